# SPDX-License-Identifier: Apache-2.0
"""What a queued call and a channel weigh.

Bytes are counted in two ways: the growth of the process (resident set, everything included, in
pages) and that of Python's own allocations (``tracemalloc``). The futures that the caller holds are
part of a call's weight.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from jax.experimental import colocated_python as jax_colocated

import aiocolocated

from ._model import Benchmark, Effort, Samples, Target
from ._peers import ONE_THREAD, OURS, TO_THREAD, peers, specialization

if TYPE_CHECKING:
    import jax

IDLE_CHANNEL = "aiocolocated channel, never used"
USED_CHANNEL = "aiocolocated channel, after a call"
EXECUTOR = "one-thread executor, after a call"

_gate = threading.Event()


def wait_at_gate(x: jax.Array) -> jax.Array:
    """A body that keeps its channel, or its thread, busy until the gate opens."""
    _gate.wait()
    return x


def resident() -> int:
    """Bytes of memory that the process occupies."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def traced() -> int:
    """Bytes that Python's allocator has handed out since tracing began."""
    return tracemalloc.get_traced_memory()[0]


class Growth:
    """Growth of the process over a ``with`` block, in bytes.

    Attributes:
        bytes: the growth, set when the block ends.
    """

    def __init__(self, probe: Callable[[], int]) -> None:
        self.bytes = 0
        self._probe = probe

    def __enter__(self) -> Growth:
        gc.collect()
        self._before = self._probe()
        return self

    def __exit__(self, *_: object) -> None:
        gc.collect()
        self.bytes = self._probe() - self._before


@contextlib.contextmanager
def tracing(probe: Callable[[], int]) -> Iterator[None]:
    """Have ``tracemalloc`` run if the probe needs it."""
    if probe is traced:
        tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


async def measure_queued_calls(effort: Effort, probe: Callable[[], int]) -> Samples:
    """Queue 100 000 calls behind one that does not end; a fifth of them for the slow peers."""
    count = effort.count(100_000)
    few = count // 5
    samples: Samples = {}
    loop = asyncio.get_running_loop()
    growth = Growth(probe)
    with peers() as peer, tracing(probe):
        x, call, ours = peer.x, peer.jax_call, peer.ours
        gate = aiocolocated.colocated_python(wait_at_gate).specialize(**specialization(x))
        jax_gate = jax_colocated.colocated_python(wait_at_gate).specialize(**specialization(x))
        await ours(x)

        # Nothing is let go before the end: freed memory would hide the growth of the next variant.
        _gate.clear()
        held = gate(x)
        await asyncio.sleep(0.1)  # the gate's body runs, and whatever its first call needs exists
        with growth:
            futures = [ours(x) for _ in range(count)]
        samples[OURS] = [growth.bytes / count]

        gate_future = loop.run_in_executor(peer.one_thread, jax_gate, x)
        await asyncio.sleep(0.1)
        with growth:
            in_executor = [loop.run_in_executor(peer.one_thread, call, x) for _ in range(few)]
        samples[ONE_THREAD] = [growth.bytes / few]

        gate_tasks = [asyncio.create_task(asyncio.to_thread(jax_gate, x)) for _ in range(64)]
        await asyncio.sleep(0.1)  # every thread of the default executor waits at the gate
        with growth:
            tasks = [asyncio.create_task(asyncio.to_thread(call, x)) for _ in range(few)]
            await asyncio.sleep(0)  # the tasks have started and handed their calls over
        samples[TO_THREAD] = [growth.bytes / few]

        _gate.set()
        await held
        for future in futures:
            await future
        for queued in [gate_future, *in_executor, *gate_tasks, *tasks]:
            await queued
    return samples


async def measure_channels(effort: Effort, probe: Callable[[], int]) -> Samples:
    """Have 10 000 channels at once, then use each for one call (200 executors for the peer)."""
    count = effort.count(10_000)
    few = effort.count(200)
    growth = Growth(probe)
    samples: Samples = {}
    with peers() as peer, tracing(probe):
        x, call, ours = peer.x, peer.jax_call, peer.ours
        await ours(x)
        for _ in range(100):  # what the first channels bring with them
            await aiocolocated.TaskChannel().submit_nowait(ours, x)

        with growth:
            channels = [aiocolocated.TaskChannel() for _ in range(count)]
        samples[IDLE_CHANNEL] = [growth.bytes / count]
        unused = growth.bytes
        with growth:
            for channel in channels:
                await channel.submit_nowait(ours, x)
        samples[USED_CHANNEL] = [(unused + growth.bytes) / count]
        for channel in channels:
            await channel.aclose()
        channels.clear()

        with growth:
            executors = [ThreadPoolExecutor(1) for _ in range(few)]
            for executor in executors:
                executor.submit(call, x).result()
        samples[EXECUTOR] = [growth.bytes / few]
        for executor in executors:
            executor.shutdown()
    return samples


async def queued_calls(effort: Effort) -> Samples:
    """Resident bytes of a queued call."""
    return await measure_queued_calls(effort, resident)


async def queued_calls_traced(effort: Effort) -> Samples:
    """Bytes of a queued call in Python's own allocations."""
    return await measure_queued_calls(effort, traced)


async def channels(effort: Effort) -> Samples:
    """Resident bytes of a channel."""
    return await measure_channels(effort, resident)


async def channels_traced(effort: Effort) -> Samples:
    """Bytes of a channel in Python's own allocations."""
    return await measure_channels(effort, traced)


_CALL = (Target(OURS, 1024),)
_CHANNEL = (Target(IDLE_CHANNEL, 2048), Target(USED_CHANNEL, 2048))

BENCHMARKS = (
    Benchmark(
        "queued_calls",
        "100 000 queued calls, each (RSS)",
        "bytes",
        queued_calls,
        _CALL,
        reference=TO_THREAD,
        every_loop=False,
    ),
    Benchmark(
        "queued_calls_traced",
        "100 000 queued calls, each (tracemalloc)",
        "bytes",
        queued_calls_traced,
        _CALL,
        reference=TO_THREAD,
        every_loop=False,
    ),
    Benchmark(
        "channels",
        "10 000 channels, each (RSS)",
        "bytes",
        channels,
        _CHANNEL,
        reference=EXECUTOR,
        every_loop=False,
    ),
    Benchmark(
        "channels_traced",
        "10 000 channels, each (tracemalloc)",
        "bytes",
        channels_traced,
        _CHANNEL,
        reference=EXECUTOR,
        every_loop=False,
    ),
)
