# SPDX-License-Identifier: Apache-2.0
"""Train a network on handwritten digits, save checkpoints meanwhile, and restore the last one.

With ``--folder`` the checkpoints stay, and the next run goes on from the newest one, however the run
before has ended.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from aiocolocated import open_task_channel
from examples.checkpoint import Checkpointer, training
from examples.hosts import open_hosts_or_here
from examples.server.model import load_digits


async def train(checkpoints: Checkpointer, steps: int, every: int, seed: int) -> training.State:
    """Train up to a step, from the newest checkpoint on, and print how that went."""
    digits = await asyncio.to_thread(load_digits)
    images, labels = jnp.asarray(digits.train_images), jnp.asarray(digits.train_labels, jnp.int32)
    held_out = jnp.asarray(digits.test_images), jnp.asarray(digits.test_labels, jnp.int32)
    first, state = 0, training.new_state(seed=seed)
    found = await checkpoints.restore(like=state)
    if found is not None:
        first, state = found
        print(f"resumed at step {first}", flush=True)
    saves, waited = 0, 0.0
    start = time.perf_counter()
    async with open_task_channel("training") as channel:
        for step in range(first + 1, steps + 1):
            state = await channel.run(training.train_step, state, images, labels)
            if step % every == 0 or step == steps:
                before = time.perf_counter()
                await checkpoints.save(step, state)
                waited += time.perf_counter() - before
                saves += 1
        before = time.perf_counter()
        await checkpoints.wait()
        now = time.perf_counter()
        waited += now - before
        recognised = float(await channel.run(training.accuracy, state.params, *held_out))
    trained = max(0, steps - first)
    print(f"trained: {trained} steps in {now - start:.1f} s, {recognised:.1%} recognised")
    if saves:
        writing = checkpoints.seconds
        hidden = max(0.0, 1 - waited / writing)
        print(
            f"saved: {saves} in {writing:.2f} s, {hidden:.0%} of it hidden behind training, which "
            f"waited {waited:.2f} s"
        )
    return state


async def run(folder: Path, args: argparse.Namespace) -> int:
    """Train, then restore and compare; returns the exit status."""
    async with open_hosts_or_here(args.hosts, jax.devices()[:1]) as hosts:
        host = hosts.devices[0]
        async with Checkpointer(folder, host, keep=args.keep) as checkpoints:
            state = await train(checkpoints, args.steps, args.every, args.seed)
            print(f"kept: steps {', '.join(map(str, await checkpoints.steps()))}")
        # As a program does that starts anew.
        async with Checkpointer(folder, host, keep=args.keep) as checkpoints:
            restored = await checkpoints.restore(like=training.new_state())
    assert restored is not None
    pairs = zip(*map(jax.tree.leaves, (restored[1], state)), strict=True)
    exactly = all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
    print(f"restored: step {restored[0]}, exactly: {'yes' if exactly else 'NO'}")
    return 0 if exactly else 1


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.checkpoint", description=__doc__)
    add = parser.add_argument
    add("--steps", type=int, default=300, help="train up to this step (%(default)s)")
    add("--every", type=int, default=20, help="steps between two checkpoints (%(default)s)")
    add("--keep", type=int, default=3, help="checkpoints that are kept (%(default)s)")
    add("--seed", type=int, default=0, help="of the weights and the batches (%(default)s)")
    add("--hosts", type=int, choices=(0, 1), default=0, help="processes that write; 0: this one")
    add("--folder", type=Path, help="where the checkpoints are kept (a temporary folder)")
    args = parser.parse_args()
    if min(args.steps, args.every, args.keep) < 1:
        parser.error("--steps, --every and --keep must be at least 1")
    return args


def main() -> int:
    """Run the program; returns the exit status."""
    args = parse_arguments()
    if args.folder is not None:
        return asyncio.run(run(args.folder, args))
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(run(Path(folder), args))


if __name__ == "__main__":
    sys.exit(main())
