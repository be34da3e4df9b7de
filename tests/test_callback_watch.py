# SPDX-License-Identifier: Apache-2.0
"""Callbacks that would hang: refused in words where that can be seen, and reported otherwise."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aiocolocated import (
    ArrayFuture,
    DeadlockError,
    TaskChannel,
    _callback_runs,
    awaitable_jit,
    callback_error,
    colocated_python,
    configure,
    io_callback,
    wait_until_ready,
)
from aiocolocated.testing import Gate

pytestmark = pytest.mark.timeout(60)

SCALAR = jax.ShapeDtypeStruct((), np.float32)


def program(callback: Any) -> Any:
    return jax.jit(lambda x: io_callback(callback, SCALAR, x))


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize("wait", ["future", "tree"])
async def test_waiting_for_the_call_that_runs_the_callback_is_refused(kind, wait):
    box: list[ArrayFuture[Any]] = []
    told = Gate()

    def plain(x: jax.Array) -> Any:
        told.wait()
        return box[0].result()

    async def coroutine(x: jax.Array) -> Any:
        await told.wait_async()
        return await (box[0] if wait == "future" else wait_until_ready(box[0]))

    fut = awaitable_jit(program(plain if kind == "plain" else coroutine))(jnp.float32(1))
    box.append(fut)
    told.open()
    with pytest.raises(DeadlockError, match="itself"):
        await fut
    box.clear()


@pytest.mark.no_blocking(False)
@pytest.mark.asyncio
async def test_coroutine_body_that_occupies_the_loop_is_named():
    """A program called in a coroutine body stops the host's loop, on which another body would run."""

    @colocated_python
    async def needed(x: jax.Array) -> jax.Array:
        return x

    async def callback(x: jax.Array) -> Any:
        return await needed(x)

    jitted = program(callback)

    @colocated_python
    async def body(x: jax.Array) -> jax.Array:
        return jitted(x)

    with pytest.raises(DeadlockError, match="called a jitted function"):
        await body(jnp.float32(1))

    @colocated_python
    async def patient(x: jax.Array) -> jax.Array:
        return await awaitable_jit(jitted)(x)

    assert float(await patient(jnp.float32(1))) == 1


@pytest.mark.asyncio
async def test_object_of_another_loop_is_explained():
    event = asyncio.Event()
    waiter = asyncio.create_task(event.wait())
    await asyncio.sleep(0)  # it belongs to this loop now

    async def callback(x: jax.Array) -> Any:
        await event.wait()
        return x

    with pytest.raises(RuntimeError, match="different event loop") as caught:
        await awaitable_jit(program(callback))(jnp.float32(1))
    assert any("library's own event loop" in note for note in caught.value.__notes__)
    event.set()
    await waiter


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_slow_callback_is_reported_once(kind):
    reported = Gate()
    texts: list[str] = []

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())
            reported.open()

    def plain(x: jax.Array) -> Any:
        configure(slow_callback=0.05)  # not before it has begun, which may take as long
        reported.wait()
        return x

    async def coroutine(x: jax.Array) -> Any:
        configure(slow_callback=0.05)
        await reported.wait_async()
        return x

    handler = Watch()
    logging.getLogger("aiocolocated").addHandler(handler)
    try:
        program(plain if kind == "plain" else coroutine)(1.0)
    finally:
        logging.getLogger("aiocolocated").removeHandler(handler)
    [text] = texts
    name = "plain" if kind == "plain" else "coroutine"
    assert text.startswith(
        f"io_callback of {test_slow_callback_is_reported_once.__name__}.<locals>.{name}"
    )
    assert "slow_callback is 0.05 s" in text
    if kind == "async":
        assert "on loop 'aiocolocated-loop', at " + __file__ in text
    else:
        assert "on thread 'MainThread'" in text


def test_no_report_without_a_limit(caplog):
    configure(slow_callback=None)
    try:

        async def callback(x: jax.Array) -> Any:
            await asyncio.sleep(0.02)
            return x

        program(callback)(1.0)
    finally:
        configure(slow_callback=5.0)
    assert not caplog.records


def test_cancelled_call_leaves_its_callback_to_end():
    """A running program cannot be interrupted; nothing of it stays when it is over."""

    async def main() -> None:
        started, gate = Gate(), Gate()

        async def callback(x: jax.Array) -> Any:
            started.open()
            await gate.wait_async()
            return x

        channel = TaskChannel()
        fut = channel.run(program(callback), jnp.float32(1))
        await started.wait_async()
        fut.cancel()
        gate.open()
        await channel.drain()

    asyncio.run(main())
    assert not _callback_runs.coroutines_running()
    assert not _callback_runs._tickets


def test_interrupted_program_cancels_its_coroutine(start_script):
    """Ctrl-C while the main thread runs a program inline."""
    running = start_script("""
        import asyncio, jax
        from aiocolocated import io_callback, callback_error
        async def callback(x):
            print("running\\n", end="", flush=True)
            try:
                await asyncio.sleep(60)
            finally:
                print("cancelled\\n", end="", flush=True)
        try:
            jax.jit(lambda x: io_callback(callback, None, x))(1.0)
        except BaseException as error:
            # It may come while JAX hands the start's ticket over: then no callback has raised it.
            found = callback_error(error)
            print(f"{found is None or isinstance(found, KeyboardInterrupt)}\\n", end="", flush=True)
            print(f"{'KeyboardInterrupt' in repr(error)}\\n", end="", flush=True)
    """)
    running.wait_for("running")
    running.process.send_signal(signal.SIGINT)
    words = running.finish().check().stdout.split()
    assert sorted(words) == ["True", "True", "cancelled", "running"]


def test_direct_error_is_found():
    async def callback(x: jax.Array) -> Any:
        raise LookupError("gone")

    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        program(callback)(1.0)
    assert isinstance(callback_error(caught.value), LookupError)
