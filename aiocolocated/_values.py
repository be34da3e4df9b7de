# SPDX-License-Identifier: Apache-2.0
"""Leaves of arguments and results: which kinds there are, and how NumPy values are placed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from aiocolocated import _compat
from aiocolocated._exceptions import ArgumentError, TracedCallError
from aiocolocated._specs import Devices

ArrayImpl = _compat.ArrayImpl


def is_numpy(leaf: Any) -> bool:
    """Whether a leaf is a NumPy value that becomes a JAX array.

    Object and byte/unicode arrays have no JAX counterpart and stay plain Python values.
    """
    return isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "biufcVT"


def placement(devices: Devices) -> jax.sharding.Sharding:
    """Where a NumPy value goes: on the device, or replicated over all of them."""
    if len(devices) == 1:
        return SingleDeviceSharding(devices[0])
    return NamedSharding(Mesh(np.array(devices, dtype=object), ("_",)), PartitionSpec())


def place(leaf: Any, sharding: jax.sharding.Sharding, where: str) -> Any:
    """Put a NumPy value on devices, its dtype kept.

    Raises:
        ArgumentError: JAX would change the dtype (64 bits with x64 off) or cannot hold it.
    """
    try:
        held = jax.dtypes.canonicalize_dtype(leaf.dtype)
    except TypeError as error:
        raise ArgumentError(f"{where}: JAX has no arrays of dtype {leaf.dtype}") from error
    if held != leaf.dtype:
        raise ArgumentError(
            f"{where}: {leaf.dtype} would become {held}, because x64 is off. Convert it yourself, "
            "pass a Python value, or enable x64 (jax_scope(enable_x64=True))"
        )
    return jax.device_put(leaf, sharding)


def array_of(leaf: Any) -> Any:
    """The concrete array to wait for behind a leaf, or ``None`` if it is no array."""
    if type(leaf) is ArrayImpl:
        return leaf
    if isinstance(leaf, jax.Array):
        if isinstance(leaf, Tracer):
            return None
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return _compat.key_data(leaf)
    return None


def refuse_traced(name: str) -> TracedCallError:
    return TracedCallError(
        f"colocated function {name} was called while JAX traces (jit, vmap, grad, scan, ...). It runs "
        "ordinary Python on concrete arrays: call it outside, or use jax.experimental.io_callback or "
        "jax.pure_callback inside."
    )
