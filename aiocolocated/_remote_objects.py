# SPDX-License-Identifier: Apache-2.0
"""Objects on hosts of other processes, as the controller sees them: made there, and closed there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from aiocolocated._exceptions import HostError, HostLostError
from aiocolocated._plans import NoArguments
from aiocolocated._remote_plans import RemoteClosing
from aiocolocated.hosts import _wire
from aiocolocated.hosts._groups import Code

if TYPE_CHECKING:
    from aiocolocated._loops import Wakes
    from aiocolocated.hosts._groups import Group
    from aiocolocated.hosts._links import Link
    from aiocolocated.hosts.remote import HostSet


class ObjectCode(Code):
    """An object on hosts: each is told of it when one of its methods is first called there."""

    def __init__(
        self, hosts: HostSet, cls: type[Any], name: str, options: tuple[Any, ...], recreate: bool
    ) -> None:
        super().__init__(hosts, lambda number: None)
        self._class = hosts.code_for(cls, lambda: hosts.function_code(cls, "function", name))
        self.after(self._class)
        self.name = name
        self._options = options
        self._recreate = recreate
        self._messages: dict[Link, Any] = {}  # for those that are about to be told

    def prepare(self, group: Group, base: Any) -> None:
        """Pickle the constructor's arguments for hosts that have no instance (worker thread).

        Raises:
            HostError: the arguments are gone, or are arrays of other hosts.
            ArgumentError: they cannot be sent.
        """
        new = [link for link in group.links if not self._is_ready(link)]
        if not new or not all(self._may_make(link) for link in new):
            return
        arguments = base.object.arguments()
        if arguments is None:
            raise HostError(
                f"the {self.name} object was made in this process before there were hosts, so its "
                f"constructor's arguments are gone: it cannot be made on {group.name}"
            )
        pickled = group.pickle(arguments, f"constructor of {self.name}")
        message = (
            _wire.OBJECT,
            self.number,
            self._class.number,
            self.name,
            self._options,
            pickled.data,
            pickled.words,
            pickled.keys,
        )
        for link in new:
            self._messages[link] = (link.generation, message, pickled.parcels, new)

    def check(self, link: Link) -> None:
        """Raise if an instance was lost with its host (under the lock)."""
        if self._told.get(link) == link.generation:
            return
        if not self._may_make(link):
            raise HostLostError(
                f"the {self.name} object was lost with {link.name}, which has been restarted since then. "
                "Make a new one, or have the class make it anew: colocated_python_class(..., "
                "recreate=True)"
            )
        if not self._is_ready(link):
            raise HostLostError(f"{link.name} was restarted while a call of {self.name} was sent")

    def _is_ready(self, link: Link) -> bool:
        if self._told.get(link) == link.generation:
            return True
        return link in self._messages and self._messages[link][0] == link.generation

    def _may_make(self, link: Link) -> bool:
        return self._recreate or link not in self._told

    def tell(self, link: Link, wakes: Wakes) -> None:
        if self._told.get(link) != link.generation:
            self._class.tell(link, wakes)
            self._told[link] = link.generation
            _, message, parcels, links = self._messages.pop(link)
            if link is links[0]:
                for parcel in parcels:
                    parcel.claim(links)
            link.post(message, wakes)

    @property
    def links(self) -> tuple[Link, ...]:
        """The hosts that have an instance."""
        told = [link for link, generation in list(self._told.items()) if link.has(generation)]
        return tuple(sorted(told, key=lambda link: link.process_index))


class RemoteClosePlan(RemoteClosing):
    """Closes the instances of an object on hosts (a ``Plan``)."""

    def __init__(self, owner: Any, hosts: HostSet, *, dropped: bool) -> None:
        self.dropped = dropped  # on the hosts such things are closed one after the other
        self._owner = weakref.ref(owner)  # the object has the call
        self._codes = owner.codes
        self.group = hosts.all
        self.host = self.group.name
        self.name = f"{owner.name}.aclose"

    def let_go(self) -> None:
        """There is nothing to close."""

    def links(self) -> tuple[Link, ...]:
        """Where there is something to close: what was lost with its host is gone."""
        code: ObjectCode | None = self._codes.get(self.group.hosts)
        return () if code is None else code.links

    def message(self, number: int) -> Any:
        return (_wire.STEP, number, self._codes[self.group.hosts].number, True, self.dropped)

    def finish(self, value: Any) -> tuple[Any, Sequence[Any]]:
        owner = self._owner()
        if owner is not None:
            owner.forget()
        return None, ()


class CloseAllPlan(NoArguments):
    """Closes an object that has instances here and on hosts, or on several sets of hosts (a ``Plan``)."""

    devices = None
    host = "in-process"

    def __init__(self, name: str, close: Callable[[], Any]) -> None:
        self._close: Callable[[], Any] | None = close
        self.name = f"{name}.aclose"

    def let_go(self) -> None:
        self._close = None

    def is_loaded(self) -> bool:
        return False

    def body(self) -> Callable[..., Any]:
        close, self._close = self._close, None  # it has the object, which has the call
        assert close is not None
        return close

    def finish(self, value: Any) -> tuple[Any, Sequence[Any]]:
        return None, ()
