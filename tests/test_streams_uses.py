# SPDX-License-Identifier: Apache-2.0
"""Streams (contract C13) without a loop, in the wrong place, and at exit."""

from __future__ import annotations

import asyncio
import copy
import pickle
import textwrap
import threading

import jax.numpy as jnp
import pytest
from stream_bodies import (
    KINDS,
    SHARED,
    TIMEOUT,
    AsyncIterator,
    Loader,
    Opener,
    eventually,
    take_all,
    warm_up,
)

from aiocolocated import (
    ArgumentError,
    DeadlockError,
    TaskChannel,
    TaskGroup,
    colocated_python,
    colocated_python_class,
    from_thread,
    gather,
    runtime,
)
from aiocolocated.testing import Recorder

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _around():
    warm_up()
    yield
    SHARED.clear()


@pytest.fixture(params=KINDS)
def opener(request) -> Opener:
    return Opener(request.param)


@pytest.fixture(params=["method", "async method"])
def method(request) -> Opener:
    return Opener(request.param)


@pytest.fixture
def x():
    return jnp.arange(3.0)


# --- without a loop ---------------------------------------------------------------------------------


def test_iterate_gives_the_items_in_a_thread(opener):
    """In order, then the end; no loop is in sight."""
    recorder = Recorder()
    for ahead in (0, 2):
        iterator = from_thread.iterate(opener.open("count", recorder, 20, read_ahead=ahead))
        assert iter(iterator) is iterator
        assert list(iterator) == list(range(20))
        assert next(iterator, "end") == "end"
    assert recorder.count("finally") == 2


def test_iterate_raises_after_the_items_before_it(opener):
    """As in a loop."""
    recorder = Recorder()
    iterator = from_thread.iterate(opener.open("count", recorder, 2, ValueError("broken")))
    assert [next(iterator), next(iterator)] == [0, 1]
    with pytest.raises(ValueError, match="broken"):
        next(iterator)
    assert list(iterator) == []


@pytest.mark.parametrize("how", ["close", "dropped", "break"])
def test_leaving_iterate_closes_the_stream(opener, how):
    """close() waits for the body's finally; what was dropped is closed in the background."""
    recorder = Recorder()
    iterator = from_thread.iterate(opener.open("count", recorder, 1000))
    assert next(iterator) == 0
    if how == "close":
        iterator.close()
        assert recorder.count("finally") == 1
    elif how == "break":
        for _ in iterator:
            break
        del iterator
    else:
        del iterator
    from_thread.run(recorder.wait_for, "finally")
    assert recorder.count("finally") == 1


def test_iterate_of_an_object(cpu_devices):
    """One that can be iterated."""
    loader = colocated_python_class(Loader, devices=cpu_devices[:1])(3)
    assert [float(item[0]) for item in from_thread.iterate(loader)] == [0, 1, 2]
    loader = colocated_python_class(AsyncIterator, devices=cpu_devices[:1])(3)
    assert list(from_thread.iterate(loader)) == [1, 2, 3]


async def plain_numbers(recorder, stop):
    try:
        for i in range(stop):
            await asyncio.sleep(0)
            yield i
    finally:
        recorder.record("finally", thread=threading.current_thread().name)


def test_iterate_of_any_asynchronous_generator(recorder):
    """Nothing colocated about it: it is advanced, and closed, on the library's loop."""
    assert list(from_thread.iterate(plain_numbers(recorder, 5))) == [0, 1, 2, 3, 4]
    iterator = from_thread.iterate(plain_numbers(recorder, 5))
    assert next(iterator) == 0
    iterator.close()
    assert recorder.sequence("finally") == ["aiocolocated-loop"] * 2


@pytest.mark.asyncio
async def test_iterate_in_a_body(opener, recorder):
    """A plain body may; each has a thread, and the loop that submitted goes on."""
    SHARED["opener"], SHARED["recorder"] = opener, recorder

    async with asyncio.timeout(TIMEOUT):
        assert await colocated_python(total)(opener.x) == 45
        assert (
            await gather(
                *(TaskChannel().submit_nowait(colocated_python(total), opener.x) for _ in range(3))
            )
            == [45] * 3
        )


def total(x):
    return sum(from_thread.iterate(SHARED["opener"].open("count", SHARED["recorder"], 10)))


@pytest.mark.asyncio
async def test_iterate_on_a_loops_thread_is_refused(opener, recorder):
    """In words, whether or not items are ready; the stream is as it was."""
    stream = opener.open("count", recorder, 5)
    for _ in range(2):
        with pytest.raises(DeadlockError, match="event loop"):
            next(from_thread.iterate(stream))
        await recorder.wait_for("step", 2)
        await eventually(lambda: not runtime.calls(), "two are ready")
    assert await take_all(stream) == list(range(5))


@pytest.mark.asyncio
async def test_iterate_in_a_thread_beside_a_loop(opener, recorder):
    """asyncio.to_thread may."""
    stream = opener.open("count", recorder, 30)
    async with asyncio.timeout(TIMEOUT):
        got = await asyncio.to_thread(lambda: list(from_thread.iterate(stream)))
    assert got == list(range(30))


# --- in the wrong place -----------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_generator_function_where_calls_are_submitted_is_refused(opener):
    """In words that say how to use one."""
    function = opener.function("count")
    channel = TaskChannel()
    for submit in (channel.submit_nowait, channel.submit):
        with pytest.raises(ArgumentError, match=r"count\w* is a generator function.*async for"):
            result = submit(function, opener.x)
            await result
    async with TaskGroup() as group:
        with pytest.raises(ArgumentError, match=r"count\w* is a generator function.*async for"):
            group.start_soon(function, opener.x)
    with pytest.raises(AttributeError, match="map"):
        await function.map([opener.x])


@pytest.mark.asyncio
async def test_stream_as_an_argument_is_refused(opener, recorder):
    """In words that say how to pass what is in it, and where it stands in the arguments."""
    stream = opener.open("count", recorder, 3)
    function = colocated_python(lambda x, more: None)
    with pytest.raises(ArgumentError, match=r"more.* is an ArrayStream: .*async for"):
        function(opener.x, more={"k": [stream]})
    with pytest.raises(ArgumentError, match="ArrayStream"):
        opener.open("items", stream)
    assert await take_all(stream) == [0, 1, 2]


@pytest.mark.asyncio
async def test_stream_as_a_result_is_refused(opener, recorder):
    """A body that calls a generator function and returns what it gives; that stream is closed."""
    SHARED["opener"], SHARED["recorder"] = opener, recorder
    with pytest.raises(ArgumentError, match="ArrayStream"):
        await colocated_python(opens)(opener.x)
    await eventually(
        lambda: not runtime.calls() and recorder.count("begin") == recorder.count("finally"),
        "it is closed",
    )


def opens(x):
    return SHARED["opener"].open("count", SHARED["recorder"], 1000)


@pytest.mark.asyncio
async def test_stream_cannot_be_pickled_copied_or_captured(opener, recorder):
    """In words."""
    stream = opener.open("count", recorder, 3, read_ahead=0)
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="ArrayStream cannot be pickled"):
            attempt(stream)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(opener.function("count"))
    from aiocolocated import NotShippableError

    with pytest.raises(NotShippableError, match=r"'stream'.*ArrayStream"):
        await colocated_python(lambda x: stream and None)(opener.x)


@pytest.mark.asyncio
async def test_colocated_generator_may_be_captured(recorder):
    """As other colocated functions: a body may open streams of it."""
    opener = Opener("function")
    count = opener.function("count")

    def body(x):
        return list(from_thread.iterate(count(None, x, recorder, 4)))

    assert await colocated_python(body)(opener.x) == [0, 1, 2, 3]


@pytest.mark.asyncio
async def test_stream_in_a_plain_for_loop_is_refused(opener, recorder):
    """In words that say both ways."""
    stream = opener.open("count", recorder, 3, read_ahead=0)
    with pytest.raises(TypeError, match=r"'async for'.*from_thread\.iterate"):
        for _ in stream:
            pass
    from aiocolocated import ArrayStream

    with pytest.raises(TypeError, match="call a colocated generator function"):
        ArrayStream()


def test_generator_function_cannot_be_colocated_twice(opener):
    """As other functions."""
    with pytest.raises(ArgumentError, match="colocated function already"):
        colocated_python(opener.function("count"))
    assert "count" in repr(opener.function("count"))


# --- exit -------------------------------------------------------------------------------------------

SCRIPT = """
import asyncio, sys
import jax.numpy as jnp
from aiocolocated import colocated_python, colocated_python_class

x = jnp.ones(2)

def say(words):  # in one piece: two threads may end at once
    print(words + "\\n", end="", flush=True)

@colocated_python
def plain(x):
    try:
        while True: yield 1
    finally: say("plain ended")

@colocated_python
async def asynchronous(x):
    try:
        while True: yield 1
    finally:
        await asyncio.sleep(0)
        say("asynchronous ended")

class Source:
    def items(self, x):
        try:
            while True: yield 1
        finally: say("method ended")
    def close(self): say("object closed")

Source = colocated_python_class(Source)
"""


@pytest.mark.parametrize("where", ["kept", "from_thread"])
def test_exit_runs_the_finally_of_open_streams(run_script, where):
    """Streams that somebody still has when the interpreter goes; not a word on stderr."""
    if where == "kept":
        end = """
        async def main():
            global streams
            source = Source()
            streams = [plain(x), asynchronous(x), source.items(x)]
            for stream in streams:
                assert await anext(stream) == 1
        asyncio.run(main())
        print("leaving", flush=True)
        """
    else:
        end = """
        from aiocolocated import from_thread
        streams = [plain(x), asynchronous(x), Source().items(x)]
        for stream in streams:
            while (step := stream._take()) is not None:
                assert stream._outcome_of(step) == 1
                break
        print("leaving", flush=True)
        """
    done = run_script(SCRIPT + textwrap.dedent(end)).check()
    lines = done.stdout.split("\n")
    assert lines[0] == "leaving"
    assert sorted(lines[1:-1]) == sorted(
        ["plain ended", "asynchronous ended", "method ended", "object closed"]
    )
    assert lines.index("method ended") < lines.index("object closed")
    assert done.stderr == ""


def test_repeated_runs_leave_nothing_behind(run_script):
    """Streams that are left open by one asyncio.run after the other are closed as they are dropped."""
    end = """
        import time
        async def main():
            for make in (plain, asynchronous):
                stream = make(x)
                assert await anext(stream) == 1
        for _ in range(3):
            asyncio.run(main())
        deadline = time.monotonic() + 10
        from aiocolocated import runtime
        while runtime.calls() and time.monotonic() < deadline: time.sleep(0.01)
        print("leaving", flush=True)
        """
    done = run_script(SCRIPT + textwrap.dedent(end)).check()
    lines = done.stdout.split("\n")
    assert sorted(lines) == sorted(
        ["plain ended"] * 3 + ["asynchronous ended"] * 3 + ["leaving", ""]
    )
    assert done.stderr == ""
