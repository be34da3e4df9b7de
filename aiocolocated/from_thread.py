# SPDX-License-Identifier: Apache-2.0
"""Running coroutines, and awaiting futures, from synchronous code and worker threads.

Inside a body the coroutine runs on the loop whose task submitted the call, as ``anyio.from_thread``
does it. Elsewhere it runs on the host's loop, in a thread of the library.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from time import monotonic
from typing import Any, ParamSpec, TypeVar, cast

from aiocolocated import _service, _settings
from aiocolocated._exceptions import CallCancelledError, DeadlockError
from aiocolocated._futures import ArrayFuture
from aiocolocated._hostloop import host_loop
from aiocolocated._streams import ArrayStream
from aiocolocated._waiters import BodyWait, body_wait, waiting
from aiocolocated._workers import local

__all__ = ("iterate", "run", "run_sync", "wait")

P = ParamSpec("P")
R = TypeVar("R")


def run(async_fn: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a coroutine function on a loop and wait for its result in this thread.

    Args:
        async_fn: called on the loop's thread.
        *args: its arguments.
        **kwargs: its keyword arguments.

    Raises:
        DeadlockError: on a running loop's thread.
        Exception: what the coroutine raised.

    Cancellation: Ctrl-C, or any error in this thread, cancels the coroutine.

    Thread safety: any thread without a running loop.

    Example:
        >>> @colocated_python
        ... def body(x):
        ...     token = from_thread.run(fetch_token)       # on the server's loop
        ...     return x * len(token)
        >>> from_thread.run(main)                          # in a script

    .. versionadded:: 0.1
    """

    async def call() -> R:
        return await async_fn(*args, **kwargs)

    return _wait_for(call, None)


def run_sync(fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a plain function on a loop's thread and wait for its result in this thread.

    Raises: as for :func:`run`.

    .. versionadded:: 0.1
    """

    async def call() -> R:
        return fn(*args, **kwargs)

    return _wait_for(call, None)


def wait(awaitable: Awaitable[R], timeout: float | None = None) -> R:
    """Wait in this thread for an array future, or for any other awaitable.

    Args:
        awaitable: an :class:`~aiocolocated.ArrayFuture` (no loop needed), a coroutine, or another awaitable.
        timeout: seconds; ``None`` waits for ever.

    Raises:
        TimeoutError: time ran out. A call goes on; a coroutine is cancelled.
        DeadlockError: this thread's wait could never end.

    .. versionadded:: 0.1
    """
    if isinstance(awaitable, ArrayFuture):
        result: R = awaitable.result(timeout)
        return result

    async def call() -> R:
        return await awaitable

    return _wait_for(call, timeout)


def iterate(items: AsyncIterable[R]) -> _Iteration[R]:
    """Iterate in this thread over a stream, or over any other asynchronous iterable.

    Args:
        items: an :class:`~aiocolocated.ArrayStream` (no loop needed), a colocated object that can be
            iterated, or another asynchronous iterable, which is advanced on a loop as in :func:`run`.

    Returns:
        An iterator. ``close()`` closes the stream and waits for that, as :func:`contextlib.closing`
        does; dropping it closes the stream in the background.

    Raises:
        DeadlockError: on a running loop's thread.
        Exception: what the body raised, after the items before it.

    Example:
        >>> for batch in from_thread.iterate(batches(path)):
        ...     train(batch)

    .. versionadded:: 0.2
    """
    _refuse_loop()  # at once, and not only when it has to wait
    return _Iteration(aiter(items))


class _Iteration(Iterator[R]):
    """A plain iterator; no generator, whose finalizer would wait for the closing, on any thread."""

    def __init__(self, items: AsyncIterator[R]) -> None:
        self._items: AsyncIterator[R] | None = items

    def __next__(self) -> R:
        items = self._items
        if items is None:
            raise StopIteration
        try:
            if isinstance(items, ArrayStream):
                step = items._take()
                if step is not None and items._took(item := items._outcome_of(step)):
                    return cast("R", item)
            else:
                with contextlib.suppress(StopAsyncIteration):
                    return run(_anext, items)
        except BaseException:
            if not isinstance(items, ArrayStream):
                self._items = None
            raise
        self._items = None
        raise StopIteration

    def close(self) -> None:
        """Close what is iterated, and wait for that."""
        items, self._items = self._items, None
        aclose = getattr(items, "aclose", None)
        if aclose is not None:
            run(aclose)


async def _anext(iterator: AsyncIterator[R]) -> R:
    return await anext(iterator)


def _refuse_loop() -> None:
    if asyncio._get_running_loop() is not None:
        raise DeadlockError(
            "from_thread was called on a running event loop's thread, which it would stop; "
            "await the coroutine instead"
        )


def _wait_for(call: Callable[[], Coroutine[Any, Any, R]], timeout: float | None) -> R:
    _refuse_loop()
    if _settings.forked:
        raise _settings.refuse_fork()
    deadline = None if timeout is None else monotonic() + timeout
    try:
        return _wait_on(_loop(), call, deadline)
    except _NeverBegunError:
        return _wait_on(host_loop().loop, call, deadline)


class _NeverBegunError(Exception):
    """The loop ended first."""


def _wait_on(
    loop: asyncio.AbstractEventLoop,
    call: Callable[[], Coroutine[Any, Any, R]],
    deadline: float | None,
) -> R:
    wait = BodyWait(local.call)
    exits: list[BaseException] = []
    begun = abandoned = False

    async def on_behalf() -> R:
        nonlocal begun
        if abandoned:
            raise asyncio.CancelledError
        begun = True
        wait.task = asyncio.current_task()
        body_wait.set(wait)  # so that waiting for what this body stands in the way of is refused
        try:
            return await call()
        except (KeyboardInterrupt, SystemExit) as error:  # for the caller: they would end the loop
            exits.append(error)
            raise asyncio.CancelledError from None
        finally:
            wait.call = wait.task = None  # contexts are copied, and the task keeps the result

    def abandon() -> None:
        nonlocal abandoned
        abandoned = True
        if wait.task is not None:
            wait.task.cancel()

    future: concurrent.futures.Future[R] | None = None
    coroutine = on_behalf()
    try:
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        except RuntimeError:  # the loop is closed already
            raise _NeverBegunError from None
        with waiting():
            while not future.done() and not _has_ended(loop):
                now = monotonic()
                if deadline is not None and now >= deadline:
                    raise TimeoutError
                until = now + _LOOK if deadline is None else min(now + _LOOK, deadline)
                concurrent.futures.wait([future], until - now)
        if future.done():
            return future.result()
        if not begun:
            raise _NeverBegunError
        raise concurrent.futures.CancelledError
    except concurrent.futures.CancelledError:
        if exits:
            raise exits.pop() from None
        raise CallCancelledError(
            "the coroutine that this thread waited for was cancelled"
            + ("; its loop has ended" if not loop.is_running() else "")
        ) from None
    except BaseException:
        if future is None or not future.done():  # Ctrl-C may come before there is a future
            with contextlib.suppress(RuntimeError):  # its loop is closed
                loop.call_soon_threadsafe(abandon)
        raise
    finally:
        wait.call = None
        if not begun and (future is None or _has_ended(loop)):
            coroutine.close()


# asyncio forgets what is scheduled on a loop that is about to close, without a word to whom waits.
_LOOK = 0.1  # seconds


def _has_ended(loop: asyncio.AbstractEventLoop) -> bool:
    return loop.is_closed() or (_service.exiting and not loop.is_running())


def _loop() -> asyncio.AbstractEventLoop:
    body = local.call
    if body is not None and body._loop is not None and body._loop.is_running():
        loop: asyncio.AbstractEventLoop = body._loop
        return loop
    return host_loop().loop
