# SPDX-License-Identifier: Apache-2.0
"""Task groups that own colocated calls as well as tasks."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, overload

from aiocolocated._channels import new_channel
from aiocolocated._exceptions import ArgumentError
from aiocolocated._futures import ArrayFuture
from aiocolocated._loops import Wakes, bridge_for
from aiocolocated._owners import Owner, current_owner, enter_owner, leave_owner
from aiocolocated._plans import RunPlan
from aiocolocated._settings import LOCK
from aiocolocated._submission import cancel_owned, settle_owned, stay_cancelled, submit
from aiocolocated._types import FAILED
from aiocolocated._waiters import LoopWaiter

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class TaskGroup(asyncio.TaskGroup):
    """An :class:`asyncio.TaskGroup` for colocated calls and tasks, with a limit and results.

    Calls that are submitted inside the block, by the block itself or by its tasks, belong to it:
    leaving waits for all of them, bodies that were abandoned included, however often the task is
    cancelled meanwhile. When a started call or task fails, the others are cancelled. Errors arrive in
    one :exc:`ExceptionGroup`; errors of other calls that nobody retrieved join it.

    Args:
        limit: started calls and coroutines that run at once; ``None`` any number. The others wait
            their turn in the order in which they were started.
        keep_results: keep every handle for :meth:`results`. Give ``False`` to a group that lives as
            long as its server, or it grows with every request.

    Ordering: each ``start_soon`` call has a channel of its own, so they overlap. Calls made as
    ``f(x)`` in the block go to the task's channel, one after the other.

    Cancellation: cancels queued calls, tells waiters at once, waits for bodies that run.

    Thread safety: as :class:`asyncio.TaskGroup`: use it from its own loop.

    Example:
        >>> async with TaskGroup(limit=8) as group:
        ...     for path in paths:
        ...         group.start_soon(decode, path)
        >>> images = group.results()

    .. versionadded:: 0.1
    """

    def __init__(self, *, limit: int | None = None, keep_results: bool = True) -> None:
        super().__init__()
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be None or at least 1, got {limit!r}")
        self._owner = Owner(None)
        self._limit = limit
        self._taken = 0
        self._held: deque[Callable[[Wakes], bool]] = deque()
        self._handles: list[Any] | None = [] if keep_results else None
        self._left: asyncio.Event | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> TaskGroup:
        await super().__aenter__()
        self._owner.parent = current_owner()
        enter_owner(self._owner)
        self._left = asyncio.Event()
        self._start_keeper()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        assert self._left is not None
        self._left.set()
        if isinstance(exc, KeyboardInterrupt):
            self._owner.given_up = True
        error: BaseException | None = None
        try:
            await super().__aexit__(kind, exc, tb)
        except BaseException as caught:
            error = caught
        try:
            if isinstance(error, KeyboardInterrupt):
                self._owner.given_up = True
            if error is not None:
                cancel_owned(self._owner, "its task group failed")
            self._owner.close_streams()
            was_cancelled = isinstance(error, asyncio.CancelledError)
            cancelled = await settle_owned(self._owner, cancelled=was_cancelled)
            leave_owner(self._owner)
            errors = self._owner.take_unretrieved()
            if isinstance(error, BaseExceptionGroup):
                known = _members(error)
                errors = [e for e in errors if id(e) not in known and e is not exc]
                # A task that awaited a call fails with the same object as the group's own look at it.
                unique = {id(e): e for e in (*error.exceptions, *errors)}
                if len(unique) != len(error.exceptions):
                    error = error.derive(list(unique.values()))
                stay_cancelled()
                raise error
            if errors and (error is None or isinstance(error, asyncio.CancelledError)):
                stay_cancelled()
                raise BaseExceptionGroup("unhandled errors in a TaskGroup", errors)
            if error is None:
                error = cancelled
            if error is not None:
                raise error
        finally:
            del exc, tb, error

    def _start_keeper(self) -> None:
        """A task of the group hears at once when the group is cancelled.

        Also while the block's own code goes on. It keeps the group open while calls run that are no
        tasks.
        """
        keeping, context = self._keep_calls(), contextvars.copy_context()
        try:
            self._keeper = super().create_task(
                keeping, name="aiocolocated-taskgroup", context=context
            )
        except BaseException:
            keeping.close()
            raise

    async def _keep_calls(self) -> None:
        assert self._left is not None
        try:
            await asyncio.sleep(0)  # eager tasks: the call that it is for is not there yet
            await self._left.wait()
            while self._owner.live and not self._owner.given_up:
                if await settle_owned(self._owner) is not None:
                    raise asyncio.CancelledError
        except asyncio.CancelledError:
            cancel_owned(self._owner, "its task group was cancelled")
            await settle_owned(self._owner, cancelled=True)
            raise

    # -- starting -----------------------------------------------------------------------------------

    @overload
    def start_soon(
        self, fn: Callable[P, ArrayFuture[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> ArrayFuture[R]: ...
    @overload
    def start_soon(  # type: ignore[overload-overlap] # a coroutine is a result, too
        self, fn: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Task[T]: ...
    @overload
    def start_soon(
        self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> ArrayFuture[R]: ...
    def start_soon(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Start a colocated call in a channel of its own; its failure cancels the group.

        Takes coroutine functions too (a task), and other callables (run like
        :meth:`TaskChannel.run`).

        Returns:
            The call's future, or the coroutine's task.

        Raises:
            RuntimeError: the group is not entered, or finished.
            SpecError, TracedCallError, ArgumentError: as for calling ``fn``.
        """
        if inspect.iscoroutinefunction(fn):
            return self.create_task(fn(*args, **kwargs))
        if self._keeper is None or self._owner.closed:
            raise RuntimeError(f"{self!r} is not active")
        if self._keeper.done():  # all was over when the block was left, but for a task
            self._start_keeper()
        frame = sys._getframe(1)
        prepare = getattr(fn, "_prepare_call", None) or RunPlan(fn).prepare
        call: ArrayFuture[Any] = prepare(
            new_channel(), args, kwargs, frame.f_code, frame.f_lasti, self._owner
        )
        del frame
        if self._limit is not None:
            with LOCK:
                if self._taken < self._limit:
                    self._taken += 1
                    call._release = self._release_slot
                else:
                    call._blocked += 1
                    self._held.append(functools.partial(self._let_go, call))
        call.add_done_callback(self._call_done)
        submit(call)
        if self._handles is not None:
            self._handles.append(call)
        return call

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T] | ArrayFuture[T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
        **options: Any,
    ) -> asyncio.Task[T]:
        """Start a task for a coroutine, or for waiting on an array future.

        The future was submitted by its call expression: ``create_task(f(x))`` twice is one channel,
        in order. Use :meth:`start_soon` for concurrent calls.
        """
        turn: _Turn | None = None
        if isinstance(coro, ArrayFuture):
            coroutine: Any = _wait(coro)
        elif not inspect.iscoroutine(coro):
            raise ArgumentError(f"create_task takes a coroutine or an array future, got {coro!r}")
        elif self._limit is not None:
            turn = _Turn(self, coro)
            coroutine = turn.run()
        else:
            coroutine = coro
        try:
            task: asyncio.Task[T] = super().create_task(
                coroutine, name=name, context=context, **options
            )
        except BaseException:
            if coroutine is not coro:
                coroutine.close()
            if turn is not None:
                turn.over()
            raise
        if turn is not None:
            task.add_done_callback(turn.over)
        if self._handles is not None:
            self._handles.append(task)
        return task

    def results(self) -> list[Any]:
        """Results of everything that was started, in the order of starting; after the block.

        Raises:
            RuntimeError: the block is not left yet, or was made with ``keep_results=False``.
        """
        if self._handles is None:
            raise RuntimeError("this group was made with keep_results=False")
        if not self._owner.closed:
            raise RuntimeError("results() is for after the block")
        return [handle.result() for handle in self._handles]

    # -- limit --------------------------------------------------------------------------------------

    def _release_slot(self, wakes: Wakes) -> None:
        """Give the slot of something that is over to the next that waits (under the lock)."""
        while self._held:
            if self._held.popleft()(wakes):
                return
        self._taken -= 1

    def _let_go(self, call: ArrayFuture[Any], wakes: Wakes) -> bool:
        """Start a held call; false if it was cancelled meanwhile."""
        if call.done():
            return False
        call._release = self._release_slot
        call._blocked -= 1
        if not call._blocked:
            call._channel._resume()
        return True

    def _call_done(self, call: ArrayFuture[Any]) -> None:
        """Let the group fail with a started call, by way of a task that awaits it.

        Where that is too late, the error is not retrieved, and joins on leaving.
        """
        if call._state == FAILED and not self._owner.closed:
            waiting = _wait(call)
            try:
                super().create_task(waiting)
            except RuntimeError:
                waiting.close()


class _Turn:
    """A coroutine's place among all that a limit counts, from ``create_task`` on."""

    __slots__ = ("_coro", "_group", "_waiter")

    def __init__(self, group: TaskGroup, coro: Coroutine[Any, Any, Any]) -> None:
        self._coro = coro
        self._group = group
        self._waiter: LoopWaiter | None = None
        loop = asyncio.get_running_loop()
        with LOCK:
            assert group._limit is not None
            if group._taken < group._limit:
                group._taken += 1
            else:
                self._waiter = LoopWaiter(bridge_for(loop), loop.create_future())
                group._held.append(self._let_go)

    def _let_go(self, wakes: Wakes) -> bool:
        assert self._waiter is not None
        self._waiter.wake(wakes)
        return True

    async def run(self) -> Any:
        if self._waiter is not None:
            await self._waiter.future
        return await self._coro

    def over(self, task: object = None) -> None:
        """The task is done, or never was; it may have been cancelled before it started."""
        self._coro.close()
        wakes = Wakes()
        with LOCK:
            if self._let_go in self._group._held:
                self._group._held.remove(self._let_go)
            else:
                self._group._release_slot(wakes)
        wakes.pay()


async def _wait(future: ArrayFuture[T]) -> T:
    try:
        return await future
    finally:
        del future


def _members(group: BaseExceptionGroup[BaseException]) -> set[int]:
    """Ids: exceptions may be equal, unhashable, or refuse to be compared."""
    found: set[int] = set()
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            found |= _members(error)
        found.add(id(error))
    return found
