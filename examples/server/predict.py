# SPDX-License-Identifier: Apache-2.0
"""What one request does, with aiocolocated.

The two decorated functions run on hosts: on aiocolocated's worker threads in this process, or in
others. Calling one returns a future at once, and a future can be an argument of the next call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aiocolocated import (
    ColocatedFunction,
    TaskChannel,
    as_argument,
    colocated_python,
    open_task_channel,
    runtime,
)
from examples.server import model, work

if TYPE_CHECKING:
    import jax


@colocated_python
def decode(png: bytes) -> bytes:
    """Pre-processing. Few pixels are cheapest as a plain value: an array would stay on the host."""
    return work.decode_png(png).tobytes()


@colocated_python
def record(
    logits: npt.NDArray[np.float32], log_path: str, request_id: int, slow_disk: float
) -> work.Prediction:
    """Post-processing: read the answer off the logits, log it to disk, return plain Python.

    The logits are passed as a NumPy array, and arrive as a ``jax.Array``.
    """
    prediction = work.to_prediction(np.asarray(logits))
    work.append_line(log_path, request_id, prediction, slow_disk)
    return prediction


class Lane(NamedTuple):
    """A host, and the channel in which it decodes uploads, one after the other."""

    decoding: TaskChannel
    decode: ColocatedFunction[[bytes], bytes]
    record: ColocatedFunction[[npt.NDArray[np.float32], str, int, float], work.Prediction]


class Predictor:
    """Decode, infer and record, off the event loop.

    Args:
        params: of the model, on its device.
        log_path: the prediction log; the hosts write to it.
        hosts: CPU devices of this process or of others; requests take turns on them.
        slow_disk: seconds that a log write takes longer.
    """

    def __init__(
        self,
        params: model.Params,
        log_path: str,
        hosts: Sequence[jax.Device],
        *,
        slow_disk: float = 0.0,
    ) -> None:
        self._params = params
        self._log_path = log_path
        self._slow_disk = slow_disk
        # A call finds its host by its arrays. Plain values have no device, so it is named here.
        # Decoding needs the GIL nearly all the time. Two at once on a host would not be faster, and an
        # event loop beside them would have to wait for both. So the requests share a channel for it.
        self._lanes = [
            Lane(
                TaskChannel("decoding"),
                decode.specialize(devices=host),
                record.specialize(devices=host),
            )
            for host in hosts
        ]

    async def predict(self, png: bytes, request_id: int) -> work.Prediction:
        """Classify one picture.

        All three calls are queued at once. Each takes the future of the one before, so nothing
        comes back to the event loop in between. Decoding waits for its turn among all requests of a
        lane; the rest runs in a channel of this request's own, beside those of other requests.

        An error in one call skips the later ones and is raised here as itself. When this task is
        cancelled, what has not started never will, and the block waits for what has.
        """
        decoding, decode_there, record_there = self._lanes[request_id % len(self._lanes)]
        async with open_task_channel() as channel:
            pixels = decoding.submit_nowait(decode_there, png)
            logits = channel.run(model.infer, self._params, as_argument(pixels))
            return await record_there(
                as_argument(logits), self._log_path, request_id, self._slow_disk
            )

    async def warm_up(self) -> None:
        """Compile before the first request: tracing and compiling happen off the loop, too."""
        png = work.encode_png(np.zeros(64, np.float32))
        async with open_task_channel("warm-up") as channel:
            for _, decode_there, _ in self._lanes:
                pixels = decode_there(png)
                await channel.run(model.infer, self._params, as_argument(pixels))

    async def aclose(self) -> None:
        """Take no more calls, and finish those that are queued."""
        for lane in self._lanes:
            await lane.decoding.aclose()

    def statistics(self) -> dict[str, Any]:
        """What aiocolocated is doing right now."""
        lanes = [dataclasses.asdict(lane.decoding.statistics()) for lane in self._lanes]
        return {"runtime": dataclasses.asdict(runtime.statistics()), "decoding": lanes}
