# SPDX-License-Identifier: Apache-2.0
"""Objects (contracts C12, C16): what is left of them when they are closed, and at exit."""

from __future__ import annotations

import contextlib
import gc
import textwrap
import weakref

import jax
import jax.numpy as jnp
import pytest
from object_bodies import (
    SHARED,
    Closing,
    ClosingAsync,
    Noted,
    eventually,
)

from aiocolocated import (
    colocated_python_class,
)
from aiocolocated.testing import Recorder

pytestmark = pytest.mark.timeout(40)

ColocatedNoted = colocated_python_class(Noted)
ColocatedClosing = colocated_python_class(Closing)
ColocatedClosingAsync = colocated_python_class(ClosingAsync)


@pytest.fixture
def x() -> jax.Array:
    return jnp.arange(3.0)


@contextlib.contextmanager
def no_collector():
    """Reference cycles stay where they are."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def names(recorder: Recorder) -> list[str]:
    return [event.name for event in recorder.events]


# --- memory -----------------------------------------------------------------------------------------


class Keeping:
    def __init__(self, argument: object) -> None:
        self.argument = argument
        SHARED["instance"] = weakref.ref(self)

    def use(self, x: object) -> object:
        return x

    async def use_async(self, x: object) -> object:
        return x

    def items(self, x: object):
        yield x

    def fail(self, x: object) -> None:
        raise ValueError

    @property
    def value(self) -> int:
        return 1

    def __len__(self) -> int:
        return 1


@pytest.mark.asyncio
async def test_dropped_object_that_was_never_used_leaves_nothing():
    """Not even its constructor's arguments, and no work for anybody."""

    class Argument: ...

    with no_collector():
        argument = Argument()
        watched = weakref.ref(argument)
        obj = colocated_python_class(Keeping)(argument)
        del argument
        assert watched() is not None
        del obj
        assert watched() is None


@pytest.mark.parametrize("error", [False, True], ids=["", "after an error"])
@pytest.mark.asyncio
async def test_closed_object_keeps_neither_instance_nor_arguments(x, error):
    """Nor do its methods, futures and streams that are still held; without the collector."""
    SHARED.clear()
    with no_collector():
        argument = Keeping(0)
        obj = colocated_python_class(Keeping)(argument)
        watched = weakref.ref(argument)
        del argument
        kept = [obj.use, obj.use.specialize(out_specs_fn=None), obj.use(x), obj.use_async(x)]
        stream = obj.items(x)
        assert [item async for item in stream] == [x]
        for call in kept[2:]:
            await call
        assert await obj.value == 1
        if error:
            with contextlib.suppress(ValueError):
                await obj.fail(x)
        await obj.aclose()
        await eventually(lambda: SHARED["instance"]() is None, "the instance is gone")
        await eventually(lambda: watched() is None, "the argument is gone")
    del kept, stream


@pytest.mark.asyncio
async def test_closed_object_whose_constructor_failed_keeps_no_arguments(x):
    """What was kept for another try goes when there will be none."""

    class Failing(Keeping):
        def __init__(self, argument: object) -> None:
            del argument  # a traceback keeps its frames, and so the locals
            raise ValueError

    with no_collector():
        argument = Keeping(0)
        watched = weakref.ref(argument)
        obj = colocated_python_class(Failing)(argument)
        del argument
        with contextlib.suppress(ValueError):
            await obj.use(x)
        assert watched() is not None
        await obj.aclose()
        await eventually(lambda: watched() is None, "the argument is gone")


@pytest.mark.parametrize("how", ["closed", "dropped", "never used", "never used, closed"])
@pytest.mark.asyncio
async def test_object_leaves_no_cycle(x, how):
    """When the last reference goes, everything of an object goes, without the collector."""
    SHARED.clear()
    with no_collector():
        obj = colocated_python_class(Keeping)(0)
        inner = weakref.ref(obj.__dict__["_aiocolocated_object"])
        if not how.startswith("never used"):
            await obj.use(x)
            await obj.use_async(x)
            assert await obj.value == 1
        if how.endswith("closed"):
            await obj.aclose()
        del obj
        await eventually(lambda: inner() is None, "the object is gone")


# --- exit -------------------------------------------------------------------------------------------

HEAD = """
import asyncio, threading, jax.numpy as jnp
from aiocolocated import colocated_python_class, TaskChannel
x = jnp.ones(2)
def say(*words):  # in one piece: two threads may have something to say
    print(" ".join(words) + "\\n", end="", flush=True)
class Store:
    def __init__(self, name): self.name = name
    def use(self, x): return x
    def slow(self, x):
        threading.Event().wait(0.2)
        say("used", self.name)
    def close(self): say("closed", self.name)
    def __del__(self): say("destroyed", self.name)
class AsyncStore(Store):
    async def aclose(self):
        await asyncio.sleep(0.01)
        say("closed", self.name)
async def main(obj): await obj.use(x)
"""


@pytest.mark.parametrize("cls", ["Store", "AsyncStore"])
def test_exit_closes_open_objects(run_script, cls):
    """After all calls, those that are referenced, and those dropped a moment before."""
    finished = run_script(
        HEAD
        + textwrap.dedent(f"""
            cls = colocated_python_class({cls})
            kept, dropped, unused = cls("kept"), cls("dropped"), cls("unused")
            asyncio.run(main(kept)); asyncio.run(main(dropped))
            TaskChannel().submit_nowait(kept.slow, x)
            del dropped
        """)
    ).check()
    lines = finished.stdout.splitlines()
    assert sorted(lines) == sorted(
        ["used kept", "closed kept", "destroyed kept", "closed dropped", "destroyed dropped"]
    )
    assert lines.index("used kept") < lines.index("closed kept") < lines.index("destroyed kept")
    assert finished.stderr == ""


def test_exit_reports_closing_that_fails(run_script):
    """The interpreter ends all the same, with its own code."""
    finished = run_script(
        HEAD
        + textwrap.dedent("""
            class Bad(Store):
                def close(self): raise ValueError("closing failed")
            bad, good = colocated_python_class(Bad)("bad"), colocated_python_class(Store)("good")
            bad.use(x).result(); good.use(x).result()
        """)
    ).check()
    assert "closed good" in finished.stdout
    assert finished.stderr.count("ValueError: closing failed") == 1
