# SPDX-License-Identifier: Apache-2.0
"""Cancellation of calls and waits, timeouts, shields."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from aiocolocated import CallCancelledError, TaskGroup, as_argument, open_task_channel
from aiocolocated.testing._conformance import bodies
from aiocolocated.testing._conformance.base import HostsUnderTest, Suite


class Cancellation(Suite):
    """Calls, waits and blocks are cancelled apart."""

    async def test_queued_call_never_runs(self, hosts: HostsUnderTest, key: str) -> None:
        """Its waiters hear at once, and its channel goes on."""
        held = hosts.on(bodies.hold)(key)
        queued = hosts.on(bodies.note)(key, "never")
        behind = hosts.on(bodies.note)(key, "behind")
        await hosts.held(key)
        assert queued.cancel()
        with pytest.raises(CallCancelledError, match="was cancelled"):
            await queued
        assert queued.cancelled()
        assert not queued.cancel()
        await hosts.release(key)
        await held
        await behind
        assert await hosts.notes(key) == ["in", "out", "behind"]

    async def test_running_plain_body_is_left_behind(self, hosts: HostsUnderTest, key: str) -> None:
        """Its waiters are released at once; the body runs to its end, and its channel waits for it."""
        held = hosts.on(bodies.hold)(key)
        behind = hosts.on(bodies.note)(key, "behind")
        await hosts.held(key)
        assert held.cancel()
        with pytest.raises(CallCancelledError):
            await held
        assert not behind.dispatched()
        assert await hosts.notes(key) == ["in"]
        await hosts.release(key)
        await behind
        assert await hosts.notes(key) == ["in", "out", "behind"]

    async def test_coroutine_body_is_cancelled_and_cleans_up(
        self, hosts: HostsUnderTest, key: str
    ) -> None:
        """Who cancels the call is not kept; what is behind it in the channel waits for the clean-up."""
        held = hosts.on(bodies.hold_async)(key)
        behind = hosts.on(bodies.note)(key, "behind")
        await hosts.held(key)
        assert held.cancel()
        with pytest.raises(CallCancelledError):
            await held
        await behind
        assert await hosts.notes(key) == ["in", "cancelled", "cleaned up", "behind"]

    async def test_cancelled_task_waits_for_the_clean_up(
        self, hosts: HostsUnderTest, key: str
    ) -> None:
        """Of a coroutine body: after the ``await`` nothing of it runs."""

        async def task() -> None:
            await hosts.on(bodies.hold_async)(key)

        waiting = asyncio.create_task(task())
        await hosts.held(key)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await hosts.notes(key) == ["in", "cancelled", "cleaned up"]

    async def test_timeout_is_prompt_for_a_plain_body(
        self, hosts: HostsUnderTest, key: str
    ) -> None:
        """It is raised while the body runs on."""
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await hosts.on(bodies.hold)(key)
        await hosts.held(key)  # unless it was so late that the call never started, it is there
        assert await hosts.notes(key) == ["in"]
        await hosts.release(key)

    async def test_timeout_cancels_a_coroutine_body(self, hosts: HostsUnderTest, key: str) -> None:
        """And waits for its clean-up."""
        await hosts.on(bodies.same_async)(0)  # what a first call needs
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await hosts.on(bodies.hold_async)(key)
        assert await hosts.notes(key) == ["in", "cancelled", "cleaned up"]

    async def test_block_waits_for_what_it_has_left_behind(
        self, hosts: HostsUnderTest, key: str
    ) -> None:
        """Leaving ``open_task_channel`` early waits for the body that runs."""

        async def block() -> None:
            async with open_task_channel():
                await hosts.on(bodies.hold)(key)

        task = asyncio.create_task(block())
        await hosts.held(key)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        await hosts.release(key)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await hosts.notes(key) == ["in", "out"]

    async def test_cancelled_group_waits_for_its_bodies(
        self, hosts: HostsUnderTest, key: str
    ) -> None:
        """Plain and coroutine bodies, on every host."""

        async def block() -> None:
            async with TaskGroup() as group:
                for host in range(len(hosts.devices)):
                    group.start_soon(hosts.on(bodies.hold, host), key)
                    group.start_soon(hosts.on(bodies.hold_async, host), f"{key}-async")

        task = asyncio.create_task(block())
        for host in range(len(hosts.devices)):
            await hosts.held(key, host)
            await hosts.held(f"{key}-async", host)
        task.cancel()
        for host in range(len(hosts.devices)):
            await hosts.release(key, host)
        with pytest.raises(asyncio.CancelledError):
            await task
        for host in range(len(hosts.devices)):
            assert await hosts.notes(key, host) == ["in", "out"]
            seen = await hosts.notes(f"{key}-async", host)
            assert seen == ["in", "cancelled", "cleaned up"]

    async def test_last_waiter_cancels_the_call(self, hosts: HostsUnderTest, key: str) -> None:
        """One of two waiters does not."""
        future = hosts.on(bodies.hold_async)(key, "value")

        async def wait() -> object:
            return await future

        one, other = asyncio.create_task(wait()), asyncio.create_task(wait())
        await hosts.held(key)
        one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one
        assert not future.done()
        other.cancel()
        with pytest.raises(asyncio.CancelledError):
            await other
        assert future.cancelled()
        assert (await hosts.notes(key))[:2] == ["in", "cancelled"]

    async def test_shield_keeps_a_call(self, hosts: HostsUnderTest, key: str) -> None:
        """It is a waiter that nobody cancels."""
        future = hosts.on(bodies.hold_async)(key, "value")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(future), 0.05)
        await hosts.held(key)
        await hosts.release(key)
        assert await future == "value"

    async def test_finished_call_is_not_cancelled(self, hosts: HostsUnderTest) -> None:
        """``cancel`` says so."""
        future = hosts.on(bodies.same)(1)
        assert await future == 1
        assert not future.cancel()
        assert await future == 1

    async def test_failing_clean_up_joins_its_block(self, hosts: HostsUnderTest, key: str) -> None:
        """Nobody waits for a cancelled call any more, but its block does."""

        async def body(key: str) -> None:
            try:
                await bodies.hold_async(key)
            finally:
                raise KeyError("clean-up")

        with pytest.raises(ExceptionGroup) as caught:
            async with open_task_channel():
                future = hosts.on(body)(key)
                await hosts.held(key)
                future.cancel()
        assert [error.args for error in caught.value.exceptions] == [("clean-up",)]

    async def test_failure_of_a_cancelled_call_is_its_own(self, hosts: HostsUnderTest) -> None:
        """What a call raises that was cancelled while it ended is nobody's: no report, no error."""
        reports: list[Any] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: reports.append(context))
        fail, add = hosts.on(bodies.fail_async), hosts.on(bodies.add_async)
        early = late = future = hosts.on(bodies.same)(0)
        for i in range(40):
            early = fail(KeyError("early"))
            late = add(as_argument(early), 1)
            await asyncio.sleep(i * 5e-5)  # somewhere on its way
            late.cancel()
            for future in (late, early):
                with pytest.raises((KeyError, CallCancelledError)):
                    await future
        await hosts.on(bodies.same)(0)
        early = late = future = hosts.on(bodies.same)(0)
        gc.collect()
        await hosts.on(bodies.same)(0)
        assert reports == []

    async def test_coroutine_body_may_not_let_itself_be_cancelled(
        self, hosts: HostsUnderTest, key: str
    ) -> None:
        """A body that returns all the same is over then, and the call stays cancelled."""

        async def stubborn(key: str) -> str:
            try:
                await bodies.hold_async(key)
            except asyncio.CancelledError:
                bodies.note(key, "stays")
            return "value"

        future = hosts.on(stubborn)(key)
        await hosts.held(key)
        assert future.cancel()
        with pytest.raises(CallCancelledError):
            await future
        await hosts.on(bodies.same)(0)  # behind it in the channel
        assert (await hosts.notes(key))[-1] == "stays"
