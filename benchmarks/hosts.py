# SPDX-License-Identifier: Apache-2.0
"""Host processes against Ray's actors, with the in-process host beside them.

Ray is used as its own documentation does: a reference per call, which is awaited; large arrays by
``ray.put``. Its classes travel by value, so that its workers need not import JAX. What is not
installed is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import jax
import numpy as np

import aiocolocated

from ._model import Benchmark, Effort, Samples, Target, Variant, alternate, per_call
from .loop_gap import IDLE, gap, largest_gap
from .objects import HAS_RAY, ray_cluster

HAS_HOSTS = importlib.util.find_spec("zmq") is not None

OURS = "aiocolocated, processes"
OURS_HANDLE = "aiocolocated, processes, an array"
OURS_GATHER = "aiocolocated.gather, processes"
IN_PROCESS = "aiocolocated, in-process"
RAY = "Ray actor"
RAY_ASYNC = "Ray async actor"
RAY_GET = "Ray actor, ray.get on the loop"
FRESH = "a thread that fills 64 MiB"

SPIN = 1.0  # seconds that a busy body takes
CALLS = 0.5  # seconds of calls beside it


def successor(n: int) -> int:
    """The trivial body."""
    return n + 1


def identity(x: jax.Array) -> jax.Array:
    """The trivial body for arrays."""
    return x


def last(x: jax.Array) -> float:
    """A number that the body can tell only when it has the array."""
    return float(np.asarray(x)[-1])


def spin(seconds: float) -> int:
    """Pure Python that never rests."""
    end, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        rounds += 1
    return rounds


class Side(Protocol):
    """One way to have work done elsewhere."""

    def call(self, n: int) -> Awaitable[int]:
        """Start a trivial call."""

    async def put(self, value: np.ndarray) -> float:
        """Bring an array there; gives its last number, read there."""

    async def keep(self, value: np.ndarray) -> None:
        """Bring an array there for ``get``."""

    async def get(self) -> np.ndarray:
        """Fetch the array that is kept there."""

    async def spin(self, seconds: float) -> None:
        """Keep another process (in-process: another thread) busy."""


class Devices:
    """aiocolocated: the same program, whatever process the devices belong to."""

    def __init__(self, device: jax.Device, other: jax.Device) -> None:
        self.call = aiocolocated.colocated_python(successor).specialize(devices=(device,))
        self.identity = aiocolocated.colocated_python(identity)
        self._last = aiocolocated.colocated_python(last)
        self._spin = aiocolocated.colocated_python(spin).specialize(devices=(other,))
        mesh = jax.sharding.Mesh(np.array([device]), ("x",))
        self._sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        self._kept: jax.Array | None = None

    def array(self, value: np.ndarray) -> aiocolocated.ArrayFuture[jax.Array]:
        """Begin to bring an array there."""
        return aiocolocated.device_put(value, self._sharding)

    async def put(self, value: np.ndarray) -> float:
        return await self._last(aiocolocated.as_argument(self.array(value)))

    async def keep(self, value: np.ndarray) -> None:
        self._kept = await self.array(value)

    async def get(self) -> np.ndarray:
        assert self._kept is not None
        # A new array each time: the value of one that was fetched could be remembered.
        fetched: np.ndarray = await aiocolocated.device_get(self.identity(self._kept))
        return fetched

    async def spin(self, seconds: float) -> None:
        await self._spin(seconds)


class RayActors:
    """Ray: an actor, and another one to be busy."""

    def __init__(self, ray: Any, *, asynchronous: bool) -> None:
        class Actor:
            def successor(self, n: int) -> int:
                return n + 1

            def last(self, x: np.ndarray) -> float:
                return float(x[-1])

            def keep(self, x: np.ndarray) -> None:
                self.kept = x.copy()

            def get(self) -> np.ndarray:
                return self.kept

            def spin(self, seconds: float) -> int:
                end, rounds = time.monotonic() + seconds, 0
                while time.monotonic() < end:
                    rounds += 1
                return rounds

        class AsyncActor(Actor):
            async def successor(self, n: int) -> int:  # type: ignore[override]
                return n + 1

        cls = ray.remote(AsyncActor if asynchronous else Actor)
        self._ray = ray
        self._actor = cls.remote()
        self._other = cls.remote()
        self.call = self._actor.successor.remote

    async def put(self, value: np.ndarray) -> float:
        number: float = await self._actor.last.remote(self._ray.put(value))
        return number

    async def keep(self, value: np.ndarray) -> None:
        await self._actor.keep.remote(value)

    async def get(self) -> np.ndarray:
        fetched: np.ndarray = await self._actor.get.remote()
        return fetched

    async def spin(self, seconds: float) -> None:
        await self._other.spin.remote(seconds)


class Sides:
    """What is there to be compared.

    Attributes:
        by_name: all of them.
        ours: the host process, if that can be had.
        ray: Ray's module, where it is installed.
    """

    def __init__(self, by_name: dict[str, Side], ours: Devices | None, ray: Any) -> None:
        self.by_name = by_name
        self.ours = ours
        self.ray = ray

    def variants(self, variant: Callable[[Side], Variant]) -> dict[str, Variant]:
        """The same variant of each."""
        return {name: variant(side) for name, side in self.by_name.items()}


@contextlib.asynccontextmanager
async def open_sides() -> AsyncIterator[Sides]:
    """Start everything, each called once."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    by_name: dict[str, Side] = {}
    ours = None
    async with contextlib.AsyncExitStack() as stack:
        if HAS_HOSTS:
            hosts = await stack.enter_async_context(
                aiocolocated.open_hosts("processes", n=2, cpu_devices=1)
            )
            by_name[OURS] = ours = Devices(hosts[1].devices[0], hosts[0].devices[0])
        else:
            print("pyzmq is not installed: host processes are left out", file=sys.stderr)
        busy, device = jax.local_devices(backend="cpu")[:2]
        by_name[IN_PROCESS] = Devices(device, busy)
        ray = await stack.enter_async_context(ray_cluster())
        if ray is not None:
            by_name[RAY] = RayActors(ray, asynchronous=False)
            by_name[RAY_ASYNC] = RayActors(ray, asynchronous=True)
        else:
            print("Ray is not installed: left out", file=sys.stderr)
        for side in by_name.values():
            assert await side.call(1) == 2
            await side.spin(0.0)
        yield Sides(by_name, ours, ray)


async def one_at_a_time(
    make: Callable[[], Awaitable[object]],
    seconds: float,
    average: Callable[[list[float]], float] = statistics.median,
) -> float:
    """Make calls one at a time for a while; their median, or another average, in us."""
    times = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        await make()
        times.append(time.perf_counter() - start)
    return average(times) * 1e6


async def calls(effort: Effort) -> Samples:
    """Make trivial calls, one at a time."""
    seconds = CALLS * effort.scale

    def variant(side: Side) -> Variant:
        return lambda: one_at_a_time(lambda: side.call(1), seconds)

    async with open_sides() as sides:
        variants = sides.variants(variant)
        if (ours := sides.ours) is not None:
            x = await ours.array(np.zeros(8, np.float32))
            variants[OURS_HANDLE] = lambda: one_at_a_time(lambda: ours.identity(x), seconds)
        return await alternate(variants, effort)


async def pipelined(effort: Effort) -> Samples:
    """Start 5 000 trivial calls, then await each."""
    count = 5_000

    def variant(side: Side) -> Variant:
        async def work() -> None:
            for future in [side.call(n) for n in range(count)]:
                await future

        return per_call(count, work)

    async with open_sides() as sides:
        variants = sides.variants(variant)
        ours, ray = sides.ours, sides.ray
        if ours is not None:

            async def in_gather() -> None:
                await aiocolocated.gather(*[ours.call(n) for n in range(count)])

            variants[OURS_GATHER] = per_call(count, in_gather)
        if ray is not None:
            call = sides.by_name[RAY].call

            async def in_ray_get() -> None:
                ray.get([call(n) for n in range(count)])

            variants[RAY_GET] = per_call(count, in_ray_get)
        return await alternate(variants, effort)


def random_floats(mebibytes: int) -> np.ndarray:
    """An array of that size."""
    return np.random.default_rng(0).random(mebibytes << 18, dtype=np.float32)


async def put(effort: Effort, mebibytes: int) -> Samples:
    """Bring an array to a host and have its last number read there; ms for each array."""
    value = random_floats(mebibytes)
    count = max(4, 16 // mebibytes)
    expected = float(value[-1])

    def variant(side: Side) -> Variant:
        async def work() -> float:
            start = time.perf_counter()
            for _ in range(count):
                assert await side.put(value) == expected
            return (time.perf_counter() - start) / count * 1e3

        return work

    async with open_sides() as sides:
        return await alternate(sides.variants(variant), effort)


async def get(effort: Effort, mebibytes: int) -> Samples:
    """Fetch an array that lies on a host; ms for each."""
    value = random_floats(mebibytes)
    count = max(4, 16 // mebibytes)
    expected = float(value[-1])

    def variant(side: Side) -> Variant:
        async def work() -> float:
            start = time.perf_counter()
            for _ in range(count):
                assert (await side.get())[-1] == expected
            return (time.perf_counter() - start) / count * 1e3

        return work

    async with open_sides() as sides:
        for side in sides.by_name.values():
            await side.keep(value)
        return await alternate(sides.variants(variant), effort)


def _of(name: str, what: str) -> str:
    """A variant's name where there are several of a side."""
    return f"{name}, {what}"


TRIVIAL, MANY, MIB, LARGE = "calls", "pipelined", "1 MiB", "64 MiB"
QUIET, BUSY = "quiet", "busy"


async def gaps(effort: Effort) -> Samples:
    """The loop's largest gap during each of the other measurements.

    Whoever starts 5 000 calls without a pause stands still that long, so the pipelined ones are
    started 100 at a time here.
    """
    small, large = random_floats(1), random_floats(64)

    async def trivial(side: Side) -> None:
        await one_at_a_time(lambda: side.call(1), CALLS)

    async def many(side: Side) -> None:
        futures = []
        for n in range(5_000):
            futures.append(side.call(n))
            if n % 100 == 99:
                await asyncio.sleep(0)
        for future in futures:
            await future

    async def there_and_back(side: Side, value: np.ndarray) -> None:
        for _ in range(max(4, (16 << 20) // value.nbytes)):
            await side.keep(value)
            await side.get()

    works: dict[str, Callable[[Side], Awaitable[None]]] = {
        TRIVIAL: trivial,
        MANY: many,
        MIB: functools.partial(there_and_back, value=small),
        LARGE: functools.partial(there_and_back, value=large),
    }
    variants = {
        IDLE: gap(lambda: asyncio.sleep(CALLS)),
        FRESH: gap(lambda: asyncio.to_thread(np.full_like, large, 1)),
    }
    async with open_sides() as sides:
        for what, work in works.items():
            for name, side in sides.by_name.items():
                variants[_of(name, what)] = gap(functools.partial(work, side))
        return await alternate(variants, effort)


async def busy_calls(
    effort: Effort,
    measure: Callable[[Callable[[], Awaitable[float]]], Awaitable[float]],
    average: Callable[[list[float]], float] = statistics.median,
) -> Samples:
    """Measure trivial calls without and with a pure-Python body that runs on another host."""

    async def quiet(side: Side) -> float:
        return await one_at_a_time(lambda: side.call(1), CALLS, average)

    async def busy(side: Side) -> float:
        # In a task of its own, so that the calls do not come behind it in program order.
        spinning = asyncio.create_task(side.spin(SPIN))
        await asyncio.sleep(0.1)
        result = await quiet(side)
        await spinning
        return result

    variants: dict[str, Variant] = {}
    async with open_sides() as sides:
        for name, side in sides.by_name.items():
            for what, work in ((QUIET, quiet), (BUSY, busy)):
                variants[_of(name, what)] = functools.partial(
                    measure, functools.partial(work, side)
                )
        return await alternate(variants, effort)


async def _result(work: Callable[[], Awaitable[float]]) -> float:
    """What the work itself gives."""
    return await work()


def _against(variant: str, limit: float, *others: str) -> tuple[Target, ...]:
    """Targets against peers, where both are there."""
    if not (HAS_HOSTS and HAS_RAY):
        return ()
    return tuple(Target(variant, limit, "ratio", other) for other in others)


def _still(*variants: str) -> tuple[Target, ...]:
    """Targets of what must not stop the loop."""
    if not HAS_HOSTS:
        return ()
    return tuple(Target(variant, 20.0, "maximum") for variant in variants)


_REFERENCE = RAY if HAS_RAY else IN_PROCESS


def _transfer(
    name: str, title: str, measure: Callable[..., Awaitable[Samples]], mebibytes: int, limit: float
) -> Benchmark:
    """A benchmark of one way, with one size."""
    return Benchmark(
        f"host_{name}_{mebibytes}mib",
        f"{mebibytes} MiB {title} a host",
        "ms",
        functools.partial(measure, mebibytes=mebibytes),
        _against(OURS, limit, RAY),
        reference=_REFERENCE,
        processes=2,
        every_loop=False,
    )


BENCHMARKS = (
    Benchmark(
        "host_call",
        "one trivial call to a host at a time, p50",
        "us",
        calls,
        _against(OURS, 0.5, RAY, RAY_ASYNC) + _against(OURS_HANDLE, 0.5, RAY, RAY_ASYNC),
        reference=_REFERENCE,
        processes=2,
        repetitions=5,
    ),
    Benchmark(
        "host_pipelined",
        "5 000 pipelined calls to a host, per call",
        "us",
        pipelined,
        _against(OURS, 1 / 5, RAY, RAY_ASYNC, RAY_GET),
        reference=_REFERENCE,
        processes=2,
        repetitions=3,
    ),
    _transfer("put", "to", put, 1, 1 / 5),
    _transfer("get", "from", get, 1, 1 / 5),
    _transfer("put", "to", put, 64, 1 / 1.5),
    _transfer("get", "from", get, 64, 1 / 1.5),
    Benchmark(
        "gap_hosts",
        "loop gap: calls and arrays to and from a host",
        "ms",
        gaps,
        _still(*(_of(OURS, what) for what in (TRIVIAL, MANY, MIB, LARGE))),
        reference=IDLE,
        processes=1,
        repetitions=5,
        every_loop=False,
    ),
    Benchmark(
        "host_call_busy",
        "a trivial call beside a busy host, p50",
        "us",
        functools.partial(busy_calls, measure=_result),
        (Target(_of(OURS, BUSY), 1.5, "ratio", _of(OURS, QUIET)),) if HAS_HOSTS else (),
        processes=2,
        repetitions=3,
        every_loop=False,
    ),
    # A thread that now and then waits for the interpreter's lock leaves the median alone.
    Benchmark(
        "host_call_busy_mean",
        "a trivial call beside a busy host, mean",
        "us",
        functools.partial(busy_calls, measure=_result, average=statistics.fmean),
        processes=2,
        repetitions=3,
        every_loop=False,
    ),
    Benchmark(
        "gap_hosts_busy",
        "loop gap: trivial calls beside a busy host",
        "ms",
        functools.partial(busy_calls, measure=largest_gap),
        _still(_of(OURS, BUSY)),
        processes=1,
        repetitions=5,
        every_loop=False,
    ),
)
