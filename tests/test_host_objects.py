# SPDX-License-Identifier: Apache-2.0
"""Objects on host processes: an instance on every host that methods are called on."""

from __future__ import annotations

import asyncio
import gc
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from host_bodies import (
    AsyncClosing,
    Counted,
    Counter,
    Door,
    Entered,
    FailsAtFirst,
    FailsToClose,
    Holder,
    Journal,
    colocated_counter as ColocatedCounter,
    counted_alive,
    ones,
    uses_others,
)
from jax.sharding import NamedSharding, PartitionSpec

from aiocolocated import (
    HostLostError,
    ObjectClosedError,
    SpecError,
    colocated_python,
    colocated_python_class,
    device_get,
    device_put,
    gather,
    open_hosts,
    open_task_channel,
)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Any]:
    with open_hosts("processes", n=2, cpu_devices=2) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def x(hosts) -> jax.Array:
    """Three numbers on the first host."""
    return ones.specialize(devices=hosts[0].devices[:1])(3).result()


@pytest.fixture(scope="module")
def y(hosts) -> jax.Array:
    """Three numbers on the second host."""
    return ones.specialize(devices=hosts[1].devices[:1])(3).result()


@pytest.fixture(scope="module")
def both(hosts) -> Any:
    """Two numbers on each host."""
    sharding = NamedSharding(hosts.mesh((2, 2), ("host", "x")), PartitionSpec(("host", "x")))
    return asyncio.run(_put(np.arange(4, dtype=np.float32), sharding))


async def _put(value: Any, sharding: Any) -> Any:
    return await device_put(value, sharding)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal")


@pytest.fixture
def door(tmp_path: Path) -> Door:
    return Door(tmp_path / "door")


# --- making -----------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_methods_of_every_kind_share_the_instance_on_the_host(hosts, x, journal):
    async with ColocatedCounter(10, journal) as counter:
        assert journal.events == []
        assert await counter.add(x) == 13
        assert await counter.add_async(x) == 16
        assert [i async for i in counter.up_to(x, 18)] == [17, 18]
        assert [i async for i in counter.up_to_async(x, 20)] == [19, 20]
        assert await counter.double == 40
        assert await counter.get() == 20
        assert counter.unit == "items"
        pid, thread = await counter.where()
        assert pid == hosts[0].pid
        assert thread.startswith("aiocolocated-worker")
    assert journal.of(pid) == ["made", "finally", "finally", "closed", "destroyed"]


@pytest.mark.asyncio
async def test_arrays_of_methods_stay_on_the_host(x):
    async with ColocatedCounter() as counter:
        scaled = await counter.scale(counter.scale(x), factor=3.0)
        assert scaled.sharding == x.sharding
        assert not scaled.is_fully_addressable
        np.testing.assert_array_equal(await device_get(scaled), np.full(3, 6.0, np.float32))
    np.testing.assert_array_equal(await device_get(await ColocatedCounter.triple(x)), np.full(3, 3))


@pytest.mark.asyncio
async def test_class_that_cannot_be_imported_is_shipped(x):
    class Local:
        def __init__(self, start: int) -> None:
            self.start = start

        def add(self, x: Any) -> int:
            return helper(self.start + int(x.sum()))

        async def other(self, x: Any) -> Any:
            return type(self)(7)

    def helper(n: int) -> int:
        return 10 * n

    async with colocated_python_class(Local)(4) as local:
        assert await local.add(x) == 70
        other = await local.other(x)
        assert type(other) is Local
        assert other.start == 7


@pytest.mark.asyncio
async def test_constructor_takes_arrays_of_its_host(hosts, x, y):
    """As references: they do not travel."""
    info = {"devices": hosts[0].devices[:1]}
    async with colocated_python_class(Holder, **info)(x) as holder:
        assert await holder.sum() == 3.0
    elsewhere = colocated_python_class(Holder, **info)(y)
    with pytest.raises(Exception, match="device_put"):
        await elsewhere.sum()
    await elsewhere.aclose()


@pytest.mark.asyncio
async def test_constructor_takes_large_arrays_once(hosts, x):
    large = np.arange(200_000, dtype=np.float64)
    async with colocated_python_class(Holder, devices=hosts[0].devices[:1])(large) as holder:
        assert await holder.sum() == large.sum()
        assert await holder.sum() == large.sum()


@pytest.mark.asyncio
async def test_constructor_error_is_raised_by_the_call_and_a_later_one_retries(x, journal):
    obj = colocated_python_class(FailsAtFirst)(journal)
    with pytest.raises(OSError, match="not yet") as caught:
        await obj.get(x)
    assert "test_host_objects.py" in caught.value.__notes__[0]
    assert await obj.get(x) == "made"
    assert journal.events == ["tries", "tries"]
    await obj.aclose()


@pytest.mark.asyncio
async def test_method_error_is_raised_and_the_object_goes_on(x):
    async with ColocatedCounter(1) as counter:
        with pytest.raises(ValueError, match="failed") as caught:
            await counter.fail(x)
        assert "host_bodies.py" in str(caught.value.__cause__)
        with pytest.raises(TypeError, match="argument"):
            counter.add(x, 1, 2)
        assert await counter.add(x) == 4


# --- where ------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_every_host_has_an_instance_of_its_own(hosts, x, y, both, journal):
    """Also when a call goes to several at once, which have to agree then."""
    counter = ColocatedCounter(0, journal)
    assert await counter.add(both) == 4
    assert await counter.add(x) == 7
    assert await counter.add(y) == 7
    await counter.aclose()
    for host in hosts:
        assert journal.of(host.pid) == ["made", "closed", "destroyed"]


@pytest.mark.asyncio
async def test_call_without_arrays_goes_where_the_others_went(hosts, x, y):
    counter = ColocatedCounter(1)
    with pytest.raises(SpecError, match="without arrays"):
        counter.get()
    await counter.add(y)
    assert (await counter.where())[0] == hosts[1].pid
    assert await counter.get() == 4
    assert await counter.double == 8
    await counter.add(x)
    with pytest.raises(SpecError, match=r"host-1 and on .*host-0"):
        counter.get()
    with pytest.raises(SpecError, match="host-1"):
        counter.double  # noqa: B018
    assert await counter.get.specialize(devices=hosts[0].devices[:1])() == 4
    await counter.aclose()


@pytest.mark.asyncio
async def test_future_whose_value_is_on_a_host_tells_where(hosts, x, journal):
    """No instance is made in this process, which is where the call seemed to go."""
    async with open_task_channel() as channel:
        counter = ColocatedCounter(0, journal)
        assert await counter.add(channel.submit_nowait(lambda: x)) == 3
        assert await counter.get() == 3
        await counter.aclose()
    assert journal.of(hosts[0].pid) == journal.events


@pytest.mark.asyncio
async def test_devices_of_the_class_say_where(hosts):
    cls = colocated_python_class(Counter, devices=hosts[1].devices)
    async with cls(5) as counter:
        assert await counter.double == 10
        assert (await counter.where())[0] == hosts[1].pid


@pytest.mark.asyncio
async def test_object_may_be_here_and_on_a_host(hosts, x, cpu_devices, journal):
    """Both are closed, and what goes wrong in both is raised."""
    here = jax.device_put(np.ones(2, np.float32), cpu_devices[0])
    cls = colocated_python_class(FailsToClose)
    obj = cls(0, journal)
    assert await obj.add(here) == 2
    assert await obj.add(x) == 3
    with pytest.raises(SpecError, match=r"this process and on host-0"):
        obj.get()
    with pytest.raises(ExceptionGroup) as caught:
        await obj.aclose()
    texts = " ".join(map(str, caught.value.exceptions))
    assert str(os.getpid()) in texts
    assert str(hosts[0].pid) in texts
    assert journal.events.count("closed") == journal.events.count("destroyed") == 2
    del here


# --- limits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("method", ["hold", "hold_async"])
@pytest.mark.asyncio
async def test_methods_run_at_once_up_to_the_limit(x, journal, door, limit, method):
    """On the host: calls of several channels are sent, and the instance's gate is there."""
    cls = colocated_python_class(Counter, max_concurrency=limit)
    async with cls(0, journal) as counter:

        async def use() -> None:
            async with open_task_channel():
                await getattr(counter, method)(x, door)

        tasks = [asyncio.create_task(use()) for _ in range(3)]
        await journal.wait_for("start", limit)
        await asyncio.sleep(0.05)
        assert journal.events.count("start") == limit
        door.open()
        await asyncio.gather(*tasks)
        inside = most = 0
        for event in journal.events:
            inside += {"start": 1, "end": -1}.get(event, 0)
            most = max(most, inside)
        assert most == limit


@pytest.mark.asyncio
async def test_dedicated_thread_runs_everything(hosts, x):
    class Database:
        def __init__(self) -> None:
            self.connection = sqlite3.connect(":memory:")
            self.connection.execute("create table t (x)")

        def insert(self, x: Any) -> int:
            self.connection.execute("insert into t values (?)", (float(x.sum()),))
            return int(self.connection.execute("select count(*) from t").fetchone()[0])

        def close(self) -> None:
            self.connection.close()

    cls = colocated_python_class(Database, dedicated_thread=True)
    async with cls() as database:
        assert await gather(*[database.insert(x) for _ in range(3)]) == [1, 2, 3]


@pytest.mark.asyncio
async def test_calls_of_a_task_are_pipelined_in_order(x):
    async with ColocatedCounter() as counter:
        futures = [counter.add(x) for _ in range(50)]
        assert [await f for f in futures] == [3 * (i + 1) for i in range(50)]


# --- closing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Counter, AsyncClosing])
@pytest.mark.asyncio
async def test_closing_waits_for_the_calls_taken(x, journal, door, cls):
    obj = colocated_python_class(cls)(0, journal)
    held = obj.hold(x, door)
    queued = obj.add(x)
    closer = asyncio.create_task(obj.aclose())
    await asyncio.sleep(0)
    await journal.wait_for("start")
    with pytest.raises(ObjectClosedError):
        obj.add(x)
    assert not closer.done()
    door.open()
    await closer
    await obj.aclose()
    await held
    assert await queued == 3
    expected = ["closed"] if cls is Counter else ["closing", "closed"]
    assert journal.events == ["made", "start", "end", *expected, "destroyed"]
    assert repr(obj) == f"<colocated {cls.__qualname__} closed calls=0>"


@pytest.mark.asyncio
async def test_object_that_was_never_used_closes_at_no_cost(hosts, journal):
    obj = ColocatedCounter(0, journal)
    await obj.aclose()
    assert journal.events == []


@pytest.mark.asyncio
async def test_async_with_enters_and_leaves_on_the_host(hosts, journal):
    cls = colocated_python_class(Entered, devices=hosts[0].devices[:1])
    async with cls(0, journal) as obj:
        assert await obj.get() == 0
        raise KeyError("suppressed")
    assert journal.of(hosts[0].pid) == [
        "made",
        "entered",
        "left by KeyError",
        "closed",
        "destroyed",
    ]


@pytest.mark.asyncio
async def test_error_of_closing_is_raised_once(x, journal):
    obj = colocated_python_class(FailsToClose)(0, journal)
    await obj.add(x)
    with pytest.raises(OSError, match="disk of"):
        await obj.aclose()
    await obj.aclose()
    assert journal.events == ["made", "closed", "destroyed"]


@pytest.mark.parametrize("cls", [Counter, AsyncClosing])
@pytest.mark.asyncio
async def test_dropping_the_last_reference_closes_in_the_background(x, journal, cls):
    obj = colocated_python_class(cls)(0, journal)
    last = obj.add(x)
    del obj
    await journal.wait_for("destroyed")
    assert await last == 3
    assert "closed" in journal.events


@pytest.mark.asyncio
async def test_cancelled_call_of_a_coroutine_is_cancelled_on_the_host(x, journal, door):
    async with ColocatedCounter(0, journal) as counter:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await counter.hold_async(x, door)
        assert journal.events == ["made", "start", "end"]
        assert await counter.add(x) == 3


@pytest.mark.asyncio
async def test_hundreds_of_dropped_objects_leave_nothing_on_the_host(hosts, x):
    cls = colocated_python_class(Counted)
    alive = counted_alive.specialize(devices=hosts[0].devices[:1])
    before = await alive()
    for _ in range(5):
        objects = [cls() for _ in range(60)]
        await gather(*[obj.touch(x) for obj in objects])
        del objects
    gc.collect()
    async with asyncio.timeout(20):
        while await alive() > before:
            await asyncio.sleep(0.01)


# --- in bodies ------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_bodies_use_colocated_things_on_their_own_host(hosts):
    for host in hosts:
        use = uses_others.specialize(devices=host.devices[:1])
        assert await use(3) == (3.0, [0.0, 3.0, 6.0], 8)


@pytest.mark.asyncio
async def test_body_captures_colocated_things_that_cannot_be_imported(hosts):
    @colocated_python
    def double(x: Any) -> Any:
        return 2 * x

    @colocated_python_class(devices=hosts[1].devices[:1], max_concurrency=2)
    class Local:
        def add(self, x: Any) -> float:
            return float(x.sum()) + 0.5

    @colocated_python
    def numbers(x: Any) -> Any:
        yield float(x.sum())

    @colocated_python
    async def body() -> Any:
        x = jax.device_put(np.ones(2, np.float32), jax.local_devices()[0])
        async with Local() as local:
            total = await local.add(double(x))
        return total, [i async for i in numbers(x)]

    assert await body.specialize(devices=hosts[1].devices[:1])() == (4.5, [2.0])


@pytest.mark.asyncio
async def test_class_may_use_its_own_colocated_class(x):
    """On the host it is known while it is still being unpickled."""

    @colocated_python_class
    class Node:
        def __init__(self, depth: int) -> None:
            self.depth = depth

        def count(self, x: Any) -> int:
            return 1 + (Node(self.depth - 1).count(x).result() if self.depth else 0)

    @colocated_python
    def body(x: Any) -> int:
        return Node(1).count(x).result()

    assert await body(x) == 2
    async with Node(3) as node:
        assert await node.count(x) == 4


@pytest.mark.asyncio
async def test_object_itself_is_not_shipped(x, hosts):
    async with ColocatedCounter() as counter:

        @colocated_python
        def body(x: Any) -> Any:
            return counter

        with pytest.raises(Exception, match="stays"):
            await body(x)


# --- lost hosts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recreate", [False, True])
def test_object_on_a_lost_host_says_so_or_is_made_anew(tmp_path, recreate):
    journal = Journal(tmp_path / "journal")

    async def main(hosts: Any) -> None:
        where = hosts[0].devices[:1]
        cls = colocated_python_class(Counter, devices=where, recreate=recreate)
        obj = cls(3, journal)
        x = await ones.specialize(devices=where)(2)
        assert await obj.add(x) == 5
        assert hosts[0].pid is not None
        os.kill(hosts[0].pid, 9)
        with pytest.raises(HostLostError, match=r"host-0 .*was lost"):
            while True:
                await obj.get()
        await hosts.restart(0)
        if recreate:
            assert await obj.get() == 3
        else:
            with pytest.raises(HostLostError, match="recreate=True"):
                await obj.get()
        await obj.aclose()
        assert journal.events.count("closed") == recreate

    with open_hosts("processes", n=1, cpu_devices=1) as hosts:
        asyncio.run(main(hosts))


def test_exit_closes_objects_on_hosts(run_script, tmp_path):
    """Also those that were not closed before their hosts."""
    journal = Journal(tmp_path / "journal")
    script = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from host_bodies import Journal, colocated_counter, ones
        from aiocolocated import open_hosts

        if __name__ == "__main__":
            hosts = open_hosts("processes", n=1)
            hosts.__enter__()
            counter = colocated_counter(1, Journal(Path({str(journal.path)!r})))
            x = ones.specialize(devices=hosts.devices)(2).result()
            print(counter.add(x).result())
    """
    assert run_script(script, timeout=60).check().stdout == "3\n"
    assert journal.events == ["made", "closed", "destroyed"]
