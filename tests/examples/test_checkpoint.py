# SPDX-License-Identifier: Apache-2.0
"""The checkpoint example: the program, killed and resumed, and the promises of its two classes."""

from __future__ import annotations

import argparse
import asyncio
import errno
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from aiocolocated import TaskGroup, open_task_channel, runtime
from examples import checkpoint
from examples.checkpoint import (
    ARRAYS,
    MANIFEST,
    Checkpointer,
    CheckpointFiles,
    __main__ as checkpoint_program,
    training,
)

ROOT = Path(__file__).parents[2]
STEPS = 60

needs_zmq = pytest.mark.skipif(
    importlib.util.find_spec("zmq") is None, reason="host processes need pyzmq"
)


def start_program(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start ``python -m examples.checkpoint`` on as many devices as here: the last bits depend on it."""
    command = [sys.executable, "-m", "examples.checkpoint", "--folder", str(folder)]
    return subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": str(len(jax.devices()))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(program: subprocess.Popen[str]) -> str:
    """Its output, once it has ended without an error."""
    output, _ = program.communicate(timeout=60)
    assert program.returncode == 0, output
    return output


def names(folder: Path) -> list[str]:
    """What lies in a folder."""
    return sorted(path.name for path in folder.iterdir())


def saved(folder: Path, step: int) -> list[np.ndarray[Any, Any]]:
    """The arrays of a checkpoint, read in the plain way."""
    path = folder / f"{step:08}"
    assert names(path) == [ARRAYS, MANIFEST]
    leaves = json.loads((path / MANIFEST).read_text())["leaves"]
    with np.load(path / ARRAYS) as stored:
        return [stored[f"arr_{index}"] for index in range(len(leaves))]


def state_of(step: int) -> dict[str, jax.Array]:
    """A state that can be told from that of any other step."""
    return {"weights": jnp.full((64, 64), float(step)), "step": jnp.int32(step)}


def equal(a: Any, b: Any) -> bool:
    """Whether two trees have the same structure, types and bits."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs
    )


class Disk:
    """Stands between the example and the disk: flushes wait for a gate, or fail."""

    def __init__(self, flush: Callable[[Path], None]) -> None:
        self._flush = flush
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()
        self.fails_at: str | None = None

    def flush(self, path: Path) -> None:
        self.reached.set()
        assert self.gate.wait(20)
        if path.name == self.fails_at:
            raise OSError(errno.ENOSPC, "no space left on device", str(path))
        self._flush(path)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """The disk of the test; its gate is open."""
    disk = Disk(checkpoint.flush)
    monkeypatch.setattr(checkpoint, "flush", disk.flush)
    yield disk
    disk.gate.set()


# --- the program --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    return folder, finish(start_program(folder, "--steps", str(STEPS), "--every", "10"))


def test_program_trains_saves_and_restores(uninterrupted: tuple[Path, str]) -> None:
    """The summary says what was done, and the last three checkpoints are in the folder."""
    folder, output = uninterrupted
    assert re.search(r"^trained: 60 steps in [\d.]+ s, [\d.]+% recognised$", output, re.M)
    assert re.search(r"^saved: 6 in [\d.]+ s, \d+% of it hidden behind training", output, re.M)
    assert re.search(r"^kept: steps 40, 50, 60$", output, re.M)
    assert re.search(r"^restored: step 60, exactly: yes$", output, re.M)
    assert names(folder) == ["00000040", "00000050", "00000060"]
    assert float(re.findall(r"([\d.]+)% recognised", output)[0]) > 80


@needs_zmq
def test_program_saves_the_same_in_a_host_process(
    tmp_path: Path, uninterrupted: tuple[Path, str]
) -> None:
    """A process of its own writes the very same bits, and reads them back exactly."""
    output = finish(start_program(tmp_path, "--steps", str(STEPS), "--every", "10", "--hosts", "1"))
    assert re.search(r"^restored: step 60, exactly: yes$", output, re.M)
    assert names(tmp_path) == names(uninterrupted[0])
    for step in (40, 50, 60):
        pairs = zip(saved(tmp_path, step), saved(uninterrupted[0], step), strict=True)
        assert all(a.tobytes() == b.tobytes() for a, b in pairs)


def test_program_goes_on_after_being_killed(
    tmp_path: Path, uninterrupted: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed at any moment and started again, it ends with the very same bits."""
    program = start_program(tmp_path, "--steps", "1000000", "--every", "1")
    deadline = time.monotonic() + 60
    while not any(path.name.isdigit() for path in tmp_path.iterdir()):
        assert time.monotonic() < deadline
        assert program.poll() is None
        time.sleep(0.01)
    program.kill()
    program.communicate()
    last = CheckpointFiles(tmp_path, 3).steps()[-1]
    assert last < STEPS
    args = argparse.Namespace(steps=STEPS, every=10, keep=3, seed=0, hosts=0)
    assert asyncio.run(checkpoint_program.run(tmp_path, args)) == 0
    output = capsys.readouterr().out
    assert f"resumed at step {last}\n" in output
    assert f"trained: {STEPS - last} steps" in output
    pairs = zip(saved(tmp_path, STEPS), saved(uninterrupted[0], STEPS), strict=True)
    assert all(a.tobytes() == b.tobytes() for a, b in pairs)


# --- files --------------------------------------------------------------------------------------------


KILLED = """
    import os, sys, threading
    from pathlib import Path

    import numpy as np

    from examples import checkpoint

    where, folder = os.environ["WHERE"], Path(os.environ["FOLDER"])
    files = checkpoint.CheckpointFiles(folder, 2)
    files.save(1, {"x": np.full(1000, 1.0)})
    files.save(2, {"x": np.full(1000, 2.0)})

    def stop():
        print("stopped", flush=True)
        threading.Event().wait()

    flush, write, rename, rmtree = (
        checkpoint.flush, Path.write_text, Path.rename, checkpoint.shutil.rmtree
    )
    if where == "between the files":
        Path.write_text = lambda *args: stop()
    elif where == "before the rename":
        Path.rename = lambda *args: stop()
    elif where == "after the rename":
        checkpoint.flush = lambda path: stop() if path == folder else flush(path)
    elif where == "while one is removed":
        checkpoint.shutil.rmtree = lambda path: (os.remove(path / checkpoint.ARRAYS), stop())
    files.save(3, {"x": np.full(1000, 3.0)})
"""


def test_killed_writer_leaves_whole_checkpoints(
    tmp_path: Path, start_script: Callable[..., Any]
) -> None:
    """Wherever it is killed, the checkpoints that are there are whole, and the rest is removed."""
    expected = {
        "between the files": [1, 2],
        "before the rename": [1, 2],
        "after the rename": [1, 2, 3],
        "while one is removed": [2, 3],
    }
    folders = {where: tmp_path / where for where in expected}
    scripts = [start_script(KILLED, WHERE=w, FOLDER=str(f)) for w, f in folders.items()]
    for script in scripts:
        script.wait_for("stopped", timeout=60)
        script.kill()
    for where, folder in folders.items():
        unfinished = [name for name in names(folder) if name.endswith(".part")]
        assert len(unfinished) == (where != "after the rename"), where
        files = CheckpointFiles(folder, 2)
        assert names(folder) == [f"{step:08}" for step in expected[where]], where
        for step in files.steps():
            assert np.array_equal(saved(folder, step)[0], np.full(1000, float(step))), where
        files.save(4, {"x": np.full(1000, 4.0)})
        assert files.steps() == [expected[where][-1], 4]


@pytest.mark.parametrize("where", [ARRAYS, MANIFEST, "00000003.part"])
def test_failed_write_leaves_nothing(tmp_path: Path, disk: Disk, where: str) -> None:
    """A write that fails anywhere leaves the checkpoints before it, and may be tried again."""
    files = CheckpointFiles(tmp_path, 2)
    for step in (1, 2):
        files.save(step, state_of(step))
    disk.fails_at = where
    with pytest.raises(OSError, match="no space left"):
        files.save(3, state_of(3))
    assert names(tmp_path) == ["00000001", "00000002"]
    disk.fails_at = None
    files.save(3, state_of(3))
    assert files.steps() == [2, 3]


def test_keep_must_be_positive(tmp_path: Path) -> None:
    """To keep nothing is refused."""
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        CheckpointFiles(tmp_path, 0)


# --- saving -------------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("keep", [1, 3])
async def test_last_checkpoints_are_kept_in_order(tmp_path: Path, keep: int) -> None:
    """Of many saves the newest are there, each with its own state."""
    async with Checkpointer(tmp_path, jax.devices()[0], keep=keep) as checkpoints:
        assert await checkpoints.steps() == []
        for step in range(1, 9):
            await checkpoints.save(step, state_of(step))
            await checkpoints.wait()
            assert await checkpoints.steps() == list(range(max(1, step + 1 - keep), step + 1))
    for step in range(9 - keep, 9):
        weights = (await asyncio.to_thread(saved, tmp_path, step))[1]
        assert np.array_equal(weights, np.full((64, 64), step))


@pytest.mark.asyncio
async def test_steps_must_increase(tmp_path: Path) -> None:
    """A save of an earlier step is refused, and the next save tells."""
    async with Checkpointer(tmp_path, jax.devices()[0]) as checkpoints:
        await checkpoints.save(5, state_of(5))
        await checkpoints.save(4, state_of(4))
        with pytest.raises(ValueError, match="step 4 does not come after step 5"):
            await checkpoints.save(6, state_of(6))
        assert await checkpoints.steps() == [5]


@pytest.mark.asyncio
async def test_training_goes_on_while_files_are_written(tmp_path: Path, disk: Disk) -> None:
    """Steps are computed, and donate the state, while the disk stands still."""
    images, labels = jnp.ones((300, 64)), jnp.zeros(300, jnp.int32)
    state = training.new_state(width=16)
    async with (
        open_task_channel() as channel,
        Checkpointer(tmp_path, jax.devices()[0]) as checkpoints,
    ):
        state = await channel.run(training.train_step, state, images, labels)
        weights = np.array(state.params["w2"])
        disk.gate.clear()
        await checkpoints.save(1, state)
        assert await asyncio.to_thread(disk.reached.wait, 20)
        for _ in range(5):
            old = state
            state = await channel.run(training.train_step, state, images, labels)
            assert old.params["w2"].is_deleted()
        assert int(state.step) == 6
        assert await asyncio.to_thread(names, tmp_path) == ["00000001.part"]
        disk.gate.set()
        await checkpoints.wait()
        found = await checkpoints.restore(like=state)
    assert found is not None
    assert (found[0], int(found[1].step)) == (1, 1)
    assert np.array_equal(np.asarray(found[1].params["w2"]), weights)


@pytest.mark.asyncio
async def test_one_save_at_a_time(tmp_path: Path, disk: Disk) -> None:
    """A save waits for the one before; so there is one copy of the state, and the order is kept."""
    async with Checkpointer(tmp_path, jax.devices()[0]) as checkpoints:
        disk.gate.clear()
        await checkpoints.save(1, state_of(1))
        second = asyncio.create_task(checkpoints.save(2, state_of(2)))
        assert await asyncio.to_thread(disk.reached.wait, 20)
        await asyncio.sleep(0)
        assert not second.done()
        disk.gate.set()
        await second
        await checkpoints.wait()
        assert await checkpoints.steps() == [1, 2]


@pytest.mark.asyncio
async def test_error_is_raised_by_the_next_save(tmp_path: Path, disk: Disk) -> None:
    """The next save raises it, once, and is not begun; it may be tried again."""
    async with Checkpointer(tmp_path, jax.devices()[0]) as checkpoints:
        await checkpoints.save(1, state_of(1))
        await checkpoints.wait()
        disk.fails_at = MANIFEST
        await checkpoints.save(2, state_of(2))
        with pytest.raises(OSError, match="no space left") as raised:
            await checkpoints.save(3, state_of(3))
        assert raised.value.errno == errno.ENOSPC
        del raised
        disk.fails_at = None
        assert await checkpoints.steps() == [1]
        await checkpoints.save(3, state_of(3))
    assert await asyncio.to_thread(names, tmp_path) == ["00000001", "00000003"]


@pytest.mark.asyncio
@pytest.mark.parametrize("inside", ["nothing", "channel", "group"])
async def test_error_is_raised_at_the_end(tmp_path: Path, disk: Disk, inside: str) -> None:
    """Without a next save, leaving the block raises it, whatever blocks are around."""
    disk.fails_at = ARRAYS

    async def save() -> None:
        async with Checkpointer(tmp_path, jax.devices()[0]) as checkpoints:
            await checkpoints.save(1, state_of(1))

    if inside == "nothing":
        with pytest.raises(OSError, match="no space left"):
            await save()
    elif inside == "channel":
        with pytest.raises(OSError, match="no space left"):
            async with open_task_channel():
                await save()
    else:
        with pytest.raises(ExceptionGroup) as raised:
            async with TaskGroup() as group:
                group.create_task(save())
        assert [type(error) for error in raised.value.exceptions] == [OSError]
        del raised
    assert await asyncio.to_thread(names, tmp_path) == []


@pytest.mark.asyncio
@pytest.mark.parametrize("fails", [False, True])
async def test_cancelled_loop_finishes_its_save(tmp_path: Path, disk: Disk, fails: bool) -> None:
    """A training that is cancelled while it waits for a save leaves that checkpoint, or its error."""
    disk.gate.clear()

    async def train() -> None:
        async with Checkpointer(tmp_path, jax.devices()[0]) as checkpoints:
            for step in range(1, 100):
                await checkpoints.save(step, state_of(step))

    task = asyncio.create_task(train())
    assert await asyncio.to_thread(disk.reached.wait, 20)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()  # it waits for the files
    disk.fails_at = ARRAYS if fails else None
    disk.gate.set()
    with pytest.raises(OSError if fails else asyncio.CancelledError):
        await task
    del task
    assert await asyncio.to_thread(names, tmp_path) == ([] if fails else ["00000001"])
    assert runtime.calls() == []


# --- restoring ----------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_all_kinds_of_leaves_are_restored_exactly(tmp_path: Path) -> None:
    """Types, bits and places come back: scalars, empty arrays, small floats, NaNs, split arrays."""
    devices = jax.devices()
    split = NamedSharding(Mesh(devices, ("x",)), PartitionSpec("x"))
    state = {
        "file": jnp.arange(3, dtype=jnp.uint8),
        "tuple": (jnp.float32(np.nan), jnp.bool_(True), jnp.int32(-7)),
        "none": None,
        "empty": jnp.zeros((0, 4)),
        "small": jnp.linspace(-2, 2, 64, dtype=jnp.bfloat16),
        "smaller": jnp.linspace(-2, 2, 64).astype(jnp.float8_e4m3fn),
        "complex": jnp.array([1 + 2j]),
        "split": jax.device_put(jnp.arange(16.0), split),
        "elsewhere": jax.device_put(jnp.arange(4.0), devices[3]),
        "nested/name": {"a": jax.random.PRNGKey(3)},
    }
    async with Checkpointer(tmp_path, devices[0]) as checkpoints:
        assert await checkpoints.restore(like=state) is None
        await checkpoints.save(3, state)
    async with Checkpointer(tmp_path, devices[0]) as checkpoints:
        found = await checkpoints.restore(like=jax.tree.map(jnp.zeros_like, state))
        assert found is not None
        assert found[0] == 3
        assert equal(found[1], state)
        for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(state), strict=True):
            assert a.sharding == b.sharding


@pytest.mark.asyncio
async def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    """The error shows what the checkpoint has and what was wanted."""
    async with Checkpointer(tmp_path, jax.devices()[0]) as checkpoints:
        await checkpoints.save(1, state_of(1))
        like = state_of(1) | {"weights": jnp.zeros((2, 2))}
        text = r"has .*'weights': 'float32\[64, 64\]'.* wanted are .*'weights': 'float32\[2, 2\]'"
        with pytest.raises(ValueError, match=text):
            await checkpoints.restore(like=like)


@pytest.mark.asyncio
async def test_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    """The constructor runs on the host at the first call, which raises what it raised."""
    file = tmp_path / "file"
    await asyncio.to_thread(file.touch)
    async with Checkpointer(file / "folder", jax.devices()[0]) as checkpoints:
        with pytest.raises(NotADirectoryError):
            await checkpoints.restore(like=state_of(0))
