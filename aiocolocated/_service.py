# SPDX-License-Identifier: Apache-2.0
"""The service thread: timers, thread starts, readiness polls and finalizers, in one place.

It exists while there is something to watch and ends when there has been nothing for a while. Only
this thread starts other threads: ``Thread.start()`` waits for the new thread to run, which may take
over a second on a loaded machine, and a loop must not wait that long.
"""

from __future__ import annotations

import _thread
import asyncio
import ctypes
import heapq
import itertools
import logging
import sys
import threading
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic, sleep

from aiocolocated import _compat, _settings
from aiocolocated._settings import LOCK

logger = logging.getLogger("aiocolocated")

THREAD_NAME = "aiocolocated-service"
_IDLE_SECONDS = 5.0

Action = Callable[[], object]

# Finalizers may run at any allocation in any thread: they only put here.
inbox: SimpleQueue[Action | None] = SimpleQueue()

_timers: list[tuple[float, int, Action]] = []
_timer_numbers = itertools.count()
running = False
exiting = False  # the interpreter exits, once all calls are over
_ending = False  # they are
_at_stop: list[Action] = []
_watched = 0  # things whose finalizers must be served
starting = 0  # threads that are being started
_here = threading.Lock()

_SUBNORMAL = 5e-324
_DEFAULT_ENVIRONMENT = ctypes.c_void_p(-1)  # FE_DFL_ENV, in glibc and in musl


def start_thread(run: Action, name: str, refused: Action = lambda: None) -> None:
    """Start a thread without waiting for it to run.

    The bare thread that waits in ``Thread.start()`` instead of us ends at once; the new thread is an
    ordinary non-daemon one, joined at exit.

    Args:
        run: what the thread runs.
        name: its name.
        refused: called, perhaps at once, where no thread can be started: the system has no more, or
            CPython 3.12 exits.
    """
    global starting
    _settings.started = True
    # Not as the current thread, which may be a daemon: those of XLA are.
    thread = threading.Thread(target=partial(_run_precisely, run), name=name, daemon=False)
    with LOCK:
        starting += 1
    try:
        _thread.start_new_thread(_start, (thread, refused))
    except RuntimeError as error:
        _start_over(thread, refused, error)


def _run_precisely(run: Action) -> None:
    """Run with the C library's default floating-point environment, as every thread should.

    Threads inherit it, and those on which XLA runs callbacks take subnormal numbers for zero.
    """
    if _SUBNORMAL * 1.0 == 0.0 and sys.platform == "linux":
        ctypes.CDLL(None).fesetenv(_DEFAULT_ENVIRONMENT)  # of libm, which NumPy has loaded
    run()


def _start(thread: threading.Thread, refused: Action) -> None:
    try:
        thread.start()
    except RuntimeError as error:
        _start_over(thread, refused, error)
    else:
        _start_over(thread, refused, None)


def _start_over(thread: threading.Thread, refused: Action, error: RuntimeError | None) -> None:
    global starting
    with LOCK:
        starting -= 1
    if error is not None:
        level = logging.DEBUG if exiting else logging.WARNING
        logger.log(level, "thread %s was not started: %s", thread.name, error)
        refused()


def wait_for_starts() -> None:
    """Off a loop: let the threads start that are about to; at exit it might be too late."""
    if not _compat.STARTS_THREADS_AT_EXIT and asyncio._get_running_loop() is None:
        deadline = monotonic() + 1.0
        while starting and monotonic() < deadline:
            sleep(0.0002)


def post(action: Action) -> None:
    """Run ``action`` on the service thread, soon. Not from finalizers."""
    if _settings.forked:
        raise _settings.refuse_fork()
    with LOCK:
        inbox.put(action)
        start()


def start() -> None:
    """Start the thread unless it runs (under the lock)."""
    global running
    if not running and not _ending:
        running = True
        start_thread(_serve, THREAD_NAME, _not_running)


def _not_running() -> None:
    global running
    running = False


def call_at(when: float, action: Action) -> None:
    """Run ``action`` at ``monotonic()`` time ``when``; only on the service thread."""
    heapq.heappush(_timers, (when, next(_timer_numbers), action))


def watch(change: int) -> None:
    """Keep the thread alive for finalizers while something needs them (under the lock)."""
    global _watched
    _watched += change


def at_stop(action: Action) -> None:
    """Run ``action`` when the interpreter exits, after all calls are over."""
    _at_stop.append(action)


def stop() -> None:
    """End the thread at interpreter exit."""
    global _ending
    for action in _at_stop:
        _run(action)
    with LOCK:
        _ending = True
    _empty_inbox()  # here, because the thread may not even have started
    inbox.put(None)


def _empty_inbox() -> None:
    while True:
        try:
            action = inbox.get_nowait()
        except Empty:
            return
        if action is not None:
            _run(action)


def serve_here() -> None:
    """Do what is due on this thread: at exit, where the thread was not started in time."""
    if running or not _here.acquire(blocking=False):
        return
    try:
        _empty_inbox()
        while _timers and _timers[0][0] <= monotonic():
            _run(heapq.heappop(_timers)[2])
    finally:
        _here.release()


def take(source: SimpleQueue[Action | None], timeout: float) -> Action | None:
    """The next action; waits for ``timeout`` seconds at most.

    Looks first: where the queue's lock is free, Python 3.11 and 3.12 take it and then wait for what is
    left of the timeout, which is for ever where that has become negative meanwhile.
    """
    try:
        return source.get_nowait()
    except Empty:
        if timeout <= 0:
            raise
    return source.get(timeout=timeout)


def _serve() -> None:
    global running
    idle_since = monotonic()
    while True:
        now = monotonic()
        timeout = min(_timers[0][0] - now, _IDLE_SECONDS) if _timers else _IDLE_SECONDS
        try:
            action = take(inbox, timeout)
        except Empty:
            action = None
            stopping = _ending
        else:
            stopping = action is None
        if action is not None:
            _run(action)
        now = monotonic()
        while _timers and _timers[0][0] <= now:
            _run(heapq.heappop(_timers)[2])
            idle_since = now
        if action is not None:
            idle_since = now
            action = None  # it may hold arrays, and the next one may be long in coming
        elif stopping or (not _timers and not _watched and now - idle_since >= _IDLE_SECONDS):
            with LOCK:
                if stopping or inbox.empty():
                    running = False
                    return


def _run(action: Action) -> None:
    try:
        action()
    except BaseException:  # one broken action must not end the service of all others
        logger.exception("aiocolocated: internal error in the service thread")
