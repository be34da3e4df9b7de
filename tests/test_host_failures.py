# SPDX-License-Identifier: Apache-2.0
"""Hosts that die, stand still or send nonsense: who is told, what goes on, and how they come back."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

from aiocolocated import (
    HostError,
    HostLostError,
    HostStartError,
    StaleHandleError,
    colocated_python,
    open_hosts,
)

pytest.importorskip("zmq")

# A restarted host has other descriptors than the one that was there before the test.
pytestmark = [pytest.mark.asyncio, pytest.mark.leak_check(descriptors=False)]

HEARTBEAT, STALLED = 0.1, 0.6


@pytest.fixture(scope="module")
def three() -> Iterator[object]:
    """Three hosts, which tests may lose."""
    with open_hosts(
        n=3, name="node", heartbeat=HEARTBEAT, stalled_after=STALLED, lost_after=None
    ) as hosts:
        yield hosts


@pytest.fixture
def hosts(three):
    """Three hosts that are up."""
    for host in three:
        if host.lost:
            three.restart(host.name).result()
    return three


@colocated_python
def identity(x):
    return x


@colocated_python
def nap(seconds):
    time.sleep(seconds)


@colocated_python
def make(n):
    return np.arange(n, dtype=np.float32)


@colocated_python
def double(x):
    return x * 2


@colocated_python
def end(code):
    import sys

    print("last words", file=sys.stderr)
    os._exit(code)


@colocated_python
def crash():
    import ctypes

    ctypes.string_at(0)


@colocated_python
def hold_gil(seconds):
    import ctypes

    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


@colocated_python
def send_garbage(data):
    import sys
    import threading

    frame = sys._current_frames()[threading.main_thread().ident]
    while "connection" not in frame.f_locals:
        frame = frame.f_back
    frame.f_locals["connection"].send(data)


def on(host, function):
    return function.specialize(devices=host.devices)


def runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def serve(host):
    return await on(host, identity)(1)


async def wait_until(condition, timeout=10.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_kill_with_calls_in_flight(hosts) -> None:
    """All of the lost host's calls fail within a second, no other does, and a new process serves."""
    first, second, _ = hosts
    here, there = on(first, identity), on(second, identity)
    await asyncio.gather(here(0), there(0))
    sleeping = on(first, nap)(60)
    affected = [sleeping, *(here(i) for i in range(500))]
    others = [there(i) for i in range(500)]
    await asyncio.sleep(0.05)
    pid = first.pid
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    outcomes = await asyncio.gather(*affected, return_exceptions=True)
    assert time.monotonic() - began < 1.0
    assert {type(outcome) for outcome in outcomes} == {HostLostError}
    assert "node-0" in str(outcomes[0])
    assert str(pid) in str(outcomes[0])
    assert "SIGKILL" in str(outcomes[0])
    assert await asyncio.gather(*others) == list(range(500))
    assert first.lost
    assert first.state == "lost"
    with pytest.raises(HostLostError, match="node-0"):
        await here(1)
    await hosts.restart(0)
    assert first.pid != pid
    assert await here(7) == 7


async def test_several_hosts_fail_at_once(hosts) -> None:
    """A call over several hosts fails when one is lost, although another's body still sleeps."""

    @colocated_python
    def leave_or_sleep(name):
        import threading

        from aiocolocated.hosts.inprocess import inprocess_host

        assert threading.current_thread()
        if inprocess_host().name == name:
            os._exit(0)
        time.sleep(3)

    devices = (*hosts[0].devices, *hosts[1].devices)
    began = time.monotonic()
    with pytest.raises(HostLostError, match="node-1"):
        await leave_or_sleep.specialize(devices=devices)("node-1")
    assert time.monotonic() - began < 2.0
    assert not hosts[0].lost
    assert await on(hosts[2], identity)(1) == 1


async def test_how_it_ended(hosts) -> None:
    """The error tells the exit code or signal, and what was printed last."""
    with pytest.raises(HostLostError, match=r"exit code 3.*last words"):
        await on(hosts[0], end)(3)
    with pytest.raises(HostLostError, match=r"SIGSEGV.*Fatal Python error"):
        await on(hosts[1], crash)()
    copy = pickle.loads(pickle.dumps(HostLostError("a")))
    assert copy.args == ("a",)


async def test_queued_dependents_fail_too(hosts) -> None:
    """What waits for a result that is lost fails with the same error, on other hosts as well."""
    first, second, _ = hosts
    x = on(first, end)(0)
    y = identity.specialize(devices=second.devices)(x)
    with pytest.raises(HostLostError, match="node-0"):
        await y
    with pytest.raises(HostLostError, match="node-0"):
        await x
    assert not second.lost


async def test_restart_is_fresh(hosts) -> None:
    """The same devices, functions are shipped again, and handles from before are refused."""
    host = hosts[0]
    devices = host.devices
    x = await on(host, make)(4)
    assert (await double(x)).shape == (4,)
    generation = host.statistics().generation
    os.kill(host.pid, signal.SIGKILL)
    await wait_until(lambda: host.lost)
    with pytest.raises((HostLostError, StaleHandleError)):
        await double(x)
    await hosts.restart("node-0")
    assert host.devices is devices
    assert host.statistics().generation == generation + 1
    assert host.statistics().handles == 0
    with pytest.raises(StaleHandleError, match="node-0"):
        await double(x)
    y = await double(await on(host, make)(4))
    assert y.shape == (4,)
    del x, y


async def test_restart_of_a_host_that_runs(hosts) -> None:
    """It is ended first, its calls are lost, and the restarts take turns."""
    sleeping = on(hosts[0], nap)(60)
    pids = [host.pid for host in hosts]
    await asyncio.gather(hosts.restart(0), hosts.restart(0), hosts.restart(1))
    with pytest.raises(HostLostError, match="restarted"):
        await sleeping
    assert [host.pid == pid for host, pid in zip(hosts, pids, strict=True)] == [False, False, True]
    assert await asyncio.gather(*(on(host, identity)(1) for host in hosts)) == [1, 1, 1]
    with pytest.raises(KeyError, match="node-9"):
        hosts.restart("node-9")
    with pytest.raises(IndexError):
        hosts.restart(3)


async def test_restart_fails(hosts, monkeypatch) -> None:
    """The host stays lost, and can be restarted once more."""
    host = hosts[2]
    monkeypatch.setattr(hosts._supervisor._launcher, "_python", "/nowhere/python")
    with pytest.raises(HostStartError, match="/nowhere/python"):
        await hosts.restart(2)
    with pytest.raises(HostLostError):
        await on(host, identity)(1)
    monkeypatch.undo()
    await hosts.restart(2)
    assert await on(host, identity)(1) == 1


async def test_stopped_host_is_reported(hosts, caplog) -> None:
    """Once, with name, process and age; again when it is back; and nothing is lost."""
    host = hosts[0]
    assert host.stalled_for == 0
    await on(host, identity)(0)
    os.kill(host.pid, signal.SIGSTOP)
    try:
        waiting = on(host, identity)(5)
        await wait_until(lambda: host.state == "stalled", timeout=STALLED + 2.0)
        assert host.stalled_for >= STALLED
        # In a task of its own: calls of one task stay in order, whichever hosts they are for.
        assert await asyncio.create_task(serve(hosts[1])) == 1
        await asyncio.sleep(3 * HEARTBEAT)
    finally:
        os.kill(host.pid, signal.SIGCONT)
    assert await waiting == 5
    assert host.state == "up"
    assert host.stalled_for == 0
    name = f"node-0 (process {host.pid})"
    own = [r for r in caplog.messages if r.startswith(name)]
    assert [("has not answered" in r, "answers again" in r) for r in own] == [
        (True, False),
        (False, True),
    ]


async def test_held_gil_is_reported(hosts) -> None:
    """So is a body that lets no other Python run; it goes on afterwards."""
    host = hosts[1]
    held = on(host, hold_gil)(STALLED + 0.6)
    await wait_until(lambda: host.state == "stalled")
    await held
    await wait_until(lambda: host.state == "up")


async def test_lost_after_a_set_time() -> None:
    """A host whose body holds the GIL for ever is killed, and its calls fail."""
    times = {"heartbeat": 0.1, "stalled_after": 0.4, "lost_after": 1.2}
    async with open_hosts(n=1, **times) as hosts:
        pid = hosts[0].pid
        began = time.monotonic()
        with pytest.raises(HostLostError, match="lost_after"):
            await on(hosts[0], hold_gil)(600)
        assert time.monotonic() - began < 6.0
        await wait_until(lambda: not runs(pid))


async def test_death_is_noticed_without_a_descriptor(monkeypatch) -> None:
    """Where the system has none that tells, the process is looked at every now and then."""
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    async with open_hosts(n=1) as hosts:
        call = on(hosts[0], nap)(60)
        await asyncio.sleep(0.05)
        os.kill(hosts[0].pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(HostLostError, match="SIGKILL"):
            await call
        assert time.monotonic() - began < 1.0


async def test_garbage_from_a_host(hosts, caplog) -> None:
    """A message that cannot be read loses its sender, with the reason, and nobody else."""
    host = hosts[1]
    for data in (b"garbage", pickle.dumps(5), pickle.dumps([7, None])):
        with pytest.raises(HostLostError, match="message that cannot be read"):
            await asyncio.gather(on(host, send_garbage)(data), on(host, nap)(60))
        assert await on(hosts[0], identity)(1) == 1
        await hosts.restart(1)
    assert await on(host, identity)(1) == 1


async def test_garbage_to_a_host(hosts) -> None:
    """It is logged there, and the host serves on."""
    connection = hosts._supervisor.hosts[0].connection
    pid = hosts[0].pid
    for data in (b"garbage", pickle.dumps(5), pickle.dumps([7, None, (99,), ()])):
        connection.send(data)
    assert await on(hosts[0], identity)(1) == 1
    assert hosts[0].pid == pid


async def test_late_controller_blames_nobody(hosts, caplog) -> None:
    """A controller that was held up itself takes no host for stalled."""
    caplog.set_level(logging.WARNING)
    import ctypes

    await asyncio.to_thread(ctypes.PyDLL(None).usleep, int((STALLED + 1.2) * 1e6))
    await asyncio.sleep(3 * HEARTBEAT)
    assert [r for r in caplog.messages if "has not answered" in r] == []


async def test_after_the_block() -> None:
    """Calls on closed hosts, and restarts, are refused in words."""
    async with open_hosts(n=1) as hosts:
        f = on(hosts[0], identity)
        assert await f(1) == 1
    with pytest.raises(HostLostError, match="host-0 is closed"):
        await f(1)
    with pytest.raises(HostError, match="closed"):
        await hosts.restart(0)
    assert hosts[0].state == "lost"
    await hosts.aclose()
    hosts.close()
