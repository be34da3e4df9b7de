# SPDX-License-Identifier: Apache-2.0
"""The thread that starts host processes, receives what they send, and notices their end.

All of it is one thread for each set of hosts, named ``aiocolocated-hosts``. The kernel kills local host
processes when the thread that started them ends, so it must live as long as they do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import pickle
import selectors
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from time import monotonic
from typing import Any

from aiocolocated import _service
from aiocolocated._exceptions import HostError, HostLostError, HostStartError
from aiocolocated._settings import LOCK
from aiocolocated.hosts import _sockets, _wire
from aiocolocated.hosts._links import Link
from aiocolocated.hosts._output import Output, Printing
from aiocolocated.hosts.launchers import HostProcess, Launcher, versions
from aiocolocated.hosts.remote import HostSet

logger = logging.getLogger("aiocolocated.hosts")

END_TIMEOUT = 10.0  # seconds that a host has to end by itself
_LOOK = 0.05  # seconds between looks at what has no descriptor
_SUSPICION = 1.0  # seconds that a closed connection may turn out to be somebody else's
_LATE = 1.0  # seconds by which this thread itself is held up, which hosts are not blamed for
_PING = pickle.dumps([(_wire.PING, 0)], 5)
_END = b""
_RESTARTED = "it is restarted"


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """When what is done, in seconds."""

    start_timeout: float
    heartbeat: float
    stalled_after: float
    lost_after: float | None


class Supervised:
    """What the thread knows of one host."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.name = link.name
        self.connection: _sockets.ControllerConnection | None = None
        self.printing: Printing | None = None
        self.starting: Future[None] | None = None  # until the host has answered
        self.start_deadline = 0.0
        self.greeted = False  # it has said hello
        self.hello: dict[str, Any] = {}
        self.up = False
        self.pid: int | None = None
        self.heard = 0.0  # when it last gave a sign of life
        self.asked = False  # for one, since then
        self.stalled = False
        self.suspected: float | None = None  # when some connection was closed

    @property
    def process(self) -> HostProcess | None:
        return None if self.printing is None else self.printing.process

    @property
    def description(self) -> str:
        return self.name if self.pid is None else f"{self.name} (process {self.pid})"


class Supervisor:
    """Starts, hears and ends the hosts of one set."""

    def __init__(
        self,
        hosts: HostSet,
        launcher: Launcher,
        config_of: Callable[[Link], dict[str, Any]],
        interface: str,
        times: Times,
    ) -> None:
        self.hosts = [Supervised(link) for link in hosts.links]
        self._set = hosts
        self._launcher = launcher
        self._config_of = config_of
        self._interface = interface
        self.times = times
        self.listener: _sockets.Listener | None = None
        self._output = Output(lambda: self._request(self._resume_output))
        self._output_paused = False
        self._requests: list[Callable[[], None]] = []
        self._wake, self._waked = socket.socketpair()
        self._wake.setblocking(False)
        self._waked.setblocking(False)
        self._poller: Any = None
        self._actions: dict[Any, Callable[[], object]] = {}
        # What seldom happens, behind one descriptor of the poller.
        self._selector = selectors.DefaultSelector()
        self._dying: list[Printing] = []  # killed, and not gone yet
        self._due = 0.0
        self._end_deadline: float | None = None
        self._over = threading.Event()
        self.thread: threading.Thread | None = None

    # -- for other threads ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all hosts and wait until they are up.

        Raises:
            HostStartError: one did not start. The others may run; :meth:`end` ends them.
        """
        futures: list[Future[None]] = [Future() for _ in self.hosts]
        for host, future in zip(self.hosts, futures, strict=True):
            self._requests.append(partial(self._begin, host, future))
        _service.start_thread(self._run, "aiocolocated-hosts", partial(self._refused, futures))
        for future in futures:
            future.result()

    def _refused(self, futures: list[Future[None]]) -> None:
        self._close()
        for future in futures:
            future.set_exception(HostStartError("the system has no thread for the hosts"))

    def restart(self, index: int) -> None:
        """Start a host again, and wait until it is up.

        Raises:
            HostStartError: it did not start; it is still lost.
            HostError: the hosts are closed.
        """
        # Those of a cluster have one fate.
        hosts = self.hosts if self._set.collectives else [self.hosts[index]]
        futures: list[Future[None]] = [Future() for _ in hosts]
        self._request(partial(self._begin_again, hosts, futures))
        if self._over.is_set():
            raise _closed_error()
        for future in futures:
            future.result()

    def give_up(self, why: str) -> None:
        """Lose all hosts of a cluster: they cannot go on together (any thread)."""
        self._request(partial(self._give_up, why))

    def end(self, *, at_once: bool = False) -> None:
        """End all hosts and the thread, and wait for that; twice is fine.

        Args:
            at_once: kill them; otherwise each has a moment to end by itself.
        """
        self._request(partial(self._begin_end, at_once))
        self._over.wait()

    def _request(self, action: Callable[[], None]) -> None:
        self._requests.append(action)
        try:
            self._wake.send(b"x")
        except OSError:  # full, or closed
            pass

    @property
    def is_over(self) -> bool:
        """Whether the hosts were ended."""
        return self._over.is_set()

    # -- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        self.thread = threading.current_thread()
        try:
            self.listener = _sockets.Listener(self._interface)
            self._poller = _sockets.zmq.Poller()
            self._watch(self.listener.authentication, self.listener.authenticate)
            self._watch(self._waked.fileno(), self._serve_requests)
            self._watch(self._selector.fileno(), self._serve_selector)
            self._due = monotonic() + self.times.heartbeat
            self._serve_requests()
            while not self._is_over():
                self._poll()
        except BaseException:
            logger.exception("aiocolocated: internal error in the thread of the hosts")
        finally:
            self._close()

    def _watch(self, what: Any, action: Callable[[], object], events: int | None = None) -> None:
        self._poller.register(what, _sockets.zmq.POLLIN if events is None else events)
        self._actions[what] = action

    def _ignore(self, what: Any) -> None:
        if self._actions.pop(what, None) is not None:
            self._poller.unregister(what)

    def _poll(self) -> None:
        """Wait for anything to happen, and see to it."""
        timeout = max(0.0, self._due - monotonic())
        for what, _ in self._poller.poll(timeout * 1000 + 0.999):
            action = self._actions.get(what)  # an earlier one may have closed it
            if action is not None:
                self._do(action)
        if monotonic() >= self._due:
            self._tick()

    def _serve_selector(self) -> None:
        for key, _ in self._selector.select(0):
            self._do(key.data)

    @staticmethod
    def _do(action: Callable[[], object]) -> None:
        try:
            action()
        except Exception:  # what is broken for one host must not end the service of the others
            logger.exception("aiocolocated: internal error in the thread of the hosts")

    def _serve_requests(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._waked.recv(4096)
        while self._requests:
            self._do(self._requests.pop(0))

    # -- starting -------------------------------------------------------------------------------------------

    def _begin(self, host: Supervised, future: Future[None]) -> None:
        if self._end_deadline is not None:
            future.set_exception(_closed_error())
            return
        host.starting = future
        host.start_deadline = monotonic() + self.times.start_timeout
        host.greeted = host.asked = host.stalled = False
        host.suspected = None
        host.pid = None
        assert self.listener is not None
        try:
            connection = self.listener.connect_host(host.name)
            host.connection = connection
            self._watch(connection.into, partial(self._take_messages, host))
            process = self._launcher.start(
                {
                    **self._config_of(host.link),
                    **connection.take_config(),
                    "name": host.name,
                    "log_level": logging.getLogger().level,
                }
            )
        except Exception as error:
            self._gone(host, f"it cannot be started: {error}", error)
            return
        host.pid = process.pid
        host.printing = Printing(host.name, process, self._output)
        for which, stream in enumerate(process.outputs):
            if not self._output_paused:
                self._select(stream, partial(self._take_output, host.printing, which))
        sentinel = getattr(process, "sentinel", None)
        if sentinel is not None:
            self._select(sentinel, partial(self._look, host.printing))
        elif process.pid is None:
            connection.watch()
            self._watch(connection.monitor, partial(self._suspect, host))
        self._due = min(self._due, monotonic())

    def _begin_again(self, hosts: list[Supervised], futures: list[Future[None]]) -> None:
        for host in hosts:
            if host.up:
                self._gone(host, _RESTARTED)
        for host, future in zip(hosts, futures, strict=True):
            self._begin(host, future)

    def _take_hello(self, host: Supervised, data: bytes) -> None:
        host.hello = json.loads(data)
        for what, own in versions().items():
            theirs = host.hello.get(what)
            if theirs != own:
                self._gone(
                    host, f"it has {what} {theirs}, the controller {own}: they must be equal"
                )
                return
        host.greeted = True
        if host.pid is None:
            host.pid = host.hello.get("pid")
        assert host.connection is not None
        # Its other connection may take a moment more.
        self._watch(host.connection.out, partial(self._came_up, host), _sockets.zmq.POLLOUT)

    def _came_up(self, host: Supervised) -> None:
        connection = host.connection
        assert connection is not None
        self._ignore(connection.out)
        connection.admitted()
        host.heard = monotonic()
        self._due = min(self._due, host.heard + self.times.heartbeat)
        link = host.link
        with LOCK:
            if link.lost is not None:
                self._set.restarted(link)
            link.answered(host.hello["pid"], shared=host.hello.get("shared", False))
            link.transmit = connection.send
            link.take_log = partial(self._output.log, host.name)
        host.up = True
        future, host.starting = host.starting, None
        assert future is not None
        future.set_result(None)

    # -- while they run -------------------------------------------------------------------------------------

    def _take_messages(self, host: Supervised) -> None:
        connection = host.connection
        assert connection is not None
        for _ in range(64):
            data = connection.receive()
            if data is None:
                return
            now = monotonic()
            if host.stalled:
                host.stalled = False
                logger.warning("%s answers again, after %.1f s", host.description, now - host.heard)
            host.heard = now
            host.asked = False
            try:
                if host.greeted:
                    host.link.receive(data)
                else:
                    self._take_hello(host, data)
            except Exception as error:
                logger.debug("%s: a message cannot be read", host.name, exc_info=True)
                what = f"{type(error).__name__}: {error}"
                self._gone(host, f"it sent a message that cannot be read ({what})", error)
                return

    def _take_output(self, printing: Printing, which: int) -> None:
        if self._output.full:
            # Then the pipe fills up, and it is the host that waits for the reader.
            self._output_paused = True
            for other in self._printings():
                for stream in other.process.outputs:
                    self._unselect(stream)
            return
        if not printing.read(which) and not printing.open[which]:
            self._unselect(printing.process.outputs[which])

    def _resume_output(self) -> None:
        self._output_paused = False
        for printing in self._printings():
            for which, stream in enumerate(printing.process.outputs):
                if printing.open[which]:
                    self._select(stream, partial(self._take_output, printing, which))

    def _printings(self) -> list[Printing]:
        return [host.printing for host in self.hosts if host.printing is not None] + self._dying

    def _select(self, what: Any, action: Callable[[], object]) -> None:
        with contextlib.suppress(KeyError, ValueError):  # it is registered, or closed
            self._selector.register(what, selectors.EVENT_READ, action)

    def _unselect(self, what: Any) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(what)

    def _tick(self) -> None:
        """See to what is due."""
        now = monotonic()
        times = self.times
        late = now - self._due  # this process was stopped, or a body of its own held the GIL
        due = now + times.heartbeat
        for host in self.hosts:
            if host.suspected is not None:
                due = min(due, self._check_connection(host, now))
            if host.starting is not None:
                if now >= host.start_deadline:
                    self._gone(host, f"it did not answer in {times.start_timeout:g} s")
                due = min(due, host.start_deadline)
            elif host.up and self._end_deadline is None:
                if late > _LATE:
                    host.heard = min(now, host.heard + late)
                due = min(due, self._check_life(host, now))
        for printing in self._printings():
            if getattr(printing.process, "sentinel", None) is None:
                self._look(printing)
                if printing.process.pid is not None:
                    due = min(due, now + _LOOK)
        if self._end_deadline is not None:
            due = min(due, self._end_deadline)
            if now >= self._end_deadline:
                self._kill_all()
                due = now + _LOOK
        self._due = max(due, now + 0.001)

    def _check_life(self, host: Supervised, now: float) -> float:
        """Ask a host for a sign of life, or say that there is none; when to look again."""
        times = self.times
        silent = now - host.heard
        if not host.asked:
            if silent < times.heartbeat:
                return host.heard + times.heartbeat
            host.asked = True
            assert host.connection is not None
            host.connection.send(_PING)
        if times.lost_after is not None and silent >= times.lost_after:
            self._gone(host, f"it has not answered for {silent:.1f} s (lost_after)")
            return now + times.heartbeat
        if silent >= times.stalled_after and not host.stalled:
            host.stalled = True
            logger.warning(
                "%s has not answered for %.1f s: it was stopped, the machine is overloaded, or a body "
                "holds the GIL; calls on it wait",
                host.description,
                silent,
            )
        ages = [
            times.heartbeat + silent,
            times.lost_after,
            None if host.stalled else times.stalled_after,
        ]
        return host.heard + min(age for age in ages if age is not None)

    # -- losing them ----------------------------------------------------------------------------------------

    def _suspect(self, host: Supervised) -> None:
        """Somebody closed a connection: the host, or one who was not let in."""
        assert host.connection is not None
        host.connection.take_events()
        if host.up:
            host.suspected = monotonic()
            self._due = min(self._due, host.suspected)

    def _check_connection(self, host: Supervised, now: float) -> float:
        connection = host.connection
        assert host.suspected is not None
        if connection is not None and host.up and not connection.connected:
            host.suspected = None
            self._gone(host, "its connection was closed")
        elif now - host.suspected > _SUSPICION:
            host.suspected = None
        return now + 0.02

    def _look(self, printing: Printing) -> None:
        """See whether a process has ended."""
        code = printing.process.poll()
        if code is None:
            return
        printing.finish()
        for host in self.hosts:
            if host.printing is printing:
                self._gone(host, f"its process ended with {describe_exit(code)}", exited=code)
        self._forget(printing)

    def _gone(
        self,
        host: Supervised,
        why: str,
        cause: Exception | None = None,
        *,
        exited: int | None = None,
    ) -> None:
        """A host has ended or is to end: whatever waits for it fails."""
        printing, connection, future = host.printing, host.connection, host.starting
        if exited is not None and host.up:
            self._take_last_messages(host)
            if host.connection is None:  # one of them could not be read
                return
        said: list[str] = []
        if printing is not None:
            printing.process.kill()
            printing.read_all()
            said = printing.said(short=future is None)
        was_up, host.up = host.up, False
        host.connection = host.printing = host.starting = None
        host.suspected = None
        host.stalled = False
        if connection is not None:
            for what in (connection.into, connection.out, connection.monitor):
                if what is not None:
                    self._ignore(what)
            connection.close()
        if printing is not None and exited is None:
            self._bury(printing)
        if future is not None:
            text = "\n    ".join([f"{host.description} did not start: {why}", *said])
            error = HostStartError(text)
            error.__cause__ = cause
            future.set_exception(error)
        elif was_up and self._end_deadline is None:
            text = f"{host.description} was lost: {why}"
            if said:
                text += f"; it printed last: {' | '.join(said)}"
            level = logging.INFO if why is _RESTARTED else logging.ERROR
            logger.log(level, "%s; %d calls fail with it", text, len(host.link.calls))
            host.link.lose(HostLostError(text))
            if self._set.collectives:  # its peers wait for it, or will
                for other in self.hosts:
                    if other.up:
                        self._gone(other, f"it was in one cluster with {host.name}; {text}")
        elif was_up:
            if exited:
                logger.warning("%s, which was to end: %s", host.description, why)
            host.link.lose(_closed(host.name))

    def _give_up(self, why: str) -> None:
        for host in self.hosts:
            if host.up:
                self._gone(host, why)

    def _take_last_messages(self, host: Supervised) -> None:
        """Take what it had sent before it ended."""
        connection = host.connection
        while host.connection is connection and connection is not None:
            if not connection.into.getsockopt(_sockets.zmq.EVENTS) & _sockets.zmq.POLLIN:
                return
            self._take_messages(host)

    def _bury(self, printing: Printing) -> None:
        """Wait for the end of a process that was killed, beside everything else."""
        if printing.process.pid is None or printing.process.poll() is not None:
            printing.finish()
            self._forget(printing)
        else:
            self._dying.append(printing)

    def _forget(self, printing: Printing) -> None:
        if printing in self._dying:
            self._dying.remove(printing)
        process = printing.process
        sentinel = getattr(process, "sentinel", None)
        for what in (*process.outputs, sentinel):
            if what is not None:
                self._unselect(what)
        process.close()

    # -- the end --------------------------------------------------------------------------------------------

    def _begin_end(self, at_once: bool) -> None:
        if self._end_deadline is None:
            for host in self.hosts:
                if host.up and not host.stalled and not at_once:
                    host.link.flush()
                    assert host.connection is not None
                    host.connection.send(_END)
                elif host.starting is not None or host.up:
                    self._end_deadline = monotonic()
                    self._gone(host, "the hosts were closed")
            self._end_deadline = monotonic() + END_TIMEOUT
        if at_once:
            self._end_deadline = monotonic()
        self._due = min(self._due, self._end_deadline)

    def _kill_all(self) -> None:
        for host in self.hosts:
            if host.up:
                if host.process is not None and host.process.pid is not None:
                    logger.warning("%s did not end in time, and is killed", host.description)
                self._gone(host, "it did not end in time")

    def _is_over(self) -> bool:
        if self._end_deadline is None or any(host.up or host.starting for host in self.hosts):
            return False
        return not self._dying or monotonic() > self._end_deadline + END_TIMEOUT

    def _close(self) -> None:
        self._end_deadline = self._end_deadline or monotonic()
        for host in self.hosts:
            with contextlib.suppress(Exception):
                if host.up or host.starting is not None:
                    self._gone(host, "the hosts were closed")
        for printing in list(self._dying):
            with contextlib.suppress(Exception):
                printing.process.kill()
                printing.finish()
                self._forget(printing)
        for host in self.hosts:
            host.link.lose(_closed(host.name))
            with LOCK:
                host.link.lost = _closed(host.name)
                host.link.transmit = _drop
                host.link.take_log = _drop
        if self.listener is not None:
            self.listener.close()
        self._selector.close()
        self._output.close(END_TIMEOUT)
        self._over.set()
        self._wake.close()
        self._waked.close()
        self._serve_last_requests()

    def _serve_last_requests(self) -> None:
        while self._requests:
            self._do(self._requests.pop(0))


def _drop(data: object) -> None:
    """Nobody is there to take it."""


def _closed(name: str) -> HostLostError:
    return HostLostError(f"{name} is closed: its 'open_hosts' block was left")


def _closed_error() -> HostError:
    return HostError("the hosts are closed")


def describe_exit(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
