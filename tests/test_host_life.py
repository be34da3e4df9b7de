# SPDX-License-Identifier: Apache-2.0
"""Host processes from their start to their end, and that of their controller."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from aiocolocated import (
    CallCancelledError,
    DeadlockError,
    HostError,
    HostLostError,
    HostStartError,
    colocated_python,
    colocated_python_class,
    device_put,
    open_hosts,
)
from aiocolocated.hosts.launchers import LocalLauncher, ManualLauncher

zmq = pytest.importorskip("zmq")

pytestmark = pytest.mark.asyncio
# The test itself writes files and waits for processes; others see whether the library blocks the loop.
blocks = pytest.mark.no_blocking(False)

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def two() -> Iterator[object]:
    """Two hosts that no test loses."""
    with open_hosts(n=2, cpu_devices=2) as hosts:
        yield hosts


@colocated_python
def identity(x):
    return x


@colocated_python
def nap(seconds):
    time.sleep(seconds)
    return seconds


@colocated_python
async def doze(seconds):
    await asyncio.sleep(seconds)


@colocated_python
def make(n):
    return np.arange(n, dtype=np.float32)


@colocated_python
def say(*parts, to="stdout", end=""):
    stream = getattr(sys, to)
    for part in parts:
        stream.write(part)
        stream.flush()
    stream.write(end)
    stream.flush()


@colocated_python
def log(name, level, message):
    try:
        raise KeyError("reason")
    except KeyError:
        logging.getLogger(name).log(level, "%s %d", message, 5, exc_info=True)


@colocated_python
def say_at_exit():
    import atexit

    atexit.register(print, "bye")


to_close: list[object] = []


@colocated_python
def close_when_told():
    hosts, event = to_close
    event.wait()
    hosts.close()


class Resource:
    def __init__(self):
        self.open = True

    def use(self):
        return self.open

    def close(self):
        print("closed", flush=True)


def on(host, function):
    return function.specialize(devices=host.devices[:1])


async def wait_until(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def runs(pid: int) -> bool:
    """Whether a process exists; one that has ended, but has nobody to wait for it, does not count."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1]
    except OSError:
        return False
    return state not in b"ZX"


def interpreter(tmp_path: Path, *command: str) -> str:
    """A program that stands for the interpreter of a host."""
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\nexec " + shlex.join(command) + "\n")
    path.chmod(0o755)
    return str(path)


# --- starting -----------------------------------------------------------------------------------------


@blocks
async def test_host_dies_while_starting(tmp_path) -> None:
    """The error has what it printed; nothing is left, which the leak check sees."""
    python = interpreter(tmp_path, "sh", "-c", "echo first >&2; echo no such thing >&2; exit 3")
    with pytest.raises(HostStartError, match=r"(?s)host-\d .*exit code 3.*first.*no such thing"):
        async with open_hosts(n=2, launcher=LocalLauncher(python=python)):
            pytest.fail("it is open")


@blocks
async def test_one_of_two_dies_while_starting(tmp_path) -> None:
    """The other one is ended."""
    pids = []

    class OneBroken(LocalLauncher):
        def start(self, config):
            if config["name"] == "host-1":
                self._python = interpreter(tmp_path, "false")
            process = super().start(config)
            pids.append(process.pid)
            return process

    with pytest.raises(HostStartError, match="host-1"):
        async with open_hosts(n=2, launcher=OneBroken()):
            pytest.fail("it is open")
    assert len(pids) == 2
    await asyncio.to_thread(lambda: [time.sleep(0.01) for _ in range(500) if any(map(runs, pids))])
    assert await asyncio.to_thread(lambda: [runs(pid) for pid in pids]) == [False, False]


@blocks
async def test_versions_must_be_equal(tmp_path) -> None:
    """The error says which differ."""
    code = (
        "import aiocolocated; aiocolocated.__version__ = '0.0'; "
        "from aiocolocated import _hostprocess; _hostprocess.main()"
    )
    python = interpreter(tmp_path, sys.executable, "-c", code)
    with pytest.raises(HostStartError, match=r"it has aiocolocated 0\.0, the controller"):
        async with open_hosts(n=1, launcher=LocalLauncher(python=python)):
            pytest.fail("it is open")


@blocks
async def test_no_answer_in_time(tmp_path) -> None:
    """The process is ended."""
    python = interpreter(tmp_path, "sleep", "600")
    began = time.monotonic()
    with pytest.raises(HostStartError, match=r"host-0 .*did not answer in 0\.3 s"):
        async with open_hosts(n=1, launcher=LocalLauncher(python=python), start_timeout=0.3):
            pytest.fail("it is open")
    assert time.monotonic() - began < 5


async def test_opening_is_cancelled() -> None:
    """What was started is ended."""
    pids = []

    class Spy(LocalLauncher):
        def start(self, config):
            process = super().start(config)
            pids.append(process.pid)
            return process

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2), open_hosts(n=2, launcher=Spy()):
            pytest.fail("it is open")
    assert not await asyncio.to_thread(lambda: any(map(runs, pids)))


@blocks
async def test_no_interpreter() -> None:
    """Nothing is started."""
    with pytest.raises(HostStartError, match="/nowhere/python"):
        async with open_hosts(n=2, launcher=LocalLauncher(python="/nowhere/python")):
            pytest.fail("it is open")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n must be an int of at least 1"),
        ({"n": True}, "n must be"),
        ({"cpu_devices": 0}, "cpu_devices must be an int of at least 1"),
        ({"cpu_devices": 1.5}, "cpu_devices must be"),
        ({"heartbeat": 0}, "heartbeat must be seconds"),
        ({"stalled_after": -1}, "stalled_after must be seconds"),
        ({"heartbeat": 2, "lost_after": 1}, "lost_after must be more than heartbeat"),
        ({"start_timeout": float("nan")}, "start_timeout must be seconds"),
        ({"interface": "0.0.0.0"}, "one network interface"),
        ({"name": ""}, "name must be"),
        ({"environment": {}, "launcher": LocalLauncher()}, "environment is for the launcher"),
    ],
)
async def test_arguments_that_make_no_sense(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        open_hosts(**options)


async def test_environment_must_be_text() -> None:
    with pytest.raises(TypeError, match="'A': 1"):
        open_hosts(environment={"A": 1})


async def test_looking_before_opening() -> None:
    hosts = open_hosts(n=2)
    assert len(hosts) == 2
    with pytest.raises(HostError, match="async with"):
        _ = hosts.devices
    with pytest.raises(DeadlockError, match="async with"), hosts:
        pytest.fail("it is open")
    await hosts.aclose()
    hosts.close()


async def test_three_sets_at_once() -> None:
    """Opened at the same time, with devices of their own; each serves, and is entered once."""
    async with contextlib.AsyncExitStack() as stack:
        sets = await asyncio.gather(
            *(
                stack.enter_async_context(open_hosts(n=1, cpu_devices=2, name=name))
                for name in "abc"
            )
        )
        devices = [device for hosts in sets for device in hosts.devices]
        assert len({device.id for device in devices}) == 6
        assert [hosts[0].name for hosts in sets] == ["a-0", "b-0", "c-0"]
        assert await asyncio.gather(*(on(hosts[0], identity)(1) for hosts in sets)) == [1, 1, 1]
        with pytest.raises(HostError, match="entered once"):
            await sets[0].__aenter__()
        del devices, sets


# --- closing ------------------------------------------------------------------------------------------


async def test_closing_waits_for_calls() -> None:
    """Those that were sent, and those that are queued here; processes end as interpreters do."""
    async with open_hosts(n=1) as hosts:
        calls = [on(hosts[0], nap)(0.1) for _ in range(3)]
        closing = asyncio.create_task(hosts.aclose())
        assert await asyncio.gather(*calls) == [0.1] * 3
        await closing
        with pytest.raises(HostLostError, match="closed"):
            await on(hosts[0], identity)(1)


async def test_closing_closes_what_is_there(capsys) -> None:
    """Objects on a host are closed, exit hooks run, and what they print arrives."""
    async with open_hosts(n=1) as hosts:
        resource = colocated_python_class(Resource, devices=hosts[0].devices)()
        assert await resource.use()
        await on(hosts[0], say_at_exit)()
    out = capsys.readouterr().out
    assert "[host-0] closed\n" in out
    assert "[host-0] bye\n" in out
    del resource


async def test_closing_with_a_timeout() -> None:
    """Calls that are under way for longer are lost."""
    async with open_hosts(n=1) as hosts:
        call = on(hosts[0], nap)(60)
        began = time.monotonic()
        await hosts.aclose(timeout=0.2)
        assert time.monotonic() - began < 5
        with pytest.raises(HostLostError, match="closed"):
            await call


async def test_block_left_by_an_exception() -> None:
    """Calls are cancelled, so that nobody waits for them."""
    call = None
    with pytest.raises(ZeroDivisionError):
        async with open_hosts(n=1) as hosts:
            call = on(hosts[0], doze)(60)
            raise ZeroDivisionError
    assert call is not None
    with pytest.raises(CallCancelledError):
        await call


async def test_closing_where_it_would_wait_for_itself(two) -> None:
    """On a loop's thread, and in a body of this process that a call on the hosts depends on."""
    with pytest.raises(DeadlockError, match="aclose"):
        two.close()
    async with open_hosts(n=1) as hosts:
        submitted = to_close[:] = [hosts, threading.Event()]
        first = close_when_told.specialize(devices=jax.devices()[0])()
        second = identity.specialize(devices=hosts.devices)(first)
        submitted[1].set()
        with pytest.raises(DeadlockError):
            await first
        with pytest.raises(DeadlockError):
            await second
        to_close.clear()
        del first, second, submitted


async def test_closing_in_a_body() -> None:
    """A body of this process may close hosts that nothing on them needs it."""
    hosts = open_hosts(n=1)
    async with hosts:
        to_close[:] = [hosts, threading.Event()]
        to_close[1].set()
        await close_when_told.specialize(devices=jax.devices()[0])()
        assert hosts[0].state == "lost"
    to_close.clear()


async def test_stopped_host_is_killed_at_the_end() -> None:
    """The wait for it is bounded."""
    async with open_hosts(n=1, heartbeat=0.1, stalled_after=0.3) as hosts:
        pid = hosts[0].pid
        os.kill(pid, signal.SIGSTOP)
        await wait_until(lambda: hosts[0].state == "stalled")
        began = time.monotonic()
    assert time.monotonic() - began < 3
    assert not await asyncio.to_thread(runs, pid)


# --- the controller's end -----------------------------------------------------------------------------

CONTROLLER = """
    import asyncio, ctypes, os, signal, time
    from aiocolocated import colocated_python, open_hosts

    @colocated_python
    def nap(): time.sleep(600)

    @colocated_python
    def hold_gil():
        import ctypes
        ctypes.PyDLL(None).sleep(600)

    @colocated_python
    def soon(): return 1

    def on(host, f): return f.specialize(devices=host.devices)
"""


def pids_of(script) -> list[int]:
    line = script.process.stdout.readline()
    return [int(word) for word in line.split()]


@blocks
@pytest.mark.parametrize("how", ["kill", "exit"])
async def test_controller_is_killed(start_script, how) -> None:
    """No host survives: idle, in a body, in one that holds the GIL, or stopped."""
    end = "os.kill(os.getpid(), signal.SIGKILL)" if how == "kill" else "os._exit(0)"
    script = start_script(
        CONTROLLER
        + f"""
    async def main():
        async with open_hosts(n=4) as hosts:
            calls = [on(hosts[1], nap)(), on(hosts[2], hold_gil)()]
            os.kill(hosts[3].pid, signal.SIGSTOP)
            await asyncio.sleep(0.3)
            print(*(h.pid for h in hosts), flush=True)
            {end}
    if __name__ == "__main__":
        asyncio.run(main())
    """
    )
    pids = await asyncio.to_thread(pids_of, script)
    assert len(pids) == 4
    await asyncio.to_thread(script.process.wait, 10)

    def all_gone() -> bool:
        deadline = time.monotonic() + 10
        while any(map(runs, pids)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return not any(map(runs, pids))

    gone = await asyncio.to_thread(all_gone)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert gone


@blocks
async def test_program_ends_with_open_hosts(start_script) -> None:
    """The hosts are ended, and calls under way are waited for."""
    script = start_script(
        CONTROLLER
        + """
    if __name__ == "__main__":
        hosts = open_hosts(n=2)
        hosts.__enter__()
        print(*(h.pid for h in hosts), flush=True)
        call = on(hosts[0], soon)()
        call.add_done_callback(lambda call: print("done", call.result(), flush=True))
    """
    )
    pids = await asyncio.to_thread(pids_of, script)
    finished = (await asyncio.to_thread(script.finish)).check()
    assert "done 1" in finished.stdout
    assert finished.stderr == ""
    assert not await asyncio.to_thread(lambda: any(map(runs, pids)))


@blocks
async def test_interrupt_does_not_reach_hosts(start_script) -> None:
    """Ctrl-C is the controller's: it goes to its process group, which hosts are not in."""
    script = start_script(
        CONTROLLER
        + """
    if __name__ == "__main__":
        with open_hosts(n=1) as hosts:
            on(hosts[0], soon)().result()
            try:
                print(hosts[0].pid, flush=True)  # the signal may come before it returns
                time.sleep(60)
            except KeyboardInterrupt:
                time.sleep(0.3)
            print(on(hosts[0], soon)().result(), hosts[0].pid, flush=True)
    """
    )
    (pid,) = await asyncio.to_thread(pids_of, script)
    os.killpg(script.process.pid, signal.SIGINT)
    finished = (await asyncio.to_thread(script.finish)).check()
    assert finished.stdout.endswith(f"1 {pid}\n")
    assert finished.stderr == ""


# --- what hosts print and log -------------------------------------------------------------------------


@blocks
async def test_printed_lines_are_labelled(two, capsys) -> None:
    """Whole lines, whatever pieces they come in, in the stream that they were printed to."""
    await asyncio.gather(
        on(two[0], say)("par", "tial\nnext", end="\n"),
        on(two[1], say)("ünï\n", to="stderr"),
        on(two[1], say)("z" * 300_000, end="\nend\n"),
    )
    out = err = ""
    deadline = time.monotonic() + 10
    while ("end\n" not in out or "n" not in err) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
        new = capsys.readouterr()
        out, err = out + new.out, err + new.err
    assert "[host-0] partial\n[host-0] next\n" in out
    assert err == "[host-1] ünï\n"
    assert sum(line.count("z") for line in out.splitlines()) == 300_000
    assert all(line.startswith("[host-") for line in out.splitlines())


async def test_log_records_arrive(two, caplog) -> None:
    """At the loggers of their names, with the host's name, before the result of the call does."""
    await on(two[1], log)("some.library", logging.WARNING, "message")
    await on(two[1], log)("some.library", logging.DEBUG, "too low")
    await wait_until(lambda: bool(caplog.records))
    (record,) = [r for r in caplog.records if r.name == "some.library"]
    assert record.getMessage() == "[host-1] message 5"
    assert record.levelno == logging.WARNING
    assert record.processName == record.host == "host-1"
    assert record.process == two[1].pid
    assert "KeyError: 'reason'" in record.exc_text


@blocks
async def test_slow_reader_holds_up_nobody(start_script) -> None:
    """Nobody reads the program's output, and hosts print much: calls go on all the same."""
    script = start_script(
        CONTROLLER
        + """
    @colocated_python
    def chatter():
        for i in range(20_000):
            print("x" * 100)

    if __name__ == "__main__":
        with open_hosts(n=2) as hosts:
            call = on(hosts[0], chatter)()
            other = on(hosts[1], soon)
            time.sleep(0.5)
            began = time.monotonic()
            from aiocolocated import TaskChannel
            channel = TaskChannel()
            for _ in range(100):
                channel.submit_nowait(other).result()
            open("fast", "w").write(str(time.monotonic() - began))
            call.result()
    """
    )
    path = Path(os.readlink(f"/proc/{script.process.pid}/cwd")) / "fast"
    await asyncio.to_thread(
        lambda: [
            time.sleep(0.02) for _ in range(1500) if not path.exists() or not path.stat().st_size
        ]
    )
    assert float(path.read_text()) < 5
    finished = (await asyncio.to_thread(script.finish)).check()
    assert finished.stdout.count("[host-0] xxx") == 20_000


# --- statistics ---------------------------------------------------------------------------------------


async def test_statistics(two) -> None:
    """What the hosts have, and what went there and back."""
    before = two.statistics()
    assert [s.name for s in before] == ["host-0", "host-1"]
    x = await on(two[0], make)(1 << 20)
    (after, other) = two.statistics()
    assert after.state == "up"
    assert after.pid == two[0].pid
    assert after.calls == 0
    assert after.handles == before[0].handles + 1
    assert after.functions >= before[0].functions + 1
    assert 0 < after.sent_bytes - before[0].sent_bytes < 100_000
    assert 0 < after.received_bytes - before[0].received_bytes < 10_000  # the array stays there
    assert after.sent_messages > before[0].sent_messages
    assert after.received_messages > before[0].received_messages
    assert after.heartbeat_age is not None
    assert 0 <= after.heartbeat_age < 10
    assert other.handles == before[1].handles
    del x
    await wait_until(lambda: two[0].statistics().handles == before[0].handles)
    assert repr(two[0]) == f"<RemoteHost host-0 up pid={two[0].pid}>"


# --- by hand ------------------------------------------------------------------------------------------


@blocks
@pytest.mark.parametrize("way", ["file", "input"])
async def test_started_by_hand(way, tmp_path) -> None:
    """The launcher tells a command and writes a file for this user only; the host ends with the block."""
    told: list[tuple[str, str]] = []
    started: list[subprocess.Popen[bytes]] = []
    modes: list[int] = []

    def tell(name: str, command: str) -> None:
        told.append((name, command))
        *start, path = shlex.split(command)
        modes.append(stat.S_IMODE(os.stat(path).st_mode))
        source = open(path) if way == "input" else subprocess.DEVNULL  # noqa: SIM115
        process = subprocess.Popen(
            [*start, path if way == "file" else "-"],
            stdin=source,
            env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        )
        if source is not subprocess.DEVNULL:
            source.close()
        started.append(process)

    launcher = ManualLauncher(tell, python=sys.executable)
    async with open_hosts(n=1, launcher=launcher) as hosts:
        assert told[0][0] == "host-0"
        assert modes == [0o600]
        assert hosts[0].pid == started[0].pid
        assert await on(hosts[0], identity)(3) == 3
        path = shlex.split(told[0][1])[-1]
    assert await asyncio.to_thread(started[0].wait, 10) == 0
    assert not await asyncio.to_thread(os.path.exists, path)


@blocks
async def test_lost_by_hand() -> None:
    """Without a process to watch, the closed connection tells; and the host ends with its controller."""
    started: list[subprocess.Popen[bytes]] = []

    def tell(name: str, command: str) -> None:
        started.append(
            subprocess.Popen(
                shlex.split(command),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
            )
        )

    launcher = ManualLauncher(tell, python=sys.executable)
    async with open_hosts(n=2, launcher=launcher) as hosts:
        call = on(hosts[0], nap)(60)
        await asyncio.sleep(0.2)
        started[0].kill()
        began = time.monotonic()
        with pytest.raises(HostLostError, match="connection was closed"):
            await call
        assert time.monotonic() - began < 2
        await asyncio.to_thread(started[0].wait, 10)
        await on(hosts[1], identity)(1)
    assert await asyncio.to_thread(started[1].wait, 10) == 0


@blocks
async def test_file_that_others_can_read(tmp_path) -> None:
    """A host refuses a key that others may have."""
    path = tmp_path / "config.json"
    path.write_text("{}")
    path.chmod(0o644)
    command = [sys.executable, "-m", "aiocolocated", "host", "--connect", str(path)]
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "chmod 600" in done.stderr


async def test_device_put_after_closing() -> None:
    async with open_hosts(n=1) as hosts:
        device = hosts.devices[0]
    with pytest.raises(HostError, match="closed"):
        await device_put(np.zeros(3), device)
