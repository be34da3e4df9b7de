# SPDX-License-Identifier: Apache-2.0
"""Objects, streams and coroutine bodies, against functions and, where it is installed, Ray.

Ray's actors and streaming generators are processes of their own, which ours are not on the
in-process host: the comparison says what a user of either pays per call or item.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

import aiocolocated

from ._model import Benchmark, Effort, Samples, Target, Variant, alternate, per_call
from ._peers import cpu_array, identity, specialization

OURS_FUNCTION = "aiocolocated, function"
OURS_METHOD = "aiocolocated, method of an object"
OURS_GENERATOR = "aiocolocated, generator"
OURS_ASYNC_GENERATOR = "aiocolocated, async generator"
TO_THREAD_NEXT = "asyncio.to_thread(next, iterator)"
PLAIN = "asyncio alone, on the same loop"
OURS = "aiocolocated"
RAY_ACTOR = "Ray actor"
RAY_GENERATOR = "Ray streaming generator"

if TYPE_CHECKING:
    import jax

HAS_RAY = importlib.util.find_spec("ray") is not None


class Holder:
    """The object: one trivial method, and two generators of the same array."""

    def identity(self, x: jax.Array) -> jax.Array:
        return x


def items(x: jax.Array, count: int) -> Iterator[jax.Array]:
    """The same small array, f32[8], again and again."""
    for _ in range(count):
        yield x


async def async_items(x: jax.Array, count: int) -> AsyncIterator[jax.Array]:
    """As ``items``."""
    for _ in range(count):
        yield x


@contextlib.asynccontextmanager
async def ray_cluster() -> AsyncIterator[Any]:
    """A Ray cluster of this machine, on loopback; ``None`` without Ray."""
    if not HAS_RAY:
        yield None
        return
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        yield ray
    finally:
        ray.shutdown()


async def method_calls(effort: Effort) -> Samples:
    """Make 5 000 pipelined calls of a function and of a method."""
    count = 5_000
    x = cpu_array()
    spec = specialization(x)
    function = aiocolocated.colocated_python(identity).specialize(**spec)
    cls = aiocolocated.colocated_python_class(Holder)
    obj = cls()
    async with contextlib.aclosing(obj), ray_cluster() as ray:
        method = obj.identity.specialize(**spec)

        async def call(ours: Callable[[jax.Array], Awaitable[jax.Array]]) -> None:
            for future in [ours(x) for _ in range(count)]:
                await future

        variants = {
            OURS_FUNCTION: per_call(count, lambda: call(function)),
            OURS_METHOD: per_call(count, lambda: call(method)),
        }
        if ray is not None:
            actor = ray.remote(Holder).remote()
            value = np.zeros(8, np.float32)

            async def in_ray() -> None:
                for reference in [actor.identity.remote(value) for _ in range(500)]:
                    await reference

            variants[RAY_ACTOR] = per_call(500, in_ray)
        return await alternate(variants, effort)


async def streams(effort: Effort) -> Samples:
    """Iterate over 10 000 small arrays, 4 read ahead."""
    count = effort.count(10_000)
    x = cpu_array()
    devices = tuple(x.devices())
    generator = aiocolocated.colocated_python(items).specialize(devices=devices, read_ahead=4)
    async_generator = aiocolocated.colocated_python(async_items).specialize(
        devices=devices, read_ahead=4
    )

    async def ours(open_stream: Callable[[jax.Array, int], AsyncIterator[jax.Array]]) -> None:
        async for _ in open_stream(x, count):
            pass

    async def in_threads() -> None:
        iterator = items(x, count)
        while await asyncio.to_thread(next, iterator, None) is not None:
            pass

    variants = {
        OURS_GENERATOR: per_call(count, lambda: ours(generator)),
        OURS_ASYNC_GENERATOR: per_call(count, lambda: ours(async_generator)),
        TO_THREAD_NEXT: per_call(count, in_threads),
    }
    async with ray_cluster() as ray:
        if ray is not None:
            variants[RAY_GENERATOR] = ray_items(ray, effort.count(1_000))
        return await alternate(variants, effort)


def ray_items(ray: Any, count: int) -> Variant:
    """Iterate over what a Ray streaming generator gives."""

    remote_items = ray.remote(items)
    value = np.zeros(8, np.float32)

    async def work() -> None:
        async for reference in remote_items.remote(value, count):
            await reference

    return per_call(count, work)


async def sleep_and_return(x: Any) -> Any:
    """A coroutine body that takes 0.1 s."""
    await asyncio.sleep(0.1)
    return x


async def thousand_coroutines(effort: Effort) -> Samples:
    """Run 1 000 coroutine bodies of 0.1 s at once."""
    x = cpu_array()
    body = aiocolocated.colocated_python(sleep_and_return)

    async def ours() -> float:
        start = time.perf_counter()
        async with aiocolocated.TaskGroup() as group:
            for _ in range(1_000):
                group.start_soon(body, x)
        return (time.perf_counter() - start) * 1e3

    async def plain() -> float:
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(1_000):
                group.create_task(sleep_and_return(x))
        return (time.perf_counter() - start) * 1e3

    return await alternate({PLAIN: plain, OURS: ours}, effort)


running: list[bool] = []
reached: list[float] = []


async def wait_for_cancellation() -> None:
    """A body that notes when it is cancelled."""
    try:
        running.append(True)
        await asyncio.sleep(60)
    finally:
        reached.append(time.perf_counter())


async def cancellation(effort: Effort) -> Samples:
    """Cancel a running coroutine body by a timeout, 200 times; the 99th percentile in ms."""
    body = aiocolocated.colocated_python(wait_for_cancellation).specialize(
        devices=tuple(cpu_array().devices())
    )

    async def ours() -> float:
        latencies = []
        for _ in range(200):
            loop = asyncio.get_running_loop()
            running.clear()
            future = body()
            while not running:
                await asyncio.sleep(0.001)
            due = loop.time() + 0.001
            offset = time.perf_counter() - loop.time()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await future
            latencies.append((reached[-1] - offset - due) * 1e3)
        return statistics.quantiles(latencies, n=100)[98]

    return await alternate({OURS: ours}, effort)


BENCHMARKS = (
    Benchmark(
        "method_calls",
        "5 000 pipelined method calls, per call",
        "us",
        method_calls,
        (Target(OURS_METHOD, 1.3, "ratio", OURS_FUNCTION),),
        reference=OURS_FUNCTION,
        repetitions=5,
    ),
    Benchmark(
        "streams",
        "a stream of 10 000 small arrays, per item",
        "us",
        streams,
        (
            Target(OURS_GENERATOR, 60.0),
            Target(OURS_ASYNC_GENERATOR, 60.0),
            *(
                (
                    Target(OURS_GENERATOR, 0.5, "ratio", RAY_GENERATOR),
                    Target(OURS_ASYNC_GENERATOR, 0.5, "ratio", RAY_GENERATOR),
                )
                if HAS_RAY
                else ()
            ),
        ),
        reference=RAY_GENERATOR if HAS_RAY else TO_THREAD_NEXT,
        repetitions=5,
    ),
    Benchmark(
        "coroutines",
        "1 000 coroutine bodies of 0.1 s at once",
        "ms",
        thousand_coroutines,
        (Target(OURS, 500.0, "maximum"),),
        reference=PLAIN,
        repetitions=5,
    ),
    Benchmark(
        "cancellation",
        "a timeout reaches a coroutine body, p99 of 200",
        "ms",
        cancellation,
        (Target(OURS, 50.0, "maximum"),),
        processes=1,
        repetitions=3,
    ),
)
