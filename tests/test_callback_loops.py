# SPDX-License-Identifier: Apache-2.0
"""On which loop a callback's coroutine runs, and that no wait there hangs, or is refused wrongly."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from late_arrays import Late

from aiocolocated import (
    ArrayFuture,
    DeadlockError,
    TaskChannel,
    _callback_runs,
    _hostloop,
    as_completed,
    colocated_python,
    configure,
    from_thread,
    gather,
    io_callback,
    wait_until_ready,
)
from aiocolocated.testing import Gate

TIMEOUT = 20.0  # seconds; only a bug takes that long
F32 = jax.ShapeDtypeStruct((), np.float32)

# Coroutine bodies that call jitted functions block the library's loop: here, on purpose.
pytestmark = [pytest.mark.timeout(60), pytest.mark.no_blocking(False)]

SHARED: dict[str, Any] = {}  # what a test and its callbacks have in common


@colocated_python
async def same(x: jax.Array) -> jax.Array:
    return x


@colocated_python
def plain(x: jax.Array) -> jax.Array:
    return x


@colocated_python
def wait_for_same(x: jax.Array) -> jax.Array:
    return same(x).result()


@colocated_python
async def await_plain(x: jax.Array) -> jax.Array:
    return await plain(x)


@colocated_python
def call(x: jax.Array, function: Any) -> jax.Array:
    return function(x)


@colocated_python
async def call_in_coroutine(x: jax.Array, function: Any) -> jax.Array:
    SHARED["started"].open()
    return function(x)


@pytest.fixture(autouse=True)
def _around() -> Iterator[None]:
    """Start the library's loop before the test, because it keeps descriptors; share nothing after it."""
    same(jnp.float32(0)).result(TIMEOUT)
    SHARED["started"] = Gate()
    yield
    SHARED.clear()


@pytest.fixture
def x() -> jax.Array:
    return jnp.float32(3)


def jitted(callback: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(lambda x: io_callback(callback, F32, x))


async def where(x: jax.Array) -> Any:
    SHARED["thread"] = threading.current_thread().name
    return np.asarray(x)


# --- which loop -------------------------------------------------------------------------------------------


def test_loops_are_counted_from_the_one_that_dispatches(x):
    """The host's; on its thread the next one; and so on, and always the same one."""
    program = jitted(where)

    async def calls(x: jax.Array) -> Any:
        return program(x)

    async def calls_twice(x: jax.Array) -> Any:
        return jitted(calls)(x)

    for _ in range(3):
        for function, expected in (
            (program, "aiocolocated-loop"),
            (jitted(calls), "aiocolocated-loop-2"),
            (jitted(calls_twice), "aiocolocated-loop-3"),
        ):
            function(x)
            assert SHARED["thread"] == expected
        call_in_coroutine(x, program).result(TIMEOUT)
        assert SHARED["thread"] == "aiocolocated-loop-2"
        call(x, program).result(TIMEOUT)
        assert SHARED["thread"] == "aiocolocated-loop"


def test_callback_that_runs_elsewhere_while_its_loop_is_stuck(x):
    """The loop is occupied by a body that waits for this callback, by way of another thread."""
    program = jitted(where)

    async def by_another_thread(x: jax.Array) -> Any:
        return np.asarray(await asyncio.to_thread(program, x))

    outer = jitted(by_another_thread)
    assert float(call_in_coroutine(x, outer).result(TIMEOUT)) == 3
    assert SHARED["thread"] == "aiocolocated-loop-2"
    assert float(program(x)) == 3
    assert SHARED["thread"] == "aiocolocated-loop"


def test_loop_that_does_nothing_is_given_up(x, monkeypatch):
    """Also where it is not known to be stuck: code that blocks it waits for the callback."""
    monkeypatch.setattr(_callback_runs, "_PATIENCE", 0.001)
    over = threading.Event()

    async def tell(x: jax.Array) -> Any:
        await where(x)
        over.set()
        return np.asarray(x)

    def block() -> None:
        SHARED["started"].open()
        assert over.wait(10)

    host = _hostloop.host_loop()
    host.loop.call_soon_threadsafe(block)
    SHARED["started"].wait()
    assert float(jitted(tell)(x)) == 3
    assert SHARED["thread"] == "aiocolocated-loop-2"


def test_interrupted_wait_for_a_coroutine_that_has_not_begun(x):
    """It never begins, on whichever loop."""
    go_on = threading.Event()
    host = _hostloop.host_loop()
    host.loop.call_soon_threadsafe(go_on.wait)
    began: list[Any] = []

    async def begin(x: jax.Array) -> Any:
        began.append(x)

    async def fail(x: jax.Array) -> Any:
        raise KeyError

    def both(x: jax.Array) -> Any:
        return io_callback(begin, F32, x) + io_callback(lambda x: 1 / 0, F32, x)

    with pytest.raises(ZeroDivisionError):
        TaskChannel().run(jax.jit(both), x).result(TIMEOUT)
    go_on.set()
    same(x).result(TIMEOUT)
    assert began == []
    assert not host.callbacks
    assert not _callback_runs.coroutines_running()


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.asyncio
async def test_inputs_that_need_a_callback_do_not_stop_its_loop(x, ordered):
    """A coroutine body calls a program with an array that comes from a callback on its own loop."""
    began, gate = Gate(), Gate()

    async def hold(x: jax.Array) -> Any:
        began.open()
        await gate.wait_async()
        for _ in range(5):
            await asyncio.sleep(0)
        return np.asarray(x)

    late = Late()
    y = jitted(hold)(late.array(x))
    late.release()
    await began.wait_async()
    second = jax.jit(lambda x: io_callback(where, F32, x, ordered=ordered) + 1)
    fut = call_in_coroutine(y, second)
    await SHARED["started"].wait_async()
    gate.open()
    async with asyncio.timeout(TIMEOUT):
        assert float(await fut) == 4
        assert float(await wait_until_ready(y)) == 3


# --- waits that are refused -------------------------------------------------------------------------------


async def wait_directly(fut: ArrayFuture[Any]) -> Any:
    return await fut


async def wait_dispatched(fut: ArrayFuture[Any]) -> Any:
    return await fut.wait_dispatched()


async def wait_by_gather(fut: ArrayFuture[Any]) -> Any:
    return await gather(fut, TaskChannel().submit_nowait(plain, jnp.float32(1)))


async def wait_by_as_completed(fut: ArrayFuture[Any]) -> Any:
    return [done async for done in as_completed([fut])]


async def wait_for_a_dependent(fut: ArrayFuture[Any]) -> Any:
    return await TaskChannel().submit_nowait(plain, fut)


async def wait_behind_it(fut: ArrayFuture[Any]) -> Any:
    return await SHARED["channel"].submit_nowait(plain, jnp.float32(1))


async def wait_in_a_thread(fut: ArrayFuture[Any]) -> Any:
    return await asyncio.to_thread(from_thread.run, wait_directly, fut)


async def wait_in_a_task(fut: ArrayFuture[Any]) -> Any:
    return await asyncio.create_task(wait_directly(fut))


async def wait_by_a_body(fut: ArrayFuture[Any]) -> Any:
    SHARED["future"] = fut
    return await TaskChannel().submit_nowait(result_of_shared, jnp.float32(1))


@colocated_python
def result_of_shared(x: jax.Array) -> jax.Array:
    return SHARED["future"].result()


WAITS = [wait_directly, wait_dispatched, wait_by_gather, wait_by_as_completed, wait_for_a_dependent]
WAITS += [wait_behind_it, wait_in_a_task, wait_by_a_body]


@pytest.mark.parametrize("wait", WAITS, ids=lambda wait: wait.__name__)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.asyncio
async def test_wait_for_the_own_call_is_refused(x, wait, depth):
    """In whichever way the callback waits for it, and in callbacks of callbacks."""
    told = Gate()

    async def callback(x: jax.Array) -> Any:
        await told.wait_async()
        return await wait(SHARED["own"])

    program = jitted(callback)
    if depth == 2:
        inner = program

        async def outer(x: jax.Array) -> Any:
            return inner(x)

        program = jitted(outer)
    channel = SHARED["channel"] = TaskChannel()
    fut = SHARED["own"] = channel.run(program, x)
    told.open()
    with pytest.raises(DeadlockError):
        async with asyncio.timeout(TIMEOUT):
            await fut
    async with asyncio.timeout(TIMEOUT):
        await channel.drain()


@pytest.mark.parametrize("needed", [same, wait_for_same, await_plain], ids=lambda f: f.__name__)
@pytest.mark.asyncio
async def test_wait_for_what_needs_the_occupied_loop_is_refused(x, needed):
    """The body that dispatches occupies the host's loop until the callback returns."""

    async def callback(x: jax.Array) -> Any:
        return np.asarray(await needed(x))

    program = jitted(callback)
    async with asyncio.timeout(TIMEOUT):
        assert float(await TaskChannel().run(program, x)) == 3
        with pytest.raises(
            DeadlockError, match="called a jitted function, which returns only when"
        ):
            await call_in_coroutine(x, program)
        assert float(await TaskChannel().run(program, x)) == 3


@pytest.mark.asyncio
async def test_waits_that_end_are_not_refused(x):
    """For other calls, of the same function too; in a coroutine body for what needs no loop."""

    async def callback(x: jax.Array) -> Any:
        y = await TaskChannel().submit_nowait(plain, x)
        return np.asarray(y + await TaskChannel().submit_nowait(call, x, jnp.square))

    program = jitted(callback)

    async def nested(x: jax.Array) -> Any:
        return await TaskChannel().run(program, x)

    async with asyncio.timeout(TIMEOUT):
        assert float(await TaskChannel().run(program, x)) == 12
        assert float(await call_in_coroutine(x, program)) == 12
        assert float(await TaskChannel().run(jitted(nested), x)) == 12
        assert float(await call_in_coroutine(x, jitted(nested))) == 12


@pytest.mark.asyncio
async def test_task_that_outlives_its_callback_may_wait_for_its_call(x):
    """When the callback is over, the program does not wait for what the callback has left behind."""
    told, waits = Gate(), Gate()

    async def later() -> Any:
        await told.wait_async()
        asyncio.get_running_loop().call_soon(waits.open)
        return await SHARED["own"]

    async def leave(x: jax.Array) -> Any:
        SHARED["task"] = asyncio.create_task(later())
        return np.asarray(x)

    async def hold(x: jax.Array) -> Any:
        told.open()
        await waits.wait_async()
        return np.asarray(x)

    program = jax.jit(lambda x: io_callback(hold, F32, io_callback(leave, F32, x)))
    async with asyncio.timeout(TIMEOUT):
        fut = SHARED["own"] = TaskChannel().run(program, x)
        assert float(await fut) == 3
        task = SHARED["task"]
        result = await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(asyncio.wait_for(task, 10), task.get_loop())
        )
    assert result is await fut


# --- the watch --------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_new_limit_holds_for_what_runs(x):
    """The watch looks again at once, not when the old limit would have it; and says each one once."""
    began, gate, reported = [Gate(), Gate()], Gate(), Gate()
    number = iter(range(2))
    texts: list[str] = []

    class Tell(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())
            if len(texts) == 2:
                reported.open()

    async def hold(x: jax.Array) -> Any:
        began[next(number)].open()
        await gate.wait_async()
        return np.asarray(x)

    program = jitted(hold)
    handler = Tell()
    logging.getLogger("aiocolocated").addHandler(handler)
    try:
        futures = [TaskChannel().run(program, x) for _ in range(2)]
        for started in began:
            await started.wait_async()
        configure(slow_callback=0.01)
        await reported.wait_async()
        configure(slow_callback=0.02)
        await asyncio.sleep(0.04)  # would say it again
    finally:
        logging.getLogger("aiocolocated").removeHandler(handler)
        gate.open()
    async with asyncio.timeout(TIMEOUT):
        await gather(*futures)
    assert len(texts) == 2
    for text in texts:
        assert "hold has not returned for 0." in text
        assert f"on loop 'aiocolocated-loop', at {__file__}:" in text
        assert "slow_callback is 0.01 s" in text


def test_callbacks_in_a_forked_child(run_script):
    """Coroutines are refused, where the library's threads are missing; plain functions run."""
    finished = run_script("""
        import os, warnings
        warnings.simplefilter("ignore")
        import jax, numpy as np
        from aiocolocated import ForkedProcessError, callback_error, io_callback
        spec = jax.ShapeDtypeStruct((), np.float32)
        async def double(x):
            return np.float32(2 * x)
        program = jax.jit(lambda x: io_callback(double, spec, x))
        plain = jax.jit(lambda x: io_callback(np.asarray, spec, x))
        x = jax.numpy.float32(3)
        assert (program(x), plain(x)) == (6, 3)
        if not (child := os.fork()):
            assert plain(x) == 3
            try:
                program(x)
            except Exception as error:
                os._exit(3 if isinstance(callback_error(error), ForkedProcessError) else 4)
            os._exit(5)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), program(x))
    """).check()
    assert finished.stdout.split() == ["3", "6.0"]
