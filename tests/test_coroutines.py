# SPDX-License-Identifier: Apache-2.0
"""Coroutine bodies (contracts C3, C5, C7, C11, C14 to C16): values, order, contexts, errors, life."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coroutine_bodies import (
    SHARED,
    TIMEOUT,
    Meeting,
    block,
    fail,
    hold,
    meet,
    outcome,
    plain,
    same,
    sleep,
)
from late_arrays import Late

from aiocolocated import (
    ArgumentError,
    SpecError,
    TaskChannel,
    TaskGroup,
    _compat,
    colocated_python,
    configure,
    from_thread,
    gather,
    jax_scope,
    open_task_channel,
    runtime,
)
from aiocolocated.testing import Gate, Recorder

try:
    import uvloop
except ImportError:
    uvloop = None

pytestmark = pytest.mark.timeout(60)

LOOP_THREAD = "aiocolocated-loop"
VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


@pytest.fixture
def x() -> jax.Array:
    return jnp.arange(3.0)


@pytest.fixture(autouse=True)
def _around():
    """Start the host's loop before the test, because it keeps descriptors; share nothing after it."""
    same(jnp.zeros(())).result(TIMEOUT)
    yield
    SHARED.clear()


# --- values -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Point:
    x: int


VALUES: dict[str, Callable[[], Any]] = {
    "array": lambda: jnp.arange(3),
    "tree": lambda: {"a": [jnp.ones(2), (1, None)], "b": "text"},
    "key": lambda: jax.random.key(0),
    "sharded": lambda: jax.device_put(jnp.arange(4.0), jax.devices("cpu")[3]),
    "None": lambda: None,
    "bool": lambda: True,
    "big integer": lambda: 2**70,
    "object": lambda: Point(3),
    "exception": lambda: ValueError("no error: a value"),
}


@colocated_python
async def make(x: jax.Array, name: str) -> Any:
    await asyncio.sleep(0)
    return VALUES[name]()


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_result_of_every_kind(x, name):
    """What the coroutine returns is what awaiting the call gives."""
    async with asyncio.timeout(TIMEOUT):
        result = await make(x, name)
    expected = VALUES[name]()
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    for got, wanted in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert type(got) is type(wanted)
        if isinstance(wanted, jax.Array):
            assert got.sharding == wanted.sharding
            assert bool((got == wanted).all())
        elif isinstance(wanted, Exception):
            assert got.args == wanted.args
        else:
            assert got == wanted


@colocated_python
async def give_numpy(x: jax.Array, dtype: str) -> np.ndarray:
    return np.ones(3, dtype)


@pytest.mark.asyncio
async def test_numpy_result_is_placed(x):
    """NumPy results become arrays, in the configuration of the call, or are refused in words."""
    async with asyncio.timeout(TIMEOUT):
        assert (await give_numpy(x, "int32")).dtype == jnp.int32
        with pytest.raises(ArgumentError, match="float64"):
            await give_numpy(x, "float64")
        with jax_scope(enable_x64=True):
            assert (await give_numpy(x, "float64")).dtype == np.float64


@colocated_python
async def describe(a, /, b, *more, c=None, **others):
    await asyncio.sleep(0)
    arguments = (a, b, more, c, others)
    return jax.tree.map(lambda leaf: (type(leaf) is type(a), np.shape(leaf)), arguments)


@pytest.mark.asyncio
async def test_arguments_of_every_kind(x):
    """Positions, keywords, futures of both kinds of bodies and NumPy: the body sees arrays."""
    late = {"deep": [plain(x), TaskChannel().submit_nowait(same, x)]}
    async with asyncio.timeout(TIMEOUT):
        seen = await describe(x, np.ones(2, np.float32), late, 5, c=same(x), d=plain(x))
    array = (True, (3,))
    assert seen == (
        array,
        (True, (2,)),
        ({"deep": [array, array]}, (False, ())),
        array,
        {"d": array},
    )


@pytest.mark.asyncio
async def test_dependents_wait_in_either_direction(x, recorder):
    """A coroutine waits for what it needs without having started, and others wait for coroutines."""
    gate = Gate()
    first, second, third = (TaskChannel() for _ in range(3))
    need = first.submit_nowait(hold, x, gate, recorder, "need")
    use = second.submit_nowait(hold, need, gate, recorder, "use")
    last = third.submit_nowait(block, use, gate, recorder, "last")
    await recorder.wait_for("start")
    assert recorder.sequence("start") == ["need"]
    gate.open()
    async with asyncio.timeout(TIMEOUT):
        assert await last is x
    assert recorder.sequence("start") == ["need", "use", "last"]


@pytest.mark.asyncio
async def test_failed_dependency_fails_a_coroutine_that_never_runs(x, recorder):
    """With the same exception, and the other way round."""
    error = ValueError("first")
    assert await outcome(hold(fail(x, error), Gate(), recorder)) is error
    assert await outcome(block(fail(x, error), Gate(), recorder)) is error
    assert recorder.events == []


@colocated_python
async def make_late(x: jax.Array, late: Late) -> jax.Array:
    await asyncio.sleep(0)
    return late.array(x)


@pytest.mark.asyncio
async def test_arrays_are_computed_when_awaited(x):
    """A coroutine that returns is dispatched; the await waits for its arrays, and for their errors."""
    good, bad = Late(), Late()
    ok, broken = (TaskChannel().submit_nowait(make_late, x, late) for late in (good, bad))
    async with asyncio.timeout(TIMEOUT):
        pending = await ok.wait_dispatched()
        assert not ok.done()
        good.release()
        assert await ok is pending
        assert pending.is_ready()
        bad.fail()
        with pytest.raises(jax.errors.JaxRuntimeError, match="told to fail"):
            await broken


@pytest.mark.asyncio
async def test_specs_are_checked_on_the_way_in_and_out(x):
    """Before submission, and when the coroutine has returned, in the words for every body."""
    spec = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    good = same.specialize(in_specs=((spec,), {}), out_specs_fn=lambda s: s)
    wrong = same.specialize(
        out_specs_fn=lambda s: jax.ShapeDtypeStruct((4,), s.dtype, sharding=s.sharding)
    )
    async with asyncio.timeout(TIMEOUT):
        assert await good(x) is x
        with pytest.raises(SpecError, match=r"same.*\n?.*args\[0\]"):
            good(jnp.ones(4))
        with pytest.raises(SpecError, match=r"same .*expected float32\[4\] .*got float32\[3\]"):
            await wrong(x)
        assert await same.specialize(devices=jax.devices("cpu")[1])(5) == 5


class Client:
    """Callables whose calls are coroutines."""

    async def __call__(self, x):
        return x, "call"

    async def method(self, x):
        return x, "method"

    @staticmethod
    async def static(x):
        return x, "static"


async def two(word, x):
    return x, word


async def decorated(x):
    return x, "decorated"


@functools.wraps(decorated)
def wrapper(x):
    return decorated(x)


KINDS: dict[str, Any] = {
    "call": Client(),
    "method": Client().method,
    "static": Client.static,
    "partial": functools.partial(two, "partial"),
}
if sys.version_info >= (3, 12):
    import inspect

    KINDS["decorated"] = inspect.markcoroutinefunction(wrapper)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.asyncio
async def test_every_callable_whose_calls_are_coroutines(x, kind):
    """Objects, methods, partial functions and, since Python 3.12, marked functions."""
    result = await outcome(colocated_python(KINDS[kind])(x))
    assert result == (x, kind)


# --- where and when ---------------------------------------------------------------------------------


@colocated_python
async def whereabouts(x):
    SHARED.setdefault("loops", set()).add(asyncio.get_running_loop())
    before = threading.current_thread().name
    await asyncio.sleep(0)
    return before, threading.current_thread().name, asyncio.current_task().get_name()


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_body_runs_on_the_hosts_loop(x):
    """One loop in a thread of the library, whoever calls; uvloop's where that is installed."""
    async with asyncio.timeout(TIMEOUT):
        for seen in await whereabouts.map([x] * 20):
            assert seen == (LOOP_THREAD, LOOP_THREAD, "aiocolocated whereabouts")
    (loop,) = SHARED["loops"]
    assert loop is not asyncio.get_running_loop()
    assert uvloop is None or isinstance(loop, uvloop.Loop)


@pytest.mark.parametrize("between", [hold, block], ids=["coroutine", "function"])
@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_program_order_in_one_channel(x, recorder, between):
    """The next body starts when the one before has ended, also when that was suspended."""
    gates = [Gate() for _ in range(4)]
    functions = [hold, between, hold, between]
    calls = [f(x, g, recorder, i) for i, (f, g) in enumerate(zip(functions, gates, strict=True))]
    everything = asyncio.ensure_future(gather(*calls))
    for i, gate in enumerate(gates):
        await recorder.wait_for("start", i + 1)
        await asyncio.sleep(0.005)  # time in which the next one must not start
        assert [e.fields["name"] for e in recorder.events] == [
            n for j in range(i) for n in (j, j)
        ] + [i]
        gate.open()
    async with asyncio.timeout(TIMEOUT):
        await everything
    assert recorder.peak() == 1


def in_channels(x, n):
    return [TaskChannel().submit_nowait(meet, x) for _ in range(n)]


async def in_tasks(x):
    return await meet(x)


async def in_group(x, n):
    async with TaskGroup() as group:
        for _ in range(n):
            group.start_soon(meet, x)


@pytest.mark.parametrize("how", ["channels", "tasks", "start_soon", "map", "create_task"])
@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_bodies_of_different_channels_overlap(x, how):
    """Channels, tasks, groups and map give concurrency: all bodies are at one place at once."""
    n = 12
    SHARED["meeting"] = Meeting(n)
    async with asyncio.timeout(TIMEOUT):
        if how == "channels":
            await gather(*in_channels(x, n))
        elif how == "tasks":
            await asyncio.gather(*(in_tasks(x) for _ in range(n)))
        elif how == "start_soon":
            await in_group(x, n)
        elif how == "map":
            await meet.map([x] * n)
        else:
            async with TaskGroup() as group:
                for _ in range(n):
                    group.create_task(in_tasks(x))


@pytest.mark.asyncio
async def test_thousand_sleeping_bodies(x):
    """They sleep at once, and hold no worker thread meanwhile."""
    started = time.monotonic()
    async with asyncio.timeout(TIMEOUT), TaskGroup() as group:
        for _ in range(1000):
            group.start_soon(sleep, x, 0.1)
        await asyncio.sleep(0.05)
        workers = runtime.statistics().workers
    assert time.monotonic() - started < 5
    assert len(group.results()) == 1000
    assert workers <= runtime.settings.worker_limit


@pytest.mark.asyncio
async def test_map_holds_to_its_limit(x, recorder):
    """In the order of the items, never more than the limit at once."""
    gate = Gate()
    gate.open()

    async with asyncio.timeout(TIMEOUT):
        results = await hold.map([x + i for i in range(20)], [gate] * 20, [recorder] * 20, limit=3)
    assert [float(r[0]) for r in results] == list(range(20))
    assert 1 <= recorder.peak() <= 3


@pytest.mark.asyncio
async def test_task_group_limit_counts_bodies(x, recorder):
    """A slot is held from the start of a coroutine to its end."""
    gate = Gate()
    async with asyncio.timeout(TIMEOUT), TaskGroup(limit=3) as group:
        for i in range(9):
            group.start_soon(hold, x, gate, recorder, i)
        await recorder.wait_for("start", 3)
        await asyncio.sleep(0.005)
        assert recorder.count("start") == 3
        gate.open()
    assert recorder.peak() <= 3
    assert recorder.count("end") == 9


# --- nested calls and threads -----------------------------------------------------------------------


@colocated_python
async def async_level(x, depth: int):
    if not depth:
        await asyncio.sleep(0.001)
        return x
    y = await sync_level(x, depth - 1)
    return await async_level(y, depth - 1)


@colocated_python
def sync_level(x, depth: int):
    if not depth:
        return x
    return async_level(sync_level(x, depth - 1), depth - 1).result(TIMEOUT)


@pytest.mark.parametrize("outer", [async_level, sync_level], ids=["coroutine", "function"])
@pytest.mark.asyncio
async def test_nested_calls_with_few_threads(x, outer):
    """A hundred, three deep, of both kinds of bodies, with four threads."""
    configure(worker_limit=4)
    async with asyncio.timeout(TIMEOUT), TaskGroup() as group:
        for _ in range(100):
            group.start_soon(outer, x, 3)
    assert group.results() == [x] * 100


@pytest.mark.asyncio
async def test_coroutines_need_no_worker_of_the_limit(x, recorder):
    """They start, run and settle while a synchronous body blocks every thread there may be."""
    configure(worker_limit=2)
    gate, held = Gate(), Gate()
    async with asyncio.timeout(TIMEOUT), TaskGroup() as group:
        for i in range(2):
            group.start_soon(block, x, gate, recorder, i)
        await recorder.wait_for("start", 2)
        behind = group.start_soon(plain, x)
        assert await sleep.map([x] * 20, [0.001] * 20) == [x] * 20
        assert isinstance(
            await outcome(TaskChannel().submit_nowait(fail, x, ValueError())), ValueError
        )
        waiting = group.start_soon(hold, x, held, recorder, "held")
        await recorder.wait_for("start", 3)
        assert recorder.sequence("start")[-1] == "held"
        assert not behind.done()
        held.open()
        await waiting
        assert not behind.done()
        gate.open()


@colocated_python
async def orders(x, recorder: Recorder):
    """Makes its calls like any task."""
    first = block(x, SHARED["gate"], recorder, "first")
    second = plain(first)
    SHARED["gate"].open()
    assert await gather(first, second) == [x, x]
    async with open_task_channel("inner") as channel:
        assert channel.submit_nowait(plain, x)._channel.name == "inner"
        total = await channel.run(jnp.sum, x)
    async with TaskGroup(limit=2) as group:
        for _ in range(4):
            group.start_soon(same, x)
    doubled = await asyncio.to_thread(plain(x).result, 10)
    return group.results(), total, doubled


@pytest.mark.asyncio
async def test_body_uses_the_library_like_any_task(x, recorder):
    """Nested calls have the channel of the body's task; channels, groups and waits work in it."""
    SHARED["gate"] = Gate()
    results, total, doubled = await outcome(orders(x, recorder))
    assert results == [x] * 4
    assert float(total) == 3.0
    assert doubled is x


@colocated_python
def calls_back(x):
    async def coroutine():
        return asyncio.get_running_loop(), await same(x)

    return from_thread.run(coroutine)[1]


@colocated_python
async def outer_of_from_thread(x):
    return await calls_back(x)


@pytest.mark.asyncio
async def test_from_thread_in_a_body_of_a_coroutine_body(x):
    """The synchronous body of a coroutine body's call runs coroutines on the loop of that one."""
    assert await outcome(outer_of_from_thread(x)) is x


# --- asyncio and anyio in bodies --------------------------------------------------------------------


async def use_timeout():
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await asyncio.sleep(10)


async def use_wait_for():
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.sleep(10), 0.001)


async def use_task_group():
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(asyncio.sleep(0.001, i)) for i in range(3)]
    assert [task.result() for task in tasks] == [0, 1, 2]


async def use_failing_task_group():
    async def failing():
        raise ValueError

    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(10))
            group.create_task(failing())
    asyncio.current_task().uncancel()  # which Python does from 3.13 on


async def use_move_on_after():
    with anyio.move_on_after(0.001) as scope:
        await anyio.sleep(10)
    assert scope.cancelled_caught


async def use_anyio_task_group():
    send, receive = anyio.create_memory_object_stream(1)

    async def sender():
        async with send:
            for i in range(3):
                await send.send(i)

    async with receive, anyio.create_task_group() as group:
        group.start_soon(sender)
        assert [i async for i in receive] == [0, 1, 2]
        group.cancel_scope.cancel()


async def use_queue_and_lock():
    queue, lock = asyncio.Queue(1), asyncio.Lock()

    async def producer():
        for i in range(3):
            async with lock:
                await queue.put(i)

    task = asyncio.create_task(producer())
    assert [await queue.get() for _ in range(3)] == [0, 1, 2]
    await task


async def use_thread():
    assert await asyncio.to_thread(threading.get_ident) != threading.get_ident()
    assert await anyio.to_thread.run_sync(threading.get_ident) != threading.get_ident()


async def use_nested_timeout():
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await sleep(SHARED["x"], 10)
    assert await sleep(SHARED["x"], 0) is SHARED["x"]


@colocated_python
async def use(x, name: str) -> str:
    await globals()[name]()
    assert asyncio.current_task().cancelling() == 0
    return name


@pytest.mark.parametrize("name", [n for n in globals() if n.startswith("use_")])
@pytest.mark.asyncio
async def test_asyncio_and_anyio_work_in_bodies(x, name):
    """Timeouts, groups, cancel scopes, queues and threads do in a body what they do in a task."""
    SHARED["x"] = x
    async with asyncio.timeout(TIMEOUT):
        assert await use.map([x] * 3, [name] * 3) == [name] * 3


# --- contexts ---------------------------------------------------------------------------------------


@colocated_python
async def variables(x, name: str):
    seen = [VARIABLE.get()]
    VARIABLE.set(f"body of {name}")
    for _ in range(3):
        await SHARED["meeting"].wait()
        seen.append(VARIABLE.get())
        await asyncio.sleep(0)
    return seen


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_context_variables_are_those_of_the_submission(x):
    """Each body has its own copy for all of its steps; nothing comes back to the caller."""
    SHARED["meeting"] = Meeting(4)

    async def task(name):
        VARIABLE.set(name)
        call = variables(x, name)
        VARIABLE.set("changed after the submission")
        return await call

    async with asyncio.timeout(TIMEOUT):
        for i, seen in enumerate(await asyncio.gather(*(task(f"task {i}") for i in range(4)))):
            assert seen == [f"task {i}"] + [f"body of task {i}"] * 3
    assert VARIABLE.get() == "unset"


def configuration() -> tuple[Any, ...]:
    """What is in force on this thread; the dtype shows that it has effects."""
    return (
        jax.config.jax_enable_x64,
        jax.config.jax_default_matmul_precision,
        jax.config.jax_default_device,
        str(jnp.arange(1.0).dtype),
        _compat.get_execution_stream(),
    )


@colocated_python
async def look(x, steps: int) -> list[tuple[Any, ...]]:
    """Look in every step; all bodies of the meeting take turns."""
    seen = []
    for _ in range(steps):
        seen.append(configuration())
        await asyncio.sleep(0)
        seen.append(configuration())
        await SHARED["meeting"].wait()
    try:
        await asyncio.wait_for(asyncio.sleep(10), 0.001)
    except TimeoutError:
        seen.append(configuration())
    return seen


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_jax_configuration_is_in_force_in_every_step(x):
    """That of the submission, and the channel's stream, never those of a body in between."""
    SHARED["meeting"] = Meeting(4)
    device = jax.devices("cpu")[5]
    channels = [TaskChannel() for _ in range(4)]
    async with asyncio.timeout(TIMEOUT):
        with jax_scope(enable_x64=True, default_device=device):
            a = channels[0].submit_nowait(look, x, 20)
        with jax_scope(default_matmul_precision="highest"):
            b = channels[1].submit_nowait(look, x, 20)
        with jax.enable_x64(True):  # this thread's
            c = channels[2].submit_nowait(look, x, 20)
        d = channels[3].submit_nowait(look, x, 20)
        results = await gather(a, b, c, d)
        after = await TaskChannel().submit_nowait(look_outside, x)
    streams = [channel._stream for channel in channels]
    expected = [
        (True, None, device, "float64", streams[0]),
        (False, "highest", None, "float32", streams[1]),
        (True, None, None, "float64", streams[2]),
        (False, None, None, "float32", streams[3]),
    ]
    for seen, wanted in zip(results, expected, strict=True):
        assert seen == [wanted] * 41
    assert after == (False, None, None, "float32", 0)


@colocated_python
async def look_outside(x):
    """What a callback of the host's loop sees between the steps of bodies."""
    seen = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(lambda: seen.set_result(configuration()))
    return await seen


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, asyncio.CancelledError])
@pytest.mark.asyncio
async def test_configuration_does_not_stay_on_the_hosts_loop(x, error):
    """Whatever ends a body, and while it waits, its configuration is not in force there."""
    gate, recorder = Gate(), Recorder()
    async with asyncio.timeout(TIMEOUT):
        with jax_scope(enable_x64=True, default_matmul_precision="highest"):
            waiting = TaskChannel().submit_nowait(hold, x, gate, recorder)
            ended = same(x) if error is None else fail(x, error())
        await recorder.wait_for("start")
        await outcome(ended)
        assert await look_outside(x) == (False, None, None, "float32", 0)
        gate.open()
        await waiting


@colocated_python
async def nest_configuration(x):
    await asyncio.sleep(0)
    return jax.config.jax_enable_x64, await look_plainly(x)


@colocated_python
def look_plainly(x):
    return jax.config.jax_enable_x64, VARIABLE.get()


@pytest.mark.asyncio
async def test_calls_of_a_body_have_its_contexts(x):
    """A nested call is made in the configuration and in the variables of its body."""
    VARIABLE.set("mine")
    with jax_scope(enable_x64=True):
        call = nest_configuration(x)
    assert await outcome(call) == (True, (True, "mine"))


@pytest.mark.asyncio
async def test_scope_with_a_wrong_value_fails_the_call(x):
    """And not the host's loop."""
    with jax_scope(default_matmul_precision="nonsense"):
        call = same(x)
    assert isinstance(await outcome(call), (TypeError, ValueError))
    assert await outcome(same(x)) is x
