# SPDX-License-Identifier: Apache-2.0
"""Array futures: one object is the call, its place in the order, and what its waiters hold."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Generator, Sequence
from functools import partial
from time import monotonic
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar, cast, final

from aiocolocated import _compat, _contexts, _readiness, _service
from aiocolocated._exceptions import (
    BodyError,
    CallCancelledError,
    ChannelStoppedError,
    DeadlockError,
    WorkerLimitError,
)
from aiocolocated._loops import LoopBridge, LoopCallback, Wakes, bridge_for
from aiocolocated._owners import FailureReport, Owner
from aiocolocated._settings import LOCK
from aiocolocated._types import CANCELLED, DISPATCHED, FAILED, QUEUED, READY, RUNNING, CallState
from aiocolocated._workers import local, pool

if TYPE_CHECKING:
    from aiocolocated._channels import TaskChannel

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

_PACKAGE = __name__.partition(".")[0]


class Plan(Protocol):
    """What a call runs, and how its results are checked."""

    name: str
    host: str

    def body(self) -> Callable[..., Any]:
        """The function to call, shipped if that is needed (worker thread)."""

    def futures(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[ArrayFuture[Any]]:
        """The futures among the arguments."""

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], values: dict[int, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments as the body sees them; ``values`` by ``id`` of their future (worker thread)."""

    def finish(self, value: Any) -> tuple[Any, Sequence[Any]]:
        """The result as the caller sees it, and the arrays to wait for (worker thread)."""


# --- waiters ------------------------------------------------------------------------------------


class Waiter(Protocol):
    def wake(self, wakes: Wakes) -> None:
        """Called once, under the lock, when the call has got so far; must not run user code."""


class LoopWaiter:
    """A task that waits on a loop."""

    __slots__ = ("bridge", "future")

    def __init__(self, bridge: LoopBridge, future: asyncio.Future[None]) -> None:
        self.bridge = bridge
        self.future = future

    def wake(self, wakes: Wakes) -> None:
        self.bridge.post(self.future)
        wakes.bridge(self.bridge)


class ThreadWaiter:
    """A thread that waits."""

    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()

    def wake(self, wakes: Wakes) -> None:
        self.lock.release()


class _Callback:
    """A done callback: on the loop that added it or, without one, on the completing thread."""

    __slots__ = ("bridge", "entry")

    def __init__(self, entry: LoopCallback, bridge: LoopBridge | None) -> None:
        self.entry = entry
        self.bridge = bridge

    def wake(self, wakes: Wakes) -> None:
        if self.bridge is not None:
            self.bridge.post(self.entry)
            wakes.bridge(self.bridge)
        else:
            wakes.callback(self._deliver)

    def _deliver(self) -> None:
        if threading.current_thread().name == _service.THREAD_NAME:
            # It polls for everybody: user code must not hold it up.
            _service.start_thread(self._run, "aiocolocated-callback")
        else:
            self._run()

    def _run(self) -> None:
        entry = self.entry
        try:
            entry.context.run(entry.function, entry.argument)
        except Exception:
            _service.logger.exception("a done callback of %r failed", entry.argument)


# --- the future -----------------------------------------------------------------------------------


@final
class ArrayFuture(Generic[R_co]):
    """What a colocated call returns at once: awaitable, resolves to the body's result.

    The call is submitted already and runs whether or not anybody awaits it. ``await fut`` gives the
    tree that the body returned when every :class:`jax.Array` in it is computed, or raises what the
    body or the computation raised. It may be awaited many times, from several tasks, loops and
    threads, and passed to other colocated calls, whose bodies see the arrays.

    Made by calling a colocated function, :meth:`TaskChannel.submit`, :meth:`TaskChannel.run` or
    :meth:`TaskGroup.start_soon`; never directly.

    Ordering: the call's place in its channel was fixed by the call expression; awaiting changes
    nothing.

    Cancellation: a task that is cancelled while it waits stops waiting; if it was the last waiter,
    the call is cancelled too (:meth:`cancel`). :func:`asyncio.shield` keeps one waiter.

    Thread safety: every method may be called from any thread. Waiting synchronously on a running
    loop's thread raises :exc:`DeadlockError`.

    Example:
        >>> fut = f(x)                             # submitted
        >>> y = await fut                          # computed

    Source: :class:`asyncio.Future` for the method names; JAX's asynchronous dispatch for the two
    stages *dispatched* and *ready*.

    .. versionadded:: 0.1
    """

    __slots__ = (
        "__weakref__",
        "_args",
        "_blocked",
        "_channel",
        "_code",
        "_config",
        "_context",
        "_convert",
        "_dependencies",
        "_dependents",
        "_dispatch_waiters",
        "_futures",
        "_kwargs",
        "_lasti",
        "_loop",
        "_nested_channel",
        "_owner",
        "_plan",
        "_release",
        "_report",
        "_started",
        "_state",
        "_submitted",
        "_traceback",
        "_value",
        "_waiter_count",
        "_waiters",
        "_waiting_on",
        "_wide",
    )

    def __init__(self) -> None:
        raise TypeError(
            "ArrayFuture is not made directly: call a colocated function, or use TaskChannel.submit"
        )

    @classmethod
    def _create(
        cls,
        plan: Plan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        channel: TaskChannel,
        owner: Owner | None,
        loop: asyncio.AbstractEventLoop | None,
        code: CodeType,
        lasti: int,
    ) -> ArrayFuture[Any]:
        self = cls.__new__(cls)
        self._plan = plan
        self._args = args
        self._kwargs = kwargs
        self._channel = channel
        self._owner = owner
        self._loop = loop
        self._code = code
        self._lasti = lasti
        self._context: contextvars.Context | None = contextvars.copy_context()
        self._config = _compat.capture_config()
        self._submitted = monotonic()
        self._started = 0.0
        self._state = QUEUED
        self._value: Any = None
        self._traceback: TracebackType | None = None
        self._blocked = 0
        self._wide = False
        self._convert = False
        self._waiter_count = 0
        self._waiters: list[Waiter] | None = None
        self._dispatch_waiters: list[Waiter] | None = None
        self._futures: list[ArrayFuture[Any]] | None = None  # arguments, until submitted
        self._dependencies: list[ArrayFuture[Any]] | None = None
        self._dependents: list[ArrayFuture[Any]] | None = None
        self._report: FailureReport | None = None
        self._waiting_on: ArrayFuture[Any] | None = None
        self._nested_channel: TaskChannel | None = None
        self._release: Callable[[Wakes], None] | None = None
        return self

    # -- looking ---------------------------------------------------------------------------------

    def done(self) -> bool:
        """Whether the call is ready, failed or cancelled."""
        return self._state >= READY

    def cancelled(self) -> bool:
        """Whether the call was cancelled."""
        return self._state == CANCELLED

    def dispatched(self) -> bool:
        """Whether the body has returned (its arrays may still be computing), or the call is done."""
        return self._state >= DISPATCHED

    @property
    def state(self) -> CallState:
        """Where the call is, as a :class:`CallState`."""
        return CallState(self._state)

    def __repr__(self) -> str:
        return (
            f"<ArrayFuture {self._plan.name} {CallState(self._state).name.lower()}"
            f" channel={self._channel.name!r} submitted at {self._where()}>"
        )

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

    # -- awaiting ----------------------------------------------------------------------------------

    def __await__(self) -> Generator[Any, None, R_co]:
        if self._state < READY:
            yield from self._suspend(READY)
        try:
            return self._outcome()
        finally:
            del self  # a traceback keeps this frame, the future keeps the traceback

    async def wait_dispatched(self) -> R_co:
        """Wait until the body has returned; its arrays may still be computing.

        Returns:
            The body's tree. Passing its arrays to JAX or to other calls needs no further wait.

        Raises:
            Exception: what the body raised. An error of the computation itself is raised by
                ``await fut``.
            CallCancelledError: the call was cancelled by somebody else.

        Cancellation: as for ``await fut``.
        """
        if self._state < DISPATCHED:
            await _Suspension(self, DISPATCHED)
        try:
            if self._state == DISPATCHED:
                return cast("R_co", self._value)
            return self._outcome()
        finally:
            del self

    def _suspend(self, phase: int) -> Generator[Any, None, None]:
        loop = asyncio.get_running_loop()
        waiter = LoopWaiter(bridge_for(loop), loop.create_future())
        if not self._add_waiter(waiter, phase):
            return
        try:
            yield from waiter.future
        except BaseException:
            self._drop_waiter(waiter, phase, cancelled=True)
            raise

    def _outcome(self) -> R_co:
        if self._state == READY:
            return cast("R_co", self._value)
        try:
            if self._report is not None:
                self._report.retrieve()
            if self._state == CANCELLED:
                raise CallCancelledError(*self._value.args)
            raise self._value.with_traceback(self._traceback)
        finally:
            del self

    # -- synchronous bridge ---------------------------------------------------------------------------

    def result(self, timeout: float | None = None) -> R_co:
        """Wait in this thread and return the body's tree.

        Args:
            timeout: seconds; ``None`` waits for ever. A finished future never waits.

        Raises:
            TimeoutError: time ran out; the call goes on. The message says how far it got.
            DeadlockError: on a running loop's thread, or in a body that would wait for itself.
            WorkerLimitError: in a body, too many others wait already.
            CallCancelledError: the call was cancelled.
            Exception: what the body or the computation raised.

        Cancellation: none; Ctrl-C ends the wait and leaves the call alone.
        """
        if self._state < READY:
            self._block(timeout)
        try:
            return self._outcome()
        finally:
            del self

    def block_until_ready(self) -> R_co:
        """Wait in this thread until every array is computed, and return the tree.

        Lets :func:`jax.block_until_ready` wait for trees of futures (it returns the futures).

        Raises:
            BodyError: the body raised ``AttributeError`` (its cause), which JAX would swallow.
            Exception: as for :meth:`result`.
        """
        try:
            return self.result()
        except AttributeError as error:
            raise BodyError(
                f"{self._plan.name} raised AttributeError: {error}"
            ) from error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error of a failed call, ``None`` after success; waits like :meth:`result`.

        Raises:
            CallCancelledError: the call was cancelled.
        """
        if self._state < READY:
            self._block(timeout)
        if self._state == FAILED:
            if self._report is not None:
                self._report.retrieve()
            return cast("BaseException", self._value)
        if self._state == CANCELLED:
            raise CallCancelledError(*self._value.args)
        return None

    def _block(self, timeout: float | None) -> None:
        if asyncio._get_running_loop() is not None:
            raise DeadlockError(
                f"{self._plan.name} is not finished and this is a running event loop's thread: "
                "waiting here would stop the loop. Use 'await fut' instead."
            )
        waiter = ThreadWaiter()
        call: ArrayFuture[Any] | None = local.call
        with LOCK:
            if call is not None:
                self._refuse_cycle(call)
            if not self._add_waiter(waiter, READY):
                return
            if call is not None:
                call._waiting_on = self
        try:
            with waiting():
                woken = waiter.lock.acquire(timeout=-1 if timeout is None else max(0.0, timeout))
        finally:
            if call is not None:
                call._waiting_on = None
            self._drop_waiter(waiter, READY, cancelled=False)
        if not woken and self._state < READY:
            raise TimeoutError(
                f"{self._plan.name} is {self._progress()} after {timeout} s "
                f"(submitted {monotonic() - self._submitted:.3f} s ago at {self._where()})"
            )

    def _progress(self) -> str:
        return {
            QUEUED: f"still queued in channel {self._channel.name!r}",
            RUNNING: "still running",
            DISPATCHED: "still waiting for its arrays",
        }.get(self._state, "done")

    def _refuse_cycle(self, waiting_call: ArrayFuture[Any]) -> None:
        """Refuse a wait that the waiting body itself stands in the way of."""
        stack: list[ArrayFuture[Any]] = [self]
        seen: set[int] = set()
        while stack:
            call = stack.pop()
            if call is waiting_call:
                raise DeadlockError(
                    f"the body of {waiting_call._plan.name} waits for {self._plan.name}, which "
                    f"cannot start before that body has returned: it is behind it in channel "
                    f"{waiting_call._channel.name!r}. Call it directly, or from another channel."
                )
            if id(call) in seen or call._state >= DISPATCHED:
                continue
            seen.add(id(call))
            if call._state == RUNNING:
                if call._waiting_on is not None:
                    stack.append(call._waiting_on)
                continue
            stack += call._dependencies or ()
            order = call._channel._order
            if order.running is not None:
                stack.append(order.running)
            for ahead in order.queue:
                if ahead is call:
                    break
                stack += ahead._dependencies or ()

    # -- callbacks ------------------------------------------------------------------------------------

    def add_done_callback(
        self,
        fn: Callable[[ArrayFuture[R_co]], object],
        *,
        context: contextvars.Context | None = None,
    ) -> None:
        """Call ``fn(fut)`` once the call is done.

        On a running loop's thread: later on that loop, as :class:`asyncio.Future` does. Elsewhere:
        on the thread that completes the call, or at once if it is done, as
        :class:`concurrent.futures.Future` does; its exceptions are logged.

        A callback is no waiter: it does not keep the call from being cancelled.
        """
        loop = asyncio._get_running_loop()
        callback = _Callback(
            LoopCallback(fn, self, context or contextvars.copy_context()),
            None if loop is None else bridge_for(loop),
        )
        with LOCK:
            if self._state < READY:
                if self._waiters is None:
                    self._waiters = []
                self._waiters.append(callback)
                return
        wakes = Wakes()
        callback.wake(wakes)
        wakes.pay()

    def remove_done_callback(self, fn: Callable[[ArrayFuture[R_co]], object]) -> int:
        """Remove every callback equal to ``fn``; the number removed."""
        with LOCK:
            waiters = self._waiters or []
            kept = [w for w in waiters if not (isinstance(w, _Callback) and w.entry.function == fn)]
            if self._waiters is not None:
                self._waiters[:] = kept
            return len(waiters) - len(kept)

    # -- cancelling -----------------------------------------------------------------------------------

    def cancel(self, msg: object = None) -> bool:
        """Cancel the call; false if it is done already.

        A queued call never runs. The body of a running call cannot be interrupted: its waiters get
        :exc:`CallCancelledError` at once, its result is thrown away, and its channel's slot and its
        owner block stay occupied until it returns. Calls that depend on this one are cancelled too.

        Args:
            msg: added to the error's message, as for :meth:`asyncio.Future.cancel`.
        """
        wakes = Wakes()
        with LOCK:
            cancelled = self._cancel(wakes, "" if msg is None else f": {msg}")
        wakes.pay()
        return cancelled

    # -- misuse in words --------------------------------------------------------------------------------

    def __bool__(self) -> NoReturn:
        raise TypeError(f"an ArrayFuture has no truth value: await it first ({self!r})")

    def __iter__(self) -> NoReturn:
        raise TypeError(f"an ArrayFuture is not iterable: await it first ({self!r})")

    def __jax_array__(self) -> NoReturn:
        raise TypeError(
            f"an ArrayFuture is no array: await it first, or pass it to a colocated function or "
            f"TaskChannel.run, which wait for it ({self!r})"
        )

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        raise TypeError(f"an ArrayFuture is no array: await it first ({self!r})")

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"an ArrayFuture cannot be pickled: await it, or pass it as an argument ({self!r})"
        )

    # -- waiters (any thread) -----------------------------------------------------------------------------

    def _add_waiter(self, waiter: Waiter, phase: int) -> bool:
        """Register a waiter; false if the call has got that far already."""
        with LOCK:
            if self._state >= phase:
                return False
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

    def _depend_on(self, dependencies: list[ArrayFuture[Any]]) -> None:
        """Wait for other calls to be dispatched before this one starts.

        Until it starts this call counts as a waiter of them, and shares their fate.
        """
        waiting: list[ArrayFuture[Any]] = []
        for dependency in dependencies:
            if dependency._state >= READY:
                continue
            waiting.append(dependency)
            if dependency._dependents is None:
                dependency._dependents = []
            dependency._dependents.append(self)
            dependency._waiter_count += 1
            if dependency._state < DISPATCHED:
                self._blocked += 1
        self._dependencies = waiting or None

    def _release_dependencies(self, wakes: Wakes) -> None:
        """This call has started, or never will."""
        dependencies, self._dependencies = self._dependencies, None
        for dependency in dependencies or ():
            if dependency._dependents is not None and self in dependency._dependents:
                dependency._dependents.remove(self)
                dependency._waiter_gone(wakes, self._state == CANCELLED)

    def _unblock_dependents(self) -> None:
        for dependent in self._dependents or ():
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
        if before == QUEUED:
            self._args = self._kwargs = self._context = None  # type: ignore[assignment]
            if self._dependencies is not None:
                wakes.cascade(partial(self._release_dependencies, wakes))
            self._channel._call_left_queue(wakes)
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
                if self._report is not None:
                    self._report.retrieve()
                dependent._fail(wakes, self._value, self._traceback)
            else:
                dependent._cancel(wakes, f": it depends on {self._describe()}")

    def _cancel(self, wakes: Wakes, why: str) -> bool:
        if self._state >= READY:
            return False
        state = self._state
        error = CallCancelledError(f"{self._title()}, was cancelled while {_STATE_WORDS[state]}{why}")
        self._settle(wakes, CANCELLED, error)
        self._channel._call_failed(error, wakes, cancelled=True)
        return True

    def _fail(self, wakes: Wakes, error: BaseException, traceback: TracebackType | None) -> None:
        if self._state >= READY:
            return
        self._traceback = traceback
        self._report = FailureReport(error, self._describe(), self._loop)
        if self._owner is not None:
            self._owner.call_failed(self._report)
        self._settle(wakes, FAILED, error)
        self._channel._call_failed(error, wakes, cancelled=False)

    def _over(self, wakes: Wakes) -> None:
        """Settled, and nothing of the call runs any more."""
        self._loop = None
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.call_over(wakes)
        if self._release is not None:
            release, self._release = self._release, None
            release(wakes)

    # -- running (worker thread) ---------------------------------------------------------------------------

    def _execute(self, wakes: Wakes) -> None:
        """Run the body and settle."""
        self._started = monotonic()
        error: BaseException | None = None
        value: Any = None
        arrays: Sequence[Any] = ()
        ready = True
        local.call = self
        try:
            value, arrays = self._run_body()
            if arrays:
                ready = _compat.all_ready(arrays)
                if ready:
                    _readiness.raise_failed(arrays)
        except BaseException as exc:
            error = self._as_error(exc)
        local.call = None
        self._nested_channel = None
        order = self._channel._order
        with LOCK:
            order.body_ended()
            if error is not None:
                if self._state == RUNNING:
                    self._fail(wakes, error, error.__traceback__)
                self._computed(wakes)
            elif ready:
                if self._state == RUNNING:
                    self._settle(wakes, READY, value)
                self._computed(wakes)
            else:
                order.in_flight += 1
                computing.add(self)
                if self._state == RUNNING:
                    self._state = DISPATCHED
                    self._value = value
                    if self._dispatch_waiters is not None:
                        self._wake_dispatched(wakes)
                    if self._dependents is not None:
                        self._unblock_dependents()
        if not ready:
            _readiness.when_ready(arrays, partial(self._arrays_ready, arrays))

    def _run_body(self) -> tuple[Any, Sequence[Any]]:
        plan, args, kwargs = self._plan, self._args, self._kwargs
        context = self._context
        config, self._config = self._config, None
        self._args = self._kwargs = self._context = None  # type: ignore[assignment]
        if self._convert:
            args, kwargs = self._bind(args, kwargs)
        body = plan.body()
        assert context is not None
        options = context.get(_contexts.scope)
        if config is None and not options:
            value = context.run(body, *args, **kwargs)
        else:
            value = context.run(
                _contexts.run_configured, config, options or (), body, args, kwargs
            )
        del args, kwargs
        return plan.finish(value)

    def _bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with the futures' values in place of the futures."""
        wakes = Wakes()
        values: dict[int, Any] = {}
        with LOCK:
            for dependency in self._plan.futures(args, kwargs):
                if dependency._state == FAILED:
                    if dependency._report is not None:
                        dependency._report.retrieve()
                    raise dependency._value.with_traceback(dependency._traceback)
                if dependency._state == CANCELLED:
                    self._cancel(wakes, f": it depends on {dependency._describe()}")
                    raise CallCancelledError(*dependency._value.args)
                values[id(dependency)] = dependency._value
            self._release_dependencies(wakes)
        wakes.pay()
        return self._plan.bind(args, kwargs, values)

    def _as_error(self, error: BaseException) -> BaseException:
        """The exception that waiters get: traceback from the body on, notes attached once."""
        traceback = error.__traceback__
        while traceback is not None and _is_ours(traceback):
            traceback = traceback.tb_next
        error.__traceback__ = traceback
        if not isinstance(error, Exception) or isinstance(error, (StopIteration, StopAsyncIteration)):
            cause = error
            error = BodyError(f"{self._plan.name} raised {type(cause).__name__}: {_text(cause)}")
            error.__cause__ = cause
        try:
            notes: Sequence[str] = getattr(error, "__notes__", ())
            if not any(note.startswith("colocated call ") for note in notes):
                error.add_note(self._title())
        except Exception:  # an exception class that does not want notes
            _service.logger.debug("no note on %s", type(error).__name__, exc_info=True)
        return error

    def _arrays_ready(self, arrays: Sequence[Any]) -> None:
        """The poller found every array computed (service thread)."""
        error: BaseException | None = None
        try:
            _readiness.raise_failed(arrays)
        except Exception as exc:
            error = self._as_error(exc)
        wakes = Wakes()
        with LOCK:
            computing.discard(self)
            if self._channel._order.computed():
                pool.schedule(self._channel)
            if self._state == DISPATCHED:
                if error is not None:
                    self._fail(wakes, error, error.__traceback__)
                else:
                    self._settle(wakes, READY, self._value)
            self._computed(wakes)
        wakes.pay()

    def _computed(self, wakes: Wakes) -> None:
        if self._wide:
            self._channel._leave_gate()
        self._over(wakes)
        channel = self._channel
        if channel._order.idle:
            channel._became_idle(wakes)


class _Suspension:
    """Awaits one stage of a call from a coroutine."""

    __slots__ = ("_call", "_phase")

    def __init__(self, call: ArrayFuture[Any], phase: int) -> None:
        self._call = call
        self._phase = phase

    def __await__(self) -> Generator[Any, None, None]:
        return self._call._suspend(self._phase)


_STATE_WORDS = {QUEUED: "queued", RUNNING: "running", DISPATCHED: "its arrays were computing"}

# Calls whose body has returned and whose arrays are computing; for `runtime.calls()` and exit.
computing: set[ArrayFuture[Any]] = set()


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text cannot be made)"


def _is_ours(traceback: TracebackType) -> bool:
    name = traceback.tb_frame.f_globals.get("__name__", "")
    return isinstance(name, str) and (
        name.startswith((_PACKAGE + "._", _PACKAGE + ".hosts"))
    )


class waiting:
    """Context manager: this thread waits inside the library, its worker slot is free meanwhile."""

    __slots__ = ("_worker",)

    def __enter__(self) -> None:
        self._worker = local.worker
        if self._worker is not None:
            with LOCK:
                granted = pool.begin_wait(self._worker)
            if not granted:
                self._worker = None
                raise WorkerLimitError(
                    f"{pool.waiting} bodies wait for others already, which keeps their threads "
                    "(worker_ceiling); await futures outside of bodies, or pass them as arguments"
                )

    def __exit__(self, *exc: object) -> None:
        if self._worker is not None:
            with LOCK:
                pool.end_wait(self._worker)


def stopped_error(name: str, cause: BaseException) -> ChannelStoppedError:
    error = ChannelStoppedError(
        f"channel {name!r} was opened with on_error='stop' and an earlier call failed: {cause!r}"
    )
    error.__cause__ = cause
    return error


def as_argument(future: ArrayFuture[R]) -> R:
    """The future itself, typed as its result, to be passed to another colocated call.

    A future may be an argument of a later call; the body sees the arrays. This identity only tells
    type checkers so.

    Example:
        >>> z = await g(as_argument(f(x)))

    .. versionadded:: 0.1
    """
    return cast("R", future)
