# SPDX-License-Identifier: Apache-2.0
"""What a benchmark is: a measurement with its variants, unit and targets."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Literal

#: Variant name -> one value per repetition, in the unit of the benchmark.
Samples = dict[str, list[float]]

#: One repetition of one variant; gives the value in the unit of the benchmark.
Variant = Callable[[], Awaitable[float]]


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much work a measurement may do.

    Attributes:
        repetitions: how many times each variant is measured in one process.
        scale: factor on every number of calls.
    """

    repetitions: int = 7
    scale: float = 1.0

    def count(self, full: int) -> int:
        """Scale a number of calls, keeping at least one."""
        return max(1, int(full * self.scale))


FULL = Effort()
QUICK = Effort(repetitions=3, scale=0.2)


@dataclasses.dataclass(frozen=True)
class Target:
    """A number that one variant has to reach.

    Attributes:
        variant: whose number is judged.
        limit: the largest number that passes.
        kind: ``value`` judges the median, ``maximum`` the largest sample of all, ``ratio`` and
            ``difference`` the median over processes of the variant's median against that of
            ``against``.
        against: the variant compared with, for ``ratio`` and ``difference``.
        aim: a better number that is hoped for; reported, never judged.
    """

    variant: str
    limit: float
    kind: Literal["value", "maximum", "ratio", "difference"] = "value"
    against: str | None = None
    aim: float | None = None

    def measured(self, processes: list[Samples]) -> float:
        """The number to judge, from the samples of every process."""
        if self.kind == "maximum":
            return max(max(samples[self.variant]) for samples in processes)
        medians = [statistics.median(samples[self.variant]) for samples in processes]
        if self.kind == "value":
            return statistics.median(medians)
        assert self.against is not None
        others = [statistics.median(samples[self.against]) for samples in processes]
        if self.kind == "ratio":
            return statistics.median(a / b for a, b in zip(medians, others, strict=True))
        return statistics.median(a - b for a, b in zip(medians, others, strict=True))


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One measurement, run in fresh processes.

    Attributes:
        name: what ``--only`` takes, and the name of the result file.
        title: what the table calls it.
        unit: unit of every sample, such as ``us``.
        measure: runs all variants under the running loop.
        targets: what has to hold.
        reference: the variant that the ratio column divides by.
        processes: in how many fresh processes the measurement is repeated.
        repetitions: repetitions in one process where the full effort's do not fit.
        every_loop: whether the event loop can matter; else asyncio's alone is used.
        pinned: keep the process, JAX's threads included, on one core.
    """

    name: str
    title: str
    unit: str
    measure: Callable[[Effort], Awaitable[Samples]]
    targets: tuple[Target, ...] = ()
    reference: str | None = None
    processes: int = 3
    repetitions: int | None = None
    every_loop: bool = True
    pinned: bool = False


async def alternate(
    variants: Mapping[str, Variant], effort: Effort, *, once: Collection[str] = ()
) -> Samples:
    """Measure the variants in turn, so that a slow spell of the machine hits all of them.

    Args:
        variants: what to measure; each is called once more, unmeasured, as a warm-up.
        effort: how many rounds.
        once: variants too slow to repeat; measured in the first round only, without warm-up.

    Returns:
        The samples of each variant.
    """
    samples: Samples = {name: [] for name in variants}
    for name, variant in variants.items():
        if name not in once:
            await variant()
    for repetition in range(effort.repetitions):
        for name, variant in variants.items():
            if repetition and name in once:
                continue
            gc.collect()  # nobody pays for the garbage of the variant before
            samples[name].append(await variant())
    return samples


def per_call(count: int, work: Callable[[], Awaitable[object]]) -> Variant:
    """Turn work made of ``count`` calls into a variant in microseconds per call."""

    async def measure() -> float:
        start = time.perf_counter()
        await work()
        return (time.perf_counter() - start) / count * 1e6

    return measure
