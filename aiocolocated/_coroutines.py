# SPDX-License-Identifier: Apache-2.0
"""Coroutine bodies: how one runs on the host's loop, and how it is cancelled there."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, Protocol

from aiocolocated import _compat, _contexts
from aiocolocated._hostloop import HostLoop
from aiocolocated._loops import LoopCallback, Wakes
from aiocolocated._types import RUNNING
from aiocolocated._waiters import BodyWait, body_wait
from aiocolocated._workers import pool

if TYPE_CHECKING:
    from aiocolocated._workers import Lane


class _Call(Protocol):
    _state: int

    @property
    def _channel(self) -> Lane: ...


class CoroutineBody:
    """One coroutine body, from the worker that made the coroutine to the worker that settles.

    In between it is a task of the host's loop, in the context of the submission. The call's channel
    stays claimed, so nothing else of the channel runs, and no worker is held.
    """

    __slots__ = (
        "_awaitable",
        "_call",
        "_context",
        "_host",
        "_one_task",
        "_stream",
        "_task",
        "cancelled",
        "config",
        "error",
        "options",
        "value",
    )

    def __init__(
        self,
        call: _Call,
        awaitable: Awaitable[Any],
        context: contextvars.Context,
        host: HostLoop,
        config: _compat.Snapshot | None,
        options: tuple[tuple[str, Any], ...],
        one_task: OneTask | None = None,
    ) -> None:
        self._call: Any = call
        self._awaitable: Awaitable[Any] | None = awaitable
        self._context = context
        self._host = host
        self._stream = call._channel._stream
        self._one_task = one_task
        self._task: asyncio.Task[None] | _Turn | None = None
        self.config = config
        self.options = options
        self.value: Any = None
        self.error: BaseException | None = None
        self.cancelled = False  # while it ran

    def start(self) -> None:
        """Have the loop start it (worker thread, or the loop's)."""
        if asyncio._get_running_loop() is self._host.loop:
            self._start(None)
        else:
            self._tell(self._start)

    def cancel(self, wakes: Wakes) -> None:
        """Have the loop cancel it (any thread, under the lock)."""
        assert self._host.bridge is not None
        self._host.bridge.post(LoopCallback(self._cancel, None, contextvars.Context()))
        wakes.bridge(self._host.bridge)

    def _tell(self, function: Any) -> None:
        assert self._host.bridge is not None
        self._host.bridge.post(LoopCallback(function, None, contextvars.Context()))
        self._host.bridge.notify()

    # -- on the loop ------------------------------------------------------------------------------

    def _start(self, _: object) -> None:
        if self._call._state != RUNNING:  # cancelled on the way: nothing of it has run
            self._ended()
            return
        name = f"aiocolocated {self._call._plan.name}"
        where = self._one_task or self._host.loop
        self._task = where.create_task(self._run(), name=name, context=self._context)
        # Also when it is cancelled before its first step.
        self._task.add_done_callback(self._ended, context=contextvars.Context())

    def _cancel(self, _: object) -> None:
        if self._task is not None:
            self.cancelled = self._task.cancel() is not False

    async def _run(self) -> None:
        wait = BodyWait(self._call)
        wait.task = asyncio.current_task()
        body_wait.set(wait)  # so that waiting for what this body stands in the way of is refused
        try:
            self.value = await self
        except BaseException as error:
            self.error = error
        finally:
            wait.call = wait.task = None  # contexts are copied, and tasks keep theirs
            del self

    def __await__(self) -> Generator[Any, Any, Any]:
        awaitable, self._awaitable = self._awaitable, None
        assert awaitable is not None
        return steps_of(awaitable, self._stream, self.config, self.options)

    def _ended(self, _: object = None) -> None:
        if self._awaitable is not None:  # it never began
            _close(self._awaitable)
            self._awaitable = None
            self.error = asyncio.CancelledError()
        call, self._call = self._call, None
        self._task = None
        pool.go_on(call._channel)


def steps_of(
    awaitable: Awaitable[Any],
    stream: int,
    config: _compat.Snapshot | None,
    options: tuple[tuple[str, Any], ...] = (),
) -> Generator[Any, Any, Any]:
    """Drive an awaitable; each step on an execution stream and in a JAX configuration.

    None of that may be in force while it waits: other bodies run on this thread then.
    """
    steps = awaitable.__await__()
    del awaitable
    sent: Any = None
    thrown: BaseException | None = None
    try:
        while True:
            _compat.set_execution_stream(stream)
            try:
                if config is None and not options:
                    waiting_for = _step(steps, sent, thrown)
                else:
                    with _contexts.in_force(config, options):
                        waiting_for = _step(steps, sent, thrown)
            except StopIteration as stop:
                return stop.value
            finally:
                _compat.set_execution_stream(0)
                thrown = None
            try:
                sent = yield waiting_for
            except BaseException as error:  # cancelled, or the coroutine is closed
                thrown = error
            del waiting_for
    finally:
        del steps, sent


class OneTask:
    """Runs coroutine bodies one after the other in one task of the host's loop.

    For the steps of an asynchronous generator: a timeout or task group that is open across a
    ``yield`` belongs to the task that entered it.
    """

    __slots__ = ("_current", "_next", "_stopped", "_task", "_wake")

    def __init__(self) -> None:
        self._current: _Turn | None = None
        self._next: _Turn | None = None
        self._stopped = False
        self._task: asyncio.Task[None] | None = None
        self._wake: asyncio.Future[None] | None = None

    def create_task(
        self, coroutine: Coroutine[Any, Any, None], *, name: str, context: contextvars.Context
    ) -> _Turn:
        """Run a coroutine when the one before it is over (on the loop)."""
        step = self._next = _Turn(self, coroutine)
        if self._task is None or self._task.done():  # after `stop`, what was read ahead
            self._task = asyncio.get_running_loop().create_task(
                self._run(), name=name, context=context
            )
        self._go_on()
        return step

    def stop(self) -> None:
        """End the task when what it runs is over (on the loop)."""
        self._stopped = True
        self._go_on()

    def cancel(self, step: _Turn) -> None:
        if self._task is not None and self._current is step:
            self._task.cancel()

    def _go_on(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _run(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        struck = False
        while True:
            step, self._next = self._next, None
            if step is not None:
                self._current = step
                if struck:
                    struck = False
                    task.cancel()
                await step.run()
                self._current = None
                while task.cancelling():  # that was meant for the step
                    task.uncancel()
                step.over()
                del step
            elif self._stopped:
                return
            else:
                self._wake = task.get_loop().create_future()
                try:
                    await self._wake
                except asyncio.CancelledError:
                    if pool.ended:
                        raise
                    # By a timeout or task group that is open across a yield: the next step gets it.
                    task.uncancel()
                    struck = True


class _Turn:
    """What :class:`OneTask` runs, with as much of a task's interface as its user needs."""

    __slots__ = ("_callback", "_cancelled", "_coroutine", "_one_task")

    def __init__(self, one_task: OneTask, coroutine: Coroutine[Any, Any, None]) -> None:
        self._one_task = one_task
        self._coroutine = coroutine
        self._cancelled = False
        self._callback: Callable[[], object] = lambda: None

    def cancel(self) -> None:
        self._cancelled = True
        self._one_task.cancel(self)

    def add_done_callback(
        self, function: Callable[[object], object], *, context: contextvars.Context
    ) -> None:
        call_soon = asyncio.get_running_loop().call_soon
        self._callback = lambda: call_soon(function, None, context=context)

    async def run(self) -> None:
        coroutine, cancelled = self._coroutine, self._cancelled
        del self  # tracebacks of what fails have this frame, and this leads to the error again
        if cancelled:
            coroutine.close()
        else:
            await coroutine  # raises nothing

    def over(self) -> None:
        self._callback()


def _step(steps: Generator[Any, Any, Any], sent: Any, thrown: BaseException | None) -> Any:
    if thrown is None:
        return steps.send(sent)
    try:
        return steps.throw(thrown)
    finally:
        del thrown


def _close(awaitable: Any) -> None:
    close = getattr(awaitable, "close", None)
    if close is not None:
        close()
