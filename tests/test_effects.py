# SPDX-License-Identifier: Apache-2.0
"""`effects_barrier`: what it waits for, and which errors it raises."""

from __future__ import annotations

import asyncio
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from late_arrays import Late

from aiocolocated import (
    DeadlockError,
    TaskChannel,
    _callback_runs,
    _programs,
    colocated_python,
    debug_callback,
    effects_barrier,
    from_thread,
    io_callback,
    wait_until_ready,
)
from aiocolocated.testing import Gate, Recorder

pytestmark = pytest.mark.timeout(60)

SCALAR = jax.ShapeDtypeStruct((), np.float32)


@pytest.fixture(scope="module")
def x() -> jax.Array:
    return jnp.float32(1)


@pytest.fixture
def late() -> Late:
    return Late()


@colocated_python
def hold(x: jax.Array, started: Gate, gate: Gate, recorder: Recorder) -> jax.Array:
    started.open()
    gate.wait()
    recorder.record("body")
    return x


def names(recorder: Recorder) -> list[str]:
    return [event.name for event in recorder.events]


async def stays(task: asyncio.Task[None]) -> bool:
    """Whether a task is not over after everything had its turn."""
    for _ in range(20):
        await asyncio.sleep(0.001)
    return not task.done()


@pytest.mark.asyncio
async def test_nothing_to_wait_for():
    await effects_barrier()


@pytest.mark.asyncio
@pytest.mark.parametrize("abandoned", [False, True])
async def test_waits_for_bodies(x, abandoned):
    """Also for one whose call was cancelled while it ran."""
    recorder, started, gate = Recorder(), Gate(), Gate()
    fut = TaskChannel().submit_nowait(hold, x, started, gate, recorder)
    await started.wait_async()
    if abandoned:
        fut.cancel()
    barrier = asyncio.create_task(effects_barrier())
    assert await stays(barrier)
    gate.open()
    await barrier
    assert names(recorder) == ["body"]


@pytest.mark.asyncio
async def test_does_not_wait_for_what_comes_later(x):
    recorder, started, gate = Recorder(), Gate(), Gate()
    late_start, late_gate = Gate(), Gate()
    first = TaskChannel().submit_nowait(hold, x, started, gate, recorder)
    await started.wait_async()
    barrier = asyncio.create_task(effects_barrier())
    assert await stays(barrier)
    second = TaskChannel().submit_nowait(hold, x, late_start, late_gate, recorder)
    gate.open()
    await barrier
    assert not second.done()
    late_gate.open()
    await first
    await second


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["io", "ordered", "debug"])
@pytest.mark.parametrize("where", ["loop", "thread", "channel"])
async def test_waits_for_programs(late, where, kind):
    """Of an asynchronous program on the loop or in a thread, which nobody awaits."""
    recorder = Recorder()

    async def write(x: jax.Array) -> None:
        await asyncio.sleep(0)
        recorder.record("written")

    @jax.jit
    def program(x: jax.Array) -> None:
        if kind == "debug":
            debug_callback(write, x)
        else:
            io_callback(write, None, x, ordered=kind == "ordered")

    y = late.array(jnp.float32(2))
    if where == "loop":
        program(y)
    elif where == "channel":
        TaskChannel().run(program, y)
    else:
        thread = threading.Thread(target=program, args=(y,))
        thread.start()
    barrier = asyncio.create_task(effects_barrier())
    if (
        where != "thread"
    ):  # a thread waits for its inputs first, and has dispatched nothing till then
        assert await stays(barrier)
    late.release()
    if where == "thread":
        await asyncio.to_thread(thread.join)
        await effects_barrier()
    await barrier
    assert names(recorder) == ["written"]
    assert not _programs.in_flight()


@pytest.mark.asyncio
@pytest.mark.parametrize("ordered", [False, True])
async def test_raises_the_error_of_a_program_called_directly_once(late, ordered):
    async def fail(x: jax.Array) -> None:
        raise LookupError("gone", 3)

    @jax.jit
    def program(x: jax.Array) -> None:
        io_callback(fail, None, x, ordered=ordered)

    program(late.array(jnp.float32(2)))
    late.release()
    with pytest.raises(LookupError) as caught:
        await effects_barrier()
    assert caught.value.args == ("gone", 3)
    await effects_barrier()


@pytest.mark.asyncio
async def test_error_of_a_call_is_the_calls(x):
    async def fail(x: jax.Array) -> None:
        raise LookupError("gone")

    @jax.jit
    def program(x: jax.Array) -> None:
        io_callback(fail, None, x)

    fut = TaskChannel().run(program, x)
    await effects_barrier()
    with pytest.raises(LookupError, match="gone"):
        await fut


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["body", "coroutine body"])
async def test_body_does_not_wait_for_itself(x, kind):
    def body(x: jax.Array) -> jax.Array:
        from_thread.run(effects_barrier)
        return x

    async def coroutine(x: jax.Array) -> jax.Array:
        await effects_barrier()
        return x

    function = colocated_python(body if kind == "body" else coroutine)
    async with asyncio.timeout(20):
        assert await function(x) is x


@pytest.mark.asyncio
async def test_callback_does_not_wait_for_itself(x):
    async def callback(x: jax.Array) -> jax.Array:
        async with asyncio.timeout(20):
            await effects_barrier()
        return x

    program = jax.jit(lambda x: io_callback(callback, SCALAR, x))
    assert float(await TaskChannel().run(program, x)) == 1


@pytest.mark.asyncio
async def test_cancelled_barrier_leaves_everything_alone(x):
    recorder, started, gate = Recorder(), Gate(), Gate()
    fut = TaskChannel().submit_nowait(hold, x, started, gate, recorder)
    await started.wait_async()
    barrier = asyncio.create_task(effects_barrier())
    assert await stays(barrier)
    barrier.cancel()
    with pytest.raises(asyncio.CancelledError):
        await barrier
    gate.open()
    assert await fut is x


def test_without_a_loop(x):
    recorder = Recorder()

    async def write(x: jax.Array) -> None:
        recorder.record("written")

    jax.jit(lambda x: io_callback(write, None, x))(x)
    from_thread.run(effects_barrier)
    assert names(recorder) == ["written"]
    assert not _callback_runs.coroutines_running()


def test_exit_waits_for_callbacks_of_programs(run_script):
    """Of one that the main thread has dispatched asynchronously, without anybody who waits."""
    finished = run_script("""
        import asyncio, time, jax, jax.numpy as jnp
        from aiocolocated import io_callback
        async def write(x):
            await asyncio.sleep(0.2)
            print("written", flush=True)
        m = jnp.ones((700, 700))
        product = jax.jit(lambda m: (m @ m @ m @ m)[0, 0])
        async def main():
            jax.jit(lambda x: io_callback(write, None, x))(product(m))
        asyncio.run(main())
        print("end", flush=True)
    """).check()
    assert sorted(finished.stdout.split()) == ["end", "written"]
    assert finished.stderr == ""


@pytest.mark.no_blocking(False)
@pytest.mark.asyncio
async def test_callback_does_not_wait_for_those_that_wait_for_it(x):
    """In a task of its own, in a callback of a callback, and in a body that it calls."""

    @colocated_python
    def body(x: jax.Array) -> jax.Array:
        from_thread.run(effects_barrier)
        return x

    async def in_a_task(x: jax.Array) -> jax.Array:
        async with asyncio.TaskGroup() as group:
            group.create_task(effects_barrier())
        return x

    async def in_a_callback(x: jax.Array) -> jax.Array:
        return jax.jit(lambda x: io_callback(in_a_task, SCALAR, x))(x)

    async def in_a_body(x: jax.Array) -> jax.Array:
        return await body(x)

    for callback in (in_a_task, in_a_callback, in_a_body):
        program = jax.jit(lambda x, callback=callback: io_callback(callback, SCALAR, x))
        async with asyncio.timeout(20):
            assert float(await asyncio.to_thread(program, x)) == 1


@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.asyncio
async def test_is_refused_in_an_asynchronous_program(late, kind):
    """It would wait for that program, which nobody can tell from the others."""

    def plain(x: jax.Array) -> jax.Array:
        from_thread.run(effects_barrier)
        return x

    async def coroutine(x: jax.Array) -> jax.Array:
        await effects_barrier()
        return x

    program = jax.jit(lambda x: io_callback(plain if kind == "plain" else coroutine, SCALAR, x))
    y = program(late.array(jnp.float32(2)))
    late.release()
    with pytest.raises(DeadlockError, match="effects_barrier in a callback of a program that JAX"):
        async with asyncio.timeout(20):
            await wait_until_ready(y)


@pytest.mark.asyncio
async def test_task_of_a_callback_may_wait_when_that_is_over(late):
    go, over = Gate(), Gate()

    async def later() -> None:
        await go.wait_async()
        await effects_barrier()
        over.open()

    tasks = []

    async def callback(x: jax.Array) -> jax.Array:
        tasks.append(asyncio.create_task(later()))
        return x

    y = jax.jit(lambda x: io_callback(callback, SCALAR, x))(late.array(jnp.float32(2)))
    late.release()
    await wait_until_ready(y)
    await effects_barrier()
    go.open()
    await over.wait_async()


@pytest.mark.asyncio
async def test_in_a_body_with_a_loop_of_its_own(x):
    @colocated_python
    def body(x: jax.Array) -> jax.Array:
        asyncio.run(effects_barrier())
        return x

    async with asyncio.timeout(20):
        assert await body(x) is x


@pytest.mark.asyncio
async def test_several_barriers_at_once(late):
    """All wait; each error is raised by one of them, and several come in a group."""
    programs, errors = [], [LookupError("one"), ArithmeticError("two")]
    for error in errors:

        async def fail(x: jax.Array, error: Exception = error) -> None:
            raise error

        programs.append(jax.jit(lambda x, fail=fail: io_callback(fail, None, x)))
    y = late.array(jnp.float32(2))
    threads = [threading.Thread(target=asyncio.run, args=(_call(p, y),)) for p in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    barriers = [asyncio.create_task(effects_barrier()) for _ in range(3)]
    assert await stays(barriers[0])
    late.release()
    raised: list[BaseException] = []
    for result in await asyncio.gather(*barriers, return_exceptions=True):
        if isinstance(result, BaseExceptionGroup):
            raised += result.exceptions
        elif result is not None:
            raised.append(result)
    assert sorted(map(str, raised)) == ["one", "two"]
    await effects_barrier()
    assert not _callback_runs._tickets


async def _call(program, x) -> None:
    program(x)
