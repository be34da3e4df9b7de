# SPDX-License-Identifier: Apache-2.0
"""Hosts that form one cluster: bodies run programs over all their devices."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from aiocolocated import (
    HostLostError,
    Hosts,
    TaskChannel,
    TaskGroup,
    colocated_python,
    device_get,
    device_put,
    gather,
    open_hosts,
)

pytest.importorskip("zmq")
pytestmark = [pytest.mark.timeout(90), pytest.mark.asyncio]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with open_hosts("processes", n=4, cpu_devices=2, collectives=True) as opened:
        yield opened


@colocated_python
def make(mesh: Any, n: int) -> jax.Array:
    sharding = NamedSharding(mesh, P("x"))
    return jax.make_array_from_callback(
        (n,), sharding, lambda index: np.arange(n, dtype=np.float32)[index]
    )


@jax.jit
def total(x: jax.Array) -> jax.Array:
    return x.sum()


@colocated_python
def reduce_(x: jax.Array) -> float:
    return float(total(x))


@colocated_python
def scale(x: jax.Array, factor: float) -> jax.Array:
    return x * factor


async def test_a_collective_over_four_hosts(hosts: Hosts) -> None:
    """An array that one call made on all hosts' devices is reduced by another."""
    mesh = hosts.mesh((8,), ("x",))
    x = await make.specialize(devices=mesh)(mesh, 16)
    assert await reduce_(x) == 120
    y = await device_put(np.ones(8, np.float32), NamedSharding(mesh, P("x")))
    assert await reduce_(scale(y, 3.0)) == 24


async def test_order_is_the_same_on_all_hosts(hosts: Hosts) -> None:
    """Collectives of many channels and tasks meet on every host in one order."""
    mesh = hosts.mesh((8,), ("x",))
    x = await device_put(np.ones(8, np.float32), NamedSharding(mesh, P("x")))

    async def task(factor: int) -> list[float]:
        channel = TaskChannel()
        futures = [
            channel.submit_nowait(reduce_, channel.submit_nowait(scale, x, float(factor)))
            for _ in range(8)
        ]
        return list(await gather(*futures))

    async with TaskGroup() as group:
        tasks = [group.create_task(task(i)) for i in range(6)]
    assert [set(t.result()) for t in tasks] == [{8.0 * i} for i in range(6)]


async def test_a_cancelled_collective_holds_nobody_up(hosts: Hosts) -> None:
    """A host that skipped a call that others have begun would leave them waiting."""
    mesh = hosts.mesh((8,), ("x",))
    x = await device_put(np.ones(8, np.float32), NamedSharding(mesh, P("x")))
    futures = [reduce_(x) for _ in range(40)]
    for future in futures[::3]:
        future.cancel()
    results = await gather(*futures, return_exceptions=True)
    assert {r for i, r in enumerate(results) if i % 3} == {8.0}


async def test_calls_on_one_host_go_on_beside(hosts: Hosts) -> None:
    mesh = hosts.mesh((8,), ("x",))
    x = await device_put(np.ones(8, np.float32), NamedSharding(mesh, P("x")))
    own = await device_put(np.ones(4, np.float32), hosts.devices[5])
    results = await gather(*(f for _ in range(10) for f in (reduce_(x), reduce_(own))))
    assert set(results) == {8.0, 4.0}


async def test_jitted_results_stay_global(hosts: Hosts) -> None:
    mesh = hosts.mesh((8,), ("x",))

    @colocated_python
    def normalize(x: jax.Array) -> jax.Array:
        return jax.jit(lambda x: x / jnp.linalg.norm(x))(x)

    x = await device_put(np.full(16, 2.0, np.float32), NamedSharding(mesh, P("x")))
    y = await normalize(x)
    np.testing.assert_allclose(await device_get(y), np.full(16, 0.25), rtol=1e-6)


async def test_one_lost_host_loses_the_cluster() -> None:
    """Its peers would wait for it: calls on all of them fail at once."""

    @colocated_python
    def end() -> None:
        import os

        if jax.process_index() == 1:
            os._exit(3)
        import time

        time.sleep(30)

    async with open_hosts("processes", n=2, cpu_devices=1, collectives=True) as hosts:
        async with asyncio.timeout(20):
            with pytest.raises(HostLostError, match="host-1"):
                await end.specialize(devices=hosts.devices)()
            while not hosts[0].lost:
                await asyncio.sleep(0.01)
        with pytest.raises(HostLostError, match="one cluster with host-1"):
            await reduce_.specialize(devices=hosts.devices[0])(np.ones(2))


@colocated_python
def total_unless(x: jax.Array, bad: int | None) -> float:
    if jax.process_index() == bad:
        raise ValueError(f"bad input on host {bad}")
    return float(total(x))


@colocated_python
def fail_everywhere(x: jax.Array) -> float:
    raise ValueError("bad input")


async def test_a_failure_on_some_hosts_gives_the_cluster_up() -> None:
    """The others' collective would wait for ever, or meet that of the next call and give wrong numbers."""
    async with open_hosts("processes", n=2, cpu_devices=2, collectives=True) as hosts:
        sharding = NamedSharding(hosts.mesh((4,), ("x",)), P("x"))
        ones = await device_put(np.ones(4, np.float32), sharding)
        hundreds = await device_put(np.full(4, 100, np.float32), sharding)
        async with asyncio.timeout(40):
            assert await total_unless(ones, None) == 4
            with pytest.raises(ExceptionGroup, match="failed on 2 hosts"):
                await fail_everywhere(ones)
            assert await total_unless(hundreds, None) == 400
            calls = [total_unless(ones, 0), *(total_unless(hundreds, None) for _ in range(5))]
            outcomes = await gather(*calls, return_exceptions=True)
            assert isinstance(outcomes[0], ValueError)
            assert {type(o) for o in outcomes[1:]} == {HostLostError}
            assert "total_unless failed on host-0" in str(outcomes[1])
            await hosts.restart(0)
            again = await device_put(np.ones(4, np.float32), sharding)
            assert await total_unless(again, None) == 4


async def test_a_failure_behind_a_timeout_gives_the_cluster_up() -> None:
    """Whoever waited for the call has gone, but the other host's collective still waits for it."""
    async with open_hosts("processes", n=2, cpu_devices=2, collectives=True) as hosts:
        sharding = NamedSharding(hosts.mesh((4,), ("x",)), P("x"))
        ones = await device_put(np.ones(4, np.float32), sharding)
        async with asyncio.timeout(40):
            assert await total_unless(ones, None) == 4
            failing = total_unless(ones, 0)
            while not failing._sent:
                await asyncio.sleep(0)
            failing.cancel()
            with pytest.raises(HostLostError, match="total_unless failed on host-0"):
                await total_unless(ones, None)
