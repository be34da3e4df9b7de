# SPDX-License-Identifier: Apache-2.0
"""Sources: the bodies of streams, as their host sees them, and the calls that advance them."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from aiocolocated import _compat, _service
from aiocolocated._channels import new_channel
from aiocolocated._coroutines import OneTask
from aiocolocated._futures import ArrayFuture
from aiocolocated._lifetimes import HERE, dropped_gate, track, untrack
from aiocolocated._loops import Wakes
from aiocolocated._owners import Owner
from aiocolocated._plans import NoArguments
from aiocolocated._protocols import Args, Kwargs
from aiocolocated._settings import LOCK
from aiocolocated._specializations import FunctionCode
from aiocolocated._submission import submit, take
from aiocolocated._types import READY
from aiocolocated._workers import pool

if TYPE_CHECKING:
    from types import CodeType

    from aiocolocated._calls import Call
    from aiocolocated._channels import TaskChannel


class _End:
    """The result of a step that found the body's end."""

    def __reduce__(self) -> str:
        return "END"


END = _End()


class Source(NoArguments):
    """The body of a stream, as its host sees it; the ``Plan`` of the calls that advance it.

    Each step is a call of its own in the stream's channel, so between two items nothing of the body
    runs, and nothing is held that limits calls. All steps run in the context of the first one.
    """

    __slots__ = (
        "__weakref__",
        "_iterator",
        "base",
        "channel",
        "closing",
        "config",
        "context",
        "ended",
        "made",
        "one_task",
        "owner",
        "plan",
        "used",
    )

    def __init__(
        self, base: FunctionCode, owner: Owner | None, channel: TaskChannel | None = None
    ) -> None:
        self.base = base
        self.owner = owner
        self.channel = channel or new_channel(f"stream {base.name}")
        self.made = False  # the iterator
        self.ended = False  # by itself, by an error, or closed
        self.used = False  # a step was submitted
        self.closing: ArrayFuture[None] | None = None
        self.plan: Any = None  # of the first call: it places and checks items
        self.context: contextvars.Context | None = None
        self.config: _compat.Snapshot | None = None
        self.one_task = OneTask() if self.asynchronous else None
        self._iterator: Any = None

    # -- Plan ---------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def host(self) -> str:
        return self.base.host.name

    @property
    def devices(self) -> Any:
        return self.plan.devices

    @property
    def asynchronous(self) -> bool:
        return self.base.kind == "asynchronous generator"

    def is_loaded(self) -> bool:
        return self.made

    def body(self) -> Callable[..., Any]:
        return self.anext if self.asynchronous else self.next

    def finish(self, value: Any) -> tuple[Any, Sequence[Any]]:
        if value is END:
            return value, ()
        result: tuple[Any, Sequence[Any]] = self.plan.finish(value)
        return result

    # -- making steps ---------------------------------------------------------------------------------

    def open(self, first: ArrayFuture[Any]) -> None:
        """Have a call of the function be the first step, which has the arguments."""
        self.plan, self.context, self.config = first._plan, first._context, first._config
        first._plan = First(self)
        first._look = None
        first._light = self.asynchronous or first._thread is not None
        first._one_task = self.one_task

    def step(
        self, loop: asyncio.AbstractEventLoop | None, code: CodeType, lasti: int
    ) -> ArrayFuture[Any]:
        """Make one of the later steps."""
        step: ArrayFuture[Any] = ArrayFuture._create(
            self, (), {}, self.channel, None, loop, code, lasti
        )
        step._context, step._config = self.context, self.config
        self.prepare(step)
        return step

    def prepare(self, call: ArrayFuture[Any]) -> None:
        """Note at a step, or at the closing, where it runs."""
        if self.base.special:
            self.base.mark(call)
        call._light = self.asynchronous or call._thread is not None
        call._one_task = self.one_task

    def submit(self, step: ArrayFuture[Any]) -> None:
        """Submit a step."""
        first, self.used = not self.used, True
        if first:
            track(self)  # before the step is submitted: it may be the last
        try:
            submit(step)
        except BaseException:
            if first:
                self.used = False
                untrack(self)
            raise

    def abandon(self, steps: Iterable[ArrayFuture[Any]]) -> None:
        """Nobody will ask for what these steps ran into."""
        for step in steps:
            if step._report is not None:
                step._report.retrieve()

    # -- steps (on the host) --------------------------------------------------------------------------

    def begin(self, *args: Any, **kwargs: Any) -> Any:
        """Make the iterator and take its first step (worker thread)."""
        try:
            if not self.ended:  # another thread may have closed it while this step was submitted
                iterable = self.plan.body()(*args, **kwargs)
                self._iterator = aiter(iterable) if self.asynchronous else iter(iterable)
                self.made = True
                with LOCK:
                    _service.watch(+1)  # until it has ended: its handle's finalizer says so there
            return self.body()()
        finally:
            del self, args, kwargs

    def next(self) -> Any:
        try:
            return END if self._iterator is None else next(self._iterator)
        except StopIteration:
            self.end()
            return END
        except BaseException:
            self.end()
            raise
        finally:
            del self

    async def anext(self) -> Any:
        try:
            return END if self._iterator is None else await anext(self._iterator)
        except StopAsyncIteration:
            self.end()
            return END
        except asyncio.CancelledError:  # only generators end with that
            raise
        except BaseException:
            self.end()
            raise
        finally:
            del self

    def end(self) -> None:
        """There is nothing to advance any more."""
        self._iterator = None
        if self.one_task is not None:
            self.one_task.stop()
        untrack(self)
        with LOCK:
            if self.made and not self.ended:
                _service.watch(-1)
            self.ended = True

    # -- closing --------------------------------------------------------------------------------------

    def close(self, *, dropped: bool = False) -> ArrayFuture[None]:
        """Cancel its steps; the call that closes a generator, so that its ``finally`` runs."""
        wakes = Wakes()
        with LOCK:
            if self.closing is None:
                untrack(self)
                order = self.channel._order
                for step in self._unfinished():
                    step._cancel(wakes, ": its stream was closed")
                call = self._closing_call(dropped=dropped)
                if not self.used:  # nothing of it has run, and nothing will
                    call._state = READY
                    self.ended = True
                    self.closing = call
                    return call
                if self.context is not None:
                    call._context, call._config = self.context, self.config
                self.prepare(call)
                if self.base.object is not None:
                    self.base.object.calls += 1
                if self.owner is not None and not self.owner.closed:
                    # It is not the owner's own call, because that would be cancelled with the others.
                    self.owner.live += 1
                    call._release = functools.partial(_closed, self.owner, call)
                self.closing = call
                take(call)
                if order.push(call):
                    pool.schedule(self.channel)
        wakes.pay()
        return self.closing

    def _unfinished(self) -> Iterable[Call]:
        order = self.channel._order
        # On a host the channel may have others, too.
        calls: list[Any] = [order.running, *order.queue]
        return [call for call in calls if call is not None and self._advances(call._plan)]

    def _advances(self, plan: Any) -> bool:
        return plan is self or (isinstance(plan, First) and plan._source is self)

    def _closing_call(self, *, dropped: bool) -> ArrayFuture[None]:
        call = self._new_call(_Close(self))
        call._gate = dropped_gate if dropped else None
        return call

    def _new_call(self, plan: Any) -> ArrayFuture[None]:
        call: ArrayFuture[None] = ArrayFuture._create(
            plan, (), {}, self.channel, None, None, HERE, 0
        )
        return call

    def close_iterator(self) -> None:
        try:
            if isinstance(self._iterator, Generator):
                self._iterator.close()
        finally:
            self.end()
            del self

    async def aclose_iterator(self) -> None:
        try:
            if isinstance(self._iterator, AsyncGenerator):
                await self._iterator.aclose()
        finally:
            self.end()
            del self


class First:
    """The ``Plan`` of a stream's first step, which has the arguments."""

    __slots__ = ("_source",)
    ships = True
    dispatches = False

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def name(self) -> str:
        return self._source.name

    @property
    def host(self) -> str:
        return self._source.host

    @property
    def devices(self) -> Any:
        return self._source.devices

    def is_loaded(self) -> bool:
        return False

    def body(self) -> Callable[..., Any]:
        return self._source.begin

    def futures(self, args: Args, kwargs: Kwargs) -> Sequence[Any]:
        return self._source.plan.futures(args, kwargs)  # type: ignore[no-any-return]

    def bind(self, args: Args, kwargs: Kwargs, values: dict[int, Any]) -> tuple[Args, Kwargs]:
        return self._source.plan.bind(args, kwargs, values)  # type: ignore[no-any-return]

    def finish(self, value: Any) -> tuple[Any, Sequence[Any]]:
        return self._source.finish(value)


class _Close(NoArguments):
    """The ``Plan`` of the call that closes a stream."""

    __slots__ = ("_source", "host", "name")
    devices = None

    def __init__(self, source: Source) -> None:
        self._source: Source | None = source
        self.host = source.host
        self.name = f"{source.name} (closing)"

    def is_loaded(self) -> bool:
        return True

    def body(self) -> Callable[..., Any]:
        # No cycle with the source, or its error were reported when the collector comes along.
        source, self._source = self._source, None
        assert source is not None
        return source.aclose_iterator if source.asynchronous else source.close_iterator

    def finish(self, value: Any) -> tuple[Any, Sequence[Any]]:
        return None, ()


def _closed(owner: Owner, call: ArrayFuture[None], wakes: Wakes) -> None:
    """A stream of a block is closed; what its body raised then is the block's (under the lock)."""
    if call._report is not None and not owner.closed:
        owner.call_failed(call._report)
    owner.call_over(wakes)
