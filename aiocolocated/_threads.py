# SPDX-License-Identifier: Apache-2.0
"""Objects that are bound to a thread: their bodies run there and nowhere else."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from aiocolocated import _compat, _contexts, _service
from aiocolocated._exceptions import ObjectClosedError
from aiocolocated._loops import Wakes
from aiocolocated._settings import LOCK
from aiocolocated._workers import local, pool


class OwnThread:
    """A thread that runs bodies one after the other, until it is stopped."""

    __slots__ = ("_bodies", "_name", "_started", "_stopped")

    def __init__(self, name: str) -> None:
        self._name = name
        self._bodies: SimpleQueue[ThreadBody | None] = SimpleQueue()
        self._started = False
        self._stopped = False

    def put(self, body: ThreadBody) -> None:
        """Run a body after those before it (worker thread)."""
        with LOCK:
            stopped = self._stopped
            if not stopped:
                self._bodies.put(body)
        if stopped:
            body.fail(ObjectClosedError(f"{self._name} has ended: its object is closed"))
        elif not self._started:
            self._started = True
            _service.start_thread(self._serve, self._name, self._refused)

    def stop(self) -> None:
        """End the thread when the bodies are over."""
        with LOCK:
            self._stopped = True
            self._bodies.put(None)

    def _serve(self) -> None:
        while (body := self._bodies.get()) is not None:
            body.run()
            del body  # or it is held until the next one comes

    def _refused(self) -> None:
        """The system has no more threads: whoever waits hears it."""
        self._started = False
        while not self._bodies.empty():
            body = self._bodies.get()
            if body is not None:
                body.fail(RuntimeError(f"thread {self._name} could not be started"))


class ThreadBody:
    """One body on an object's own thread; its channel stays claimed meanwhile."""

    __slots__ = ("_call", "_context", "_function", "config", "error", "options", "value")

    def __init__(
        self,
        call: Any,
        function: Callable[[], Any],
        context: contextvars.Context,
        config: _compat.Snapshot | None,
        options: tuple[tuple[str, Any], ...],
    ) -> None:
        self._call: Any = call
        self._function: Callable[[], Any] | None = function
        self._context = context
        self.config = config
        self.options = options
        self.value: Any = None
        self.error: BaseException | None = None

    def cancel(self, wakes: Wakes) -> None:
        """A plain body cannot be interrupted."""

    def run(self) -> None:
        call, function = self._call, self._function
        self._function = None
        assert function is not None
        local.call = call
        try:
            _compat.set_execution_stream(call._channel._stream)
            with _contexts.in_force(self.config, self.options):
                self.value = self._context.run(function)
        except BaseException as error:
            self.error = error
        finally:
            local.call = None
            _compat.set_execution_stream(0)
            del function
        self._ended(call)

    def fail(self, error: BaseException) -> None:
        self.error = error
        self._function = None
        self._ended(self._call)

    def _ended(self, call: Any) -> None:
        self._call = None
        with LOCK:
            pool.schedule(call._channel)  # a worker settles
