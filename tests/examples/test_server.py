# SPDX-License-Identifier: Apache-2.0
"""The server example, run for real: a child process, a loopback port, HTTP."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from starlette.requests import ClientDisconnect, Request

from examples import demo
from examples.server import model, work
from examples.server.__main__ import MODES
from examples.server.app import cancel_on_disconnect
from examples.server.launch import ROOT, ServerProcess, run_server

pytestmark = pytest.mark.timeout(120)

needs_zmq = pytest.mark.skipif(
    importlib.util.find_spec("zmq") is None, reason="host processes need pyzmq"
)


@pytest.fixture(scope="session")
def digits() -> model.Digits:
    """The data set."""
    return model.load_digits()


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first server writes the trained weights and the others find them."""
    return tmp_path_factory.mktemp("weights") / "digits.npz"


class Running:
    """A started server with a client for it."""

    def __init__(self, process: ServerProcess, client: httpx.AsyncClient, log: Path) -> None:
        self.process = process
        self.client = client
        self._log = log

    async def stats(self) -> dict[str, Any]:
        """``GET /stats``."""
        stats: dict[str, Any] = (await self.client.get("/stats")).json()
        return stats

    async def log_lines(self) -> list[dict[str, Any]]:
        """What the prediction log holds."""
        if not await asyncio.to_thread(self._log.exists):
            return []
        text = await asyncio.to_thread(self._log.read_text)
        return [json.loads(line) for line in text.splitlines()]


Start = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture
def start(weights: Path, tmp_path: Path) -> Start:
    """Starts servers: ``async with start("--workers", "1") as server``."""

    @asynccontextmanager
    async def start(*arguments: str) -> AsyncIterator[Running]:
        log = tmp_path / "predictions.jsonl"
        files = ("--weights", str(weights), "--log", str(log))
        async with (
            run_server(*files, *arguments) as process,
            httpx.AsyncClient(base_url=process.url, timeout=60) as client,
        ):
            yield Running(process, client, log)

    return start


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Ask again until ``condition`` holds."""
    async with asyncio.timeout(30):
        while not await condition():
            await asyncio.sleep(0.01)


@pytest.mark.asyncio
@pytest.mark.parametrize("hosts", [0, pytest.param(2, marks=needs_zmq)])
async def test_accuracy_on_held_out_digits(start: Start, digits: model.Digits, hosts: int) -> None:
    """A hundred digits that training never saw: most are right, and each is in the log."""
    uploads = await asyncio.to_thread(
        lambda: [work.encode_png(image) for image in digits.test_images[:100]]
    )
    async with start("--hosts", str(hosts)) as server:
        limit = asyncio.Semaphore(16)

        async def predict(png: bytes) -> int:
            async with limit:
                response = await server.client.post("/predict", content=png)
            response.raise_for_status()
            return int(response.json()["digit"])

        answers = await asyncio.gather(*map(predict, uploads))
        stats = await server.stats()
        lines = await server.log_lines()
    right = sum(a == int(label) for a, label in zip(answers, digits.test_labels, strict=False))
    assert right >= 95
    assert sorted(line["digit"] for line in lines) == sorted(answers)
    assert len({line["request"] for line in lines}) == 100
    assert stats["requests"] == {"ok": 100}
    assert stats["in_flight"] == 0
    lanes = stats["predictor"]["decoding"]
    assert len(lanes) == max(hosts, 1)
    assert min(lane["submitted"] for lane in lanes) >= 100 // len(lanes)


@pytest.mark.asyncio
async def test_bad_uploads_are_refused_in_words(start: Start, digits: model.Digits) -> None:
    """Each kind of bad upload gets its status and a reason, and the next request works."""
    good = work.encode_png(digits.test_images[0])
    huge = io.BytesIO()
    Image.new("1", (3000, 3000)).save(huge, "PNG")
    async with start() as server:
        post = server.client.post
        for png, words in [
            (b"GIF89a, honestly", "not a readable PNG"),
            (good[: len(good) // 2], "not a readable PNG"),
            (b"", "not a readable PNG"),
            (huge.getvalue(), "3000 x 3000 pixels are too many"),
        ]:
            response = await post("/predict", content=png)
            assert response.status_code == 400
            assert words in response.json()["error"]
            assert (await post("/predict", content=good)).status_code == 200
        response = await post("/predict", files={"picture": ("digit.png", good, "image/png")})
        assert (response.status_code, "'file'" in response.text) == (400, True)
        response = await post("/predict", content=bytes(2 << 20))
        assert response.status_code == 413
        response = await post("/predict", files={"file": ("digit.png", good, "image/png")})
        assert response.json()["digit"] == int(digits.test_labels[0])
        stats = await server.stats()
    assert stats["requests"] == {"ok": 5, "bad_upload": 4}


@pytest.mark.asyncio
async def test_too_many_requests_are_told_when_to_come_back(
    start: Start, digits: model.Digits
) -> None:
    """Above the limit the answer is 503 with Retry-After at once; the admitted ones succeed."""
    png = work.encode_png(digits.test_images[0])
    async with start("--max-in-flight", "2", "--slow-disk-ms", "1000") as server:

        async def full() -> bool:
            return bool((await server.stats())["in_flight"] == 2)

        post = server.client.post
        admitted = [asyncio.ensure_future(post("/predict", content=png)) for _ in range(2)]
        await until(full)
        response = await post("/predict", content=png)
        assert response.status_code == 503
        assert int(response.headers["Retry-After"]) >= 1
        assert [r.status_code for r in await asyncio.gather(*admitted)] == [200, 200]


@pytest.mark.asyncio
async def test_health_stays_fast_under_load(start: Start, digits: model.Digits) -> None:
    """Under the same load the health check answers far sooner than with inline JAX calls."""
    count = 64
    uploads = [work.encode_png(image) for image in digits.test_images[:count]]
    labels = [int(label) for label in digits.test_labels[:count]]
    measured = {}
    for mode in ("aiocolocated", "jax-inline"):
        async with start("--mode", mode, "--slow-disk-ms", "20") as server:
            measured[mode] = await demo.measure(server.process.url, uploads, labels, concurrency=32)
    ours, inline = measured["aiocolocated"], measured["jax-inline"]
    assert (ours.failed, inline.failed) == (0, 0)
    assert ours.healthz_p99 < inline.healthz_p99 / 2
    assert ours.worst_loop_gap < inline.worst_loop_gap / 2


@pytest.mark.asyncio
async def test_sigterm_drains(start: Start, digits: model.Digits) -> None:
    """SIGTERM: no new work, what is in flight (also queued) is answered and logged, exit code 0."""
    png = work.encode_png(digits.test_images[0])
    async with start("--workers", "1", "--slow-disk-ms", "300") as server:

        async def all_in_flight() -> bool:
            return bool((await server.stats())["in_flight"] == 4)

        async def turned_away() -> bool:
            try:
                return (await server.client.get("/healthz")).status_code == 503
            except httpx.TransportError:  # the port is closed
                return True

        requests = [
            asyncio.ensure_future(server.client.post("/predict", content=png)) for _ in range(4)
        ]
        await until(all_in_flight)
        server.process.terminate()
        await until(turned_away)
        assert [r.status_code for r in await asyncio.gather(*requests)] == [200] * 4
        assert await server.process.wait() == 0
        assert len(await server.log_lines()) == 4


@pytest.mark.asyncio
async def test_disconnect_cancels_the_queued_calls(start: Start, digits: model.Digits) -> None:
    """A client that hangs up: its calls never run, the request that is ahead of it is untouched."""
    png = work.encode_png(digits.test_images[0])
    # One worker, and the first request keeps it busy in its log write: the second is queued.
    async with start("--workers", "1", "--slow-disk-ms", "3000") as server:

        async def first_is_writing() -> bool:
            return len(await server.log_lines()) == 1

        async def second_is_queued() -> bool:
            # All three of them: decode, infer, record.
            return bool((await server.stats())["predictor"]["runtime"]["queued"] == 3)

        async def second_is_gone() -> bool:
            return bool((await server.stats())["requests"].get("disconnected") == 1)

        first = asyncio.ensure_future(server.client.post("/predict", content=png))
        await until(first_is_writing)

        url = httpx.URL(server.process.url)
        _, writer = await asyncio.open_connection(url.host, url.port)
        head = f"POST /predict HTTP/1.1\r\nHost: {url.host}\r\nContent-Length: {len(png)}\r\n\r\n"
        writer.write(head.encode() + png)
        await until(second_is_queued)
        writer.close()
        await writer.wait_closed()
        await until(second_is_gone)

        stats = await server.stats()
        assert stats["in_flight"] == 1
        assert stats["predictor"]["runtime"]["queued"] == 0
        assert stats["predictor"]["runtime"]["running"] == 1  # the first one's log write
        assert stats["predictor"]["decoding"][0]["cancelled"] == 1
        assert (await first).status_code == 200
        assert len(await server.log_lines()) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [asyncio.CancelledError(), ExceptionGroup("", [KeyError()])])
async def test_disconnect_takes_back_its_own_cancellation(error: BaseException) -> None:
    """Whatever the cancelled block raises becomes ClientDisconnect, and the task can go on."""

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(ClientDisconnect):
        async with cancel_on_disconnect(Request({"type": "http"}, receive)):
            try:
                await asyncio.Event().wait()
            finally:
                raise error
    assert task.cancelling() == 0
    await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_cancellation_from_elsewhere_stays_one() -> None:
    """A timeout around the block is a timeout, although a client is being watched."""

    async def receive() -> dict[str, str]:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            async with cancel_on_disconnect(Request({"type": "http"}, receive)):
                await asyncio.Event().wait()


@pytest.mark.asyncio
async def test_demo_runs() -> None:
    """``python -m examples.demo``, smaller, prints its table and exits with 0."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "examples.demo", "--requests", "60", "--concurrency", "16"),
        *("--slow-disk-ms", "5"),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(100):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0
    table = out.decode()
    for words in (*MODES, "accuracy on held-out digits", "worst event-loop gap", "SIMULATED"):
        assert words in table
