# SPDX-License-Identifier: Apache-2.0
"""Run the benchmarks, each in fresh processes, and print one table.

Each benchmark's numbers are also written to ``benchmarks/results/<name>.json``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import _report
from ._registry import BENCHMARKS

if TYPE_CHECKING:
    from ._model import Benchmark, Samples

RESULTS = Path(__file__).parent / "results"
LOOPS = ("asyncio", "uvloop")


def in_new_process(benchmark: Benchmark, loop: str, effort: str) -> Samples:
    """Measure once in a process of its own, so that nothing is left over from anything else."""

    def pin() -> None:
        # Before the program starts: its threads inherit it, and JAX's pools count these cores.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "samples.json")
        subprocess.run(
            [sys.executable, "-m", "benchmarks._child", benchmark.name, loop, effort, str(result)],
            check=True,
            cwd=Path(__file__).parent.parent,
            preexec_fn=pin if benchmark.pinned else None,
        )
        samples: Samples = json.loads(result.read_text())
        return samples


def run(
    names: list[str], loops: list[str], *, quick: bool
) -> tuple[list[_report.Result], list[str]]:
    """Run the named benchmarks; return their results and the names of those that failed."""
    results: list[_report.Result] = []
    failed: list[str] = []
    for name in names:
        benchmark = BENCHMARKS[name]
        processes = 1 if quick else benchmark.processes
        for loop in loops if benchmark.every_loop else loops[:1]:
            print(f"{name}, {loop}: {processes} process(es) ...", file=sys.stderr, flush=True)
            try:
                samples = [
                    in_new_process(benchmark, loop, "quick" if quick else "full")
                    for _ in range(processes)
                ]
            except subprocess.CalledProcessError as error:
                print(f"{name}, {loop}: exit status {error.returncode}", file=sys.stderr)
                failed.append(f"{name} ({loop})")
                continue
            results.append(_report.Result(benchmark, loop, samples))
    return results, failed


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status (1 when a benchmark could not run)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one process, few calls: a rough look")
    parser.add_argument(
        "--only", metavar="NAME", action="append", choices=BENCHMARKS, help="may be repeated"
    )
    parser.add_argument("--loops", default=",".join(LOOPS), help="comma-separated (%(default)s)")
    parser.add_argument("--json", metavar="PATH", type=Path, help="also write everything here")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    options = parser.parse_args(arguments)
    if options.list:
        for benchmark in BENCHMARKS.values():
            print(f"{benchmark.name:<22} {benchmark.title}")
        return 0
    loops = [loop for loop in options.loops.split(",") if loop]
    if unknown := set(loops) - set(LOOPS):
        parser.error(f"unknown event loops: {', '.join(sorted(unknown))}")
    if "uvloop" in loops and importlib.util.find_spec("uvloop") is None:
        print("uvloop is not installed: left out", file=sys.stderr)
        loops.remove("uvloop")
    if not loops:
        parser.error("no event loop left to run under")

    where = _report.environment(quick=options.quick)
    results, failed = run(options.only or list(BENCHMARKS), loops, quick=options.quick)
    for name in dict.fromkeys(result.benchmark.name for result in results):
        of_name = [result for result in results if result.benchmark.name == name]
        _report.write(RESULTS / f"{name}.json", of_name, where)
    if options.json is not None:
        _report.write(options.json, results, where)
    print(_report.heading(where), end="\n\n")
    print(_report.table(results))
    print()
    print(_report.summary(results))
    if failed:
        print(f"could not run: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
