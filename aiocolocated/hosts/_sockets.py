# SPDX-License-Identifier: Apache-2.0
"""Sockets between a controller and its hosts: ZeroMQ with CURVE, one pair for each host.

Both ends prove who they are before a byte of a message is looked at: a host knows the controller's key,
and the controller lets in the one key that it gave to that host.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

zmq: Any = None  # pyzmq, imported when the first hosts are opened


def require_zmq() -> None:
    """Import the messaging library.

    Raises:
        ImportError: it is missing; the message has the pip command.
    """
    global zmq
    try:
        import zmq as module
        import zmq.utils.z85
    except ImportError as error:
        raise ImportError("hosts need pyzmq: pip install 'aiocolocated[hosts]'") from error
    if not module.has("curve"):
        raise ImportError("hosts need a pyzmq with CURVE: pip install 'aiocolocated[hosts]'")
    zmq = module


class HostConnection:
    """The host's end."""

    def __init__(self, context: Any, out: Any, into: Any) -> None:
        self._context = context
        self._out = out
        self._into = into

    def send(self, data: bytes) -> None:
        """Send a message (one thread at a time)."""
        self._out.send(data)

    def receive(self) -> bytes:
        """Wait for the next message; an empty one says that the host is to end."""
        data: bytes = self._into.recv()
        return data


def connect(config: dict[str, Any]) -> HostConnection:
    """Connect to the controller."""
    require_zmq()
    context = zmq.Context()
    sockets = []
    for kind, endpoint in ((zmq.PUSH, config["pull"]), (zmq.PULL, config["push"])):
        socket = context.socket(kind)
        socket.linger = 1000
        socket.sndhwm = socket.rcvhwm = 0
        socket.curve_serverkey = config["server_key"].encode()
        socket.curve_publickey = config["public"].encode()
        socket.curve_secretkey = config["secret"].encode()
        socket.connect(endpoint)
        sockets.append(socket)
    return HostConnection(context, *sockets)


class ControllerConnection:
    """The controller's end of what connects it to one host."""

    def __init__(self, listener: Listener, domain: str) -> None:
        public, secret = zmq.curve_keypair()
        self.domain = domain
        self._lock = threading.Lock()
        self._closed = False
        listener.allowed[domain] = public
        self._out = listener.bind(zmq.PUSH, domain)
        self.into = listener.bind(zmq.PULL, domain)
        self.config = {
            "push": _endpoint(self._out),
            "pull": _endpoint(self.into),
            "server_key": listener.public.decode(),
            "public": zmq.utils.z85.encode(zmq.utils.z85.decode(public)).decode(),
            "secret": secret.decode(),
        }

    def send(self, data: bytes) -> None:
        """Send a message (any thread)."""
        with self._lock:
            if not self._closed:
                self._out.send(data)

    def receive(self) -> bytes | None:
        """The next message, if there is one (the thread that receives)."""
        try:
            data: bytes = self.into.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return data

    def close(self) -> None:
        """Close both sockets; the second close is a no-op."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._out.close(linger=0)
                self.into.close(linger=0)


def _endpoint(socket: Any) -> str:
    endpoint: bytes = socket.getsockopt(zmq.LAST_ENDPOINT)
    return endpoint.decode().rstrip("\0")


class Listener:
    """Where hosts connect: binds sockets, and lets in whom it has given a key."""

    def __init__(self, interface: str) -> None:
        require_zmq()
        self._interface = interface
        self.context = zmq.Context()
        self.public, self._secret = zmq.curve_keypair()
        self.allowed: dict[str, bytes] = {}
        self.refused = 0
        # RFC 27/ZAP: libzmq asks here before a connection is made.
        self.authentication = self.context.socket(zmq.REP)
        self.authentication.linger = 0
        self.authentication.bind("inproc://zeromq.zap.01")

    def bind(self, kind: int, domain: str) -> Any:
        socket = self.context.socket(kind)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 0
        socket.curve_server = True
        socket.curve_secretkey = self._secret
        socket.curve_publickey = self.public
        socket.zap_domain = domain.encode()
        socket.bind(f"tcp://{self._interface}:*")
        return socket

    def authenticate(self) -> None:
        """Answer one question of libzmq (the thread that receives)."""
        version, request, domain, _, _, mechanism, *credentials = (
            self.authentication.recv_multipart()
        )
        allowed = self.allowed.get(domain.decode())
        good = (
            version == b"1.0"
            and mechanism == b"CURVE"
            and allowed is not None
            and credentials == [zmq.utils.z85.decode(allowed)]
        )
        if not good:
            self.refused += 1
        status = (b"200", b"OK") if good else (b"400", b"unknown key")
        self.authentication.send_multipart([version, request, *status, b"", b""])

    def close(self) -> None:
        self.authentication.close()
        with contextlib.suppress(Exception):
            self.context.term()
