# SPDX-License-Identifier: Apache-2.0
"""The CPU devices beside accelerators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import jax

from aiocolocated import _compat, _specs
from aiocolocated._exceptions import SpecError


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
