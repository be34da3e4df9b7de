# SPDX-License-Identifier: Apache-2.0
"""What the tests of objects and streams on host processes run there.

Host processes import this file. What tests and bodies have in common are files: a journal that bodies
write to, and doors that tests open.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aiocolocated import colocated_python, colocated_python_class
from aiocolocated.testing import allow_blocking

TIMEOUT = 20.0  # seconds; only a bug takes that long


class Journal:
    """Notes what happens, on every host."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with allow_blocking():
            path.touch()

    def __reduce__(self) -> Any:
        return Journal, (self.path,)

    def note(self, event: str) -> None:
        with allow_blocking(), self.path.open("a") as file:
            file.write(f"{os.getpid()} {event}\n")

    def _lines(self) -> list[list[str]]:
        with allow_blocking():
            return [line.split(maxsplit=1) for line in self.path.read_text().splitlines()]

    @property
    def events(self) -> list[str]:
        return [event for _, event in self._lines()]

    def of(self, pid: int | None) -> list[str]:
        """What happened in one process."""
        return [event for who, event in self._lines() if int(who) == pid]

    async def wait_for(self, event: str, times: int = 1) -> None:
        deadline = time.monotonic() + TIMEOUT
        while self.events.count(event) < times:
            assert time.monotonic() < deadline, f"{event} never happened: {self.events}"
            await asyncio.sleep(0.001)


class Door:
    """Bodies wait at it until the test opens it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> None:
        with allow_blocking():
            self.path.touch()

    def wait(self) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not self.path.exists():
            assert time.monotonic() < deadline, "nobody opened the door"
            time.sleep(0.001)

    async def wait_async(self) -> None:
        while not self.path.exists():
            await asyncio.sleep(0.001)


@colocated_python
def ones(count: int) -> Any:
    return np.ones(count, np.float32)


class Counter:
    """Plain state, and a method of every kind."""

    unit = "items"

    def __init__(self, start: int = 0, journal: Journal | None = None) -> None:
        self.value = start
        self.journal = journal
        self.note("made")

    def note(self, event: str) -> None:
        if self.journal is not None:
            self.journal.note(event)

    def add(self, x: Any) -> int:
        self.value += int(x.size)
        return self.value

    async def add_async(self, x: Any) -> int:
        await asyncio.sleep(0)
        self.value += int(x.size)
        return self.value

    def up_to(self, x: Any, stop: int) -> Iterator[int]:
        try:
            while self.value < stop:
                self.value += 1
                yield self.value
        finally:
            self.note("finally")

    async def up_to_async(self, x: Any, stop: int) -> AsyncIterator[int]:
        try:
            while self.value < stop:
                await asyncio.sleep(0)
                self.value += 1
                yield self.value
        finally:
            self.note("finally")

    def scale(self, x: Any, factor: float = 2.0) -> Any:
        return x * factor

    def get(self) -> int:
        return self.value

    def where(self) -> tuple[int, str]:
        return os.getpid(), threading.current_thread().name

    def hold(self, x: Any, door: Door) -> None:
        self.note("start")
        door.wait()
        self.note("end")

    async def hold_async(self, x: Any, door: Door) -> None:
        self.note("start")
        try:
            await door.wait_async()
        finally:
            self.note("end")

    def fail(self, x: Any) -> None:
        raise ValueError("failed")

    def close(self) -> None:
        self.note("closed")

    def __del__(self) -> None:
        self.note("destroyed")

    @property
    def double(self) -> int:
        return 2 * self.value

    @staticmethod
    def triple(x: Any) -> Any:
        return x * 3


class AsyncClosing(Counter):
    async def aclose(self) -> None:
        self.note("closing")
        await asyncio.sleep(0)
        self.note("closed")


class FailsToClose(Counter):
    def close(self) -> None:
        self.note("closed")
        raise OSError(f"the disk of {os.getpid()} is full")


class Entered(Counter):
    async def __aenter__(self) -> None:
        self.note("entered")

    async def __aexit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        self.note("left" if kind is None else f"left by {kind.__name__}")
        return kind is KeyError


class FailsAtFirst:
    def __init__(self, journal: Journal) -> None:
        journal.note("tries")
        if len(journal.events) == 1:
            raise OSError("not yet")

    def get(self, x: Any) -> str:
        return "made"


class Holder:
    """Has an array since it was made."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def sum(self) -> float:
        return float(self.array.sum())


class Counted:
    alive = 0

    def __init__(self) -> None:
        type(self).alive += 1

    def touch(self, x: Any) -> int:
        return type(self).alive

    def __del__(self) -> None:
        type(self).alive -= 1


@colocated_python
def counted_alive() -> int:
    return Counted.alive


class Totals:
    """Computes with all hosts' shards."""

    def total(self, x: Any) -> Any:
        return jax.jit(jnp.sum)(x)

    def multiples(self, x: Any, stop: int) -> Any:
        for i in range(stop):
            yield jax.jit(jnp.sum)(x) * i


# --- generators ---------------------------------------------------------------------------------------


def count_sync(x: Any, journal: Journal, stop: int, error: BaseException | None = None) -> Any:
    journal.note("begin")
    try:
        for i in range(stop):
            journal.note(f"step {i}")
            yield i
        if error is not None:
            raise error
    finally:
        journal.note("finally")


async def count_async(
    x: Any, journal: Journal, stop: int, error: BaseException | None = None
) -> Any:
    journal.note("begin")
    try:
        for i in range(stop):
            await asyncio.sleep(0)
            journal.note(f"step {i}")
            yield i
        if error is not None:
            raise error
    finally:
        journal.note("finally")


def doors_sync(x: Any, journal: Journal, doors: list[Door]) -> Any:
    try:
        for i, door in enumerate(doors):
            journal.note(f"waits {i}")
            door.wait()
            yield i
    finally:
        journal.note("finally")


async def doors_async(x: Any, journal: Journal, doors: list[Door]) -> Any:
    try:
        for i, door in enumerate(doors):
            journal.note(f"waits {i}")
            await door.wait_async()
            yield i
    finally:
        journal.note("finally")


@colocated_python
def multiples(x: Any, stop: int) -> Any:
    for i in range(stop):
        yield {"array": x * i, "number": i}


@colocated_python
def global_multiples(x: Any, stop: int) -> Any:
    """Items that have shards on several hosts."""
    for i in range(stop):
        shards = [shard.data * i for shard in x.addressable_shards]
        yield jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


@colocated_python
def own_numbers(x: Any, stop: int, fewer: int = 0) -> Any:
    """Numbers of this host, on some hosts fewer."""
    index = jax.process_index()
    for i in range(stop - fewer * index):
        yield 10 * index + i


@colocated_python
def fails_in_finally(x: Any) -> Any:
    try:
        while True:
            yield 0
    finally:
        raise OSError("the disk is full")


# --- what bodies capture --------------------------------------------------------------------------------


@colocated_python
def uses_others(count: int) -> tuple[float, list[int], int]:
    """Calls a colocated function and an object, and opens a stream, on its own host."""
    device = jax.local_devices()[0]
    array = ones.specialize(devices=device)(count).result()
    counter = colocated_counter(5)
    total = counter.add(array).result()
    steps = [float(step["array"].sum()) for step in _iterate(multiples(array, 3))]
    return float(array.sum()), steps, total


def _iterate(stream: Any) -> Iterator[Any]:
    from aiocolocated import from_thread

    return from_thread.iterate(stream)


colocated_counter = colocated_python_class(Counter)
