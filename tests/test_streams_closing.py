# SPDX-License-Identifier: Apache-2.0
"""Closing streams (contract C13): when and where a body's finally runs, and what blocks do."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import threading
import time
from types import SimpleNamespace

import pytest
from stream_bodies import (
    KINDS,
    PROMPT,
    SHARED,
    TIMEOUT,
    Opener,
    eventually,
    is_over,
    take,
    take_all,
    warm_up,
)

from aiocolocated import (
    CallCancelledError,
    ChannelClosedError,
    TaskGroup,
    colocated_python,
    gather,
    open_task_channel,
    runtime,
)
from aiocolocated._sources import END, Source
from aiocolocated.testing import Gate

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _around():
    warm_up()
    yield
    SHARED.clear()


@pytest.fixture(params=KINDS)
def opener(request) -> Opener:
    return Opener(request.param)


# --- aclose -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_aclose_runs_the_finally_on_the_host(opener, recorder, ahead):
    """It has run when aclose returns, soon, where the body runs; then there are no more items."""
    stream = opener.open("count", recorder, 1000, read_ahead=ahead)
    assert await take(stream, 3) == [0, 1, 2]
    recorder.record("closing")
    async with asyncio.timeout(PROMPT):
        await stream.aclose()
    recorder.record("closed")
    names = [e.name for e in recorder.events if e.name in ("closing", "finally", "closed")]
    assert names == ["closing", "finally", "closed"]
    assert recorder.count("step") <= 3 + ahead
    where = next(e.thread for e in recorder.events if e.name == "finally")
    assert where.startswith(opener.thread)
    assert await is_over(stream)
    assert "closed" in repr(stream)
    assert runtime.calls() == []


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_break_under_aclosing_runs_the_finally(opener, recorder):
    """Before the block is left."""
    async with asyncio.timeout(PROMPT):
        async with contextlib.aclosing(opener.open("count", recorder, 1000)) as stream:
            async for item in stream:
                if item == 3:
                    break
        recorder.record("left")
    assert [e.name for e in recorder.events][-2:] == ["finally", "left"]


@pytest.mark.asyncio
async def test_error_of_the_consumer_under_aclosing_runs_the_finally(opener, recorder):
    """And goes on as it is."""
    with pytest.raises(ZeroDivisionError):
        async with contextlib.aclosing(opener.open("count", recorder, 1000)) as stream:
            async for _ in stream:
                raise ZeroDivisionError
    assert recorder.count("finally") == 1


@pytest.mark.asyncio
async def test_aclose_twice_and_concurrently(opener, recorder):
    """The finally runs once, and everybody waits for it."""
    stream = opener.open("count", recorder, 1000)
    await take(stream, 1)
    async with asyncio.timeout(PROMPT):
        await gather(*(stream.aclose() for _ in range(5)))
        assert recorder.count("finally") == 1
        await stream.aclose()
    assert recorder.count("finally") == 1


@pytest.mark.asyncio
async def test_aclose_before_the_start_runs_nothing(opener, recorder):
    """A body that was never advanced has nothing to clean up."""
    stream = opener.open("count", recorder, 10, read_ahead=0)
    async with asyncio.timeout(PROMPT):
        await stream.aclose()
    assert await is_over(stream)
    del stream
    await eventually(lambda: not runtime.calls(), "nothing is left")
    assert recorder.events == []


@pytest.mark.asyncio
async def test_aclose_at_once_leaves_nothing_half_open(opener, recorder):
    """Whether or not the body had begun: what has begun has ended."""
    for _ in range(30):
        stream = opener.open("count", recorder, 10)
        async with asyncio.timeout(PROMPT):
            await stream.aclose()
        assert recorder.count("begin") == recorder.count("finally")
        assert await is_over(stream)


@pytest.mark.asyncio
async def test_aclose_while_a_plain_body_works(recorder):
    """The step cannot be interrupted: aclose waits for it, then the finally runs."""
    for kind in ("function", "method"):
        recorder.clear()
        opener, gate = Opener(kind), Gate()
        stream = opener.open("gated", recorder, [gate])
        await recorder.wait_for("waits")
        closing = asyncio.create_task(stream.aclose())
        await eventually(
            lambda: any("closing" in call.function for call in runtime.calls()), "it is closing"
        )
        assert not closing.done()
        assert recorder.count("finally") == 0
        gate.open()
        async with asyncio.timeout(PROMPT):
            await closing
        assert [e.name for e in recorder.events] == ["waits", "step", "finally"]
        assert await is_over(stream)


@pytest.mark.parametrize("kind", ["async function", "async method"])
@pytest.mark.asyncio
async def test_aclose_while_an_asynchronous_body_waits(kind, recorder):
    """The body is cancelled where it waits, and its finally runs, soon."""
    opener = Opener(kind)
    stream = opener.open("gated", recorder, [Gate()])
    await recorder.wait_for("waits")
    async with asyncio.timeout(PROMPT):
        await stream.aclose()
    assert [e.name for e in recorder.events] == ["waits", "finally"]
    assert await is_over(stream)


@pytest.mark.parametrize("kind", ["async function", "async method"])
@pytest.mark.asyncio
async def test_aclose_while_somebody_waits_for_an_item(kind, recorder):
    """That consumer hears of it at once."""
    opener = Opener(kind)
    stream = opener.open("gated", recorder, [Gate()])
    await recorder.wait_for("waits")
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    async with asyncio.timeout(PROMPT):
        await stream.aclose()
        with pytest.raises(CallCancelledError, match="its stream was closed"):
            await waiting
    assert recorder.count("finally") == 1


async def cleaning(x, recorder, gate):
    """Its clean-up awaits."""
    try:
        while True:
            yield 0
    finally:
        recorder.record("cleaning")
        await gate.wait_async()
        recorder.record("clean")


@pytest.mark.asyncio
async def test_aclose_waits_for_an_awaiting_finally(recorder):
    """Not only for its first step; a cancelled wait does not stop it."""
    gate = Gate()
    stream = colocated_python(cleaning)(Opener("function").x, recorder, gate)
    await take(stream, 1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await stream.aclose()
    await recorder.wait_for("cleaning")
    closing = asyncio.create_task(stream.aclose())
    await asyncio.sleep(0)
    assert not closing.done()
    gate.open()
    async with asyncio.timeout(PROMPT):
        await closing
    assert [e.name for e in recorder.events] == ["cleaning", "clean"]


@pytest.mark.parametrize("kind", ["function", "method"])
@pytest.mark.asyncio
async def test_cancelled_aclose_closes_all_the_same(kind, recorder):
    """Its wait ends at once; the body is closed when it can be."""
    opener, gate = Opener(kind), Gate()
    stream = opener.open("gated", recorder, [gate])
    await recorder.wait_for("waits")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await stream.aclose()
    assert recorder.count("finally") == 0
    gate.open()
    await recorder.wait_for("finally", timeout=PROMPT)
    assert await is_over(stream)


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.asyncio
async def test_error_in_the_finally_comes_out_of_aclose(opener, recorder, ahead):
    """With a note that names the body."""
    stream = opener.open("stubborn", recorder, ValueError("cannot close"), read_ahead=ahead)
    await take(stream, 2)
    with pytest.raises(ValueError, match="cannot close") as caught:
        async with asyncio.timeout(PROMPT):
            await stream.aclose()
    assert any("stubborn" in note for note in caught.value.__notes__)
    assert await is_over(stream)
    assert runtime.calls() == []


@pytest.mark.asyncio
async def test_body_that_goes_on_after_closing_is_an_error(opener):
    """As for any generator."""
    stream = opener.open("goes_on", read_ahead=0)
    await take(stream, 1)
    with pytest.raises(RuntimeError, match="ignored GeneratorExit"):
        async with asyncio.timeout(PROMPT):
            await stream.aclose()
    assert await is_over(stream)


# --- dropping ---------------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_dropped_stream_is_closed_in_the_background(opener, recorder):
    """On its host, and nowhere else."""
    stream = opener.open("count", recorder, 1000)
    await take(stream, 2)
    del stream
    await recorder.wait_for("finally", timeout=PROMPT)
    where = next(e.thread for e in recorder.events if e.name == "finally")
    assert where.startswith(opener.thread)


@pytest.mark.parametrize("where", ["thread", "collector"])
@pytest.mark.asyncio
async def test_stream_may_be_dropped_anywhere(opener, recorder, where):
    """By another thread, or by the garbage collector."""
    stream = opener.open("count", recorder, 1000)
    await take(stream, 2)
    holder = [stream]
    del stream
    if where == "thread":
        await asyncio.to_thread(holder.clear)
    else:
        holder.append(holder)
        del holder
        gc.collect()
    await recorder.wait_for("finally", timeout=PROMPT)


@pytest.mark.asyncio
async def test_break_without_aclosing_closes_when_the_stream_is_dropped(opener, recorder):
    """An async for over a temporary stream."""
    async for item in opener.open("count", recorder, 1000):
        if item == 2:
            break
    await recorder.wait_for("finally", timeout=PROMPT)


@pytest.mark.asyncio
async def test_stream_that_is_dropped_at_once_leaves_nothing(opener, recorder):
    """Nobody ever asked: what has begun has ended."""
    for ahead in (0, 2):
        for _ in range(10):
            opener.open("count", recorder, 1000, read_ahead=ahead)
    await eventually(
        lambda: not runtime.calls() and recorder.count("begin") == recorder.count("finally"),
        "all are closed",
    )


@pytest.mark.asyncio
async def test_dropped_while_the_body_works(opener, recorder):
    """It is closed when its step has ended; an asynchronous one at once."""
    gate = Gate()
    stream = opener.open("gated", recorder, [gate])
    await recorder.wait_for("waits")
    del stream
    if not opener.asynchronous:
        gate.open()
    await recorder.wait_for("finally", timeout=PROMPT)


@pytest.mark.asyncio
async def test_error_in_the_finally_of_a_dropped_stream_is_reported_once(opener, recorder, caplog):
    """Where nobody can be told: in the log."""
    stream = opener.open("stubborn", recorder, ValueError("cannot close"))
    await take(stream, 1)
    del stream
    await recorder.wait_for("finally", timeout=PROMPT)
    await eventually(lambda: "cannot close" in caplog.text, "it is reported")
    records = [r for r in caplog.records if r.exc_info and "cannot close" in str(r.exc_info[1])]
    assert len(records) == 1
    assert "stubborn" in records[0].getMessage()
    del records
    caplog.clear()  # tracebacks keep the arrays of their frames


@pytest.mark.asyncio
async def test_dropped_streams_are_closed_one_after_the_other(recorder):
    """A thousand finally clauses do not take a thousand threads."""
    x = Opener("function").x
    streams = [colocated_python(slow_to_close)(x, recorder, i) for i in range(10)]
    for stream in streams:
        await take(stream, 1)
    del stream
    while streams:
        streams.pop(0)
    await recorder.wait_for("end", 10)
    assert recorder.peak() == 1
    assert recorder.sequence("start") == list(range(10))


def slow_to_close(x, recorder, i):
    try:
        while True:
            yield i
    finally:
        recorder.record("start", i=i)
        time.sleep(0.002)
        recorder.record("end", i=i)


# --- blocks -----------------------------------------------------------------------------------------

BLOCKS = {"TaskGroup": TaskGroup, "open_task_channel": open_task_channel}


@pytest.fixture(params=BLOCKS)
def block(request):
    return BLOCKS[request.param]


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_leaving_a_block_closes_its_streams(opener, recorder, block):
    """The finally has run when the block has been left."""
    async with asyncio.timeout(PROMPT):
        async with block():
            stream = opener.open("count", recorder, 1000)
            await take(stream, 2)
        recorder.record("left")
    assert [e.name for e in recorder.events][-2:] == ["finally", "left"]


@pytest.mark.asyncio
async def test_block_left_by_an_exception_closes_its_streams(opener, recorder, block):
    """Before the exception goes on."""
    async with asyncio.timeout(PROMPT):
        with pytest.raises((ExceptionGroup, ZeroDivisionError)):
            async with block():
                stream = opener.open("count", recorder, 1000)
                await take(stream, 2)
                raise ZeroDivisionError
    assert recorder.count("finally") == 1


@pytest.mark.asyncio
async def test_cancelled_block_closes_its_streams(opener, recorder, block):
    """Before the cancellation goes on."""

    async def main():
        async with block():
            stream = opener.open("gated", recorder, [gate])
            async for _ in stream:
                pass

    gate = Gate()
    task = asyncio.create_task(main())
    await recorder.wait_for("waits")
    task.cancel()
    if not opener.asynchronous:  # its step cannot be interrupted
        done, _ = await asyncio.wait([task], timeout=0.02)
        assert not done
        gate.open()
    async with asyncio.timeout(PROMPT):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert recorder.count("finally") == 1


@pytest.mark.asyncio
async def test_block_is_left_though_a_body_waits_for_ever(recorder, block):
    """An asynchronous body that is ahead of its consumer, and waits there, is cancelled."""
    for kind in ("async function", "async method"):
        recorder.clear()
        opener, gates = Opener(kind), [Gate(), Gate()]
        gates[0].open()
        async with asyncio.timeout(PROMPT):
            async with block():
                stream = opener.open("gated", recorder, gates)
                assert await take(stream, 1) == [0]
                await recorder.wait_for("waits", 2)
        assert recorder.count("finally") == 1


@pytest.mark.asyncio
async def test_block_waits_for_a_plain_body_that_works(recorder, block):
    """Nothing of it runs any more when the block has been left."""
    for kind in ("function", "method"):
        recorder.clear()
        opener, gate = Opener(kind), Gate()

        async def main(opener=opener, gate=gate):
            async with block():
                stream = opener.open("gated", recorder, [gate])
                await recorder.wait_for("waits")
                del stream

        task = asyncio.create_task(main())
        await recorder.wait_for("waits")
        done, _ = await asyncio.wait([task], timeout=0.02)
        assert not done
        gate.open()
        async with asyncio.timeout(PROMPT):
            await task
        assert recorder.count("finally") == 1


@pytest.mark.asyncio
async def test_stream_of_a_child_task_belongs_to_the_group(opener, recorder):
    """The child has ended, the stream is open, and closed when the group has been left."""
    opened = []

    async def child():
        stream = opener.open("count", recorder, 1000)
        opened.append(stream)
        await take(stream, 2)

    async with asyncio.timeout(PROMPT):
        async with TaskGroup() as group:
            await group.create_task(child())
            assert recorder.count("finally") == 0
            assert await take(opened[0], 1) == [2]
    assert recorder.count("finally") == 1


@pytest.mark.asyncio
async def test_child_task_may_read_its_stream_to_the_end(opener, recorder):
    """Leaving the group's block waits for the child before it closes anything."""
    gates = [Gate() for _ in range(4)]

    async def child():
        return [item async for item in opener.open("gated", recorder, gates)]

    async def open_gates():
        for gate in gates:
            await asyncio.sleep(0.002)
            gate.open()

    async with asyncio.timeout(PROMPT):
        async with TaskGroup() as group:
            reading = group.create_task(child())
            group.create_task(open_gates())
    assert reading.result() == [0, 1, 2, 3]


@pytest.mark.asyncio
async def test_inner_block_leaves_streams_of_outer_blocks_alone(opener, recorder):
    """A stream belongs to the block in which it was opened."""
    async with open_task_channel():
        stream = opener.open("count", recorder, 1000)
        async with TaskGroup():
            assert await take(stream, 1) == [0]
        assert await take(stream, 3) == [1, 2, 3]
        assert recorder.count("finally") == 0
    assert recorder.count("finally") == 1


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.asyncio
async def test_stream_that_outlives_its_block_says_so(opener, recorder, block, ahead):
    """It does not seem to be at its end; then it is over."""
    async with block():
        stream = opener.open("count", recorder, 1000, read_ahead=ahead)
        await take(stream, 2)
    with pytest.raises(ChannelClosedError, match=r"count.* was closed before its end.*block"):
        await take(stream, 1)
    assert await is_over(stream)
    await stream.aclose()
    assert recorder.count("finally") == 1


@pytest.mark.asyncio
async def test_stream_that_was_closed_in_its_block_is_at_its_end(opener, recorder, block):
    """By its user: nothing is missing that was not meant to be."""
    async with block():
        stream = opener.open("count", recorder, 1000)
        await take(stream, 2)
        await stream.aclose()
        ended = opener.open("count", recorder, 1)
        assert await take_all(ended) == [0]
    assert await is_over(stream)
    assert await is_over(ended)


@pytest.mark.asyncio
async def test_error_in_the_finally_of_a_block_s_stream_joins_the_block(opener, recorder, block):
    """As other errors do that nobody has seen."""
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(PROMPT):
            async with block():
                stream = opener.open("stubborn", recorder, ValueError("cannot close"))
                await take(stream, 1)
    (error,) = caught.value.exceptions
    assert re.search("cannot close", str(error))


# --- threads ----------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_open_streams_hold_no_thread_and_no_call(opener, recorder):
    """Between two items a body is at rest: a hundred open streams cost no thread."""
    before = threading.active_count()
    streams = [opener.open("count", recorder, 5, read_ahead=0) for _ in range(100)]
    for stream in streams:
        await take(stream, 1)
    assert runtime.calls() == []
    assert threading.active_count() <= before + 5
    async with asyncio.timeout(TIMEOUT):
        await gather(*(stream.aclose() for stream in streams))
    assert recorder.count("finally") == 100


@pytest.mark.parametrize("kind", ["generator", "asynchronous generator"])
def test_body_of_a_stream_closed_before_its_first_step_never_begins(kind):
    """Another thread may close a stream while its first step is being submitted."""
    began: list[int] = []

    def plain():
        began.append(1)
        yield 1

    async def asynchronous():
        began.append(1)
        yield 1

    function = colocated_python(plain if kind == "generator" else asynchronous)
    source = Source(function._function._base, None)
    source.plan = SimpleNamespace(body=lambda: plain if kind == "generator" else asynchronous)
    source.end()
    step = source.begin()
    if kind == "generator":
        assert step is END
    else:
        assert asyncio.run(step) is END
    assert not began
    assert not source.made
