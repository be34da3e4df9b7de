# SPDX-License-Identifier: Apache-2.0
"""Waiting for many things at once, without a task for each."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from typing import Any, Literal, TypeVar, overload

import jax
from jax.core import Tracer

from aiocolocated import _readiness, _values
from aiocolocated._deadlocks import refuse_cycle
from aiocolocated._exceptions import CallCancelledError
from aiocolocated._futures import ArrayFuture
from aiocolocated._loops import LoopBridge, Wakes, bridge_for
from aiocolocated._settings import LOCK
from aiocolocated._types import CANCELLED, FAILED, READY
from aiocolocated._waiters import LoopWaiter, waiting_body
from aiocolocated.hosts._forwarded import calls_behind, computing

T = TypeVar("T")
R = TypeVar("R")

_tree_leaves = jax.tree_util.tree_leaves
_ONLY_ARRAYS = frozenset({_values.ArrayImpl})


async def wait_until_ready(tree: T, *, timeout: float | None = None) -> T:
    """Wait until every array in ``tree`` is computed, leaving the event loop free.

    The asynchronous :func:`jax.block_until_ready`. Costs no thread hop when everything is ready; no
    copy is made.

    Args:
        tree: pytree of :class:`jax.Array` of any shape, dtype and sharding (typed PRNG keys, strings,
            zero-size and not fully addressable arrays included) and of array futures. Other leaves
            pass through.
        timeout: seconds; ``None`` waits for ever.

    Returns:
        The same tree; array futures are replaced by their results.

    Raises:
        TimeoutError: time ran out; the computation goes on and may be awaited again.
        ArrayDeletedError: an array was deleted or donated, before or while it was awaited.
        Exception: the error of the computation.

    Ordering: none; takes no channel.

    Cancellation: stops the wait, never a computation or a call.

    Thread safety: any loop's thread. Without a loop use :func:`jax.block_until_ready`.

    Example:
        >>> y = await wait_until_ready(step(x))    # step is jitted; y as x, computed

    Source: ``jax.block_until_ready`` (JAX 0.10).

    .. versionadded:: 0.1
    """
    leaves = _tree_leaves(tree)
    try:
        if computing and (behind := calls_behind(leaves)):
            leaves = [*leaves, *behind]  # their handles say that they are ready
        if _ONLY_ARRAYS.issuperset(map(type, leaves)) and _readiness.check(leaves):
            return tree  # the common case
        if timeout is None:
            return await _wait_until_ready(tree, leaves)
        async with asyncio.timeout(timeout):
            return await _wait_until_ready(tree, leaves)
    finally:
        del tree, leaves  # a traceback keeps this frame


async def _wait_until_ready(tree: T, leaves: Sequence[Any]) -> T:
    arrays: list[Any] = []
    calls: list[Any] = []
    leaf: Any = None
    array: Any = None
    try:
        for leaf in leaves:
            if (array := _values.array_of(leaf)) is not None:
                arrays.append(array)
            elif type(leaf) is ArrayFuture:
                calls.append(leaf)
            elif isinstance(leaf, Tracer):
                raise _values.refuse_traced("wait_until_ready")
        if calls:
            await _wait_all(asyncio.get_running_loop(), calls, [], patient=False, cancels=False)
            _raise_first(calls)
            tree = jax.tree_util.tree_map(
                lambda leaf: leaf._value if type(leaf) is ArrayFuture else leaf, tree
            )
        if arrays and not _readiness.check(arrays):
            await _poll(arrays)
            _readiness.check(arrays)
        return tree
    finally:
        del tree, leaves, arrays, calls, leaf, array  # a traceback keeps this frame


async def _poll(arrays: Sequence[Any]) -> None:
    loop = asyncio.get_running_loop()
    waiter = LoopWaiter(bridge_for(loop), loop.create_future())

    def done() -> None:
        wakes = Wakes()
        waiter.wake(wakes)
        wakes.pay()

    poll = _readiness.when_ready(arrays, done)
    try:
        await waiter.future
    finally:
        poll.stop()  # or it would hold the arrays, and poll, after a timeout
        del arrays


# --- gather -------------------------------------------------------------------------------------------


class _Countdown:
    """One waiter for many futures: wakes its loop when the last is done, or the first has failed."""

    __slots__ = ("bridge", "future", "left", "patient")

    def __init__(self, bridge: LoopBridge, future: asyncio.Future[None], patient: bool) -> None:
        self.bridge = bridge
        self.future = future
        self.left = 0
        self.patient = patient

    def wake(self, wakes: Wakes) -> None:
        self.left -= 1
        if self.left <= 0:
            self.bridge.post(self.future)
            wakes.bridge(self.bridge)

    def impatient_wake(self, call: ArrayFuture[Any]) -> None:
        if not self.future.done():
            self.future.set_result(None)


class _Counted:
    """The countdown's entry at one future, which must look at how that one ended."""

    __slots__ = ("call", "countdown")

    def __init__(self, countdown: _Countdown, call: ArrayFuture[Any]) -> None:
        self.countdown = countdown
        self.call = call

    def wake(self, wakes: Wakes) -> None:
        if self.call._state != READY and not self.countdown.patient:
            self.countdown.left = 0
        self.countdown.wake(wakes)


@overload
async def gather(
    *awaitables: Awaitable[R], return_exceptions: Literal[False] = False
) -> list[R]: ...
@overload
async def gather(*awaitables: Awaitable[R], return_exceptions: bool) -> list[R | BaseException]: ...
async def gather(*awaitables: Awaitable[Any], return_exceptions: bool = False) -> list[Any]:
    """Wait for many futures with one wake-up, and return their results in order.

    Like :func:`asyncio.gather`, which makes a task for every awaitable; here only coroutines and
    other awaitables cost one.

    ``gather(f(x), f(y))`` waits for two calls of *one* channel, which run one after the other: order
    was fixed by the call expressions. For concurrent calls use :meth:`TaskGroup.start_soon` or
    :meth:`ColocatedFunction.map`.

    Args:
        *awaitables: array futures; also coroutines, tasks and other awaitables.
        return_exceptions: give errors as results instead of raising the first.

    Raises:
        Exception: the first error, as soon as it happens; the other calls go on, and their errors
            count as retrieved.

    Cancellation: cancels the waits, and thereby every call that nobody else waits for.

    Example:
        >>> a, b = await gather(f(x), f(y))

    .. versionadded:: 0.1
    """
    loop = asyncio.get_running_loop()
    tasks: dict[int, Any] = {id(aw): aw for aw in awaitables if type(aw) is not ArrayFuture}
    for key, other in tasks.items():  # one task for each, though it be given twice
        tasks[key] = asyncio.ensure_future(other)
    others: list[asyncio.Future[Any]] = list(tasks.values())
    items: list[Any] = [tasks.get(id(aw), aw) for aw in awaitables] if tasks else list(awaitables)
    other = None
    try:
        await _wait_all(loop, items, others, patient=return_exceptions)
        if return_exceptions:
            return [_error_or_value(item) for item in items]
        _raise_first(items)
        return [item._value if type(item) is ArrayFuture else item.result() for item in items]
    finally:
        del items, others, other, tasks, awaitables


def _refuse_cycles(futures: Iterable[Any]) -> None:
    """On behalf of a body: refuse to wait for what it stands in the way of."""
    body = waiting_body()
    if body is not None:
        with LOCK:
            for future in futures:
                if type(future) is ArrayFuture:
                    refuse_cycle(future, body)


async def _wait_all(
    loop: asyncio.AbstractEventLoop,
    items: list[Any],
    others: list[asyncio.Future[Any]],
    *,
    patient: bool,
    cancels: bool = True,
) -> None:
    pending = [i for i in items if type(i) is ArrayFuture and i._state < READY]
    if not pending and not others:
        return
    _refuse_cycles(pending)
    countdown = _Countdown(bridge_for(loop), loop.create_future(), patient)
    entries: list[tuple[ArrayFuture[Any], _Counted]] = []

    def other_done(future: asyncio.Future[Any]) -> None:
        wakes = Wakes()
        with LOCK:
            if not patient and (future.cancelled() or future.exception() is not None):
                countdown.left = 0
            countdown.wake(wakes)
        wakes.pay()

    with LOCK:
        countdown.left = len(others)
        for call in pending:
            entry = _Counted(countdown, call)
            if call._add_waiter(entry, READY):
                countdown.left += 1
                entries.append((call, entry))
        idle = not countdown.left
        if not patient and any(
            i._state in (FAILED, CANCELLED) for i in items if type(i) is ArrayFuture
        ):
            idle = True
    for future in others:
        future.add_done_callback(other_done)
    cancelled = cleans_up = False
    try:
        if not idle:
            await countdown.future
    except BaseException as error:
        cancelled = True
        cleans_up = cancels and isinstance(error, asyncio.CancelledError)
        for future in others:
            future.cancel()
        raise
    finally:
        for future in others:
            future.remove_done_callback(other_done)
        for call, entry in entries:
            if call._state < READY:
                call._drop_waiter(entry, READY, cancelled=cancelled and cancels)
        if cleans_up:
            for call, _ in entries:
                await call._clean_up()


async def wait_until_over(calls: list[ArrayFuture[Any]]) -> None:
    """Wait for calls, however they end; none is cancelled, and no error counts as retrieved."""
    await _wait_all(asyncio.get_running_loop(), calls, [], patient=True, cancels=False)


def _raise_first(items: Sequence[Any]) -> None:
    """Raise the first error there is; the others, also those still to come, count as retrieved."""
    other: Any = None
    for item in items:
        if item.done() and not _succeeded(item):
            break
    else:
        return
    for other in items:
        if other is not item:
            if other.done():
                _look(other)
            else:
                other.add_done_callback(_look)
    try:
        if type(item) is ArrayFuture:
            item._outcome()
        else:
            item.result()
    finally:
        del items, item, other


def _succeeded(item: Any) -> bool:
    if type(item) is ArrayFuture:
        return item._state == READY
    return not item.cancelled() and item.exception() is None


def _look(item: Any) -> None:
    """Count an error as retrieved."""
    if type(item) is not ArrayFuture:
        if not item.cancelled():
            item.exception()
    elif item._report is not None:
        item._report.retrieve()


def _error_or_value(item: Any) -> Any:
    if type(item) is ArrayFuture:
        if item._state == CANCELLED:
            return CallCancelledError(*item._value.args)
        _look(item)
        return item._value
    if item.cancelled():
        return asyncio.CancelledError()
    return item.exception() or item.result()


# --- as_completed -----------------------------------------------------------------------------------------


class _Collector:
    """One waiter for many futures: keeps those that are done, in the order of finishing."""

    __slots__ = ("bridge", "done", "waiting")

    def __init__(self, bridge: LoopBridge) -> None:
        self.bridge = bridge
        self.done: deque[ArrayFuture[Any]] = deque()
        self.waiting: asyncio.Future[None] | None = None


class _Collected:
    __slots__ = ("call", "collector")

    def __init__(self, collector: _Collector, call: ArrayFuture[Any]) -> None:
        self.collector = collector
        self.call = call

    def wake(self, wakes: Wakes) -> None:
        collector = self.collector
        collector.done.append(self.call)
        if collector.waiting is not None:
            collector.bridge.post(collector.waiting)
            collector.waiting = None
            wakes.bridge(collector.bridge)


async def as_completed(
    futures: Iterable[ArrayFuture[R]], *, timeout: float | None = None
) -> AsyncIterator[ArrayFuture[R]]:
    """Yield array futures as they finish; each is done when it is yielded.

    Args:
        futures: array futures; they may repeat, and are yielded once each.
        timeout: seconds for all together; ``None`` waits for ever.

    Yields:
        Done futures, in the order of finishing: ``await`` or ``result()`` them for value or error.

    Raises:
        TimeoutError: time ran out; the remaining calls go on.

    Cancellation: cancels the waits, and thereby every remaining call that nobody else waits for.
    Breaking out of the loop leaves the calls alone.

    Example:
        >>> async for fut in as_completed([f(x) for x in xs]):
        ...     use(await fut)

    .. versionadded:: 0.1
    """
    loop = asyncio.get_running_loop()
    collector = _Collector(bridge_for(loop))
    entries: dict[int, tuple[ArrayFuture[R], _Collected]] = {}
    deadline = None if timeout is None else loop.time() + timeout
    cancelled = False
    unique = dict.fromkeys(futures)
    _refuse_cycles(unique)
    try:
        for call in unique:
            if type(call) is not ArrayFuture:
                raise TypeError(f"as_completed takes array futures, got {call!r}")
            entry = _Collected(collector, call)
            entries[id(call)] = (call, entry)
            if not call._add_waiter(entry, READY):
                with LOCK:
                    collector.done.append(call)
        while entries:
            waiting = None
            with LOCK:
                if not collector.done:
                    waiting = collector.waiting = loop.create_future()
            if waiting is not None:  # `collector.waiting` may be gone by now
                async with asyncio.timeout_at(deadline):
                    await waiting
            call = collector.done.popleft()
            entries.pop(id(call), None)
            yield call
            del call
    except asyncio.CancelledError:
        cancelled = True
        raise
    finally:
        collector.waiting = None
        for call, entry in entries.values():
            call._drop_waiter(entry, READY, cancelled=cancelled)
        if cancelled:
            for call, _ in entries.values():
                await call._clean_up()
