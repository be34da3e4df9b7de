# SPDX-License-Identifier: Apache-2.0
"""Launchers: what starts host processes. There are two for this machine; the interface is for others."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax

_REAP = 5.0  # seconds that a killed process has to be gone


def versions() -> dict[str, str]:
    """What a host and its controller must have in common."""
    return {
        "aiocolocated": sys.modules["aiocolocated"].__version__,
        "jax": jax.__version__,
        "python": ".".join(map(str, sys.version_info[:2])),
    }


class HostProcess(Protocol):
    """A host process that was started. All methods are called by one thread."""

    @property
    def pid(self) -> int | None:
        """Its process id, if it is on this machine."""
        ...

    @property
    def sentinel(self) -> int | None:
        """A descriptor that becomes readable when the process ends; ``None`` if there is none."""
        ...

    @property
    def outputs(self) -> tuple[Any, ...]:
        """Non-blocking files of what it prints, first standard output, then standard error; or none."""
        ...

    def poll(self) -> int | None:
        """How it ended, or ``None`` while it runs or if nobody can tell."""
        ...

    def kill(self) -> None:
        """End it at once; killing it twice is fine, as is one that has ended."""

    def close(self) -> None:
        """Give back what was kept for it; it has ended, or was killed."""


class Launcher(Protocol):
    """Starts host processes.

    What a launcher runs is ``python -m aiocolocated host``, which reads ``config`` as one line of JSON from
    standard input, or ``... host --connect FILE``, which reads it from a file. With standard input the
    host ends when that is closed: the launcher keeps it open for as long as the controller lives. With a
    file the host ends when the connection does. ``config`` holds the host's key, so it belongs neither on
    a command line nor in an environment variable.
    """

    def start(self, config: Mapping[str, Any]) -> HostProcess:
        """Start a host process and hand it ``config``.

        Always called by the same thread, which lives as long as the hosts.

        Raises:
            Exception: it cannot be started; :exc:`~aiocolocated.HostStartError` has the text.
        """
        ...


# --- processes of this machine ------------------------------------------------------------------------


class LocalProcess:
    """A host process on this machine."""

    def __init__(
        self, python: str, config: Mapping[str, Any], environment: Mapping[str, str]
    ) -> None:
        line = json.dumps({**config, "child_of": os.getpid()}).encode() + b"\n"
        package = str(Path(__file__).resolve().parent.parent.parent)
        inherited = os.environ.get("PYTHONPATH")
        env = {
            "PYTHONFAULTHANDLER": "1",  # a crash says where
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": package if not inherited else os.pathsep.join([package, inherited]),
            **environment,
        }
        self._process = subprocess.Popen(
            [python, "-m", "aiocolocated", "host"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=env,
            process_group=0,  # Ctrl-C is the controller's
        )
        self._sentinel: int | None = None
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        assert stdin is not None
        assert stdout is not None
        assert stderr is not None
        self._stdin = stdin
        self.outputs: tuple[Any, ...] = (stdout, stderr)
        try:
            if hasattr(os, "pidfd_open"):
                with contextlib.suppress(OSError):  # an old kernel, or no descriptors left
                    self._sentinel = os.pidfd_open(self._process.pid)
            for output in (stdout, stderr):
                os.set_blocking(output.fileno(), False)
            rest = memoryview(line)
            with contextlib.suppress(BrokenPipeError):  # how it ended says more
                while rest:
                    rest = rest[stdin.write(rest) :]
        except BaseException:
            self.kill()
            self.close()
            raise

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def sentinel(self) -> int | None:
        return self._sentinel

    def poll(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP)
        if self._sentinel is not None:
            os.close(self._sentinel)
            self._sentinel = None
        for stream in (self._stdin, *self.outputs):
            with contextlib.suppress(OSError):
                stream.close()


class LocalLauncher:
    """Starts processes on this machine: new interpreters, never forks.

    Args:
        environment: environment variables besides those of this process.
        python: the interpreter; this one if absent.

    Raises:
        TypeError: an environment variable is no text.

    .. versionadded:: 0.4
    """

    def __init__(
        self, environment: Mapping[str, str] | None = None, *, python: str | None = None
    ) -> None:
        self._environment: dict[Any, Any] = dict(environment or {})
        for name, value in self._environment.items():
            if not (isinstance(name, str) and isinstance(value, str)):
                raise TypeError(
                    f"environment must be names and values of type str, got {name!r}: {value!r}"
                )
        self._python = python

    def start(self, config: Mapping[str, Any]) -> LocalProcess:
        """Start an interpreter with its configuration on standard input."""
        python = self._python or sys.executable
        if not python:
            raise FileNotFoundError(
                "this process does not know its own interpreter: pass "
                "launcher=LocalLauncher(python=...)"
            )
        return LocalProcess(python, config, self._environment)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends (Linux).

    The end of standard input says the same, but a body may hold the interpreter lock for ever, or the
    process may be stopped.

    Args:
        parent: the process id of the parent, which may have ended before.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


# --- processes that somebody else starts --------------------------------------------------------------


class ManualProcess:
    """A host process that somebody else starts: all that is known of it is its connection."""

    pid: int | None = None
    sentinel: int | None = None
    outputs: tuple[Any, ...] = ()

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def poll(self) -> int | None:
        return None

    def kill(self) -> None:
        """Nothing: it ends with its connection."""

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class ManualLauncher:
    """Has hosts started by hand, or by other means, perhaps on another machine.

    For each host it writes a file, which only this user can read because the host's key is in it, and says
    which command to run. Where the host does not see the file, copy it there by a way that keeps it
    secret, such as ``scp -p``; ``--connect -`` reads it from standard input. The file is removed when the
    host is closed or lost; its key is good for one connection.

    Args:
        tell: called with the name of the host and the command, on a thread of the library; prints them
            if absent.
        python: the interpreter in the command.

    The host must reach ``interface``, an argument of :func:`~aiocolocated.open_hosts`, and needs the same
    versions. What it prints stays there. It ends when the connection does.

    Example:
        >>> async with open_hosts(n=1, launcher=ManualLauncher(), start_timeout=600) as hosts:
        ...     ...
        host-0: python -m aiocolocated host --connect /tmp/aiocolocated-x1/host-0.json

    .. versionadded:: 0.4
    """

    def __init__(
        self, tell: Callable[[str, str], object] | None = None, *, python: str = "python"
    ) -> None:
        self._tell = tell or _print_command
        self._python = python

    def start(self, config: Mapping[str, Any]) -> ManualProcess:
        """Write the file and tell the command."""
        folder = Path(tempfile.mkdtemp(prefix="aiocolocated-"))  # nobody else's, mode 0700
        process = ManualProcess(folder)
        try:
            path = folder / f"{config['name']}.json"
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(json.dumps(dict(config)) + "\n")
            command = [self._python, "-m", "aiocolocated", "host", "--connect", str(path)]
            self._tell(config["name"], shlex.join(command))
        except BaseException:
            process.close()
            raise
        return process


def _print_command(name: str, command: str) -> None:
    sys.stdout.write(f"{name}: {command}\n")
    sys.stdout.flush()


def read_config(source: str | None) -> dict[str, Any]:
    """What a host was given by its launcher (in the host process).

    Args:
        source: a file, or ``"-"`` for standard input; ``None`` too, which then stays open for as long as
            the controller lives.
    """
    if source is None or source == "-":
        line = sys.stdin.readline()
        if not line.strip():
            sys.exit("aiocolocated: nothing on standard input: the controller has ended")
    else:
        path = Path(source)
        try:
            mode = path.stat().st_mode
            line = path.read_text()
        except OSError as error:
            sys.exit(f"aiocolocated: {error}")
        if mode & 0o077:
            sys.exit(
                f"aiocolocated: {path} has a key in it and others may read it: chmod 600 {path}"
            )
    try:
        config = json.loads(line)
        assert isinstance(config, dict)
        assert "server_key" in config
    except (ValueError, AssertionError):
        sys.exit("aiocolocated: this is no configuration of a host")
    return config
