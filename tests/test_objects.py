# SPDX-License-Identifier: Apache-2.0
"""Objects (contract C12): how they are made, and their methods."""

from __future__ import annotations

import asyncio
import contextvars
import random
import threading
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import object_bodies
import pytest
from object_bodies import (
    SHARED,
    Counter,
    Noted,
    eventually,
    outcome,
)

import aiocolocated
from aiocolocated import (
    ArgumentError,
    ArrayFuture,
    ArrayStream,
    BodyError,
    SpecError,
    TaskGroup,
    cache_info,
    colocated_python_class,
    gather,
    jax_scope,
    open_task_channel,
)
from aiocolocated.testing import Gate, measure_loop_gap

pytestmark = pytest.mark.timeout(40)

ColocatedCounter = colocated_python_class(Counter)
ColocatedNoted = colocated_python_class(Noted)
variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


@pytest.fixture
def x() -> jax.Array:
    return jnp.arange(3.0)


# --- making -----------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_constructor_runs_at_first_call_on_a_worker(x, recorder):
    """Making the object makes nothing; its first method call does, once, off the loop."""
    noted = ColocatedNoted(recorder)
    assert recorder.events == []
    await noted.use(x)
    await noted.use(x)
    assert [event.name for event in recorder.events] == ["made", "used", "used"]
    assert recorder.events[0].thread.startswith("aiocolocated-worker")
    await noted.aclose()


@pytest.mark.asyncio
async def test_constructor_runs_on_a_worker_for_a_coroutine_method(x, recorder):
    """The host's loop is not held up by a constructor, though the first method is a coroutine."""
    gate = Gate()
    gate.open()
    async with ColocatedNoted(recorder) as noted:
        await noted.hold_async(x, gate)
        threads = {event.name: event.thread for event in recorder.events}
    assert threads["made"].startswith("aiocolocated-worker")
    assert not threads["start"].startswith("aiocolocated-worker")


class Environment:
    """What its constructor and its methods see."""

    def __init__(self) -> None:
        self.made_with = self.now(None)

    def now(self, x: object) -> tuple[str, bool]:
        return variable.get(), bool(jax.config.jax_enable_x64)

    def at_first(self, x: object) -> tuple[str, bool]:
        return self.made_with


@pytest.mark.asyncio
async def test_constructor_sees_context_and_configuration_of_the_first_call(x):
    """Those of the call that makes the instance, not of the expression that makes the object."""
    variable.set("at the object")
    async with colocated_python_class(Environment)() as environment:
        token = variable.set("at the first call")
        with jax_scope(enable_x64=True):
            assert await environment.now(x) == ("at the first call", True)
        variable.reset(token)
        assert await environment.now(x) == ("at the object", False)
        assert await environment.at_first(x) == ("at the first call", True)


class Failing:
    """Its constructor fails so many times."""

    def __init__(self, times: int) -> None:
        SHARED["made"] = SHARED.get("made", 0) + 1
        if SHARED["made"] <= times:
            raise ValueError(f"attempt {SHARED['made']}")

    def use(self, x: object) -> object:
        return x

    async def use_async(self, x: object) -> object:
        return x


@pytest.mark.parametrize("method", ["use", "use_async"])
@pytest.mark.asyncio
async def test_constructor_error_is_raised_by_the_call_and_a_later_one_retries(x, method):
    """Each call that finds no instance tries anew, and raises an exception of its own."""
    SHARED.clear()
    async with colocated_python_class(Failing)(2) as failing:
        errors = [await outcome(getattr(failing, method)(x)) for _ in range(2)]
        assert [str(error) for error in errors] == ["attempt 1", "attempt 2"]
        assert await getattr(failing, method)(x) is x
        assert await getattr(failing, method)(x) is x
        assert SHARED["made"] == 3


@pytest.mark.asyncio
async def test_constructor_error_does_not_grow(x):
    """The tenth attempt's error, awaited ten times, is like the first: same frames, one note."""
    SHARED.clear()
    failing = colocated_python_class(Failing)(100)
    seen = set()
    for i in range(1, 11):
        call = failing.use(x)
        for _ in range(i):
            with pytest.raises(ValueError, match=rf"attempt {i}\b") as caught:
                await call
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert caught.value.__context__ is None
        seen.add((tuple(frame.name for frame in frames), len(caught.value.__notes__)))
    [(names, notes)] = seen
    assert names[-1] == "__init__"
    assert notes == 1
    await failing.aclose()


@pytest.mark.asyncio
async def test_constructor_error_names_the_call(x):
    """The note says which method call it was, and where it was submitted."""
    SHARED.clear()
    failing = colocated_python_class(Failing)(1)
    with pytest.raises(ValueError, match="attempt 1") as caught:
        await failing.use(x)
    assert "colocated call Failing.use" in caught.value.__notes__[0]
    assert "test_objects.py" in caught.value.__notes__[0]


@pytest.mark.asyncio
async def test_constructor_runs_once_for_concurrent_first_calls(x, recorder):
    """Whatever ``max_concurrency`` allows, there is one instance."""
    cls = colocated_python_class(Noted, max_concurrency=8)
    async with cls(recorder) as noted:
        await noted.use.map([x] * 8)
        assert recorder.count("made") == 1
        assert recorder.count("used") == 8


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((1, 2), {}, "too many positional arguments"),
        ((), {"stepp": 2}, "unexpected keyword argument 'stepp'"),
        ((1,), {"start": 2}, "multiple values for argument 'start'"),
    ],
)
def test_wrong_constructor_arguments_are_refused_where_given(args, kwargs, words):
    """At the expression that makes the object, as for any class, not at a call much later."""
    with pytest.raises(TypeError, match=words) as caught:
        ColocatedCounter(*args, **kwargs)
    assert "Counter()" in str(caught.value)


def test_class_that_does_not_tell_its_signature_takes_any_arguments():
    """There is nothing to check then; the constructor has its say on the host."""

    class Silent:
        def __new__(cls, *args: object) -> Silent:
            return super().__new__(cls)

        __signature__ = "none"

    assert "new" in repr(colocated_python_class(Silent)(1, 2, 3))


# --- methods ----------------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_methods_of_every_kind_share_the_instance(x):
    """Plain, coroutine, generator and asynchronous generator methods see one state."""
    async with ColocatedCounter(10, step=2) as counter:
        assert isinstance(future := counter.add(x), ArrayFuture)
        assert await future == 12
        assert isinstance(future := counter.add_async(x), ArrayFuture)
        assert await future == 14
        assert isinstance(stream := counter.up_to(x, 18), ArrayStream)
        assert [item async for item in stream] == [16, 18]
        assert isinstance(stream := counter.up_to_async(x, 22), ArrayStream)
        assert [item async for item in stream] == [20, 22]
        np.testing.assert_array_equal(await counter.scale(x, factor=3.0), np.arange(3.0) * 3)


@pytest.mark.asyncio
async def test_objects_of_one_class_have_their_own_state(x):
    """Two objects, two instances."""
    async with ColocatedCounter(0) as first, ColocatedCounter(100) as second:
        assert await gather(first.add(x), second.add(x), first.add(x)) == [1, 101, 2]


@pytest.mark.asyncio
async def test_method_arguments_are_checked_at_the_call(x):
    """As for any function; ``self`` is not counted."""
    counter = ColocatedCounter()
    with pytest.raises(TypeError, match=r"Counter.add\(\): missing a required argument: 'x'"):
        counter.add()
    with pytest.raises(TypeError, match="too many positional"):
        counter.add(x, x)
    with pytest.raises(TypeError, match="unexpected keyword argument 'factr'"):
        counter.scale(x, factr=1)


@pytest.mark.asyncio
async def test_method_error_is_raised_and_the_object_goes_on(x, recorder):
    """A failing method is a failing call, with a note that names class and method."""
    async with ColocatedNoted(recorder) as noted:
        with pytest.raises(ValueError, match="failed") as caught:
            await noted.fail(x)
        assert "Noted.fail" in caught.value.__notes__[0]
        del caught  # its frames hold the instance
        assert await noted.use(x) is x
        assert recorder.count("made") == 1


@pytest.mark.asyncio
async def test_methods_take_futures_and_numpy_as_functions_do(x):
    """Arguments are those of colocated calls: futures resolved, NumPy placed."""
    async with ColocatedCounter() as counter:
        doubled = counter.scale(x)
        np.testing.assert_array_equal(await counter.scale(doubled), np.arange(3.0) * 4)
        result = await counter.scale.specialize(devices=jax.devices("cpu")[1])(
            np.ones(2, np.float32)
        )
        assert result.devices() == {jax.devices("cpu")[1]}


@pytest.mark.asyncio
async def test_methods_go_where_functions_go(x, recorder):
    """A channel, a task group and ``map`` take methods."""
    async with ColocatedCounter() as counter, open_task_channel("lane") as channel:
        calls = [counter.add(x), await channel.submit(counter.add, x)]
        calls.append(await channel.submit(counter.add_async, x))
        assert {call._channel for call in calls} == {channel}
        assert await gather(*calls) == [1, 2, 3]
        async with TaskGroup() as group:
            for _ in range(3):
                group.start_soon(counter.add, x)
        assert sorted(group.results()) == [4, 5, 6]
        assert sorted(await counter.add_async.map([x] * 3)) == [7, 8, 9]


@pytest.mark.asyncio
async def test_static_and_class_methods_need_no_instance(x, recorder):
    """They are colocated functions, of the class and of its objects."""

    np.testing.assert_array_equal(await ColocatedCounter.triple(x), np.arange(3.0) * 3)
    assert await ColocatedCounter.kind(x) == "Counter"
    SHARED.clear()
    failing = ColocatedCounter()
    np.testing.assert_array_equal(await failing.triple(x), np.arange(3.0) * 3)
    assert await failing.kind(x) == "Counter"
    assert "new" in repr(failing)


@pytest.mark.asyncio
async def test_method_without_arrays_needs_devices(cpu_devices):
    """The error says how to give them; the class or a specialized method then has them."""
    counter = ColocatedCounter(5)
    with pytest.raises(SpecError, match=r"colocated_python_class\(\.\.\., devices=\.\.\.\)"):
        counter.get()
    assert await counter.get.specialize(devices=cpu_devices[:1])() == 5
    await counter.aclose()
    async with colocated_python_class(Counter, devices=cpu_devices[:2])(6) as counter:
        assert await counter.get() == 6
        result = await counter.scale(np.ones(2, np.float32))
        assert result.devices() == set(cpu_devices[:2])
        with pytest.raises(SpecError, match="devices already specified"):
            counter.get.specialize(devices=cpu_devices[:1])


# --- specializing -----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_specializations_are_cached_per_object_and_method(x):
    """Equal specs make one entry; another method or object has entries of its own."""
    spec = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    first, second = ColocatedCounter(), ColocatedCounter()

    async def misses(call) -> int:
        before = cache_info().misses
        await call()
        return cache_info().misses - before

    def specialized(method):
        return method.specialize(in_specs=((spec,), {}), out_specs_fn=lambda x: spec)

    assert await misses(lambda: specialized(first.scale)(x)) == 1
    assert await misses(lambda: specialized(first.scale)(x)) == 0
    assert await misses(lambda: specialized(second.scale)(x)) == 1
    assert await misses(lambda: first.scale(x)) == 1
    assert await misses(lambda: first.scale(x)) == 0
    assert await misses(lambda: first.add(x)) == 1
    assert await misses(lambda: first.add(x)) == 0
    assert first.add is first.add
    await first.aclose()
    await second.aclose()


@pytest.mark.asyncio
async def test_reading_an_attribute_again_makes_no_specialization():
    """Also where there is no method to keep: ``await obj.name``."""
    async with ColocatedCounter(3) as counter:
        assert await counter.double == 6
        before = cache_info().misses
        assert await counter.double == 6
        assert cache_info().misses == before


@pytest.mark.asyncio
async def test_specs_of_methods_are_checked(x):
    """Input specs at the call, output specs on the host."""
    spec = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    wide = jax.ShapeDtypeStruct((4,), x.dtype, sharding=x.sharding)
    async with ColocatedCounter() as counter:
        method = counter.scale.specialize(in_specs=((spec,), {}))
        with pytest.raises(SpecError, match=r"call of Counter\.scale.*x"):
            method(jnp.ones(4))
        method = counter.scale.specialize(out_specs_fn=lambda x, factor=2.0: wide)
        with pytest.raises(SpecError, match=r"Counter\.scale on host in-process"):
            await method(x)
        with pytest.raises(SpecError, match="in_specs already specified"):
            counter.scale.specialize(in_specs=((spec,), {})).specialize(in_specs=((spec,), {}))


@pytest.mark.asyncio
async def test_clear_caches_and_random_state_harm_nothing(x):
    """Live objects go on, and the library neither uses nor changes the state of ``random``."""
    async with ColocatedCounter() as counter, ColocatedCounter(100) as other:
        for i in range(1, 6):
            random.seed(0)
            state = random.getstate()
            assert await counter.add(x) == i
            assert await other.add(x) == 100 + i
            assert random.getstate() == state
            jax.clear_caches()
            aiocolocated.clear_caches()
        random.seed(0)
        third = ColocatedCounter(1000)
        assert await third.add(x) == 1001
        assert await counter.add(x) == 6
        await third.aclose()


# --- where objects are used ---------------------------------------------------------------------------


def test_object_made_at_import_is_used_from_many_loops_and_threads(x, new_loop):
    """It belongs to no loop: several runs, two threads, and no loop at all."""
    imported = object_bodies.imported
    before = imported.add(x).result(10)

    async def add() -> int:
        return await imported.add_async(x)

    results = []

    def run() -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            results.append(runner.run(add()))

    for _ in range(2):
        run()
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(results) == [before + i for i in range(1, 5)]
    assert imported.add(x).result(10) == before + 5


class Slow:
    """Waits in its constructor and its destructor, off the loop."""

    def __init__(self, made: Gate, destroyed: Gate) -> None:
        self.destroyed = destroyed
        made.wait()

    def use(self, x: object) -> object:
        return x

    def __del__(self) -> None:
        SHARED["destroying"] = True
        self.destroyed.wait()


@pytest.mark.asyncio
async def test_slow_constructor_and_destructor_do_not_hold_the_loop(x):
    """The loop runs on while the instance is made and while it is destroyed."""
    SHARED.clear()
    made, destroyed = Gate(), Gate()
    slow = colocated_python_class(Slow)(made, destroyed)
    async with measure_loop_gap() as gap:
        call = slow.use(x)
        await asyncio.sleep(0.1)
        assert not call.done()
        made.open()
        assert await call is x
        closing = asyncio.create_task(slow.aclose())
        await eventually(lambda: SHARED.get("destroying"), "the destructor runs")
        await asyncio.sleep(0.1)
        assert not closing.done()
        destroyed.open()
        await closing
    assert gap.max_seconds < 0.09, gap.where


class Wayward:
    def __init__(self, how: str) -> None:
        self.how = how

    def method(self, x: object) -> object:
        if self.how == "exit":
            raise SystemExit(3)

        async def forgotten() -> None: ...

        return forgotten()


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [("exit", BodyError, "SystemExit"), ("coroutine", ArgumentError, "await it first")],
)
@pytest.mark.asyncio
async def test_wayward_methods_are_calls_like_others(x, how, error, words):
    """What bodies of functions may not do, methods may not either; the worker lives on."""
    async with colocated_python_class(Wayward)(how) as wayward:
        for _ in range(2):
            with pytest.raises(error, match=words):
                await wayward.method(x)
