# SPDX-License-Identifier: Apache-2.0
"""Continue a text with counts from a service, looked up together, in order, and by plain JAX."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import httpx
import jax
import numpy as np

from examples.lookup import (
    Codes,
    Sampler,
    Tables,
    UnknownKey,
    blocking,
    in_order,
    ngrams,
    overlapping,
    sampler,
)
from examples.lookup.service import run_service


class Measured(NamedTuple):
    """A run: seconds, the most lookups at a time, and what was drawn, ``u8[texts, length]``."""

    seconds: float
    most: int
    drawn: Codes


async def measure(
    sample: Sampler, service: httpx.AsyncClient, delay: float, key: jax.Array, prompts: Codes
) -> Measured:
    """Sample once, with a service that answers ``delay`` seconds later than it could."""
    await service.post(f"/delay/{delay}")
    await service.get("/most")
    start = time.perf_counter()
    drawn = await sample(key, prompts)
    seconds = time.perf_counter() - start
    return Measured(seconds, (await service.get("/most")).json(), np.asarray(drawn))


async def unknown_key(sample: Sampler, key: jax.Array, prompts: Codes) -> UnknownKey:
    """Sample with a prompt that the text does not have; what it raises is the callback's own."""
    try:
        await sample(key, np.zeros_like(prompts))
    except UnknownKey as error:
        return error
    raise AssertionError("the text has zeros")


async def compare(address: str, args: argparse.Namespace) -> int:
    """Sample in all ways, and print a table; returns the exit status."""
    delays = list(dict.fromkeys((0.0, args.latency_ms / 1e3)))
    key = jax.random.key(args.seed)
    prompts = ngrams.encode([args.prompt[-ngrams.LONGEST :]] * args.texts)
    results: dict[str, list[Measured]] = {}
    with httpx.Client(base_url=address, verify=False) as client:
        async with (
            Tables(address) as tables,
            httpx.AsyncClient(base_url=address, verify=False) as service,
        ):
            ways = {
                "aiocolocated.io_callback": overlapping(tables),
                "... with ordered=True": in_order(tables),
                "jax.experimental.io_callback": blocking(client),
            }
            samplers = {name: sampler(look_up, args.length) for name, look_up in ways.items()}
            for name, sample in samplers.items():
                await sample.warm_up(key, prompts)
                await sample(key, prompts)  # connects
                results[name] = [await measure(sample, service, d, key, prompts) for d in delays]
            error = await unknown_key(samplers["aiocolocated.io_callback"], key, prompts)
    width = 24
    titles = ("the service as it is", f"SIMULATED: {args.latency_ms:g} ms more")
    print(
        f"{args.texts} texts, {args.length} characters each, {len(ngrams.ORDERS)} lookups for each step\n"
        f"{'':30}" + "".join(f"{title:>{width}}" for title, _ in zip(titles, delays, strict=False))
    )
    for name, runs in results.items():
        cells = (f"{run.seconds / args.length * 1e3:.1f} ms, {run.most} at once" for run in runs)
        print(f"{name:30}" + "".join(f"{cell:>{width}}" for cell in cells))
    first, *rest = [run.drawn for runs in results.values() for run in runs]
    same = all(np.array_equal(drawn, first) for drawn in rest)
    print(f"the same texts in all ways: {'yes' if same else 'NO'}")
    print(f"an unknown key raises {error!r}")
    print(f"the first text: {args.prompt}{ngrams.decode(first)[0]}")
    return 0 if same else 1


async def run(path: Path, args: argparse.Namespace) -> int:
    """Start the service and compare; returns the exit status."""
    async with run_service(path) as address:
        return await compare(address, args)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.lookup", description=__doc__)
    add = parser.add_argument
    add("--prompt", default="The statement", help="how the texts begin (%(default)s)")
    add("--length", type=int, default=20, help="characters to add (%(default)s)")
    add("--texts", type=int, default=4, help="texts at a time (%(default)s)")
    add("--seed", type=int, default=0, help="of the texts (%(default)s)")
    add("--latency-ms", type=float, default=10, help="SIMULATION: each answer comes later; 0: no")
    args = parser.parse_args()
    if min(args.length, args.texts) < 1:
        parser.error("--length and --texts must be at least 1")
    if len(args.prompt) < ngrams.LONGEST or not args.prompt.isascii():
        parser.error(f"--prompt needs at least {ngrams.LONGEST} characters, all of ASCII")
    return args


def main() -> int:
    """Write the tables, then sample; returns the exit status."""
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tables.sqlite")
        text = ngrams.read_text()
        rows = ngrams.write_tables(path, text)
        print(f"{len(text)} characters of text in {rows} rows of {len(ngrams.ORDERS)} tables")
        try:
            return asyncio.run(run(path, args))
        except UnknownKey as error:
            print(f"error: the text does not have this prompt: {error}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
