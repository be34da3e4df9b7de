# SPDX-License-Identifier: Apache-2.0
"""Callbacks that run: their coroutines on a loop of the library's, and the watch over slow ones."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from collections.abc import Awaitable, Callable, Generator, Iterable
from time import monotonic
from types import TracebackType
from typing import Any

from aiocolocated import _compat, _coroutines, _programs, _service, _settings
from aiocolocated._exceptions import CallCancelledError
from aiocolocated._hostloop import HostLoop, next_loop, of_this_thread
from aiocolocated._loops import LoopCallback
from aiocolocated._settings import LOCK
from aiocolocated._waiters import BodyWait, body_wait, own_body, waiting

# Started by programs whose finish has not come. Nothing says when a program has failed in between.
_tickets: dict[int, CoroutineRun] = {}
_MOST_TICKETS = 1024  # of coroutines that are over
_PATIENCE = 0.05  # seconds between looks whether a coroutine has begun
_MOST_LOOKS = 20  # until its loop counts as stuck
_next_ticket = 0

_running: set[Running] = set()


class Place:
    """That code runs in a callback; not the callback itself, because contexts live longer."""

    __slots__ = ("in_flight",)

    def __init__(self) -> None:
        # Whether a program that this thread does not run inline waits for the callback.
        self.in_flight = _programs.here.dispatch is None


# The callbacks that wait for the code that runs here, from the outermost on.
callbacks_here: contextvars.ContextVar[tuple[Place, ...]] = contextvars.ContextVar(
    "aiocolocated_callbacks_here", default=()
)


class Running:
    """A callback that runs, for the watch; a context manager for a plain function."""

    __slots__ = ("_entered", "_reported", "_since", "_where", "place", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self.place = Place()
        self._where = ""
        self._since = 0.0
        self._reported = False

    def __enter__(self) -> None:
        self._where = f"on thread {threading.current_thread().name!r}"
        self._entered = callbacks_here.set((*callbacks_here.get(), self.place))
        self._begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        callbacks_here.reset(self._entered)
        self._end()

    def _begin(self) -> None:
        global _watching
        self._since = monotonic()
        with LOCK:
            _running.add(self)
            if not _watching:
                _watching = True
                _service.post(functools.partial(_look, _watch))

    def _end(self) -> None:
        self.place.in_flight = False
        with LOCK:
            _running.discard(self)

    def _line(self) -> str:
        """Where it is now."""
        return self._where


class CoroutineRun(Running):
    """A callback's coroutine, from the XLA thread that starts it to the one that collects it.

    Args:
        what: kind and name of the callback.
        make: makes the coroutine, on the loop.
        context: the coroutine's.
        config: the JAX configuration of its steps.
    """

    __slots__ = (
        "_asked",
        "_config",
        "_context",
        "_done",
        "_host",
        "_make",
        "_steps",
        "_task",
        "_wait",
        "error",
        "ticket",
        "value",
    )

    def __init__(
        self,
        what: str,
        make: Callable[[], Awaitable[Any]],
        context: contextvars.Context,
        config: _compat.Snapshot | None,
    ) -> None:
        if _settings.forked:
            raise _settings.refuse_fork()
        super().__init__(what)
        self._make: Callable[[], Awaitable[Any]] | None = make
        self._context: contextvars.Context | None = context
        self._config = config
        self._done = threading.Event()
        self._steps: _Steps | None = None
        self._task: asyncio.Task[None] | None = None
        self._asked = False  # to be cancelled, by us
        self.ticket = -1
        self.value: Any = None
        self.error: BaseException | None = None
        # The body that called the program inline, and so waits for this; an XLA thread has none.
        self._wait = BodyWait(own_body())
        context.run(body_wait.set, self._wait)
        context.run(callbacks_here.set, (*context.get(callbacks_here, ()), self.place))
        self._host = next_loop()  # until another loop is faster

    def begin(self) -> None:
        """Have it run; who would cancel it if this is interrupted knows of it already."""
        self._begin()
        self._tell(self._start, self._host)

    def _tell(self, function: Callable[[Any], object], host: HostLoop) -> None:
        assert host.bridge is not None
        host.bridge.post(LoopCallback(function, None, contextvars.Context()))
        host.bridge.notify()

    def cancel(self) -> None:
        """Have the coroutine cancelled, which nobody will collect (any thread)."""
        collect(self.ticket)
        self._asked = True
        if not self._done.is_set():
            self._tell(self._start, self._host)  # an interrupt may have come between
            self._tell(self._cancel, self._host)

    def wait(self) -> Any:
        """Wait for the coroutine, and give or raise what came of it (any thread).

        A wait that is interrupted cancels the coroutine.
        """
        try:
            if not self._done.is_set():
                try:
                    with waiting():
                        self._wait_until_over()
                except BaseException:
                    self.cancel()
                    raise
            if self.error is not None:
                raise self.error
            return self.value
        finally:
            self.error = None
            del self

    def _wait_until_over(self) -> None:
        # The thread of its loop may be stuck: in a program that waits for this coroutine, by other
        # threads, or in what code that runs there waits for. Then it is begun on another loop.
        looks, host = 0, self._host
        while not self._done.wait(_PATIENCE):
            looks += 1
            if self._context is None:
                # Not for ever: a Ctrl-C just before does not interrupt it.
                while not self._done.wait(1.0):
                    pass
                return
            if host.occupants or looks >= _MOST_LOOKS:
                looks, host = 0, next_loop(host)
                self._tell(self._start, host)

    # -- on the loop ------------------------------------------------------------------------------

    def _start(self, _: object) -> None:
        with LOCK:
            context, self._context = self._context, None
        if context is None:  # another loop was faster
            return
        host = of_this_thread()
        assert host is not None
        self._host = host
        self._task = host.loop.create_task(
            self._run(), name=f"aiocolocated {self.what}", context=context
        )
        host.callbacks.add(self._task)
        self._task.add_done_callback(self._over, context=contextvars.Context())
        if self._asked:
            self._task.cancel()

    def _cancel(self, _: object) -> None:
        if self._task is not None:
            if self._host is of_this_thread():
                self._task.cancel()
            else:
                self._tell(self._cancel, self._host)

    async def _run(self) -> None:
        make, self._make = self._make, None
        assert make is not None
        self._wait.task = asyncio.current_task()
        self._steps = _Steps(make, self._config)
        try:
            self.value = await self._steps
        except asyncio.CancelledError as error:
            self.error = error  # its own
            if self._asked:
                self.error = CallCancelledError(f"the coroutine of {self.what} was cancelled")
                self.error.__cause__ = error
        except BaseException as error:
            _explain(error)
            self.error = error
        finally:
            self._steps = None
            del self, make

    def _over(self, task: asyncio.Task[None]) -> None:
        if self._make is not None:  # cancelled before its first step
            self._make = None
            self.error = CallCancelledError(f"the coroutine of {self.what} was cancelled")
        self._task = None
        self._host.callbacks.discard(task)
        self._wait.call = self._wait.task = None  # contexts are copied, and tasks keep theirs
        self._end()
        self._done.set()

    def is_running(self) -> bool:
        return not self._done.is_set()

    def _line(self) -> str:
        name = self._host.name
        steps = self._steps
        frame = getattr(None if steps is None else steps.coroutine, "cr_frame", None)
        if frame is None:
            return f"on loop {name!r}"
        return f"on loop {name!r}, at {frame.f_code.co_filename}:{frame.f_lineno}"


class _Steps:
    """Awaitable: a coroutine made and driven on a stream of its own, in a JAX configuration."""

    __slots__ = ("_config", "_make", "coroutine")

    def __init__(self, make: Callable[[], Awaitable[Any]], config: _compat.Snapshot | None) -> None:
        self._make: Callable[[], Awaitable[Any]] | None = make
        self._config = config
        self.coroutine: Awaitable[Any] | None = None

    def __await__(self) -> Generator[Any, Any, Any]:
        make, self._make = self._make, None
        assert make is not None
        self.coroutine = coroutine = make()
        return _coroutines.steps_of(coroutine, _programs.new_stream(), self._config)


def _explain(error: BaseException) -> None:
    text = str(error) if isinstance(error, RuntimeError) else ""
    if "different loop" in text or "different event loop" in text:
        error.add_note(
            "Callbacks run on the library's own event loop, not on the one that called the jitted "
            "function. Create the object in the callback, or keep what belongs to your loop there and "
            "give the callback a thread-safe way to it (asyncio.run_coroutine_threadsafe)."
        )


# --- tickets ------------------------------------------------------------------------------------------


def ticket_for(run: CoroutineRun) -> int:
    """A number under which a later callback collects the coroutine."""
    global _next_ticket
    with LOCK:
        _next_ticket = (_next_ticket + 1) % (1 << 31)
        _tickets[_next_ticket] = run
        run.ticket = _next_ticket
        if len(_tickets) > _MOST_TICKETS:
            over = [number for number, other in _tickets.items() if other._done.is_set()]
            for number in over[: max(0, len(over) - _MOST_TICKETS)]:
                del _tickets[number]
        return _next_ticket


def collect(ticket: int) -> CoroutineRun | None:
    """The coroutine of a ticket, which is good once."""
    with LOCK:
        return _tickets.pop(ticket, None)


def abandon(tickets: Iterable[int]) -> None:
    """Their program has failed: nobody will collect them."""
    for ticket in tickets:
        if (run := collect(ticket)) is not None:
            run.cancel()


# --- watch --------------------------------------------------------------------------------------------

_watching = False
_watch = 0  # the number of the watch in force


def watch_anew() -> None:
    """The limit has changed, and the next look may be a second away (under the lock)."""
    global _watch
    _watch += 1
    if _watching:
        _service.post(functools.partial(_look, _watch))


def coroutines_running() -> list[CoroutineRun]:
    """Every coroutine of a callback that is not over (under the lock)."""
    return [run for run in _running if isinstance(run, CoroutineRun)]


def _look(watch: int) -> None:
    """Log callbacks that are slow, each once (service thread)."""
    global _watching
    limit = _settings.current.slow_callback
    now = monotonic()
    slow: list[Running] = []
    with LOCK:
        if watch != _watch:
            return
        if not _running:
            _watching = False
            return
        for run in _running:
            if limit is not None and now - run._since >= limit and not run._reported:
                run._reported = True
                slow.append(run)
    pause = 1.0 if limit is None else max(0.01, min(limit / 4, 1.0))
    _service.call_at(now + pause, functools.partial(_look, watch))
    for run in slow:
        _service.logger.warning(
            "%s has not returned for %.1f s, %s (slow_callback is %s s). It never will if it waits for "
            "the program that called it, for work queued behind that, or for an event loop whose thread "
            "called that program.",
            run.what,
            now - run._since,
            run._line(),
            limit,
        )
