# SPDX-License-Identifier: Apache-2.0
"""Errors of callbacks in jitted code: whoever waits gets the callback's own exception (contract C7)."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import logging
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from late_arrays import Late

from aiocolocated import (
    BodyError,
    SpecError,
    TaskChannel,
    TaskGroup,
    _callback_errors,
    _callback_runs,
    _compat,
    _execution,
    _programs,
    _service,
    awaitable_jit,
    callback_error,
    colocated_python,
    debug_callback,
    effects_barrier,
    gather,
    io_callback,
    pure_callback,
    wait_until_ready,
)
from aiocolocated.testing import Gate, Rendezvous

TIMEOUT = 20.0  # seconds; only a bug takes that long
F32 = jax.ShapeDtypeStruct((), jnp.float32)
JaxError = jax.errors.JaxRuntimeError
JAX = tuple(int(part) for part in jax.__version__.split(".")[:3])

# A program with a callback that is called on an event loop's thread blocks it. Errors hold nothing in cycles.
pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.no_blocking(False),
    pytest.mark.leak_check(collect=False),
]


@colocated_python
async def started(x: jax.Array) -> jax.Array:
    return x


@pytest.fixture(autouse=True)
def _around() -> Iterator[None]:
    """Start the library's loop before the test, because it keeps descriptors; no test sees another's."""
    started(one()).result(TIMEOUT)
    _callback_errors._errors.clear()
    yield
    RAISED.clear()
    assert _callback_runs._tickets == {}
    assert _callback_runs._running == set()
    _callback_errors._errors.clear()


# --- callbacks that fail ----------------------------------------------------------------------------------

# What callbacks raise, one by one; then they return.
RAISED: list[BaseException] = []


def raise_next() -> None:
    """Raise what a test wants; no frame holds it afterwards."""
    try:
        if RAISED:
            raise RAISED.pop(0)
    finally:
        pass


def plain(x: jax.Array) -> Any:
    raise_next()
    return np.asarray(x)


async def coroutine(x: jax.Array) -> Any:
    await asyncio.sleep(0)
    raise_next()
    return np.asarray(x)


def new_program(function: Callable[..., Any], kind: str = "io", ordered: bool = False) -> Any:
    """A jitted function that has not been called.

    It uses no result of a callback: over several devices, XLA would wait for ever for the one that failed.
    """

    @jax.jit
    def program(x: jax.Array) -> jax.Array:
        if kind == "io":
            return io_callback(function, _spec_of(x), x, ordered=ordered)
        if kind == "pure":
            return pure_callback(function, _spec_of(x), x)
        debug_callback(function, x, ordered=ordered)
        return x + 0

    return program


def _spec_of(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


program_of = functools.cache(new_program)  # compiled once for all tests
awaitable_of = functools.cache(awaitable_jit)


def one() -> jax.Array:
    return jnp.float32(1)


def spread() -> jax.Array:
    """On two devices: a program over it never runs inline."""
    return jax.device_put(np.ones(2, np.float32), _halves())


@functools.cache
def _halves() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices("cpu")[:2]), ("x",)), P("x"))


def late_result(program: Any) -> jax.Array:
    """A result of ``program`` for an input that was not ready, so that it ran asynchronously."""
    late = Late()
    y = program(late.array(one()))
    late.release()
    return y


# --- kinds of exceptions ----------------------------------------------------------------------------------


class Plain(Exception):
    pass


class OddConstructor(Exception):
    def __init__(self, a, *, b):
        super().__init__()
        self.values = a, b


class BrokenText(Exception):
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


class Slotted(Exception):
    """Without notes, and nobody may replace its traceback."""

    __slots__ = ("code",)

    def __init__(self, code):
        super().__init__(code)
        self.code = code

    def add_note(self, note):
        raise RuntimeError("no notes")

    def with_traceback(self, tb):
        raise RuntimeError("no traceback")


def with_attributes() -> BaseException:
    error = Plain("text")
    error.code = 7
    return error


def with_cause() -> BaseException:
    error = KeyError("key")
    error.__cause__ = ZeroDivisionError("its own cause")
    return error


# Made anew for every test: exceptions keep what was done to them.
ORDINARY: dict[str, Callable[[], BaseException]] = {
    "builtin": lambda: ValueError("text"),
    "arguments": lambda: LookupError("text", 2, None),
    "constructor": lambda: OddConstructor(1, b=2),
    "attributes": with_attributes,
    "no_text": lambda: BrokenText("t"),
    "cause": with_cause,
    "slots": lambda: Slotted(7),
    "group": lambda: ExceptionGroup("group", [KeyError(1), OSError(2, "two")]),
    "os_error": lambda: OSError(2, "No such file", "name"),
    "timeout": lambda: TimeoutError("the callback's own"),
    "asyncio": lambda: asyncio.IncompleteReadError(b"xy", 3),
}
WRAPPED: dict[str, Callable[[], BaseException]] = {
    "stop_iteration": lambda: StopIteration(5),
    "keyboard_interrupt": lambda: KeyboardInterrupt("k"),
    "system_exit": lambda: SystemExit(3),
    "cancelled": lambda: asyncio.CancelledError("c"),
    "generator_exit": lambda: GeneratorExit("g"),
    "base_group": lambda: BaseExceptionGroup("group", [KeyboardInterrupt(), ValueError()]),
}
KINDS = {**ORDINARY, **WRAPPED}


def state_of(error: BaseException) -> Any:
    """What an exception says of itself, but for the library's note."""
    attributes = {key: value for key, value in vars(error).items() if key != "__notes__"}
    return type(error), error.args, attributes, getattr(error, "code", None)


def shown_chain(error: BaseException) -> list[BaseException]:
    """An exception and what a printed traceback shows above it, up to the first."""
    chain = [error]
    while True:
        last = chain[-1]
        origin = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if origin is None:
            return chain
        assert origin not in chain
        chain.append(origin)


def check_error(
    caught: BaseException, error: BaseException, function: Any, jaxs: bool = True
) -> None:
    """``caught`` is what a waiter should get for ``error``."""
    found = error
    if isinstance(error, StopIteration) and function is coroutine:  # Python's own doing
        assert type(caught) is RuntimeError
        assert caught.__cause__ is error
        found = caught
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        assert caught is error
    else:
        assert type(caught) is BodyError
        assert caught.__cause__ is error
        assert type(error).__name__ in str(caught)
    assert callback_error(caught) is found
    # First the frames of who waits, then the callback's.
    frames = traceback.extract_tb(BaseException.__traceback__.__get__(error))
    assert [frame.name for frame in frames[-2:]] == [function.__name__, "raise_next"]
    assert {frame.filename for frame in frames[-2:]} == {__file__}
    assert frames[-2].line == "raise_next()"
    assert frames[0].filename == __file__  # not the library's
    assert not {"__call__", "_call", "_dispatch", "_run", "_step"} & {f.name for f in frames}
    *_, first = shown_chain(error)
    assert (type(first) is JaxError) == jaxs
    assert [type(e) for e in shown_chain(error)].count(JaxError) == jaxs


def check_direct(caught: BaseException, error: BaseException, function: Any) -> None:
    """``caught`` is JAX's own error for ``error``, as it came."""
    assert type(caught) is JaxError
    assert caught.__cause__ is None
    assert type(error).__name__ in str(caught)
    found = callback_error(caught)
    if isinstance(error, StopIteration) and function is coroutine:
        assert type(found) is RuntimeError
    else:
        assert found is error


async def outcome(awaitable: Any) -> BaseException:
    """The error of something awaited, with a limit."""
    async with asyncio.timeout(TIMEOUT):
        try:
            await awaitable
        except BaseException as error:
            return error
        finally:
            del awaitable  # the error's traceback holds this frame
    raise AssertionError("nothing was raised")


def raised_by(function: Callable[..., Any], *args: Any) -> BaseException:
    try:
        function(*args)
    except BaseException as error:
        return error
    finally:
        del args
    raise AssertionError("nothing was raised")


# --- ways to an error -------------------------------------------------------------------------------------


async def run_inline(program):
    return await outcome(TaskChannel().run(program, one()))


async def run_late(program):
    late = Late()
    future = TaskChannel().run(program, late.array(one()))
    late.release()
    return await outcome(future)


async def run_devices(program):
    return await outcome(TaskChannel().run(program, spread()))


async def awaitable_inline(program):
    return await outcome(awaitable_of(program)(one()))


async def awaitable_devices(program):
    return await outcome(awaitable_of(program)(spread()))


async def waited_late(program):
    return await outcome(wait_until_ready(late_result(program)))


async def waited_devices(program):
    return await outcome(wait_until_ready({"y": program(spread())}))


async def barrier_late(program):
    late_result(program)
    return await outcome(effects_barrier())


async def barrier_devices(program):
    program(spread())
    return await outcome(effects_barrier())


async def direct_inline(program):
    return raised_by(program, one())


async def direct_late(program):
    return raised_by(jax.block_until_ready, late_result(program))


async def direct_devices(program):
    return raised_by(np.asarray, program(spread()))


WAYS = [
    *(run_inline, run_late, run_devices, awaitable_inline, awaitable_devices),
    *(waited_late, waited_devices, barrier_late, barrier_devices),
    *(direct_inline, direct_late, direct_devices),
]


def combinations(way: Any) -> Iterator[tuple[Any, bool]]:
    """Callback and order; JAX 0.10.0 compiles no ordered callback for several devices."""
    for function in (plain, coroutine):
        yield function, False
        if not (way.__name__.endswith("devices") and JAX < (0, 10, 1)):
            yield function, True


def check(way: Any, caught: BaseException, error: BaseException, function: Any) -> None:
    if way.__name__.startswith("direct"):
        check_direct(caught, error, function)
    else:
        check_error(caught, error, function)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.asyncio
async def test_each_kind_arrives_each_way(kind, way):
    """As itself, whether the callback is a coroutine function, and ordered; the next call works."""
    for function, ordered in combinations(way):
        program = program_of(function, ordered=ordered)
        error = KINDS[kind]()
        state = state_of(error)
        RAISED.append(error)
        caught = await way(program)
        assert RAISED == []
        check(way, caught, error, function)
        assert state_of(error) == state
        assert float(program(one())) == 1
        assert float(await TaskChannel().run(program, one())) == 1
        del caught, error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.asyncio
async def test_each_kind_arrives_from_the_first_call(kind):
    """While JAX traces and compiles, in a channel and directly."""
    for function, ordered in combinations(run_inline):
        program = new_program(function, ordered=ordered)
        error = KINDS[kind]()
        RAISED.append(error)
        check_error(await run_inline(program), error, function)
        assert float(program(one())) == 1
    program = new_program(plain)
    error = KINDS[kind]()
    RAISED.append(error)
    check_direct(raised_by(program, one()), error, plain)
    assert float(program(one())) == 1


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.asyncio
async def test_first_call_each_way(way):
    """Nothing differs from that of a cached call."""
    program = new_program(coroutine)
    error = Plain("text", 1)
    RAISED.append(error)
    check(way, await way(program), error, coroutine)
    assert float(program(one())) == 1


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("kind", ["pure", "debug"])
@pytest.mark.asyncio
async def test_other_callbacks(kind, way):
    """``pure_callback`` and ``debug_callback`` fail as ``io_callback`` does."""
    for function in (plain, coroutine):
        program = program_of(function, kind)
        error = Plain("text", 1)
        RAISED.append(error)
        caught = await way(program)
        RAISED.clear()
        check(way, caught, error, function)
        assert f"{kind}_callback of {function.__name__} raised Plain" in str(
            shown_chain(caught)[-1]
        )
        assert float(program(one())) == 1
        del caught


@pytest.mark.parametrize("way", [run_inline, run_devices, waited_late, barrier_late])
@pytest.mark.parametrize("function", [plain, coroutine])
@pytest.mark.asyncio
async def test_wrong_result_arrives_as_spec_error(function, way):
    """What the library itself raises for a callback arrives like the callback's own exceptions."""
    x = spread() if way is run_devices else one()

    def as_wanted(y: Any) -> Any:
        return np.ones(3, np.float32) if WRONG else np.asarray(y)

    async def as_wanted_async(y: Any) -> Any:
        return as_wanted(y)

    WRONG = True
    program = new_program(as_wanted if function is plain else as_wanted_async)
    caught = await way(program)
    assert type(caught) is SpecError
    assert "as_wanted" in str(caught)
    assert "shape" in str(caught)
    del caught
    WRONG = False
    np.testing.assert_array_equal(await TaskChannel().run(program, x), x)


# --- raised again and again -------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_five_waits_raise_the_same():
    """Same object, same traceback, same causes and notes, each time."""
    error = with_cause()
    RAISED.append(error)
    future = TaskChannel().run(program_of(coroutine), one())
    seen = set()
    for _ in range(5):
        assert await outcome(future) is error
        seen.add((frames_here(error), len(shown_chain(error))))
        assert len(error.__notes__) == 1
    assert len(seen) == 1
    RAISED.append(error := with_cause())
    y = late_result(program_of(coroutine))
    seen = set()
    for later in (y, y + 1, y + 1, y, y):
        assert await outcome(wait_until_ready(later)) is error
        seen.add((frames_here(error), len(shown_chain(error))))
    assert len(seen) == 1
    assert not hasattr(error, "__notes__")
    del error


def frames_here(error: BaseException) -> tuple[str, ...]:
    """Names of the frames in this file; one of the library is there only if a wait had to wait."""
    frames = traceback.extract_tb(error.__traceback__)
    return tuple(frame.name for frame in frames if frame.filename == __file__)


@pytest.mark.asyncio
async def test_one_exception_raised_by_many_failures():
    """It has the JAX error of the last, not of all; each time it starts with its callback's frames."""
    error = Plain("shared")
    for way in (run_inline, waited_late, run_devices, barrier_late, run_inline):
        RAISED.append(error.with_traceback(None))
        check_error(await way(program_of(plain)), error, plain)
    assert len(shown_chain(error)) == 2


@pytest.mark.asyncio
async def test_context_stays():
    """What the callback was handling when it raised is still shown, above it JAX's error."""

    def failing(x):
        try:
            raise_next()
        except KeyError as error:
            if error.args == ("from",):
                raise Plain("text") from error
            raise Plain("text")  # noqa: B904
        return np.asarray(x)

    program = new_program(failing)
    for key in ("from", "while handling"):
        for way in (run_inline, waited_late):
            RAISED.append(KeyError(key))
            caught = await way(program)
            shown = shown_chain(caught)
            assert [type(e) for e in shown] == [Plain, KeyError, JaxError]
            assert (caught.__cause__ is shown[1]) == (key == "from")
            assert "failing" in "".join(traceback.format_exception(caught))
            del caught, shown


@pytest.mark.asyncio
async def test_exception_that_the_caller_handles_is_not_touched():
    """It is no context of the callback's error, although JAX calls back on the same thread."""
    RAISED.append(error := Plain("text"))
    try:
        raise KeyError("the caller's")
    except KeyError as handled:
        before = handled.__traceback__
        caught = raised_by(program_of(plain), one())
        after = handled.__traceback__
    assert after is before
    assert type(caught.__context__) is KeyError
    assert callback_error(caught) is error
    assert error.__context__ is None
    del before, after, caught


@pytest.mark.asyncio
async def test_coroutine_that_caught_the_exception_goes_on():
    """An exception that several get, as clients raise for a lost connection, ends none of them."""
    lost = ConnectionError("lost")
    handled = Gate()
    go = Gate()

    async def other_user():
        try:
            raise lost
        except ConnectionError:
            handled.open()
        await go.wait_async()
        return "went on"

    async with asyncio.timeout(TIMEOUT):
        other = asyncio.create_task(other_user())
        await handled.wait_async()
        RAISED.append(lost)
        assert await run_inline(program_of(plain)) is lost
        go.open()
        assert await other == "went on"
    lost.__traceback__ = None


# --- waiters of all kinds ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["builtin", "system_exit"])
@pytest.mark.asyncio
async def test_every_waiter_of_a_call(kind):
    """Tasks, threads, groups, dependents and synchronous waits all get the same."""
    error = KINDS[kind]()
    RAISED.append(error)
    future = TaskChannel().run(program_of(coroutine), one())
    dependent = TaskChannel().run(program_of(plain), future)
    errors = [
        await outcome(gather(future)),
        await outcome(dependent),
        await outcome(wait_until_ready([dependent])),
        await outcome(asyncio.wait_for(future, TIMEOUT)),
        await asyncio.to_thread(raised_by, future.result, TIMEOUT),
        await asyncio.to_thread(raised_by, future.block_until_ready),
        await asyncio.to_thread(future.exception, TIMEOUT),
    ]
    for caught in errors:
        assert caught is errors[0]
    check_error(errors[0], error, coroutine)
    errors.clear()
    del future, dependent


@pytest.mark.leak_check  # asyncio's task group is in a cycle with its errors
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.asyncio
async def test_task_group(devices):
    """``except*`` gets the callback's error, also through an awaitable function."""
    x = one() if devices == 1 else spread()
    for target in (program_of(plain), awaitable_of(program_of(plain))):
        RAISED.append(error := Plain("text"))
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.timeout(TIMEOUT), TaskGroup() as group:
                group.start_soon(target, x)
        assert caught.value.exceptions == (error,)
        del caught, group


@pytest.mark.asyncio
async def test_dependents_lead_to_the_original():
    """Whatever was computed from a failed result: by whom, on which device, with or without callback."""
    error = Plain("text")
    RAISED.append(error)
    late = Late()
    y = program_of(plain)(late.array(one()))
    double = jax.jit(lambda x: x * 2)
    dependents = [
        y + 1,
        double(y),
        double(y + 1) * y,
        program_of(coroutine)(y),
        jax.device_put(y, jax.devices("cpu")[1]),
    ]
    late.release()
    for dependent in dependents:
        assert await outcome(wait_until_ready(dependent)) is error
        assert callback_error(raised_by(np.asarray, dependent)) is error
        assert callback_error(raised_by(float, dependent)) is error
    assert await outcome(wait_until_ready([one(), *dependents])) is error
    channel = TaskChannel()
    for body in (double, program_of(plain), lambda x: x, lambda x: x + 1, np.asarray, float):
        assert await outcome(channel.run(body, y)) is error
    assert await outcome(awaitable_of(program_of(plain))(y)) is error
    future = channel.run(lambda x: x, y)
    assert await outcome(channel.run(double, future)) is error
    program_of(plain)(y)
    await effects_barrier()  # somebody has got the error
    assert float(await channel.run(double, one())) == 2
    dependents.clear()
    del y, error, body, dependent, future


# --- called directly --------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_callback_error_finds_it_wherever_it_is():
    """In causes, contexts, groups, and behind texts that quote JAX's error; not where there is none."""
    program = program_of(plain)
    RAISED.append(error := Plain("text"))
    jaxs = raised_by(program, one())

    def wrapped(how):
        try:
            try:
                raise jaxs
            except JaxError as exc:
                if how == "cause":
                    raise RuntimeError("wrapped") from exc
                if how == "hidden context":
                    raise RuntimeError("wrapped") from None
                if how == "text":
                    raise RuntimeError(f"wrapped: {exc}") from None
                raise RuntimeError("wrapped")  # noqa: B904
        except RuntimeError as exc:
            return exc.with_traceback(None)

    for how in ("cause", "context", "hidden context", "text"):
        assert callback_error(wrapped(how)) is error
        group = ExceptionGroup("g", [ValueError(), ExceptionGroup("h", [wrapped(how)])])
        assert callback_error(group) is error
        assert callback_error(BaseExceptionGroup("g", [KeyboardInterrupt(), wrapped(how)])) is error
    assert callback_error(error) is error
    for other in (
        ValueError("text"),
        ExceptionGroup("g", [KeyError()]),
        BrokenText(),
        JaxError("INTERNAL"),
    ):
        assert callback_error(other) is None
    circle = KeyError()
    circle.__cause__ = ValueError()
    circle.__cause__.__cause__ = circle
    assert callback_error(circle) is None
    circle.__cause__.__cause__ = None
    jaxs.__traceback__ = jaxs.__context__ = None


@pytest.mark.asyncio
async def test_text_of_another_process_is_not_confused():
    """The same number in a text from elsewhere leads to nothing, and to nothing wrong."""
    RAISED.append(Plain("text"))
    jaxs = raised_by(program_of(plain), one())
    process = _callback_errors._process
    assert process in str(jaxs)
    foreign = JaxError(str(jaxs).replace(process, process[::-1]))
    assert callback_error(foreign) is None
    caught = await outcome(TaskChannel().run(raise_this, foreign))
    assert caught is foreign
    both = JaxError(f"{foreign} {jaxs}")  # one that was quoted, and then our own
    assert type(callback_error(both)) is Plain
    del jaxs, foreign, both, caught


def raise_this(error):
    try:
        raise error
    finally:
        del error


@pytest.mark.asyncio
async def test_jaxs_own_callbacks_are_left_alone(caplog):
    """JAX's error, and its record in the log."""

    def failing(x):
        raise Plain("text")

    program = jax.jit(lambda x: jax.experimental.io_callback(failing, F32, x))
    caught = await outcome(TaskChannel().run(program, one()))
    assert type(caught) is JaxError
    assert callback_error(caught) is None
    assert [r.name for r in caplog.records] == ["jax._src.callback"]
    caplog.clear()


# --- a callback that calls jitted code --------------------------------------------------------------------


@pytest.mark.parametrize("way", [run_inline, waited_late, barrier_late, direct_inline])
@pytest.mark.asyncio
async def test_failure_in_a_callback_of_a_callback(way):
    """What the inner one raised, or what the outer one made of it."""
    inner = program_of(plain)

    def passing_on(x):
        return np.asarray(inner(x))

    def quoting(x):
        try:
            return np.asarray(inner(x))
        except JaxError as error:
            raise LookupError(f"not found: {error}") from None

    def translating(x):
        try:
            return np.asarray(inner(x))
        except JaxError as error:
            raise LookupError("not found") from callback_error(error)

    for outer in (passing_on, quoting, translating):
        RAISED.append(error := Plain("text"))
        caught = await way(new_program(outer))
        if way is direct_inline:
            assert type(caught) is JaxError
            caught = callback_error(caught)
        assert (caught is error) == (outer is passing_on)
        if outer is not passing_on:
            assert type(caught) is LookupError
            assert callback_error(caught) is caught
            assert (caught.__cause__ is error) == (outer is translating)
        del caught, error


@pytest.mark.asyncio
async def test_body_that_translates_an_error():
    """Its own exception arrives, also if it quotes JAX's; of several, the one that it does not handle."""
    program = program_of(plain)

    def quoting(x):
        try:
            return program(x)
        except JaxError as error:
            raise LookupError(f"not found: {error}") from None

    def handling(x):
        raised_by(program, x)
        return program(x)

    RAISED.append(Plain("first"))
    assert type(await outcome(TaskChannel().run(quoting, one()))) is LookupError
    RAISED.extend([Plain("first"), second := Plain("second")])
    assert await outcome(TaskChannel().run(handling, one())) is second


# --- siblings ---------------------------------------------------------------------------------------------

ENDED: list[str] = []
ARRIVED: list[str] = []


async def stays(x: jax.Array) -> Any:
    """Until it is cancelled."""
    try:
        ARRIVED.append("")
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        ENDED.append("cancelled")
        raise


async def fails_beside(x: jax.Array) -> Any:
    while len(ARRIVED) < 2:
        await asyncio.sleep(0)
    raise_next()


@jax.jit
def siblings(x: jax.Array) -> tuple[jax.Array, ...]:
    return (
        io_callback(fails_beside, F32, x),
        io_callback(stays, F32, x),
        pure_callback(stays, F32, x),
    )


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.asyncio
async def test_siblings_are_cancelled(asynchronous):
    """Of one that failed; nothing of them stays in the library."""
    ENDED.clear()
    ARRIVED.clear()
    RAISED.append(error := Plain("text"))
    if asynchronous:
        late = Late()
        y = siblings(late.array(one()))
        late.release()
        assert await outcome(wait_until_ready(y)) is error
        del y
    else:
        assert await outcome(TaskChannel().run(siblings, one())) is error
    async with asyncio.timeout(TIMEOUT):
        await effects_barrier()
    assert ENDED == ["cancelled", "cancelled"]
    assert _callback_runs._tickets == {}
    assert _callback_runs._running == set()
    assert unfinished_callbacks() == []


def unfinished_callbacks() -> list[asyncio.Task[Any]]:
    from aiocolocated._hostloop import host_loop

    tasks = asyncio.all_tasks(host_loop().loop)
    return [task for task in tasks if "callback" in task.get_name()]


@pytest.mark.parametrize("way", [run_inline, waited_late])
@pytest.mark.asyncio
async def test_sibling_that_ended_is_let_go(way):
    """A result that nobody collects is not kept."""
    results: list[Any] = []

    async def ends(x):
        result = np.zeros(1000)
        results.append(weakref.ref(result))
        ARRIVED.append("")
        return {"result": result}

    spec = {"result": jax.ShapeDtypeStruct((1000,), np.float32)}
    program = jax.jit(
        lambda x: (io_callback(fails_beside, F32, x), io_callback(ends, spec, x)["result"][0])
    )
    ARRIVED[:] = [""]
    RAISED.append(error := Plain("text"))
    assert await way(program) is error
    await effects_barrier()
    assert [ref() for ref in results] == [None]


@pytest.mark.asyncio
async def test_what_a_program_has_started_is_cancelled():
    """If it fails inline, by whatever; and the ticket for it is taken back."""
    ENDED.clear()
    ARRIVED.clear()

    def start_and_fail(x):
        # What JAX does for an overlapping callback of a coroutine, before another one fails.
        run = _callback_runs.CoroutineRun(
            "callback", functools.partial(stays, x), contextvars.Context(), None
        )
        _callback_runs.ticket_for(run)
        _programs.here.dispatch.runs.append(run)
        run.begin()
        while not ARRIVED:
            time.sleep(0.0001)
        return plain(x)

    RAISED.append(error := Plain("text"))
    assert await run_inline(new_program(start_and_fail)) is error
    assert _callback_runs._tickets == {}
    await effects_barrier()
    assert ENDED == ["cancelled"]


@pytest.mark.asyncio
async def test_cancelled_by_the_library_is_told_from_its_own():
    """A coroutine that raises CancelledError by itself is nobody's cancellation."""

    async def cancels_itself(x):
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    caught = await run_inline(new_program(cancels_itself))
    assert type(caught) is BodyError
    assert type(caught.__cause__) is asyncio.CancelledError


# --- ordered effects --------------------------------------------------------------------------------------

pytest_ordered_devices = pytest.mark.skipif(
    JAX < (0, 10, 1), reason="JAX compiles no ordered callback for several devices"
)


def fail_ordered_asynchronously(devices: int) -> BaseException:
    """On this thread; JAX keeps a token of the failure for its next ordered callback.

    With one device only on a loop's thread: elsewhere, programs run inline.
    """
    RAISED.append(error := Plain("text"))
    program = program_of(plain, ordered=True)
    y = late_result(program) if devices == 1 else program(spread())
    assert callback_error(raised_by(jax.block_until_ready, y)) is error
    return error


def check_ordered_effects() -> None:
    """Those of this thread take place: the library's, and JAX's own."""
    seen: list[float] = []
    program = program_of(plain, ordered=True)

    def see(x: jax.Array) -> Any:
        seen.append(float(x))
        return np.asarray(x)

    jaxs = jax.jit(lambda x: jax.experimental.io_callback(see, F32, x, ordered=True))
    assert float(program(one())) == 1
    assert float(jaxs(one())) == 1
    assert float(program(one())) == 1
    assert float(jaxs(one() * 2)) == 2
    assert seen == [1, 2]


DEVICES = [1, pytest.param(2, marks=pytest_ordered_devices)]


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.asyncio
async def test_ordered_effects_of_the_loops_thread_go_on(devices):
    fail_ordered_asynchronously(devices)
    check_ordered_effects()
    fail_ordered_asynchronously(devices)
    fail_ordered_asynchronously(devices)
    late = Late()
    y = program_of(coroutine, ordered=True)(late.array(one()))  # and asynchronously
    late.release()
    assert float(await wait_until_ready(y)) == 1
    check_ordered_effects()
    assert _programs._failed == []


@pytest.mark.parametrize("devices", DEVICES[1:])
def test_ordered_effects_of_another_thread_go_on(devices):
    """One without a loop; one of the library's pool, whichever channel uses it next."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            fail_ordered_asynchronously(devices)
            check_ordered_effects()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(TIMEOUT)
    assert errors == []
    threads = set()

    def body() -> None:
        threads.add(threading.get_ident())
        fail_ordered_asynchronously(devices)
        check_ordered_effects()
        fail_ordered_asynchronously(devices)

    for _ in range(3):
        TaskChannel().run(body).result(TIMEOUT)
    assert len(threads) < 3


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.asyncio
async def test_ordered_failure_is_raised_once(devices):
    """The token that JAX keeps is not another error."""
    program = program_of(plain, ordered=True)
    for _ in range(2):
        RAISED.append(error := Plain("text"))
        if devices == 1:
            late_result(program)
        else:
            program(spread())
        assert await outcome(effects_barrier()) is error
        await effects_barrier()
        assert float(program(one())) == 1
        await effects_barrier()
        del error


# --- the barrier ------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_barrier_raises_what_nobody_has_got():
    """Each error once; also that of a program after which another one succeeded, or without results."""
    program = program_of(plain)
    silent = program_without_results(plain)
    RAISED.append(first := Plain("first"))
    late_result(program)
    late_result(program)
    caught = await outcome(effects_barrier())
    assert caught is first
    await effects_barrier()
    RAISED.extend([second := Plain("second"), third := OSError("third"), Plain("got")])
    late_result(program)
    late_result(silent)
    got = late_result(program)
    await outcome(wait_until_ready(got))
    caught = await outcome(effects_barrier())
    assert type(caught) is ExceptionGroup
    assert set(caught.exceptions) == {second, third}
    await effects_barrier()
    RAISED.append(KeyboardInterrupt("k"))
    late_result(silent)
    caught = await outcome(effects_barrier())
    assert type(caught) is BodyError
    await effects_barrier()
    del got, caught


@pytest.mark.asyncio
async def test_barrier_leaves_errors_of_calls_to_their_waiters():
    """Also of calls that were submitted, or whose errors nobody has looked at, while it waited."""
    RAISED.extend([first := Plain("first"), second := Plain("second")])
    channel = TaskChannel()
    future = channel.run(program_of(plain), spread())
    await effects_barrier()
    barrier = asyncio.create_task(effects_barrier())
    later = channel.run(program_of(plain), spread())
    await barrier
    assert await outcome(future) is first
    assert await outcome(later) is second
    await effects_barrier()
    del future, later


@pytest.mark.asyncio
async def test_barrier_leaves_an_error_to_a_call_that_is_to_get_it():
    """One of a later call, that has failed while the barrier waited, and has not been told so."""
    go, fail = Gate(), Gate()
    stopped, stop = Gate(), Gate()

    def stop_telling() -> None:
        stopped.open()
        stop.wait()

    def failing(x):
        fail.wait()
        return plain(x)

    earlier = TaskChannel().run(go.wait)
    barrier = asyncio.create_task(effects_barrier())
    await asyncio.sleep(0)  # it has begun
    RAISED.append(error := Plain("text"))
    later = TaskChannel().run(new_program(failing), spread())
    try:
        async with asyncio.timeout(TIMEOUT):
            while not any(call is later for call in _execution.computing):
                await asyncio.sleep(0.001)
            _service.post(stop_telling)
            await stopped.wait_async()
            fail.open()
            while not _callback_errors.has_lost():
                await asyncio.sleep(0.001)
            go.open()
            await earlier
            for _ in range(20):  # the barrier comes to its end
                await asyncio.sleep(0.001)
            assert _callback_errors.has_lost()
    finally:
        stop.open()
    await barrier
    assert await outcome(later) is error
    del earlier, later


@pytest.mark.parametrize("function", [plain, coroutine])
@pytest.mark.asyncio
async def test_call_without_results_gets_the_error(function):
    """Over several devices, no array tells of it."""
    program = program_without_results(function)
    RAISED.append(error := Plain("text"))
    check_error(await run_devices(program), error, function)
    RAISED.append(error := Plain("text"))
    check_error(await awaitable_inline(program), error, function)
    RAISED.append(error := Plain("text"))
    assert await outcome(call_without_results(spread(), function)) is error
    await effects_barrier()
    assert await TaskChannel().run(program, spread()) is None
    assert await call_without_results(spread(), function) is None


@colocated_python
async def call_without_results(x: jax.Array, function: Any) -> None:
    program_without_results(function)(x)


@functools.cache
def program_without_results(function: Callable[..., Any]) -> Any:
    return jax.jit(lambda x: debug_callback(function, x))


# --- memory -----------------------------------------------------------------------------------------------

SIZE = 20_000_000  # 80 MB


@functools.cache
def program_of_much(function: Callable[..., Any]) -> Any:
    return jax.jit(lambda x: io_callback(function, F32, x))


GIVEN: list[weakref.ref[Any]] = []


def plain_of_much(x: jax.Array) -> Any:
    GIVEN.append(weakref.ref(x))
    raise_from(x)


async def coroutine_of_much(x: jax.Array) -> Any:
    GIVEN.append(weakref.ref(x))
    raise_from(x)


def raise_from(x: jax.Array) -> None:
    try:
        raise KeyError("first")
    except KeyError:
        raise Plain("text")  # noqa: B904


@pytest.mark.parametrize("function", [plain_of_much, coroutine_of_much])
@pytest.mark.parametrize("way", ["run", "body", "awaitable", "wait", "barrier", "direct"])
@pytest.mark.asyncio
async def test_arguments_are_freed(way, function):
    """80 MB that a failing callback got, and its caller has, without a collection of garbage."""
    program = program_of_much(function)
    GIVEN.clear()

    async def fail() -> None:
        x = jnp.zeros(SIZE, jnp.float32)
        GIVEN.append(weakref.ref(x))
        try:
            if way == "run":
                await TaskChannel().run(program, x)
            elif way == "body":
                await TaskChannel().run(lambda: program(x))
            elif way == "awaitable":
                await awaitable_of(program)(x)
            elif way == "direct":
                program(x)
            else:
                late = Late()
                y = program(late.array(x))
                late.release()
                await (wait_until_ready(y) if way == "wait" else effects_barrier())
        except (Plain, JaxError) as error:
            found.append(type(callback_error(error)))

    found: list[Any] = []
    gc.disable()
    try:
        await fail()
        async with asyncio.timeout(TIMEOUT):
            while any(ref() is not None for ref in GIVEN):
                await asyncio.sleep(0.005)
    finally:
        gc.enable()
    assert found == [Plain]
    assert len(GIVEN) == 2
    assert len(_callback_errors._errors) == 1


@pytest.mark.asyncio
async def test_kept_errors_are_bounded(caplog):
    """The oldest go; then JAX's own error arrives. One that nobody had got is logged first."""
    RAISED.append(Plain("the oldest"))
    y = late_result(program_of(plain))
    error = raised_by(jax.block_until_ready, y)
    limit = _callback_errors._KEPT
    for _ in range(limit + 5):
        _callback_errors.keep(Plain("another"), "io_callback of another", inline=True)
    assert len(_callback_errors._errors) == limit
    assert callback_error(error) is None
    assert type(await outcome(wait_until_ready(y))) is JaxError
    (record,) = caplog.records
    assert "io_callback of plain" in record.getMessage()
    assert str(record.exc_info[1]) == "the oldest"
    await effects_barrier()
    caplog.clear()
    del y, error, record


# --- what is logged ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.asyncio
async def test_delivered_error_is_not_logged(way, caplog, capfd):
    """Neither by JAX nor by us, nor written to stderr."""
    for kind in ("io", "pure", "debug"):
        for function in (plain, coroutine):
            RAISED.append(Plain("text"))
            assert callback_error(await way(program_of(function, kind))) is not None
    _callback_errors.log_lost()
    assert [r for r in caplog.records if r.name != "asyncio"] == []
    assert "Plain" not in capfd.readouterr().err


@pytest.mark.asyncio
async def test_error_that_nobody_asks_for_is_logged_once(caplog, monkeypatch):
    """After some seconds; whoever asks later still gets it."""
    monkeypatch.setattr(_callback_errors, "_PATIENCE", 0.05)
    RAISED.append(error := Plain("text"))
    y = late_result(program_of(plain))
    async with asyncio.timeout(TIMEOUT):
        while not caplog.records:
            await asyncio.sleep(0.005)
    _callback_errors.log_lost()
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("aiocolocated", "ERROR")
    assert "io_callback of plain failed, and nobody has asked for its error" in caplog.text
    assert "raise_next" in caplog.text
    assert record.exc_info[1] is error
    assert await outcome(effects_barrier()) is error
    assert await outcome(wait_until_ready(y)) is error
    caplog.clear()
    del y, record


def test_exit_is_quiet_about_errors_that_were_handled(run_script):
    """The same script shows, once, the error that nobody asked for."""
    script = """
        import asyncio, sys
        import jax, jax.numpy as jnp
        from late_arrays import Late
        from aiocolocated import (
            TaskChannel, callback_error, effects_barrier, io_callback, wait_until_ready
        )

        class Lost(Exception):
            pass

        def fail(x):
            raise Lost("text")

        f32 = jax.ShapeDtypeStruct((), jnp.float32)
        program = jax.jit(lambda x: io_callback(fail, f32, x, ordered=True))

        def later():
            late = Late()
            y = program(late.array(jnp.float32(1)))
            late.release()
            return y

        async def main():
            try:
                program(jnp.float32(1))
            except jax.errors.JaxRuntimeError as error:
                assert isinstance(callback_error(error), Lost)
            try:
                await TaskChannel().run(program, jnp.float32(1))
            except Lost:
                pass
            try:
                await wait_until_ready(later())
            except Lost:
                pass
            later()
            try:
                await effects_barrier()
            except Lost:
                pass
            print("handled", flush=True)
            if sys.argv[0].endswith("script_1.py"):
                later()

        asyncio.run(main())
    """
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    quiet = run_script(script, PYTHONPATH=path).check()
    assert quiet.stdout == "handled\n"
    assert quiet.stderr == ""
    told = run_script(script, PYTHONPATH=path).check()
    assert told.stderr.count("io_callback of fail failed, and nobody has asked for its error") == 1
    assert told.stderr.count("Lost: text") == 1
    assert "Exception ignored" not in told.stderr
    assert "jax.io_callback failed" not in told.stderr


# --- many at once -----------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_errors_of_threads_are_not_mixed_up():
    """Each call gets the error of its own callback."""
    parties = 8
    together = Rendezvous(parties)

    def failing(x):
        number = int(x)
        together.wait()
        raise LookupError(number)

    program = jax.jit(lambda x: io_callback(failing, F32, x))
    compiled = program.lower(one()).compile()
    assert compiled is not None
    futures = [TaskChannel().run(program, jnp.float32(i)) for i in range(parties)]
    for number, future in enumerate(futures):
        caught = await outcome(future)
        assert type(caught) is LookupError
        assert caught.args == (number,)
    del future, caught
    futures.clear()


@pytest.mark.asyncio
async def test_shard_map_raises_one_of_its_errors():
    """Each device calls back; the one whose error XLA took is raised, the others by the barrier."""
    mesh = _halves().mesh

    def failing(x):
        raise LookupError(int(x[0]))

    program = jax.jit(
        jax.shard_map(
            lambda x: io_callback(failing, _spec_of(x), x),
            mesh=mesh,
            in_specs=P("x"),
            out_specs=P("x"),
        )
    )
    x = jax.device_put(np.arange(2, dtype=np.float32), _halves())
    caught = await outcome(TaskChannel().run(program, x))
    assert type(caught) is LookupError
    assert caught.args in ((0,), (1,))
    other = await outcome(effects_barrier())
    assert other.args == (1 - caught.args[0],)
    del caught, other


# --- JAX's private parts that this rests on ---------------------------------------------------------------


def test_traceback_without_frames():
    """The same lines, in frames that have no variables and no callers."""

    def deep(n):
        if n:
            deep(n - 1)
        raise_this(ValueError(n))

    error = raised_by(deep, 2)
    bare = _compat.without_frames(error.__traceback__)
    assert traceback.extract_tb(bare) == traceback.extract_tb(error.__traceback__)
    while bare is not None:
        assert bare.tb_frame.f_back is None
        assert bare.tb_frame.f_locals == {}
        bare = bare.tb_next
    del error


def test_loggers_of_jax():
    """Records of errors of JAX's own callbacks are wanted, those of the library's are not."""
    for name in ("jax._src.callback", "jax._src.debugging"):
        logger = logging.getLogger(name)
        for error, wanted in ((Plain("text"), True), (_callback_errors.CallbackFailed(), False)):
            info = (type(error), error, None)
            record = logger.makeRecord(name, logging.ERROR, "file", 1, "failed", (), info)
            assert bool(logger.filter(record)) == wanted


@pytest.mark.asyncio
async def test_tokens_of_handled_failures_are_dropped():
    """Those that JAX would raise at exit, of this thread; other failures it does raise."""
    from jax._src.dispatch import runtime_tokens

    runtime_tokens.clear()  # of other tests
    fail_ordered_asynchronously(1)
    assert runtime_tokens.current_tokens
    _compat.drop_failed_tokens_if(lambda error: False)
    assert type(raised_by(jax.effects_barrier)) in (JaxError, ExceptionGroup)
    fail_ordered_asynchronously(1)
    _compat.drop_failed_tokens_if(_callback_errors.is_callbacks)
    jax.effects_barrier()
    runtime_tokens.clear()
