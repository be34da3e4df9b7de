# SPDX-License-Identifier: Apache-2.0
"""How long the event loop stands still while it awaits a body.

A task sleeps 5 ms over and over beside the work; the largest time between two of its wake-ups is
the gap, the 5 ms included. Plain JAX makes the same call on the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import colocated_python as jax_colocated

import aiocolocated

from ._model import Benchmark, Effort, Samples, Target, Variant, alternate
from ._peers import ON_LOOP, cpu_array, specialization

TICK = 0.005
SLEEP = 0.5
BODIES = 32
COMPILE_SECONDS = 2.0

IDLE = "an idle loop"
FIRST = "aiocolocated, first call"
SECOND = "aiocolocated, second call"
SPECIALIZED = "aiocolocated, specialized"
OURS = "aiocolocated"
BARE_THREAD = "a bare thread"
CHANNEL_RUN = "aiocolocated, channel.run"
CLOSED = "aiocolocated, closed"
DROPPED = "aiocolocated, dropped"


async def largest_gap(work: Callable[[], Awaitable[object]]) -> float:
    """Run the work beside a 5 ms ticker and return the largest gap between two ticks, in ms."""
    worst = 0.0

    async def tick() -> None:
        nonlocal worst
        last = time.perf_counter()
        while True:
            await asyncio.sleep(TICK)
            now = time.perf_counter()
            worst = max(worst, now - last)
            last = now

    ticker = asyncio.create_task(tick())
    await asyncio.sleep(4 * TICK)
    worst = 0.0
    await work()
    await asyncio.sleep(2 * TICK)  # the gap that the work's end lies in counts too
    ticker.cancel()
    await asyncio.wait([ticker])
    return worst * 1e3


def gap(work: Callable[[], Awaitable[object]]) -> Variant:
    """Turn work into a variant that gives its largest gap."""
    return lambda: largest_gap(work)


def new_sleeper() -> Callable[[jax.Array], jax.Array]:
    """A body that nobody has called before, so that its first call ships and specializes it."""

    def sleeper(x: jax.Array) -> jax.Array:
        time.sleep(SLEEP)
        return x

    return sleeper


async def sleeping_body(effort: Effort) -> Samples:
    """Await a body that sleeps 0.5 s."""
    x = cpu_array()
    known = aiocolocated.colocated_python(new_sleeper())
    specialized = aiocolocated.colocated_python(new_sleeper()).specialize(**specialization(x))

    async def on_loop() -> object:
        return jax_colocated.colocated_python(new_sleeper())(x)

    variants = {
        IDLE: gap(lambda: asyncio.sleep(SLEEP)),
        ON_LOOP: gap(on_loop),
        FIRST: gap(lambda: aiocolocated.colocated_python(new_sleeper())(x)),
        SECOND: gap(lambda: known(x)),
        SPECIALIZED: gap(lambda: specialized(x)),
    }
    return await alternate(variants, effort)


def product(x: jax.Array) -> jax.Array:
    """The matrix product of f32[n, n] with itself."""
    return x @ x


def one_second_matrix() -> jax.Array:
    """A matrix, f32[n, n], whose product with itself takes about a second here."""
    x = cpu_array(np.ones((1536, 1536), np.float32))
    jax.block_until_ready(product(x))
    start = time.perf_counter()
    jax.block_until_ready(product(x))
    side = int(1536 * (1.0 / (time.perf_counter() - start)) ** (1 / 3))
    return cpu_array(np.ones((side, side), np.float32))


async def matrix_product(effort: Effort) -> Samples:
    """Await a body that dispatches a matrix product of a second."""
    x = one_second_matrix()
    jax_product = jax_colocated.colocated_python(product)
    ours = aiocolocated.colocated_python(product)

    async def on_loop() -> object:
        return jax.block_until_ready(jax_product(x))

    return await alternate({ON_LOOP: gap(on_loop), OURS: gap(lambda: ours(x))}, effort)


async def sleeping_bodies(effort: Effort) -> Samples:
    """Await 32 bodies that sleep 0.5 s at the same time (one after the other with plain JAX)."""
    x = cpu_array()
    sleeper = aiocolocated.colocated_python(new_sleeper())
    jax_sleeper = jax_colocated.colocated_python(new_sleeper())

    async def on_loop() -> None:
        for _ in range(BODIES):
            jax_sleeper(x)

    async def ours() -> None:
        async with aiocolocated.TaskGroup() as group:
            for _ in range(BODIES):
                group.start_soon(sleeper, x)

    return await alternate({ON_LOOP: gap(on_loop), OURS: gap(ours)}, effort, once=[ON_LOOP])


_salt = itertools.count()


def new_program(layers: int) -> Callable[[jax.Array], jax.Array]:
    """A jitted function that was never traced, of as many layers, each unlike all others."""
    salt = next(_salt)

    def program(x: jax.Array) -> jax.Array:
        for layer in range(layers):
            x = jnp.tanh(x @ x + jnp.float32(salt + layer / layers)) * jnp.cos(x).sum(axis=0)
        return x

    return jax.jit(program)


def two_second_layers(x: jax.Array) -> int:
    """How many layers make tracing and compiling take about two seconds here."""
    layers = 20
    for _ in range(3):  # not quite linear: the estimate is repeated where it was far off
        start = time.perf_counter()
        jax.block_until_ready(new_program(layers)(x))
        seconds = time.perf_counter() - start
        if 0.9 < seconds / COMPILE_SECONDS < 1.2:
            break
        layers = max(1, int(layers * COMPILE_SECONDS / seconds))
    return layers


async def in_bare_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function in a new thread: the least that any solution can do."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def run() -> None:
        result = jax.block_until_ready(function(*args))
        loop.call_soon_threadsafe(done.set_result, result)

    threading.Thread(target=run).start()
    return await done


async def compilation(effort: Effort) -> Samples:
    """Await a jitted function whose tracing and compiling takes 2 s.

    Tracing is Python code and holds the interpreter's lock most of the time, so a bare thread has
    gaps as well.
    """
    x = cpu_array(np.ones((8, 8), np.float32))
    layers = two_second_layers(x)

    async def on_loop() -> object:
        return jax.block_until_ready(new_program(layers)(x))

    async with aiocolocated.open_task_channel() as channel:
        variants = {
            ON_LOOP: gap(on_loop),
            BARE_THREAD: gap(lambda: in_bare_thread(new_program(layers), x)),
            CHANNEL_RUN: gap(lambda: channel.run(new_program(layers), x)),
        }
        return await alternate(variants, effort, once=[ON_LOOP])


class Slow:
    """An object that is slow to make, to iterate over, and to close."""

    def __init__(self) -> None:
        time.sleep(SLEEP / 4)

    def items(self) -> Iterator[bytes]:
        for _ in range(2):
            time.sleep(SLEEP / 4)
            yield bytes(40_000_000)  # pickled in strict mode

    def close(self) -> None:
        time.sleep(SLEEP / 4)

    def __del__(self) -> None:
        time.sleep(SLEEP / 4)


async def slow_object(effort: Effort) -> Samples:
    """Make, iterate over and close an object, and drop another; with big pickled values."""
    devices = tuple(cpu_array().devices())
    cls = aiocolocated.colocated_python_class(Slow, devices=devices)

    async def use_and_close() -> None:
        async with cls() as obj:
            async for _ in obj.items():
                pass

    async def drop() -> None:
        obj = cls()
        await anext(obj.items())
        del obj
        await asyncio.sleep(2 * SLEEP)

    with strict():
        variants = {CLOSED: gap(use_and_close), DROPPED: gap(drop)}
        return await alternate(variants, effort)


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Values go by value, as to another host."""
    aiocolocated.configure(strict=True)
    try:
        yield
    finally:
        aiocolocated.configure(strict=False)


def _still(*variants: str) -> tuple[Target, ...]:
    """The targets of variants that must not stop the loop."""
    return tuple(
        target
        for variant in variants
        for target in (Target(variant, 20.0), Target(variant, 50.0, "maximum"))
    )


BENCHMARKS = (
    Benchmark(
        "gap_sleep",
        "loop gap: a body sleeps 0.5 s",
        "ms",
        sleeping_body,
        _still(FIRST, SECOND, SPECIALIZED),
        reference=ON_LOOP,
        processes=1,
        repetitions=5,
    ),
    Benchmark(
        "gap_matmul",
        "loop gap: a 1 s matrix product",
        "ms",
        matrix_product,
        _still(OURS),
        reference=ON_LOOP,
        processes=1,
        repetitions=5,
    ),
    Benchmark(
        "gap_32_bodies",
        "loop gap: 32 bodies sleep 0.5 s",
        "ms",
        sleeping_bodies,
        _still(OURS),
        reference=ON_LOOP,
        processes=1,
        repetitions=5,
    ),
    Benchmark(
        "gap_objects",
        "loop gap: a slow object, closed or dropped",
        "ms",
        slow_object,
        _still(CLOSED, DROPPED),
        processes=1,
        repetitions=5,
    ),
    Benchmark(
        "gap_compile",
        "loop gap: a 2 s trace and compile",
        "ms",
        compilation,
        (Target(CHANNEL_RUN, 1.2, "ratio", BARE_THREAD),),
        reference=ON_LOOP,
        processes=1,
        repetitions=25,  # they spread from 14 to 74 ms: the median of five says nothing
    ),
)
