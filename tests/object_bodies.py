# SPDX-License-Identifier: Apache-2.0
"""Classes that the tests of objects wrap.

Code of an importable module is shipped by reference: these see the module's own globals.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from aiocolocated import colocated_python_class
from aiocolocated.testing import Gate, Recorder

TIMEOUT = 20.0  # seconds; only a bug takes that long
SHARED: dict[str, Any] = {}  # what a test and its bodies have in common


class Counter:
    """Plain state, and a method of every kind."""

    unit = "items"

    def __init__(self, start: int = 0, *, step: int = 1) -> None:
        self.value = start
        self.step = step

    def add(self, x: Any) -> int:
        self.value += self.step
        return self.value

    def get(self) -> int:
        return self.value

    async def add_async(self, x: Any) -> int:
        await asyncio.sleep(0)
        self.value += self.step
        return self.value

    def up_to(self, x: Any, stop: int) -> Iterator[int]:
        while self.value < stop:
            self.value += self.step
            yield self.value

    async def up_to_async(self, x: Any, stop: int) -> AsyncIterator[int]:
        while self.value < stop:
            await asyncio.sleep(0)
            self.value += self.step
            yield self.value

    def scale(self, x: Any, factor: float = 2.0) -> Any:
        return x * factor

    @property
    def double(self) -> int:
        return 2 * self.value

    @staticmethod
    def triple(x: Any) -> Any:
        return x * 3

    @classmethod
    def kind(cls, x: Any) -> str:
        return cls.__name__


class Noted:
    """Notes its life: where and when it is made, used and closed."""

    def __init__(self, recorder: Recorder, name: object = 0) -> None:
        self.recorder = recorder
        self.name = name
        self.note("made")

    def note(self, event: str) -> None:
        thread = threading.current_thread()
        self.recorder.record(event, name=self.name, thread=thread.name)

    def use(self, x: Any) -> Any:
        self.note("used")
        return x

    def hold(self, x: Any, gate: Gate) -> Any:
        self.note("start")
        gate.wait()
        self.note("end")
        return x

    async def hold_async(self, x: Any, gate: Gate) -> Any:
        self.note("start")
        await gate.wait_async()
        self.note("end")
        return x

    def call(self, x: Any, function: Callable[[], Any]) -> Any:
        return function()

    def fail(self, x: Any) -> None:
        raise ValueError("failed")

    def __del__(self) -> None:
        self.note("destroyed")


class Closing(Noted):
    def close(self) -> None:
        self.note("closed")


class ClosingAsync(Noted):
    def close(self) -> None:
        self.note("never: it has aclose")

    async def aclose(self) -> None:
        self.note("closing")
        await asyncio.sleep(0)
        self.note("closed")


# Made at import time, without a loop or a JAX backend.
imported = colocated_python_class(Counter)()


@colocated_python_class
class Decorated:
    """The name stands for the colocated class."""

    def shared(self, x: Any) -> bool:
        return SHARED["here"]

    def own_class(self, x: Any) -> str:
        return f"{type(self).__module__}.{type(self).__qualname__}"


@colocated_python_class(max_concurrency=3)
class DecoratedWithArguments:
    def shared(self, x: Any) -> bool:
        return SHARED["here"]


async def outcome(awaitable) -> Any:
    """What awaiting gives, or the error."""
    try:
        async with asyncio.timeout(TIMEOUT):
            return await awaitable
    except Exception as error:
        return error


async def eventually(condition: Callable[[], object], what: str) -> None:
    """Wait until something that no future tells of has happened."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        await asyncio.sleep(0.001)
