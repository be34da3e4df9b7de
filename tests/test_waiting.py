# SPDX-License-Identifier: Apache-2.0
"""Waiting for many things: gather, as_completed, map and wait_until_ready."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from late_arrays import Late

from aiocolocated import (
    ArrayDeletedError,
    ArrayFuture,
    CallCancelledError,
    TaskChannel,
    TracedCallError,
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


# --- gather -----------------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_gather_gives_results_in_order(x):
    """Results come in the order of the arguments, whatever the order of finishing."""
    gates = [Gate() for _ in range(4)]
    calls = [elsewhere(wait, x, gate, None, i) for i, gate in enumerate(gates)]
    gathering = asyncio.create_task(gather(*calls))
    for gate, call in zip(reversed(gates), reversed(calls), strict=True):
        await spin()
        assert not gathering.done()
        gate.open()
        await call
    assert await gathering == [0, 1, 2, 3]


@pytest.mark.asyncio
async def test_gather_of_nothing_is_empty():
    """Without arguments the result is an empty list."""
    assert await gather() == []
    assert await gather(return_exceptions=True) == []


@pytest.mark.asyncio
async def test_gather_of_finished_calls_does_not_suspend(x):
    """What is done already costs no turn of the loop."""
    calls = [add(x, i) for i in range(3)]
    await calls[-1]
    results = without_suspending(gather(*calls))
    assert [int(r[0]) for r in results] == [0, 1, 2]
    assert without_suspending(gather(*calls, return_exceptions=True)) == results


@pytest.mark.asyncio
async def test_gather_waits_for_arrays(x):
    """A call is waited for until its arrays are computed, not only until its body has returned."""
    late = Late()
    call = elsewhere(be_late, x, late)
    gathering = asyncio.create_task(gather(call, add(x, 1)))
    await call.wait_dispatched()
    await spin()
    assert not gathering.done()
    late.release()
    first, second = await gathering
    assert first.is_ready()
    assert second.tolist() == [1, 2, 3]


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


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_gather_mixes_all_kinds_of_awaitables(x):
    """Calls, coroutines, tasks, futures and other awaitables keep their places."""

    class Other:
        def __await__(self):
            yield from asyncio.sleep(0).__await__()
            return "other"

    async def coroutine(value):
        await asyncio.sleep(0)
        return value

    future = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_result, "future")
    gate = Gate()
    call = elsewhere(wait, x, gate, None, "call")
    task = asyncio.create_task(coroutine("task"))
    task.add_done_callback(lambda _: gate.open())
    results = await gather(coroutine("coroutine"), call, task, Other(), future, elsewhere(add, x, 1))
    assert results[:5] == ["coroutine", "call", "task", "other", "future"]
    assert results[5].tolist() == [1, 2, 3]


@pytest.mark.asyncio
async def test_gather_makes_no_task_per_call(x):
    """Waiting for calls makes no asyncio task."""
    gate = Gate()
    calls = [elsewhere(wait, x, gate), *(add(x, i) for i in range(100))]
    gathering = asyncio.create_task(gather(*calls))
    await spin()
    assert asyncio.all_tasks() == {asyncio.current_task(), gathering}
    gate.open()
    assert len(await gathering) == 101


@pytest.mark.asyncio
async def test_gather_takes_duplicates(x):
    """The same call, task or coroutine given twice gives its result twice."""

    async def coroutine(value):
        await asyncio.sleep(0)
        return value

    gate = Gate()
    call, task, coro = wait(x, gate, None, "call"), asyncio.create_task(coroutine(1)), coroutine(2)
    gathering = asyncio.create_task(gather(call, task, coro, call, task, coro))
    await spin()
    gate.open()
    assert await gathering == ["call", 1, 2, "call", 1, 2]


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


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_gather_raises_first_error_at_once(x):
    """The first error to happen is raised while others still run, which go on."""
    slow, last, ready = Gate(), Gate(), Gate()
    calls = [
        elsewhere(wait, x, slow, None, "slow"),
        elsewhere(fail, x, ValueError("last"), last),
        elsewhere(fail, x, KeyError("first"), ready),
    ]
    gathering = asyncio.create_task(gather(*calls))
    await spin()
    ready.open()
    with pytest.raises(KeyError, match="first"):
        await gathering
    assert [call.done() for call in calls] == [False, False, True]
    slow.open()
    last.open()
    assert await calls[0] == "slow"
    with pytest.raises(ValueError, match="last"):
        await calls[1]


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
async def test_gather_raises_error_of_coroutine_at_once(x):
    """A coroutine's error is raised while calls still run, which go on."""

    async def broken():
        await asyncio.sleep(0)
        raise KeyError("coroutine")

    gate = Gate()
    slow = elsewhere(wait, x, gate, None, "slow")
    with pytest.raises(KeyError, match="coroutine"):
        await gather(slow, broken())
    assert not slow.done()
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
async def test_gather_with_exceptions_gives_everything(x):
    """With return_exceptions errors take the places of results, after all are done."""

    async def broken():
        raise KeyError("coroutine")

    async def fine():
        return "fine"

    gate = Gate()
    cancelled_call, cancelled_task = add(x, 1), asyncio.create_task(asyncio.sleep(60))
    slow = elsewhere(wait, x, gate, None, "slow")
    error = ValueError("call")
    gathering = asyncio.create_task(
        gather(
            elsewhere(fail, x, error),
            cancelled_call,
            broken(),
            slow,
            cancelled_task,
            fine(),
            return_exceptions=True,
        )
    )
    cancelled_call.cancel("for the test")
    cancelled_task.cancel()
    await spin()
    assert not gathering.done()
    gate.open()
    results = await gathering
    assert results[0] is error
    assert isinstance(results[1], CallCancelledError)
    assert isinstance(results[2], KeyError)
    assert results[3] == "slow"
    assert isinstance(results[4], asyncio.CancelledError)
    assert results[5] == "fine"


@pytest.mark.asyncio
async def test_gather_of_cancelled_call_raises_library_error(x):
    """Somebody else's cancelled call is an ordinary error for those who wait for it."""
    gate = Gate()
    blocker, call = wait(x, gate), add(x, 1)
    gathering = asyncio.create_task(gather(call, blocker))
    await spin()
    call.cancel()
    with pytest.raises(CallCancelledError):
        await gathering
    assert not blocker.done()
    gate.open()
    await blocker


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_cancelled_gather_cancels_what_nobody_else_waits_for(x, recorder):
    """Cancelling releases the waiter at once; calls with other waiters go on, the rest is cancelled."""
    gate, leave = Gate(), asyncio.Event()
    running = elsewhere(wait, x, gate, recorder, "running")
    blocker = wait(x, gate)
    queued = wait(x, gate, recorder, "queued")
    shared = wait(x, gate, recorder, "shared")
    other = asyncio.create_task(gather(shared))
    task = asyncio.create_task(leave.wait())
    gathering = asyncio.create_task(gather(running, queued, shared, task))
    await recorder.wait_for("start")
    await spin()
    gathering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(gathering, 5)
    assert running.cancelled()
    assert queued.cancelled()
    assert not shared.done()
    await spin()
    assert task.cancelled()
    assert recorder.sequence("end", "name") == []
    gate.open()
    assert await other == ["shared"]
    await blocker
    assert sorted(recorder.sequence("start", "name")) == ["running", "shared"]


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


# --- as_completed -----------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_as_completed_yields_in_order_of_finishing(x):
    """Every future is done when it is yielded, in the order of finishing."""
    gates = [Gate() for _ in range(4)]
    calls = [elsewhere(wait, x, gate, None, i) for i, gate in enumerate(gates)]
    order = [2, 0, 3, 1]
    gates[order[0]].open()
    seen = []
    async for call in as_completed(calls):
        assert call.done()
        seen.append(await call)
        if len(seen) < len(order):
            gates[order[len(seen)]].open()
    assert seen == order


@pytest.mark.asyncio
async def test_as_completed_of_nothing_ends():
    """Without futures the iterator is empty."""
    assert [call async for call in as_completed([])] == []


@pytest.mark.asyncio
async def test_as_completed_takes_any_iterable_and_yields_duplicates_once(x):
    """Futures come from any iterable; a future that repeats is yielded once."""
    call, other = add(x, 1), add(x, 2)
    yielded = [fut async for fut in as_completed(fut for fut in (call, other, call, call))]
    assert sorted(map(id, yielded)) == sorted(map(id, (call, other)))


@pytest.mark.asyncio
async def test_as_completed_yields_failed_and_cancelled_calls(x):
    """Errors are raised by the futures, not by the iteration."""
    gate = Gate()
    blocker, cancelled, failed = wait(x, gate), add(x, 1), elsewhere(fail, x, KeyError("body"))
    cancelled.cancel()
    outcomes = {}
    async for call in as_completed([blocker, cancelled, failed], timeout=10):
        try:
            outcomes[call] = await call
        except (KeyError, CallCancelledError) as error:
            outcomes[call] = type(error)
        if len(outcomes) == 2:
            gate.open()
    assert outcomes == {blocker: 0, cancelled: CallCancelledError, failed: KeyError}


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
async def test_as_completed_times_out_and_leaves_calls_alone(x):
    """What finishes in time is yielded, then TimeoutError; the remaining calls go on."""
    gate = Gate()
    slow, quick = elsewhere(wait, x, gate, None, "slow"), add(x, 1)
    await quick
    seen = []
    with pytest.raises(TimeoutError):
        async for call in as_completed([slow, quick], timeout=0.01):
            seen.append(call)
    assert seen == [quick]
    assert not slow.done()
    gate.open()
    assert await slow == "slow"


@pytest.mark.asyncio
async def test_as_completed_yields_what_is_done_without_time_left(x):
    """Finished futures are yielded whatever the timeout."""
    calls = [add(x, i) for i in range(3)]
    await calls[-1]
    assert [call async for call in as_completed(calls, timeout=0)] == calls


@pytest.mark.asyncio
async def test_cancelled_as_completed_cancels_what_nobody_else_waits_for(x, recorder):
    """Cancelling the wait releases it at once; calls with other waiters go on."""
    gate = Gate()
    done = add(x, 1)
    await done
    running = elsewhere(wait, x, gate, recorder, "running")
    blocker = wait(x, gate)
    queued = wait(x, gate, recorder, "queued")
    shared = wait(x, gate, recorder, "shared")
    other = asyncio.create_task(gather(shared))

    async def collect():
        async for _ in as_completed([done, running, queued, shared]):
            pass

    collecting = asyncio.create_task(collect())
    await recorder.wait_for("start")
    await spin()
    collecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(collecting, 5)
    assert [call.cancelled() for call in (done, running, queued, shared)] == [False, True, True, False]
    gate.open()
    assert await other == ["shared"]
    await blocker
    assert sorted(recorder.sequence("start", "name")) == ["running", "shared"]


@pytest.mark.asyncio
async def test_breaking_out_of_as_completed_leaves_calls_alone(x):
    """Remaining calls go on after a break, and after the iterator is closed."""
    gate = Gate()
    slow, quick = elsewhere(wait, x, gate, None, "slow"), add(x, 1)
    async for call in as_completed([slow, quick]):
        assert call is quick
        break
    iterator = as_completed([slow, quick])
    await anext(iterator)
    await iterator.aclose()
    await spin()
    assert not slow.done()
    gate.open()
    assert await slow == "slow"


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


# --- map --------------------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_map_gives_results_in_order(x):
    """Results come in the order of the items, whatever the order of finishing."""
    gates = [Gate() for _ in range(4)]
    mapping = asyncio.create_task(wait.map([x] * 4, gates, [None] * 4, range(4)))
    for i, gate in reversed(list(enumerate(gates))):
        await eventually(lambda i=i: runtime.statistics().running == i + 1, "the others ended")
        assert not mapping.done()
        gate.open()
    assert await mapping == [0, 1, 2, 3]


@pytest.mark.asyncio
async def test_map_of_nothing_is_empty(x):
    """Empty iterables, or none, give an empty list."""
    assert await add.map([], []) == []
    assert await add.map() == []
    assert await add.map([x], [], limit=1) == []


@pytest.mark.asyncio
async def test_map_ends_with_the_shortest(x):
    """Several iterables are taken side by side, as map() does."""
    results = await add.map(itertools.repeat(x), [1, 2, 3])
    assert [int(result[0]) for result in results] == [1, 2, 3]


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


@pytest.mark.parametrize("limit", [0, -1])
@pytest.mark.asyncio
async def test_map_refuses_senseless_limit(x, limit):
    """A limit below one is refused before anything is taken."""
    items = iter([x])
    with pytest.raises(ValueError, match="at least 1"):
        await add.map(items, [1], limit=limit)
    assert next(items) is x


@pytest.mark.asyncio
async def test_map_takes_items_as_calls_finish(x, recorder):
    """Never more items are taken than may be under way; each finished call takes one."""
    gates = [Gate() for _ in range(6)]
    taken = []

    def items():
        for i, gate in enumerate(gates):
            taken.append(i)
            yield gate

    mapping = asyncio.create_task(
        wait.map(itertools.repeat(x), items(), itertools.repeat(recorder), range(6), limit=2)
    )
    for finished in range(5):
        expected = min(6, finished + 2)
        await recorder.wait_for("start", expected)
        await spin()
        assert len(taken) == expected
        gates[finished].open()
    gates[5].open()
    assert await mapping == list(range(6))


@pytest.mark.asyncio
async def test_map_counts_calls_until_their_arrays_are_there(x, recorder):
    """A call whose arrays are still computed counts against the limit."""
    late, quick = Late(), Late()
    quick.release()
    mapping = asyncio.create_task(
        be_late.map([x] * 2, [late, quick], itertools.repeat(recorder), limit=1)
    )
    await recorder.wait_for("start")
    await eventually(lambda: runtime.statistics().running == 0, "the first body returned")
    await spin()
    assert recorder.count("start") == 1
    late.release()
    assert len(await mapping) == 2


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
        if i == 1:
            ready.wait()
            raise KeyError(i)
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
    with pytest.raises(KeyError, match="1"):
        await mapping
    assert recorder.sequence("end") == [0]
    assert sorted(recorder.sequence("start")) == [0, 1]
    assert taken == [0, 1, 2, 3, 4]
    assert not runtime.calls()


@pytest.mark.asyncio
async def test_map_raises_one_of_several_errors(x):
    """Errors behind the first are not reported: the caller has been told."""
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    meeting = Rendezvous(3)

    @colocated_python
    def body(x, i):
        meeting.wait()
        raise KeyError(i)

    with pytest.raises(KeyError):
        await body.map([x] * 3, range(3))
    await spin()
    assert reported == []


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
    gate = Gate()

    def items():
        yield gate
        raise KeyError("iterable")

    mapping = asyncio.create_task(
        wait.map(itertools.repeat(x), items(), itertools.repeat(recorder), limit=4)
    )
    await recorder.wait_for("start")
    await spin()
    assert not mapping.done()
    gate.open()
    with pytest.raises(KeyError, match="iterable"):
        await mapping
    assert recorder.count("end") == 1


@pytest.mark.asyncio
async def test_map_ends_when_a_call_cannot_be_made(x):
    """An item that the function refuses ends the map like any error."""
    gate = Gate()
    gate.open()
    elsewhere_array = jax.device_put(x, jax.devices()[1])
    pinned = wait.specialize(devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="device"):
        await pinned.map([x, elsewhere_array], itertools.repeat(gate))
    assert not runtime.calls()


# --- wait_until_ready -------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_wait_until_ready_waits_for_arrays(x):
    """It returns the same tree once every array is computed."""
    late = Late()
    tree = {"late": late.array(x), "ready": [x, None, 3, "text", np.arange(2)]}
    waiting = asyncio.create_task(wait_until_ready(tree))
    await spin()
    assert not waiting.done()
    late.release()
    assert await waiting is tree
    assert tree["late"].is_ready()


@pytest.mark.asyncio
async def test_wait_until_ready_of_ready_tree_does_not_suspend(x):
    """What is computed, or is no array, costs no turn of the loop."""
    jax.block_until_ready(x)
    for tree in (x, [x, (x, {"a": x})], None, (), 3, jax.random.key(0), jnp.zeros((0, 3))):
        jax.block_until_ready(tree)
        assert without_suspending(wait_until_ready(tree)) is tree


@pytest.mark.asyncio
async def test_wait_until_ready_replaces_futures(x):
    """Array futures in the tree are replaced by their results."""
    late = Late()
    call = elsewhere(be_late, x, late)
    waiting = asyncio.create_task(wait_until_ready({"a": add(x, 1), "b": (call, x), "c": call}))
    await call.wait_dispatched()
    await spin()
    assert not waiting.done()
    late.release()
    tree = await waiting
    assert tree["a"].tolist() == [1, 2, 3]
    assert tree["b"][0] is tree["c"] is await call
    assert tree["b"][1] is x


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


@pytest.mark.asyncio
async def test_slow_array_does_not_delay_fast_one(x):
    """Waiters of several arrays are woken as each becomes ready."""
    lates = [Late() for _ in range(4)]
    arrays = [late.array(jax.device_put(x, jax.devices()[i])) for i, late in enumerate(lates)]
    waiting = [asyncio.create_task(wait_until_ready(array)) for array in arrays]
    for i in (2, 1, 3, 0):
        await spin()
        assert not waiting[i].done()
        lates[i].release()
        await waiting[i]


@pytest.mark.asyncio
async def test_many_waiters_take_no_threads(x):
    """Any number of waiters for pending arrays is served by the library's one service thread."""
    await add(x, 1)  # the library's threads are there
    late = Late()
    array = late.array(x)
    before = threading.active_count()
    waiting = [asyncio.create_task(wait_until_ready([array, x])) for _ in range(200)]
    await spin()
    assert threading.active_count() <= before + 1
    late.release()
    for result in await gather(*waiting):
        assert result[0] is array


@pytest.mark.parametrize("kind", ["array", "future", "running"])
@pytest.mark.asyncio
async def test_wait_until_ready_times_out(x, kind):
    """TimeoutError; the computation or call goes on and may be awaited again."""
    late, gate = Late(), Gate()
    if kind == "array":
        gate.open()
        tree = late.array(x)
    elif kind == "future":
        gate.open()
        tree = elsewhere(be_late, x, late)
    else:
        late.release()
        tree = elsewhere(wait, x, gate)
    with pytest.raises(TimeoutError):
        await wait_until_ready(tree, timeout=0.01)
    if kind != "array":
        assert not tree.done()
    late.release()
    gate.open()
    await wait_until_ready(tree, timeout=10)


@pytest.mark.asyncio
async def test_wait_until_ready_of_ready_tree_needs_no_time(x):
    """With nothing to wait for even a timeout of zero is enough."""
    jax.block_until_ready(x)
    assert await wait_until_ready(x, timeout=0) is x


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


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@pytest.mark.asyncio
async def test_wait_until_ready_raises_error_of_computation(x, when):
    """A failed computation raises its error, whether it failed before or during the wait."""
    late = Late()
    array = late.array(x)
    if when == "before":
        late.fail()
        await eventually(array.is_ready, "the computation failed")
    waiting = asyncio.create_task(wait_until_ready([x, array]))
    await spin()
    late.fail()
    with pytest.raises(jax.errors.JaxRuntimeError, match="told to fail"):
        await waiting


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.asyncio
async def test_wait_until_ready_raises_first_error_at_once(x, place):
    """A failed call ends the wait while others still run, wherever it is in the tree."""
    gate, ready = Gate(), Gate()
    slow, failing = elsewhere(wait, x, gate, None, "slow"), elsewhere(fail, x, KeyError("body"), ready)
    tree = [slow]
    tree.insert(place, failing)
    waiting = asyncio.create_task(wait_until_ready(tree))
    await spin()
    ready.open()
    with pytest.raises(KeyError, match="body"):
        await waiting
    assert not slow.done()
    gate.open()
    assert await slow == "slow"


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
    await eventually(lambda: all(call.done() for call in calls), "all calls failed")
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


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@pytest.mark.asyncio
async def test_wait_until_ready_refuses_deleted_array(x, when):
    """A deleted array raises an error that says so, and does not crash the process."""
    late = Late()
    array = late.array(x)
    if when == "before":
        array.delete()
    waiting = asyncio.create_task(wait_until_ready([x, array]))
    await spin()
    if when == "meanwhile":
        assert not waiting.done()
        array.delete()
    with pytest.raises(ArrayDeletedError, match="deleted or donated"):
        await asyncio.wait_for(waiting, 10)
    late.release()


def test_wait_until_ready_refuses_tracers(x):
    """Under a transformation there is nothing to wait for, which the error says."""

    @jax.jit
    def function(x):
        with pytest.raises(TracedCallError, match="traces"):
            wait_until_ready(x).send(None)
        return x

    function(x)
