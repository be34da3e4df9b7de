# SPDX-License-Identifier: Apache-2.0
"""An asyncio data pipeline over image files (``python -m examples.pipeline``).

Files are read, decoded on the host of the devices, batched, put on the devices and prefetched
while the consumer computes. The order of the files is kept, memory is bounded, an error names its
file, and leaving the block early stops everything.

``open_batches`` is the part to copy. ``__main__.py`` is a consumer, and has the same work as a
plain loop for comparison; ``tiles.py`` makes the image files.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import anyio
import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from PIL import Image

from aiocolocated import TaskGroup, colocated_cpu_devices, colocated_python, open_task_channel

Pixels = npt.NDArray[np.uint8]


class Batch(NamedTuple):
    """Images that are ready on the devices.

    Attributes:
        images: ``u8[batch, height, width, 3]``, split over the devices along ``batch``. Rows
            beyond the names are zeros: the last batch has the shape of the others, so that one
            compiled program serves all.
        names: the names of the files, in order.
    """

    images: jax.Array
    names: list[str]


@dataclasses.dataclass
class Meter:
    """Counts the images that are in memory: decoding, decoded, batched, or with the consumer."""

    now: int = 0
    peak: int = 0

    def add(self, images: int) -> None:
        """Count more images, or with a negative number fewer."""
        self.now += images
        self.peak = max(self.peak, self.now)


def decode(data: bytes, name: str) -> Pixels:
    """Decode a JPEG to ``u8[height, width, 3]``.

    Raises:
        ValueError: the data is no JPEG or is damaged; the text names the file.
    """
    try:
        with Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError) as exc:
        raise ValueError(f"{name} is not a readable JPEG") from exc


def stack(images: Sequence[npt.ArrayLike], size: int) -> Pixels:
    """Copy images of one shape into ``u8[size, height, width, 3]``, with zeros at the end."""
    batch = np.zeros((size, *np.shape(images[0])), np.uint8)
    for row, image in zip(batch, images, strict=False):
        row[...] = image
    return batch


def split_over(devices: Sequence[jax.Device]) -> NamedSharding:
    """How a batch lies on the devices: each has an equal part of the images."""
    return NamedSharding(Mesh(devices, ("batch",)), PartitionSpec("batch"))


decode_on_host = colocated_python(decode)
stack_on_host = colocated_python(stack)


@asynccontextmanager
async def open_batches(
    paths: Sequence[Path],
    size: int,
    devices: Sequence[jax.Device],
    *,
    prefetch: int = 2,
    decoders: int = 4,
    meter: Meter | None = None,
) -> AsyncIterator[AsyncGenerator[Batch]]:
    """Load image files in batches, in order, while the consumer works on earlier ones.

    Args:
        paths: JPEG files, all of one height and width.
        size: images per batch; a multiple of the number of devices.
        devices: where the batches go.
        prefetch: batches that are loaded ahead of the consumer. With the one that the consumer
            has, ``(prefetch + 1) * size`` images are in memory at most.
        decoders: images of a batch that are decoded at the same time.
        meter: counts the images in memory.

    Yields:
        The batches. Leaving the block, in whatever way, stops the loading and waits for its end.

    Raises:
        ExceptionGroup: a file could not be read (``OSError``) or decoded (``ValueError``).
    """
    meter = meter or Meter()
    sharding = split_over(devices)
    decode_here = decode_on_host.specialize(devices=colocated_cpu_devices(devices)[0])

    async def load(files: Sequence[Path]) -> Batch:
        meter.add(len(files))
        names = [file.name for file in files]
        data = [await anyio.Path(file).read_bytes() for file in files]
        images = await decode_here.map(data, names, limit=decoders)
        batch = await stack_on_host(images, size)
        async with open_task_channel() as channel:
            return Batch(await channel.run(jax.device_put, batch, sharding), names)

    waiting = deque(paths[start : start + size] for start in range(0, len(paths), size))
    loading: deque[asyncio.Task[Batch]] = deque()

    async def in_order() -> AsyncGenerator[Batch]:
        held = 0
        while waiting or loading:
            # Here the consumer still has the batch before.
            while waiting and len(loading) < prefetch:
                loading.append(group.create_task(load(waiting.popleft())))
            batch = await loading.popleft()
            meter.add(-held)
            held = len(batch.names)
            yield batch

    async with TaskGroup() as group:
        async with aclosing(in_order()) as batches:
            yield batches
        for task in loading:  # the consumer has left before the end
            task.cancel()
