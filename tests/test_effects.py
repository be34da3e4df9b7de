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
    TaskChannel,
    _callback_runs,
    _programs,
    colocated_python,
    debug_callback,
    effects_barrier,
    from_thread,
    io_callback,
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
