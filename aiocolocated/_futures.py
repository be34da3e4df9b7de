# SPDX-License-Identifier: Apache-2.0
"""Array futures: what a call returns, and how to wait for it from tasks and threads."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Generator
from time import monotonic
from typing import Any, Generic, NoReturn, TypeVar, cast, final

from aiocolocated import _service
from aiocolocated._calls import Call
from aiocolocated._deadlocks import refuse_cycle
from aiocolocated._exceptions import BodyError, CallCancelledError, DeadlockError
from aiocolocated._execution import RunnableCall
from aiocolocated._loops import LoopCallback, Wakes, bridge_for
from aiocolocated._raising import set_traceback
from aiocolocated._settings import LOCK
from aiocolocated._types import CANCELLED, DISPATCHED, FAILED, QUEUED, READY, RUNNING, CallState
from aiocolocated._waiters import Callback, LoopWaiter, ThreadWaiter, body_wait, waiting
from aiocolocated._workers import local, pool

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


@final
class ArrayFuture(RunnableCall, Generic[R_co]):
    """What a colocated call returns at once: awaitable, resolves to the body's result.

    The call is submitted already and runs whether or not anybody awaits it. ``await fut`` gives the
    tree that the body returned when every :class:`jax.Array` in it is computed, or raises what the
    body or the computation raised. It may be awaited many times, from several tasks, loops and
    threads, and passed to other colocated calls, whose bodies see the arrays.

    Made by calling a colocated function, :meth:`TaskChannel.submit`, :meth:`TaskChannel.run` or
    :meth:`TaskGroup.start_soon`; never directly.

    Ordering: the call's place in its channel was fixed by the call expression; awaiting changes
    nothing.

    Cancellation: a task that is cancelled while it waits stops waiting; if it was the last waiter,
    the call is cancelled too (:meth:`cancel`). :func:`asyncio.shield` keeps one waiter.

    Thread safety: every method may be called from any thread. Waiting synchronously on a running
    loop's thread raises :exc:`DeadlockError`.

    Example:
        >>> fut = f(x)                             # submitted
        >>> y = await fut                          # computed

    Source: :class:`asyncio.Future` for the method names; JAX's asynchronous dispatch for the two
    stages *dispatched* and *ready*.

    .. versionadded:: 0.1
    """

    __slots__ = ()

    def __init__(self) -> None:
        raise TypeError(
            "ArrayFuture is not made directly: call a colocated function, or use TaskChannel.submit"
        )

    # -- looking ---------------------------------------------------------------------------------

    def done(self) -> bool:
        """Whether the call is ready, failed or cancelled."""
        return self._state >= READY

    def cancelled(self) -> bool:
        """Whether the call was cancelled."""
        return self._state == CANCELLED

    def dispatched(self) -> bool:
        """Whether the body has returned (its arrays may still be computing), or the call is done."""
        return self._state >= DISPATCHED

    @property
    def state(self) -> CallState:
        """Where the call is, as a :class:`CallState`."""
        return CallState(self._state)

    def __repr__(self) -> str:
        return (
            f"<ArrayFuture {self._plan.name} {CallState(self._state).name.lower()}"
            f" channel={self._channel.name!r} submitted at {self._where()}>"
        )

    # -- awaiting ----------------------------------------------------------------------------------

    def __await__(self) -> Generator[Any, None, R_co]:
        if self._state < READY:
            yield from self._suspend(READY)
        try:
            return self._outcome()
        finally:
            del self  # a traceback keeps this frame, the future keeps the traceback

    async def wait_dispatched(self) -> R_co:
        """Wait until the body has returned; its arrays may still be computing.

        Returns:
            The body's tree. Passing its arrays to JAX or to other calls needs no further wait.

        Raises:
            Exception: what the body raised. An error of the computation itself is raised by
                ``await fut``.
            CallCancelledError: the call was cancelled by somebody else.

        Cancellation: as for ``await fut``.
        """
        if self._state < DISPATCHED:
            await _Suspension(self, DISPATCHED)
        try:
            if self._state == DISPATCHED:
                return cast("R_co", self._value)
            return self._outcome()
        finally:
            del self

    def _suspend(self, phase: int, cancels: bool = True) -> Generator[Any, None, None]:
        loop = asyncio.get_running_loop()
        waiter = LoopWaiter(bridge_for(loop), loop.create_future())
        wait = body_wait.get()
        body = None if wait is None else wait.call
        if wait is not None and body is not None:
            with LOCK:
                refuse_cycle(self, body)
                if wait.task is asyncio.current_task():
                    body._waiting_on = self
        try:
            if not self._add_waiter(waiter, phase):
                return
            try:
                yield from waiter.future
            except BaseException as error:
                self._drop_waiter(waiter, phase, cancelled=cancels)
                if self._state == FAILED and self._report is not None:
                    self._report.retrieve()  # it came together with the cancellation, as with asyncio
                if cancels and isinstance(error, asyncio.CancelledError):
                    yield from self._clean_up().__await__()
                raise
        finally:
            if body is not None and body._waiting_on is self:
                body._waiting_on = None

    async def _clean_up(self) -> None:
        """Wait for the clean-up of a coroutine that the last waiter's cancellation has cancelled.

        As a task does that awaits the coroutine itself. A second cancellation ends the wait.
        """
        loop = asyncio.get_running_loop()
        waiter = LoopWaiter(bridge_for(loop), loop.create_future())
        with LOCK:
            running = self._light and self._thread is None and self._channel._order.running is self
            if self._sent:
                running = cast("Any", self._plan).asynchronous
            if self._state != CANCELLED or not running:
                return
            if self._over_waiters is None:
                self._over_waiters = []
            self._over_waiters.append(waiter)
        await waiter.future

    def _outcome(self) -> R_co:
        if self._state == READY:
            return cast("R_co", self._value)
        try:
            if self._report is not None:
                self._report.retrieve()
            if self._state == CANCELLED:
                raise CallCancelledError(*self._value.args)
            raise set_traceback(self._value, self._traceback)
        finally:
            del self

    # -- synchronous bridge ---------------------------------------------------------------------------

    def result(self, timeout: float | None = None) -> R_co:
        """Wait in this thread and return the body's tree.

        Args:
            timeout: seconds; ``None`` waits for ever. A finished future never waits.

        Raises:
            TimeoutError: time ran out; the call goes on. The message says how far it got.
            DeadlockError: on a running loop's thread, or in a body that would wait for itself.
            WorkerLimitError: in a body, too many others wait already.
            CallCancelledError: the call was cancelled.
            Exception: what the body or the computation raised.

        Cancellation: none; Ctrl-C ends the wait and leaves the call alone.
        """
        if self._state < READY:
            self._block(timeout)
        try:
            return self._outcome()
        finally:
            del self

    def block_until_ready(self) -> R_co:
        """Wait in this thread until every array is computed, and return the tree.

        Lets :func:`jax.block_until_ready` wait for trees of futures (it returns the futures).

        Raises:
            BodyError: the body raised ``AttributeError`` (its cause), which JAX would swallow.
            Exception: as for :meth:`result`.
        """
        try:
            return self.result()
        except AttributeError as error:
            raise BodyError(f"{self._plan.name} raised AttributeError: {error}") from error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error of a failed call, ``None`` after success; waits like :meth:`result`.

        Raises:
            CallCancelledError: the call was cancelled.
        """
        if self._state < READY:
            self._block(timeout)
        if self._state == FAILED:
            if self._report is not None:
                self._report.retrieve()
            return cast("BaseException", self._value)
        if self._state == CANCELLED:
            raise CallCancelledError(*self._value.args)
        return None

    def _block(self, timeout: float | None) -> None:
        if asyncio._get_running_loop() is not None:
            raise DeadlockError(
                f"{self._plan.name} is not finished and this is a running event loop's thread: "
                "waiting here would stop the loop. Use 'await fut' instead."
            )
        waiter = ThreadWaiter()
        call: Call | None = local.call
        with LOCK:
            if call is not None:
                refuse_cycle(self, call)
            if not self._add_waiter(waiter, READY):
                return
            if call is not None:
                call._waiting_on = self
        try:
            with waiting():
                seconds = -1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
                if _service.exiting:
                    woken = pool.wait_at_exit(waiter.lock, seconds, self._channel)
                else:
                    woken = waiter.lock.acquire(timeout=seconds)
        finally:
            if call is not None:
                call._waiting_on = None
            self._drop_waiter(waiter, READY, cancelled=False)
        if not woken and self._state < READY:
            raise TimeoutError(
                f"{self._plan.name} is {self._progress()} after {timeout} s "
                f"(submitted {monotonic() - self._submitted:.3f} s ago at {self._where()})"
            )

    def _progress(self) -> str:
        return {
            QUEUED: f"still queued in channel {self._channel.name!r}",
            RUNNING: "still running",
            DISPATCHED: "still waiting for its arrays",
        }.get(self._state, "done")

    # -- callbacks ------------------------------------------------------------------------------------

    def add_done_callback(
        self,
        fn: Callable[[ArrayFuture[R_co]], object],
        *,
        context: contextvars.Context | None = None,
    ) -> None:
        """Call ``fn(fut)`` once the call is done.

        On a running loop's thread: later on that loop, as :class:`asyncio.Future` does. Elsewhere:
        on the thread that completes the call, or at once if it is done, as
        :class:`concurrent.futures.Future` does; its exceptions are logged.

        A callback is no waiter: it does not keep the call from being cancelled.
        """
        loop = asyncio._get_running_loop()
        callback = Callback(
            LoopCallback(fn, self, context or contextvars.copy_context()),
            None if loop is None else bridge_for(loop),
        )
        with LOCK:
            if self._state < READY:
                if self._waiters is None:
                    self._waiters = []
                self._waiters.append(callback)
                return
        wakes = Wakes()
        callback.wake(wakes)
        wakes.pay()

    def remove_done_callback(self, fn: Callable[[ArrayFuture[R_co]], object]) -> int:
        """Remove every callback equal to ``fn``; the number removed."""
        with LOCK:
            waiters = self._waiters or []
            kept = [w for w in waiters if not (isinstance(w, Callback) and w.entry.function == fn)]
            if len(kept) < len(waiters):
                self._waiters = kept
            return len(waiters) - len(kept)

    # -- cancelling -----------------------------------------------------------------------------------

    def cancel(self, msg: object = None) -> bool:
        """Cancel the call; false if it is done already.

        A queued call never runs. The body of a running call cannot be interrupted: its waiters get
        :exc:`CallCancelledError` at once, its result is thrown away, and its channel's slot and its
        owner block stay occupied until it returns. Calls that depend on this one are cancelled too.

        Args:
            msg: added to the error's message, as for :meth:`asyncio.Future.cancel`.
        """
        wakes = Wakes()
        why = "" if msg is None else f": {msg}"  # user code, so not under the lock
        with LOCK:
            cancelled = self._cancel(wakes, why)
        wakes.pay()
        return cancelled

    # -- misuse in words --------------------------------------------------------------------------------

    def __index__(self) -> NoReturn:
        raise TypeError(f"an ArrayFuture is no number: await it first ({self!r})")

    def __bool__(self) -> NoReturn:
        raise TypeError(f"an ArrayFuture has no truth value: await it first ({self!r})")

    def __iter__(self) -> NoReturn:
        raise TypeError(f"an ArrayFuture is not iterable: await it first ({self!r})")

    @property
    def __jax_array__(self) -> NoReturn:
        # A property: JAX looks for the attribute first, and has words of its own for a method. No
        # TypeError either, of which JAX makes another one that talks of static arguments.
        raise ValueError(
            f"an ArrayFuture is no array: await it first, or pass it to a colocated function or "
            f"TaskChannel.run, which wait for it ({self!r})"
        )

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        raise TypeError(f"an ArrayFuture is no array: await it first ({self!r})")

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"an ArrayFuture cannot be pickled: await it, or pass it as an argument ({self!r})"
        )


class _Suspension:
    """Awaits one stage of a call from a coroutine."""

    __slots__ = ("_call", "_cancels", "_phase")

    def __init__(self, call: ArrayFuture[Any], phase: int, cancels: bool = True) -> None:
        self._call = call
        self._cancels = cancels
        self._phase = phase

    def __await__(self) -> Generator[Any, None, None]:
        return self._call._suspend(self._phase, self._cancels)


async def wait_for_call(call: ArrayFuture[R]) -> R:
    """Await a call that goes on when its waiter is cancelled."""
    if call._state < READY:
        await _Suspension(call, READY, cancels=False)
    try:
        return call._outcome()
    finally:
        del call


def as_argument(future: ArrayFuture[R]) -> R:
    """The future itself, typed as its result, to be passed to another colocated call.

    A future may be an argument of a later call; the body sees the arrays. This identity only tells
    type checkers so.

    Example:
        >>> z = await g(as_argument(f(x)))

    .. versionadded:: 0.1
    """
    return cast("R", future)
