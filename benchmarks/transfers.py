# SPDX-License-Identifier: Apache-2.0
"""1 GiB in 16 arrays to devices and back: how long it takes, and how long the loop stands still.

On one CPU device the way back is free, because JAX shows its own memory; over two devices it is a copy.
What was moved is kept until the clock has stopped: to drop a GiB takes 70 ms, with the interpreter's
lock held, whoever does it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import jax
import numpy as np

import aiocolocated

from ._model import Benchmark, Effort, Samples, Target, Variant, alternate
from .loop_gap import largest_gap

ON_LOOP = "jax.device_put, jax.device_get on the loop"
TO_THREAD = "asyncio.to_thread + JAX's functions"
OURS = "aiocolocated.device_put, device_get"
PUT = "aiocolocated.device_put"
GET = "aiocolocated.device_get"
JAX_PUT = "jax.device_put on the loop"
JAX_GET = "jax.device_get on the loop"
THREAD_PUT = "asyncio.to_thread + jax.device_put"
THREAD_GET = "asyncio.to_thread + jax.device_get"
FRESH = "a thread that writes to 1 GiB of fresh memory"

ARRAYS = 16
FLOATS = 16 << 20  # in each
PAUSE = 0.2  # seconds until threads have dropped what the loop has dropped
TRIES = (
    3  # of which the fastest counts: at times the system takes a second to hand out fresh memory
)


def host_arrays(effort: Effort) -> list[np.ndarray]:
    """The 16 arrays, f32[16 Mi] each, 1 GiB together."""
    random = np.random.default_rng(0)
    return [random.random(effort.count(FLOATS), dtype=np.float32) for _ in range(ARRAYS)]


def over(devices: int) -> jax.sharding.Sharding:
    """Where they go: one CPU device, or halves on two."""
    mesh = jax.sharding.Mesh(np.array(jax.local_devices(backend="cpu")[:devices]), ("x",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))


async def jax_put(x: Any, sharding: jax.sharding.Sharding) -> Any:
    """JAX's function, and the wait for its result."""
    return jax.block_until_ready(jax.device_put(x, sharding))


async def jax_get(x: Any) -> Any:
    """JAX's function."""
    return jax.device_get(x)


async def thread_put(x: Any, sharding: jax.sharding.Sharding) -> Any:
    """The same in a thread."""
    return await asyncio.to_thread(lambda: jax.block_until_ready(jax.device_put(x, sharding)))


async def thread_get(x: Any) -> Any:
    """The same in a thread."""
    return await asyncio.to_thread(jax.device_get, x)


def round_trip(devices: int) -> Callable[[Effort], Awaitable[Samples]]:
    """The time to put everything on devices and to get it back, in ms."""

    async def measure(effort: Effort) -> Samples:
        x, sharding = host_arrays(effort), over(devices)

        def timed(
            put: Callable[..., Awaitable[Any]], get: Callable[..., Awaitable[Any]]
        ) -> Variant:
            async def once() -> float:
                start = time.perf_counter()
                there = await put(x, sharding)
                back = await get(there)
                seconds = time.perf_counter() - start
                del there, back
                await asyncio.sleep(PAUSE)
                return seconds * 1e3

            async def variant() -> float:
                return min([await once() for _ in range(TRIES)])

            return variant

        variants = {
            ON_LOOP: timed(jax_put, jax_get),
            TO_THREAD: timed(thread_put, thread_get),
            OURS: timed(aiocolocated.device_put, aiocolocated.device_get),
        }
        return await alternate(variants, effort)

    return measure


async def gaps(effort: Effort) -> Samples:
    """The largest gap of the loop, each way, over two devices.

    Beside it that of a thread which uses as much fresh memory and does nothing else: on a virtual machine
    that may stop a core for as long as 90 ms.
    """
    x, sharding = host_arrays(effort), over(2)
    kept: list[Any] = []

    async def drop() -> None:
        kept.clear()
        await asyncio.sleep(PAUSE)

    def put_gap(put: Callable[..., Awaitable[Any]]) -> Variant:
        async def work() -> None:
            kept.append(await put(x, sharding))

        async def variant() -> float:
            await drop()
            return await largest_gap(work)

        return variant

    def get_gap(get: Callable[..., Awaitable[Any]]) -> Variant:
        async def variant() -> float:
            await drop()
            there = await jax_put(x, sharding)
            kept.append(there)

            async def work() -> None:
                kept.append(await get(there))

            return await largest_gap(work)

        return variant

    async def use_fresh_memory() -> None:
        kept.append(await asyncio.to_thread(lambda: [np.full_like(a, 1) for a in x]))

    async def fresh_gap() -> float:
        await drop()
        return await largest_gap(use_fresh_memory)

    variants = {
        FRESH: fresh_gap,
        JAX_PUT: put_gap(jax_put),
        THREAD_PUT: put_gap(thread_put),
        PUT: put_gap(aiocolocated.device_put),
        JAX_GET: get_gap(jax_get),
        THREAD_GET: get_gap(thread_get),
        GET: get_gap(aiocolocated.device_get),
    }
    return await alternate(variants, effort)


_THROUGHPUT = (Target(OURS, 1 / 0.9, "ratio", ON_LOOP),)

BENCHMARKS = (
    Benchmark(
        "transfers",
        "1 GiB to a device and back, 16 arrays",
        "ms",
        round_trip(1),
        _THROUGHPUT,
        reference=ON_LOOP,
        repetitions=3,
    ),
    Benchmark(
        "transfers_sharded",
        "1 GiB to two devices and back, 16 arrays",
        "ms",
        round_trip(2),
        _THROUGHPUT,
        reference=ON_LOOP,
        repetitions=3,
    ),
    Benchmark(
        "gap_transfers",
        "loop gap: 1 GiB to or from two devices",
        "ms",
        gaps,
        (Target(PUT, 50.0, "maximum"), Target(GET, 50.0, "maximum")),
        reference=JAX_PUT,
        processes=1,
        repetitions=5,
    ),
)
