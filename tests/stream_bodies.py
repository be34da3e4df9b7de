# SPDX-License-Identifier: Apache-2.0
"""Generator bodies of both kinds, as functions and as methods, that the tests of streams share.

Code of an importable module is shipped by reference: these see the module's own globals. Every body
takes ``self`` first, which functions get as ``None``.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aiocolocated import colocated_python, colocated_python_class
from aiocolocated.testing import Gate, Recorder

TIMEOUT = 20.0  # seconds; only a bug takes that long
PROMPT = 2.0  # seconds within which a body's `finally` has to run
SHARED: dict[str, Any] = {}  # what a test and its bodies have in common
USER: contextvars.ContextVar[Any] = contextvars.ContextVar("user", default=None)


# --- plain generators -------------------------------------------------------------------------------


def count_sync(self, x, recorder: Recorder, stop: int, error: BaseException | None = None):
    """Numbers from 0 on, then perhaps an error."""
    recorder.record("begin")
    try:
        for i in range(stop):
            recorder.record("step", i=i)
            yield i
        if error is not None:
            raise error
    finally:
        recorder.record("finally")


def gated_sync(self, x, recorder: Recorder, gates: list[Gate]):
    """Each number when its gate opens."""
    try:
        for i, gate in enumerate(gates):
            recorder.record("waits", i=i)
            gate.wait()
            recorder.record("step", i=i)
            yield i
    finally:
        recorder.record("finally")


def items_sync(self, x, items: Callable[[Any], list[Any]]):
    yield from items(x)


def stubborn_sync(self, x, recorder: Recorder, error: BaseException):
    """Raises when it is closed."""
    try:
        while True:
            yield 0
    finally:
        recorder.record("finally")
        raise error


def goes_on_sync(self, x):
    """Ignores that it is closed, once."""
    with contextlib.suppress(GeneratorExit):
        yield 0
    yield 1


def settings_sync(self, x, recorder: Recorder):
    """What is in force in every step, and at the end."""
    try:
        while True:
            yield _in_force()
            USER.set((USER.get(), "body"))
    finally:
        recorder.record("finally", seen=_in_force())


def big_sync(self, x, stop: int):
    for i in range(stop):
        yield jnp.full((20_000_000,), i, jnp.float32)


# --- asynchronous generators ------------------------------------------------------------------------


async def count_async(self, x, recorder: Recorder, stop: int, error: BaseException | None = None):
    recorder.record("begin")
    try:
        for i in range(stop):
            await asyncio.sleep(0)
            recorder.record("step", i=i)
            yield i
        if error is not None:
            raise error
    finally:
        recorder.record("finally")


async def gated_async(self, x, recorder: Recorder, gates: list[Gate]):
    try:
        for i, gate in enumerate(gates):
            recorder.record("waits", i=i)
            await gate.wait_async()
            recorder.record("step", i=i)
            yield i
    finally:
        recorder.record("finally")


async def items_async(self, x, items: Callable[[Any], list[Any]]):
    for item in items(x):
        yield item


async def stubborn_async(self, x, recorder: Recorder, error: BaseException):
    try:
        while True:
            yield 0
    finally:
        recorder.record("finally")
        raise error


async def goes_on_async(self, x):
    with contextlib.suppress(GeneratorExit):
        yield 0
    yield 1


async def settings_async(self, x, recorder: Recorder):
    try:
        while True:
            await asyncio.sleep(0)
            yield _in_force()
            USER.set((USER.get(), "body"))
    finally:
        await asyncio.sleep(0)
        recorder.record("finally", seen=_in_force())


async def big_async(self, x, stop: int):
    for i in range(stop):
        yield jnp.full((20_000_000,), i, jnp.float32)


def _in_force() -> tuple[Any, bool]:
    return USER.get(), bool(jax.config.jax_enable_x64)


# --- as functions and methods -------------------------------------------------------------------------


class Sync:
    """All of the plain ones as methods, and an ordinary method."""

    count = count_sync
    gated = gated_sync
    items = items_sync
    stubborn = stubborn_sync
    goes_on = goes_on_sync
    settings = settings_sync
    big = big_sync

    def ping(self, x):
        return "pong"


class Async:
    """All of the asynchronous ones."""

    count = count_async
    gated = gated_async
    items = items_async
    stubborn = stubborn_async
    goes_on = goes_on_async
    settings = settings_async
    big = big_async

    async def ping(self, x):
        return "pong"


NAMES = ("count", "gated", "items", "stubborn", "goes_on", "settings", "big")


class Opener:
    """Opens streams of one kind: a function's or a method's, of a plain or an asynchronous generator."""

    def __init__(self, kind: str) -> None:
        self.asynchronous = kind.startswith("async")
        self.is_method = kind.endswith("method")
        bodies = Async if self.asynchronous else Sync
        self.x = jnp.arange(3.0)
        if self.is_method:
            self.object = colocated_python_class(bodies)()
            self._colocated = {name: getattr(self.object, name) for name in NAMES}
        else:
            self.object = None
            self._colocated = {name: colocated_python(getattr(bodies, name)) for name in NAMES}

    def function(self, name: str) -> Any:
        return self._colocated[name]

    def open(self, name: str, *args: Any, read_ahead: int | None = None, **specialization: Any):
        """A stream of one of the bodies above."""
        function = self._colocated[name]
        if read_ahead is not None or specialization:
            function = function.specialize(read_ahead=read_ahead, **specialization)
        first = (self.x,) if self.is_method else (None, self.x)
        return function(*first, *args)

    @property
    def thread(self) -> str:
        """How the threads are called on which the bodies run."""
        return "aiocolocated-loop" if self.asynchronous else "aiocolocated-worker"


# --- loaders ----------------------------------------------------------------------------------------


class Iterator:
    """As Grain's: its own iterator, with state."""

    def __init__(self, stop, recorder=None):
        self.stop = stop
        self.next = 0
        self.recorder = recorder

    def __iter__(self):
        return self

    def __next__(self):
        if self.next >= self.stop:
            raise StopIteration
        self.next += 1
        return {"batch": np.full(2, self.next, np.float32), "step": self.next}

    def get_state(self):
        return {"next": self.next}

    def set_state(self, state):
        self.next = state["next"]

    def close(self):
        if self.recorder is not None:
            self.recorder.record("close")


class Loader:
    """As PyTorch's: every iter() begins anew, and it has a length."""

    def __init__(self, stop):
        self.stop = stop

    def __len__(self):
        return self.stop

    def __iter__(self):
        for i in range(self.stop):
            yield np.full(2, i, np.float32)


class AsyncIterator:
    def __init__(self, stop):
        self.stop = stop
        self.next = 0

    def __aiter__(self):
        return self

    async def __anext__(self):
        await asyncio.sleep(0)
        if self.next >= self.stop:
            raise StopAsyncIteration
        self.next += 1
        return self.next


class AsyncLoader:
    def __init__(self, stop):
        self.stop = stop

    async def __aiter__(self):
        for i in range(self.stop):
            await asyncio.sleep(0)
            yield i


KINDS = ("function", "async function", "method", "async method")


def warm_up() -> None:
    """Start the host's loop, which keeps descriptors, and the workers."""

    @colocated_python
    async def nothing(x):
        return None

    nothing(jnp.zeros(())).result(TIMEOUT)


async def take(stream, count: int) -> list[Any]:
    """The next few items."""
    async with asyncio.timeout(TIMEOUT):
        return [await anext(stream) for _ in range(count)]


async def take_all(stream) -> list[Any]:
    async with asyncio.timeout(TIMEOUT):
        return [item async for item in stream]


async def is_over(stream) -> bool:
    """Whether the next thing that a stream gives is its end, again and again."""
    async with asyncio.timeout(TIMEOUT):
        for _ in range(2):
            with contextlib.suppress(StopAsyncIteration):
                await anext(stream)
                return False
    return True


async def eventually(condition: Callable[[], object], what: str, timeout: float = 10.0) -> None:
    """Wait until something that no future tells of has happened."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        await asyncio.sleep(0.001)
