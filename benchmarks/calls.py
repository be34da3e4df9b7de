# SPDX-License-Identifier: Apache-2.0
"""The cost of a trivial specialized call: pipelined, one at a time, and from many tasks.

What each peer does with pipelined calls: *on the loop* makes them one after the other, blocking;
*asyncio.to_thread* and *anyio.to_thread* have a coroutine per call, so each is made a task
(``asyncio.create_task``), then each is awaited; the *executors* give a future per call
(``loop.run_in_executor``), then each is awaited; *aiocolocated* gives a future per call, then
each is awaited. Of all these only the one-thread executor and aiocolocated keep program order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import anyio.to_thread

import aiocolocated

from ._model import Benchmark, Effort, Samples, Target, Variant, alternate, per_call
from ._peers import ANYIO, ON_LOOP, ONE_THREAD, OURS, OURS_GATHER, POOL, TO_THREAD, Peers, peers

if TYPE_CHECKING:
    import jax

TASKS = 64


def one_call(peer: Peers) -> dict[str, Callable[[], Awaitable[jax.Array]]]:
    """For each variant, how to make one call and await it."""
    loop = asyncio.get_running_loop()
    x, call = peer.x, peer.jax_call

    async def on_loop() -> jax.Array:
        return call(x)

    return {
        ON_LOOP: on_loop,
        TO_THREAD: lambda: asyncio.to_thread(call, x),
        POOL: lambda: loop.run_in_executor(peer.pool, call, x),
        ONE_THREAD: lambda: loop.run_in_executor(peer.one_thread, call, x),
        ANYIO: lambda: anyio.to_thread.run_sync(call, x),
        OURS: lambda: peer.ours(x),
    }


async def pipelined(effort: Effort) -> Samples:
    """Start 5 000 calls, then await each."""
    count = 5_000  # whatever the effort: what a peer's call costs grows with the backlog
    loop = asyncio.get_running_loop()
    with peers() as peer:
        x, call, ours = peer.x, peer.jax_call, peer.ours

        async def on_loop() -> None:
            for _ in range(count):
                call(x)

        async def to_thread() -> None:
            tasks = [asyncio.create_task(asyncio.to_thread(call, x)) for _ in range(count)]
            for task in tasks:
                await task

        async def pool() -> None:
            futures = [loop.run_in_executor(peer.pool, call, x) for _ in range(count)]
            for future in futures:
                await future

        async def one_thread() -> None:
            futures = [loop.run_in_executor(peer.one_thread, call, x) for _ in range(count)]
            for future in futures:
                await future

        async def in_anyio() -> None:
            tasks = [asyncio.create_task(anyio.to_thread.run_sync(call, x)) for _ in range(count)]
            for task in tasks:
                await task

        async def in_aiocolocated() -> None:
            futures = [ours(x) for _ in range(count)]
            for future in futures:
                await future

        async def in_gather() -> None:
            await aiocolocated.gather(*[ours(x) for _ in range(count)])

        variants = {
            ON_LOOP: on_loop,
            TO_THREAD: to_thread,
            POOL: pool,
            ONE_THREAD: one_thread,
            ANYIO: in_anyio,
            OURS: in_aiocolocated,
            OURS_GATHER: in_gather,
        }
        return await alternate(
            {name: per_call(count, work) for name, work in variants.items()}, effort
        )


async def one_at_a_time(effort: Effort) -> Samples:
    """Make a call and await it, 2 000 times."""
    count = effort.count(2_000)

    def repeated(make: Callable[[], Awaitable[jax.Array]]) -> Variant:
        async def work() -> None:
            for _ in range(count):
                await make()

        return per_call(count, work)

    with peers() as peer:
        variants = {name: repeated(make) for name, make in one_call(peer).items()}
        return await alternate(variants, effort)


async def many_tasks(effort: Effort) -> Samples:
    """64 tasks, each of which makes a call and awaits it, 80 times."""
    count = effort.count(80)

    def repeated(make: Callable[[], Awaitable[jax.Array]]) -> Variant:
        async def one_task() -> None:
            for _ in range(count):
                await make()

        async def work() -> None:
            async with asyncio.TaskGroup() as group:
                for _ in range(TASKS):
                    group.create_task(one_task())

        return per_call(TASKS * count, work)

    with peers() as peer:
        variants = {name: repeated(make) for name, make in one_call(peer).items()}
        return await alternate(variants, effort)


BENCHMARKS = (
    Benchmark(
        "pipelined",
        "5 000 pipelined calls, per call",
        "us",
        pipelined,
        (
            Target(OURS, 0.2, "ratio", TO_THREAD, aim=0.1),
            Target(OURS, 8.0),
            Target(OURS_GATHER, 2.0, "difference", OURS),
        ),
        reference=TO_THREAD,
    ),
    Benchmark(
        "one_at_a_time",
        "one call at a time",
        "us",
        one_at_a_time,
        (Target(OURS, 1.1, "ratio", TO_THREAD, aim=0.85),),
        reference=TO_THREAD,
    ),
    Benchmark(
        "one_at_a_time_pinned",
        "one call at a time, one core",
        "us",
        one_at_a_time,
        (Target(OURS, 1.1, "ratio", TO_THREAD, aim=0.85),),
        reference=TO_THREAD,
        pinned=True,
    ),
    Benchmark(
        "many_tasks",
        "64 tasks, one call at a time each",
        "us",
        many_tasks,
        (Target(OURS, 0.7, "ratio", TO_THREAD),),
        reference=TO_THREAD,
    ),
)
