# SPDX-License-Identifier: Apache-2.0
"""What one request does, with aiocolocated.

The two decorated functions run on the hosts of the model's devices, on aiocolocated's worker
threads. Calling one returns a future at once, and a future can be an argument of the next call.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from aiocolocated import (
    TaskChannel,
    as_argument,
    colocated_cpu_devices,
    colocated_python,
    open_task_channel,
    runtime,
)
from examples.server import model, work


@colocated_python
def decode(png: bytes) -> npt.NDArray[np.float32]:
    """Pre-processing. ``bytes`` go in as they are; the NumPy result arrives as a ``jax.Array``."""
    return work.decode_png(png)


@colocated_python
def record(logits: jax.Array, log_path: str, request_id: int, slow_disk: float) -> work.Prediction:
    """Post-processing: read the answer off the logits, log it to disk, return plain Python."""
    prediction = work.to_prediction(np.asarray(logits))
    work.append_line(log_path, request_id, prediction, slow_disk)
    return prediction


class Predictor:
    """Decode, infer and record, off the event loop."""

    def __init__(self, params: model.Params, log_path: str, *, slow_disk: float = 0.0) -> None:
        self._params = params
        self._log_path = log_path
        self._slow_disk = slow_disk
        (self._host,) = colocated_cpu_devices(jax.devices()[:1])
        # A call finds its host by its arrays. `bytes` have no device, so it is named here.
        self._decode = decode.specialize(devices=[self._host])
        # Decoding needs the GIL nearly all the time. Two at once would not be faster and the event
        # loop would have to wait for both, so all requests share one channel for it.
        self._decoding = TaskChannel("decoding")

    async def predict(self, png: bytes, request_id: int) -> work.Prediction:
        """Classify one picture.

        All three calls are queued at once. Each takes the future of the one before, so nothing
        comes back to the event loop in between. Decoding waits for its turn among all requests;
        the rest runs in a channel of this request's own, beside those of other requests.

        An error in one call skips the later ones and is raised here as itself. When this task is
        cancelled, what has not started never will, and the block waits for what has.
        """
        async with open_task_channel() as channel:
            pixels = self._decoding.submit_nowait(self._decode, png)
            logits = channel.run(model.infer, self._params, as_argument(pixels), self._host)
            return await record(as_argument(logits), self._log_path, request_id, self._slow_disk)

    async def warm_up(self) -> None:
        """Compile before the first request: tracing and compiling happen off the loop, too."""
        async with open_task_channel("warm-up") as channel:
            pixels = self._decode(work.encode_png(np.zeros(64, np.float32)))
            await channel.run(model.infer, self._params, as_argument(pixels), self._host)

    async def aclose(self) -> None:
        """Take no more calls, and finish those that are queued."""
        await self._decoding.aclose()

    def statistics(self) -> dict[str, Any]:
        """What aiocolocated is doing right now."""
        return {
            "runtime": dataclasses.asdict(runtime.statistics()),
            "decoding": dataclasses.asdict(self._decoding.statistics()),
        }
