# SPDX-License-Identifier: Apache-2.0
"""Waiting without a loop, refusing waits that could never end, and coroutines from synchronous code."""

from __future__ import annotations

import asyncio
import contextvars
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from aiocolocated import (
    ArrayFuture,
    BodyError,
    CallCancelledError,
    DeadlockError,
    TaskChannel,
    TaskGroup,
    as_completed,
    colocated_python,
    configure,
    from_thread,
    gather,
    open_task_channel,
    runtime,
    wait_until_ready,
)
from aiocolocated.testing import Gate, Recorder

TIMEOUT = 20.0  # seconds; only a bug takes that long

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def x() -> jax.Array:
    return jnp.arange(3.0)


@colocated_python
def same(x: jax.Array) -> jax.Array:
    return x


@colocated_python
def hold(x: jax.Array, started: Gate, gate: Gate) -> jax.Array:
    started.open()
    gate.wait()
    return x


@colocated_python
def fail(x: jax.Array, error: Exception) -> jax.Array:
    raise error


@jax.jit
def compute(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 30, lambda _, y: y @ x * 1e-3, x)


@pytest.fixture
def in_thread() -> Iterator[Callable[..., Future[Any]]]:
    """Run something in a thread of its own."""
    with ThreadPoolExecutor() as executor:
        yield executor.submit


# --- result, exception, block_until_ready -----------------------------------------------------------


def test_result_in_a_script(x):
    """Without any loop: the array that the body returned, computed, again and again."""
    fut = colocated_python(lambda m: {"y": compute(m)})(jnp.ones((300, 300)))
    result = fut.result()
    assert result["y"].is_ready()
    assert fut.result(0) is result
    assert fut.block_until_ready() is result
    assert fut.exception() is None


def test_result_in_threads(x, in_thread):
    """Many threads submit and wait at once; each has a channel of its own."""

    def work(i: int) -> list[float]:
        return [float(same(x + i + j).result(TIMEOUT)[0]) for j in range(50)]

    results = [in_thread(work, 100 * i) for i in range(8)]
    assert [r.result(TIMEOUT) for r in results] == [
        [100 * i + j for j in range(50)] for i in range(8)
    ]


def test_errors_without_a_loop(x):
    """``result`` raises the body's own error each time, ``exception`` gives it."""
    error = KeyError("from the body")
    fut = fail(x, error)
    for _ in range(2):
        with pytest.raises(KeyError) as caught:
            fut.result(TIMEOUT)
        assert caught.value is error
    assert fut.exception() is error
    with pytest.raises(KeyError):
        fut.block_until_ready()


def test_cancelled_call_without_a_loop(x, in_thread):
    """A thread that waits is released at once when the call is cancelled; so are later ones."""
    started, gate = Gate(), Gate()
    fut = hold(x, started, gate)
    waiting = [in_thread(fut.result, TIMEOUT), in_thread(fut.exception, TIMEOUT)]
    started.wait()
    while fut._waiter_count < 2:
        time.sleep(0.001)
    fut.cancel()
    for wait in waiting:
        with pytest.raises(CallCancelledError):
            wait.result(TIMEOUT)
    assert runtime.statistics().abandoned == 1  # the body did not go on
    gate.open()
    for method in (fut.result, fut.exception, fut.block_until_ready):
        with pytest.raises(CallCancelledError):
            method()
    from_thread.run(drained, fut)


async def drained(fut: ArrayFuture[Any]) -> None:
    await fut._channel.drain()


@pytest.mark.parametrize("method", ["result", "exception"])
def test_timeout_says_how_far_the_call_got(x, method):
    """Time runs out, the message tells the state, and the call goes on."""
    started, gate, lane = Gate(), Gate(), TaskChannel("the lane")
    running = lane.submit_nowait(hold, x, started, gate)
    queued = lane.submit_nowait(same, x)
    started.wait()
    for fut, timeout, words in (
        (running, 0.01, r"^hold is still running after 0.01 s \(submitted 0\.\d+ s ago at .*\.py:"),
        (queued, 0.01, r"^same is still queued in channel 'the lane' after 0.01 s"),
        (queued, 0, r"still queued"),
        (queued, -1, r"still queued"),
    ):
        with pytest.raises(TimeoutError, match=words):
            getattr(fut, method)(timeout)
    gate.open()
    assert queued.result(TIMEOUT) is x
    assert running.result(0) is x


def test_timeout_while_arrays_compute():
    """The body has returned; its arrays are what is waited for."""
    m = jnp.ones((500, 500))
    jax.block_until_ready(compute(m))
    fut = colocated_python(lambda m: compute(m))(m)
    while not fut.dispatched():
        time.sleep(0.0005)
    if not fut.done():
        with pytest.raises(TimeoutError, match="still waiting for its arrays after 0"):
            fut.result(0)
    assert fut.result(TIMEOUT).is_ready()


def test_jax_block_until_ready_takes_trees_of_futures(x):
    """JAX's function waits for the futures in a tree and returns them."""
    m = jnp.ones((300, 300))
    tree = {"a": colocated_python(lambda m: compute(m))(m), "b": [same(x), 3]}
    assert jax.block_until_ready(tree) is not None
    assert tree["a"].done()
    assert tree["b"][0].done()
    assert tree["a"].result(0).is_ready()


def test_jax_block_until_ready_raises_errors(x):
    """Errors come through, also an AttributeError, which JAX would take for a missing method."""
    with pytest.raises(KeyError):
        jax.block_until_ready([same(x), fail(x, KeyError("k"))])
    error = AttributeError("no such thing")
    fut = fail(x, error)
    with pytest.raises(BodyError, match="fail raised AttributeError: no such thing") as caught:
        jax.block_until_ready(fut)
    assert caught.value.__cause__ is error
    with pytest.raises(AttributeError, match="no such thing"):
        fut.result()


# --- on a loop's thread -------------------------------------------------------------------------------

WAITS: dict[str, Callable[[ArrayFuture[Any]], Any]] = {
    "result": lambda fut: fut.result(),
    "result with timeout": lambda fut: fut.result(5),
    "exception": lambda fut: fut.exception(),
    "block_until_ready": lambda fut: fut.block_until_ready(),
    "jax.block_until_ready": lambda fut: jax.block_until_ready([fut])[0].result(),
    "from_thread.wait": from_thread.wait,
}


@pytest.mark.all_loops
@pytest.mark.parametrize("where", ["task", "callback"])
@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.asyncio
async def test_waiting_on_the_loop_is_refused(x, wait, where):
    """On a running loop's thread an unfinished future raises at once, a finished one never."""
    started, gate = Gate(), Gate()
    fut = hold(x, started, gate)
    loop = asyncio.get_running_loop()

    async def attempt() -> Any:
        if where == "task":
            return WAITS[wait](fut)
        outcome = loop.create_future()

        def call() -> None:
            try:
                outcome.set_result(WAITS[wait](fut))
            except DeadlockError as error:
                outcome.set_exception(error)

        loop.call_soon(call)
        return await outcome

    with pytest.raises(DeadlockError, match=r"hold is not finished.*Use 'await fut' instead"):
        await attempt()
    gate.open()
    assert await fut is x
    assert await attempt() is (None if wait == "exception" else x)


@pytest.mark.parametrize("function", ["run", "run_sync", "wait"])
@pytest.mark.asyncio
async def test_from_thread_on_the_loop_is_refused(function):
    """``from_thread`` would stop the loop that it was called on."""

    async def coroutine() -> None:
        return None

    with pytest.raises(DeadlockError, match="await the coroutine instead"):
        if function == "wait":
            awaitable = coroutine()
            try:
                from_thread.wait(awaitable)
            finally:
                awaitable.close()
        else:
            getattr(from_thread, function)(coroutine if function == "run" else int)


# --- bodies that would wait for ever --------------------------------------------------------------------
#
# `lanes` and `calls` let a body reach channels and calls of the test: it runs in this process.

lanes: dict[str, TaskChannel] = {}
calls: dict[str, ArrayFuture[Any]] = {}


@pytest.fixture(autouse=True)
def _fresh_lanes() -> Iterator[None]:
    yield
    lanes.clear()
    calls.clear()


async def await_call(fut: ArrayFuture[Any]) -> Any:
    return await fut


async def gather_call(fut: ArrayFuture[Any]) -> Any:
    return await asyncio.gather(fut)


async def first_of(fut: ArrayFuture[Any]) -> Any:
    return [done async for done in as_completed([fut])]


BODY_WAITS: dict[str, Callable[[ArrayFuture[Any]], Any]] = {
    "result": lambda fut: fut.result(TIMEOUT),
    "exception": lambda fut: fut.exception(TIMEOUT),
    "block_until_ready": lambda fut: fut.block_until_ready(),
    "jax.block_until_ready": lambda fut: jax.block_until_ready([fut]),
    "from_thread.wait": lambda fut: from_thread.wait(fut, TIMEOUT),
    "from_thread.run": lambda fut: from_thread.run(await_call, fut),
    "from_thread.run, in a child task": lambda fut: from_thread.run(gather_call, fut),
    "from_thread.run, gather": lambda fut: from_thread.run(gather, fut),
    "from_thread.run, as_completed": lambda fut: from_thread.run(first_of, fut),
    "from_thread.run, wait_until_ready": lambda fut: from_thread.run(wait_until_ready, [fut]),
}


@pytest.mark.parametrize("wait", BODY_WAITS)
@pytest.mark.asyncio
async def test_body_waiting_in_its_own_channel_is_refused(x, wait):
    """What a body puts behind itself in its channel cannot start before it returns."""
    lane = TaskChannel("own")

    def body(x: jax.Array) -> None:
        BODY_WAITS[wait](lane.submit_nowait(same, x))

    fut = lane.run(body, x)
    with pytest.raises(DeadlockError, match=r"behind it in channel 'own'"):
        await asyncio.wait_for(fut, TIMEOUT)
    assert await lane.submit_nowait(same, x) is x  # the channel goes on
    await lane.aclose()


@pytest.mark.parametrize("wait", ["result", "from_thread.run"])
@pytest.mark.asyncio
async def test_body_waiting_for_itself_is_refused(x, wait):
    """A body that gets hold of its own future does not wait for it."""
    known = Gate()

    def body(x: jax.Array) -> None:
        known.wait()
        BODY_WAITS[wait](calls["self"])

    calls["self"] = TaskChannel().run(body, x)
    known.open()
    with pytest.raises(DeadlockError):
        await asyncio.wait_for(asyncio.shield(calls["self"]), TIMEOUT)


@pytest.mark.parametrize("wait", ["result", "from_thread.run"])
@pytest.mark.parametrize("length", [2, 3, 5])
@pytest.mark.asyncio
async def test_cycle_of_bodies_is_refused(x, length, wait):
    """Bodies that wait for each other in a ring: the last one to wait is told, the others go on."""
    ready = [Gate() for _ in range(length)]

    def body(i: int) -> str:
        ready[i].wait()
        fut = calls[str((i + 1) % length)]
        try:
            if i < length - 1:
                BODY_WAITS[wait](fut)
            else:
                fut.result(TIMEOUT)
        except DeadlockError:
            return "refused"
        return "waited"

    futures = [TaskChannel(str(i)).run(body, i) for i in range(length)]
    calls.update({str(i): fut for i, fut in enumerate(futures)})
    for i in range(length - 1):
        ready[i].open()
        while futures[i]._waiting_on is None:
            await asyncio.sleep(0.001)
    ready[-1].open()
    results = await asyncio.wait_for(gather(*futures), TIMEOUT)
    assert results == ["waited"] * (length - 1) + ["refused"]


@pytest.mark.asyncio
async def test_body_waiting_for_call_behind_who_waits_for_it_is_refused(x):
    """A waits for B; B must not wait for what is queued in A's channel."""
    lane = TaskChannel("of A")
    entered = Gate()

    def a(x: jax.Array) -> jax.Array:
        entered.wait()
        return calls["b"].result(TIMEOUT)

    def b(x: jax.Array) -> str:
        while calls["a"]._waiting_on is None:
            time.sleep(0.001)
        try:
            lane.submit_nowait(same, x).result(TIMEOUT)
        except DeadlockError as error:
            return str(error)
        return "waited"

    calls["a"] = lane.run(a, x)
    calls["b"] = TaskChannel("of B").run(b, x)
    entered.open()
    assert "which cannot start before that body has returned" in await asyncio.wait_for(
        calls["b"], TIMEOUT
    )
    await calls["a"]
    await lane.drain()


@pytest.mark.asyncio
async def test_cycle_with_abandoned_body_is_refused(x):
    """A cancelled call's body still runs, waits, and holds its channel."""
    lane = TaskChannel("of A")
    entered = Gate()

    def a(x: jax.Array) -> jax.Array:
        entered.wait()
        return calls["b"].result(TIMEOUT)

    def b(x: jax.Array) -> str:
        while calls["a"]._waiting_on is None:
            time.sleep(0.001)
        calls["a"].cancel()
        with pytest.raises(DeadlockError):
            lane.submit_nowait(same, x).result(TIMEOUT)
        return "refused"

    calls["a"] = lane.run(a, x)
    calls["b"] = TaskChannel("of B").run(b, x)
    entered.open()
    assert await asyncio.wait_for(calls["b"], TIMEOUT) == "refused"
    await lane.aclose()


@pytest.mark.asyncio
async def test_body_waiting_for_dependent_of_what_is_behind_it_is_refused(x):
    """A call in another channel may depend on one that is queued behind the body."""
    lane, other = TaskChannel("own"), TaskChannel("other")

    def body(x: jax.Array) -> None:
        behind = lane.submit_nowait(same, x)
        other.submit_nowait(same, behind).result(TIMEOUT)

    with pytest.raises(DeadlockError):
        await asyncio.wait_for(lane.run(body, x), TIMEOUT)
    await lane.aclose()
    await other.aclose()


@pytest.mark.asyncio
async def test_body_waiting_behind_such_a_dependent_is_refused(x):
    """The awaited call itself is harmless, but stands in a queue behind one that can never start."""
    lane, other = TaskChannel("own"), TaskChannel("other")

    def body(x: jax.Array) -> None:
        behind = lane.submit_nowait(same, x)
        other.submit_nowait(same, behind)
        other.submit_nowait(same, x).result(TIMEOUT)

    with pytest.raises(DeadlockError):
        await asyncio.wait_for(lane.run(body, x), TIMEOUT)
    await lane.aclose()
    await other.aclose()


@pytest.mark.asyncio
async def test_body_may_wait_for_what_can_finish(x):
    """Nested calls, other channels, and earlier calls of its own channel are no deadlock."""
    lane, other = TaskChannel("own"), TaskChannel("other")
    earlier = lane.submit_nowait(same, x)

    def body(x: jax.Array) -> list[jax.Array]:
        return [
            same(x).result(TIMEOUT),
            other.submit_nowait(same, x).result(TIMEOUT),
            earlier.result(TIMEOUT),
            from_thread.run(await_call, same(x)),
            from_thread.run(gather_call, other.submit_nowait(same, x))[0],
        ]

    results = await asyncio.wait_for(lane.run(body, x), TIMEOUT)
    assert all(r is x for r in results)


@pytest.mark.asyncio
async def test_task_started_by_a_body_is_not_taken_for_it(x):
    """A coroutine that a body has only started may wait for what is queued behind the body."""
    lane = TaskChannel("own")
    tasks: list[asyncio.Task[Any]] = []

    def body(x: jax.Array) -> None:
        behind = lane.submit_nowait(same, x)
        from_thread.run_sync(lambda: tasks.append(asyncio.create_task(await_call(behind))))
        from_thread.run(asyncio.sleep, 0.02)  # the task begins to wait while the body runs

    await asyncio.wait_for(lane.run(body, x), TIMEOUT)
    assert await asyncio.wait_for(tasks[0], TIMEOUT) is x
    await lane.aclose()


CHANNEL_WAITS: dict[str, Callable[[TaskChannel, jax.Array], Any]] = {
    "drain": lambda lane, x: lane.drain(),
    "aclose": lambda lane, x: lane.aclose(),
    "submit": lambda lane, x: lane.submit(same, x),
}


@pytest.mark.parametrize("how", ["from_thread.run", "asyncio.run"])
@pytest.mark.parametrize("wait", CHANNEL_WAITS)
@pytest.mark.asyncio
async def test_waiting_for_own_channel_inside_its_body_is_refused(x, wait, how):
    """``drain``, ``aclose`` and a waiting ``submit`` would wait for the body that calls them."""
    lane = TaskChannel("own", max_pending=1)
    full = Gate()

    def body(x: jax.Array) -> None:
        full.wait()
        run = from_thread.run if how == "from_thread.run" else lambda f: asyncio.run(f())

        async def wait_for_channel() -> Any:
            return await CHANNEL_WAITS[wait](lane, x)

        run(wait_for_channel)

    fut = await lane.submit(body, x)
    while lane.statistics().queued:
        await asyncio.sleep(0.001)
    queued = await lane.submit(same, x)
    full.open()
    with pytest.raises(DeadlockError, match=f"{wait} of channel 'own' was called inside the body"):
        await asyncio.wait_for(fut, TIMEOUT)
    assert await queued is x
    assert lane.statistics().waiting_for_room == 0
    assert not lane.closed
    await lane.aclose()


def test_thread_waiting_for_room_inside_own_body_is_refused(x):
    """Off a loop a full channel makes the caller wait, but not the body that keeps it full."""
    lane = TaskChannel("own", max_pending=1)
    full = Gate()

    def body(x: jax.Array) -> None:
        full.wait()
        lane.submit_nowait(same, x)

    fut = lane.run(body, x)
    while lane.statistics().queued:
        time.sleep(0.001)
    queued = lane.submit_nowait(same, x)
    full.open()
    with pytest.raises(DeadlockError, match="a waiting submit of channel 'own'"):
        fut.result(TIMEOUT)
    assert queued.result(TIMEOUT) is x
    assert lane.statistics().waiting_for_room == 0


def test_thread_waits_for_room(x, in_thread):
    """Off a loop a full channel makes the caller wait until there is room."""
    lane = TaskChannel(max_pending=1)
    started, gate = Gate(), Gate()
    lane.submit_nowait(hold, x, started, gate)
    started.wait()
    lane.submit_nowait(same, x)
    waiting = in_thread(lane.submit_nowait, same, x)
    while not lane.statistics().waiting_for_room:
        time.sleep(0.001)
    gate.open()
    assert waiting.result(TIMEOUT).result(TIMEOUT) is x


# --- from_thread ------------------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_from_thread_in_a_body_uses_the_submitting_loop(x):
    """Coroutines and functions run on the loop whose task submitted the call, nested ones too."""
    loop, thread = asyncio.get_running_loop(), threading.get_ident()

    async def where() -> tuple[asyncio.AbstractEventLoop, int]:
        await asyncio.sleep(0)
        return asyncio.get_running_loop(), threading.get_ident()

    def body(x: jax.Array) -> list[Any]:
        return [
            from_thread.run(where),
            (
                from_thread.run_sync(asyncio.get_running_loop),
                from_thread.run_sync(threading.get_ident),
            ),
            from_thread.wait(where()),
        ]

    def outer(x: jax.Array) -> list[Any]:
        return TaskChannel().run(body, x).result(TIMEOUT)

    for function in (body, outer):
        places = await TaskChannel().run(function, x)
        assert places == [(loop, thread)] * 3


@pytest.mark.asyncio
async def test_from_thread_passes_arguments_and_errors(x):
    """Arguments go in; results and errors come out as they are."""

    async def divide(a: int, *, by: int) -> float:
        return a / by

    def body(x: jax.Array) -> list[Any]:
        with pytest.raises(ZeroDivisionError):
            from_thread.run(divide, 1, by=0)
        with pytest.raises(ZeroDivisionError):
            from_thread.run_sync(lambda: 1 / 0)
        return [from_thread.run(divide, 6, by=3), from_thread.run_sync(divmod, 7, 2)]

    assert await TaskChannel().run(body, x) == [2.0, (3, 1)]


def test_from_thread_in_scripts_and_threads_uses_one_loop(x, in_thread):
    """Without a body there is one loop of the library's, in a thread of its own."""

    async def where() -> tuple[int, str]:
        return id(asyncio.get_running_loop()), threading.current_thread().name

    async def program() -> list[float]:
        async with TaskGroup() as group:
            group.start_soon(same, x)
        return (await same(x)).tolist()

    places = {from_thread.run(where), from_thread.wait(where())}
    places |= {in_thread(from_thread.run, where).result(TIMEOUT) for _ in range(4)}
    assert len(places) == 1
    assert places.pop()[1] == "aiocolocated-loop"
    assert from_thread.run(program) == [0, 1, 2]
    assert from_thread.wait(same(x)) is x


def test_first_users_of_the_own_loop_share_it(run_script):
    """Threads that need the library's loop at the same moment get the same one."""
    finished = run_script("""
        import asyncio, threading
        from aiocolocated import from_thread
        loops, meeting = [], threading.Barrier(8)
        def work():
            meeting.wait()
            loops.append(from_thread.run_sync(asyncio.get_running_loop))
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(len(loops), len(set(loops)))
    """).check()
    assert finished.stdout == "8 1\n"


def test_body_of_a_closed_loop_uses_the_librarys(x):
    """The submitting loop may be gone when the body gets to it."""
    gate = Gate()

    def body(x: jax.Array) -> str:
        gate.wait()
        return from_thread.run_sync(lambda: threading.current_thread().name)

    async def main() -> ArrayFuture[str]:
        return TaskChannel().run(body, x)

    fut = asyncio.run(main())
    gate.open()
    assert fut.result(TIMEOUT) == "aiocolocated-loop"


class ForgettingLoop(asyncio.SelectorEventLoop):
    """Drops what other threads schedule, as every loop does that is about to close."""

    forgets: Gate | None = None

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
        if self.forgets is None:
            return super().call_soon_threadsafe(callback, *args, context=context)
        self.forgets.open()
        return None


@pytest.mark.parametrize("how", ["run", "wait", "wait, with a limit"])
def test_coroutine_forgotten_by_a_closing_loop_runs_on_the_librarys(x, how):
    forgot = Gate()

    async def where() -> str:
        return threading.current_thread().name

    def body(x: jax.Array) -> str:
        if how == "run":
            return from_thread.run(where)
        return from_thread.wait(where(), None if how == "wait" else TIMEOUT)

    async def main() -> ArrayFuture[str]:
        asyncio.get_running_loop().forgets = forgot
        fut = TaskChannel().run(body, x)
        while not forgot.is_open:
            await asyncio.sleep(0.001)
        return fut

    with asyncio.Runner(loop_factory=ForgettingLoop) as runner:
        fut = runner.run(main())
    assert fut.result(TIMEOUT) == "aiocolocated-loop"


def test_coroutine_left_behind_by_a_closed_loop_ends_the_wait(x):
    """A loop closed by hand leaves its tasks where they are."""
    begun = Gate()

    async def forever() -> None:
        begun.open()
        await asyncio.Event().wait()

    def body(x: jax.Array) -> None:
        from_thread.run(forever)

    async def main() -> ArrayFuture[None]:
        fut = TaskChannel().run(body, x)
        while not begun.is_open:
            await asyncio.sleep(0.001)
        return fut

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: None)  # a pending task is destroyed
    fut = loop.run_until_complete(main())
    loop.close()
    with pytest.raises(CallCancelledError, match="its loop has ended"):
        fut.result(TIMEOUT)


def test_from_thread_wait_times_out(x):
    """A call goes on; a coroutine is cancelled."""
    recorder = Recorder()
    started, gate = Gate(), Gate()
    fut = hold(x, started, gate)
    with pytest.raises(TimeoutError, match="hold is still"):
        from_thread.wait(fut, 0.01)
    assert not fut.done()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            recorder.record("cancelled")

    with pytest.raises(TimeoutError):
        from_thread.wait(forever(), 0.05)
    from_thread.run(recorder.wait_for, "cancelled")
    gate.open()
    assert fut.result(TIMEOUT) is x


@pytest.mark.asyncio
async def test_waiting_in_from_thread_gives_the_slot_back(x):
    """With a limit of 1 a body may wait for a coroutine that waits for another body."""
    configure(worker_limit=1)

    async def call() -> jax.Array:
        return await TaskChannel().submit_nowait(same, x)

    def body(x: jax.Array) -> jax.Array:
        return from_thread.run(call)

    assert await asyncio.wait_for(TaskChannel().run(body, x), TIMEOUT) is x


@pytest.mark.asyncio
async def test_body_sees_context_of_its_submitter_only(x):
    """A coroutine run for a body sees the body's context variables."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")

    async def look() -> str:
        return variable.get()

    def body(x: jax.Array) -> list[str]:
        before = from_thread.run(look)
        variable.set("in the body")
        return [before, from_thread.run(look)]

    variable.set("of the submitter")
    assert await TaskChannel().run(body, x) == ["of the submitter", "in the body"]
    assert variable.get() == "of the submitter"


@pytest.mark.asyncio
async def test_cancelled_call_leaves_its_coroutine_alone(x):
    """The body of a cancelled call goes on, and so does the coroutine that it waits for."""
    started, gate, ended = Gate(), Gate(), Gate()

    async def wait() -> None:
        started.open()
        await gate.wait_async()

    def body(x: jax.Array) -> None:
        from_thread.run(wait)
        ended.open()

    async with open_task_channel() as channel:
        fut = channel.run(body, x)
        await started.wait_async()
        fut.cancel()
        gate.open()
    assert ended.is_open


def test_interrupt_cancels_coroutine(start_script):
    """Ctrl-C in a script that waits in ``from_thread.run`` cancels the coroutine, whose clean-up runs."""
    running = start_script("""
        import asyncio, threading
        from aiocolocated import from_thread
        cleaned = threading.Event()
        async def forever():
            print("waiting", flush=True)
            try:
                await asyncio.Event().wait()
            finally:
                cleaned.set()
        try:
            from_thread.run(forever)
        except KeyboardInterrupt:
            print(cleaned.wait(20), flush=True)
    """)
    running.wait_for("waiting")
    running.process.send_signal(signal.SIGINT)
    assert running.finish().check().stdout == "waiting\nTrue\n"


def test_exit_exceptions_of_a_coroutine_leave_the_own_loop_alone():
    """They arrive where the coroutine was waited for; the library's loop goes on."""

    async def leave(error):
        raise error

    async def answer():
        return 5

    for error in (SystemExit(3), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            from_thread.run(leave, error)
        assert from_thread.run(answer) == 5


def test_cancelled_coroutine_is_named():
    """Not an empty CancelledError of concurrent.futures."""

    async def cancelled():
        raise asyncio.CancelledError

    with pytest.raises(CallCancelledError, match="was cancelled"):
        from_thread.run(cancelled)
