# SPDX-License-Identifier: Apache-2.0
"""``python -m aiocolocated doctor``: what there is, whether it works, and what to do if it does not.

What can hang, JAX's backends above all, runs on a thread of its own and has a time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import importlib.util
import json
import os
import platform
import statistics
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import numpy as np

import aiocolocated
from aiocolocated import _compat, _compat_hosts
from aiocolocated.hosts import _shared, _sockets

TIMEOUT = 60.0  # seconds for each self-test
_CALLS = 200
_REPEATS = 5
_SIZES = {"1 MiB": 1 << 20, "16 MiB": 16 << 20}
_TESTS = 8
_TESTED = "JAX 0.10 to 0.12"

# What each extra brings: the module of each package. A test compares it with pyproject.toml.
EXTRAS: dict[str, dict[str, str]] = {
    "hosts": {"pyzmq": "zmq"},
    "testing": {
        "blockbuster": "blockbuster",
        "pytest": "pytest",
        "pytest-asyncio": "pytest_asyncio",
    },
    "uvloop": {"uvloop": "uvloop"},
    "serve": {
        "python-multipart": "python_multipart",
        "starlette": "starlette",
        "uvicorn": "uvicorn",
    },
    "examples": {
        "gymnasium": "gymnasium",
        "httpx": "httpx",
        "pillow": "PIL",
        "scikit-learn": "sklearn",
        "tqdm": "tqdm",
    },
}


@dataclasses.dataclass
class Check:
    """One thing that was tried: ``PASS``, ``FAIL``, or ``SKIP`` if it could not be tried."""

    name: str
    status: str = "PASS"
    seconds: float = 0.0
    timings: dict[str, float] = dataclasses.field(default_factory=dict[str, float])  # seconds
    found: str = ""
    advice: str = ""


class _Skip(Exception):
    """A self-test cannot be made here, which is no fault: why, and what to do."""


# --- what there is --------------------------------------------------------------------------------------


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _messaging() -> str:
    try:
        _sockets.require_zmq()
    except ImportError as error:
        return f"cannot be used: {error}"
    return f"{_sockets.zmq.__version__}, with CURVE"


def versions() -> dict[str, str]:
    """Versions of what takes part."""
    own = {"aiocolocated": aiocolocated.__version__, "Python": platform.python_version()}
    packages = "jax jaxlib numpy anyio cloudpickle uvloop"
    return own | {name: _version(name) for name in packages.split()} | {"pyzmq": _messaging()}


def about_platform() -> dict[str, str]:
    """The system, and what it is told."""
    try:
        cpus = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cpus = os.cpu_count() or 1
    named = {k: v for k, v in sorted(os.environ.items()) if k.startswith(("JAX_", "XLA_"))}
    return {
        "system": platform.platform(),
        "interpreter": sys.executable,
        "CPUs": str(cpus),
        "environment": " ".join(f"{k}={v}" for k, v in named.items())
        or "no JAX_ or XLA_ variables",
        "shared memory": "yes"
        if _shared.AVAILABLE
        else "no: large arrays go to host processes in messages, which is slower",
    }


def extras() -> dict[str, dict[str, Any]]:
    """Which extras are installed, and the command for those that are not."""
    found: dict[str, dict[str, Any]] = {}
    for extra, modules in EXTRAS.items():
        missing = [name for name, module in modules.items() if not importlib.util.find_spec(module)]
        found[extra] = {"installed": not missing, "missing": missing, "advice": ""}
        if missing:
            found[extra]["advice"] = f"pip install 'aiocolocated[{extra}]'"
    return found


def launchers() -> list[dict[str, str]]:
    """What can start hosts."""
    return [
        {
            "name": "processes",
            "starts": f"new interpreters on this machine: {sys.executable}",
            "advice": "" if sys.executable else "this Python does not know its own executable",
        },
        {
            "name": "by hand",
            "starts": "nothing: ManualLauncher says what to run",
            "advice": "",
        },
    ]


# --- self-tests -------------------------------------------------------------------------------------------


def _streams() -> str:
    assert _compat.HAS_EXECUTION_STREAMS, "JAX has none: device work of a channel may overlap"
    _compat.set_execution_stream(77)  # of this thread, which ends
    assert _compat.get_execution_stream() == 77, "a thread's stream cannot be set"
    return "a stream for each channel"


def _programs() -> str:
    assert _compat.HAS_PROGRAMS, "jitted programs with callbacks cannot be watched"
    return "callbacks of jitted programs overlap, and their errors arrive as they were raised"


def _tracebacks() -> str:
    assert _compat._traceback_of is not None, "errors that are kept hold what their frames do"
    return "errors that are kept hold no variables"


def _configuration() -> str:
    with jax.debug_nans(not jax.config.jax_debug_nans):  # type: ignore[attr-defined]
        assert _compat.capture_config(), "a thread's configuration cannot be seen"
    return "bodies see the configuration of their submitters"


def _detached() -> str:
    first = _compat_hosts.FIRST_DEVICE
    devices, way = _compat_hosts.detached_devices({first: 0, first + 1: 1})
    assert [d.process_index for d in devices] == [0, 1]
    return f"devices of other processes (by a {way}), and handles for their arrays"


def _devices(report: dict[str, Any]) -> str:
    devices = jax.devices()
    report["devices"] = [str(device) for device in devices]
    try:
        cpus = aiocolocated.colocated_cpu_devices(jax.local_devices())
        report["colocated_cpu_devices"] = [str(device) for device in cpus]
    except aiocolocated.SpecError as error:  # a matter of settings
        report["colocated_cpu_devices"] = []
        report["colocated_cpu_advice"] = str(error)
    return f"{len(devices)} of {devices[0].platform}"


def _successor(n: int) -> int:
    return n + 1


async def _successor_later(n: int) -> int:
    await asyncio.sleep(0)
    return n + 1


def _double(x: Any) -> Any:
    return x * 2


async def _typical(call: Callable[[int], Awaitable[int]]) -> float:
    """The median time of a trivial awaited call, in seconds."""
    times: list[float] = []
    for n in range(_CALLS):
        start = perf_counter()
        answer = await call(n)
        times.append(perf_counter() - start)
        assert answer == n + 1, f"{answer} is not {n + 1}"
    return statistics.median(times)


async def _in_process(timings: dict[str, float]) -> str:
    device = jax.local_devices(backend="cpu")[0]
    plain = aiocolocated.colocated_python(_successor).specialize(devices=device)
    start = perf_counter()
    assert await plain(1) == 2
    timings["first call"] = perf_counter() - start
    timings["call"] = await _typical(plain)
    later = aiocolocated.colocated_python(_successor_later).specialize(devices=device)
    timings["coroutine"] = await _typical(later)
    x = jax.device_put(np.arange(1000.0, dtype=np.float32), device)
    double = aiocolocated.colocated_python(_double)
    await double(x)  # compiles
    start = perf_counter()
    y = await double(x)
    timings["array"] = perf_counter() - start
    assert np.array_equal(np.asarray(y), 2 * np.asarray(x)), "wrong numbers"
    return str(device)


async def _processes(timings: dict[str, float]) -> str:
    try:
        _sockets.require_zmq()
    except ImportError as error:
        raise _Skip(str(error)) from error
    start = perf_counter()
    async with aiocolocated.open_hosts("processes", n=1) as hosts:
        timings["start-up"] = perf_counter() - start
        (device,) = hosts.devices
        plain = aiocolocated.colocated_python(_successor).specialize(devices=device)
        timings["call"] = await _typical(plain)
        double = aiocolocated.colocated_python(_double)
        for size, nbytes in _SIZES.items():
            array = np.arange(nbytes // 4, dtype=np.float32)
            to: list[float] = []
            back: list[float] = []
            for _ in range(_REPEATS):
                start = perf_counter()
                there = await aiocolocated.device_put(array, device)
                to.append(perf_counter() - start)
                doubled = await double(there)
                start = perf_counter()
                value = await aiocolocated.device_get(doubled)
                back.append(perf_counter() - start)
                assert np.array_equal(value, array * 2), "wrong numbers"
            timings[f"{size} to"] = statistics.median(to)
            timings[f"{size} from"] = statistics.median(back)
        start = perf_counter()
    timings["end"] = perf_counter() - start
    return "one host process"


# --- running them -----------------------------------------------------------------------------------------

_USE_ANOTHER_JAX = f"this is JAX {jax.__version__}; the library is tested with {_TESTED}"
_USE_CPU = (
    "set JAX_PLATFORMS=cpu to go without accelerators, or 'cuda,cpu' and the like to have both; an "
    "accelerator needs JAX's extra for it"
)
_REPORT = "If this is not a matter of the machine, report it with the output of 'doctor --json'"
_LOOK_AT_HOST = (
    "what the process printed is above; 'python -m aiocolocated host --help' has to run in the same "
    "environment"
)


class _Doctor:
    """Makes the self-tests, one after the other."""

    def __init__(self, timeout: float, tell: Callable[[Check], None]) -> None:
        self.timeout = timeout
        self.checks: list[Check] = []
        self.stuck = False
        self._tell = tell

    def check(self, name: str, test: Callable[[dict[str, float]], str], advice: str) -> None:
        check = Check(name)
        self.checks.append(check)
        start = perf_counter()
        outcome: list[str | BaseException] = []

        def run() -> None:
            try:
                outcome.append(test(check.timings))
            except BaseException as error:
                outcome.append(error)

        # A daemon: one that is stuck must not hold up the end of the process.
        thread = threading.Thread(target=run, name=f"doctor {name}", daemon=True)
        thread.start()
        thread.join(self.timeout)
        check.seconds = perf_counter() - start
        if not outcome:
            self.stuck = True
            check.status = "FAIL"
            check.found = f"not over after {self.timeout:g} s; it stands at {_place(thread)}"
            check.advice = f"'--timeout' gives it more time; {advice}"
        elif isinstance(outcome[0], str):
            check.found = outcome[0]
        elif isinstance(outcome[0], _Skip):
            check.status, check.found = "SKIP", str(outcome[0])
        else:
            check.status, check.advice = "FAIL", advice
            check.found = _chain(outcome[0])
        self._tell(check)


def _chain(error: BaseException | None) -> str:
    """An error and its causes."""
    texts: list[str] = []
    while error is not None:
        what = str(error) or f"at {_lines(traceback.extract_tb(error.__traceback__))}"
        texts.append(f"{type(error).__name__}: {what}")
        error = error.__cause__
    return "; because of ".join(texts)


def _place(thread: threading.Thread) -> str:
    """Where a thread is."""
    frame = sys._current_frames().get(thread.ident or 0)
    return _lines(traceback.extract_stack(frame)) if frame is not None else "its end"


def _lines(stack: traceback.StackSummary) -> str:
    """The innermost lines, the last one last."""
    return ", ".join(f"{Path(line.filename).name}:{line.lineno}" for line in stack[-3:])


def run(*, as_json: bool = False, timeout: float = TIMEOUT) -> int:
    """Look at everything, and print it.

    Args:
        as_json: print one JSON object; what hosts print goes to standard error.
        timeout: seconds for each self-test.

    Returns:
        The exit status: 1 if something is wrong.
    """
    out = sys.stdout
    report: dict[str, Any] = {
        "versions": versions(),
        "platform": about_platform(),
        "extras": extras(),
        "launchers": launchers(),
        "devices": [],
        "colocated_cpu_devices": [],
        "colocated_cpu_advice": "",
    }

    def say(text: str = "") -> None:
        if not as_json:
            print(text, file=out, flush=True)

    for title in ("versions", "platform"):
        say(title.capitalize())
        for name, value in report[title].items():
            say(f"  {name:<14} {value}")
    say("Extras")
    for name, extra in report["extras"].items():
        missing = f"without {', '.join(extra['missing'])}: {extra['advice']}"
        say(f"  {name:<14} {'installed' if extra['installed'] else missing}")
    say("Launchers")
    for launcher in report["launchers"]:
        say(f"  {launcher['name']:<14} {launcher['starts']} {launcher['advice']}".rstrip())
    say("Self-tests")
    doctor = _Doctor(timeout, lambda check: say(_line(check)))
    # Should a test keep the interpreter lock as well, this still ends the process.
    faulthandler.dump_traceback_later(_TESTS * timeout + 30, exit=True)
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        doctor.check("execution streams", lambda _: _streams(), _USE_ANOTHER_JAX)
        doctor.check("callback programs", lambda _: _programs(), _USE_ANOTHER_JAX)
        doctor.check("tracebacks", lambda _: _tracebacks(), _USE_ANOTHER_JAX)
        doctor.check("configuration", lambda _: _configuration(), _USE_ANOTHER_JAX)
        doctor.check("JAX backend", lambda _: _devices(report), _USE_CPU)
        for name in ("devices", "colocated_cpu_devices"):
            say(f"        {name.replace('_', ' ')}: {' '.join(report[name]) or 'none'}")
        if report["colocated_cpu_advice"]:
            say(f"        {report['colocated_cpu_advice']}")
        # With a broken backend everything else fails, too, but for reasons that would mislead.
        if doctor.checks[-1].status == "PASS":
            doctor.check("in-process host", lambda t: asyncio.run(_in_process(t)), _USE_CPU)
            doctor.check("detached devices", lambda _: _detached(), _USE_ANOTHER_JAX)
            doctor.check("host processes", lambda t: asyncio.run(_processes(t)), _LOOK_AT_HOST)
    faulthandler.cancel_dump_traceback_later()
    wrong = [check.name for check in doctor.checks if check.status == "FAIL"]
    report["checks"] = [dataclasses.asdict(check) for check in doctor.checks]
    report["ok"] = not wrong
    say("Nothing is wrong." if not wrong else f"Something is wrong: {', '.join(wrong)}. {_REPORT}")
    if as_json:
        print(json.dumps(report, indent=2), file=out, flush=True)
    if doctor.stuck:
        sys.stderr.flush()
        os._exit(1)  # the exit would wait for what is stuck
    return 1 if wrong else 0


def _line(check: Check) -> str:
    text = f"  {check.status}  {check.name:<18} {_short(check.seconds):>8}  {check.found}"
    if check.timings:
        text += "\n" + " " * 8
        text += ", ".join(f"{name} {_short(value)}" for name, value in check.timings.items())
    if check.advice:
        text += f"\n        What to do: {check.advice}"
    return text


def _short(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
