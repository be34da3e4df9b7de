# SPDX-License-Identifier: Apache-2.0
"""Objects (contract C12): how many methods run at once, in which order, and waits that cannot end."""

from __future__ import annotations

import asyncio
import random
import threading

import jax
import jax.numpy as jnp
import pytest
from object_bodies import SHARED, TIMEOUT, Noted, eventually, outcome

from aiocolocated import (
    CallCancelledError,
    DeadlockError,
    TaskChannel,
    TaskGroup,
    colocated_python,
    colocated_python_class,
    configure,
    gather,
    open_task_channel,
    runtime,
)
from aiocolocated.testing import Gate, Recorder, Rendezvous

pytestmark = pytest.mark.timeout(60)

ColocatedNoted = colocated_python_class(Noted)


@pytest.fixture
def x() -> jax.Array:
    return jnp.arange(3.0)


class Worker:
    """Notes how many of its methods run at once."""

    def __init__(self, recorder: Recorder, meeting: Rendezvous | None = None) -> None:
        self.recorder = recorder
        self.meeting = meeting
        self.running = 0
        self.peak = 0
        self.together = asyncio.Event()

    def begin(self, name: object) -> None:
        self.running += 1
        self.peak = max(self.peak, self.running)
        self.recorder.record("start", name=name)

    def end(self, name: object) -> None:
        self.running -= 1
        self.recorder.record("end", name=name)

    def work(self, x: object, name: object = 0) -> object:
        self.begin(name)
        threading.Event().wait(1e-4)  # others may run meanwhile
        self.end(name)
        return x

    async def work_async(self, x: object, name: object = 0) -> object:
        self.begin(name)
        try:
            for _ in range(3):
                await asyncio.sleep(0)
        finally:  # cancelled, perhaps
            self.end(name)
        return x

    def items(self, x: object, count: int):
        for i in range(count):
            self.begin(i)
            threading.Event().wait(1e-4)
            self.end(i)
            yield i

    def meet(self, x: object) -> object:
        self.begin("meet")
        self.meeting.wait()
        self.end("meet")
        return x

    async def meet_async(self, x: object, parties: int) -> object:
        self.begin("meet")
        if self.running == parties:
            self.together.set()
        await asyncio.wait_for(self.together.wait(), 10)
        self.end("meet")
        return x


# --- how many ---------------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_methods_of_one_object_do_not_overlap(x, recorder):
    """From tasks, channels, groups and threads, plain and coroutine methods and streams: one by one."""
    worker = colocated_python_class(Worker)(recorder)

    async def user(number: int) -> None:
        for i in range(5):
            method = worker.work if (number + i) % 2 else worker.work_async
            await method(x)

    async def listener() -> None:
        assert [i async for i in worker.items(x, 5)] == list(range(5))

    async def threads() -> None:
        results = await asyncio.gather(
            *(asyncio.to_thread(lambda: worker.work(x).result(TIMEOUT)) for _ in range(5))
        )
        assert results == [x] * 5

    channels = [TaskChannel() for _ in range(5)]
    async with asyncio.timeout(TIMEOUT), TaskGroup() as group:
        tasks = [asyncio.create_task(user(number)) for number in range(10)]
        tasks += [asyncio.create_task(listener()), asyncio.create_task(threads())]
        for channel in channels:
            channel.submit_nowait(worker.work, x)
            channel.submit_nowait(worker.work_async, x)
        for _ in range(10):
            group.start_soon(worker.work, x)
            group.start_soon(worker.work_async, x)
        await asyncio.gather(*tasks)
    for channel in channels:
        await channel.aclose()
    await worker.aclose()
    assert recorder.count("start") == recorder.count("end") == 50 + 5 + 5 + 10 + 20
    assert recorder.peak() == 1


@pytest.mark.parametrize("limit", [2, 5])
@pytest.mark.asyncio
async def test_so_many_methods_meet_and_no_more(x, recorder, limit):
    """With ``max_concurrency=n``, n methods run at once, and never one more."""
    meeting = Rendezvous(limit)
    worker = colocated_python_class(Worker, max_concurrency=limit)(recorder, meeting)
    async with asyncio.timeout(TIMEOUT):
        await worker.meet.map([x] * (4 * limit))
    assert recorder.peak() == limit
    await worker.aclose()


@pytest.mark.parametrize("limit", [2, 5])
@pytest.mark.asyncio
async def test_so_many_coroutine_methods_meet_and_no_more(x, recorder, limit):
    """Coroutine methods count, though they hold no thread."""
    worker = colocated_python_class(Worker, max_concurrency=limit)(recorder)
    async with asyncio.timeout(TIMEOUT):
        await worker.meet_async.map([x] * limit, [limit] * limit)
        assert recorder.peak() == limit
        await worker.work_async.map([x] * 50)
    assert recorder.peak() == limit
    await worker.aclose()


@pytest.mark.asyncio
async def test_objects_of_one_class_overlap(x, recorder):
    """The limit is each object's own."""
    meeting = Rendezvous(3)
    cls = colocated_python_class(Worker)
    workers = [cls(recorder, meeting) for _ in range(3)]
    async with asyncio.timeout(TIMEOUT), TaskGroup() as group:
        for worker in workers:
            group.start_soon(worker.meet, x)
    for worker in workers:
        await worker.aclose()


@pytest.mark.asyncio
async def test_cancelled_body_counts_until_it_ends(x, recorder):
    """A running method cannot be interrupted: the next one waits for it all the same."""
    gate = Gate()
    async with ColocatedNoted(recorder) as noted, TaskGroup() as group:
        running = group.start_soon(noted.hold, x, gate)
        await recorder.wait_for("start")
        next_one = group.start_soon(noted.use, x)
        running.cancel()
        with pytest.raises(CallCancelledError):
            await running
        assert runtime.statistics().queued == 1
        assert recorder.count("used") == 0
        gate.open()
        await next_one
    assert [event.name for event in recorder.events][:4] == ["made", "start", "end", "used"]


@pytest.mark.asyncio
async def test_waiting_methods_hold_no_threads(x, recorder):
    """A hundred calls that wait for their object leave the workers to others."""
    configure(worker_limit=2)
    gate = Gate()
    noted = ColocatedNoted(recorder)
    async with asyncio.timeout(TIMEOUT), TaskGroup() as group:
        group.start_soon(noted.hold, x, gate)
        await recorder.wait_for("start")
        for _ in range(100):
            group.start_soon(noted.use, x)
        assert await same(x) is x
        assert runtime.statistics().running == 1
        gate.open()
    await noted.aclose()
    assert recorder.count("used") == 100


@colocated_python
def same(x: object) -> object:
    return x


# --- order ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 3])
@pytest.mark.asyncio
async def test_program_order_of_a_channel_is_kept_across_methods(x, recorder, limit):
    """Methods of several objects and functions of one channel start in submission order."""
    cls = colocated_python_class(Worker, max_concurrency=limit)
    async with cls(recorder) as first, cls(recorder) as second:
        async with open_task_channel():
            calls = []
            for i in range(60):
                obj = (first, second)[i % 2]
                method = obj.work if i % 3 else obj.work_async
                calls.append(method(x, i))
            await gather(*calls)
        assert recorder.sequence("start") == list(range(60))
        assert recorder.peak() == 1


@pytest.mark.asyncio
async def test_method_that_waits_for_its_object_keeps_its_place(x, recorder):
    """What comes behind it in its channel does not overtake it, whatever else is free."""
    gate = Gate()
    noted = ColocatedNoted(recorder)
    other = TaskChannel()
    busy = other.submit_nowait(noted.hold, x, gate)
    await recorder.wait_for("start")
    async with open_task_channel() as channel:
        waiting = noted.use(x)
        behind = note(x, recorder)
        await eventually(lambda: channel.statistics().queued == 2, "both are queued")
        gate.open()
        await gather(busy, waiting, behind)
    assert [event.name for event in recorder.events] == ["made", "start", "end", "used", "noted"]
    await noted.aclose()
    await other.aclose()


@colocated_python
def note(x: object, recorder: Recorder) -> object:
    recorder.record("noted", name=0)
    return x


@pytest.mark.parametrize("method", ["work", "work_async"])
@pytest.mark.parametrize("dedicated", [False, True])
@pytest.mark.asyncio
async def test_channels_take_turns_at_an_object(x, recorder, method, dedicated):
    """First come, first served: a long queue in one channel does not keep another channel out."""
    gate = Gate()
    long = TaskChannel(dedicated_thread=dedicated)
    worker = colocated_python_class(WaitingWorker)(recorder)
    async with asyncio.timeout(TIMEOUT):
        first = long.submit_nowait(worker.hold, x, gate)
        calls = [long.submit_nowait(getattr(worker, method), x, i) for i in range(200)]
        await recorder.wait_for("held")
        others = [TaskChannel() for _ in range(3)]
        calls += [
            channel.submit_nowait(getattr(worker, method), x, f"other {i}")
            for i, channel in enumerate(others)
        ]
        gate.open()
        await gather(first, *calls)
    started = recorder.sequence("start", "name")
    assert started[:4] == ["other 0", "other 1", "other 2", 0]
    assert started[4:] == list(range(1, 200))
    await worker.aclose()
    await long.aclose()


class WaitingWorker(Worker):
    def hold(self, x: object, gate: Gate) -> None:
        self.recorder.record("held")
        gate.wait()


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.asyncio
async def test_cancelled_calls_do_not_keep_an_object_busy(x, seed):
    """Queued calls are cancelled at random while the object is busy; all others run, one at a time."""
    chance = random.Random(seed)
    configure(worker_limit=4)
    recorder = Recorder()
    limit = chance.choice([1, 2])
    worker = colocated_python_class(Worker, max_concurrency=limit)(recorder)
    channels = [TaskChannel(max_in_flight=chance.choice([1, 8])) for _ in range(10)]
    calls = []
    async with asyncio.timeout(TIMEOUT):
        for i in range(600):
            channel = chance.choice(channels)
            method = chance.choice([worker.work, worker.work_async])
            calls.append(channel.submit_nowait(method, x, i))
            if chance.random() < 0.4:
                calls[chance.randrange(max(0, i - 30), i + 1)].cancel()
            if chance.random() < 0.1:
                await asyncio.sleep(chance.random() * 1e-3)
        results = await gather(*calls, return_exceptions=True)
        await worker.aclose()
    for channel in channels:
        await channel.aclose()
    queued = {
        i
        for i, result in enumerate(results)
        if isinstance(result, CallCancelledError) and "while queued" in str(result)
    }
    assert len(queued) > 50
    started = recorder.sequence("start", "name")
    assert set(range(600)) - queued >= set(started)
    assert {i for i, result in enumerate(results) if result is x} <= set(started)
    assert recorder.peak() <= limit
    assert all(result is x or isinstance(result, CallCancelledError) for result in results)
    assert not worker.__dict__["_aiocolocated_object"].gate.parked


# --- waits that cannot end ----------------------------------------------------------------------------


class Caller:
    """Calls methods of objects, its own among them, from inside its methods."""

    def get(self, x: object) -> object:
        return x

    async def get_async(self, x: object) -> object:
        return x

    def wait(self, x: object, name: str) -> object:
        return SHARED[name](x).result(TIMEOUT)

    async def wait_async(self, x: object, name: str) -> object:
        return await SHARED[name](x)

    async def close_async(self, x: object, name: str) -> None:
        await SHARED[name]()

    def plain_call(self, x: object) -> object:
        return self.get(x)

    def meet_and_wait(self, x: object, name: str) -> object:
        SHARED["meeting"].wait()
        try:
            return SHARED[name](x).result(TIMEOUT)
        except DeadlockError as error:
            return str(error)


@pytest.fixture
def caller():
    SHARED.clear()
    yield colocated_python_class(Caller)()
    SHARED.clear()


@pytest.mark.parametrize("method", ["wait", "wait_async"])
@pytest.mark.parametrize("wanted", ["get", "get_async"])
@pytest.mark.asyncio
async def test_waiting_for_a_method_of_the_own_object_is_refused(x, caller, method, wanted):
    """With ``max_concurrency=1`` it could never start; the error says what to do."""
    SHARED["own"] = getattr(caller, wanted)
    error = await outcome(getattr(caller, method)(x, "own"))
    assert isinstance(error, DeadlockError)
    assert f"waits for Caller.{wanted}" in str(error)
    assert "max_concurrency is 1" in str(error)
    del error
    assert await outcome(caller.plain_call(x)) is x
    await caller.aclose()


@pytest.mark.parametrize("method", ["wait", "wait_async"])
@pytest.mark.asyncio
async def test_waiting_for_the_own_object_by_way_of_a_function_is_refused(x, caller, method):
    """A function that waits for the object whose method waits for the function."""
    SHARED["own"] = caller.get
    SHARED["function"] = waits_for_shared if method == "wait" else waits_for_shared_async
    error = await outcome(getattr(caller, method)(x, "function"))
    assert isinstance(error, DeadlockError)
    assert "waits for Caller.get" in str(error)
    await caller.aclose()


@colocated_python
def waits_for_shared(x: object) -> object:
    return SHARED["own"](x).result(TIMEOUT)


@colocated_python
async def waits_for_shared_async(x: object) -> object:
    return await SHARED["own"](x)


@pytest.mark.asyncio
async def test_waiting_for_what_waits_for_the_own_object_is_refused(x, caller):
    """The wanted call is behind a method of the own object in a channel of its own."""
    lane = TaskChannel()

    def behind(x: object) -> object:
        first = lane.submit_nowait(caller.get, x)
        del first
        return lane.submit_nowait(same, x)

    SHARED["behind"] = behind
    error = await outcome(caller.wait(x, "behind"))
    assert isinstance(error, DeadlockError)
    await caller.aclose()
    await lane.aclose()


@pytest.mark.asyncio
async def test_waiting_for_a_method_of_another_object_works(x, caller):
    """Two objects, and the own one where there is room for two methods."""
    other = colocated_python_class(Caller)()
    SHARED["other"] = other.get
    assert await outcome(caller.wait(x, "other")) is x
    assert await outcome(caller.wait_async(x, "other")) is x
    async with colocated_python_class(Caller, max_concurrency=2)() as roomy:
        SHARED["own"] = roomy.get
        assert await outcome(roomy.wait(x, "own")) is x
        assert await outcome(roomy.wait_async(x, "own")) is x
        del SHARED["own"]
    await other.aclose()
    await caller.aclose()


@pytest.mark.asyncio
async def test_last_of_the_methods_that_wait_for_their_object_is_refused(x):
    """Where two may run, both do, and both want a third: the second to wait is told."""
    SHARED.clear()
    roomy = colocated_python_class(Caller, max_concurrency=2)()
    SHARED["meeting"], SHARED["own"] = Rendezvous(2), roomy.get
    async with asyncio.timeout(TIMEOUT):
        results = await roomy.meet_and_wait.map([x] * 2, ["own"] * 2)
    assert sum(result is x for result in results) == 1
    [words] = [result for result in results if isinstance(result, str)]
    assert "max_concurrency is 2" in words
    SHARED.clear()
    await roomy.aclose()


@pytest.mark.asyncio
async def test_objects_that_wait_for_each_other_are_refused(x):
    """A method of one waits for the other, whose method waits for the first: the second is told."""
    SHARED.clear()
    cls = colocated_python_class(Caller)
    first, second = cls(), cls()
    SHARED.update(meeting=Rendezvous(2), first=first.get, second=second.get)
    async with asyncio.timeout(TIMEOUT), TaskGroup() as group:
        group.start_soon(first.meet_and_wait, x, "second")
        group.start_soon(second.meet_and_wait, x, "first")
    assert sorted(type(result).__name__ for result in group.results()) == ["ArrayImpl", "str"]
    SHARED.clear()
    await first.aclose()
    await second.aclose()


@pytest.mark.asyncio
async def test_closing_the_own_object_is_refused(x, caller):
    """Closing waits for all methods, and so for the one that closes; the object stays open."""
    SHARED["close"] = caller.aclose
    error = await outcome(caller.close_async(x, "close"))
    assert isinstance(error, DeadlockError)
    assert "aclose of the Caller object was called inside its own method" in str(error)
    del error
    assert await caller.get(x) is x
    await caller.aclose()


@pytest.mark.asyncio
async def test_closing_the_own_object_by_way_of_a_function_is_refused(x, caller):
    """A body that a method waits for cannot wait for the object to be closed."""
    SHARED["close"], SHARED["function"] = caller.aclose, closes_shared
    error = await outcome(caller.wait_async(x, "function"))
    assert isinstance(error, DeadlockError)
    assert "Caller.aclose, which waits for that body" in str(error)
    del error
    await caller.aclose()  # it was closed all the same


@colocated_python
async def closes_shared(x: object) -> None:
    await SHARED["close"]()
