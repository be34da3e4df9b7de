# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin: settings, marks and fixtures for what :mod:`aiocolocated.testing` has.

It works beside pytest-asyncio (strict and auto mode), anyio's plugin and pytest-xdist, and does nothing
for tests that ask for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
import sys
import unittest
import weakref
from collections.abc import Awaitable, Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from aiocolocated import _settings
from aiocolocated.testing._gap import LoopGap
from aiocolocated.testing._guard import BlockedCall, BlockingGuard
from aiocolocated.testing._leaks import LeakCheck, LeakError
from aiocolocated.testing._recorder import Recorder

if TYPE_CHECKING:
    import jax

_DEVICES_VARIABLE = "JAX_NUM_CPU_DEVICES"
_MARKS = (
    (
        "no_blocking(enabled=True, *, grace=0.02, max_gap=None): fail the test if it blocks its event "
        "loop: by a known blocking call or, with max_gap, for longer than so many seconds by anything"
    ),
    (
        "leak_check(enabled=True, *, threads=True, tasks=True, arrays=True, descriptors=True, "
        "collect=True, timeout=2.0): fail the test if it leaves something behind"
    ),
    (
        "strict_values(enabled=True): send plain Python values to bodies and back by value, as other "
        "hosts get them (on for all tests, unless the setting colocated_strict_values is false)"
    ),
)

# --- settings ---------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("aiocolocated")
    group.addoption(
        "--colocated-cpu-devices",
        type=int,
        default=None,
        metavar="N",
        help="start JAX with N CPU devices (overrides the setting colocated_cpu_devices)",
    )
    parser.addini("colocated_cpu_devices", "start JAX with so many CPU devices", default=None)
    parser.addini(
        "colocated_no_blocking",
        "apply the mark no_blocking to all tests",
        type="bool",
        default=False,
    )
    parser.addini(
        "colocated_strict_values",
        "apply the mark strict_values to all tests (default true)",
        type="bool",
        default=True,
    )
    parser.addini(
        "colocated_leak_check", "apply the mark leak_check to all tests", type="bool", default=False
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    _request_cpu_devices(early_config)  # before a conftest can start JAX


def pytest_configure(config: pytest.Config) -> None:
    for mark in _MARKS:
        config.addinivalue_line("markers", mark)
    _request_cpu_devices(config)  # again: a plugin named in a conftest has no earlier hook


def _wanted_cpu_devices(config: pytest.Config) -> int | None:
    option = getattr(config.known_args_namespace, "colocated_cpu_devices", None)
    value = config.getini("colocated_cpu_devices") if option is None else option
    if value is None or value == "":
        return None
    try:
        number = int(value)
    except ValueError:
        number = 0
    if number < 1:
        raise pytest.UsageError(f"colocated_cpu_devices: expected a positive number, got {value!r}")
    return number


def _request_cpu_devices(config: pytest.Config) -> None:
    number = _wanted_cpu_devices(config)
    if number is None:
        return
    if "jax" not in sys.modules:
        previous = os.environ.get(_DEVICES_VARIABLE)
        os.environ[_DEVICES_VARIABLE] = str(number)
        config.add_cleanup(functools.partial(_set_variable, previous))
        return
    import jax

    from aiocolocated import _compat

    if not _compat.backend_started():
        jax.config.update("jax_num_cpu_devices", number)
    elif (started := len(jax.local_devices(backend="cpu"))) != number:
        raise pytest.UsageError(
            f"colocated_cpu_devices: {number} CPU devices wanted, but JAX was started already, with "
            f"{started}. Something imported before the tests makes an array or asks for devices; "
            "move that into a fixture or a function."
        )


def _set_variable(value: str | None) -> None:
    if value is None:
        os.environ.pop(_DEVICES_VARIABLE, None)
    else:
        os.environ[_DEVICES_VARIABLE] = value


# --- checks around each test --------------------------------------------------------------------------

_seen_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()


class _Checks:
    """What is checked in one test."""

    def __init__(self, item: pytest.Item) -> None:
        self.guard: BlockingGuard | None = None
        self.gap: LoopGap | None = None
        self.max_gap: float | None = None
        self.leaks: LeakCheck | None = None
        self.passed = False
        self._item = item
        self._stack = contextlib.ExitStack()
        # Weakly: a closed loop may hold what its last task had.
        self._loop: weakref.ref[asyncio.AbstractEventLoop] | None = None
        self._after_setup: LeakCheck | None = None
        self._stack.callback(_settings.change, strict=_settings.current.strict)
        _settings.change(strict=self._wanted("strict_values"))
        if self._wanted("leak_check"):
            self.check_leaks()
        if self._wanted("no_blocking"):
            self.forbid_blocking()

    def _wanted(self, name: str) -> bool:
        mark = self._item.get_closest_marker(name)
        if mark is None:
            return bool(self._item.config.getini(f"colocated_{name}"))
        return bool(mark.args[0] if mark.args else mark.kwargs.get("enabled", True))

    def _options(self, name: str) -> dict[str, Any]:
        mark = self._item.get_closest_marker(name)
        return {} if mark is None else {k: v for k, v in mark.kwargs.items() if k != "enabled"}

    def forbid_blocking(self) -> BlockingGuard:
        if self.guard is None:
            options = self._options("no_blocking")
            self.max_gap = options.pop("max_gap", None)
            if self.max_gap is not None:
                self.measure_gap()
            self.guard = self._stack.enter_context(BlockingGuard(**options))
        return self.guard

    def check_leaks(self) -> LeakCheck:
        if self.leaks is None:
            self.leaks = self._new_leak_check()
        return self.leaks

    def _new_leak_check(self) -> LeakCheck:
        check = LeakCheck(**self._options("leak_check"))
        check._release = self._item.funcargs.clear  # type: ignore[attr-defined]
        check._start()
        return check

    def measure_gap(self) -> LoopGap:
        if self.gap is None:
            self.gap = LoopGap()
        return self.gap

    @property
    def active(self) -> bool:
        return not (self.guard is None and self.gap is None and self.leaks is None)

    async def run(
        self, function: Callable[..., Awaitable[Any]], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the test's coroutine function with what needs its loop around it."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # trio
            return await function(*args, **kwargs)
        if self.leaks is not None:
            if loop not in _seen_loops:
                self._loop, self._after_setup = weakref.ref(loop), self._new_leak_check()
                _seen_loops.add(loop)
            self.leaks._start_tasks()
        if self.gap is None:
            result = await function(*args, **kwargs)
        else:
            async with self.gap:
                result = await function(*args, **kwargs)
        if self.leaks is not None:
            try:
                await self.leaks._check_tasks()
            except LeakError as error:
                raise pytest.fail.Exception(str(error), pytrace=False) from None
        return result

    def after_test(self) -> None:
        """Fail the test for blocking its loop."""
        if self.guard is not None and self.guard.calls:
            message = _tell(self.guard.calls)
            self.guard.clear()
            pytest.fail(message, pytrace=False)
        if self.gap is not None and self.max_gap is not None:
            largest = self.gap.max_seconds
            if largest > self.max_gap:
                pytest.fail(
                    f"the event loop was blocked for {largest:.3f} s, at most {self.max_gap:g} s are "
                    f"allowed; its thread was here:\n{self.gap.where or '(no stack)'}",
                    pytrace=False,
                )
        self.passed = True

    def _loop_is_open(self) -> bool:
        loop = None if self._loop is None else self._loop()
        return loop is not None and not loop.is_closed()

    def close(self) -> None:
        self._stack.close()
        if not self.passed:  # what a failed test holds says nothing; its traceback holds its values
            return
        if self.guard is not None and self.guard.calls:
            pytest.fail(_tell(self.guard.calls), pytrace=False)
        check = self.leaks
        if check is None:
            return
        if self._after_setup is not None and self._loop_is_open():
            # A loop for several tests: its own descriptors, opened in the set-up of its first one,
            # stay open.
            check = self._after_setup
        try:
            check._check()
        except LeakError as error:
            raise pytest.fail.Exception(str(error), pytrace=False) from None


def _tell(calls: list[BlockedCall]) -> str:
    lines = [f"blocking call to {call.function} on the event loop:\n{call.stack}" for call in calls]
    return "\n".join(["the error was caught, but the loop would have been blocked", *lines])


def _cut_traceback(error: BaseException) -> None:
    """End the traceback at the blocking call, not inside the function that stands in for it."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        if "blockbuster" in frame.tb_next.tb_frame.f_code.co_filename:
            frame.tb_next = None
        frame = frame.tb_next


_checks_key = pytest.StashKey[_Checks]()


@pytest.fixture(autouse=True)
def _aiocolocated_checks(request: pytest.FixtureRequest) -> Iterator[_Checks]:
    # The first fixture of the narrowest scope: what wider ones keep was there before, and what later
    # ones make is gone when this one ends.
    checks = _Checks(request.node)
    request.node.stash[_checks_key] = checks
    yield checks
    checks.close()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    checks = item.stash.get(_checks_key, None)
    if checks is None or not checks.active:
        return (yield)
    try:
        with _wrapped(item, checks):
            result = yield
    except BaseException as error:
        if checks.guard is not None and checks.guard.calls:
            if type(error).__name__ == "BlockingError":
                _cut_traceback(error)
            else:
                error.add_note(_tell(checks.guard.calls))
        raise
    checks.after_test()
    return result


@contextlib.contextmanager
def _wrapped(item: pytest.Item, checks: _Checks) -> Generator[None]:
    """Have ``checks.run`` between the plugin that runs coroutine tests and the test itself."""
    cls = getattr(item, "cls", None)
    if not isinstance(item, pytest.Function) or (cls and issubclass(cls, unittest.TestCase)):
        yield
        return
    hypothesis = getattr(item.obj, "hypothesis", None)
    owner, name = (item, "obj") if hypothesis is None else (hypothesis, "inner_test")
    function = getattr(owner, name)
    # anyio leaves its own wrapper there for the test's next backend.
    inner = getattr(function, "_anyio_original_func", function)
    if not inspect.iscoroutinefunction(inner):
        yield
        return

    @functools.wraps(inner)
    async def checked(*args: Any, **kwargs: Any) -> Any:
        return await checks.run(inner, *args, **kwargs)

    setattr(owner, name, checked)
    try:
        yield
    finally:
        setattr(owner, name, function)


# --- fixtures -----------------------------------------------------------------------------------------


@pytest.fixture
def no_blocking(_aiocolocated_checks: _Checks) -> BlockingGuard:
    """Fail this test if it blocks its event loop; the guard, for tests that expect it."""
    return _aiocolocated_checks.forbid_blocking()


@pytest.fixture
def leak_check(_aiocolocated_checks: _Checks) -> LeakCheck:
    """Fail this test if it leaves threads, tasks, arrays or file descriptors behind."""
    return _aiocolocated_checks.check_leaks()


@pytest.fixture
def loop_gap(_aiocolocated_checks: _Checks) -> LoopGap:
    """The largest gap between two ticks of this test's event loop: ``loop_gap.max_seconds``."""
    return _aiocolocated_checks.measure_gap()


@pytest.fixture
def recorder() -> Recorder:
    """A recorder of events, which bodies may capture."""
    return Recorder()


@pytest.fixture(scope="session")
def cpu_devices(pytestconfig: pytest.Config) -> list[Any]:
    """JAX's CPU devices of this process, as many as ``colocated_cpu_devices`` says."""
    import jax

    devices = jax.local_devices(backend="cpu")
    wanted = _wanted_cpu_devices(pytestconfig)
    if wanted is not None and len(devices) != wanted:
        pytest.fail(
            f"colocated_cpu_devices: {wanted} CPU devices wanted, JAX was started with "
            f"{len(devices)}: something changed jax_num_cpu_devices or started JAX before pytest",
            pytrace=False,
        )
    return list(devices)


@pytest.fixture(scope="session")
def cpu_mesh(cpu_devices: list[Any]) -> jax.sharding.Mesh:
    """All CPU devices as a mesh with one axis, ``"x"``."""
    import jax
    import numpy as np

    return jax.sharding.Mesh(np.array(cpu_devices), ("x",))
