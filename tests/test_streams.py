# SPDX-License-Identifier: Apache-2.0
"""Streams (contract C13): items, read-ahead, the end, and errors."""

from __future__ import annotations

import asyncio
import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from late_arrays import Late
from stream_bodies import (
    KINDS,
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
    ArgumentError,
    BodyError,
    SpecError,
    colocated_python,
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


# --- items ------------------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_items_come_in_order_and_then_the_end(opener, recorder):
    """All of them, once, in the order of the body; the end stays the end; its finally has run."""
    stream = opener.open("count", recorder, 20)
    assert aiter(stream) is stream
    assert await take_all(stream) == list(range(20))
    assert recorder.sequence("step") == list(range(20))
    assert recorder.count("begin") == recorder.count("finally") == 1
    assert await is_over(stream)
    await stream.aclose()
    assert await is_over(stream)


@pytest.mark.asyncio
async def test_body_runs_on_its_host(opener, recorder):
    """A plain generator on worker threads, an asynchronous one on the host's loop."""
    await take_all(opener.open("count", recorder, 3))
    assert all(event.thread.startswith(opener.thread) for event in recorder.events)


@pytest.mark.asyncio
async def test_empty_stream_ends_at_once(opener, recorder):
    """A body without items is a stream without items."""
    assert await take_all(opener.open("count", recorder, 0)) == []
    assert recorder.count("finally") == 1


@dataclasses.dataclass
class Batch:
    name: str
    size: int


def plain_items(x):
    return [None, 0, False, "", 2**40, "text", b"\0", (), {}, [None], Batch("b", 3)]


@pytest.mark.asyncio
async def test_plain_items_keep_their_types(opener):
    """Python values are themselves; None is an item and no end."""
    got = await take_all(opener.open("items", plain_items))
    expected = plain_items(None)
    assert got == expected
    assert [type(item) for item in got] == [type(item) for item in expected]


def array_items(x):
    return [
        x,
        x + 1,
        {"a": [x, None], "b": np.arange(2, dtype=np.int8)},
        np.float32(2),
        np.zeros((0, 3), np.bool_),
        jax.random.key(3),
    ]


@pytest.mark.asyncio
async def test_array_items_are_results(opener):
    """Arrays are computed when they come; NumPy is on the device of the call, its dtype kept."""
    same, more, tree, scalar, empty, key = await take_all(opener.open("items", array_items))
    assert same is opener.x
    assert more.is_ready()
    np.testing.assert_array_equal(more, [1, 2, 3])
    assert tree["a"][0] is opener.x
    assert tree["a"][1] is None
    for placed, dtype in ((tree["b"], np.int8), (scalar, np.float32), (empty, np.bool_)):
        assert isinstance(placed, jax.Array)
        assert placed.dtype == dtype
        assert placed.device == opener.x.device
    assert empty.shape == (0, 3)
    assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


def late_items(x):
    return [1, SHARED["late"].array(x), 3]


@pytest.mark.asyncio
async def test_item_comes_when_its_arrays_are_computed(opener):
    """An item that is dispatched and not computed is waited for; the items after it come after it."""
    SHARED["late"] = late = Late()
    stream = opener.open("items", late_items)
    assert await take(stream, 1) == [1]
    second = asyncio.create_task(anext(stream))
    await eventually(
        lambda: any(call.state == "dispatched" for call in runtime.calls()), "it is dispatched"
    )
    assert not second.done()
    late.release()
    async with asyncio.timeout(TIMEOUT):
        array = await second
    assert array.is_ready()
    assert await take_all(stream) == [3]


def failing_array_items(x):
    return [1, SHARED["late"].array(x), 3]


@pytest.mark.asyncio
async def test_failed_computation_is_the_error_of_its_item(opener):
    """The item before it comes; awaiting the item raises; the stream is over."""
    SHARED["late"] = late = Late()
    stream = opener.open("items", failing_array_items)
    assert await take(stream, 1) == [1]
    late.fail()
    with pytest.raises(Exception, match="late array was told to fail"):
        await take(stream, 1)
    assert await is_over(stream)
    await stream.aclose()


def wide_items(x):
    return [1, {"k": np.float64(2)}, 3]


@pytest.mark.asyncio
async def test_numpy_item_that_would_lose_bits_is_refused(opener):
    """After the item before it, in words, with its path."""
    stream = opener.open("items", wide_items)
    assert await take(stream, 1) == [1]
    with pytest.raises(ArgumentError, match=r"result\['k'\].*float64.*x64 is off"):
        await take(stream, 1)
    assert await is_over(stream)
    await stream.aclose()


def mistaken_items(x):
    return [1, (i for i in range(3))]


@pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")
@pytest.mark.asyncio
async def test_item_that_can_only_be_a_mistake_is_refused(opener):
    """A generator as an item is refused in words, after the items before it."""
    stream = opener.open("items", mistaken_items)
    assert await take(stream, 1) == [1]
    with pytest.raises(ArgumentError, match="generator"):
        await take(stream, 1)
    await stream.aclose()


def shaped_items(x):
    return [x, x * 2, jnp.arange(4.0), x]


@pytest.mark.asyncio
async def test_every_item_is_checked_against_the_specs(opener):
    """Items that fit come; the first that does not is refused with both shapes."""
    spec = jax.ShapeDtypeStruct(opener.x.shape, opener.x.dtype, sharding=opener.x.sharding)
    stream = opener.open("items", shaped_items, out_specs_fn=lambda *_: spec)
    first, second = await take(stream, 2)
    np.testing.assert_array_equal(first * 2, second)
    with pytest.raises(SpecError, match=r"(?s)items.*float32\[3\].*float32\[4\]"):
        await take(stream, 1)
    assert await is_over(stream)
    await stream.aclose()


def test_specialization_is_given_once(opener):
    """read_ahead as every other thing; the words name the function."""
    function = opener.function("count")
    once = function.specialize(read_ahead=3)
    with pytest.raises(SpecError, match=r"count.*: read_ahead already specified"):
        once.specialize(read_ahead=3)
    device = jax.devices("cpu")[:1]
    with pytest.raises(SpecError, match="devices already specified"):
        once.specialize(devices=device).specialize(devices=device)
    again = once.specialize(devices=device)  # read_ahead stays
    with pytest.raises(SpecError, match="read_ahead already specified"):
        again.specialize(read_ahead=1)


@pytest.mark.parametrize("wrong", [-1, True, 1.5, "2"])
def test_read_ahead_is_a_number_of_items(opener, wrong):
    """Anything else is refused in words where it is given."""
    with pytest.raises(SpecError, match=f"read_ahead must be .*{wrong!r}"):
        opener.function("count").specialize(read_ahead=wrong)


@pytest.mark.asyncio
async def test_call_without_arrays_takes_the_given_devices(opener, recorder, cpu_devices):
    """As for a function: items are placed there."""
    function = opener.function("items").specialize(devices=cpu_devices[3])
    first = () if opener.is_method else (None,)
    stream = function(*first, None, lambda x: [np.float32(1)])
    (item,) = await take_all(stream)
    assert item.device == cpu_devices[3]


@pytest.mark.asyncio
async def test_call_without_devices_is_refused_where_it_is_made(opener):
    """No stream is opened."""
    first = () if opener.is_method else (None,)
    with pytest.raises(SpecError, match="devices="):
        opener.function("items")(*first, None, plain_items)
    with pytest.raises(TypeError, match="items"):
        opener.function("items")(*first, opener.x)


@pytest.mark.asyncio
async def test_future_may_be_an_argument(opener):
    """The body sees the array when it is there."""
    gate = Gate()

    @colocated_python
    def later(x):
        gate.wait()
        return x + 5

    future = later(opener.x)
    first = () if opener.is_method else (None,)
    stream = opener.function("items")(*first, future, lambda x: [int(x[0])])
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    assert not waiting.done()
    gate.open()
    async with asyncio.timeout(TIMEOUT):
        assert await waiting == 5
    assert await is_over(stream)


# --- read-ahead -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [None, 0, 1, 5])
@pytest.mark.asyncio
async def test_body_is_so_far_ahead_and_no_further(opener, recorder, ahead):
    """It goes as far as it may without being asked, and then rests, whatever the consumer does."""
    stop = 12
    allowed = 2 if ahead is None else ahead
    stream = opener.open("count", recorder, stop, read_ahead=ahead)
    for taken in range(stop):
        produced = min(stop, taken + allowed)
        await recorder.wait_for("step", produced)
        await no_call_is_left()
        assert recorder.count("step") == produced
        recorder.record("asks")
        assert await anext(stream) == taken
    assert await is_over(stream)
    asked = 0
    for event in recorder.events:
        if event.name == "asks":
            asked += 1
        elif event.name == "step":
            assert event.fields["i"] < asked + allowed


@pytest.mark.asyncio
async def test_lock_step_body_runs_only_while_the_consumer_waits(opener, recorder):
    """With read-ahead 0 opening starts nothing, and between items nothing of it runs."""
    stream = opener.open("count", recorder, 3, read_ahead=0)
    assert runtime.calls() == []
    assert "not started" in repr(stream)
    assert recorder.events == []
    for i in range(3):
        assert await take(stream, 1) == [i]
        assert recorder.sequence("step") == list(range(i + 1))
        assert runtime.calls() == []
        assert recorder.count("finally") == 0
    assert await is_over(stream)
    assert recorder.count("finally") == 1


@pytest.mark.asyncio
async def test_opening_starts_the_body_by_default(opener, recorder):
    """Two items are made though nobody waits."""
    stream = opener.open("count", recorder, 10)
    await recorder.wait_for("step", 2)
    assert "open" in repr(stream)
    await stream.aclose()


@pytest.mark.asyncio
async def test_item_does_not_wait_for_the_one_after_it(opener, recorder):
    """An item comes as soon as it is there, though the body works at the next one already."""
    gates = [Gate() for _ in range(3)]
    stream = opener.open("gated", recorder, gates)
    for i, gate in enumerate(gates):
        gate.open()
        assert await take(stream, 1) == [i]
        assert recorder.sequence("step") == list(range(i + 1))
    assert await is_over(stream)


@pytest.mark.asyncio
async def test_streams_of_one_task_overlap(recorder):
    """Each has a channel of its own, whatever the task's current one is busy with."""
    plain, method = Opener("function"), Opener("async method")
    gate, closed = Gate(), Gate()

    @colocated_python
    def busy(x):
        gate.wait()

    blocker = busy(plain.x)
    waiting = plain.open("gated", recorder, [closed])
    assert await take_all(method.open("count", Recorder(), 5)) == list(range(5))
    assert await take_all(plain.open("count", Recorder(), 5)) == list(range(5))
    gate.open()
    closed.open()
    assert await take_all(waiting) == [0]
    await blocker


# --- errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 2, 10])
@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_error_comes_after_the_items_before_it(opener, recorder, ahead):
    """However far the body is ahead; then the stream is over, and there is nothing to close."""
    stream = opener.open("count", recorder, 5, ValueError("broken"), read_ahead=ahead)
    if ahead == 10:
        await recorder.wait_for("finally")  # it has failed before anybody asks
    assert await take(stream, 5) == list(range(5))
    with pytest.raises(ValueError, match="broken") as caught:
        await take(stream, 1)
    assert await is_over(stream)
    assert recorder.count("finally") == 1
    (note,) = caught.value.__notes__
    assert "count" in note
    assert __file__.rpartition("/")[2].replace("test_streams", "stream_bodies") in note
    await stream.aclose()


@pytest.mark.asyncio
async def test_error_before_the_first_item(opener, recorder):
    """The first anext raises it."""
    stream = opener.open("count", recorder, 0, ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        await take_all(stream)
    assert await is_over(stream)


@pytest.mark.parametrize(
    "kind",
    [KeyboardInterrupt, SystemExit, asyncio.CancelledError, StopIteration, StopAsyncIteration],
)
@pytest.mark.asyncio
async def test_dangerous_error_ends_the_stream_and_nothing_else(opener, recorder, kind):
    """It arrives inside of another error, or as Python's own for generators: never as an end."""
    stream = opener.open("count", recorder, 2, kind("why"))
    assert await take(stream, 2) == [0, 1]
    with pytest.raises((BodyError, RuntimeError)) as caught:
        await take(stream, 1)
    assert isinstance(caught.value.__cause__, kind)
    assert await is_over(stream)
    await stream.aclose()
    assert recorder.count("finally") == 1
    assert await take_all(opener.open("count", Recorder(), 3)) == [0, 1, 2]


@pytest.mark.asyncio
async def test_error_that_nobody_asked_for_is_not_reported_after_closing(opener, recorder, caplog):
    """A consumer that closes its stream does not want to know what comes later."""
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    stream = opener.open("count", recorder, 2, ValueError("broken"), read_ahead=5)
    assert await take(stream, 1) == [0]
    await recorder.wait_for("finally")
    await no_call_is_left()
    await stream.aclose()
    del stream
    gc.collect()
    await take_all(opener.open("count", Recorder(), 1))
    await asyncio.sleep(0)
    assert reported == []
    assert caplog.records == []
