# SPDX-License-Identifier: Apache-2.0
"""Callbacks of jitted programs: where they are called and run, what they see, and what they overlap."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from late_arrays import Late

import aiocolocated
from aiocolocated import (
    ArgumentError,
    SpecError,
    TaskChannel,
    TaskGroup,
    _compat,
    awaitable_jit,
    colocated_python,
    debug_callback,
    from_thread,
    gather,
    io_callback,
    pure_callback,
)
from aiocolocated.testing import Gate

TIMEOUT = 20.0  # seconds; only a bug takes that long
F32 = jax.ShapeDtypeStruct((), jnp.float32)
LOOP = "aiocolocated-loop"  # how the names of the library's loops begin

# Called on an event loop's thread, a program with a callback blocks it: here, on purpose.
pytestmark = [pytest.mark.timeout(60), pytest.mark.no_blocking(False)]

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


@pytest.fixture(autouse=True)
def _around() -> Iterator[None]:
    """Start the library's loop before the test, because it keeps descriptors."""
    started(jnp.float32(0)).result(TIMEOUT)
    yield
    SEEN.clear()


@colocated_python
async def started(x: jax.Array) -> jax.Array:
    return x


SEEN: dict[str, Any] = {}  # what callbacks have seen


async def double(x: jax.Array) -> Any:
    """Twice ``x``, after a turn of the loop; notes where it runs."""
    SEEN["thread"] = threading.current_thread().name
    await asyncio.sleep(0)
    return 2 * np.asarray(x)


def plain_double(x: jax.Array) -> Any:
    SEEN["thread"] = threading.current_thread().name
    return 2 * np.asarray(x)


@jax.jit
def first(x: jax.Array) -> jax.Array:
    return io_callback(double, F32, x) + 1


async def call_first(x: jax.Array) -> Any:
    return first(x) * 3


@jax.jit
def second(x: jax.Array) -> jax.Array:
    return io_callback(call_first, F32, x) - x


async def call_second(x: jax.Array) -> Any:
    await asyncio.sleep(0)
    return np.asarray(second(x) + second(x + 1))


@jax.jit
def third(x: jax.Array) -> jax.Array:
    """Calls a callback that calls a jitted function with a callback that calls one with a callback."""
    return io_callback(call_second, F32, x) * 10


class Meeting:
    """Coroutines of any loops, and threads, go on when so many have come: shows that they overlap."""

    def __init__(self, parties: int) -> None:
        self.left = parties
        self.gate = Gate()
        self.lock = threading.Lock()

    def come(self) -> None:
        with self.lock:
            self.left -= 1
            if not self.left:
                self.gate.open()

    async def meet(self, x: Any) -> Any:
        """``x``, when the others are there."""
        self.come()
        await self.gate.wait_async()
        return np.asarray(x)


# --- where they are called --------------------------------------------------------------------------------


def in_a_thread(function: Callable[..., Any], x: Any) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function(x)))
    thread.start()
    thread.join(TIMEOUT)
    return results[0]


def on_a_loop(function: Callable[..., Any], x: Any) -> Any:
    async def main() -> Any:
        return function(x)

    return asyncio.run(main())


def in_an_executor(function: Callable[..., Any], x: Any) -> Any:
    return asyncio.run(asyncio.to_thread(asyncio.run, _awaited(function, x)))


async def _awaited(function: Callable[..., Any], x: Any) -> Any:
    return function(x)


@colocated_python
def body(x: jax.Array, function: Any) -> Any:
    return function(x)


@colocated_python
async def coroutine_body(x: jax.Array, function: Any) -> Any:
    await asyncio.sleep(0)
    return function(x)


WAYS: dict[str, Callable[[Callable[..., Any], Any], Any]] = {
    "script": lambda function, x: function(x),
    "thread": in_a_thread,
    "loop": on_a_loop,
    "loop in a thread": in_an_executor,
    "channel": lambda function, x: TaskChannel().run(function, x).result(TIMEOUT),
    "awaitable": lambda function, x: awaitable_jit(function)(x).result(TIMEOUT),
    "body": lambda function, x: body(x, function).result(TIMEOUT),
    "coroutine body": lambda function, x: coroutine_body(x, function).result(TIMEOUT),
    "from_thread": lambda function, x: from_thread.run(_awaited, function, x),
}


@pytest.mark.parametrize("way", WAYS)
def test_called_anywhere(way):
    """The value is right, and the coroutine runs on a loop of the library, wherever it is called."""
    x = jnp.float32(3)
    assert float(WAYS[way](first, x)) == 7
    assert SEEN["thread"].startswith(LOOP)


@pytest.mark.parametrize("way", WAYS)
def test_nested_callbacks(way):
    """A callback may call a jitted function with a callback that calls another one, and so on."""
    x = jnp.float32(3)
    # second(x) = 3 (2x + 1) - x = 5x + 3
    assert float(WAYS[way](third, x)) == 10 * (18 + 23)


@pytest.mark.parametrize("way", ["script", "loop", "channel", "coroutine body"])
def test_plain_functions_run_where_they_are_called(way):
    """One of a plain function runs inline where the program does."""
    program = jax.jit(lambda x: io_callback(plain_double, F32, x) + 1)
    assert float(WAYS[way](program, jnp.float32(3))) == 7
    expected = {
        "script": threading.current_thread().name,
        "loop": threading.current_thread().name,
        "channel": "aiocolocated-worker",
        "coroutine body": LOOP,
    }[way]
    assert SEEN["thread"].startswith(expected)


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_on_every_kind_of_loop():
    """Inline on the loop's thread, and with inputs that come later, when JAX dispatches it."""
    x = jnp.float32(3)
    assert float(third(x)) == 410
    late = Late()
    y = first(late.array(x))
    assert not y.is_ready()
    late.release()
    async with asyncio.timeout(TIMEOUT):
        assert float(await aiocolocated.wait_until_ready(y)) == 7
        assert float(await TaskChannel().run(third, x)) == 410


# --- many of them -----------------------------------------------------------------------------------------


@jax.jit
def busy(x: jax.Array) -> jax.Array:
    """What JAX dispatches asynchronously, so that what follows on this thread is queued behind it."""
    return (jnp.full((64, 64), 0.5) @ jnp.full((64, 64), 1 / 32))[0, 0] * x


@jax.jit
def two(x: jax.Array) -> jax.Array:
    """Two callbacks that overlap, and one that needs both."""
    y, z = io_callback(double, F32, x), io_callback(double, F32, x + 1)
    return io_callback(double, F32, y + z, ordered=True)


@pytest.mark.asyncio
async def test_a_thousand_calls_on_the_loops_thread():
    """Among all kinds of work none hangs, and none gives another value."""
    chance = random.Random(5)
    calls = 1000
    wrong: list[Any] = []
    pending: list[Any] = []

    def check(got: Any, expected: float, what: str) -> None:
        if float(got) != expected:
            wrong.append((what, float(got), expected))

    async def others() -> None:
        """What else goes on meanwhile, on the loop and in channels."""
        while True:
            n = chance.randrange(100)
            x = jnp.float32(n)
            match chance.randrange(5):
                case 0:
                    check(await TaskChannel().run(first, x), 2 * n + 1, "run")
                case 1:
                    check(await TaskChannel().submit_nowait(body, x, second), 5 * n + 3, "body")
                case 2:
                    check(await coroutine_body(x, first), 2 * n + 1, "coroutine body")
                case 3:
                    check(await asyncio.to_thread(two, x), 8 * n + 4, "thread")
                case 4:
                    await asyncio.sleep(0)

    tasks = [asyncio.create_task(others()) for _ in range(3)]
    async with asyncio.timeout(50):
        for _ in range(calls):
            n = chance.randrange(1000)
            x = jnp.float32(n)
            if chance.random() < 0.3:
                x = busy(x)
            match chance.randrange(6):
                case 0 | 1 | 2:
                    pending.append((first(x), 2 * n + 1, "first"))
                case 3 | 4:
                    pending.append((two(x), 8 * n + 4, "two"))
                case 5:
                    pending.append((second(x), 5 * n + 3, "second"))
            if chance.random() < 0.1:
                for y, expected, what in pending:
                    check(await aiocolocated.wait_until_ready(y), expected, what)
                pending.clear()
        for y, expected, what in pending:
            check(await aiocolocated.wait_until_ready(y), expected, what)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    assert not wrong
    assert [task for task in tasks if not task.cancelled()] == []


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.asyncio
async def test_many_programs_in_flight_from_channels(devices):
    """64 finish; if no device has more than JAX takes, 32, also if they wait for each other."""
    meeting = Meeting(64 if devices > 1 else 1)
    program = jax.jit(lambda x: io_callback(meeting.meet, F32, x) * 2)
    xs = [jax.device_put(np.float32(i), jax.devices("cpu")[i % devices]) for i in range(64)]
    async with asyncio.timeout(TIMEOUT):
        ys = await gather(*(TaskChannel().run(program, x) for x in xs))
    assert [float(y) for y in ys] == [2 * i for i in range(64)]


@pytest.mark.asyncio
async def test_first_calls_overlap():
    """JAX lets nobody else in before the first call has returned; a channel's first call does."""
    meeting = Meeting(3)
    program = jax.jit(lambda x: io_callback(meeting.meet, F32, x))
    awaitable = awaitable_jit(program)
    async with asyncio.timeout(TIMEOUT):
        async with TaskGroup() as group:
            futures = [
                TaskChannel().run(program, jnp.float32(0)),
                group.start_soon(program, jnp.float32(1)),
                group.start_soon(awaitable, jnp.float32(2)),
            ]
        assert [float(await y) for y in futures] == [0, 1, 2]


@pytest.mark.asyncio
async def test_a_callback_may_call_its_own_program():
    """In a channel. Called directly it would wait for the call that waits for it."""

    async def factorial(n: jax.Array) -> Any:
        return n * await TaskChannel().run(program, n - 1) if n > 1 else np.float32(1)

    program = jax.jit(lambda n: io_callback(factorial, F32, n))
    async with asyncio.timeout(TIMEOUT):
        assert float(await TaskChannel().run(program, jnp.float32(5))) == 120


# --- what they see ----------------------------------------------------------------------------------------


def look(x: jax.Array) -> Any:
    """Note context and configuration."""
    SEEN["variable"] = VARIABLE.get()
    for name in CONFIGURATION:
        SEEN[name] = getattr(jax.config, f"jax_{name}")
    return np.asarray(x)


async def look_async(x: jax.Array) -> Any:
    value = look(x)
    VARIABLE.set("of the callback")
    before = dict(SEEN)
    await asyncio.sleep(0)
    look(x)  # it is in force after a wait, too
    assert before | {"variable": "of the callback"} == SEEN
    SEEN.update(before)
    return value


CONFIGURATION = {
    "enable_x64": True,
    "default_matmul_precision": "highest",
    "numpy_rank_promotion": "raise",
    "debug_nans": True,
    "transfer_guard_device_to_device": "log",  # no part of what jit compiles for
}
KINDS = {"plain": look, "async": look_async}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "thread"])
def test_context_of_an_inline_program(way, kind):
    """The callback sees the variables of whoever dispatched; what it sets stays in its coroutine."""
    program = jax.jit(lambda x: io_callback(KINDS[kind], F32, x))
    context = contextvars.copy_context()
    context.run(VARIABLE.set, "of the caller")
    assert float(context.run(WAYS[way], program, jnp.float32(3))) == 3
    assert SEEN["variable"] == "of the caller"
    assert context[VARIABLE] == "of the caller"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["script", "loop", "channel", "coroutine body"])
def test_configuration_of_an_inline_program(way, kind):
    """The callback sees JAX's configuration of whoever dispatched, and nobody keeps it."""
    program = jax.jit(lambda x: io_callback(KINDS[kind], F32, x))
    x = jnp.float32(3)
    WAYS[way](program, x)
    default = dict(SEEN)
    for name, value in CONFIGURATION.items():
        with getattr(jax, name)(value):
            WAYS[way](program, x)
        assert SEEN == default | {name: value} != default
        WAYS[way](program, x)
        assert default == SEEN


@jax.jit
def slow(x: jax.Array) -> jax.Array:
    """``x``, asynchronously and some milliseconds later."""
    y = jnp.full((256, 256), x / 256)
    return jax.lax.fori_loop(0, 20, lambda _, z: z @ jnp.full((256, 256), 1 / 256), y)[0, 0] * 256


@pytest.mark.parametrize("way", ["script", "channel", "body", "coroutine body"])
def test_inline_though_other_work_is_in_flight(way):
    """Off a user's loop: work that the thread has dispatched before, or that the input needs."""
    variables: list[str] = []

    async def note(x: jax.Array) -> Any:
        variables.append(VARIABLE.get())
        return np.asarray(x)

    program = jax.jit(lambda x: io_callback(note, F32, x))

    def after_others(x: jax.Array) -> jax.Array:
        return slow(x) * 0 + program(x) + program(slow(x))

    WAYS[way](after_others, jnp.float32(3))  # compiled
    variables.clear()
    context = contextvars.copy_context()
    context.run(VARIABLE.set, "of the caller")
    assert float(context.run(WAYS[way], after_others, jnp.float32(3))) == pytest.approx(6)
    assert variables == ["of the caller"] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.asyncio
async def test_context_of_an_asynchronous_program(kind):
    """It has no thread of its own: the callback sees what was in force when it was traced."""
    program = jax.jit(lambda x: io_callback(KINDS[kind], F32, x))
    VARIABLE.set("of the caller")
    with (
        jax.default_matmul_precision("highest"),
        jax.transfer_guard_device_to_device("log"),
    ):
        program(jnp.float32(3))
    assert SEEN["variable"] == "of the caller"
    traced = SEEN | {"variable": "unset"}
    SEEN.clear()
    late = Late()
    array = late.array(jnp.float32(4))
    with jax.default_matmul_precision("highest"):
        y = program(array)
    assert not y.is_ready()
    late.release()
    async with asyncio.timeout(TIMEOUT):
        assert float(await aiocolocated.wait_until_ready(y)) == 4
    assert traced == SEEN
    assert SEEN["default_matmul_precision"] == "highest"
    assert SEEN["transfer_guard_device_to_device"] == "log"


def test_x64_values_go_through():
    """With x64 on, arguments and results have 64 bits."""
    with jax.enable_x64(True):
        spec = {"f": jax.ShapeDtypeStruct((), np.float64), "i": jax.ShapeDtypeStruct((), np.int64)}

        async def values(x: jax.Array) -> Any:
            return {"f": np.asarray(x) + 2.0**-40, "i": 2**40}

        y = jax.jit(lambda x: io_callback(values, spec, x))(np.float64(1))
        assert (float(y["f"]), int(y["i"])) == (1 + 2.0**-40, 2**40)


# --- what they may do -------------------------------------------------------------------------------------


@jax.jit
def heavy(x: jax.Array) -> jax.Array:
    """Asynchronous, and not quick."""
    y = jnp.full((64, 64), x / 64)
    return jax.lax.fori_loop(0, 20, lambda _, z: z @ jnp.full((64, 64), 1 / 64), y)[0, 0] * 64


async def use_jax(x: jax.Array) -> Any:
    key = jax.random.split(jax.random.key(0))[0]
    await asyncio.sleep(0)
    y = heavy(x) + jax.random.uniform(key) * 0
    return np.asarray(jax.device_put(y, jax.devices("cpu")[1]))


async def await_jax(x: jax.Array) -> Any:
    y = await aiocolocated.wait_until_ready(heavy(x))
    return await aiocolocated.device_get(y)


async def call_colocated(x: jax.Array) -> Any:
    same, other = await gather(started(x), TaskChannel().submit_nowait(body, x, jnp.square))
    return np.asarray(same * 2 - other / other * same)


async def time_out(x: jax.Array) -> Any:
    try:
        async with asyncio.timeout(0.005):
            await asyncio.sleep(60)
    except TimeoutError:
        return np.asarray(x)


async def use_task_groups(x: jax.Array) -> Any:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(asyncio.to_thread(np.asarray, x))
    async with TaskGroup() as group:
        fut = group.start_soon(started, x)
        group.create_task(asyncio.sleep(0))
    return task.result() * 2 - np.asarray(fut.result())


async def use_anyio(x: jax.Array) -> Any:
    results: list[Any] = []

    async def put(function: Any) -> None:
        value = np.array(x)  # a copy: threads of anyio 4.4 keep their last arguments
        results.append(await anyio.to_thread.run_sync(function, value))

    with anyio.move_on_after(0.005):
        await anyio.sleep(60)
    async with anyio.create_task_group() as group:
        group.start_soon(put, np.asarray)
    return results[0]


async def use_awaitable_jit(x: jax.Array) -> Any:
    return np.asarray(await awaitable_jit(first)(x)) - 1 - np.asarray(x)


async def leave_a_task(x: jax.Array) -> Any:
    async def later() -> None:
        await asyncio.sleep(0)
        SEEN["later"].open()

    SEEN["task"] = asyncio.create_task(later())
    return np.asarray(x)


ACTIONS = [use_jax, await_jax, call_colocated, time_out, use_task_groups, use_anyio]
ACTIONS += [use_awaitable_jit, leave_a_task]


@pytest.mark.parametrize("way", ["loop", "channel", "coroutine body", "late"])
@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
def test_inside_a_callback(action, way):
    """JAX operations, the library and asyncio, inline and asynchronously."""
    if way == "coroutine body" and action in (call_colocated, use_task_groups):
        pytest.skip("a coroutine body cannot run meanwhile, and waiting for it is refused")
    SEEN["later"] = Gate()
    program = jax.jit(lambda x: io_callback(action, F32, x) + 1)
    late = Late()

    async def on_a_loop() -> Any:
        y = program(late.array(jnp.float32(3)))
        late.release()
        return await aiocolocated.wait_until_ready(y)

    y = asyncio.run(on_a_loop()) if way == "late" else WAYS[way](program, jnp.float32(3))
    assert float(y) == pytest.approx(4)
    if action is leave_a_task:
        SEEN["later"].wait()


@pytest.mark.parametrize("way", ["script", "channel", "coroutine body"])
def test_inside_a_plain_callback(way):
    """Waiting there is what it is in a body: colocated calls and coroutines, but not on a loop."""

    def use(x: jax.Array) -> Any:
        y = heavy(x) + first(x)
        if way != "coroutine body":
            y += TaskChannel().submit_nowait(started, x).result() + from_thread.run(call_first, x)
        return np.asarray(y)

    program = jax.jit(lambda x: io_callback(use, F32, x))
    expected = 3 + 7 + (0 if way == "coroutine body" else 3 + 21)
    assert float(WAYS[way](program, jnp.float32(3))) == pytest.approx(expected)


# --- what they must return --------------------------------------------------------------------------------


def spec_of(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


KEY = jax.eval_shape(lambda: jax.random.key(0)).dtype
TREE = "the result's tree differs from result_shape_dtypes"

# What is said, what is returned, and the error's words.
WRONG: dict[str, tuple[Any, Callable[[], Any], list[str]]] = {
    "other key": ({"a": F32}, lambda: {"b": 1.0}, [TREE, "{'a': *}", "{'b': *}"]),
    "leaf for tuple": ((F32, F32), lambda: 1.0, [TREE, "(*, *)", "PyTreeDef(*)"]),
    "tuple for leaf": (F32, lambda: (1.0, 1.0), [TREE, "(*, *)", "PyTreeDef(*)"]),
    "list for array": (spec_of("float32", 2), lambda: [1.0, 2.0], [TREE, "[*, *]"]),
    "None": (F32, lambda: None, [TREE, "PyTreeDef(*), got PyTreeDef(None)"]),
    "something for None": (None, lambda: 1.0, [TREE, "PyTreeDef(None), got PyTreeDef(*)"]),
    "shape": (
        {"a": [F32, spec_of("float32", 3)]},
        lambda: {"a": [1.0, np.ones(4, np.float32)]},
        ["result['a'][1] has another shape: expected float32[3], got float32[4]"],
    ),
    "scalar for vector": (
        spec_of("float32", 3),
        lambda: 1.0,
        ["result has another shape: expected float32[3], got 1.0"],
    ),
    "vector for scalar": (F32, lambda: np.ones(1, np.float32), ["shape: expected float32[], got"]),
    "dtype": (
        (F32, F32),
        lambda: (1.0, np.int32(1)),
        ["result[1] has another dtype: expected float32[], got int32[]"],
    ),
    "float for int": (spec_of("int32"), lambda: 5.0, ["expected int32[], got 5.0"]),
    "bool for int": (spec_of("int32"), lambda: True, ["expected int32[], got True"]),
    "bool for float": (F32, lambda: True, ["expected float32[], got True"]),
    "float for bool": (spec_of("bool"), lambda: 1.0, ["expected bool[], got 1.0"]),
    "large int": (spec_of("int32"), lambda: 2**40, ["expected int32[], got 1099511627776"]),
    "int64": (spec_of("int32"), lambda: np.int64(2**40), ["expected int32[], got int64[]"]),
    "negative for unsigned": (spec_of("uint32"), lambda: -1, ["expected uint32[], got -1"]),
    "too large for uint8": (spec_of("uint8"), lambda: 300, ["expected uint8[], got 300"]),
    "too large for int4": (spec_of("int4"), lambda: 100, ["expected int4[], got 100"]),
    "float for int4": (spec_of("int4"), lambda: 1.5, ["expected int4[], got 1.5"]),
    "float32 for bfloat16": (
        spec_of("bfloat16"),
        lambda: np.float32(1),
        ["expected bfloat16[], got float32[]"],
    ),
    "text": (F32, lambda: "text", ["expected float32[], got 'text'"]),
    "object": (F32, lambda: np.array(None, object), ["expected float32[], got object[]"]),
    "key for integers": (
        spec_of("uint32", 2),
        lambda: jax.random.key(0),
        ["dtype: expected uint32[2], got key<fry>[]"],
    ),
    "integers for key": (
        spec_of(KEY),
        lambda: np.zeros(2, np.uint32),
        ["dtype: expected key<fry>[], got uint32[2]"],
    ),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name, (spec, _, _) in WRONG.items()
        for kind in ("plain", "async", "ordered", "pure")
        if not (spec is None and kind == "pure")  # JAX drops it: nothing needs its result
    ],
)
def test_result_that_is_not_as_said(name, kind):
    """The error names the callback, the leaf, what was expected and what came."""
    spec, value, words = WRONG[name]

    def make() -> Any:
        return value()

    async def make_async() -> Any:
        return value()

    match kind:
        case "plain":
            program = jax.jit(lambda: io_callback(make, spec))
        case "async" | "ordered":
            program = jax.jit(lambda: io_callback(make_async, spec, ordered=kind == "ordered"))
        case "pure":
            program = jax.jit(lambda: pure_callback(make_async, spec))
    with pytest.raises(SpecError) as caught:
        TaskChannel().run(program).result(TIMEOUT)
    text = str(caught.value)
    what = "pure_callback" if kind == "pure" else "io_callback"
    function = "make" if kind == "plain" else "make_async"
    assert text.startswith(f"{what} of ")
    assert f".{function}: " in text
    for word in words:
        assert word in text


# What is said, what is returned, and what the program gives.
RIGHT: dict[str, tuple[Any, Callable[[], Any], Any]] = {
    "nothing": (None, lambda: None, None),
    "no leaves": ({"a": None}, lambda: {"a": None}, {"a": None}),
    "list for tuple": ((F32, F32), lambda: [1.0, 2.0], (1.0, 2.0)),
    "int": (spec_of("int32"), lambda: 2**31 - 1, 2**31 - 1),
    "int for float": (F32, lambda: 5, 5.0),
    "bool": (spec_of("bool"), lambda: True, True),
    "complex": (spec_of("complex64"), lambda: 1j, 1j),
    "bfloat16": (spec_of("bfloat16"), lambda: 1.5, 1.5),
    "float8": (spec_of("float8_e4m3fn"), lambda: 1.5, 1.5),
    "float64": (F32, lambda: np.float64(1.5), 1.5),
    "int64": (spec_of("int32"), lambda: np.int64(7), 7),
    "no size": (spec_of("float32", 0, 3), lambda: np.zeros((0, 3), np.float32), []),
    "jax.Array": (spec_of("float32", 2), lambda: jnp.ones(2), [1.0, 1.0]),
}


@pytest.mark.parametrize("name", RIGHT)
def test_result_that_is_taken(name):
    """Python scalars that fit, and 64 bits where that is what NumPy makes of everything."""
    spec, value, expected = RIGHT[name]

    async def make() -> Any:
        return value()

    program = jax.jit(lambda: (io_callback(make, spec), pure_callback(value, spec)))
    for result in TaskChannel().run(program).result(TIMEOUT):
        assert jax.tree.map(lambda leaf: leaf.tolist(), result) == expected
        if spec is not None:
            got = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), result)
            assert got == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), spec)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("float32", r"result_shape_dtypes must have a shape and a dtype .* got a str"),
        ([F32, 1.0], r"result_shape_dtypes\[1\] must have a shape and a dtype .* got float"),
        ({"a": np.float32}, r"result_shape_dtypes\['a'\] must have .* got <class 'numpy.float32'>"),
        (spec_of(np.float64), "float64, which JAX makes float32, because x64 is off"),
        ({"a": (spec_of(np.int64),)}, r"result_shape_dtypes\['a'\]\[0\] has dtype int64"),
    ],
)
@pytest.mark.parametrize("callback", [io_callback, pure_callback])
def test_wrong_specs(callback, spec, words):
    """Refused where they are said."""
    with pytest.raises((ArgumentError, SpecError), match=words):
        jax.jit(lambda: callback(double, spec))()


# --- what can be one --------------------------------------------------------------------------------------


class Model:
    """Callable, with methods of all kinds."""

    def __init__(self, by: float) -> None:
        self.by = by

    async def __call__(self, x: jax.Array) -> Any:
        await asyncio.sleep(0)
        return np.float32(self.by * x)

    async def method(self, x: jax.Array) -> Any:
        return await self(x)

    @classmethod
    async def of_class(cls, x: jax.Array) -> Any:
        return await cls(2)(x)

    @staticmethod
    async def static(x: jax.Array) -> Any:
        return await Model(2)(x)


class SubModel(Model):
    """Equal to others by value, and not hashable: its ``__call__`` is inherited."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return type(other) is SubModel and other.by == self.by


async def multiply(by: Any, x: jax.Array, *, plus: float = 0) -> Any:
    return np.float32(by * x + plus)


CALLABLES: dict[str, Callable[[], Callable[..., Any]]] = {
    "function": lambda: double,
    "object": lambda: Model(2),
    "object of a subclass": lambda: SubModel(2),
    "bound method": lambda: Model(2).method,
    "method of an unhashable object": lambda: SubModel(2).method,
    "class method": lambda: Model.of_class,
    "static method": lambda: Model.static,
    "partial": lambda: functools.partial(multiply, 2),
    "partial of a partial": lambda: functools.partial(functools.partial(multiply, 2), plus=0),
    "partial of a method": lambda: functools.partial(Model(2).method),
    "partial of an object": lambda: functools.partial(SubModel(2)),
    "partial with an array": lambda: functools.partial(multiply, np.float32(2)),
    "lambda": lambda: lambda x: 2 * np.asarray(x),
    "ufunc": lambda: functools.partial(np.multiply, np.float32(2)),
    "jitted": lambda: jax.jit(lambda x: 2 * x),
}


@pytest.mark.parametrize("name", CALLABLES)
def test_callables(name):
    """Functions, methods, partials and objects, of coroutines too: in a jitted function and without."""
    function = CALLABLES[name]()
    program = jax.jit(lambda x: io_callback(function, F32, x) + pure_callback(function, F32, x))
    x = jnp.float32(3)
    assert float(TaskChannel().run(program, x).result(TIMEOUT)) == 12
    assert float(io_callback(function, F32, x)) == 6
    assert float(pure_callback(function, F32, x)) == 6
    assert debug_callback(function, x) is None


def generator(x: jax.Array) -> Any:
    yield x


async def async_generator(x: jax.Array) -> Any:
    yield x


class GeneratorObject:
    def __call__(self, x: jax.Array) -> Any:
        yield x


NO_CALLBACKS: dict[str, tuple[Any, str]] = {
    "None": (None, "needs a function, got NoneType"),
    "text": ("double", "needs a function, got a str"),
    "array": (np.ones(2), "needs a function, got float64"),
    "generator": (generator, "of generator: a generator gives its items over time"),
    "async generator": (async_generator, "of async_generator: a generator gives its items"),
    "partial of one": (functools.partial(generator), "of generator: a generator gives its items"),
}


@pytest.mark.parametrize("callback", ["io_callback", "pure_callback", "debug_callback"])
@pytest.mark.parametrize("name", NO_CALLBACKS)
def test_what_cannot_be_a_callback(name, callback):
    """Refused in words, where it is said."""
    wrong, words = NO_CALLBACKS[name]
    if wrong is None and callback == "debug_callback":
        words = "got arguments without a callback"  # it may be left out, in a decorator
    function = getattr(aiocolocated, callback)
    specs = () if callback == "debug_callback" else (F32,)
    with pytest.raises(ArgumentError, match=f"{callback} {words}"):
        jax.jit(lambda x: function(wrong, *specs, x))(jnp.float32(3))


def test_coroutine_object_is_no_callback():
    """It has begun somewhere else, and can run only once."""
    coroutine = double(jnp.float32(3))
    with pytest.raises(ArgumentError, match="needs a function, got coroutine"):
        io_callback(coroutine, F32)
    coroutine.close()


@pytest.mark.parametrize("kind", ["io_callback", "pure_callback", "debug_callback"])
def test_function_that_returns_a_coroutine(kind):
    """Refused in words, and the coroutine is closed: nobody warns that it was never awaited."""

    def forgot(x: jax.Array) -> Any:
        return double(x)

    function = getattr(aiocolocated, kind)
    specs = () if kind == "debug_callback" else (F32,)
    program = jax.jit(lambda x: function(forgot, *specs, x))
    with pytest.raises(ArgumentError, match="returned a coroutine: pass the coroutine function"):
        TaskChannel().run(program, jnp.float32(3)).result(TIMEOUT)


# --- compiling --------------------------------------------------------------------------------------------


class Compilations:
    """Counts what XLA compiles in a block."""

    def __enter__(self) -> Compilations:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def _listen(self, event: str, duration: float, **kwargs: object) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"

    def __exit__(self, *exc: object) -> None:
        jax.monitoring.clear_event_listeners()


@pytest.mark.parametrize("ordered", [False, True])
def test_equal_callbacks_compile_once(ordered):
    """A new method, partial or specs that are equal: called directly, JAX finds what it compiled."""
    model, x = Model(2), jnp.float32(3)

    def call(function: Any, x: Any) -> float:
        return float(io_callback(function, spec_of(np.float32), x, ordered=ordered))

    for make in (lambda: model.method, lambda: double, lambda: Model.of_class):
        assert call(make(), x) == 6
        with Compilations() as compilations:
            assert [call(make(), x + i) for i in range(3)] == [6, 8, 10]
        assert compilations.count <= 1  # the addition
    with Compilations() as compilations:
        assert call(Model(3).method, x) == 9
    assert compilations.count >= 1


def test_callable_objects_compare_by_value():
    """As the hash of an unhashable one its identity serves, and equality decides."""
    x = jnp.float32(3)
    one, other = SubModel(2), SubModel(3)
    assert float(io_callback(one, F32, x)) == 6
    assert float(io_callback(other, F32, x)) == 9
    other.by = 2
    with Compilations() as compilations:
        assert float(io_callback(one, F32, x)) == 6
        assert float(io_callback(other, F32, x)) == 6
    assert compilations.count == 0


def test_program_is_compiled_once():
    """Whatever calls it."""
    program = jax.jit(lambda x: io_callback(double, F32, x))
    x = jnp.float32(3)
    program(x)
    with Compilations() as compilations:
        for way in ("script", "loop", "channel", "body", "coroutine body", "awaitable"):
            assert float(WAYS[way](program, x)) == 6
    assert compilations.count == 0


# --- what else JAX does -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["script", "loop", "channel"])
def test_donated_argument(way):
    """Its buffer is used again, and what the callback got stays as it was."""

    async def keep(x: jax.Array) -> Any:
        SEEN["kept"] = x
        return np.asarray(x) * 2

    spec = spec_of("float32", 1000)
    program = jax.jit(lambda x: io_callback(keep, spec, x) + x, donate_argnums=0)
    x = jnp.arange(1000.0)
    y = WAYS[way](program, x)
    assert x.is_deleted()
    np.testing.assert_array_equal(np.asarray(y), 3 * np.arange(1000.0))
    np.testing.assert_array_equal(np.asarray(SEEN["kept"]), np.arange(1000.0))


@pytest.mark.parametrize("clear", [jax.clear_caches, aiocolocated.clear_caches])
@pytest.mark.asyncio
async def test_caches_may_be_cleared_meanwhile(clear):
    """Also while a program is in flight whose jitted function is gone."""
    gate = Gate()

    async def hold(x: jax.Array) -> Any:
        await gate.wait_async()
        return np.asarray(x)

    program = jax.jit(lambda x: io_callback(hold, F32, x) + io_callback(double, F32, x))
    x = jnp.float32(3)
    futures = [TaskChannel().run(program, x), awaitable_jit(program)(x)]
    await asyncio.sleep(0)
    clear()
    assert float(first(x)) == 7
    del program
    gate.open()
    async with asyncio.timeout(TIMEOUT):
        assert [float(await fut) for fut in futures] == [9, 9]
    assert float(await TaskChannel().run(first, x)) == 7


def test_jax_without_the_hook(monkeypatch):
    """A JAX that dispatches in another way: values are right, contexts are not seen."""
    executable = _compat._executable
    monkeypatch.setattr(executable, "__call__", executable.__call__.__wrapped__)
    x = jnp.float32(3)
    for way in WAYS:
        assert float(WAYS[way](third, x)) == 410
        assert float(WAYS[way](two, x)) == 28
    program = jax.jit(lambda x: io_callback(look_async, F32, x))
    context = contextvars.copy_context()
    context.run(VARIABLE.set, "of the caller")
    assert float(context.run(program, x)) == 3
    assert SEEN["variable"] == "unset"
    with pytest.raises(SpecError):
        TaskChannel().run(jax.jit(lambda: io_callback(lambda: None, F32))).result(TIMEOUT)
