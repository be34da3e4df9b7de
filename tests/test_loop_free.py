# SPDX-License-Identifier: Apache-2.0
"""The event loop is never blocked: the largest gap between two ticks of 5 ms, and who runs what.

Bounds are medians, widened by what a loop shows on the machine at the time with the least that could be
done, and may be missed while other programs take the cores; plain JAX on the loop shows in the same test
that a gap would be seen. ``benchmarks/loop_gap.py`` measures without mercy.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import threading
import time
from collections.abc import Awaitable, Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import colocated_python as jax_colocated

from aiocolocated import (
    TaskGroup,
    _values,
    colocated_python,
    configure,
    gather,
    open_task_channel,
    runtime,
    wait_until_ready,
)
from aiocolocated.testing import LoopGap

BODY = 0.12  # seconds that a body takes
BOUND = 0.02  # seconds, the largest gap allowed
RUNS = 3
ATTEMPTS = 5

Work = Callable[[], Awaitable[object]]

# The guard's patches cost time in every thread, and plain JAX blocks the loop here on purpose.
measured = pytest.mark.no_blocking(False)


async def largest_gap(work: Work) -> float:
    """Seconds of the largest gap beside the work."""
    async with LoopGap(watch=None) as gap:
        await asyncio.sleep(0.02)
        gap.reset()
        await work()
        await asyncio.sleep(0.01)
    return gap.max_seconds


async def median_gaps(*works: Work) -> list[float]:
    """Medians of several runs, alternated: what else the machine does hits all works."""
    gaps: list[list[float]] = [[] for _ in works]
    for _ in range(RUNS):
        for work, found in zip(works, gaps, strict=True):
            found.append(await largest_gap(work))
    return [statistics.median(found) for found in gaps]


async def assert_free(work: Work, *, stall: Work | None = None, least: Work | None = None) -> None:
    """The work leaves the loop as free as ``least`` does, an idle loop if absent; ``stall`` does not."""
    missed = []
    for _ in range(ATTEMPTS):
        gap, unavoidable = await median_gaps(work, least or (lambda: asyncio.sleep(BODY)))
        if gap < max(BOUND, 1.2 * unavoidable):
            break
        missed.append((gap, unavoidable))
    else:
        pytest.fail(f"gaps (seconds, and with the least that could be done): {missed}")
    if stall is not None:
        stalled = await largest_gap(stall)
        assert stalled >= 0.9 * BODY
        assert gap < stalled / 2


def new_sleeper() -> Callable[[jax.Array], jax.Array]:
    """A body that nobody has called before."""

    def sleeper(x: jax.Array) -> jax.Array:
        time.sleep(BODY)
        return x

    return sleeper


def on_loop(make: Callable[[], Callable[[jax.Array], jax.Array]], x: jax.Array) -> Work:
    """The call as plain JAX makes it, on the loop's thread."""

    async def work() -> object:
        return jax.block_until_ready(jax_colocated.colocated_python(make())(x))

    return work


# --- gaps -------------------------------------------------------------------------------------------


@measured
@pytest.mark.asyncio
async def test_loop_free_in_first_call():
    """Shipping and specializing a function and its body's sleep leave the loop free."""
    x = jnp.ones(8)
    await assert_free(lambda: colocated_python(new_sleeper())(x), stall=on_loop(new_sleeper, x))


@measured
@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_loop_free_in_later_calls():
    """A known function's body sleeps and the loop runs, on every kind of loop."""
    x = jnp.ones(8)
    f = colocated_python(new_sleeper())
    await f(x)
    await assert_free(lambda: f(x))


@measured
@pytest.mark.asyncio
async def test_loop_free_in_specialized_calls():
    """The same with every spec given in advance."""
    x = jnp.ones(8)
    spec = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    f = colocated_python(new_sleeper()).specialize(
        in_specs=((spec,), {}), out_specs_fn=lambda x: x, devices=jax.devices()[:1]
    )
    await assert_free(lambda: f(x))


@measured
@pytest.mark.asyncio
async def test_loop_free_while_32_bodies_sleep():
    """32 bodies at once, and the threads that they need, leave the loop free."""
    x = jnp.ones(8)
    f = colocated_python(new_sleeper())
    await f(x)

    async def work() -> None:
        async with TaskGroup() as group:
            for _ in range(32):
                group.start_soon(f, x)

    await assert_free(work)
    assert runtime.statistics().workers >= 32  # they did overlap


@jax.jit
def product(x: jax.Array) -> jax.Array:
    """A chain of matrix products, f32[n, n]; its length is the time that it takes."""
    return jax.lax.fori_loop(0, 8, lambda _, y: y @ x * 1e-3, x)


def slow_matrix() -> jax.Array:
    """f32[n, n] for which :func:`product` takes a little longer than a body."""
    n = 256
    while True:
        x = jax.block_until_ready(jnp.ones((n, n)))
        jax.block_until_ready(product(x))
        start = time.perf_counter()
        jax.block_until_ready(product(x))
        if time.perf_counter() - start > 1.1 * BODY:
            return x
        n = n * 5 // 4


@measured
@pytest.mark.asyncio
async def test_loop_free_while_arrays_compute():
    """A dispatched computation is awaited off the loop, in a call and with wait_until_ready."""
    x = slow_matrix()
    f = colocated_python(lambda x: product(x))
    least: Work = lambda: in_bare_thread(product, x)  # noqa: E731 - it has both cores to itself
    await assert_free(lambda: f(x), stall=on_loop(lambda: product, x), least=least)
    await assert_free(lambda: wait_until_ready(product(x)), least=least)


_salt = itertools.count()


def new_program(layers: int) -> Callable[[jax.Array], jax.Array]:
    """A jitted function that was never traced, unlike all others."""
    salt = next(_salt)

    def program(x: jax.Array) -> jax.Array:
        for layer in range(layers):
            x = jnp.tanh(x @ x + jnp.float32(salt + layer / layers)) * jnp.cos(x).sum(axis=0)
        return x

    return jax.jit(program)


async def in_bare_thread(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> object:
    """The least that any solution can do: a new thread."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def run() -> None:
        jax.block_until_ready(function(x))
        loop.call_soon_threadsafe(done.set_result, None)

    threading.Thread(target=run).start()
    return await done


@measured
@pytest.mark.asyncio
async def test_loop_free_while_channel_traces_and_compiles():
    """Tracing and compiling in a channel cost the loop what they cost it in a bare thread.

    Tracing is Python code that holds the interpreter lock, so that a bare thread shows gaps as well.
    """
    x = jnp.ones((8, 8))
    layers = 16

    async def plain() -> None:
        jax.block_until_ready(new_program(layers)(x))

    async with open_task_channel() as channel:
        await channel.run(new_program(layers), x)
        await assert_free(
            lambda: channel.run(new_program(layers), x),
            least=lambda: in_bare_thread(new_program(layers), x),
            stall=plain,
        )


# --- who runs what ----------------------------------------------------------------------------------


class Witness:
    """Notes which thread pickles it, and which one destroys it."""

    pickled_on: ClassVar[list[int]] = []
    destroyed_on: ClassVar[list[int]] = []

    def __reduce__(self) -> tuple[type[Witness], tuple[()]]:
        self.pickled_on.append(threading.get_ident())
        return Witness, ()

    def __del__(self) -> None:
        self.destroyed_on.append(threading.get_ident())


@pytest.fixture
def witness() -> type[Witness]:
    Witness.pickled_on.clear()
    Witness.destroyed_on.clear()
    return Witness


@pytest.mark.asyncio
async def test_captured_values_pickled_off_the_loop(witness):
    """What a body captures is pickled on a worker thread, once."""
    captured = witness()
    f = colocated_python(lambda x: (x, captured)[0])
    fut, second = f(jnp.ones(2)), f(jnp.ones(2))
    await gather(fut, second)
    assert len(witness.pickled_on) == 1
    assert threading.get_ident() not in witness.pickled_on


@pytest.mark.asyncio
async def test_argument_destroyed_off_the_loop(witness):
    """The last reference to an argument goes on the worker thread, whose time its ``__del__`` takes."""
    f = colocated_python(lambda x, value: x)
    await f(jnp.ones(2), witness())
    assert len(witness.destroyed_on) == 1
    assert threading.get_ident() not in witness.destroyed_on


@pytest.mark.asyncio
async def test_output_specs_made_off_the_loop():
    """``out_specs_fn`` is the user's code and runs on a worker thread."""
    threads: list[int] = []

    def out_specs(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        threads.append(threading.get_ident())
        return x

    f = colocated_python(lambda x: x).specialize(out_specs_fn=out_specs)
    await f(jnp.ones(2))
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.asyncio
async def test_numpy_transferred_off_the_loop(monkeypatch):
    """NumPy arguments and results are put on their devices by worker threads."""
    threads: list[int] = []
    place = _values.place

    def recording(*args, **kwargs):
        threads.append(threading.get_ident())
        return place(*args, **kwargs)

    monkeypatch.setattr(_values, "place", recording)
    f = colocated_python(lambda x: np.asarray(x) + 1).specialize(devices=jax.devices()[0])
    assert (await f(np.zeros(3, np.float32))).tolist() == [1, 1, 1]
    assert len(threads) == 2
    assert threading.get_ident() not in threads


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_no_thread_started_from_the_loop(monkeypatch):
    """``Thread.start`` waits for the new thread; the loop's thread never calls it."""
    configure(worker_idle_timeout=0.01)
    f = colocated_python(new_sleeper())
    await f(jnp.ones(2))
    while runtime.statistics().workers:  # every worker has to be started anew
        await asyncio.sleep(0.01)
    starters: list[int] = []
    start = threading.Thread.start

    def recording(thread: threading.Thread) -> None:
        starters.append(threading.get_ident())
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", recording)
    async with TaskGroup() as group, open_task_channel(dedicated_thread=True) as channel:
        for _ in range(4):
            group.start_soon(f, jnp.ones(2))
        channel.submit_nowait(f, jnp.ones(2))
        f(jnp.ones(2)).add_done_callback(lambda fut: None)
        await wait_until_ready(jnp.ones(4) + 1)
    assert len(starters) >= 5  # four channels of the group, the block's own thread
    assert threading.get_ident() not in starters
