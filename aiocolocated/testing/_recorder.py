# SPDX-License-Identifier: Apache-2.0
"""What happened in which order, and ways to make it happen in one order.

The objects here may be captured by a colocated function. Its code is shipped through cloudpickle, which
copies what it captures; these pickle as a reference to themselves, so that every copy of the function in
this process holds the same object.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from time import monotonic, perf_counter
from typing import Any, TypeVar

T = TypeVar("T")

_numbers = itertools.count(1)
_objects: weakref.WeakValueDictionary[int, _ByReference] = weakref.WeakValueDictionary()


class _ByReference:
    """Pickles, within one process, as a reference to itself."""

    def __init__(self) -> None:
        self._number = next(_numbers)
        _objects[self._number] = self

    def __reduce__(self) -> tuple[Callable[..., _ByReference], tuple[Any, ...]]:
        return _find, (type(self).__name__, os.getpid(), self._number)


def _find(kind: str, process: int, number: int) -> _ByReference:
    if process != os.getpid():
        raise LookupError(
            f"this {kind} lives in process {process} and cannot be used in process {os.getpid()}"
        )
    try:
        return _objects[number]
    except KeyError:
        raise LookupError(f"this {kind} is gone: keep it alive while its pickle is used") from None


class _Waiters:
    """Wakes coroutines of any loop, and threads, when something has changed."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self._futures: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Call with the condition held."""
        self.condition.notify_all()
        for future in self._futures:
            try:
                future.get_loop().call_soon_threadsafe(_wake, future)
            except RuntimeError:  # that loop is closed
                continue
        self._futures.clear()

    def wait(self, reached: Callable[[], bool], timeout: float, failure: Callable[[], str]) -> None:
        """Block this thread until ``reached()``."""
        with self.condition:
            if reached():
                return
            if _loop_runs_here():
                raise RuntimeError(
                    "waiting here would block the event loop: await the async method"
                )
            if not self.condition.wait_for(reached, timeout):
                raise TimeoutError(f"{failure()} after {timeout:g} s")

    async def wait_async(
        self, reached: Callable[[], bool], timeout: float, failure: Callable[[], str]
    ) -> None:
        """Wait on the running loop until ``reached()``."""
        deadline = monotonic() + timeout
        while True:
            with self.condition:
                if reached():
                    return
                future = asyncio.get_running_loop().create_future()
                self._futures.add(future)
            try:
                async with asyncio.timeout(deadline - monotonic()):
                    await future
            except TimeoutError:
                raise TimeoutError(f"{failure()} after {timeout:g} s") from None
            finally:
                with self.condition:
                    self._futures.discard(future)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _loop_runs_here() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedEvent:
    """One event of a :class:`Recorder`.

    .. versionadded:: 0.1
    """

    name: str
    """What was recorded, such as ``"start"``."""
    fields: dict[str, Any]
    """What was recorded with it."""
    time: float
    """When, in seconds of :func:`time.perf_counter`."""
    thread: str
    """Name of the thread that recorded it."""


class Recorder(_ByReference):
    """Records events from any thread, in the order in which they happen.

    Colocated functions may capture it: within the process every copy of the function records here.

    Thread safety: any thread; :meth:`wait_for` on an event loop.

    Example:
        >>> def body(x):
        ...     recorder.record("start", i=int(x))
        ...     return x
        >>> await gather(f(x0), f(x1))       # f = colocated_python(body)
        >>> assert recorder.sequence("start") == [0, 1]

    .. versionadded:: 0.1
    """

    def __init__(self) -> None:
        super().__init__()
        self._events: list[RecordedEvent] = []
        self._waiters = _Waiters()

    def record(self, event: str, /, **fields: Any) -> None:
        """Note that ``event`` happens now.

        Args:
            event: its name.
            fields: anything to remember with it; kept by reference.
        """
        thread = threading.current_thread().name
        with self._waiters.condition:
            self._events.append(RecordedEvent(event, fields, perf_counter(), thread))
            self._waiters.notify()

    @property
    def events(self) -> list[RecordedEvent]:
        """Everything recorded so far, in order; a copy."""
        with self._waiters.condition:
            return list(self._events)

    def count(self, event: str) -> int:
        """How many times ``event`` was recorded."""
        return sum(recorded.name == event for recorded in self.events)

    def sequence(self, event: str, field: str | None = None) -> list[Any]:
        """The values of one field over all events of one name, in order.

        Args:
            event: name of the events.
            field: name of the field; may be left out where these events carry one field only.

        Raises:
            ValueError: ``field`` was left out and the events carry several fields, or none.
            KeyError: one of the events does not carry ``field``.
        """
        events = [recorded for recorded in self.events if recorded.name == event]
        if field is None:
            names = sorted({name for recorded in events for name in recorded.fields})
            if events and len(names) != 1:
                carried = ", ".join(names) or "no fields"
                raise ValueError(f"events {event!r} carry {carried}: say which field")
            field = names[0] if names else ""
        return [recorded.fields[field] for recorded in events]

    def peak(self, start: str = "start", end: str = "end") -> int:
        """The largest number of ``start`` events without their ``end``: the peak concurrency."""
        running = largest = 0
        for recorded in self.events:
            if recorded.name == start:
                running += 1
                largest = max(largest, running)
            elif recorded.name == end:
                running -= 1
        return largest

    async def wait_for(self, event: str, count: int = 1, *, timeout: float = 10.0) -> None:
        """Wait on the loop until ``event`` has been recorded ``count`` times.

        Raises:
            TimeoutError: it was not, within ``timeout`` seconds.
        """

        def seen() -> int:
            return sum(recorded.name == event for recorded in self._events)

        await self._waiters.wait_async(
            lambda: seen() >= count,
            timeout,
            lambda: f"event {event!r} was recorded {seen()} of {count} times",
        )

    def clear(self) -> None:
        """Forget everything recorded so far."""
        with self._waiters.condition:
            self._events.clear()


class Gate(_ByReference):
    """Closed at first; who waits goes on when somebody opens it. For tests that must not sleep.

    Colocated functions may capture it, as a :class:`Recorder`.

    Thread safety: any thread; :meth:`wait_async` on an event loop.

    Example:
        >>> started, leave = Gate(), Gate()
        >>> def body(x):
        ...     started.open()
        ...     leave.wait()
        ...     return x
        >>> future = f(x)                    # f = colocated_python(body)
        >>> await started.wait_async()       # the body runs now, and will until it may leave
        >>> leave.open()

    .. versionadded:: 0.1
    """

    def __init__(self) -> None:
        super().__init__()
        self._open = False
        self._waiters = _Waiters()

    @property
    def is_open(self) -> bool:
        """Whether it was opened."""
        return self._open

    def open(self) -> None:
        """Let everybody through, for good."""
        with self._waiters.condition:
            self._open = True
            self._waiters.notify()

    def wait(self, timeout: float = 10.0) -> None:
        """Block this thread until the gate is open.

        Raises:
            TimeoutError: nobody opened it within ``timeout`` seconds.
            RuntimeError: on the thread of a running event loop, where it is closed.
        """
        self._waiters.wait(lambda: self._open, timeout, lambda: "the gate is still closed")

    async def wait_async(self, timeout: float = 10.0) -> None:
        """Wait on the running loop until the gate is open.

        Raises:
            TimeoutError: nobody opened it within ``timeout`` seconds.
        """
        await self._waiters.wait_async(
            lambda: self._open, timeout, lambda: "the gate is still closed"
        )


class Rendezvous(_ByReference):
    """A meeting point: who waits goes on when ``parties`` threads wait, which shows that they overlap.

    Colocated functions may capture it, as a :class:`Recorder`. It can be used again and again.

    Args:
        parties: number of threads that meet.

    Thread safety: any thread.

    Example:
        >>> meeting = Rendezvous(2)
        >>> def body(x):
        ...     meeting.wait()               # passes only if two bodies run at once
        ...     return x

    .. versionadded:: 0.1
    """

    def __init__(self, parties: int) -> None:
        super().__init__()
        self.parties = parties
        self._arrived = 0
        self._meeting = 0  # meetings held so far
        self._waiters = _Waiters()

    def wait(self, timeout: float = 10.0) -> int:
        """Block this thread until all have come.

        Returns:
            How many had come before; 0 for the first, ``parties - 1`` for the last.

        Raises:
            TimeoutError: they did not come within ``timeout`` seconds. Who gives up leaves: the others
                then wait for somebody else.
            RuntimeError: on the thread of a running event loop.
        """
        waiters = self._waiters
        with waiters.condition:
            place, meeting = self._arrived, self._meeting
            self._arrived += 1
            if self._arrived == self.parties:
                self._arrived = 0
                self._meeting += 1
                waiters.notify()
            try:
                waiters.wait(
                    lambda: self._meeting != meeting,
                    timeout,
                    lambda: f"{self._arrived} of {self.parties} threads have met",
                )
            except BaseException:
                self._arrived -= 1
                raise
        return place
