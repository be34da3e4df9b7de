# SPDX-License-Identifier: Apache-2.0
"""Many calls at once, with fixed seeds: order, overlap, collectives and memory hold under load."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from late_arrays import Late

from aiocolocated import (
    CallCancelledError,
    TaskChannel,
    TaskGroup,
    WouldBlock,
    colocated_python,
    configure,
    gather,
    open_task_channel,
    runtime,
)
from aiocolocated.testing import Gate, Recorder, Rendezvous

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def x() -> jax.Array:
    return jnp.arange(3.0)


@colocated_python
def work(x: jax.Array, recorder: Recorder, name: object, seconds: float) -> jax.Array:
    """A body that takes a moment."""
    recorder.record("start", name=name)
    time.sleep(seconds)
    recorder.record("end", name=name)
    return x


@colocated_python
def meet(x: jax.Array, meeting: Rendezvous) -> jax.Array:
    meeting.wait()
    return x


async def eventually(condition, what: str, timeout: float = 20.0) -> None:
    """Wait until something that no future tells of has happened."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        await asyncio.sleep(0.001)


# --- order ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.asyncio
async def test_thousand_calls_start_in_submission_order(x, recorder, seed):
    """With random delays, late arguments and random cancellations on one channel, order holds.

    Calls start in the order of submission and one at a time; those that were cancelled before they
    started never do; all others run.
    """
    chance = random.Random(seed)
    arguments = [TaskChannel() for _ in range(4)]
    calls = []
    async with open_task_channel() as channel:
        for i in range(1000):
            argument = x
            if chance.random() < 0.2:  # computed elsewhere, and later
                seconds = chance.random() * 5e-4
                elsewhere = chance.choice(arguments)
                argument = elsewhere.submit_nowait(work, x, Recorder(), i, seconds)
            calls.append(work(argument, recorder, i, chance.random() * 3e-4))
            if chance.random() < 0.1:
                calls[chance.randrange(max(0, i - 20), i + 1)].cancel()
            if chance.random() < 0.05:
                await asyncio.sleep(chance.random() * 1e-3)
        results = await gather(*calls, return_exceptions=True)
        assert channel.statistics().submitted == 1000
    started = recorder.sequence("start", "name")
    assert started == sorted(started)
    assert recorder.peak() == 1
    assert recorder.count("end") == len(started)
    cancelled = {i: str(r) for i, r in enumerate(results) if isinstance(r, CallCancelledError)}
    in_queue = {i for i, text in cancelled.items() if "while queued" in text}
    assert len(in_queue) > 20
    assert set(started) == set(range(1000)) - in_queue
    assert all(r is x for i, r in enumerate(results) if i not in cancelled)


@pytest.mark.asyncio
async def test_many_channels_keep_their_own_order_and_overlap(x):
    """Calls of twenty channels, submitted in a random mixture, are in order in each of them."""
    configure(worker_limit=8)
    chance = random.Random(3)
    channels = [TaskChannel(max_pending=chance.choice([None, 5])) for _ in range(20)]
    recorders = [Recorder() for _ in channels]
    together = Recorder()

    async def producer(number):
        mine = random.Random(number)
        for i in range(50):
            call = await channels[number].submit(
                work, x, recorders[number], i, mine.random() * 2e-4
            )
            if mine.random() < 0.1:
                call.cancel()
            together.record("submitted")

    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(producer(number))
    for channel in channels:
        await channel.aclose()
    for recorder, channel in zip(recorders, channels, strict=True):
        started = recorder.sequence("start", "name")
        assert started == sorted(started)
        assert recorder.peak() == 1
        assert len(started) >= 50 - channel.statistics().cancelled
    starts = [(e.time, 1) for r in recorders for e in r.events if e.name == "start"]
    ends = [(e.time, -1) for r in recorders for e in r.events if e.name == "end"]
    running = peak = 0
    for _, change in sorted(starts + ends):
        running += change
        peak = max(peak, running)
    assert peak <= 8
    assert together.count("submitted") == 1000


@pytest.mark.asyncio
async def test_two_channels_overlap_a_hundred_times(x):
    """Pairs of calls of two channels meet, again and again."""
    meeting = Rendezvous(2)
    async with open_task_channel() as first, open_task_channel() as second:
        calls = [c.submit_nowait(meet, x, meeting) for _ in range(100) for c in (first, second)]
        await gather(*calls)


@pytest.mark.asyncio
async def test_tasks_submit_wait_and_are_cancelled_at_random(x):
    """A hundred tasks share bounded channels, wait for rooms and results, and are cancelled: no leak.

    Afterwards nothing is queued, running or waiting anywhere, and every channel still works.
    """
    chance = random.Random(4)
    channels = [TaskChannel(max_pending=2, max_in_flight=chance.choice([1, 8])) for _ in range(5)]
    recorder = Recorder()

    async def user(number):
        mine = random.Random(number)
        previous = x
        for i in range(20):
            channel = mine.choice(channels)
            try:
                if mine.random() < 0.3:
                    call = channel.submit_nowait(work, previous, recorder, i, 1e-5)
                else:
                    call = await channel.submit(work, previous, recorder, i, 1e-5)
            except WouldBlock:
                continue
            if mine.random() < 0.2:
                call.cancel()
            elif mine.random() < 0.5:
                with contextlib.suppress(CallCancelledError):
                    await call
            previous = call if mine.random() < 0.3 and not call.cancelled() else x

    tasks = [asyncio.create_task(user(number)) for number in range(100)]
    for task in chance.sample(tasks, 40):
        await asyncio.sleep(0)
        task.cancel()
    done, pending = await asyncio.wait(tasks, timeout=60)
    assert not pending
    assert all(task.cancelled() or task.exception() is None for task in done)
    for channel in channels:
        await channel.drain()
        numbers = channel.statistics()
        assert numbers.queued == numbers.running == numbers.in_flight == 0
        assert numbers.waiting_for_room == numbers.abandoned == numbers.failed == 0
        assert await (await channel.submit(work, x, recorder, "last", 0)) is x
    assert runtime.calls() == []


@pytest.mark.asyncio
async def test_limited_groups_in_parallel(x, recorder):
    """Several groups with limits, failing and not, keep to them and end."""

    async def run(number):
        mine = random.Random(number)
        try:
            async with TaskGroup(limit=3) as group:
                for i in range(60):
                    call = group.start_soon(work, x, recorder, i, mine.random() * 2e-4)
                    if mine.random() < 0.1:
                        call.cancel()
                    if number % 3 == 0 and i == 30:
                        group.start_soon(divmod, 1, 0)
        except ExceptionGroup as errors:
            return [type(error) for error in errors.exceptions]
        return len(group._handles)

    results = await gather(*(run(number) for number in range(9)))
    assert results == [[ZeroDivisionError], 60, 60] * 3
    assert recorder.peak() <= 27
    assert runtime.calls() == []


# --- collectives ------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_sixteen_channels_of_collectives_finish(cpu_devices):
    """200 psums over 8 devices in each of 16 channels, none of which is awaited before the last."""
    mesh = Mesh(np.array(cpu_devices), ("d",))
    spread = NamedSharding(mesh, P("d"))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("d"), out_specs=P())
    def total(x):
        return jax.lax.psum(x, "d")

    x = jax.device_put(np.arange(8, dtype=np.float32), spread)
    channels = [TaskChannel() for _ in range(16)]
    async with asyncio.timeout(90):
        calls = [channel.run(total, x) for _ in range(200) for channel in channels]
        results = await gather(*calls)
        for channel in channels:
            await channel.aclose()
    assert {tuple(np.asarray(y)) for y in results[:16]} == {(28.0,)}
    assert len(results) == 3200


# --- memory -----------------------------------------------------------------------------------------

BIG = 20_000_000  # float32: 80 MB


@colocated_python
def succeed(x: jax.Array) -> int:
    return x.size


@colocated_python
def fail(x: jax.Array) -> int:
    del x  # a traceback keeps its frames, and so the locals of the body
    raise ValueError("failed")


@colocated_python
def wait(x: jax.Array, gate: Gate) -> int:
    gate.wait()
    return x.size


@contextlib.contextmanager
def no_collector():
    """Reference cycles stay where they are."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def assert_freed(watched: weakref.ref) -> None:
    await eventually(lambda: watched() is None, "the argument is freed", timeout=5)


@pytest.mark.parametrize(
    "how", ["success", "failure", "failure, future kept", "cancelled in queue", "cancelled running"]
)
@pytest.mark.parametrize("numpy", [False, True], ids=["jax", "numpy"])
@pytest.mark.asyncio
async def test_big_argument_is_freed_without_the_collector(how, numpy, cpu_devices):
    """After success, failure and cancellation nothing keeps an 80 MB argument, not even a cycle."""
    gate, blocker = Gate(), None
    device = {"devices": cpu_devices[:1]}
    with no_collector():
        big = np.ones(BIG, np.float32) if numpy else jnp.ones(BIG, jnp.float32)
        watched = weakref.ref(big)
        channel = TaskChannel()
        if how == "success":
            call = channel.submit_nowait(succeed.specialize(**device), big)
            assert await call == BIG
        elif how.startswith("failure"):
            call = channel.submit_nowait(fail.specialize(**device), big)
            del big
            # Not pytest.raises, which would keep the error and so its frames.
            with contextlib.suppress(ValueError):
                await call
            assert call.exception() is not None
        else:
            if how == "cancelled in queue":
                blocker = channel.submit_nowait(
                    wait.specialize(**device), np.ones(1, np.float32), gate
                )
            call = channel.submit_nowait(wait.specialize(**device), big, gate)
            if how == "cancelled running":
                await eventually(lambda: channel.statistics().running, "it runs")
            call.cancel()
            with contextlib.suppress(CallCancelledError):
                await call
        big = None
        if how == "cancelled running":
            gate.open()
        if how != "failure, future kept":
            call = None
        await assert_freed(watched)
        gate.open()
        await channel.aclose()
    del blocker, call


@pytest.mark.asyncio
async def test_big_argument_of_a_failed_group_is_freed(x):
    """A task group that failed, and its error, keep no arguments of the calls it cancelled."""
    gate = Gate()
    with no_collector():
        big = jnp.ones(BIG, jnp.float32)
        watched = weakref.ref(big)
        with contextlib.suppress(ExceptionGroup):
            async with TaskGroup(limit=2) as group:
                for argument in (x, big, big):
                    lost = group.start_soon(wait, argument, gate)
                del big, argument
                lost.add_done_callback(lambda _: gate.open())
                await eventually(lambda: runtime.statistics().running == 2, "two are running")
                raise ValueError("block")
        assert lost.cancelled()
        await assert_freed(watched)


@pytest.mark.asyncio
async def test_big_argument_is_freed_while_the_result_computes():
    """The library drops an argument with the body's return, though the result is not ready."""
    late = Late()

    def body(x):
        size = jnp.full((), x.size, jnp.float32)
        return late.array(size)

    with no_collector():
        big = jnp.ones(BIG, jnp.float32)
        watched = weakref.ref(big)
        call = TaskChannel().run(body, big)
        del big
        await call.wait_dispatched()
        assert not call.done()
        await assert_freed(watched)
        late.release()
        assert int(await call) == BIG
