# SPDX-License-Identifier: Apache-2.0
"""Diagnosis: what is in flight, slow calls, counters, settings, caches, and how things print."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from late_arrays import Late

import aiocolocated
from aiocolocated import (
    Settings,
    TaskChannel,
    TaskGroup,
    cache_info,
    clear_caches,
    colocated_python,
    configure,
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
def hold(x: jax.Array, started: Gate, gate: Gate) -> jax.Array:
    """Say so, and wait."""
    started.open()
    gate.wait()
    return x


@colocated_python
def be_late(x: jax.Array, late: Late) -> jax.Array:
    return late.array(x)


@colocated_python
def same(x: jax.Array) -> jax.Array:
    return x


@colocated_python
def fail(x: jax.Array) -> jax.Array:
    del x
    raise KeyError("from the body")


async def eventually(condition: Callable[[], object], what: str, timeout: float = 10.0) -> None:
    """Wait until something that no future tells of has happened."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        await asyncio.sleep(0.001)


def line_before() -> str:
    """File and line of the statement before the one that calls this."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"{__file__}:{frame.f_back.f_lineno - 1}"


# --- what is in flight ------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_calls_tell_everything_of_each_state(x):
    """Function, channel, host, state, ages and submitting line of four calls in four states."""
    late, gate, started = Late(), Gate(), [Gate(), Gate(), Gate()]
    assert runtime.calls() == []
    before = time.monotonic()
    one, two, three = TaskChannel("one"), TaskChannel("two"), TaskChannel("three")
    dispatched = one.submit_nowait(be_late, x, late)
    dispatched_at = line_before()
    await dispatched.wait_dispatched()
    abandoned = two.submit_nowait(hold, x, started[0], gate)
    abandoned_at = line_before()
    await started[0].wait_async()
    abandoned.cancel()
    running = three.submit_nowait(hold, x, started[1], gate)
    running_at = line_before()
    await started[1].wait_async()
    queued = three.run(len, "abc")
    queued_at = line_before()

    calls = runtime.calls()
    elapsed = time.monotonic() - before
    assert [(c.function, c.channel, c.host, c.state, c.where) for c in calls] == [
        ("be_late", "one", "in-process", "dispatched", dispatched_at),
        ("hold", "two", "in-process", "abandoned", abandoned_at),
        ("hold", "three", "in-process", "running", running_at),
        ("len", "three", "in-process", "queued", queued_at),
    ]
    ages = [c.age for c in calls]
    assert ages == sorted(ages, reverse=True)
    assert 0 < ages[-1] <= ages[0] <= elapsed
    assert calls[-1].running_for is None
    assert all(c.running_for is not None and 0 < c.running_for <= c.age for c in calls[:-1])
    later = runtime.calls()
    assert all(b.age > a.age for a, b in zip(calls, later, strict=True))

    numbers = runtime.statistics()
    assert (numbers.queued, numbers.running, numbers.dispatched, numbers.abandoned) == (1, 2, 1, 1)
    assert numbers.channels == 3
    late.release()
    gate.open()
    await gather(dispatched, running, queued)
    await two.aclose()
    assert runtime.calls() == []
    numbers = runtime.statistics()
    assert (numbers.queued, numbers.running, numbers.dispatched, numbers.abandoned) == (0, 0, 0, 0)
    assert numbers.channels == 0


@pytest.mark.asyncio
async def test_calls_list_cancelled_call_whose_arrays_compute(x):
    """A call cancelled after its dispatch is abandoned until its arrays are computed."""
    late = Late()
    async with open_task_channel("late") as channel:
        fut = be_late(x, late)
        await fut.wait_dispatched()
        fut.cancel()
        (call,) = runtime.calls()
        assert (call.function, call.state) == ("be_late", "abandoned")
        late.release()
        await channel.drain()
        assert runtime.calls() == []


@pytest.mark.asyncio
async def test_calls_leave_out_cancelled_queued_call(x):
    """A call cancelled in the queue is over at once, though its channel has not got to it."""
    gate, started = Gate(), Gate()
    async with open_task_channel() as channel:
        running = hold(x, started, gate)
        await started.wait_async()
        queued = hold(x, Gate(), gate)
        assert [call.state for call in runtime.calls()] == ["running", "queued"]
        queued.cancel()
        assert [call.state for call in runtime.calls()] == ["running"]
        assert runtime.statistics().queued == channel.statistics().queued == 0
        gate.open()
        assert await running is x


@pytest.mark.asyncio
async def test_calls_name_lines_of_every_way_to_submit(x):
    """The line is that of the call expression, in map, groups, channels and coroutines alike."""
    gate, started = Gate(), Gate()
    lines = []
    async with open_task_channel("front") as channel:
        front = hold(x, started, gate)
        lines.append(line_before())
        channel.submit_nowait(same, x)
        lines.append(line_before())
        await channel.submit(same, x)
        lines.append(line_before())
        channel.run(same, x)
        lines.append(line_before())
        await started.wait_async()
        assert [call.where for call in runtime.calls()] == lines
        gate.open()
        await front
    meeting = Gate()
    async with TaskGroup() as group:
        group.start_soon(hold, x, Gate(), meeting)
        started_at = line_before()
        assert [call.where for call in runtime.calls()] == [started_at]
        meeting.open()


@pytest.mark.asyncio
async def test_calls_give_channels_of_tasks_their_names(x):
    """A call that names no channel goes by the name of its task."""
    gate, started = Gate(), Gate()

    async def work() -> None:
        await hold(x, started, gate)

    task = asyncio.create_task(work(), name="the worker")
    await started.wait_async()
    assert [call.channel for call in runtime.calls()] == ["the worker"]
    gate.open()
    await task


def test_calls_are_seen_without_a_loop_and_from_other_threads(x):
    """runtime.calls() needs no loop and sees the calls of all threads."""
    gate, started = Gate(), Gate()
    thread = threading.Thread(target=lambda: hold(x, started, gate).result(10), name="submitter")
    thread.start()
    started.wait()
    assert [(c.function, c.channel) for c in runtime.calls()] == [("hold", "submitter")]
    gate.open()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.asyncio
async def test_statistics_count_waiting_and_dedicated_threads(x):
    """Bodies that wait for other bodies count as waiting; threads of their own are apart."""
    gate, started = Gate(), Gate()

    def outer(x: jax.Array) -> jax.Array:
        return hold(x, started, gate).result(10)

    own = TaskChannel(dedicated_thread=True)
    waits = colocated_python(outer)(x)
    await started.wait_async()
    dedicated = own.submit_nowait(hold, x, Gate(), gate)
    await eventually(lambda: runtime.statistics().running == 3, "all three run")
    numbers = runtime.statistics()
    assert numbers.waiting == 1
    assert numbers.dedicated == 1
    assert numbers.workers - numbers.idle == 2
    gate.open()
    await gather(waits, dedicated)
    await own.aclose()
    await eventually(lambda: runtime.statistics().dedicated == 0, "its thread ends")
    numbers = runtime.statistics()
    assert numbers.waiting == 0
    await eventually(
        lambda: (n := runtime.statistics()).idle == n.workers, "the workers are idle again"
    )


@pytest.mark.asyncio
async def test_statistics_count_runnable_channels(x):
    """Channels that wait for a thread are runnable."""
    configure(worker_limit=1)
    gate, started = Gate(), Gate()
    channels = [TaskChannel() for _ in range(4)]
    calls = [channels[0].submit_nowait(hold, x, started, gate)]
    await started.wait_async()
    calls += [channel.submit_nowait(same, x) for channel in channels]
    numbers = runtime.statistics()
    assert (numbers.runnable, numbers.queued, numbers.running) == (3, 4, 1)
    gate.open()
    await gather(*calls)
    assert runtime.statistics().runnable == 0


@pytest.mark.asyncio
async def test_statistics_of_channel_agree_with_runtime(x):
    """One channel's numbers and the runtime's are of the same calls."""
    gate, started, late = Gate(), Gate(), Late()
    async with open_task_channel("numbers") as channel:
        computing = be_late(x, late)
        await computing.wait_dispatched()
        running = hold(x, started, gate)
        await started.wait_async()
        queued = [same(x) for _ in range(3)]
        ours, all_ = channel.statistics(), runtime.statistics()
        assert (ours.queued, ours.running, ours.in_flight) == (3, 1, 1)
        assert (all_.queued, all_.running, all_.dispatched) == (3, 1, 1)
        assert ours.submitted == 5
        late.release()
        gate.open()
        await gather(computing, running, *queued)
        failed = await gather(fail(x), return_exceptions=True)
        assert isinstance(failed[0], KeyError)
        ours = channel.statistics()
        assert (ours.submitted, ours.failed, ours.cancelled) == (6, 1, 0)


# --- slow calls -------------------------------------------------------------------------------------


def slow_reports(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [r for r in caplog.records if "slow_call" in r.getMessage()]


@pytest.mark.asyncio
async def test_slow_call_is_logged_once(x, caplog):
    """A running call slower than slow_call is logged once, with all that is known of it."""
    configure(slow_call=0.05)
    gate, started = Gate(), Gate()
    async with open_task_channel("the lane") as channel:
        fut = hold(x, started, gate)
        where = line_before()
        queued = same(x)
        await eventually(lambda: slow_reports(caplog), "it is logged")
        (record,) = slow_reports(caplog)
        assert (record.name, record.levelno) == ("aiocolocated", logging.WARNING)
        message = record.getMessage()
        for part in ("hold", "in-process", "'the lane'", "running", "0.05", where):
            assert part in message
        seconds = re.search(r"for (\d+\.\d) s", message)
        assert seconds is not None
        assert float(seconds[1]) >= 0.05 - 0.05  # one digit
        # Not again, at any of the next looks, and never for the call that only waits behind it.
        await asyncio.sleep(0.2)
        assert len(slow_reports(caplog)) == 1
        gate.open()
        await gather(fut, queued)
        await channel.drain()
    assert len(slow_reports(caplog)) == 1


@pytest.mark.asyncio
async def test_every_slow_call_is_logged(x, caplog):
    """Several slow calls are logged once each, those whose arrays compute included."""
    gate, late = Gate(), Late()
    channels = [TaskChannel(name) for name in "abc"]
    calls = [channel.submit_nowait(hold, x, Gate(), gate) for channel in channels[:2]]
    calls.append(channels[2].submit_nowait(be_late, x, late))
    await calls[2].wait_dispatched()
    configure(slow_call=0.05)
    await eventually(lambda: len(slow_reports(caplog)) >= 3, "they are logged")
    await asyncio.sleep(0.1)
    messages = [r.getMessage() for r in slow_reports(caplog)]
    assert len(messages) == 3
    assert sorted(re.search(r"channel '(.)'", m)[1] for m in messages) == ["a", "b", "c"]
    (computing,) = [m for m in messages if "be_late" in m]
    assert "dispatched" in computing
    gate.open()
    late.release()
    await gather(*calls)


@pytest.mark.asyncio
async def test_slow_calls_one_after_the_other_are_logged(x, caplog):
    """A slow call that takes the memory of an earlier one is another call."""
    configure(slow_call=0.02)
    for number in range(1, 6):
        gate, started = Gate(), Gate()
        fut = hold(x, started, gate)
        await eventually(lambda n=number: len(slow_reports(caplog)) >= n, f"{number} are logged")
        gate.open()
        await fut
        del fut
    assert len(slow_reports(caplog)) == 5


@pytest.mark.asyncio
async def test_abandoned_slow_call_is_logged(x, caplog):
    """A cancelled call whose body will not end is worth a line: it holds its slot."""
    configure(slow_call=0.05)
    gate, started = Gate(), Gate()
    channel = TaskChannel()
    fut = channel.submit_nowait(hold, x, started, gate)
    await started.wait_async()
    fut.cancel()
    await eventually(lambda: slow_reports(caplog), "it is logged")
    assert "abandoned" in slow_reports(caplog)[0].getMessage()
    gate.open()
    await channel.aclose()


@pytest.mark.asyncio
async def test_slow_call_may_be_lowered_while_a_call_runs(x, caplog):
    """A new slow_call counts for calls that run already; None logs nothing."""
    configure(slow_call=None)
    gate, started = Gate(), Gate()
    fut = hold(x, started, gate)
    await started.wait_async()
    await asyncio.sleep(0.1)
    assert slow_reports(caplog) == []
    configure(slow_call=0.01)
    await eventually(lambda: slow_reports(caplog), "it is logged")
    gate.open()
    await fut


@pytest.mark.asyncio
async def test_quick_calls_are_not_logged(x, caplog):
    """A channel that is busy for longer than slow_call with quick calls has no slow call."""
    configure(slow_call=0.2)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        await gather(*(same(x) for _ in range(100)))
    assert slow_reports(caplog) == []


# --- settings ---------------------------------------------------------------------------------------


def test_configure_returns_and_keeps_settings():
    """configure changes what it is given, keeps the rest, and says what is in force."""
    before = runtime.settings
    assert before == Settings()
    changed = configure(worker_limit=7, slow_call=None)
    assert changed is runtime.settings
    assert changed == dataclasses.replace(before, worker_limit=7, slow_call=None)
    assert configure() == changed
    assert configure(**dataclasses.asdict(before)) == before


def test_settings_are_immutable():
    """Settings change by configure only."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        runtime.settings.worker_limit = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("worker_limit", "worker_ceiling", "multi_device_in_flight")
          for value in (0, -1, 2.0, "4", None, True)),
        *((name, value) for name in ("worker_idle_timeout", "slow_call", "exit_grace")
          for value in (-1, -0.1, "4", True, float("nan"))),
        ("worker_idle_timeout", None),
    ],
)  # fmt: skip
def test_senseless_setting_is_refused(name, value):
    """A value that makes no sense is refused by name, and changes nothing, not even its neighbours."""
    before = runtime.settings
    with pytest.raises(ValueError, match=rf"{name} must be .*got {re.escape(repr(value))}"):
        configure(**{"slow_call": 3.0, "worker_limit": 5, name: value})
    assert runtime.settings is before


def test_unknown_setting_is_refused_with_the_known_ones():
    """A misspelled setting names those that exist."""
    before = runtime.settings
    with pytest.raises(TypeError, match=r"'workers'.*worker_limit"):
        configure(worker_limit=5, workers=3)  # type: ignore[call-arg]
    assert runtime.settings is before


@pytest.mark.parametrize(
    "changes",
    [
        {"worker_limit": 1, "worker_ceiling": 1},
        {"worker_idle_timeout": 0},
        {"worker_idle_timeout": 0.5, "slow_call": 0.0, "exit_grace": 0},
        {"slow_call": None, "exit_grace": None},
        {"multi_device_in_flight": 1},
    ],
    ids=str,
)
def test_extreme_settings_are_taken(changes, x):
    """The smallest values are taken, and calls work with them."""
    configure(**changes)
    for name, value in changes.items():
        assert getattr(runtime.settings, name) == value
    assert same(x).result(10) is x


def test_endless_idle_timeout_is_taken(x):
    """Threads may stay for ever: infinity is a number of seconds, and no wait chokes on it."""
    configure(worker_idle_timeout=float("inf"))
    assert same(x).result(10) is x
    meeting = Rendezvous(3)

    def meet(x: jax.Array) -> jax.Array:
        meeting.wait()
        return x

    f = colocated_python(meet)
    calls = [TaskChannel().submit_nowait(f, x) for _ in range(3)]
    assert all(call.result(10) is x for call in calls)
    configure(worker_idle_timeout=0.01)
    assert same(x).result(10) is x


@pytest.mark.asyncio
async def test_raised_limit_takes_effect_for_waiting_channels(x):
    """A higher worker_limit lets channels start that wait for a thread."""
    configure(worker_limit=1)
    gate, started = Gate(), Gate()
    first = TaskChannel().submit_nowait(hold, x, started, gate)
    await started.wait_async()
    second = TaskChannel().submit_nowait(same, x)
    await asyncio.sleep(0.05)
    assert not second.done()
    configure(worker_limit=2)
    assert await asyncio.wait_for(second, 10) is x
    gate.open()
    await first


# --- how things print -------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_future_prints_function_state_channel_and_line(x):
    """repr of a future says what it is of, in every state."""
    gate, started, late = Gate(), Gate(), Late()
    async with open_task_channel("lane") as channel:
        running = hold(x, started, gate)
        where = line_before()
        await started.wait_async()
        queued = same(x)
        for fut, name, state in ((running, "hold", "running"), (queued, "same", "queued")):
            assert repr(fut).startswith(f"<ArrayFuture {name} {state} channel='lane' submitted at ")
        assert repr(running).endswith(f"{where}>")
        gate.open()
        await gather(running, queued)
        computing = be_late(x, late)
        await computing.wait_dispatched()
        assert " dispatched " in repr(computing)
        late.release()
        await computing
        assert " ready " in repr(computing)
        failed, cancelled = fail(x), same(x)
        cancelled.cancel()
        await gather(failed, cancelled, return_exceptions=True)
        assert " failed " in repr(failed)
        assert " cancelled " in repr(cancelled) or " ready " in repr(cancelled)
        await channel.drain()


@pytest.mark.asyncio
async def test_channel_prints_name_state_and_queue(x):
    """repr of a channel says whether it is open, stopped or closed, and how long its queue is."""
    gate, started = Gate(), Gate()
    channel = TaskChannel("lane", on_error="stop")
    assert repr(channel) == "<TaskChannel 'lane' open queued=0>"
    running = channel.submit_nowait(hold, x, started, gate)
    await started.wait_async()
    queued = channel.submit_nowait(fail, x)
    assert repr(channel) == "<TaskChannel 'lane' open queued=1>"
    gate.open()
    await gather(running, queued, return_exceptions=True)
    assert repr(channel) == "<TaskChannel 'lane' stopped queued=0>"
    await channel.aclose()
    assert repr(channel) == "<TaskChannel 'lane' closed queued=0>"
    assert re.fullmatch(r"<TaskChannel 'channel-\d+' open queued=0>", repr(TaskChannel()))


def test_function_and_runtime_print_themselves():
    """repr of a colocated function names it; that of the runtime gives the numbers."""
    assert repr(same) == "<ColocatedFunction same>"
    assert repr(runtime).startswith("<aiocolocated.runtime RuntimeStatistics(workers=")
    assert "worker_limit=64" in repr(runtime.settings)


@pytest.mark.asyncio
async def test_printing_waits_for_nothing(x):
    """repr and runtime.calls() work while many threads are busy with them."""
    recorder: Recorder = Recorder()
    gate, started = Gate(), Gate()
    running = hold(x, started, gate)
    await started.wait_async()

    def look(_: Any) -> None:
        for _ in range(50):
            repr(running), repr(runtime), runtime.calls()
        recorder.record("looked")

    await asyncio.gather(*(asyncio.to_thread(look, i) for i in range(4)))
    assert recorder.count("looked") == 4
    gate.open()
    await running


# --- caches -----------------------------------------------------------------------------------------


def test_cache_info_counts_specializations(x):
    """misses counts what was made, currsize what is held; clear_caches empties and breaks nothing."""
    clear_caches()

    def body(x: jax.Array) -> jax.Array:
        return x

    f = colocated_python(body)
    before = cache_info()
    assert before.currsize == 0
    assert before.maxsize >= 1
    for _ in range(3):
        f(x).result(10)
    once = cache_info()
    assert (once.misses - before.misses, once.currsize) == (1, 1)
    assert once.shipped == before.shipped + 1
    f(jnp.ones((2, 2))).result(10)
    twice = cache_info()
    assert (twice.misses - before.misses, twice.currsize) == (2, 2)
    assert twice.shipped == once.shipped  # one copy of the code for all specializations
    clear_caches()
    assert cache_info().currsize == 0
    f(x).result(10)
    f(jnp.ones((2, 2))).result(10)
    assert (cache_info().misses - before.misses, cache_info().currsize) == (4, 2)
    assert cache_info().shipped == once.shipped


def test_cache_info_forgets_dropped_functions(x):
    """A function that nobody has any more does not stay in the counts."""
    before = cache_info().functions

    def body(x: jax.Array) -> jax.Array:
        return x

    f = colocated_python(body)
    f(x).result(10)
    assert cache_info().functions > before
    del f, body
    aiocolocated.clear_caches()
    deadline = time.monotonic() + 10
    while cache_info().functions > before:
        assert time.monotonic() < deadline, cache_info()
        time.sleep(0.001)


def test_jax_clear_caches_empties_ours(x):
    """jax.clear_caches() does what clear_caches() does."""
    same(x).result(10)
    assert cache_info().currsize >= 1
    jax.clear_caches()
    assert cache_info().currsize == 0
    assert same(x).result(10) is x
