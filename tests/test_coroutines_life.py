# SPDX-License-Identifier: Apache-2.0
"""Coroutine bodies (contracts C5, C7, C14, C15, C17): errors, channels, deadlocks, threads, loops."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import re
import sys
import threading
import time
import traceback
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from coroutine_bodies import (
    SHARED,
    TIMEOUT,
    Meeting,
    eventually,
    fail,
    hold,
    meet,
    outcome,
    plain,
    same,
    sleep,
)

from aiocolocated import (
    BodyError,
    ChannelStoppedError,
    DeadlockError,
    TaskChannel,
    TaskGroup,
    WouldBlock,
    as_completed,
    colocated_python,
    configure,
    gather,
    jax_scope,
    open_task_channel,
    runtime,
)
from aiocolocated._workers import pool
from aiocolocated.testing import Gate, Recorder

pytestmark = pytest.mark.timeout(60)

LOOP_THREAD = "aiocolocated-loop"


@pytest.fixture
def x() -> jax.Array:
    return jnp.arange(3.0)


@pytest.fixture(autouse=True)
def _around():
    """Start the host's loop before the test, because it keeps descriptors; share nothing after it."""
    same(jnp.zeros(())).result(TIMEOUT)
    yield
    SHARED.clear()


# --- errors -----------------------------------------------------------------------------------------


@colocated_python
async def deep(x):
    await asyncio.sleep(0)
    await deeper()


async def deeper():
    await asyncio.sleep(0)
    raise ValueError("deep")


@pytest.mark.parametrize("configured", [False, True])
@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_error_shows_the_body_and_the_call(x, configured):
    """Its traceback starts at the body, and one note names function, host, channel and line."""
    channel = TaskChannel("lane")
    with jax_scope(debug_nans=True) if configured else contextlib.nullcontext():
        future = channel.submit_nowait(deep, x)
        line = sys._getframe().f_lineno - 1
    error = await outcome(asyncio.to_thread(future.exception))
    assert [frame.name for frame in traceback.extract_tb(error.__traceback__)] == ["deep", "deeper"]
    (note,) = error.__notes__
    for part in ("deep", "in-process", "'lane'", f"{__file__}:{line}"):
        assert part in note
    lengths = set()
    for _ in range(5):
        assert await outcome(future) is error
        lengths.add(len(traceback.extract_tb(error.__traceback__)))
    assert len(lengths) == 1


DANGEROUS = [
    StopAsyncIteration,
    GeneratorExit,
    KeyboardInterrupt,
    SystemExit,
    asyncio.CancelledError,
]


@pytest.mark.parametrize("kind", DANGEROUS)
@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_dangerous_error_arrives_inside_body_error(x, kind):
    """None of them ends a waiter, the task, or the host's loop."""
    error = await outcome(fail(x, kind("why")))
    assert isinstance(error, BodyError)
    assert isinstance(error.__cause__, kind)
    assert error.__cause__.args == ("why",)
    assert asyncio.current_task().cancelling() == 0
    assert await outcome(sleep(x, 0.001)) is x


@pytest.mark.asyncio
async def test_stop_iteration_is_what_python_makes_of_it(x):
    """Python itself turns that of a coroutine into a RuntimeError."""
    error = await outcome(fail(x, StopIteration(1)))
    assert isinstance(error, RuntimeError)
    assert isinstance(error.__cause__, StopIteration)


async def raise_(error):
    raise error


@colocated_python
async def end_the_loop(x, how: str):
    error = SystemExit(3) if how == "SystemExit" else KeyboardInterrupt()
    if how == "stop":
        asyncio.get_running_loop().stop()
    elif how == "callback":
        asyncio.get_running_loop().call_soon(sys.exit, 3)
    elif how == "group":
        async with asyncio.TaskGroup() as group:
            group.create_task(raise_(error))
    else:
        task = asyncio.create_task(raise_(error))
        await asyncio.wait([task])
        assert task.exception() is error
    await asyncio.sleep(0.001)
    return how


@pytest.mark.parametrize("how", ["SystemExit", "KeyboardInterrupt", "stop", "callback", "group"])
@pytest.mark.asyncio
async def test_hosts_loop_outlives_what_would_end_a_loop(x, how, recorder, caplog):
    """A task or callback of one body may not take the loop from the others; it is logged."""
    gate = Gate()
    other = TaskChannel().submit_nowait(hold, x, gate, recorder)
    await recorder.wait_for("start")
    result = await outcome(end_the_loop(x, how))
    assert result == how or isinstance(result.__cause__, KeyboardInterrupt)
    gate.open()
    assert await outcome(other) is x
    assert await outcome(loop_thread_name(x)) == LOOP_THREAD
    (record,) = [r for r in caplog.records if r.name == "aiocolocated"]
    assert "tried to end it" in record.getMessage()
    record.exc_info = None  # it holds the test's arrays


@pytest.mark.asyncio
async def test_unretrieved_error_is_reported_once(x):
    """Through the exception handler of the loop that made the call."""
    contexts, reported = [], asyncio.Event()

    def handler(loop, context):
        contexts.append((context["message"], context["exception"]))
        reported.set()

    asyncio.get_running_loop().set_exception_handler(handler)
    error = ValueError("nobody looks")
    TaskChannel().submit_nowait(fail, x, error)
    async with asyncio.timeout(TIMEOUT):
        await reported.wait()
        last = ValueError("last")
        TaskChannel().submit_nowait(fail, x, last)
        await eventually(lambda: any(e is last for _, e in contexts), "the second report")
    asyncio.get_running_loop().set_exception_handler(None)
    assert [e for _, e in contexts] == [error, last]
    assert "fail" in contexts[0][0]
    assert "never retrieved" in contexts[0][0]
    contexts.clear()


@pytest.mark.parametrize("block", ["group", "channel"])
@pytest.mark.asyncio
async def test_error_joins_the_block(x, block):
    """An error that nobody retrieves is raised when the block is left."""
    error = ValueError("nobody looks")
    with pytest.raises(ExceptionGroup) as caught:
        async with TaskGroup() if block == "group" else open_task_channel():
            fail(x, error)
    assert caught.value.exceptions == (error,)


@colocated_python
async def consume(x, how: str, gate: Gate) -> int:
    n = x.nbytes
    del x
    if how == "failure":
        raise ValueError
    if how == "cancellation":
        await gate.wait_async()
    return n


@pytest.mark.parametrize("how", ["success", "failure", "cancellation"])
@pytest.mark.asyncio
async def test_big_argument_is_freed_without_collecting(how):
    """80 MB go when the body is done with them, though the future is kept."""
    big = jnp.zeros(20_000_000)
    reference = weakref.ref(big)
    gc.collect()
    gc.disable()
    try:
        gate = Gate()
        async with asyncio.timeout(TIMEOUT):
            with jax_scope(debug_nans=True):
                future = consume(big, how, gate)
            del big
            if how == "cancellation":
                await eventually(lambda: reference() is None, "the body drops it")
                future.cancel()
            result = await outcome(future)
            await eventually(lambda: reference() is None, "the argument is freed")
    finally:
        gc.enable()
    assert result == 80_000_000 or isinstance(result, Exception)


# --- channels ---------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_stopping_channel_stops_behind_a_failed_coroutine(x, recorder):
    """With on_error="stop" nothing behind a failed or cancelled coroutine runs."""
    for how in ("failed", "cancelled"):
        channel = TaskChannel(on_error="stop")
        gate = Gate()
        if how == "failed":
            first = channel.submit_nowait(fail, x, ValueError("first"))
        else:
            first = channel.submit_nowait(hold, x, Gate(), recorder, "first")
        second = channel.submit_nowait(hold, x, gate, recorder, "second")
        if how == "cancelled":
            await recorder.wait_for("start")
            first.cancel()
        error = await outcome(second)
        assert isinstance(error, ChannelStoppedError)
        assert error.__cause__ is await outcome(first) or how == "cancelled"
        with pytest.raises(ChannelStoppedError):
            channel.submit_nowait(same, x)
        async with asyncio.timeout(TIMEOUT):
            await channel.aclose()
    assert recorder.sequence("start") == ["first"]


@pytest.mark.asyncio
async def test_bounded_channel_counts_coroutines(x, recorder):
    """A suspended coroutine keeps the others queued: full is refused at once, or waited for."""
    gate = Gate()
    async with asyncio.timeout(TIMEOUT), open_task_channel(max_pending=1) as channel:
        channel.submit_nowait(hold, x, gate, recorder, 0)
        await recorder.wait_for("start")
        channel.submit_nowait(hold, x, gate, recorder, 1)
        with pytest.raises(WouldBlock):
            channel.submit_nowait(hold, x, gate, recorder, 2)
        waiting = asyncio.create_task(channel.submit(hold, x, gate, recorder, 3))
        await eventually(lambda: channel.statistics().waiting_for_room, "it waits for room")
        gate.open()
        await (await waiting)
    assert recorder.sequence("start") == [0, 1, 3]


@pytest.mark.asyncio
async def test_thread_waits_for_room_behind_a_coroutine(x, recorder):
    """Off a loop a full channel makes the caller wait until the coroutine has ended."""
    gate = Gate()
    channel = TaskChannel(max_pending=1)
    channel.submit_nowait(hold, x, gate, recorder)
    await recorder.wait_for("start")
    channel.submit_nowait(same, x)
    thread = asyncio.create_task(asyncio.to_thread(channel.submit_nowait, same, x))
    await eventually(lambda: channel.statistics().waiting_for_room, "it waits for room")
    gate.open()
    async with asyncio.timeout(TIMEOUT):
        assert await (await thread) is x
        await channel.aclose()


@colocated_python
def thread_name(x: jax.Array) -> str:
    return threading.current_thread().name


@colocated_python
async def loop_thread_name(x: jax.Array) -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


@pytest.mark.asyncio
async def test_dedicated_thread_takes_coroutines_too(x):
    """In order with its functions, which have the thread; coroutines run on the loop, as anywhere."""
    async with asyncio.timeout(TIMEOUT):
        async with open_task_channel("lane", dedicated_thread=True):
            names = [f(x) for _ in range(10) for f in (thread_name, loop_thread_name)]
            seen = await gather(*names)
        assert seen == ["aiocolocated-channel-lane", LOOP_THREAD] * 10
        await eventually(lambda: not runtime.statistics().dedicated, "the thread ends")


@pytest.mark.asyncio
async def test_drain_and_close_wait_for_coroutines(x, recorder):
    """Also for one that is suspended."""
    gate = Gate()
    channel = TaskChannel()
    call = channel.submit_nowait(hold, x, gate, recorder)
    await recorder.wait_for("start")
    waits = [asyncio.create_task(channel.drain()), asyncio.create_task(channel.aclose())]
    await asyncio.sleep(0.005)
    assert not any(wait.done() for wait in waits)
    gate.open()
    async with asyncio.timeout(TIMEOUT):
        await asyncio.gather(*waits)
    assert call.done()


# --- deadlocks --------------------------------------------------------------------------------------


async def in_child_task(fut):
    async with asyncio.TaskGroup() as group:
        group.create_task(outcome(fut))
        task = group.create_task(_await(fut))
    return task.result()


async def _await(fut):
    return await fut


async def first_of(fut):
    async for done in as_completed([fut]):
        return await done


WAITS = {
    "await": _await,
    "wait_dispatched": lambda fut: fut.wait_dispatched(),
    "gather": lambda fut: gather(fut),
    "asyncio.gather": lambda fut: asyncio.gather(fut),
    "as_completed": first_of,
    "asyncio.timeout": lambda fut: asyncio.wait_for(fut, 15),
    "child task": lambda fut: asyncio.create_task(_await(fut)),
}


@colocated_python
async def wait_behind_itself(x, wait: str):
    return await WAITS[wait](SHARED["lane"].submit_nowait(same, x))


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.asyncio
async def test_body_waiting_in_its_own_channel_is_refused(x, wait):
    """What a coroutine puts behind itself cannot start before it has ended."""
    lane = SHARED["lane"] = TaskChannel("own")
    error = await outcome(lane.submit_nowait(wait_behind_itself, x, wait))
    assert isinstance(error, DeadlockError)
    assert "behind it in channel 'own'" in str(error)
    assert await outcome(lane.submit_nowait(same, x)) is x
    await lane.aclose()


@colocated_python
async def wait_for_itself(x, gate: Gate):
    await gate.wait_async()
    return await SHARED["self"]


@pytest.mark.asyncio
async def test_body_waiting_for_itself_is_refused(x):
    """A coroutine that gets hold of its own future does not wait for it."""
    gate = Gate()
    call = SHARED["self"] = wait_for_itself(x, gate)
    gate.open()
    assert isinstance(await outcome(call), DeadlockError)


@colocated_python
async def wait_for_next(x, number: int, count: int):
    await SHARED["meeting"].wait()
    return await SHARED["calls"][(number + 1) % count]


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.asyncio
async def test_cycle_of_bodies_is_refused(x, count):
    """Coroutines that wait for each other: one of them is told, and the others with it."""
    SHARED["meeting"] = Meeting(count)
    calls = SHARED["calls"] = [
        TaskChannel().submit_nowait(wait_for_next, x, i, count) for i in range(count)
    ]
    for error in await asyncio.gather(*map(outcome, calls)):
        assert isinstance(error, DeadlockError)


@colocated_python
def wait_for_call(x):
    return SHARED["lane"].submit_nowait(same, x).result(TIMEOUT)


@colocated_python
async def wait_for_function(x):
    return await TaskChannel().submit_nowait(wait_for_call, x)


@pytest.mark.asyncio
async def test_cycle_through_a_function_is_refused(x):
    """A function waits in a thread for what is behind the coroutine that waits for it."""
    lane = SHARED["lane"] = TaskChannel("own")
    assert isinstance(await outcome(lane.submit_nowait(wait_for_function, x)), DeadlockError)
    await lane.aclose()


CHANNEL_WAITS = {
    "drain": lambda channel, x: channel.drain(),
    "aclose": lambda channel, x: channel.aclose(),
    "submit": lambda channel, x: channel.submit(same, x),
}


@colocated_python
async def wait_for_own_channel(x, wait: str, gate: Gate):
    await gate.wait_async()
    await CHANNEL_WAITS[wait](SHARED["lane"], x)


@pytest.mark.parametrize("wait", CHANNEL_WAITS)
@pytest.mark.asyncio
async def test_waiting_for_own_channel_is_refused(x, wait):
    """drain, aclose and a waiting submit would wait for the body that calls them."""
    lane = SHARED["lane"] = TaskChannel("own", max_pending=1)
    gate = Gate()
    call = lane.submit_nowait(wait_for_own_channel, x, wait, gate)
    await eventually(lambda: lane.statistics().running, "it runs")
    queued = lane.submit_nowait(same, x)
    gate.open()
    error = await outcome(call)
    assert isinstance(error, DeadlockError)
    assert f"{wait} of channel 'own' was called inside the body" in str(error)
    assert await outcome(queued) is x
    assert not lane.closed
    await lane.aclose()


@colocated_python
async def block_the_loop(x):
    return plain(x).result(5)


@pytest.mark.asyncio
async def test_blocking_in_a_body_is_refused(x):
    """result() of an unfinished call would stop the host's loop."""
    error = await outcome(block_the_loop(x))
    assert isinstance(error, DeadlockError)
    assert "await fut" in str(error)


@colocated_python
async def leave_a_task(x, recorder: Recorder):
    async def later():
        await SHARED["ended"].wait()
        recorder.record("later", result=await SHARED["lane"].submit_nowait(same, x) is x)

    SHARED["task"] = asyncio.create_task(later())


@pytest.mark.asyncio
async def test_task_that_outlives_its_body_is_not_taken_for_it(x, recorder):
    """It may wait for calls in the channel of the body that has ended."""
    lane = SHARED["lane"] = TaskChannel()
    SHARED["ended"] = ended = asyncio.Event()
    async with asyncio.timeout(TIMEOUT):
        await lane.submit_nowait(leave_a_task, x, recorder)
        SHARED["task"].get_loop().call_soon_threadsafe(ended.set)
        await recorder.wait_for("later")
    assert recorder.sequence("later") == [True]


# --- threads and loops ------------------------------------------------------------------------------


def test_coroutine_without_a_loop(x):
    """Scripts call, wait and look like everywhere else."""
    assert same(x).result(TIMEOUT) is x
    assert same(x).block_until_ready() is x
    assert jax.block_until_ready([same(x)])[0].result() is x
    error = ValueError("own")
    assert fail(x, error).exception(TIMEOUT) is error
    with pytest.raises(ValueError, match="own"):
        fail(x, error).result(TIMEOUT)
    gate = Gate()
    call = TaskChannel("lane").submit_nowait(hold, x, gate)
    with pytest.raises(TimeoutError, match="still"):
        call.result(0.01)
    seen = threading.Event()
    call.add_done_callback(lambda call: seen.set())
    gate.open()
    assert call.result(TIMEOUT) is x
    assert seen.wait(TIMEOUT)


def test_coroutines_from_many_threads(x):
    """Threads wait side by side, each in its own channel."""
    SHARED["meeting"] = Meeting(8)
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.append(meet(x).result(TIMEOUT))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert results == [x] * 8


def test_several_event_loops_one_after_the_other(x, new_loop):
    """Functions and channels made before are used from each; calls may outlive a loop."""
    channel = TaskChannel()
    gate = Gate()

    async def main(i):
        if i == 1:
            SHARED["left"] = TaskChannel().submit_nowait(hold, x, gate)
        async with asyncio.timeout(TIMEOUT):
            assert await gather(same(x), channel.submit_nowait(sleep, x, 0.001)) == [x, x]

    for i in range(3):
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(main(i))
    gate.open()
    assert SHARED["left"].result(TIMEOUT) is x


def test_two_event_loops_at_once(x):
    """Bodies of tasks on two loops meet on the one loop of the host."""
    SHARED["meeting"] = Meeting(2)
    results: list[Any] = []

    async def main():
        async with asyncio.timeout(TIMEOUT):
            results.append(await meet(x))

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    asyncio.run(main())
    thread.join(TIMEOUT)
    assert results == [x, x]


def test_call_of_a_loop_that_was_closed(x):
    """The coroutine goes on when the loop of its caller is gone, and so does what it calls."""
    gate = Gate()

    async def main():
        SHARED["call"] = hold_then_call(x, gate)

    asyncio.run(main())
    gate.open()
    assert SHARED["call"].result(TIMEOUT) is x


@colocated_python
async def hold_then_call(x, gate: Gate):
    await gate.wait_async()
    return await same(await plain(x))


# --- workers ----------------------------------------------------------------------------------------


class SlowToShip:
    """Takes its time on the worker that makes the shipped copy."""

    def __reduce__(self):
        return _make_slowly, ()


def _make_slowly() -> SlowToShip:
    time.sleep(0.05)
    return SlowToShip()


@pytest.mark.asyncio
async def test_worker_is_not_stuck_in_a_coroutine_that_it_has_started(x):
    """One that took long to start a coroutine counts as free afterwards, or others are added for it."""
    captured = SlowToShip()

    @colocated_python
    async def body(x):
        return (x, captured)[0]

    async with asyncio.timeout(TIMEOUT):
        await gather(*(TaskChannel().submit_nowait(f, x) for f in (body, plain, same, body)))
    await eventually(
        lambda: runtime.statistics().workers == runtime.statistics().idle, "workers are idle"
    )
    assert pool.stuck == 0


# --- diagnosis --------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_runtime_shows_coroutines(x, recorder):
    """Running ones and those queued behind them, with all that is known of any call."""
    gate = Gate()
    async with asyncio.timeout(TIMEOUT), open_task_channel("lane") as channel:
        calls = [channel.submit_nowait(hold, x, gate, recorder), channel.submit_nowait(same, x)]
        await recorder.wait_for("start")
        running, queued = runtime.calls()
        assert (running.function, running.state, running.channel) == ("hold", "running", "lane")
        assert (queued.function, queued.state) == ("same", "queued")
        assert running.running_for is not None
        assert running.running_for >= 0
        assert f"{__file__}:" in running.where
        await eventually(
            lambda: runtime.statistics().workers == runtime.statistics().idle, "workers are idle"
        )
        statistics = runtime.statistics()
        assert (statistics.running, statistics.queued, statistics.channels) == (1, 1, 1)
        assert channel.statistics().running == 1
        gate.open()
        await gather(*calls)
    assert runtime.calls() == []


@pytest.mark.asyncio
async def test_slow_coroutine_is_logged_once(x, caplog):
    """As a slow function is, though no thread is in it."""
    configure(slow_call=0.05)
    gate = Gate()
    call = TaskChannel("lane").submit_nowait(hold, x, gate)

    def slow():
        return [r for r in caplog.records if "slow_call" in r.getMessage()]

    await eventually(slow, "it is logged")
    await asyncio.sleep(0.15)
    (record,) = slow()
    assert record.levelno == logging.WARNING
    assert re.search(r"hold .*'lane', has been running for 0\.\d s", record.getMessage())
    gate.open()
    assert await outcome(call) is x


@pytest.mark.asyncio
async def test_workers_are_no_more_than_needed(x):
    """Coroutines that start and end all the time do not make the pool grow."""
    configure(worker_limit=4)
    async with asyncio.timeout(TIMEOUT):
        before = runtime.statistics().workers
        for _ in range(5):
            await sleep.map([x] * 200, [0.002] * 200, limit=200)
        after = runtime.statistics().workers
    assert after <= max(before, 4) + 4
