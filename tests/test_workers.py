# SPDX-License-Identifier: Apache-2.0
"""Worker threads: the library's own, few, added when needed, and never beyond their limits."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import re
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from aiocolocated import (
    TaskChannel,
    TaskGroup,
    WorkerLimitError,
    _service,
    _workers,
    colocated_python,
    configure,
    gather,
    open_task_channel,
    runtime,
    wait_until_ready,
)
from aiocolocated._settings import LOCK
from aiocolocated._workers import pool
from aiocolocated.testing import Gate, Recorder, Rendezvous

X = jnp.ones(2)


@colocated_python
def same(x: jax.Array) -> jax.Array:
    return x


@colocated_python
def hold(x: jax.Array, started: Gate, gate: Gate) -> jax.Array:
    started.open()
    gate.wait()
    return x


@colocated_python
def meet(x: jax.Array, meeting: Rendezvous) -> str:
    meeting.wait()
    return threading.current_thread().name


@colocated_python
def thread_name(x: jax.Array) -> str:
    return threading.current_thread().name


async def eventually(condition: Callable[[], object], timeout: float = 10.0) -> None:
    """Wait for something that no future tells of."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def end_workers() -> None:
    """Start the rest of a test without any worker; they would end by themselves in some seconds."""
    await eventually(lambda: (n := runtime.statistics()).idle == n.workers)
    with LOCK:
        for worker in pool.idle:
            pool.workers.discard(worker)
            pool.release(worker)
        pool.idle.clear()
    await eventually(lambda: not worker_threads())


def worker_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("aiocolocated-worker")]


# --- bodies that need each other ------------------------------------------------------------------------

PARTIES = 32
all_meet = threading.Barrier(PARTIES)
few_meet = threading.Barrier(PARTIES, timeout=1.5)


@colocated_python
def meet_all(x: jax.Array) -> jax.Array:
    all_meet.wait(20)
    return x


@colocated_python
def meet_few(x: jax.Array) -> jax.Array:
    few_meet.wait()
    return x


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_bodies_meet_within_limit():
    """32 bodies that meet at one barrier of an importable module complete with a limit of 32."""
    configure(worker_limit=PARTIES)
    async with TaskGroup() as group:
        for _ in range(PARTIES):
            group.start_soon(meet_all, X)
    assert group.results() == [X] * PARTIES
    loop = asyncio.get_running_loop()
    assert getattr(loop, "_default_executor", None) is None


@pytest.mark.asyncio
async def test_bodies_that_cannot_meet_are_reported(caplog):
    """Beyond the limit bodies get their own errors, one warning says why, and later calls work."""
    configure(worker_limit=8)
    few_meet.reset()
    begin = time.time()
    calls = [TaskChannel().submit_nowait(meet_few, X) for _ in range(PARTIES)]
    results = await gather(*calls, return_exceptions=True)
    assert [type(r) for r in results] == [threading.BrokenBarrierError] * PARTIES
    assert len(set(map(id, results))) == PARTIES
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert record.name == "aiocolocated"
    assert record.created - begin < 1.0
    message = record.getMessage()
    assert message.startswith("all 8 workers (worker_limit) have been busy for over 0.5 s")
    assert "24 calls are queued in 24 waiting channels" in message
    running = re.findall(
        rf"meet_few \(submitted at {re.escape(__file__)}:\d+\) for 0\.\d s", message
    )
    assert len(running) == 8
    assert await same(X) is X
    assert asyncio.get_running_loop()._default_executor is None


@pytest.mark.asyncio
async def test_limit_is_reported_anew(caplog):
    """One warning for one jam; the next jam is worth another."""
    configure(worker_limit=1)
    for jam in (1, 2):
        started, gate = Gate(), Gate()
        running = TaskChannel().submit_nowait(hold, X, started, gate)
        waiting = TaskChannel().submit_nowait(same, X)
        await eventually(lambda jam=jam: len(caplog.records) == jam)
        gate.open()
        await gather(running, waiting)
    assert [r.levelname for r in caplog.records] == ["WARNING"] * 2


def nested(depth: int, recorder: Recorder) -> Callable[[jax.Array], jax.Array]:
    """A colocated body that calls and waits ``depth`` deep."""
    inner = nested(depth - 1, recorder) if depth else None

    def body(x: jax.Array) -> jax.Array:
        if inner is not None:
            return inner(x).result(30)
        recorder.record("start")
        time.sleep(0.002)
        recorder.record("end")
        return x

    return colocated_python(body)


@pytest.mark.asyncio
async def test_bodies_call_and_wait_three_deep(recorder):
    """100 bodies that call and wait three deep finish with a limit of 4, which holds for who runs."""
    configure(worker_limit=4)
    f = nested(3, recorder)
    async with TaskGroup() as group:
        for _ in range(100):
            group.start_soon(f, X)
    assert group.results() == [X] * 100
    assert recorder.count("end") == 100
    assert recorder.peak() <= 4


@pytest.mark.asyncio
async def test_waiting_body_gives_its_slot_back(recorder):
    """With a limit of 1 a body can wait for another."""
    configure(worker_limit=1)
    assert await nested(1, recorder)(X) is X


@pytest.mark.asyncio
async def test_wait_beyond_ceiling_is_refused():
    """Waiting bodies keep their threads, up to the ceiling; one more wait is an error of that body."""
    configure(worker_limit=2, worker_ceiling=4)
    await end_workers()
    started, gate = Gate(), Gate()
    lane = TaskChannel(dedicated_thread=True)  # outside the pool
    held = lane.submit_nowait(hold, X, started, gate)
    await started.wait_async()
    waits = TaskChannel
    calls = [waits().run(lambda: held.result(30)) for _ in range(10)]
    await eventually(lambda: sum(c.done() for c in calls) == 7)
    numbers = runtime.statistics()
    assert (numbers.waiting, numbers.queued) == (3, 0)
    assert numbers.workers <= 4
    gate.open()
    results = await gather(*calls, return_exceptions=True)
    errors = [r for r in results if isinstance(r, WorkerLimitError)]
    assert len(errors) == 7
    assert "3 bodies wait for others already" in str(errors[0])
    assert "worker_ceiling" in str(errors[0])
    assert [r for r in results if not isinstance(r, WorkerLimitError)] == [X] * 3
    await lane.aclose()
    assert runtime.statistics().waiting == 0


@pytest.mark.asyncio
async def test_threads_never_exceed_ceiling():
    """Bodies that run and bodies that wait together have no more threads than the ceiling."""
    configure(worker_limit=4, worker_ceiling=6)
    await end_workers()
    most = 0

    def inner(x: jax.Array) -> jax.Array:
        time.sleep(0.005)
        return x

    called = colocated_python(inner)
    outer = colocated_python(lambda x: called(x).result(30))
    calls = [TaskChannel().submit_nowait(outer, X) for _ in range(40)]
    while not all(call.done() for call in calls):
        most = max(most, runtime.statistics().workers)
        await asyncio.sleep(0.001)
    results = await gather(*calls, return_exceptions=True)
    assert 4 < most <= 6
    assert {type(r) for r in results} <= {type(X), WorkerLimitError}
    assert any(r is X for r in results)


# --- how many ---------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_threads_added_for_stuck_channels():
    """A thread is added for every runnable channel that waits while all others are in their bodies."""
    await end_workers()
    meeting = Rendezvous(16)
    names = await gather(*(TaskChannel().submit_nowait(meet, X, meeting) for _ in range(16)))
    assert len(set(names)) == 16
    assert all(name.startswith("aiocolocated-worker-") for name in names)


@pytest.mark.asyncio
async def test_limit_holds_for_bodies_at_once(recorder):
    """No more bodies run at once than worker_limit, also after it was lowered."""

    def body(x: jax.Array) -> jax.Array:
        recorder.record("start")
        time.sleep(0.01)
        recorder.record("end")
        return x

    f = colocated_python(body)
    for limit in (6, 2):
        configure(worker_limit=limit)
        recorder.clear()
        await gather(*(TaskChannel().submit_nowait(f, X) for _ in range(24)))
        assert 2 <= recorder.peak() <= limit


@pytest.mark.asyncio
async def test_ten_thousand_channels_need_few_threads():
    """A channel is a queue, not a thread: quick calls of 10 000 channels share a few."""
    await end_workers()
    await same(X)
    channels = [TaskChannel() for _ in range(10_000)]
    await gather(*(channel.submit_nowait(same, X) for channel in channels))
    assert runtime.statistics().workers <= 8
    assert runtime.statistics().channels == 0


@pytest.mark.asyncio
async def test_queued_calls_need_no_threads():
    """10 000 calls behind one that does not end take no thread."""
    await end_workers()
    started, gate = Gate(), Gate()
    async with open_task_channel() as channel:
        hold(X, started, gate)
        await started.wait_async()
        calls = [same(X) for _ in range(10_000)]
        assert channel.statistics().queued == 10_000
        assert runtime.statistics().workers == 1
        gate.open()
        await gather(*calls)


@pytest.mark.asyncio
async def test_idle_threads_are_reused_last_in_first_out():
    """Calls one at a time stay with the thread that was idle last, whatever others there are."""
    await end_workers()
    meeting = Rendezvous(8)
    await gather(*(TaskChannel().submit_nowait(meet, X, meeting) for _ in range(8)))
    names = [await thread_name(X) for _ in range(50)]
    changes = sum(a != b for a, b in itertools.pairwise(names))
    assert changes <= 5  # a busy machine may make a thread look stuck


@pytest.mark.asyncio
async def test_idle_threads_end():
    """Threads that nothing was handed to for worker_idle_timeout end, and calls start new ones."""
    configure(worker_idle_timeout=0.05)
    meeting = Rendezvous(8)
    await gather(*(TaskChannel().submit_nowait(meet, X, meeting) for _ in range(8)))
    await eventually(
        lambda: not worker_threads() and not runtime.statistics().workers, timeout=15.0
    )
    assert await same(X) is X


@pytest.mark.asyncio
async def test_threads_are_named_and_no_daemons():
    """Every thread of the library says whose it is, and is joined at exit: a daemon may abort it."""
    started, gate = Gate(), Gate()
    async with open_task_channel("own", dedicated_thread=True):
        hold(X, started, gate)
        await started.wait_async()
        other = TaskChannel().submit_nowait(same, X)
        await other
        library = [t for t in threading.enumerate() if t.name.startswith("aiocolocated")]
        names = {re.sub(r"\d+$", "N", t.name) for t in library}
        # Of `from_thread`, and of callbacks, if an earlier test used them.
        names -= {"aiocolocated-loop", "aiocolocated-loop-N"}
        assert names == {
            "aiocolocated-worker-N",
            "aiocolocated-service",
            "aiocolocated-channel-own",
        }
        assert not any(t.daemon for t in library)
        gate.open()


def test_threads_started_by_a_daemon_are_none():
    """As a callback on a thread of XLA's does it."""
    ended = threading.Event()
    inherited: list[bool] = []

    def start() -> None:
        _service.start_thread(
            lambda: (inherited.append(threading.current_thread().daemon), ended.set()),
            "aiocolocated-test",
        )

    threading.Thread(target=start, daemon=True).start()
    assert ended.wait(20)
    assert inherited == [False]


def test_threads_started_by_a_callback_know_subnormal_numbers():
    """XLA has its threads flush them to zero, and threads inherit that."""
    ended = threading.Event()
    seen: dict[str, float] = {}
    tiny = 5e-324

    def compute() -> None:
        seen["thread"] = tiny * 1.0
        ended.set()

    def start(x: jax.Array) -> jax.Array:
        seen["callback"] = tiny * 1.0
        _service.start_thread(compute, "aiocolocated-test")
        return x

    jax.jit(lambda x: jax.pure_callback(start, x, x))(X).block_until_ready()
    assert ended.wait(20)
    assert seen == {"callback": 0.0, "thread": tiny}


@pytest.mark.asyncio
async def test_default_executor_untouched():
    """Nothing of the library uses the loop's executor, which belongs to asyncio.to_thread."""
    loop = asyncio.get_running_loop()

    async def program() -> None:
        async with TaskGroup() as group, open_task_channel(dedicated_thread=True) as channel:
            group.start_soon(same, X)
            await channel.submit(same, X)
            await channel.run(jax.jit(lambda x: x + 1), X)
            await wait_until_ready(X @ X)
            same(X).add_done_callback(lambda fut: None)
        await same.map([X] * 4, limit=2)

    await program()
    assert loop._default_executor is None


@pytest.mark.asyncio
async def test_busy_channel_lets_others_in():
    """With one thread a channel with thousands of quick calls does not keep it to itself."""
    configure(worker_limit=1)
    await end_workers()
    busy, other = TaskChannel(), TaskChannel()
    started, gate = Gate(), Gate()
    busy.submit_nowait(hold, X, started, gate)  # until all are submitted
    calls = [busy.submit_nowait(same, X) for _ in range(10_000)]
    single = other.submit_nowait(same, X)
    gate.open()
    await single
    assert not calls[-1].done()
    await gather(*calls)


@pytest.mark.parametrize("behind", [0, 4])
@pytest.mark.asyncio
async def test_long_body_after_short_ones_holds_no_waiter_up(behind, monkeypatch):
    """Loops are woken once for several short bodies, and by the watch if the next one takes long."""
    monkeypatch.setattr(_workers, "_QUICK", 60.0)  # every body counts as short
    monkeypatch.setattr(_workers, "_LONGEST_OWED", 60.0)
    may_wait = _workers.Worker._may_wait
    waited = []

    def spy(*args):
        answer = may_wait(*args)
        waited.append(answer)
        return answer

    monkeypatch.setattr(_workers.Worker, "_may_wait", spy)
    configure(worker_limit=8)
    held, started, gate = Gate(), Gate(), Gate()
    async with TaskGroup() as group:
        group.start_soon(hold, X, started, held)
        await started.wait_async()
        short = [group.start_soon(same, X) for _ in range(4)]
        for _ in range(1 + behind):
            group.start_soon(hold, X, Gate(), gate)
        await gather(*short)
        gate.open()  # it was not the end of the long bodies that woke this task
        held.open()
    assert any(waited)


# --- what they hold -----------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_idle_workers_hold_nothing():
    """A result goes with its future, also if its worker was looked at while it ran."""

    def make(x: jax.Array) -> jax.Array:
        time.sleep(0.03)  # long enough to count as stuck
        return x + 1

    f = colocated_python(make)
    calls = [TaskChannel().submit_nowait(f, X) for _ in range(4)]
    arrays = [weakref.ref(array) for array in await gather(*calls)]
    calls.clear()
    gc.disable()
    try:
        await eventually(lambda: not any(array() is not None for array in arrays))
    finally:
        gc.enable()


def grown(make: Callable[[], object], count: int) -> tuple[float, object]:
    """Bytes of Python's memory per thing made, and the things."""
    gc.collect()
    tracemalloc.start()
    try:
        made = make()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / count, made
    finally:
        tracemalloc.stop()


@pytest.mark.asyncio
async def test_queued_call_takes_at_most_a_kibibyte():
    """A queued call weighs at most 1 KiB, its future included."""
    count = 50_000
    started, gate = Gate(), Gate()
    f = colocated_python(lambda x: x).specialize(devices=jax.devices()[0])
    async with open_task_channel() as channel:
        await f(X)
        hold(X, started, gate)
        await started.wait_async()
        weight, calls = grown(lambda: [f(X) for _ in range(count)], count)
        assert channel.statistics().queued == count
        assert 100 < weight <= 1024
        for call in calls:
            call.cancel()
        gate.open()


@pytest.mark.asyncio
async def test_channel_takes_at_most_two_kibibytes():
    """A channel weighs at most 2 KiB, also after a call."""
    count = 10_000
    await same(X)
    weight, channels = grown(lambda: [TaskChannel() for _ in range(count)], count)
    assert 100 < weight <= 2048
    gc.collect()
    tracemalloc.start()
    try:
        await gather(*(channel.submit_nowait(same, X) for channel in channels))
        gc.collect()
        more = tracemalloc.get_traced_memory()[0] / count
    finally:
        tracemalloc.stop()
    assert weight + more <= 2048


# --- threads of their own -----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_dedicated_thread_runs_every_body_of_its_channel():
    """All bodies of the channel run on one thread, nobody else's does, and no limit counts it."""
    configure(worker_limit=1)
    started, gate = Gate(), Gate()
    blocked = TaskChannel().submit_nowait(hold, X, started, gate)
    await started.wait_async()
    async with open_task_channel("own", dedicated_thread=True) as own:
        names = await gather(*(own.submit_nowait(thread_name, X) for _ in range(20)))
    assert set(names) == {"aiocolocated-channel-own"}
    gate.open()
    await blocked
    assert await thread_name(X) != "aiocolocated-channel-own"


def dedicated_threads(name: str) -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == f"aiocolocated-channel-{name}"]


@pytest.mark.asyncio
async def test_dedicated_thread_ends_with_its_channel():
    """Closing the channel ends its thread, while idle and after what was queued."""
    idle, busy = (TaskChannel(n, dedicated_thread=True) for n in ("idle", "busy"))
    await idle.submit_nowait(same, X)
    await idle.aclose()
    await eventually(lambda: not dedicated_threads("idle"))
    started, gate = Gate(), Gate()
    busy.submit_nowait(hold, X, started, gate)
    queued = busy.submit_nowait(thread_name, X)
    await started.wait_async()
    closing = asyncio.create_task(busy.aclose())
    gate.open()
    await closing
    assert await queued == "aiocolocated-channel-busy"
    await eventually(lambda: not dedicated_threads("busy"))


@pytest.mark.asyncio
async def test_dedicated_thread_ends_when_its_only_call_is_cancelled():
    """A channel may be closed before its thread has woken up for a call that was cancelled."""
    for _ in range(20):
        channel = TaskChannel("brief", dedicated_thread=True)
        await channel.submit_nowait(same, X)
        channel.submit_nowait(same, X).cancel()
        await channel.aclose()
    await eventually(lambda: not dedicated_threads("brief"))


@pytest.mark.asyncio
async def test_dedicated_thread_ends_when_its_channel_is_dropped():
    """A channel that was never closed does not leave its thread behind for ever."""
    configure(worker_idle_timeout=0.0)
    channel = TaskChannel("dropped", dedicated_thread=True)
    await channel.submit_nowait(same, X)
    del channel
    gc.collect()
    await eventually(lambda: not dedicated_threads("dropped"))
    assert runtime.statistics().dedicated == 0


# --- a system that refuses threads --------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_refused_thread_is_tried_again(monkeypatch, caplog):
    """A call whose thread the system refuses waits for one and then runs; it is not lost."""
    await end_workers()
    monkeypatch.setattr(_workers, "_REFUSED_PAUSE", 0.05)
    refused: list[str] = []
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("aiocolocated-worker") and len(refused) < 2:
            refused.append(thread.name)
            # Nothing seems to wait: the call has gone to this thread.
            while len(refused) == 2 and _workers.pool._watching:
                time.sleep(0.0005)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert await asyncio.wait_for(same(X), 10) is X
    assert len(refused) == 2
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == [f"thread {n} was not started: can't start new thread" for n in refused]
    assert runtime.statistics().workers == 1


@pytest.mark.asyncio
async def test_refused_dedicated_thread_is_tried_again(monkeypatch):
    """A channel's own thread is started as soon as the system allows, and no other is used."""
    monkeypatch.setattr(_workers, "_REFUSED_PAUSE", 0.05)
    refused: list[str] = []
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("aiocolocated-channel") and len(refused) < 2:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    async with open_task_channel("own", dedicated_thread=True):
        calls = [thread_name(X) for _ in range(3)]
        names = await asyncio.wait_for(gather(*calls), 10)
    assert names == ["aiocolocated-channel-own"] * 3
    assert len(refused) == 2


@pytest.mark.asyncio
async def test_refused_service_thread_is_tried_again(monkeypatch):
    """The next call starts the service thread that the system refused once."""
    await end_workers()
    monkeypatch.setattr(_service, "_IDLE_SECONDS", 0.05)
    monkeypatch.setattr(_service, "_watched", 0)  # by objects that other tests have open
    configure(slow_call=0.1)  # a nearer look at slow calls
    _service.post(_service._timers.clear)  # in place of one that is seconds away
    await same(X)
    await end_workers()
    await eventually(lambda: not _service.running)
    refused: list[str] = []
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == _service.THREAD_NAME and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    started, gate = Gate(), Gate()
    first = TaskChannel().submit_nowait(hold, X, started, gate)
    await started.wait_async()
    await eventually(lambda: refused and not _service.running)
    second = TaskChannel().submit_nowait(same, X)  # needs a second thread, which the service adds
    assert await asyncio.wait_for(second, 10) is X
    gate.open()
    await first
