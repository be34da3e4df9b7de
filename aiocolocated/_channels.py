# SPDX-License-Identifier: Apache-2.0
"""Task channels: program order for asyncio code, and where a call goes that names no channel."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import sys
import threading
import weakref
from collections.abc import Callable
from types import CodeType, TracebackType
from typing import Any, ParamSpec, TypeVar, cast, final, overload

from aiocolocated import _settings
from aiocolocated._calls import Call
from aiocolocated._exceptions import ChannelClosedError, DeadlockError
from aiocolocated._futures import ArrayFuture
from aiocolocated._loops import Wakes, bridge_for
from aiocolocated._ordering import ChannelOrder, Ticket
from aiocolocated._plans import RunPlan
from aiocolocated._settings import LOCK
from aiocolocated._submission import enqueue, gate, stopped_error, submit, take
from aiocolocated._types import RUNNING, OnError
from aiocolocated._waiters import LoopWaiter, Waiter, waiting_body
from aiocolocated._workers import Worker, local, pool

P = ParamSpec("P")
R = TypeVar("R")

# Stream 0 is the thread's own; small numbers may be thread ids.
_streams = itertools.count(1 << 32)
_numbers = itertools.count(1)


@dataclasses.dataclass(frozen=True, slots=True)
class TaskChannelStatistics:
    """A snapshot of a channel.

    Attributes:
        name: the channel's name.
        queued: calls submitted and not started.
        running: 1 while a body runs (an abandoned one too), else 0. Of calls that were sent to other
            processes the first counts as running and the others as queued.
        in_flight: calls whose body has returned and whose arrays are computing.
        waiting_for_room: submitters that wait in :meth:`TaskChannel.submit`.
        submitted: calls taken since the channel was made.
        failed: of them, failed so far.
        cancelled: of them, cancelled so far.
        abandoned: cancelled calls whose body still runs.
        max_pending: the bound on ``queued``, or ``None``.
        max_in_flight: the bound on ``in_flight``.
        closed: whether the channel takes no more calls.
    """

    name: str
    queued: int
    running: int
    in_flight: int
    waiting_for_room: int
    submitted: int
    failed: int
    cancelled: int
    abandoned: int
    max_pending: int | None
    max_in_flight: int
    closed: bool


@final
class TaskChannel:
    """A first-in, first-out lane of calls: one runs at a time, in submission order.

    A channel is a queue over the library's shared worker threads, so thousands are cheap. Each is
    its own JAX execution stream: device work of two channels does not queue behind each other.

    Args:
        name: for errors and :meth:`Runtime.calls`; made up if absent.
        max_pending: calls that may be queued; ``None`` any number. A full channel raises
            :exc:`WouldBlock` on a loop's thread and makes other threads wait.
        max_in_flight: calls whose arrays may still be computing while the next one starts.
        on_error: ``"continue"`` goes on after a failed or cancelled call; ``"stop"`` fails
            everything behind it with :exc:`ChannelStoppedError`.
        dedicated_thread: run every body on one thread of its own, for state that is bound to a
            thread (SQLite connections, JAX's ordered effects).

    Use :func:`open_task_channel` for a block that opens, activates, drains and closes one. A channel
    made here lives until :meth:`aclose`, may be made at import time, and is not bound to a loop;
    ``async with channel:`` only activates it for this task.

    Ordering: calls start in submission order; the next one starts when the previous body has
    returned, raised or been skipped, not when its arrays are ready.

    Thread safety: every method may be used from any thread and loop.

    Example:
        >>> log = TaskChannel("log", max_pending=100)
        >>> async def handler(x):
        ...     fut = await log.submit(write, x)   # waits for room, then for nothing

    .. versionadded:: 0.1
    """

    __slots__ = (
        "__weakref__",
        "_activations",
        "_cancelled",
        "_dedicated",
        "_failed",
        "_idle_waiters",
        "_nested",
        "_number",
        "_order",
        "_runnable_since",
        "_stream",
        "_submitted",
        "_title",
        "_worker",
    )

    def __init__(
        self,
        name: str | None = None,
        *,
        max_pending: int | None = None,
        max_in_flight: int = 8,
        on_error: OnError = "continue",
        dedicated_thread: bool = False,
    ) -> None:
        if max_pending is not None and max_pending < 1:
            raise ValueError(f"max_pending must be None or at least 1, got {max_pending!r}")
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight must be at least 1, got {max_in_flight!r}")
        if on_error not in ("continue", "stop"):
            raise ValueError(f"on_error must be 'continue' or 'stop', got {on_error!r}")
        self._setup(name, max_pending, max_in_flight, on_error, dedicated_thread)

    def _setup(
        self,
        title: str | None,
        max_pending: int | None = None,
        max_in_flight: int = 8,
        on_error: OnError = "continue",
        dedicated: bool = False,
    ) -> None:
        self._title = title
        self._number = next(_numbers)
        self._stream = next(_streams)
        self._order: ChannelOrder[Call] = ChannelOrder(
            gate,
            lane=self,
            max_pending=max_pending,
            max_in_flight=max_in_flight,
            on_error=on_error,
        )
        self._dedicated = dedicated
        self._worker: Worker | None = None
        self._nested = False
        self._runnable_since = 0.0
        self._submitted = self._failed = self._cancelled = 0
        self._idle_waiters: list[Waiter] | None = None
        self._activations: list[_Position] | None = None

    @property
    def name(self) -> str:
        """The channel's name."""
        return self._title or f"channel-{self._number}"

    @property
    def closed(self) -> bool:
        """Whether the channel takes no more calls."""
        return self._order.closed

    def __repr__(self) -> str:
        state = "closed" if self.closed else "stopped" if self._order.stopped else "open"
        return f"<TaskChannel {self.name!r} {state} queued={self._order.waiting}>"

    # -- submitting ---------------------------------------------------------------------------------

    @overload
    def submit_nowait(
        self, fn: Callable[P, ArrayFuture[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> ArrayFuture[R]: ...
    @overload
    def submit_nowait(
        self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> ArrayFuture[R]: ...
    def submit_nowait(self, fn: Any, /, *args: Any, **kwargs: Any) -> ArrayFuture[Any]:
        """Submit a colocated call to this channel; its place is fixed when this returns.

        Takes other callables too, and runs them like :meth:`run`.

        Raises:
            WouldBlock: the channel is full, or others wait for room already (on a loop's thread;
                other threads wait).
            ChannelClosedError: the channel is closed.
            ChannelStoppedError: an earlier call stopped it (``on_error="stop"``).
        """
        frame = sys._getframe(1)
        return submit(self._prepare(fn, args, kwargs, frame.f_code, frame.f_lasti))

    @overload
    async def submit(
        self, fn: Callable[P, ArrayFuture[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> ArrayFuture[R]: ...
    @overload
    async def submit(
        self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> ArrayFuture[R]: ...
    async def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> ArrayFuture[Any]:
        """Wait for room, submit, and return the future; ``await`` it again for the result.

        Takes other callables too, and runs them like :meth:`run`.

        Ordering: first come, first served, never overtaken by ``submit_nowait``; the call takes its
        place when room is granted.

        Cancellation: a submitter that is cancelled while it waits leaves nothing behind.

        Raises:
            DeadlockError: inside a body of this very channel.
            ChannelClosedError: the channel is closed, perhaps while waiting.
            ChannelStoppedError: an earlier call stopped it.
        """
        frame = sys._getframe(1)  # the awaiting coroutine's own frame drives this one
        call = self._prepare(fn, args, kwargs, frame.f_code, frame.f_lasti)
        loop = asyncio.get_running_loop()
        ticket = enqueue(call, lambda: LoopWaiter(bridge_for(loop), loop.create_future()))
        if ticket is None:
            return call
        try:
            self._refuse_own_body("submit")
            await ticket.waiter.future
        except BaseException:
            self._give_up(ticket)
            raise
        if ticket.error is not None:
            raise ticket.error
        return call

    @overload
    def run(
        self, fn: Callable[P, ArrayFuture[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> ArrayFuture[R]: ...
    @overload
    def run(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> ArrayFuture[R]: ...
    def run(self, fn: Any, /, *args: Any, **kwargs: Any) -> ArrayFuture[Any]:
        """Call anything in this channel, off the loop: a jitted function, say.

        Tracing, compiling and dispatching happen on a worker thread, in the channel's order and on
        its execution stream. Nothing is shipped or copied: ``fn`` and its arguments are used as they
        are. Futures among the arguments are waited for and replaced by their arrays.

        Programs over several devices are held to ``multi_device_in_flight`` in the whole process,
        because too many collectives in flight hang JAX's CPU backend.

        Raises:
            WouldBlock, ChannelClosedError, ChannelStoppedError: as for :meth:`submit_nowait`.
            ArgumentError: ``fn`` is a coroutine function or not callable.
        """
        frame = sys._getframe(1)
        return submit(self._prepare(fn, args, kwargs, frame.f_code, frame.f_lasti))

    def _prepare(
        self,
        fn: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        code: CodeType,
        lasti: int,
    ) -> ArrayFuture[Any]:
        prepare = getattr(fn, "_prepare_call", None) or RunPlan(fn).prepare
        return cast("ArrayFuture[Any]", prepare(self, args, kwargs, code, lasti))

    # -- life ---------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Wait until nothing is queued, running or computing here.

        Raises:
            DeadlockError: inside a body of this very channel.

        Cancellation: stops the wait only.
        """
        self._refuse_own_body("drain")
        if _settings.forked:
            raise _settings.refuse_fork()
        loop = asyncio.get_running_loop()
        waiter = LoopWaiter(bridge_for(loop), loop.create_future())
        with LOCK:
            if self._order.idle:
                return
            if self._idle_waiters is None:
                self._idle_waiters = []
            self._idle_waiters.append(waiter)
        try:
            await waiter.future
        finally:
            with LOCK:
                if self._idle_waiters and waiter in self._idle_waiters:
                    self._idle_waiters.remove(waiter)

    async def aclose(self) -> None:
        """Take no more calls and wait for those submitted; closing twice is fine.

        Raises:
            DeadlockError: inside a body of this very channel.

        Cancellation: stops the wait; the channel is closed all the same.
        """
        self._refuse_own_body("aclose")
        self._close()
        await self.drain()

    def _close(self) -> None:
        wakes = Wakes()
        with LOCK:
            order = self._order
            order.closed = True
            error = ChannelClosedError(f"channel {self.name!r} was closed while its caller waited")
            self._turn_away(error, wakes)
            self._release_thread()
        wakes.pay()

    def statistics(self) -> TaskChannelStatistics:
        """Counters and gauges of this moment."""
        with LOCK:
            order = self._order
            running = order.running
            return TaskChannelStatistics(
                name=self.name,
                queued=order.waiting,
                running=int(running is not None or order.ahead > 0),
                in_flight=order.in_flight,
                waiting_for_room=len(order.room or ()),
                submitted=self._submitted,
                failed=self._failed,
                cancelled=self._cancelled,
                abandoned=int(running is not None and running._state > RUNNING),
                max_pending=order.max_pending,
                max_in_flight=order.max_in_flight,
                closed=order.closed,
            )

    async def __aenter__(self) -> TaskChannel:
        """Make this the task's channel until the block is left."""
        self._activate()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._deactivate()

    def _activate(self) -> None:
        position = current_position(_get_running_loop())
        with LOCK:
            if position.active is None:
                position.active = []
            position.active.append(self)
            if self._activations is None:
                self._activations = []
            self._activations.append(position)

    def _deactivate(self) -> None:
        position = current_position(_get_running_loop())
        with LOCK:
            activations = self._activations or []
            if position not in activations:  # left by another task than entered it
                position = activations[-1]
            activations.remove(position)
            assert position.active is not None
            last = len(position.active) - 1 - position.active[::-1].index(self)
            del position.active[last]

    def _refuse_own_body(self, what: str) -> None:
        call: Any = local.call
        if call is None:
            call = waiting_body()
        running = self._order.running
        if running is not None and running is call:
            raise DeadlockError(
                f"{what} of channel {self.name!r} was called inside the body of {running._plan.name}, "
                "which runs in that channel: it would wait for itself"
            )

    # -- called by calls and workers, under the lock ----------------------------------------------------

    def _resume(self) -> None:
        if self._order.claim():
            pool.schedule(self)

    def _call_left_queue(self, wakes: Wakes) -> None:
        order = self._order
        order.settled_in_queue()
        if order.room:
            self._admit(wakes)
        if order.claim():
            pool.schedule(self)
        if order.gate.parked:  # the call may have held the gate's room without having started
            self._hand_out(order.gate.admit())
        if order.idle:
            self._became_idle(wakes)

    def _call_failed(self, error: BaseException, wakes: Wakes, *, cancelled: bool) -> None:
        if cancelled:
            self._cancelled += 1
        else:
            self._failed += 1
        order = self._order
        if order.on_error == "stop" and order.stopped is None:
            dead = order.stop(error)
            self._turn_away(stopped_error(self.name, error), wakes)
            for call in dead:
                call._fail(wakes, stopped_error(self.name, error), None)
                if call._report is not None:
                    call._report.retrieve()  # the failure behind it is reported, not each victim

    def _turn_away(self, error: BaseException, wakes: Wakes) -> None:
        for ticket in self._order.turn_away():
            ticket.error = error
            ticket.waiter.wake(wakes)
            if ticket.call._object is not None:
                ticket.call._object.call_over(wakes)

    def _admit(self, wakes: Wakes) -> None:
        while (ticket := self._order.admit()) is not None:
            take(ticket.call)
            ticket.waiter.wake(wakes)
        self._resume()

    def _give_up(self, ticket: Ticket[Call]) -> None:
        """The submitter was cancelled; nobody will have the future of a call that got in."""
        wakes = Wakes()
        with LOCK:
            room = self._order.room
            if room and ticket in room:
                room.remove(ticket)
                if ticket.call._object is not None:
                    ticket.call._object.call_over(wakes)
            elif ticket.error is None:
                ticket.call._cancel(wakes, ": its submitter was cancelled")
        wakes.pay()

    def _became_idle(self, wakes: Wakes) -> None:
        pool.lanes.discard(self)
        waiters, self._idle_waiters = self._idle_waiters, None
        for waiter in waiters or ():
            waiter.wake(wakes)
        if self._worker is not None:
            self._release_thread()

    def _leave_gate(self, call: Call) -> None:
        self._hand_out(gate.leave(call))

    @staticmethod
    def _hand_out(orders: list[ChannelOrder[Call]]) -> None:
        for order in orders:
            pool.schedule(order.lane)

    def _release_thread(self) -> None:
        if self._worker is not None and self._order.closed and self._order.idle:
            worker, self._worker = self._worker, None
            pool.release(worker)


# --- the current channel --------------------------------------------------------------------------


class _Position:
    """The channels of one task or thread: its own, and those it has activated."""

    __slots__ = ("__weakref__", "active", "own")

    def __init__(self, name: str) -> None:
        self.own = new_channel(name)
        self.active: list[TaskChannel] | None = None


# Keyed by the task itself: a context variable would be shared by tasks that share a context.
_tasks: weakref.WeakKeyDictionary[asyncio.Task[Any], _Position] = weakref.WeakKeyDictionary()
_get_running_loop = asyncio._get_running_loop
_current_task = asyncio.current_task


def new_channel(name: str | None = None) -> TaskChannel:
    """An unbounded channel: of a task, a thread, a body, or one concurrent call."""
    channel = TaskChannel.__new__(TaskChannel)
    channel._setup(name)
    return channel


def current_position(loop: asyncio.AbstractEventLoop | None) -> _Position:
    """The position of the task that runs on ``loop``, the thread's own, else the thread's."""
    if loop is not None:
        task = _current_task(loop)
        if task is not None:
            position = _tasks.get(task)
            if position is None:
                position = _tasks[task] = _Position(task.get_name())
            return position
    thread_position: _Position | None = local.position
    if thread_position is None:
        thread_position = local.position = _Position(threading.current_thread().name)
    return thread_position


def current_channel(loop: asyncio.AbstractEventLoop | None) -> TaskChannel:
    """Where a call goes that names no channel (contract of the current channel).

    A task's activated channel, else the task's own; in a body, the body's own; in other threads, and
    in callbacks of ``call_soon``, the thread's own.

    Args:
        loop: the one that runs on this thread. Finding it takes a system call on Python 3.11, so
            whoever submits a call does so once.
    """
    call: Call | None = local.call
    if call is not None and loop is None:
        nested: TaskChannel | None = call._nested_channel
        if nested is None:
            nested = call._nested_channel = new_channel()
            nested._nested = True
        return nested
    position = current_position(loop)
    if position.active:
        return position.active[-1]
    return position.own
