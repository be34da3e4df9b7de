# SPDX-License-Identifier: Apache-2.0
"""Errors (contract C7): every exception arrives, as itself or inside a documented library error."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import inspect
import logging
import pickle
import sys
import threading
import time
import traceback
import weakref

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import pytest_asyncio

import aiocolocated
from aiocolocated import (
    AiocolocatedError,
    ArgumentError,
    BodyError,
    CallCancelledError,
    ChannelStoppedError,
    RemoteError,
    SpecError,
    TaskChannel,
    TaskGroup,
    WouldBlock,
    _exceptions,
    as_completed,
    colocated_python,
    gather,
    jax_scope,
    open_task_channel,
    wait_until_ready,
)
from aiocolocated.testing import Gate

TIMEOUT = 20.0  # seconds; only a bug takes that long


# --- bodies: of an importable module, so shipped by reference ---------------------------------------


@colocated_python
def fail(x, error):
    """Raise a ready-made exception, which this frame must not hold: its traceback holds the frame."""
    try:
        raise error
    finally:
        del error


@colocated_python
def fail_without_input(x, error):
    del x
    try:
        raise error
    finally:
        del error


@colocated_python
def ok(x):
    return x + 1


@colocated_python
def wait_then_fail(x, gate, error):
    gate.wait()
    try:
        raise error
    finally:
        del error


def line() -> int:
    """The caller's line."""
    return inspect.currentframe().f_back.f_lineno


def numbers() -> jax.Array:
    return jnp.arange(3.0)


async def outcome(future) -> BaseException:
    """The error of a call, awaited with a limit."""
    async with asyncio.timeout(TIMEOUT):
        try:
            await future
        except BaseException as error:
            return error
        finally:
            del future  # the error's traceback holds this frame, and the future holds the error
    raise AssertionError("the call did not fail")


async def works_again() -> None:
    """The next call of this task's channel runs."""
    async with asyncio.timeout(TIMEOUT):
        np.testing.assert_array_equal(np.asarray(await ok(numbers())), [1, 2, 3])


# --- exceptions that arrive as themselves -----------------------------------------------------------


class Plain(Exception):
    pass


class Slotted(Exception):
    __slots__ = ("code",)

    def __init__(self, code):
        super().__init__(code)
        self.code = code


class OddConstructor(Exception):
    def __init__(self, a, *, b):
        super().__init__()
        self.values = a, b


class BrokenText(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class BrokenRepr(Exception):
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


class FixedNotes(Exception):
    @property
    def __notes__(self):
        return ("fixed",)


class BrokenNotes(Exception):
    @property
    def __notes__(self):
        raise RuntimeError("no notes")

    def add_note(self, note):
        raise RuntimeError("no notes")


class ExitingNotes(Exception):
    def add_note(self, note):
        raise SystemExit(3)


class ForeignNotes(Exception):
    """Notes that are no strings."""

    def __init__(self):
        super().__init__()
        self.__notes__ = [1, None]


class FixedTraceback(Exception):
    @property
    def __traceback__(self):
        return None

    def with_traceback(self, tb):
        raise RuntimeError("no traceback")


class NeverEqual(Exception):
    def __eq__(self, other):
        raise RuntimeError("not comparable")

    __hash__ = None


@dataclasses.dataclass
class Record(Exception):
    """Equal to others of the same code, and unhashable."""

    code: int


class Alien(BaseException):
    """No Exception, and of no kind anybody knows."""


class BrokenAlien(BaseException):
    def __str__(self):
        raise SystemExit("no text")

    __repr__ = __str__


class Ended(StopIteration):
    pass


# Made anew for every test: a kept exception keeps the arrays of the frames it went through.
ORDINARY = [
    lambda: Plain("text", 1),
    lambda: KeyError("key"),
    lambda: AttributeError("attribute"),
    lambda: OSError(2, "No such file", "name"),
    lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    lambda: TimeoutError("the body's own"),
    lambda: RecursionError(),
    lambda: MemoryError(),
    lambda: AssertionError(),
    lambda: ImportError("no", name="n", path="p"),
    lambda: ExceptionGroup("group", [KeyError(1), StopIteration(2)]),
    lambda: Slotted(7),
    lambda: OddConstructor(1, b=2),
    lambda: BrokenText("t"),
    lambda: BrokenRepr("t"),
    lambda: FixedNotes(),
    lambda: BrokenNotes(),
    lambda: ExitingNotes(),
    lambda: ForeignNotes(),
    lambda: FixedTraceback(),
    lambda: NeverEqual(),
    lambda: Record(1),
    lambda: WouldBlock("the body's own"),
    lambda: CallCancelledError("the body's own"),
]

WRAPPED = [
    lambda: StopIteration(5),
    lambda: StopAsyncIteration(5),
    lambda: GeneratorExit("g"),
    lambda: KeyboardInterrupt("k"),
    lambda: SystemExit(3),
    lambda: asyncio.CancelledError("c"),
    lambda: BaseExceptionGroup("group", [KeyboardInterrupt(), ValueError()]),
    lambda: Alien("a"),
    lambda: BrokenAlien("b"),
    lambda: Ended(1),
]


def name_of(make) -> str:
    """An id for what makes an error."""
    return type(make()).__name__


@pytest.mark.parametrize("make", ORDINARY, ids=name_of)
@pytest.mark.asyncio
async def test_ordinary_exception_arrives_as_itself(make):
    """The very object arrives, arguments untouched, and the next call of the channel works."""
    error = make()
    args = error.args
    caught = await outcome(fail(numbers(), error))
    assert caught is error
    assert caught.args == args
    await works_again()


@pytest.mark.parametrize("make", WRAPPED, ids=name_of)
@pytest.mark.asyncio
async def test_dangerous_exception_arrives_inside_body_error(make):
    """What would break its waiter arrives as the cause of a BodyError that names it."""
    error = make()
    caught = await outcome(fail(numbers(), error))
    assert type(caught) is BodyError
    assert caught.__cause__ is error
    assert "fail" in str(caught)
    assert type(error).__name__ in str(caught)
    frames = traceback.extract_tb(error.__traceback__)
    assert [frame.name for frame in frames] == ["fail"]
    await works_again()


@pytest.mark.parametrize("make", WRAPPED, ids=name_of)
@pytest.mark.asyncio
async def test_dangerous_exception_reaches_every_kind_of_waiter(make):
    """Every way to wait gets the BodyError, and none hangs."""
    error = make()
    start = Gate()
    future = wait_then_fail(numbers(), start, error)
    dependent = ok(future)

    async def collect():
        return [f.exception() async for f in as_completed([future])]

    waiting = [
        asyncio.ensure_future(waiter)
        for waiter in (
            outcome(future),
            outcome(future.wait_dispatched()),
            outcome(asyncio.wait_for(future, TIMEOUT)),
            outcome(gather(future)),
            outcome(wait_until_ready([future])),
            outcome(dependent),
            asyncio.to_thread(future.exception, TIMEOUT),
            collect(),
        )
    ]
    async with asyncio.timeout(TIMEOUT):
        while len(future._waiters or ()) < 6:  # every waiter but the dispatched one has arrived
            await asyncio.sleep(0)
        start.open()
        *errors, collected = await asyncio.gather(*waiting)
    assert all(e is future.exception() for e in [*errors, *collected])
    assert type(future.exception()) is BodyError


@pytest.mark.asyncio
async def test_cancelled_error_of_body_does_not_cancel_the_task():
    """A body's own CancelledError fails a task group instead of vanishing in it."""
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(TIMEOUT), TaskGroup() as group:
            group.start_soon(fail, numbers(), asyncio.CancelledError())
    (error,) = caught.value.exceptions
    assert isinstance(error, BodyError)
    assert isinstance(error.__cause__, asyncio.CancelledError)
    await works_again()


@pytest.mark.asyncio
async def test_reraised_library_error_of_body_stays_itself():
    """An error of a nested call passes through the outer call as the same object, noted once."""
    error = Plain("inner")
    caught = await outcome(call_inside(numbers(), error))
    assert caught is error
    assert len(caught.__notes__) == 1
    assert "colocated call fail " in caught.__notes__[0]
    frames = [frame.name for frame in traceback.extract_tb(caught.__traceback__)]
    assert frames[-1] == "fail"
    assert "call_inside" in frames


@colocated_python
def call_inside(x, error):
    return fail(x, error).result(TIMEOUT)


# --- notes ------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_note_names_function_host_channel_and_line():
    """One note says what ran where, and which line submitted it."""
    async with open_task_channel("notes"):
        future, here = fail(numbers(), Plain()), line()
        caught = await outcome(future)
    (note,) = caught.__notes__
    assert note == (
        f"colocated call fail on host in-process, channel 'notes', submitted at {__file__}:{here}"
    )


@pytest.mark.asyncio
async def test_note_names_submitting_line_for_every_way_to_submit():
    """The line is that of the submitting expression, whatever submitted it."""
    x = numbers()
    futures = []
    async with open_task_channel() as channel:
        futures.append((fail(x, Plain()), line()))
        futures.append((channel.submit_nowait(fail, x, Plain()), line()))
        futures.append((await channel.submit(fail, x, Plain()), line()))
        futures.append((channel.run(fail._base.function, x, Plain()), line()))
        futures.append((fail.specialize(devices=x.device)(x, Plain()), line()))
        for future, here in futures:
            (note,) = (await outcome(future)).__notes__
            assert note.endswith(f"{__file__}:{here}"), note
    with pytest.raises(ExceptionGroup) as caught:
        async with TaskGroup() as group:
            _, here = group.start_soon(fail, x, Plain()), line()
    (error,) = caught.value.exceptions
    assert error.__notes__[0].endswith(f"{__file__}:{here}")
    with pytest.raises(Plain) as mapped:
        await fail.map([x], [Plain()])
    here = mapped.value.__traceback__.tb_lineno
    assert mapped.value.__notes__[0].endswith(f"{__file__}:{here}")


@pytest.mark.asyncio
async def test_notes_are_attached_once_per_exception_object():
    """Many awaits, dependents and calls that raise the same object add no further notes."""
    error = Plain()
    future = fail(numbers(), error)
    dependent = ok(future)
    for _ in range(3):
        assert await outcome(future) is error
        assert await outcome(dependent) is error
    assert await outcome(fail(numbers(), error)) is error
    assert len(error.__notes__) == 1


@pytest.mark.asyncio
async def test_notes_of_the_body_are_kept():
    """The library's note comes after those that the body attached."""
    error = Plain()
    error.add_note("from the body")
    caught = await outcome(fail(numbers(), error))
    assert caught.__notes__[0] == "from the body"
    assert len(caught.__notes__) == 2


@pytest.mark.asyncio
async def test_library_errors_after_the_body_carry_the_note():
    """A result that is refused names the submitting line too."""
    future, here = return_future(numbers()), line()
    caught = await outcome(future)
    assert isinstance(caught, ArgumentError)
    assert caught.__notes__[0].endswith(f"{__file__}:{here}")


@colocated_python
def return_future(x):
    return ok(x)


# --- tracebacks -------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_traceback_starts_in_the_body():
    """No library frame is between the caller of exception() and the body."""
    future = deep(numbers())
    async with asyncio.timeout(TIMEOUT):
        error = await asyncio.to_thread(future.exception)
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert frames == ["deep", "deeper"]


@pytest.mark.asyncio
async def test_traceback_starts_in_the_body_under_a_captured_configuration():
    """Neither does the code that puts contexts in force appear."""
    with jax_scope(named_scope="scope", debug_nans=True), jax.default_matmul_precision("float32"):
        future = deep(numbers())
    async with asyncio.timeout(TIMEOUT):
        error = await asyncio.to_thread(future.exception)
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert frames == ["deep", "deeper"]


@colocated_python
def deep(x):
    return deeper(x)


def deeper(x):
    raise Plain("deep")


async def traceback_length(future) -> int:
    return len(traceback.extract_tb((await outcome(future)).__traceback__))


@pytest.mark.parametrize("make", [Plain, KeyboardInterrupt], ids=name_of)
@pytest.mark.asyncio
async def test_five_awaits_show_the_same_traceback_length(make):
    """A future that is awaited again and again does not grow its traceback."""
    future = fail(numbers(), make())
    lengths = [await traceback_length(future) for _ in range(5)]
    tasks = await asyncio.gather(*(traceback_length(future) for _ in range(5)))
    assert len({*lengths, *tasks}) == 1
    threads = set()
    for _ in range(5):
        with pytest.raises(type(future.exception())) as caught:
            future.result()
        threads.add(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(threads) == 1


@pytest.mark.asyncio
async def test_dependent_shows_the_traceback_of_the_body_that_failed():
    """The error of a dependency keeps its origin."""
    caught = await outcome(ok(deep(numbers())))
    assert [f.name for f in traceback.extract_tb(caught.__traceback__)][-2:] == ["deep", "deeper"]


@pytest.mark.parametrize("scope", [False, True], ids=["plain", "configured"])
@pytest.mark.asyncio
async def test_library_frames_hold_no_inputs(scope):
    """A kept error keeps only what the body's own frames hold, and no garbage collection is needed."""
    gc.collect()
    gc.disable()
    try:
        x = numbers()
        reference = weakref.ref(x)
        if scope:
            with jax_scope(debug_nans=True):
                future = fail_without_input(x, Plain())
        else:
            future = fail_without_input(x, Plain())
        del x
        caught = await outcome(future)
        assert isinstance(caught, Plain)
        async with asyncio.timeout(TIMEOUT):
            while reference() is not None:  # the worker may still be on its way out of the call
                await asyncio.sleep(0.001)
    finally:
        gc.enable()


@pytest.mark.asyncio
async def test_library_errors_hold_no_inputs(reports):
    """Errors that the library raises on the worker do not keep the arguments either."""
    x, y = numbers(), jnp.ones((5,))
    spec = jax.ShapeDtypeStruct((3,), x.dtype, sharding=x.sharding)
    checked = two.specialize(in_specs=((spec, spec), {}))
    reference = weakref.ref(y)
    first = ok(x)
    gc.collect()
    gc.disable()
    try:
        future = checked(first, y)
        del y
        caught = await outcome(future)
        assert isinstance(caught, SpecError)
        async with asyncio.timeout(TIMEOUT):
            while reference() is not None:
                await asyncio.sleep(0.001)
    finally:
        gc.enable()


@colocated_python
def two(x, y):
    return x


# --- errors that nobody retrieves -------------------------------------------------------------------


class Reports:
    """A loop's exception handler, or a logging handler, that can be waited for."""

    def __init__(self):
        self.contexts = []
        self.changed = threading.Condition()

    def add(self, message, error):
        with self.changed:
            self.contexts.append((message, error))
            self.changed.notify_all()

    def on_loop(self, loop, context):
        self.add(context["message"], context["exception"])

    def count(self, error):
        return sum(found is error for _, found in self.contexts)

    def wait_for(self, error):
        with self.changed:
            assert self.changed.wait_for(lambda: self.count(error), TIMEOUT), self.contexts


@pytest_asyncio.fixture
async def reports():
    """What this test's loop is told by its exception handler."""
    reports = Reports()
    asyncio.get_running_loop().set_exception_handler(reports.on_loop)
    yield reports
    asyncio.get_running_loop().set_exception_handler(None)
    reports.contexts.clear()


@pytest.fixture
def logged():
    """What the library's logger reports."""
    reports = Reports()

    def take(record):
        text, error = record.getMessage(), record.exc_info[1] if record.exc_info else None
        # pytest keeps records, those hold tracebacks, and those hold arrays.
        record.msg, record.args, record.exc_info = text, None, None
        reports.add(text, error)
        return True

    loggers = [logging.getLogger(name) for name in ("aiocolocated", "jax._src.callback")]
    for logger in loggers:
        logger.addFilter(take)
    yield reports
    for logger in loggers:
        logger.removeFilter(take)
    reports.contexts.clear()


async def fence(reports: Reports) -> None:
    """Wait for the report of one more error: those of earlier ones have come by then."""
    last = Plain("fence")
    drop_failed(last)
    await asyncio.to_thread(reports.wait_for, last)


def drop_failed(error):
    """A failing call that nobody keeps."""
    fail(numbers(), error)


@pytest.mark.asyncio
async def test_unretrieved_error_is_reported_once_through_the_loop(logged, reports):
    """The loop's exception handler hears of it exactly once, the logger never."""
    error = Plain()
    drop_failed(error)
    await asyncio.to_thread(reports.wait_for, error)
    await fence(reports)
    assert reports.count(error) == 1
    message = next(text for text, found in reports.contexts if found is error)
    assert "never retrieved" in message
    assert "fail" in message
    assert f"{__file__}:" in message
    assert not logged.contexts


@pytest.mark.parametrize(
    "make", [BrokenRepr, FixedTraceback, NeverEqual, BrokenAlien, BrokenNotes], ids=name_of
)
@pytest.mark.asyncio
async def test_unretrieved_awkward_error_is_reported(make, reports):
    """The report needs neither text nor notes of the exception."""
    error = make()
    drop_failed(error)
    await fence(reports)
    assert len(reports.contexts) == 2


@pytest.mark.parametrize(
    "retrieve",
    [
        lambda fut: outcome(fut),
        lambda fut: outcome(fut.wait_dispatched()),
        lambda fut: asyncio.to_thread(fut.exception),
        lambda fut: outcome(asyncio.to_thread(fut.result)),
        lambda fut: gather(fut, return_exceptions=True),
        lambda fut: outcome(gather(fut)),
        lambda fut: outcome(ok(fut)),
        lambda fut: asyncio.to_thread(_block, fut),
    ],
    ids=[
        "await",
        "wait_dispatched",
        "exception",
        "result",
        "gather",
        "gather_raises",
        "dependent",
        "block_until_ready",
    ],
)
@pytest.mark.asyncio
async def test_retrieved_error_is_not_reported(retrieve, reports):
    """Whoever has looked at the error has retrieved it."""
    error = Plain()
    future = fail(numbers(), error)
    async with asyncio.timeout(TIMEOUT):
        await retrieve(future)
    del future
    await fence(reports)
    assert reports.count(error) == 0


@pytest.mark.no_blocking(False)
@pytest.mark.asyncio
async def test_error_that_meets_a_cancellation_is_not_reported(reports):
    """A task waited for it, and a timeout was as quick: asyncio counts such an error as retrieved."""
    error = Plain()
    future = fail(numbers(), error)
    task = asyncio.create_task(outcome(future))
    while not future._waiters and not future.done():
        await asyncio.sleep(0)
    while not future.done():
        time.sleep(0.001)  # the loop does not hear of it yet
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    del future, task
    await fence(reports)
    assert reports.count(error) == 0


def _block(future):
    with pytest.raises(Plain):
        future.block_until_ready()


@pytest.mark.asyncio
async def test_gather_retrieves_every_error(reports):
    """gather raises the first error; the others that fail, at once or later, count as retrieved."""
    gate = Gate()
    first, second, late = Plain(1), Plain(2), Plain(3)
    other = TaskChannel("other")
    waiting = other.submit_nowait(wait_then_fail, numbers(), gate, late)
    async with asyncio.timeout(TIMEOUT):
        failed = fail(numbers(), second)
        await outcome(gather(failed, return_exceptions=False))
        error = await outcome(gather(waiting, fail(numbers(), first), failed))
        assert error is first or error is second
        gate.open()
        await other.aclose()
    del waiting, failed
    await fence(reports)
    assert [e for _, e in reports.contexts if e in (first, second, late)] == []


@pytest.mark.asyncio
async def test_error_of_dependents_is_reported_once(reports):
    """Two dependents that share one error make one report, not two."""
    error = Plain()

    def submit():
        future = fail(numbers(), error)
        ok(future)
        ok(future)

    submit()
    await fence(reports)
    assert reports.count(error) == 1


@pytest.mark.asyncio
async def test_cancelled_call_is_not_reported(reports):
    """A cancellation is no error that somebody must look at."""
    gate = Gate()

    def submit():
        wait_then_fail(numbers(), gate, Plain("abandoned")).cancel()
        ok(numbers()).cancel()

    submit()
    gate.open()
    await fence(reports)
    assert len(reports.contexts) == 1


def test_unretrieved_error_without_a_loop_is_logged_once(logged):
    """Where there is no loop the aiocolocated logger reports it, at level ERROR, exactly once."""
    error, last = Plain(), Plain("fence")
    drop_failed(error)
    logged.wait_for(error)
    drop_failed(last)
    logged.wait_for(last)
    assert logged.count(error) == 1


def test_unretrieved_error_of_a_closed_loop_is_logged_once(logged):
    """A report that comes when its loop has ended goes to the logger."""
    kept = []
    error, last = Plain(), Plain("fence")

    async def main():
        kept.append(fail(numbers(), error))
        await outcome(kept[0].wait_dispatched())

    async def unretrieved():
        kept[:] = [fail(numbers(), error)]

    asyncio.run(unretrieved())
    waiting = threading.Event()
    kept[0].add_done_callback(lambda _: waiting.set())
    assert waiting.wait(TIMEOUT)
    kept.clear()
    logged.wait_for(error)
    drop_failed(last)
    logged.wait_for(last)
    assert logged.count(error) == 1
    asyncio.run(main())


@pytest.mark.parametrize("block", [TaskGroup, open_task_channel])
@pytest.mark.asyncio
async def test_unretrieved_error_joins_its_block(block, reports):
    """Leaving the owner block raises what nobody has seen, and it is not reported besides."""
    seen, unseen, other = Plain("seen"), Plain("unseen"), Record(1)
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(TIMEOUT), block():
            assert await outcome(fail(numbers(), seen)) is seen
            fail(numbers(), unseen)
            fail(numbers(), other)
    assert [e is unseen or e is other for e in caught.value.exceptions] == [True, True]
    await fence(reports)
    assert len(reports.contexts) == 1


@pytest.mark.parametrize("block", [TaskGroup, open_task_channel])
@pytest.mark.asyncio
async def test_equal_errors_of_a_block_all_join(block):
    """Errors that compare equal, or refuse to be compared, are different errors."""
    errors = [Record(1), Record(1), NeverEqual(), NeverEqual()]
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(TIMEOUT), block():
            for error in errors:
                fail(numbers(), error)
    assert [id(e) for e in caught.value.exceptions] == [id(e) for e in errors]


@pytest.mark.asyncio
async def test_equal_errors_of_a_failing_group_all_join():
    """Also next to an equal error of a started call, by which the group fails."""
    first, second, third = Record(1), Record(1), NeverEqual()
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(TIMEOUT), TaskGroup() as group:
            calls = [fail(numbers(), second), fail(numbers(), third)]
            while not all(call.done() for call in calls):
                await asyncio.sleep(0.001)
            group.start_soon(fail, numbers(), first)
    assert {id(e) for e in caught.value.exceptions} == {id(first), id(second), id(third)}


@pytest.mark.asyncio
async def test_error_of_a_block_that_fails_itself_joins_too():
    """The block's own exception and the unretrieved ones arrive together."""
    own, unseen = Plain("own"), Plain("unseen")
    for block in (TaskGroup, open_task_channel):
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.timeout(TIMEOUT), block():
                future = fail(numbers(), unseen)
                while not future.done():
                    await asyncio.sleep(0.001)
                raise own
        assert {id(e) for e in caught.value.exceptions} == {id(own), id(unseen)}


@pytest.mark.asyncio
async def test_error_retrieved_inside_a_block_does_not_join():
    """Whoever handled an error has handled it."""
    for block in (TaskGroup, open_task_channel):
        async with asyncio.timeout(TIMEOUT), block():
            assert isinstance(await outcome(fail(numbers(), Plain())), Plain)


# --- a channel that stops ---------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Plain, BrokenRepr, BrokenAlien], ids=name_of)
@pytest.mark.asyncio
async def test_stopped_channel_names_the_error_that_stopped_it(make):
    """What is queued behind the failure gets ChannelStoppedError with the failure as its cause."""
    error = make()
    gate = Gate()
    async with open_task_channel(on_error="stop"):
        first = wait_then_fail(numbers(), gate, error)
        second = ok(numbers())
        gate.open()
        cause = await outcome(first)
        stopped = await outcome(second)
        assert type(stopped) is ChannelStoppedError
        assert stopped.__cause__ is cause
        with pytest.raises(ChannelStoppedError):
            ok(numbers())
    await works_again()


# --- AttributeError and jax.block_until_ready -------------------------------------------------------


def test_attribute_error_reaches_jax_block_until_ready():
    """JAX swallows AttributeError from its look for a method: it arrives inside BodyError there."""
    future = fail(numbers(), AttributeError("the body's own"))
    with pytest.raises(BodyError, match="the body's own") as caught:
        jax.block_until_ready({"a": future})
    assert isinstance(caught.value.__cause__, AttributeError)
    with pytest.raises(AttributeError, match="the body's own"):
        future.result(TIMEOUT)


def test_jax_block_until_ready_waits_and_returns_the_futures():
    """jax.block_until_ready of a tree of futures waits for them and gives the futures back."""
    future = ok(numbers())
    tree = jax.block_until_ready([future, numbers()])
    assert tree[0] is future
    assert future.done()
    failing = fail(numbers(), Plain("as itself"))
    with pytest.raises(Plain, match="as itself"):
        jax.block_until_ready([failing])


# --- computations that fail -------------------------------------------------------------------------


@colocated_python
def fail_in_computation(x):
    def explode(y):
        raise Plain("inside the computation")

    return jax.pure_callback(explode, jax.ShapeDtypeStruct(x.shape, x.dtype), x @ x)


@pytest.mark.asyncio
async def test_failed_computation_raises_and_the_channel_goes_on(logged):
    """JAX's error of a computation arrives as JAX raises it, with the note."""
    future = fail_in_computation(jnp.ones((64, 64)))
    caught = await outcome(future)
    assert isinstance(caught, jax.errors.JaxRuntimeError)
    assert "inside the computation" in str(caught)
    assert any("colocated call fail_in_computation" in note for note in caught.__notes__)
    assert await outcome(future) is caught
    await works_again()


# --- user code that is not the body -----------------------------------------------------------------


@pytest.mark.parametrize("make", [Plain, KeyboardInterrupt], ids=name_of)
@pytest.mark.asyncio
async def test_error_of_out_specs_fn_fails_the_call(make):
    """out_specs_fn is user code: what it raises arrives like an error of the body."""
    error = make()

    def broken(x):
        raise error

    caught = await outcome(ok.specialize(out_specs_fn=broken)(numbers()))
    assert (caught if isinstance(error, Exception) else caught.__cause__) is error
    await works_again()


@pytest.mark.asyncio
async def test_error_of_done_callback_is_logged_and_harmless(logged):
    """A done callback that raises on a worker hurts nobody."""
    error = Plain("callback")

    def broken(future):
        raise error

    future = ok(numbers())
    await asyncio.to_thread(_add_callback, future, broken)
    await asyncio.to_thread(logged.wait_for, error)
    await works_again()


def _add_callback(future, callback):
    future.add_done_callback(callback)


@pytest.mark.parametrize("make", [SystemExit, KeyboardInterrupt], ids=name_of)
@pytest.mark.asyncio
async def test_exit_in_done_callback_does_not_end_the_worker(make, logged):
    """Neither does one that raises what is no Exception."""
    error = make()
    gate = Gate()
    future = wait_gate(numbers(), gate)

    def broken(future):
        raise error

    await asyncio.to_thread(_add_callback, future, broken)
    gate.open()
    await asyncio.to_thread(logged.wait_for, error)
    await works_again()


@colocated_python
def wait_gate(x, gate):
    gate.wait()
    return x


# --- the error tree ---------------------------------------------------------------------------------


TREE = sorted(
    (
        value
        for value in vars(_exceptions).values()
        if isinstance(value, type) and issubclass(value, AiocolocatedError)
    ),
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_error_survives_pickling(kind):
    """Type, arguments, text, attributes and notes of every error come back."""
    args = ("pkg.Error", "text", "Traceback ...") if kind is RemoteError else ("text",)
    error = kind(*args)
    error.add_note("a note")
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        copy = pickle.loads(pickle.dumps(error, protocol))
        assert type(copy) is kind
        assert copy.args == args
        assert str(copy) == str(error)
        assert copy.__notes__ == ["a note"]
        assert vars(copy) == vars(error)


def test_error_tree_is_public_and_complete():
    """Every error is exported, is an AiocolocatedError, and is documented."""
    assert len(TREE) == 21
    for kind in TREE:
        assert getattr(aiocolocated, kind.__name__) is kind
        assert kind.__doc__


def test_errors_are_also_what_others_expect():
    """except clauses written for anyio, TypeError, ValueError and RuntimeError hold."""
    assert issubclass(aiocolocated.WouldBlock, anyio.WouldBlock)
    assert issubclass(aiocolocated.ChannelClosedError, anyio.ClosedResourceError)
    assert issubclass(aiocolocated.ObjectClosedError, anyio.ClosedResourceError)
    for kind, base in (
        (aiocolocated.ArgumentError, TypeError),
        (aiocolocated.TracedCallError, ArgumentError),
        (aiocolocated.NotShippableError, TypeError),
        (aiocolocated.SpecError, ValueError),
        (aiocolocated.BodyError, RuntimeError),
        (aiocolocated.DeadlockError, RuntimeError),
        (aiocolocated.ArrayDeletedError, RuntimeError),
        (aiocolocated.ShutdownError, RuntimeError),
        (aiocolocated.HostLostError, aiocolocated.HostError),
        (aiocolocated.HostError, RuntimeError),
    ):
        assert issubclass(kind, base)
    assert not issubclass(CallCancelledError, asyncio.CancelledError)


def test_remote_error_shows_the_remote_traceback():
    """The text has type, message and traceback."""
    text = str(RemoteError("pkg.Error", "text", "Traceback of the host"))
    assert text == "pkg.Error: text\nTraceback of the host"
    assert str(RemoteError("pkg.Error", "text")) == "pkg.Error: text"


def test_sys_exc_info_is_clean_on_workers():
    """A worker thread that has handled a failure does not keep it as its current exception."""
    fail(numbers(), Plain()).exception(TIMEOUT)
    assert see_exception(numbers()).result(TIMEOUT) == (None, None, None)


@colocated_python
def see_exception(x):
    return tuple.__new__(tuple, (repr(part) if part else None for part in sys.exc_info()))
