# SPDX-License-Identifier: Apache-2.0
"""Tokenize the documentation on this machine and train on it, with threads and with processes."""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from aiocolocated import device_put
from aiocolocated.testing import measure_loop_gap
from examples.tokenize import Flow, Workers, bpe, corpus, model, open_batches, open_workers

KINDS: tuple[Workers, ...] = ("threads", "processes")
PIECE = 16_384  # characters


class Measured(NamedTuple):
    """What a run did: its losses, step by step, what went through, seconds, and the largest gap."""

    losses: Sequence[float]
    flow: Flow
    seconds: float
    gap: float


async def run(
    kind: Workers, pieces: Sequence[str], vocabulary: bpe.Vocabulary, args: argparse.Namespace
) -> Measured:
    """Train on all pieces once, with workers of a kind."""
    device = jax.devices()[0]
    shape = (args.rows, model.ROW)
    blank = np.zeros(shape, np.uint16)
    state, rows = await device_put((model.new_state(vocabulary.size, args.seed), blank), device)
    await model.train_step.warm_up(state, rows)
    losses: list[jax.Array] = []
    flow = Flow()
    async with open_workers(kind, args.count) as devices, measure_loop_gap() as gap:
        start = time.perf_counter()
        async with open_batches(
            pieces, vocabulary, devices, shape, ahead=args.ahead, flow=flow
        ) as batches:
            async for batch in batches:
                state, loss = await model.train_step(state, device_put(batch, device))
                losses.append(loss)
        seconds = time.perf_counter() - start
    return Measured([float(loss) for loss in losses], flow, seconds, gap.max_seconds)


async def run_all(
    kinds: Sequence[Workers],
    pieces: Sequence[str],
    vocabulary: bpe.Vocabulary,
    args: argparse.Namespace,
) -> dict[str, Measured]:
    """One run after the other."""
    return {kind: await run(kind, pieces, vocabulary, args) for kind in kinds}


def print_table(results: dict[str, Measured], args: argparse.Namespace) -> None:
    """A column for each kind of workers."""
    rows: dict[str, Callable[[Measured], str]] = {
        "tokens per second": lambda r: f"{r.flow.tokens / r.seconds:.0f}",
        "seconds": lambda r: f"{r.seconds:.2f}",
        "worst event-loop gap (ms)": lambda r: f"{r.gap * 1e3:.1f}",
        f"pieces held (bound {args.ahead})": lambda r: f"{r.flow.most}",
        "loss, first 10 steps": lambda r: f"{np.mean(r.losses[:10]):.3f}",
        "loss, last 10 steps": lambda r: f"{np.mean(r.losses[-10:]):.3f}",
    }
    print(f"{'':30}" + "".join(f"{args.count:>5} {kind}" for kind in results))
    for title, cell in rows.items():
        print(f"{title:30}" + "".join(f"{cell(result):>15}" for result in results.values()))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.tokenize", description=__doc__)
    add = parser.add_argument
    add("--workers", choices=[*KINDS, "both"], default="both", help="(%(default)s)")
    add("--count", type=int, default=2, help="how many workers (%(default)s)")
    add("--limit-bytes", type=int, help="how much text (all there is)")
    add("--vocabulary", type=int, default=1024, help="how many tokens to learn (%(default)s)")
    add("--rows", type=int, default=256, help="rows of a batch (%(default)s)")
    add("--ahead", type=int, default=16, help="pieces that are under way at a time (%(default)s)")
    add("--seed", type=int, default=0, help="of the weights (%(default)s)")
    args = parser.parse_args()
    if min(args.count, args.rows, args.ahead) < 1:
        parser.error("--count, --rows and --ahead must be at least 1")
    if not bpe.BYTES <= args.vocabulary <= 1 << 16:
        parser.error("--vocabulary must be from 256, the bytes, to 65536")
    return args


def main() -> int:
    """Learn a vocabulary, train with it, and compare; returns the exit status."""
    args = parse_arguments()
    documents = corpus.read_documents(args.limit_bytes)
    vocabulary = bpe.train(documents, args.vocabulary)
    pieces = corpus.cut(documents, PIECE)
    random.Random(args.seed).shuffle(pieces)  # or the model would see one package after the other
    counts = f"{len(documents)} documents in {len(pieces)} pieces, {vocabulary.size} tokens"
    print(counts, flush=True)
    gc.freeze()  # a full collection would look like a gap
    kinds = KINDS if args.workers == "both" else (args.workers,)
    results = asyncio.run(run_all(kinds, pieces, vocabulary, args))
    if not all(result.losses for result in results.values()):
        sys.exit(f"the text does not fill a batch of {args.rows} rows of {model.ROW} tokens")
    print_table(results, args)
    first, *rest = results.values()
    same = all(result.flow.digest.digest() == first.flow.digest.digest() for result in rest)
    if rest:
        print(f"the same tokens: {'yes' if same else 'NO'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
