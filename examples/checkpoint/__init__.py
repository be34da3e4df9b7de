# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are written while the training goes on (``python -m examples.checkpoint``).

``CheckpointFiles`` is ordinary blocking Python: files, ``fsync``, ``rename``. As a colocated class it
lives on a host, that of the devices or with ``--hosts 1`` a process of its own, and its methods run there
one after the other. ``Checkpointer`` is what a training loop has of it. Both are to copy.

``training.py`` is a small training to save; ``__main__.py`` is the command line.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from aiocolocated import TaskChannel, colocated_python_class, device_put

T = TypeVar("T")

ARRAYS = "arrays.npz"
MANIFEST = "manifest.json"
UNFINISHED = ".part"


class CheckpointFiles:
    """A folder with a folder for each checkpoint, named after its step. For one program at a time.

    A checkpoint is there as a whole or not at all: it is written under another name and renamed when
    everything is on the disk. Whoever is killed meanwhile leaves a folder that the next one removes.

    Args:
        folder: made if it is not there.
        keep: so many checkpoints are kept, the newest.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self._folder = folder
        self._keep = keep
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob(f"*{UNFINISHED}"):
            shutil.rmtree(unfinished)

    def steps(self) -> list[int]:
        """Steps of the checkpoints, oldest first."""
        return sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdigit())

    def save(self, step: int, state: Any) -> float:
        """Write a checkpoint, then remove those that are too many; returns the seconds it took.

        Raises:
            ValueError: there is a checkpoint of this step or of a later one.
            OSError: it could not be written; the checkpoints before are as they were.
        """
        start = time.perf_counter()
        steps = self.steps()
        if steps and step <= steps[-1]:
            raise ValueError(f"step {step} does not come after step {steps[-1]}, which is saved")
        arrays = {name: np.asarray(leaf) for name, leaf in by_name(state).items()}
        leaves = [{"name": name, "dtype": str(a.dtype)} for name, a in arrays.items()]
        unfinished = self._path(step, UNFINISHED)
        unfinished.mkdir()
        try:
            np.savez(unfinished / ARRAYS, *arrays.values())
            (unfinished / MANIFEST).write_text(json.dumps({"step": step, "leaves": leaves}))
            for path in (unfinished / ARRAYS, unfinished / MANIFEST, unfinished):
                flush(path)
            unfinished.rename(self._path(step))
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        flush(self._folder)
        for old in [*steps, step][: -self._keep]:
            # Renamed first: what is half removed must not look like a checkpoint.
            shutil.rmtree(self._path(old).rename(self._path(old, UNFINISHED)))
        return time.perf_counter() - start

    def restore(self) -> tuple[int, dict[str, npt.NDArray[Any]]] | None:
        """Step and arrays of the newest checkpoint; ``None`` if there is none."""
        steps = self.steps()
        if not steps:
            return None
        path = self._path(steps[-1])
        manifest = json.loads((path / MANIFEST).read_text())
        with np.load(path / ARRAYS) as stored:
            # NumPy reads bfloat16 and its like back as bytes, hence the view.
            return steps[-1], {
                leaf["name"]: stored[f"arr_{index}"].view(jnp.dtype(leaf["dtype"]))
                for index, leaf in enumerate(manifest["leaves"])
            }

    def _path(self, step: int, suffix: str = "") -> Path:
        return self._folder / f"{step:08}{suffix}"


def flush(path: Path) -> None:
    """Return when a file, or the names in a folder, are on the disk and not only in memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by their paths, such as ``params/w1``."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


FilesOnHost = colocated_python_class(CheckpointFiles)


class Checkpointer:
    """Saves a training state in the background, one checkpoint at a time, in order.

    ``save`` returns as soon as the state is being copied. What goes wrong afterwards is raised by the
    next ``save``, by ``wait`` or by ``aclose``, whichever comes first, and by one of them only.

    For one task at a time.

    Args:
        folder: where the checkpoints are.
        host: a CPU device of the host that writes the files, this process or another.
        keep: so many checkpoints are kept.
    """

    def __init__(self, folder: Path, host: jax.Device, *, keep: int = 3) -> None:
        self._host = host
        self._files = FilesOnHost(folder, keep)
        # Its own channel: in the caller's, the next step would wait for the files.
        self._channel = TaskChannel("checkpoints")
        self._saving: asyncio.Future[float] | None = None
        self.seconds = 0.0
        """How long the saves took that are on the disk."""

    async def save(self, step: int, state: Any) -> None:
        """Save a pytree of arrays, which may be donated afterwards.

        Waits for the save before, so that there is one copy of the state at most.

        Raises:
            Exception: what the save before raised; this one was not begun, and may be tried again.

        Cancellation: a save that was begun goes on.
        """
        await self.wait()
        copying = self._channel.submit_nowait(device_put, state, self._host, may_alias=False)
        copy = await copying.wait_dispatched()
        saving = self._channel.submit_nowait(self._files.save, step, copy)
        self._saving = asyncio.ensure_future(saving)

    async def wait(self) -> None:
        """Return when the last save is on the disk, or raise what it raised."""
        saving = self._saving
        if saving is not None:
            await asyncio.wait([saving])  # who is cancelled here does not cancel the save
            self._saving = None
            self.seconds += saving.result()

    async def restore(self, like: T) -> tuple[int, T] | None:
        """Step and state of the newest checkpoint; ``None`` if there is none.

        Args:
            like: a state whose structure, shapes, dtypes and places the result has.

        Raises:
            ValueError: the checkpoint is of another kind of state.
        """
        await self.wait()
        restore = self._files.restore.specialize(devices=self._host)
        found = await self._channel.submit_nowait(restore)
        if found is None:
            return None
        step, arrays = found
        wanted = by_name(like)
        if types(arrays) != types(wanted):
            raise ValueError(f"checkpoint {step} has {types(arrays)}, wanted are {types(wanted)}")
        places = jax.tree.map(lambda leaf: leaf.sharding, like)
        state = jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted])
        return step, await self._channel.submit_nowait(device_put, state, places)

    async def steps(self) -> list[int]:
        """Steps of the checkpoints that are on the disk, oldest first."""
        steps = self._files.steps.specialize(devices=self._host)
        found: list[int] = await self._channel.submit_nowait(steps)
        return found

    async def aclose(self) -> None:
        """Wait for the last save, and let go of the files."""
        try:
            await self.wait()
        finally:
            await self._channel.aclose()
            await self._files.aclose()

    async def __aenter__(self) -> Checkpointer:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.aclose()


def types(arrays: dict[str, Any]) -> dict[str, str]:
    """Shapes and dtypes of arrays, by name."""
    return {name: f"{array.dtype}{list(array.shape)}" for name, array in arrays.items()}
