# SPDX-License-Identifier: Apache-2.0
"""The ways to call colocated Python from asyncio that are compared, around one trivial body.

All of them are fully specialized (input specs, output specs and devices given), so none infers
anything per call, and all of them call the very same body.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.experimental import colocated_python as jax_colocated

import aiocolocated

ON_LOOP = "JAX's call on the loop"
TO_THREAD = "asyncio.to_thread + JAX's call"
POOL = "ThreadPoolExecutor + JAX's call"
ONE_THREAD = "one-thread executor + JAX's call (ordered)"
ANYIO = "anyio.to_thread + JAX's call"
OURS = "aiocolocated (ordered)"
OURS_GATHER = "aiocolocated.gather (ordered)"


def identity(x: jax.Array) -> jax.Array:
    """The trivial body."""
    return x


@dataclasses.dataclass(frozen=True)
class Peers:
    """What one process compares.

    Attributes:
        x: the argument, f32[8] on one CPU device.
        jax_call: JAX's specialized colocated call of the body.
        ours: aiocolocated's specialized call of the body.
        pool: a thread pool of the size that ``asyncio.to_thread`` uses.
        one_thread: a pool of one thread, which keeps program order as a channel does.
    """

    x: jax.Array
    jax_call: Callable[[jax.Array], jax.Array]
    ours: aiocolocated.ColocatedFunction[[jax.Array], jax.Array]
    pool: ThreadPoolExecutor
    one_thread: ThreadPoolExecutor


def cpu_array(value: Any = None) -> jax.Array:
    """Commit a value (f32[8] by default) to the first CPU device."""
    if value is None:
        value = np.zeros(8, np.float32)
    array: jax.Array = jax.device_put(value, jax.local_devices(backend="cpu")[0])
    return array


def specialization(x: jax.Array) -> dict[str, Any]:
    """The arguments of ``specialize`` for functions that map ``x`` to something of its kind."""
    spec = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    return {
        "in_specs": ((spec,), {}),
        "out_specs_fn": lambda spec: spec,
        "devices": tuple(x.devices()),
    }


@contextlib.contextmanager
def peers() -> Iterator[Peers]:
    """Set the peers up, called once each, and take their threads down afterwards."""
    x = cpu_array()
    jax_call = jax_colocated.colocated_python(identity).specialize(**specialization(x))
    ours = aiocolocated.colocated_python(identity).specialize(**specialization(x))
    jax_call(x)
    with ThreadPoolExecutor() as pool, ThreadPoolExecutor(1) as one_thread:
        yield Peers(x, jax_call, ours, pool, one_thread)
