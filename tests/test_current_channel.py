# SPDX-License-Identifier: Apache-2.0
"""The current channel (contract C2): where a call goes that names none, and who owns it."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from aiocolocated import (
    TaskChannel,
    TaskGroup,
    colocated_python,
    configure,
    from_thread,
    gather,
    open_task_channel,
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
def fail(x: jax.Array, error: Exception) -> jax.Array:
    raise error


@colocated_python
def meet(x: jax.Array, meeting: Rendezvous, timeout: float = 10.0) -> jax.Array:
    meeting.wait(timeout)
    return x


@colocated_python
def wait(x: jax.Array, gate: Gate, recorder: Recorder | None = None, name: object = 0) -> jax.Array:
    if recorder is not None:
        recorder.record("start", name=name)
    gate.wait()
    if recorder is not None:
        recorder.record("end", name=name)
    return x


def channel_of(call) -> str:
    """Name of a call's channel."""
    return call._channel.name


# --- tasks ------------------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_calls_of_one_task_share_its_channel(x, recorder):
    """A task's calls run one after the other, in the order of the call expressions."""
    gate = Gate()
    gate.open()
    calls = [wait(x, gate, recorder, i) for i in range(10)]
    await asyncio.sleep(0)
    calls += [wait(x, gate, recorder, i) for i in range(10, 20)]
    await gather(*calls)
    assert len({channel_of(call) for call in calls}) == 1
    assert recorder.sequence("start") == list(range(20))
    assert recorder.peak() == 1


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_child_tasks_have_channels_of_their_own(x):
    """Tasks of a group overlap, with each other and with their parent."""
    meeting = Rendezvous(3)
    async with TaskGroup() as group:

        async def child():
            await meet(x, meeting)

        group.create_task(child())
        group.create_task(child())
        await meet(x, meeting)


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_child_tasks_do_not_inherit_active_channel(x):
    """A channel that the parent has activated is the parent's alone, also for grandchildren."""

    async def names(depth):
        call = ok(x)
        found = [channel_of(call)]
        if depth:
            found += await asyncio.create_task(names(depth - 1))
        await call
        return found

    async with open_task_channel("parent's"):
        own = ok(x)
        found = await asyncio.create_task(names(2))
        await own
    assert channel_of(own) == "parent's"
    assert len({"parent's", *found}) == 4


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_tasks_that_share_a_context_do_not_share_channels(x):
    """The channel is the task's, not the Context's."""
    context = contextvars.copy_context()
    meeting = Rendezvous(2)
    entered = asyncio.Barrier(2)

    async def worker(name):
        async with open_task_channel(name):
            await entered.wait()
            call = meet(x, meeting)
            assert channel_of(call) == name
            await call
            await entered.wait()
        outside = ok(x)
        await outside
        return channel_of(outside)

    tasks = [asyncio.create_task(worker(name), context=context) for name in ("a", "b")]
    first, second = await asyncio.gather(*tasks)
    assert first != second


@pytest.mark.asyncio
async def test_group_tasks_for_calls_are_one_channel(x, recorder):
    """`create_task(f(x))` and `gather(f(x), f(y))` only wait; start_soon gives a channel."""
    gate = Gate()
    gate.open()
    async with TaskGroup() as group:
        for i in range(5):
            group.create_task(wait(x, gate, recorder, i))
    await gather(*(wait(x, gate, recorder, i) for i in range(5, 10)))
    assert recorder.sequence("start") == list(range(10))
    assert recorder.peak() == 1
    meeting = Rendezvous(4)
    async with TaskGroup() as group:
        for _ in range(4):
            group.start_soon(meet, x, meeting)


@pytest.mark.asyncio
async def test_start_soon_and_map_ignore_active_channel(x):
    """Concurrent calls stay concurrent inside a block with a channel."""
    meeting = Rendezvous(3)
    async with open_task_channel("block") as channel:
        async with TaskGroup() as group:
            for _ in range(3):
                group.start_soon(meet, x, meeting)

        @colocated_python
        def meet_all(x):
            meeting.wait()
            return x

        await meet_all.map([x, x, x])
        assert channel.statistics().submitted == 0


# --- no task ----------------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_loop_callbacks_use_the_threads_channel(x):
    """Calls of call_soon callbacks go to the loop thread's channel, whoever scheduled them."""
    loop = asyncio.get_running_loop()
    calls = []
    done = asyncio.Event()

    def callback():
        calls.append(ok(x))
        if len(calls) == 2:
            done.set()

    async with open_task_channel("task's") as channel:
        own = ok(x)
        loop.call_soon(callback)
        loop.call_soon(callback)
        await done.wait()
        await gather(own, *calls)
        assert channel.statistics().submitted == 1
    assert channel_of(calls[0]) == channel_of(calls[1]) != channel_of(own)


def test_threads_without_loop_have_channels_of_their_own(x, recorder):
    """Calls of one thread run in order, those of two threads overlap."""
    meeting = Rendezvous(2)
    gate = Gate()
    gate.open()
    errors = []

    def work(name):
        try:
            calls = [meet(x, meeting), *(wait(x, gate, recorder, (name, i)) for i in range(5))]
            assert len({channel_of(call) for call in calls}) == 1
            for call in calls:
                call.result(timeout=10)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not errors
    for name in "ab":
        started = [i for who, i in recorder.sequence("start", "name") if who == name]
        assert started == list(range(5))


def test_thread_keeps_its_channel_between_loops(x):
    """Outside of tasks a thread's calls share one channel, before and after a loop ran on it."""

    async def main():
        call = ok(x)
        await call
        return channel_of(call)

    before = ok(x)
    inside = asyncio.run(main())
    after = ok(x)
    assert channel_of(before) == channel_of(after) != inside
    before.result(timeout=10)
    after.result(timeout=10)


def test_loop_in_another_thread_has_its_own_tasks(x):
    """Tasks of two loops in two threads overlap."""
    meeting = Rendezvous(2)

    async def main():
        return await meet(x, meeting)

    results = []
    threads = [
        threading.Thread(target=lambda: results.append(asyncio.run(main()))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [result is x for result in results] == [True, True]


# --- bodies -----------------------------------------------------------------------------------------


@colocated_python
def two_nested(x: jax.Array, names: list[str]) -> jax.Array:
    first, second = ok(x), ok(x)
    names += [channel_of(first), channel_of(second)]
    second.result(timeout=10)
    return first.result(timeout=10)


@pytest.mark.asyncio
async def test_calls_of_a_body_share_a_channel_new_per_call(x):
    """A body's calls are in order among themselves, and in no other channel there is."""
    names: list[str] = []
    outer = [two_nested(x, names) for _ in range(3)]
    await gather(*outer)
    assert names[0::2] == names[1::2]
    assert len({*names, channel_of(outer[0])}) == 4


@colocated_python
def start_and_leave(x: jax.Array, gate: Gate, started: list) -> jax.Array:
    """Make a call and do not wait for it."""
    started.append(wait(x, gate))
    return x


@colocated_python
def start_and_wait(x: jax.Array) -> jax.Array:
    return ok(x).result(timeout=10)


@pytest.mark.asyncio
async def test_calls_of_a_body_do_not_use_the_worker_threads_channel(x):
    """An unfinished call of one body does not hold up the calls of the next body on that thread."""
    gate = Gate()
    started = []
    await start_and_leave(x, gate, started)
    configure(worker_limit=2)  # one for the call that waits, one for all the rest
    for _ in range(5):
        await start_and_wait(x)
    assert not started[0].done()
    gate.open()
    await started[0]


@colocated_python
def run_a_loop(x: jax.Array, names: list[str]) -> jax.Array:
    """A body with a loop of its own."""

    async def main():
        call = ok(x)
        names.append(channel_of(call))
        async with open_task_channel("in the body"):
            inner = ok(x)
            names.append(channel_of(inner))
            await gather(call, inner)

    outside = ok(x)
    names.append(channel_of(outside))
    asyncio.run(main())
    return outside.result(timeout=10)


@pytest.mark.asyncio
async def test_loop_in_a_body_has_tasks_with_their_own_channels(x):
    """In a task of a loop that a body runs, the task's channel counts, not the body's."""
    names: list[str] = []
    await run_a_loop(x, names)
    assert len(set(names)) == 3
    assert names[2] == "in the body"


@colocated_python
def call_back(x: jax.Array, names: list[str]) -> jax.Array:
    """A body that runs a coroutine on the submitter's loop."""

    async def main():
        call = ok(x)
        names.append(channel_of(call))
        return await call

    return from_thread.run(main)


@pytest.mark.asyncio
async def test_coroutine_that_a_body_runs_has_its_own_channel(x):
    """from_thread.run makes a task on the loop, and a task has its own channel."""
    names: list[str] = []
    async with open_task_channel("submitter's") as channel:
        await call_back(x, names)
        assert channel.statistics().submitted == 1
    assert names != ["submitter's"]


# --- owners -----------------------------------------------------------------------------------------


async def eventually(condition, what: str, timeout: float = 10.0) -> None:
    """Wait until something that no future tells of has happened."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        await asyncio.sleep(0.001)


async def a_moment() -> None:
    """Time in which what must not happen would."""
    await asyncio.sleep(0.005)


def new_block(kind):
    return TaskGroup() if kind == "group" else open_task_channel()


@pytest.mark.parametrize("kind", ["group", "channel"])
@pytest.mark.asyncio
async def test_block_owns_calls_of_its_child_tasks(x, kind):
    """Leaving a block waits for calls that tasks started inside it have made and left."""
    gate, made = Gate(), asyncio.Event()
    calls = []

    async def child():
        calls.append(wait(x, gate))
        made.set()

    async def block():
        async with new_block(kind):
            await asyncio.create_task(child())

    leaving = asyncio.create_task(block())
    await made.wait()
    await a_moment()
    assert not leaving.done()
    gate.open()
    await leaving
    assert calls[0].done()


@pytest.mark.parametrize("kind", ["group", "channel"])
@pytest.mark.asyncio
async def test_owner_falls_through_closed_blocks(x, kind, recorder):
    """A call that a closed block's task makes belongs to the next open block around it."""
    gate, go = Gate(), asyncio.Event()

    async def child():
        await go.wait()
        return wait(x, gate, recorder)

    async def outer():
        async with new_block(kind):
            async with new_block("group"), new_block("channel"):
                task = asyncio.create_task(child())
            go.set()
            call = await task
            recorder.record("left inner")
        recorder.record("left outer")
        return call

    leaving = asyncio.create_task(outer())
    await recorder.wait_for("start")
    await recorder.wait_for("left inner")
    await a_moment()
    assert recorder.count("left outer") == 0
    gate.open()
    call = await leaving
    assert call.done()


@pytest.mark.asyncio
async def test_owner_of_last_resort_is_the_runtime(x):
    """When every block around it is closed, a call's error goes to the loop's exception handler."""
    reports = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: reports.append(context["exception"]))
    go = asyncio.Event()

    async def child():
        await go.wait()
        call = fail(x, ValueError("late"))
        await eventually(call.done, "the call fails")

    async with open_task_channel():
        task = asyncio.create_task(child())
    go.set()
    await task
    await eventually(lambda: reports, "the error is reported")
    assert [error.args for error in reports] == [("late",)]


@pytest.mark.asyncio
async def test_call_in_foreign_channel_belongs_to_the_submitters_block(x, recorder):
    """The owner is the submitter's block, whatever channel the call is in."""
    gate = Gate()
    foreign = TaskChannel()

    async def block():
        async with open_task_channel():
            foreign.submit_nowait(wait, x, gate, recorder)
        recorder.record("left")

    leaving = asyncio.create_task(block())
    await recorder.wait_for("start")
    await a_moment()
    assert recorder.count("left") == 0
    gate.open()
    await leaving


@pytest.mark.asyncio
async def test_calls_of_a_body_belong_to_the_block_of_its_call(x, recorder):
    """What a body starts and leaves is waited for by the block in which the body was called."""
    gate = Gate()
    started = []

    async def block():
        async with open_task_channel():
            await start_and_leave(x, gate, started)
            recorder.record("leaving")
        recorder.record("left")

    leaving = asyncio.create_task(block())
    await recorder.wait_for("leaving")
    await a_moment()
    assert recorder.count("left") == 0
    gate.open()
    await leaving
    assert started[0].done()
