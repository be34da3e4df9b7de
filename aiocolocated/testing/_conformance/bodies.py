# SPDX-License-Identifier: Apache-2.0
"""Bodies of the conformance tests, and what they share on one host: notes, gates and meetings.

Hosts import this module, so its state is one for all bodies of a host, whatever process that is.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aiocolocated import io_callback

TIMEOUT = 20.0  # seconds; only a bug takes that long

_notes: collections.defaultdict[str, list[Any]] = collections.defaultdict(list)
_gates: collections.defaultdict[str, threading.Event] = collections.defaultdict(threading.Event)
_meetings: dict[str, threading.Barrier] = {}
_lock = threading.Lock()


# --- what bodies share ------------------------------------------------------------------------------


def note(key: str, item: Any) -> Any:
    """Add to a list of the host."""
    _notes[key].append(item)
    return item


def notes(key: str) -> list[Any]:
    return _notes[key]


def open_gate(key: str) -> None:
    _gates[key].set()


def pass_gate(key: str) -> str:
    """Wait until somebody opens a gate of the host."""
    if not _gates[key].wait(TIMEOUT):
        raise TimeoutError(f"nobody opened the gate {key}")
    return key


async def pass_gate_async(key: str) -> str:
    """As :func:`pass_gate`, without a thread."""
    async with asyncio.timeout(TIMEOUT):
        while not _gates[key].is_set():  # noqa: ASYNC110 # it is opened by another thread
            await asyncio.sleep(0.001)
    return key


def hold(key: str, value: Any = None) -> Any:
    """Open the gate ``key.in``, and wait for ``key.out``."""
    note(key, "in")
    open_gate(f"{key}.in")
    pass_gate(f"{key}.out")
    note(key, "out")
    return value


async def hold_async(key: str, value: Any = None) -> Any:
    """As :func:`hold`, and note how it ends; its clean-up takes a moment."""
    note(key, "in")
    open_gate(f"{key}.in")
    try:
        await pass_gate_async(f"{key}.out")
    except asyncio.CancelledError:
        note(key, "cancelled")
        raise
    finally:
        await asyncio.sleep(0.02)
        note(key, "cleaned up")
    return value


async def hold_too(x: Any, key: str) -> None:
    await hold_async(key)


def meet(key: str, n: int, value: Any = None) -> Any:
    """Return only if so many bodies are here at once."""
    with _lock:
        barrier = _meetings.setdefault(key, threading.Barrier(n))
    barrier.wait(TIMEOUT)
    return value


def count_at_once(key: str) -> int:
    """How many bodies have been in here at once, so far."""
    with _lock:
        _notes[key].append(1)
        most = len(_notes[key])
    threading.Event().wait(0.002)
    with _lock:
        _notes[key].pop()
    return most


def meet_and_count(key: str, n: int) -> int:
    """Both: at least ``n`` at once, and how many they were."""
    with _lock:
        _notes[key].append(1)
        most = len(_notes[key])
    meet(key, n)
    with _lock:
        _notes[key].pop()
    return most


# --- plain bodies -----------------------------------------------------------------------------------


def same(value: Any) -> Any:
    return value


def same_too(x: Any, value: Any) -> Any:
    return value


def words(x: Any) -> dict[str, Any]:
    """A set is in another order in every process."""
    return {"words": {"to", "be", "or", "not"}, "x": x}


async def same_async(value: Any) -> Any:
    await asyncio.sleep(0)
    return value


def add(x: Any, y: Any) -> Any:
    return x + y


def add_noted(key: str, x: Any, y: Any) -> Any:
    note(key, y)
    return x + y


async def add_async(x: Any, y: Any) -> Any:
    await asyncio.sleep(0.001)
    return x + y


def total(*args: Any, **kwargs: Any) -> float:
    """The sum of every leaf, as a plain number."""
    return float(sum(np.asarray(x).sum() for x in jax.tree.leaves((args, kwargs))))


def describe(value: Any) -> list[tuple[str, str, tuple[int, ...]]]:
    """Of every leaf: its type, dtype and shape."""
    return [
        (
            "array" if isinstance(x, jax.Array) else type(x).__name__,
            str(getattr(x, "dtype", "")),
            tuple(getattr(x, "shape", ())),
        )
        for x in jax.tree.leaves(value)
    ]


def make(shape: tuple[int, ...], dtype: Any, value: Any = 1) -> Any:
    return jnp.full(shape, value, dtype)


def make_numpy(shape: tuple[int, ...], dtype: Any, value: Any = 1) -> Any:
    return np.full(shape, value, dtype)


def shards(x: Any) -> list[tuple[int, Any]]:
    """The device and the numbers of every shard that this host sees."""
    return [(s.device.id, np.asarray(s.data).tolist()) for s in x.addressable_shards]


def double_shards(x: Any) -> Any:
    """An array like a global one, of what this host has of it."""
    return jax.tree.map(
        lambda a: jax.make_array_from_single_device_arrays(
            a.shape, a.sharding, [s.data * 2 for s in a.addressable_shards]
        ),
        x,
    )


def live_arrays() -> int:
    """How many arrays the host has."""
    gc.collect()
    return len(jax.live_arrays())


def fail(error: BaseException) -> Any:
    raise error


async def fail_async(error: BaseException) -> Any:
    await asyncio.sleep(0)
    raise error


def fail_deep(depth: int) -> Any:
    if depth:
        return fail_deep(depth - 1)
    raise LookupError("deep")


class Stubborn(Exception):
    """An exception that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("stubborn")
        self.lock = threading.Lock()


def thread() -> int:
    return threading.get_ident()


def fail_stubbornly() -> Any:
    raise Stubborn


class Broken:
    """A value that is pickled without complaint."""

    def __reduce__(self) -> Any:
        return _break, ()


def _break() -> Any:
    raise ValueError("broken on arrival")


def give_lock() -> Any:
    return {"k": threading.Lock()}


def configuration(name: str) -> Any:
    """A value of JAX's configuration, as a body sees it."""
    value = getattr(jax.config, name)
    return value if isinstance(value, (str, int, bool, type(None))) else str(value)


async def configuration_async(name: str) -> Any:
    before = configuration(name)
    await asyncio.sleep(0.001)
    return before, configuration(name)


def ambient_mesh() -> tuple[tuple[str, ...], tuple[int, ...]]:
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.axis_names, mesh.axis_sizes


def default_dtype() -> str:
    return jnp.ones(1).dtype.name


def where(x: Any) -> list[int]:
    return sorted(d.id for d in x.devices())


def jitted_with_callbacks(n: int) -> float:
    """Run a program that calls back into coroutines."""

    async def times_ten(x: Any) -> Any:
        await asyncio.sleep(0.001)
        return np.float32(x * 10)

    @jax.jit
    def program(x: Any) -> Any:
        spec = jax.ShapeDtypeStruct((), jnp.float32)
        return sum(io_callback(times_ten, spec, x[i]) for i in range(n))

    return float(program(jnp.arange(n, dtype=jnp.float32)))


# --- values -----------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Options:
    """A plain value, whatever is in it."""

    name: str
    extra: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    """A dataclass that is a pytree."""

    w: Any
    steps: Any


# --- objects and streams ----------------------------------------------------------------------------


class Counter:
    """State on a host."""

    unit = "items"

    def __init__(self, start: Any = 0, key: str = "") -> None:
        self.value = start
        self.key = key
        if start == "broken":
            raise OSError("not made")

    def add(self, n: Any) -> Any:
        self.value = self.value + n
        return self.value

    async def add_async(self, n: Any) -> Any:
        before = self.value
        await asyncio.sleep(0.001)
        self.value = before + n
        return self.value

    def get(self) -> Any:
        return self.value

    def meet(self, key: str, n: int) -> int:
        return meet_and_count(key, n)

    def count_at_once(self, key: str) -> int:
        return count_at_once(key)

    def fail(self) -> Any:
        raise KeyError("of a method")

    @property
    def twice(self) -> Any:
        return self.value * 2

    @staticmethod
    def triple(n: Any) -> Any:
        return n * 3

    def items(self, n: int) -> Iterator[Any]:
        for _ in range(n):
            self.value += 1
            yield self.value

    async def items_async(self, n: int) -> AsyncIterator[Any]:
        for _ in range(n):
            await asyncio.sleep(0)
            self.value += 1
            yield self.value

    def close(self) -> None:
        note(self.key, "closed")


class Threaded:
    """State that is bound to the thread that made it."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()

    def same_thread(self) -> bool:
        return threading.get_ident() == self.thread


def count_up(n: int, key: str) -> Iterator[int]:
    """Numbers; notes each, and its end."""
    try:
        for i in range(n):
            note(key, i)
            yield i
    finally:
        note(key, "closed")


async def count_up_async(n: int, key: str) -> AsyncIterator[int]:
    try:
        for i in range(n):
            await asyncio.sleep(0)
            note(key, i)
            yield i
    finally:
        await asyncio.sleep(0.001)
        note(key, "closed")


def yield_arrays(n: int) -> Iterator[Any]:
    for i in range(n):
        yield {"i": i, "x": jnp.full((3,), float(i))}


def yield_then_fail(n: int) -> Iterator[int]:
    yield from range(n)
    raise KeyError("after the items")
