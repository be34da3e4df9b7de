# SPDX-License-Identifier: Apache-2.0
"""Objects by the thousand, with a fixed seed: none, and nothing of them, is left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from object_bodies import eventually

from aiocolocated import (
    CallCancelledError,
    ObjectClosedError,
    TaskChannel,
    TaskGroup,
    _lifetimes,
    colocated_python_class,
    runtime,
)
from aiocolocated.testing import LeakCheck

pytestmark = pytest.mark.timeout(120)

TASKS, OBJECTS = 50, 2000
lock = threading.Lock()
counts: dict[str, int] = {}


def note(what: str, change: int = 1) -> None:
    with lock:
        counts[what] = counts.get(what, 0) + change


class Failure(Exception):
    pass


class Thing:
    """Fails here and there, in every way there is; notes that it is made and destroyed."""

    def __init__(self, seed: int, x: jax.Array) -> None:
        self.chance = random.Random(seed)
        self.array = x + seed
        self.running = 0
        if self.chance.random() < 0.1:
            raise Failure("constructor")
        self.counted = True
        note("alive")
        note("made")

    def use(self, x: jax.Array) -> jax.Array:
        self.enter()
        try:
            if self.chance.random() < 0.1:
                raise Failure("method")
            return x + 1
        finally:
            self.running -= 1

    async def use_async(self, x: jax.Array) -> jax.Array:
        self.enter()
        try:
            await asyncio.sleep(0)
            if self.chance.random() < 0.1:
                raise Failure("coroutine method")
            return x
        finally:
            self.running -= 1

    def items(self, x: jax.Array) -> Any:
        for i in range(3):
            if self.chance.random() < 0.05:
                raise Failure("item")
            yield x + i

    def enter(self) -> None:
        if self.running:
            note("overlaps")
        self.running += 1

    def close(self) -> None:
        note("closed")
        if self.chance.random() < 0.1:
            raise Failure("close")

    def __del__(self) -> None:
        if hasattr(self, "counted"):
            note("alive", -1)


class AsyncThing(Thing):
    async def aclose(self) -> None:
        await asyncio.sleep(0)
        self.close()


CLASSES = [colocated_python_class(Thing), colocated_python_class(AsyncThing)]


async def live(seed: int, x: jax.Array, channel: TaskChannel) -> None:
    """Make, use, and close or drop an object, each in some way; may be cancelled anywhere."""
    mine = random.Random(seed)
    obj = mine.choice(CLASSES)(seed, x)
    with contextlib.suppress(Failure, CallCancelledError, ObjectClosedError, ExceptionGroup):
        await use_object(obj, x, mine, channel)
    if mine.random() < 0.5:
        with contextlib.suppress(Failure):
            await obj.aclose()


async def use_object(obj: Any, x: jax.Array, mine: random.Random, channel: TaskChannel) -> None:
    way = mine.randrange(6)
    if way == 0:
        await obj.use(x)
        await obj.use_async(x)
    elif way == 1:
        async with obj:
            await obj.use_async(x)
    elif way == 2:
        async with TaskGroup() as group:
            for _ in range(3):
                call = group.start_soon(mine.choice([obj.use, obj.use_async]), x)
                if mine.random() < 0.3:
                    call.cancel()
    elif way == 3:
        async for _ in obj.items(x):
            if mine.random() < 0.3:
                break
    elif way == 4:
        calls = [channel.submit_nowait(obj.use, x), channel.submit_nowait(obj.use_async, x)]
        if mine.random() < 0.5:
            calls[0].cancel()
        if mine.random() < 0.5:
            await calls[1]
        for call in calls:
            call.add_done_callback(lambda call: call.cancelled() or call.exception())
    elif mine.random() < 0.5:
        async with asyncio.timeout(mine.random() * 1e-3):
            await obj.use_async(x)


async def run(seed: int) -> None:
    counts.clear()
    chance = random.Random(seed)
    x = jnp.arange(3.0)
    channels = [TaskChannel() for _ in range(5)]
    lives: dict[int, asyncio.Task[None]] = {}

    async def user(number: int) -> None:
        for i in range(OBJECTS // TASKS):
            note("lives")
            lives[number] = asyncio.create_task(live(number * 1000 + i, x, channels[number % 5]))
            done, pending = await asyncio.wait([lives[number]], timeout=60)
            assert not pending
            for task in done:
                if task.cancelled():
                    note("cancelled")
                elif not isinstance(task.exception(), TimeoutError | type(None)):
                    task.result()

    async def cancel() -> None:
        while True:
            await asyncio.sleep(0.001)
            chance.choice(list(lives.values())).cancel()

    canceller = asyncio.create_task(cancel())
    await asyncio.gather(*(user(number) for number in range(TASKS)))
    canceller.cancel()
    await asyncio.wait([canceller])
    for channel in channels:
        await channel.aclose()


@pytest.mark.asyncio
async def test_two_thousand_objects_leave_nothing(caplog):
    """Made, used and closed or dropped by 50 tasks, with random cancellation and failure.

    Every instance is destroyed, its methods never overlapped, and no thread, task, array, call or
    descriptor is left.
    """
    # The host's loop starts with the first coroutine.
    async with CLASSES[0](0, jnp.ones(1)) as first:
        with contextlib.suppress(Failure):
            await first.use_async(jnp.ones(1))
    del first
    old = set(_lifetimes._open)  # that other tests have made for all
    # Errors of closing dropped objects, and of calls whose task was cancelled, go to these.
    caplog.set_level("CRITICAL", logger="aiocolocated")
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: note("reported"))
    async with LeakCheck():
        await run(5)
        # Errors have the frames that they came through, in cycles, and so objects and instances.
        await eventually(lambda: gc.collect() >= 0 and _lifetimes._open <= old, "all are closed")
        await eventually(lambda: not runtime.calls(), "all calls are over")
        await eventually(lambda: gc.collect() >= 0 and not counts["alive"], "all are destroyed")
    assert counts["lives"] == OBJECTS
    assert counts["made"] > OBJECTS / 2
    assert counts["closed"] == counts["made"]
    assert counts["cancelled"] > 50
    assert "overlaps" not in counts
