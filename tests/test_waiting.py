# SPDX-License-Identifier: Apache-2.0
"""Waiting for many: gather, as_completed, map, and wait_until_ready for trees with futures."""

from __future__ import annotations

import asyncio
import gc
import time

import jax
import jax.numpy as jnp
import pytest
from late_arrays import Late

from aiocolocated import (
    CallCancelledError,
    SpecError,
    TaskChannel,
    as_completed,
    colocated_python,
    configure,
    gather,
    open_task_channel,
    runtime,
    wait_until_ready,
)
from aiocolocated.testing import Gate, Recorder, Rendezvous

pytestmark = pytest.mark.timeout(40)


@pytest.fixture
def x() -> jax.Array:
    return jnp.arange(3.0)


@pytest.fixture
def xs() -> list[jax.Array]:
    return [jnp.full(3, float(i)) for i in range(8)]


@colocated_python
def ok(x: jax.Array) -> jax.Array:
    return x


@colocated_python
def give(x: jax.Array, value: object) -> object:
    return value


@colocated_python
def fail(x: jax.Array, error: BaseException) -> jax.Array:
    raise error


@colocated_python
def wait(x: jax.Array, gate: Gate, value: object = None) -> object:
    gate.wait()
    if isinstance(value, Exception):
        raise value
    return value


@colocated_python
def be_late(x: jax.Array, late: Late) -> jax.Array:
    return late.array(x)


def held(x: jax.Array, gate: Gate, value: object = None):
    """A call in a channel of its own that waits for a gate; its value may be an error."""
    return TaskChannel().submit_nowait(wait, x, gate, value)


async def eventually(condition, what: str, timeout: float = 10.0) -> None:
    """Wait until something that no future tells of has happened."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        await asyncio.sleep(0.001)


async def a_moment() -> None:
    """Time in which what must not happen would."""
    await asyncio.sleep(0.005)


class Reports:
    """What the running loop's exception handler is told."""

    def __init__(self) -> None:
        self.found: list[dict] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, c: self.found.append(c))

    async def are_none(self) -> bool:
        gc.collect()
        await asyncio.sleep(0.03)  # time in which one would arrive
        return self.found == []


# --- gather -----------------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_gather_gives_results_in_order(x):
    """Results come in the order of the arguments, whichever finished first."""
    gates = [Gate() for _ in range(4)]
    gathering = asyncio.ensure_future(gather(*(held(x, gate, i) for i, gate in enumerate(gates))))
    for gate in reversed(gates):
        await a_moment()
        assert not gathering.done()
        gate.open()
    assert await gathering == [0, 1, 2, 3]


@pytest.mark.asyncio
async def test_gather_of_nothing_and_of_finished_calls(x):
    """No arguments give an empty list; calls that are over give their results without a wait."""
    assert await gather() == []
    assert await gather(return_exceptions=True) == []
    calls = [give(x, i) for i in range(5)]
    await gather(*calls)
    gathering = gather(*calls)
    with pytest.raises(StopIteration) as stop:
        gathering.send(None)
    assert stop.value.value == [0, 1, 2, 3, 4]


@pytest.mark.asyncio
async def test_gather_waits_for_arrays(x):
    """A call whose arrays are still computing is not over."""
    late = Late()
    call = be_late(x, late)
    gathering = asyncio.ensure_future(gather(call, ok(x)))
    await call.wait_dispatched()
    await a_moment()
    assert not gathering.done()
    late.release()
    assert all(array.is_ready() for array in await gathering)


@pytest.mark.asyncio
async def test_gather_mixes_kinds_of_awaitables(x):
    """Coroutines, tasks, asyncio futures and awaitable objects mix with calls, order kept."""

    async def coroutine(value):
        await asyncio.sleep(0)
        return value

    class Awaitable:
        def __await__(self):
            yield from asyncio.sleep(0).__await__()
            return "object"

    future = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_result, "future")
    gate = Gate()
    asyncio.get_running_loop().call_later(0.01, gate.open)
    task = asyncio.create_task(coroutine("task"))
    results = await gather(
        coroutine("coroutine"), held(x, gate, "call"), task, future, give(x, "quick"), Awaitable()
    )
    assert results == ["coroutine", "call", "task", "future", "quick", "object"]


@pytest.mark.asyncio
async def test_gather_takes_the_same_awaitable_twice(x):
    """The same call, and the same coroutine, may be given twice, as with asyncio.gather."""

    async def coroutine():
        await asyncio.sleep(0)
        return "once"

    call, coro = give(x, 1), coroutine()
    assert await gather(call, coro, call, coro) == [1, "once", 1, "once"]


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_gather_raises_the_first_error_at_once(x):
    """The first failure ends the wait, while the other calls go on."""
    gate, error = Gate(), ValueError("first")
    other = held(x, gate, "other")
    with pytest.raises(ValueError, match="first") as caught:
        await gather(other, fail(x, error), held(x, gate))
    assert caught.value is error
    assert not other.done()
    gate.open()
    assert await other == "other"


@pytest.mark.parametrize("when", ["before", "while"])
@pytest.mark.asyncio
async def test_gather_raises_an_error_of_another_kind_of_awaitable(x, when):
    """A failed coroutine or task ends the wait for calls, too."""
    gate = Gate()

    async def coroutine():
        if when == "while":
            await asyncio.sleep(0.005)
        raise ValueError("task")

    other = held(x, gate, "other")
    task = asyncio.create_task(coroutine())
    if when == "before":
        await asyncio.wait([task])
    with pytest.raises(ValueError, match="task"):
        await gather(other, task)
    assert not other.done()
    gate.open()
    assert await other == "other"


@pytest.mark.asyncio
async def test_gather_counts_later_errors_as_retrieved(x):
    """Errors beside and after the first one are nobody's surprise: they are not reported."""
    reports = Reports()
    gate = Gate()

    async def late_error():
        await gate.wait_async()
        raise KeyError("task")

    calls = [fail(x, ValueError(1)), fail(x, ValueError(2)), held(x, gate, ValueError(3))]
    calls.append(asyncio.create_task(late_error()))
    with pytest.raises(ValueError, match="1"):
        await gather(*calls)
    gate.open()
    await eventually(lambda: all(call.done() for call in calls), "all fail")
    await a_moment()
    calls.clear()
    assert await reports.are_none()


@pytest.mark.asyncio
async def test_gather_returns_exceptions(x):
    """With return_exceptions errors and cancellations are results, and all are waited for."""
    gate = Gate()
    reports = Reports()

    async def coroutine():
        raise KeyError("coroutine")

    sleeper = asyncio.create_task(asyncio.sleep(30))
    cancelled = held(x, gate)
    gathering = asyncio.ensure_future(
        gather(
            fail(x, ValueError("call")),
            coroutine(),
            cancelled,
            held(x, gate, "last"),
            sleeper,
            return_exceptions=True,
        )
    )
    await a_moment()
    assert not gathering.done()
    cancelled.cancel()
    sleeper.cancel()
    gate.open()
    results = await gathering
    kinds = [ValueError, KeyError, CallCancelledError, str, asyncio.CancelledError]
    assert [type(result) for result in results] == kinds
    assert await reports.are_none()


@pytest.mark.asyncio
async def test_gather_tells_of_a_cancelled_call(x):
    """A call that somebody else cancels is an error for who gathers it, at once."""
    gate = Gate()
    cancelled, other = held(x, gate), held(x, gate, "other")
    gathering = asyncio.ensure_future(gather(other, cancelled))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(CallCancelledError):
        await gathering
    gate.open()
    assert await other == "other"


@pytest.mark.asyncio
async def test_cancelled_gather_cancels_what_it_alone_waits_for(x):
    """Coroutines and tasks are cancelled, and calls that nobody else waits for."""
    gate = Gate()
    ended = []

    async def coroutine():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(asyncio.current_task().cancelling())

    mine, shared = held(x, gate), held(x, gate, "shared")
    other = asyncio.ensure_future(shared)
    gathering = asyncio.ensure_future(gather(mine, coroutine(), shared))
    await a_moment()
    gathering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gathering
    await a_moment()
    assert ended == [1]
    assert mine.cancelled()
    assert not shared.done()
    gate.open()
    assert await other == "shared"


@pytest.mark.asyncio
async def test_gather_is_one_wait_for_thousands(x):
    """Many calls of many channels are gathered without a task for each."""
    before = len(asyncio.all_tasks())
    channels = [TaskChannel() for _ in range(20)]
    calls = [channels[i % 20].submit_nowait(give, x, i) for i in range(2000)]
    gathering = asyncio.ensure_future(gather(*calls))
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) <= before + 1
    assert await gathering == list(range(2000))


# --- as_completed -----------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_as_completed_yields_in_order_of_finishing(x):
    """Futures are yielded done, in the order in which they finished."""
    gates = [Gate() for _ in range(5)]
    calls = [held(x, gate, i) for i, gate in enumerate(gates)]
    order = [3, 0, 4, 1, 2]
    seen = []
    gates[order[0]].open()
    async for call in as_completed(calls):
        assert call.done()
        seen.append(await call)
        if len(seen) < len(order):
            gates[order[len(seen)]].open()
    assert seen == order


@pytest.mark.asyncio
async def test_as_completed_yields_each_once_whatever_became_of_it(x):
    """Repeated, finished, failed and cancelled futures are each yielded once; none raises."""
    gate = Gate()
    good, bad, gone = give(x, 1), fail(x, ValueError()), held(x, gate)
    await good
    gone.cancel()
    seen = [call async for call in as_completed([good, bad, good, gone, bad])]
    assert sorted(map(id, seen)) == sorted(map(id, (good, bad, gone)))
    assert isinstance(bad.exception(), ValueError)
    assert gone.cancelled()
    gate.open()


@pytest.mark.asyncio
async def test_as_completed_of_nothing_ends(x):
    """An empty collection gives an empty iteration."""
    assert [call async for call in as_completed([])] == []


@pytest.mark.asyncio
async def test_as_completed_takes_array_futures_only(x):
    """Other awaitables are refused by name, and nothing waits for the rest any more."""
    gate = Gate()
    call = held(x, gate)
    with pytest.raises(TypeError, match="array futures, got 3"):
        async for _ in as_completed([call, 3]):
            pass
    assert call._waiter_count == 0
    gate.open()
    await call


@pytest.mark.asyncio
async def test_as_completed_times_out_and_leaves_calls_alone(x):
    """The timeout is for all together; what is done comes first, and the rest goes on."""
    gate = Gate()
    quick, slow = give(x, "quick"), held(x, gate, "slow")
    await quick
    seen = []
    with pytest.raises(TimeoutError):
        async for call in as_completed([slow, quick], timeout=0.02):
            seen += [call]
    assert seen == [quick]
    assert not slow.done()
    gate.open()
    assert await slow == "slow"


@pytest.mark.asyncio
async def test_leaving_as_completed_early_leaves_calls_alone(x):
    """After a break nothing waits for the remaining calls, and nothing cancels them."""
    gate = Gate()
    quick, slow = give(x, "quick"), held(x, gate, "slow")
    iterator = as_completed([slow, quick])
    async for call in iterator:
        assert call is quick
        break
    await iterator.aclose()
    assert slow._waiter_count == 0
    assert not slow.done()
    gate.open()
    assert await slow == "slow"


@pytest.mark.asyncio
async def test_cancelled_as_completed_cancels_the_rest(x):
    """A task that is cancelled in the iteration was the remaining calls' last waiter."""
    gate = Gate()
    quick, slow = give(x, "quick"), held(x, gate)
    first_is_done = asyncio.Event()

    async def iterate():
        async for call in as_completed([slow, quick]):
            assert call is quick
            first_is_done.set()

    iterating = asyncio.create_task(iterate())
    await first_is_done.wait()
    iterating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await iterating
    assert slow.cancelled()
    gate.open()


# --- map --------------------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_map_gives_results_in_order(xs):
    """The results are in the order of the items, of several iterables, of which the shortest counts."""

    @colocated_python
    def weigh(x, factor):
        return float(x[0]) * factor

    assert await weigh.map(xs, [1, 2, 3]) == [0, 2, 6]
    assert await ok.map([]) == []
    assert await ok.map(iter(xs)) == xs


@pytest.mark.parametrize("limit", [1, 3, 8])
@pytest.mark.asyncio
async def test_map_limit_is_the_peak(xs, limit):
    """Exactly `limit` calls run at once."""
    meeting, recorder = Rendezvous(limit), Recorder()

    @colocated_python
    def meet(x):
        recorder.record("start")
        meeting.wait()
        recorder.record("end")
        return x

    count = len(xs) // limit * limit
    assert len(await meet.map(xs[:count], limit=limit)) == count
    assert recorder.peak() == limit


@pytest.mark.asyncio
async def test_map_is_limited_by_the_workers_by_default(xs):
    """Without a limit as many calls are under way as there may be workers."""
    configure(worker_limit=2)
    recorder = Recorder()

    @colocated_python
    def body(x):
        recorder.record("start")
        recorder.record("end")
        return x

    taken = []

    def items():
        for x in xs:
            taken.append(recorder.count("end"))
            yield x

    await body.map(items())
    assert [i - ended <= 2 for i, ended in enumerate(taken)] == [True] * len(xs)


@pytest.mark.asyncio
async def test_map_takes_items_as_calls_finish(x):
    """An endless or lazy iterable is read only as far as calls are under way."""
    gates = [Gate() for _ in range(6)]
    taken = []

    def items():
        for i, gate in enumerate(gates):
            taken.append(i)
            yield gate

    @colocated_python
    def body(gate):
        gate.wait()

    mapping = asyncio.ensure_future(
        body.specialize(devices=jax.devices()[:1]).map(items(), limit=2)
    )
    for i, gate in enumerate(gates):
        await eventually(lambda i=i: len(taken) == min(6, i + 2), "an item is taken")
        await a_moment()
        assert len(taken) == min(6, i + 2)
        gate.open()
    assert await mapping == [None] * 6


@pytest.mark.parametrize("limit", [1, 2, None])
@pytest.mark.asyncio
async def test_map_raises_the_first_error_when_nothing_runs(xs, limit):
    """The first failure cancels the rest; map() raises it when no body runs, and starts no more."""
    gate, fail_gate, recorder = Gate(), Gate(), Recorder()
    error = ValueError("item")

    @colocated_python
    def body(x):
        recorder.record("start")
        if float(x[0]) == 0:
            fail_gate.wait()
            raise error
        gate.wait()
        recorder.record("end")
        return x

    mapping = asyncio.ensure_future(body.map(xs, limit=limit))
    await recorder.wait_for("start", limit or len(xs))
    fail_gate.open()
    if limit != 1:
        await eventually(lambda: runtime.statistics().abandoned, "the others are cancelled")
        await a_moment()
        assert not mapping.done()
    gate.open()
    async with asyncio.timeout(10):
        with pytest.raises(ValueError, match="item"):
            await mapping
    running = recorder.count("start")
    assert recorder.count("end") == running - 1
    await a_moment()
    assert recorder.count("start") == running


@pytest.mark.asyncio
async def test_map_reports_errors_of_other_items_no_more(xs):
    """Errors beside the first one are dropped with it, as with gather."""
    reports = Reports()
    meeting = Rendezvous(4)

    @colocated_python
    def body(x):
        meeting.wait()
        raise ValueError(float(x[0]))

    async with open_task_channel():
        with pytest.raises(ValueError, match="0"):
            await body.map(xs[:4], limit=4)
    assert await reports.are_none()


@pytest.mark.asyncio
async def test_map_stops_when_the_iterable_fails(xs):
    """An error of the iterable, or of a call that is refused, comes out after the others have ended."""
    recorder, gate = Recorder(), Gate()

    @colocated_python
    def body(x):
        recorder.record("start")
        gate.wait()
        recorder.record("end")

    def items():
        yield xs[0]
        raise KeyError("iterable")

    asyncio.get_running_loop().call_later(0.02, gate.open)
    with pytest.raises(KeyError, match="iterable"):
        await body.map(items())
    assert recorder.count("start") == recorder.count("end")
    with pytest.raises(SpecError, match="devices"):
        await body.map([xs[0], "no array"])
    assert recorder.count("start") == recorder.count("end")


@pytest.mark.asyncio
async def test_map_waits_for_arrays(x):
    """map() is over when the arrays are computed, and holds the slot until then."""
    lates = [Late() for _ in range(2)]
    mapping = asyncio.ensure_future(be_late.map([x, x], lates, limit=1))
    await eventually(lambda: runtime.statistics().dispatched == 1, "the first is dispatched")
    await a_moment()
    assert runtime.statistics().queued == runtime.statistics().running == 0
    lates[0].release()
    await eventually(lambda: runtime.statistics().dispatched == 1, "the second is dispatched")
    lates[1].release()
    assert all(array.is_ready() for array in await mapping)


@pytest.mark.parametrize("limit", [0, -3])
@pytest.mark.asyncio
async def test_map_refuses_a_senseless_limit(x, limit):
    """A limit below one could never start anything."""
    with pytest.raises(ValueError, match="limit"):
        await ok.map([x], limit=limit)


# --- wait_until_ready with futures ------------------------------------------------------------------


@pytest.mark.asyncio
async def test_wait_until_ready_replaces_futures_in_a_tree(x):
    """Futures in the tree are waited for and replaced by their results; the rest is the same."""
    tree = {"call": ok(x), "array": x, "twice": [give(x, (1, 2)), 7]}
    ready = await wait_until_ready(tree)
    assert ready == {"call": x, "array": x, "twice": [(1, 2), 7]}
    assert ready["call"] is x
    assert ready["array"] is x


@pytest.mark.asyncio
async def test_wait_until_ready_raises_the_first_error(x):
    """A failed call's error is raised though an earlier one in the tree is not done yet."""
    gate = Gate()
    slow = held(x, gate, "slow")
    with pytest.raises(ValueError, match="quick"):
        await wait_until_ready([slow, fail(x, ValueError("quick"))])
    assert not slow.done()
    gate.open()
    assert await slow == "slow"


@pytest.mark.asyncio
async def test_wait_until_ready_times_out(x):
    """The timeout ends the wait for calls and for arrays; both go on."""
    gate, late = Gate(), Late()
    slow = held(x, gate, "slow")
    array = await TaskChannel().submit_nowait(be_late, x, late).wait_dispatched()
    for tree in ([slow], [array], [slow, array]):
        with pytest.raises(TimeoutError):
            await wait_until_ready(tree, timeout=0.01)
    gate.open()
    late.release()
    assert await wait_until_ready([slow, array], timeout=10) == ["slow", array]
