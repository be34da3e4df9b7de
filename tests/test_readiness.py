# SPDX-License-Identifier: Apache-2.0
"""Readiness (contract C4): waiting for arrays on a loop, without a thread each, whatever happens to them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import queue
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import pytest_asyncio
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from late_arrays import Late

from aiocolocated import (
    ArrayDeletedError,
    CallState,
    TaskChannel,
    _compat,
    _loops,
    _readiness,
    _service,
    colocated_python,
    wait_until_ready,
)
from aiocolocated.testing import Gate

TIMEOUT = 20.0  # seconds; only a bug takes that long


# --- bodies and helpers -----------------------------------------------------------------------------


def late_body(x, late):
    return late.array(x)


def hold(x, gate):
    gate.wait()
    return x


@pytest_asyncio.fixture
async def channel():
    """A channel to dispatch in, off the loop."""
    channel = TaskChannel("late")
    yield channel
    await channel.aclose()


@pytest.fixture
def late():
    """Makes a pending array; released in the end in any case."""
    late = Late()
    yield late
    late.release()


async def pending(late, x=None):
    """An array that is computed when ``late`` is released."""
    async with asyncio.timeout(TIMEOUT):
        array = await asyncio.to_thread(late.array, jnp.arange(4.0) if x is None else x)
    assert not array.is_ready()
    return array


async def pending_apart(late, device):
    """The same on an execution stream of its own: JAX computes what shares one in order."""
    x = jax.device_put(jnp.arange(2.0), device)
    async with asyncio.timeout(TIMEOUT):
        array = await TaskChannel().run(late.array, x).wait_dispatched()
    assert not array.is_ready()
    return array


def finished_at_once(coroutine):
    """The result of a coroutine that must not suspend."""
    try:
        waiting_for = coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise AssertionError(f"it waits for {waiting_for!r}")


async def started(coroutine):
    """A task that has run up to where it waits."""
    task = asyncio.ensure_future(coroutine)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not task.done(), task
    return task


# --- ready ------------------------------------------------------------------------------------------


def ready_trees():
    device = jax.devices("cpu")[0]
    mesh = Mesh(np.array(jax.devices("cpu")), ("x",))
    strings = jax.device_put(np.array(["a"], dtype=np.dtypes.StringDType()), device)
    key = jax.random.key(0)
    return {
        "array": jnp.ones(3),
        "nested": {"a": [jnp.ones(3), (jnp.zeros(2), None)], "b": {}},
        "ten": [jnp.ones(1) for _ in range(10)],
        "keys": [key, jax.random.split(key, 3)],
        "zero size": jnp.ones((0, 2)),
        "strings": strings,
        "sharded": jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("x"))),
        "None": None,
        "empty": [],
        "Python": [1, 2.0, "text", True, b"bytes", None, object()],
        "NumPy": {"a": np.ones(2), "b": np.float32(1)},
        "mixed": (jnp.ones(1), np.ones(1), 3, None, key),
    }


@pytest.mark.parametrize(
    "which",
    [
        "array", "nested", "ten", "keys", "zero size", "strings", "sharded", "None", "empty", "Python",
        "NumPy", "mixed",
    ],
)  # fmt: skip
def test_ready_tree_costs_no_hop(which):
    """What is ready is given back without suspending, without a thread, and without a loop even."""
    tree = ready_trees()[which]
    jax.block_until_ready(jax.tree.leaves(tree))
    before = threading.active_count()
    assert finished_at_once(wait_until_ready(tree)) is tree
    assert threading.active_count() == before


def test_ready_future_costs_no_hop():
    """Awaiting a finished call does not suspend either."""

    async def wait(future):
        return await future

    x = jnp.ones(2)
    future = colocated_python(lambda x: x)(x)
    assert future.result(TIMEOUT) is x
    assert finished_at_once(wait(future)) is x
    assert finished_at_once(future.wait_dispatched()) is x


# --- pending ----------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_pending_array_is_waited_for_off_the_loop(late):
    """The loop goes on, the wait ends when the array is computed, and gives the same tree."""
    tree = {"a": [await pending(late)], "b": None, "c": 3}
    task = await started(wait_until_ready(tree))
    late.release()
    async with asyncio.timeout(TIMEOUT):
        assert await task is tree
    assert tree["a"][0].is_ready()


@pytest.mark.asyncio
async def test_pending_future_is_waited_for_off_the_loop(late):
    """A call is dispatched when its body has returned, and ready when its arrays are."""
    future = colocated_python(late_body)(jnp.arange(4.0), late)
    async with asyncio.timeout(TIMEOUT):
        early = await future.wait_dispatched()
    assert future.state is CallState.DISPATCHED
    assert not future.done()
    assert not early.is_ready()
    task = await started(wait_until_ready([future, early]))
    late.release()
    async with asyncio.timeout(TIMEOUT):
        assert all(result is early for result in await task)
        assert await future is early
    assert future.state is CallState.READY
    assert early.is_ready()


@pytest.mark.parametrize("kind", ["keys", "sharded", "bfloat16"])
@pytest.mark.asyncio
async def test_pending_arrays_of_every_kind(kind, late, cpu_devices):
    """Typed keys, which have no is_ready, and arrays over several devices are waited for, too."""
    if kind == "keys":
        data = await pending(late, jnp.zeros(2, jnp.uint32))
        array = jax.random.wrap_key_data(data)
    elif kind == "sharded":
        mesh = Mesh(np.array(cpu_devices[:2]), ("x",))
        x = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, P("x")))
        array = await pending(late, x)
    else:
        array = await pending(late, jnp.ones(3, jnp.bfloat16))
    task = await started(wait_until_ready([array]))
    late.release()
    async with asyncio.timeout(TIMEOUT):
        (result,) = await task
    assert result is array
    assert _compat.all_ready([_compat.key_data(array) if kind == "keys" else array])


@pytest.mark.asyncio
async def test_many_waiters_of_one_array(late):
    """Any number of tasks may wait for the same array."""
    array = await pending(late)
    tasks = [await started(wait_until_ready(array)) for _ in range(20)]
    late.release()
    async with asyncio.timeout(TIMEOUT):
        assert all(result is array for result in await asyncio.gather(*tasks))


@pytest.mark.asyncio
async def test_thousand_pending_arrays_use_few_threads(channel, late):
    """1 000 arrays that pend at once are waited for by at most 8 more threads."""
    many = jax.jit(lambda x: [x] * 1000)
    async with asyncio.timeout(60):
        await channel.run(many, jnp.arange(4.0))  # compiled
        first = await pending(late)
        arrays = await channel.run(many, first).wait_dispatched()
        assert not any(array.is_ready() for array in arrays)
        before = threading.active_count()
        tasks = [asyncio.ensure_future(wait_until_ready(array)) for array in arrays]
        most = before
        for _ in range(20):
            await asyncio.sleep(0.002)
            most = max(most, threading.active_count())
        assert not any(task.done() for task in tasks)
        late.release()
        results = await asyncio.gather(*tasks)
    assert all(result is array for result, array in zip(results, arrays, strict=True))
    assert most - before <= 8


@pytest.mark.asyncio
async def test_slow_array_does_not_delay_a_fast_one(cpu_devices):
    """Each wait ends with its own array, in whichever order they are computed."""
    lates = [Late() for _ in range(4)]
    arrays = [await pending_apart(*pair) for pair in zip(lates, cpu_devices, strict=False)]
    tasks = [await started(wait_until_ready(array)) for array in arrays]
    async with asyncio.timeout(TIMEOUT):
        for i in (2, 0, 3, 1):
            lates[i].release()
            await tasks[i]
            assert sum(task.done() for task in tasks) == (2, 0, 3, 1).index(i) + 1


@pytest.mark.asyncio
async def test_tree_is_ready_when_its_last_array_is(cpu_devices):
    """A tree waits for all its arrays, also if another failed to be the slowest."""
    lates = [Late() for _ in range(3)]
    tree = [await pending_apart(*pair) for pair in zip(lates, cpu_devices, strict=False)]
    task = await started(wait_until_ready(tree))
    for late, array in zip(lates, tree, strict=True):
        assert not task.done()
        late.release()
        await asyncio.to_thread(jax.block_until_ready, array)
    async with asyncio.timeout(TIMEOUT):
        assert await task is tree


# --- time -------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_timeout_ends_the_wait_only(late):
    """TimeoutError comes in time, and the array may be awaited again."""
    array = await pending(late)
    async with asyncio.timeout(TIMEOUT):
        with pytest.raises(TimeoutError):
            await wait_until_ready(array, timeout=0.02)
        with pytest.raises(TimeoutError):
            await wait_until_ready(array, timeout=0)
        late.release()
        assert await wait_until_ready(array, timeout=TIMEOUT) is array


@pytest.mark.asyncio
async def test_timeout_does_not_matter_when_ready():
    """A ready tree is given back even if there is no time at all."""
    x = jnp.ones(2)
    jax.block_until_ready(x)
    assert await wait_until_ready(x, timeout=0) is x


@pytest.mark.asyncio
async def test_cancelled_wait_leaves_nothing_behind():
    """The poller forgets the arrays of a wait that was given up, long before they are computed."""
    late = Late()
    array = await pending(late)
    reference = weakref.ref(array)
    task = await started(wait_until_ready([array]))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del array, task
    async with asyncio.timeout(TIMEOUT):
        while reference() is not None:
            gc.collect()
            await asyncio.sleep(0.005)
        late.release()


def test_pauses_grow_with_the_age_of_a_wait(monkeypatch):
    """A pending array is looked at again after about 5 % of its age, between 50 us and 20 ms."""
    now, due = [100.0], []
    ready = [False]
    monkeypatch.setattr(_readiness, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        _readiness._service, "call_at", lambda when, action: due.append((when, action))
    )
    monkeypatch.setattr(_readiness._service, "post", lambda action: action())
    monkeypatch.setattr(_readiness._compat, "all_ready", lambda arrays: ready[0])
    monkeypatch.setattr(_readiness, "_pending", 0)
    done = []
    _readiness.when_ready([object()], lambda: done.append(now[0]))
    pauses = {}
    while now[0] < 110.0:
        when, action = due.pop()
        age = now[0] - 100.0
        pauses[age] = when - now[0]
        now[0] = when
        action()
    assert pauses[0.0] == pytest.approx(50e-6)
    for age, pause in pauses.items():
        assert min(0.049 * age, 0.0199) <= pause <= max(51e-6, min(0.051 * age, 0.0201))
    assert len(pauses) < 1000
    ready[0] = True
    due.pop()[1]()
    assert done == [now[0]]
    assert due == []


# --- failed -----------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_failed_computation_raises(late):
    """A failed array counts as ready for JAX: the wait raises its error, each time."""
    array = await pending(late)
    task = await started(wait_until_ready({"a": array}))
    late.fail()
    async with asyncio.timeout(TIMEOUT):
        for wait in (task, wait_until_ready(array), wait_until_ready([1, array])):
            with pytest.raises(jax.errors.JaxRuntimeError, match="told to fail"):
                await wait


@pytest.mark.asyncio
async def test_failed_computation_fails_its_call(late):
    """A call whose body returned fails with its arrays; what was dispatched stays dispatched."""
    future = colocated_python(late_body)(jnp.arange(4.0), late)
    async with asyncio.timeout(TIMEOUT):
        early = await future.wait_dispatched()
        task = await started(future_result(future))
        late.fail()
        with pytest.raises(jax.errors.JaxRuntimeError, match="told to fail"):
            await task
        with pytest.raises(jax.errors.JaxRuntimeError, match="told to fail") as caught:
            await future.wait_dispatched()
    assert any(note.startswith("colocated call late_body") for note in caught.value.__notes__)
    assert future.state is CallState.FAILED
    assert early.is_ready()


async def future_result(future):
    return await future


@pytest.mark.asyncio
async def test_failure_among_ready_arrays_raises(late):
    """One failed array fails its tree."""
    array = await pending(late)
    late.fail()
    async with asyncio.timeout(TIMEOUT):
        with pytest.raises(jax.errors.JaxRuntimeError, match="told to fail"):
            await wait_until_ready([jnp.ones(2), array, jnp.ones(3)])


# --- deleted and donated ----------------------------------------------------------------------------


def delete(array):
    array.delete()


_donate = jax.jit(lambda x: x + 1, donate_argnums=0)


def donate(array):
    _donate(array).block_until_ready()


ways = pytest.mark.parametrize("way", [delete, donate])


@ways
@pytest.mark.asyncio
async def test_deleted_array_raises(way):
    """Deleted or donated before it is awaited: a Python error names shape and dtype."""
    array = jnp.arange(5.0)
    way(array)
    assert array.is_deleted()
    async with asyncio.timeout(TIMEOUT):
        for tree in (array, [jnp.ones(2), array], {"a": (array, None)}):
            with pytest.raises(ArrayDeletedError, match=r"shape \(5,\) and dtype float32"):
                await wait_until_ready(tree)


@pytest.mark.asyncio
async def test_deleted_keys_raise():
    """Typed keys too."""
    key = jax.random.split(jax.random.key(0), 2)
    key.delete()
    with pytest.raises(ArrayDeletedError):
        await wait_until_ready([key])


@pytest.mark.asyncio
async def test_array_deleted_while_waiting_raises(late):
    """The wait ends with the error at once, not when the computation would have ended."""
    array = await pending(late)
    task = await started(wait_until_ready(array))
    await asyncio.to_thread(array.delete)
    async with asyncio.timeout(TIMEOUT):
        with pytest.raises(ArrayDeletedError):
            await task
    assert not late._go.is_set()


@pytest.mark.asyncio
async def test_array_donated_while_waiting_raises(channel, late):
    """A pending array that is donated to another computation is gone for who awaits it."""
    array = await pending(late)
    task = await started(wait_until_ready(array))
    result = channel.run(_donate, array)
    async with asyncio.timeout(TIMEOUT):
        after = await result.wait_dispatched()
        assert array.is_deleted()
        with pytest.raises(ArrayDeletedError):
            await task
        assert not after.is_ready()
        late.release()
        np.testing.assert_array_equal(np.asarray(await result), [1, 2, 3, 4])


@pytest.mark.asyncio
async def test_result_deleted_while_computing_fails_its_call(late):
    """Somebody deletes what a call returned before it is ready: its waiters get the error."""
    future = colocated_python(late_body)(jnp.arange(4.0), late)
    async with asyncio.timeout(TIMEOUT):
        early = await future.wait_dispatched()
        task = await started(future_result(future))
        await asyncio.to_thread(early.delete)
        with pytest.raises(ArrayDeletedError) as caught:
            await task
    assert any(note.startswith("colocated call late_body") for note in caught.value.__notes__)


@ways
@pytest.mark.asyncio
async def test_body_that_returns_a_deleted_array_fails(way):
    """A body's result must be alive."""
    async with asyncio.timeout(TIMEOUT):
        x = jnp.arange(5.0)

        def body(x):
            y = x + 1
            way(y)
            return {"y": y, "x": x}

        with pytest.raises(ArrayDeletedError):
            await colocated_python(body)(x)
        assert await colocated_python(lambda x: x)(x) is x


@pytest.mark.asyncio
async def test_deleted_argument_fails_in_the_body():
    """An argument deleted before its call runs is JAX's error in the body; the channel goes on."""
    x = jnp.arange(5.0)
    x.delete()
    async with asyncio.timeout(TIMEOUT):
        with pytest.raises(RuntimeError, match="deleted"):
            await colocated_python(lambda x: x + 1)(x)
        y = jnp.ones(1)
        assert await colocated_python(lambda x: x)(y) is y


RACE = """
    import asyncio, sys, threading
    import jax, jax.numpy as jnp
    jax.config.update("jax_num_cpu_devices", 2)
    from aiocolocated import ArrayDeletedError, colocated_python, wait_until_ready

    sys.setswitchinterval(1e-5)
    square = jax.jit(lambda x: x @ x)
    start = jnp.full((96, 96), 0.01)
    square(start).block_until_ready()
    shelf, taken = [], threading.Semaphore(0)
    body = colocated_python(lambda x: [square(x) for _ in range(3)])
    ended = {"ready": 0, "deleted": 0}

    def delete():
        while True:
            taken.acquire()
            array = shelf.pop()
            if array is None:
                return
            array.delete()

    def offer(array):
        shelf.append(array)
        taken.release()

    async def wait(tree):
        try:
            await wait_until_ready(tree)
            ended["ready"] += 1
        except ArrayDeletedError:
            ended["deleted"] += 1
        except RuntimeError as error:
            assert "deleted" in str(error), error
            ended["deleted"] += 1

    async def main():
        async with asyncio.timeout(25):
            for i in range(150):
                arrays = [square(start) for _ in range(8)]
                waits = [asyncio.ensure_future(wait(a)) for a in arrays]
                waits.append(asyncio.ensure_future(wait(arrays)))
                for array in arrays[i % 3 :: 2]:
                    offer(array)
                future = body(start)
                offer(arrays[1])
                await asyncio.gather(*waits)
                try:
                    for array in await future.wait_dispatched():
                        offer(array)
                    await future
                except (ArrayDeletedError, RuntimeError) as error:
                    assert "deleted" in str(error), error

    threads = [threading.Thread(target=delete) for _ in range(3)]
    for thread in threads:
        thread.start()
    asyncio.run(main())
    for thread in threads:
        offer(None)
    for thread in threads:
        thread.join()
    assert ended["deleted"] > 50, ended
    print("survived", sum(ended.values()))
"""


def test_arrays_deleted_by_other_threads_never_crash(run_script):
    """Threads that delete arrays while they are polled cause errors, never the end of the process."""
    finished = run_script(RACE).check()
    assert finished.stdout == "survived 1350\n"


# --- loops ------------------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_pending_array_on_every_kind_of_loop(late):
    """Debug mode, uvloop and eager tasks wait alike."""
    array = await pending(late)
    task = await started(wait_until_ready(array))
    late.release()
    async with asyncio.timeout(TIMEOUT):
        assert await task is array


def test_wait_of_a_closed_loop_does_no_harm():
    """A loop that ends in the middle of a wait leaves the poller working for others."""
    late, kept = Late(), []

    async def give_up():
        kept.append(await pending(late))
        asyncio.ensure_future(wait_until_ready(kept[0]))  # noqa: RUF006 - dropped on purpose
        await asyncio.sleep(0)

    asyncio.run(give_up())

    async def wait():
        async with asyncio.timeout(TIMEOUT):
            task = await started(wait_until_ready(kept[0]))
            late.release()
            return await task

    assert asyncio.run(wait()) is kept[0]


def test_loops_of_other_threads_may_come_and_go(monkeypatch):
    """A loop that starts in another thread does not disturb one that starts here."""

    class Changing(weakref.WeakKeyDictionary):
        def items(self):
            raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr(_loops, "_bridges", Changing())
    gate = Gate()
    x = jnp.ones(1)

    async def main():
        future = colocated_python(hold)(x, gate)
        task = await started(wait_until_ready([future]))
        gate.open()
        async with asyncio.timeout(TIMEOUT):
            (result,) = await task
        assert result is x

    asyncio.run(main())


def test_service_thread_takes_no_tiny_timeout_for_ever():
    """Python 3.11 and 3.12 wait for ever where a short timeout has passed before the wait begins."""

    inbox = queue.SimpleQueue()

    def take_often():
        for _ in range(30_000):
            inbox.put(None)
            inbox.get()
            with contextlib.suppress(queue.Empty):
                _service.take(inbox, 1e-9)

    thread = threading.Thread(target=take_often, daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    assert not thread.is_alive()
