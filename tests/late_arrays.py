# SPDX-License-Identifier: Apache-2.0
"""Arrays that stay uncomputed for as long as a test wants, made by real JAX programs."""

from __future__ import annotations

import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class LateError(Exception):
    """Why the computation failed; JAX only keeps its text, in a ``JaxRuntimeError``."""


def _expected(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], LateError)


# JAX logs the error with its traceback, and so with arrays that the test would seem to leak.
logging.getLogger("jax._src.callback").addFilter(_expected)

_lates: dict[int, Late] = {}  # until their arrays are computed


class Late:
    """Makes an array that is computed when :meth:`release` says so, or fails when :meth:`fail` does.

    Pass it to a body as an argument. At most seven may be pending at once: each occupies one of the
    threads of JAX's CPU client, which has as many as there are devices.
    """

    _count = 0

    def __init__(self) -> None:
        Late._count += 1
        self.number = Late._count
        self._fails = False
        self._lock = threading.Lock()
        self._thread = 0  # that dispatches
        self._dispatched = False
        self._early = False
        self._go = threading.Event()

    def array(self, x: jax.Array) -> jax.Array:
        """``x``, some time later: dispatched now, on the device or devices of ``x``."""
        # A host callback blocks the program, but JAX dispatches one only when it has returned if its
        # inputs are there already. So it gets its input from a matrix product, again if that was
        # done too early.
        _lates[self.number] = self
        work, hold = _programs(x)
        self._thread, steps = threading.get_ident(), 64
        while True:
            self._early = False
            array = hold(x, self.number, work(steps))
            with self._lock:
                if not self._early:
                    self._dispatched = True
                    return array
            steps *= 2

    def release(self) -> None:
        """Let the array be computed."""
        self._go.set()

    def fail(self) -> None:
        """Let its computation fail; on one device only, or JAX waits for ever for the others."""
        self._fails = True
        self._go.set()

    def _wait(self) -> None:
        here = threading.get_ident() == self._thread
        if here or not self._go.wait(0.05):
            with self._lock:
                if not self._dispatched:
                    self._early = True
                    return
        del _lates[self.number]
        if not self._go.wait(20):
            raise TimeoutError("nobody released the late array")
        if self._fails:
            raise LateError("the late array was told to fail")


def _hold(number: jax.Array, _: jax.Array) -> np.ndarray:
    _lates[int(number)]._wait()
    return np.zeros((), np.float32)


_made: dict[object, object] = {}


def _programs(x: jax.Array):
    """The two programs for the devices of ``x``."""
    devices = x.sharding.device_set
    key = frozenset(devices)
    if key not in _made:
        one = min(devices, key=lambda d: d.id)
        spread = x.sharding
        if len(devices) > 1:
            mesh = Mesh(np.array(sorted(devices, key=lambda d: d.id)), ("d",))
            spread = NamedSharding(mesh, PartitionSpec())

        def work(steps):
            ones = jnp.full((64, 64), 0.01, jnp.float32, device=spread)
            return jax.lax.fori_loop(0, steps, lambda _, y: y @ y, ones)[0, 0] * 0

        def hold(x, number, late):
            held = jax.pure_callback(
                _hold,
                jax.ShapeDtypeStruct((), jnp.float32),
                number,
                late,
                sharding=jax.sharding.SingleDeviceSharding(one),
            )
            return x + held.astype(x.dtype)

        _made[key] = jax.jit(work), jax.jit(hold)
    return _made[key]
