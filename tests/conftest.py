# SPDX-License-Identifier: Apache-2.0
"""What every test gets: 8 CPU devices, guards around it, and the loops that it may ask for.

``colocated_cpu_devices``, ``colocated_no_blocking`` and ``colocated_leak_check`` in ``pyproject.toml``
turn the checks of the library's own pytest plugin on for all tests; ``docs/how-to/testing.md`` describes
them. This file adds what only the library's own tests need.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import importlib.metadata
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

try:
    import uvloop
except ImportError:  # no wheel for this system or Python
    uvloop = None

ROOT = Path(__file__).parent.parent

# The installed package brings its plugin by an entry point; a bare checkout has none.
if not any(e.name == "aiocolocated" for e in importlib.metadata.entry_points(group="pytest11")):
    pytest_plugins = ["aiocolocated.testing.plugin"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So it is for what a shell starts in the background, and for the programs that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "all_loops: run an asyncio test on every kind of loop: plain, debug mode, uvloop, eager tasks",
    )
    if uvloop is not None:  # libuv opens a pipe for the whole process with its first loop
        uvloop.new_event_loop().close()


def pytest_collection_finish() -> None:
    # The leak check collects garbage after many tests. JAX, hypothesis and four thousand tests are not
    # garbage: looking at them each time would take a third of the suite's time.
    gc.collect()
    gc.freeze()


# --- kinds of loops ---------------------------------------------------------------------------------


class _DebugLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self.slow_callback_duration = (
            10.0  # or a busy machine makes it write to stderr, on the loop
        )

    def set_debug(self, enabled: bool) -> None:  # the runner turns it off
        super().set_debug(True)


def _new_eager_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_task_factory(asyncio.eager_task_factory)
    return loop


LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "debug": _DebugLoop,
}
if uvloop is not None:
    LOOPS["uvloop"] = uvloop.new_event_loop
if hasattr(asyncio, "eager_task_factory"):  # Python >= 3.12
    LOOPS["eager"] = _new_eager_loop


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Any]:
    """Every kind of loop for a test with the mark ``all_loops``, else the plain one."""
    if item.get_closest_marker("all_loops") is not None:
        return LOOPS
    return {"asyncio": LOOPS["asyncio"]}


@pytest.fixture(params=list(LOOPS))
def new_loop(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    """A loop factory of each kind, for tests that run their own loops."""
    return LOOPS[request.param]


# --- around every test ------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _restored_library() -> Iterator[None]:
    """Give every test the default settings and, so that tests cannot share them, empty caches."""
    import aiocolocated

    defaults = dataclasses.asdict(aiocolocated.Settings())
    yield
    aiocolocated.configure(**defaults)
    aiocolocated.clear_caches()
    aiocolocated._callback_errors._errors.clear()  # nor is one that nobody got logged in another test


@pytest.fixture(autouse=True)
def _no_internal_errors(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail a test behind which a broken callback or the service thread logged an internal error."""
    yield
    for when in ("setup", "call"):
        for record in caplog.get_records(when):
            message = record.getMessage()
            if message.startswith(("aiocolocated: internal error", "Exception in callback")):
                pytest.fail(caplog.handler.format(record), pytrace=False)


# --- programs of their own --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Finished:
    """How a script ended."""

    code: int
    stdout: str
    stderr: str

    def check(self, code: int = 0) -> Finished:
        """The same, once the exit code is as expected."""
        assert self.code == code, f"exit code {self.code}\n{self.stdout}\n{self.stderr}"
        return self


class Script:
    """A Python program in a process of its own."""

    def __init__(self, path: Path, source: str, **environment: str) -> None:
        path.write_text(textwrap.dedent(source))
        env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
        self._read = b""
        self.process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", path.name],
            cwd=path.parent,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,  # or a look at the first lines takes away what `communicate` would return
            start_new_session=True,
        )

    def wait_for(self, line: str, timeout: float = 30.0) -> None:
        """Read standard output up to a line, which the program has to flush."""
        stdout = self.process.stdout
        assert stdout is not None
        while select.select([stdout], [], [], timeout)[0]:
            read = stdout.readline()
            self._read += read
            if read.decode().rstrip("\n") == line:
                return
            if not read:
                break
        finished = self.finish(timeout=0.5)
        pytest.fail(f"the script did not print {line!r}:\n{finished.stdout}\n{finished.stderr}")

    def finish(self, timeout: float = 30.0) -> Finished:
        """Wait for the end. A program that hangs is killed, and the test fails with its stacks."""
        try:
            stdout, stderr = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # faulthandler shows all threads
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            stdout, stderr = self.kill()
            pytest.fail(f"the script hangs:\n{stdout.decode()}\n{stderr.decode()}", pytrace=False)
        return Finished(self.process.returncode, (self._read + stdout).decode(), stderr.decode())

    def kill(self) -> tuple[bytes, bytes]:
        """End the program and its children, if any is left; the rest of its output."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.communicate()


@pytest.fixture
def start_script(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    """Start Python source text as a program; keyword arguments are environment variables."""
    scripts: list[Script] = []

    def start(source: str, **environment: str) -> Script:
        script = Script(tmp_path / f"script_{len(scripts)}.py", source, **environment)
        scripts.append(script)
        return script

    yield start
    for script in scripts:
        script.kill()


@pytest.fixture
def run_script(start_script: Callable[..., Script]) -> Callable[..., Finished]:
    """Run Python source text as a program to its end."""

    def run(source: str, *, timeout: float = 30.0, **environment: str) -> Finished:
        return start_script(source, **environment).finish(timeout)

    return run
