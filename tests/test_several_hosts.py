# SPDX-License-Identifier: Apache-2.0
"""Calls over several host processes: one result of many, errors of several, and what each host sees."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from host_bodies import Door, Journal
from jax.sharding import NamedSharding, PartitionSpec as P

from aiocolocated import (
    ChannelStoppedError,
    HostError,
    Hosts,
    SpecError,
    TaskChannel,
    WouldBlock,
    as_completed,
    colocated_python,
    device_get,
    device_put,
    gather,
    on_each_host,
    one_device_per_host,
    open_hosts,
    open_task_channel,
    runtime,
    wait_until_ready,
)

pytest.importorskip("zmq")
pytestmark = [pytest.mark.timeout(60), pytest.mark.asyncio]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with open_hosts("processes", n=3, cpu_devices=2) as opened:
        yield opened


@colocated_python
def host_index() -> int:
    return jax.process_index()


@colocated_python
def same(x: Any) -> Any:
    return x


@colocated_python
def describe(x: jax.Array) -> tuple[int, list[tuple[int, ...]], list[float]]:
    shards = x.addressable_shards
    return (
        jax.process_index(),
        [s.data.shape for s in shards],
        [float(s.data.sum()) for s in shards],
    )


@colocated_python
def fail_on(*wrong: int) -> int:
    if (index := jax.process_index()) in wrong:
        raise KeyError(f"host {index}")
    return 1


# --- one result of many -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [("list", [0, 1, 2]), ("any", True), ("all", False), (sum, 3), (max, 2)],
)
async def test_reducers(hosts: Hosts, reduce: Any, expected: Any) -> None:
    """One result of what the body gave on every host, in the order of the hosts."""
    ask = host_index.specialize(devices=one_device_per_host(hosts), reduce=reduce)
    assert await ask() == expected


async def test_intersection_and_equality(hosts: Hosts) -> None:
    """Sets are intersected; 'equal' wants the same of each."""

    @colocated_python
    def steps() -> set[int]:
        return {1, 2, 3 + jax.process_index()}

    everywhere = one_device_per_host(hosts)
    assert await steps.specialize(devices=everywhere, reduce="intersection")() == {1, 2}
    assert await same.specialize(devices=everywhere, reduce="equal")(5) == 5
    with pytest.raises(SpecError, match="the hosts gave different results: 0 on the first"):
        await host_index.specialize(devices=everywhere, reduce="equal")()


async def test_different_results_are_refused_without_a_reducer(hosts: Hosts) -> None:
    """A result of several hosts is one result, unless it is said how to make one."""
    ask = host_index.specialize(devices=one_device_per_host(hosts))
    with pytest.raises(
        SpecError, match=r"host_index returned different results on host-0 and host-1"
    ):
        await ask()
    assert await same.specialize(devices=hosts.devices)({"a": [1, "b"]}) == {"a": [1, "b"]}


async def test_reducers_of_local_arrays(hosts: Hosts) -> None:
    """With 'list' the arrays of each host stay there, each with its own sharding."""

    @colocated_python
    def local() -> np.ndarray:
        import jax.numpy as jnp

        return jnp.full(2, jax.process_index(), "float32", device=jax.local_devices()[1])

    made = await local.specialize(devices=one_device_per_host(hosts), reduce="list")()
    assert [x.sharding.device_set for x in made] == [{h.devices[1]} for h in hosts]
    assert [v.tolist() for v in await device_get(made)] == [[0, 0], [1, 1], [2, 2]]
    assert await same(made[2]) is not None  # goes to that host alone


async def test_a_reducer_in_this_process() -> None:
    """The same program runs where there is one host only."""
    device = jax.devices()[0]
    assert await host_index.specialize(devices=device, reduce="list")() == [0]
    with pytest.raises(SpecError, match="reduce must be one of 'equal', 'list'"):
        host_index.specialize(reduce="most")  # type: ignore[arg-type]


async def test_on_each_host(hosts: Hosts) -> None:
    """A call for each host, each with an outcome of its own."""
    assert await gather(*on_each_host(host_index, hosts)) == [0, 1, 2]
    seen = set()
    async for future in as_completed(on_each_host(same, hosts.mesh((6,), ("x",)), 7)):
        seen.add(await future)
    assert seen == {7}
    outcomes = await gather(*on_each_host(fail_on, hosts, 1), return_exceptions=True)
    assert outcomes[::2] == [1, 1]
    assert isinstance(outcomes[1], KeyError)
    assert [d.process_index for d in one_device_per_host(jax.devices())] == [0]


async def test_map_spreads_over_hosts(hosts: Hosts) -> None:
    """Every call goes to the host with the fewest under way; results keep their order."""

    @colocated_python
    def work(n: int) -> tuple[int, int]:
        time.sleep(0.3 if n == 0 else 0.01)
        return n, jax.process_index()

    results = await work.map(range(12), devices=hosts, limit=3)
    assert [n for n, _ in results] == list(range(12))
    counts = [[i for _, i in results].count(index) for index in range(3)]
    assert counts[results[0][1]] == 1  # the slow one kept its host busy
    assert sum(counts) == 12
    here = await work.map(range(3), devices=jax.devices()[:2])
    assert [i for _, i in here] == [0, 0, 0]


# --- errors -----------------------------------------------------------------------------------------


async def test_error_of_one_host(hosts: Hosts) -> None:
    """It arrives as itself, and says where it comes from."""
    with pytest.raises(KeyError, match="host 1") as caught:
        await fail_on.specialize(devices=hosts.devices)(1)
    assert "on host-1" in str(caught.value.__cause__)
    assert any("fail_on" in note and __file__ in note for note in caught.value.__notes__)


async def test_errors_of_two_hosts(hosts: Hosts) -> None:
    """They arrive as a group, one for each host."""
    with pytest.raises(ExceptionGroup, match="failed on 2 hosts") as caught:
        await fail_on.specialize(devices=hosts.devices)(0, 2)
    assert sorted(str(e) for e in caught.value.exceptions) == ["'host 0'", "'host 2'"]


async def test_error_while_another_host_is_busy(hosts: Hosts) -> None:
    """A call that has failed on one host does not wait for the others for ever."""

    @colocated_python
    def fail_or_sleep() -> None:
        if jax.process_index() == 0:
            raise KeyError("early")
        time.sleep(3)

    started = time.monotonic()
    with pytest.raises(KeyError, match="early") as caught:
        await fail_or_sleep.specialize(devices=one_device_per_host(hosts)[:2])()
    assert time.monotonic() - started < 2.5
    assert any("host-1 had not answered yet" in note for note in caught.value.__notes__)
    while runtime.calls():  # the other body still runs
        await asyncio.sleep(0.02)


# --- what each host sees ----------------------------------------------------------------------------


async def test_every_host_sees_its_own_shards(hosts: Hosts) -> None:
    """A body gets the global array, with the shards of its host's devices."""
    mesh = hosts.mesh((3, 2), ("host", "x"))
    value = np.arange(24, dtype=np.float32).reshape(6, 4)
    x = await device_put(value, NamedSharding(mesh, P("host", "x")))
    seen = await describe.specialize(reduce="list")(x)
    for index, (host, shapes, sums) in enumerate(seen):
        own = value[2 * index : 2 * index + 2]
        assert host == index
        assert shapes == [(2, 2), (2, 2)]
        assert sums == [float(own[:, :2].sum()), float(own[:, 2:].sum())]


async def test_a_global_array_made_on_the_hosts(hosts: Hosts) -> None:
    """What the bodies put together is one array; the controller has a handle of it."""
    mesh = hosts.mesh((6,), ("x",))

    @colocated_python
    def make(mesh: Any) -> jax.Array:
        return jax.make_array_from_callback(
            (12,), NamedSharding(mesh, P("x")), lambda index: np.arange(12, dtype=np.int32)[index]
        )

    x = await make.specialize(devices=mesh)(mesh)
    assert x.shape == (12,)
    assert x.sharding == NamedSharding(mesh, P("x"))
    assert x.addressable_shards == []
    np.testing.assert_array_equal(await device_get(x), np.arange(12))


async def test_numpy_arguments_are_replicated(hosts: Hosts) -> None:
    """As in one process: over all devices of the call."""
    seen = await describe.specialize(devices=hosts.devices, reduce="list")(np.ones(3, np.float32))
    assert seen == [(i, [(3,), (3,)], [3.0, 3.0]) for i in range(3)]


# --- handles ----------------------------------------------------------------------------------------


async def test_handles_of_arrays_that_are_still_computing(hosts: Hosts) -> None:
    """`wait_dispatched` gives handles early; waiting for those waits for the arrays."""

    @colocated_python
    def compute(x: jax.Array) -> jax.Array:
        for _ in range(60):
            x = x @ x / 100
        return x

    x = await device_put(np.ones((400, 400), np.float32), hosts.devices[0])
    await compute(x)  # compiled
    future = compute(x)
    y = await future.wait_dispatched()
    await wait_until_ready(y)
    assert future.done()


async def test_computing_on_a_handle_raises(hosts: Hosts) -> None:
    """JAX refuses; inside the library the error says what to do."""
    x = await device_put(np.ones(3, np.float32), hosts.devices[0])
    with pytest.raises(jax.errors.JaxRuntimeError):
        x + 1
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        await TaskChannel().run(jax.jit(lambda x: x + 1), x)
    assert any("device_get" in note for note in caught.value.__notes__)


async def test_handles_that_others_made_are_refused(hosts: Hosts) -> None:
    """JAX makes arrays of other processes' devices without data; no host has them."""
    phantom = jax.device_put(np.ones(3, np.float32), hosts.devices[0])
    with pytest.raises(HostError, match="was not made by the library"):
        await same(phantom)
    x = await device_put(np.ones(3, np.float32), hosts.devices[0])
    with pytest.raises(
        SpecError, match=r"\[device \d+ of host-0\] and devices= on \[device \d+ of host-1\]"
    ):
        await same.specialize(devices=hosts.devices[2])(x)
    with pytest.raises(HostError, match=r"of host-0 was passed to a call on host-1.*device_put"):
        await same.specialize(devices=hosts.devices[2])(_Box(x))


class _Box:
    """No tree, so that nothing looks into it before it is sent."""

    def __init__(self, content: Any) -> None:
        self.content = content


async def test_handles_inside_of_other_objects(hosts: Hosts) -> None:
    """They arrive as arrays, and come back as handles."""
    x = await device_put(np.ones(3, np.float32), hosts.devices[0])

    @colocated_python
    def double(box: Any) -> Any:
        box.content = box.content * 2
        return box

    box = await double.specialize(devices=hosts.devices[0])(_Box(x))
    assert type(box) is _Box
    assert (await device_get(box.content)).tolist() == [2, 2, 2]


# --- channels ---------------------------------------------------------------------------------------


async def test_a_channel_that_stops(hosts: Hosts) -> None:
    """Calls that were sent ahead stop, too, and say which failure it was."""
    channel = TaskChannel("strict", on_error="stop")
    run = fail_on.specialize(devices=hosts.devices[0])
    nap = colocated_python(time.sleep).specialize(devices=hosts.devices[0])
    channel.submit_nowait(nap, 0.3)
    futures = [channel.submit_nowait(run, *wrong) for wrong in ((), (0,), (), ())]
    assert await futures[0] == 1
    with pytest.raises(KeyError):
        await futures[1]
    for future in futures[2:]:
        with pytest.raises(ChannelStoppedError, match="channel 'strict'") as caught:
            await future
        assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(ChannelStoppedError):
        channel.submit_nowait(run)


async def test_statistics_of_calls_that_were_sent_ahead(hosts: Hosts, tmp_path: Path) -> None:
    """The first of them runs and the others are queued, as with calls that run here."""
    door, journal = Door(tmp_path / "door"), Journal(tmp_path / "journal")

    def body(door: Door, journal: Journal) -> None:
        journal.note("begun")
        door.wait()

    channel = TaskChannel("busy", max_pending=4)
    wait = colocated_python(body).specialize(devices=hosts.devices[0])
    futures = [channel.submit_nowait(wait, door, journal)]
    await journal.wait_for("begun")
    futures += [channel.submit_nowait(wait, door, journal) for _ in range(4)]
    while not all(future._sent for future in futures):
        await asyncio.sleep(0)
    busy, shown = channel.statistics(), repr(channel)
    with pytest.raises(WouldBlock) as full:
        channel.submit_nowait(wait, door, journal)
    door.open()
    await gather(*futures)
    assert (busy.running, busy.queued, busy.submitted) == (1, 4, 5)
    assert "queued=4" in shown
    assert "full: 4 calls are queued" in str(full.value)
    over = channel.statistics()
    assert (over.running, over.queued, over.submitted) == (0, 0, 5)


async def test_a_channel_with_a_thread_of_its_own(hosts: Hosts) -> None:
    """All its bodies run on one thread of the host."""

    @colocated_python
    def thread() -> str:
        import threading

        return threading.current_thread().name

    there = thread.specialize(devices=hosts.devices[0])
    async with open_task_channel("own", dedicated_thread=True):
        assert {await there() for _ in range(5)} == {"aiocolocated-channel-own"}
    assert (await there()).startswith("aiocolocated-worker")


async def test_calls_of_a_channel_that_go_to_several_hosts(hosts: Hosts) -> None:
    """They start in order, whichever host each goes to; what is here waits for what is there."""
    here = same.specialize(devices=jax.devices()[0])
    channel = TaskChannel()

    @colocated_python
    def nap(seconds: float) -> float:
        started = time.time()
        time.sleep(seconds)
        return started

    @colocated_python
    def now() -> float:
        return time.time()

    first = channel.submit_nowait(nap.specialize(devices=hosts.devices[0]), 0.2)
    second = channel.submit_nowait(now.specialize(devices=hosts.devices[2]))
    third = channel.submit_nowait(now.specialize(devices=jax.devices()[0]))
    fourth = channel.submit_nowait(here, 4)
    began = await first
    assert began + 0.2 <= await second <= await third
    assert await fourth == 4


async def test_calls_in_flight_are_listed(hosts: Hosts) -> None:
    """`runtime.calls()` says that a call was sent, and to which host."""
    nap = colocated_python(time.sleep)
    future = nap.specialize(devices=hosts.devices[2])(0.3)
    await asyncio.sleep(0.1)
    (info,) = runtime.calls()
    assert (info.function, info.host, info.state) == ("sleep", "host-1", "sent")
    await future


# --- misuse -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"name": 5},
        {"launcher": "ssh"},
        {"interface": None},
        {"environment": "abc"},
        {"collectives": "yes"},
    ],
)
async def test_options_of_a_wrong_type(options: dict[str, Any]) -> None:
    """Refused where they are given."""
    with pytest.raises(TypeError, match=next(iter(options))):
        open_hosts("processes", **options)


async def test_hosts_in_place_of_devices(hosts: Hosts) -> None:
    """They stand for their devices; what there is not, is refused with what there is."""
    assert await same.specialize(devices=hosts[1])(3) == 3
    assert await same.specialize(devices=hosts)("x") == "x"
    with pytest.raises(IndexError, match="there are 3: host-0, host-1, host-2"):
        hosts[3]
    with pytest.raises(ValueError, match="does not fit 6 devices"):
        hosts.mesh((4,), ("x",))


async def test_an_interrupt_does_not_end_a_host(hosts: Hosts) -> None:
    """Its controller does."""

    @colocated_python
    def interrupt() -> None:
        import os
        import signal

        os.kill(os.getpid(), signal.SIGINT)

    there = interrupt.specialize(devices=hosts[2])
    await there()
    await there()
    assert await host_index.specialize(devices=hosts[2])() == 2
