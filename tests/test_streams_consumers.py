# SPDX-License-Identifier: Apache-2.0
"""Streams (contract C13): consumers that are cancelled or many, what is in force, and memory."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import weakref

import jax
import jax.numpy as jnp
import pytest
from stream_bodies import (
    KINDS,
    PROMPT,
    SHARED,
    TIMEOUT,
    USER,
    Opener,
    eventually,
    is_over,
    take,
    take_all,
    warm_up,
)

from aiocolocated import (
    BodyError,
    colocated_python,
    gather,
    jax_scope,
    runtime,
)
from aiocolocated.testing import Gate, Recorder

pytestmark = [pytest.mark.timeout(60), pytest.mark.strict_values]


@pytest.fixture(autouse=True)
def _around():
    warm_up()
    yield
    SHARED.clear()


@pytest.fixture(params=KINDS)
def opener(request) -> Opener:
    return Opener(request.param)


async def no_call_is_left() -> None:
    await eventually(lambda: not runtime.calls(), "every step has ended")


# --- consumers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_cancelled_consumer_loses_no_item(opener, recorder, ahead):
    """Waits that time out leave the body alone; the next one gets the item."""
    gates = [Gate() for _ in range(3)]
    stream = opener.open("gated", recorder, gates, read_ahead=ahead)
    for i, gate in enumerate(gates):
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.005):
                    await anext(stream)
        waiting = asyncio.create_task(anext(stream))
        await recorder.wait_for("waits", i + 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.open()
        assert await take(stream, 1) == [i]
        assert recorder.count("waits") <= i + 1 + ahead
    assert await is_over(stream)
    assert recorder.sequence("step") == [0, 1, 2]


@pytest.mark.asyncio
async def test_cancelled_wait_leaves_no_waiter(opener, recorder):
    """Nobody waits for the step any more, and the step goes on."""
    gate = Gate()
    stream = opener.open("gated", recorder, [gate], read_ahead=0)
    for _ in range(5):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.005):
                await anext(stream)
    (step,) = stream._steps
    assert not step._waiters
    assert step._waiter_count == 0
    assert not step.done()
    gate.open()
    await recorder.wait_for("step")
    assert await take_all(stream) == [0]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.asyncio
async def test_random_cancellation_loses_and_repeats_nothing(opener, recorder, seed):
    """A consumer that is cancelled at any moment, again and again, gets every item once, in order."""
    chance = random.Random(seed)
    stream = opener.open("count", recorder, 150, read_ahead=chance.choice([0, 1, 4]))
    got = []

    async def consume():
        async for item in stream:
            got.append(item)  # noqa: PERF401 - the list has to be right when this is cancelled
        return True

    async with asyncio.timeout(TIMEOUT):
        while True:
            task = asyncio.create_task(consume())
            for _ in range(chance.randrange(12)):
                await asyncio.sleep(0)
            if chance.random() < 0.3:
                await asyncio.sleep(chance.random() * 2e-3)
            task.cancel()
            try:
                await task
                break
            except asyncio.CancelledError:
                continue
    assert got == list(range(150))


@pytest.mark.asyncio
async def test_two_consumers_share_the_items(opener, recorder):
    """Each item goes to one of them, in order, and both see the end."""
    stream = opener.open("count", recorder, 60)
    taken = Recorder()

    async def consume():
        mine = []
        async for item in stream:
            taken.record("item", i=item)
            mine.append(item)
        return mine

    async with asyncio.timeout(TIMEOUT):
        first, second = await gather(consume(), consume())
    assert first
    assert second
    assert first == sorted(first)
    assert second == sorted(second)
    assert sorted(first + second) == list(range(60))


@pytest.mark.asyncio
async def test_error_comes_to_one_of_two_consumers(opener, recorder):
    """The other one sees the end: nobody hangs."""
    stream = opener.open("count", recorder, 4, ValueError("broken"))

    async def consume():
        async for _ in stream:
            pass

    async with asyncio.timeout(TIMEOUT):
        outcomes = await gather(consume(), consume(), return_exceptions=True)
    assert sorted(map(repr, outcomes)) == ["None", "ValueError('broken')"]


def test_stream_is_bound_to_no_loop(opener, new_loop):
    """Opened in one program run, read in the next two, and closed in a fourth."""
    recorder = Recorder()

    def run(coroutine):
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(coroutine)

    async def opened():
        return opener.open("count", recorder, 100)

    stream = run(opened())
    assert run(take(stream, 3)) == [0, 1, 2]
    assert run(take(stream, 3)) == [3, 4, 5]
    run(stream.aclose())
    assert recorder.count("finally") == 1


# --- what is in force -------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", [jax_scope, jax.enable_x64], ids=["jax_scope", "thread"])
@pytest.mark.asyncio
async def test_context_and_jax_config_of_the_opening_task_hold_in_every_step(
    opener, recorder, scope
):
    """What the body sets stays in the body; what consumers set does not reach it."""
    USER.set("opener")
    with scope(enable_x64=True) if scope is jax_scope else scope(True):
        stream = opener.open("settings", recorder, read_ahead=0)
    USER.set("somebody else")
    assert await take(stream, 1) == [("opener", True)]

    async def other():
        USER.set("other")
        return await take(stream, 1)

    assert await asyncio.create_task(other()) == [(("opener", "body"), True)]
    await stream.aclose()
    ((seen, wide),) = recorder.sequence("finally")
    assert seen == ("opener", "body")
    assert wide
    assert USER.get() == "somebody else"
    assert not jax.config.jax_enable_x64


@pytest.mark.asyncio
async def test_streams_with_other_settings_do_not_mix(opener, recorder):
    """Two of them, advanced in turn, each see their own."""
    streams = []
    for i in range(2):
        USER.set(i)
        with jax_scope(enable_x64=bool(i)):
            streams.append(opener.open("settings", recorder, read_ahead=0))
    for step in range(3):
        for i, stream in enumerate(streams):
            ((user, wide),) = await take(stream, 1)
            for _ in range(step):
                user = user[0]
            assert user == i
            assert wide == bool(i)
    for stream in streams:
        await stream.aclose()


# --- what a body has open across its yields ---------------------------------------------------------


async def hurried(x, recorder):
    """A timeout around two items and what is between them."""
    try:
        async with asyncio.timeout(0.05):
            yield 1
            recorder.record("goes on")
            await asyncio.sleep(30)
    except TimeoutError:
        yield "too late"


async def grouped(x, recorder):
    """A task group around them, one task of which fails."""

    async def fail():
        await asyncio.sleep(0.05)
        recorder.record("fails")
        raise ValueError("a child")

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            yield 1
            recorder.record("goes on")
            await asyncio.sleep(30)
    except* ValueError:
        recorder.record("failed")
    yield "a child failed"


@pytest.mark.parametrize(("body", "word"), [(hurried, "too late"), (grouped, "a child failed")])
@pytest.mark.parametrize("when", ["in a step", "between steps", "read ahead"])
@pytest.mark.asyncio
async def test_timeouts_and_groups_may_be_open_across_yields(body, word, when, recorder):
    """They belong to the body's own task, whenever they strike: nothing of the body hangs."""
    function = colocated_python(body).specialize(read_ahead=3 if when == "read ahead" else 0)
    async with asyncio.timeout(PROMPT):
        async with contextlib.aclosing(function(jnp.zeros(1), recorder)) as stream:
            assert await anext(stream) == 1
            if when == "between steps":
                await asyncio.sleep(0.1)
            assert await anext(stream) == word
            assert await anext(stream, None) is None


@pytest.mark.asyncio
async def test_body_may_cancel_itself_before_a_yield(recorder):
    """An odd thing to do; the stream goes on, or ends, and nothing hangs."""
    function = colocated_python(cancels_itself).specialize(read_ahead=0)
    async with asyncio.timeout(PROMPT):
        async with contextlib.aclosing(function(jnp.zeros(1), recorder)) as stream:
            assert await anext(stream) == 1
            with contextlib.suppress(BodyError):
                await anext(stream)
    assert recorder.count("finally") == 1


async def cancels_itself(x, recorder):
    try:
        asyncio.current_task().cancel()
        yield 1
        yield 2
    finally:
        recorder.record("finally")


# --- memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.asyncio
async def test_big_items_are_freed_without_the_collector(opener, ahead):
    """80 MB each: once consumer and body have let go of one, nothing keeps it, not even a cycle."""
    gc.collect()
    gc.disable()
    try:
        stream = opener.open("big", 4, read_ahead=ahead)
        watched = []
        async with asyncio.timeout(TIMEOUT):
            async for item in stream:
                watched.append(weakref.ref(item))
                del item
                await no_call_is_left()
                # The body is past all but its last item, which its frame may still have.
                await eventually(
                    lambda: all(w() is None for w in watched[:-1]), "it is freed", timeout=5
                )
        assert len(watched) == 4
        await eventually(lambda: watched[-1]() is None, "the last one is freed", timeout=5)
        del stream
    finally:
        gc.enable()


@pytest.mark.parametrize("end", ["aclose", "dropped", "error"])
@pytest.mark.asyncio
async def test_items_that_nobody_took_are_freed(opener, end):
    """Closing or dropping a stream lets go of what was read ahead, and of the argument."""
    gc.collect()
    gc.disable()
    try:
        opener.x = jnp.ones((20_000_000,), jnp.float32)
        watched = weakref.ref(opener.x)
        stream = opener.open("items" if end == "error" else "big", failing if end == "error" else 4)
        opener.x = None
        if end == "error":
            with contextlib.suppress(ValueError):
                await take(stream, 1)
        else:
            await take(stream, 1)
        if end == "aclose":
            await stream.aclose()
        else:
            del stream
        await eventually(lambda: watched() is None, "the argument is freed", timeout=5)
    finally:
        gc.enable()


def failing(x):
    del x  # a traceback keeps its frames, and so the locals of the body
    raise ValueError("failed")
