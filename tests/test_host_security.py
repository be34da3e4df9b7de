# SPDX-License-Identifier: Apache-2.0
"""Who may talk to a controller or a host: nobody without the key, and no byte of theirs is unpickled."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiocolocated import colocated_python, open_hosts
from aiocolocated.hosts import _sockets
from aiocolocated.hosts.launchers import LocalLauncher

zmq = pytest.importorskip("zmq")

pytestmark = pytest.mark.asyncio
blocks = pytest.mark.no_blocking(False)


class Spy(LocalLauncher):
    """Keeps what each host was given."""

    def __init__(self):
        super().__init__()
        self.configs = []

    def start(self, config):
        self.configs.append(dict(config))
        return super().start(config)


@pytest.fixture(scope="module")
def spied() -> Iterator[tuple[object, list[dict[str, object]]]]:
    """Two hosts, and what the launcher handed to them."""
    spy = Spy()
    with open_hosts(n=2, launcher=spy) as hosts:
        yield hosts, spy.configs


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@colocated_python
def identity(x):
    return x


def connect_client(endpoint, kind, **options):
    """A client with a context of its own: sends what it gets a connection for."""
    context = zmq.Context()
    client = context.socket(kind)
    client.linger = 0
    for name, value in options.items():
        setattr(client, name, value)
    client.connect(endpoint)
    return client


def keys(server_key: str) -> dict[str, bytes]:
    public, secret = zmq.curve_keypair()
    return {
        "curve_serverkey": server_key.encode(),
        "curve_publickey": public,
        "curve_secretkey": secret,
    }


async def serves(hosts) -> bool:
    results = [identity.specialize(devices=host.devices)(1) for host in hosts]
    return await asyncio.gather(*results) == [1] * len(hosts)


@blocks
async def test_strangers_are_dropped(spied, tmp_path) -> None:
    """Without the key, with another one, or with the right one a second time: nothing is unpickled."""
    hosts, configs = spied
    listener = hosts._supervisor.listener
    refused = listener.refused
    config = configs[0]
    bomb = tmp_path / "unpickled"
    payload = pickle.dumps([Bomb(str(bomb))])
    assert await serves(hosts)
    wrong = keys(config["server_key"])
    right = {
        "curve_serverkey": config["server_key"].encode(),
        "curve_publickey": config["public"].encode(),
        "curve_secretkey": config["secret"].encode(),
    }
    other_server = {**right, "curve_serverkey": zmq.curve_keypair()[0]}
    clients = []
    for options in ({}, wrong, right, other_server):
        clients.append(connect_client(config["pull"], zmq.PUSH, **options))
        clients[-1].send(payload)
        clients.append(connect_client(config["push"], zmq.PULL, **options))
    heard = await asyncio.to_thread(
        lambda: [client.poll(600) for client in clients if client.type == zmq.PULL]
    )
    assert heard == [0] * 4
    assert listener.refused >= refused + 4  # the wrong key and the used one, at both sockets
    assert await serves(hosts)
    assert not bomb.exists()
    for client in clients:
        client.close()
        client.context.term()


@blocks
async def test_garbage_bytes(spied, tmp_path) -> None:
    """Whatever comes before the handshake closes the connection; the hosts go on."""
    hosts, configs = spied
    bomb = tmp_path / "unpickled"
    payload = pickle.dumps([Bomb(str(bomb))])
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15) + b"\x00" + bytes(31)
    for config in configs:
        for endpoint in (config["pull"], config["push"]):
            host, port = endpoint.removeprefix("tcp://").split(":")
            for data in (
                b"",
                b"GET / HTTP/1.1\r\n\r\n",
                payload,
                os.urandom(4096),
                greeting + payload,
                greeting + b"\x04\xff" + b"\x05HELLO" + bytes(249),
            ):
                with socket.create_connection((host, int(port)), timeout=5) as connection:
                    try:
                        connection.sendall(data)
                        connection.shutdown(socket.SHUT_WR)
                        connection.settimeout(2)
                        while connection.recv(4096):
                            pass
                    except OSError:
                        pass
    assert await serves(hosts)
    assert not bomb.exists()
    assert not any(host.lost for host in hosts)


@blocks
async def test_key_stays_secret(spied) -> None:
    """It is neither on the command line nor in the environment of a host, nor kept by the controller."""
    hosts, configs = spied
    for host, config in zip(hosts, configs, strict=True):
        process = Path(f"/proc/{host.pid}")
        seen = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        for what in ("secret", "public", "server_key"):
            assert config[what].encode() not in seen
    assert configs[0]["secret"] != configs[1]["secret"]
    assert hosts._supervisor.hosts[0].connection._config == {}


@blocks
async def test_loopback_only(spied) -> None:
    """Every port of the controller is bound to 127.0.0.1, and hosts have none."""
    hosts, configs = spied
    ports = {int(c[end].rpartition(":")[2]) for c in configs for end in ("push", "pull")}
    listening = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A":
                address, port = local.split(":")
                listening[rest[5]] = (address, int(port, 16))
    assert {address for address, port in listening.values() if port in ports} == {"0100007F"}
    for host in hosts:
        for descriptor in Path(f"/proc/{host.pid}/fd").iterdir():
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                assert target[8:-1] not in listening


async def test_authentication_alone() -> None:
    """A listener lets in one key for each host, and counts the others."""
    _sockets.require_zmq()

    def look() -> None:
        listener = _sockets.Listener("127.0.0.1")
        connection = listener.connect_host("host-0")
        config = connection.take_config()
        over = threading.Event()

        def serve() -> None:
            while not over.is_set():
                if listener.authentication.poll(10):
                    listener.authenticate()

        thread = threading.Thread(target=serve)
        thread.start()
        stranger = connect_client(config["pull"], zmq.PUSH, **keys(config["server_key"]))
        stranger.send(b"stranger")
        deadline = time.monotonic() + 5
        while not listener.refused and time.monotonic() < deadline:
            time.sleep(0.01)
        assert listener.refused == 1
        assert connection.receive() is None
        assert not connection.connected
        connection.send(b"nobody is there")  # does not wait
        host = _sockets.connect(config)
        host.send(b"hello")
        assert connection.into.poll(5000)
        assert connection.receive() == b"hello"
        while not connection.connected:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        connection.send(b"back")
        assert host.receive() == b"back"
        host.close()
        stranger.close()
        stranger.context.term()
        connection.close()
        connection.close()
        over.set()
        thread.join()
        listener.close()

    await asyncio.to_thread(look)
