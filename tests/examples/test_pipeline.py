# SPDX-License-Identifier: Apache-2.0
"""The pipeline example: the program itself, and the promises of ``open_batches``."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from examples import pipeline
from examples.pipeline import Meter, open_batches, tiles

ROOT = Path(__file__).parents[2]
SIDE = 48
SHAPE = (SIDE, SIDE)
SIZE = 8

needs_zmq = pytest.mark.skipif(
    importlib.util.find_spec("zmq") is None, reason="host processes need pyzmq"
)
HOSTS = [0, pytest.param(2, marks=needs_zmq)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiles of this session are."""
    return tmp_path_factory.mktemp("tiles")


@pytest.fixture(scope="session")
def paths(folder: Path) -> list[Path]:
    """100 tiles: 12 batches and a half."""
    return tiles.cut(100, SIDE, folder)


@pytest.fixture(scope="session")
def pixels(paths: list[Path]) -> list[pipeline.Pixels]:
    """Their pixels, read in the plain way."""
    return [np.asarray(Image.open(path).convert("RGB")) for path in paths]


def run_program(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m examples.pipeline`` on small tiles."""
    command = [sys.executable, "-m", "examples.pipeline", "--folder", str(folder)]
    return subprocess.run(
        [*command, "--side", str(SIDE), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )


def other_tasks() -> set[asyncio.Task[object]]:
    """Tasks of this loop beside the running one."""
    return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[return-value]


def images_in_memory() -> int:
    """Decoded tiles that exist, by the buffers that JAX holds: several arrays may share one."""
    if jax.__version_info__ < (0, 10, 2):
        gc.collect()  # it keeps some in cycles for a while; elsewhere that would be a fault
    images = {
        shard.data.unsafe_buffer_pointer(): shard.data.shape[0]
        for array in jax.live_arrays()
        if array.shape[1:] == (*SHAPE, 3)
        for shard in array.addressable_shards
    }
    return sum(images.values())


@pytest.mark.parametrize("hosts", HOSTS)
def test_program_keeps_order_and_bound(folder: Path, hosts: int) -> None:
    """The program exits with 0, and so both ways agreed, in order and within the bound."""
    done = run_program(folder, "--tiles", "100", "--batch", "16", "--hosts", str(hosts))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "order kept: yes; same results: yes" in done.stdout
    peak, bound = map(int, re.findall(r"(\d+) images \(bound (\d+)\)", done.stdout)[0])
    assert 16 <= peak <= bound == 48
    assert len(re.findall(r"\d+ images/s", done.stdout)) == 2


@pytest.mark.parametrize("hosts", HOSTS)
def test_program_names_a_corrupt_file(tmp_path: Path, hosts: int) -> None:
    """A damaged file ends the program with its name and without a traceback."""
    damaged = tiles.cut(64, SIDE, tmp_path)[40]
    damaged.write_bytes(damaged.read_bytes()[:200])
    done = run_program(tmp_path, "--tiles", "64", "--batch", "16", "--hosts", str(hosts))
    assert done.returncode == 1
    assert "error: tile-00040.jpg is not a readable JPEG" in done.stderr
    assert "Traceback" not in done.stderr


def test_cut_makes_distinct_jpegs_once(folder: Path, paths: list[Path]) -> None:
    """Tiles are real JPEGs of the size asked for, all different, and not made anew."""
    with Image.open(paths[0]) as image:
        assert (image.format, image.size) == ("JPEG", (SIDE, SIDE))
    assert len({path.read_bytes() for path in paths}) == len(paths)
    before = [path.stat().st_mtime_ns for path in paths]
    assert tiles.cut(len(paths), SIDE, folder) == paths
    assert [path.stat().st_mtime_ns for path in paths] == before


def test_batch_that_cannot_be_split_is_refused(folder: Path) -> None:
    """The program says so before it does anything."""
    done = run_program(folder, "--batch", "12")
    assert done.returncode == 1
    assert done.stderr == "--batch 12 cannot be split over 8 devices\n"


@pytest.mark.asyncio
async def test_batches_come_in_order(paths: list[Path], pixels: list[pipeline.Pixels]) -> None:
    """Names and pixels arrive in the order of the files, split over the devices, the rest zeros."""
    devices = jax.devices()
    names: list[str] = []
    async with open_batches(paths, SIZE, SHAPE, devices, devices) as batches:
        async for batch in batches:
            assert batch.images.shape == (SIZE, *SHAPE, 3)
            assert batch.images.sharding == pipeline.split_over(devices)
            assert len(batch.images.sharding.device_set) == len(devices)
            start, end = len(names), len(names) + len(batch.names)
            images = np.asarray(batch.images)
            assert np.array_equal(images[: end - start], pixels[start:end])
            assert not images[end - start :].any()
            names += batch.names
    assert names == [path.name for path in paths]


@pytest.mark.asyncio
@pytest.mark.parametrize("prefetch", [1, 2, 4])
async def test_memory_is_bounded(paths: list[Path], prefetch: int) -> None:
    """However slow the consumer is, no more batches than promised are in memory."""
    devices = jax.devices()
    meter = Meter()
    bound = (prefetch + 1) * SIZE
    async with open_batches(
        paths, SIZE, SHAPE, devices, devices, prefetch=prefetch, meter=meter
    ) as batches:
        async for batch in batches:
            await asyncio.sleep(0.02)  # time enough to load more, if that were allowed
            assert meter.now <= bound
            assert images_in_memory() <= bound
            assert len(batch.names) <= SIZE
    assert 2 * SIZE <= meter.peak <= bound


@pytest.mark.asyncio
@pytest.mark.parametrize("leave", ["break", "raise"])
async def test_leaving_early_stops_everything(paths: list[Path], leave: str) -> None:
    """After the block nothing is loaded any more, and nothing is left of what was."""
    devices = jax.devices()
    meter = Meter()
    before = other_tasks()
    consumed = 0

    async def consume() -> None:
        nonlocal consumed
        async with open_batches(
            paths, SIZE, SHAPE, devices, devices, prefetch=4, meter=meter
        ) as batches:
            async for batch in batches:
                consumed += len(batch.names)
                if consumed == 2 * SIZE:
                    if leave == "raise":
                        raise KeyError("enough")
                    break

    if leave == "break":
        await consume()
    else:
        with pytest.raises(ExceptionGroup) as raised:
            await consume()
        assert [repr(error) for error in raised.value.exceptions] == ["KeyError('enough')"]
        del raised
    assert consumed == 2 * SIZE
    assert other_tasks() == before
    gc.collect()  # frames of tracebacks hold some, in cycles
    assert images_in_memory() == 0
    started = meter.now
    await asyncio.sleep(0.05)
    assert meter.now == started < len(paths)


@pytest.mark.asyncio
async def test_cancelling_the_consumer_stops_everything(paths: list[Path]) -> None:
    """A timeout around the block ends the loading too."""
    before = other_tasks()

    async def consume() -> None:
        async with open_batches(paths, SIZE, SHAPE, *[jax.devices()] * 2) as batches:
            async for _ in batches:
                await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(consume(), 0.2)
    assert other_tasks() == before
    gc.collect()  # frames of tracebacks hold some, in cycles
    assert images_in_memory() == 0


@pytest.fixture(
    params=[
        pytest.param((b"no JPEG at all", ValueError), id="no-jpeg"),
        pytest.param((None, ValueError), id="truncated"),
        pytest.param(("other side", ValueError), id="other-shape"),
        pytest.param(("missing", FileNotFoundError), id="missing"),
    ]
)
def damaged(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[list[Path], type[Exception]]:
    """40 tiles of which the 28th is bad in some way, and the kind of error to expect."""
    kind, error = request.param
    paths = tiles.cut(40, SIDE, tmp_path)
    bad = paths[27]
    if kind == "missing":
        bad.unlink()
    elif kind == "other side":
        tiles.cut(1, SIDE + 1, tmp_path)[0].replace(bad)
    else:
        bad.write_bytes(kind or bad.read_bytes()[:400])
    return paths, error


@pytest.mark.asyncio
async def test_error_names_the_file(damaged: tuple[list[Path], type[Exception]]) -> None:
    """The consumer's block ends with the one error of the one bad file, which the text names."""
    paths, error = damaged
    names: list[str] = []
    before = other_tasks()
    with pytest.raises(ExceptionGroup) as raised:
        async with open_batches(paths, SIZE, SHAPE, *[jax.devices()] * 2) as batches:
            async for batch in batches:
                names += batch.names
    assert len(raised.value.exceptions) == 1, raised.value.exceptions
    only = raised.value.exceptions[0]
    assert isinstance(only, error)
    assert paths[27].name in str(only)
    assert names == [path.name for path in paths[: len(names)]]
    assert len(names) <= 24  # the batches before the bad one, as far as they were consumed
    assert other_tasks() == before
