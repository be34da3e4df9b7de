# SPDX-License-Identifier: Apache-2.0
"""Objects with a thread of their own (contract C3): for state that is bound to a thread."""

from __future__ import annotations

import asyncio
import sqlite3
import threading

import jax
import jax.numpy as jnp
import pytest

from aiocolocated import (
    ArgumentError,
    ObjectClosedError,
    TaskGroup,
    colocated_python_class,
    from_thread,
    jax_scope,
)
from aiocolocated.testing import Gate

TIMEOUT = 20.0  # seconds; only a bug takes that long

closed_on: list[str] = []


class Notes:
    """Keeps an SQLite connection, which only the thread that opened it may use."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:")
        self.connection.execute("create table notes (number)")

    def add(self, number):
        self.connection.execute("insert into notes values (?)", (number,))
        return self.connection.execute("select count(*) from notes").fetchone()[0]

    def numbers(self):
        for row in self.connection.execute("select number from notes order by number"):
            yield row[0]

    def thread(self):
        return threading.current_thread().name

    def hold(self, started, gate):
        started.open()
        gate.wait(TIMEOUT)

    def precision(self, x):
        return (x + x).dtype.name, jax.config.jax_enable_x64

    def fail(self):
        raise KeyError("none")

    def close(self):
        self.connection.close()
        closed_on.append(threading.current_thread().name)


@pytest.fixture
def colocated_notes(cpu_devices):
    closed_on.clear()
    return colocated_python_class(Notes, devices=cpu_devices[0], dedicated_thread=True)


def object_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("aiocolocated-object")]


@pytest.mark.asyncio
async def test_everything_runs_on_the_objects_thread(colocated_notes):
    """Constructor, methods of many channels, streams and closing: SQLite would refuse another thread."""
    async with asyncio.timeout(TIMEOUT), colocated_notes() as notes:
        async with TaskGroup() as group:
            for number in range(50):
                group.start_soon(notes.add, number)
        assert sorted(group.results()) == list(range(1, 51))
        assert [number async for number in notes.numbers()] == list(range(50))
        name = await notes.thread()
    assert name.startswith("aiocolocated-object")
    assert closed_on == [name]
    assert not object_threads()


@pytest.mark.asyncio
async def test_two_objects_have_two_threads(colocated_notes):
    """While one is in a body, the other's runs."""
    started, gate = Gate(), Gate()
    async with asyncio.timeout(TIMEOUT), colocated_notes() as one, colocated_notes() as other:
        held = one.hold(started, gate)
        await started.wait_async(TIMEOUT)
        async with TaskGroup() as group:
            count = group.start_soon(other.add, 1)
        assert count.result() == 1
        gate.open()
        await held


@pytest.mark.asyncio
async def test_cancelled_waiter_does_not_wait_for_the_body(colocated_notes):
    """A plain body is abandoned as on a worker; the next method waits for it."""
    started, gate = Gate(), Gate()
    async with asyncio.timeout(TIMEOUT), colocated_notes() as notes:
        held = notes.hold(started, gate)
        await started.wait_async(TIMEOUT)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(held, 0.001)
        behind = notes.add(1)
        assert not behind.done()
        gate.open()
        assert await behind == 1


@pytest.mark.asyncio
async def test_error_starts_at_the_body(colocated_notes):
    """As from a worker thread: type, note and traceback; the next call works."""
    async with asyncio.timeout(TIMEOUT), colocated_notes() as notes:
        with pytest.raises(KeyError) as caught:
            await notes.fail()
        assert caught.traceback[-1].name == "fail"
        assert caught.value.__notes__[0].startswith("colocated call Notes.fail")
        assert await notes.add(1) == 1


@pytest.mark.asyncio
async def test_body_sees_the_jax_configuration_of_its_submission(colocated_notes):
    """It is in force for that body only."""
    async with asyncio.timeout(TIMEOUT), colocated_notes() as notes:
        with jax_scope(enable_x64=True):
            inside = notes.precision(jnp.ones(2))
        outside = notes.precision(jnp.ones(2))
        assert await inside == ("float32", True)
        assert await outside == ("float32", False)


@pytest.mark.asyncio
async def test_dropped_object_closes_on_its_thread(colocated_notes):
    """Nobody waits for that; the thread ends after it."""
    notes = colocated_notes()
    name = await notes.thread()
    del notes
    async with asyncio.timeout(TIMEOUT):
        while object_threads():
            await asyncio.sleep(0.001)
    assert closed_on == [name]


def test_constructor_error_leaves_no_thread_behind(cpu_devices):
    """The thread ends when the object is closed, made or not."""

    class Failing:
        def __init__(self):
            raise OSError("no such file")

        def use(self):
            pass

    cls = colocated_python_class(Failing, devices=cpu_devices[0], dedicated_thread=True)
    failing = cls()
    for _ in range(2):
        with pytest.raises(OSError, match="no such file"):
            failing.use().result(TIMEOUT)
    from_thread.run(failing.aclose)
    assert not object_threads()


def test_coroutine_methods_are_refused():
    """They would run on the host's loop, which is another thread."""

    class Asynchronous:
        async def use(self):
            pass

    with pytest.raises(ArgumentError, match=r"Asynchronous\.use is asynchronous.*plain methods"):
        colocated_python_class(Asynchronous, dedicated_thread=True)


def test_object_that_is_never_used_has_no_thread(colocated_notes):
    """The thread starts with the first call."""
    notes = colocated_notes()
    assert not object_threads()
    from_thread.run(notes.aclose)
    assert not closed_on


@pytest.mark.asyncio
async def test_stream_of_a_closed_object_is_refused(colocated_notes):
    """Nothing of it waits for the thread, which has ended; its block is left."""
    notes = colocated_notes()
    await notes.add(1)
    await notes.aclose()
    async with asyncio.timeout(TIMEOUT), TaskGroup():
        for opened in (notes.numbers, notes.numbers.specialize(read_ahead=0)):
            with pytest.raises(ObjectClosedError):
                await anext(opened())
    assert not object_threads()


@pytest.mark.asyncio
@pytest.mark.parametrize("first", ["object", "stream"])
async def test_stream_that_never_started_starts_no_thread(colocated_notes, first):
    """Neither closing it does, nor closing its object."""
    notes = colocated_notes()
    stream = notes.numbers.specialize(read_ahead=0)()
    async with asyncio.timeout(TIMEOUT):
        for closed in (notes, stream) if first == "object" else (stream, notes):
            await closed.aclose()
    assert not object_threads()


def test_one_thread_runs_one_method_at_a_time():
    """A higher limit would be a misunderstanding."""
    with pytest.raises(ValueError, match="there is one thread"):
        colocated_python_class(Notes, dedicated_thread=True, max_concurrency=2)
