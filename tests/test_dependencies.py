# SPDX-License-Identifier: Apache-2.0
"""Futures as arguments (contract C5): a call starts when what it needs is dispatched."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import time
import weakref

import jax
import jax.numpy as jnp
import pytest
from late_arrays import Late

from aiocolocated import (
    CallCancelledError,
    SpecError,
    TaskChannel,
    TaskGroup,
    as_argument,
    colocated_python,
    configure,
    gather,
    open_task_channel,
    runtime,
)
from aiocolocated.testing import Gate, Recorder

pytestmark = pytest.mark.timeout(60)

LONG = 5000


@pytest.fixture
def x() -> jax.Array:
    return jnp.arange(3.0)


@colocated_python
def add_one(x: jax.Array) -> jax.Array:
    return x + 1


@colocated_python
def tree_of(x: jax.Array) -> dict:
    return {"double": x * 2, "pair": (x, 3)}


@colocated_python
def fail(x: jax.Array, error: Exception) -> jax.Array:
    raise error


@colocated_python
def wait(x: jax.Array, gate: Gate, recorder: Recorder | None = None, name: object = 0) -> jax.Array:
    if recorder is not None:
        recorder.record("start", name=name)
    gate.wait()
    return x


@colocated_python
def wait_and_fail(x: jax.Array, gate: Gate, error: Exception) -> jax.Array:
    gate.wait()
    raise error


@colocated_python
def record(x: jax.Array, recorder: Recorder, name: object) -> jax.Array:
    recorder.record("start", name=name)
    return x


@colocated_python
def be_late(x: jax.Array, late: Late) -> jax.Array:
    return late.array(x)


@colocated_python
def note_kinds(recorder: Recorder, *args, **kwargs) -> None:
    """Record what the leaves of the arguments are."""
    for leaf in jax.tree.leaves((args, kwargs)):
        recorder.record("leaf", kind=isinstance(leaf, jax.Array), value=leaf)


@colocated_python
def note_readiness(x: jax.Array, recorder: Recorder) -> jax.Array:
    recorder.record("ready", value=x.is_ready())
    return x


async def eventually(condition, what: str, timeout: float = 10.0) -> None:
    """Wait until something that no future tells of has happened."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        await asyncio.sleep(0.001)


# --- values -----------------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_body_sees_arrays_in_place_of_futures(x, recorder):
    """Futures anywhere in positional and keyword arguments arrive as arrays; the rest is unchanged."""
    future = add_one(x)
    await note_kinds(recorder, future, [future, {"a": (future, x)}], 7, key={"b": [future]})
    values = recorder.sequence("leaf", "value")
    assert recorder.sequence("leaf", "kind") == [True, True, True, True, False, True]
    assert values[4] == 7
    assert values[3] is x
    assert all(value is values[0] for value in (values[1], values[2], values[5]))


@pytest.mark.asyncio
async def test_future_of_a_tree_arrives_as_that_tree(x, recorder):
    """A future that resolves to a tree is replaced by the whole tree."""

    @colocated_python
    def total(tree, y):
        return tree["double"] + tree["pair"][0] + tree["pair"][1] + y

    assert (await total(tree_of(x), x)).tolist() == (x * 2 + x + 3 + x).tolist()


@pytest.mark.asyncio
async def test_finished_future_is_an_argument_too(x):
    """A future that is ready already needs no wait and no waiter."""
    future = add_one(x)
    await future
    assert (await add_one(future)).tolist() == [2.0, 3.0, 4.0]


@pytest.mark.asyncio
async def test_run_takes_futures(x):
    """TaskChannel.run waits for futures and gives their arrays to a jitted function."""
    double = jax.jit(lambda x, y: x + y)
    async with open_task_channel() as channel:
        assert (await channel.run(double, add_one(x), y=add_one(x))).tolist() == [2.0, 4.0, 6.0]


@pytest.mark.asyncio
async def test_start_soon_takes_futures_of_its_group(x):
    """A group's calls may need each other, also when a limit holds them back."""
    async with TaskGroup(limit=1) as group:
        future = group.start_soon(add_one, x)
        for _ in range(5):
            future = group.start_soon(add_one, future)
    assert [int(value[0]) for value in group.results()] == [1, 2, 3, 4, 5, 6]


def test_as_argument_is_the_identity(x):
    """as_argument gives the future itself back."""
    future = add_one(x)
    assert as_argument(future) is future
    future.result(timeout=10)


# --- when a dependent starts ------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_dependent_starts_when_dependency_is_dispatched(x, recorder):
    """It does not wait for the arrays of what it needs to be computed."""
    late = Late()
    first = TaskChannel().submit_nowait(be_late, x, late)
    second = note_readiness(first, recorder)
    assert not (await second.wait_dispatched()).is_ready()
    assert not first.done()
    assert recorder.sequence("ready") == [False]
    late.release()
    await gather(first, second)


@pytest.mark.asyncio
async def test_dependent_does_not_start_before_all_are_dispatched(x, recorder):
    """One unfinished dependency of several is enough to wait."""
    gates = [Gate() for _ in range(3)]
    needs = [TaskChannel().submit_nowait(wait, x, gate) for gate in gates]

    @colocated_python
    def all_three(*arrays):
        recorder.record("start")
        return arrays

    dependent = all_three(*needs)
    for gate, need in zip(gates, needs, strict=True):
        await asyncio.sleep(0.002)  # time in which it would start
        assert recorder.count("start") == 0
        gate.open()
        await need
    await dependent


@pytest.mark.asyncio
async def test_waiting_dependent_holds_its_place(x, recorder):
    """Calls behind a waiting dependent do not overtake it."""
    gate = Gate()
    need = TaskChannel().submit_nowait(wait, x, gate)
    async with open_task_channel() as channel:
        calls = [record(need, recorder, 0), *(record(x, recorder, i) for i in range(1, 4))]
        await eventually(lambda: runtime.statistics().running == 1, "the dependency runs")
        assert channel.statistics().queued == 4
        gate.open()
        await gather(*calls)
    assert recorder.sequence("start") == [0, 1, 2, 3]


@pytest.mark.asyncio
async def test_waiting_dependents_hold_no_worker(x):
    """With one worker thread a hundred dependents wait, and what they wait for still runs."""
    configure(worker_limit=1)
    gate = Gate()
    need = TaskChannel().submit_nowait(wait, x, gate)
    dependents = [TaskChannel().submit_nowait(add_one, need) for _ in range(100)]
    await eventually(lambda: runtime.statistics().running == 1, "the dependency runs")
    statistics = runtime.statistics()
    assert statistics.queued == 100
    assert statistics.runnable == 0
    gate.open()
    await gather(*dependents)


@pytest.mark.asyncio
async def test_specs_of_futures_are_checked_when_they_are_there(x):
    """Input specs that a future's result does not meet fail the dependent, naming the argument."""
    spec = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=x.sharding)
    ran = Recorder()

    @colocated_python
    def wants_four(a):
        ran.record("ran")
        return a

    dependent = wants_four.specialize(in_specs=((spec,), {}))(add_one(x))
    with pytest.raises(SpecError, match=r"args\[0\].*'a'.*shape.*float32\[4\].*float32\[3\]"):
        await dependent
    assert ran.count("ran") == 0


@pytest.mark.asyncio
async def test_devices_of_futures_are_checked_when_they_are_there(x, cpu_devices):
    """A future's arrays on another device list fail the dependent."""
    elsewhere = jax.device_put(x, cpu_devices[1])

    @colocated_python
    def both(a, b):
        return a

    dependent = both(x, add_one(elsewhere))
    with pytest.raises(SpecError, match="device list"):
        await dependent


# --- failure and cancellation -----------------------------------------------------------------------


async def nothing_is_reported(reports) -> None:
    """An error that nobody retrieved would have been reported by now."""
    gc.collect()
    done = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, done.set)
    await done.wait()
    assert reports == []


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.asyncio
async def test_failed_dependency_fails_its_dependents(x, recorder, when):
    """Dependents, and theirs, fail with the very same exception, without being run."""
    gate, error = Gate(), ValueError("root")
    root = TaskChannel().submit_nowait(wait_and_fail, x, gate, error)
    if when == "before":
        gate.open()
        await eventually(root.done, "the dependency fails")
    first = record(root, recorder, 1)
    second = TaskChannel().submit_nowait(record, [first], recorder, 2)
    after = record(x, recorder, "after")
    gate.open()
    for call in (second, first, root):
        with pytest.raises(ValueError, match="root") as caught:
            await call
        assert caught.value is error
    await after
    assert recorder.sequence("start") == ["after"]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.asyncio
async def test_error_counts_as_retrieved_by_dependents(x, when):
    """Who retrieves a dependent's error has retrieved the dependency's, too."""
    reports = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, c: reports.append(c))
    gate = Gate()
    root = TaskChannel().submit_nowait(wait_and_fail, x, gate, ValueError("root"))
    if when == "before":
        gate.open()
        await eventually(root.done, "the dependency fails")
    dependent = add_one(root)
    del root
    gate.open()
    with pytest.raises(ValueError, match="root"):
        await dependent
    del dependent
    await nothing_is_reported(reports)


@pytest.mark.asyncio
async def test_failure_joins_its_block_once(x):
    """A failed call and its unawaited dependents leave the block with one exception."""
    error = ValueError("root")
    with pytest.raises(ExceptionGroup) as caught:
        async with open_task_channel():
            root = fail(x, error)
            add_one(add_one(root))
            add_one(root)
    assert caught.value.exceptions == (error,)


@pytest.mark.asyncio
async def test_failed_computation_fails_dependents_that_have_not_started(x, recorder):
    """When a dispatched dependency fails, a dependent still in the queue is not run."""
    late, gate = Late(), Gate()
    root = TaskChannel().submit_nowait(be_late, x, late)
    await root.wait_dispatched()
    async with open_task_channel():
        blocker = wait(x, gate)
        dependent = record(root, recorder, "dependent")
        late.fail()
        with pytest.raises(jax.errors.JaxRuntimeError, match="told to fail"):
            await dependent
        with pytest.raises(jax.errors.JaxRuntimeError, match="told to fail"):
            await root
        assert not blocker.done()
        gate.open()
    assert recorder.events == []


@pytest.mark.asyncio
async def test_failed_computation_reaches_dependents_that_run(x, recorder):
    """A dependent that has started gets the failed array, and fails by computing with it."""
    late = Late()
    root = TaskChannel().submit_nowait(be_late, x, late)
    dependent = add_one(root)
    await dependent.wait_dispatched()
    late.fail()
    for call in (root, dependent):
        with pytest.raises(jax.errors.JaxRuntimeError, match="told to fail"):
            await call


@pytest.mark.parametrize("when", ["cancelled before", "queued", "running", "dispatched"])
@pytest.mark.asyncio
async def test_cancelled_dependency_cancels_its_dependents(x, recorder, when):
    """Dependents, and theirs, are cancelled; whoever waits for them is told, at once."""
    gate, late = Gate(), Late()
    channel = TaskChannel()
    if when in ("queued", "cancelled before"):
        channel.submit_nowait(wait, x, gate)
    if when == "dispatched":
        root = channel.submit_nowait(be_late, x, late)
        await root.wait_dispatched()
    else:
        root = channel.submit_nowait(wait, x, gate, recorder, "root")
    if when == "running":
        await recorder.wait_for("start")
    if when == "cancelled before":
        root.cancel()
    blocker = wait(x, gate)
    first = record(root, recorder, 1)
    second = TaskChannel().submit_nowait(record, (first,), recorder, 2)
    waiters = [asyncio.create_task(call.wait_dispatched()) for call in (first, second)]
    await asyncio.sleep(0)
    if when == "cancelled before":
        gate.open()  # it is cancelled when its turn comes
    else:
        root.cancel()
    for waiter in waiters:
        with pytest.raises(CallCancelledError, match="depends on"):
            await waiter
    assert first.cancelled()
    assert second.cancelled()
    gate.open()
    late.release()
    await blocker
    await channel.aclose()
    assert not set(recorder.sequence("start")) & {1, 2}


@pytest.mark.asyncio
async def test_failed_dependent_lets_go_of_its_other_dependencies(x, recorder):
    """After one dependency has failed it, a call is no waiter of the others any more."""
    late = Late()
    other = TaskChannel().submit_nowait(be_late, x, late)
    failed = fail(x, ValueError("first"))
    await gather(failed, return_exceptions=True)

    @colocated_python
    def both(a, b):
        return a

    dependent = both(failed, other)
    with pytest.raises(ValueError, match="first"):
        await dependent
    waiter = asyncio.create_task(other.wait_dispatched())
    await waiter
    waiter = asyncio.ensure_future(other)
    await asyncio.sleep(0)
    waiter.cancel()  # the last one now
    await asyncio.wait([waiter])
    assert other.cancelled()
    late.release()


# --- long chains ------------------------------------------------------------------------------------


@pytest.fixture(params=["one channel", "two channels", "a channel each"])
def next_channel(request):
    """Gives the channel of each call of a chain."""
    if request.param == "a channel each":
        return TaskChannel
    channels = [TaskChannel() for _ in range(2 if request.param == "two channels" else 1)]
    return lambda: (channels.insert(0, channels.pop()), channels[0])[1]


def new_chain(x, next_channel, gate):
    """A call that waits for the gate, and thousands that each need the one before."""
    head = TaskChannel().submit_nowait(wait, x, gate)
    chain = [head]
    for _ in range(LONG):
        chain.append(next_channel().submit_nowait(add_one, chain[-1]))
    return chain


@pytest.mark.asyncio
async def test_long_chain_runs_to_its_end(x, next_channel):
    """Thousands of calls that each need the one before do not recurse."""
    gate = Gate()
    chain = new_chain(x, next_channel, gate)
    gate.open()
    assert (await chain[-1]).tolist() == (x + LONG).tolist()


@pytest.mark.asyncio
async def test_failure_passes_through_long_chain(x, next_channel):
    """All of them fail with the exception of the first."""
    gate, error = Gate(), ValueError("root")
    chain = [TaskChannel().submit_nowait(wait_and_fail, x, gate, error)]
    for _ in range(LONG):
        chain.append(next_channel().submit_nowait(add_one, chain[-1]))
    gate.open()
    with pytest.raises(ValueError, match="root"):
        await chain[-1]
    assert all(call.exception() is error for call in chain)


@pytest.mark.asyncio
async def test_cancellation_passes_down_long_chain(x, next_channel):
    """Cancelling the first cancels all that need it."""
    gate = Gate()
    chain = new_chain(x, next_channel, gate)
    assert chain[0].cancel()
    assert all(call.cancelled() for call in chain)
    gate.open()
    assert runtime.statistics().queued == 0


@pytest.mark.asyncio
async def test_cancellation_passes_up_long_chain(x, next_channel):
    """Cancelling the last one's only waiter cancels all that nobody else needs."""
    gate = Gate()
    chain = new_chain(x, next_channel, gate)
    waiter = asyncio.ensure_future(chain[-1])
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.wait([waiter])
    assert waiter.cancelled()
    assert all(call.cancelled() for call in chain)
    gate.open()


@pytest.mark.asyncio
async def test_many_dependents_of_one_call(x):
    """Thousands of calls that need the same one start, fail and are cancelled with it."""
    for how in ("succeed", "fail", "cancel"):
        gate = Gate()
        if how == "fail":
            root = TaskChannel().submit_nowait(wait_and_fail, x, gate, ValueError("root"))
        else:
            root = TaskChannel().submit_nowait(wait, x, gate)
        calls = [add_one(root) for _ in range(LONG // 2)]
        if how == "cancel":
            root.cancel()
        gate.open()
        results = await gather(*calls, return_exceptions=True)
        kinds = {"succeed": jax.Array, "fail": ValueError, "cancel": CallCancelledError}
        assert all(isinstance(result, kinds[how]) for result in results)


# --- memory -----------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Box:
    """A Python value that can be watched."""

    content: str = ""


@pytest.mark.parametrize("how", ["ready", "failed", "cancelled"])
@pytest.mark.asyncio
async def test_dependents_keep_nothing_of_what_they_needed(x, how):
    """Once a dependent is over, only who asked for them holds its dependencies and their values."""
    gate = Gate()

    @colocated_python
    def make(x):
        gate.wait()
        return Box()

    @colocated_python
    def use(box, x):
        del box  # or the traceback keeps it
        if how == "failed":
            raise ValueError("used")
        return x

    need = TaskChannel().submit_nowait(make, x)
    dependent = use(need, x)
    if how == "cancelled":
        dependent.cancel()
        assert need.cancelled()
        watched = weakref.ref(need)
        gate.open()
    else:
        gate.open()
        watched = weakref.ref(await need)
        await gather(dependent, return_exceptions=True)
    del need
    await eventually(lambda: watched() is None, "the dependency is gone")
    assert dependent.done()
