# SPDX-License-Identifier: Apache-2.0
"""Sockets between a controller and its hosts: ZeroMQ with CURVE, one pair for each host.

Both ends prove who they are before a byte of a message is looked at: a host knows the controller's key,
and the controller lets in the one key that it gave to that host, once.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

zmq: Any = None  # pyzmq, imported when the first hosts are opened
_read_event: Any = None
_decode: Any = None

_LINGER = 1000  # milliseconds that a host has to send its last messages
_REACH = 60.0  # seconds until a host must have reached its controller
_PROBE = 5000  # milliseconds between the probes of a connection to another machine
_PROBE_TIMEOUT = 30_000


def require_zmq() -> None:
    """Import the messaging library.

    Raises:
        ImportError: it is missing; the message has the pip command.
    """
    global zmq, _read_event, _decode
    try:
        import zmq as module
        from zmq.utils.monitor import recv_monitor_message
        from zmq.utils.z85 import decode
    except ImportError as error:
        raise ImportError("hosts need pyzmq: pip install 'aiocolocated[hosts]'") from error
    if not module.has("curve"):
        raise ImportError("hosts need a pyzmq with CURVE: pip install 'aiocolocated[hosts]'")
    zmq = module
    _read_event, _decode = recv_monitor_message, decode


def _monitor(socket: Any, name: str, events: int) -> Any:
    """A socket on which events of another one arrive."""
    address = f"inproc://{name}-{socket.underlying}"
    socket.monitor(address, events)
    monitor = socket.context.socket(zmq.PAIR)
    monitor.linger = 0
    monitor.rcvhwm = 0  # else many of them would hold the connections up
    monitor.connect(address)
    return monitor


# --- the host's end -----------------------------------------------------------------------------------


class HostConnection:
    """The host's end."""

    def __init__(self, context: Any, out: Any, into: Any, monitor: Any = None) -> None:
        self._context = context
        self._out = out
        self._into = into
        self._monitor = monitor

    def send(self, data: bytes) -> None:
        """Send a message (one thread at a time)."""
        self._out.send(data)

    def receive(self) -> bytes:
        """Wait for the next message; an empty one says that the host is to end."""
        data: bytes = self._into.recv()
        return data

    def wait_for_loss(self) -> str | None:
        """Wait until the controller is gone, and say how; ``None`` if this end was closed."""
        events = zmq.Event
        reached = False
        try:
            while reached or self._monitor.poll(_REACH * 1000):
                event = _read_event(self._monitor)["event"]
                if event == events.HANDSHAKE_SUCCEEDED:
                    reached = True
                elif event == events.HANDSHAKE_FAILED_AUTH:
                    return "the controller does not know this key: each is good for one connection"
                elif event == events.DISCONNECTED and reached:
                    return "the controller has closed the connection"
        except zmq.ContextTerminated:
            self._monitor.close()
            return None
        return f"the controller did not answer in {_REACH:g} s"

    def close(self) -> None:
        """Send what there is to send, for a moment, and close."""
        self._out.close(linger=_LINGER)
        self._into.close(linger=0)
        self._context.term()


def connect(config: dict[str, Any], *, monitored: bool = False) -> HostConnection:
    """Connect to the controller.

    Args:
        config: what the controller has given to this host.
        monitored: whether nothing but the connection tells that the controller is gone.
    """
    require_zmq()
    context = zmq.Context()
    monitor = None
    sockets: list[Any] = []
    for kind, endpoint in ((zmq.PUSH, config["pull"]), (zmq.PULL, config["push"])):
        socket = context.socket(kind)
        socket.linger = _LINGER
        socket.sndhwm = socket.rcvhwm = 0
        socket.curve_serverkey = config["server_key"].encode()
        socket.curve_publickey = config["public"].encode()
        socket.curve_secretkey = config["secret"].encode()
        if monitored:
            _probe(socket)
        if monitored and kind == zmq.PULL:
            events = zmq.Event
            monitor = _monitor(
                socket,
                "host",
                events.HANDSHAKE_SUCCEEDED | events.HANDSHAKE_FAILED_AUTH | events.DISCONNECTED,
            )
        socket.connect(endpoint)
        sockets.append(socket)
    return HostConnection(context, sockets[0], sockets[1], monitor)


def _probe(socket: Any) -> None:
    """Have a connection closed when the other end, or what is in between, does not answer."""
    socket.heartbeat_ivl = _PROBE
    socket.heartbeat_timeout = socket.heartbeat_ttl = _PROBE_TIMEOUT


# --- the controller's end -----------------------------------------------------------------------------


class ControllerConnection:
    """The controller's end of what connects it to one host."""

    def __init__(self, listener: Listener, domain: str) -> None:
        public, secret = zmq.curve_keypair()
        self.domain = domain
        self._listener = listener
        self._lock = threading.Lock()
        self._closed = False
        listener.allowed[domain] = _decode(public)
        try:
            self.out = listener.bind(zmq.PUSH, domain)
            self.into = listener.bind(zmq.PULL, domain)
        except BaseException:
            listener.allowed.pop(domain)
            raise
        self.monitor: Any = None
        self._config = {
            "push": _endpoint(self.out),
            "pull": _endpoint(self.into),
            "server_key": listener.public.decode(),
            "public": public.decode(),
            "secret": secret.decode(),
        }

    def take_config(self) -> dict[str, str]:
        """What the host needs, its key included; it is not kept here."""
        config, self._config = self._config, {}
        return config

    def watch(self) -> None:
        """Have ``monitor`` tell of lost connections; they may be others than the host's."""
        self.monitor = _monitor(self.out, self.domain, zmq.Event.DISCONNECTED)

    def take_events(self) -> None:
        """Empty ``monitor`` (the thread that receives)."""
        with contextlib.suppress(zmq.Again):
            while True:
                self.monitor.recv_multipart(zmq.NOBLOCK)

    @property
    def connected(self) -> bool:
        """Whether the host is there to be sent something (the thread that receives)."""
        with self._lock:
            return not self._closed and bool(self.out.getsockopt(zmq.EVENTS) & zmq.POLLOUT)

    def admitted(self) -> None:
        """The host is there: nobody else will be let in with its key."""
        self._listener.allowed.pop(self.domain, None)

    def send(self, data: bytes) -> None:
        """Send a message (any thread); it is dropped if the host is gone."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(zmq.Again):  # waiting would be for ever
                    self.out.send(data, zmq.NOBLOCK)

    def receive(self) -> bytes | None:
        """The next message, if there is one (the thread that receives)."""
        if self._closed:
            return None
        try:
            data: bytes = self.into.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return data

    def close(self) -> None:
        """Close the sockets; the second close is a no-op."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._listener.allowed.pop(self.domain, None)
                if self.monitor is not None:
                    self.out.disable_monitor()
                    self.monitor.close()
                self.out.close(linger=0)
                self.into.close(linger=0)


def _endpoint(socket: Any) -> str:
    endpoint: bytes = socket.getsockopt(zmq.LAST_ENDPOINT)
    return endpoint.decode().rstrip("\0")


def check_interface(interface: str) -> None:
    """Refuse an address that stands for all interfaces of the machine.

    Raises:
        ValueError: it does.
    """
    if interface in ("", "*", "0.0.0.0", "::", "[::]"):
        raise ValueError(
            f"interface must be the address of one network interface, which hosts connect to, got "
            f"{interface!r}"
        )


class Listener:
    """Where hosts connect: binds sockets, and lets in whom it has given a key."""

    def __init__(self, interface: str) -> None:
        require_zmq()
        self._interface = interface
        self.context = zmq.Context()
        self.public, self._secret = zmq.curve_keypair()
        self.allowed: dict[str, bytes] = {}
        self.refused = 0  # connections with a key that is not allowed there
        # RFC 27/ZAP: libzmq asks here before a connection is made.
        self.authentication = self.context.socket(zmq.REP)
        self.authentication.linger = 0
        self.authentication.bind("inproc://zeromq.zap.01")

    def connect_host(self, domain: str) -> ControllerConnection:
        """Make a key for one host, and sockets that wait for it."""
        return ControllerConnection(self, domain)

    def bind(self, kind: int, domain: str) -> Any:
        """A socket for the host that has the key of ``domain``."""
        socket = self.context.socket(kind)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 0
        socket.curve_server = True
        socket.curve_secretkey = self._secret
        socket.curve_publickey = self.public
        socket.zap_domain = domain.encode()
        socket.ipv6 = ":" in self._interface
        socket.bind(f"tcp://{self._interface}:*")
        return socket

    def authenticate(self) -> None:
        """Answer one question of libzmq (the thread that receives)."""
        version, request, domain, _, _, mechanism, *credentials = (
            self.authentication.recv_multipart()
        )
        allowed = self.allowed.get(domain.decode(errors="replace"))
        good = (
            version == b"1.0"
            and mechanism == b"CURVE"
            and allowed is not None
            and credentials == [allowed]
        )
        if not good:
            self.refused += 1
        status = (b"200", b"OK") if good else (b"400", b"unknown key")
        self.authentication.send_multipart([version, request, *status, b"", b""])

    def close(self) -> None:
        """Close everything, and end the threads of the messaging library."""
        self.authentication.close()
        with contextlib.suppress(Exception):
            self.context.destroy(linger=0)
