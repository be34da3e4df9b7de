# SPDX-License-Identifier: Apache-2.0
"""No loop binding (contract C14): what is made at import time serves every loop, one after the other
and several at once, of every kind."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aiocolocated
from aiocolocated import (
    ArrayFuture,
    CallCancelledError,
    TaskChannel,
    TaskGroup,
    colocated_python,
    from_thread,
    gather,
    open_task_channel,
    runtime,
    wait_until_ready,
)
from aiocolocated.testing import Gate, Recorder, Rendezvous

pytestmark = pytest.mark.timeout(40)

NewLoop = Callable[[], asyncio.AbstractEventLoop]


@colocated_python
def double(x: jax.Array) -> jax.Array:
    return x * 2


@colocated_python
def hold(x: jax.Array, started: Gate, gate: Gate) -> jax.Array:
    """Say so, and wait."""
    started.open()
    gate.wait()
    return x


@colocated_python
def meet(x: jax.Array, meeting: Rendezvous) -> jax.Array:
    meeting.wait()
    return x


CHANNEL = TaskChannel("import time")
BOUNDED = TaskChannel("import time, bounded", max_pending=2)
OWN_THREAD = TaskChannel("import time, own thread", dedicated_thread=True)


@pytest.fixture(scope="module", autouse=True)
def _own_thread_ends():
    yield
    asyncio.run(OWN_THREAD.aclose())


def run(new_loop: NewLoop, main: Callable[[], Awaitable[Any]]) -> Any:
    """asyncio.run on a kind of loop."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(asyncio.wait_for(main(), 20))


async def everything(x: jax.Array) -> None:
    """Use each construct once."""
    expected = np.asarray([0.0, 2.0, 4.0])

    def right(value: jax.Array) -> bool:
        return bool((np.asarray(value) == expected).all())

    assert right(await double(x))
    assert all(map(right, await gather(*(double(x) for _ in range(5)))))
    async with TaskGroup(limit=2) as group:
        for _ in range(4):
            group.start_soon(double, x)
    assert all(map(right, group.results()))
    assert all(map(right, await double.map([x] * 5, limit=2)))
    for channel in (CHANNEL, BOUNDED, OWN_THREAD):
        futures = [await channel.submit(double, x) for _ in range(5)]
        assert all([right(await fut) async for fut in aiocolocated.as_completed(futures)])
        await channel.drain()
    async with CHANNEL:
        assert right(await double(x))
    async with open_task_channel(max_pending=1) as own:
        assert right(await own.run(jax.jit(lambda x: x * 2), x))
    assert right(await wait_until_ready(x + x))
    assert right(await asyncio.to_thread(lambda: double(x).result(10)))


# --- one loop after the other -------------------------------------------------------------------------


def test_everything_works_in_three_runs(new_loop):
    """A second and a third asyncio.run use what the first has used, with JAX's caches emptied between."""
    for _ in range(3):
        run(new_loop, lambda: everything(jnp.arange(3.0)))
        jax.clear_caches()
    assert runtime.calls() == []


def test_everything_works_without_clearing(new_loop):
    """Warm caches of an earlier loop serve the next one."""
    for _ in range(3):
        run(new_loop, lambda: everything(jnp.arange(3.0)))


@pytest.mark.asyncio
async def test_caches_cleared_while_calls_run():
    """jax.clear_caches() in the middle of running and queued calls breaks none of them."""
    gate, started, x = Gate(), Gate(), jnp.arange(3.0)
    async with open_task_channel():
        running = hold(x, started, gate)
        await started.wait_async()
        queued = [double(x) for _ in range(5)]
        jax.clear_caches()
        later = [double(x) for _ in range(5)]
        gate.open()
        assert await running is x
        for value in await gather(*queued, *later):
            np.testing.assert_array_equal(value, [0, 2, 4])


def test_kinds_of_loops_take_turns():
    """Loops of different kinds, one after the other, share functions and channels."""
    from conftest import LOOPS

    for new_loop in (*LOOPS.values(), *LOOPS.values()):
        run(new_loop, lambda: everything(jnp.arange(3.0)))


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_everything_works_on_every_kind_of_loop():
    """Debug mode, uvloop and eager tasks change nothing."""
    await everything(jnp.arange(3.0))


def test_future_made_without_a_loop_is_awaited_on_two(new_loop):
    """A future made in a script is awaited by asyncio.run, twice, and read in the script again."""
    x, gate, started = jnp.arange(3.0), Gate(), Gate()
    fut = hold(x, started, gate)

    async def first() -> object:
        task = asyncio.ensure_future(asyncio.wait_for(fut, 10))
        await started.wait_async()
        gate.open()
        return await task

    async def second() -> object:
        return await fut

    assert run(new_loop, first) is x
    assert run(new_loop, second) is x
    assert fut.result(10) is x


def test_future_outlives_its_loop(new_loop):
    """A call submitted on a loop that ends meanwhile is awaited on the next one."""
    x, gate, started = jnp.arange(3.0), Gate(), Gate()

    async def submit() -> list[ArrayFuture[Any]]:
        futures = [hold(x, started, gate), double(x)]
        await started.wait_async()
        return futures

    futures = run(new_loop, submit)
    assert not any(fut.done() for fut in futures)
    gate.open()

    async def wait() -> list[Any]:
        return await gather(*futures)

    held, doubled = run(new_loop, wait)
    assert held is x
    np.testing.assert_array_equal(doubled, [0, 2, 4])


def test_end_of_run_cancels_what_its_tasks_awaited(new_loop):
    """asyncio.run cancels the tasks left over, and with them the calls that only they wait for."""
    x, gate, started = jnp.arange(3.0), Gate(), Gate()
    tasks = []

    async def main() -> list[ArrayFuture[Any]]:
        awaited, forgotten = CHANNEL.submit_nowait(hold, x, started, gate), double(x)

        async def wait() -> None:
            await awaited

        tasks.append(asyncio.ensure_future(wait()))
        await started.wait_async()
        await asyncio.sleep(0)
        return [awaited, forgotten]

    awaited, forgotten = run(new_loop, main)
    assert awaited.cancelled()
    with pytest.raises(CallCancelledError):
        awaited.result(10)
    np.testing.assert_array_equal(forgotten.result(10), [0, 2, 4])
    gate.open()
    run(new_loop, CHANNEL.drain)


@pytest.mark.parametrize("finish", ["result", "callback", "both"])
def test_loop_closed_with_calls_in_flight(new_loop, finish):
    """A loop closed under its waiters, the hard way, disturbs neither the worker nor others' waits."""
    x, gate, started = jnp.arange(3.0), Gate(), Gate()
    recorder = Recorder()
    loop = new_loop()
    # Its pending task is destroyed, which asyncio tells.
    loop.set_exception_handler(lambda loop, context: recorder.record("told", text=str(context)))
    fut = CHANNEL.submit_nowait(hold, x, started, gate)

    async def wait() -> None:
        await fut

    async def begin() -> None:
        if finish != "callback":
            tasks.append(asyncio.ensure_future(wait()))
        if finish != "result":
            fut.add_done_callback(lambda _: recorder.record("called"))
        await started.wait_async()
        await asyncio.sleep(0)

    tasks: list[Any] = []
    loop.run_until_complete(begin())
    loop.close()
    gate.open()
    assert fut.result(10) is x
    del tasks[:]

    async def again() -> object:
        await CHANNEL.drain()
        return await CHANNEL.submit_nowait(double, x)

    np.testing.assert_array_equal(run(new_loop, again), [0, 2, 4])
    del loop
    gc.collect()
    assert recorder.count("called") == 0  # its loop was closed: nobody could run it
    assert all("pending" in text for text in recorder.sequence("told"))


def test_loop_run_in_pieces(new_loop):
    """run_until_complete may be called again and again; what completes between waits for the loop."""
    x, loop, recorder = jnp.arange(3.0), new_loop(), Recorder()
    gate, started = Gate(), Gate()
    try:

        async def submit() -> ArrayFuture[Any]:
            fut = hold(x, started, gate)
            fut.add_done_callback(lambda _: recorder.record("called"))
            await started.wait_async()
            return fut

        async def wait(fut: ArrayFuture[Any]) -> object:
            return await fut

        fut = loop.run_until_complete(submit())
        gate.open()
        assert fut.result(10) is x
        assert recorder.count("called") == 0
        assert loop.run_until_complete(wait(fut)) is x
        loop.run_until_complete(recorder.wait_for("called"))
        assert recorder.count("called") == 1
        np.testing.assert_array_equal(loop.run_until_complete(wait(double(x))), [0, 2, 4])
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


# --- several loops at once --------------------------------------------------------------------------------


def in_threads(new_loop: NewLoop, *mains: Callable[[], Awaitable[Any]]) -> list[Any]:
    """Run each on a loop of its own, in a thread of its own, at once."""
    results: list[Any] = [None] * len(mains)

    def target(i: int, main: Callable[[], Awaitable[Any]]) -> None:
        try:
            results[i] = run(new_loop, main)
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=target, args=(i, m)) for i, m in enumerate(mains)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def test_two_loops_in_two_threads(new_loop):
    """Two loops use the same functions and channels at once."""
    x = jnp.arange(3.0)
    in_threads(new_loop, *[functools.partial(everything, x)] * 2)


def test_calls_of_two_loops_overlap(new_loop):
    """The calls of two loops' tasks are of different channels: they meet."""
    x, meeting = jnp.arange(3.0), Rendezvous(2)

    async def main() -> object:
        return await meet(x, meeting)

    values = in_threads(new_loop, main, main)
    assert all(value is x for value in values)


def test_one_channel_of_two_loops_keeps_one_at_a_time(new_loop):
    """Two loops that share a channel share its order: one body at a time, each loop's in its order."""
    x, recorder = jnp.arange(3.0), Recorder()

    def note(x: jax.Array, name: object) -> jax.Array:
        recorder.record("start", name=name)
        recorder.record("end", name=name)
        return x

    f = colocated_python(note)

    async def main(who: str) -> None:
        await gather(*[await BOUNDED.submit(f, x, (who, i)) for i in range(100)])

    in_threads(new_loop, lambda: main("a"), lambda: main("b"))
    assert recorder.peak() == 1
    names = recorder.sequence("start")
    for who in "ab":
        assert [i for w, i in names if w == who] == list(range(100))


def test_one_future_awaited_from_two_loops_and_a_thread(new_loop):
    """Two loops, a thread and callbacks of each wait for one call and get one array."""
    x, gate, started, waiting = jnp.arange(3.0), Gate(), Gate(), Recorder()
    fut = CHANNEL.submit_nowait(hold, x, started, gate)

    async def main() -> Any:
        loop = asyncio.get_running_loop()
        called = loop.create_future()
        fut.add_done_callback(lambda f: called.set_result((f, asyncio.get_running_loop())))
        waiting.record("waiting")
        value = await fut
        assert await asyncio.wait_for(called, 10) == (fut, loop)
        return value

    def thread() -> Any:
        waiting.record("waiting")
        return fut.result(10)

    async def threaded() -> Any:
        return await asyncio.to_thread(thread)

    async def open_when_all_wait() -> Any:
        await waiting.wait_for("waiting", 3)
        gate.open()
        return await fut

    values = in_threads(new_loop, main, main, threaded, open_when_all_wait)
    assert all(value is x for value in values)


def test_cancelling_waiter_on_one_loop_leaves_the_other(new_loop):
    """A timeout on one loop does not cancel the call that another loop awaits; the last one does."""
    x, gate, started = jnp.arange(3.0), Gate(), Gate()
    fut = CHANNEL.submit_nowait(hold, x, started, gate)
    timed_out, waits = Gate(), Gate()

    async def patient() -> Any:
        task = asyncio.ensure_future(asyncio.wait_for(fut, 10))
        while not fut._waiters:
            await asyncio.sleep(0)
        waits.open()
        await timed_out.wait_async()
        assert not fut.done()
        gate.open()
        return await task

    async def impatient() -> None:
        await waits.wait_async()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(fut, 0.02)
        timed_out.open()

    assert in_threads(new_loop, patient, impatient)[0] is x


def test_cancel_from_another_loop_reaches_waiters(new_loop):
    """cancel() on one loop releases a task on another one with CallCancelledError."""
    x, gate, started = jnp.arange(3.0), Gate(), Gate()
    fut = CHANNEL.submit_nowait(hold, x, started, gate)
    waits = Gate()

    async def waiter() -> str:
        task = asyncio.ensure_future(asyncio.wait_for(fut, 10))
        while not fut._waiters:
            await asyncio.sleep(0)
        waits.open()
        (done, _) = await asyncio.wait([task], timeout=10)
        return type(done.pop().exception()).__name__

    async def canceller() -> bool:
        await waits.wait_async()
        return fut.cancel()

    assert in_threads(new_loop, waiter, canceller) == ["CallCancelledError", True]
    gate.open()
    run(new_loop, CHANNEL.drain)


def test_dependency_of_another_loop(new_loop):
    """A future made on one loop is an argument of a call on another."""
    x, gate, started, shared = jnp.arange(3.0), Gate(), Gate(), Recorder()

    async def producer() -> None:
        fut = CHANNEL.submit_nowait(hold, x, started, gate)
        shared.record("made", fut=fut)
        await fut

    async def consumer() -> Any:
        await shared.wait_for("made")
        dependent = double(shared.sequence("made")[0])
        gate.open()
        return await dependent

    _, value = in_threads(new_loop, producer, consumer)
    np.testing.assert_array_equal(value, [0, 2, 4])


def test_many_loops_in_threads_one_after_the_other(new_loop):
    """Threads with a loop each come and go; nothing is left of them."""
    x = jnp.arange(3.0)

    async def main() -> Any:
        return await gather(*(double(x) for _ in range(3)))

    for _ in range(5):
        in_threads(new_loop, main, main, main)
    assert runtime.statistics().channels == 0


def test_from_thread_serves_scripts_between_loops(new_loop):
    """The library's own loop of from_thread shares functions and channels with others."""
    x = jnp.arange(3.0)

    async def main() -> Any:
        return await CHANNEL.submit_nowait(double, x)

    for _ in range(2):
        np.testing.assert_array_equal(run(new_loop, main), [0, 2, 4])
        np.testing.assert_array_equal(from_thread.run(main), [0, 2, 4])


# --- the wake-up's descriptor -------------------------------------------------------------------------------


def descriptors() -> Counter[str]:
    """Targets of this process's open descriptors."""
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            found[os.readlink(f"/proc/self/fd/{number}")] += 1
        except OSError:  # the one that listed the folder
            continue
    return found


async def held_briefly(x: jax.Array) -> None:
    """Wait for a call for which the loop really has to be woken."""
    gate = Gate()
    fut = hold(x, Gate(), gate)
    asyncio.get_running_loop().call_later(0.01, gate.open)
    await fut


linux = pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")


@linux
def test_descriptor_is_given_back_after_run(new_loop):
    """Each loop has one descriptor of the library's, closed when asyncio.run returns, not when collected."""
    x = jnp.arange(3.0)
    run(new_loop, lambda: held_briefly(x))  # also sweeps up behind loops of other tests
    before = descriptors()
    inside = []

    async def main() -> None:
        without = descriptors_here()
        for _ in range(3):
            await held_briefly(x)
        inside.append((descriptors_here() - without).total())

    def descriptors_here() -> Counter[str]:
        with aiocolocated.testing.allow_blocking():
            return descriptors()

    gc.disable()
    try:
        for _ in range(3):
            run(new_loop, main)
            assert descriptors() == before
    finally:
        gc.enable()
    assert inside == [1, 1, 1]


@linux
def test_descriptor_is_given_back_after_hard_close(new_loop):
    """A loop closed without shutting its generators down gives it back when the next loop comes."""
    x = jnp.arange(3.0)
    run(new_loop, lambda: held_briefly(x))  # also sweeps up behind loops of other tests
    before = descriptors()
    for _ in range(3):
        loop = new_loop()
        loop.run_until_complete(held_briefly(x))
        loop.close()
        del loop
        assert (descriptors() - before).total() <= 1
    run(new_loop, lambda: held_briefly(x))
    assert descriptors() == before


@linux
def test_descriptor_is_given_back_with_calls_in_flight(new_loop):
    """A run that ends before its calls gives its descriptor back at once; the calls end well."""
    x, gate, started = jnp.arange(3.0), Gate(), Gate()
    run(new_loop, lambda: held_briefly(x))  # also sweeps up behind loops of other tests
    before = descriptors()

    async def main() -> ArrayFuture[Any]:
        fut = hold(x, started, gate)
        await asyncio.wait([fut], timeout=0.01)
        await started.wait_async()
        return fut

    fut = run(new_loop, main)
    assert descriptors() == before
    gate.open()
    assert fut.result(10) is x
    assert descriptors() == before
