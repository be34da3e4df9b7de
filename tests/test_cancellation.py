# SPDX-License-Identifier: Apache-2.0
"""Cancellation (contract C6): a test per clause."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time

import jax
import jax.numpy as jnp
import pytest
from late_arrays import Late

from aiocolocated import (
    BodyError,
    CallCancelledError,
    TaskChannel,
    TaskGroup,
    as_completed,
    colocated_python,
    gather,
    open_task_channel,
    runtime,
    wait_until_ready,
)
from aiocolocated.testing import Gate, Recorder

pytestmark = pytest.mark.timeout(40)


@pytest.fixture
def x() -> jax.Array:
    return jnp.arange(3.0)


@colocated_python
def ok(x: jax.Array) -> jax.Array:
    return x


@colocated_python
def wait(x: jax.Array, gate: Gate, recorder: Recorder | None = None, name: object = 0) -> jax.Array:
    """Note the start, wait, note the end."""
    if recorder is not None:
        recorder.record("start", name=name)
    gate.wait()
    if recorder is not None:
        recorder.record("end", name=name)
    return x


@colocated_python
def fail(x: jax.Array, error: BaseException) -> jax.Array:
    raise error


@colocated_python
def be_late(x: jax.Array, late: Late) -> jax.Array:
    return late.array(x)


async def eventually(condition, what: str, timeout: float = 10.0) -> None:
    """Wait until something that no future tells of has happened."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        await asyncio.sleep(0.001)


async def a_moment() -> None:
    """Time in which what must not happen would."""
    await asyncio.sleep(0.005)


async def cancelled(task: asyncio.Future) -> None:
    """Cancel a task that waits, and see it end that way."""
    await asyncio.sleep(0)  # let it start to wait
    task.cancel()
    await asyncio.wait([task], timeout=10)
    assert task.cancelled()


class Held:
    """A call that runs until :meth:`let_go`."""

    def __init__(self, x: jax.Array, channel: TaskChannel | None = None) -> None:
        self.gate, self.recorder = Gate(), Recorder()
        self.channel = TaskChannel() if channel is None else channel
        self.call = self.channel.submit_nowait(wait, x, self.gate, self.recorder)

    async def started(self) -> Held:
        await self.recorder.wait_for("start")
        return self

    @property
    def ended(self) -> bool:
        return self.recorder.count("end") == 1

    def let_go(self) -> None:
        self.gate.open()


# --- cancel() ---------------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_cancelled_queued_call_never_runs(x, recorder):
    """A call that is cancelled in the queue is skipped, and its waiters are told at once."""
    gate = Gate()
    async with open_task_channel() as channel:
        blocker = wait(x, gate)
        doomed, after = wait(x, gate, recorder, "doomed"), wait(x, gate, recorder, "after")
        waiter = asyncio.ensure_future(doomed)
        await asyncio.sleep(0)
        assert doomed.cancel()
        assert doomed.cancelled()
        assert doomed.done()
        with pytest.raises(CallCancelledError, match="while queued"):
            await waiter
        await eventually(lambda: channel.statistics().running, "the first call runs")
        assert not blocker.done()
        assert channel.statistics().queued == 1
        gate.open()
        await gather(blocker, after)
    assert recorder.sequence("start") == ["after"]


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_cancelling_running_call_abandons_its_body(x):
    """Waiters are released at once and the result is discarded; the slot is held until the body ends."""
    held = await Held(x).started()
    behind = held.channel.submit_nowait(ok, x)
    waiters = [asyncio.ensure_future(held.call), asyncio.create_task(held.call.wait_dispatched())]
    await asyncio.sleep(0)
    assert held.call.cancel()
    for waiter in waiters:
        with pytest.raises(CallCancelledError, match="while running"):
            await waiter
    assert not held.ended
    assert held.channel.statistics().running == 1
    assert held.channel.statistics().abandoned == 1
    assert runtime.statistics().abandoned == 1
    assert [call.state for call in runtime.calls()] == ["abandoned", "queued"]
    await a_moment()
    assert not behind.done()
    held.let_go()
    await behind
    assert held.ended
    assert held.call.cancelled()
    with pytest.raises(CallCancelledError):
        held.call.result()
    assert held.channel.statistics().abandoned == 0
    assert runtime.statistics().abandoned == 0


@pytest.mark.asyncio
async def test_cancelling_dispatched_call_releases_waiters(x):
    """A call whose arrays are computing can be cancelled; its slot is free when they are computed."""
    late = Late()
    channel = TaskChannel(max_in_flight=1)
    call = channel.submit_nowait(be_late, x, late)
    await call.wait_dispatched()
    behind = channel.submit_nowait(ok, x)
    waiter = asyncio.ensure_future(call)
    await asyncio.sleep(0)
    assert call.cancel()
    with pytest.raises(CallCancelledError, match="computing"):
        await waiter
    with pytest.raises(CallCancelledError):
        await call.wait_dispatched()
    await a_moment()
    assert not behind.done()
    late.release()
    await behind
    await channel.aclose()


@pytest.mark.parametrize("how", ["ready", "failed", "cancelled"])
@pytest.mark.asyncio
async def test_cancelling_finished_call_does_nothing(x, how):
    """cancel() of a call that is over is false and changes nothing."""
    call = fail(x, ValueError("own")) if how == "failed" else ok(x)
    if how == "cancelled":
        call.cancel()
    await gather(call, return_exceptions=True)
    assert not call.cancel()
    assert call.cancelled() == (how == "cancelled")
    if how == "ready":
        assert await call is x
    elif how == "failed":
        assert isinstance(call.exception(), ValueError)


@pytest.mark.asyncio
async def test_cancel_message_reaches_waiters(x):
    """What is given to cancel() is in the error, beside function, channel and line."""
    held = await Held(x, TaskChannel("named")).started()
    held.call.cancel("because of rain")
    with pytest.raises(CallCancelledError) as caught:
        await held.call
    for part in ("because of rain", "wait", "'named'", "test_cancellation.py"):
        assert part in str(caught.value)
    held.let_go()


@pytest.mark.asyncio
async def test_call_cancelled_error_is_an_ordinary_exception(x):
    """Task groups do not swallow it: whoever waits for a call that others cancelled fails."""
    assert issubclass(CallCancelledError, Exception)
    assert not issubclass(CallCancelledError, asyncio.CancelledError)
    held = await Held(x).started()

    async def child():
        await held.call

    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            group.create_task(child())
            await asyncio.sleep(0)
            held.call.cancel()
    assert isinstance(caught.value.exceptions[0], CallCancelledError)
    held.let_go()


@pytest.mark.asyncio
async def test_error_of_abandoned_body_is_discarded(x):
    """What an abandoned body raises is its own affair: it is neither raised nor reported."""
    reports = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reports.append(context))
    gate, recorder = Gate(), Recorder()

    def body(x):
        recorder.record("start")
        gate.wait()
        raise ValueError("too late")

    async with open_task_channel() as channel:
        call = channel.run(body, x)
        await recorder.wait_for("start")
        call.cancel()
        gate.open()
    with pytest.raises(CallCancelledError):
        await call
    del call
    await a_moment()
    assert reports == []


@pytest.mark.asyncio
async def test_cancel_from_another_thread(x):
    """cancel() works from any thread and wakes waiters on the loop and in other threads."""
    held = await Held(x).started()
    on_loop = asyncio.ensure_future(held.call)
    in_thread = asyncio.create_task(asyncio.to_thread(held.call.result, 10))
    await eventually(lambda: held.call._waiter_count == 2, "both wait")
    assert await asyncio.to_thread(held.call.cancel)
    for waiter in (on_loop, in_thread):
        with pytest.raises(CallCancelledError):
            await waiter
    held.let_go()


@pytest.mark.asyncio
async def test_body_cancels_its_own_call(x):
    """A body may cancel the call that it is the body of; it goes on to its end."""
    calls, recorder = [], Recorder()
    ready = Gate()

    def body(x):
        ready.wait()
        recorder.record("cancel", done=calls[0].cancel())
        recorder.record("end")
        return x

    async with open_task_channel() as channel:
        calls.append(channel.run(body, x))
        ready.open()
        with pytest.raises(CallCancelledError):
            await calls[0]
    assert recorder.sequence("cancel") == [True]
    assert recorder.count("end") == 1


@pytest.mark.asyncio
async def test_done_callback_cancels_another_call(x):
    """A done callback, which may run on the completing thread, may cancel other calls."""
    gate = Gate()
    first, second = TaskChannel(), TaskChannel()
    done = first.submit_nowait(wait, x, gate)
    other = await Held(x, second).started()

    def add_from_thread():
        done.add_done_callback(lambda call: other.call.cancel())

    await asyncio.to_thread(add_from_thread)
    gate.open()
    with pytest.raises(CallCancelledError):
        await other.call
    other.let_go()


# --- the last waiter --------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_call_is_cancelled_with_its_last_waiter(x):
    """A waiting task that is cancelled takes the call with it, if nobody else waits."""
    held = await Held(x).started()
    first, second = asyncio.ensure_future(held.call), asyncio.ensure_future(held.call)
    await cancelled(first)
    assert not held.call.done()
    await cancelled(second)
    assert held.call.cancelled()
    with pytest.raises(CallCancelledError, match="last waiter"):
        await held.call
    held.let_go()


@pytest.mark.asyncio
async def test_remaining_waiter_gets_the_result(x):
    """Cancelling some waiters leaves the others with the result, and a new one may come."""
    held = await Held(x).started()
    waiters = [asyncio.ensure_future(held.call) for _ in range(5)]
    for waiter in waiters[:4]:
        await cancelled(waiter)
    late_comer = asyncio.ensure_future(held.call)
    await asyncio.sleep(0)
    await cancelled(waiters[4])
    held.let_go()
    assert await late_comer is x


@pytest.mark.asyncio
async def test_call_that_nobody_awaited_is_untouched(x):
    """Cancelling a task that has made a call, and does not wait for it, leaves the call alone."""
    gate = Gate()
    made = []

    async def task():
        made.append(wait(x, gate))
        await asyncio.Event().wait()

    await cancelled(asyncio.create_task(task()))
    assert not made[0].done()
    gate.open()
    assert await made[0] is x


@pytest.mark.asyncio
async def test_waiter_cancelled_before_it_waits_is_none(x):
    """A task that is cancelled before it gets to its await never was a waiter."""
    held = await Held(x).started()
    task = asyncio.ensure_future(held.call)
    task.cancel()
    await asyncio.wait([task], timeout=10)
    if hasattr(asyncio, "eager_task_factory"):
        assert task.cancelled()
    assert not held.call.done()
    held.let_go()
    await held.call


@pytest.mark.parametrize("kind", ["ready", "dispatched"])
@pytest.mark.asyncio
async def test_waiters_of_both_stages_count(x, kind):
    """Who waits for the body's return is a waiter like who waits for the arrays."""
    held = await Held(x).started()
    waits = {"ready": asyncio.ensure_future(held.call)}
    waits["dispatched"] = asyncio.create_task(held.call.wait_dispatched())
    await asyncio.sleep(0)
    await cancelled(waits.pop(kind))
    assert not held.call.done()
    (last,) = waits.values()
    await cancelled(last)
    assert held.call.cancelled()
    held.let_go()


@pytest.mark.asyncio
async def test_satisfied_waiter_counts_no_more(x):
    """Who waited for the return, and got it, does not keep the call from being cancelled."""
    late = Late()
    call = TaskChannel().submit_nowait(be_late, x, late)
    await call.wait_dispatched()
    await cancelled(asyncio.ensure_future(call))
    assert call.cancelled()
    late.release()


@pytest.mark.parametrize("kind", ["gather", "as_completed", "asyncio.wait_for"])
@pytest.mark.asyncio
async def test_waiting_for_many_is_waiting_for_each(x, kind):
    """Cancelling a combined wait cancels the calls nobody else waits for, and only those."""
    shared, mine = await Held(x).started(), await Held(x).started()
    calls = [shared.call, mine.call]

    async def iterate():
        async for _ in as_completed(calls):
            pass

    async def wait_for():
        await asyncio.wait_for(gather(*calls), 30)

    waits = {
        "gather": lambda: gather(*calls),
        "as_completed": iterate,
        "asyncio.wait_for": wait_for,
    }
    other = asyncio.ensure_future(shared.call)
    combined = asyncio.create_task(waits[kind]())
    await eventually(lambda: mine.call._waiter_count, "the combined wait")
    await cancelled(combined)
    assert mine.call.cancelled()
    assert not shared.call.done()
    shared.let_go()
    mine.let_go()
    assert await other is x


@pytest.mark.asyncio
async def test_wait_until_ready_cancels_nothing(x):
    """Cancelling wait_until_ready, and its timeout, leave the calls in the tree alone."""
    held = await Held(x).started()
    waiting = asyncio.create_task(wait_until_ready({"a": held.call}))
    await eventually(lambda: held.call._waiter_count, "the wait")
    await cancelled(waiting)
    with pytest.raises(TimeoutError):
        await wait_until_ready([held.call], timeout=0.01)
    assert not held.call.done()
    held.let_go()
    assert await held.call is x


@pytest.mark.asyncio
async def test_shield_keeps_a_waiter(x):
    """asyncio.shield(fut) goes on waiting when the task around it is cancelled."""
    held = await Held(x).started()

    async def shielded():
        await asyncio.shield(held.call)

    await cancelled(asyncio.create_task(shielded()))
    await a_moment()
    assert not held.call.done()
    held.let_go()
    assert await held.call is x


@pytest.mark.asyncio
async def test_thread_that_waits_is_a_waiter(x):
    """A thread in result() keeps a call whose waiting tasks are cancelled."""
    held = await Held(x).started()
    thread = asyncio.create_task(asyncio.to_thread(held.call.result, 10))
    task = asyncio.ensure_future(held.call)
    await eventually(lambda: held.call._waiter_count == 2, "both wait")
    await cancelled(task)
    assert not held.call.done()
    held.let_go()
    assert await thread is x


@pytest.mark.asyncio
async def test_thread_that_runs_out_of_patience_cancels_nothing(x):
    """result(timeout) that ends is no cancellation, even as the last waiter."""
    held = await Held(x).started()
    with pytest.raises(TimeoutError, match="still running"):
        await asyncio.to_thread(held.call.result, 0.01)
    assert not held.call.done()
    held.let_go()
    await held.call


@pytest.mark.asyncio
async def test_done_callback_is_no_waiter(x):
    """A callback does not keep a call from being cancelled with its last waiter, and is called."""
    held = await Held(x).started()
    seen = asyncio.Event()
    held.call.add_done_callback(lambda call: seen.set())
    await cancelled(asyncio.ensure_future(held.call))
    assert held.call.cancelled()
    await seen.wait()
    held.let_go()


@pytest.mark.asyncio
async def test_waiter_cancelled_when_call_is_done_gets_cancelled_alone(x):
    """A call that is done already is not cancelled by a waiter that has not noticed yet."""
    held = await Held(x).started()
    task = asyncio.ensure_future(held.call)
    await asyncio.sleep(0)
    held.let_go()
    while not held.call.done():  # without letting the loop run
        threading.Event().wait(0.001)
    task.cancel()
    await asyncio.wait([task], timeout=10)
    assert task.cancelled()
    assert not held.call.cancelled()
    assert await held.call is x


test_waiter_cancelled_when_call_is_done_gets_cancelled_alone = pytest.mark.no_blocking(False)(
    test_waiter_cancelled_when_call_is_done_gets_cancelled_alone
)


# --- dependents -------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_queued_dependent_is_a_waiter(x):
    """A call that needs another keeps it from being cancelled with its last waiting task."""
    held = await Held(x).started()
    dependent = ok(held.call)
    await cancelled(asyncio.ensure_future(held.call))
    assert not held.call.done()
    held.let_go()
    assert await dependent is x


@pytest.mark.asyncio
async def test_running_dependent_is_a_waiter(x):
    """A dependent counts until it is over, not only until it starts."""
    late = Late()
    need = TaskChannel().submit_nowait(be_late, x, late)
    gate, recorder = Gate(), Recorder()
    dependent = wait(need, gate, recorder)
    await recorder.wait_for("start")
    await cancelled(asyncio.ensure_future(need))
    assert not need.done()
    gate.open()
    await dependent.wait_dispatched()
    late.release()
    assert (await need).is_ready()
    await dependent


@pytest.mark.asyncio
async def test_finished_dependent_is_no_waiter(x):
    """A dependent that is over does not keep what it needed."""
    late = Late()
    need = TaskChannel().submit_nowait(be_late, x, late)

    @colocated_python
    def use(y, x):
        return x

    await use(need, x)
    await cancelled(asyncio.ensure_future(need))
    assert need.cancelled()
    late.release()


@pytest.mark.asyncio
async def test_cancelled_dependent_takes_what_only_it_needs(x):
    """Cancelling a dependent cancels its dependencies, if nobody else waits for them."""
    shared, mine = await Held(x).started(), await Held(x).started()

    @colocated_python
    def both(a, b):
        return a

    dependent = both(shared.call, mine.call)
    other = asyncio.ensure_future(shared.call)
    await asyncio.sleep(0)
    dependent.cancel()
    assert mine.call.cancelled()
    assert not shared.call.done()
    shared.let_go()
    mine.let_go()
    await other


@pytest.mark.asyncio
async def test_waiters_of_dependents_are_told(x):
    """Those who wait for a dependent of a cancelled call get CallCancelledError, at once."""
    held = await Held(x).started()
    waiter = asyncio.ensure_future(ok(ok(held.call)))
    await asyncio.sleep(0)
    held.call.cancel()
    with pytest.raises(CallCancelledError, match="depends on"):
        await waiter
    assert not held.ended
    held.let_go()


# --- timeouts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["queued", "running", "dispatched"])
@pytest.mark.parametrize("kind", ["timeout", "wait_for"])
@pytest.mark.asyncio
async def test_timeout_is_prompt_and_cancels(x, kind, state):
    """asyncio.timeout and wait_for end on time in every state, and cancel what nobody else awaits."""
    held, late = Held(x), Late()
    if state == "queued":
        call = held.channel.submit_nowait(ok, x)
    elif state == "running":
        call = held.call
    else:
        call = TaskChannel().submit_nowait(be_late, x, late)
        await call.wait_dispatched()
    await held.started()
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        if kind == "timeout":
            async with asyncio.timeout(0.02):
                await call
        else:
            await asyncio.wait_for(call, 0.02)
    assert time.monotonic() - started < 5
    assert call.cancelled()
    assert not held.ended  # asyncio's own tools do not wait for an abandoned body
    held.let_go()
    late.release()


@pytest.mark.asyncio
async def test_timeout_of_one_of_several_waiters(x):
    """A timeout of one waiter leaves the call to the others."""
    held = await Held(x).started()
    other = asyncio.ensure_future(held.call)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await held.call
    assert not held.call.done()
    held.let_go()
    assert await other is x


@pytest.mark.parametrize("kind", ["group", "channel"])
@pytest.mark.asyncio
async def test_timeout_around_a_block_waits_for_its_bodies(x, kind):
    """asyncio.timeout around a block of the library is over when nothing of the block runs."""
    gate, recorder = Gate(), Recorder()
    loop = asyncio.get_running_loop()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as timeout:
            async with new_block(kind) as block:
                call = start(block, wait, x, gate, recorder)
                await recorder.wait_for("start")
                timeout.reschedule(loop.time())
                loop.call_later(0.05, gate.open)
                with contextlib.suppress(CallCancelledError):
                    await call
    assert call.cancelled()
    assert recorder.count("end") == 1


# --- owners -----------------------------------------------------------------------------------------


def new_block(kind: str):
    return TaskGroup() if kind == "group" else open_task_channel()


def start(block, fn, *args):
    """A call of the block."""
    return block.start_soon(fn, *args) if isinstance(block, TaskGroup) else fn(*args)


BLOCKS = pytest.mark.parametrize("kind", ["group", "channel"])


@BLOCKS
@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_block_left_by_exception_cancels_its_calls(x, kind):
    """An exception in the block cancels its calls; leaving waits for the one that runs."""
    gate, recorder = Gate(), Recorder()
    error = RuntimeError("block")
    calls = []

    async def block():
        async with new_block(kind) as block:
            calls.append(start(block, wait, x, gate, recorder, "first"))
            calls.append(wait(x, gate, recorder, "queued") if kind == "channel" else ok(calls[0]))
            await recorder.wait_for("start")
            recorder.record("raise")
            raise error

    leaving = asyncio.create_task(block())
    await recorder.wait_for("raise")
    await eventually(lambda: all(call.cancelled() for call in calls), "the calls are cancelled")
    await a_moment()
    assert not leaving.done()
    gate.open()
    await asyncio.wait([leaving], timeout=10)
    raised = leaving.exception()
    assert (raised.exceptions[0] if kind == "group" else raised) is error
    assert recorder.sequence("start", "name") == ["first"]
    assert recorder.count("end") == 1


@BLOCKS
@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_cancelled_block_cancels_its_calls(x, kind):
    """Cancelling the task in the block does the same, and CancelledError comes out with its message."""
    gate, recorder = Gate(), Recorder()
    calls = []

    async def block():
        async with new_block(kind) as block:
            calls.append(start(block, wait, x, gate, recorder, "first"))
            await asyncio.Event().wait()

    leaving = asyncio.create_task(block())
    await recorder.wait_for("start")
    leaving.cancel("stop now")
    await eventually(lambda: calls[0].cancelled(), "the call is cancelled")
    await a_moment()
    assert not leaving.done()
    gate.open()
    with pytest.raises(asyncio.CancelledError, match="stop now"):
        await leaving
    assert recorder.count("end") == 1


@BLOCKS
@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_repeated_cancellation_while_leaving(x, kind):
    """However often it is cancelled, a block ends when nothing of it runs; then it re-raises."""
    gate, recorder = Gate(), Recorder()
    calls = []

    async def block():
        async with new_block(kind) as block:
            calls.append(start(block, wait, x, gate, recorder))
            calls.append(ok(calls[0]))
        recorder.record("after the block")

    leaving = asyncio.create_task(block())
    await recorder.wait_for("start")
    assert not calls[0].done()
    for i in range(10):
        leaving.cancel(f"cancelled {i}")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not leaving.done()
    await eventually(lambda: all(call.cancelled() for call in calls), "the calls are cancelled")
    assert runtime.statistics().abandoned == 1
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert leaving.cancelled()
    assert recorder.count("end") == 1
    assert recorder.count("after the block") == 0


@BLOCKS
@pytest.mark.asyncio
async def test_block_waits_for_calls_that_are_not_awaited(x, kind):
    """Without any cancellation a block waits for its calls, abandoned ones included."""
    gate, recorder = Gate(), Recorder()

    async def block():
        async with new_block(kind) as block:
            call = start(block, wait, x, gate, recorder)
            await recorder.wait_for("start")
            call.cancel()

    leaving = asyncio.create_task(block())
    await recorder.wait_for("start")
    await a_moment()
    assert not leaving.done()
    assert runtime.statistics().abandoned == 1
    gate.open()
    await leaving
    assert recorder.count("end") == 1


@BLOCKS
@pytest.mark.asyncio
async def test_calls_that_an_abandoned_body_makes_are_waited_for(x, kind):
    """What an abandoned body still starts belongs to the block, and nothing of it outlives it."""
    go, gate, recorder = Gate(), Gate(), Recorder()

    def body(x):
        recorder.record("outer")
        go.wait()
        wait(x, gate, recorder, "nested")
        return x

    async def block():
        async with new_block(kind) as block:
            if kind == "group":
                block.start_soon(body, x)
            else:
                block.run(body, x)
            await recorder.wait_for("outer")
            raise RuntimeError("block")

    leaving = asyncio.create_task(block())
    await recorder.wait_for("outer")
    await eventually(lambda: runtime.statistics().abandoned == 1, "the body is abandoned")
    go.open()
    await recorder.wait_for("start")
    await a_moment()
    assert not leaving.done()
    gate.open()
    await asyncio.wait([leaving], timeout=10)
    assert leaving.done()
    assert leaving.exception() is not None
    assert recorder.count("end") == 1


@BLOCKS
@pytest.mark.asyncio
async def test_calls_that_a_body_waits_for_are_cancelled_with_the_block(x, kind):
    """Calls made by bodies belong to the block, too: the waiting body hears of it and ends."""
    gate, recorder = Gate(), Recorder()

    def body(x):
        try:
            wait(x, gate, recorder, "nested").result(timeout=10)
        except CallCancelledError as error:
            recorder.record("told", error=error)

    with pytest.raises((RuntimeError, ExceptionGroup)):
        async with new_block(kind) as block:
            if kind == "group":
                block.start_soon(body, x)
            else:
                block.run(body, x)
            await recorder.wait_for("start")
            asyncio.get_running_loop().call_later(0.05, gate.open)
            raise RuntimeError("block")
    assert recorder.count("told") == 1
    assert recorder.count("end") == 1


@pytest.mark.asyncio
async def test_failing_task_group_cancels_calls_of_its_tasks(x):
    """A task's failure cancels the calls that its siblings wait for, and those nobody waits for."""
    gate, recorder = Gate(), Recorder()
    calls = []

    async def waits():
        calls.append(wait(x, gate, recorder, "awaited"))
        await calls[-1]

    async def leaves():
        calls.append(wait(x, gate, recorder, "left"))
        await asyncio.Event().wait()

    async def fails():
        await recorder.wait_for("start", 2)
        raise ValueError("sibling")

    async def block():
        async with TaskGroup() as group:
            for task in (waits, leaves, fails):
                group.create_task(task())

    leaving = asyncio.create_task(block())
    await recorder.wait_for("start", 2)
    await eventually(lambda: all(call.cancelled() for call in calls), "both are cancelled")
    await a_moment()
    assert not leaving.done()
    gate.open()
    with pytest.raises(ExceptionGroup) as caught:
        await leaving
    assert [error.args for error in caught.value.exceptions] == [("sibling",)]
    assert recorder.count("end") == 2


@pytest.mark.asyncio
async def test_plain_asyncio_task_group_does_not_wait_for_abandoned_bodies(x):
    """asyncio.TaskGroup cancels the wait and so the call, but leaves while the body still runs."""
    held = await Held(x).started()

    async def fails():
        raise ValueError("sibling")

    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(wait_for_it(held.call))
            await asyncio.sleep(0)
            group.create_task(fails())
    assert held.call.cancelled()
    assert not held.ended
    held.let_go()


async def wait_for_it(call):
    return await call


@pytest.mark.skipif(
    sys.version_info < (3, 13), reason="asyncio itself drops the cancellation before Python 3.13"
)
@BLOCKS
@pytest.mark.asyncio
async def test_unretrieved_error_and_cancellation_both_come_out(x, kind):
    """A block that is cancelled while an error waits for it raises the error, and stays cancelled."""
    gate, recorder = Gate(), Recorder()

    async def block():
        try:
            async with open_task_channel() if kind == "channel" else TaskGroup() as block:
                fail(x, ValueError("unseen"))
                start(block, wait, x, gate, recorder)
        except ExceptionGroup as group:
            recorder.record("group", errors=group.exceptions)
        await asyncio.Event().wait()

    leaving = asyncio.create_task(block())
    await recorder.wait_for("start")
    leaving.cancel()
    await a_moment()
    gate.open()
    await asyncio.wait([leaving], timeout=5)
    assert leaving.done(), "the cancellation was lost"
    assert leaving.cancelled()
    ((error,),) = recorder.sequence("group")
    assert error.args == ("unseen",)


@pytest.mark.asyncio
async def test_map_cancels_and_waits(x):
    """A cancelled map() leaves when none of its bodies runs, however often it is cancelled."""
    gate, recorder = Gate(), Recorder()

    @colocated_python
    def body(x):
        recorder.record("start")
        gate.wait()
        recorder.record("end")
        return x

    mapping = asyncio.create_task(body.map([x] * 10, limit=2))
    await recorder.wait_for("start", 2)
    for _ in range(5):
        mapping.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await a_moment()
    assert not mapping.done()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await mapping
    assert recorder.count("end") == recorder.count("start") == 2


# --- the function's own CancelledError --------------------------------------------------------------


@pytest.mark.asyncio
async def test_functions_own_cancelled_error_is_not_the_callers(x):
    """A body that raises CancelledError has failed; neither the call nor its waiter is cancelled."""
    error = asyncio.CancelledError("from the body")

    async def waiter():
        with pytest.raises(BodyError, match="CancelledError") as caught:
            await fail(x, error)
        assert caught.value.__cause__ is error
        assert asyncio.current_task().cancelling() == 0
        return "went on"

    assert await asyncio.create_task(waiter()) == "went on"
    call = fail(x, error)
    assert isinstance((await gather(call, return_exceptions=True))[0], BodyError)
    assert not call.cancelled()


@pytest.mark.asyncio
async def test_functions_own_cancelled_error_fails_a_task_group(x):
    """A group is not left in silence by a body's CancelledError, which it would swallow as it is."""
    with pytest.raises(ExceptionGroup) as caught:
        async with TaskGroup() as group:
            group.start_soon(fail, x, asyncio.CancelledError())
    assert isinstance(caught.value.exceptions[0], BodyError)


# --- afterwards -------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_everything_works_after_cancellations(x, recorder):
    """A storm of cancellations in every state leaves nothing behind that later calls would notice."""
    for _ in range(5):
        gate = Gate()
        async with open_task_channel() as channel:
            calls = [wait(x, gate) for _ in range(20)]
            tasks = [asyncio.ensure_future(call) for call in calls]
            await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            await asyncio.sleep(0)
            for call in calls[1::4]:
                call.cancel()
            gate.open()
            await asyncio.wait(tasks, timeout=10)
            for task in tasks:
                if not task.cancelled():
                    task.exception()
        assert channel.statistics().cancelled == 15
    assert await ok(x) is x
    assert runtime.statistics().abandoned == 0
