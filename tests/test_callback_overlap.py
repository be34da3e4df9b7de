# SPDX-License-Identifier: Apache-2.0
"""Coroutine callbacks of one program overlap: what is guaranteed, and that no value changes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from aiocolocated import io_callback, pure_callback

pytestmark = pytest.mark.timeout(60)

SCALAR = jax.ShapeDtypeStruct((), np.float32)
CALLBACKS = {
    "io": io_callback,
    "pure": lambda *args: pure_callback(*args, vmap_method="sequential"),
}


class Meeting:
    """Callbacks that return when so many of them have come; one alone would wait for ever."""

    def __init__(self, parties: int) -> None:
        self.parties = parties
        self.come = 0
        self.most = 0
        self.all_here: asyncio.Event | None = None

    async def __call__(self, x: jax.Array) -> Any:
        if self.all_here is None:
            self.all_here = asyncio.Event()
        self.come += 1
        self.most = max(self.most, self.come)
        if self.come == self.parties:
            self.all_here.set()
        async with asyncio.timeout(20):
            await self.all_here.wait()
        return np.asarray(x) * 2

    def reset(self) -> Meeting:
        self.come, self.all_here = 0, None
        return self


def depths(call: Callable[[Any], Any], x: Any) -> Any:
    """Arguments that XLA computes early and late, and one that needs nothing."""
    matrix = jnp.full((8, 8), x)
    return [call(x), call(x + 1), call((matrix @ matrix)[0, 0]), call(jnp.sum(matrix) * 0 + 4)]


def uses_between(call: Callable[[Any], Any], x: Any) -> Any:
    """The result of the first is used before the second is called."""
    first = call(x)
    used = jnp.sin(first) + first * x
    return [first, used, call(x * 3), call(x * 5) + used, call(x * 7)]


def in_scan(call: Callable[[Any], Any], x: Any) -> Any:
    def body(total: Any, _: None) -> Any:
        results = [call(total + i) for i in range(4)]
        return sum(results) / 1024, results[2]

    return jax.lax.scan(body, x, None, length=1)


def in_cond(call: Callable[[Any], Any], x: Any) -> Any:
    return jax.lax.cond(
        x > 0, lambda x: sum(call(x + i) for i in range(4)), lambda x: x + call(x), x
    )


@pytest.mark.parametrize("program", [depths, uses_between, in_scan, in_cond])
@pytest.mark.parametrize("kind", CALLBACKS)
def test_all_have_started_before_one_is_waited_for(kind, program):
    meeting = Meeting(4)
    callback = CALLBACKS[kind]
    jitted = jax.jit(lambda x: program(lambda y: callback(meeting, SCALAR, y), x))
    got = jitted(3.0)
    assert meeting.come == 4
    expected = jax.jit(lambda x: program(lambda y: y * 2, x))(3.0)
    jax.tree.map(np.testing.assert_allclose, got, expected)
    meeting.reset()
    jitted(3.0)  # from the cache
    assert meeting.come == 4


def test_on_each_device_of_a_shard_map():
    devices = jax.devices("cpu")[:2]
    mesh = Mesh(np.array(devices), ("d",))
    meeting = Meeting(4)
    row = jax.ShapeDtypeStruct((1,), np.float32)

    def part(x: Any) -> Any:
        return io_callback(meeting, row, x) + io_callback(meeting, row, x + 1)

    spec = PartitionSpec("d")
    program = jax.jit(jax.shard_map(part, mesh=mesh, in_specs=spec, out_specs=spec))
    assert program(jnp.arange(2.0)).tolist() == [2, 6]
    assert meeting.come == 4


def test_other_calls_with_an_index_are_left_alone():
    """An FFI call of the user's, whose attribute has the name of that which numbers callbacks."""

    async def double(x: jax.Array) -> Any:
        return np.asarray(x) * 2

    def program(x: Any) -> Any:
        y = jax.ffi.ffi_call("somebody_elses", SCALAR)(x, index=np.uint64(7))
        return io_callback(double, SCALAR, x) + io_callback(double, SCALAR, y)

    text = jax.jit(program).lower(1.0).as_text()
    assert text.count("xla_ffi_python_cpu_callback") == 4


def test_what_needs_a_result_waits_for_it():
    order: list[float] = []

    async def callback(x: jax.Array) -> Any:
        order.append(float(x))
        await asyncio.sleep(0.001)
        return np.float32(float(x) + 1)

    def program(x: Any) -> Any:
        first = io_callback(callback, SCALAR, x)
        return io_callback(callback, SCALAR, io_callback(callback, SCALAR, first * 10))

    assert float(jax.jit(program)(1.0)) == 22
    assert order == [1, 20, 21]


def test_ordered_ones_never_overlap():
    running, most, order = 0, 0, []

    async def callback(x: jax.Array) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        order.append(float(x))
        running -= 1
        return np.asarray(x)

    def program(x: Any) -> Any:
        return [io_callback(callback, SCALAR, x + i, ordered=True) for i in range(4)]

    jax.jit(program)(0.0)
    assert most == 1
    assert order == [0, 1, 2, 3]


def test_repeated_finish_of_a_pure_callback_runs_it_again():
    """XLA may do so: the ticket is good once."""
    from aiocolocated import _callback_results, _callbacks

    calls = []

    async def double(x: jax.Array) -> Any:
        calls.append(float(x))
        return np.asarray(x) * 2

    specs = _callback_results.ResultSpecs(SCALAR, False)
    target, _, _ = _callbacks._prepared("pure_callback", double, specs, (jnp.float32(3),), {})
    ticket = target.in_part("start")(jnp.float32(3))
    finish = target.in_part("finish")
    assert [float(finish(ticket, jnp.float32(3))[0]) for _ in range(2)] == [6, 6]
    assert calls == [3, 3]


@pytest.mark.parametrize("seed", range(6))
def test_random_programs_keep_their_values(seed):
    """Chains of callbacks and arithmetic, whose lowering moves operations about, against NumPy."""
    choose = random.Random(seed)
    steps = [
        (
            choose.choice(["io", "pure", "plain", "add", "sin", "cond"]),
            choose.random(),
            choose.random(),
        )
        for _ in range(14)
    ]

    async def scaled(x: Any, y: Any) -> Any:
        return np.float32(np.asarray(x) * 0.5 + np.asarray(y))

    def plain(x: Any, y: Any) -> Any:
        return np.float32(np.asarray(x) * 0.5 + np.asarray(y))

    def program(values: list[Any], call: Callable[..., Any], lib: Any, cond: Any) -> list[Any]:
        for kind, a, b in steps:
            x, y = values[int(a * len(values))], values[int(b * len(values))]
            if kind == "add":
                values.append(x - y)
            elif kind == "sin":
                values.append(lib.sin(x) + y)
            elif kind == "cond":
                values.append(cond(x, y))
            else:
                values.append(call(kind, x, y))
        return values

    def call(kind: str, x: Any, y: Any) -> Any:
        function = plain if kind == "plain" else scaled
        return CALLBACKS["pure" if kind == "pure" else "io"](function, SCALAR, x, y)

    def cond(x: Any, y: Any) -> Any:
        return jax.lax.cond(x > y, lambda: call("io", x, y) + call("io", y, x), lambda: x + y)

    def plain_cond(x: Any, y: Any) -> Any:
        return plain(x, y) + plain(y, x) if x > y else x + y

    start = [0.25, -1.5, 2.0]
    got = jax.jit(lambda *values: program(list(values), call, jnp, cond))(*start)
    expected = program([np.float32(v) for v in start], lambda _, x, y: plain(x, y), np, plain_cond)
    np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=1e-4, atol=1e-5)
