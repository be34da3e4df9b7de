# SPDX-License-Identifier: Apache-2.0
"""Host processes as the controller's program sees them: opening, looking, restarting, closing."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import NoneType, TracebackType
from typing import Any, final

import jax
import numpy as np

from aiocolocated import _compat_hosts, _service
from aiocolocated._calls import Call
from aiocolocated._channels import new_channel
from aiocolocated._deadlocks import refuse_cycle
from aiocolocated._exceptions import DeadlockError, HostError
from aiocolocated._futures import ArrayFuture
from aiocolocated._loops import Wakes
from aiocolocated._runtime import before_exit
from aiocolocated._settings import LOCK
from aiocolocated._submission import calls_in_flight, submit
from aiocolocated._waiters import waiting
from aiocolocated._workers import local
from aiocolocated.hosts import _parcels, _sockets
from aiocolocated.hosts._links import Link
from aiocolocated.hosts._supervisor import END_TIMEOUT, Supervisor, Times
from aiocolocated.hosts._views import HostStatistics, RemoteHost as RemoteHost
from aiocolocated.hosts.launchers import Launcher, LocalLauncher
from aiocolocated.hosts.remote import HostSet, add_devices, remove_devices

_next_device = _compat_hosts.FIRST_DEVICE


@final
class Hosts:
    """Host processes of this program; made by :func:`open_hosts`, for one ``async with`` or ``with``.

    A sequence of :class:`RemoteHost`; ``hosts["host-0"]`` finds one by its name.

    Leaving the block closes them, see :meth:`aclose`. If it is left by an exception, the calls on the hosts
    are cancelled first, and what still runs after 10 s is lost. A program that ends without leaving the
    block closes them, too; if the program is killed, the hosts end at once.

    Thread safety: every method may be used from any thread and loop.

    .. versionadded:: 0.4
    """

    def __init__(
        self,
        launcher: Launcher,
        times: Times,
        *,
        n: int,
        cpu_devices: int,
        interface: str,
        collectives: bool,
        name: str,
    ) -> None:
        self._launcher = launcher
        self._times = times
        self._n = n
        self._cpu_devices = cpu_devices
        self._interface = interface
        self._collectives = collectives
        self._name = name
        self._devices: tuple[Any, ...] = ()
        self._hosts: tuple[RemoteHost, ...] = ()
        self._supervisor: Supervisor | None = None
        self._opened = False
        self._closing = False
        self._restarts = new_channel("restart hosts")

    # -- looking ------------------------------------------------------------------------------------------

    @property
    def devices(self) -> tuple[Any, ...]:
        """All devices, host after host; they are of :class:`jax.Device`, for meshes and shardings.

        Raises:
            HostError: the hosts were not opened yet.
        """
        self._check_opened()
        return self._devices

    def _check_opened(self) -> None:
        if self._supervisor is None:
            raise HostError("hosts are opened by 'async with open_hosts(...) as hosts:', or 'with'")

    def _find(self, which: int | str) -> RemoteHost:
        self._check_opened()
        if isinstance(which, str):
            for host in self._hosts:
                if host.name == which:
                    return host
            raise KeyError(f"no host {which!r}; there are {', '.join(h.name for h in self._hosts)}")
        try:
            return self._hosts[which]
        except (IndexError, TypeError):
            raise IndexError(
                f"no host {which!r}; there are {len(self._hosts)}: "
                f"{', '.join(h.name for h in self._hosts)}"
            ) from None

    def __getitem__(self, which: int | str) -> RemoteHost:
        return self._find(which)

    def __iter__(self) -> Iterator[RemoteHost]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return self._n

    def mesh(
        self, shape: Sequence[int], axis_names: Sequence[str], **options: Any
    ) -> jax.sharding.Mesh:
        """A mesh of all devices, host after host.

        Args:
            shape: of the mesh; its product is the number of devices.
            axis_names: a name for each axis.
            **options: of :class:`jax.sharding.Mesh`.

        Raises:
            ValueError: the shape does not fit.

        Example:
            >>> mesh = hosts.mesh((2, 4), ("host", "x"))
        """
        devices = np.array(self.devices, dtype=object)
        if math.prod(shape) != len(devices):
            raise ValueError(f"a mesh of shape {tuple(shape)} does not fit {len(devices)} devices")
        devices = devices.reshape(tuple(shape))
        return jax.sharding.Mesh(devices, tuple(axis_names), **options)

    def statistics(self) -> tuple[HostStatistics, ...]:
        """Counters and gauges of this moment, for each host.

        Example:
            >>> for host in hosts.statistics():
            ...     print(host.name, host.state, host.calls, f"{host.sent_bytes >> 20} MiB")
        """
        return tuple(host.statistics() for host in self._hosts)

    def __repr__(self) -> str:
        if self._supervisor is None:
            return "<Hosts, not opened>"
        return f"<Hosts {list(self._hosts)}>"

    # -- opening ------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Hosts:
        self._claim()
        try:
            await new_channel("open hosts").run(self._open)
        except BaseException:
            await self._close_soon(at_once=True)
            raise
        return self

    def __enter__(self) -> Hosts:
        _refuse_loop("opening hosts by 'with'", "async with open_hosts(...)")
        self._claim()
        try:
            self._open()
        except BaseException:
            self._close(at_once=True)
            raise
        return self

    def _claim(self) -> None:
        with LOCK:
            if self._opened:
                raise HostError("open_hosts() is entered once; call it again")
            self._opened = True

    def _open(self) -> None:
        _sockets.require_zmq()
        process_of = self._name_devices()
        devices, way = _compat_hosts.detached_devices(process_of)
        k = self._cpu_devices
        hosts = HostSet(
            self._name,
            [devices[i * k : (i + 1) * k] for i in range(self._n)],
            collectives=self._collectives,
        )
        config_of = partial(_config_of, _Coordinator(self._interface), process_of, way)
        with LOCK:
            if self._closing:
                raise HostError("the hosts were closed while they were opened")
            supervisor = Supervisor(hosts, self._launcher, config_of, self._interface, self._times)
            hosts.broken = supervisor.give_up
            _service.watch(+1)
            _service.start()
            self._devices = tuple(devices)
            self._hosts = tuple(RemoteHost(host) for host in supervisor.hosts)
            self._set = hosts
            self._supervisor = supervisor
        _open.add(self)
        add_devices(hosts)
        # Handles and meshes may be longer-lived than the hosts: calls on them say that these are closed.
        finalizer = weakref.finalize(self, _service.inbox.put, partial(remove_devices, hosts))
        finalizer.atexit = False
        with waiting():
            supervisor.start()

    def _name_devices(self) -> dict[int, int]:
        """The process index of each device id."""
        global _next_device
        n, k = self._n, self._cpu_devices
        if self._collectives:  # a cluster has ids of its own
            ids = [_compat_hosts.cluster_device(i, j) for i in range(n) for j in range(k)]
        else:
            step = _compat_hosts.DEVICES_PER_PROCESS
            step *= -(-k // step)
            with LOCK:
                first, _next_device = _next_device, _next_device + n * step
            ids = [first + i * step + j for i in range(n) for j in range(k)]
        return {device: i // k for i, device in enumerate(ids)}

    # -- restarting ---------------------------------------------------------------------------------------

    def restart(self, host: int | str) -> ArrayFuture[None]:
        """Start a host again: ``await hosts.restart(0)``, or ``hosts.restart(0).result()`` without a loop.

        Its devices are the same objects, so meshes and shardings stay valid. Arrays that were on it are
        gone: their handles raise :exc:`StaleHandleError`, and objects on it are lost. Functions are
        shipped again when they are called. A host that runs is ended first: its calls fail with
        :exc:`HostLostError`. With ``collectives=True`` all hosts are restarted, because they have one fate.

        Args:
            host: its index or name.

        Raises:
            HostStartError: it did not start; it is still lost, and may be restarted once more.
            HostError: the hosts are closed.
            IndexError, KeyError: there is no such host.

        Ordering: restarts of one set of hosts take place one after the other. Cancellation: stops the wait;
        a restart that has begun goes on. Thread safety: any thread.

        Example:
            >>> try:
            ...     y = await f(x)
            ... except HostLostError:
            ...     await hosts.restart(0)
            ...     y = await f(await device_put(numpy_x, sharding))
        """
        found = self._find(host)
        frame = sys._getframe(1)
        call = self._restarts._prepare(
            self._restart, (found.process_index,), {}, frame.f_code, frame.f_lasti
        )
        return submit(call)

    def _restart(self, index: int) -> None:
        assert self._supervisor is not None
        with waiting():
            self._supervisor.restart(index)

    # -- closing ------------------------------------------------------------------------------------------

    async def aclose(self, *, timeout: float | None = None) -> None:
        """Wait for the calls that are under way there, then end the processes; twice is fine.

        Each process ends as any interpreter does: objects on it are closed, what it prints is printed. It
        has 10 s for that, and is killed then. Calls that are submitted meanwhile fail with
        :exc:`HostLostError`, and so do those that are still under way after ``timeout``.

        Args:
            timeout: seconds to wait for calls; ``None`` without limit.

        Cancellation: stops the wait; the hosts are closed all the same.
        """
        await new_channel("close hosts").run(partial(self._close, timeout=timeout))

    async def _close_soon(self, *, timeout: float | None = None, at_once: bool = False) -> None:
        await new_channel("close hosts").run(partial(self._close, timeout=timeout, at_once=at_once))

    def close(self, *, timeout: float | None = None) -> None:
        """As :meth:`aclose`, for code without a loop.

        Raises:
            DeadlockError: on a running loop's thread, in a callback on the hosts' own thread, or in a body
                that a call on the hosts waits for.
        """
        supervisor = self._supervisor
        if supervisor is not None and not supervisor.is_over:
            _refuse_loop("closing hosts", "await hosts.aclose()")
            if threading.current_thread() is supervisor.thread:
                raise DeadlockError(
                    "hosts were closed on their own thread, which would wait for itself"
                )
        self._close(timeout=timeout)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if exc is not None:
            self._cancel_calls()
        await self._close_soon(timeout=None if exc is None else END_TIMEOUT)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if exc is not None:
            self._cancel_calls()
        self._close(timeout=None if exc is None else END_TIMEOUT)

    def _close(self, *, timeout: float | None = None, at_once: bool = False) -> None:
        with LOCK:
            self._closing = True
            supervisor = self._supervisor
        if supervisor is None:
            return
        graceful = False
        try:
            graceful = not at_once and self._wait_for_calls(timeout)
        finally:
            with waiting():
                supervisor.end(at_once=not graceful)
            with LOCK:
                known = self in _open
                _open.discard(self)
                if known:
                    _service.watch(-1)

    def _calls(self) -> list[Call]:
        """Calls on these hosts that are not over (under the lock)."""
        hosts = self._set
        return [c for c in calls_in_flight() if c._group is not None and c._group.hosts is hosts]

    def _cancel_calls(self) -> None:
        if self._supervisor is None:
            return
        wakes = Wakes()
        with LOCK:
            for call in self._calls():
                call._cancel(wakes, ": the block of its hosts was left by an exception")
        wakes.pay()

    def _wait_for_calls(self, timeout: float | None) -> bool:
        """Wait until the calls that are under way now are over; false if they are not in time."""
        own: Any = local.call
        with LOCK:
            calls = self._calls()
            if own is not None:
                for call in calls:
                    refuse_cycle(call, own)
            if not calls:
                return True
            waiter = _Countdown(len(calls))
            for call in calls:
                if call._over_waiters is None:
                    call._over_waiters = []
                call._over_waiters.append(waiter)
            if own is not None:
                own._waiting_on = calls[-1]
        try:
            with waiting():
                return waiter.lock.acquire(
                    timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX)
                )
        finally:
            if own is not None:
                own._waiting_on = None


class _Countdown:
    """Waits for several calls (a ``Waiter``)."""

    __slots__ = ("_left", "lock")

    def __init__(self, count: int) -> None:
        self._left = count
        self.lock = threading.Lock()
        self.lock.acquire()

    def wake(self, wakes: Wakes) -> None:
        self._left -= 1
        if not self._left:
            self.lock.release()


def _refuse_loop(what: str, instead: str) -> None:
    if asyncio._get_running_loop() is not None:
        raise DeadlockError(
            f"{what} takes a while, and this is a running event loop's thread: use {instead!r}"
        )


# --- what hosts are told --------------------------------------------------------------------------------


class _Coordinator:
    """Where the hosts of a cluster meet: a new place for each generation."""

    def __init__(self, interface: str) -> None:
        self._interface = interface
        self.address = ""

    def move(self) -> None:
        with contextlib.closing(socket.create_server((self._interface, 0))) as free:
            self.address = f"{self._interface}:{free.getsockname()[1]}"


def _config_of(
    coordinator: _Coordinator, process_of: dict[int, int], way: str, link: Link
) -> dict[str, Any]:
    """What one host has to know (the hosts' thread, for one host after the other)."""
    config: dict[str, Any] = {
        "devices": [device.id for device in link.devices],
        "process_of": {str(device): index for device, index in process_of.items()},
        "devices_by": way,
        "sys_path": sys.path,
        "parent": os.getpid(),
        "probe": _parcels.probe(),
    }
    if link.hosts.collectives:
        if link.process_index == 0:
            coordinator.move()
        config["cluster"] = {
            "coordinator_address": coordinator.address,
            "num_processes": len(link.hosts.links),
            "process_id": link.process_index,
        }
    return config


# --- all hosts of this process --------------------------------------------------------------------------

_open: set[Hosts] = set()


@before_exit
def _close_all() -> None:
    for hosts in list(_open):
        hosts._close()


def open_hosts(
    kind: str = "processes",
    *,
    n: int = 2,
    cpu_devices: int = 1,
    environment: Mapping[str, str] | None = None,
    launcher: Launcher | None = None,
    interface: str = "127.0.0.1",
    collectives: bool = False,
    name: str = "host",
    start_timeout: float = 120.0,
    heartbeat: float = 2.0,
    stalled_after: float = 10.0,
    lost_after: float | None = 60.0,
) -> Hosts:
    """Start host processes, whose devices calls can run on: ``async with open_hosts(n=2) as hosts:``.

    Also ``with``, in code without a loop. Nothing is started before the block is entered.

    Each host is a Python interpreter of its own, with CPU devices that no other process computes on.
    Colocated functions and objects run there if their arrays or ``devices`` are there. What a host prints
    appears in this process's streams, with the host's name before each line, and its log records come to
    the loggers of this process, those of the level of the root logger and above.

    Args:
        kind: ``"processes"``.
        n: how many hosts.
        cpu_devices: how many devices each has.
        environment: environment variables besides those of this process.
        launcher: starts the processes; :class:`~aiocolocated.hosts.launchers.LocalLauncher` if absent.
        interface: address of the network interface that hosts connect to.
        collectives: whether the hosts form one JAX cluster, whose jitted programs may run over all of them.
            Then they have one fate: if one is lost, all are.
        name: hosts are named ``f"{name}-{i}"``.
        start_timeout: seconds that each host has to start.
        heartbeat: seconds between questions for a sign of life.
        stalled_after: seconds without one after which a host is logged as stalled, once, and once more when
            it is back: it was stopped, or a body of C code holds the GIL.
        lost_after: seconds without one after which the host is killed and lost; ``None`` never.

    Returns:
        Hosts, to be entered once.

    Raises:
        ValueError: an argument that makes no sense.
        TypeError: an environment variable is no text.

    Entering raises :exc:`HostStartError` if a host does not start: everything is ended then, and the error
    has the last lines that it printed. :exc:`ImportError` says that pyzmq is missing.

    Ordering: calls reach every host in the order of their submission. Cancellation: of entering, ends what
    was started. Thread safety: any thread; several sets of hosts may be open at once.

    Example:
        >>> async with open_hosts(n=2, cpu_devices=4) as hosts:
        ...     mesh = hosts.mesh((2, 4), ("host", "x"))
        ...     x = await device_put(values, NamedSharding(mesh, PartitionSpec("host")))
        ...     y = await f(x)  # on both hosts
        ...     print(await device_get(y))

    .. versionadded:: 0.4
    """
    if kind != "processes":
        raise ValueError(f"kind must be 'processes', got {kind!r}")
    numbers: dict[str, Any] = {"n": n, "cpu_devices": cpu_devices}
    for what, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{what} must be an int of at least 1, got {number!r}")
    if environment is not None and launcher is not None:
        raise ValueError("environment is for the launcher: pass one of them")
    options: dict[str, tuple[Any, Any]] = {
        "collectives": (collectives, bool),
        "name": (name, str),
        "interface": (interface, str),
        "environment": (environment, (Mapping, NoneType)),
    }
    for what, (value, expected) in options.items():
        if not isinstance(value, expected):
            raise TypeError(f"{what} has a wrong type: {value!r}")
    if launcher is not None and not callable(getattr(launcher, "start", None)):
        raise TypeError(f"launcher must have a method 'start', got {launcher!r}")
    if not name or not name.isprintable():
        raise ValueError(f"name must be text that can be printed, got {name!r}")
    _sockets.check_interface(interface)
    times = Times(
        start_timeout=_seconds("start_timeout", start_timeout),
        heartbeat=_seconds("heartbeat", heartbeat),
        stalled_after=_seconds("stalled_after", stalled_after),
        lost_after=None if lost_after is None else _seconds("lost_after", lost_after),
    )
    if times.lost_after is not None and times.lost_after <= times.heartbeat:
        raise ValueError(
            f"lost_after must be more than heartbeat ({heartbeat} s), got {lost_after}"
        )
    return Hosts(
        launcher or LocalLauncher(environment),
        times,
        n=n,
        cpu_devices=cpu_devices,
        interface=interface,
        collectives=collectives,
        name=name,
    )


def _seconds(what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
        raise ValueError(f"{what} must be seconds, more than 0, got {value!r}")
    return float(value)
