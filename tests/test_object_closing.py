# SPDX-License-Identifier: Apache-2.0
"""Objects (contract C12): how they are closed, and dropped."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import sys
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from object_bodies import (
    SHARED,
    TIMEOUT,
    Closing,
    ClosingAsync,
    Counter,
    Noted,
    eventually,
    outcome,
)

from aiocolocated import (
    CallCancelledError,
    ObjectClosedError,
    TaskChannel,
    TaskGroup,
    colocated_python_class,
    runtime,
)
from aiocolocated._settings import LOCK
from aiocolocated.testing import Gate, Recorder

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


# --- aclose -----------------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_close_comes_before_the_destructor_on_a_worker(x, recorder):
    """``close``, then ``__del__``, both on the host and off the caller's loop."""
    obj = ColocatedClosing(recorder)
    await obj.use(x)
    await obj.aclose()
    assert names(recorder) == ["made", "used", "closed", "destroyed"]
    assert {event.thread.rpartition("-")[0] for event in recorder.events[2:]} == {
        "aiocolocated-worker"
    }


@pytest.mark.asyncio
async def test_coroutine_aclose_runs_on_the_loop_of_the_host(x, recorder):
    """``aclose`` is preferred to ``close``, and awaited; the destructor stays off that loop."""
    obj = ColocatedClosingAsync(recorder)
    await obj.use(x)
    await obj.aclose()
    assert names(recorder) == ["made", "used", "closing", "closed", "destroyed"]
    main = threading.current_thread().name
    threads = {event.name: event.thread for event in recorder.events}
    assert threads["closing"] not in (main, threads["destroyed"])
    assert threads["destroyed"].startswith("aiocolocated-worker")


@pytest.mark.asyncio
async def test_closing_twice_and_at_once_is_fine(x, recorder):
    """However many wait, it is closed once, and nobody is done before it is."""
    gate = Gate()
    obj = ColocatedClosing(recorder)
    call = obj.hold(x, gate)
    await recorder.wait_for("start")
    closers = [asyncio.create_task(obj.aclose()) for _ in range(5)]
    await eventually(lambda: "closed" in repr(obj), "closing begins")
    assert not any(closer.done() for closer in closers)
    gate.open()
    await asyncio.gather(*closers)
    await obj.aclose()
    assert await call is x
    assert names(recorder) == ["made", "start", "end", "closed", "destroyed"]


@pytest.mark.asyncio
async def test_closing_drains_all_channels(x, recorder):
    """Calls that were submitted run, in whichever channel; those that wait for room, too."""
    gate = Gate()
    obj = ColocatedClosing(recorder)
    bounded, other = TaskChannel(max_pending=1), TaskChannel()
    calls = [bounded.submit_nowait(obj.hold, x, gate)]
    await recorder.wait_for("start")
    calls += [bounded.submit_nowait(obj.use, x), other.submit_nowait(obj.use, x)]
    submitter = asyncio.create_task(bounded.submit(obj.use, x))
    await eventually(lambda: bounded.statistics().waiting_for_room == 1, "it waits for room")
    closing = asyncio.create_task(obj.aclose())
    await eventually(lambda: "closed" in repr(obj), "closing begins")
    gate.open()
    await closing
    assert names(recorder) == ["made", "start", "end", *["used"] * 3, "closed", "destroyed"]
    assert all(call.done() for call in calls)
    assert await (await submitter) is x
    await bounded.aclose()
    await other.aclose()


@pytest.mark.asyncio
async def test_calls_after_closing_are_refused(x, recorder, cpu_devices):
    """At the call, from the moment that closing begins, by every way to call; the error has a name."""
    gate = Gate()
    obj = colocated_python_class(Closing, devices=cpu_devices[:1])(recorder)
    use, special = obj.use, obj.use.specialize(out_specs_fn=lambda x: x)
    running = obj.hold(x, gate)
    closing = asyncio.create_task(obj.aclose())
    await eventually(lambda: "closed" in repr(obj), "closing begins")
    channel = TaskChannel()
    for attempt in (
        lambda: obj.use(x),
        lambda: use(x),
        lambda: special(x),
        lambda: obj.hold_async(x, gate),
        lambda: channel.submit_nowait(obj.use, x),
    ):
        with pytest.raises(ObjectClosedError, match="the Closing object is closed"):
            attempt()
    with pytest.raises(ObjectClosedError):
        await channel.submit(obj.use, x)
    with pytest.raises(ExceptionGroup) as caught:
        async with TaskGroup() as group:
            group.start_soon(obj.use, x)
    assert caught.group_contains(ObjectClosedError)
    gate.open()
    await closing
    assert await running is x
    with pytest.raises(ObjectClosedError):
        obj.use(x)
    assert recorder.count("used") == 0


@pytest.mark.asyncio
async def test_cancelled_closer_leaves_closing_to_go_on(x, recorder):
    """The wait is over, the object is closed all the same."""
    gate = Gate()
    obj = ColocatedClosing(recorder)
    call = obj.hold(x, gate)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await obj.aclose()
    with pytest.raises(ObjectClosedError):
        obj.use(x)
    gate.open()
    assert await call is x
    await recorder.wait_for("destroyed")
    await obj.aclose()
    assert recorder.count("closed") == 1


@pytest.mark.asyncio
async def test_closing_waits_for_the_body_of_a_cancelled_call(x, recorder):
    """It still runs in the instance."""
    gate = Gate()
    obj = ColocatedClosing(recorder)
    call = obj.hold(x, gate)
    await recorder.wait_for("start")
    call.cancel()
    closing = asyncio.create_task(obj.aclose())
    with pytest.raises(CallCancelledError):
        await call
    assert recorder.count("closed") == 0
    gate.open()
    await closing
    assert names(recorder) == ["made", "start", "end", "closed", "destroyed"]


@pytest.mark.asyncio
async def test_object_that_was_never_used_closes_at_no_cost(recorder):
    """No call, no thread, no instance; it is closed all the same."""
    before = runtime.statistics()
    obj = ColocatedClosing(recorder)
    await obj.aclose()
    await obj.aclose()
    with pytest.raises(ObjectClosedError):
        obj.use(jnp.ones(1))
    async with ColocatedClosing(recorder):
        pass
    after = runtime.statistics()
    assert after.workers <= before.workers  # an idle one may have ended meanwhile
    assert dataclasses.replace(after, workers=before.workers, idle=before.idle) == before
    assert recorder.events == []


@pytest.mark.asyncio
async def test_object_whose_constructor_failed_closes(x):
    """There is no instance to close."""

    class Failing:
        def __init__(self) -> None:
            raise ValueError("no")

        def use(self, x: object) -> None: ...

        def close(self) -> None:
            raise AssertionError("never")

    obj = colocated_python_class(Failing)()
    assert isinstance(await outcome(obj.use(x)), ValueError)
    await obj.aclose()
    with pytest.raises(ObjectClosedError):
        obj.use(x)


class Failing(Noted):
    """Its closing fails, one way or another."""

    def __init__(self, recorder: Recorder, error: BaseException) -> None:
        super().__init__(recorder)
        self.error = error

    def close(self) -> None:
        self.note("closed")
        raise self.error


class FailingAsync(Failing):
    async def aclose(self) -> None:
        await asyncio.sleep(0)
        super().close()


@pytest.mark.parametrize("cls", [Failing, FailingAsync])
@pytest.mark.asyncio
async def test_error_of_closing_is_raised_once(x, recorder, cls):
    """To who closes; the instance is dropped all the same, and closing again is quiet."""
    obj = colocated_python_class(cls)(recorder, ValueError("closing failed"))
    await obj.use(x)
    with pytest.raises(ValueError, match="closing failed") as caught:
        await obj.aclose()
    assert f"{cls.__name__}.aclose" in caught.value.__notes__[0]
    await recorder.wait_for("destroyed")
    assert recorder.events[-1].thread != threading.current_thread().name
    await obj.aclose()
    with pytest.raises(ObjectClosedError):
        obj.use(x)


@pytest.mark.asyncio
async def test_error_of_closing_comes_out_of_the_block(x, recorder):
    """With the block's own error as context."""
    cls = colocated_python_class(Failing)
    with pytest.raises(ValueError, match="closing failed") as caught:
        async with cls(recorder, ValueError("closing failed")) as obj:
            await obj.use(x)
            raise KeyError
    assert isinstance(caught.value.__context__, KeyError)


@pytest.mark.asyncio
async def test_close_that_gives_a_coroutine_is_told(x, recorder):
    """It would never be awaited: only an ``async def aclose`` of the class is."""

    class Wrong(Noted):
        def close(self) -> object:
            return asyncio.sleep(0)

    obj = colocated_python_class(Wrong)(recorder)
    await obj.use(x)
    with pytest.raises(TypeError, match=r"Wrong\.close\(\) gave <coroutine"):
        await obj.aclose()


# --- dropping ---------------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.parametrize("cls", [ColocatedNoted, ColocatedClosing, ColocatedClosingAsync])
@pytest.mark.asyncio
async def test_dropping_the_last_reference_closes_in_the_background(x, recorder, cls):
    """As ``aclose`` does, on the host's threads, without the collector."""
    with no_collector():
        obj = cls(recorder)
        await obj.use(x)
        del obj
        await recorder.wait_for("destroyed")
    expected = {ColocatedNoted: [], ColocatedClosing: ["closed"]}.get(cls, ["closing", "closed"])
    assert names(recorder) == ["made", "used", *expected, "destroyed"]
    assert threading.current_thread().name not in {event.thread for event in recorder.events}


@pytest.mark.asyncio
async def test_dropped_objects_are_closed_one_at_a_time_in_order(x, recorder):
    """In the order of dropping, however long one of them takes."""
    SHARED["gate"] = gate = Gate()
    objects = [colocated_python_class(SlowlyClosing)(recorder, i) for i in range(20)]
    for obj in objects:
        await obj.use(x)
    order = [7, 3, 19, *(i for i in range(20) if i not in (7, 3, 19))]
    slots = dict(enumerate(objects))
    del objects, obj
    recorder.clear()
    for i in order:
        del slots[i]
    await recorder.wait_for("closing")
    assert runtime.statistics().running == 1
    gate.open()
    await recorder.wait_for("destroyed", 20)
    assert recorder.sequence("closing", "name") == order
    assert recorder.sequence("destroyed", "name") == order
    assert recorder.peak("closing", "destroyed") == 1


class SlowlyClosing(Noted):
    def close(self) -> None:
        self.note("closing")
        SHARED["gate"].wait()


@pytest.mark.asyncio
async def test_object_in_a_cycle_is_closed_by_the_collector(x, recorder):
    """Whichever thread the collector runs on."""
    with no_collector():
        obj = ColocatedClosing(recorder)
        await obj.use(x)
        cycle: list[object] = [obj]
        cycle.append(cycle)
        del obj, cycle
        assert recorder.count("closed") == 0
        await asyncio.to_thread(gc.collect)
        await recorder.wait_for("destroyed")
    assert names(recorder) == ["made", "used", "closed", "destroyed"]


@pytest.mark.asyncio
async def test_dropping_needs_no_lock(x, recorder):
    """Neither dropping nor the collector waits, while another thread has the library's lock."""
    objects = []
    for i in range(3):
        objects.append(ColocatedClosing(recorder, i))
        await objects[-1].use(x)
    cycle: list[object] = [objects.pop()]
    cycle.append(cycle)
    locked, release = threading.Event(), threading.Event()

    def hold() -> None:
        with LOCK:
            locked.set()
            release.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        locked.wait(10)
        began = time.monotonic()
        del cycle
        gc.collect()
        objects.clear()
        assert time.monotonic() - began < 5
        assert recorder.count("closed") == 0
    finally:
        release.set()
        holder.join(10)
    await recorder.wait_for("destroyed", 3)
    assert sorted(recorder.sequence("closed", "name")) == [0, 1, 2]


@pytest.mark.asyncio
async def test_object_may_be_dropped_under_the_lock_and_in_bodies(x, recorder):
    """A finalizer may run anywhere, so it only leaves a message."""
    obj = ColocatedClosing(recorder, "lock")
    await obj.use(x)
    with LOCK:
        del obj
    SHARED["object"] = ColocatedClosing(recorder, "body")
    await SHARED["object"].use(x)

    noted = ColocatedNoted(recorder, "other")
    await noted.call(x, lambda: SHARED.pop("object") and None)
    await recorder.wait_for("destroyed", 2)
    assert sorted(recorder.sequence("closed", "name")) == ["body", "lock"]
    await noted.aclose()


@pytest.mark.asyncio
async def test_object_dropped_with_calls_in_flight_closes_after_them(x, recorder):
    """Calls hold the instance, not the object: they run, then it is closed."""
    gate = Gate()
    obj = ColocatedClosing(recorder)
    calls = [obj.hold(x, gate), obj.use(x), obj.hold_async(x, gate)]
    del obj
    gc.collect()
    await recorder.wait_for("start")
    assert recorder.count("closed") == 0
    gate.open()
    for call in calls:
        assert await call is x
    await recorder.wait_for("destroyed")
    assert names(recorder)[-2:] == ["closed", "destroyed"]
    assert recorder.count("used") == 1


@pytest.mark.parametrize("what", ["bound", "specialized", "captured"])
@pytest.mark.asyncio
async def test_method_that_is_held_keeps_the_object_open(x, recorder, what):
    """Bound methods, specialized ones, and what captured them are references, too."""
    obj = ColocatedClosing(recorder)
    held = {
        "bound": lambda method: method,
        "specialized": lambda method: method.specialize(out_specs_fn=lambda x: x),
        "captured": capture,
    }[what](obj.use)
    await obj.use(x)
    del obj
    gc.collect()
    assert await outcome(held(x)) is x
    assert recorder.count("closed") == 0
    del held
    await recorder.wait_for("destroyed")
    assert names(recorder) == ["made", "used", "used", "closed", "destroyed"]


def capture(method: Callable[[object], object]) -> Callable[[object], object]:
    return lambda x: method(x)


@pytest.mark.parametrize("cls", [Failing, FailingAsync])
@pytest.mark.asyncio
async def test_error_of_closing_a_dropped_object_is_reported_once(x, recorder, cls, caplog):
    """There is nobody else to tell."""
    with caplog.at_level(logging.ERROR, logger="aiocolocated"), no_collector():
        obj = colocated_python_class(cls)(recorder, ValueError("closing failed"))
        await obj.use(x)
        del obj
        await recorder.wait_for("destroyed")
        await eventually(lambda: reports(caplog, "never retrieved"), "the error is reported")
        await ColocatedNoted(recorder).use(x)  # time for a second report
    [record] = reports(caplog, "never retrieved")
    assert f"{cls.__name__}.aclose" in record.getMessage()
    assert "closing failed" in str(record.exc_info[1])
    del record
    caplog.clear()


def reports(caplog, words: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if words in record.getMessage()]


class FailingToDie:
    def use(self, x: object) -> object:
        return x

    def __del__(self) -> None:
        SHARED["tried"] = SHARED.get("tried", 0) + 1
        raise ValueError("destructor failed")


@pytest.mark.parametrize("how", ["closed", "dropped"])
@pytest.mark.asyncio
async def test_destructor_that_raises_is_reported_once(x, how, monkeypatch):
    """By Python, as for any ``__del__``; closing goes on, and so does the worker."""
    SHARED.clear()
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda info: seen.append(str(info.exc_value)))
    obj = colocated_python_class(FailingToDie)()
    await obj.use(x)
    if how == "closed":
        await obj.aclose()
        assert SHARED["tried"] == 1
    del obj
    await eventually(lambda: seen, "it is reported")
    counter = colocated_python_class(Counter)()
    assert await counter.add(x) == 1
    await counter.aclose()
    assert seen == ["destructor failed"]
    assert SHARED["tried"] == 1


# --- threads ----------------------------------------------------------------------------------------


def test_objects_are_closed_without_a_loop(x, recorder):
    """By dropping; in a script there is no ``aclose`` to await."""
    obj = ColocatedClosing(recorder)
    assert obj.use(x).result(TIMEOUT) is x
    del obj
    asyncio.run(recorder.wait_for("destroyed"))


@pytest.mark.asyncio
async def test_object_is_closed_from_another_loop(x, recorder):
    """It belongs to no loop."""
    obj = ColocatedClosing(recorder)
    await obj.use(x)
    await asyncio.to_thread(lambda: asyncio.run(obj.aclose()))
    await obj.aclose()
    assert names(recorder) == ["made", "used", "closed", "destroyed"]
