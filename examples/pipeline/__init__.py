# SPDX-License-Identifier: Apache-2.0
"""An asyncio data pipeline over image files (``python -m examples.pipeline``).

Files are read, decoded on hosts, put on the devices in batches and prefetched while the consumer
computes. The order of the files is kept, memory is bounded, an error names its file, and leaving the
block early stops everything. The hosts are those of the devices, or with ``--hosts N`` processes of
their own.

``open_batches`` is the part to copy. ``__main__.py`` is a consumer, and has the same work as a
plain loop for comparison; ``tiles.py`` makes the image files.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from PIL import Image

from aiocolocated import TaskGroup, colocated_python, device_put

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


def decode(
    jpegs: Sequence[bytes], names: Sequence[str], count: int, shape: tuple[int, int]
) -> Pixels:
    """Decode JPEGs to ``u8[count, height, width, 3]``, with zeros where there are fewer.

    Raises:
        ValueError: one is damaged, no JPEG, or of another shape; the text names it.
    """
    images = np.zeros((count, *shape, 3), np.uint8)
    for row, jpeg, name in zip(images, jpegs, names, strict=False):
        try:
            with Image.open(io.BytesIO(jpeg), formats=["JPEG"]) as image:
                row[...] = np.asarray(image.convert("RGB"))
        except (OSError, SyntaxError, ValueError) as exc:
            raise ValueError(f"{name} is not a readable JPEG of shape {shape}") from exc
    return images


decode_on_host = colocated_python(decode)


async def read_files(paths: Sequence[Path]) -> list[bytes]:
    """Fetch files from a disk: one trip to a thread for all, since each is read in no time."""
    return await asyncio.to_thread(lambda: [path.read_bytes() for path in paths])


def split_over(devices: Sequence[jax.Device]) -> NamedSharding:
    """How a batch lies on the devices: each has an equal part of the images."""
    return NamedSharding(Mesh(devices, ("batch",)), PartitionSpec("batch"))


@asynccontextmanager
async def open_batches(
    paths: Sequence[Path],
    size: int,
    shape: tuple[int, int],
    devices: Sequence[jax.Device],
    hosts: Sequence[jax.Device],
    *,
    prefetch: int = 2,
    fetch: Callable[[Sequence[Path]], Awaitable[list[bytes]]] = read_files,
    meter: Meter | None = None,
) -> AsyncIterator[AsyncGenerator[Batch]]:
    """Load image files in batches, in order, while the consumer works on earlier ones.

    Each device's part of a batch is decoded on a host; all parts of all batches that are being loaded
    are decoded at the same time.

    Args:
        paths: JPEG files.
        size: images per batch; a multiple of the number of devices.
        shape: height and width of every image.
        devices: where the batches go.
        hosts: CPU devices of this process or of others, which decode; for each of ``devices`` the next
            one, in turns.
        prefetch: batches that are loaded ahead of the consumer. With the one that the consumer
            has, ``(prefetch + 1) * size`` images are in memory at most.
        fetch: how the files of a batch are read.
        meter: counts the images in memory.

    Yields:
        The batches. Leaving the block, in whatever way, stops the loading and waits for its end.

    Raises:
        ExceptionGroup: a file could not be read (``OSError``) or decoded (``ValueError``).
        ValueError: ``size`` is no multiple of the number of devices.
    """
    if size % len(devices):
        raise ValueError(f"a batch of {size} cannot be split over {len(devices)} devices")
    meter = meter or Meter()
    functions = [decode_on_host.specialize(devices=host) for host in hosts]
    part = size // len(devices)
    starts = range(0, size, part)  # of the part of each device

    async def load(files: Sequence[Path]) -> Batch:
        meter.add(len(files))
        names = [file.name for file in files]
        jpegs = await fetch(files)
        parts = [  # futures of JAX arrays, made of the NumPy arrays that bodies return
            group.start_soon(function, jpegs[i : i + part], names[i : i + part], part, shape)
            for function, i in zip(cycle(functions), starts, strict=False)
        ]
        shards = await device_put(parts, list(devices))
        images = jax.make_array_from_single_device_arrays(
            (size, *shape, 3), split_over(devices), shards
        )
        return Batch(images, names)

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

    async with TaskGroup(keep_results=False) as group:
        async with aclosing(in_order()) as batches:
            yield batches
        for task in loading:  # the consumer has left before the end
            task.cancel()
