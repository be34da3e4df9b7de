# SPDX-License-Identifier: Apache-2.0
"""Coroutine bodies that the tests of coroutine bodies share.

Code of an importable module is shipped by reference: these see the module's own globals.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest

from aiocolocated import colocated_python
from aiocolocated.testing import Gate, Recorder

TIMEOUT = 20.0  # seconds; only a bug takes that long
SHARED: dict[str, Any] = {}  # what a test and its bodies have in common


class Meeting:
    """Coroutines of one loop go on when so many wait: shows that they overlap."""

    def __init__(self, parties: int) -> None:
        self.left = parties
        self.all_here = asyncio.Event()

    async def wait(self) -> None:
        self.left -= 1
        if not self.left:
            self.all_here.set()
        await asyncio.wait_for(self.all_here.wait(), 10)


@colocated_python
async def same(x: Any) -> Any:
    return x


@colocated_python
def plain(x: Any) -> Any:
    return x


@colocated_python
async def hold(x, gate: Gate, recorder: Recorder | None = None, name: object = 0):
    """Note the start, wait, note the end."""
    if recorder is not None:
        recorder.record("start", name=name)
    await gate.wait_async()
    if recorder is not None:
        recorder.record("end", name=name)
    return x


@colocated_python
def block(x, gate: Gate, recorder: Recorder, name: object = 0):
    """The same on a worker thread."""
    recorder.record("start", name=name)
    gate.wait()
    recorder.record("end", name=name)
    return x


@colocated_python
async def meet(x: Any) -> Any:
    await SHARED["meeting"].wait()
    return x


@colocated_python
async def sleep(x: Any, seconds: float) -> Any:
    await asyncio.sleep(seconds)
    return x


@colocated_python
async def fail(x: Any, error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


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


@colocated_python
async def work(x, recorder: Recorder, clean_up: Gate, name: object = 0, finish: str = "raise"):
    """Until it is cancelled; then until it may end, in one of several ways."""
    recorder.record("start", name=name)
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        recorder.record("cancelled", name=name)
        await clean_up.wait_async()
        recorder.record("clean", name=name)
        if finish == "return":
            return x
        if finish == "ValueError":
            raise ValueError(f"clean-up of {name}") from None
        if finish == "KeyboardInterrupt":
            raise KeyboardInterrupt from None
        raise
    return x


async def waiter(awaitable) -> asyncio.Future[Any]:
    """A task that waits already, so that cancelling it is cancelling a waiter."""
    task = asyncio.ensure_future(awaitable)
    await asyncio.sleep(0)
    return task


@contextlib.asynccontextmanager
async def timeout_once_started(recorder: Recorder):
    """asyncio.timeout that runs out when the body has started."""

    async def run_out():
        await recorder.wait_for("start")
        timeout.reschedule(0)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as timeout:
            task = asyncio.create_task(run_out())
            yield
    await task


def opened() -> Gate:
    gate = Gate()
    gate.open()
    return gate
