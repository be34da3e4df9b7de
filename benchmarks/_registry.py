# SPDX-License-Identifier: Apache-2.0
"""All benchmarks, by name, in the order in which they run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import calls, control_channels, hosts, loop_gap, memory, objects, readiness, transfers

if TYPE_CHECKING:
    from ._model import Benchmark

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for family in (
        calls,
        objects,
        readiness,
        memory,
        transfers,
        loop_gap,
        hosts,
        control_channels,
    )
    for benchmark in family.BENCHMARKS
}
