# SPDX-License-Identifier: Apache-2.0
"""Submission: a call gets its place in a channel; and what is known of all calls in flight."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import TypeVar

from aiocolocated import _service, _settings
from aiocolocated._calls import Call
from aiocolocated._exceptions import (
    ChannelClosedError,
    ChannelStoppedError,
    ShutdownError,
    WouldBlock,
)
from aiocolocated._execution import computing
from aiocolocated._loops import Wakes, bridge_for
from aiocolocated._ordering import Budget, Gate, Ticket
from aiocolocated._owners import Owner
from aiocolocated._protocols import CallChannel
from aiocolocated._settings import LOCK
from aiocolocated._types import READY
from aiocolocated._waiters import LoopWaiter, ThreadWaiter, Waiter, waiting, waiting_body
from aiocolocated._workers import local, pool

C = TypeVar("C", bound=Call)

gate: Gate[Call] = Gate(_settings.current.multi_device_in_flight)
transfers: Budget[Call] = Budget(_settings.current.transfer_bytes_in_flight)
shutting_down = False
watching_slow = False
slow_call_watch: Callable[[], None] | None = None  # set by _runtime


def enqueue(call: Call, make_waiter: Callable[[], Waiter] | None = None) -> Ticket[Call] | None:
    """Give a call its place; in a full channel a ticket, if the caller can wait, or ``WouldBlock``."""
    channel = call._channel
    order = channel._order
    if _settings.forked:
        raise _settings.refuse_fork()
    with LOCK:
        if order.closed or order.stopped is not None or shutting_down:
            _refuse(channel)
        if order.max_pending is not None and not order.has_room():
            if make_waiter is None:
                raise WouldBlock(
                    f"channel {channel.name!r} is full: {order.waiting} calls are queued (max_pending="
                    f"{order.max_pending}) and {len(order.room or ())} submitters wait. "
                    "Use 'await channel.submit(...)' to wait for room."
                )
            ticket = Ticket(call, make_waiter())
            if call._object is not None:
                call._object.call_taken()
            order.wait_for_room(ticket)
            return ticket
        if call._object is not None:
            call._object.call_taken()
        take(call)
        if order.push(call):
            pool.schedule(channel)
    return None


def submit(call: C) -> C:
    """Give a call its place; on a full channel raise on a loop's thread, and wait elsewhere."""
    if call._channel._order.max_pending is None or asyncio._get_running_loop() is not None:
        enqueue(call)
        if _service.starting:
            _service.wait_for_starts()
        return call
    ticket = enqueue(call, ThreadWaiter)
    if ticket is not None:
        channel = call._channel
        try:
            channel._refuse_own_body("a waiting submit")
            with waiting():
                ticket.waiter.lock.acquire()
        except BaseException:
            channel._give_up(ticket)
            raise
        if ticket.error is not None:
            raise ticket.error
    return call


def take(call: Call) -> None:
    """Count a call that has got its place (under the lock)."""
    global watching_slow
    channel = call._channel
    channel._submitted += 1
    pool.lanes.add(channel)
    if not watching_slow and slow_call_watch is not None:
        watching_slow = True
        slow_call_watch()
    if call._owner is not None:
        call._owner.live += 1
    if call._futures is not None:
        call._depend_on(call._futures)
        call._futures = None
    if channel._dedicated and channel._worker is None:
        channel._worker = pool.add_dedicated(channel.name, channel)


def _refuse(channel: CallChannel) -> None:
    if channel._order.closed:
        raise ChannelClosedError(f"channel {channel.name!r} is closed")
    if channel._order.stopped is not None:
        raise stopped_error(channel.name, channel._order.stopped)
    if shutting_down and local.call is None and waiting_body() is None:
        raise ShutdownError("the interpreter is exiting: no new calls are taken")


def stopped_error(name: str, cause: BaseException) -> ChannelStoppedError:
    # Not the cause's own text: making it is user code, and this runs under the lock.
    error = ChannelStoppedError(
        f"channel {name!r} was opened with on_error='stop' and an earlier call ended with "
        f"{type(cause).__name__} (the cause of this error)"
    )
    error.__cause__ = cause
    return error


def owned_calls(owner: Owner) -> list[Call]:
    """The calls of a block that are not over."""
    with LOCK:
        return [call for call in calls_in_flight() if call._owner is owner]


def started_calls() -> list[Call]:
    """Every call that is running or computing (under the lock)."""
    running = [call for lane in pool.lanes if (call := lane._order.running) is not None]
    return [*running, *computing]


def calls_in_flight() -> list[Call]:
    """Every call that is queued, running or computing (under the lock)."""
    queued = [call for lane in pool.lanes for call in lane._order.queue if call._state < READY]
    return [*started_calls(), *queued]


def cancel_owned(owner: Owner, why: str) -> None:
    """Cancel every call of a block."""
    wakes = Wakes()
    with LOCK:
        for call in owned_calls(owner):
            call._cancel(wakes, f": {why}")
    wakes.pay()


def stay_cancelled() -> None:
    """An error takes the place of the task's cancellation: have that raised at its next ``await``.

    :class:`asyncio.TaskGroup` does so, too, from Python 3.13 on. Before, ``uncancel()`` could not take
    it back, and an ``asyncio.timeout`` around the block would cancel what comes after it.
    """
    task = asyncio.current_task()
    if sys.version_info >= (3, 13) and task is not None and task.cancelling():
        task.uncancel()
        task.cancel()


async def settle_owned(owner: Owner, *, cancelled: bool = False) -> BaseException | None:
    """Wait until nothing of a block runs, whatever happens; the last cancellation, if any.

    The first cancellation cancels the block's calls; none of them ends the wait, but a second Ctrl-C
    does: :class:`asyncio.Runner` then cancels every task while it handles the ``KeyboardInterrupt``.

    Args:
        owner: the block.
        cancelled: whether the block is left because its task was cancelled.
    """
    interrupted: BaseException | None = None
    loop = asyncio.get_running_loop()

    def look(future: asyncio.Future[None] | None = None) -> None:
        # In a callback, because the task may be handling some other exception.
        if future is None or future.cancelled():
            wakes = Wakes()
            with LOCK:
                if isinstance(sys.exc_info()[1], KeyboardInterrupt):
                    owner.give_up(wakes)
            wakes.pay()

    if cancelled:
        loop.call_soon(look)
    while True:
        waiter = LoopWaiter(bridge_for(loop), loop.create_future())
        waiter.future.add_done_callback(look)
        with LOCK:
            if not owner.add_quiet_waiter(waiter):
                return interrupted
        try:
            await waiter.future
        except asyncio.CancelledError as error:
            if interrupted is None:
                cancel_owned(owner, "its block was cancelled")
            interrupted = error
