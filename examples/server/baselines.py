# SPDX-License-Identifier: Apache-2.0
"""The same work with ``jax.experimental.colocated_python``, on the event loop and in threads.

This is what a JAX user writes without aiocolocated. Colocated functions of plain JAX accept and
return ``jax.Array``s only, so the PNG travels as ``uint8`` and the answer comes back as numbers.
"""

from __future__ import annotations

import asyncio
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.experimental import colocated_python as jax_colocated_python

from examples.server import model, work


class PlainJaxPredictor:
    """Decode, infer and record with plain JAX, either inline or through ``asyncio.to_thread``."""

    def __init__(
        self,
        params: model.Params,
        log_path: str,
        *,
        to_thread: bool,
        slow_disk: float = 0.0,
    ) -> None:
        self._params = params
        self._to_thread = to_thread
        (self._host,) = jax_colocated_python.colocated_cpu_devices(jax.devices()[:1])

        def decode(data: jax.Array) -> jax.Array:
            return jnp.asarray(work.decode_png(np.asarray(data).tobytes()))

        def record(logits: jax.Array, request_id: jax.Array) -> tuple[jax.Array, jax.Array]:
            prediction = work.to_prediction(np.asarray(logits))
            work.append_line(log_path, int(request_id), prediction, slow_disk)
            return jnp.asarray(prediction["digit"]), jnp.asarray(prediction["confidence"])

        self._decode = jax_colocated_python.colocated_python(decode)
        self._record = jax_colocated_python.colocated_python(record)

    async def predict(self, png: bytes, request_id: int) -> work.Prediction:
        """Classify one picture; blocks the event loop unless ``to_thread``."""
        if self._to_thread:
            # One hop for the whole request: the cheapest way to do it.
            return await asyncio.to_thread(self._predict, png, request_id)
        return self._predict(png, request_id)

    def _predict(self, png: bytes, request_id: int) -> work.Prediction:
        logits = self._infer(self._decode(jax.device_put(_padded(png), self._host)))
        number = jax.device_put(np.uint32(request_id), self._host)
        digit, confidence = self._record(logits, number)
        return {"digit": int(digit), "confidence": round(float(confidence), 4)}

    async def warm_up(self) -> None:
        """Compile before the first request (on the loop: it is not serving yet)."""
        png = _padded(work.encode_png(np.zeros(64, np.float32)))
        self._infer(self._decode(jax.device_put(png, self._host)))

    def _infer(self, pixels: jax.Array) -> jax.Array:
        """To the device of the model and back; on a CPU-only machine ``device_put`` does nothing."""
        pixels = jax.device_put(pixels, self._params["w1"].sharding)
        logits: jax.Array = jax.device_put(model.forward(self._params, pixels), self._host)
        return logits

    async def aclose(self) -> None:
        """Nothing to close."""

    def statistics(self) -> dict[str, Any]:
        """Plain JAX counts nothing."""
        return {}


def _padded(png: bytes) -> npt.NDArray[np.uint8]:
    """The bytes as ``u8[n]``, zero-padded to 64 KiB or the next power of two.

    Each new shape costs plain JAX another specialization (milliseconds); PNG readers stop at the
    end mark and never see the padding.
    """
    size = max(1 << 16, 1 << (len(png) - 1).bit_length())
    return np.frombuffer(png.ljust(size, b"\0"), np.uint8)
