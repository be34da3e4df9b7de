# SPDX-License-Identifier: Apache-2.0
"""Objects and streams on hosts."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import Any

import numpy as np
import pytest

from aiocolocated import (
    ObjectClosedError,
    TaskGroup,
    as_argument,
    colocated_python,
    colocated_python_class,
    device_get,
    device_put,
    from_thread,
    gather,
    open_task_channel,
)
from aiocolocated.testing._conformance import bodies
from aiocolocated.testing._conformance.base import HostsUnderTest, Suite


class Objects(Suite):
    """Instances live on a host, proxies here."""

    def _counter(self, hosts: HostsUnderTest, *args: Any, host: int = 0, **options: Any) -> Any:
        devices = hosts.devices[host][0]
        return colocated_python_class(bodies.Counter, devices=devices, **options)(*args)

    async def test_state_stays_on_the_host(self, hosts: HostsUnderTest) -> None:
        """Plain, coroutine and static methods, and properties; calls of a task are in order."""
        counter = self._counter(hosts, 5)
        assert await gather(*(counter.add(1) for _ in range(10))) == list(range(6, 16))
        assert await counter.add_async(1) == 16
        assert await counter.twice == 32
        assert await counter.triple(2) == 6
        assert await counter.get() == 16

    async def test_instances_are_apart(self, hosts: HostsUnderTest) -> None:
        """Two objects of a class, on one host or on two."""
        last = len(hosts.devices) - 1
        one, other = self._counter(hosts, 0), self._counter(hosts, 100, host=last)
        third = self._counter(hosts, 1000)
        assert await gather(one.add(1), other.add(1), third.add(1)) == [1, 101, 1001]

    async def test_arrays_as_state(self, hosts: HostsUnderTest) -> None:
        """They stay there; methods take and return arrays and futures."""
        x = await device_put(np.ones(3, np.float32), hosts.device)
        counter = self._counter(hosts, 0)
        early = counter.add(x)
        assert (await device_get(await counter.add(as_argument(early)))).tolist() == [2, 2, 2]
        assert (await device_get(await counter.get())).tolist() == [2, 2, 2]

    async def test_constructor_error_is_raised_by_the_call(self, hosts: HostsUnderTest) -> None:
        """And by the next one."""
        counter = self._counter(hosts, "broken")
        for _ in range(2):
            with pytest.raises(OSError, match="not made"):
                await counter.get()

    async def test_error_of_a_method(self, hosts: HostsUnderTest) -> None:
        """It keeps its type, and the object goes on."""
        counter = self._counter(hosts, 1)
        with pytest.raises(KeyError, match="of a method"):
            await counter.fail()
        assert await counter.add(1) == 2

    async def test_methods_run_one_at_a_time(self, hosts: HostsUnderTest, key: str) -> None:
        """From whatever channel they are called."""
        counter = self._counter(hosts)
        async with TaskGroup() as group:
            for _ in range(8):
                group.start_soon(counter.count_at_once, key)
        assert max(group.results()) == 1

    async def test_max_concurrency(self, hosts: HostsUnderTest, key: str) -> None:
        """So many run at once, and no more."""
        counter = self._counter(hosts, max_concurrency=2)
        async with TaskGroup() as group:
            for _ in range(6):
                group.start_soon(counter.meet, key, 2)
        assert max(group.results()) == 2

    async def test_dedicated_thread(self, hosts: HostsUnderTest) -> None:
        """Constructor and methods run on one thread."""
        threaded = colocated_python_class(
            bodies.Threaded, devices=hosts.device, dedicated_thread=True
        )
        async with threaded() as there:
            async with TaskGroup() as group:
                for _ in range(5):
                    group.start_soon(there.same_thread)
            assert group.results() == [True] * 5

    async def test_closing(self, hosts: HostsUnderTest, key: str) -> None:
        """It waits for calls, runs ``close`` once, and refuses further calls; twice is fine."""
        async with self._counter(hosts, 1, key) as counter:
            last = counter.add(1)
        assert await last == 2
        assert await hosts.notes(key) == ["closed"]
        await counter.aclose()
        assert await hosts.notes(key) == ["closed"]
        with pytest.raises(ObjectClosedError):
            await counter.add(1)
        never_made = self._counter(hosts, 1, key)
        await never_made.aclose()
        assert await hosts.notes(key) == ["closed"]

    async def test_dropped_object_is_closed(self, hosts: HostsUnderTest, key: str) -> None:
        """In the background."""
        counter = self._counter(hosts, 1, key)
        assert await counter.add(1) == 2
        del counter
        for _ in range(300):
            gc.collect()
            if await hosts.notes(key) == ["closed"]:
                break
            await asyncio.sleep(0.01)
        assert await hosts.notes(key) == ["closed"]

    async def test_object_of_a_local_class(self, hosts: HostsUnderTest) -> None:
        """That no host can import, with what it captures and inherits."""
        factor = 3

        class Base:
            def __init__(self) -> None:
                self.n = 1

        class Local(Base):
            def step(self, x: int) -> int:
                self.n = self.n * factor + x
                return self.n

        local = colocated_python_class(Local, devices=hosts.device)()
        assert await local.step(1) == 4
        assert await local.step(0) == 12

    async def test_cancelled_method(self, hosts: HostsUnderTest, key: str) -> None:
        """A coroutine method is cancelled where it waits, and the object goes on."""

        class Waiting:
            async def hold(self, key: str) -> None:
                await bodies.hold_async(key)

            def get(self) -> str:
                return "there"

        waiting = colocated_python_class(Waiting, devices=hosts.device)()
        held = waiting.hold(key)
        await hosts.held(key)
        assert held.cancel()
        assert await waiting.get() == "there"
        assert await hosts.notes(key) == ["in", "cancelled", "cleaned up"]


class Streams(Suite):
    """Generators on hosts give their items here."""

    @pytest.mark.parametrize("function", [bodies.count_up, bodies.count_up_async])
    async def test_items_come_in_order(
        self, hosts: HostsUnderTest, key: str, function: Any
    ) -> None:
        """And end; the body has ended by then."""
        stream = colocated_python(function).specialize(devices=hosts.device)(20, key)
        assert [i async for i in stream] == list(range(20))
        assert await hosts.notes(key) == [*range(20), "closed"]
        assert [i async for i in stream] == []

    async def test_items_are_arrays(self, hosts: HostsUnderTest) -> None:
        """Or trees of them."""
        stream = colocated_python(bodies.yield_arrays).specialize(devices=hosts.device)(4)
        async for item in stream:
            assert item["x"].devices() == {hosts.device}
            assert (await device_get(item["x"])).tolist() == [item["i"]] * 3

    async def test_error_comes_after_the_items(self, hosts: HostsUnderTest) -> None:
        """As itself; then the stream is at its end."""
        stream = colocated_python(bodies.yield_then_fail).specialize(devices=hosts.device)(2)
        assert [await anext(stream), await anext(stream)] == [0, 1]
        with pytest.raises(KeyError, match="after the items"):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    @pytest.mark.parametrize("function", [bodies.count_up, bodies.count_up_async])
    async def test_read_ahead_is_bounded(
        self, hosts: HostsUnderTest, key: str, function: Any
    ) -> None:
        """The body is no more than that ahead of its consumer."""
        for ahead in (0, 1, 3):
            name = f"{key}-{ahead}"
            function_there = colocated_python(function).specialize(
                devices=hosts.device, read_ahead=ahead
            )
            async with contextlib.aclosing(function_there(50, name)) as stream:
                for i in range(10):
                    assert await anext(stream) == i
                    assert len(await hosts.notes(name)) <= i + 1 + ahead

    @pytest.mark.parametrize("function", [bodies.count_up, bodies.count_up_async])
    async def test_closing_runs_the_clean_up(
        self, hosts: HostsUnderTest, key: str, function: Any
    ) -> None:
        """By ``aclosing``, by the block that opened it, or by being dropped."""
        function_there = colocated_python(function).specialize(devices=hosts.device)
        async with contextlib.aclosing(function_there(1000, key)) as stream:
            await anext(stream)
        assert (await hosts.notes(key))[-1] == "closed"
        async with open_task_channel():
            stream = function_there(1000, f"{key}-block")
            await anext(stream)
        assert (await hosts.notes(f"{key}-block"))[-1] == "closed"
        stream = function_there(1000, f"{key}-dropped")
        await anext(stream)
        del stream
        for _ in range(300):
            gc.collect()
            if "closed" in await hosts.notes(f"{key}-dropped"):
                break
            await asyncio.sleep(0.01)
        assert (await hosts.notes(f"{key}-dropped"))[-1] == "closed"

    async def test_streams_of_an_object(self, hosts: HostsUnderTest) -> None:
        """Its methods that are generators, of both kinds."""
        counter = colocated_python_class(bodies.Counter, devices=hosts.device)(10)
        assert [i async for i in counter.items(3)] == [11, 12, 13]
        assert [i async for i in counter.items_async(2)] == [14, 15]
        assert await counter.get() == 15

    def test_stream_without_a_loop(self, hosts: HostsUnderTest, key: str) -> None:
        """``from_thread.iterate`` takes it, too."""
        stream = colocated_python(bodies.count_up).specialize(devices=hosts.device)(5, key)
        assert list(from_thread.iterate(stream)) == list(range(5))
