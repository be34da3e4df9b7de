# SPDX-License-Identifier: Apache-2.0
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false
"""Private JAX for several hosts: devices of other processes, and arrays without data.

Like ``_compat``, the only place for this. Everything here was run on JAX 0.10.0, 0.10.2 and 0.12.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core as _core, xla_bridge as _xla_bridge
from jax._src.array import ArrayImpl as _ArrayImpl

from aiocolocated._compat import Device
from aiocolocated._exceptions import AiocolocatedError

# A client with no device of its own crashes the process (all versions), so each gets one that nobody
# sees. Ids of hosts' devices start far from those of any process.
_OWN_DEVICE = (1 << 31) - 2
FIRST_DEVICE = 1 << 20
_PER_PROCESS = (
    2048  # ids of a process's CPU devices in a cluster of `jax.distributed` start at its multiples
)
_shapes: dict[tuple[tuple[int, ...], Any], Any] = {}


def _create_client(mine: Iterable[int], process_of: Mapping[int, int]) -> Any:
    try:
        from jaxlib._pathways import _create_cpu_client
    except ImportError as error:
        raise AiocolocatedError(
            f"JAX {jax.__version__} cannot describe the devices of other processes: jaxlib has no "
            "_pathways._create_cpu_client. Hosts need JAX 0.10 to 0.12"
        ) from error
    return _create_cpu_client(set(mine), dict(process_of))


def detached_devices(process_of: Mapping[int, int]) -> list[Device]:
    """Devices of other processes: real ones for meshes and shardings, and nothing runs on them here.

    Args:
        process_of: the process index of each device id.

    Raises:
        AiocolocatedError: this JAX cannot make them.
    """
    client = _create_client([_OWN_DEVICE], {**process_of, _OWN_DEVICE: 1 << 20})
    by_id = {device.id: device for device in client.devices()}
    try:
        devices = [by_id[device_id] for device_id in process_of]
        assert all(d.process_index == process_of[d.id] for d in devices)
        _test_handles(devices)
    except Exception as error:
        raise AiocolocatedError(
            f"JAX {jax.__version__} describes devices of other processes in a way that this version of "
            "aiocolocated does not know; hosts cannot be used with it"
        ) from error
    return devices


def _test_handles(devices: Sequence[Device]) -> None:
    """Raise if a handle does not behave: it has a shape and a sharding, and computing on it raises."""
    mesh = jax.sharding.Mesh(np.array(devices, dtype=object), ("_",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    handle = make_handle((2,), np.dtype(np.float32), sharding)
    assert handle.shape == (2,)
    assert handle.sharding is sharding
    assert not handle.is_fully_addressable
    handle._aiocolocated = 1
    try:
        np.asarray(handle)
    except RuntimeError:
        return
    raise AssertionError("a handle has data")


def become_host(mine: Sequence[int], process_of: Mapping[int, int]) -> None:
    """Make ``jax.devices()`` those of all hosts, of which this process owns some.

    Before JAX starts its CPU backend.
    """
    assert not _xla_bridge.backends_are_initialized()
    _xla_bridge.register_backend_factory(
        "cpu", lambda: _create_client(mine, process_of), priority=0, fail_quietly=False
    )


def cluster_device(process: int, number: int) -> int:
    """The id that ``jax.distributed`` gives to a process's CPU device (all versions)."""
    return process * _PER_PROCESS + number


def make_handle(shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding) -> Any:
    """A ``jax.Array`` without data, of devices of other processes."""
    key = (shape, dtype)
    aval = _shapes.get(key)
    if aval is None:
        if len(_shapes) >= 4096:
            _shapes.clear()
        aval = _shapes[key] = _core.ShapedArray(shape, dtype)
    return _ArrayImpl(aval, sharding, [], committed=True, _skip_checks=True)
