# SPDX-License-Identifier: Apache-2.0
"""Cancellation of coroutine bodies (contract C6): how it reaches them, and who waits for the clean-up."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import threading
import time
import weakref
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import pytest
from coroutine_bodies import (
    SHARED,
    TIMEOUT,
    block,
    eventually,
    hold,
    opened,
    outcome,
    plain,
    same,
    sleep,
    timeout_once_started,
    waiter,
    work,
)

from aiocolocated import (
    BodyError,
    CallCancelledError,
    TaskChannel,
    TaskGroup,
    _compat,
    as_completed,
    colocated_python,
    gather,
    jax_scope,
    open_task_channel,
    runtime,
)
from aiocolocated.testing import Gate, Recorder

pytestmark = pytest.mark.timeout(60)

PROMPT = 2.0  # seconds until a cancellation has reached a body


@pytest.fixture
def x() -> jax.Array:
    return jnp.arange(3.0)


@pytest.fixture(autouse=True)
def _around():
    """Start the host's loop before the test, because it keeps descriptors; share nothing after it."""
    same(jnp.zeros(())).result(TIMEOUT)
    yield
    SHARED.clear()


class Reports:
    """What the loop's exception handler is told."""

    def __init__(self) -> None:
        self.errors: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: self.errors.append(context["exception"])
        )


# --- what reaches the body --------------------------------------------------------------------------


async def by_cancel(x, recorder, channel):
    call = channel.submit_nowait(work, x, recorder, opened())
    await recorder.wait_for("start")
    assert call.cancel("because of rain")
    with pytest.raises(CallCancelledError, match="while running: because of rain"):
        await call


async def by_waiter(x, recorder, channel):
    task = await waiter(channel.submit_nowait(work, x, recorder, opened()))
    await recorder.wait_for("start")
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert recorder.count("clean") == 1


async def by_timeout(x, recorder, channel):
    async with timeout_once_started(recorder):
        await channel.submit_nowait(work, x, recorder, opened())
    assert recorder.count("clean") == 1


async def by_wait_for(x, recorder, channel):
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(channel.submit_nowait(work, x, recorder, opened()), 0.3)
    assert recorder.count("clean") == 1


async def by_anyio(x, recorder, channel):
    with anyio.move_on_after(0.3) as scope:
        await channel.submit_nowait(work, x, recorder, opened())
    assert scope.cancelled_caught


async def by_group(x, recorder, channel):
    with pytest.raises(ExceptionGroup) as caught:
        async with TaskGroup() as group:
            channel.submit_nowait(work, x, recorder, opened())
            await recorder.wait_for("start")
            group.start_soon(fail_now, x)
            await asyncio.sleep(60)
    assert [type(e) for e in caught.value.exceptions] == [ValueError]
    assert recorder.count("clean") == 1


async def by_started_call_of_group(x, recorder, channel):
    with pytest.raises(ExceptionGroup) as caught:
        async with TaskGroup() as group:
            group.start_soon(work, x, recorder, opened())
            await recorder.wait_for("start")
            group.start_soon(fail_now, x)
    assert [type(e) for e in caught.value.exceptions] == [ValueError]
    assert recorder.count("clean") == 1


async def by_asyncio_group(x, recorder, channel):
    async def task():
        await channel.submit_nowait(work, x, recorder, opened())

    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(task())
            await recorder.wait_for("start")
            raise ValueError
    assert recorder.count("clean") == 1


async def by_block(x, recorder, channel):
    with pytest.raises(ValueError, match="leave"):
        async with open_task_channel():
            work(x, recorder, opened())
            await recorder.wait_for("start")
            raise ValueError("leave")
    assert recorder.count("clean") == 1


async def by_map(x, recorder, channel):
    async with timeout_once_started(recorder):
        await work.map([x], [recorder], [opened()])
    assert recorder.count("clean") == 1


async def by_gather(x, recorder, channel):
    async with timeout_once_started(recorder):
        await gather(same(x), channel.submit_nowait(work, x, recorder, opened()))
    assert recorder.count("clean") == 1


async def by_as_completed(x, recorder, channel):
    async with timeout_once_started(recorder):
        async for _ in as_completed([channel.submit_nowait(work, x, recorder, opened())]):
            pass
    assert recorder.count("clean") == 1


async def by_dependent(x, recorder, channel):
    """The last waiter of what depends on it."""
    async with timeout_once_started(recorder):
        await plain(channel.submit_nowait(work, x, recorder, opened()))


async def by_thread(x, recorder, channel):
    call = channel.submit_nowait(work, x, recorder, opened())
    await recorder.wait_for("start")
    waiting = asyncio.create_task(outcome(asyncio.to_thread(call.result, TIMEOUT)))
    await eventually(lambda: call._waiter_count, "the thread waits")
    await asyncio.to_thread(call.cancel)
    assert isinstance(await waiting, CallCancelledError)


WAYS = {name: way for name, way in globals().items() if name.startswith("by_")}


@colocated_python
async def fail_now(x):
    raise ValueError("fail now")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_cancellation_reaches_a_running_body(x, recorder, way):
    """Every way to cancel raises CancelledError in the coroutine, soon, and lets it clean up."""
    started = time.monotonic()
    channel = TaskChannel()
    async with asyncio.timeout(TIMEOUT):
        await WAYS[way](x, recorder, channel)
        await recorder.wait_for("clean")
        await channel.aclose()
    assert [event.name for event in recorder.events] == ["start", "cancelled", "clean"]
    assert time.monotonic() - started < PROMPT
    assert runtime.calls() == []
    if sys.version_info >= (3, 13):  # before, failing groups leave their task's count where it is
        assert asyncio.current_task().cancelling() == 0


@pytest.mark.asyncio
async def test_many_cancellations_are_prompt(x, recorder):
    """Two hundred bodies at once hear of it, and have cleaned up when their group is left."""
    async with asyncio.timeout(TIMEOUT):
        with contextlib.suppress(asyncio.CancelledError):
            async with TaskGroup() as group:
                for i in range(200):
                    group.start_soon(work, x, recorder, opened(), i)
                await recorder.wait_for("start", 200)
                started = time.monotonic()
                raise asyncio.CancelledError
    assert time.monotonic() - started < PROMPT
    assert sorted(recorder.sequence("clean")) == list(range(200))


@pytest.mark.parametrize("how", ["cancel", "waiter", "block"])
@pytest.mark.asyncio
async def test_queued_coroutine_never_starts(x, recorder, how):
    """One that waits behind another is skipped; no coroutine is even made."""
    gate = Gate()
    channel = TaskChannel()
    first = channel.submit_nowait(hold, x, gate)
    if how == "block":
        with pytest.raises(ValueError, match="leave"):
            async with open_task_channel():
                doomed = channel.submit_nowait(work, x, recorder, opened())
                raise ValueError("leave")
    else:
        doomed = channel.submit_nowait(work, x, recorder, opened())
        if how == "cancel":
            doomed.cancel()
        else:
            task = await waiter(doomed)
            task.cancel()
            await asyncio.wait([task])
    assert doomed.cancelled()
    assert isinstance(await outcome(doomed), CallCancelledError)
    gate.open()
    async with asyncio.timeout(TIMEOUT):
        await first
        await channel.aclose()
    assert recorder.events == []


@colocated_python
async def hold_the_loop(x, started: Gate):
    """Keep the host's loop from doing anything, as no body should."""
    started.open()
    while not SHARED["go on"].wait(0.001):
        pass
    return x


@pytest.mark.no_blocking(False)
@pytest.mark.asyncio
async def test_cancelled_before_its_first_step(x, recorder):
    """A call that runs already, whose coroutine had no turn yet, never runs any of it."""
    SHARED["go on"] = threading.Event()
    started = Gate()
    blocking = TaskChannel().submit_nowait(hold_the_loop, x, started)
    await started.wait_async()
    channel = TaskChannel()
    doomed = channel.submit_nowait(work, x, recorder, opened())
    await eventually(lambda: doomed._body is not None, "its coroutine is made")
    doomed.cancel()
    assert isinstance(await outcome(doomed), CallCancelledError)
    SHARED["go on"].set()
    async with asyncio.timeout(TIMEOUT):
        assert await blocking is x
        await channel.aclose()
    assert recorder.events == []


class Shipped:
    """Holds up the worker that makes the shipped copy of what captures it."""

    def __reduce__(self):
        return _make_shipped, ()


def _make_shipped() -> Shipped:
    SHARED["shipping"].set()
    assert SHARED["go on"].wait(TIMEOUT)
    return Shipped()


@pytest.mark.asyncio
async def test_cancelled_while_its_coroutine_is_made(x, recorder):
    """A call that a worker is about to start on the host's loop never runs any of it either."""
    SHARED.update({"shipping": threading.Event(), "go on": threading.Event()})
    captured = Shipped()

    @colocated_python
    async def body(x):
        recorder.record("start")
        return (x, captured)[0]

    channel = TaskChannel()
    doomed = channel.submit_nowait(body, x)
    await eventually(SHARED["shipping"].is_set, "a worker is at it")
    doomed.cancel()
    assert isinstance(await outcome(doomed), CallCancelledError)
    SHARED["go on"].set()
    async with asyncio.timeout(TIMEOUT):
        await channel.aclose()
    assert recorder.events == []


@pytest.mark.asyncio
async def test_call_that_nobody_awaits_is_untouched(x, recorder):
    """Neither its caller's end nor a shielded wait cancels a coroutine."""
    gate = Gate()
    calls = []

    async def make_call():
        calls.append(hold(x, gate, recorder))
        await asyncio.Event().wait()

    caller = asyncio.create_task(make_call())
    await recorder.wait_for("start")
    shielded = await waiter(asyncio.shield(calls[0]))
    for task in (caller, shielded):
        task.cancel()
        await asyncio.wait([task])
    gate.open()
    assert await outcome(calls[0]) is x


# --- who waits for the clean-up ---------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_others_do_not_wait_for_the_clean_up(x, recorder):
    """Waiters that were not cancelled, and dependents, are told at once; the slot stays held."""
    clean_up = Gate()
    channel = TaskChannel()
    call = channel.submit_nowait(work, x, recorder, clean_up)
    behind = channel.submit_nowait(same, x)
    waiters = [await waiter(outcome(w)) for w in (call, call.wait_dispatched(), plain(call))]
    await recorder.wait_for("start")
    call.cancel()
    assert call.cancelled()
    assert not call.cancel()
    for task in waiters:
        assert isinstance(await task, CallCancelledError)
    await recorder.wait_for("cancelled")
    statistics = channel.statistics()
    assert (statistics.running, statistics.abandoned, statistics.queued) == (1, 1, 1)
    assert [info.state for info in runtime.calls()] == ["abandoned", "queued"]
    assert runtime.statistics().abandoned == 1
    assert not behind.done()
    clean_up.open()
    assert await outcome(behind) is x
    assert recorder.count("clean") == 1
    assert channel.statistics().abandoned == 0


@pytest.mark.parametrize("wait", ["await", "wait_dispatched", "gather", "as_completed"])
@pytest.mark.asyncio
async def test_cancelled_waiter_waits_for_the_clean_up(x, recorder, wait):
    """As a task does that awaits the coroutine itself; a second cancellation ends that wait."""
    clean_up = Gate()
    channel = TaskChannel()

    async def waits(call):
        if wait == "await":
            await call
        elif wait == "wait_dispatched":
            await call.wait_dispatched()
        elif wait == "gather":
            await gather(call, same(x))
        else:
            async for _ in as_completed([call]):
                pass

    for times in (1, 2):
        recorder.clear()
        clean_up = Gate()
        task = await waiter(waits(channel.submit_nowait(work, x, recorder, clean_up)))
        await recorder.wait_for("start")
        task.cancel()
        await recorder.wait_for("cancelled")
        await asyncio.sleep(0.005)
        assert not task.done()
        if times == 2:
            task.cancel()
            await asyncio.wait([task], timeout=TIMEOUT)
            assert recorder.count("clean") == 0
            clean_up.open()
            await recorder.wait_for("clean")
        else:
            clean_up.open()
            await asyncio.wait([task], timeout=TIMEOUT)
            assert recorder.count("clean") == 1
        assert task.cancelled()
        async with asyncio.timeout(TIMEOUT):
            await channel.drain()


@pytest.mark.asyncio
async def test_waiter_that_is_not_the_last_does_not_wait(x, recorder):
    """Its cancellation does not touch the body, so there is nothing to wait for."""
    clean_up = opened()
    call = TaskChannel().submit_nowait(work, x, recorder, clean_up)
    first, last = await waiter(call), await waiter(call)
    await recorder.wait_for("start")
    first.cancel()
    await asyncio.wait([first], timeout=TIMEOUT)
    assert first.cancelled()
    assert recorder.count("cancelled") == 0
    last.cancel()
    await asyncio.wait([last], timeout=TIMEOUT)
    assert recorder.count("clean") == 1


@pytest.mark.parametrize("kind", ["group", "channel", "map"])
@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_block_waits_however_often_it_is_cancelled(x, recorder, kind):
    """Nothing that a block has started still runs after it."""
    clean_up = Gate()

    async def main():
        if kind == "map":
            await work.map([x], [recorder], [clean_up])
        else:
            async with TaskGroup() if kind == "group" else open_task_channel():
                await work(x, recorder, clean_up)

    task = await waiter(main())
    await recorder.wait_for("start")
    for _ in range(3):
        task.cancel()
        await recorder.wait_for("cancelled")
        await asyncio.sleep(0.003)
        assert not task.done()
    clean_up.open()
    await asyncio.wait([task], timeout=TIMEOUT)
    assert task.cancelled()
    # Once: the clean-up itself is not cancelled.
    assert [event.name for event in recorder.events] == ["start", "cancelled", "clean"]


@pytest.mark.asyncio
async def test_group_of_asyncio_waits_for_the_clean_up(x, recorder):
    """So does what only awaits calls in its tasks, after one cancellation."""
    clean_up = Gate()

    async def task():
        await TaskChannel().submit_nowait(work, x, recorder, clean_up)

    async def main():
        async with asyncio.TaskGroup() as group:
            group.create_task(task())

    running = await waiter(main())
    await asyncio.sleep(0)
    await recorder.wait_for("start")
    running.cancel()
    await recorder.wait_for("cancelled")
    await asyncio.sleep(0.003)
    assert not running.done()
    clean_up.open()
    await asyncio.wait([running], timeout=TIMEOUT)
    assert running.cancelled()
    assert recorder.count("clean") == 1


# --- what the clean-up does -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", "group", "channel"])
@pytest.mark.asyncio
async def test_body_that_suppresses_its_cancellation(x, recorder, kind):
    """What it returns is thrown away, the call stays cancelled, and the block waits for its end."""
    reports = Reports()
    clean_up = Gate()
    blocks = {"none": contextlib.nullcontext, "group": TaskGroup, "channel": open_task_channel}
    channel = TaskChannel()

    async def main():
        async with blocks[kind]():
            call = channel.submit_nowait(work, x, recorder, clean_up, 0, "return")
            await recorder.wait_for("start")
            call.cancel()
            assert isinstance(await outcome(call), CallCancelledError)
        return call

    running = asyncio.create_task(main())
    await recorder.wait_for("cancelled")
    await asyncio.sleep(0.003)
    assert running.done() == (kind == "none")
    clean_up.open()
    call = await outcome(running)
    async with asyncio.timeout(TIMEOUT):
        await channel.aclose()
    assert recorder.count("clean") == 1
    assert call.cancelled()
    assert isinstance(await outcome(call), CallCancelledError)
    assert reports.errors == []


@pytest.mark.parametrize("finish", ["ValueError", "KeyboardInterrupt"])
@pytest.mark.parametrize("kind", ["group", "channel"])
@pytest.mark.asyncio
async def test_error_of_the_clean_up_joins_the_block(x, recorder, kind, finish):
    """Beside whatever else went wrong in the block; with the call's note."""
    reports = Reports()
    with pytest.raises(ExceptionGroup) as caught:
        async with TaskGroup() if kind == "group" else open_task_channel():
            call = work(x, recorder, opened(), 0, finish)
            await recorder.wait_for("start")
            raise LookupError("leave")
    first, second = caught.value.exceptions
    assert isinstance(first, LookupError)
    assert isinstance(second, ValueError if finish == "ValueError" else BodyError)
    assert any(note.startswith("colocated call work") for note in second.__notes__)
    assert isinstance(await outcome(call), CallCancelledError)
    assert reports.errors == []
    del caught, first, second


@pytest.mark.asyncio
async def test_error_of_the_clean_up_joins_a_cancelled_block(x, recorder):
    """It takes the place of the cancellation, which a task is left with from Python 3.13 on."""
    errors = []

    async def main():
        try:
            async with TaskGroup():
                work(x, recorder, opened(), 0, "ValueError")
                await asyncio.sleep(60)
        except BaseExceptionGroup as group:
            errors.extend(str(error) for error in group.exceptions)

    task = await waiter(main())
    await recorder.wait_for("start")
    task.cancel()
    await asyncio.wait([task], timeout=TIMEOUT)
    assert errors == ["clean-up of 0"]
    assert task.cancelled() == (sys.version_info >= (3, 13))


@pytest.mark.asyncio
async def test_error_of_the_clean_up_is_reported_once(x, recorder):
    """Where no block is, and the waiters are gone, the loop's exception handler gets it."""
    reports = Reports()
    channel = TaskChannel()
    for name in ("first", "second"):
        recorder.clear()
        async with timeout_once_started(recorder):
            await channel.submit_nowait(work, x, recorder, opened(), name, "ValueError")
    await eventually(lambda: len(reports.errors) >= 2, "both are reported")
    assert [str(error) for error in reports.errors] == ["clean-up of first", "clean-up of second"]
    asyncio.get_running_loop().set_exception_handler(None)
    reports.errors.clear()


@colocated_python
async def cancel_itself(x, how: str):
    if how == "raise":
        raise asyncio.CancelledError("my own")
    asyncio.current_task().cancel("my own")
    await asyncio.sleep(10)


@pytest.mark.parametrize("how", ["raise", "cancel"])
@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_cancelled_error_of_the_body_is_not_the_callers(x, how):
    """A body that cancels itself has failed; the call was not cancelled."""
    call = cancel_itself(x, how)
    error = await outcome(call)
    assert isinstance(error, BodyError)
    assert isinstance(error.__cause__, asyncio.CancelledError)
    assert not call.cancelled()
    assert asyncio.current_task().cancelling() == 0


@colocated_python
async def look_while_cleaning_up(x, recorder: Recorder):
    recorder.record("start")
    try:
        await asyncio.sleep(60)
    finally:
        for _ in range(3):
            await asyncio.sleep(0)
            recorder.record(
                "look",
                seen=(
                    jax.config.jax_enable_x64,
                    _compat.get_execution_stream(),
                    threading.current_thread().name,
                ),
            )


@pytest.mark.asyncio
async def test_clean_up_has_configuration_and_stream_of_the_call(x, recorder):
    """It is more steps of the same body."""
    channel = TaskChannel()
    with jax_scope(enable_x64=True):
        call = channel.submit_nowait(look_while_cleaning_up, x, recorder)
    await recorder.wait_for("start")
    call.cancel()
    async with asyncio.timeout(TIMEOUT):
        await channel.aclose()
    assert recorder.sequence("look") == [(True, channel._stream, "aiocolocated-loop")] * 3


# --- nested calls -----------------------------------------------------------------------------------


@colocated_python
async def outer(x, recorder: Recorder, clean_up: Gate, depth: int):
    if not depth:
        return await work(x, recorder, clean_up, "inner")
    try:
        return await outer(x, recorder, clean_up, depth - 1)
    finally:
        recorder.record("outer", depth=depth)


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_cancellation_goes_through_nested_calls(x, recorder):
    """From the outermost to the innermost; each waits for the clean-up of what it has called."""
    clean_up = Gate()
    task = await waiter(outer(x, recorder, clean_up, 3))
    await recorder.wait_for("start")
    task.cancel()
    await recorder.wait_for("cancelled")
    await asyncio.sleep(0.003)
    assert not task.done()
    assert recorder.count("outer") == 0
    clean_up.open()
    await asyncio.wait([task], timeout=TIMEOUT)
    assert task.cancelled()
    names = [event.name for event in recorder.events]
    assert names == ["start", "cancelled", "clean", "outer", "outer", "outer"]
    assert recorder.sequence("outer") == [1, 2, 3]


@colocated_python
async def wait_for_function(x, gate: Gate, recorder: Recorder):
    return await block(x, gate, recorder)


@pytest.mark.asyncio
async def test_cancelled_while_it_waits_for_a_function(x, recorder):
    """The function cannot be interrupted and is abandoned; the coroutine does not wait for it."""
    gate = Gate()
    task = await waiter(wait_for_function(x, gate, recorder))
    await recorder.wait_for("start")
    task.cancel()
    await asyncio.wait([task], timeout=TIMEOUT)
    assert task.cancelled()
    assert recorder.count("end") == 0
    gate.open()
    await recorder.wait_for("end")


@colocated_python
async def time_out_inside(x, recorder: Recorder, clean_up: Gate):
    try:
        async with asyncio.timeout(0.3):
            await work(x, recorder, clean_up)
    except TimeoutError:
        recorder.record("timeout")
    return await same(x)


@pytest.mark.asyncio
async def test_timeout_inside_of_a_body(x, recorder):
    """A body's own timeout cancels what it awaits, waits for its clean-up, and the body goes on."""
    assert await outcome(time_out_inside(x, recorder, opened())) is x
    names = [event.name for event in recorder.events]
    assert names == ["start", "cancelled", "clean", "timeout"]


# --- nothing is left --------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_cancelled_coroutine_keeps_nothing(recorder):
    """Arguments go when the clean-up has ended, though the future is kept."""
    big = jnp.zeros(1_000_000)
    reference = weakref.ref(big)
    clean_up = Gate()
    channel = TaskChannel()
    call = channel.submit_nowait(work, big, recorder, clean_up)
    del big
    await recorder.wait_for("start")
    call.cancel()
    assert reference() is not None
    clean_up.open()
    await eventually(lambda: reference() is None, "the argument is freed")
    async with asyncio.timeout(TIMEOUT):
        await channel.aclose()
    assert call.cancelled()


@colocated_python
async def count(x, seconds: float, recorder: Recorder):
    recorder.record("start")
    try:
        await sleep(x, seconds)
        await plain(x)
    finally:
        try:
            await asyncio.sleep(0)  # here it may be cancelled as well
        finally:
            recorder.record("end")


@pytest.mark.asyncio
async def test_random_cancellations_leave_nothing(x, recorder):
    """Every body that starts ends, whenever and however it is cancelled, and nothing is in flight."""
    chance = random.Random(3)

    async def one():
        call = TaskChannel().submit_nowait(count, x, chance.random() * 0.01, recorder)
        how = chance.randrange(3)
        if how == 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(chance.random() * 0.02):
                    await call
        elif how == 1:
            await asyncio.sleep(chance.random() * 0.02)
            call.cancel()
        else:
            await call

    async with asyncio.timeout(TIMEOUT):
        async with TaskGroup(limit=50) as group:
            for _ in range(400):
                group.create_task(one())
        await eventually(lambda: not runtime.calls(), "nothing is in flight")
    assert recorder.count("start") == recorder.count("end")
    assert recorder.count("start") > 200
