# SPDX-License-Identifier: Apache-2.0
"""The cost of waiting for arrays: a tree that is ready, and many arrays that are not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

import anyio.to_thread
import jax
import numpy as np

import aiocolocated

from ._model import Benchmark, Effort, Samples, Target, Variant, alternate, per_call
from ._peers import cpu_array

ON_LOOP = "jax.block_until_ready on the loop"
TO_THREAD = "asyncio.to_thread + jax.block_until_ready"
ANYIO = "anyio.to_thread + jax.block_until_ready"
OURS = "aiocolocated.wait_until_ready"

LEAVES = 10
DEVICES = 2  # more of them computing at once would starve the loop's thread on a small machine
PROGRAMS = 20  # per device; the CPU backend takes up to 32 in flight before a dispatch blocks
OUTPUTS = 25


async def ready_tree(effort: Effort) -> Samples:
    """Wait for a tree of 10 arrays that are ready, 2 000 times."""
    count = effort.count(2_000)
    tree = {"pairs": [(cpu_array(), cpu_array()) for _ in range(LEAVES // 2)]}
    jax.block_until_ready(tree)

    def repeated(wait: Callable[[], Awaitable[object]]) -> Variant:
        async def work() -> None:
            for _ in range(count):
                await wait()

        return per_call(count, work)

    async def on_loop() -> object:
        return jax.block_until_ready(tree)

    variants = {
        ON_LOOP: repeated(on_loop),
        TO_THREAD: repeated(lambda: asyncio.to_thread(jax.block_until_ready, tree)),
        ANYIO: repeated(lambda: anyio.to_thread.run_sync(jax.block_until_ready, tree)),
        OURS: repeated(lambda: aiocolocated.wait_until_ready(tree)),
    }
    return await alternate(variants, effort)


def program(x: jax.Array) -> list[jax.Array]:
    """Matrix products of f32[512, 512], which XLA runs in the background on CPUs, in 25 pieces."""
    y = x
    for _ in range(40):
        y = y @ x
    return [y[i] for i in range(OUTPUTS)]


def threads_of_this_process() -> int:
    """Threads that the operating system sees, those of native libraries included."""
    return len(os.listdir("/proc/self/task"))


async def pending_arrays(effort: Effort) -> Samples:
    """Have a task wait for each of 1 000 pending arrays; count the threads that appear.

    Threads stay for a while after the work, so one process measures each variant once.
    """
    del effort
    inputs = [
        jax.device_put(np.eye(512, dtype=np.float32), device)
        for device in jax.local_devices(backend="cpu")[:DEVICES]
    ]
    jitted = jax.jit(program)
    jax.block_until_ready([jitted(x) for x in inputs])

    async def threads_used(wait: Callable[[jax.Array], Awaitable[object]]) -> float:
        arrays = [y for _ in range(PROGRAMS) for x in inputs for y in jitted(x)]
        pending = sum(not y.is_ready() for y in arrays)
        if pending < 0.9 * len(arrays):
            raise RuntimeError(f"only {pending} of {len(arrays)} arrays were pending")
        before = peak = threads_of_this_process()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(wait_for(wait, y)) for y in arrays]
            while not all(task.done() for task in tasks):
                peak = max(peak, threads_of_this_process())
                await asyncio.sleep(0.01)
        return peak - before

    async def wait_for(wait: Callable[[jax.Array], Awaitable[object]], y: jax.Array) -> None:
        await wait(y)

    return {
        OURS: [await threads_used(aiocolocated.wait_until_ready)],
        TO_THREAD: [await threads_used(lambda y: asyncio.to_thread(jax.block_until_ready, y))],
        ANYIO: [await threads_used(lambda y: anyio.to_thread.run_sync(jax.block_until_ready, y))],
    }


BENCHMARKS = (
    Benchmark(
        "ready_tree",
        "a ready tree of 10 arrays",
        "us",
        ready_tree,
        (Target(OURS, 10.0),),
        reference=TO_THREAD,
    ),
    Benchmark(
        "pending_arrays",
        "1 000 arrays pending at once",
        "extra threads",
        pending_arrays,
        (Target(OURS, 8, "maximum"),),
        reference=TO_THREAD,
    ),
)
