# SPDX-License-Identifier: Apache-2.0
"""Leaves of arguments and results: which kinds there are, and how NumPy values are placed."""

from __future__ import annotations

import asyncio
import types
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

_ALIGNMENT = 64  # bytes; what XLA's CPU backend wants


class Late:
    """Stands for the result of a call on the same hosts that is still under way."""

    __slots__ = ("reference",)

    def __init__(self, body: Any) -> None:
        self.reference = body.future


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
    """Put a NumPy value on devices, its dtype kept; later changes of the value do not show.

    Raises:
        ArgumentError: JAX would change the dtype (64 bits with x64 off) or cannot hold it.
    """
    held = jax.dtypes.canonicalize_dtype(leaf.dtype)
    if held != leaf.dtype:
        raise ArgumentError(
            f"{where}: {leaf.dtype} would become {held}, because x64 is off. Convert it yourself, "
            "pass a Python value, or enable x64 (jax_scope(enable_x64=True))"
        )
    try:
        private = leaf if is_private(leaf) else private_copy(leaf)
        if not sharding.is_fully_addressable:
            return jax.make_array_from_callback(leaf.shape, sharding, lambda index: private[index])
        return jax.device_put(private, sharding)
    except RuntimeError:  # no memory, say: not the value's fault
        raise
    except Exception as error:  # no such dtype in JAX, masked, not divisible, ...
        # Its traceback would keep this frame, and so the leaf.
        raise ArgumentError(f"{where}: {error}") from error.with_traceback(None)


def is_private(leaf: Any) -> bool:
    """Whether nobody else writes to a NumPy value's memory; replaced where such memory comes from."""
    return False


def private_copy(leaf: Any) -> Any:
    """A copy of a NumPy value that nobody else writes to.

    ``device_put`` shares memory that happens to be aligned, and copies other memory later (JAX <=
    0.11.1): either way it may show what the caller, or the next body, writes into it. This copy is
    aligned, so that JAX takes it over and does not copy again (4 ms instead of 16 for 40 MB).
    """
    if type(leaf) is not np.ndarray or leaf.dtype.kind == "T" or leaf.dtype.hasobject:
        return leaf.copy()
    memory = np.empty(leaf.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    copy = memory[start : start + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)
    copy[...] = leaf
    return copy


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


# What would arrive unfinished, a forgotten await say, or has to stay where it is: type -> what to do.
_INSTEAD: dict[type[Any], str] = {
    types.CoroutineType: "await it first",
    types.GeneratorType: "take its items first",
    types.AsyncGeneratorType: "take its items first",
    asyncio.Future: "await it first; only array futures are waited for",
}
unfinished: tuple[type[Any], ...] = tuple(_INSTEAD)


def refuse(kind: type[Any], instead: str) -> None:
    """Take no instances of ``kind`` as arguments or results."""
    global unfinished
    _INSTEAD[kind] = instead
    unfinished = tuple(_INSTEAD)


def refused(leaf: Any, what: str) -> ArgumentError:
    """The error for an instance of ``unfinished``; ``what`` is or returned it."""
    if isinstance(leaf, types.CoroutineType):
        leaf.close()  # or Python says that it was never awaited
    instead = next(words for kind, words in _INSTEAD.items() if isinstance(leaf, kind))
    return ArgumentError(f"{what} {_a(type(leaf).__name__)}: {instead}")


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'AEIOUaeiou' else 'a'} {noun}"


def refuse_traced(name: str) -> TracedCallError:
    return TracedCallError(
        f"{name} was called while JAX traces (jit, vmap, grad, scan, ...). A colocated call is ordinary "
        "Python on concrete arrays: call it outside, or use jax.experimental.io_callback or "
        "jax.pure_callback inside."
    )


def refuse_argument(leaf: Any, where: str) -> None:
    if isinstance(leaf, unfinished):
        raise refused(leaf, f"an argument of the {where} is")
