# SPDX-License-Identifier: Apache-2.0
"""The CPU devices beside accelerators, and one device of each host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import jax

from aiocolocated import _compat, _specs
from aiocolocated._exceptions import SpecError
from aiocolocated.hosts.controller import Hosts
from aiocolocated.hosts.remote import link_of


@overload
def colocated_cpu_devices(devices_or_mesh: jax.sharding.Mesh) -> jax.sharding.Mesh: ...
@overload
def colocated_cpu_devices(
    devices_or_mesh: Sequence[_compat.Device],
) -> tuple[_compat.Device, ...]: ...
def colocated_cpu_devices(devices_or_mesh: Any) -> Any:
    """The CPU devices that sit beside some devices, in the same order or mesh.

    Args:
        devices_or_mesh: devices, or a mesh; CPU devices are their own.

    Returns:
        A tuple of CPU devices, or a mesh of the same shape and axis names.

    Raises:
        SpecError: there are too few CPU devices beside them. JAX makes as many as
            ``jax_num_cpu_devices`` (or ``JAX_NUM_CPU_DEVICES``) says when its CPU backend starts.

    Source: ``jax.experimental.colocated_python.colocated_cpu_devices`` (JAX 0.10).

    Example:
        >>> cpus = colocated_cpu_devices(jax.devices())

    .. versionadded:: 0.1
    """
    devices = _specs.as_devices(devices_or_mesh)
    is_mesh = isinstance(devices_or_mesh, jax.sharding.Mesh)
    if not is_mesh:
        devices_or_mesh = devices
    if all(d.platform == "cpu" for d in devices):
        return devices_or_mesh  # JAX would give the first ones of the process
    try:
        found = _compat.colocated_cpu_devices(devices_or_mesh)
        return found if is_mesh else tuple(found)
    except Exception as error:
        cpus = len(jax.devices("cpu"))
        raise SpecError(
            f"no CPU devices are known beside {devices_or_mesh}: {error}. This process has {cpus} CPU "
            "devices; before JAX starts, set jax.config.update('jax_num_cpu_devices', n) with at "
            "least one for each accelerator of the process"
        ) from error


def one_device_per_host(devices: Any) -> tuple[_compat.Device, ...]:
    """The first of the given devices on each host: for calls that run once on every host.

    Args:
        devices: devices, a mesh, or the hosts of :func:`open_hosts`.

    Returns:
        Devices, in the order in which their hosts first appear.

    Raises:
        SpecError: ``devices`` are none.

    Example:
        >>> ask = newest_step.specialize(devices=one_device_per_host(mesh), reduce="list")
        >>> steps = await ask()                    # one for each host

    .. versionadded:: 0.4
    """
    first: dict[Any, _compat.Device] = {}
    for device in devices.devices if isinstance(devices, Hosts) else _specs.as_devices(devices):
        first.setdefault(link_of(device) or device.process_index, device)
    return tuple(first.values())


def spread_over(devices: Any) -> tuple[_compat.Device, ...]:
    """The devices that independent calls are spread over: those given, or one of each host."""
    return (
        one_device_per_host(devices) if isinstance(devices, Hosts) else _specs.as_devices(devices)
    )
