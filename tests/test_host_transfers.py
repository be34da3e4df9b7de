# SPDX-License-Identifier: Apache-2.0
"""`device_put` and `device_get` to, from and between host processes."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

from aiocolocated import (
    ArrayDeletedError,
    Hosts,
    TaskChannel,
    colocated_python,
    device_get,
    device_put,
    gather,
    on_each_host,
    open_hosts,
)
from aiocolocated.hosts import _parcels

pytest.importorskip("zmq")
pytestmark = [pytest.mark.timeout(60), pytest.mark.asyncio]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with open_hosts("processes", n=2, cpu_devices=2) as opened:
        yield opened


def shardings(hosts: Hosts) -> dict[str, Any]:
    mesh = hosts.mesh((2, 2), ("host", "x"))
    local = Mesh(np.array(hosts[1].devices, dtype=object), ("x",))
    return {
        "one": SingleDeviceSharding(hosts[1].devices[1]),
        "host": NamedSharding(local, P("x")),
        "rows": NamedSharding(mesh, P("host")),
        "columns": NamedSharding(mesh, P(None, ("host", "x"))),
        "both": NamedSharding(mesh, P("x", "host")),
        "replicated": NamedSharding(mesh, P()),
    }


NAMES = ["one", "host", "rows", "columns", "both", "replicated"]
VALUE = np.arange(64, dtype=np.float32).reshape(8, 8)


@pytest.mark.parametrize("name", NAMES)
async def test_there_and_back(hosts: Hosts, name: str) -> None:
    sharding = shardings(hosts)[name]
    x = await device_put(VALUE, sharding)
    assert x.sharding == sharding
    assert x.dtype == VALUE.dtype
    back = await device_get(x)
    assert type(back) is np.ndarray
    np.testing.assert_array_equal(back, VALUE)


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(NAMES, 2)))
async def test_from_one_sharding_to_another(hosts: Hosts, source: str, target: str) -> None:
    """Between the devices of one host, and of several."""
    everything = shardings(hosts)
    x = await device_put(VALUE, everything[source])
    y = await device_put(x, everything[target])
    assert y.sharding == everything[target]
    np.testing.assert_array_equal(await device_get(y), VALUE)


@pytest.mark.parametrize("name", NAMES)
async def test_to_and_from_devices_of_this_process(hosts: Hosts, name: str) -> None:
    local = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("x",)), P("x"))
    x = await device_put(jax.device_put(VALUE, local), shardings(hosts)[name])
    y = await device_put(x, local)
    assert y.sharding == local
    np.testing.assert_array_equal(np.asarray(y), VALUE)


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint32", "float16", "complex64", ml_dtypes.bfloat16, "float32"]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (300, 300)])
async def test_shapes_and_dtypes(hosts: Hosts, dtype: Any, shape: tuple[int, ...]) -> None:
    value = np.ones(shape, dtype)
    x = await device_put(value, hosts.devices[3])
    assert (x.shape, x.dtype) == (shape, value.dtype)
    back = await device_get(x)
    assert back.dtype == value.dtype
    np.testing.assert_array_equal(back, value)


async def test_trees_scalars_and_keys(hosts: Hosts) -> None:
    """What JAX's functions take; 64 bits become 32 as they do there."""
    key = jax.random.key(7)
    tree = {"key": key, "n": 3, "f": 2.5, "wide": np.arange(3), "list": [jnp.ones(2), None]}
    there = await device_put(tree, hosts.devices[0])
    assert there["key"].dtype == key.dtype
    assert there["wide"].dtype == np.int32
    back = await device_get(there)
    assert int(back["n"]) == 3
    assert float(back["f"]) == 2.5
    assert back["list"][1] is None
    assert jax.random.key_data(back["key"]).tolist() == jax.random.key_data(key).tolist()


async def test_a_tree_of_shardings(hosts: Hosts) -> None:
    """Each leaf goes where its sharding says: some to hosts, one stays here."""
    here = jax.devices()[2]
    a, b, c = await device_put(
        (VALUE, VALUE + 1, VALUE + 2), (hosts.devices[0], shardings(hosts)["rows"], here)
    )
    assert a.sharding.device_set == {hosts.devices[0]}
    assert b.sharding == shardings(hosts)["rows"]
    assert c.devices() == {here}
    got = await device_get((a, b, c))
    assert [v[0, 0] for v in got] == [0, 1, 2]


async def test_futures_and_channels(hosts: Hosts) -> None:
    """Transfers are calls: they take futures, are arguments, and have places in channels."""

    @colocated_python
    def double(x: jax.Array) -> jax.Array:
        return x * 2

    for _ in range(
        30
    ):  # whether a call knows at once where its future will be is a matter of chance
        x = device_put(VALUE, hosts.devices[0])
        y = double(x)
        z = device_put(y, hosts.devices[2])
        np.testing.assert_array_equal(await device_get(double(z)), VALUE * 4)
    channel = TaskChannel()
    w = channel.submit_nowait(device_put, VALUE, hosts.devices[1])
    np.testing.assert_array_equal(await channel.submit_nowait(device_get, w), VALUE)


async def test_what_is_fetched_stays(hosts: Hosts) -> None:
    """The memory of a large array is not used again while it is looked at, whoever else transfers."""
    arrays = [np.full((512, 512), i, np.float32) for i in range(12)]
    there = await gather(*(device_put(a, hosts.devices[i % 4]) for i, a in enumerate(arrays)))
    got = await gather(*map(device_get, there))
    again = await gather(*(device_put(a + 100, hosts.devices[0]) for a in arrays))
    for i, value in enumerate(got):
        assert not value.flags.writeable
        assert (value == i).all()
    moved = await gather(*(device_put(x, hosts.devices[3]) for x in again))
    del again
    for i, value in enumerate(await gather(*map(device_get, moved))):
        assert (value == i + 100).all()


async def test_large_arguments_and_results(hosts: Hosts) -> None:
    """NumPy arrays in arguments, and in objects that are no trees; a body may write to the latter."""

    @colocated_python
    def change(box: dict[str, Any], x: jax.Array) -> Any:
        (array,) = box["hidden"].content
        array += 1
        return float(x.sum()), box["hidden"]

    big = np.ones((512, 512), np.float32)
    total, hidden = await change.specialize(devices=hosts.devices[0])(
        {"hidden": _Hidden([big])}, big
    )
    assert total == big.size
    assert (hidden.content[0] == 2).all()
    hidden.content[0][:] = 3
    assert (big == 1).all()


class _Hidden:
    def __init__(self, content: Any) -> None:
        self.content = content


@pytest.mark.parametrize(
    ("value", "match"),
    [(np.ones((3, 5)), "divi"), (np.array(["a"], dtype=object), "x"), (np.array("text"), "x")],
)
async def test_what_cannot_be_put(hosts: Hosts, value: Any, match: str) -> None:
    """Refused with the leaf's place, as for devices of this process."""
    with pytest.raises((TypeError, ValueError)) as caught:
        await device_put(value, shardings(hosts)["rows"])
    text = str(caught.value) + "".join(getattr(caught.value, "__notes__", ()))
    assert match in text
    assert "device_put" in text


async def test_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that cannot look into this process, as on another machine, gets the bytes themselves."""
    monkeypatch.setattr(_parcels, "sharing", _parcels.sharing)  # restored
    monkeypatch.setattr(_parcels, "probe", lambda: None)
    big = np.arange(1 << 18, dtype=np.float32)
    async with open_hosts("processes", n=2, cpu_devices=1) as hosts:
        assert not _parcels.sharing

        @colocated_python
        def total(x: jax.Array, hidden: Any) -> float:
            return float(x.sum()) + float(hidden.content.sum())

        x = await device_put(big, hosts.devices[0])
        y = await device_put(x, hosts.devices[1])
        np.testing.assert_array_equal(await device_get(y), big)
        assert await total.specialize(devices=hosts.devices[0])(big, _Hidden(big)) > 0
        (first, _) = hosts.statistics()
        assert first.sent_bytes >= 2 * big.nbytes


async def test_a_result_is_fetched_before_it_is_there(hosts: Hosts) -> None:
    """`device_get` of a future follows its call to the host; trees, keys and plain values come back."""

    @colocated_python
    def make(n: int) -> Any:
        return {
            "a": jnp.full((n, 300), 2.0),
            "key": jax.random.key(n),
            "none": None,
            "text": ["x", n],
            "split": jax.device_put(jnp.arange(4), NamedSharding(local_mesh(), P("x"))),
        }

    got = await device_get(make.specialize(devices=hosts.devices[0])(300))
    assert got["a"].shape == (300, 300)
    assert not got["a"].flags.writeable
    assert (got["text"], got["none"]) == (["x", 300], None)
    assert got["split"].tolist() == [0, 1, 2, 3]
    assert jax.random.key_data(got["key"]).tolist() == [0, 300]

    @colocated_python
    def fail() -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        await device_get(fail.specialize(devices=hosts.devices[0])())


def local_mesh() -> Mesh:
    return Mesh(np.array(jax.local_devices(), dtype=object), ("x",))


# --- what nobody looks at --------------------------------------------------------------------------------


async def everything_released(hosts: Hosts) -> None:
    """Wait until no process keeps memory for what another looks at."""

    @colocated_python
    def kept() -> int:
        import gc

        from aiocolocated.hosts import _parcels

        gc.collect()  # JAX lets go of some NumPy arrays only then
        return len(_parcels._sent)

    async with asyncio.timeout(10):
        while any(await gather(*on_each_host(kept, hosts))) or _parcels._sent:
            gc.collect()
            await asyncio.sleep(0.01)


async def test_arguments_of_calls_that_never_run_are_released(hosts: Hosts) -> None:
    """Calls that are cancelled on their host, or fail with what they depend on, unpack nothing."""

    @colocated_python
    def fail() -> None:
        raise KeyError("first")

    @colocated_python
    def take(x: Any, *others: Any) -> None:
        """Nothing to do."""

    big, here = np.ones(1 << 18, np.float32), hosts.devices[0]
    nap, take_there = (f.specialize(devices=here) for f in (colocated_python(time.sleep), take))
    first = nap(0.3)
    queued = take_there(big)
    while not queued._sent:
        await asyncio.sleep(0)
    queued.cancel()
    await first
    with pytest.raises(KeyError):
        await take_there(big, fail.specialize(devices=here)())
    await everything_released(hosts)


async def test_results_that_nobody_can_have_are_released(hosts: Hosts) -> None:
    """Of a call over two hosts one gives a large value, and the other fails."""

    @colocated_python
    def make_or_fail() -> Any:
        if jax.process_index() == 1:
            raise KeyError("second")
        return _Hidden(np.ones(1 << 18, np.float32))

    with pytest.raises(KeyError):
        await make_or_fail.specialize(devices=hosts.devices)()
    await everything_released(hosts)


async def test_a_gibibyte_that_nobody_fetches_stays(hosts: Hosts) -> None:
    """Only its shape crosses the wire."""

    @colocated_python
    def make() -> jax.Array:
        return jnp.zeros(1 << 28, jnp.float32)

    before = hosts[0].statistics().received_bytes
    x = await make.specialize(devices=hosts.devices[0])()
    assert x.nbytes == 1 << 30
    del x
    await everything_released(hosts)
    assert hosts[0].statistics().received_bytes - before < 100_000


async def test_a_deleted_leaf_is_named(hosts: Hosts) -> None:
    """Whether it was to be fetched, or to be moved to another host."""
    tree = {"a": np.ones(3, np.float32), "b": [np.ones(4, np.float32)]}
    there = await device_put(tree, hosts.devices[0])
    there["b"][0].delete()
    for transfer in (device_get(there), device_put(there, hosts.devices[2])):
        with pytest.raises(ArrayDeletedError, match=r"x\['b'\]\[0\]"):
            await transfer


async def test_many_arrays_move_together(hosts: Hosts) -> None:
    """From host to host: one question to the source, whatever their number."""
    there = await device_put([np.full(5, i, np.float32) for i in range(40)], hosts.devices[0])
    before = hosts[0].statistics().sent_messages
    moved = await device_put(there, hosts.devices[2])
    assert hosts[0].statistics().sent_messages - before < 10
    assert [x[0] for x in await device_get(moved)] == list(range(40))
