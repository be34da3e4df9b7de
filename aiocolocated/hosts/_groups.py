# SPDX-License-Identifier: Apache-2.0
"""Groups: the hosts of some devices, and what is sent to all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from aiocolocated import _compat, _specs
from aiocolocated._exceptions import HostError
from aiocolocated._execution import RunnableCall
from aiocolocated._loops import Wakes
from aiocolocated._settings import LOCK
from aiocolocated._values import Late
from aiocolocated.hosts import _parcels, _wire
from aiocolocated.hosts._forwarded import Forwarded
from aiocolocated.hosts._references import CODE, Reference, reference_of

if TYPE_CHECKING:
    from aiocolocated.hosts._links import Link
    from aiocolocated.hosts.remote import HostSet

_MANY = 64  # messages that are sent although more may come


class Group:
    """The hosts of some devices, in order; there is one of each."""

    def __init__(self, hosts: HostSet, links: tuple[Link, ...]) -> None:
        self.hosts = hosts
        self.links = links
        self.name = ", ".join(link.name for link in links)
        self.epochs = tuple(link.generation for link in links)
        # Bodies may wait for each other: all hosts run the same ones, in the same order.
        self.collective = hosts.collectives and len(links) > 1

    def send(
        self,
        call: RunnableCall,
        plan: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        config: _compat.Snapshot | None,
        options: tuple[tuple[str, Any], ...],
        wakes: Wakes,
    ) -> None:
        """Send a call to every host, at the same place among what they get (worker thread)."""
        if plan.follows:
            self._send_step(call, plan, wakes)
            return
        hosts = self.hosts
        held: Any = args
        own: list[_wire.Pickled] | None = None
        data = None
        words: tuple[Any, ...] = ()
        parcels: Sequence[Any] = ()
        keys: tuple[int, ...] = ()  # of these
        if plan.per_host:
            own = [
                value.pickled()
                if type(value) is _wire.Plain
                else _wire.dumps(value, GroupPeer(self))
                for value in plan.for_hosts(*args)
            ]
        elif plan.flat is not None and not call._convert:
            words = tuple([reference_of(x).word(self) for x in args])
        else:
            packed = _parcels.pack_leaves((args, kwargs))
            pickled = self.pickle(packed, f"call of {plan.name}")
            data, words, parcels = pickled.data, pickled.words, pickled.parcels
            keys = pickled.keys
            held = pickled.held
            words = tuple(w.reference.word(self)[0] if type(w) is Late else w for w in words)
        state: bytes | None = None
        if config is not None or options:
            named = (_compat.snapshot_by_name(config or ()), options)
            state = _wire.dumps(named, GroupPeer(self)).data
        code = hosts.code_of(plan)
        code.prepare(self, plan._base)
        channel: Any = call._channel
        lane = hosts.channel_code(channel)
        with LOCK:
            for link in self.links:
                link.check()
                code.check(link)
            number = next(hosts.numbers)
            forwarded = Forwarded(call, self, number, plan)
            if not call._is_sent(forwarded, wakes):
                return
            if plan.opens:
                plan.opened(number)
            message = (
                _wire.CALL,
                number,
                code.number,
                channel._number,
                plan.place_ids,
                data,
                words,
                state,
                keys,
            )
            for parcel in parcels:
                parcel.claim(self.links)
            for i, link in enumerate(self.links):
                code.tell(link, wakes)
                if lane is not None:
                    lane.tell(link, wakes)
                link.calls[number] = forwarded
                if own is not None:
                    message = (*message[:5], own[i].data, own[i].words, state, own[i].keys)
                    for parcel in own[i].parcels:
                        parcel.claim((link,))
                link.post(message, wakes)
            full = len(self.links[0].outgoing) >= _MANY
        del held
        if full:
            for link in self.links:
                link.flush()

    def _send_step(self, call: RunnableCall, plan: Any, wakes: Wakes) -> None:
        """Send what needs nothing but the number of what it is for: a step of a stream, or a closing."""
        while True:
            links = plan.links()
            group = self.hosts.group(links) if links else self
            with LOCK:
                if plan.links() != links:  # one was lost meanwhile
                    continue
                number = next(self.hosts.numbers)
                forwarded = Forwarded(call, group, number, plan)
                if not call._is_sent(forwarded, wakes):
                    return
                if not links:
                    call._over_there(plan.nothing, None, False, wakes)
                    return
                message = plan.message(number)
                for link in links:
                    link.calls[number] = forwarded
                    link.post(message, wakes)
                return

    def pickle(self, arguments: tuple[Any, Any], where: str) -> _wire.Pickled:
        """Pickle the arguments of a call for these hosts.

        Raises:
            HostError: it has arrays of other hosts.
            ArgumentError: it cannot be sent.
        """
        peer = GroupPeer(self)
        try:
            return _wire.dumps(arguments, peer)
        except (HostError, MemoryError):
            raise
        except Exception as error:
            raise _wire.describe_failure(
                error, where, arguments, _specs.argument_path, peer
            ) from error


class GroupPeer(_wire.Peer):
    """What a group of hosts knows."""

    def __init__(self, group: Group) -> None:
        self.classes = group.hosts.classes
        self._group = group

    def array(self, array: Any) -> Any:
        if self._group.hosts.owns(array):
            return reference_of(array).word(self._group)
        return None

    def define_class(self, class_id: str, cls: type) -> None:
        self._group.hosts.define_class(class_id, cls)


class CodePeer(GroupPeer):
    """The same for code, whose arrays need to be only on the hosts that it is told to."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.references: list[Reference] = []

    def array(self, array: Any) -> Any:
        if not self._group.hosts.owns(array):
            return None
        reference = reference_of(array)
        self.references.append(reference)
        return (reference.number, reference.leaf)


class Code:
    """A function on hosts: told to each when it is first needed there."""

    def __init__(self, hosts: HostSet, message: Callable[[int], Any], held: Any = None) -> None:
        self.reference = Reference(hosts.all, next(hosts.numbers), CODE)
        self.number = self.reference.number
        self.held = held
        self._message = message(self.number)
        self.captured: Sequence[Reference] = ()  # arrays on hosts
        self._needs: tuple[Code, ...] = ()
        self._told: dict[Link, int] = {}

    def after(self, *codes: Code) -> Code:
        """Have others told first."""
        self._needs = codes
        return self

    def prepare(self, group: Group, base: Any) -> None:
        """Pickle what hosts have to be told of it, and are told each for itself (worker thread)."""
        for reference in self.captured:
            reference.word(group)  # raises if it is not there
        for code in self._needs:
            code.prepare(group, base)

    def check(self, link: Link) -> None:
        """Raise if a host cannot be told (under the lock)."""
        for code in self._needs:
            code.check(link)

    def tell(self, link: Link, wakes: Wakes) -> None:
        """Tell a host, unless it knows (under the lock)."""
        if self._told.get(link) != link.generation:
            for code in self._needs:
                code.tell(link, wakes)
            self._told[link] = link.generation
            link.functions += 1
            link.post(self._message, wakes)
