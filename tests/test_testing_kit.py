# SPDX-License-Identifier: Apache-2.0
"""The test kit: every check fails when it should, and passes when it should, under each plugin.

The samples run in a pytest of their own. The name of a sample says how it has to end (`test_passes_...`,
`test_fails_...` in the test itself, `test_errors_...` after it), and the string in it what the report
has to say.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import importlib.metadata
import inspect
import json
import pickle
import re
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import cloudpickle
import jax
import pytest

import aiocolocated.testing
from aiocolocated.testing import (
    BlockingGuard,
    Gate,
    LeakCheck,
    LeakError,
    Recorder,
    Rendezvous,
    allow_blocking,
    forbid_blocking,
    measure_loop_gap,
)

pytest_plugins = "pytester"
# The tests here block loops and leave things behind on purpose.
pytestmark = [pytest.mark.no_blocking(False), pytest.mark.leak_check(False)]

MODES = {  # name: (setting of pytest-asyncio, mark of an async sample, arguments)
    "strict": ("strict", "pytest.mark.asyncio", ()),
    "auto": ("auto", "lambda function: function", ()),
    "anyio": ("strict", "pytest.mark.anyio", ()),
    "xdist": ("strict", "pytest.mark.asyncio", ("-n", "2")),
}

HEAD = """
    import asyncio, gc, os, threading, time
    import jax, jax.numpy as jnp, numpy as np, pytest
    from aiocolocated.testing import Gate, allow_blocking, forbid_blocking

    aio = {mark}
    quick = pytest.mark.leak_check(timeout=0.1)
    kept, stuck = [], Gate()

    @pytest.fixture(scope="module", autouse=True)
    def freed():
        yield
        stuck.open()

    @pytest.fixture(scope="module")
    def anyio_backend():
        return "asyncio"

    @jax.jit
    def compute(rounds):
        return jax.lax.fori_loop(0, rounds, lambda i, y: y @ y * 0.001, jnp.ones((500, 500)))

    @pytest.fixture(scope="module")
    def pending():
        times = []
        for _ in range(5):
            start = time.perf_counter()
            compute(10).block_until_ready()
            times.append(time.perf_counter() - start)
        rounds = int(3 / min(times)) + 1    # 0.3 s
        def make():
            array = compute(rounds)
            assert not array.is_ready()
            return array
        return make
"""

SAMPLES = """
    # --- the guard

    @aio
    @pytest.mark.no_blocking
    async def test_fails_sleep():
        "Blocking call to time.sleep"
        time.sleep(0)

    @aio
    async def test_fails_sleep_with_fixture(no_blocking):
        "Blocking call to time.sleep"
        time.sleep(0)

    @aio
    async def test_passes_sleep_without_guard():
        time.sleep(0)

    @aio
    @pytest.mark.no_blocking
    async def test_fails_swallowed():
        "blocking call to time.sleep on the event loop(.|\\n)*in test_fails_swallowed"
        try:
            time.sleep(0)
        except Exception:
            pass

    @aio
    @pytest.mark.no_blocking
    async def test_fails_in_callback():
        "blocking call to time.sleep"
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: None)
        loop.call_soon(time.sleep, 0)
        await asyncio.sleep(0.01)

    @aio
    async def test_passes_expected(no_blocking):
        with pytest.raises(Exception, match="time.sleep.*allow_blocking"):
            time.sleep(0)
        assert [call.function for call in no_blocking.calls] == ["time.sleep"]
        no_blocking.clear()

    @aio
    @pytest.mark.no_blocking
    async def test_passes_allowed():
        async def child():
            time.sleep(0)
        with allow_blocking():
            await asyncio.sleep(0.001)
            time.sleep(0)
            await asyncio.gather(child())

    @aio
    @pytest.mark.no_blocking
    async def test_fails_allowed_elsewhere():
        "Blocking call to time.sleep"
        inside, leave = Gate(), Gate()
        async def other():
            with allow_blocking():
                inside.open()
                await leave.wait_async()
        task = asyncio.create_task(other())
        await inside.wait_async()
        try:
            time.sleep(0)
        finally:
            leave.open()
            await task

    @aio
    @pytest.mark.no_blocking
    async def test_passes_in_thread(pending):
        array = pending()
        await asyncio.to_thread(array.block_until_ready)
        assert np.asarray(array).shape == (500, 500)    # ready

    @pytest.mark.no_blocking
    def test_passes_without_loop(pending):
        pending().block_until_ready()
        time.sleep(0)

    @aio
    @pytest.mark.no_blocking(grace=0)
    async def test_fails_pending_array(pending):
        "Blocking call to jax.Array.tolist.*wait_until_ready"
        pending().tolist()

    @aio
    @pytest.mark.no_blocking(max_gap=0.1)
    async def test_fails_busy_loop():
        "blocked for [0-9.]+ s, at most 0[.]1 s(.|\\n)*sum[(]range"
        until = time.perf_counter() + 0.3
        while time.perf_counter() < until:
            sum(range(1000))

    @aio
    @pytest.mark.no_blocking(max_gap=10)
    async def test_passes_max_gap():
        await asyncio.sleep(0.02)

    @aio
    async def test_passes_loop_gap(loop_gap):
        await asyncio.sleep(0.05)
        assert loop_gap.ticks >= 1
        time.sleep(0.4)
        assert loop_gap.max_seconds >= 0.4       # before the loop runs again
        loop_gap.reset()
        await asyncio.sleep(0.01)
        assert loop_gap.max_seconds < 0.4

    # --- the leak check

    @quick
    def test_errors_thread():
        "thread 'lost', a daemon, still runs:(.|\\n)*in body(.|\\n)*stuck.wait"
        def body():
            stuck.wait(60)
        threading.Thread(target=body, name="lost", daemon=True).start()

    def test_passes_thread_on_its_way_out(leak_check):
        threading.Timer(0.05, int).start()

    @quick
    def test_errors_array():
        r"array float32\\[3,5\\] on .*cpu:0.*60 bytes; held by list in module test_samples.kept"
        kept.append(jnp.ones((3, 5)))

    @quick
    def test_passes_array_of_a_cycle():
        cycle = [jnp.ones(3)]
        cycle.append(cycle)

    @pytest.mark.leak_check(timeout=0.1, collect=False)
    def test_errors_array_of_a_cycle():
        r"array float32\\[3,5\\]"
        gc.disable()
        cycle = [jnp.ones((3, 5))]
        cycle.append(cycle)

    def test_passes_collector_on_again():
        gc.enable()

    @quick
    def test_passes_array_kept_before():
        assert jnp.ones(3).sum() == 3

    @quick
    def test_errors_descriptor(tmp_path):
        "descriptor [0-9]+ -> .*/left.txt"
        kept.append(os.open(tmp_path / "left.txt", os.O_CREAT))

    @quick
    def test_passes_descriptor(tmp_path):
        os.close(os.open(tmp_path / "closed.txt", os.O_CREAT))

    @aio
    @quick
    async def test_fails_task():
        "task <Task pending .*coro=<test_fails_task.<locals>.forgotten"
        async def forgotten():
            await asyncio.sleep(30)
        kept.append(asyncio.create_task(forgotten()))
        await asyncio.sleep(0)

    @aio
    @pytest.mark.leak_check
    async def test_passes_task_on_its_way_out():
        asyncio.create_task(asyncio.sleep(0.05))

    @aio
    @pytest.mark.leak_check(timeout=0.1, tasks=False)
    async def test_passes_task_unchecked():
        kept.append(asyncio.create_task(asyncio.sleep(30)))

    @aio
    @pytest.mark.leak_check(timeout=0.1, arrays=False, threads=False, descriptors=False)
    async def test_passes_unchecked(tmp_path):
        kept.append(os.open(tmp_path / "left.txt", os.O_CREAT))
        kept.append(jnp.ones(3))
        threading.Thread(target=stuck.wait, args=(60,), daemon=True).start()

    @pytest.fixture
    def opened(tmp_path):
        with open(tmp_path / "open.txt", "w") as file:
            yield [file, jnp.ones(3)]

    @aio
    @quick
    async def test_passes_clean(opened):
        await asyncio.to_thread(int)
        with pytest.raises(ValueError):
            local = jnp.ones(3)
            raise ValueError
        assert (opened[1] + jax.random.uniform(jax.random.key(0), 3)).shape == (3,)

    @aio
    @quick
    async def test_fails_by_itself_only():
        "only this"
        kept.append(jnp.ones(3))
        raise RuntimeError("only this")
"""

REPORTER = """
    import json, os

    def pytest_runtest_logreport(report):
        if "PYTEST_XDIST_WORKER" in os.environ:
            return  # the controller reports the same
        with open("reports.jsonl", "a") as file:
            name = report.nodeid.split("::")[-1].split("[")[0]
            print(json.dumps([name, report.when, report.outcome, report.longreprtext]), file=file)
"""


@pytest.fixture
def kit(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A pytester whose processes find the plugin, also where the package is not installed."""
    root = Path(aiocolocated.testing.__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    for variable in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS"):
        monkeypatch.delenv(variable, raising=False)
    pytester.makeconftest(textwrap.dedent(REPORTER))
    return pytester


def run(kit: pytest.Pytester, *args: str, mode: str = "strict", ini: str = "") -> pytest.RunResult:
    installed = importlib.metadata.entry_points(group="pytest11", name="aiocolocated")
    plugin = () if installed else ("-p", "aiocolocated.testing.plugin")
    kit.makeini(
        f"[pytest]\nasyncio_mode = {mode}\nasyncio_default_fixture_loop_scope = function\n{ini}"
    )
    return kit.runpytest_subprocess(*plugin, *args, timeout=60)


def ends(kit: pytest.Pytester) -> dict[str, tuple[str, str]]:
    """How each sample ended, and what its report says."""
    found: dict[str, tuple[str, str]] = {}
    for line in (kit.path / "reports.jsonl").read_text().splitlines():
        name, when, outcome, text = json.loads(line)
        if when == "call":
            found[name] = ("passes" if outcome == "passed" else "fails", text)
        elif outcome == "failed":
            first, _ = found.get(name, ("passes", ""))
            found[name] = ("errors" if first == "passes" else "fails and errors", text)
    return found


def expected_ends(samples: str) -> dict[str, tuple[str, str]]:
    """What name and string of each sample promise."""
    pattern = re.compile(r'def (test_(passes|fails|errors)_\w+)\(.*\):\s+(?:r?"(.*)"\n)?')
    return {name: (end, text or "") for name, end, text in pattern.findall(samples)}


@pytest.mark.parametrize("mode", MODES)
def test_samples_end_as_named(kit: pytest.Pytester, mode: str) -> None:
    """Under pytest-asyncio in both modes, anyio's plugin and xdist, every check does its work."""
    setting, mark, args = MODES[mode]
    kit.makepyfile(test_samples=textwrap.dedent(HEAD.format(mark=mark) + SAMPLES))
    result = run(kit, *args, mode=setting)
    expected, found = expected_ends(SAMPLES), ends(kit)
    assert len(expected) == len(re.findall(r" def test_", SAMPLES))
    assert {n: found.get(n, ("missing",))[0] for n in expected} == {
        n: end for n, (end, _) in expected.items()
    }, result.stdout.str()
    for name, (_, text) in expected.items():
        assert re.search(text, found[name][1]), f"{name}: {text!r} is not in\n{found[name][1]}"


def test_settings_apply_to_all(kit: pytest.Pytester) -> None:
    """The settings switch the checks on for all kinds of tests; a mark switches them off."""
    kit.makepyfile(
        test_samples=textwrap.dedent(
            HEAD.format(mark="pytest.mark.asyncio(loop_scope='module')")
            + """
    import unittest
    from hypothesis import given, settings, strategies as st

    started = jnp.ones(3)

    @aio
    async def test_passes_first():
        "the loop of this module is open for the tests to come"
        await asyncio.to_thread(int)

    @aio
    async def test_fails_blocking():
        "Blocking call to time.sleep"
        time.sleep(0)

    @aio
    @pytest.mark.no_blocking(False)
    async def test_passes_blocking():
        time.sleep(0)

    @pytest.mark.leak_check(timeout=0.1)
    def test_errors_leak():
        "array"
        kept.append(jnp.ones(3))

    @pytest.mark.leak_check(False)
    def test_passes_leak():
        kept.append(jnp.ones(3))

    def test_passes_devices(cpu_devices, cpu_mesh, recorder):
        assert len(cpu_devices) == 8 == len(jax.devices("cpu"))
        assert cpu_mesh.shape == {"x": 8}
        assert recorder.events == []

    class TestMethods:
        @aio
        async def test_fails_method(self):
            "Blocking call to time.sleep"
            time.sleep(0)

    class TestUnit(unittest.IsolatedAsyncioTestCase):
        async def test_passes_unit(self):
            await asyncio.sleep(0)

    @aio
    @settings(max_examples=3, database=None, deadline=None)
    @given(st.integers())
    async def test_passes_given(i):
        await asyncio.sleep(0)

    @aio
    @pytest.mark.leak_check(timeout=0.1)
    @settings(max_examples=1, database=None, deadline=None)
    @given(st.just(1))
    async def test_fails_given(i):
        "task"
        kept.append(asyncio.create_task(asyncio.sleep(30)))
"""
        )
    )
    settings = (
        "colocated_cpu_devices = 8\ncolocated_no_blocking = true\ncolocated_leak_check = true"
    )
    result = run(kit, ini=settings)
    ended = {name: end for name, (end, _) in ends(kit).items()}
    assert ended == {name: name.split("_")[1] for name in ended}, result.stdout.str()
    assert len(ended) == 10


def test_devices_from_option(kit: pytest.Pytester) -> None:
    """The option beats the setting, also on xdist's workers, and starts no backend by itself."""
    kit.makepyfile(
        """
        import jax
        from aiocolocated import _compat

        def test_devices(request):
            assert not _compat.backend_started()
            assert len(request.getfixturevalue("cpu_devices")) == 3
        """
    )
    result = run(kit, "--colocated-cpu-devices", "3", "-n", "1", ini="colocated_cpu_devices = 2")
    result.assert_outcomes(passed=1)


def test_devices_too_late_is_a_usage_error(kit: pytest.Pytester) -> None:
    """JAX started with another number before pytest was configured: said in words, at once."""
    kit.makepyfile(early="import jax; jax.devices()")
    kit.makepyfile("def test_nothing(): pass")
    kit.syspathinsert()
    result = run(kit, "-p", "early", ini="colocated_cpu_devices = 2")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*2 CPU devices wanted, but JAX was started already, with 1*"])


def test_devices_changed_later_is_told(kit: pytest.Pytester) -> None:
    """A test file that asks for another number is found out when the devices are used."""
    kit.makepyfile(
        """
        import jax
        jax.config.update("jax_num_cpu_devices", 4)
        def test_devices(cpu_devices): pass
        """
    )
    result = run(kit, ini="colocated_cpu_devices = 2")
    result.stdout.fnmatch_lines(["*2 CPU devices wanted, JAX was started with 4*"])


def test_devices_of_no_number_are_refused(kit: pytest.Pytester) -> None:
    result = run(kit, ini="colocated_cpu_devices = many")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*expected a positive number, got 'many'*"])


def test_plugin_is_quiet_for_others(kit: pytest.Pytester) -> None:
    """Without settings and marks: no blockbuster, no patched function, no backend."""
    kit.makepyfile(
        """
        import sys, time, types
        from aiocolocated import _compat

        def test_nothing():
            assert isinstance(time.sleep, types.BuiltinFunctionType)
            assert "blockbuster" not in sys.modules
            assert not _compat.backend_started()
        """
    )
    run(kit).assert_outcomes(passed=1)


def test_guard_without_blockbuster_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from aiocolocated.testing import _guard

    monkeypatch.setattr(_guard._Engine, "_instance", None)
    monkeypatch.setitem(sys.modules, "blockbuster", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'aiocolocated[testing]'")):
        forbid_blocking().__enter__()


# --- the guard, call by call ---------------------------------------------------------------------------


def slow_array():
    """An array that is computed for 0.5 s or so on this machine."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def compute(rounds):
        start = jnp.ones((500, 500))
        return jax.lax.fori_loop(0, rounds, lambda i, y: y @ y * 0.001, start).sum()

    times = []
    for _ in range(5):
        start = time.perf_counter()
        compute(10).block_until_ready()
        times.append(time.perf_counter() - start)
    array = compute(int(5 / min(times)) + 1)
    assert not array.is_ready()
    return array


def blocking_calls() -> dict[str, object]:
    import jax
    import numpy as np

    calls = {
        "jax.block_until_ready": lambda x: jax.block_until_ready({"a": [x, 1]}),
        "jax.device_get": lambda x: jax.device_get([x]),
        "jax.effects_barrier": lambda x: jax.effects_barrier(),
        "jax.Array.block_until_ready": lambda x: x.block_until_ready(),
        "jax.Array.item": lambda x: x.item(),
        "jax.Array.tolist": lambda x: x.tolist(),
        "jax.Array.__array__": lambda x: x.__array__(),
        "jax.Array.__bool__": lambda x: bool(x),
        "jax.Array.__float__": lambda x: float(x),
        "jax.Array.__int__": lambda x: int(x),
        "jax.Array.__str__": lambda x: str(x),
        "jax.Array.__format__": lambda x: f"{x:.3f}",
        "jax.Array.__reduce__": lambda x: pickle.dumps(x),
        "jax.Array.__dlpack__": lambda x: np.from_dlpack(x),
        "numpy.asarray": lambda x: np.asarray(x),
        "numpy.array": lambda x: np.array([x, x]),
    }
    if sys.version_info >= (3, 12):
        calls["jax.Array.__buffer__"] = lambda x: memoryview(x)
    return calls


@pytest.mark.asyncio
async def test_guard_refuses_every_call_on_a_pending_array_only() -> None:
    """Each refuses a pending array and takes a ready one; the patches are gone afterwards."""
    array = slow_array()
    calls = blocking_calls()
    with forbid_blocking(grace=0) as guard:
        for name, call in calls.items():
            with pytest.raises(Exception, match=re.escape(f"Blocking call to {name} ")):
                call(array)
        if sys.version_info >= (3, 12):
            import numpy as np

            with pytest.raises(Exception, match=r"Blocking call to jax\.Array"):
                np.add(array, 1)  # NumPy tries the buffer, then __array__
        assert not array.is_ready()
        assert {call.function for call in guard.calls} == set(calls)
        assert guard.calls[0].stack.endswith('jax.block_until_ready({"a": [x, 1]}),\n')
        guard.clear()
        while not array.is_ready():
            await asyncio.sleep(0.01)
        for name, call in calls.items():
            if name != "jax.effects_barrier":  # which cannot be asked whether it would wait
                call(array)
        assert guard.calls == []
    array = slow_array()
    float(array)


@pytest.mark.asyncio
async def test_guard_takes_deleted_and_traced_arrays() -> None:
    """There is nothing to wait for: JAX's own errors come through."""
    import jax
    import jax.numpy as jnp

    array, key = jnp.float32(3), jax.random.key(0)
    array.delete()
    with forbid_blocking(grace=0) as guard:
        with pytest.raises(RuntimeError, match="deleted"):
            jax.block_until_ready([array])
        with pytest.raises(RuntimeError, match="deleted"):
            float(array)
        with allow_blocking():
            jax.block_until_ready(key)
        with pytest.raises(TypeError, match="traced"):
            jax.jit(lambda x: float(x))(1.0)
    assert guard.calls == []


@pytest.mark.asyncio
async def test_guard_gives_pending_work_a_moment() -> None:
    """What is ready within the grace is no blocked loop."""
    array = slow_array()
    with forbid_blocking(grace=60) as guard:
        float(array)
    assert guard.calls == []


@pytest.mark.asyncio
async def test_guard_refuses_locks_threads_and_queues() -> None:
    """A lock that is free, an ended thread and a filled queue do not block; others do."""
    import queue

    gate, lock, items = Gate(), threading.Lock(), queue.SimpleQueue()
    thread = threading.Thread(target=gate.wait)
    thread.start()
    with forbid_blocking() as guard:
        lock.acquire()
        for call in (lock.acquire, thread.join, items.get, threading.Event().wait):
            with pytest.raises(Exception, match="Blocking call"):
                call()
        assert not lock.acquire(False)
        lock.release()
        items.put(1)
        items.get()
        gate.open()
        while thread.is_alive():
            await asyncio.sleep(0.001)
        thread.join()
    assert [call.function for call in guard.calls] == [
        "threading.Lock.acquire",
        "threading.Thread.join",
        "queue.SimpleQueue.get",
        "threading.Lock.acquire",
    ]


@pytest.mark.asyncio
async def test_guard_refuses_thread_starts_of_the_library_only() -> None:
    """`Thread.start` waits for the new thread: the library must not do that on a loop."""
    library = Path(aiocolocated.testing.__file__).parents[1] / "_example.py"
    scope: dict[str, object] = {}
    exec(compile("def start(thread): thread.start()", str(library), "exec"), scope)
    with forbid_blocking():
        thread = threading.Thread(target=int)
        with pytest.raises(Exception, match=r"Blocking call to threading\.Thread\.start"):
            scope["start"](thread)
        thread.start()
        await asyncio.to_thread(thread.join)


def test_guard_leaves_functions_picklable() -> None:
    """A body may capture a patched function, or one from before; both come back as the original."""
    from time import sleep

    with forbid_blocking():
        shipped = [cloudpickle.dumps(function) for function in (sleep, time.sleep, lambda: sleep)]
        assert time.sleep is not sleep
    assert [cloudpickle.loads(data) for data in shipped[:2]] == [sleep, sleep]
    assert cloudpickle.loads(shipped[2])() is sleep


@pytest.mark.asyncio
async def test_guard_can_be_nested() -> None:
    """The innermost one counts; the patches stay until the outermost one ends."""
    with forbid_blocking() as outer:
        with forbid_blocking() as inner, pytest.raises(Exception, match="sleep"):
            time.sleep(0)
        with pytest.raises(Exception, match="sleep"):
            time.sleep(0)
    assert (len(outer.calls), len(inner.calls)) == (1, 1)
    time.sleep(0)
    assert isinstance(outer, BlockingGuard)


def test_guard_and_gap_on_uvloop() -> None:
    """Another kind of loop is no different."""
    uvloop = pytest.importorskip("uvloop")

    async def main() -> None:
        with forbid_blocking(), pytest.raises(Exception, match="Blocking call to time"):
            time.sleep(0)
        async with LeakCheck(), measure_loop_gap() as gap:
            time.sleep(0.3)
        assert gap.max_seconds >= 0.3
        assert "time.sleep(0.3)" in (gap.where or "")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


# --- gap, leaks, outside pytest -------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_gap_sees_what_blocks_at_both_ends() -> None:
    """Also before the first tick and after the last one, with the stack of the loop's thread."""
    async with measure_loop_gap() as gap:
        time.sleep(0.3)
    assert gap.max_seconds >= 0.3
    assert "time.sleep(0.3)" in (gap.where or "")
    before = gap.max_seconds
    time.sleep(0.01)
    assert gap.max_seconds == before


@pytest.mark.asyncio
async def test_gap_without_watch_has_no_stack() -> None:
    async with measure_loop_gap(interval=0.001, watch=None) as gap:
        time.sleep(0.1)
        while gap.ticks < 2:
            await asyncio.sleep(0.001)
    assert gap.max_seconds >= 0.1
    assert gap.where is None


def test_gap_needs_a_loop() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        measure_loop_gap().__aenter__().send(None)


def test_leak_check_outside_pytest() -> None:
    """Synchronous: threads, arrays and descriptors, all in one error."""
    gate = Gate()
    with pytest.raises(LeakError, match="thread 'lost'") as caught, LeakCheck(timeout=0.05):
        thread = threading.Thread(target=gate.wait, name="lost")
        thread.start()
        left = open(__file__)  # noqa: SIM115
    assert len(caught.value.leaks) == 2
    assert f"-> {Path(__file__).resolve()}" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    gate.open()
    thread.join()
    left.close()


@pytest.mark.asyncio
async def test_leak_check_on_a_loop() -> None:
    """Asynchronous: tasks too, and what ends soon is waited for without blocking the loop."""
    with pytest.raises(LeakError, match="task <Task pending"):
        async with LeakCheck(timeout=0.02):
            task = asyncio.create_task(asyncio.sleep(30))
    task.cancel()
    async with LeakCheck():
        last = asyncio.create_task(asyncio.sleep(0.05))
    assert last.done()


def test_leak_check_is_silent_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), LeakCheck():
        thread = threading.Thread(target=lambda: 1 / 1)
        thread.start()
        _ = 1 / 0
    thread.join()


def test_leak_check_knows_old_arrays_by_their_buffers() -> None:
    """A call may look at the shards of an array, which keeps them; they are no leak of the block."""
    array = jax.numpy.ones(3)
    same = aiocolocated.colocated_python(lambda x: x)
    with LeakCheck(timeout=0.1):
        assert same(array).result(10) is array
        assert array.addressable_data(0).shape == (3,)
    with pytest.raises(LeakError, match=r"float32\[3\]"), LeakCheck(timeout=0.1):
        copied = array.copy()
    del copied


def test_leak_check_holds_no_frame_of_another_thread() -> None:
    """What that thread's functions had in their variables is gone when they have returned."""
    refs: list[weakref.ref[Gate]] = []
    begun, end = Gate(), Gate()

    def run() -> None:
        thing = Gate()
        refs.append(weakref.ref(thing))
        begun.open()
        end.wait()

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    gc.disable()
    try:
        with LeakCheck():
            pass
        end.open()
        thread.join()
        assert refs[0]() is None
    finally:
        gc.enable()


# --- recorder, gate, rendezvous ---------------------------------------------------------------------------


def shipped(function):
    """A copy of a function, as the library ships it."""
    return cloudpickle.loads(cloudpickle.dumps(function))


def test_recorder_is_shared_with_shipped_bodies() -> None:
    recorder = Recorder()

    def body(i: int) -> None:
        recorder.record("start", i=i)
        recorder.record("end", i=i)

    copies = [shipped(body) for _ in range(3)]
    for i, function in enumerate(copies):
        function(i)
    assert recorder.sequence("start") == [0, 1, 2]
    assert recorder.count("end") == 3
    assert recorder.peak() == 1
    first = recorder.events[0]
    assert (first.name, first.fields, first.thread) == (
        "start",
        {"i": 0},
        threading.current_thread().name,
    )
    assert copy.deepcopy(recorder) is recorder is copy.copy(recorder)
    recorder.clear()
    assert recorder.events == []


def test_recorder_sequence_of_several_fields() -> None:
    recorder = Recorder()
    assert recorder.sequence("start") == []
    recorder.record("start", i=1, channel="a")
    recorder.record("start", i=2, channel="b")
    recorder.record("bare")
    assert recorder.sequence("start", "channel") == ["a", "b"]
    with pytest.raises(ValueError, match="carry channel, i: say which"):
        recorder.sequence("start")
    with pytest.raises(ValueError, match="carry no fields"):
        recorder.sequence("bare")
    with pytest.raises(KeyError):
        recorder.sequence("start", "x")


@pytest.mark.asyncio
async def test_recorder_waits_on_the_loop() -> None:
    recorder = Recorder()
    thread = threading.Thread(
        target=lambda: [(time.sleep(0.01), recorder.record("step")) for _ in range(3)]
    )
    thread.start()
    await recorder.wait_for("step", 3)
    thread.join()
    with pytest.raises(TimeoutError, match=r"'step' was recorded 3 of 4 times after 0\.01 s"):
        await recorder.wait_for("step", 4, timeout=0.01)


def test_reference_to_what_is_gone_or_elsewhere() -> None:
    from aiocolocated.testing import _recorder

    data = pickle.dumps(Gate())
    with pytest.raises(LookupError, match="this Gate is gone"):
        pickle.loads(data)
    with pytest.raises(LookupError, match="this Gate lives in process 1"):
        _recorder._find("Gate", 1, 1)


@pytest.mark.asyncio
async def test_gate_lets_threads_and_coroutines_through() -> None:
    gate = Gate()
    with pytest.raises(TimeoutError, match=r"still closed after 0\.01 s"):
        await gate.wait_async(0.01)
    with pytest.raises(RuntimeError, match="await the async method"):
        gate.wait()
    passed = Recorder()

    def body() -> None:
        gate.wait()
        passed.record("thread")

    threads = [threading.Thread(target=shipped(body)) for _ in range(3)]
    for thread in threads:
        thread.start()
    tasks = [asyncio.create_task(gate.wait_async()) for _ in range(3)]
    await asyncio.sleep(0)
    assert not gate.is_open
    assert passed.events == []
    await asyncio.to_thread(gate.open)
    await asyncio.gather(*tasks)
    await passed.wait_for("thread", 3)
    gate.wait()
    await gate.wait_async()
    for thread in threads:
        thread.join()


def test_gate_in_a_thread_times_out() -> None:
    with pytest.raises(TimeoutError):
        Gate().wait(0.01)


def test_rendezvous_meets_again_and_again() -> None:
    meeting, recorder = Rendezvous(3), Recorder()

    def body() -> None:
        for _ in range(5):
            recorder.record("place", i=meeting.wait())

    threads = [threading.Thread(target=shipped(body)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(recorder.sequence("place")) == sorted([0, 1, 2] * 5)


def test_rendezvous_times_out() -> None:
    """Who gives up leaves, and the meeting can still be held."""
    meeting = Rendezvous(2)
    with pytest.raises(TimeoutError, match=r"1 of 2 threads have met after 0\.01 s"):
        meeting.wait(0.01)
    thread = threading.Thread(target=meeting.wait)
    thread.start()
    meeting.wait()
    thread.join()


# --- the module -----------------------------------------------------------------------------------------


def test_names_are_public_and_documented() -> None:
    names = aiocolocated.testing.__all__
    assert sorted(set(names)) == names
    for name in names:
        assert inspect.getdoc(getattr(aiocolocated.testing, name))
