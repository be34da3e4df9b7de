# SPDX-License-Identifier: Apache-2.0
"""Streams: what a generator body gives, item by item, a bounded number of items ahead."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, TypeVar, final

from aiocolocated import _compat, _serialization, _values
from aiocolocated._channels import new_channel
from aiocolocated._exceptions import ArgumentError, ChannelClosedError, SpecError
from aiocolocated._functions import ColocatedFunction
from aiocolocated._futures import ArrayFuture, wait_for_call
from aiocolocated._lifetimes import Handle
from aiocolocated._owners import current_owner
from aiocolocated._protocols import Args, Kwargs
from aiocolocated._reducers import Reducer
from aiocolocated._remote_streams import RemoteSource
from aiocolocated._sources import END, Source
from aiocolocated.hosts import _wire

if TYPE_CHECKING:
    from types import CodeType

    import jax

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

_READ_AHEAD = 2


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
        channel = new_channel(f"stream {function._base.name}")
        first = function._prepare_call(channel, args, kwargs, code, lasti)
        # The block waits for the closing, which waits for the steps: one of them may never end
        # before it is cancelled.
        first._owner = None
        source = (
            Source(function._base, owner, channel)
            if first._group is None
            else RemoteSource(function._base, owner, channel, first._group)
        )
        source.open(first)
        self._first = first
        self._handle = Handle(source)
        self._keep = function._keep
        self._steps = deque()
        self._ahead = read_ahead
        self._over = False
        self._code = code
        self._lasti = lasti
        if owner is not None:
            owner.add_stream(source)
        if function._base.object is not None:
            function._base.object.streams.add(source)
        self._advance(read_ahead)
        return self

    @property
    def _source(self) -> Source:
        source = self._handle.closable
        assert isinstance(source, Source)
        return source

    def _advance(self, count: int) -> None:
        """Submit steps until ``count`` are under way or ready."""
        source = self._source
        while len(self._steps) < count and not source.ended and source.closing is None:
            step, self._first = self._first, None
            if step is None:
                step = source.step(asyncio._get_running_loop(), self._code, self._lasti)
            source.submit(step)
            self._steps.append(step)

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
        if item is END:
            self._finish()
            return False
        return True

    def _finish(self) -> None:
        self._over = True
        self._source.abandon(self._steps)
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
        if self._over or source.closing is not None:
            state = "closed"
        else:
            state = "open" if self._first is None else "not started"
        return f"<ArrayStream {source.name} {state} read_ahead={self._ahead}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"an ArrayStream cannot be pickled: pass its items ({self!r})")


def check_read_ahead(name: str, read_ahead: Any) -> int | None:
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
        reduce: Reducer | None = None,
        *,
        read_ahead: int | None = None,
    ) -> ColocatedGenerator[P, R]:
        """A version with more fixed in advance; each thing can be given once.

        Args:
            in_specs: as for :meth:`ColocatedFunction.specialize`.
            out_specs_fn: likewise; every item is checked against what it returns.
            devices: likewise.
            reduce: likewise, for every item: all hosts' bodies take each step together.
            read_ahead: items that the body may be ahead of its consumer; 0 is lock-step: the body runs
                only while the consumer waits. Default 2.

        Raises:
            SpecError: something was given already, or makes no sense.
        """
        if read_ahead is not None and self._read_ahead is not None:
            raise SpecError(f"{self._function._base.name}: read_ahead already specified")
        check_read_ahead(self._function._base.name, read_ahead)
        return ColocatedGenerator(
            self._function.specialize(in_specs, out_specs_fn, devices, reduce),
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


def _reduce(generator: ColocatedGenerator[Any, Any]) -> Any:
    return ColocatedGenerator, (generator._function, generator._read_ahead, generator._default)


_serialization.carry_by_reference(ColocatedGenerator)
_wire.register_reducer(ColocatedGenerator, _reduce)
_serialization.refuse(ArrayStream)
_values.refuse(ArrayStream, "iterate it with 'async for', and pass its items")
