# SPDX-License-Identifier: Apache-2.0
"""The other end of ``control_channels``: a process that sends every message back.

``python -m benchmarks._echo`` reads one line of JSON from its standard input, the channel's kind
and keys (a command line could be read by anyone on the machine), prints the addresses that it has
bound, and serves until it is killed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal, cast


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of control channel.

    Attributes:
        name: what the table calls it.
        library: the Python package that carries the messages.
        secure: encrypted, and either end proves who it is.
        pattern: pyzmq's sockets: a pair of PUSH and PULL for each direction, or DEALER to DEALER.
        transport: ``tcp`` on loopback, or ``ipc``, a Unix domain socket.
        threads: a thread blocks in ``recv``; else ``zmq.asyncio``.
    """

    name: str
    library: Literal["asyncio", "grpc", "zmq"]
    secure: bool = True
    pattern: Literal["push", "dealer"] = "push"
    transport: Literal["tcp", "ipc"] = "tcp"
    threads: bool = True


@dataclasses.dataclass(frozen=True)
class Order:
    """What the process is told.

    Attributes:
        kind: the fields of the kind.
        uvloop: run under uvloop, as the other end does.
        folder: a folder for Unix domain sockets.
        keys: CURVE's keys (this end's public and secret, the other's public), or TLS's
            certificate and key, the same for both ends; ASCII.
    """

    kind: dict[str, Any]
    uvloop: bool
    folder: str
    keys: dict[str, str]


class Framed(asyncio.BufferedProtocol):
    """Messages over a byte stream, each behind 8 bytes that say how long it is."""

    def __init__(self, receive: Callable[[memoryview | bytearray], None]) -> None:
        self._receive = receive
        self._transport: asyncio.Transport | None = None
        self._scratch = memoryview(bytearray(256 << 10))
        self._filled = 0
        self._large: bytearray | None = None  # one that does not fit: it is read in place

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def send(self, message: bytes | bytearray | memoryview) -> None:
        """Queue a message; never waits."""
        assert self._transport is not None
        head = len(message).to_bytes(8, "little")
        if len(message) < len(self._scratch):
            self._transport.write(head + message)
        else:
            self._transport.write(head)
            self._transport.write(message)

    def get_buffer(self, _: int) -> memoryview:
        buffer = self._scratch if self._large is None else memoryview(self._large)
        return buffer[self._filled :]

    def buffer_updated(self, count: int) -> None:
        self._filled += count
        if self._large is not None:
            if self._filled == len(self._large):
                message, self._large, self._filled = self._large, None, 0
                self._receive(message)
            return
        scratch, start = self._scratch, 0
        while (left := self._filled - start) >= 8:
            length = int.from_bytes(scratch[start : start + 8], "little")
            end = start + 8 + length
            if end <= self._filled:
                self._receive(scratch[start + 8 : end])
                start = end
                continue
            if 8 + length > len(scratch):
                self._large = bytearray(length)
                self._large[: left - 8] = scratch[start + 8 : self._filled]
                self._filled = left - 8
                return
            break
        scratch[:left] = bytes(scratch[start : self._filled])
        self._filled = left


def zmq_sockets(context: Any, kind: Kind) -> tuple[Any, Any]:
    """Make the sockets of one end, to send and to receive; for DEALER the same."""
    import zmq

    if kind.pattern == "dealer":
        socket = context.socket(zmq.DEALER)
        sockets = (socket, socket)
    else:
        sockets = (context.socket(zmq.PUSH), context.socket(zmq.PULL))
    for socket in sockets:
        socket.linger = 0
        socket.set_hwm(0)  # a call is queued, however many are under way
    return sockets


class _OneClient:
    """What pyzmq asks whether a client's key is known."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        """Say whether the key is known."""
        return key == self._key


def tell(*addresses: str) -> None:
    """Print where this process can be reached."""
    print(json.dumps(addresses), flush=True)


async def echo_zmq(order: Order, kind: Kind) -> None:
    """Serve pyzmq's sockets."""
    import zmq.asyncio
    from zmq.auth.thread import ThreadAuthenticator

    plain: zmq.Context[Any] = zmq.Context()
    context: Any = plain if kind.threads else zmq.asyncio.Context(plain)
    push, pull = zmq_sockets(context, kind)
    if kind.secure:
        authenticator = ThreadAuthenticator(plain)
        authenticator.start()
        client = _OneClient(order.keys["client_public"].encode())
        authenticator.configure_curve_callback("*", client)
    addresses = []
    for number, socket in enumerate(dict.fromkeys((push, pull))):
        if kind.secure:
            socket.curve_server = True
            socket.curve_publickey = order.keys["server_public"].encode()
            socket.curve_secretkey = order.keys["server_secret"].encode()
        if kind.transport == "ipc":
            socket.bind(f"ipc://{order.folder}/{kind.pattern}{number}")
        else:
            socket.bind("tcp://127.0.0.1:*")
        addresses.append(socket.last_endpoint.decode())
    tell(*addresses)
    while True:
        if kind.threads:
            push.send(pull.recv(copy=False), copy=False)
        else:
            await push.send(await pull.recv(copy=False), copy=False)


async def echo_grpc(order: Order, kind: Kind) -> None:
    """Serve a bidirectional stream of gRPC."""
    grpc: Any = importlib.import_module("grpc.aio").grpc

    async def echo(messages: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        async for message in messages:
            yield message

    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, _: Any) -> Any:
            return grpc.stream_stream_rpc_method_handler(echo)  # bytes, as they are

    server = grpc.aio.server(options=GRPC_OPTIONS)
    server.add_generic_rpc_handlers((Handler(),))
    if kind.secure:
        certificate, key = (order.keys[name].encode() for name in ("certificate", "key"))
        credentials = grpc.ssl_server_credentials(
            [(key, certificate)], root_certificates=certificate, require_client_auth=True
        )
        port = server.add_secure_port("127.0.0.1:0", credentials)
    else:
        port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    tell(f"127.0.0.1:{port}")
    await server.wait_for_termination()


GRPC_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.ssl_target_name_override", "localhost"),
)


async def echo_asyncio() -> None:
    """Serve a TCP connection of asyncio."""

    def protocol() -> Framed:
        framed = Framed(lambda message: framed.send(message))
        return framed

    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    tell(f"{host}:{port}")
    await server.serve_forever()


async def serve(order: Order) -> None:
    """Serve until the end of the process."""
    kind = Kind(**order.kind)
    match kind.library:
        case "zmq":
            await echo_zmq(order, kind)
        case "grpc":
            await echo_grpc(order, kind)
        case "asyncio":
            await echo_asyncio()


def main() -> None:
    """Read the order and serve."""
    order = Order(**json.loads(sys.stdin.readline()))
    if order.uvloop:
        import uvloop

        uvloop.run(serve(order))
    else:
        asyncio.run(serve(order))


if __name__ == "__main__":
    main()
