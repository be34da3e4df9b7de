# SPDX-License-Identifier: Apache-2.0
"""The runtime: settings, what is in flight, slow calls, and how the process ends."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable
from time import monotonic
from typing import Unpack, final

from aiocolocated import _compat, _owners, _service, _settings, _submission
from aiocolocated._callback_runs import coroutines_running, watch_anew
from aiocolocated._calls import Call
from aiocolocated._execution import computing
from aiocolocated._loops import Wakes
from aiocolocated._settings import LOCK, Settings, SettingsChanges
from aiocolocated._types import CANCELLED, QUEUED, READY, RUNNING, CallState
from aiocolocated._workers import pool

_POLL = 0.02  # seconds between looks while the interpreter waits at exit


@dataclasses.dataclass(frozen=True, slots=True)
class CallInfo:
    """One call in flight.

    Attributes:
        function: qualified name of what it runs.
        channel: name of its channel.
        host: name of its host.
        state: ``"queued"``, ``"running"``, ``"sent"`` (to hosts in other processes: queued or running
            there), ``"dispatched"`` (arrays computing) or ``"abandoned"`` (cancelled, the body still runs).
        age: seconds since submission.
        running_for: seconds since its body started; ``None`` if it has not.
        where: file and line of the call expression.
    """

    function: str
    channel: str
    host: str
    state: str
    age: float
    running_for: float | None
    where: str


@dataclasses.dataclass(frozen=True, slots=True)
class RuntimeStatistics:
    """A snapshot of the process.

    Attributes:
        workers: pool threads that exist.
        idle: of them, waiting for work.
        waiting: of them, inside a body that waits for another call.
        dedicated: channels with a thread of their own.
        runnable: channels that wait for a thread.
        channels: channels with anything queued, running or computing.
        queued: calls submitted and not started.
        running: bodies that run, abandoned ones included, and calls sent to other processes.
        dispatched: calls whose arrays are computing.
        abandoned: cancelled calls whose body still runs.
        transfer_bytes: bytes that transfers have in flight.
    """

    workers: int
    idle: int
    waiting: int
    dedicated: int
    runnable: int
    channels: int
    queued: int
    running: int
    dispatched: int
    abandoned: int
    transfer_bytes: int


@final
class Runtime:
    """What the library does in this process; use the one instance, :data:`runtime`."""

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return _settings.current

    def calls(self) -> list[CallInfo]:
        """Every call in flight, oldest first.

        Example:
            >>> for call in runtime.calls():
            ...     print(call.function, call.state, f"{call.age:.1f} s", call.where)
        """
        with LOCK:
            calls = [(c, _state(c)) for c in _submission.calls_in_flight()]
        now = monotonic()
        return sorted((_info(c, state, now) for c, state in calls), key=lambda c: -c.age)

    def statistics(self) -> RuntimeStatistics:
        """Counters and gauges of this moment."""
        with LOCK:
            calls = _submission.calls_in_flight()
            states = [_state(c) for c in calls]
            return RuntimeStatistics(
                workers=len(pool.workers),
                idle=len(pool.idle),
                waiting=pool.waiting,
                dedicated=len(pool.dedicated),
                runnable=len(pool.ready) + len(pool.light),
                channels=len(pool.lanes),
                queued=states.count("queued"),
                running=sum(states.count(s) for s in ("running", "sent", "abandoned")),
                dispatched=states.count("dispatched"),
                abandoned=states.count("abandoned"),
                transfer_bytes=_submission.transfers.taken,
            )

    def __repr__(self) -> str:
        return f"<aiocolocated.runtime {self.statistics()}>"


def _state(call: Call) -> str:
    if call._sent and call._state == RUNNING:
        return "sent"
    if call._state == CANCELLED or call._state >= READY:
        return "abandoned"
    return CallState(call._state).name.lower()


def _info(call: Call, state: str, now: float) -> CallInfo:
    return CallInfo(
        function=call._plan.name,
        channel=call._channel.name,
        host=call._plan.host,
        state=state,
        age=now - call._submitted,
        running_for=None if state == "queued" or not call._started else now - call._started,
        where=call._where(),
    )


runtime = Runtime()


def configure(**changes: Unpack[SettingsChanges]) -> Settings:
    """Change limits and grace periods of the process; see :class:`Settings` for the names.

    Returns:
        The settings now in force.

    Raises:
        TypeError: no such setting.
        ValueError: a value that makes no sense.

    Thread safety: any thread; takes effect for what starts afterwards.

    Example:
        >>> configure(worker_limit=128, slow_call=5.0)

    .. versionadded:: 0.1
    """
    known = {field.name for field in dataclasses.fields(Settings)}
    for name in changes:
        if name not in known:
            raise TypeError(f"configure() has no setting {name!r}; there are: {sorted(known)}")
    settings = _settings.change(**changes)
    with LOCK:
        gate, transfers = _submission.gate, _submission.transfers
        gate.limit = settings.multi_device_in_flight
        transfers.capacity = settings.transfer_bytes_in_flight
        for order in (*gate.admit(), *transfers.admit()):
            pool.schedule(order.lane)
        if "slow_call" in changes and _submission.watching_slow:
            _watch_slow_calls()  # the next look may be seconds away
        if "slow_callback" in changes:
            watch_anew()
    return settings


# --- slow calls ----------------------------------------------------------------------------------------

_reported: weakref.WeakSet[Call] = weakref.WeakSet()
_watch_number = 0


def _watch_slow_calls() -> None:
    """Begin to look for slow calls, in place of an earlier watch (under the lock)."""
    global _watch_number
    _watch_number += 1
    _service.post(functools.partial(_look_for_slow_calls, _watch_number))


def _look_for_slow_calls(watch: int) -> None:
    """Log running calls that are slow, each once (service thread)."""
    limit = _settings.current.slow_call
    if limit is None:
        limit = (
            math.inf
        )  # the looks go on: they also keep the thread alive while calls are in flight
    now = monotonic()
    slow: list[CallInfo] = []
    with LOCK:
        if watch != _watch_number:
            return
        if not pool.lanes and not computing:
            _submission.watching_slow = False
            return
        for call in _submission.started_calls():
            if call._started and now - call._started >= limit and call not in _reported:
                _reported.add(call)
                slow.append(_info(call, _state(call), now))
    again = now + max(0.01, min(limit / 4, 5.0))
    _service.call_at(again, functools.partial(_look_for_slow_calls, watch))
    for info in slow:
        _service.logger.warning(
            "colocated call %s on host %s, channel %r, has been %s for %.1f s (slow_call is %s s); "
            "submitted at %s",
            info.function,
            info.host,
            info.channel,
            info.state,
            info.running_for or 0.0,
            limit,
            info.where,
        )


_submission.slow_call_watch = _watch_slow_calls


# --- exit ----------------------------------------------------------------------------------------------


_before_exit: list[Callable[[], None]] = []


def before_exit(function: Callable[[], None]) -> Callable[[], None]:
    """Call ``function`` at interpreter exit, when no call is in flight; it may submit some."""
    _before_exit.append(function)
    return function


def _at_exit() -> None:
    """Wait for submitted calls, then end the threads; runs before the interpreter joins threads."""
    if _settings.forked:
        return
    with LOCK:
        _submission.shutting_down = True
        _service.exiting = True
    grace = _settings.current.exit_grace
    deadline = None if grace is None else monotonic() + grace
    interrupted = False
    try:
        while _busy() or _run_before_exit():
            if deadline is not None and monotonic() >= deadline:
                interrupted = True
                break
            _run_stranded()
            _service.serve_here()
            threading.Event().wait(_POLL)
    except KeyboardInterrupt:
        interrupted = True
    if interrupted and _busy():
        _give_up(grace)
    with LOCK:
        pool.stop()
    _owners.report_unretrieved()
    _service.stop()


def _run_before_exit() -> bool:
    for function in _before_exit:
        function()
    return _busy()


def _busy() -> bool:
    with LOCK:
        return bool(_submission.calls_in_flight() or coroutines_running())


def _run_stranded() -> None:
    """Serve a channel here for which there is no thread, and none can be started any more."""
    with LOCK:
        lane = pool.take() if pool.refused and pool.stands_still() else None
    if lane is not None:
        pool.serve_here(lane)


def _give_up(grace: float | None) -> None:
    """The grace is over: cancel what is queued, name what runs, and end the process."""
    wakes = Wakes()
    with LOCK:
        calls = _submission.calls_in_flight()
        for call in calls:
            if call._state == QUEUED:
                call._cancel(wakes, ": the interpreter exits")
        now = monotonic()
        running = [_info(c, _state(c), now) for c in calls if c._state != CANCELLED or c._started]
    lines = [
        f"  {c.function} on host {c.host}, channel {c.channel!r}, {c.state} for "
        f"{c.running_for or 0.0:.1f} s, submitted at {c.where}"
        for c in running
    ]
    why = "was interrupted" if grace is None else f"gave {grace} s (exit_grace)"
    sys.stderr.write(
        "\n".join(
            [f"aiocolocated: exit {why}; these calls still run and are abandoned:", *lines, ""]
        )
    )
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # a closed pipe must not stop the exit
            continue
    os._exit(1)


_compat.register_at_exit(_at_exit)
