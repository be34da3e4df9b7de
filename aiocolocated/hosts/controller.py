# SPDX-License-Identifier: Apache-2.0
"""The controller's side of host processes: starting them, listening to them, and noticing their end."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, final

import jax
import numpy as np

from aiocolocated import _compat_hosts, _service
from aiocolocated._channels import new_channel
from aiocolocated._exceptions import HostLostError, HostStartError
from aiocolocated._runtime import before_exit
from aiocolocated._settings import LOCK
from aiocolocated.hosts import _sockets
from aiocolocated.hosts.launchers import HostProcess, Launcher, LocalLauncher, versions
from aiocolocated.hosts.remote import HostSet, Link, add_devices

logger = logging.getLogger("aiocolocated.hosts")

_START_TIMEOUT = 120.0  # seconds until a host must have answered
_END_TIMEOUT = 10.0  # seconds that a host has to end by itself
_next_device = _compat_hosts.FIRST_DEVICE


@final
class RemoteHost:
    """One host of :class:`Hosts`."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.process: HostProcess | None = None
        self.connection: Any = None
        self.ready = False
        self.hello: dict[str, Any] = {}
        self.tail: list[str] = []  # the last lines of its standard error, for errors
        self._partial = [b"", b""]

    @property
    def name(self) -> str:
        """Such as ``"host-0"``."""
        return self._link.name

    @property
    def process_index(self) -> int:
        """Its place among the hosts, as :attr:`jax.Device.process_index` has it."""
        return self._link.process_index

    @property
    def devices(self) -> tuple[Any, ...]:
        """Its devices."""
        return self._link.devices

    @property
    def pid(self) -> int | None:
        """Its process id, ``None`` if there is no process."""
        return None if self.process is None else self.process.pid

    @property
    def lost(self) -> bool:
        """Whether it has ended, or does not answer any more."""
        return self._link.lost is not None

    def __repr__(self) -> str:
        state = "lost" if self.lost else "up" if self.ready else "starting"
        return f"<RemoteHost {self.name} {state} pid={self.pid}>"

    def take_output(self, which: int) -> bool:
        """Print what the host has printed, with its name before each line; false at its end."""
        assert self.process is not None
        try:
            data = os.read(self.process.outputs[which].fileno(), 1 << 16)
        except BlockingIOError:
            return True
        *lines, self._partial[which] = (self._partial[which] + data).split(b"\n")
        if not data and self._partial[which]:
            lines, self._partial[which] = [self._partial[which]], b""
        stream = (sys.stdout, sys.stderr)[which]
        for line in lines:
            text = line.decode(errors="replace")
            if which == 1:
                self.tail = [*self.tail[-19:], text]
            print(f"[{self.name}] {text}", file=stream, flush=True)
        return bool(data)


@final
class Hosts:
    """Host processes of this program; made by :func:`open_hosts`."""

    def __init__(
        self,
        launcher: Launcher,
        *,
        n: int,
        cpu_devices: int,
        interface: str,
        collectives: bool,
    ) -> None:
        global _next_device
        if collectives:  # a cluster has ids of its own
            ids = [_compat_hosts.cluster_device(i, k) for i in range(n) for k in range(cpu_devices)]
        else:
            first, _next_device = _next_device, _next_device + n * cpu_devices
            ids = list(range(first, _next_device))
        self._process_of = {device: i // cpu_devices for i, device in enumerate(ids)}
        self._coordinator: str | None = None
        devices = _compat_hosts.detached_devices(self._process_of)
        per_host = [devices[i * cpu_devices : (i + 1) * cpu_devices] for i in range(n)]
        self._set = HostSet("host", per_host, collectives=collectives)
        self._hosts = tuple(RemoteHost(link) for link in self._set.links)
        self.devices: tuple[Any, ...] = tuple(devices)
        self._launcher = launcher
        self._interface = interface
        self._listener: _sockets.Listener | None = None
        self._requests: list[Callable[[], None]] = []
        self._wake, self._waked = socket.socketpair()
        self._wake.setblocking(False)
        self._waked.setblocking(False)
        self._thread_over = threading.Event()
        self._closing = False
        self._closed = False

    # -- looking ------------------------------------------------------------------------------------------

    def __getitem__(self, index: int) -> RemoteHost:
        return self._hosts[index]

    def __iter__(self) -> Iterator[RemoteHost]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    def mesh(
        self, shape: Sequence[int], axis_names: Sequence[str], **options: Any
    ) -> jax.sharding.Mesh:
        """A mesh of all devices, host after host.

        Args:
            shape: of the mesh; its product is the number of devices.
            axis_names: a name for each axis.
            **options: of :class:`jax.sharding.Mesh`.
        """
        devices = np.array(self.devices, dtype=object).reshape(tuple(shape))
        return jax.sharding.Mesh(devices, tuple(axis_names), **options)

    def __repr__(self) -> str:
        return f"<Hosts {list(self._hosts)}>"

    # -- life ---------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Hosts:
        try:
            await new_channel("open hosts").run(self._open)
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __enter__(self) -> Hosts:
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self) -> None:
        self._listener = _sockets.Listener(self._interface)
        with LOCK:
            _service.watch(+1)
            _service.start()
        _open.add(self)
        add_devices(self._set)
        started = threading.Event()
        failed: list[BaseException] = []

        def refused() -> None:
            failed.append(HostStartError("the system has no thread for the hosts"))
            started.set()

        _service.start_thread(
            lambda: self._run(started, failed),
            "aiocolocated-hosts",
            refused,
        )
        started.wait()
        if failed:
            raise failed[0]

    async def aclose(self) -> None:
        """Wait for the calls that are under way there, then end the processes; twice is fine."""
        await new_channel("close hosts").run(self.close)

    def close(self) -> None:
        """As :meth:`aclose`, for code without a loop."""
        with LOCK:
            if self._closed:
                return
            self._closed = True
        self._request(self._begin_end)
        if self._listener is not None and _opened(self):
            self._thread_over.wait()

    # -- the thread that receives ---------------------------------------------------------------------------

    def _request(self, action: Callable[[], None]) -> None:
        self._requests.append(action)
        try:
            self._wake.send(b"x")
        except (BlockingIOError, OSError):
            pass

    def _run(self, started: threading.Event, failed: list[BaseException]) -> None:
        try:
            try:
                self._start_all()
            except BaseException as error:
                failed.append(error)
                return
            finally:
                started.set()
            self._receive()
        finally:
            self._end_all()

    def _start_all(self) -> None:
        if self._set.collectives:
            with socket.create_server((self._interface, 0)) as free:
                self._coordinator = f"{self._interface}:{free.getsockname()[1]}"
        for host in self._hosts:
            self._start(host)
        self._wait_until_up(self._hosts)

    def _start(self, host: RemoteHost) -> None:
        assert self._listener is not None
        link = host._link
        host.ready = False
        host.connection = _sockets.ControllerConnection(self._listener, link.name)
        link.transmit = host.connection.send
        host.process = self._launcher.start(
            {
                **host.connection.config,
                "name": link.name,
                "devices": [d.id for d in link.devices],
                "process_of": {str(k): v for k, v in self._process_of.items()},
                "sys_path": sys.path,
                "parent": os.getpid(),
                "cluster": None
                if self._coordinator is None
                else {
                    "coordinator_address": self._coordinator,
                    "num_processes": len(self._hosts),
                    "process_id": link.process_index,
                },
            }
        )

    def _wait_until_up(self, hosts: Sequence[RemoteHost]) -> None:
        deadline = monotonic() + _START_TIMEOUT
        while not all(host.ready for host in hosts):
            self._poll(0.1)
            for host in hosts:
                if host._link.lost is not None:
                    raise HostStartError("\n".join([str(host._link.lost), *host.tail]))
            if monotonic() > deadline:
                slow = [host.name for host in hosts if not host.ready]
                raise HostStartError(f"{', '.join(slow)} did not answer in {_START_TIMEOUT} s")

    def _receive(self) -> None:
        while not self._closing:
            self._poll(1.0)

    def _poll(self, timeout: float) -> None:
        """Wait for anything to happen, and see to it."""
        zmq = _sockets.zmq
        assert self._listener is not None
        poller = zmq.Poller()
        actions: dict[Any, Callable[[], object]] = {}

        def watch(what: Any, action: Callable[[], object]) -> None:
            poller.register(what, zmq.POLLIN)
            actions[what] = action

        watch(self._listener.authentication, self._listener.authenticate)
        watch(self._waked.fileno(), self._serve_requests)
        for host in self._hosts:
            if host.connection is not None and host._link.lost is None:
                watch(host.connection.into, partial(self._take_messages, host))
            if host.process is not None:
                for which, output in enumerate(host.process.outputs):
                    if not output.closed:
                        watch(output.fileno(), partial(self._take_output, host, which))
        for what, _ in poller.poll(timeout * 1000):
            actions[what]()
        for host in self._hosts:
            if host.process is not None and host._link.lost is None:
                code = host.process.poll()
                if code is not None:
                    self._lost(host, f"its process {host.pid} ended with {_describe_exit(code)}")

    def _serve_requests(self) -> None:
        try:
            self._waked.recv(4096)
        except BlockingIOError:
            pass
        requests, self._requests = self._requests, []
        for request in requests:
            request()

    def _take_messages(self, host: RemoteHost) -> None:
        for _ in range(64):
            data = host.connection.receive()
            if data is None:
                return
            if host.ready:
                try:
                    host._link.receive(data)
                except Exception:
                    logger.exception("%s: a message cannot be read", host.name)
            else:
                self._take_hello(host, data)

    def _take_hello(self, host: RemoteHost, data: bytes) -> None:
        host.hello = json.loads(data)
        for what, own in versions().items():
            theirs = host.hello.get(what)
            if theirs != own:
                self._lost(
                    host, f"it has {what} {theirs}, the controller {own}: they must be equal"
                )
                return
        host._link.answered(host.hello["pid"])
        host.ready = True

    def _take_output(self, host: RemoteHost, which: int) -> None:
        if not host.take_output(which):
            assert host.process is not None
            host.process.outputs[which].close()

    def _lost(self, host: RemoteHost, why: str) -> None:
        host._link.lose(HostLostError(f"{host.name} was lost: {why}"))
        host.connection.close()
        if host.process is not None:
            host.process.kill()
        if self._set.collectives:  # its peers wait for it, or will
            for other in self._hosts:
                if other._link.lost is None:
                    self._lost(
                        other, f"it was in one cluster with {host.name}, which was lost ({why})"
                    )

    # -- the end --------------------------------------------------------------------------------------------

    def _begin_end(self) -> None:
        self._closing = True

    def _end_all(self) -> None:
        for host in self._hosts:
            if host.connection is not None and host._link.lost is None:
                host._link.flush()
                host.connection.send(b"")
        deadline = monotonic() + _END_TIMEOUT
        for host in self._hosts:
            process = host.process
            if process is None:
                continue
            while process.poll() is None and host._link.lost is None and monotonic() < deadline:
                self._drain_outputs(host)
                threading.Event().wait(0.005)
            process.kill()
            self._drain_outputs(host)
            process.close()
        for host in self._hosts:
            host._link.lose(
                HostLostError(f"{host.name} is closed: its 'open_hosts' block was left")
            )
            if host.connection is not None:
                host.connection.close()
        if self._listener is not None:
            self._listener.close()
        self._wake.close()
        self._waked.close()
        _open.discard(self)
        with LOCK:
            _service.watch(-1)
        self._thread_over.set()

    def _drain_outputs(self, host: RemoteHost) -> None:
        assert host.process is not None
        for which, output in enumerate(host.process.outputs):
            if not output.closed:
                self._take_output(host, which)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


_open: set[Hosts] = set()


def _opened(hosts: Hosts) -> bool:
    return hosts in _open


@before_exit
def _close_all() -> None:
    for hosts in list(_open):
        hosts.close()


def open_hosts(
    kind: str = "processes",
    *,
    n: int = 2,
    cpu_devices: int = 1,
    environment: Mapping[str, str] | None = None,
    launcher: Launcher | None = None,
    interface: str = "127.0.0.1",
    collectives: bool = False,
) -> Hosts:
    """Start hosts."""
    if kind != "processes":
        raise ValueError(f"kind must be 'processes', got {kind!r}")
    _sockets.require_zmq()
    return Hosts(
        launcher or LocalLauncher(environment),
        n=n,
        cpu_devices=cpu_devices,
        interface=interface,
        collectives=collectives,
    )
