# SPDX-License-Identifier: Apache-2.0
"""The HTTP side of the server: admission, client disconnects, health, statistics, draining.

Endpoints:

* ``POST /predict``: a PNG as the body, or as the field ``file`` of a multipart form.
* ``GET /healthz``: 200 while serving, 503 while draining.
* ``GET /stats``: counters, the worst gap of the event loop, the library's statistics.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from examples.server import work

MAX_UPLOAD_BYTES = 1 << 20


class Predictor(Protocol):
    """What the app needs from ``predict.py`` or ``baselines.py``."""

    async def predict(self, png: bytes, request_id: int) -> work.Prediction: ...
    async def warm_up(self) -> None: ...
    async def aclose(self) -> None: ...
    def statistics(self) -> dict[str, Any]: ...


class LoopMonitor:
    """Measures how long the event loop did not run.

    A task that wants to wake up every 5 ms notes the longest time between two of its turns: that
    long, no other request, health check or timer got a turn either.
    """

    PERIOD = 0.005

    def __init__(self) -> None:
        self.worst_gap = 0.0  # seconds, the period included

    async def run(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(self.PERIOD)
            now = time.perf_counter()
            self.worst_gap = max(self.worst_gap, now - last)
            last = now


@contextlib.asynccontextmanager
async def cancel_on_disconnect(request: Request) -> AsyncIterator[None]:
    """Cancel the block when the client hangs up, and raise ``ClientDisconnect`` instead.

    Enter it after the body has been read. Like ``asyncio.timeout``, it takes back its own
    cancellation only; one that comes from elsewhere stays a ``CancelledError``.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except BaseException as exc:
        # The CancelledError, or an error that came up while the block was being cancelled.
        if gone and task.uncancel() == 0:
            raise ClientDisconnect from exc
        raise
    finally:
        watcher.cancel()


class Service:
    """The endpoints and the state they share.

    Args:
        predictor: does the work.
        max_in_flight: requests being worked on at a time; more are told to come back later.
            A bound keeps latency and memory bounded: work that waits here is late already.
    """

    def __init__(self, predictor: Predictor, *, max_in_flight: int = 64) -> None:
        self.predictor = predictor
        self.max_in_flight = max_in_flight
        self.in_flight = 0
        self.draining = False
        self.counts: collections.Counter[str] = collections.Counter()
        self.loop_monitor = LoopMonitor()
        self.request_ids = itertools.count(1)

    async def predict(self, request: Request) -> Response:
        """``POST /predict``."""
        if self.draining or self.in_flight >= self.max_in_flight:
            self.counts["rejected"] += 1
            reason = "shutting down" if self.draining else "too many requests"
            raise HTTPException(503, reason, headers={"Retry-After": "1"})
        self.in_flight += 1
        try:
            png = await read_upload(request)
            async with cancel_on_disconnect(request):
                prediction = await self.predictor.predict(png, next(self.request_ids))
        except work.BadUpload as exc:
            self.counts["bad_upload"] += 1
            raise HTTPException(400, str(exc)) from exc
        except ClientDisconnect:
            self.counts["disconnected"] += 1
            return Response(status_code=499)  # nobody is there to read it
        finally:
            self.in_flight -= 1
        self.counts["ok"] += 1
        return JSONResponse(prediction)

    async def healthz(self, request: Request) -> Response:
        """``GET /healthz``."""
        if self.draining:
            return JSONResponse({"status": "draining"}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def stats(self, request: Request) -> Response:
        """``GET /stats``."""
        return JSONResponse(
            {
                "in_flight": self.in_flight,
                "requests": dict(self.counts),
                "worst_loop_gap_ms": round(self.loop_monitor.worst_gap * 1e3, 2),
                "predictor": self.predictor.statistics(),
            }
        )

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Around serving. uvicorn leaves this block when the last request has been answered."""
        await self.predictor.warm_up()
        # JAX leaves some hundred thousand long-lived objects. Without this, each full garbage
        # collection walks over all of them, and the event loop stops for tens of milliseconds.
        gc.collect()
        gc.freeze()
        monitor = asyncio.create_task(self.loop_monitor.run())
        try:
            yield
        finally:
            monitor.cancel()
            await self.predictor.aclose()


async def read_upload(request: Request) -> bytes:
    """The uploaded bytes.

    Raises:
        HTTPException: no length given (411), too long (413), or a form without ``file`` (400).
    """
    length = request.headers.get("content-length")
    if length is None:
        raise HTTPException(411, "send a Content-Length")
    if int(length) > MAX_UPLOAD_BYTES:
        raise HTTPException(413, f"the upload is larger than {MAX_UPLOAD_BYTES} bytes")
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        return await request.body()
    async with request.form(max_files=1) as form:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise HTTPException(400, "the form has no file field named 'file'")
        return await file.read()


async def as_json(request: Request, exc: Exception) -> Response:
    """Errors in words, as JSON."""
    assert isinstance(exc, HTTPException)
    return JSONResponse({"error": exc.detail}, status_code=exc.status_code, headers=exc.headers)


def create_app(service: Service) -> Starlette:
    """The ASGI application around ``service``."""
    return Starlette(
        routes=[
            Route("/predict", service.predict, methods=["POST"]),
            Route("/healthz", service.healthz),
            Route("/stats", service.stats),
        ],
        exception_handlers={HTTPException: as_json},
        lifespan=service.lifespan,
    )
