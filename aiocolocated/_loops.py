# SPDX-License-Identifier: Apache-2.0
"""Waking event loops from other threads: one eventfd per loop, many completions per wake-up."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

# asyncio's own wake-up (`call_soon_threadsafe`) costs 54 us there and back on the reference machine,
# an eventfd read by `add_reader` 28-32 us.
_PER_ITERATION = 256


class LoopCallback:
    """A function to be called on a loop, in order with the futures that are completed there."""

    __slots__ = ("argument", "context", "function")

    def __init__(
        self, function: Callable[[Any], object], argument: Any, context: contextvars.Context
    ) -> None:
        self.function = function
        self.argument = argument
        self.context = context


class LoopBridge:
    """Completes futures of one loop from any thread.

    ``post`` queues a future, ``notify`` wakes the loop; workers post as they go and notify last,
    just before they block or start another body.
    """

    __slots__ = ("__weakref__", "_armed", "_closer", "_done", "_fd", "_fd_lock", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._done: deque[asyncio.Future[None] | LoopCallback] = deque()
        self._armed = False
        self._fd: int | None = None
        self._fd_lock = threading.Lock()
        self._closer: AsyncGenerator[None, None] | None = None
        if hasattr(os, "eventfd"):
            fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            try:
                # In a context of its own: the reader would keep that of the first task to wait.
                contextvars.Context().run(loop.add_reader, fd, self._on_wake)
            except NotImplementedError:  # a loop without readers
                os.close(fd)
            else:
                self._fd = fd
                self._close_with_loop()

    def _close_with_loop(self) -> None:
        # asyncio has no hook for a closing loop but this one: `asyncio.run` closes the asynchronous
        # generators that were started on the loop, while the loop still runs.
        reference = weakref.ref(self)

        async def wait_for_loop() -> AsyncGenerator[None, None]:
            try:
                yield
            finally:
                if (bridge := reference()) is not None:
                    bridge.close()

        self._closer = wait_for_loop()
        with contextlib.suppress(StopIteration):
            self._closer.__anext__().send(None)

    def post(self, item: asyncio.Future[None] | LoopCallback) -> None:
        """Queue a completion; ``notify`` must follow."""
        self._done.append(item)

    def notify(self) -> None:
        """Wake the loop unless a wake-up is under way."""
        if self._armed:
            return
        self._armed = True
        loop = self._loop()
        if loop is None or loop.is_closed():
            self.close()
            return
        with self._fd_lock:  # a descriptor closed before the write might be somebody else's by then
            if self._fd is not None:
                os.eventfd_write(self._fd, 1)
                return
        try:
            loop.call_soon_threadsafe(self._complete)
        except RuntimeError:  # closed just now
            self.close()

    def _on_wake(self) -> None:
        fd = self._fd
        if fd is not None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(fd)  # before the flag is cleared, or a wake-up is lost
        self._complete()

    def _complete(self) -> None:
        self._armed = False
        done = self._done
        loop = self._loop()
        for _ in range(_PER_ITERATION):
            try:
                item = done.popleft()
            except IndexError:
                return
            if isinstance(item, LoopCallback):
                if loop is not None:
                    loop.call_soon(item.function, item.argument, context=item.context)
            elif not item.done():
                item.set_result(None)
        if loop is not None and done:
            self._armed = True
            loop.call_soon(self._complete)

    def close(self) -> None:
        """Give the descriptor back; later wake-ups go through ``call_soon_threadsafe``."""
        self._closer = None  # it refers to the loop
        with self._fd_lock:
            fd, self._fd = self._fd, None
        loop = self._loop()
        if loop is None or loop.is_closed():
            # Nobody waits there any more, and the futures refer to the loop, whose entry this is.
            self._armed = False
            self._done.clear()
            if fd is not None:
                os.close(fd)
        elif fd is not None:
            loop.remove_reader(fd)
            os.close(fd)
            loop.call_soon_threadsafe(self._complete)

    def __del__(self) -> None:
        with self._fd_lock:
            fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


_bridges: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopBridge] = (
    weakref.WeakKeyDictionary()
)


def bridge_for(loop: asyncio.AbstractEventLoop) -> LoopBridge:
    """The bridge of a running loop; call it on the loop's thread."""
    bridge = _bridges.get(loop)
    if bridge is None:
        # Loops closed without `shutdown_asyncgens`. Other threads' loops may come and go meanwhile;
        # then the next new loop looks again.
        with contextlib.suppress(RuntimeError):
            for other, old in list(_bridges.items()):
                if other.is_closed():
                    old.close()
        bridge = _bridges[loop] = LoopBridge(loop)
    return bridge


class Wakes:
    """What a thread owes to others: filled under the lock, paid without it."""

    __slots__ = ("_callbacks", "_cascading", "_flushes", "_steps", "bridges")

    def __init__(self) -> None:
        self.bridges: list[LoopBridge] = []  # any thread may look
        self._callbacks: deque[Callable[[], None]] = deque()
        self._flushes: list[Callable[[], None]] = []
        self._steps: deque[Callable[[], None]] = deque()
        self._cascading = False

    def bridge(self, bridge: LoopBridge) -> None:
        """Wake a loop."""
        if bridge not in self.bridges:
            self.bridges.append(bridge)

    def callback(self, function: Callable[[], None]) -> None:
        """Run user code."""
        self._callbacks.append(function)

    def flush(self, function: Callable[[], None]) -> None:
        """Send what has been collected for another process: last, so that more comes together."""
        if function not in self._flushes:
            self._flushes.append(function)

    def cascade(self, step: Callable[[], None]) -> None:
        """Run a step that one settled call causes for others; a chain of thousands must not recurse."""
        self._steps.append(step)
        if self._cascading:
            return
        self._cascading = True
        try:
            while self._steps:
                self._steps.popleft()()
        finally:
            self._cascading = False

    def pay(self) -> None:
        """Send what was collected, run callbacks, then wake the loops."""
        while self._flushes:
            self._flushes.pop()()
        while self._callbacks:
            self._callbacks.popleft()()
        while self.bridges:
            self.bridges.pop().notify()

    def __bool__(self) -> bool:
        return bool(self.bridges or self._callbacks or self._flushes)

    @property
    def only_bridges(self) -> bool:
        """Whether nothing is owed but waking loops."""
        return not (self._callbacks or self._flushes)

    @property
    def only_flushes(self) -> bool:
        """Whether nobody waits for anything but what is to be sent."""
        return not (self.bridges or self._callbacks)
