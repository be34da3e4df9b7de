# SPDX-License-Identifier: Apache-2.0
"""Errors of bodies, and what cannot travel."""

from __future__ import annotations

import asyncio
import builtins
import gc
import threading
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aiocolocated import (
    ArgumentError,
    BodyError,
    NotShippableError,
    RemoteError,
    SpecError,
    TaskGroup,
    TracedCallError,
    colocated_python,
    colocated_python_class,
    device_put,
    gather,
    open_task_channel,
)
from aiocolocated.testing._conformance import bodies
from aiocolocated.testing._conformance.base import HostsUnderTest, Suite


class Errors(Suite):
    """An error of a body arrives as itself, or says why not."""

    @pytest.mark.parametrize("function", [bodies.fail, bodies.fail_async])
    @pytest.mark.parametrize(
        "error",
        [
            KeyError("k", 1),
            OSError(2, "no such thing", "file"),
            UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
            AttributeError("attribute"),
            TimeoutError("too late"),
            ZeroDivisionError(),
            ArgumentError("of the library"),
        ],
        ids=lambda e: type(e).__name__,
    )
    async def test_exception_keeps_type_and_arguments(
        self, hosts: HostsUnderTest, function: Any, error: Exception
    ) -> None:
        """With one note, that says which call it was, and where it was submitted."""
        error = type(error)(*error.args)  # notes of other tests are not wanted
        future = hosts.on(function)(error)
        for _ in range(2):
            with pytest.raises(type(error)) as caught:
                await future
            assert type(caught.value) is type(error)
            assert caught.value.args == error.args
            assert str(caught.value) == str(error)
            (note,) = caught.value.__notes__
            assert note.startswith(f"colocated call {function.__name__} on host ")
            assert "failing.py:" in note

    async def test_traceback_shows_the_body(self, hosts: HostsUnderTest) -> None:
        """With its frames and lines, wherever it ran."""
        with pytest.raises(LookupError) as caught:
            await hosts.on(bodies.fail_deep)(3)
        text = "".join(traceback.format_exception(caught.value))
        assert text.count("in fail_deep") >= 4
        assert 'raise LookupError("deep")' in text

    async def test_cause_is_told(self, hosts: HostsUnderTest) -> None:
        """The text has what an error was raised from."""

        def body() -> None:
            try:
                bodies.fail(KeyError("first"))
            except KeyError as error:
                raise OSError("second") from error

        with pytest.raises(OSError, match="second") as caught:
            await hosts.on(body)()
        text = "".join(traceback.format_exception(caught.value))
        assert "KeyError: 'first'" in text

    async def test_exception_class_that_cannot_be_imported(self, hosts: HostsUnderTest) -> None:
        """``except`` catches it by its own class, with its attributes and notes."""

        class Odd(ValueError):
            def __init__(self, code: int) -> None:
                super().__init__(code)
                self.code = code
                self.more = {"code": code}

        def body(code: int) -> None:
            error = Odd(code)
            error.add_note("of the body")
            raise error

        for code in (3, 4):
            with pytest.raises(Odd) as caught:
                await hosts.on(body)(code)
            assert (caught.value.code, caught.value.more) == (code, {"code": code})
            assert "of the body" in caught.value.__notes__
            assert len(caught.value.__notes__) == 2

    async def test_exception_class_of_the_host(self, hosts: HostsUnderTest) -> None:
        """One that a body makes arrives as one of its base class."""

        def body() -> None:
            class Own(LookupError):
                code = 3

            raise Own("own")

        with pytest.raises(LookupError, match="own") as caught:
            await hosts.on(body)()
        assert type(caught.value).__name__ == "Own"
        assert caught.value.code == 3  # type: ignore[attr-defined]

    async def test_exception_with_arrays(self, hosts: HostsUnderTest) -> None:
        """They come with it, as values."""

        class Bad(ValueError):
            def __init__(self, batch: Any, table: Any) -> None:
                super().__init__(batch, table)
                self.batch, self.table = batch, table

        def body() -> None:
            raise Bad(jnp.arange(3), np.arange(2))

        with pytest.raises(Bad) as caught:
            await hosts.on(body)()
        assert np.asarray(caught.value.batch).tolist() == [0, 1, 2]
        assert caught.value.table.tolist() == [0, 1]

    async def test_exception_group(self, hosts: HostsUnderTest) -> None:
        """Its parts keep their types."""

        def body() -> None:
            raise ExceptionGroup("two", [KeyError("a"), OSError(1, "b")])

        with pytest.raises(ExceptionGroup) as caught:
            await hosts.on(body)()
        assert [type(e) for e in caught.value.exceptions] == [KeyError, PermissionError]

    async def test_exception_that_cannot_be_pickled(self, hosts: HostsUnderTest) -> None:
        """Other hosts send its type's name, its text and its traceback."""
        if not hosts.handles:
            with pytest.raises(bodies.Stubborn):
                await hosts.on(bodies.fail_stubbornly)()
            return
        with pytest.raises(RemoteError) as caught:
            await hosts.on(bodies.fail_stubbornly)()
        assert caught.value.type_name.endswith("bodies.Stubborn")
        assert caught.value.message == "stubborn"
        assert "in fail_stubbornly" in caught.value.traceback_text
        assert len(caught.value.__notes__) == 1

    async def test_exception_that_cannot_be_unpickled(self, hosts: HostsUnderTest) -> None:
        """The same, and nothing hangs."""

        class Needy(Exception):
            def __init__(self, one: int, two: int) -> None:
                super().__init__(f"{one} and {two}")

        def body() -> None:
            raise Needy(1, 2)

        with pytest.raises(RemoteError if hosts.handles else Needy, match="1 and 2"):
            await hosts.on(body)()

    @pytest.mark.parametrize("function", [bodies.fail, bodies.fail_async])
    @pytest.mark.parametrize(
        "name",
        [
            "StopIteration",
            "StopAsyncIteration",
            "GeneratorExit",
            "KeyboardInterrupt",
            "SystemExit",
            "CancelledError",
        ],
    )
    async def test_exception_that_would_break_a_waiter(
        self, hosts: HostsUnderTest, function: Any, name: str
    ) -> None:
        """It arrives inside of a BodyError, and hurts neither waiter nor host."""
        kind = getattr(builtins, name, asyncio.CancelledError)
        if function is bodies.fail_async and name in ("StopIteration", "GeneratorExit"):
            pytest.skip("a coroutine cannot raise it")

        def body() -> Any:
            return function(kind("odd"))

        async def body_async() -> Any:
            return await function(kind("odd"))

        with pytest.raises(BodyError) as caught:
            await hosts.on(body if function is bodies.fail else body_async)()
        assert name in str(caught.value)
        assert await hosts.on(bodies.same)(1) == 1
        if not hosts.handles:
            assert type(caught.value.__cause__) is kind

    async def test_error_that_nobody_retrieved_joins_its_block(self, hosts: HostsUnderTest) -> None:
        """Once, with the others of the block."""
        with pytest.raises(ExceptionGroup) as caught:
            async with open_task_channel("block"):
                hosts.on(bodies.fail)(KeyError("lost"))
                hosts.on(bodies.fail)(OSError("lost"))
        assert [type(e) for e in caught.value.exceptions] == [KeyError, OSError]
        with pytest.raises(ExceptionGroup) as caught:
            async with TaskGroup() as group:
                group.start_soon(hosts.on(bodies.fail), KeyError("lost"))
        assert [type(e) for e in caught.value.exceptions] == [KeyError]

    async def test_error_that_nobody_retrieved_is_reported_once(
        self, hosts: HostsUnderTest
    ) -> None:
        """To the loop's exception handler, when the future is gone."""
        reports: list[dict[str, Any]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: reports.append(context))
        forgotten = hosts.on(bodies.fail)(KeyError("forgotten"))
        await hosts.on(bodies.same)(0)  # behind it in the channel
        del forgotten
        for _ in range(200):
            gc.collect()
            await asyncio.sleep(0.01)
            if reports:
                break
        await hosts.on(bodies.same)(0)
        assert ["fail" in report["message"] for report in reports] == [True]
        assert isinstance(reports[0]["exception"], KeyError)

    async def test_gather_gives_errors_in_their_places(self, hosts: HostsUnderTest) -> None:
        """With ``return_exceptions``."""
        calls = [hosts.aside(bodies.fail, KeyError(i)) for i in range(3)]
        calls.insert(1, hosts.aside(bodies.same, 7))
        answers = await gather(*calls, return_exceptions=True)
        assert [type(a) for a in answers] == [KeyError, int, KeyError, KeyError]
        assert [a.args for a in answers if isinstance(a, KeyError)] == [(0,), (1,), (2,)]


class Refusals(Suite):
    """What cannot travel is refused in words, and spoils nothing."""

    async def test_wrong_arguments_are_refused_at_the_call(self, hosts: HostsUnderTest) -> None:
        """Not in the body."""
        with pytest.raises(TypeError, match="missing"):
            hosts.on(bodies.add)(1)

    async def test_captured_lock_is_refused_by_name(self, hosts: HostsUnderTest) -> None:
        """So is what else must not be copied."""
        lock, event = threading.Lock(), asyncio.Event()
        with pytest.raises(NotShippableError, match="'lock'"):
            await hosts.on(lambda: lock)()
        with pytest.raises(NotShippableError, match="'event'"):
            await hosts.on(lambda: event)()

    async def test_argument_that_cannot_be_pickled(self, hosts: HostsUnderTest) -> None:
        """It is named with its path, where values are copied."""
        if not hosts.by_value:
            pytest.skip("values go by reference")
        for value in (threading.Lock(), asyncio.Event(), threading.Event()):
            with pytest.raises(ArgumentError, match=r"\['k'\]\[1\]"):
                await hosts.on(bodies.same)({"k": [1, value]})
        assert await hosts.on(bodies.same)([1]) == [1]

    async def test_result_that_cannot_be_pickled(self, hosts: HostsUnderTest) -> None:
        """So is a result."""
        if not hosts.by_value:
            pytest.skip("values go by reference")
        with pytest.raises(ArgumentError, match=r"give_lock.*\['k'\].*lock"):
            await hosts.on(bodies.give_lock)()
        assert await hosts.on(bodies.same)([1]) == [1]

    @pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")
    async def test_argument_that_was_forgotten(self, hosts: HostsUnderTest) -> None:
        """A coroutine, a stream, an object of a host: refused at the call, with the path."""

        async def coroutine() -> None:
            """Never run."""

        stream = colocated_python(bodies.yield_arrays).specialize(devices=hosts.device)(0)
        counter = colocated_python_class(bodies.Counter, devices=hosts.device)()
        for value in (coroutine(), stream, counter):
            with pytest.raises(ArgumentError, match=r"\['k'\]\[1\].* is an? "):
                await hosts.on(bodies.same)({"k": [1, value]})
        await stream.aclose()

    async def test_call_under_a_trace_is_refused(self, hosts: HostsUnderTest) -> None:
        """A colocated call is no part of a program."""
        with pytest.raises(TracedCallError):
            jax.jit(lambda x: hosts.on(bodies.same)(x))(1.0)

    async def test_array_of_elsewhere_is_refused(self, hosts: HostsUnderTest) -> None:
        """One that is not on the devices of the call."""
        x = await device_put(np.ones(3, np.float32), hosts.devices[-1][-1])
        with pytest.raises(SpecError, match=r"args\[0\]"):
            await hosts.on(bodies.same)(x)
        here = jax.device_put(np.ones(3, np.float32), jax.local_devices()[-1])
        with pytest.raises(SpecError, match=r"args\[0\]"):
            await hosts.on(bodies.same)(here)

    async def test_argument_that_cannot_be_unpickled(self, hosts: HostsUnderTest) -> None:
        """It says what went wrong over there; so does a result."""
        if not hosts.by_value:
            pytest.skip("values go by reference")
        with pytest.raises(ArgumentError, match="broken on arrival"):
            await hosts.on(bodies.same)([bodies.Broken()])
        with pytest.raises(ArgumentError, match="broken on arrival"):
            await hosts.on(lambda: [bodies.Broken()])()
        assert await hosts.on(bodies.same)([1]) == [1]

    async def test_forgotten_call_is_refused(self, hosts: HostsUnderTest) -> None:
        """A generator or coroutine that a body returns was meant to be run."""

        async def coroutine() -> None:
            """Never run."""

        def body() -> Any:
            return coroutine()

        with pytest.raises(ArgumentError, match="coroutine"):
            await hosts.on(body)()
