# SPDX-License-Identifier: Apache-2.0
"""Array futures in the hands of asyncio and anyio, on every kind of loop; and done callbacks."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import functools
import inspect
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import pytest

import aiocolocated
from aiocolocated import (
    ArrayFuture,
    CallCancelledError,
    TaskChannel,
    TaskGroup,
    colocated_python,
    runtime,
    wait_until_ready,
)
from aiocolocated.testing import Gate, Recorder

pytestmark = pytest.mark.timeout(40)


@pytest.fixture(scope="module")
def x() -> jax.Array:
    # For the module, because a leak check that has to wait for pytest to drop it takes its time; and
    # used once, because on older JAX the first wait makes a view of an array that lives as long as it.
    return same(jnp.arange(3.0)).result(10)


@colocated_python
def hold(x: jax.Array, started: Gate, gate: Gate) -> jax.Array:
    """Say so, and wait."""
    started.open()
    gate.wait()
    return x


@colocated_python
def fail(x: jax.Array, gate: Gate) -> jax.Array:
    gate.wait()
    del x  # the error's traceback would hold it
    raise KeyError("from the body")


@colocated_python
def same(x: jax.Array) -> jax.Array:
    return x


async def eventually(condition: Callable[[], object], what: str, timeout: float = 10.0) -> None:
    """Wait until something that no future tells of has happened."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        await asyncio.sleep(0.001)


async def ended(*tasks: asyncio.Task[Any]) -> None:
    """Wait until tasks are over, whatever they raise: raised here it would tie frames into a cycle."""
    _, pending = await asyncio.wait(tasks, timeout=10)
    assert not pending


async def cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task, which must take it."""
    task.cancel()
    await ended(task)
    assert task.cancelled()


async def idle() -> None:
    """Wait until no call is in flight, abandoned ones included."""
    await eventually(lambda: not runtime.calls(), "all calls are over")


class Held:
    """A call whose body runs and waits until it is released; in a channel of its own."""

    def __init__(self, x: jax.Array) -> None:
        self.started, self.gate = Gate(), Gate()
        self.channel = TaskChannel()
        self.future = self.channel.submit_nowait(hold, x, self.started, self.gate)

    async def running(self) -> ArrayFuture[jax.Array]:
        await self.started.wait_async()
        return self.future

    async def release(self) -> None:
        self.gate.open()
        await self.channel.aclose()


# --- the table: ways to wait for one future ---------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to wait, and what cancelling the task that waits so means for the call."""

    wait: Callable[[ArrayFuture[Any]], Awaitable[Any]]
    cancels: bool = True  # the waiter counts, and goes with its task


WAYS: dict[str, Way] = {}


def way(name: str, *, cancels: bool = True) -> Callable[[Any], Any]:
    def add(wait: Any) -> Any:
        WAYS[name] = Way(wait, cancels)
        return wait

    return add


@way("await")
async def by_await(fut):
    return await fut


@way("asyncio.wait_for")
async def by_wait_for(fut):
    return await asyncio.wait_for(fut, 10)


@way("asyncio.timeout")
async def by_timeout(fut):
    async with asyncio.timeout(10):
        return await fut


@way("asyncio.gather")
async def by_gather(fut):
    (value,) = await asyncio.gather(fut)
    return value


@way("asyncio.shield", cancels=False)
async def by_shield(fut):
    return await asyncio.shield(fut)


@way("asyncio.wait", cancels=False)
async def by_wait(fut):
    done, pending = await asyncio.wait([fut])
    assert (done, pending) == ({fut}, set())
    return fut.result()


@way("asyncio.wait first completed", cancels=False)
async def by_wait_first(fut):
    done, _ = await asyncio.wait([fut], return_when=asyncio.FIRST_COMPLETED)
    return done.pop().result()


@way("asyncio.as_completed", cancels=False)
async def by_as_completed(fut):
    for first in asyncio.as_completed([fut]):
        return await first


@way("asyncio.ensure_future", cancels=True)
async def by_ensure_future(fut):
    return await asyncio.ensure_future(fut)


@way("asyncio.TaskGroup")
async def by_task_group(fut):
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(by_await(fut))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return task.result()


@way("aiocolocated.TaskGroup")
async def by_our_task_group(fut):
    try:
        async with TaskGroup() as group:
            task = group.create_task(fut)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return task.result()


@way("aiocolocated.gather")
async def by_our_gather(fut):
    (value,) = await aiocolocated.gather(fut)
    return value


@way("aiocolocated.as_completed")
async def by_our_as_completed(fut):
    async for first in aiocolocated.as_completed([fut]):
        return await first


@way("aiocolocated.wait_until_ready", cancels=False)
async def by_wait_until_ready(fut):
    return await wait_until_ready(fut)


@way("wait_dispatched")
async def by_wait_dispatched(fut):
    return await fut.wait_dispatched()


@way("anyio.CancelScope")
async def by_cancel_scope(fut):
    with anyio.CancelScope():
        return await fut


@way("anyio.move_on_after")
async def by_move_on_after(fut):
    with anyio.move_on_after(10):
        return await fut


@way("anyio.fail_after")
async def by_fail_after(fut):
    with anyio.fail_after(10):
        return await fut


@way("anyio.create_task_group")
async def by_anyio_task_group(fut):
    values = []

    async def child() -> None:
        values.append(await fut)

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(child)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return values[0]


each_way = pytest.mark.parametrize("way", list(WAYS.values()), ids=list(WAYS))


async def begin(way: Way, fut: ArrayFuture[Any]) -> asyncio.Task[Any]:
    """A task that waits in this way, once it really waits."""
    before = len(fut._waiters or ()) + len(fut._dispatch_waiters or ())
    task = asyncio.ensure_future(way.wait(fut))
    await eventually(
        lambda: len(fut._waiters or ()) + len(fut._dispatch_waiters or ()) > before, "it waits"
    )
    return task


@pytest.mark.all_loops
@pytest.mark.asyncio
@each_way
async def test_value_arrives_however_it_is_waited_for(way, x):
    """The very array that the body returned, before and after the call is done."""
    held = Held(x)
    task = await begin(way, held.future)
    await held.release()
    assert await asyncio.wait_for(task, 10) is x
    assert await asyncio.wait_for(way.wait(held.future), 10) is x


@pytest.mark.all_loops
@pytest.mark.asyncio
@each_way
async def test_error_arrives_however_it_is_waited_for(way, x):
    """The body's own exception, for who waited and for who comes later."""
    gate = Gate()
    fut = fail(x, gate)
    task = await begin(way, fut)
    gate.open()
    later = asyncio.ensure_future(way.wait(fut))
    await ended(task, later)
    for waiting in (task, later):
        assert isinstance(waiting.exception(), KeyError)
        assert waiting.exception().args == ("from the body",)


@pytest.mark.all_loops
@pytest.mark.asyncio
@each_way
async def test_call_goes_with_its_only_waiter(way, x):
    """Cancelling the task that alone waits cancels the call, unless its way to wait is no waiter."""
    held = Held(x)
    fut = await held.running()
    task = await begin(way, fut)
    await cancel(task)
    if way.cancels:
        await eventually(fut.done, "the call is cancelled")
        assert fut.cancelled()
        later = asyncio.ensure_future(by_await(fut))
        await ended(later)
        assert isinstance(later.exception(), CallCancelledError)
        assert "its last waiter was cancelled" in str(later.exception())
    else:
        await asyncio.sleep(0)
        assert not fut.done()
    await held.release()
    if not way.cancels:
        assert await fut is x


@pytest.mark.all_loops
@pytest.mark.asyncio
@each_way
async def test_call_stays_for_its_other_waiter(way, x):
    """Cancelling one of two tasks that wait in the same way leaves the other its value."""
    held = Held(x)
    fut = await held.running()
    first, second = await begin(way, fut), await begin(way, fut)
    await cancel(first)
    assert not fut.done()
    assert not second.done()
    await held.release()
    assert await asyncio.wait_for(second, 10) is x


@pytest.mark.all_loops
@pytest.mark.asyncio
@each_way
async def test_waiter_that_was_not_cancelled_gets_an_exception(way, x):
    """When somebody else cancels the call, its waiters get CallCancelledError and are not cancelled."""
    held = Held(x)
    fut = await held.running()
    task = await begin(way, fut)
    assert fut.cancel()
    await ended(task)
    assert not task.cancelled()
    assert isinstance(task.exception(), CallCancelledError)
    await held.release()


# --- timeouts ---------------------------------------------------------------------------------------


async def expire_wait_for(fut):
    await asyncio.wait_for(fut, 0.01)


async def expire_timeout(fut):
    async with asyncio.timeout(0.01):
        await fut


async def expire_fail_after(fut):
    with anyio.fail_after(0.01):
        await fut


async def expire_move_on_after(fut):
    with anyio.move_on_after(0.01) as scope:
        await fut
    assert scope.cancelled_caught
    raise TimeoutError


async def expire_cancel_scope(fut):
    with anyio.CancelScope() as scope:
        asyncio.get_running_loop().call_later(0.01, scope.cancel)
        await fut
    assert scope.cancelled_caught
    raise TimeoutError


async def expire_anyio_group(fut):
    async with anyio.create_task_group() as group:
        group.start_soon(by_await, fut)
        await anyio.sleep(0.01)
        group.cancel_scope.cancel()
    raise TimeoutError


each_timeout = pytest.mark.parametrize(
    "expire",
    [
        expire_wait_for,
        expire_timeout,
        expire_fail_after,
        expire_move_on_after,
        expire_cancel_scope,
        expire_anyio_group,
    ],
)


@pytest.mark.all_loops
@pytest.mark.asyncio
@each_timeout
async def test_timeout_releases_waiter_and_cancels_call(expire, x):
    """A timeout is prompt although the body cannot be interrupted, and the call is cancelled."""
    held = Held(x)
    fut = await held.running()
    expiring = asyncio.ensure_future(expire(fut))
    await ended(expiring)
    assert isinstance(expiring.exception(), TimeoutError)
    assert fut.cancelled()
    assert held.channel.statistics().abandoned == 1
    await held.release()


@pytest.mark.all_loops
@pytest.mark.asyncio
@each_timeout
async def test_timeout_of_one_leaves_call_to_others(expire, x):
    """A timeout of one waiter is not that of another."""
    held = Held(x)
    fut = await held.running()
    other = await begin(WAYS["await"], fut)
    expiring = asyncio.ensure_future(expire(fut))
    await ended(expiring)
    assert isinstance(expiring.exception(), TimeoutError)
    assert not fut.done()
    await held.release()
    assert await other is x


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_timeout_of_wait_leaves_call_pending(x):
    """asyncio.wait and wait_until_ready with a timeout look, and cancel nothing."""
    held = Held(x)
    fut = await held.running()
    done, pending = await asyncio.wait([fut], timeout=0.01)
    assert (done, pending) == (set(), {fut})
    with pytest.raises(TimeoutError):
        await wait_until_ready(fut, timeout=0.01)
    assert not fut.done()
    await held.release()
    assert await fut is x


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_cancelled_queued_call_never_runs(x, recorder):
    """A timeout of a call that is still queued takes it out of the queue."""
    held = Held(x)
    started = Gate()
    queued = held.channel.submit_nowait(hold, x, started, held.gate)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(queued, 0.01)
    assert queued.cancelled()
    await held.release()
    assert not started.is_open


# --- several futures --------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_asyncio_wait_takes_array_futures_as_they_are(x):
    """FIRST_COMPLETED, FIRST_EXCEPTION and ALL_COMPLETED tell futures apart by themselves."""
    slow, quick, failing = Held(x), Held(x), Gate()
    failed = TaskChannel().submit_nowait(fail, x, failing)
    futures = {slow.future, quick.future, failed}
    quick.gate.open()
    done, pending = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED, timeout=10)
    assert (done, pending) == ({quick.future}, {slow.future, failed})
    failing.open()
    done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION, timeout=10)
    assert (done, pending) == ({failed}, {slow.future})
    slow.gate.open()
    done, pending = await asyncio.wait(futures, timeout=10)
    assert (done, pending) == (futures, set())
    assert isinstance(failed.exception(), KeyError)
    # `wait` has taken its callbacks back.
    assert not any(fut.remove_done_callback(print) for fut in futures)


@pytest.mark.all_loops
@pytest.mark.asyncio
@pytest.mark.parametrize("gather", [asyncio.gather, aiocolocated.gather])
async def test_gather_keeps_order_and_exceptions(gather, x):
    """Results are in the order of the arguments, whichever call is done first."""
    first, second, failing = Held(x), Held(x + 1), Gate()
    failed = TaskChannel().submit_nowait(fail, x, failing)
    gathering = asyncio.ensure_future(
        _collected(gather(first.future, failed, second.future, return_exceptions=True))
    )
    await second.release()
    failing.open()
    await asyncio.wait([failed], timeout=10)
    await first.release()
    one, error, two = await asyncio.wait_for(gathering, 10)
    assert one is first.future.result()
    assert two is second.future.result()
    assert error is failed.exception()


async def _collected(gathering):
    return await gathering


@pytest.mark.all_loops
@pytest.mark.asyncio
@pytest.mark.parametrize("gather", [asyncio.gather, aiocolocated.gather])
async def test_gather_raises_first_error_and_leaves_the_rest(gather, x):
    """The first error is raised at once; the other call goes on."""
    held, failing = Held(x), Gate()
    failed = TaskChannel().submit_nowait(fail, x, failing)
    failing.open()
    with pytest.raises(KeyError, match="from the body"):
        await asyncio.wait_for(_collected(gather(held.future, failed)), 10)
    assert not held.future.done()
    await held.release()
    assert await held.future is x


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_as_completed_gives_results_in_order_of_completion(x):
    """asyncio.as_completed and the library's own yield first what is done first."""
    held = [Held(x + i) for i in range(3)]
    order = [2, 0, 1]
    futures = [h.future for h in held]
    found: list[list[Any]] = [[], []]

    async def ours() -> None:
        async for fut in aiocolocated.as_completed(futures):
            found[0].append(await fut)

    async def theirs() -> None:
        for first in asyncio.as_completed(futures):
            found[1].append(await first)

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(ours())
        group.create_task(theirs())
        for count, i in enumerate(order):
            await held[i].release()
            await eventually(
                lambda count=count: all(len(f) == count + 1 for f in found), "it is told"
            )
    expected = [await futures[i] for i in order]
    assert all(a is b for got in found for a, b in zip(got, expected, strict=True))


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_task_group_failure_cancels_calls_awaited_in_it(x):
    """A failing child of asyncio.TaskGroup and of anyio's cancels the calls that its siblings await."""

    async def boom() -> None:
        raise KeyError("sibling")

    held = [Held(x), Held(x)]
    for h in held:
        await h.running()
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            group.create_task(by_await(held[0].future))
            group.create_task(asyncio.sleep(0.01)).add_done_callback(
                lambda _: group.create_task(boom())
            )
    assert caught.group_contains(KeyError)
    with pytest.raises(ExceptionGroup) as caught:
        async with anyio.create_task_group() as anyio_group:
            anyio_group.start_soon(by_await, held[1].future)
            await anyio.wait_all_tasks_blocked()
            anyio_group.start_soon(boom)
    assert caught.group_contains(KeyError)
    for h in held:
        assert h.future.cancelled()
        await h.release()


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_shield_keeps_call_while_others_come_and_go(x):
    """One shield keeps the call alive when every other waiter is cancelled."""
    held = Held(x)
    fut = await held.running()
    shielded = await begin(WAYS["asyncio.shield"], fut)
    other = await begin(WAYS["await"], fut)
    for task in (other, shielded):
        await cancel(task)
    assert not fut.done()
    await held.release()
    assert await fut is x


@pytest.mark.asyncio
async def test_two_kinds_of_waiters_count_alike(x):
    """A waiter for dispatch keeps the call for a waiter for the result, and the other way round."""
    for one, other in (("await", "wait_dispatched"), ("wait_dispatched", "await")):
        held = Held(x)
        fut = await held.running()
        first, second = await begin(WAYS[one], fut), await begin(WAYS[other], fut)
        await cancel(first)
        assert not fut.done()
        await held.release()
        assert await second is x


@pytest.mark.asyncio
async def test_thread_keeps_call_of_cancelled_task(x):
    """A thread that waits is a waiter as a task is."""
    held = Held(x)
    fut = await held.running()
    thread = asyncio.create_task(asyncio.to_thread(fut.result, 10))
    await eventually(lambda: fut._waiters, "the thread waits")
    task = await begin(WAYS["await"], fut)
    await cancel(task)
    assert not fut.done()
    await held.release()
    assert await thread is x


# --- what kind of thing it is -------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_future_is_awaitable_and_no_asyncio_future(x):
    """asyncio must wrap it: with isfuture true, wait_for and gather would cancel it for everybody."""
    fut = same(x)
    assert inspect.isawaitable(fut)
    assert isinstance(fut, Awaitable)
    assert not asyncio.isfuture(fut)
    assert not asyncio.iscoroutine(fut)
    assert not isinstance(fut, asyncio.Future)
    assert await fut is x


@pytest.mark.asyncio
async def test_future_is_hashable_and_equal_to_itself_only(x):
    """Futures go into sets and dictionaries, as asyncio.wait needs."""
    a, b = same(x), same(x)
    assert len({a, b, a}) == 2
    assert a != b
    await aiocolocated.gather(a, b)


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_future_may_be_awaited_many_times_at_once(x):
    """Fifty tasks wait for one call and get one and the same array."""
    held = Held(x)
    tasks = [await begin(WAYS["await"], held.future) for _ in range(50)]
    await held.release()
    values = await asyncio.wait_for(asyncio.gather(*tasks), 10)
    assert all(value is x for value in values)


# --- done callbacks -----------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_callbacks_run_later_on_the_loop_in_order(x, recorder):
    """On a loop callbacks run on its thread, in the order they were added, never inside the call."""
    held = Held(x)
    fut = held.future

    def note(name: str, future: ArrayFuture[Any]) -> None:
        assert asyncio.get_running_loop() is loop
        recorder.record("called", name=(name, future is fut, future.done()))

    loop = asyncio.get_running_loop()
    for name in "abc":
        fut.add_done_callback(functools.partial(note, name))
    await held.release()
    await recorder.wait_for("called", 3)
    fut.add_done_callback(functools.partial(note, "late"))
    assert recorder.count("called") == 3
    await recorder.wait_for("called", 4)
    assert recorder.sequence("called") == [(n, True, True) for n in ("a", "b", "c", "late")]
    assert {event.thread for event in recorder.events} == {threading.current_thread().name}


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_callbacks_run_in_order_with_awaiting_tasks(x, recorder):
    """Who came first is told first: callbacks and tasks share one order on a loop."""
    held = Held(x)
    fut = held.future

    async def waiter(name: str) -> None:
        await fut
        recorder.record("told", name=name)

    fut.add_done_callback(lambda _: recorder.record("told", name="callback 1"))
    first = asyncio.ensure_future(waiter("task 1"))
    await eventually(lambda: len(fut._waiters or ()) == 2, "it waits")
    fut.add_done_callback(lambda _: recorder.record("told", name="callback 2"))
    await held.release()
    await asyncio.wait_for(first, 10)
    await recorder.wait_for("told", 3)
    names = recorder.sequence("told")
    assert names.index("callback 1") < names.index("callback 2")
    assert sorted(names) == ["callback 1", "callback 2", "task 1"]


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_callback_sees_context_of_its_adder(x, recorder):
    """The context is that of add_done_callback, or the one given."""
    variable = contextvars.ContextVar("variable", default="none")
    held = Held(x)

    def note(_: object) -> None:
        recorder.record("seen", value=variable.get())

    other = contextvars.copy_context()
    other.run(variable.set, "given")
    variable.set("added")
    held.future.add_done_callback(note)
    held.future.add_done_callback(note, context=other)
    variable.set("later")
    await held.release()
    await recorder.wait_for("seen", 2)
    assert recorder.sequence("seen") == ["added", "given"]


@pytest.mark.all_loops
@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["failed", "cancelled"])
async def test_callback_runs_whatever_happened(how, x, recorder):
    """Callbacks run for failed and for cancelled calls."""
    gate = Gate()
    fut = fail(x, gate)
    fut.add_done_callback(lambda f: recorder.record("called", state=f.state.name.lower()))
    if how == "cancelled":
        fut.cancel()
        await recorder.wait_for("called")
        gate.open()
    else:
        gate.open()
        await recorder.wait_for("called")
        assert isinstance(fut.exception(), KeyError)
    assert recorder.sequence("called") == [how]
    await idle()


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_removed_callback_does_not_run(x, recorder):
    """remove_done_callback takes all equal callbacks back and says how many."""
    held = Held(x)
    fut = held.future

    def removed(_: object) -> None:
        recorder.record("called", name="removed")

    fut.add_done_callback(removed)
    fut.add_done_callback(lambda _: recorder.record("called", name="kept"))
    fut.add_done_callback(removed)
    assert fut.remove_done_callback(removed) == 2
    assert fut.remove_done_callback(removed) == 0
    await held.release()
    await recorder.wait_for("called")
    await asyncio.sleep(0)
    assert fut.remove_done_callback(removed) == 0
    assert recorder.sequence("called") == ["kept"]


@pytest.mark.asyncio
async def test_bound_method_callback_can_be_removed(x, recorder):
    """Callbacks are compared by equality: a bound method is a new object each time."""
    held = Held(x)

    class Owner:
        def called(self, _: object) -> None:
            recorder.record("called")

    owner = Owner()
    held.future.add_done_callback(owner.called)
    assert held.future.remove_done_callback(owner.called) == 1
    await held.release()
    assert recorder.count("called") == 0


@pytest.mark.asyncio
async def test_callback_is_no_waiter(x, recorder):
    """A callback neither keeps a call when its last waiter goes nor cancels it when removed."""
    held = Held(x)
    fut = await held.running()
    fut.add_done_callback(print)
    assert fut.remove_done_callback(print) == 1
    assert not fut.done()
    fut.add_done_callback(lambda f: recorder.record("called", cancelled=f.cancelled()))
    task = await begin(WAYS["await"], fut)
    await cancel(task)
    assert fut.cancelled()
    await recorder.wait_for("called")
    assert recorder.sequence("called") == [True]
    await held.release()


def test_callbacks_without_a_loop_run_where_the_call_ends(x):
    """In a thread: on the completing thread in order, or at once if the call is done."""
    recorder, held = Recorder(), Held(x)
    for i in range(3):
        held.future.add_done_callback(lambda _, i=i: recorder.record("called", i=i))
    assert recorder.count("called") == 0
    held.gate.open()
    assert held.future.result(10) is x
    asyncio.run(recorder.wait_for("called", 3))
    assert recorder.sequence("called") == [0, 1, 2]
    here = threading.current_thread().name
    assert here not in {event.thread for event in recorder.events}
    held.future.add_done_callback(lambda _: recorder.record("called", i=3))
    assert recorder.sequence("called") == [0, 1, 2, 3]
    assert recorder.events[-1].thread == here


def test_callback_in_a_thread_runs_on_the_cancelling_thread(x):
    """Cancelling completes the call, so its callbacks run before cancel() returns."""
    recorder, held = Recorder(), Held(x)
    held.future.add_done_callback(lambda f: recorder.record("called", done=f.cancelled()))
    assert held.future.cancel()
    assert recorder.sequence("called") == [True]
    assert recorder.events[0].thread == threading.current_thread().name
    held.gate.open()
    asyncio.run(held.channel.aclose())


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_callback_may_submit_and_add_callbacks(x, recorder):
    """A callback on the loop may call colocated functions and add further callbacks."""

    def then(fut: ArrayFuture[Any]) -> None:
        same(fut.result()).add_done_callback(
            lambda f: recorder.record("called", same=f.result() is x)
        )

    same(x).add_done_callback(then)
    await recorder.wait_for("called")
    assert recorder.sequence("called") == [True]


def test_callback_in_a_thread_may_submit_and_wait_for_nothing(x):
    """A callback on a worker may submit; the call goes to that thread's channel and runs."""
    recorder, held = Recorder(), Held(x)

    def then(fut: ArrayFuture[Any]) -> None:
        same(fut.result()).add_done_callback(
            lambda f: recorder.record("called", same=f.result() is x)
        )

    held.future.add_done_callback(then)
    held.gate.open()
    asyncio.run(recorder.wait_for("called"))
    assert recorder.sequence("called") == [True]


# --- waiting in threads ---------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [None, float("inf"), 1e30])
def test_thread_may_wait_for_ever(timeout, x):
    """Endless timeouts are longer than a lock can wait, and wait without limit."""
    held = Held(x)
    threading.Timer(0.02, held.gate.open).start()
    assert held.future.result(timeout) is x
    assert held.future.exception(timeout) is None


@pytest.mark.parametrize("timeout", [0, -1, 0.01])
def test_wait_in_thread_times_out_and_leaves_call(timeout, x):
    """A timeout of result() or exception() ends the wait and leaves the call alone."""
    held = Held(x)
    held.started.wait()
    for wait in (held.future.result, held.future.exception):
        with pytest.raises(TimeoutError, match="hold is still running"):
            wait(timeout)
    assert not held.future.done()
    held.gate.open()
    assert held.future.result(10) is x
