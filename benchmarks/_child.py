# SPDX-License-Identifier: Apache-2.0
"""One benchmark in this process: ``python -m benchmarks._child NAME LOOP EFFORT RESULT``."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import jax

from ._model import FULL, QUICK, Samples
from ._registry import BENCHMARKS


def loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """The event loop of that name."""
    if name == "uvloop":
        import uvloop

        return uvloop.new_event_loop
    return asyncio.SelectorEventLoop


def main(name: str, loop: str, effort_name: str, result: str) -> None:
    """Run one benchmark and write its samples as JSON."""
    benchmark = BENCHMARKS[name]
    effort = FULL if effort_name == "full" else QUICK
    if effort is FULL and benchmark.repetitions is not None:
        effort = dataclasses.replace(effort, repetitions=benchmark.repetitions)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

    async def measure() -> Samples:
        return await benchmark.measure(effort)

    with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
        samples = runner.run(measure())
    Path(result).write_text(json.dumps(samples))


if __name__ == "__main__":
    main(*sys.argv[1:])
