# SPDX-License-Identifier: Apache-2.0
"""Thousands of streams with random cancellation and failure, a fixed seed: nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random

import jax.numpy as jnp
import pytest
from stream_bodies import PROMPT, eventually, warm_up

from aiocolocated import (
    CallCancelledError,
    TaskGroup,
    colocated_python,
    colocated_python_class,
    open_task_channel,
    runtime,
)
from aiocolocated._sources import Source
from aiocolocated._streams import ArrayStream
from aiocolocated.testing import Recorder

pytestmark = pytest.mark.timeout(120)


def plain(self, x, recorder, stop, fails):
    recorder.record("begin")
    try:
        for i in range(stop):
            yield x + i if i % 3 == 0 else i
        if fails:
            raise ValueError("broken")
    finally:
        recorder.record("finally")


async def asynchronous(self, x, recorder, stop, fails):
    recorder.record("begin")
    try:
        for i in range(stop):
            if i % 2:
                await asyncio.sleep(0)
            yield x + i if i % 3 == 0 else i
        if fails:
            raise ValueError("broken")
    finally:
        recorder.record("finally")
        await asyncio.sleep(0)  # closing may cancel it here, if it ends by itself just then


class Both:
    plain = plain
    asynchronous = asynchronous


def open_streams() -> int:
    """Streams that exist, for their users or on their host."""
    gc.collect()
    return sum(type(o) in (ArrayStream, Source) for o in gc.get_objects())


@pytest.fixture(autouse=True)
def _around():
    warm_up()


@pytest.mark.parametrize("seed", [1])
@pytest.mark.asyncio
async def test_thousands_of_streams_leave_nothing_behind(seed):
    """2 000 streams from 50 tasks, every way to use and to leave one: all that began has ended.

    Whatever a consumer got, it got in order and without a gap.
    """
    chance = random.Random(seed)
    recorder = Recorder()
    functions = [colocated_python(plain), colocated_python(asynchronous)]
    cls = colocated_python_class(Both, max_concurrency=2)
    x = jnp.zeros(2)
    outcomes: dict[str, int] = {}
    # Of streams that were dropped before their consumer came to the error.
    reported: list[str] = []  # no errors: their tracebacks keep frames
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: reported.append(str(context["exception"]))
    )

    async def use(mine: random.Random, stream: ArrayStream, stop: int, fails: bool) -> str:
        way = mine.choice(["all", "some", "aclose", "drop", "timeout"])
        wanted = mine.randrange(stop + 1)
        got = 0
        try:
            async with contextlib.AsyncExitStack() as stack:
                if way in ("some", "aclose"):
                    await stack.enter_async_context(contextlib.aclosing(stream))
                while True:
                    if way in ("some", "drop") and got == wanted:
                        return way
                    if way == "aclose" and got == wanted:
                        await asyncio.gather(*(stream.aclose() for _ in range(2)))
                        return way
                    try:
                        async with asyncio.timeout(1e-4 if way == "timeout" else PROMPT * 10):
                            item = await anext(stream)
                    except TimeoutError:
                        assert way == "timeout"
                        if mine.random() < 0.1:
                            return way
                        continue
                    except StopAsyncIteration:
                        assert got == stop
                        assert not fails
                        return "end"
                    assert (int(item[0]) if got % 3 == 0 else item) == got
                    got += 1
        except ValueError as error:
            assert str(error) == "broken"  # noqa: PT017 - whether there is one is by chance
            assert fails
            assert got == stop
            return "error"

    async def user(number: int) -> None:
        mine = random.Random(seed * 1000 + number)
        methods = cls()
        for _ in range(40):
            stop, fails = mine.randrange(8), mine.random() < 0.2
            ahead = mine.choice([None, 0, 1, 5])
            kind = mine.randrange(4)
            if kind < 2:
                function, first = functions[kind], (None, x)
            else:
                function, first = (methods.plain, methods.asynchronous)[kind - 2], (x,)
            if ahead is not None:
                function = function.specialize(read_ahead=ahead)
            block = mine.choice([contextlib.nullcontext, TaskGroup, open_task_channel])
            task = None
            if mine.random() < 0.3:  # cancel it at some moment
                task = asyncio.current_task()
                delay = mine.choice([0, 0, 1e-4, 1e-3])
                asyncio.get_running_loop().call_later(delay, task.cancel, "by the test")
            try:
                try:
                    async with block():
                        stream = function(*first, recorder, stop, fails)
                        outcome = await use(mine, stream, stop, fails)
                        if mine.random() < 0.1:
                            raise ZeroDivisionError
                except* (ZeroDivisionError, ValueError):  # of what was read ahead, too
                    outcome = "block failed"
                del stream
                if task is not None:
                    outcome = "cancelled"
                    await asyncio.sleep(0.05)  # for the cancellation, if it has not come yet
            except asyncio.CancelledError:
                assert task is not None
                outcome = "cancelled"
                while task.cancelling():
                    task.uncancel()
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
        if mine.random() < 0.5:
            with contextlib.suppress(CallCancelledError):
                await methods.aclose()

    await user(-1)  # the caches of JAX and of the library
    await eventually(lambda: not runtime.calls(), "all calls are over")
    before = open_streams()
    async with asyncio.timeout(60):
        numbers = list(range(50))
        chance.shuffle(numbers)
        tasks = [asyncio.create_task(user(number)) for number in numbers]
        await asyncio.gather(*tasks)
    del tasks
    gc.collect()  # asyncio leaves frames of tasks that were cancelled in reference cycles
    await eventually(
        lambda: recorder.count("begin") == recorder.count("finally"), "all that began has ended"
    )
    await eventually(lambda: not runtime.calls(), "all calls are over")
    assert sum(outcomes.values()) == 51 * 40
    assert set(outcomes) >= {"end", "error", "some", "aclose", "drop", "timeout", "cancelled"}
    assert recorder.count("begin") > 1000
    # Threads, tasks, arrays and descriptors are looked at around each test of the suite.
    assert open_streams() <= before
    assert set(reported) <= {"broken"}
