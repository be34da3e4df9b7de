# SPDX-License-Identifier: Apache-2.0
"""Streams of objects, and loaders that are iterated (contract C13)."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import jax.numpy as jnp
import pytest
from stream_bodies import (
    KINDS,
    PROMPT,
    SHARED,
    TIMEOUT,
    AsyncIterator,
    AsyncLoader,
    Iterator,
    Loader,
    Opener,
    eventually,
    is_over,
    take,
    take_all,
    warm_up,
)

from aiocolocated import (
    ChannelClosedError,
    ObjectClosedError,
    colocated_python_class,
    gather,
    runtime,
)
from aiocolocated.testing import Gate, Recorder

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


# --- of an object -----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_other_methods_run_between_the_items(method, recorder):
    """An open stream holds nothing of its object, though only one method may run at a time."""
    async with asyncio.timeout(TIMEOUT):
        stream = method.open("count", recorder, 6)
        for i in range(5):
            assert await anext(stream) == i
            assert await method.object.ping(method.x) == "pong"
        await stream.aclose()


@pytest.mark.asyncio
async def test_step_counts_as_a_method_that_runs(method, recorder):
    """While the body works no other method of the object does."""
    gates = [Gate(), Gate()]
    stream = method.open("gated", recorder, gates, read_ahead=0)
    async with asyncio.timeout(TIMEOUT):
        waiting = asyncio.create_task(anext(stream))
        await recorder.wait_for("waits")
        ping = method.object.ping(method.x)
        done, _ = await asyncio.wait([asyncio.ensure_future(_wait(ping))], timeout=0.02)
        assert not done
        gates[0].open()
        assert await waiting == 0
        assert await ping == "pong"
        await stream.aclose()


async def _wait(future):
    return await future


@pytest.mark.asyncio
async def test_closing_an_object_closes_its_streams_first(recorder):
    """Their finally runs before the object's own close, and all is over when aclose returns."""

    class Source:
        def __init__(self, recorder):
            self.recorder = recorder

        def plain(self, x):
            try:
                while True:
                    yield 1
            finally:
                self.recorder.record("plain")

        async def asynchronous(self, x):
            try:
                while True:
                    yield 1
            finally:
                self.recorder.record("asynchronous")

        def close(self):
            self.recorder.record("close")

    x = jnp.zeros(1)
    source = colocated_python_class(Source)(recorder)
    streams = [source.plain(x), source.asynchronous(x), source.plain(x)]
    for stream in streams:
        await take(stream, 1)
    async with asyncio.timeout(PROMPT):
        await source.aclose()
    names = [event.name for event in recorder.events]
    assert sorted(names[:-1]) == ["asynchronous", "plain", "plain"]
    assert names[-1] == "close"
    for stream in streams:
        with pytest.raises(ChannelClosedError, match="its object closed"):
            await take(stream, 1)
        assert await is_over(stream)
        await stream.aclose()
    assert len(recorder.events) == 4


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.asyncio
async def test_stream_of_a_closed_object_is_refused(method, recorder, ahead):
    """Opened after the object was closed: in words, and nothing runs."""
    assert await method.object.ping(method.x) == "pong"
    await method.object.aclose()
    with pytest.raises(ObjectClosedError, match="closed"):
        stream = method.open("count", recorder, 3, read_ahead=ahead)
        await take(stream, 1)
    assert recorder.events == []


@pytest.mark.asyncio
async def test_unused_stream_of_a_closed_object_stands_in_nobodys_way(method, recorder):
    """Dropping one that could not begin neither runs anything nor stops the object's closing."""
    assert await method.object.ping(method.x) == "pong"
    stream = method.open("count", recorder, 3, read_ahead=0)
    async with asyncio.timeout(PROMPT):
        await method.object.aclose()
        with pytest.raises(ChannelClosedError, match="its object closed"):
            await anext(stream)
        await stream.aclose()
    del stream
    gc.collect()
    await eventually(lambda: not runtime.calls(), "nothing is left")
    assert recorder.events == []


@pytest.mark.asyncio
async def test_open_stream_keeps_its_object(recorder):
    """The object may be a temporary: it is closed when the stream is over, and no sooner."""

    class Loader:
        def __init__(self, recorder):
            self.recorder = recorder

        def items(self, x):
            yield from range(50)

        async def more(self, x):
            for i in range(50):
                yield i

        def close(self):
            self.recorder.record("close")

    cls = colocated_python_class(Loader)
    x = jnp.zeros(1)
    for number, name in enumerate(("items", "more")):
        got = []
        async with asyncio.timeout(TIMEOUT):
            async for item in getattr(cls(recorder), name)(x):
                gc.collect(0)
                assert recorder.count("close") == number
                got.append(item)
        assert got == list(range(50))
        await recorder.wait_for("close", number + 1, timeout=PROMPT)


@pytest.mark.asyncio
async def test_constructor_error_comes_from_the_first_item(x):
    """As from any method; the next stream tries again."""

    SHARED["tries"] = 0
    fussy = colocated_python_class(Fussy)()
    with pytest.raises(ValueError, match="not yet"):
        await take(fussy.items(x), 1)
    assert await take_all(fussy.items(x)) == [1]


class Fussy:
    """Of the module, so that it shares its globals."""

    def __init__(self):
        SHARED["tries"] += 1
        if SHARED["tries"] == 1:
            raise ValueError("not yet")

    def items(self, x):
        yield 1


@pytest.mark.asyncio
async def test_streams_of_one_object_take_turns(method, recorder):
    """Two of them, and a method, with max_concurrency=1: all get on."""
    async with asyncio.timeout(TIMEOUT):
        results = await gather(
            take_all(method.open("count", Recorder(), 30)),
            take_all(method.open("count", Recorder(), 30)),
            *(method.object.ping(method.x) for _ in range(10)),
        )
    assert results == [list(range(30))] * 2 + ["pong"] * 10


# --- loaders ----------------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_iterator_class_can_be_iterated(recorder, cpu_devices):
    """Grain's kind: wrapped as it is; StopIteration is the end; state methods work beside it."""
    cls = colocated_python_class(Iterator, devices=cpu_devices[:1])
    async with asyncio.timeout(TIMEOUT):
        async with cls(5, recorder) as iterator:
            got = [item async for item in iterator]
            assert [item["step"] for item in got] == [1, 2, 3, 4, 5]
            assert [float(item["batch"][0]) for item in got] == [1, 2, 3, 4, 5]
            assert [item async for item in iterator] == []  # it is its own iterator
            assert await iterator.get_state() == {"next": 5}
            await iterator.set_state({"next": 3})
            assert [item["step"] async for item in iterator] == [4, 5]
    assert recorder.count("close") == 1


@pytest.mark.asyncio
async def test_loader_class_begins_anew_each_time(cpu_devices):
    """PyTorch's kind."""
    loader = colocated_python_class(Loader, devices=cpu_devices[:1])(4)
    async with asyncio.timeout(TIMEOUT):
        for _ in range(3):
            assert [float(item[0]) async for item in loader] == [0, 1, 2, 3]
        assert await loader.__len__() == 4
    with pytest.raises(TypeError, match="async for"):
        iter(loader)


@pytest.mark.parametrize(
    ("cls", "expected"), [(AsyncIterator, [1, 2, 3]), (AsyncLoader, [0, 1, 2])]
)
@pytest.mark.asyncio
async def test_asynchronous_iterator_class_can_be_iterated(cls, expected, cpu_devices):
    """__aiter__ and __anext__, and __aiter__ that is a generator itself."""
    loader = colocated_python_class(cls, devices=cpu_devices[:1])(3)
    assert await take_all(aiter(loader)) == expected
    again = await take_all(aiter(loader))
    assert again == ([] if cls is AsyncIterator else expected)


@pytest.mark.asyncio
async def test_loader_of_a_generator_is_closed(recorder, cpu_devices):
    """Breaking out of an object's own iteration runs the finally of its __iter__."""
    cls = colocated_python_class(Cleaning, devices=cpu_devices[:1])
    loader = cls(recorder)
    async with contextlib.aclosing(aiter(loader)) as stream:
        async for _ in stream:
            break
    assert recorder.count("finally") == 1


class Cleaning:
    def __init__(self, recorder):
        self.recorder = recorder

    def __iter__(self):
        try:
            while True:
                yield 1
        finally:
            self.recorder.record("finally")
