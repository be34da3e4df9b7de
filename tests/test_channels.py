# SPDX-License-Identifier: Apache-2.0
"""Channels (contracts C1, C3, C3b): where a call goes, when it starts, and how a channel lives."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from late_arrays import Late

from aiocolocated import (
    ArgumentError,
    CallCancelledError,
    ChannelClosedError,
    ChannelStoppedError,
    DeadlockError,
    TaskChannel,
    WouldBlock,
    _compat,
    colocated_python,
    configure,
    gather,
    open_task_channel,
    runtime,
    wait_until_ready,
)
from aiocolocated.testing import Gate, Recorder, Rendezvous

pytestmark = pytest.mark.timeout(40)

IMPORTED = TaskChannel("imported", max_pending=100)


@pytest.fixture
def x() -> jax.Array:
    return jnp.arange(3.0)


@colocated_python
def record(x: jax.Array, recorder: Recorder, name: object) -> jax.Array:
    """Note the start and the end."""
    recorder.record("start", name=name)
    recorder.record("end", name=name)
    return x


@colocated_python
def wait(x: jax.Array, gate: Gate, recorder: Recorder | None = None, name: object = 0) -> jax.Array:
    """Note the start, wait, and note the end."""
    if recorder is not None:
        recorder.record("start", name=name)
    gate.wait()
    if recorder is not None:
        recorder.record("end", name=name)
    return x


@colocated_python
def fail(x: jax.Array, error: Exception) -> jax.Array:
    raise error


@colocated_python
def be_late(x: jax.Array, late: Late, recorder: Recorder, name: object = 0) -> jax.Array:
    """Return an array that is computed when the test wants it."""
    recorder.record("start", name=name)
    return late.array(x)


@colocated_python
def meet(x: jax.Array, meeting: Rendezvous) -> jax.Array:
    meeting.wait()
    return x


@colocated_python
def this_thread(x: jax.Array) -> int:
    return threading.get_ident()


@colocated_python
def this_stream(x: jax.Array) -> int:
    return _compat.get_execution_stream()


async def eventually(condition, what: str, timeout: float = 10.0) -> None:
    """Wait until something that no future tells of has happened."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        await asyncio.sleep(0.001)


# --- C1: the place of a call ------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_place_is_fixed_by_call_expression(x, recorder):
    """Calls start in the order of the call expressions, whatever the order of the awaits."""
    calls = [record(x, recorder, i) for i in range(20)]
    for call in reversed(calls):
        await call
    assert recorder.sequence("start") == list(range(20))
    assert recorder.peak() == 1


@pytest.mark.asyncio
async def test_place_is_kept_while_argument_is_late(x, recorder):
    """A call whose argument is not there yet is not overtaken by one whose argument is."""
    gate = Gate()
    other = TaskChannel()
    async with open_task_channel() as channel:
        argument = other.submit_nowait(wait, x, gate)
        first = record(argument, recorder, "late")
        second = record(x, recorder, "early")
        await eventually(lambda: runtime.statistics().running == 1, "the other channel runs")
        assert channel.statistics().queued == 2
        gate.open()
        await gather(second, first)
    assert recorder.sequence("start") == ["late", "early"]


@pytest.mark.asyncio
async def test_place_is_kept_when_others_fail_or_are_cancelled(x, recorder):
    """The fate of other calls does not change the order of the rest."""
    gate = Gate()
    async with open_task_channel() as channel:
        blocker = wait(x, gate)
        calls = []
        for i in range(9):
            if i % 3 == 1:
                calls.append(fail(x, ValueError(i)))
            else:
                calls.append(record(x, recorder, i))
        calls[3].cancel()
        gate.open()
        results = await gather(blocker, *calls, return_exceptions=True)
        assert channel.statistics().failed == 3
    assert recorder.sequence("start") == [0, 2, 5, 6, 8]
    assert [type(r).__name__ for r in results[1:6]] == [
        "ArrayImpl",
        "ValueError",
        "ArrayImpl",
        "CallCancelledError",
        "ValueError",
    ]


@pytest.mark.asyncio
async def test_full_channel_raises_on_loop(x):
    """A full channel refuses submit_nowait, run and the plain call, and takes nothing of them."""
    gate = Gate()
    async with open_task_channel(max_pending=1) as channel:
        running = channel.submit_nowait(wait, x, gate)
        await eventually(lambda: channel.statistics().running, "the first call runs")
        queued = channel.submit_nowait(wait, x, gate)
        for submit in (
            lambda: channel.submit_nowait(wait, x, gate),
            lambda: channel.run(len, "ab"),
            lambda: wait(x, gate),
        ):
            with pytest.raises(WouldBlock, match="full") as caught:
                submit()
            assert isinstance(caught.value, anyio.WouldBlock)
        assert channel.statistics().submitted == 2
        gate.open()
        await gather(running, queued)
        await channel.submit_nowait(wait, x, gate)


@pytest.mark.asyncio
async def test_full_channel_makes_thread_wait(x, recorder):
    """A thread without a loop waits for room, and then gets its future."""
    gate = Gate()
    channel = TaskChannel(max_pending=1)
    running = channel.submit_nowait(wait, x, gate)
    await eventually(lambda: channel.statistics().running, "the first call runs")
    queued = channel.submit_nowait(wait, x, gate)

    def submit():
        recorder.record("submitting")
        future = channel.submit_nowait(record, x, recorder, "from thread")
        recorder.record("submitted")
        return future.result(timeout=10)

    thread = asyncio.create_task(asyncio.to_thread(submit))
    await recorder.wait_for("submitting")
    await eventually(lambda: channel.statistics().waiting_for_room == 1, "the thread waits")
    assert recorder.count("submitted") == 0
    gate.open()
    assert await thread is x
    await gather(running, queued)
    assert recorder.sequence("start") == ["from thread"]
    await channel.aclose()


@pytest.mark.asyncio
async def test_body_that_waits_for_room_gives_its_worker_back(x):
    """With one worker a body may wait for room in another channel, whose calls need that worker."""
    configure(worker_limit=1)
    full = TaskChannel("full", max_pending=1)
    gate = Gate()

    def body():
        gate.wait()
        futures = [full.submit_nowait(this_thread, x) for _ in range(5)]
        return [future.result(timeout=10) for future in futures]

    call = TaskChannel().run(body)
    queued = full.submit_nowait(this_thread, x)
    gate.open()
    assert len(await call) == 5
    await queued


@pytest.mark.asyncio
async def test_body_must_not_wait_for_room_in_its_own_channel(x):
    """That would never end, and is refused at once."""
    channel = TaskChannel("own", max_pending=1)
    gate = Gate()

    def body():
        gate.wait()
        channel.submit_nowait(this_thread, x)

    call = channel.run(body)
    await eventually(lambda: channel.statistics().running, "the body runs")
    queued = channel.submit_nowait(this_thread, x)
    gate.open()
    with pytest.raises(DeadlockError, match="own"):
        await call
    await queued
    assert channel.statistics().waiting_for_room == 0


@pytest.mark.asyncio
async def test_submit_returns_at_once_with_room(x):
    """With room, and without a bound, submit gives the future without waiting for anything."""
    gate = Gate()
    for bound in (None, 2):
        async with open_task_channel(max_pending=bound) as channel:
            call = await channel.submit(wait, x, gate)
            assert not call.done()
            gate.open()
            assert await call is x


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_submitters_get_room_in_order(x, recorder):
    """Waiting submitters are served first come, first served."""
    gate = Gate()
    async with open_task_channel(max_pending=1) as channel:
        await channel.submit(wait, x, gate)
        await eventually(lambda: channel.statistics().running, "the first call runs")
        tasks = [asyncio.create_task(channel.submit(record, x, recorder, i)) for i in range(6)]
        await eventually(lambda: channel.statistics().waiting_for_room == 5, "five wait")
        gate.open()
        await gather(*[await task for task in tasks])
    assert recorder.sequence("start") == list(range(6))
    assert recorder.peak() == 1


@pytest.mark.asyncio
async def test_submit_nowait_never_overtakes_waiting_submitter(x, recorder):
    """Room that becomes free belongs to who waits, also before the waiting task has noticed."""
    gate = Gate()
    async with open_task_channel(max_pending=1) as channel:
        running = channel.submit_nowait(wait, x, gate)
        await eventually(lambda: channel.statistics().running, "the first call runs")
        queued = channel.submit_nowait(record, x, recorder, "cancelled")
        submitter = asyncio.create_task(channel.submit(record, x, recorder, "waited"))
        await eventually(lambda: channel.statistics().waiting_for_room, "the submitter waits")
        queued.cancel()
        assert channel.statistics().waiting_for_room == 0
        assert not submitter.done()
        with pytest.raises(WouldBlock):
            channel.submit_nowait(record, x, recorder, "pushy")
        gate.open()
        await running
        await (await submitter)
    assert recorder.sequence("start") == ["waited"]


@pytest.mark.asyncio
async def test_cancelled_submitter_leaves_nothing(x, recorder):
    """Who is cancelled while waiting for room leaves no call, no place and no waiter behind."""
    gate = Gate()
    async with open_task_channel(max_pending=1) as channel:
        running = channel.submit_nowait(wait, x, gate)
        await eventually(lambda: channel.statistics().running, "the first call runs")
        queued = channel.submit_nowait(record, x, recorder, "queued")
        names = ("cancelled", "stays")
        first, second = (
            asyncio.create_task(channel.submit(record, x, recorder, name)) for name in names
        )
        await eventually(lambda: channel.statistics().waiting_for_room == 2, "both wait")
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert channel.statistics().waiting_for_room == 1
        assert channel.statistics().submitted == 2
        gate.open()
        await gather(running, queued, await second)
        assert channel.statistics().submitted == 3
    assert recorder.sequence("start") == ["queued", "stays"]


@pytest.mark.asyncio
async def test_submitter_cancelled_in_the_moment_of_admission_leaves_nothing(x, recorder):
    """A call that got in just before its submitter was cancelled does not run; its room is free."""
    gate = Gate()
    async with open_task_channel(max_pending=1) as channel:
        running = channel.submit_nowait(wait, x, gate)
        await eventually(lambda: channel.statistics().running, "the first call runs")
        queued = channel.submit_nowait(record, x, recorder, "queued")
        submitter = asyncio.create_task(channel.submit(record, x, recorder, "gone"))
        await eventually(lambda: channel.statistics().waiting_for_room, "the submitter waits")
        queued.cancel()
        submitter.cancel()  # it has got its room, and does not know yet
        with pytest.raises(asyncio.CancelledError):
            await submitter
        assert channel.statistics().queued == 0
        last = channel.submit_nowait(record, x, recorder, "last")
        gate.open()
        await gather(running, last)
    assert recorder.sequence("start") == ["last"]


@pytest.mark.asyncio
async def test_waiting_submitters_are_turned_away_when_channel_closes(x):
    """Closing tells tasks and threads that wait for room, and waits for what was taken."""
    gate = Gate()
    channel = TaskChannel("closing", max_pending=1)
    running = channel.submit_nowait(wait, x, gate)
    await eventually(lambda: channel.statistics().running, "the first call runs")
    queued = channel.submit_nowait(wait, x, gate)
    task = asyncio.create_task(channel.submit(wait, x, gate))
    thread = asyncio.create_task(asyncio.to_thread(channel.submit_nowait, wait, x, gate))
    await eventually(lambda: channel.statistics().waiting_for_room == 2, "both wait")
    closing = asyncio.create_task(channel.aclose())
    for waiting in (task, thread):
        with pytest.raises(ChannelClosedError, match="closing"):
            await waiting
    assert not closing.done()
    gate.open()
    await closing
    assert running.done()
    assert queued.done()


@pytest.mark.asyncio
async def test_waiting_submitters_are_turned_away_when_channel_stops(x):
    """A failure stops an on_error="stop" channel also for tasks and threads that wait for room."""
    gate = Gate()
    channel = TaskChannel(max_pending=1, on_error="stop")
    running = channel.submit_nowait(wait, x, gate)
    await eventually(lambda: channel.statistics().running, "the first call runs")
    queued = channel.submit_nowait(wait, x, gate)
    task = asyncio.create_task(channel.submit(wait, x, gate))
    thread = asyncio.create_task(asyncio.to_thread(channel.submit_nowait, wait, x, gate))
    await eventually(lambda: channel.statistics().waiting_for_room == 2, "both wait")
    running.cancel()
    for waiting in (task, thread, queued):
        with pytest.raises(ChannelStoppedError):
            await waiting
    gate.open()
    await channel.aclose()


@pytest.mark.asyncio
async def test_what_is_no_callable_is_refused(x):
    """Coroutine functions and plain values are refused before they take a place."""

    async def coroutine_function(x):
        return x

    async with open_task_channel() as channel:
        for wrong in (coroutine_function, 3):
            with pytest.raises(ArgumentError, match="callable"):
                channel.run(wrong, x)
        assert channel.statistics().submitted == 0


# --- C3: when the next call starts ------------------------------------------------------------------


@pytest.mark.asyncio
async def test_next_call_starts_while_arrays_still_compute(x, recorder):
    """The next call starts when the body before it has returned, its arrays may come later."""
    late = Late()
    async with open_task_channel() as channel:
        first = be_late(x, late, recorder, "late")
        second = record(x, recorder, "next")
        await second
        assert not first.done()
        assert first.dispatched()
        assert channel.statistics().in_flight == 1
        array = await first.wait_dispatched()
        assert not array.is_ready()
        late.release()
        assert (await first).is_ready()


@pytest.mark.asyncio
async def test_max_in_flight_bounds_run_ahead(x, recorder):
    """With as many calls computing as allowed, the next waits until one of them is ready."""
    lates = [Late() for _ in range(3)]
    async with open_task_channel(max_in_flight=2) as channel:
        calls = [be_late(x, late, recorder, i) for i, late in enumerate(lates)]
        last = record(x, recorder, "last")
        await calls[1].wait_dispatched()
        await eventually(lambda: channel.statistics().in_flight == 2, "two are computing")
        assert channel.statistics().queued == 2
        assert recorder.sequence("start", "name") == [0, 1]
        lates[0].release()
        await calls[0]
        await recorder.wait_for("start", 3)
        assert recorder.sequence("start", "name") == [0, 1, 2]
        lates[1].release()
        await last
        lates[2].release()
        await gather(*calls)
    assert recorder.sequence("start", "name") == [0, 1, 2, "last"]


@pytest.mark.asyncio
async def test_two_channels_overlap(x):
    """Calls of two channels run at the same time."""
    meeting = Rendezvous(2)
    async with open_task_channel() as first, open_task_channel() as second:
        await gather(first.run(meeting.wait), second.run(meeting.wait))


@pytest.mark.asyncio
async def test_channel_continues_after_failed_and_cancelled_calls(x, recorder):
    """By default a failed, a cancelled and an abandoned call leave the channel going."""
    gate, never = Gate(), Gate()
    async with open_task_channel() as channel:
        abandoned = wait(x, gate, recorder, "abandoned")
        await recorder.wait_for("start")
        failed, cancelled = fail(x, KeyError("k")), wait(x, never)
        last = record(x, recorder, "last")
        assert abandoned.cancel()
        assert cancelled.cancel()
        gate.open()
        await last
        assert isinstance(failed.exception(), KeyError)
        assert channel.statistics().cancelled == 2


@pytest.mark.parametrize("how", ["failed", "cancelled while queued", "cancelled while running"])
@pytest.mark.asyncio
async def test_stopping_channel_fails_what_is_behind(x, recorder, how):
    """After a failure everything behind it fails with ChannelStoppedError, now and later."""
    gate, error = Gate(), KeyError("k")
    channel = TaskChannel("chain", on_error="stop")
    first = channel.submit_nowait(wait, x, gate, recorder, "first")
    await recorder.wait_for("start")
    if how == "failed":
        broken = channel.submit_nowait(fail, x, error)
    else:
        queued = channel.submit_nowait(record, x, recorder, "second")
        broken = first if how == "cancelled while running" else queued
    behind = [channel.submit_nowait(record, x, recorder, "behind") for _ in range(3)]
    if how != "failed":
        assert broken.cancel()
    gate.open()
    (outcome,) = await gather(broken, return_exceptions=True)
    assert outcome is error if how == "failed" else isinstance(outcome, CallCancelledError)
    for call in behind:
        with pytest.raises(ChannelStoppedError, match="chain") as caught:
            await call
        assert type(caught.value.__cause__) is type(outcome)
    for submit in (channel.submit_nowait, channel.run):
        with pytest.raises(ChannelStoppedError, match="chain"):
            submit(record, x, recorder, "later")
    with pytest.raises(ChannelStoppedError, match="chain"):
        await channel.submit(record, x, recorder, "later")
    await channel.aclose()
    assert recorder.sequence("start") == ["first"]


@pytest.mark.asyncio
async def test_every_channel_is_one_execution_stream(x):
    """The calls of a channel share JAX's execution stream, whichever thread runs them."""
    streams = []
    for _ in range(2):
        async with open_task_channel():
            streams.append(set(await gather(*(this_stream(x) for _ in range(5)))))
    first, second = streams
    assert len(first) == len(second) == 1
    assert first != second


@pytest.mark.asyncio
async def test_pending_work_of_one_channel_does_not_delay_another(x, recorder):
    """A program of one channel is computed while one of another channel, on the same device, is not."""
    late = Late()
    double = jax.jit(lambda x: x @ x)
    square = jnp.ones((64, 64))
    async with open_task_channel() as slow, open_task_channel() as quick:
        pending = slow.submit_nowait(be_late, x, late, recorder)
        await pending.wait_dispatched()
        async with asyncio.timeout(10):
            await quick.run(double, square)
        assert not pending.done()
        late.release()
        await pending


# --- C3: a thread of one's own ----------------------------------------------------------------------


@pytest.mark.asyncio
async def test_dedicated_thread_runs_every_body(x):
    """All bodies of the channel run on one thread, which runs nothing else and ends with it."""
    async with open_task_channel("own", dedicated_thread=True) as channel:
        (own,) = {await this_thread(x) for _ in range(5)} | set(
            await gather(*(this_thread(x) for _ in range(5)))
        )
        async with open_task_channel(), open_task_channel():
            others = await gather(*(this_thread(x) for _ in range(20)))
        assert own not in others
        assert own != threading.get_ident()
        names = [thread.name for thread in threading.enumerate() if thread.ident == own]
        assert names == ["aiocolocated-channel-own"]
        assert runtime.statistics().dedicated == 1
        assert channel.statistics().submitted == 10
    await eventually(
        lambda: all(thread.ident != own for thread in threading.enumerate()), "the thread ends"
    )


@pytest.mark.asyncio
async def test_dedicated_thread_is_outside_the_worker_limit(x):
    """A busy pool does not keep a dedicated thread from running, nor the other way round."""
    configure(worker_limit=1)
    gate = Gate()
    async with open_task_channel(dedicated_thread=True) as own, open_task_channel() as shared:
        await shared.submit(wait, x, gate)
        await own.submit_nowait(this_thread, x)
        gate.open()


@pytest.mark.asyncio
async def test_dedicated_thread_ends_when_closed_channel_loses_its_last_call(x):
    """Cancelling the only call of a closed channel, before its thread has even started, ends it."""
    for _ in range(20):
        channel = TaskChannel("brief", dedicated_thread=True)
        call = channel.submit_nowait(this_thread, x)
        closing = asyncio.create_task(channel.aclose())
        await asyncio.sleep(0)
        call.cancel()
        await closing
    await eventually(
        lambda: all("brief" not in thread.name for thread in threading.enumerate()), "they end"
    )


@pytest.mark.asyncio
async def test_dedicated_thread_of_dropped_channel_ends(x):
    """A channel that nobody closed and nobody has any more does not keep its thread."""
    configure(worker_idle_timeout=0.05)
    channel = TaskChannel("dropped", dedicated_thread=True)
    await channel.submit_nowait(this_thread, x)
    del channel
    gc.collect()
    await eventually(
        lambda: all("dropped" not in thread.name for thread in threading.enumerate()), "it ends"
    )


# --- drain, close -----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_drain_waits_for_queue_bodies_and_arrays(x, recorder):
    """drain() is over when nothing is queued, running or computing."""
    gate, late = Gate(), Late()
    channel = TaskChannel()
    await channel.drain()  # nothing there
    calls = [
        channel.submit_nowait(wait, x, gate, recorder, "body"),
        channel.submit_nowait(be_late, x, late, recorder, "arrays"),
    ]
    draining = asyncio.create_task(channel.drain())
    await recorder.wait_for("start")
    assert not draining.done()
    gate.open()
    await calls[1].wait_dispatched()
    assert not draining.done()
    assert channel.statistics().in_flight == 1
    late.release()
    await draining
    assert all(call.done() for call in calls)
    assert not channel.closed


@pytest.mark.asyncio
async def test_cancelled_drain_leaves_calls_alone(x):
    """Cancelling drain() stops the wait, not the calls; another one waits on."""
    gate = Gate()
    channel = TaskChannel()
    call = channel.submit_nowait(wait, x, gate)
    first, second = (asyncio.create_task(channel.drain()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not call.done()
    gate.open()
    await second
    assert call.done()


@pytest.mark.asyncio
async def test_drain_waits_for_abandoned_body(x, recorder):
    """A cancelled call's body still counts."""
    gate = Gate()
    channel = TaskChannel()
    call = channel.submit_nowait(wait, x, gate, recorder)
    await recorder.wait_for("start")
    call.cancel()
    draining = asyncio.create_task(channel.drain())
    await asyncio.sleep(0)
    assert channel.statistics().abandoned == 1
    assert not draining.done()
    gate.open()
    await draining
    assert recorder.count("end") == 1


@pytest.mark.asyncio
async def test_close_finishes_what_was_submitted_and_refuses_the_rest(x, recorder):
    """aclose() takes no more calls, runs those it has, and may be called again at any time."""
    gate = Gate()
    channel = TaskChannel("shut")
    channel.submit_nowait(wait, x, gate)
    last = channel.submit_nowait(record, x, recorder, "last")
    closing = [asyncio.create_task(channel.aclose()) for _ in range(2)]
    await asyncio.sleep(0)
    assert channel.closed
    for submit in (channel.submit_nowait, channel.run):
        with pytest.raises(ChannelClosedError, match="shut") as caught:
            submit(record, x, recorder, "late")
        assert isinstance(caught.value, anyio.ClosedResourceError)
    with pytest.raises(ChannelClosedError):
        await channel.submit(record, x, recorder, "late")
    with pytest.raises(ChannelClosedError):
        async with channel:
            record(x, recorder, "late")
    assert not any(task.done() for task in closing)
    gate.open()
    await asyncio.gather(*closing)
    assert last.done()
    await channel.aclose()
    assert recorder.sequence("start") == ["last"]
    assert repr(channel) == "<TaskChannel 'shut' closed queued=0>"


@pytest.mark.asyncio
async def test_cancelled_close_leaves_channel_closed(x):
    """Cancelling aclose() stops the wait; the channel is closed and its calls go on."""
    gate = Gate()
    channel = TaskChannel()
    call = channel.submit_nowait(wait, x, gate)
    closing = asyncio.create_task(channel.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert channel.closed
    assert not call.done()
    gate.open()
    assert await call is x


@pytest.mark.asyncio
async def test_statistics_tell_everything(x, recorder):
    """Every number of the statistics says what it promises, at one moment with all of them."""
    gate, late = Gate(), Late()
    channel = TaskChannel("numbers", max_pending=2, max_in_flight=3)
    await gather(
        channel.submit_nowait(record, x, recorder, 0),
        channel.submit_nowait(fail, x, ValueError()),
        return_exceptions=True,
    )
    computing = channel.submit_nowait(be_late, x, late, recorder)
    await computing.wait_dispatched()
    abandoned = channel.submit_nowait(wait, x, gate, recorder)
    await recorder.wait_for("start", 3)
    abandoned.cancel()
    queued = [channel.submit_nowait(wait, x, gate) for _ in range(2)]
    queued[0].cancel()
    queued.append(channel.submit_nowait(wait, x, gate))
    submitter = asyncio.create_task(channel.submit(wait, x, gate))
    await asyncio.sleep(0)
    numbers = channel.statistics()
    assert {name: getattr(numbers, name) for name in numbers.__slots__} == {
        "name": "numbers",
        "queued": 2,
        "running": 1,
        "in_flight": 1,
        "waiting_for_room": 1,
        "submitted": 7,
        "failed": 1,
        "cancelled": 2,
        "abandoned": 1,
        "max_pending": 2,
        "max_in_flight": 3,
        "closed": False,
    }
    gate.open()
    late.release()
    await submitter
    await channel.aclose()
    numbers = channel.statistics()
    assert (numbers.queued, numbers.running, numbers.in_flight, numbers.abandoned) == (0, 0, 0, 0)
    assert (numbers.submitted, numbers.closed) == (8, True)


@pytest.mark.parametrize(
    "options",
    [
        {"max_pending": 0},
        {"max_pending": -1},
        {"max_in_flight": 0},
        {"on_error": "ignore"},
    ],
    ids=str,
)
def test_senseless_options_are_refused(options):
    """A channel refuses a bound below one and an unknown on_error, naming it."""
    (name,) = options
    for make in (TaskChannel, open_task_channel):
        with pytest.raises(ValueError, match=name):
            make(**options)


def test_channel_of_import_time_serves_every_loop_and_thread(x, recorder):
    """A channel made at import time is bound to no loop: several runs, threads, and no loop at all."""

    async def main(name):
        async with IMPORTED:
            return await record(x, recorder, name)

    asyncio.run(main(0))
    asyncio.run(main(1))
    IMPORTED.submit_nowait(record, x, recorder, 2).result(timeout=10)
    thread = threading.Thread(target=asyncio.run, args=(main(3),))
    thread.start()
    thread.join(10)
    assert recorder.sequence("start") == [0, 1, 2, 3]
    assert not IMPORTED.closed


def test_forgotten_channels_do_not_hold_the_exit_up(run_script):
    """A program that closes none of its channels, one with a thread of its own among them, ends."""
    finished = run_script(
        """
        import asyncio, jax.numpy as jnp
        from aiocolocated import TaskChannel, colocated_python

        plain, own = TaskChannel(), TaskChannel(dedicated_thread=True)

        @colocated_python
        def body(x):
            return x + 1

        async def main():
            for channel in (plain, own):
                print(float(await channel.submit_nowait(body, jnp.ones(()))))

        asyncio.run(main())
        """
    ).check()
    assert finished.stdout.split() == ["2.0", "2.0"]


# --- activation -------------------------------------------------------------------------------------


def channel_of(call) -> str:
    """Name of a call's channel."""
    return call._channel.name


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_activation_is_undone_on_leaving(x):
    """Calls go to the innermost active channel and, outside, to the task's own."""
    outer, inner = TaskChannel("outer"), TaskChannel("inner")

    def where():
        call = this_thread(x)
        calls.append(call)
        return channel_of(call)

    calls = []
    own = where()
    async with outer:
        assert where() == "outer"
        async with inner:
            assert where() == "inner"
            async with outer:
                assert where() == "outer"
            assert where() == "inner"
        assert where() == "outer"
    assert where() == own
    await gather(*calls)


@pytest.mark.asyncio
async def test_activation_does_not_wait_or_close(x):
    """Leaving `async with channel` does not wait for its calls and does not close it."""
    gate = Gate()
    channel = TaskChannel()
    async with channel:
        call = wait(x, gate)
    assert not call.done()
    assert not channel.closed
    gate.open()
    await call


@pytest.mark.asyncio
async def test_activations_are_left_in_any_order(x):
    """Leaving the outer channel first keeps the inner one active."""
    outer, inner = TaskChannel("outer"), TaskChannel("inner")
    await outer.__aenter__()
    await inner.__aenter__()
    await outer.__aexit__(None, None, None)
    call = this_thread(x)
    assert channel_of(call) == "inner"
    await inner.__aexit__(None, None, None)
    other = this_thread(x)
    assert channel_of(other) not in ("inner", "outer")
    await gather(call, other)


@pytest.mark.asyncio
async def test_activation_is_left_from_another_task(x):
    """A channel that one task has entered may be left by another: it is the first that loses it."""
    channel, mine = TaskChannel("handed on"), TaskChannel("mine")
    await channel.__aenter__()

    async def leave():
        async with mine:
            await channel.__aexit__(None, None, None)
            call = this_thread(x)
            await call
            return channel_of(call)

    assert await asyncio.create_task(leave()) == "mine"
    call = this_thread(x)
    assert channel_of(call) not in ("handed on", "mine")
    await call


@pytest.mark.asyncio
async def test_block_is_left_from_another_task(x):
    """open_task_channel may be entered in one task and left in another, as fixtures do."""
    block = open_task_channel("fixture")
    channel = await block.__aenter__()
    call = this_thread(x)
    assert channel_of(call) == "fixture"
    await asyncio.create_task(block.__aexit__(None, None, None))
    assert call.done()
    assert channel.closed
    after = this_thread(x)
    assert channel_of(after) != "fixture"
    await after


# --- the block --------------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_block_waits_and_closes(x, recorder):
    """Leaving the block waits for its calls, none of which anybody awaited, and closes the channel."""
    late = Late()
    async with open_task_channel("block", max_pending=9) as channel:
        for i in range(5):
            record(x, recorder, i)
        last = be_late(x, late, recorder, "late")
        channel.run(late.release)
        assert channel.name == "block"
    assert last.done()
    assert channel.closed
    assert recorder.sequence("start", "name") == [*range(5), "late"]


@pytest.mark.asyncio
async def test_block_drains_calls_that_others_submitted(x):
    """The channel is drained on leaving, whoever owns the calls in it."""
    gate, submitted = Gate(), asyncio.Event()

    async def other(channel_ready):
        channel = await channel_ready
        call = channel.submit_nowait(wait, x, gate)
        submitted.set()
        return call

    channel_ready = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(other(channel_ready))  # outside of the block: not owned by it

    async def block():
        async with open_task_channel() as channel:
            channel_ready.set_result(channel)
            await submitted.wait()
        return channel

    leaving = asyncio.create_task(block())
    call = await task
    await asyncio.sleep(0.005)  # time in which it would leave
    assert not leaving.done()
    gate.open()
    channel = await leaving
    assert call.done()
    assert channel.closed


@pytest.mark.asyncio
async def test_block_is_entered_once(x):
    """The block's channel is closed when it is left, so it cannot be entered again."""
    block = open_task_channel()
    async with block:
        await this_thread(x)
    with pytest.raises(ChannelClosedError, match="once"):
        async with block:
            pass


@pytest.mark.asyncio
async def test_block_raises_errors_that_nobody_retrieved(x):
    """Errors of calls that nobody awaited come out of the block together; retrieved ones do not."""
    with pytest.raises(ExceptionGroup) as caught:
        async with open_task_channel():
            fail(x, ValueError(1))
            with pytest.raises(KeyError):
                await fail(x, KeyError(2))
            fail(x, ValueError(3))
    assert [error.args for error in caught.value.exceptions] == [(1,), (3,)]


@pytest.mark.asyncio
async def test_block_raises_errors_beside_its_own(x):
    """What the block raised comes first in the group."""
    own = RuntimeError("own")
    with pytest.raises(ExceptionGroup) as caught:
        async with open_task_channel() as channel:
            fail(x, ValueError(1))
            await channel.drain()
            raise own
    first, second = caught.value.exceptions
    assert first is own
    assert second.args == (1,)


@pytest.mark.asyncio
async def test_block_lets_its_own_error_through_alone(x):
    """With no other error the block's exception leaves it as it is, a call's own error too."""
    error = ValueError("alone")
    with pytest.raises(ValueError, match="alone") as caught:
        async with open_task_channel():
            await fail(x, error)
    assert caught.value is error


@pytest.mark.asyncio
async def test_nested_blocks_keep_calls_apart(x, recorder):
    """Each block waits for its own calls only, and each channel keeps its own order."""
    gate = Gate()
    async with open_task_channel("outer"):
        slow = wait(x, gate)
        async with open_task_channel("inner"):
            for i in range(3):
                record(x, recorder, i)
        assert recorder.sequence("end") == [0, 1, 2]
        assert not slow.done()
        gate.open()
    assert slow.done()


@pytest.mark.asyncio
async def test_idle_channels_are_forgotten(x):
    """After its calls are over the library keeps no channel, however they ended."""
    late, recorder = Late(), Recorder()
    async with open_task_channel() as channel:
        call = be_late(x, late, recorder)
        await call.wait_dispatched()
        assert runtime.statistics().channels == 1
        late.release()
        await call
        await channel.drain()
        assert runtime.statistics().channels == 0
        gate = Gate()
        wait(x, gate)
        wait(x, gate).cancel()
        gate.open()
        await channel.drain()
        assert runtime.statistics().channels == 0


# --- C3b: programs over several devices -------------------------------------------------------------


@pytest.fixture
def spread(cpu_devices) -> jax.Array:
    """An array on two devices."""
    mesh = jax.sharding.Mesh(np.array(cpu_devices[:2]), ("d",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.device_put(np.zeros(2, np.float32), sharding)


def hold(x: jax.Array, gate: Gate, recorder: Recorder, name: object = 0) -> jax.Array:
    recorder.record("start", name=name)
    gate.wait()
    recorder.record("end", name=name)
    return x


@pytest.mark.asyncio
async def test_multi_device_programs_are_held_to_the_cap(spread, recorder):
    """In all channels together no more of them are under way than multi_device_in_flight says."""
    configure(multi_device_in_flight=2)
    gates = [Gate() for _ in range(6)]
    channels = [TaskChannel() for _ in gates]
    calls = [
        channel.run(hold, spread, gate, recorder, i)
        for i, (channel, gate) in enumerate(zip(channels, gates, strict=True))
    ]
    await recorder.wait_for("start", 2)
    await TaskChannel().run(len, "any other call")
    assert recorder.count("start") == 2
    for ended in range(6):
        i = recorder.sequence("start")[ended]
        gates[i].open()
        await calls[i]
        await recorder.wait_for("start", min(6, ended + 3))
    assert recorder.peak() == 2


@pytest.mark.asyncio
async def test_multi_device_program_counts_until_it_is_computed(spread, recorder):
    """It is not the return of the call but its arrays that make room for the next one."""
    configure(multi_device_in_flight=1)
    late, gate = Late(), Gate()
    gate.open()
    first, second = TaskChannel(), TaskChannel()
    pending = first.run(late.array, spread)
    await pending.wait_dispatched()
    held = second.run(hold, spread, gate, recorder)
    await first.run(len, "one device")
    assert second.statistics().queued == 1
    assert recorder.count("start") == 0
    late.release()
    await gather(pending, held)


@pytest.mark.parametrize("how", ["cancelled", "replaced by another kind of call"])
@pytest.mark.asyncio
async def test_cancelled_multi_device_program_passes_its_turn_on(spread, recorder, how):
    """A channel that waited for its turn and does not need it any more gives it to the next."""
    configure(multi_device_in_flight=1)
    first_gate, narrow_gate, last_gate = Gate(), Gate(), Gate()
    channels = [TaskChannel() for _ in range(3)]
    first = channels[0].run(hold, spread, first_gate, recorder, "first")
    await recorder.wait_for("start")
    lost = channels[1].run(hold, spread, last_gate, recorder, "lost")
    last = channels[2].run(hold, spread, last_gate, recorder, "last")
    narrow = None
    if how != "cancelled":
        narrow = channels[1].run(narrow_gate.wait)
    lost.cancel()
    first_gate.open()
    await recorder.wait_for("start", 2)
    assert recorder.sequence("start") == ["first", "last"]
    narrow_gate.open()
    last_gate.open()
    await gather(first, last, *([narrow] if narrow is not None else []))


@pytest.mark.asyncio
async def test_raised_cap_lets_waiting_programs_start(spread, recorder):
    """configure() takes effect for programs that wait for their turn already."""
    configure(multi_device_in_flight=1)
    gate = Gate()
    calls = [TaskChannel().run(hold, spread, gate, recorder, i) for i in range(4)]
    await recorder.wait_for("start")
    configure(multi_device_in_flight=3)
    await recorder.wait_for("start", 3)
    assert recorder.count("start") == 3
    gate.open()
    await gather(*calls)
    assert recorder.peak() == 3


@pytest.mark.asyncio
async def test_failed_multi_device_program_makes_room(spread, recorder):
    """A body that raises and one that was abandoned give their turn back when they end."""
    configure(multi_device_in_flight=1)
    gate, opened = Gate(), Gate()
    opened.open()

    def boom(x):
        raise ValueError("boom")

    failed = TaskChannel().run(boom, spread)
    abandoned = TaskChannel().run(hold, spread, gate, recorder, "abandoned")
    await recorder.wait_for("start")
    last = TaskChannel().run(hold, spread, opened, recorder, "last")
    abandoned.cancel()
    await gather(failed, abandoned, return_exceptions=True)
    assert recorder.sequence("start") == ["abandoned"]
    gate.open()
    await last
    assert await wait_until_ready(spread) is spread
