# SPDX-License-Identifier: Apache-2.0
"""Launchers: what starts host processes. There is one for this machine; the interface is for others."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import jax


def versions() -> dict[str, str]:
    """What a host and its controller must have in common."""
    return {
        "aiocolocated": sys.modules["aiocolocated"].__version__,
        "jax": jax.__version__,
        "python": ".".join(map(str, sys.version_info[:2])),
    }


class HostProcess(Protocol):
    """A host process that was started."""

    @property
    def pid(self) -> int | None:
        """Its process id, if it is on this machine."""
        ...

    @property
    def outputs(self) -> tuple[Any, ...]:
        """Files of what it prints, non-blocking: standard output, then standard error."""
        ...

    def poll(self) -> int | None:
        """How it ended, or ``None`` while it runs."""
        ...

    def kill(self) -> None:
        """End it at once; killing it twice is fine."""

    def close(self) -> None:
        """Wait for its end, and give back what was kept for it."""


class Launcher(Protocol):
    """Starts host processes."""

    def start(self, config: Mapping[str, Any]) -> HostProcess:
        """Start a host process and hand it ``config``, keys included; called off any loop.

        What it runs is :func:`aiocolocated._hostprocess.main`, with ``config`` as one line of JSON on
        standard input, which stays open for as long as the controller lives.
        """
        ...


class LocalProcess:
    """A host process on this machine."""

    def __init__(self, config: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        package = str(Path(__file__).resolve().parent.parent.parent)
        inherited = os.environ.get("PYTHONPATH")
        env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": package if not inherited else os.pathsep.join([package, inherited]),
            **environment,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "aiocolocated", "host"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            process_group=0,  # Ctrl-C is the controller's
        )
        assert self._process.stdin is not None
        self.outputs: tuple[Any, ...] = (self._process.stdout, self._process.stderr)
        for output in (self._process.stdout, self._process.stderr):
            assert output is not None
            os.set_blocking(output.fileno(), False)
        self._process.stdin.write(json.dumps(dict(config)).encode() + b"\n")
        self._process.stdin.flush()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.wait()
        for stream in (self._process.stdin, *self.outputs):
            with contextlib.suppress(OSError):  # what was not written yet has no reader any more
                stream.close()


class LocalLauncher:
    """Starts processes on this machine: new interpreters, never forks.

    Args:
        environment: environment variables besides those of this process.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = dict(environment or {})

    def start(self, config: Mapping[str, Any]) -> LocalProcess:
        return LocalProcess(config, self._environment)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends (Linux).

    The end of standard input says the same, but a body may hold the interpreter lock for ever.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
