# SPDX-License-Identifier: Apache-2.0
"""Streams: what a generator body gives, item by item, a bounded number of items ahead."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, TypeVar, final

from aiocolocated import _compat, _serialization, _service, _values
from aiocolocated._channels import new_channel
from aiocolocated._coroutines import OneTask
from aiocolocated._exceptions import ArgumentError, ChannelClosedError, SpecError
from aiocolocated._functions import ColocatedFunction
from aiocolocated._futures import ArrayFuture, wait_for_call
from aiocolocated._lifetimes import HERE, Handle, dropped_gate, track, untrack
from aiocolocated._loops import Wakes
from aiocolocated._owners import Owner, current_owner
from aiocolocated._protocols import Args, Kwargs
from aiocolocated._settings import LOCK
from aiocolocated._specializations import FunctionCode
from aiocolocated._submission import submit, take
from aiocolocated._workers import pool

if TYPE_CHECKING:
    from types import CodeType

    import jax

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

_READ_AHEAD = 2


class _End:
    """The result of a step that found the body's end."""


_END = _End()


class _Source:
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
    )
    ships = False
    dispatches = False
    used = True

    def __init__(self, base: FunctionCode, owner: Owner | None) -> None:
        self.base = base
        self.owner = owner
        self.channel = new_channel(f"stream {base.name}")
        self.made = False  # the iterator
        self.ended = False  # by itself, by an error, or closed
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

    def futures(self, args: Args, kwargs: Kwargs) -> Sequence[Any]:
        return ()

    def bind(self, args: Args, kwargs: Kwargs, values: dict[int, Any]) -> tuple[Args, Kwargs]:
        return args, kwargs

    def finish(self, value: Any) -> tuple[Any, Sequence[Any]]:
        if value is _END:
            return value, ()
        result: tuple[Any, Sequence[Any]] = self.plan.finish(value)
        return result

    # -- steps (on the host) --------------------------------------------------------------------------

    def begin(self, *args: Any, **kwargs: Any) -> Any:
        """Make the iterator and take its first step (worker thread)."""
        try:
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
            return _END if self._iterator is None else next(self._iterator)
        except StopIteration:
            self.end()
            return _END
        except BaseException:
            self.end()
            raise
        finally:
            del self

    async def anext(self) -> Any:
        try:
            return _END if self._iterator is None else await anext(self._iterator)
        except StopAsyncIteration:
            self.end()
            return _END
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
                for step in (order.running, *order.queue):
                    if step is not None:
                        step._cancel(wakes, ": its stream was closed")
                call: ArrayFuture[None] = ArrayFuture._create(
                    _Close(self), (), {}, self.channel, None, None, HERE, 0
                )
                if self.base.object is not None:
                    call._thread = self.base.object.thread
                call._light = self.asynchronous or call._thread is not None
                call._one_task = self.one_task
                if self.context is not None:
                    call._context, call._config = self.context, self.config
                call._gate = dropped_gate if dropped else None
                if self.base.object is not None:
                    call._gate = self.base.object.gate
                    call._object = self.base.object
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


class _First:
    """The ``Plan`` of a stream's first step, which has the arguments."""

    __slots__ = ("_source",)
    ships = True
    dispatches = False

    def __init__(self, source: _Source) -> None:
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


class _Close:
    """The ``Plan`` of the call that closes a stream."""

    __slots__ = ("_source", "host", "name")
    devices = None
    ships = False
    dispatches = False

    def __init__(self, source: _Source) -> None:
        self._source: _Source | None = source
        self.host = source.host
        self.name = f"{source.name} (closing)"

    def is_loaded(self) -> bool:
        return True

    def body(self) -> Callable[..., Any]:
        # No cycle with the source, or its error were reported when the collector comes along.
        source, self._source = self._source, None
        assert source is not None
        return source.aclose_iterator if source.asynchronous else source.close_iterator

    def futures(self, args: Args, kwargs: Kwargs) -> Sequence[Any]:
        return ()

    def bind(self, args: Args, kwargs: Kwargs, values: dict[int, Any]) -> tuple[Args, Kwargs]:
        return args, kwargs

    def finish(self, value: Any) -> tuple[Any, Sequence[Any]]:
        return None, ()


def _closed(owner: Owner, call: ArrayFuture[None], wakes: Wakes) -> None:
    """A stream of a block is closed; what its body raised then is the block's (under the lock)."""
    if call._report is not None and not owner.closed:
        owner.call_failed(call._report)
    owner.call_over(wakes)


# --- the public objects ----------------------------------------------------------------------------


@final
class ArrayStream(Generic[R_co]):
    """What a colocated generator gives: its items, awaited with ``async for``.

    The body runs on its host and is advanced a few items ahead of the consumer (``read_ahead``);
    every item is a result as any call's: its arrays are computed when it arrives. Between two items
    the body is at rest and holds nothing: other methods of its object may run.

    Close it, or the body's ``finally`` runs some time after the last reference is gone:
    ``async with contextlib.aclosing(f(x)) as stream``. Leaving a :class:`TaskGroup` or
    :func:`open_task_channel` closes what was opened in it.

    Ordering: a stream has a channel of its own; its steps run one after the other and are in no order
    with other calls of the task.

    Cancellation: a consumer that is cancelled while it waits loses no item; the next ``anext`` gets it.

    Thread safety: one consumer at a time. Without a loop, use :func:`from_thread.iterate`.

    Example:
        >>> async with contextlib.aclosing(batches(path)) as stream:
        ...     async for batch in stream:
        ...         loss = await train(batch)

    .. versionadded:: 0.2
    """

    __slots__ = (
        "__weakref__",
        "_ahead",
        "_code",
        "_first",
        "_handle",
        "_keep",
        "_lasti",
        "_over",
        "_steps",
    )

    _ahead: int
    _code: CodeType
    _first: ArrayFuture[Any] | None  # the first step, until it is submitted
    _handle: Handle
    _keep: object  # of a method, its object: dropping that would close this, too
    _lasti: int
    _over: bool
    _steps: deque[ArrayFuture[Any]]  # submitted, not yet consumed

    def __init__(self) -> None:
        raise TypeError("ArrayStream is not made directly: call a colocated generator function")

    @classmethod
    def _open(
        cls,
        function: ColocatedFunction[..., Any],
        args: Args,
        kwargs: Kwargs,
        read_ahead: int,
        code: CodeType,
        lasti: int,
    ) -> ArrayStream[Any]:
        self = cls.__new__(cls)
        owner = current_owner()
        source = _Source(function._base, owner)
        first = function._prepare_call(source.channel, args, kwargs, code, lasti)
        # The block waits for the closing, which waits for the steps: one of them may never end
        # before it is cancelled.
        first._owner = None
        source.plan, source.context, source.config = first._plan, first._context, first._config
        first._plan = _First(source)
        first._light = source.asynchronous or first._thread is not None
        first._one_task = source.one_task
        self._first = first
        self._handle = Handle(source)
        self._keep = function._keep
        self._steps = deque()
        self._ahead = read_ahead
        self._over = False
        self._code = code
        self._lasti = lasti
        track(source)
        if owner is not None:
            owner.add_stream(source)
        if function._base.object is not None:
            function._base.object.streams.add(source)
        self._advance(read_ahead)
        return self

    @property
    def _source(self) -> _Source:
        source = self._handle.closable
        assert isinstance(source, _Source)
        return source

    def _advance(self, count: int) -> None:
        """Submit steps until ``count`` are under way or ready."""
        source = self._source
        while len(self._steps) < count and not source.ended and source.closing is None:
            step, self._first = self._first, None
            if step is None:
                step = ArrayFuture._create(
                    source,
                    (),
                    {},
                    source.channel,
                    None,
                    asyncio._get_running_loop(),
                    self._code,
                    self._lasti,
                )
                step._context, step._config = source.context, source.config
                if source.base.special:
                    source.base.mark(step)
                step._light = source.asynchronous or step._thread is not None
                step._one_task = source.one_task
            self._steps.append(submit(step))

    def _take(self) -> ArrayFuture[Any] | None:
        """The next step to wait for; ``None`` at the end.

        Raises:
            ChannelClosedError: the stream was closed, and not by ``aclose``.
        """
        if self._source.closing is not None and not self._over:
            self._finish()
            raise ChannelClosedError(
                f"the stream of {self._source.name} was closed before its end: the block in which it "
                "was opened was left, or its object closed"
            )
        if not self._over:
            self._advance(self._ahead + 1)
        if self._over or not self._steps:
            self._finish()
            return None
        return self._steps.popleft()

    def _outcome_of(self, step: ArrayFuture[Any]) -> Any:
        """Wait for a step in this thread."""
        try:
            return step.result()
        except BaseException:
            if step.done():
                self._finish()
            else:  # a running loop's thread, Ctrl-C, ...
                self._steps.appendleft(step)
            raise

    def _took(self, item: Any) -> bool:
        """Whether an item is one, and not the end."""
        if item is _END:
            self._finish()
            return False
        return True

    def _finish(self) -> None:
        self._over = True
        for step in self._steps:  # nobody asked for what these ran into
            if step._report is not None:
                step._report.retrieve()
        self._steps.clear()
        self._first = self._keep = None

    def __aiter__(self) -> ArrayStream[R_co]:
        return self

    async def __anext__(self) -> R_co:
        step = self._take()
        if step is None:
            raise StopAsyncIteration
        try:
            item = await wait_for_call(step)
        except asyncio.CancelledError:
            self._steps.appendleft(step)
            raise
        except BaseException:
            self._finish()
            raise
        finally:
            del step
        if not self._took(item):
            raise StopAsyncIteration
        return item  # type: ignore[no-any-return]

    async def aclose(self) -> None:
        """Take no more items and run the body's ``finally`` on its host; closing twice is fine.

        Raises:
            Exception: what the body raised while it was closed.

        Cancellation: stops the wait; the stream is closed all the same.
        """
        source = self._source
        started = self._first is None
        self._finish()
        if started and (not source.ended or source.closing is not None):
            await wait_for_call(source.close())

    def __iter__(self) -> NoReturn:
        raise TypeError(
            f"an ArrayStream is iterated with 'async for', or with from_thread.iterate(stream) where "
            f"there is no loop ({self!r})"
        )

    def __repr__(self) -> str:
        source = self._source
        state = "closed" if self._over else "open" if self._first is None else "not started"
        return f"<ArrayStream {source.name} {state} read_ahead={self._ahead}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"an ArrayStream cannot be pickled: pass its items ({self!r})")


def check_read_ahead(name: str, read_ahead: int | None) -> int | None:
    if read_ahead is not None and (
        isinstance(read_ahead, bool) or not isinstance(read_ahead, int) or read_ahead < 0
    ):
        raise SpecError(f"{name}: read_ahead must be an int of 0 or more, got {read_ahead!r}")
    return read_ahead


@final
class ColocatedGenerator(Generic[P, R]):
    """A generator function that runs on the hosts of its arguments' devices.

    Made by :func:`colocated_python`. Calling it returns an :class:`ArrayStream` at once.

    .. versionadded:: 0.2
    """

    __slots__ = ("__dict__", "__weakref__", "_default", "_function", "_read_ahead")

    def __init__(
        self,
        function: ColocatedFunction[P, Any],
        read_ahead: int | None = None,
        default: int | None = None,
    ) -> None:
        self._function = function
        self._read_ahead = read_ahead
        self._default = _READ_AHEAD if default is None else default
        functools.update_wrapper(self, function._base.function)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> ArrayStream[R]:
        """Open a stream; unless ``read_ahead`` is 0, the body starts at once.

        Raises: as for calling a :class:`ColocatedFunction`.
        """
        frame = sys._getframe(1)
        ahead = self._default if self._read_ahead is None else self._read_ahead
        return ArrayStream._open(self._function, args, kwargs, ahead, frame.f_code, frame.f_lasti)

    def specialize(
        self,
        in_specs: Any = None,
        out_specs_fn: Callable[..., Any] | None = None,
        devices: _compat.Device | Sequence[_compat.Device] | jax.sharding.Mesh | None = None,
        *,
        read_ahead: int | None = None,
    ) -> ColocatedGenerator[P, R]:
        """A version with more fixed in advance; each thing can be given once.

        Args:
            in_specs: as for :meth:`ColocatedFunction.specialize`.
            out_specs_fn: likewise; every item is checked against what it returns.
            devices: likewise.
            read_ahead: items that the body may be ahead of its consumer; 0 is lock-step: the body runs
                only while the consumer waits. Default 2.

        Raises:
            SpecError: something was given already, or makes no sense.
        """
        if read_ahead is not None and self._read_ahead is not None:
            raise SpecError(f"{self._function._base.name}: read_ahead already specified")
        check_read_ahead(self._function._base.name, read_ahead)
        return ColocatedGenerator(
            self._function.specialize(in_specs, out_specs_fn, devices),
            read_ahead if read_ahead is not None else self._read_ahead,
            self._default,
        )

    def _prepare_call(self, *args: Any) -> NoReturn:
        raise ArgumentError(
            f"{self._function._base.name} is a generator function: call it, and iterate what it "
            "returns with 'async for'"
        )

    def __repr__(self) -> str:
        return f"<ColocatedGenerator {self._function._base.name}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} cannot be pickled; it can be captured by other colocated functions"
        )


_serialization.carry_by_reference(ColocatedGenerator)
_serialization.refuse(ArrayStream)
_values.refuse(ArrayStream, "iterate it with 'async for', and pass its items")
