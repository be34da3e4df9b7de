# SPDX-License-Identifier: Apache-2.0
"""What waits for a call: tasks on loops, threads, callbacks."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import Any, Protocol

from aiocolocated import _service
from aiocolocated._exceptions import WorkerLimitError
from aiocolocated._loops import LoopBridge, LoopCallback, Wakes
from aiocolocated._settings import LOCK
from aiocolocated._workers import local, pool


class Waiter(Protocol):
    def wake(self, wakes: Wakes) -> None:
        """Called once, under the lock, when the call has got so far; must not run user code."""


class LoopWaiter:
    """A task that waits on a loop."""

    __slots__ = ("bridge", "future")

    def __init__(self, bridge: LoopBridge, future: asyncio.Future[None]) -> None:
        self.bridge = bridge
        self.future = future

    def wake(self, wakes: Wakes) -> None:
        self.bridge.post(self.future)
        wakes.bridge(self.bridge)


class ThreadWaiter:
    """A thread that waits."""

    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()

    def wake(self, wakes: Wakes) -> None:
        self.lock.release()


class Callback:
    """A done callback: on the loop that added it or, without one, on the completing thread."""

    __slots__ = ("bridge", "entry")

    def __init__(self, entry: LoopCallback, bridge: LoopBridge | None) -> None:
        self.entry = entry
        self.bridge = bridge

    def wake(self, wakes: Wakes) -> None:
        if self.bridge is not None:
            self.bridge.post(self.entry)
            wakes.bridge(self.bridge)
        else:
            wakes.callback(self._deliver)

    def _deliver(self) -> None:
        if threading.current_thread().name == _service.THREAD_NAME:
            # It polls for everybody: user code must not hold it up.
            _service.start_thread(self._run, "aiocolocated-callback")
        else:
            self._run()

    def _run(self) -> None:
        entry = self.entry
        try:
            entry.context.run(entry.function, entry.argument)
        except BaseException:  # SystemExit too: it would end the thread that serves others
            _service.logger.exception("a done callback of %r failed", entry.argument)


class waiting:
    """Context manager: this thread waits inside the library, its worker slot is free meanwhile."""

    __slots__ = ("_worker",)

    def __enter__(self) -> None:
        self._worker = local.worker
        if self._worker is not None:
            with LOCK:
                granted = pool.begin_wait(self._worker)
            if not granted:
                self._worker = None
                raise WorkerLimitError(
                    f"{pool.waiting} bodies wait for others already, which keeps their threads "
                    "(worker_ceiling); await futures outside of bodies, or pass them as arguments"
                )

    def __exit__(self, *exc: object) -> None:
        if self._worker is not None:
            with LOCK:
                pool.end_wait(self._worker)


# --- bodies ---------------------------------------------------------------------------------------


class BodyWait:
    """A body that waits for a coroutine, see `from_thread`."""

    __slots__ = ("call", "task")

    def __init__(self, call: Any) -> None:
        self.call = call  # until the wait is over: tasks inherit the variable
        self.task: asyncio.Task[Any] | None = None


# Set in the coroutine, and in the tasks that it starts.
body_wait: contextvars.ContextVar[BodyWait | None] = contextvars.ContextVar(
    "aiocolocated_body_wait", default=None
)


def own_body() -> Any:
    """The call whose body runs here, or waits for the code that does."""
    call = local.call
    return waiting_body() if call is None else call


def waiting_body() -> Any:
    """The call whose body waits for the code that runs here."""
    wait = body_wait.get()
    return None if wait is None else wait.call
