# SPDX-License-Identifier: Apache-2.0
"""The service thread: timers, thread starts, readiness polls and finalizers, in one place.

It exists while there is something to watch and ends when there has been nothing for a while. Only
this thread starts other threads: ``Thread.start()`` waits for the new thread to run, which may take
over a second on a loaded machine, and a loop must not wait that long.
"""

from __future__ import annotations

import _thread
import heapq
import itertools
import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import monotonic

from aiocolocated._settings import LOCK

logger = logging.getLogger("aiocolocated")

THREAD_NAME = "aiocolocated-service"
_IDLE_SECONDS = 5.0

Action = Callable[[], object]

# Finalizers may run at any allocation in any thread: they only put here.
inbox: SimpleQueue[Action | None] = SimpleQueue()

_timers: list[tuple[float, int, Action]] = []
_timer_numbers = itertools.count()
_running = False
_ending = False  # the interpreter exits: no new threads
_at_stop: list[Action] = []
_watched = 0  # things whose finalizers must be served


def start_thread(run: Action, name: str) -> None:
    """Start a thread without waiting for it to run.

    The bare thread that waits in ``Thread.start()`` instead of us ends at once; the new thread is an
    ordinary non-daemon one, joined at exit.
    """
    thread = threading.Thread(target=run, name=name)
    _thread.start_new_thread(_start_quietly, (thread,))


def _start_quietly(thread: threading.Thread) -> None:
    try:
        thread.start()
    except RuntimeError:  # the interpreter began to exit meanwhile; the exit hook does the work
        logger.debug("thread %s was not started", thread.name)


def post(action: Action) -> None:
    """Run ``action`` on the service thread, soon. Not from finalizers."""
    global _running
    with LOCK:
        inbox.put(action)
        if not _running and not _ending:
            _running = True
            start_thread(_serve, THREAD_NAME)


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
        inbox.put(None)


def _serve() -> None:
    global _running
    idle_since = monotonic()
    while True:
        now = monotonic()
        timeout = min(_timers[0][0] - now, _IDLE_SECONDS) if _timers else _IDLE_SECONDS
        try:
            action = inbox.get(timeout=timeout) if timeout > 0 else inbox.get_nowait()
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
        elif stopping or (not _timers and not _watched and now - idle_since >= _IDLE_SECONDS):
            with LOCK:
                if stopping or inbox.empty():
                    _running = False
                    return


def _run(action: Action) -> None:
    try:
        action()
    except BaseException:  # one broken action must not end the service of all others
        logger.exception("aiocolocated: internal error in the service thread")
