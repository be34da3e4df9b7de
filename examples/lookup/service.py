# SPDX-License-Identifier: Apache-2.0
"""The service: an HTTP server in front of the tables, in a process of its own.

Endpoints:

* ``POST /tables/NAME``: a JSON list of keys; the answer is the list of their rows, or 404.
* ``POST /delay/SECONDS``: SIMULATION of a slower network: answers come so much later from now on.
* ``GET /most``: the most lookups at a time since somebody last asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sqlite3
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


class Service:
    """The endpoints over one SQLite file."""

    def __init__(self, path: Path) -> None:
        self._store = sqlite3.connect(path)
        self._delay = 0.0
        self._at_once = self._most = 0

    async def look_up(self, request: Request) -> Response:
        """``POST /tables/NAME``."""
        self._at_once += 1
        self._most = max(self._most, self._at_once)
        try:
            keys = await request.json()
            await asyncio.sleep(self._delay)
            rows = []
            for key in keys:
                # Microseconds each: a local file, and the primary key.
                row = self._store.execute(
                    "SELECT row FROM counts WHERE name = ? AND key = ?",
                    (request.path_params["name"], key),
                ).fetchone()
                if row is None:
                    return JSONResponse({"unknown key": key}, status_code=404)
                rows.append(json.loads(row[0]))
            return JSONResponse(rows)
        except ClientDisconnect:  # a lookup was cancelled
            return Response(status_code=499)
        finally:
            self._at_once -= 1

    async def delay(self, request: Request) -> Response:
        """``POST /delay/SECONDS``."""
        self._delay = request.path_params["seconds"]
        return Response()

    async def most(self, request: Request) -> Response:
        """``GET /most``."""
        most, self._most = self._most, self._at_once
        return JSONResponse(most)

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/tables/{name:int}", self.look_up, methods=["POST"]),
                Route("/delay/{seconds:float}", self.delay, methods=["POST"]),
                Route("/most", self.most),
            ]
        )


def main() -> None:
    """Serve the file that the command line names, until standard input ends."""
    app = Service(Path(sys.argv[1])).app()
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=60)
    server = uvicorn.Server(config)

    def stop_at_end_of_input() -> None:  # also when the program that started this was killed
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=stop_at_end_of_input, daemon=True).start()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
        server.run(sockets=[listening])


@contextlib.asynccontextmanager
async def run_service(path: Path) -> AsyncIterator[str]:
    """Run the service on a free loopback port.

    Args:
        path: the SQLite file.

    Yields:
        Its address.

    Raises:
        RuntimeError: it did not start, or did not end as it should; its stderr is ours and says why.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, str(path)),  # by its file, so that it does without JAX
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the program, which then ends the service
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            address = (await process.stdout.readline()).decode().strip()
        if not address:
            raise RuntimeError(f"the service did not start (exit code {await process.wait()})")
        yield address
        process.stdin.close()
        async with asyncio.timeout(30):
            code = await process.wait()
        if code != 0:
            raise RuntimeError(f"the service ended with exit code {code}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


if __name__ == "__main__":
    main()
