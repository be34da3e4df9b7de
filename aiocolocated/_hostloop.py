# SPDX-License-Identifier: Apache-2.0
"""The host's own event loop, in a thread of the library: coroutine bodies run on it.

It starts with the first coroutine body, or when :mod:`aiocolocated.from_thread` has no better loop,
and ends with the interpreter. It is uvloop's where that is installed.
"""

from __future__ import annotations

import asyncio
import threading

from aiocolocated import _service
from aiocolocated._exceptions import ShutdownError
from aiocolocated._loops import LoopBridge, bridge_for
from aiocolocated._settings import LOCK
from aiocolocated._workers import pool


class HostLoop:
    """A running loop, with the bridge that wakes it."""

    __slots__ = ("bridge", "loop", "ready")

    def __init__(self) -> None:
        self.loop = _new_loop()
        self.bridge: LoopBridge | None = None
        self.ready = threading.Event()

    def serve(self) -> None:
        """Run the loop until the interpreter exits (its own thread)."""

        async def stay() -> None:
            stop = asyncio.Event()
            _service.at_stop(
                lambda: self.loop.is_closed() or self.loop.call_soon_threadsafe(stop.set)
            )
            self.bridge = bridge_for(self.loop)
            self.ready.set()
            await stop.wait()

        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(stay())

    def refused(self) -> None:
        """No thread could be started."""
        self.loop.close()
        self.ready.set()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


_current: HostLoop | None = None


def host_loop() -> HostLoop:
    """The loop, started on first use. Waits for that: not for a running loop's thread.

    Raises:
        ShutdownError: the interpreter is exiting and the loop has ended.
        RuntimeError: its thread could not be started.
    """
    global _current
    with LOCK:
        if pool.ended:
            raise ShutdownError("the interpreter is exiting: the library's event loop has ended")
        host = _current
        if host is None or host.loop.is_closed():
            host = _current = HostLoop()
            _service.start_thread(host.serve, "aiocolocated-loop", host.refused)
    host.ready.wait()
    if host.loop.is_closed():
        raise RuntimeError("the thread of the library's event loop could not be started")
    return host
