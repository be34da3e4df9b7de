# SPDX-License-Identifier: Apache-2.0
"""Ways to carry calls to a process of the same machine: what a message costs, small and large.

Each channel's other end is a process that sends every message back. With two exceptions, there to
show what security costs, the channels are encrypted and both ends prove who they are: CURVE with
known keys, or TLS with a certificate for either end. Libraries that are not installed are left out.
``python -m benchmarks.control_channels`` runs these benchmarks alone.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from ._echo import GRPC_OPTIONS, Framed, Kind, Order, zmq_sockets
from ._model import Benchmark, Effort, Samples, Variant, alternate

FLOOR = Kind("asyncio TCP, no security", "asyncio", secure=False)
PLAIN = Kind("pyzmq PUSH/PULL tcp, thread, no security", "zmq", secure=False)
PUSH = Kind("pyzmq PUSH/PULL tcp, thread, CURVE", "zmq")
GRPC_PLAIN = Kind("grpc.aio stream, no security", "grpc", secure=False)
GRPC = Kind("grpc.aio stream, TLS", "grpc")

KINDS = (
    FLOOR,
    PLAIN,
    PUSH,
    Kind("pyzmq PUSH/PULL ipc, thread, CURVE", "zmq", transport="ipc"),
    Kind("pyzmq PUSH/PULL tcp, zmq.asyncio, CURVE", "zmq", threads=False),
    Kind("pyzmq PUSH/PULL ipc, zmq.asyncio, CURVE", "zmq", transport="ipc", threads=False),
    Kind("pyzmq DEALER tcp, thread, CURVE", "zmq", pattern="dealer"),
    Kind("pyzmq DEALER tcp, zmq.asyncio, CURVE", "zmq", pattern="dealer", threads=False),
    GRPC_PLAIN,
    GRPC,
)
SMALL = bytes(100)
MANY = 256  # messages that a thread hands to the loop at once, at most


class Channel(Protocol):
    """Messages to the other process and back."""

    async def send(self, message: bytes) -> None:
        """Send a message."""

    async def receive(self) -> int:
        """Wait for the next message; gives its length in bytes."""


class Inbox:
    """What has arrived, for one reader on the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lengths: collections.deque[int] = collections.deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, lengths: Iterable[int]) -> None:
        """Add messages, on the loop."""
        self._lengths.extend(lengths)
        if self._waiter is not None:
            self._waiter.set_result(None)
            self._waiter = None

    def put_from_thread(self, lengths: Iterable[int]) -> None:
        """Add messages, on another thread."""
        self._loop.call_soon_threadsafe(self.put, lengths)

    async def get(self) -> int:
        """Wait for the next one."""
        if not self._lengths:
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._lengths.popleft()


class TcpChannel:
    """A TCP connection of asyncio."""

    def __init__(self) -> None:
        inbox = Inbox()
        self.receive = inbox.get
        self.framed = Framed(lambda message: inbox.put((len(message),)))

    async def send(self, message: bytes) -> None:
        self.framed.send(message)


class AsyncioZmqChannel:
    """Sockets of ``zmq.asyncio``."""

    def __init__(self, push: Any, pull: Any) -> None:
        self._push = push
        self._pull = pull

    async def send(self, message: bytes) -> None:
        await self._push.send(message, copy=False)

    async def receive(self) -> int:
        return len(await self._pull.recv(copy=False))


def waiting_messages(pull: Any) -> Iterator[int]:
    """The lengths of messages that are there already."""
    import zmq

    for _ in range(MANY):
        try:
            yield len(pull.recv(zmq.NOBLOCK, copy=False))
        except zmq.Again:
            return


class ThreadZmqChannel:
    """PUSH and PULL: the loop's thread sends, another blocks in ``recv``."""

    def __init__(self, push: Any, pull: Any) -> None:
        inbox = Inbox()
        self.receive = inbox.get
        self._push = push
        self._pull = pull
        self._put = inbox.put_from_thread
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    async def send(self, message: bytes) -> None:
        self._push.send(message, copy=False)

    def close(self) -> None:
        """End the thread: an empty message comes back."""
        self._push.send(b"")
        self._thread.join()

    def _run(self) -> None:
        pull = self._pull
        while length := len(pull.recv(copy=False)):
            self._put([length, *waiting_messages(pull)])


class ThreadDealerChannel:
    """DEALER: the socket belongs to a thread, to which the loop's hands messages over."""

    def __init__(self, context: Any, dealer: Any) -> None:
        import zmq

        inbox = Inbox()
        self.receive = inbox.get
        self._dealer = dealer
        self._put = inbox.put_from_thread
        address = f"inproc://{id(self)}"
        self._outgoing = context.socket(zmq.PULL)
        self._push = context.socket(zmq.PUSH)
        for socket in (self._outgoing, self._push):
            socket.set_hwm(0)
        self._outgoing.bind(address)
        self._push.connect(address)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    async def send(self, message: bytes) -> None:
        self._push.send(message, copy=False)

    def close(self) -> None:
        """End the thread: an empty message is not sent on."""
        self._push.send(b"")
        self._thread.join()
        self._push.close()
        self._outgoing.close()

    def _run(self) -> None:
        import zmq

        dealer, outgoing = self._dealer, self._outgoing
        poller = zmq.Poller()
        poller.register(dealer, zmq.POLLIN)
        poller.register(outgoing, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if dealer in ready:
                self._put(list(waiting_messages(dealer)))
            if outgoing in ready:
                message = outgoing.recv(copy=False)
                if not len(message):
                    return
                dealer.send(message, copy=False)


class GrpcChannel:
    """A bidirectional stream of gRPC."""

    def __init__(self, call: Any) -> None:
        self.send = call.write
        self._read = call.read

    async def receive(self) -> int:
        return len(await self._read())


def new_certificate(folder: str) -> dict[str, str]:
    """A certificate of this run, for both ends, and its key."""
    key, certificate = Path(folder, "key.pem"), Path(folder, "certificate.pem")
    options = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1"
    names = "-subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run(
        ["openssl", "req", *options.split(), *names.split(), "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    return {"key": key.read_text(), "certificate": certificate.read_text()}


def new_keys(kind: Kind, folder: str) -> dict[str, str]:
    """The keys of a channel."""
    if not kind.secure:
        return {}
    if kind.library == "grpc":
        return new_certificate(folder)
    import zmq

    keys: dict[str, str] = {}
    for end in ("server", "client"):
        public, secret = zmq.curve_keypair()
        keys |= {f"{end}_public": public.decode(), f"{end}_secret": secret.decode()}
    return keys


@contextlib.asynccontextmanager
async def zmq_channel(
    kind: Kind, keys: dict[str, str], addresses: list[str]
) -> AsyncIterator[Channel]:
    """Connect pyzmq's sockets."""
    import zmq.asyncio

    context: Any = zmq.Context() if kind.threads else zmq.asyncio.Context()
    push, pull = zmq_sockets(context, kind)
    # The other end's first socket is the one it sends with.
    for socket, address in zip(dict.fromkeys((pull, push)), addresses, strict=True):
        if kind.secure:
            socket.curve_serverkey = keys["server_public"].encode()
            socket.curve_publickey = keys["client_public"].encode()
            socket.curve_secretkey = keys["client_secret"].encode()
        socket.connect(address)
    try:
        if not kind.threads:
            yield AsyncioZmqChannel(push, pull)
            return
        dealer = kind.pattern == "dealer"
        channel = ThreadDealerChannel(context, push) if dealer else ThreadZmqChannel(push, pull)
        try:
            yield channel
        finally:
            channel.close()
    finally:
        context.destroy(linger=0)


@contextlib.asynccontextmanager
async def grpc_channel(keys: dict[str, str], address: str) -> AsyncIterator[Channel]:
    """Open a stream of gRPC."""
    grpc: Any = importlib.import_module("grpc.aio").grpc
    if keys:
        certificate, key = (keys[name].encode() for name in ("certificate", "key"))
        credentials = grpc.ssl_channel_credentials(certificate, key, certificate)
        opened = grpc.aio.secure_channel(address, credentials, GRPC_OPTIONS)
    else:
        opened = grpc.aio.insecure_channel(address, GRPC_OPTIONS)
    async with opened as connection:
        yield GrpcChannel(connection.stream_stream("/echo/Echo")())


@contextlib.asynccontextmanager
async def open_channel(kind: Kind) -> AsyncIterator[Channel]:
    """Start the other process and connect to it."""
    loop = asyncio.get_running_loop()
    uvloop = type(loop).__module__.startswith("uvloop")
    with tempfile.TemporaryDirectory() as folder:
        keys = new_keys(kind, folder)
        order = Order(dataclasses.asdict(kind), uvloop, folder, keys)
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks._echo"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parent.parent,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with process, contextlib.ExitStack() as stack:
            stack.callback(process.kill)
            process.stdin.write(json.dumps(dataclasses.asdict(order)).encode() + b"\n")
            process.stdin.flush()
            addresses = json.loads(process.stdout.readline())
            match kind.library:
                case "zmq":
                    async with zmq_channel(kind, keys, addresses) as channel:
                        yield channel
                case "grpc":
                    async with grpc_channel(keys, *addresses) as channel:
                        yield channel
                case "asyncio":
                    host, port = addresses[0].split(":")
                    tcp = TcpChannel()
                    transport, _ = await loop.create_connection(lambda: tcp.framed, host, int(port))
                    with contextlib.closing(transport):
                        yield tcp


def present(kind: Kind) -> bool:
    """Whether the channel can be measured here."""
    if importlib.util.find_spec(kind.library) is None:
        reason = f"{kind.library} is not installed"
    elif kind.library == "grpc" and kind.secure and shutil.which("openssl") is None:
        reason = "no openssl to make a certificate with"
    else:
        return True
    print(f"{kind.name}: left out, {reason}", file=sys.stderr)
    return False


async def echo(channel: Channel, message: bytes) -> None:
    """Send a message and wait until it is back."""
    await channel.send(message)
    length = await channel.receive()
    assert length == len(message)


async def pipelined(channel: Channel, count: int) -> None:
    """Send messages without a wait and receive them as they come back."""

    async def send_all() -> None:
        for _ in range(count):
            await channel.send(SMALL)

    sending = asyncio.create_task(send_all())
    for _ in range(count):
        await channel.receive()
    await sending


async def on_every_channel(
    effort: Effort, work: Callable[[Channel], Awaitable[float]], kinds: tuple[Kind, ...] = KINDS
) -> Samples:
    """Measure the work on each channel in turn; the other ends sleep meanwhile."""

    def variant(channel: Channel) -> Variant:
        return lambda: work(channel)

    async with contextlib.AsyncExitStack() as stack:
        variants = {}
        for kind in filter(present, kinds):
            channel = await stack.enter_async_context(open_channel(kind))
            await echo(channel, SMALL)
            variants[kind.name] = variant(channel)
        return await alternate(variants, effort)


async def round_trips(effort: Effort, percentile: int) -> Samples:
    """A message of 100 bytes and back, one at a time; a percentile of 500, in us."""
    count = max(100, effort.count(500))

    async def work(channel: Channel) -> float:
        times = []
        for _ in range(count):
            start = time.perf_counter()
            await echo(channel, SMALL)
            times.append(time.perf_counter() - start)
        return statistics.quantiles(times, n=100)[percentile - 1] * 1e6

    return await on_every_channel(effort, work)


async def many_messages(effort: Effort) -> Samples:
    """5 000 messages of 100 bytes and back, pipelined; us for each."""
    count = effort.count(5_000)

    async def work(channel: Channel) -> float:
        start = time.perf_counter()
        await pipelined(channel, count)
        return (time.perf_counter() - start) / count * 1e6

    return await on_every_channel(effort, work)


async def large_message(effort: Effort, mebibytes: int) -> Samples:
    """A large message and back, in ms."""
    message = bytes(mebibytes << 20)
    count = max(1, 16 // mebibytes)

    async def work(channel: Channel) -> float:
        start = time.perf_counter()
        for _ in range(count):
            await echo(channel, message)
        return (time.perf_counter() - start) / count * 1e3

    return await on_every_channel(effort, work)


def _benchmark(
    name: str,
    title: str,
    unit: str,
    measure: Callable[[Effort], Awaitable[Samples]],
    repetitions: int = 5,
) -> Benchmark:
    """What all of them have in common."""
    return Benchmark(
        f"channel_{name}",
        f"a control channel: {title}",
        unit,
        measure,
        reference=FLOOR.name,
        processes=2,
        repetitions=repetitions,
        every_loop=unit == "us",
    )


BENCHMARKS = (
    _benchmark(
        "p50", "100 bytes and back, p50", "us", functools.partial(round_trips, percentile=50)
    ),
    _benchmark(
        "p99", "100 bytes and back, p99", "us", functools.partial(round_trips, percentile=99)
    ),
    _benchmark("pipelined", "5 000 pipelined messages and back, each", "us", many_messages),
    _benchmark("1mib", "1 MiB and back", "ms", functools.partial(large_message, mebibytes=1)),
    _benchmark("64mib", "64 MiB and back", "ms", functools.partial(large_message, mebibytes=64), 3),
)


if __name__ == "__main__":
    from .__main__ import main

    only = [word for benchmark in BENCHMARKS for word in ("--only", benchmark.name)]
    sys.exit(main([*only, *sys.argv[1:]]))
