# SPDX-License-Identifier: Apache-2.0
"""Jitted functions that are awaited: `awaitable_jit`."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aiocolocated import (
    ArgumentError,
    CallCancelledError,
    JittedFunction,
    TaskChannel,
    TaskGroup,
    awaitable_jit,
    colocated_python,
    gather,
    io_callback,
    open_task_channel,
)
from aiocolocated.testing import Gate, Recorder

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def x() -> jax.Array:
    return jnp.arange(3.0)


@awaitable_jit
def double(x: jax.Array) -> jax.Array:
    """Twice ``x``."""
    return 2 * x


@colocated_python
def hold(x: jax.Array, started: Gate, gate: Gate) -> jax.Array:
    started.open()
    gate.wait()
    return x


@pytest.mark.all_loops
async def test_call_gives_a_future_of_what_jit_gives(x):
    fut = double(x)
    assert (await fut).tolist() == [0, 2, 4]
    assert (await fut) is (await fut)


async def test_is_the_function_by_name_and_doc():
    assert isinstance(double, JittedFunction)
    assert (double.__name__, double.__doc__) == ("double", "Twice ``x``.")
    assert "double" in repr(double)


async def test_takes_what_jit_returned(x):
    scaled = awaitable_jit(jax.jit(lambda x, by: x * by, static_argnames="by"))
    assert (await scaled(x, by=3)).tolist() == [0, 3, 6]
    assert awaitable_jit(scaled) is scaled


async def test_takes_pytrees_and_gives_them(x):
    split = awaitable_jit(lambda tree: {"sum": tree["a"] + tree["b"][0], "none": None})
    result = await split({"a": x, "b": [x]})
    assert result["sum"].tolist() == [0, 2, 4]
    assert result["none"] is None


async def test_donated_argument_is_used_up():
    y = jnp.arange(3.0)
    step = awaitable_jit(jax.jit(lambda y: y + 1, donate_argnums=0))
    assert (await step(y)).tolist() == [1, 2, 3]
    assert y.is_deleted()


async def test_futures_are_arguments(x):
    """A chain is submitted without one await."""
    value = x
    for _ in range(20):
        value = double(value)
    assert (await value).tolist() == [0, 2.0**20, 2.0**21]


async def test_chain_of_bodies_and_jitted_functions(x):
    """Body, jit, body, jit: submitted without one await; a failure reaches what is behind it alone."""

    @colocated_python
    def body(x: jax.Array, fails: bool) -> jax.Array:
        if fails:
            raise LookupError("link")
        return x

    links = []
    async with open_task_channel() as chain:
        value = x
        for link in range(50):
            value = chain.submit_nowait(double, chain.submit_nowait(body, value, link == 25))
            links.append(value)
        ends = await gather(*links, return_exceptions=True)
    assert [type(end) is LookupError for end in ends] == [False] * 25 + [True] * 25
    assert ends[24].tolist() == [0, 2.0**25, 2.0**26]


async def test_calls_keep_the_order_of_their_channel(x):
    recorder = Recorder()
    started, gate = Gate(), Gate()

    def traced(x: jax.Array) -> jax.Array:
        recorder.record("traced")
        return x

    first = hold(x, started, gate)
    second = awaitable_jit(traced)(x)
    await started.wait_async()
    assert not recorder.events
    gate.open()
    await gather(first, second)
    assert [event.name for event in recorder.events] == ["traced"]


async def test_task_groups_and_channels_take_it(x):
    channel = TaskChannel()
    async with TaskGroup() as group:
        fut = group.start_soon(double, x)
    assert fut.result().tolist() == [0, 2, 4]
    assert (await channel.run(double, x)).tolist() == [0, 2, 4]
    assert (await (await channel.submit(double, x))).tolist() == [0, 2, 4]


async def test_inside_another_jitted_function_it_is_a_part_of_that(x):
    assert jax.jit(lambda x: double(x) + 1)(x).tolist() == [1, 3, 5]
    assert (await awaitable_jit(lambda x: double(double(x)))(x)).tolist() == [0, 4, 8]
    assert jax.vmap(double)(x).tolist() == [0, 2, 4]


async def test_queued_call_is_cancelled(x):
    started, gate = Gate(), Gate()
    first = hold(x, started, gate)
    fut = double(x)
    assert fut.cancel()
    gate.open()
    await first
    with pytest.raises(CallCancelledError):
        await fut


async def test_errors_of_tracing_are_the_calls(x):
    def bad(x: jax.Array) -> jax.Array:
        raise KeyError("traced")

    with pytest.raises(KeyError, match="traced"):
        await awaitable_jit(bad)(x)
    with pytest.raises(KeyError, match="traced"):
        await awaitable_jit(bad).warm_up(x)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        await awaitable_jit(lambda x: x if x[0] else -x)(x)


async def test_refuses_coroutine_functions_and_values(x):
    async def coroutine(x: jax.Array) -> jax.Array:
        return x

    for wrong in (coroutine, 3):
        with pytest.raises(ArgumentError):
            awaitable_jit(wrong)


@pytest.mark.parametrize("what", ["specs", "arrays"])
async def test_warm_up_compiles_ahead_of_the_first_call(x, what):
    compiled = []

    def listen(event: str, duration: float, **kwargs: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    traces = []

    def traced(x: jax.Array, *, by: jax.Array) -> jax.Array:
        traces.append(x)
        return x * by + len(what)

    function = awaitable_jit(traced)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        spec = x if what == "arrays" else jax.ShapeDtypeStruct(x.shape, x.dtype)
        await function.warm_up(spec, by=spec)
        assert len(compiled) == 1
        compiled.clear()
        y = await function(x, by=x)
        assert compiled == []
    finally:
        jax.monitoring.clear_event_listeners()
    assert len(traces) == 1
    traces.clear()
    assert y.tolist() == [float(i * i + len(what)) for i in range(3)]


async def test_warm_ups_and_calls_of_partials(x):
    function = awaitable_jit(functools.partial(lambda by, x: by * x, 3.0))
    await gather(*(function.warm_up(jax.ShapeDtypeStruct((n,), "float32")) for n in (2, 3)))
    assert (await function(x)).tolist() == [0, 3, 6]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    scale: jax.Array

    @awaitable_jit
    def apply(self, x: jax.Array) -> jax.Array:
        return self.scale * x

    def plain(self, x: jax.Array) -> jax.Array:
        return self.scale * x


async def test_methods(x):
    """As jax.jit: of a pytree, called on the object and on the class, and of a bound method."""
    model = Model(jnp.float32(2))
    await model.apply.warm_up(jax.ShapeDtypeStruct(x.shape, x.dtype))
    channel = TaskChannel()
    async with TaskGroup() as group:
        futures = [model.apply(x), Model.apply(model, x), awaitable_jit(model.plain)(x)]
        futures += [channel.run(model.apply, x), group.start_soon(model.apply, x)]
    for fut in futures:
        assert (await fut).tolist() == [0, 2, 4]
    assert jax.jit(lambda model, x: model.apply(x))(model, x).tolist() == [0, 2, 4]


async def test_loop_goes_on_while_it_compiles(x):
    """Tracing and compiling take their time in another thread."""

    def many(x: jax.Array) -> jax.Array:
        for _ in range(100):
            x = jnp.sin(x) + 1
        return x

    fut = awaitable_jit(many)(x)
    turns = 0
    while not fut.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 20


async def test_call_that_runs_is_cancelled(x):
    """Its waiter is told at once; the program runs on to its end, and the channel then goes on."""
    started, gate = Gate(), Gate()

    def wait(x: jax.Array) -> Any:
        started.open()
        gate.wait()
        return np.asarray(x)

    function = awaitable_jit(
        lambda x: io_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x) * 3
    )
    first, second = function(x), double(x)
    await started.wait_async()
    assert first.cancel()
    with pytest.raises(CallCancelledError):
        await first
    assert not second.done()
    gate.open()
    assert (await second).tolist() == [0, 2, 4]
