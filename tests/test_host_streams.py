# SPDX-License-Identifier: Apache-2.0
"""Streams over host processes: the bodies are there, and items come as they are asked for."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from host_bodies import (
    Counter,
    Door,
    Journal,
    Totals,
    colocated_counter as ColocatedCounter,
    count_async,
    count_sync,
    doors_async,
    doors_sync,
    fails_in_finally,
    global_multiples,
    multiples,
    ones,
    own_numbers,
)
from jax.sharding import NamedSharding, PartitionSpec

from aiocolocated import (
    ChannelClosedError,
    HostLostError,
    SpecError,
    TaskGroup,
    colocated_python,
    colocated_python_class,
    device_get,
    device_put,
    from_thread,
    one_device_per_host,
    open_hosts,
    open_task_channel,
)

if TYPE_CHECKING:
    import jax

pytestmark = pytest.mark.timeout(60)

COUNT = {"generator": colocated_python(count_sync), "asynchronous": colocated_python(count_async)}
DOORS = {"generator": colocated_python(doors_sync), "asynchronous": colocated_python(doors_async)}
kinds = pytest.mark.parametrize("kind", ["generator", "asynchronous"])


@pytest.fixture(scope="module")
def hosts() -> Iterator[Any]:
    with open_hosts("processes", n=2, cpu_devices=2) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def x(hosts) -> jax.Array:
    """Three numbers on the first host."""
    return ones.specialize(devices=hosts[0].devices[:1])(3).result()


@pytest.fixture(scope="module")
def both(hosts) -> Any:
    """Four numbers on two hosts."""
    sharding = NamedSharding(hosts.mesh((2, 2), ("host", "x")), PartitionSpec(("host", "x")))
    return asyncio.run(_put(np.arange(4, dtype=np.float32), sharding))


async def _put(value: Any, sharding: Any) -> Any:
    return await device_put(value, sharding)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal")


@pytest.fixture
def doors(tmp_path: Path) -> list[Door]:
    return [Door(tmp_path / f"door{i}") for i in range(4)]


async def anext_of(stream: Any) -> Any:
    return await anext(stream)


async def _read(stream: Any, seen: list[Any]) -> None:
    """Read a stream up to its end or error."""
    async for item in stream:
        seen.append(item)  # noqa: PERF401 - what came before an error counts


# --- items ----------------------------------------------------------------------------------------------


@kinds
@pytest.mark.asyncio
async def test_items_come_in_order_and_then_the_end(hosts, x, journal, kind):
    stream = COUNT[kind](x, journal, 5)
    assert [i async for i in stream] == [0, 1, 2, 3, 4]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    await stream.aclose()
    expected = ["begin", *(f"step {i}" for i in range(5)), "finally"]
    assert journal.of(hosts[0].pid) == journal.events == expected


@pytest.mark.asyncio
async def test_arrays_of_items_stay_on_the_host(x):
    seen = []
    async for item in multiples(x, 4):
        assert not item["array"].is_fully_addressable
        seen.append((item["number"], (await device_get(item["array"]))[0]))
    assert seen == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]


@pytest.mark.asyncio
async def test_future_and_devices_tell_where(hosts, x, journal):
    where = hosts[1].devices[:1]
    later = ones.specialize(devices=where)(2)
    assert [item["number"] async for item in multiples(later, 2)] == [0, 1]
    stream = COUNT["generator"].specialize(devices=where)(None, journal, 2)
    assert [i async for i in stream] == [0, 1]
    assert journal.of(hosts[1].pid) == journal.events


@pytest.mark.asyncio
async def test_body_that_cannot_be_imported_is_shipped(x):
    step = 3

    @colocated_python
    def local(x: Any, stop: int) -> Any:
        yield from range(0, stop, step)

    assert [i async for i in local(x, 9)] == [0, 3, 6]


def test_iterated_without_a_loop(x, journal):
    assert list(from_thread.iterate(COUNT["generator"](x, journal, 3))) == [0, 1, 2]


@kinds
@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.asyncio
async def test_body_is_so_far_ahead_and_no_further(x, journal, kind, ahead):
    stream = COUNT[kind].specialize(read_ahead=ahead)(x, journal, 20)
    for i in range(5):
        assert await anext(stream) == i
        await journal.wait_for(f"step {i + ahead}")
        await asyncio.sleep(0.02)
        assert f"step {i + ahead + 1}" not in journal.events
    await stream.aclose()


@pytest.mark.asyncio
async def test_items_of_a_host_that_is_behind_are_waited_for(x, journal, doors):
    """The second step waits on the host, and does not hold the first item up."""
    stream = DOORS["generator"].specialize(read_ahead=3)(x, journal, doors)
    doors[0].open()
    assert await anext(stream) == 0
    waiting = asyncio.create_task(anext_of(stream))
    await journal.wait_for("waits 1")
    assert not waiting.done()
    for door in doors[1:]:
        door.open()
    assert await waiting == 1
    assert [i async for i in stream] == [2, 3]


@kinds
@pytest.mark.asyncio
async def test_cancelled_consumer_loses_no_item(x, journal, doors, kind):
    stream = DOORS[kind](x, journal, doors)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await anext(stream)
    for door in doors:
        door.open()
    assert [i async for i in stream] == [0, 1, 2, 3]


# --- errors -----------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.asyncio
async def test_error_comes_after_the_items_before_it(x, journal, kind, ahead, caplog):
    stream = COUNT[kind].specialize(read_ahead=ahead)(x, journal, 2, LookupError("no more"))
    seen: list[int] = []
    with pytest.raises(LookupError, match="no more") as caught:
        await _read(stream, seen)
    assert seen == [0, 1]
    assert "host_bodies.py" in str(caught.value.__cause__)
    assert "test_host_streams.py" in caught.value.__notes__[0]
    assert [i async for i in stream] == []
    await stream.aclose()
    del stream, caught
    gc.collect()
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


@pytest.mark.asyncio
async def test_argument_that_is_not_shipped_is_the_error_of_the_first_item(x, caplog):
    stream = multiples(x, threading.Lock())
    with pytest.raises(Exception, match="cannot pickle"):
        await anext(stream)
    await stream.aclose()
    del stream
    gc.collect()
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


# --- closing ----------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.asyncio
async def test_aclose_runs_the_finally_on_the_host(hosts, x, journal, kind, ahead):
    stream = COUNT[kind].specialize(read_ahead=ahead)(x, journal, 1000)
    assert await anext(stream) == 0
    await asyncio.gather(stream.aclose(), stream.aclose())
    await stream.aclose()
    assert journal.of(hosts[0].pid)[-1] == "finally"
    assert journal.events.count("finally") == 1


@kinds
@pytest.mark.asyncio
async def test_break_under_aclosing_runs_the_finally(x, journal, kind):
    async with contextlib.aclosing(COUNT[kind](x, journal, 1000)) as stream:
        async for i in stream:
            if i == 3:
                break
    assert journal.events[-1] == "finally"


@kinds
@pytest.mark.asyncio
async def test_aclose_before_the_start_runs_nothing(x, journal, kind):
    stream = COUNT[kind].specialize(read_ahead=0)(x, journal, 5)
    await stream.aclose()
    assert journal.events == []


@pytest.mark.asyncio
async def test_aclose_cancels_an_asynchronous_body_that_waits(x, journal, doors):
    stream = DOORS["asynchronous"](x, journal, doors)
    await journal.wait_for("waits 0")
    await stream.aclose()
    assert journal.events == ["waits 0", "finally"]


@pytest.mark.asyncio
async def test_aclose_waits_for_a_plain_body_that_works(x, journal, doors):
    stream = DOORS["generator"](x, journal, doors)
    await journal.wait_for("waits 0")
    closer = asyncio.create_task(stream.aclose())
    await asyncio.sleep(0.02)
    assert not closer.done()
    doors[0].open()
    await closer
    assert journal.events == ["waits 0", "finally"]


@pytest.mark.asyncio
async def test_error_in_the_finally_comes_out_of_aclose(x):
    stream = fails_in_finally(x)
    await anext(stream)
    with pytest.raises(OSError, match="disk is full"):
        await stream.aclose()


@kinds
@pytest.mark.asyncio
async def test_dropped_streams_are_closed_in_the_background(x, journal, kind):
    for _ in range(5):
        stream = COUNT[kind](x, journal, 1000)
        assert await anext(stream) == 0
        del stream
    gc.collect()
    await journal.wait_for("finally", times=5)


@kinds
@pytest.mark.parametrize("block", [TaskGroup, open_task_channel])
@pytest.mark.asyncio
async def test_leaving_a_block_closes_its_streams(x, journal, kind, block):
    async with block():
        stream = COUNT[kind](x, journal, 1000)
        assert await anext(stream) == 0
    assert journal.events[-1] == "finally"
    with pytest.raises(ChannelClosedError):
        await anext(stream)


# --- methods ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["up_to", "up_to_async"])
@pytest.mark.asyncio
async def test_other_methods_run_between_the_items(x, method):
    cls = colocated_python_class(Counter, read_ahead=0)
    async with cls() as counter:
        stream = getattr(counter, method)(x, 10)
        assert await anext(stream) == 1
        assert await counter.add(x) == 4
        assert await anext(stream) == 5
        await stream.aclose()


@pytest.mark.asyncio
async def test_closing_an_object_closes_its_streams_first(x, journal):
    counter = ColocatedCounter(0, journal)
    stream = counter.up_to(x, 1000)
    assert await anext(stream) == 1
    await counter.aclose()
    assert journal.events == ["made", "finally", "closed", "destroyed"]
    with pytest.raises(ChannelClosedError):
        await anext(stream)


@pytest.mark.asyncio
async def test_open_stream_keeps_its_object(x, journal):
    stream = ColocatedCounter(0, journal).up_to(x, 5)
    gc.collect()
    assert [i async for i in stream] == [1, 2, 3, 4, 5]
    del stream
    await journal.wait_for("destroyed")


@pytest.mark.asyncio
async def test_iterator_class_is_iterated_on_the_host(hosts):
    class Loader:
        def __init__(self, n: int) -> None:
            self.n = n

        def __iter__(self) -> Iterator[int]:
            yield from range(self.n)

    cls = colocated_python_class(Loader, devices=hosts[1].devices[:1])
    async with cls(3) as loader:
        assert [i async for i in loader] == [0, 1, 2]
        assert [i async for i in loader] == [0, 1, 2]


# --- several hosts ----------------------------------------------------------------------------------------


@kinds
@pytest.mark.asyncio
async def test_bodies_of_several_hosts_advance_together(hosts, both, journal, kind):
    stream = COUNT[kind](both, journal, 4)
    assert [i async for i in stream] == [0, 1, 2, 3]
    for host in hosts:
        assert journal.of(host.pid) == ["begin", *(f"step {i}" for i in range(4)), "finally"]
    stream = COUNT[kind](both, journal, 1000)
    assert await anext(stream) == 0
    await stream.aclose()
    for host in hosts:
        assert journal.of(host.pid)[-1] == "finally"


@pytest.mark.asyncio
async def test_global_arrays_are_items(both):
    items = [item async for item in global_multiples(both, 3)]
    assert items[2].sharding == both.sharding
    np.testing.assert_array_equal(await device_get(items[2]), 2.0 * np.arange(4))


@pytest.mark.asyncio
async def test_items_that_differ_are_refused_unless_they_are_reduced(hosts, both):
    with pytest.raises(SpecError, match="different results"):
        await anext(own_numbers(both, 3))
    listed = own_numbers.specialize(devices=one_device_per_host(hosts), reduce="list")
    assert [i async for i in listed(None, 3)] == [[0, 10], [1, 11], [2, 12]]
    seen: list[Any] = []
    with pytest.raises(SpecError, match="more items on some hosts"):
        await _read(listed(None, 3, fewer=1), seen)
    assert seen == [[0, 10], [1, 11]]


def test_collectives_in_methods_and_streams():
    """The steps take the place among the calls that every host sees them in."""

    async def main(hosts: Any) -> None:
        sharding = NamedSharding(hosts.mesh((2,), ("host",)), PartitionSpec("host"))
        x = await device_put(np.arange(4, dtype=np.float32), sharding)
        async with colocated_python_class(Totals)() as totals:
            async with contextlib.aclosing(totals.multiples(x, 100)) as stream:
                first = await anext(stream)
                others = [totals.total(x) for _ in range(3)]
                second = await anext(stream)
            values = [first, second, *[await other for other in others]]
            assert [float(v) for v in await device_get(values)] == [0.0, 6.0, 6.0, 6.0, 6.0]

    with open_hosts("processes", n=2, cpu_devices=1, collectives=True) as hosts:
        asyncio.run(main(hosts))


# --- lost hosts -------------------------------------------------------------------------------------------


def test_stream_of_a_lost_host_says_so(tmp_path, caplog):
    journal = Journal(tmp_path / "journal")

    async def main(hosts: Any) -> None:
        where = hosts[0].devices[:1]
        count = COUNT["generator"].specialize(devices=where, read_ahead=0)
        doors = DOORS["generator"].specialize(devices=where)
        idle, waiting, dropped = [
            count(None, journal, 1000),
            doors(None, journal, [Door(tmp_path / "never")]),
            count(None, journal, 1000),
        ]
        assert await anext(idle) == await anext(dropped) == 0
        await journal.wait_for("waits 0")
        os.kill(hosts[0].pid, 9)
        with pytest.raises(HostLostError):
            await anext(waiting)
        await waiting.aclose()
        await hosts.restart(0)
        with pytest.raises(HostLostError, match="restarted"):
            await anext(idle)
        await idle.aclose()
        del waiting, idle, dropped
        gc.collect()
        assert [i async for i in count(None, journal, 3)] == [0, 1, 2]

    with open_hosts("processes", n=1, cpu_devices=1) as hosts:
        asyncio.run(main(hosts))
    gc.collect()
    assert not [r for r in caplog.records if "never retrieved" in r.getMessage()]


def test_stream_that_outlives_its_hosts_is_let_go(tmp_path):
    journal = Journal(tmp_path / "journal")
    with open_hosts("processes", n=1, cpu_devices=1) as hosts:
        stream = COUNT["generator"].specialize(devices=hosts.devices)(None, journal, 1000)
        items = from_thread.iterate(stream)
        assert next(items) == 0
    assert journal.events[-1] == "finally"
    with pytest.raises(HostLostError):
        while True:
            next(items)
