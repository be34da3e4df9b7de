# SPDX-License-Identifier: Apache-2.0
"""From samples to the table and the result files."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import statistics
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from ._model import Benchmark, Samples, Target


@dataclasses.dataclass(frozen=True)
class Result:
    """The samples of one benchmark under one event loop.

    Attributes:
        benchmark: what was measured.
        loop: the event loop's name.
        processes: the samples of each process.
    """

    benchmark: Benchmark
    loop: str
    processes: list[Samples]

    def medians(self, variant: str) -> list[float]:
        """The median of the variant in each process."""
        return [statistics.median(samples[variant]) for samples in self.processes]

    def ratio(self, variant: str) -> float | None:
        """The variant's median over the reference's, in each process; the median of these."""
        if self.benchmark.reference is None:
            return None
        target = Target(variant, 0.0, "ratio", self.benchmark.reference)
        # A peer may well need no extra thread or byte at all: no ratio then.
        return target.measured(self.processes) if all(self.medians(target.against or "")) else None

    def targets(self, variant: str) -> list[Target]:
        """The targets that judge the variant."""
        return [target for target in self.benchmark.targets if target.variant == variant]


def number(value: float) -> str:
    """Three significant digits, and whole numbers where those say more."""
    if abs(value) >= 100:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.3g}"


def verdict(target: Target, result: Result) -> str:
    """Say whether a target is met, and by what number."""
    measured = target.measured(result.processes)
    limit = number(target.limit)
    word = "PASS" if measured <= target.limit else "miss"
    unit = result.benchmark.unit
    match target.kind:
        case "value":
            claim = f"{number(measured)} <= {limit} {unit}"
        case "maximum":
            claim = f"max {number(measured)} <= {limit} {unit}"
        case "ratio":
            claim = f"{measured:.3f}x <= {limit}x of {target.against}"
        case "difference":
            claim = f"{measured:+.2g} <= +{limit} {unit}"
    aim = f" (aim {number(target.aim)})" if target.aim is not None else ""
    return f"{word}: {claim}{aim}"


def table(results: Sequence[Result]) -> str:
    """The results for people: a block for each benchmark and loop, a line for each variant."""
    lines: list[str] = []
    for result in results:
        benchmark = result.benchmark
        heading = f"{benchmark.title} [{benchmark.unit}]"
        if benchmark.every_loop:
            heading += f", {result.loop}"
        lines += ["", heading, "-" * len(heading)]
        for variant in result.processes[0]:
            medians = result.medians(variant)
            ratio = result.ratio(variant)
            spread = f"({number(min(medians))} - {number(max(medians))})"
            times = "" if ratio is None else f"{ratio:.2f}x"
            verdicts = [verdict(target, result) for target in result.targets(variant)]
            line = (
                f"  {variant:<42} {number(statistics.median(medians)):>9}  {spread:<19} {times:>7}"
            )
            lines.append(f"{line}  {'; '.join(verdicts)}".rstrip())
    return "\n".join(lines[1:])


def summary(results: Sequence[Result]) -> str:
    """How many targets are met."""
    verdicts = [
        verdict(target, result) for result in results for target in result.benchmark.targets
    ]
    passed = sum(text.startswith("PASS") for text in verdicts)
    return f"{passed} of {len(verdicts)} targets met"


def environment(*, quick: bool) -> dict[str, Any]:
    """What the numbers depend on."""
    packages = ("aiocolocated", "jax", "jaxlib", "numpy", "anyio", "uvloop", "pyzmq")
    peers = ("ray", "grpcio")
    versions: dict[str, str | None] = {}
    for package in (*packages, *peers):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None  # run from a checkout, or an extra that is not installed
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "quick": quick,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "versions": versions,
    }


def heading(where: dict[str, Any]) -> str:
    """One line on the environment."""
    load = where["load_average"][0]
    busy = " (busy: the numbers are noisy)" if load > 0.5 * where["cpus"] else ""
    return (
        f"Python {where['python']}, JAX {where['versions']['jax']}, {where['cpus']} cores, "
        f"load {load:.1f}{busy}{', quick' if where['quick'] else ''}"
    )


def as_json(results: Sequence[Result], where: dict[str, Any]) -> dict[str, Any]:
    """The results for machines: every sample, the medians, ratios and verdicts."""
    return {
        "environment": where,
        "results": [
            {
                "benchmark": result.benchmark.name,
                "title": result.benchmark.title,
                "unit": result.benchmark.unit,
                "loop": result.loop,
                "reference": result.benchmark.reference,
                "variants": {
                    variant: {
                        "median": statistics.median(result.medians(variant)),
                        "ratio": result.ratio(variant),
                        "verdicts": [verdict(t, result) for t in result.targets(variant)],
                        "samples": [samples[variant] for samples in result.processes],
                    }
                    for variant in result.processes[0]
                },
            }
            for result in results
        ],
    }


def write(path: Path, results: Sequence[Result], where: dict[str, Any]) -> None:
    """Write results as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(as_json(results, where), indent=1) + "\n")
