# SPDX-License-Identifier: Apache-2.0
"""Waiting for many, at the edges: duplicates, races, given-up waits, and what errors keep alive."""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import pytest
from late_arrays import Late

from aiocolocated import (
    ArrayFuture,
    CallCancelledError,
    TaskChannel,
    TracedCallError,
    _readiness,
    as_completed,
    colocated_python,
    configure,
    gather,
    runtime,
    wait_until_ready,
)
from aiocolocated.testing import Gate, Recorder, Rendezvous

pytestmark = pytest.mark.timeout(40)


@pytest.fixture
def x() -> jax.Array:
    return jnp.arange(3.0)


@colocated_python
def add(x: jax.Array, n: int) -> jax.Array:
    return x + n


@colocated_python
def wait(x: jax.Array, gate: Gate, recorder: Recorder | None = None, name: object = 0) -> object:
    """Note the start, wait, note the end, and return the name."""
    if recorder is not None:
        recorder.record("start", name=name)
    gate.wait()
    if recorder is not None:
        recorder.record("end", name=name)
    return name


@colocated_python
def fail(x: jax.Array, error: Exception, gate: Gate | None = None) -> jax.Array:
    if gate is not None:
        gate.wait()
    raise error


@colocated_python
def be_late(x: jax.Array, late: Late, recorder: Recorder | None = None) -> jax.Array:
    """Return an array that is computed when the test wants it."""
    if recorder is not None:
        recorder.record("start")
    return late.array(x)


def elsewhere(function, *args) -> ArrayFuture:
    """A call in a channel of its own."""
    return TaskChannel().submit_nowait(function, *args)


async def spin(turns: int = 20) -> None:
    """Give a loop turns in which what must not happen would."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def eventually(condition, what: str, timeout: float = 10.0) -> None:
    """Wait until something that no future tells of has happened."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        await asyncio.sleep(0.001)


def without_suspending(coroutine):
    """The result of a coroutine that must not wait for anything."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    pytest.fail("the coroutine suspended")


@pytest.mark.asyncio
async def test_gather_of_finished_calls_does_not_suspend(x):
    """What is done already costs no turn of the loop."""
    calls = [add(x, i) for i in range(3)]
    await calls[-1]
    results = without_suspending(gather(*calls))
    assert [int(r[0]) for r in results] == [0, 1, 2]
    assert without_suspending(gather(*calls, return_exceptions=True)) == results


@pytest.mark.asyncio
async def test_gather_raises_error_of_computation(x):
    """An error that only the computation has is raised like that of a body."""
    late = Late()
    call = elsewhere(be_late, x, late)
    gathering = asyncio.create_task(gather(add(x, 1), call))
    await call.wait_dispatched()
    late.fail()
    with pytest.raises(jax.errors.JaxRuntimeError, match="told to fail"):
        await gathering


@pytest.mark.asyncio
async def test_cancelled_gather_of_duplicates_cancels_the_call(x):
    """A call given twice does not keep itself alive."""
    gate = Gate()
    blocker, call = wait(x, gate), add(x, 1)
    gathering = asyncio.create_task(gather(call, call))
    await spin()
    gathering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gathering
    assert call.cancelled()
    gate.open()
    await blocker


@pytest.mark.parametrize("wrong", [3, None, "text", [1]])
@pytest.mark.asyncio
async def test_gather_refuses_what_cannot_be_awaited(x, wrong):
    """A TypeError, as from asyncio.gather, that leaves the calls alone."""
    call = add(x, 1)
    with pytest.raises(TypeError, match=r"awaitable|coroutine"):
        await gather(call, wrong)
    assert (await call).tolist() == [1, 2, 3]


@pytest.mark.asyncio
async def test_gather_raises_error_that_is_there_already(x):
    """It does not wait for anything if one of the calls has failed before."""
    gate = Gate()
    slow, failed = elsewhere(wait, x, gate, None, "slow"), elsewhere(fail, x, KeyError("early"))
    with pytest.raises(KeyError, match="early"):
        await failed
    with pytest.raises(KeyError, match="early"):
        without_suspending(gather(slow, failed))
    gate.open()
    assert await slow == "slow"


@pytest.mark.asyncio
async def test_gather_raises_error_of_call_while_coroutine_runs(x):
    """A call's error is raised while a coroutine still runs, which goes on."""
    leave = asyncio.Event()

    async def patient():
        await leave.wait()
        return "done"

    task = asyncio.create_task(patient())
    with pytest.raises(KeyError, match="call"):
        await gather(task, elsewhere(fail, x, KeyError("call")))
    assert not task.done()
    leave.set()
    assert await task == "done"


@pytest.mark.asyncio
async def test_cancelled_gather_with_exceptions_is_cancelled(x):
    """return_exceptions does not swallow the caller's own cancellation."""
    gate = Gate()
    call = elsewhere(wait, x, gate)
    gathering = asyncio.create_task(gather(call, return_exceptions=True))
    await spin()
    gathering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gathering
    assert call.cancelled()
    gate.open()


@pytest.mark.asyncio
async def test_timeout_around_gather_cancels_its_calls(x):
    """asyncio.timeout turns into TimeoutError and takes the calls with it."""
    gate = Gate()
    call = elsewhere(wait, x, gate)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await gather(call)
    assert call.cancelled()
    gate.open()


@pytest.mark.asyncio
async def test_last_of_two_gathers_cancels_the_call(x):
    """A call is cancelled with its last waiter, not with the first."""
    gate = Gate()
    call = elsewhere(wait, x, gate)
    first, second = asyncio.create_task(gather(call)), asyncio.create_task(gather(call))
    await spin()
    for gathering, cancelled in ((first, False), (second, True)):
        gathering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gathering
        assert call.cancelled() is cancelled
    gate.open()


def test_gather_of_two_loops_at_once(x):
    """Loops in two threads gather the same calls."""
    gate, meeting = Gate(), Rendezvous(2)
    calls = [elsewhere(wait, x, gate, None, i) for i in range(5)]
    results = []

    async def main():
        gathering = asyncio.create_task(gather(*calls))
        await asyncio.sleep(0)
        await asyncio.to_thread(meeting.wait)
        gate.open()
        results.append(await gathering)

    threads = [threading.Thread(target=asyncio.run, args=(main(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.asyncio
async def test_as_completed_waits_for_arrays(x):
    """A call whose arrays are still being computed is not yielded."""
    late = Late()
    slow, quick = elsewhere(be_late, x, late), add(x, 1)
    await slow.wait_dispatched()
    iterator = as_completed([slow, quick])
    assert await anext(iterator) is quick
    rest = asyncio.create_task(anext(iterator))
    await spin()
    assert not rest.done()
    late.release()
    assert await rest is slow
    await iterator.aclose()


@pytest.mark.asyncio
async def test_as_completed_yields_what_is_done_without_time_left(x):
    """Finished futures are yielded whatever the timeout."""
    calls = [add(x, i) for i in range(3)]
    await calls[-1]
    assert [call async for call in as_completed(calls, timeout=0)] == calls


@pytest.mark.asyncio
async def test_closed_as_completed_is_no_waiter(x):
    """Once closed, it does not keep a call whose last waiter is cancelled."""
    gate = Gate()
    slow, quick = elsewhere(wait, x, gate), add(x, 1)
    iterator = as_completed([slow, quick])
    await anext(iterator)
    await iterator.aclose()
    waiting = asyncio.create_task(gather(slow))
    await spin()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert slow.cancelled()
    gate.open()


@pytest.mark.asyncio
async def test_as_completed_refuses_others_and_leaves_no_waiter(x):
    """It takes array futures only; the ones before the wrong one are untouched."""
    gate = Gate()
    call = elsewhere(wait, x, gate)
    task = asyncio.create_task(asyncio.sleep(0))
    with pytest.raises(TypeError, match="array futures"):
        async for _ in as_completed([call, task]):
            pass
    await task
    waiting = asyncio.create_task(gather(call))
    await spin()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert call.cancelled()  # so the refused iteration did not count as a waiter
    gate.open()


@pytest.mark.asyncio
async def test_as_completed_misses_nothing_when_calls_finish_meanwhile(x):
    """Whatever the moment at which a worker finishes a call, it is yielded once."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            calls = [elsewhere(add, 0.0 * x, i) for i in range(20)]
            seen = [call async for call in as_completed(calls, timeout=10)]
            assert len(seen) == 20
            assert set(seen) == set(calls)
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("by_default", [False, True])
@pytest.mark.asyncio
async def test_map_respects_its_limit_exactly(x, recorder, by_default):
    """So many calls run at once and never one more; worker_limit if nothing is said."""
    meeting = Rendezvous(3)

    @colocated_python
    def meet(x, i):
        recorder.record("start", i=i)
        meeting.wait()
        recorder.record("end", i=i)
        return i

    if by_default:
        configure(worker_limit=3)
    limit = {} if by_default else {"limit": 3}
    assert await meet.map([x] * 12, range(12), **limit) == list(range(12))
    assert recorder.peak() == 3


@pytest.mark.asyncio
async def test_map_takes_futures_as_items(x):
    """Items may be calls themselves."""
    results = await add.map([add(x, 1), add(x, 2)], [10, 20])
    assert [int(result[0]) for result in results] == [11, 22]


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_failed_map_cancels_the_rest_and_waits_for_bodies(x, recorder):
    """After the first error no further item is taken, what is queued never runs, and nothing runs on."""
    configure(worker_limit=2)
    leave, ready = Gate(), Gate()
    taken = []

    @colocated_python
    def body(x, i):
        recorder.record("start", i=i)
        if recorder.sequence("start").index(i) == 1:
            ready.wait()
            raise KeyError("second")
        leave.wait()
        recorder.record("end", i=i)

    def items():
        for i in itertools.count():
            taken.append(i)
            yield i

    mapping = asyncio.create_task(body.map(itertools.repeat(x), items(), limit=5))
    await recorder.wait_for("start", 2)
    ready.open()
    await eventually(lambda: runtime.statistics().queued == 0, "the queued calls were cancelled")
    await spin()
    assert not mapping.done()  # an abandoned body still runs
    assert recorder.count("end") == 0
    leave.open()
    with pytest.raises(KeyError, match="second"):
        await mapping
    # The worker of the failed call may have started one more before the map heard of the failure.
    assert recorder.count("start") in (2, 3)
    assert recorder.count("end") == recorder.count("start") - 1
    assert taken == [0, 1, 2, 3, 4]
    assert not runtime.calls()


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_cancelled_map_waits_for_bodies(x, recorder):
    """However often it is cancelled, it is over only when none of its bodies runs, and then cancelled."""
    gate = Gate()
    mapping = asyncio.create_task(
        wait.map([x] * 4, itertools.repeat(gate), itertools.repeat(recorder), range(4), limit=2)
    )
    await recorder.wait_for("start", 2)
    for _ in range(3):
        mapping.cancel()
        await spin()
        assert not mapping.done()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await mapping
    assert sorted(recorder.sequence("end", "name")) == [0, 1]
    assert recorder.count("start") == 2


@pytest.mark.asyncio
async def test_map_over_failing_iterable_ends_its_calls(x, recorder):
    """The iterable's own error is raised after its calls were cancelled and none runs."""
    first, second = Gate(), Gate()

    def items():
        yield first
        yield second
        raise KeyError("iterable")

    mapping = asyncio.create_task(
        wait.map(itertools.repeat(x), items(), itertools.repeat(recorder), limit=2)
    )
    await recorder.wait_for("start", 2)
    first.open()
    await eventually(lambda: len(runtime.calls()) == 1, "the first call is over")
    await spin()
    assert not mapping.done()
    second.open()
    with pytest.raises(KeyError, match="iterable"):
        await mapping
    assert recorder.count("end") == 2


@pytest.mark.asyncio
async def test_wait_until_ready_waits_for_futures_and_arrays(x):
    """A tree of both is ready when both are."""
    late, gate = Late(), Gate()
    call = elsewhere(wait, x, gate, None, "call")
    waiting = asyncio.create_task(wait_until_ready([late.array(x), call]))
    gate.open()
    await call
    await spin()
    assert not waiting.done()
    late.release()
    array, name = await waiting
    assert array.is_ready()
    assert name == "call"


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_cancelled_wait_until_ready_never_cancels(x, recorder):
    """The waiter is released at once; the calls go on, although nobody else waits for them."""
    gate, late = Gate(), Late()
    running = elsewhere(wait, x, gate, recorder, "running")
    blocker = wait(x, gate)
    queued = wait(x, gate, recorder, "queued")
    waiting = [
        asyncio.create_task(wait_until_ready([running, queued])),
        asyncio.create_task(wait_until_ready(late.array(x))),
    ]
    await recorder.wait_for("start")
    await spin()
    for task in waiting:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)
    assert not running.done()
    assert not queued.done()
    gate.open()
    late.release()
    assert await gather(running, blocker, queued) == ["running", 0, "queued"]


@pytest.mark.asyncio
async def test_wait_until_ready_does_not_keep_a_call(x):
    """It does not cancel a call, and once it is over it does not hold it either."""
    gate = Gate()
    call = elsewhere(wait, x, gate)
    looking, waiting = (asyncio.create_task(w) for w in (wait_until_ready(call), gather(call)))
    await spin()
    looking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looking
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert call.cancelled()
    gate.open()


@pytest.mark.asyncio
async def test_wait_until_ready_counts_every_error_as_retrieved(x):
    """As with gather, errors behind the first that is raised are not reported as well."""
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    gate = Gate()
    calls = [elsewhere(fail, x, KeyError(i)) for i in range(2)]
    calls.append(elsewhere(fail, x, KeyError(2), gate))
    with pytest.raises(KeyError):
        await wait_until_ready(calls)
    gate.open()
    with pytest.raises(KeyError):
        await calls[2]
    del calls
    await spin()
    assert reported == []


@pytest.mark.asyncio
async def test_wait_until_ready_of_cancelled_call_raises_library_error(x):
    """A call that somebody else cancelled raises CallCancelledError."""
    gate = Gate()
    blocker, call = wait(x, gate), add(x, 1)
    waiting = asyncio.create_task(wait_until_ready((blocker, call)))
    await spin()
    call.cancel()
    with pytest.raises(CallCancelledError):
        await waiting
    gate.open()
    await blocker


@pytest.mark.asyncio
async def test_given_up_waits_are_not_polled_on(x):
    """A wait that timed out costs nothing more, however long the computation takes."""
    late = Late()
    array = late.array(x)
    for _ in range(10):
        with pytest.raises(TimeoutError):
            await wait_until_ready([array], timeout=0.001)
    await eventually(lambda: _readiness._pending == 0, "the poller has nothing to do")
    assert not array.is_ready()
    late.release()
    await wait_until_ready(array)


@pytest.mark.parametrize("kind", ["call", "array", "timeout"])
@pytest.mark.asyncio
async def test_error_of_wait_until_ready_keeps_no_array(x, kind):
    """While its error is handled, what was waited for can be freed, without the garbage collector."""
    late = Late()
    if kind == "call":
        failing = elsewhere(fail, x, KeyError("body"))
    else:
        failing = late.array(x)
        if kind == "array":
            late.fail()
    tree = [x + 1, failing]
    held = weakref.ref(tree[0])
    gc.disable()
    try:
        with pytest.raises((KeyError, TimeoutError, jax.errors.JaxRuntimeError)) as caught:
            await wait_until_ready(tree, timeout=0.01 if kind == "timeout" else None)
        del tree, failing
        assert held() is None
    finally:
        gc.enable()
        late.release()
    del caught


def test_wait_until_ready_refuses_tracers(x):
    """Under a transformation there is nothing to wait for, which the error says."""

    @jax.jit
    def function(x):
        with pytest.raises(TracedCallError, match="traces"):
            wait_until_ready(x).send(None)
        return x

    function(x)
