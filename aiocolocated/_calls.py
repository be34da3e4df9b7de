# SPDX-License-Identifier: Apache-2.0
"""Calls: their states, and what moves them from one to the next."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from types import CodeType, TracebackType
from typing import Any

from aiocolocated import _compat, _settings
from aiocolocated._coroutines import OneTask
from aiocolocated._exceptions import CallCancelledError
from aiocolocated._loops import Wakes
from aiocolocated._ordering import Gate
from aiocolocated._owners import FailureReport, Owner
from aiocolocated._protocols import Args, Body, CallChannel, CallCounter, Kwargs, Plan
from aiocolocated._readiness import Poll
from aiocolocated._settings import LOCK
from aiocolocated._threads import OwnThread
from aiocolocated._types import CANCELLED, DISPATCHED, FAILED, QUEUED, READY, RUNNING
from aiocolocated._waiters import Waiter
from aiocolocated._workers import local


class Call:
    """One invocation of a body; :class:`ArrayFuture` is its public face."""

    # What few calls need is a class attribute until it is set: making a call is most of submitting one.
    __slots__ = (
        "__dict__",
        "__weakref__",
        "_args",
        "_channel",
        "_code",
        "_config",
        "_context",
        "_kwargs",
        "_lasti",
        "_loop",
        "_owner",
        "_plan",
        "_started",
        "_state",
        "_submitted",
        "_value",
        "_waiter_count",
        "_waiters",
    )

    _plan: Plan
    _args: Args
    _kwargs: Kwargs
    _channel: CallChannel
    _owner: Owner | None
    _loop: asyncio.AbstractEventLoop | None
    _code: CodeType  # of the caller, with the place of its call expression
    _lasti: int
    _context: contextvars.Context | None
    _config: _compat.Snapshot | None
    _submitted: float  # monotonic seconds
    _started: float
    _state: int
    _value: Any  # the result, or the error
    _waiter_count: int
    _waiters: list[Waiter] | None

    _traceback: TracebackType | None = None  # where every raise of the error starts
    _blocked: int = 0  # dependencies that are not dispatched yet
    _wide: bool = False  # a multi-device program
    _convert: bool = False  # the arguments need work before the body sees them
    _dispatch_waiters: list[Waiter] | None = None
    _futures: list[Call] | None = None  # among the arguments, until submitted
    _dependencies: list[Call] | None = None
    _dependents: list[Call] | None = None
    _report: FailureReport | None = None
    _waiting_on: Call | None = None  # what the body waits for
    _nested_channel: Any = None  # of the calls that the body makes
    _release: Callable[[Wakes], None] | None = None  # gives a task group's slot back
    _object: CallCounter | None = None  # whose method this is
    _gate: Gate[Any] | None = None  # of that object, or of all transfers
    _size: int = 0  # bytes, of a transfer
    _look: Callable[[Any], Sequence[Any] | None] | None = (
        None  # comes before the body, see `_look_ahead`
    )
    _inputs: Poll | None = None  # watches the arrays that the call waits for, once it has looked
    _group: Any = None  # the hosts that it goes to, if they are other processes
    _sent: bool = False  # to them
    _may_wait: Callable[[], bool] | None = None  # of a call from a controller: see `Server.defer`
    _passable: bool = False  # what its hosts have is its result, not something to make that of
    _waits_here: bool = False  # for what it depends on, because its arguments are checked
    _early: list[Call] | None = None  # dependents that go to the same hosts, which do not wait here
    _light: bool = False  # needs a worker for a moment only: its body runs elsewhere
    _body: Body | None = None  # that body, while it runs
    _thread: OwnThread | None = None  # where it runs, of an object that is bound to one
    _one_task: OneTask | None = None  # where it runs, if not in a task of its own
    _over_waiters: list[Waiter] | None = None

    @classmethod
    def _create(
        cls,
        plan: Plan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        channel: CallChannel,
        owner: Owner | None,
        loop: asyncio.AbstractEventLoop | None,
        code: CodeType,
        lasti: int,
    ) -> Any:
        self = cls.__new__(cls)
        self._plan = plan
        self._args = args
        self._kwargs = kwargs
        self._channel = channel
        self._owner = owner
        if loop is None and (body := local.call) is not None:
            loop = body._loop  # a body's own calls belong to the loop that its caller belongs to
        self._loop = loop
        self._code = code
        self._lasti = lasti
        self._context = contextvars.copy_context()
        self._config = _compat.capture_config()
        self._submitted = monotonic()
        self._started = 0.0
        self._state = QUEUED
        self._value = None
        self._waiter_count = 0
        self._waiters = None
        return self

    def _where(self) -> str:
        line = self._code.co_firstlineno
        for start, end, number in self._code.co_lines():
            if start <= self._lasti < end and number is not None:
                line = number
        return f"{self._code.co_filename}:{line}"

    def _describe(self) -> str:
        return f"{self._plan.name} (submitted at {self._where()})"

    def _title(self) -> str:
        return (
            f"colocated call {self._plan.name} on host {self._plan.host}, channel "
            f"{self._channel.name!r}, submitted at {self._where()}"
        )

    # -- waiters (any thread) -----------------------------------------------------------------------------

    def _add_waiter(self, waiter: Waiter, phase: int) -> bool:
        """Register a waiter; false if the call has got that far already."""
        with LOCK:
            if self._state >= phase:
                return False
            if _settings.forked:
                raise _settings.refuse_fork()
            if phase == READY:
                if self._waiters is None:
                    self._waiters = [waiter]
                else:
                    self._waiters.append(waiter)
            elif self._dispatch_waiters is None:
                self._dispatch_waiters = [waiter]
            else:
                self._dispatch_waiters.append(waiter)
            self._waiter_count += 1
            return True

    def _drop_waiter(self, waiter: Waiter, phase: int, *, cancelled: bool) -> None:
        """Take a waiter back; the last one that was cancelled takes the call with it."""
        wakes = Wakes()
        with LOCK:
            waiters = self._waiters if phase == READY else self._dispatch_waiters
            if waiters is None or waiter not in waiters:
                return
            waiters.remove(waiter)
            self._waiter_gone(wakes, cancelled)
        wakes.pay()

    def _waiter_gone(self, wakes: Wakes, cancelled: bool) -> None:
        self._waiter_count -= 1
        if cancelled and not self._waiter_count and self._state < READY:
            self._cancel(wakes, ": its last waiter was cancelled")

    # -- transitions (under the lock) ---------------------------------------------------------------------

    def _depend_on(self, dependencies: list[Call]) -> None:
        """Wait for other calls to be dispatched before this one starts.

        Until it starts this call shares their fate; until it is over it counts as a waiter of them.
        """
        waiting: list[Call] = []
        for dependency in dependencies:
            if dependency._state >= READY:
                continue
            waiting.append(dependency)
            if dependency._dependents is None:
                dependency._dependents = []
            dependency._dependents.append(self)
            dependency._waiter_count += 1
            if dependency._state < DISPATCHED:
                if dependency._sent and self._follows(dependency):
                    dependency._not_waited_for_by(self)
                else:
                    self._blocked += 1
        self._dependencies = waiting or None

    def _release_dependencies(self, wakes: Wakes) -> None:
        """This call is over: it is no waiter any more."""
        dependencies, self._dependencies = self._dependencies, None
        for dependency in dependencies or ():
            if dependency._dependents is not None and self in dependency._dependents:
                dependency._dependents.remove(self)
                dependency._waiter_gone(wakes, self._state == CANCELLED)

    def _follows(self, dependency: Call) -> bool:
        """Whether this call may be sent before a call that it depends on is over: to the same hosts."""
        return (
            self._group is not None
            and self._group is dependency._group
            and dependency._passable
            and not self._waits_here
        )

    def _not_waited_for_by(self, dependent: Call) -> None:
        if self._early is None:
            self._early = []
        self._early.append(dependent)

    def _unblock_followers(self) -> None:
        """This call is on its way; those that it is for may follow."""
        for dependent in self._dependents or ():
            if dependent._follows(self):
                self._not_waited_for_by(dependent)
                self._unblock(dependent)

    def _unblock_dependents(self) -> None:
        early, self._early = self._early or (), None
        for dependent in self._dependents or ():
            if dependent not in early:
                self._unblock(dependent)

    @staticmethod
    def _unblock(dependent: Call) -> None:
        dependent._blocked -= 1
        if not dependent._blocked and dependent._state == QUEUED:
            dependent._channel._resume()

    def _settle(self, wakes: Wakes, state: int, value: Any) -> None:
        """The one way to ``READY``, ``FAILED`` and ``CANCELLED``."""
        before = self._state
        self._state = state
        self._value = value
        waiters, self._waiters = self._waiters, None
        if waiters is not None:
            for waiter in waiters:
                waiter.wake(wakes)
        if self._dispatch_waiters is not None:
            self._wake_dispatched(wakes)
        if self._dependents is not None:
            if state == READY:
                if before < DISPATCHED:
                    self._unblock_dependents()
                self._dependents = None
            else:
                wakes.cascade(partial(self._settle_dependents, wakes))
        if self._dependencies is not None:
            wakes.cascade(partial(self._release_dependencies, wakes))
        if before == QUEUED:
            self._args = self._kwargs = self._context = None  # type: ignore[assignment]
            if self._inputs is not None:
                self._inputs.stop()
                self._inputs = None
            self._channel._call_left_queue(wakes)
            if self._gate is not None and self._gate.parked:
                # It may have held the gate's room without having started.
                self._channel._hand_out(self._gate.admit())
            self._over(wakes)

    def _wake_dispatched(self, wakes: Wakes) -> None:
        waiters, self._dispatch_waiters = self._dispatch_waiters, None
        for waiter in waiters or ():
            self._waiter_count -= 1
            waiter.wake(wakes)

    def _settle_dependents(self, wakes: Wakes) -> None:
        """Queued dependents fail, or are cancelled, with this call; running ones find out."""
        dependents, self._dependents = self._dependents, None
        for dependent in dependents or ():
            if dependent._state != QUEUED:
                continue
            if self._state == FAILED:
                self._pass_error_on(dependent)
                dependent._fail(wakes, self._value, self._traceback)
            else:
                dependent._cancel(wakes, f": it depends on {self._describe()}")

    def _cancel(self, wakes: Wakes, why: str) -> bool:
        if self._state >= READY:
            return False
        state = self._state
        error = CallCancelledError(
            f"{self._title()}, was cancelled while {_STATE_WORDS[state]}{why}"
        )
        self._settle(wakes, CANCELLED, error)
        self._channel._call_failed(error, wakes, cancelled=True)
        body = self._body  # a worker may take it away meanwhile
        if body is not None:
            body.cancel(wakes)
        return True

    def _fail(self, wakes: Wakes, error: BaseException, traceback: TracebackType | None) -> None:
        if self._state >= READY:
            return
        self._traceback = traceback
        if self._report is None:
            self._report = FailureReport(error, self._describe(), self._loop)
            if self._owner is not None:
                self._owner.call_failed(self._report)
        self._settle(wakes, FAILED, error)
        self._channel._call_failed(error, wakes, cancelled=False)

    def _pass_error_on(self, dependent: Call) -> None:
        """A dependent fails with this call's error: it is the dependent's to be retrieved now."""
        report = self._report
        if report is None:
            return
        if report.owned or dependent._owner is not None:
            report.retrieve()
        else:
            dependent._report = report  # one error, one report, however many calls it fails

    def _over(self, wakes: Wakes) -> None:
        """Settled, and nothing of the call runs any more."""
        self._loop = None
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.call_over(wakes)
        if self._release is not None:
            release, self._release = self._release, None
            release(wakes)
        if self._object is not None:
            owner_object, self._object = self._object, None
            owner_object.call_over(wakes)
        if self._over_waiters is not None:
            waiters, self._over_waiters = self._over_waiters, None
            for waiter in waiters:
                waiter.wake(wakes)

    def _computed(self, wakes: Wakes) -> None:
        """The body has ended and its arrays are computed, whatever became of the call."""
        if self._wide:
            self._channel._leave_gate(self)
        self._over(wakes)
        channel = self._channel
        if channel._order.idle:
            channel._became_idle(wakes)


_STATE_WORDS = {QUEUED: "queued", RUNNING: "running", DISPATCHED: "its arrays were computing"}
