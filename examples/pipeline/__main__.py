# SPDX-License-Identifier: Apache-2.0
"""Mean colour and edge strength of many image tiles, through the pipeline and in a plain loop."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from aiocolocated import open_task_channel
from examples.hosts import open_hosts_or_here
from examples.pipeline import Batch, Meter, decode, open_batches, read_files, split_over, tiles

Rows = npt.NDArray[np.float32]
Result = tuple[list[str], Rows]


@jax.jit
def features(images: jax.Array) -> jax.Array:
    """Mean red, green and blue and the edge strength, ``f32[batch, 4]``, of images in 0..1."""
    images = images.astype(jnp.float32) / 255  # u8[batch, height, width, 3] came over
    grey = images.mean(axis=3)
    down, right = (jnp.abs(jnp.diff(grey, axis=axis)).mean(axis=(1, 2)) for axis in (1, 2))
    return jnp.column_stack([images.mean(axis=(1, 2)), down + right])


async def analyse(batches: AsyncIterable[Batch], total: int) -> Result:
    """Compute the features of all images while the next ones are loaded."""
    names: list[str] = []
    rows: list[Rows] = []
    with tqdm(total=total, unit=" images", disable=None) as bar:
        async with open_task_channel() as channel:
            async for batch in batches:
                values = await channel.run(features, batch.images)
                rows.append(np.asarray(values)[: len(batch.names)])
                names += batch.names
                bar.update(len(batch.names))
    return names, np.concatenate(rows)


def analyse_in_a_loop(
    paths: Sequence[Path],
    size: int,
    shape: tuple[int, int],
    devices: Sequence[jax.Device],
    latency: float = 0,
) -> Result:
    """The same without any concurrency: each step waits for the one before."""
    names: list[str] = []
    rows: list[Rows] = []
    sharding = split_over(devices)
    for start in range(0, len(paths), size):
        files = paths[start : start + size]
        new = [file.name for file in files]
        time.sleep(latency * len(files))
        images = decode([file.read_bytes() for file in files], new, size, shape)
        values = features(jax.device_put(images, sharding))
        rows.append(np.asarray(values)[: len(files)])
        names += new
    return names, np.concatenate(rows)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.pipeline", description=__doc__)
    add = parser.add_argument
    add("--tiles", type=int, default=512, help="how many images (%(default)s)")
    add("--side", type=int, default=224, help="their height and width (%(default)s)")
    add("--batch", type=int, default=32, help="images per batch (%(default)s)")
    add("--prefetch", type=int, default=2, help="batches loaded ahead (%(default)s)")
    add("--hosts", type=int, default=0, help="processes that decode; 0: this one (%(default)s)")
    add("--fetch-ms", type=float, default=0, help="SIMULATION: every file takes longer to read")
    add("--folder", type=Path, help="where the tiles are kept (your cache)")
    return parser.parse_args()


def main() -> int:
    """Run both ways and compare; returns the exit status."""
    args = parse_arguments()
    jax.config.update("jax_num_cpu_devices", 8)
    devices = jax.devices()
    shape = (args.side, args.side)
    if args.batch % len(devices):
        sys.exit(f"--batch {args.batch} cannot be split over {len(devices)} devices")
    paths = tiles.cut(args.tiles, args.side, args.folder)
    blank = np.zeros((args.batch, *shape, 3), np.uint8)
    features(jax.device_put(blank, split_over(devices))).block_until_ready()  # compiled, for both
    meter = Meter()
    latency = args.fetch_ms / 1e3

    async def fetch(files: Sequence[Path]) -> list[bytes]:
        await asyncio.sleep(latency)  # a store serves all files of a batch at the same time
        return await read_files(files)

    async def pipeline() -> tuple[Result, float]:
        async with open_hosts_or_here(args.hosts, devices) as hosts:
            start = time.perf_counter()
            async with open_batches(
                *(paths, args.batch, shape, devices, hosts.devices),
                prefetch=args.prefetch,
                fetch=fetch,
                meter=meter,
            ) as batches:
                result = await analyse(batches, len(paths))
            return result, time.perf_counter() - start

    try:
        (names, rows), seconds = asyncio.run(pipeline())
    except ExceptionGroup as errors:
        for error in errors.exceptions:
            print(f"error: {error}", file=sys.stderr)
        return 1

    start = time.perf_counter()
    names_in_loop, rows_in_loop = analyse_in_a_loop(paths, args.batch, shape, devices, latency)
    seconds_in_loop = time.perf_counter() - start

    in_order = names == names_in_loop == [path.name for path in paths]
    same = in_order and bool(np.allclose(rows, rows_in_loop, atol=1e-6))
    bound = (args.prefetch + 1) * args.batch
    print(f"pipeline    {len(paths) / seconds:8.0f} images/s")
    print(f"plain loop  {len(paths) / seconds_in_loop:8.0f} images/s")
    print(f"in memory at a time: {meter.peak} images (bound {bound})")
    print(f"order kept: {'yes' if in_order else 'NO'}; same results: {'yes' if same else 'NO'}")
    return 0 if same and meter.peak <= bound else 1


if __name__ == "__main__":
    sys.exit(main())
