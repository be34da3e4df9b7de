# SPDX-License-Identifier: Apache-2.0
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false
"""Private JAX for several hosts: devices of other processes, and arrays without data.

Like ``_compat``, the only place for this. Everything here was run on JAX 0.10.0, 0.10.2 and 0.12.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core as _core, xla_bridge as _xla_bridge
from jax._src.array import ArrayImpl as _ArrayImpl

from aiocolocated._compat import Device
from aiocolocated._exceptions import HostError

# Ids of a process's CPU devices start at a multiple of it, in a cluster of `jax.distributed` and for
# `_client_by_topology`. All versions.
DEVICES_PER_PROCESS = 2048

# Ids of hosts' devices start far from those of any process. A client with no device of its own crashes
# the process (all versions), so each controller has one that nobody sees; its id is the last possible.
FIRST_DEVICE = 1 << 20
_OWN_DEVICE = (1 << 31) - DEVICES_PER_PROCESS

_TEST_TIMEOUT = 60.0
_tested: set[str] = set()  # ways; each once, because JAX's caches keep the devices of the test
_shapes: dict[tuple[tuple[int, ...], Any], Any] = {}


# --- two ways to a client with devices of other processes -------------------------------------------


def _client_by_mapping(mine: Sequence[int], process_of: Mapping[int, int]) -> Any:
    """A CPU client that is told of all devices. All versions so far, but nothing in JAX uses it."""
    from jaxlib._pathways import _create_cpu_client

    return _create_cpu_client(set(mine), dict(process_of))


def _client_by_topology(mine: Sequence[int], process_of: Mapping[int, int]) -> Any:
    """The CPU client of a process of a cluster, which there is none of. All versions so far.

    Such a client reads what devices there are from the key-value store of a service that a process of the
    cluster runs. Here it is a service that nobody else can reach, on a socket in a private directory,
    and it is over when the client is there.
    """
    from jax._src.lib import _jax, xla_client  # type: ignore[attr-defined]

    # The client computes the ids of its own devices from its number.
    number = mine[0] // DEVICES_PER_PROCESS
    first = number * DEVICES_PER_PROCESS
    if not number or list(mine) != list(range(first, first + len(mine))):
        raise ValueError(
            f"the devices of a process need ids one after the other, from a multiple of "
            f"{DEVICES_PER_PROCESS} that is not 0; got {list(mine[:9])}"
        )
    nodes: list[list[int]] = [[] for _ in range(max(process_of.values()) + 1)]
    for device, process in process_of.items():
        nodes[process].append(device)
    # A process's index is its position, whatever its number is.
    topology = b"".join(
        _bytes(1, _node(number if index == process_of[first] else number + 1 + index, ids))
        for index, ids in enumerate(nodes)
    )
    short = None if len(tempfile.gettempdir()) < 64 else "/tmp"  # a socket's path is of 100 bytes
    # Nobody misses a heartbeat, even if the process is stopped for a while just now: it would be killed.
    times = {"heartbeat_timeout": 24 * 3600, "shutdown_timeout": 30}
    with tempfile.TemporaryDirectory(prefix="aiocolocated-", dir=short) as folder:
        path = f"{folder}/topology"
        with socket.socket(socket.AF_UNIX) as probe:  # a service that cannot bind crashes JAX 0.10
            probe.bind(path)
        os.unlink(path)
        address = f"unix:{path}"
        service = _jax.get_distributed_runtime_service(address, 1, **times)
        try:
            store = _jax.get_distributed_runtime_client(
                address, 0, init_timeout=30, shutdown_on_destruction=False, **times
            )
            store.connect()
            try:
                store.key_value_set_bytes("cpu:global_topology/cpu", topology)
                return xla_client.make_cpu_client(
                    distributed_client=store,
                    node_id=number,  # not 0, or it would collect the topology from all processes
                    num_nodes=len(nodes) + 1,  # not 1, or it would not read it
                    num_devices=len(mine),
                    get_global_topology_timeout_minutes=1,
                )
            finally:
                store.shutdown()
        finally:
            service.shutdown()


def _node(number: int, devices: Iterable[int]) -> bytes:
    """One process in the topology, as an encoded protocol buffer.

    Fields of ``GlobalTopologyProto``: 1 nodes. Of ``LocalTopologyProto``: 1 node_id, 3 devices (2 boot_id
    would say which processes share a machine). Of ``DeviceProto``: 1 local_device_ordinal,
    4 global_device_id, 8 device_kind, 9 to_string, 10 debug_string.
    """
    return _number(1, number) + b"".join(
        _bytes(
            3,
            _number(1, ordinal)
            + _number(4, device)
            + _bytes(8, b"cpu")
            + _bytes(9, b"CpuDevice(id=%d)" % device)
            + _bytes(10, b"cpu:%d" % device),
        )
        for ordinal, device in enumerate(devices)
    )


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


_WAYS: dict[str, Callable[[Sequence[int], Mapping[int, int]], Any]] = {
    "mapping": _client_by_mapping,
    "topology": _client_by_topology,
}


def _first_that_works(
    ways: Iterable[str],
    mine: Sequence[int],
    process_of: Mapping[int, int],
    test: Callable[[Sequence[Device]], None] | None,
) -> tuple[list[Device], str, Any]:
    """All devices in the order of ``process_of``, the way that was taken, and the client."""
    errors: list[Exception] = []
    reasons: list[str] = []
    for way in ways:
        try:
            client = _WAYS[way](mine, process_of)
            devices = _devices_of(client, mine, process_of)
            if test is not None and way not in _tested:
                _run_in_time(test, devices)
                _tested.add(way)
        except Exception as error:
            errors.append(error)
            reasons.append(f"by a {way}: {type(error).__name__}: {error}")
        else:
            return devices, way, client
    raise HostError(
        f"JAX {jax.__version__} cannot describe the devices of other processes in a way that this version "
        f"of aiocolocated knows, so hosts cannot be used with it ({'; '.join(reasons)})"
    ) from ExceptionGroup("no way works", errors)


def _devices_of(client: Any, mine: Sequence[int], process_of: Mapping[int, int]) -> list[Device]:
    """All devices of a client; raises if they are not as they were described."""
    found = {device.id: device.process_index for device in client.devices()}
    _expect(found == process_of, f"the devices are {_some(found)}, not {_some(process_of)}")
    own = [device.id for device in client.local_devices()]
    _expect(own == list(mine), f"the process's own devices are {own[:9]}, not {list(mine[:9])}")
    index, expected = client.process_index(), process_of[mine[0]]
    _expect(index == expected, f"the process has index {index}, not {expected}")
    by_id = {device.id: device for device in client.devices()}
    return [by_id[device] for device in process_of]


def _some(process_of: Mapping[int, int]) -> str:
    return f"{len(process_of)} ({str(dict(list(process_of.items())[:9]))[1:-1]}...)"


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise RuntimeError(otherwise)


def _run_in_time(test: Callable[[Sequence[Device]], None], devices: Sequence[Device]) -> None:
    """Run a test in a thread, which is left behind if it hangs; contexts of this thread do not matter."""
    outcome: list[Exception | None] = []

    def run() -> None:
        try:
            test(devices)
        except Exception as error:
            outcome.append(error)
        else:
            outcome.append(None)

    thread = threading.Thread(target=run, name="aiocolocated-test", daemon=True)
    thread.start()
    thread.join(_TEST_TIMEOUT)
    if not outcome:
        raise TimeoutError(f"the test with handles hangs, for {_TEST_TIMEOUT:g} s")
    if outcome[0] is not None:
        raise outcome[0]


def _test_handles(devices: Sequence[Device]) -> None:
    """Raise if a handle does not behave: it has a shape and a sharding, and computing on it raises."""
    devices = devices[:2]
    mesh = jax.sharding.Mesh(np.array(devices, dtype=object), ("_",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    handle = make_handle((2,), np.dtype(np.float32), sharding)
    _expect(handle.shape == (2,), "a handle has another shape")
    _expect(handle.sharding is sharding, "a handle has another sharding")
    _expect(not handle.is_fully_addressable, "a handle counts as data of this process")
    _expect(not handle.addressable_shards, "a handle has shards")
    handle._aiocolocated = 1
    try:  # not to fetch it: that starts the backends of this process, which may lack what JAX looks for
        with jax.disable_jit(False):
            jax.jit(_double)(handle)
    except RuntimeError:
        return
    raise RuntimeError("a handle can be computed on")


def _double(x: Any) -> Any:
    return x + x


# --- what the library uses --------------------------------------------------------------------------


def detached_devices(process_of: Mapping[int, int]) -> tuple[list[Device], str]:
    """Devices of other processes: real ones for meshes and shardings, and nothing runs on them here.

    Args:
        process_of: the process index of each device id; indices are from 0.

    Returns:
        The devices, and the way they were made, for ``become_host``.

    Raises:
        HostError: this JAX cannot make them.
    """
    # The last index: the client keeps a list of all processes up to it.
    everything = {**process_of, _OWN_DEVICE: max(process_of.values()) + 1}
    devices, way, _ = _first_that_works(
        _WAYS, [_OWN_DEVICE], everything, lambda devices: _test_handles(devices[:-1])
    )
    return devices[:-1], way


def become_host(mine: Sequence[int], process_of: Mapping[int, int], way: str) -> None:
    """Make ``jax.devices()`` those of all hosts, of which this process owns some.

    Before JAX starts its CPU backend.

    Args:
        mine: the ids of this process's devices: one after the other, from a multiple of
            ``DEVICES_PER_PROCESS``.
        process_of: the process index of each device id.
        way: that of the controller, which is tried first.

    Raises:
        HostError: this JAX cannot do it.
    """
    assert not _xla_bridge.backends_are_initialized()
    ways = sorted(_WAYS, key=lambda other: other != way)
    _, _, client = _first_that_works(ways, mine, process_of, None)
    _xla_bridge.register_backend_factory("cpu", lambda: client, priority=0, fail_quietly=False)


def cluster_device(process: int, number: int) -> int:
    """The id that ``jax.distributed`` gives to a process's CPU device (all versions)."""
    return process * DEVICES_PER_PROCESS + number


def make_handle(shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding) -> Any:
    """A ``jax.Array`` without data, of devices of other processes."""
    key = (shape, dtype)
    aval = _shapes.get(key)
    if aval is None:
        if len(_shapes) >= 4096:
            _shapes.clear()
        aval = _shapes[key] = _core.ShapedArray(shape, dtype)
    return _ArrayImpl(aval, sharding, [], committed=True, _skip_checks=True)
