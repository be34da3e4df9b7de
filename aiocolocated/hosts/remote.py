# SPDX-License-Identifier: Apache-2.0
"""Hosts in other processes, as the controller sees them: what is sent to them, and what comes back."""

from __future__ import annotations

import itertools
import pickle
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from aiocolocated import _compat, _compat_hosts, _serialization, _service, _specs
from aiocolocated._exceptions import (
    ArgumentError,
    ArrayDeletedError,
    CallCancelledError,
    ChannelStoppedError,
    HostError,
    HostLostError,
    SpecError,
    StaleHandleError,
)
from aiocolocated._execution import RunnableCall
from aiocolocated._loops import Wakes
from aiocolocated._owners import FailureReport
from aiocolocated._settings import LOCK
from aiocolocated._submission import stopped_error
from aiocolocated._types import READY
from aiocolocated._values import Late
from aiocolocated.hosts import _parcels, _shared, _wire

if TYPE_CHECKING:
    from aiocolocated._specs import Devices

_FORGET_AFTER = 0.005  # seconds that dropped handles are collected
_FAILURE_GRACE = 1.0  # seconds that other hosts have to fail, too, before the call does
_MANY = 64  # messages that are sent although more may come

_numbers = itertools.count(1)  # of whatever hosts are told; for all sets, so that one says which

FUTURE, CODE, STREAM = -1, -2, -3  # in place of the number of an array


_NONE = pickle.dumps(None, 5)


class Reference:
    """What keeps something alive on hosts: an array, the result of a call, or code."""

    __slots__ = ("__weakref__", "epochs", "group", "leaf", "number")

    def __init__(self, group: Group, number: int, leaf: int) -> None:
        self.group = group
        self.epochs = group.epochs
        self.number = number
        self.leaf = leaf

    def __del__(self) -> None:
        # The collector may call this anywhere: no lock.
        hosts = self.group.hosts
        hosts.dropped.put((self.group, self.epochs, self.number, self.leaf))
        if not hosts.forgetting:
            hosts.forgetting = True
            _service.inbox.put(hosts.forget_soon)

    def word(self, group: Group) -> tuple[int, int]:
        """What a group of hosts knows it by.

        Raises:
            StaleHandleError: it was lost with a host.
        """
        if self.group is not group or self.epochs is not group.epochs:
            self._check(group)
        return (self.number, self.leaf)

    def _check(self, group: Group) -> None:
        own = dict(zip(self.group.links, self.epochs, strict=True))
        for link in group.links:
            if link not in own:
                raise HostError(
                    f"an array of {self.group.name} was passed to a call on {group.name}: move it there "
                    "with 'await device_put(x, sharding)'"
                )
            if own[link] != link.generation or link.lost is not None:
                raise StaleHandleError(
                    f"this array was lost with {link.name}, which has been "
                    + ("lost" if link.lost is not None else "restarted since then")
                )


def reference_of(array: Any) -> Reference:
    """What stands behind a handle.

    Raises:
        HostError: the library did not make it.
    """
    reference = getattr(array, "_aiocolocated", None)
    if array.is_deleted():
        raise ArrayDeletedError(
            f"an array of shape {array.shape} and dtype {array.dtype} was deleted or donated"
        )
    if reference is None:
        raise HostError(
            f"an array of shape {array.shape} on devices of other hosts was not made by the library, so "
            "no host has it: use what colocated calls and 'await device_put(x, sharding)' return"
        )
    return reference  # type: ignore[no-any-return]


class Link:
    """The connection to one host, and what is under way there."""

    def __init__(self, hosts: HostSet, name: str, index: int, devices: Devices) -> None:
        self.hosts = hosts
        self.name = name
        self.process_index = index
        self.devices = devices
        self.generation = 0
        self.lost: HostLostError | None = None
        self.outgoing: list[Any] = []
        self.calls: dict[int, Forwarded] = {}
        self.specs: dict[int, tuple[Any, ...]] = {}
        self.transmit: Callable[[bytes], None] = lambda data: None
        self._send_lock = threading.Lock()
        self.take_log: Callable[[Any], None] = lambda record: None
        self.sent_bytes = self.received_bytes = 0
        self.sent_messages = self.received_messages = 0
        self.functions = 0  # that it was told
        self.handles = 0  # of arrays that it keeps
        self._pid = 0

    def post(self, message: Any, wakes: Wakes) -> None:
        """Have a message sent, in order (under the lock)."""
        self.outgoing.append(message)
        wakes.flush(self.flush)

    def flush(self) -> None:
        """Send what has been collected (without the lock)."""
        if self.outgoing:
            with self._send_lock:
                with LOCK:
                    messages, self.outgoing = self.outgoing, []
                    transmit = self.transmit  # not that of a host restarted meanwhile
                if messages and self.lost is None:
                    data = pickle.dumps(messages, 5)
                    self.sent_bytes += len(data)
                    self.sent_messages += len(messages)
                    transmit(data)

    def receive(self, data: bytes) -> None:
        """Take what the host has sent (the thread that receives)."""
        self.received_bytes += len(data)
        wakes = Wakes()
        try:
            self._receive(pickle.loads(data), wakes)
        finally:
            wakes.pay()

    def _receive(self, messages: list[Any], wakes: Wakes) -> None:
        self.received_messages += len(messages)
        for message in messages:
            kind = message[0]
            if kind == _wire.SPEC:
                self.specs[message[1]] = self.hosts.load(message[2], ())
            elif kind == _wire.RELEASED:
                _parcels.released(message[1], self, message[2])
            elif kind == _wire.KNOWN_CLASS:
                self.hosts.class_blobs.setdefault(message[1], message[2])
            elif kind == _wire.LOG:
                self.take_log(message[1])
            elif kind == _wire.PONG:
                pass  # any message is a sign of life
            elif (call := self.calls.get(message[1])) is not None:
                if kind != _wire.DISPATCHED:
                    del self.calls[message[1]]
                try:
                    call.answer(self, message, wakes)
                except BaseException:  # one broken answer must not lose the others
                    _service.logger.exception("aiocolocated: internal error in an answer")

    def answered(self, pid: int, *, shared: bool) -> None:
        """The host is up, and its process is this one; perhaps it can look into the memory of this one."""
        self._pid = pid
        if shared:
            _parcels.release_to[pid] = self.release
        else:
            _parcels.stop_sharing()

    def release(self, key: int, reuse: bool) -> None:
        """Tell the host that a parcel of its is not needed any more (service thread)."""
        wakes = Wakes()
        with LOCK:
            if self.lost is None:
                self.post((_wire.RELEASE, key, reuse), wakes)
        wakes.pay()

    def lose(self, error: HostLostError) -> None:
        """The host is gone: so is all that was on it (any thread)."""
        wakes = Wakes()
        with LOCK:
            if self.lost is not None:
                return
            self.lost = error
            calls, self.calls = self.calls, {}
            self.outgoing = []
            self.specs = {}
        _parcels.lost(self)
        _parcels.release_to.pop(self._pid, None)
        _shared.kept.forget(self._pid)
        for call in calls.values():
            try:
                call.answer(self, (None, call.number, error), wakes)
            except BaseException:  # nor must the others go on waiting
                _service.logger.exception("aiocolocated: internal error in an answer")
        wakes.pay()

    def check(self) -> None:
        """Raise if the host is gone."""
        if self.lost is not None:
            raise HostLostError(*self.lost.args)

    def has(self, generation: int) -> bool:
        """Whether what it was told in a generation is there."""
        return self.lost is None and self.generation == generation


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
        if plan.per_host:
            own = [
                value.pickled() if type(value) is _wire.Plain else _wire.dumps(value, _Peer(self))
                for value in plan.for_hosts(*args)
            ]
        elif plan.flat is not None and not call._convert:
            words = tuple([reference_of(x).word(self) for x in args])
        else:
            packed = _parcels.pack_leaves((args, kwargs))
            pickled = self.pickle(packed, f"call of {plan.name}")
            data, words, parcels = pickled.data, pickled.words, pickled.parcels
            held = pickled.held
            words = tuple(w.reference.word(self)[0] if type(w) is Late else w for w in words)
        state: bytes | None = None
        if config is not None or options:
            named = (_compat.snapshot_by_name(config or ()), options)
            state = _wire.dumps(named, _Peer(self)).data
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
            )
            for parcel in parcels:
                parcel.claim(self.links)
            for i, link in enumerate(self.links):
                code.tell(link, wakes)
                if lane is not None:
                    lane.tell(link, wakes)
                link.calls[number] = forwarded
                if own is not None:
                    message = (*message[:5], own[i].data, own[i].words, state)
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
        peer = _Peer(self)
        try:
            return _wire.dumps(arguments, peer)
        except (HostError, MemoryError):
            raise
        except Exception as error:
            raise _wire.describe_failure(
                error, where, arguments, _specs.argument_path, peer
            ) from error


class Forwarded:
    """A call that runs on other hosts."""

    __slots__ = (
        "answers",
        "call",
        "dispatched",
        "future",
        "group",
        "late",
        "number",
        "plan",
        "value",
    )

    def __init__(self, call: RunnableCall, group: Group, number: int, plan: Any) -> None:
        self.call = call
        self.group = group
        self.number = number
        self.plan = plan
        self.future = Reference(group, number, FUTURE)
        self.answers: dict[Link, Any] = {}
        self.dispatched = False
        self.value: Any = None
        self.late: BaseException | None = None  # of the clean-up after it was cancelled

    def cancel(self, wakes: Wakes) -> None:
        """Have the hosts cancel it, unless one that has begun would wait for the others."""
        if self.group.collective:
            return
        for link in self.group.links:
            if self.number in link.calls:
                link.post((_wire.CANCEL, self.number), wakes)

    def answer(self, link: Link, message: Any, wakes: Wakes) -> None:
        """A host has answered, or is lost (the thread that receives)."""
        if message[0] is None and self.plan.dropped:  # what was to be closed is gone, as was wanted
            message = (_wire.DONE, self.number, (), _NONE)
        kind = message[0]
        if kind is None and len(self.group.links) > 1:
            with LOCK:  # at once, whatever the others do
                self.call._fail(wakes, self._lost(message[2]), None)
        before = self.answers.get(link)
        if kind == _wire.DONE and before is not None:  # the value has come with DISPATCHED
            message = (kind, message[1], *before[2:])
        self.answers[link] = message
        if kind == _wire.CANCELLED and message[3] is not None and self.late is None:
            late = self.group.hosts.load_error(message[3], link.name)
            self.late = self.call._as_error(late)
        if len(self.answers) < len(self.group.links):
            if kind == _wire.FAILED and len(self.answers) == 1:  # others may wait for it for ever
                give_up = monotonic() + _FAILURE_GRACE
                _service.post(partial(_service.call_at, give_up, self._fail_early))
            return
        error: BaseException | None = None
        value = None
        try:
            value = self._outcome()
        except BaseException as caught:
            error = self.call._as_error(caught)
        final = all(m[0] != _wire.DISPATCHED for m in self.answers.values())
        if error is not None and not final:
            return
        if type(error) is ChannelStoppedError:
            error = self._stopped(error)
        with LOCK:
            computing.pop(self.number, None)
            if final:
                self.call._over_there(value, error, self.dispatched, wakes)
            elif not self.dispatched:
                self.dispatched = True
                self.value = value
                computing[self.number] = self.call
                self.call._dispatched_there(value, wakes)
        del error, value

    def _fail_early(self) -> None:
        """It has failed on some hosts, and others have not answered for a moment (service thread)."""
        if self.call._state >= READY:
            return
        silent = [link.name for link in self.group.links if link not in self.answers]
        try:
            self._outcome()
        except BaseException as caught:
            error = self.call._as_error(caught)
            error.add_note(f"{', '.join(silent)} had not answered yet")
            wakes = Wakes()
            with LOCK:
                self.call._fail(wakes, error, None)
            wakes.pay()

    def _stopped(self, error: BaseException) -> BaseException:
        """The host says that an earlier call stopped the channel; which one it was is known here."""
        channel: Any = self.call._channel
        if (cause := channel._order.stopped) is None:
            return error
        with LOCK:
            self.call._report = FailureReport(error, self.call._describe(), None)
            self.call._report.retrieve()  # the failure behind it is reported, not each victim
        return stopped_error(channel.name, cause)

    def _lost(self, error: HostLostError) -> HostLostError:
        return HostLostError(*error.args)  # one for each call, which is to have notes of its own

    def _outcome(self) -> Any:
        """What the body gave, or raises what it raised."""
        answers = self.answers
        errors: list[BaseException] = []
        cancelled: BaseException | None = None
        for link, message in answers.items():
            kind = message[0]
            if kind is None:
                errors.append(self._lost(message[2]))
            elif kind == _wire.FAILED:
                errors.append(self.group.hosts.load_error(message[2], link.name))
            elif kind == _wire.CANCELLED:
                cancelled = CallCancelledError(message[2])
        if len(errors) == 1 or (errors and self.group.collective and self._all_lost(errors)):
            raise errors[0]  # of a cluster the others are lost with the first
        if errors:
            what = f"{self.plan.name} failed on {len(errors)} hosts"
            raise BaseExceptionGroup(what, errors)
        if cancelled is not None:
            raise cancelled
        if self.dispatched:
            return self.value
        value, _ = self.plan.finish(self._value())
        return value

    @staticmethod
    def _all_lost(errors: Sequence[BaseException]) -> bool:
        return all(isinstance(error, HostLostError) for error in errors)

    def _value(self) -> Any:
        links = self.group.links
        # One for all hosts: the first to go would free what the others refer to.
        references: dict[int, Reference] = {}
        if self.plan.reduce is not None:
            return self.plan.reduce([self._value_of(link, references) for link in links])
        value = self._value_of(links[0], references)
        for link in links[1:]:
            if not self._agrees(link, value):
                raise SpecError(
                    f"{self.plan.name} returned different results on {links[0].name} and {link.name}. "
                    "Return global arrays and equal values, or say how they are put together: "
                    "specialize(reduce='list')"
                )
        return value

    def _value_of(self, link: Link, references: dict[int, Reference]) -> Any:
        """What a host gave, with handles for its arrays."""
        hosts = self.group.hosts
        _, _, specs, data = self.answers[link]
        handles: list[Any] = []
        for leaf, spec in enumerate(specs):
            if leaf not in references:
                references[leaf] = hosts.array_reference(self.group, self.number, leaf)
            handle = _compat_hosts.make_handle(*link.specs[spec])
            handle._aiocolocated = references[leaf]
            handles.append(handle)
        return handles[0] if data is None else self._load(data, handles)

    def _load(self, data: bytes, things: Sequence[Any]) -> Any:
        try:
            return self.group.hosts.load(data, things)
        except Exception as error:
            raise ArgumentError(
                f"what {self.plan.name} returned cannot be unpickled in this process: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _agrees(self, link: Link, value: Any) -> bool:
        """Whether a host gave the same as the first one, whose value this is."""
        first = self.group.links[0]
        _, _, specs, data = self.answers[first]
        _, _, other_specs, other_data = self.answers[link]
        if [first.specs[i] for i in specs] != [link.specs[i] for i in other_specs]:
            return False
        if data == other_data:
            return True
        if data is None or other_data is None:
            return False
        # Equal values may be pickled in different ways: each process has its own order of sets.
        return _equal(value, self._load(other_data, [_Array(i) for i in range(len(specs))]))


class _Array:
    """Stands for an array where results are compared."""

    def __init__(self, leaf: int) -> None:
        self.leaf = leaf


def _equal(value: Any, other: Any) -> bool:
    leaves, tree = jax.tree_util.tree_flatten(value)
    others, other_tree = jax.tree_util.tree_flatten(other)
    same: Any = tree == other_tree  # type: ignore[operator]
    return bool(same) and all(map(_equal_leaves, leaves, others))


def _equal_leaves(a: Any, b: Any) -> bool:
    if type(b) is _Array:
        return isinstance(a, jax.Array) and reference_of(a).leaf == b.leaf
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return bool(a == b)


class _Peer(_wire.Peer):
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


class _CodePeer(_Peer):
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


class HostSet:
    """All hosts of one controller."""

    def __init__(
        self, name: str, devices: Sequence[Sequence[Any]], *, collectives: bool = False
    ) -> None:
        self.name = name
        self.collectives = collectives
        self.links = tuple(
            Link(self, f"{name}-{i}", i, tuple(own)) for i, own in enumerate(devices)
        )
        self.numbers = _numbers
        self.classes: set[str] = set()
        self.class_blobs: dict[str, Any] = {}
        self.dropped: SimpleQueue[tuple[Group, tuple[int, ...], int, int]] = SimpleQueue()
        self.forgetting = False
        self._lock = threading.RLock()
        self._groups: dict[tuple[Link, ...], Group] = {}
        self._codes: weakref.WeakKeyDictionary[Any, Code] = weakref.WeakKeyDictionary()
        self._channels: weakref.WeakKeyDictionary[Any, Code] = weakref.WeakKeyDictionary()
        self._class_messages: dict[str, Any] = {}
        self._class_parts: list[Any] = []  # what these refer to
        self.all = self.group(self.links)

    def group(self, links: tuple[Link, ...]) -> Group:
        with self._lock:
            found = self._groups.get(links)
            if found is None:
                found = self._groups[links] = Group(self, links)
            return found

    def owns(self, array: Any) -> bool:
        return hosts_of(next(iter(array.sharding.device_set))) is self

    def restarted(self, link: Link) -> None:
        """A host has come back, with nothing on it (under the lock)."""
        link.lost = None
        link.generation += 1
        link.functions = link.handles = 0
        link.outgoing = list(self._class_messages.values())
        for group in self._groups.values():
            if link in group.links:
                group.epochs = tuple(other.generation for other in group.links)

    # -- code -------------------------------------------------------------------------------------------

    def code_of(self, plan: Any) -> Code:
        base = plan._base
        code = self._codes.get(base)
        if code is None:
            code = self.code_for(base, lambda: plan.make_code(self))
        return code

    def code_for(self, key: Any, make: Callable[[], Code]) -> Code:
        """The code that a function, class or method has here, made by ``make`` if there is none."""
        with self._lock:
            code = self._codes.get(key)
            if code is None:
                code = self._codes[key] = make()
            return code

    def function_code(self, function: Callable[..., Any], kind: str, name: str) -> Code:
        """Ship a function or class.

        Raises:
            NotShippableError: naming the captured variable.
        """
        try:
            copied = function if isinstance(function, type) else None
            if copied is not None and not _serialization._stays(copied):
                copied = None
            peer = _CodePeer(self.all)
            pickled = _wire.dumps(function, peer)
        except Exception as error:
            raise _serialization._explain(function, error) from error
        code = Code(
            self,
            lambda number: (
                _wire.FUNCTION,
                number,
                kind,
                name,
                pickled.data,
                pickled.words,
            ),
            (pickled.held, pickled.parcels),  # it may be told to more hosts at any time
        )
        code.captured = peer.references
        return code

    def method_code(self, of: Code, getter: Any, kind: str, name: str) -> Code:
        """Ship how a method is got from its object."""
        pickled = _wire.dumps(getter, _Peer(self.all))
        code = Code(
            self,
            lambda number: (_wire.METHOD, number, of.number, kind, name, pickled.data),
            (pickled.held, pickled.parcels),
        )
        return code.after(of)

    def channel_code(self, channel: Any) -> Code | None:
        """What hosts have to be told of a channel, if it is not like any other."""
        order = channel._order
        if not channel._dedicated and order.on_error == "continue" and order.max_in_flight == 8:
            return None
        options = {
            "name": channel.name,
            "max_in_flight": order.max_in_flight,
            "on_error": order.on_error,
            "dedicated_thread": channel._dedicated,
        }
        with self._lock:
            code = self._channels.get(channel)
            if code is None:
                code = self._channels[channel] = Code(
                    self, lambda number: (_wire.CHANNEL, number, channel._number, options)
                )
        return code

    def define_class(self, class_id: str, cls: type) -> None:
        pickled = _wire.dumps_class(cls, _Peer(self.all))
        message = (_wire.CLASS, class_id, pickled.data, pickled.words)
        with LOCK:
            self._class_messages[class_id] = message
            self._class_parts.append((pickled.held, pickled.parcels))
            for link in self.links:
                if link.lost is None:
                    link.outgoing.append(message)  # the call that needs it flushes

    # -- values -----------------------------------------------------------------------------------------

    @staticmethod
    def array_reference(group: Group, number: int, leaf: int) -> Reference:
        """What keeps an array on the hosts of a group."""
        with LOCK:
            for link in group.links:
                link.handles += 1
        return Reference(group, number, leaf)

    def load(self, data: bytes, things: Sequence[Any]) -> Any:
        loading.hosts = self
        try:
            return _wire.loads(data, things, self._class)
        finally:
            loading.hosts = None

    def load_error(self, parts: Any, host: str) -> BaseException:
        return _wire.load_error(parts, host, self._class)

    def _class(self, class_id: str) -> type:
        found = _wire.known_class(class_id)
        if found is None:
            blob = self.class_blobs.get(class_id)
            if blob is None:
                raise HostError(f"class {class_id} is not known to the controller")
            found = self.load(blob, ())
            assert isinstance(found, type)
        return found

    # -- handles ----------------------------------------------------------------------------------------

    def forget_soon(self) -> None:
        """Collect dropped handles for a moment (service thread)."""
        _service.call_at(monotonic() + _FORGET_AFTER, self.forget)

    def forget(self) -> None:
        """Tell hosts what nobody refers to any more, behind its last use."""
        self.forgetting = False
        lists: dict[Link, list[tuple[int, int]]] = {}
        while True:
            try:
                group, epochs, number, leaf = self.dropped.get_nowait()
            except Empty:
                break
            for link, epoch in zip(group.links, epochs, strict=True):
                if link.generation == epoch:
                    lists.setdefault(link, []).append((number, leaf))
        wakes = Wakes()
        with LOCK:
            for link, pairs in lists.items():
                link.handles -= sum(leaf >= 0 for _, leaf in pairs)
                if link.lost is None:
                    link.post((_wire.FORGET, pairs), wakes)
        wakes.pay()


# Calls whose arrays are still computing on their hosts, by number: their handles are not ready.
computing: dict[int, Any] = {}


def calls_behind(leaves: Sequence[Any]) -> list[Any]:
    """The calls that still compute some handles, each once."""
    found: dict[int, Any] = {}
    for leaf in leaves:
        reference = getattr(leaf, "_aiocolocated", None)
        if type(reference) is Reference and (call := computing.get(reference.number)) is not None:
            found[reference.number] = call
    return list(found.values())


# --- which hosts a device belongs to --------------------------------------------------------------------

_by_device: dict[Any, Link] = {}
_groups: dict[Devices, Group | None] = {}


def add_devices(hosts: HostSet) -> None:
    """Have calls on these devices go to their hosts."""
    with LOCK:
        for link in hosts.links:
            for device in link.devices:
                _by_device[device] = link


def remove_devices(hosts: HostSet) -> None:
    with LOCK:
        for link in hosts.links:
            for device in link.devices:
                _by_device.pop(device, None)
        for devices in [d for d, group in _groups.items() if group and group.hosts is hosts]:
            del _groups[devices]


def hosts_of(device: Any) -> HostSet | None:
    link = _by_device.get(device)
    return None if link is None else link.hosts


def hosts_are_open() -> bool:
    """Whether any device of another process is known."""
    return bool(_by_device)


def link_of(device: Any) -> Link | None:
    """The host of a device; ``None`` for those of this process."""
    return _by_device.get(device)


def group_of(devices: Devices | None) -> Group | None:
    """The hosts of devices; ``None`` for devices of this process.

    Raises:
        SpecError: some are here and some are there, or of closed hosts.
    """
    if devices is None or not _by_device:
        return None
    found = _groups.get(devices)
    if found is None:
        links = [_by_device.get(device) for device in devices]
        if links[0] is None and not any(links):
            return None
        known = [link for link in links if link is not None]
        if len(known) < len(links) or len({id(link.hosts) for link in known}) > 1:
            raise SpecError(f"devices of several sets of hosts in one call: {devices}")
        unique = sorted(set(known), key=lambda link: link.process_index)
        found = known[0].hosts.group(tuple(unique))
        with LOCK:
            if len(_groups) > 4096:
                _groups.clear()
            _groups[devices] = found
    return found


class _Loading(threading.local):
    hosts: HostSet | None = None  # whose message this thread reads


loading = _Loading()


def _find_device(platform: str, device_id: int) -> Any:
    """The device that a host's message means, or ``None``: several sets of hosts may use one id."""
    if loading.hosts is not None:
        for link in loading.hosts.links:
            for device in link.devices:
                if device.id == device_id:
                    return device
    return None


_serialization.device_finders.append(_find_device)
