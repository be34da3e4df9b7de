# SPDX-License-Identifier: Apache-2.0
"""How loops are woken, what is left of them when they are gone, and loops that lack something."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import logging
import os
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from aiocolocated import (
    ArrayFuture,
    TaskChannel,
    TaskGroup,
    _loops,
    as_completed,
    colocated_python,
    gather,
    open_task_channel,
    runtime,
    wait_until_ready,
)
from aiocolocated.testing import Gate, Rendezvous

NewLoop = Callable[[], asyncio.AbstractEventLoop]

# Made at import time, when there is no loop.
LANE = TaskChannel("lane", max_pending=4)


@colocated_python
def double(x: jax.Array) -> jax.Array:
    return 2 * x


@colocated_python
def fail(x: jax.Array) -> jax.Array:
    raise KeyError("from the body")


@colocated_python
def hold(x: jax.Array, started: Gate, gate: Gate) -> jax.Array:
    started.open()
    gate.wait()
    return x


@colocated_python
def meet(x: jax.Array, meeting: Rendezvous) -> jax.Array:
    meeting.wait()
    return x


@pytest.fixture
def x() -> jax.Array:
    return jnp.arange(3.0)


def run(new_loop: NewLoop, main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """As ``asyncio.run`` does it, on a given kind of loop."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main())


async def use_everything(x: jax.Array) -> None:
    """A program that uses everything that waits on a loop."""
    loop = asyncio.get_running_loop()
    assert (await double(x)).tolist() == [0, 2, 4]
    assert (await LANE.submit(double, x)).__class__ is ArrayFuture
    first, second = await gather(double(x), asyncio.sleep(0, "slept"))
    assert (first[1], second) == (2, "slept")
    assert [(await fut)[2] async for fut in as_completed([double(x), double(x)])] == [4, 4]
    async with TaskGroup(limit=2) as group:
        for _ in range(3):
            group.start_soon(double, x)
        group.create_task(double(x))
        group.create_task(asyncio.sleep(0, "task"))
    assert group.results()[4] == "task"
    async with open_task_channel(max_pending=2) as channel:
        futures = [await channel.submit(double, x) for _ in range(8)]
        await channel.drain()
        assert all(fut.done() for fut in futures)
    assert len(await double.map([x] * 5, limit=2)) == 5
    product = jnp.ones((300, 300)) @ jnp.ones((300, 300))
    assert await wait_until_ready(product) is product
    called = loop.create_future()
    double(x).add_done_callback(called.set_result)
    assert (await called).done()
    with pytest.raises(KeyError):
        await fail(x)
    started, gate = Gate(), Gate()
    held = TaskChannel().submit_nowait(hold, x, started, gate)
    await started.wait_async()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(held, 0.01)
    assert held.cancelled()
    gate.open()
    await LANE.drain()


def descriptors() -> dict[str, str]:
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found


# --- loops that are gone ----------------------------------------------------------------------------


def test_closed_loops_are_not_kept(new_loop, x):
    """The library forgets a loop that was closed."""
    loops = []

    async def main() -> None:
        await double(x)
        loops.append(weakref.ref(asyncio.get_running_loop()))

    for _ in range(3):
        run(new_loop, main)
    gc.collect()
    assert [loop() for loop in loops] == [None] * 3


def test_context_of_first_waiter_is_not_kept(new_loop, x):
    """What wakes a loop is made when a task first waits, and must not keep that task's context."""
    variable: contextvars.ContextVar[Gate] = contextvars.ContextVar("variable")

    async def wait() -> weakref.ref[Gate]:
        value = Gate()
        variable.set(value)
        await hold(x, Gate(), opened)
        return weakref.ref(value)

    async def main() -> None:
        task = asyncio.create_task(wait())
        await asyncio.sleep(0.01)  # now it waits
        opened.open()
        value = await task
        del task
        for _ in range(200):
            gc.collect()
            if value() is None:
                return
            await asyncio.sleep(0.01)
        pytest.fail(f"{value()} is still there")

    opened = Gate()
    run(new_loop, main)


def test_unretrieved_error_of_a_closed_loop_is_logged(new_loop, x, monkeypatch):
    """With its loop gone, an error that nobody saw goes to the library's logger, once."""

    async def main() -> None:
        failed = fail(x)
        done = asyncio.get_running_loop().create_future()
        failed.add_done_callback(lambda fut: done.set_result(None))
        await done
        held.append(failed)

    held: list[ArrayFuture[Any]] = []
    run(new_loop, main)
    reported = Gate()
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())
            reported.open()

    handler, logger = Handler(), logging.getLogger("aiocolocated")
    logger.addHandler(handler)
    monkeypatch.setattr(logger, "propagate", False)  # who keeps the record keeps the argument, too
    try:
        held.clear()
        gc.collect()
        reported.wait()
    finally:
        logger.removeHandler(handler)
    assert len([m for m in messages if "never retrieved" in m]) == 1


# --- waking a loop ----------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_many_completions_wake_the_loop_few_times(monkeypatch, x):
    """Completions that come while the loop is busy, or being woken, share a wake-up."""
    writes = 0
    write = os.eventfd_write

    def counting(fd: int, value: int) -> None:
        nonlocal writes
        writes += 1
        write(fd, value)

    monkeypatch.setattr(os, "eventfd_write", counting)
    await double(x)
    count = 2_000
    writes = 0
    await gather(*(double(x) for _ in range(count)))
    assert 1 <= writes <= 3
    writes = 0
    futures = [double(x) for _ in range(count)]
    for fut in futures:
        await fut
    assert 1 <= writes < count


class NoReaders(asyncio.SelectorEventLoop):
    """A loop that can wait for no descriptors of ours, as on Windows."""

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("lack", ["eventfd", "readers"])
def test_loops_without_eventfd_or_readers(monkeypatch, lack, x):
    """Where there is no eventfd, or no reader for it, everything works all the same."""
    if lack == "eventfd":
        monkeypatch.delattr(os, "eventfd")
    before = descriptors()
    run(NoReaders if lack == "readers" else asyncio.new_event_loop, lambda: use_everything(x))
    assert descriptors() == before


def test_bridge_is_idle_when_its_loop_was_closed(x):
    """A wake-up that comes after the end of its loop touches no descriptor and nothing else."""
    bridges: list[_loops.LoopBridge] = []

    async def main() -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        bridges.append(_loops.bridge_for(loop))
        return loop.create_future()

    waiter = asyncio.run(main())
    (bridge,) = bridges
    opened = os.open("/dev/null", os.O_RDONLY)  # gets the number that the bridge gave back
    try:
        for _ in range(3):
            bridge.post(waiter)
            bridge.notify()
        bridge.close()
        assert os.fstat(opened)
        assert not waiter.done()
    finally:
        os.close(opened)


# --- eager tasks ------------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_tasks_have_channels_of_their_own_on_every_loop(x, recorder):
    """Two tasks' calls overlap, one's do not, though eager tasks start inside their parent."""
    meeting = Rendezvous(2)

    def body(x: jax.Array, who: str) -> jax.Array:
        recorder.record("start", who=who)
        recorder.record("end", who=who)
        return x

    ordered = colocated_python(body)

    async def child(who: str) -> None:
        own = meet(x, meeting)
        await gather(own, ordered(x, who + "1"), ordered(x, who + "2"))

    await asyncio.gather(child("a"), child("b"))
    starts = recorder.sequence("start", "who")
    assert [s for s in starts if s[0] == "a"] == ["a1", "a2"]
    assert [s for s in starts if s[0] == "b"] == ["b1", "b2"]


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_task_that_never_suspends(x):
    """A task that finds its call done goes through without ever waiting, and leaves nothing behind."""
    fut = double(x)
    await fut

    async def look() -> jax.Array:
        return await fut

    assert (await asyncio.create_task(look())).tolist() == [0, 2, 4]
    assert runtime.statistics().channels == 0


# --- scopes of pytest-asyncio -----------------------------------------------------------------------


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("turn", [1, 2])
async def test_loop_of_a_whole_module(turn, x):
    """Tests that share a loop, and those with one each between them, do not disturb each other."""
    assert (await double(x))[turn] == 2 * turn
