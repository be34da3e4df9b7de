# SPDX-License-Identifier: Apache-2.0
"""Measuring how long an event loop was kept from running."""

from __future__ import annotations

import _thread
import asyncio
import os
import sys
import threading
import traceback
from time import perf_counter
from types import FrameType, TracebackType

_STACK_LINES = 12
_OWN_FOLDER = os.path.dirname(os.path.abspath(__file__))


def loop_stack(frame: FrameType | None) -> str:
    """The stack of an event loop's thread, below the loop and without this kit, as text."""
    frames: list[traceback.FrameSummary] = []
    for summary in traceback.extract_stack(frame):
        file = summary.filename.replace("\\", "/")
        if file.endswith("asyncio/events.py"):  # runs callbacks; what is above is the same for all
            frames.clear()
        elif "/blockbuster/" not in file and not summary.filename.startswith(_OWN_FOLDER):
            frames.append(summary)
    return "".join(traceback.format_list(frames[-_STACK_LINES:]))


class LoopGap:
    """The largest gap between two ticks of an event loop, from :func:`measure_loop_gap`.

    A context manager: ``async with`` starts the ticks on the running loop and stops them. The figures
    can be read at any time, from any thread, also while the loop is stuck, and stay after the block.

    Args:
        interval: seconds from one tick to the next.
        watch: seconds without a tick after which a thread of the kit notes what the loop's thread is
            doing; ``None`` starts no such thread.

    Ordering: none. Cancellation: stops the ticks. Thread safety: reading only.

    .. versionadded:: 0.1
    """

    def __init__(self, *, interval: float = 0.005, watch: float | None = 0.05) -> None:
        self._interval = interval
        self._watch = watch
        self._last: float | None = None  # time of the last tick while measuring
        self._largest = 0.0
        self._ticks = 0
        self._where: tuple[float, str] | None = None  # length and stack of the worst watched gap
        self._handle: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._stop = threading.Event()

    @property
    def max_seconds(self) -> float:
        """Largest time between two ticks, in seconds; about ``interval`` on a free loop.

        The time since the last tick counts too, so a loop that is stuck now shows.
        """
        last = self._last
        return self._largest if last is None else max(self._largest, perf_counter() - last)

    @property
    def ticks(self) -> int:
        """Number of ticks so far."""
        return self._ticks

    @property
    def where(self) -> str | None:
        """What the loop's thread was doing in the worst gap over ``watch`` seconds: a stack."""
        return None if self._where is None else self._where[1]

    def reset(self) -> None:
        """Forget what was measured so far. On the loop's thread."""
        self._largest, self._ticks, self._where = 0.0, 0, None
        if self._last is not None:
            self._last = perf_counter()

    def _tick(self) -> None:
        assert self._loop is not None
        self._note()
        self._ticks += 1
        self._handle = self._loop.call_later(self._interval, self._tick)

    def _note(self) -> None:
        now = perf_counter()
        if self._last is not None:
            self._largest = max(self._largest, now - self._last)
        self._last = now

    def _watch_loop(self, patience: float) -> None:
        wait = patience
        while not self._stop.wait(wait):
            last = self._last
            if last is None:
                return
            silence = perf_counter() - last
            if silence < patience:
                wait = patience - silence
                continue
            wait = patience
            if self._where is None or silence > self._where[0]:
                frame = sys._current_frames().get(self._loop_thread)
                if frame is not None:
                    self._where = silence, loop_stack(frame)

    async def __aenter__(self) -> LoopGap:
        if self._last is not None:
            raise RuntimeError("this LoopGap measures already; make one for each loop")
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._stop = threading.Event()
        self._last = perf_counter()
        if self._watch is not None:
            # Not `Thread.start()`, which would hold the loop up until the thread runs.
            _thread.start_new_thread(self._watch_loop, (self._watch,))
        self._handle = self._loop.call_later(self._interval, self._tick)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._note()
        self._last = None
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop = None
        self._stop.set()


def measure_loop_gap(*, interval: float = 0.005, watch: float | None = 0.05) -> LoopGap:
    """Measure how long the running event loop is kept from running inside a block.

    Catches whatever keeps the loop busy: Python code, C code, locks, garbage collection, and other
    threads that hold the GIL. :func:`forbid_blocking` names the call instead, but sees only calls that
    it knows.

    Args:
        interval: seconds from one tick to the next.
        watch: seconds without a tick after which a thread of the kit notes the loop's stack, for
            ``gap.where``; ``None`` starts no such thread, for the finest measurements.

    Returns:
        An asynchronous context manager that gives itself, a :class:`LoopGap`.

    Raises:
        RuntimeError: on entering, where no asyncio loop runs.

    Ordering: none. Cancellation: stops the ticks. Thread safety: enter and leave on the loop's thread.

    Example:
        >>> async with measure_loop_gap() as gap:
        ...     await f(x)
        >>> assert gap.max_seconds < 0.02, gap.where

    .. versionadded:: 0.1
    """
    return LoopGap(interval=interval, watch=watch)
