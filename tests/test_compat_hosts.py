# SPDX-License-Identifier: Apache-2.0
"""Devices of other processes, made in each of the two ways: nobody can tell which one was taken."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from aiocolocated import (
    HostError,
    Hosts,
    _compat_hosts,
    colocated_python,
    device_get,
    device_put,
    open_hosts,
)

pytestmark = pytest.mark.timeout(60)

FIRST = 1 << 21  # far from what other tests use
BLOCK = _compat_hosts.DEVICES_PER_PROCESS
PROCESS_OF = {FIRST + BLOCK * process + n: process for process in range(3) for n in range(4)}
WAYS = ["mapping", "topology"]


class Forced(pytest.MonkeyPatch):
    """While it is entered, detached devices are made in one way, or there is no such JAX."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def __enter__(self) -> Forced:
        if self.way == "mapping":
            pytest.importorskip("jaxlib._pathways")
        else:
            self.setitem(sys.modules, "jaxlib._pathways", None)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.undo()


def make(way: str, process_of: dict[int, int]) -> list[Any]:
    with Forced(way):
        devices, taken = _compat_hosts.detached_devices(process_of)
    assert taken == way
    return devices


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    kept = make("topology", PROCESS_OF)  # as long as gRPC is in use, it has a few descriptors
    yield request.param
    del kept


@pytest.fixture(scope="module")
def devices(way: str) -> list[Any]:
    return make(way, PROCESS_OF)


def mesh_of(devices: list[Any]) -> Mesh:
    return Mesh(np.array(devices, dtype=object).reshape(3, 4), ("host", "x"))


# --- devices ----------------------------------------------------------------------------------------


def test_devices_are_those_that_were_asked_for(devices: list[Any]) -> None:
    """Ids and process indices, in the order of the mapping."""
    assert {d.id: d.process_index for d in devices} == PROCESS_OF
    assert [d.id for d in devices] == list(PROCESS_OF)
    assert {(d.platform, d.device_kind) for d in devices} == {("cpu", "cpu")}
    assert all(isinstance(d, jax.Device) for d in devices)


def test_devices_in_the_order_of_the_mapping(way: str) -> None:
    reverse = dict(reversed(PROCESS_OF.items()))
    assert [d.id for d in make(way, reverse)] == list(reverse)


def test_ids_need_no_order(way: str) -> None:
    """Any ids, and several processes in one block: those of `jax.distributed`, for instance."""
    for process_of in ({0: 0, 1: 0, BLOCK: 1}, {7: 1, 3: 0, FIRST: 2}, {FIRST: 0, FIRST + 1: 1}):
        made = make(way, process_of)
        assert {d.id: d.process_index for d in made} == process_of


def test_the_process_of_the_devices_is_another(devices: list[Any]) -> None:
    """The client's own device, which nobody sees, is of no host."""
    assert devices[0].client.process_index() == 3
    assert not set(devices) & set(devices[0].client.local_devices())
    assert all(d.default_memory().kind == "device" for d in devices)


def test_the_devices_of_this_process_stay(way: str) -> None:
    """JAX does not notice."""
    before = jax.devices(), jax.local_devices(), jax.process_index(), jax.process_count()
    made = make(way, PROCESS_OF)
    assert before == (
        jax.devices(),
        jax.local_devices(),
        jax.process_index(),
        jax.process_count(),
    )
    assert not set(made) & set(jax.devices())
    assert jnp.arange(3).sum() == 3


def test_many_devices_are_quick(way: str) -> None:
    """4000 devices of 500 hosts."""
    process_of = {FIRST + BLOCK * p + n: p for p in range(500) for n in range(8)}
    start = time.perf_counter()
    made = make(way, process_of)
    assert time.perf_counter() - start < 5.0
    sharding = NamedSharding(Mesh(np.array(made, dtype=object), ("x",)), P("x"))
    handle = _compat_hosts.make_handle((8000,), np.dtype(np.float32), sharding)
    assert len(handle.sharding.device_set) == 4000
    jax.clear_caches()


def _counts() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_devices_that_are_dropped_leave_nothing(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread, descriptor or file, nor a port while they are there."""
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        before = _counts()
        sockets = _sockets()
        for _ in range(20):
            made = make(way, PROCESS_OF)
            assert _sockets() <= sockets
            assert os.listdir(folder) == []
            del made
            gc.collect()
        deadline = time.monotonic() + 10
        while _counts() > before and time.monotonic() < deadline:
            time.sleep(0.01)
        threads, descriptors = _counts()
        assert threads <= before[0]
        assert descriptors <= before[1]


def _sockets() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # of the listing itself
            continue
    return {path for path in found if path.startswith("socket:")}


# --- meshes, shardings, handles ---------------------------------------------------------------------


def test_shardings(devices: list[Any]) -> None:
    """Equal if they should be, and of no device here."""
    mesh = mesh_of(devices)
    assert mesh is mesh_of(devices)
    sharding = NamedSharding(mesh, P("host", "x"))
    assert sharding == NamedSharding(mesh, P("host", "x"))
    assert hash(sharding) == hash(NamedSharding(mesh, P("host", "x")))
    assert sharding != NamedSharding(mesh, P("host"))
    assert sharding.shard_shape((6, 8)) == (2, 2)
    assert not sharding.is_fully_addressable
    assert sharding.addressable_devices == set()
    parts = sharding.devices_indices_map((6, 8))
    assert {device.id: index for device, index in parts.items()} == {
        FIRST + BLOCK * i + j: (slice(2 * i, 2 * i + 2), slice(2 * j, 2 * j + 2))
        for i in range(3)
        for j in range(4)
    }


def test_handles(devices: list[Any]) -> None:
    """A shape, a dtype and a sharding, and no data; they can be marked and watched."""
    sharding = NamedSharding(mesh_of(devices), P("host"))
    handle = _compat_hosts.make_handle((6, 8), np.dtype(jnp.bfloat16), sharding)
    assert isinstance(handle, jax.Array)
    assert handle.shape == (6, 8)
    assert handle.dtype == jnp.bfloat16
    assert handle.sharding is sharding
    assert handle.committed
    assert handle.addressable_shards == []
    assert len(handle.global_shards) == 12
    assert not handle.is_fully_addressable
    assert handle.is_ready()
    assert not handle.is_deleted()
    assert "(6, 8)" in repr(handle)
    handle._aiocolocated = "mark"
    assert handle._aiocolocated == "mark"
    reference = weakref.ref(handle)
    del handle
    assert reference() is None


def test_handles_of_one_device(devices: list[Any]) -> None:
    single = NamedSharding(Mesh(np.array(devices[:1], dtype=object), ("x",)), P())
    handle = _compat_hosts.make_handle((), np.dtype(np.int32), single)
    assert not handle.is_fully_addressable
    with pytest.raises(RuntimeError, match="non-addressable"):
        int(handle)


def test_handles_of_keys(devices: list[Any]) -> None:
    """Typed keys are wrapped without computing anything."""
    sharding = NamedSharding(mesh_of(devices), P("host", None))
    handle = _compat_hosts.make_handle((3, 2), np.dtype(np.uint32), sharding)
    key = jax.random.wrap_key_data(handle)
    assert key.shape == (3,)
    assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    assert key.sharding.device_set == set(devices)


USES: dict[str, Callable[[Any], Any]] = {
    "fetch": np.asarray,
    "device_get": jax.device_get,
    "add": lambda x: x + 1,
    "index": lambda x: x[0],
    "sum": jnp.sum,
    "copy": jnp.copy,
    "with an array of this process": lambda x: x + jnp.ones(x.shape),
    "jit": lambda x: jax.jit(lambda y: y * 2)(x),
    "compile": lambda x: jax.jit(lambda y: y * 3).lower(x).compile(),
    "grad": lambda x: jax.grad(lambda y: (y * y).sum())(x),
    "shard_map": lambda x: jax.shard_map(
        lambda y: jax.lax.psum(y, ("host", "x")),
        mesh=x.sharding.mesh,
        in_specs=P("host"),
        out_specs=P(),
    )(x),
    "results there": lambda x: jax.jit(lambda: jnp.ones(6), out_shardings=x.sharding)(),
    "numpy to there": lambda x: jax.device_put(np.ones(6), next(iter(x.sharding.device_set))) + 1,
    "to a device of this process": lambda x: jax.device_put(x, jax.devices()[0]),
}


@pytest.mark.parametrize("use", USES)
def test_computing_on_a_handle_raises(devices: list[Any], use: str) -> None:
    """At once; it neither hangs nor crashes, and computing goes on here."""
    sharding = NamedSharding(mesh_of(devices), P("host"))
    handle = _compat_hosts.make_handle((6,), np.dtype(np.float32), sharding)
    start = time.perf_counter()
    with pytest.raises((RuntimeError, ValueError)):
        USES[use](handle)
    assert time.perf_counter() - start < 10.0
    assert float(jnp.ones(3).sum()) == 3.0


# --- choosing a way ---------------------------------------------------------------------------------


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no way had passed the test with handles in this process."""
    monkeypatch.setattr(_compat_hosts, "_tested", set())


def test_no_way_works(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says which JAX it is, and why neither."""
    from jaxlib import _jax

    monkeypatch.delattr(_jax, "get_distributed_runtime_service")
    with Forced("topology"), pytest.raises(HostError) as raised:
        _compat_hosts.detached_devices(PROCESS_OF)
    message = str(raised.value)
    assert f"JAX {jax.__version__} cannot describe the devices of other processes" in message
    assert "by a mapping: ModuleNotFoundError" in message
    assert "by a topology: AttributeError" in message
    assert "get_distributed_runtime_service" in message
    assert isinstance(raised.value.__cause__, ExceptionGroup)
    assert len(raised.value.__cause__.exceptions) == 2


@pytest.mark.usefixtures("untested")
def test_a_way_that_fails_the_test_is_not_taken(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one whose devices are others."""
    real = _compat_hosts._test_handles
    clients: list[Any] = []

    def test(devices: Any) -> None:
        clients.append(devices[0].client)
        if len(clients) == 1:
            raise RuntimeError("a handle has wings")
        real(devices)

    monkeypatch.setattr(_compat_hosts, "_test_handles", test)
    with Forced("mapping"):
        devices, taken = _compat_hosts.detached_devices(PROCESS_OF)
    assert taken == "topology"
    assert devices[0].client is clients[1]

    def other(mine: Any, process_of: Any) -> Any:
        return clients[1]

    monkeypatch.setitem(_compat_hosts._WAYS, "mapping", other)
    few = {FIRST: 0, FIRST + BLOCK: 1}
    devices, taken = _compat_hosts.detached_devices(few)
    assert taken == "topology"
    assert [d.id for d in devices] == list(few)


@pytest.mark.usefixtures("untested")
def test_a_way_that_hangs_is_not_taken(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its test is left behind."""
    over = threading.Event()
    monkeypatch.setattr(_compat_hosts, "_TEST_TIMEOUT", 0.05)
    monkeypatch.setattr(_compat_hosts, "_test_handles", lambda devices: over.wait(30))
    with pytest.raises(HostError, match=r"by a topology: TimeoutError: the test .* hangs"):
        _compat_hosts.detached_devices(PROCESS_OF)
    over.set()


def test_ids_of_own_devices() -> None:
    """They follow each other from a multiple of what a process may have, or a host cannot have them."""
    for mine in ([FIRST + 1], [FIRST, FIRST + 2], [0, 1], [FIRST + 1, FIRST]):
        with pytest.raises(ValueError, match="one after the other"):
            _compat_hosts._client_by_topology(mine, dict.fromkeys(mine, 0))


def test_numbers_of_protocol_buffers() -> None:
    """Seven bits in each byte, the lowest first."""
    assert _compat_hosts._varint(0) == b"\x00"
    assert _compat_hosts._varint(127) == b"\x7f"
    assert _compat_hosts._varint(300) == b"\xac\x02"
    assert _compat_hosts._number(4, 1) == b"\x20\x01"
    assert _compat_hosts._bytes(8, b"cpu") == b"\x42\x03cpu"


# --- hosts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "absent", "n"),
    [
        pytest.param("mapping", "", 2, id="mapping"),
        pytest.param("topology", "", 2, id="topology"),
        pytest.param("topology", "", 1, id="alone"),
        pytest.param("mapping", "jaxlib._pathways", 2, id="other"),
    ],
)
def test_become_host(run_script: Callable[..., Any], told: str, absent: str, n: int) -> None:
    """The devices of all hosts are there, and this process computes on its own, only."""
    script = f"""
        import sys
        if {absent!r}:
            sys.modules[{absent!r}] = None
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        from aiocolocated import _compat_hosts

        n, block = {n}, _compat_hosts.DEVICES_PER_PROCESS
        process_of = {{{FIRST} + block * i + j: i for i in range(n) for j in range(2)}}
        mine = [device for device, process in process_of.items() if process == n - 1]
        jax.config.update("jax_platforms", "cpu")
        _compat_hosts.become_host(mine, process_of, {told!r})
        assert {{d.id: d.process_index for d in jax.devices()}} == process_of
        assert [d.id for d in jax.local_devices()] == mine
        assert (jax.process_index(), jax.process_count()) == (n - 1, n)

        x = jnp.arange(4.0)
        assert x.devices() == {{jax.local_devices()[0]}}
        assert float((x + 1).sum()) == 10.0
        here = Mesh(np.array(jax.local_devices()), ("x",))
        y = jax.device_put(x, NamedSharding(here, P("x")))
        total = jax.shard_map(
            lambda a: jax.lax.psum(a.sum(), "x"), mesh=here, in_specs=P("x"), out_specs=P()
        )
        assert float(jax.jit(total)(y)) == 6.0
        shape = jax.ShapeDtypeStruct((4,), np.float32)
        assert jax.pure_callback(lambda a: np.asarray(a) * 2, shape, x).tolist() == [0, 2, 4, 6]

        everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
        parts = [jax.device_put(np.ones(2, np.float32), d) for d in jax.local_devices()]
        z = jax.make_array_from_single_device_arrays((4 * n,), everywhere, parts)
        assert len(z.addressable_shards) == 2 and len(z.global_shards) == 2 * n
        try:
            sum_of = jax.jit(jnp.sum)(z)
        except RuntimeError:
            assert n > 1
        else:
            assert n == 1 and float(sum_of) == 4.0
        mapped = sys.modules.get("jaxlib._pathways") is not None
        assert mapped == ({told!r} == "mapping" and not {absent!r})
    """
    finished = run_script(script).check()
    assert finished.stderr == ""


def test_become_host_in_no_way(run_script: Callable[..., Any]) -> None:
    """The error is that of a controller."""
    run_script(
        f"""
        import sys
        sys.modules["jaxlib._pathways"] = None
        from jaxlib import _jax
        del _jax.get_distributed_runtime_client
        from aiocolocated import HostError, _compat_hosts
        try:
            _compat_hosts.become_host([{FIRST}], {{{FIRST}: 0}}, "mapping")
        except HostError as error:
            assert "by a mapping" in str(error) and "by a topology" in str(error), error
        else:
            raise AssertionError
        """
    ).check()


@colocated_python
def double(x: Any) -> Any:
    parts = [shard.data * 2 for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


@colocated_python
def seen() -> tuple[int, list[int], bool]:
    mapped = sys.modules.get("jaxlib._pathways") is not None
    return jax.process_index(), [device.id for device in jax.devices()], mapped


@pytest.fixture(scope="module")
def hosts(way: str) -> Iterator[Hosts]:
    pytest.importorskip("zmq")
    with Forced(way), open_hosts("processes", n=2, cpu_devices=2) as opened:
        yield opened


@pytest.mark.asyncio
async def test_hosts_go_the_way_of_the_controller(hosts: Hosts, way: str) -> None:
    """And nothing else is different."""
    for index, host in enumerate(hosts):
        assert [d.process_index for d in host.devices] == [index, index]
        where = seen.specialize(devices=host.devices[:1])
        ids = [device.id for device in hosts.devices]
        assert await where() == (index, ids, way == "mapping")


@pytest.mark.asyncio
async def test_values_there_and_back(hosts: Hosts) -> None:
    """A call over two hosts, and parts of its arrays on each."""
    value = np.arange(32, dtype=np.float32).reshape(8, 4)
    mesh = hosts.mesh((2, 2), ("host", "x"))
    for spec in (P("host", "x"), P("host"), P(None, "x"), P()):
        x = await device_put(value, NamedSharding(mesh, spec))
        y = await double(x)
        assert y.sharding == x.sharding
        np.testing.assert_array_equal(await device_get(y), 2 * value)
        moved = await device_put(y, hosts[1].devices[1])
        np.testing.assert_array_equal(await device_get(moved), 2 * value)


@pytest.mark.asyncio
async def test_restarted_host(way: str) -> None:
    """It has the same devices again."""
    pytest.importorskip("zmq")
    value = np.ones((4, 4), np.float32)
    with Forced(way):
        async with open_hosts("processes", n=2) as hosts:
            await hosts.restart(0)
            x = await device_put(value, NamedSharding(hosts.mesh((2,), ("host",)), P("host")))
            np.testing.assert_array_equal(await device_get(await double(x)), 2 * value)


@colocated_python
def total(x: Any) -> Any:
    return jax.jit(jnp.sum)(x)


@pytest.mark.asyncio
async def test_collectives(way: str) -> None:
    """The ids are those of a cluster then."""
    pytest.importorskip("zmq")
    with Forced(way):
        async with open_hosts(n=2, cpu_devices=1, collectives=True) as hosts:
            assert [d.id for d in hosts.devices] == [0, BLOCK]
            sharding = NamedSharding(hosts.mesh((2,), ("x",)), P("x"))
            x = await device_put(np.arange(4, dtype=np.float32), sharding)
            assert float(await device_get(await total(x))) == 6.0
