# SPDX-License-Identifier: Apache-2.0
"""Task groups: limit, results, errors, and that they are asyncio's where they should be."""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
import time
import weakref

import jax
import jax.numpy as jnp
import pytest

from aiocolocated import (
    ArgumentError,
    CallCancelledError,
    TaskGroup,
    colocated_python,
    gather,
    open_task_channel,
    runtime,
)
from aiocolocated.testing import Gate, Recorder, Rendezvous

pytestmark = pytest.mark.timeout(40)


@pytest.fixture
def x() -> jax.Array:
    return jnp.arange(3.0)


@colocated_python
def ok(x: jax.Array) -> jax.Array:
    return x


@colocated_python
def give(x: jax.Array, value: object) -> object:
    return value


@colocated_python
def fail(x: jax.Array, error: BaseException) -> jax.Array:
    raise error


@colocated_python
def wait(x: jax.Array, gate: Gate, recorder: Recorder | None = None, name: object = 0) -> jax.Array:
    if recorder is not None:
        recorder.record("start", name=name)
    gate.wait()
    if recorder is not None:
        recorder.record("end", name=name)
    return x


@colocated_python
def wait_and_fail(x: jax.Array, gate: Gate, error: Exception) -> jax.Array:
    gate.wait()
    raise error


@colocated_python
def meet(x: jax.Array, meeting: Rendezvous, recorder: Recorder) -> jax.Array:
    recorder.record("start")
    meeting.wait()
    recorder.record("end")
    return x


async def eventually(condition, what: str, timeout: float = 10.0) -> None:
    """Wait until something that no future tells of has happened."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        await asyncio.sleep(0.001)


async def a_moment() -> None:
    """Time in which what must not happen would."""
    await asyncio.sleep(0.005)


def flat(group: BaseExceptionGroup) -> list[BaseException]:
    """The exceptions in a group, and in groups in it."""
    found = []
    for error in group.exceptions:
        found += flat(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


# --- starting ---------------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_results_are_in_order_of_starting(x):
    """results() lists calls, coroutines, futures and plain callables as they were started."""
    gate = Gate()

    async def coroutine(value):
        await asyncio.sleep(0)
        return value

    async with TaskGroup() as group:
        first = group.start_soon(wait, x, gate)
        second = group.start_soon(coroutine, "coroutine function")
        third = group.create_task(coroutine("coroutine"))
        fourth = group.create_task(give(x, "future"))
        fifth = group.start_soon(len, "plain callable")
        with pytest.raises(RuntimeError, match="after the block"):
            group.results()
        await gather(second, third, fourth, fifth)
        gate.open()
    assert group.results() == [x, "coroutine function", "coroutine", "future", 14]
    assert isinstance(second, asyncio.Task)
    assert isinstance(fourth, asyncio.Task)
    assert first.result() is x


@pytest.mark.asyncio
async def test_started_calls_overlap(x, recorder):
    """Without a limit all started calls run at once."""
    meeting = Rendezvous(8)
    async with TaskGroup() as group:
        for _ in range(8):
            group.start_soon(meet, x, meeting, recorder)
    assert recorder.peak() == 8


@pytest.mark.asyncio
async def test_start_soon_passes_keyword_arguments(x):
    """Positional and keyword arguments reach the function, whichever kind it is."""

    async def coroutine(a, *, b):
        return a, b

    async with TaskGroup() as group:
        group.start_soon(give, x, value="colocated")
        group.start_soon(coroutine, 1, b=2)
        group.start_soon(dict, a=1)
    assert group.results() == ["colocated", (1, 2), {"a": 1}]


@pytest.mark.asyncio
async def test_what_cannot_be_started_is_refused(x):
    """Things that are neither awaitable nor callable are refused by name, and do no harm."""
    async with TaskGroup() as group:
        for wrong in (3, x, None):
            with pytest.raises(ArgumentError, match="create_task takes"):
                group.create_task(wrong)
            with pytest.raises(ArgumentError, match="callable"):
                group.start_soon(wrong)
        group.start_soon(ok, x)
    assert group.results() == [x]


@pytest.mark.parametrize("limit", [0, -1])
def test_senseless_limit_is_refused(limit):
    """A limit below one could never start anything."""
    with pytest.raises(ValueError, match="limit"):
        TaskGroup(limit=limit)


@pytest.mark.asyncio
async def test_group_without_results_keeps_nothing(x):
    """keep_results=False forgets what is over, and says so when asked."""

    class Value:
        pass

    async with TaskGroup(keep_results=False) as group:
        watched = weakref.ref(await group.start_soon(give, x, Value()))
        await a_moment()
        assert watched() is None
        task = weakref.ref(group.start_soon(asyncio.sleep, 0))
        await eventually(lambda: gc.collect() >= 0 and task() is None, "the task is forgotten")
    with pytest.raises(RuntimeError, match="keep_results"):
        group.results()


@pytest.mark.asyncio
async def test_start_soon_from_child_tasks(x, recorder):
    """Tasks of the group start calls in it, which the block waits for."""
    gate = Gate()

    async def child(name):
        group.start_soon(wait, x, gate, recorder, name)

    async def block():
        nonlocal group
        async with TaskGroup() as group:
            for name in range(3):
                group.create_task(child(name))

    group: TaskGroup
    leaving = asyncio.create_task(block())
    await recorder.wait_for("start", 3)
    await a_moment()
    assert not leaving.done()
    gate.open()
    await leaving


# --- limit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 5])
@pytest.mark.asyncio
async def test_limit_is_the_peak(x, recorder, limit):
    """Exactly `limit` calls run at once: no more, and no fewer."""
    meeting = Rendezvous(limit)  # passes only when so many run together
    async with TaskGroup(limit=limit) as group:
        for _ in range(4 * limit):
            group.start_soon(meet, x, meeting, recorder)
    assert recorder.peak() == limit
    assert recorder.count("end") == 4 * limit


@pytest.mark.asyncio
async def test_limit_counts_calls_and_coroutines_together(x, recorder):
    """Calls and coroutines share the limit, and take turns in the order of starting."""
    gates = [Gate() for _ in range(6)]

    async def coroutine(i):
        recorder.record("start", name=i)
        await gates[i].wait_async()
        recorder.record("end", name=i)

    async with TaskGroup(limit=2) as group:
        for i, gate in enumerate(gates):
            if i % 2:
                group.start_soon(coroutine, i)
            else:
                group.start_soon(wait, x, gate, recorder, i)
        for i, gate in enumerate(gates):
            await recorder.wait_for("start", min(6, i + 2))
            assert len(recorder.sequence("start", "name")) == min(6, i + 2)
            gate.open()
            await recorder.wait_for("end", i + 1)
    assert recorder.peak() == 2
    assert recorder.sequence("end", "name") == list(range(6))
    assert sorted(recorder.sequence("start", "name")[:2]) == [0, 1]
    assert recorder.sequence("start", "name")[2:] == [2, 3, 4, 5]


@pytest.mark.asyncio
async def test_limit_does_not_hold_back_waiting_for_futures(x):
    """create_task(f(x)) only waits for a call of the task's channel, and takes no slot."""
    gate = Gate()
    async with TaskGroup(limit=1) as group:
        group.start_soon(wait, x, gate)
        task = group.create_task(ok(x))
        assert await task is x
        gate.open()


@pytest.mark.asyncio
async def test_cancelled_held_call_never_runs_and_loses_no_slot(x, recorder):
    """Calls that are cancelled while the limit holds them back are skipped; the rest gets its turn."""
    gate = Gate()
    async with TaskGroup(limit=1) as group:
        first = group.start_soon(wait, x, gate, recorder, "first")
        held = [group.start_soon(wait, x, gate, recorder, i) for i in range(6)]
        for call in held[:5:2]:
            assert call.cancel()
        gate.open()
        await first
    assert recorder.sequence("start", "name") == ["first", 1, 3, 5]
    assert recorder.peak() == 1
    assert [call.cancelled() for call in held] == [True, False, True, False, True, False]
    with pytest.raises(CallCancelledError):
        group.results()


@pytest.mark.asyncio
async def test_cancelled_held_coroutine_never_runs_and_loses_no_slot(x, recorder):
    """The same for coroutines, whether they wait for their turn or have just got it."""
    gate = Gate()

    async def coroutine(name):
        recorder.record("start", name=name)

    async with TaskGroup(limit=1) as group:
        first = group.start_soon(wait, x, gate, recorder, "first")
        tasks = [group.start_soon(coroutine, i) for i in range(4)]
        tasks[0].cancel()  # before it has begun to wait
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        tasks[2].cancel()  # while it waits
        gate.open()
        while not first.done():
            await asyncio.sleep(0)
        tasks[1].cancel()  # about when it gets its turn
        last = group.start_soon(ok, x)
        await last
    assert [task.cancelled() for task in tasks[::2]] == [True, True]
    assert not tasks[3].cancelled()
    assert 3 in recorder.sequence("start", "name")
    assert not {0, 2} & set(recorder.sequence("start", "name"))


@pytest.mark.asyncio
async def test_coroutine_cancelled_before_it_starts_is_closed(x):
    """A coroutine that a limited group never gets to start is closed, as asyncio's group does it."""
    async with TaskGroup(limit=1) as group:
        coro = asyncio.sleep(0)
        group.create_task(coro).cancel()
    assert inspect.getcoroutinestate(coro) == inspect.CORO_CLOSED


@pytest.mark.asyncio
async def test_failed_call_gives_its_slot_back(x):
    """A limited group whose call fails cancels the ones held back and ends."""
    gate = Gate()
    with pytest.raises(ExceptionGroup) as caught:
        async with TaskGroup(limit=1) as group:
            group.start_soon(wait_and_fail, x, gate, ValueError("first"))
            held = [group.start_soon(ok, x) for _ in range(5)]
            gate.open()
    assert [error.args for error in caught.value.exceptions] == [("first",)]
    assert all(call.done() for call in held)


@pytest.mark.asyncio
async def test_abandoned_call_holds_its_slot(x, recorder):
    """A cancelled call whose body still runs counts against the limit until it ends."""
    gate = Gate()
    async with TaskGroup(limit=1) as group:
        abandoned = group.start_soon(wait, x, gate, recorder, "abandoned")
        await recorder.wait_for("start")
        abandoned.cancel()
        following = group.start_soon(ok, x)
        await a_moment()
        assert not following.done()
        gate.open()
        await following
        assert recorder.count("end") == 1


@pytest.mark.asyncio
async def test_limited_call_with_dependency_waits_for_both(x):
    """A held call starts when it has its slot and its arguments, in either order."""
    first_gate, second_gate = Gate(), Gate()
    async with TaskGroup(limit=1) as group:
        first = group.start_soon(wait, x, first_gate)
        needed = wait(x, second_gate)
        held = group.start_soon(ok, needed)
        first_gate.open()
        await first
        await a_moment()
        assert not held.done()
        second_gate.open()
        assert await held is x


# --- errors -----------------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_one_failure_cancels_siblings_into_one_group(x, recorder):
    """A failed call cancels calls and tasks beside it; the block raises one flat group."""
    gate = Gate()
    error = ValueError("one")
    ended = []

    async def sleeper():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("task")

    async def block():
        async with TaskGroup() as group:
            calls.append(group.start_soon(wait, x, gate, recorder))
            calls.append(wait(x, gate, recorder))
            group.create_task(sleeper())
            await recorder.wait_for("start", 2)
            group.start_soon(fail, x, error)
            await asyncio.Event().wait()  # the block's own code is interrupted, too

    calls = []
    leaving = asyncio.create_task(block())
    await recorder.wait_for("start", 2)
    await eventually(lambda: all(call.cancelled() for call in calls), "the calls are cancelled")
    await a_moment()
    assert not leaving.done()
    gate.open()
    with pytest.raises(ExceptionGroup) as caught:
        await leaving
    assert caught.value.exceptions == (error,)
    assert ended == ["task"]
    assert recorder.count("end") == 2


@pytest.mark.asyncio
async def test_failure_is_one_exception_also_for_a_task_that_awaits_it(x):
    """A call's error that a task of the group has awaited, too, is in the group once."""
    error = ValueError("once")
    with pytest.raises(ExceptionGroup) as caught:
        async with TaskGroup() as group:
            call = group.start_soon(fail, x, error)

            async def child():
                await call

            group.create_task(child())
    assert flat(caught.value) == [error]


@pytest.mark.asyncio
async def test_failure_counts_even_if_the_block_handles_it(x):
    """As with asyncio's tasks, a started call that fails ends the group, awaited or not."""
    with pytest.raises(ExceptionGroup) as caught:
        async with TaskGroup() as group:
            call = group.start_soon(fail, x, ValueError("handled"))
            try:
                await call
            except ValueError:
                await asyncio.sleep(0)
    assert [error.args for error in flat(caught.value)] == [("handled",)]


@pytest.mark.asyncio
async def test_unretrieved_errors_of_other_calls_join(x):
    """Errors of calls made as f(x), which nobody awaited, come out in the group; awaited ones do not."""
    with pytest.raises(ExceptionGroup) as caught:
        async with TaskGroup():
            fail(x, ValueError(1))
            with pytest.raises(KeyError):
                await fail(x, KeyError(2))
            fail(x, ValueError(3))
    assert [error.args for error in caught.value.exceptions] == [(1,), (3,)]


@pytest.mark.asyncio
async def test_errors_of_calls_and_tasks_come_in_one_group(x):
    """What failed before the group could cancel it is all there."""
    gate = Gate()
    meeting = Rendezvous(2)

    def both(error):
        meeting.wait()
        raise error

    async def task():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise KeyError("while cancelled") from None

    with pytest.raises(ExceptionGroup) as caught:
        async with TaskGroup() as group:
            group.create_task(task())
            await asyncio.sleep(0)
            group.start_soon(both, ValueError(1))
            group.start_soon(both, ValueError(2))
    gate.open()
    found = {error.args for error in flat(caught.value)}
    assert ("while cancelled",) in found
    assert found & {(1,), (2,)}


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_late_failure_cancels_calls_that_were_started_late(x, recorder):
    """A call that a task starts after the block's code has ended still takes its siblings with it."""
    go, gate, sibling_gate = asyncio.Event(), Gate(), Gate()
    siblings = []

    async def child():
        await go.wait()
        group.start_soon(wait_and_fail, x, gate, ValueError("late"))
        siblings.extend(group.start_soon(wait, x, sibling_gate, recorder, i) for i in range(3))

    async def block():
        nonlocal group
        async with TaskGroup(limit=2) as group:
            group.create_task(child())

    group: TaskGroup
    leaving = asyncio.create_task(block())
    await a_moment()
    go.set()
    await recorder.wait_for("start")
    gate.open()
    await eventually(lambda: all(call.cancelled() for call in siblings), "they are cancelled")
    sibling_gate.open()
    with pytest.raises(ExceptionGroup) as caught:
        await leaving
    assert [error.args for error in flat(caught.value)] == [("late",)]
    assert recorder.count("start") < 3


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_late_calls_are_cancelled_with_the_block(x, recorder):
    """Cancelling the block reaches calls that were started after its code had ended."""
    go, gate = asyncio.Event(), Gate()

    async def child():
        await go.wait()
        group.start_soon(wait, x, gate, recorder, "runs")
        group.start_soon(wait, x, gate, recorder, "held")

    async def block():
        nonlocal group
        async with TaskGroup(limit=1) as group:
            group.create_task(child())

    group: TaskGroup
    leaving = asyncio.create_task(block())
    await a_moment()
    go.set()
    await recorder.wait_for("start")
    leaving.cancel()
    await eventually(lambda: runtime.statistics().abandoned == 1, "the call is cancelled")
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert recorder.sequence("start", "name") == ["runs"]


@pytest.mark.asyncio
async def test_results_after_failure_raise_it(x):
    """results() of a failed group raises the first handle's error again."""
    with pytest.raises(ExceptionGroup):
        async with TaskGroup() as group:
            group.start_soon(fail, x, ValueError("first"))
    with pytest.raises(ValueError, match="first"):
        group.results()


@pytest.mark.asyncio
async def test_cancelling_one_call_leaves_the_group(x):
    """A call of the group that is cancelled by name is no failure."""
    gate = Gate()
    async with TaskGroup() as group:
        call = group.start_soon(wait, x, gate)
        other = group.start_soon(wait, x, gate)
        call.cancel()
        gate.open()
    assert call.cancelled()
    assert other.result() is x


# --- nesting ----------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_nested_groups_fail_separately(x):
    """An inner group's failure leaves the outer one alone when its block handles it."""
    gate, inner_gate = Gate(), Gate()
    async with TaskGroup() as outer:
        kept = outer.start_soon(wait, x, gate)
        with pytest.raises(ExceptionGroup):
            async with TaskGroup() as inner:
                lost = inner.start_soon(wait, x, inner_gate)
                lost.add_done_callback(lambda _: inner_gate.open())
                inner.start_soon(fail, x, ValueError("inner"))
        assert lost.cancelled()
        assert not kept.done()
        gate.open()
    assert kept.result() is x


@pytest.mark.asyncio
async def test_outer_failure_cancels_inner_groups_and_waits(x, recorder):
    """When the outer group fails, the inner block is cancelled, and nothing of either runs after."""
    gate = Gate()

    async def inner():
        async with TaskGroup() as group:
            group.start_soon(wait, x, gate, recorder, "inner")

    async def outer():
        async with TaskGroup() as group:
            group.create_task(inner())
            await recorder.wait_for("start")
            group.start_soon(fail, x, ValueError("outer"))

    leaving = asyncio.create_task(outer())
    await recorder.wait_for("start")
    await eventually(lambda: runtime.statistics().abandoned == 1, "the inner call is cancelled")
    await a_moment()
    assert not leaving.done()
    gate.open()
    with pytest.raises(ExceptionGroup) as caught:
        await leaving
    assert [error.args for error in flat(caught.value)] == [("outer",)]
    assert recorder.count("end") == 1


@pytest.mark.asyncio
async def test_group_in_a_channels_block(x, recorder):
    """A group inside a channel's block has its own calls; the block's channel keeps its own."""
    async with open_task_channel() as channel:
        for i in range(3):
            wait(x, opened(), recorder, i)
        async with TaskGroup(limit=2) as group:
            for _ in range(4):
                group.start_soon(ok, x)
        assert channel.statistics().submitted == 3
    assert recorder.sequence("end", "name") == [0, 1, 2]


def opened() -> Gate:
    gate = Gate()
    gate.open()
    return gate


# --- as asyncio -------------------------------------------------------------------------------------


class Interrupt(BaseException):
    """An exception that is no Exception."""


async def raise_(error):
    raise error


async def forever():
    await asyncio.Event().wait()


async def stubborn(log):
    """A task that needs a moment to end when it is cancelled."""
    try:
        await forever()
    finally:
        await asyncio.sleep(0)
        log.append("cleaned up")


async def success(group_type, log):
    async with group_type() as group:
        tasks = [group.create_task(asyncio.sleep(0, i)) for i in range(3)]
    log.append([task.result() for task in tasks])


async def one_task_fails(group_type, log):
    async with group_type() as group:
        group.create_task(stubborn(log))
        group.create_task(raise_(ValueError("task")))
        await forever()


async def body_fails(group_type, log):
    async with group_type() as group:
        group.create_task(stubborn(log))
        await asyncio.sleep(0)
        raise ValueError("body")


async def body_and_task_fail(group_type, log):
    async with group_type() as group:
        group.create_task(raise_(KeyError("task")))
        raise ValueError("body")


async def two_tasks_fail(group_type, log):
    async with group_type() as group:
        for i in range(2):
            coro = raise_(ValueError(i))
            try:
                group.create_task(coro)
            finally:
                if inspect.getcoroutinestate(coro) == inspect.CORO_CREATED:  # refused
                    coro.close()


async def task_cancels_itself(group_type, log):
    async with group_type() as group:
        task = group.create_task(raise_(asyncio.CancelledError()))
        other = group.create_task(asyncio.sleep(0, "fine"))
    log.append((task.cancelled(), other.result()))


async def task_is_cancelled(group_type, log):
    async with group_type() as group:
        task = group.create_task(stubborn(log))
        await asyncio.sleep(0)
        task.cancel()
    log.append(task.cancelled())


async def body_raises_cancelled(group_type, log):
    async with group_type() as group:
        group.create_task(stubborn(log))
        await asyncio.sleep(0)
        raise asyncio.CancelledError("from the body")


async def cancelled_in_body(group_type, log):
    async def block():
        async with group_type() as group:
            group.create_task(stubborn(log))
            await forever()

    await cancel_and_look(block, log)


async def cancelled_while_leaving(group_type, log):
    async def block():
        async with group_type() as group:
            group.create_task(stubborn(log))

    await cancel_and_look(block, log)


async def cancelled_twice_while_leaving(group_type, log):
    async def block():
        async with group_type() as group:
            group.create_task(stubborn(log))

    await cancel_and_look(block, log, times=2)


async def cancel_and_look(block, log, times=1):
    task = asyncio.create_task(block())
    for _ in range(3):
        await asyncio.sleep(0)
    for _ in range(times):
        task.cancel()
    await asyncio.wait([task], timeout=10)
    log.append((task.cancelled(), task.cancelling()))


async def failure_does_not_leave_a_cancellation(group_type, log):
    try:
        async with group_type() as group:
            group.create_task(raise_(ValueError()))
            await forever()
    except ExceptionGroup:
        log.append(asyncio.current_task().cancelling())
    await asyncio.sleep(0)
    log.append("went on")


async def failure_in_a_cancelled_task(group_type, log):
    async def block():
        try:
            async with group_type() as group:
                group.create_task(stubborn_failure())
        except ExceptionGroup as caught:
            log.append(shape(caught))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        log.append("went on")

    async def stubborn_failure():
        try:
            await forever()
        finally:
            raise ValueError("while cancelled")

    await cancel_and_look(block, log)


async def failure_within_a_timeout(group_type, log):
    try:
        async with asyncio.timeout(0.01):
            async with group_type() as group:
                group.create_task(stubborn_failure_of_group())
    except (ExceptionGroup, TimeoutError) as error:
        log.append(shape(error))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    log.append(asyncio.current_task().cancelling())


async def stubborn_failure_of_group():
    try:
        await forever()
    finally:
        raise ValueError("while cancelled")


async def timeout_around(group_type, log):
    async with asyncio.timeout(0.01):
        async with group_type() as group:
            group.create_task(stubborn(log))


async def task_interrupts(group_type, log):
    async with group_type() as group:
        group.create_task(stubborn(log))
        group.create_task(raise_(Interrupt("task")))


async def body_interrupts(group_type, log):
    async with group_type() as group:
        group.create_task(stubborn(log))
        await asyncio.sleep(0)
        raise Interrupt("body")


async def nested(group_type, log):
    async with group_type() as outer:
        outer.create_task(stubborn(log))
        async with group_type() as inner:
            inner.create_task(raise_(ValueError("inner")))


async def task_starts_tasks(group_type, log):
    async def child(depth):
        log.append(depth)
        if depth:
            group.create_task(child(depth - 1))

    async with group_type() as group:
        group.create_task(child(3))


async def create_before_entering(group_type, log):
    group = group_type()
    coro = asyncio.sleep(0)
    try:
        group.create_task(coro)
    finally:
        coro.close()


async def create_after_leaving(group_type, log):
    async with group_type() as group:
        pass
    coro = asyncio.sleep(0)
    try:
        group.create_task(coro)
    finally:
        coro.close()


async def create_while_failing(group_type, log):
    async def last_wish():
        try:
            await forever()
        finally:
            coro = asyncio.sleep(0)
            try:
                group.create_task(coro)
            except RuntimeError:
                log.append("refused")
            finally:
                coro.close()

    async with group_type() as group:
        group.create_task(last_wish())
        await asyncio.sleep(0)
        group.create_task(raise_(ValueError("first")))


async def enter_twice(group_type, log):
    group = group_type()
    async with group:
        pass
    async with group:
        pass


async def name_and_context(group_type, log):
    import contextvars

    variable = contextvars.ContextVar("variable", default="outside")
    context = contextvars.copy_context()
    context.run(variable.set, "inside")

    async def look():
        await asyncio.sleep(0)  # an eager task gets its name when it has started
        log.append((asyncio.current_task().get_name(), variable.get()))

    async with group_type() as group:
        group.create_task(look(), name="named", context=context)


SCENARIOS = [
    success,
    one_task_fails,
    body_fails,
    body_and_task_fail,
    two_tasks_fail,
    task_cancels_itself,
    task_is_cancelled,
    body_raises_cancelled,
    cancelled_in_body,
    cancelled_while_leaving,
    cancelled_twice_while_leaving,
    failure_does_not_leave_a_cancellation,
    failure_in_a_cancelled_task,
    failure_within_a_timeout,
    timeout_around,
    task_interrupts,
    body_interrupts,
    nested,
    task_starts_tasks,
    create_before_entering,
    create_after_leaving,
    create_while_failing,
    enter_twice,
    name_and_context,
]


def shape(error: BaseException | None):
    """An exception as something to compare."""
    if isinstance(error, BaseExceptionGroup):
        return type(error).__name__, sorted(map(str, map(shape, error.exceptions)))
    if isinstance(error, RuntimeError):  # its text names the group, which is another one
        return type(error).__name__
    return None if error is None else (type(error).__name__, error.args)


async def outcome(scenario, group_type):
    log = []
    error = None

    async def run():
        nonlocal error
        try:
            await scenario(group_type, log)
        except BaseException as caught:
            error = caught

    await asyncio.wait([asyncio.create_task(run())], timeout=10)
    return shape(error), log


@pytest.mark.parametrize("limit", [None, 100])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_group_of_tasks_behaves_as_asyncios(scenario, limit):
    """With tasks alone, everything that can be seen is what asyncio.TaskGroup shows."""
    expected = await outcome(scenario, asyncio.TaskGroup)
    assert await outcome(scenario, lambda: TaskGroup(limit=limit)) == expected


def test_group_is_an_asyncio_group():
    """Code that takes asyncio's group takes ours."""
    assert issubclass(TaskGroup, asyncio.TaskGroup)
    assert sys.version_info >= (3, 11)
