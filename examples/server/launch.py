# SPDX-License-Identifier: Apache-2.0
"""Start the server as a child process and stop it again; for the demo and the tests."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


class ServerProcess:
    """A running server.

    Attributes:
        url: ``http://127.0.0.1:<port>``.
    """

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self._process = process
        self.url = url

    def terminate(self) -> None:
        """Ask the server to drain and exit (SIGTERM)."""
        self._process.send_signal(signal.SIGTERM)

    async def wait(self, timeout: float = 30.0) -> int:
        """Its exit code, within ``timeout`` seconds."""
        async with asyncio.timeout(timeout):
            return await self._process.wait()


@contextlib.asynccontextmanager
async def run_server(*arguments: str, start_timeout: float = 60.0) -> AsyncIterator[ServerProcess]:
    """Run ``python -m examples.server`` on a free loopback port; killed on leaving, if need be.

    Args:
        arguments: more arguments for its command line.
        start_timeout: seconds until it must be serving.

    Raises:
        TimeoutError: it was not serving in time.
        RuntimeError: it exited before it was serving; its stderr is ours and says why.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "examples.server", "--port", "0", *arguments),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        try:
            async with asyncio.timeout(start_timeout):
                line = (await process.stdout.readline()).decode()
        except TimeoutError as exc:
            raise TimeoutError(f"the server was not serving after {start_timeout:g} s") from exc
        if not line.startswith("serving on "):
            raise RuntimeError(f"the server did not start (exit code {await process.wait()})")
        yield ServerProcess(process, line.split()[-1])
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
