# SPDX-License-Identifier: Apache-2.0
"""The host's own event loop, in a thread of the library: coroutine bodies run on it.

It starts with the first coroutine body, or when :mod:`aiocolocated.from_thread` has no better loop,
and ends with the interpreter. It is uvloop's where that is installed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable

# For its exit hook, which has to be registered before the library's, to run after it: bodies use
# executors while the interpreter waits for them, and uvloop is imported then.
from concurrent.futures import thread as _  # noqa: F401
from typing import Any

from aiocolocated import _service
from aiocolocated._exceptions import ShutdownError
from aiocolocated._loops import LoopBridge, bridge_for
from aiocolocated._settings import LOCK
from aiocolocated._workers import pool

logger = logging.getLogger("aiocolocated")


class HostLoop:
    """A running loop, with the bridge that wakes it."""

    __slots__ = ("bridge", "callbacks", "loop", "name", "occupants", "place", "ready")

    def __init__(self, loop: asyncio.AbstractEventLoop, place: int) -> None:
        self.loop = loop
        self.place = place
        self.name = "aiocolocated-loop" + (f"-{place + 1}" if place else "")
        self.bridge: LoopBridge | None = None
        self.ready = threading.Event()
        # For each program with callbacks that its thread runs inline now, the call whose body
        # dispatched it, if one did.
        self.occupants: list[Any] = []
        self.callbacks: set[asyncio.Task[None]] = set()  # that have begun here

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
            staying = runner.get_loop().create_task(stay())
            while not (staying.done() or self.loop.is_closed()):
                # A task or callback that a body has started may end a loop by SystemExit, and may
                # stop it. Other bodies run on this one: it goes on.
                try:
                    self.loop.run_until_complete(staying)
                except BaseException:
                    logger.exception("something on the library's event loop tried to end it")

    def has_other_callbacks(self) -> bool:
        """Whether blocking this thread, which runs the loop, would stop callbacks but its own."""
        return bool(self.callbacks - {asyncio.current_task()})

    def refused(self) -> None:
        """No thread could be started."""
        self.loop.close()
        self.ready.set()


@functools.cache
def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


# The first is the host's. Others exist once the thread of the one before had to wait for a callback.
_loops: list[HostLoop] = []


def host_loop() -> HostLoop:
    """The loop, started on first use. Waits for that: not for a running loop's thread.

    Raises:
        ShutdownError: the interpreter is exiting and the loop has ended.
        RuntimeError: its thread could not be started.
    """
    return _running_loop(0)


def next_loop(stuck: HostLoop | None = None) -> HostLoop:
    """A loop for a callback's coroutine: the host's, or on the thread of one the one after it.

    So the threads of no two can wait for each other. One that does not come to begin the coroutine is
    ``stuck``, and it is given to the next.
    """
    before = of_this_thread() if stuck is None else stuck
    return _running_loop(0 if before is None else before.place + 1)


def of_this_thread() -> HostLoop | None:
    """The library's loop that runs on this thread."""
    here = asyncio._get_running_loop()
    if here is None:
        return None
    return next((host for host in _loops if host.loop is here), None)


def occupants() -> list[Any]:
    """The calls whose bodies have the host's loop run a program inline."""
    return [call for call in _loops[0].occupants if call is not None] if _loops else []


def _running_loop(place: int) -> HostLoop:
    new_loop = _loop_factory()  # an import, so not under the lock
    with LOCK:
        if pool.ended:
            raise ShutdownError("the interpreter is exiting: the library's event loop has ended")
        if place < len(_loops) and not _loops[place].loop.is_closed():
            host = _loops[place]
        else:
            host = HostLoop(new_loop(), place)
            _loops[place : place + 1] = [host]
            _service.start_thread(host.serve, host.name, host.refused)
    host.ready.wait()
    if host.loop.is_closed():
        raise RuntimeError("the thread of the library's event loop could not be started")
    return host
