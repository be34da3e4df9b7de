# SPDX-License-Identifier: Apache-2.0
"""Owners: the blocks that calls belong to, and the reports of errors that nobody retrieved."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from aiocolocated import _service
from aiocolocated._settings import LOCK

if TYPE_CHECKING:
    from aiocolocated._loops import Wakes

logger = logging.getLogger("aiocolocated")


class FailureReport:
    """A failed call's error until somebody retrieves it.

    Only failed calls have one, so that successful calls pay for no finalizer. When the last
    reference goes unretrieved, the finalizer hands the error to the service thread.
    """

    __slots__ = ("__weakref__", "_loop", "error", "owned", "retrieved", "title")

    def __init__(
        self, error: BaseException, title: str, loop: asyncio.AbstractEventLoop | None
    ) -> None:
        self.error: BaseException | None = error
        self.title = title
        self._loop = None if loop is None else weakref.ref(loop)
        self.retrieved = False
        self.owned = False  # by a block, which raises the error
        _service.watch(+1)
        _unretrieved.add(self)

    def retrieve(self) -> None:
        """Note that somebody has seen the error (any thread, any number of times)."""
        if not self.retrieved:
            with LOCK:
                if not self.retrieved:
                    self.retrieved = True
                    self.error = None  # owners keep reports; they must not keep tracebacks
                    _unretrieved.discard(self)
                    _service.watch(-1)

    def __del__(self) -> None:
        if not self.retrieved and self.error is not None:
            _service.inbox.put(_Report(self.error, self.title, self._loop))


_unretrieved: weakref.WeakSet[FailureReport] = weakref.WeakSet()  # for the exit


def report_unretrieved() -> None:
    """At exit: report what futures hold that the interpreter will not destroy in time."""
    with LOCK:
        reports = [r for r in _unretrieved if not r.retrieved and r.error is not None]
    for report in reports:
        assert report.error is not None
        message = _Report(report.error, report.title, report._loop)
        report.retrieved = True
        message()


class _Report:
    """The finalizer's message to the service thread; no closure, which would resurrect ``self``."""

    __slots__ = ("_error", "_loop", "_title")

    def __init__(
        self,
        error: BaseException,
        title: str,
        loop: weakref.ref[asyncio.AbstractEventLoop] | None,
    ) -> None:
        self._error = error
        self._title = title
        self._loop = loop

    def __call__(self) -> None:
        with LOCK:
            _service.watch(-1)
        message = f"the error of a colocated call was never retrieved: {self._title}"
        loop = self._loop() if self._loop is not None else None
        if loop is not None and loop.is_running():
            context: dict[str, Any] = {"message": message, "exception": self._error}
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(loop.call_exception_handler, context)
                return
        logger.error("%s", message, exc_info=self._error)


class Owner:
    """A block that waits for its calls: what a ``TaskGroup`` and ``open_task_channel`` share."""

    __slots__ = (
        "_failed",
        "_pruned_at",
        "_quiet",
        "_streams",
        "closed",
        "given_up",
        "live",
        "parent",
    )

    def __init__(self, parent: Owner | None) -> None:
        self.parent = parent
        self.live = 0  # calls that are not over: abandoned bodies count
        self.closed = False
        self.given_up = False  # a second Ctrl-C: nobody waits for the calls any more
        self._quiet: list[Any] = []  # waiters for live == 0
        self._failed: list[FailureReport] = []
        self._pruned_at = 16
        self._streams: weakref.WeakSet[Any] | None = None

    def add_stream(self, source: Any) -> None:
        """Have leaving the block close a stream."""
        if self._streams is None:
            self._streams = weakref.WeakSet()
        self._streams.add(source)

    def close_streams(self) -> None:
        """Begin to close the streams that were opened in the block; their closing counts as live."""
        for source in list(self._streams or ()):
            if not source.ended:
                source.close()

    # All under the lock.

    def call_failed(self, report: FailureReport) -> None:
        """Keep an error until the block is left."""
        report.owned = True
        failed = self._failed
        failed.append(report)
        if len(failed) >= self._pruned_at:
            failed[:] = [r for r in failed if not r.retrieved]
            self._pruned_at = max(16, 2 * len(failed))

    def call_over(self, wakes: Wakes) -> None:
        """A call is settled and nothing of it runs any more."""
        self.live -= 1
        if not self.live and self._quiet:
            for waiter in self._quiet:
                waiter.wake(wakes)
            self._quiet = []

    def give_up(self, wakes: Wakes) -> None:
        """Wait for the calls no longer."""
        self.given_up = True
        for waiter in self._quiet:
            waiter.wake(wakes)
        self._quiet = []

    def add_quiet_waiter(self, waiter: Any) -> bool:
        """Register a waiter for the moment when no call is left; false if that is now."""
        if not self.live or self.given_up:
            return False
        self._quiet.append(waiter)
        return True

    def take_unretrieved(self) -> list[BaseException]:
        """The errors that nobody has seen, each once; they count as retrieved now."""
        with LOCK:
            reports, self._failed = self._failed, []
        errors: list[BaseException] = []
        for report in reports:
            error = report.error
            if error is not None:
                report.retrieve()
                if not any(e is error for e in errors):
                    errors.append(error)
        return errors


_owner: ContextVar[Owner | None] = ContextVar("aiocolocated_owner", default=None)


def current_owner() -> Owner | None:
    """The innermost open block of this context; ``None`` stands for the runtime."""
    owner = _owner.get()
    while owner is not None and owner.closed:
        owner = owner.parent
    return owner


def enter_owner(owner: Owner) -> None:
    _owner.set(owner)


def leave_owner(owner: Owner) -> None:
    """Restore the parent where ``owner`` is current; elsewhere closing it is enough.

    No token is used: a block may be left from another task than entered it.
    """
    owner.closed = True
    if _owner.get() is owner:
        _owner.set(owner.parent)
