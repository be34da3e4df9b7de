# SPDX-License-Identifier: Apache-2.0
"""Streams over hosts of other processes: steps and closing are messages, the body is on the hosts."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from aiocolocated._exceptions import HostLostError, SpecError
from aiocolocated._remote_plans import RemoteClosing
from aiocolocated._sources import END, First, Source
from aiocolocated._submission import submit
from aiocolocated.hosts import _wire
from aiocolocated.hosts._references import STREAM, Reference

if TYPE_CHECKING:
    from aiocolocated._channels import TaskChannel
    from aiocolocated._futures import ArrayFuture
    from aiocolocated._owners import Owner
    from aiocolocated._specializations import FunctionCode
    from aiocolocated.hosts._groups import Code, Group
    from aiocolocated.hosts._links import Link
    from aiocolocated.hosts.remote import HostSet


class _Body:
    """The body on the hosts. The source knows it, and so does the closing, which may outlive the source."""

    __slots__ = ("group", "reference")

    def __init__(self, group: Group) -> None:
        self.group = group
        self.reference: Reference | None = None  # once the first step is sent

    def pairs(self) -> Iterable[tuple[Link, int]]:
        """The hosts that have it, and which generation of them."""
        if self.reference is None:
            return ()
        return zip(self.group.links, self.reference.epochs, strict=True)

    def message(self, number: int, *, closing: bool = False, dropped: bool = False) -> Any:
        assert self.reference is not None
        return (_wire.STEP, number, self.reference.number, closing, dropped)


class RemoteSource(Source):
    """The body of a stream on hosts, as the controller sees it; the ``Plan`` of its later steps."""

    __slots__ = ("_used", "group", "steps", "there")
    follows = True
    opens = dropped = False
    nothing = END  # what a step gives whose stream did not begin

    def __init__(
        self, base: FunctionCode, owner: Owner | None, channel: TaskChannel, group: Group
    ) -> None:
        super().__init__(base, owner, channel)
        self.one_task = None
        self.group = group
        self.there = _Body(group)
        self.steps: weakref.WeakSet[ArrayFuture[Any]] = weakref.WeakSet()

    @property
    def used(self) -> bool:
        """Whether there is anything to close: what was on hosts that are gone is closed."""
        return self._used and any(link.lost is None for link in self.group.links)

    @used.setter
    def used(self, used: bool) -> None:
        self._used = used

    @property
    def host(self) -> str:
        return self.group.name

    @property
    def reduce(self) -> Any:
        return None if self.plan.reduce is None else self._reduce

    def _reduce(self, items: list[Any]) -> Any:
        """Of the hosts' items; at the end of all, the end."""
        ended = [item is END for item in items]
        if all(ended):
            return END
        if any(ended):
            raise SpecError(f"{self.name} gave more items on some hosts than on others")
        return self.plan.reduce(items)

    def is_loaded(self) -> bool:
        return False

    def open(self, first: ArrayFuture[Any]) -> None:
        self.plan, self.context, self.config = first._plan, first._context, first._config
        first._plan = RemoteFirst(self)
        self.steps.add(first)

    def prepare(self, call: ArrayFuture[Any]) -> None:
        self.plan.mark(call)
        self.steps.add(call)

    def submit(self, step: ArrayFuture[Any]) -> None:
        """Submit a step. At exit hosts close what is open on them."""
        before, self._used = self._used, True
        try:
            submit(step)
        except BaseException:
            self._used = before
            raise

    def sent_as(self, number: int) -> None:
        """The first step has its number, which is the stream's (under the lock)."""
        self.there.reference = Reference(self.group, number, STREAM)

    def links(self) -> tuple[Link, ...]:
        """Where a step goes.

        Raises:
            HostLostError: the body was lost with a host.
        """
        pairs = tuple(self.there.pairs())
        for link, epoch in pairs:
            link.check()
            if not link.has(epoch):
                raise HostLostError(
                    f"the stream of {self.name} was lost with {link.name}, which has been restarted "
                    "since then"
                )
        return tuple(link for link, _ in pairs)

    def message(self, number: int) -> Any:
        return self.there.message(number)

    # -- closing ----------------------------------------------------------------------------------------

    def _unfinished(self) -> Iterable[ArrayFuture[Any]]:
        return list(self.steps)

    def _closing_call(self, *, dropped: bool) -> ArrayFuture[None]:
        return self._new_call(_RemoteClose(self, dropped=dropped))

    def abandon(self, steps: Iterable[ArrayFuture[Any]]) -> None:
        for step in steps:
            if not self.ended:  # they fail with what has failed already, a lost host for one
                step.cancel()
        super().abandon(steps)


class RemoteFirst(First):
    """The ``Plan`` of the first step, which has the code and the arguments."""

    __slots__ = ()
    follows = False
    opens = True
    per_host = dropped = False

    _source: RemoteSource

    def opened(self, number: int) -> None:
        self._source.sent_as(number)

    @property
    def asynchronous(self) -> bool:
        return self._source.asynchronous

    @property
    def flat(self) -> Any:
        return self._source.plan.flat

    @property
    def place_ids(self) -> tuple[int, ...]:
        return self._source.plan.place_ids  # type: ignore[no-any-return]

    @property
    def reduce(self) -> Any:
        return self._source.reduce

    @property
    def _base(self) -> FunctionCode:
        return self._source.base

    def make_code(self, hosts: HostSet) -> Code:
        return self._source.base.make_code(hosts)


class _RemoteClose(RemoteClosing):
    """The ``Plan`` of the call that closes a stream on its hosts."""

    __slots__ = ("_source", "_there", "dropped", "host", "name")

    def __init__(self, source: RemoteSource, *, dropped: bool) -> None:
        self.dropped = dropped
        self._source = weakref.ref(source)  # which has the call
        self._there = source.there
        self.host = source.host
        self.name = f"{source.name} (closing)"

    def links(self) -> tuple[Link, ...]:
        """Where there is something to close: what was lost with its host is gone."""
        return tuple(link for link, epoch in self._there.pairs() if link.has(epoch))

    def message(self, number: int) -> Any:
        return self._there.message(number, closing=True, dropped=self.dropped)

    def finish(self, value: Any) -> tuple[Any, Sequence[Any]]:
        source = self._source()
        if source is not None:
            source.end()
        return None, ()
