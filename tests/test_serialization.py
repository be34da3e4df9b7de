# SPDX-License-Identifier: Apache-2.0
"""Shipping code (contract C10): what is copied, what is carried as it is, and what is refused."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import fractions
import functools
import gc
import io
import queue
import socket
import sqlite3
import sys
import tempfile
import threading
import types
import weakref

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

import aiocolocated
from aiocolocated import NotShippableError, TaskGroup, cache_info, colocated_python
from aiocolocated.testing import Gate, Recorder, Rendezvous

TIMEOUT = 20.0  # seconds; only a bug takes that long


def numbers():
    return jnp.arange(3.0)


def run(function, *args):
    """Call a colocated function from a script and wait for its result."""
    return function(*args).result(TIMEOUT)


def shipped(value):
    """What a body that captures ``value`` finds in its place."""
    return run(colocated_python(lambda x: [value]).specialize(devices=jax.devices("cpu")[0]), 0)[0]


# --- once per function ------------------------------------------------------------------------------


class Counted:
    """A captured value that counts how often it is pickled, and on which threads."""

    def __init__(self):
        self.recorder = Recorder()

    def __reduce__(self):
        self.recorder.record("pickled")
        return Counted, ()


def test_code_is_shipped_once_for_all_specializations(cpu_devices):
    """Calls with other specs, devices and checks share the one copy."""
    counted = Counted()
    function = colocated_python(lambda x: (x, id(counted)))
    before = cache_info().shipped
    variants = [
        function,
        function.specialize(out_specs_fn=None),
        function.specialize(devices=cpu_devices[0]),
    ]
    ids = set()
    for variant in variants:
        for x in (numbers(), jnp.ones((2, 2)), {"a": numbers()}):
            ids.add(run(variant, x)[1])
    assert len(ids) == 1
    assert counted.recorder.count("pickled") == 1
    assert cache_info().shipped == before + 1


def test_functions_made_of_one_function_share_its_copy():
    """Decorated twice, a function still has one copy on the host."""
    counted = Counted()

    def body(x):
        return id(counted)

    first, second = colocated_python(body), colocated_python(body)
    assert run(first, numbers()) == run(second, numbers()) != id(counted)
    assert counted.recorder.count("pickled") == 1


@pytest.mark.asyncio
async def test_code_is_shipped_once_under_concurrent_first_calls():
    """64 first calls at once ship one copy."""
    counted = Counted()
    function = colocated_python(lambda x: id(counted))
    async with asyncio.timeout(TIMEOUT), TaskGroup() as group:
        for _ in range(64):
            group.start_soon(function, numbers())
    assert len(set(group.results())) == 1
    assert counted.recorder.count("pickled") == 1


@pytest.mark.asyncio
async def test_code_is_shipped_off_the_loop():
    """Pickling a large capture blocks a worker, never the event loop."""
    counted = Counted()
    async with asyncio.timeout(TIMEOUT):
        await colocated_python(lambda x: counted is None)(numbers())
    (event,) = counted.recorder.events
    assert event.thread.startswith("aiocolocated-worker")


def test_shipped_copy_dies_with_its_function():
    """A function made on the way, its captures and its copy are free when it goes."""
    gc.collect()
    before = cache_info()

    def make():
        captured = numbers()
        return colocated_python(lambda x: x + captured), weakref.ref(captured)

    function, reference = make()
    run(function, numbers())
    assert cache_info().shipped == before.shipped + 1
    del function
    wait_until(lambda: reference() is None and cache_info().shipped == before.shipped)


def test_shipped_copy_of_a_recursive_function_dies_with_it():
    """Also where the copy refers to the function itself."""
    gc.collect()
    before = cache_info()

    def make():
        captured = numbers()

        @colocated_python
        def count_down(x, n):
            return x + captured if n == 0 else count_down(x, n - 1).result(TIMEOUT)

        return count_down, weakref.ref(captured)

    function, reference = make()
    np.testing.assert_array_equal(np.asarray(run(function, numbers(), 3)), [0, 2, 4])
    del function
    wait_until(lambda: reference() is None and cache_info().shipped == before.shipped)


def wait_until(condition):
    """Poll, as the last references may be on their way out of a worker."""
    for _ in range(200):
        gc.collect()
        if condition():
            return
        threading.Event().wait(0.01)
    pytest.fail("it did not happen")


# --- copies -----------------------------------------------------------------------------------------


def test_captured_values_are_copies():
    """The body has its own copy, made at the first call; the caller's is not changed."""
    seen, box = [], {"n": 0}

    @colocated_python
    def count(x):
        seen.append(len(seen))
        box["n"] += 1
        return box["n"], len(seen)

    assert [run(count, numbers()) for _ in range(3)] == [(1, 1), (2, 2), (3, 3)]
    assert seen == []
    assert box == {"n": 0}


def test_captures_are_copied_at_the_first_call():
    """What a variable is when the code is shipped counts, not what it becomes."""
    values = [1]
    function = colocated_python(lambda x: list(values))
    values.append(2)
    assert run(function, numbers()) == [1, 2]
    values.append(3)
    assert run(function, numbers()) == [1, 2]


def test_shared_captures_stay_shared():
    """Two variables that are one object are one object in the copy."""
    shared = []
    left, right = {"s": shared}, (shared,)
    function = colocated_python(lambda x: left["s"] is right[0])
    assert run(function, numbers()) is True


def test_defaults_are_copies():
    """Mutable defaults, by position and by keyword, are the copy's own and live between calls."""

    def body(x, seen=[], *, named={"n": 0}):  # noqa: B006
        seen.append(1)
        named["n"] += 1
        return len(seen), named["n"]

    function = colocated_python(body)
    assert [run(function, numbers()) for _ in range(2)] == [(1, 1), (2, 2)]
    assert body.__defaults__ == ([],)
    assert body.__kwdefaults__ == {"named": {"n": 0}}


COUNT = 0


def count_here(x):
    global COUNT
    COUNT += 1
    return COUNT


def test_module_functions_go_by_reference():
    """The function of an importable module uses that module's own globals."""
    global COUNT
    COUNT = 10
    assert run(colocated_python(count_here), numbers()) == 11
    COUNT = 20
    assert run(colocated_python(count_here), numbers()) == 21
    assert COUNT == 21


MEETING = threading.Barrier(2)


@colocated_python
def decorated_here(x):
    global COUNT
    COUNT += 1
    return COUNT, MEETING.parties  # a barrier cannot be shipped


def test_decorated_module_functions_go_by_reference():
    """It makes no difference whether the module has the function itself or only the decorated one."""
    global COUNT
    COUNT = 30
    assert run(decorated_here, numbers()) == (31, 2)
    assert run(decorated_here.specialize(devices=jax.devices()[:1]), numbers()) == (32, 2)
    captured = decorated_here.__wrapped__
    assert run(colocated_python(lambda x: captured(x)), numbers()) == (33, 2)
    assert COUNT == 33


def test_closures_reach_module_functions_by_reference():
    """A closure is copied; the module functions and modules that it uses are not."""
    global COUNT
    COUNT = 0
    function = colocated_python(
        lambda x: (count_here(x), sys is SYS, threading.current_thread().name)
    )
    count, same_module, thread = run(function, numbers())
    assert (count, same_module) == (1, True)
    assert thread.startswith("aiocolocated-worker")
    assert COUNT == 1


SYS = sys


def test_functions_of_a_script_are_copied_with_their_globals(run_script):
    """__main__ is no importable module: its functions and the globals they use are copied once."""
    finished = run_script("""
        import jax.numpy as jnp
        from aiocolocated import colocated_python

        count = 0
        table = {"n": 1}

        def helper():
            global count
            count += 1
            table["n"] += 1
            return count, table["n"]

        @colocated_python
        def body(x):
            return helper()

        x = jnp.ones(1)
        print([body(x).result(20) for _ in range(3)], count, table)
    """).check()
    assert finished.stdout == "[(1, 2), (2, 3), (3, 4)] 0 {'n': 1}\n"


def test_code_with_unusual_constants_is_shipped():
    """Tools make code objects with constants that no compiler makes."""

    def body(x):
        return "replaced"

    half = fractions.Fraction(1, 2)
    constants = tuple(half if c == "replaced" else c for c in body.__code__.co_consts)
    captured = "a closure, so that the code is copied"
    body.__code__ = body.__code__.replace(co_consts=constants)

    def outer(x):
        return body(x), captured

    assert run(colocated_python(outer), numbers()) == (half, captured)


def test_function_object_is_not_changed():
    """Decorating leaves the function callable as it was, and gives the wrapper its name and text."""

    def body(x, y=1):
        """Add."""
        return x + y

    function = colocated_python(body)
    assert body(1) == 2
    assert (function.__name__, function.__doc__) == ("body", "Add.")
    assert function.__wrapped__ is body


class Adder:
    """A callable that is neither hashable nor a function."""

    __hash__ = None

    def __init__(self, n):
        self.n = n

    def __eq__(self, other):
        return isinstance(other, Adder) and self.n == other.n

    def __call__(self, x):
        self.n += 1
        return self.n

    def method(self, x):
        return self(x)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: functools.partial(lambda n, x: n, 5), 5),
        (lambda: Adder(5), 6),
        (lambda: Adder(5).method, 6),
        (lambda: np.ndim, 1),
        (lambda: len, 3),
        (lambda: jax.jit(lambda x: 7), 7),
        (lambda: jax.vmap(lambda x: 1.0), [1.0, 1.0, 1.0]),
        (lambda: jnp.size, 3),
    ],
    ids=["partial", "callable", "method", "numpy", "builtin", "jitted", "vmap", "jnp"],
)
def test_any_callable_can_be_colocated(make, expected):
    """Partials, callable objects, methods, built-in and jitted functions are functions too."""
    result = run(colocated_python(make()), numbers())
    np.testing.assert_array_equal(np.asarray(result), expected)


def test_ufunc_can_be_colocated():
    """NumPy's ufuncs are no Python functions, and take no weak references."""
    assert run(colocated_python(np.add), numbers(), numbers()).tolist() == [0.0, 2.0, 4.0]


def test_equal_callables_are_not_mixed_up():
    """Callable objects that are equal keep their own copies."""
    first, second = Adder(1), Adder(1)
    one, two = colocated_python(first), colocated_python(second)
    assert [run(one, numbers()), run(one, numbers()), run(two, numbers())] == [2, 3, 2]
    assert (first.n, second.n) == (1, 1)


# --- carried by reference ---------------------------------------------------------------------------


def arrays():
    key = jax.random.key(0)
    mesh = Mesh(np.array(jax.devices("cpu")), ("x",))
    return {
        "array": numbers(),
        "bfloat16": jnp.ones(2, jnp.bfloat16),
        "zero size": jnp.ones((0, 3)),
        "sharded": jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("x"))),
        "committed": jax.device_put(1.0, jax.devices("cpu")[3]),
        "key": key,
        "keys": jax.random.split(key, 2),
        "jitted": jax.jit(lambda x: x),
        "custom_jvp": jax.custom_jvp(lambda x: x),
        "custom_vjp": jax.custom_vjp(lambda x: x),
        "relu": jax.nn.relu,
    }


@pytest.mark.parametrize(
    "which",
    [
        "array", "bfloat16", "zero size", "sharded", "committed", "key", "keys",
        "jitted", "custom_jvp", "custom_vjp", "relu",
    ],
)  # fmt: skip
def test_arrays_and_jitted_functions_are_carried_by_reference(which):
    """A body finds the very object: a copy would cost memory, the sharding, or a compilation."""
    value = arrays()[which]
    assert shipped(value) is value
    assert shipped({"deep": [value]})["deep"][0] is value


def test_global_of_a_closure_is_carried_by_reference():
    """So does a closure that uses a module's jitted function."""
    assert run(colocated_python(lambda x: JITTED is identify(JITTED)), numbers()) is True


JITTED = jax.jit(lambda x: x * 2)


def identify(value):
    """The module's own object."""
    return JITTED


def traced_counts():
    """Functions that count how often they are traced, by JAX's kinds of wrappers."""
    traces = {"jit": 0, "jvp": 0, "vjp": 0}

    @jax.jit
    def jitted(x):
        traces["jit"] += 1
        return x * 2

    @jax.custom_jvp
    def with_jvp(x):
        traces["jvp"] += 1
        return x * 3

    with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), tangents[0] * 30.0))

    @jax.custom_vjp
    def with_vjp(x):
        traces["vjp"] += 1
        return x * 4

    with_vjp.defvjp(lambda x: (with_vjp(x), None), lambda _, g: (g * 40.0,))
    return traces, jitted, with_jvp, with_vjp


def test_captured_jitted_function_is_not_compiled_again():
    """What the caller has compiled, the body finds compiled, and the other way round."""
    traces, jitted, with_jvp, with_vjp = traced_counts()
    x = numbers()
    outside = jitted(x)
    assert traces["jit"] == 1
    function = colocated_python(lambda x: (jitted(x), with_jvp(x), with_vjp(x)))
    for _ in range(3):
        inside, third, fourth = run(function, x)
    np.testing.assert_array_equal(np.asarray(inside), np.asarray(outside))
    np.testing.assert_array_equal(np.asarray(third), [0, 3, 6])
    np.testing.assert_array_equal(np.asarray(fourth), [0, 4, 8])
    assert traces["jit"] == 1
    other = jnp.ones((2, 2))
    run(function, other)
    jitted(other)
    assert traces["jit"] == 2


def test_captured_custom_derivatives_work_in_bodies():
    """custom_jvp and custom_vjp functions keep their rules."""
    _, jitted, with_jvp, with_vjp = traced_counts()
    function = colocated_python(
        lambda x: (jax.grad(with_jvp)(x), jax.grad(with_vjp)(x), jax.grad(jitted)(x))
    )
    assert [float(g) for g in run(function, jnp.float32(1.0))] == [30.0, 40.0, 2.0]


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this JAX has no mutable arrays")
def test_captured_mutable_array_is_the_same():
    """A jax.Ref that a body writes to is the caller's."""
    ref = jax.new_ref(jnp.zeros(3))

    def write(x):
        ref[...] = x
        return x

    run(colocated_python(write), numbers())
    np.testing.assert_array_equal(np.asarray(ref[...]), [0, 1, 2])


# --- JAX's other objects ----------------------------------------------------------------------------


def placed():
    devices = jax.devices("cpu")
    mesh = Mesh(np.array(devices).reshape(2, 4), ("a", "b"))
    sharding = NamedSharding(mesh, P("a", None))
    return {
        "device": devices[3],
        "devices": devices,
        "mesh": mesh,
        "abstract mesh": AbstractMesh((2, 4), ("a", "b")),
        "partition spec": P("a", None, ("b",)),
        "named sharding": sharding,
        "single sharding": SingleDeviceSharding(devices[2]),
        "abstract sharding": NamedSharding(AbstractMesh((2,), ("a",)), P("a")),
        "spec": jax.ShapeDtypeStruct((4, 2), jnp.bfloat16, sharding=sharding),
        "key dtype": jax.random.key(0).dtype,
        "treedef": jax.tree.structure({"a": [1, (2, None)]}),
        "dtype": np.dtype(jnp.float8_e4m3fn),
    }


@pytest.mark.parametrize(
    "which",
    [
        "device", "devices", "mesh", "abstract mesh", "partition spec", "named sharding",
        "single sharding", "abstract sharding", "spec", "key dtype", "treedef", "dtype",
    ],
)  # fmt: skip
def test_meshes_shardings_devices_and_specs_can_be_captured(which):
    """They arrive equal, with the devices of this process."""
    value = placed()[which]
    got = shipped(value)
    assert got == value
    if which == "device":
        assert got is value
    if which == "devices":
        assert all(a is b for a, b in zip(got, value, strict=True))
    if which == "mesh":
        assert got.devices.tolist() == value.devices.tolist()


def test_captured_sharding_places_arrays():
    """A body puts arrays where its captured sharding says."""
    sharding = placed()["named sharding"]
    result = run(colocated_python(lambda x: jax.device_put(jnp.ones((4, 2)), sharding)), numbers())
    assert result.sharding == sharding


def test_unknown_device_is_refused_in_words():
    """A device that a host does not have is named, with those that it has."""
    from aiocolocated import _serialization

    with pytest.raises(
        ValueError, match=r"has no cpu device 99; it has \[0, 1, 2, 3, 4, 5, 6, 7\]"
    ):
        _serialization._find_device("cpu", 99)


# --- colocated functions ----------------------------------------------------------------------------


def test_colocated_function_can_be_captured():
    """A body calls others; they are carried as they are and have their own copies."""
    inner = colocated_python(lambda x: x + 1)
    checked = inner.specialize(out_specs_fn=lambda x: x)
    outer = colocated_python(lambda x: (inner(x).result(TIMEOUT), checked(x).result(TIMEOUT)))
    one, two = run(outer, numbers())
    np.testing.assert_array_equal(np.asarray(one), [1, 2, 3])
    np.testing.assert_array_equal(np.asarray(two), [1, 2, 3])
    assert shipped(inner) is inner


def test_mutually_recursive_functions_can_be_captured():
    """Two that call each other, and each itself."""

    @colocated_python
    def even(x, n):
        return True if n == 0 else odd(x, n - 1).result(TIMEOUT)

    @colocated_python
    def odd(x, n):
        return False if n == 0 else even(x, n - 1).result(TIMEOUT)

    assert run(even, numbers(), 6) is True
    assert run(odd, numbers(), 6) is False


# --- refused ----------------------------------------------------------------------------------------


async def coroutine():
    """Never run."""


def generator():
    yield


async def agenerator():
    yield


def _loop():
    loop = asyncio.new_event_loop()
    loop.close()
    return loop


def _on_loop(make):
    """Made while a loop runs, as a program does it."""

    async def main():
        return make()

    return asyncio.run(main())


def _executor():
    executor = concurrent.futures.ThreadPoolExecutor(1)
    executor.shutdown()
    return executor


def _closed(resource):
    resource.close()
    return resource


REFUSED = {
    "threading.Lock": threading.Lock,
    "threading.RLock": threading.RLock,
    "threading.Event": threading.Event,
    "threading.Condition": threading.Condition,
    "threading.Semaphore": threading.Semaphore,
    "threading.Barrier": lambda: threading.Barrier(2),
    "threading.Thread": threading.Thread,
    "threading.local": threading.local,
    "queue.Queue": queue.Queue,
    "queue.SimpleQueue": queue.SimpleQueue,
    "asyncio.Event": asyncio.Event,
    "asyncio.Lock": asyncio.Lock,
    "asyncio.Condition": asyncio.Condition,
    "asyncio.Semaphore": asyncio.Semaphore,
    "asyncio.BoundedSemaphore": asyncio.BoundedSemaphore,
    "asyncio.Barrier": lambda: asyncio.Barrier(2),
    "asyncio.Queue": asyncio.Queue,
    "asyncio.PriorityQueue": asyncio.PriorityQueue,
    "asyncio.Future": lambda: _on_loop(lambda: asyncio.get_running_loop().create_future()),
    "asyncio.Task": lambda: _on_loop(asyncio.current_task),
    "asyncio.TaskGroup": asyncio.TaskGroup,
    "asyncio.timeout": lambda: _on_loop(lambda: asyncio.timeout(1)),
    "asyncio.Runner": asyncio.Runner,
    "asyncio loop": _loop,
    "anyio.Event": lambda: _on_loop(anyio.Event),
    "anyio.Event outside": anyio.Event,
    "anyio.Lock": lambda: _on_loop(anyio.Lock),
    "anyio.Condition": lambda: _on_loop(anyio.Condition),
    "anyio.Semaphore": lambda: _on_loop(lambda: anyio.Semaphore(1)),
    "anyio.CapacityLimiter": lambda: _on_loop(lambda: anyio.CapacityLimiter(1)),
    "anyio.CancelScope": lambda: _on_loop(anyio.CancelScope),
    "anyio.TaskGroup": lambda: _on_loop(anyio.create_task_group),
    "concurrent.futures.Future": concurrent.futures.Future,
    "concurrent.futures.Executor": _executor,
    "contextvars.ContextVar": lambda: contextvars.ContextVar("captured"),
    "contextvars.Context": contextvars.copy_context,
    "coroutine": coroutine,
    "generator": generator,
    "asynchronous generator": agenerator,
    "open file": lambda: _closed(tempfile.TemporaryFile()),  # noqa: SIM115
    "text file": lambda: _closed(io.TextIOWrapper(io.BytesIO())),
    "standard output": lambda: sys.__stdout__,
    "socket": lambda: _closed(socket.socket()),
    "sqlite3.Connection": lambda: _closed(sqlite3.connect(":memory:")),
    "array future": lambda: run_and_keep(),
    "task channel": lambda: aiocolocated.TaskChannel("captured"),
    "channel block": aiocolocated.open_task_channel,
    "task group": TaskGroup,
}


def run_and_keep():
    future = colocated_python(count_here)(numbers())
    future.result(TIMEOUT)
    return future


def close(value):
    if isinstance(value, (types.CoroutineType, types.GeneratorType, asyncio.Runner)):
        value.close()


@pytest.mark.parametrize("which", REFUSED)
def test_what_cannot_be_shipped_is_refused_by_name(which):
    """The first call fails, naming function and variable, on every call anew; others go on."""
    captured = REFUSED[which]()
    try:

        def body(x):
            return captured is None

        function = colocated_python(body)
        errors = []
        for _ in range(2):
            errors.append(function(numbers()).exception(TIMEOUT))
            assert isinstance(errors[-1], NotShippableError)
            text = str(errors[-1])
            assert "test_what_cannot_be_shipped_is_refused_by_name.<locals>.body" in text
            assert "captured variable 'captured'" in text
            assert errors[-1].__notes__[0].startswith("colocated call ")
        assert errors[0] is not errors[1]
        assert run(colocated_python(count_here), numbers())
    finally:
        close(captured)


def test_memory_streams_of_anyio_are_refused():
    """A copy of one end would wait for ever."""
    send, receive = anyio.create_memory_object_stream(1)
    for captured in (send, receive):
        with pytest.raises(NotShippableError, match="'captured'"):
            shipped_as("captured", captured)
    send.close()
    receive.close()


def shipped_as(name, value):
    """Ship a function that captures ``value`` under a name."""
    captured = value
    assert name == "captured"
    return run(colocated_python(lambda x: captured is None), numbers())


@pytest.mark.parametrize("buffer", [io.BytesIO(b"bytes"), io.StringIO("text")])
def test_buffers_in_memory_are_values(buffer):
    """They are no open files: their content is copied."""
    got = shipped(buffer)
    assert got is not buffer
    assert got.getvalue() == buffer.getvalue()


LOCK = threading.Lock()


def make_nested(lock):
    """Functions that reach a lock by every way there is, and how each is named."""

    def helper():
        return lock

    class Holder:
        held = lock

        def method(self, x):
            return self.held

    class Tool:
        def __init__(self):
            self.lock = lock

        def __call__(self, x):
            return x

        def method(self, x):
            return x

    holder, tool = Holder, Tool()
    box = {"deep": [lock]}

    def nested(x):
        return helper()

    def wrapped(fn):
        @functools.wraps(fn)
        def wrapper(x):
            return fn(x)

        return wrapper

    def inner(x):
        return (lambda: lock)()

    def global_in_lambda(x):
        return (lambda: [LOCK for _ in range(1)])()

    def global_in_body(x):
        return LOCK

    def default(x, lock=lock):
        return x

    def keyword_default(x, *, lock=lock):
        return x

    def unassigned(x):
        return later, lock

    def container(x):
        return box

    def in_class(x):
        return holder

    def in_object(x):
        return tool

    cases = {
        "nested": (nested, "captured variable 'lock' of", "by way of captured variable 'helper'"),
        "wrapped": (wrapped(nested), "captured variable 'lock' of", "captured variable 'fn'"),
        "inner": (inner, "captured variable 'lock'"),
        "global in lambda": (global_in_lambda, "global 'LOCK'"),
        "global": (global_in_body, "global 'LOCK'"),
        "default": (default, "default of parameter 'lock'"),
        "keyword default": (keyword_default, "default of parameter 'lock'"),
        "unassigned": (unassigned, "captured variable 'lock'"),
        "container": (container, "captured variable 'box' is a dict"),
        "class": (in_class, "attribute 'held' of Holder", "captured variable 'holder'"),
        "object": (in_object, "attribute 'lock' of Tool", "captured variable 'tool'"),
        "callable": (tool, "attribute 'lock' of Tool"),
        "method": (tool.method, "attribute 'lock' of Tool"),
        "partial": (functools.partial(lambda a, x: x, lock), "argument 0 of the partial"),
        "partial keyword": (
            functools.partial(lambda x, a: x, a=lock),
            "argument 'a' of the partial",
        ),
        "partial function": (functools.partial(inner), "captured variable 'lock'"),
    }
    if lock is None:
        later = None
    return cases


@pytest.mark.parametrize(
    "which",
    [
        "nested", "wrapped", "inner", "global in lambda", "global", "default", "keyword default",
        "unassigned", "container", "class", "object", "callable", "method", "partial",
        "partial keyword", "partial function",
    ],
)  # fmt: skip
def test_culprit_is_named_however_it_is_reached(which):
    """The words name the variable that cannot be shipped and the way that leads to it."""
    function, *words = make_nested(threading.Lock())[which]
    error = colocated_python(function)(numbers()).exception(TIMEOUT)
    assert isinstance(error, NotShippableError)
    for text in (*words, "lock"):
        assert text in str(error).replace("make_nested.<locals>.", "")


def test_attribute_named_like_a_global_is_not_blamed():
    """Only what the code reads as a global counts."""
    lock = threading.Lock()

    class Holder:
        LOCK = 1

    def body(x):
        return Holder.LOCK, lock

    with pytest.raises(NotShippableError, match="captured variable 'lock'"):
        run(colocated_python(body), numbers())


def test_retry_after_failure_ships_what_is_shippable_then():
    """A failed shipment is not remembered: with the variable mended, the next call works."""
    held = [threading.Lock()]
    function = colocated_python(lambda x: len(held))
    for _ in range(2):
        with pytest.raises(NotShippableError, match="captured variable 'held' is a list"):
            run(function, numbers())
    held[0] = "mended"
    assert run(function, numbers()) == 1


class DumpsBadly:
    def __reduce__(self):
        raise KeyError("the class's own error")


class LoadsBadly:
    def __reduce__(self):
        return _explode, ()


def _explode():
    raise KeyError("the class's own error")


@pytest.mark.parametrize("kind", [DumpsBadly, LoadsBadly])
def test_error_of_a_captured_value_is_the_cause(kind):
    """Pickling or unpickling code of the user's that fails is named, with its error as the cause."""
    captured = kind()
    with pytest.raises(NotShippableError, match="captured variable 'captured' is a") as caught:
        run(colocated_python(lambda x: captured is None), numbers())
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.asyncio
async def test_refused_function_fails_its_call_not_the_channel():
    """The error comes from the future; calls behind it run."""
    lock = threading.Lock()
    bad, good = colocated_python(lambda x: lock), colocated_python(lambda x: x)
    x = numbers()
    first, second = bad(x), good(x)
    async with asyncio.timeout(TIMEOUT):
        with pytest.raises(NotShippableError):
            await first
        assert await second is x


# --- helpers of the test kit ------------------------------------------------------------------------


def test_helpers_of_the_test_kit_are_shared():
    """Recorder, Gate and Rendezvous are the caller's own inside a body."""
    recorder, gate, meeting = Recorder(), Gate(), Rendezvous(1)

    def body(x):
        recorder.record("body")
        gate.open()
        meeting.wait()
        return x

    run(colocated_python(body), numbers())
    assert recorder.count("body") == 1
    assert gate.is_open


def test_module_that_cannot_be_imported_is_refused():
    """A copy of a module would not be the one that others use; importable ones go by name."""
    made_up = types.ModuleType("made_up")
    function = colocated_python(lambda x: made_up.__name__)
    with pytest.raises(NotShippableError, match=r"'made_up'.*hosts cannot import it"):
        run(function, numbers())
    assert run(colocated_python(lambda x: functools.__name__), numbers()) == "functools"
