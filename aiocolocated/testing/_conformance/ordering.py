# SPDX-License-Identifier: Apache-2.0
"""Order in channels, concurrency of channels, groups, futures as arguments."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aiocolocated import (
    ArgumentError,
    CallCancelledError,
    ChannelClosedError,
    ChannelStoppedError,
    TaskChannel,
    TaskGroup,
    WouldBlock,
    as_argument,
    as_completed,
    colocated_python,
    device_get,
    device_put,
    gather,
    open_task_channel,
    runtime,
)
from aiocolocated.testing._conformance import bodies
from aiocolocated.testing._conformance.base import HostsUnderTest, Suite


class Channels(Suite):
    """A channel is one lane, channels are many."""

    async def test_calls_of_a_channel_run_in_order(self, hosts: HostsUnderTest, key: str) -> None:
        """Whatever they run, and in whatever order they are awaited."""
        note, again = hosts.on(bodies.note), hosts.on(lambda key, i: bodies.note(key, i))
        futures = [(note, again)[i % 2](key, i) for i in range(60)]
        assert await futures[-1] == 59
        assert await gather(*reversed(futures)) == list(reversed(range(60)))
        assert await hosts.notes(key) == list(range(60))

    async def test_plain_and_coroutine_bodies_share_the_order(
        self, hosts: HostsUnderTest, key: str
    ) -> None:
        """A coroutine that waits keeps what is behind it in the channel waiting."""

        async def note_late(key: str, i: int) -> int:
            await asyncio.sleep(0.002)
            return int(bodies.note(key, i))

        plain, late = hosts.on(bodies.note), hosts.on(note_late)
        await gather(*[(late, plain)[i % 2](key, i) for i in range(20)])
        assert await hosts.notes(key) == list(range(20))

    async def test_order_holds_across_devices_and_hosts(
        self, hosts: HostsUnderTest, key: str
    ) -> None:
        """A call on another device or host waits for the one before it in its channel."""
        other = hosts.devices[-1][-1]
        first = hosts.on(bodies.hold)(key)
        second = colocated_python(bodies.note).specialize(devices=other)(key, "second")
        await hosts.held(key)
        last = len(hosts.devices) - 1
        assert "second" not in await hosts.notes(key, host=last)
        assert not second.dispatched()
        await hosts.release(key)
        assert await gather(first, second) == [None, "second"]
        assert (await hosts.notes(key, host=last))[-1] == "second"

    async def test_tasks_run_at_once(self, hosts: HostsUnderTest, key: str) -> None:
        """Each task has a channel of its own."""
        meet = hosts.on(bodies.meet)

        async def task(i: int) -> int:
            return int(await meet(key, 4, i))

        assert await asyncio.gather(*(task(i) for i in range(4))) == [0, 1, 2, 3]

    async def test_hosts_run_at_once(self, hosts: HostsUnderTest, key: str) -> None:
        """A host that is held keeps no other one."""
        first = hosts.aside(bodies.hold, key)
        last = len(hosts.devices) - 1
        await hosts.held(key)
        assert await hosts.aside(bodies.same, 3, host=last) == 3
        await hosts.release(key)
        await first

    async def test_gather_does_not_make_calls_of_a_task_overlap(
        self, hosts: HostsUnderTest, key: str
    ) -> None:
        """They are in one channel."""
        count = hosts.on(bodies.count_at_once)
        assert set(await gather(*(count(key) for _ in range(5)))) == {1}
        assert set(await asyncio.gather(*(count(key) for _ in range(5)))) == {1}

    async def test_open_task_channel_is_the_current_one(
        self, hosts: HostsUnderTest, key: str
    ) -> None:
        """Calls in its block take their places there, and leaving waits for them."""
        note = hosts.on(bodies.note)
        async with open_task_channel("lane") as channel:
            for i in range(10):
                note(key, i)
            await channel.drain()
            assert await hosts.notes(key) == list(range(10))
            note(key, 10)
            statistics = channel.statistics()
            assert (statistics.submitted, statistics.name) == (11, "lane")
        assert await hosts.notes(key) == list(range(11))
        with pytest.raises(ChannelClosedError):
            channel.submit_nowait(note, key, 11)

    async def test_bounded_channel_refuses_and_lets_wait(
        self, hosts: HostsUnderTest, key: str
    ) -> None:
        """``submit_nowait`` raises at ``max_pending``, ``submit`` waits for room."""
        hold, same = hosts.on(bodies.hold), hosts.on(bodies.same)
        channel = TaskChannel(max_pending=2)
        first = channel.submit_nowait(hold, key)
        await hosts.held(key)
        futures = []
        with pytest.raises(WouldBlock):
            for i in range(100):
                futures.append(channel.submit_nowait(same, i))  # noqa: PERF401
        submitting = asyncio.create_task(channel.submit(same, "late"))
        await asyncio.sleep(0)
        assert channel.statistics().queued <= 2
        assert not submitting.done()
        await hosts.release(key)
        assert await (await submitting) == "late"
        assert await gather(first, *futures) == [None, *range(len(futures))]
        await channel.aclose()

    async def test_stopped_channel_fails_what_is_behind(
        self, hosts: HostsUnderTest, key: str
    ) -> None:
        """With ``on_error="stop"`` nothing runs after a failed call."""
        channel = TaskChannel("stops", on_error="stop")
        first = channel.submit_nowait(hosts.on(bodies.pass_gate), f"{key}.out")
        failed = channel.submit_nowait(hosts.on(bodies.fail), KeyError("stop"))
        behind = channel.submit_nowait(hosts.on(bodies.note), key, 1)
        await hosts.release(key)
        await first
        with pytest.raises(KeyError, match="stop"):
            await failed
        with pytest.raises(ChannelStoppedError) as caught:
            await behind
        assert isinstance(caught.value.__cause__, KeyError)
        with pytest.raises(ChannelStoppedError):
            await channel.submit_nowait(hosts.on(bodies.note), key, 2)
        assert await hosts.notes(key) == []
        await channel.aclose()

    async def test_failed_call_does_not_stop_others(self, hosts: HostsUnderTest) -> None:
        """By default a channel goes on."""
        fail, same = hosts.on(bodies.fail), hosts.on(bodies.same)
        answers = await gather(
            same(1), fail(KeyError(1)), same(2), fail(OSError(2)), same(3), return_exceptions=True
        )
        assert [type(a) for a in answers] == [int, KeyError, int, OSError, int]

    async def test_closed_channel_has_done_everything(
        self, hosts: HostsUnderTest, key: str
    ) -> None:
        """``aclose`` waits for what was submitted, on every host; twice is fine."""
        channel = TaskChannel("closing")
        notes = [hosts.on(bodies.note, host) for host in range(len(hosts.devices))]
        for i in range(12):
            channel.submit_nowait(notes[i % len(notes)], key, i)
        await channel.aclose()
        seen = [i for host in range(len(notes)) for i in await hosts.notes(key, host)]
        assert sorted(seen) == list(range(12))
        await channel.aclose()
        assert channel.closed
        with pytest.raises(ChannelClosedError):
            channel.submit_nowait(notes[0], key, 12)

    async def test_channel_with_a_thread_of_its_own(self, hosts: HostsUnderTest) -> None:
        """All its bodies run on one thread of a host."""
        channel = TaskChannel("threaded", dedicated_thread=True)
        function = hosts.on(bodies.thread)
        threads = await gather(*(channel.submit_nowait(function) for _ in range(8)))
        assert len(set(threads)) == 1
        await channel.aclose()

    async def test_calls_are_listed(self, hosts: HostsUnderTest, key: str) -> None:
        """``runtime.calls()`` has what runs and what waits, and statistics count it."""
        async with open_task_channel("listed") as channel:
            running = hosts.on(bodies.hold)(key)
            queued = hosts.on(bodies.pass_gate)(f"{key}.out")
            await hosts.held(key)
            found = {call.function: call for call in runtime.calls() if call.channel == "listed"}
            assert set(found) == {"hold", "pass_gate"}
            assert found["hold"].state in ("running", "sent")
            assert found["pass_gate"].state in ("queued", "sent")  # it waits at its host, perhaps
            assert __file__.rsplit("/", 1)[-1] in found["hold"].where
            assert found["hold"].host
            assert channel.statistics().submitted == 2
            await hosts.release(key)
            await gather(running, queued)
        assert all(call.channel != "listed" for call in runtime.calls())

    async def test_many_channels(self, hosts: HostsUnderTest) -> None:
        """Two hundred of them, on all hosts."""
        same = [hosts.on(bodies.same, host) for host in range(len(hosts.devices))]
        futures = [TaskChannel().submit_nowait(same[i % len(same)], i) for i in range(200)]
        assert await gather(*futures) == list(range(200))


class Groups(Suite):
    """What runs several calls at once."""

    async def test_group_starts_calls_at_once(self, hosts: HostsUnderTest, key: str) -> None:
        """And has their results in the order of starting."""
        meet = hosts.on(bodies.meet)
        async with TaskGroup() as group:
            for i in range(5):
                group.start_soon(meet, key, 5, i)
        assert group.results() == list(range(5))

    async def test_group_keeps_its_limit(self, hosts: HostsUnderTest, key: str) -> None:
        """Never more than ``limit`` at once, and as many as that."""
        meet = hosts.on(bodies.meet_and_count)
        async with TaskGroup(limit=2) as group:
            for _ in range(6):
                group.start_soon(meet, key, 2)
        assert max(group.results()) == 2

    async def test_failing_group_cancels_the_others(self, hosts: HostsUnderTest, key: str) -> None:
        """What runs is waited for, what waits never runs."""
        hold, fail, note = (hosts.on(f) for f in (bodies.hold_async, bodies.fail, bodies.note))
        futures = []
        with pytest.raises(BaseExceptionGroup) as caught:
            async with TaskGroup() as group:
                futures.append(group.start_soon(hold, key))
                futures.append(group.start_soon(note, key, as_argument(futures[0])))
                await hosts.held(key)
                group.start_soon(fail, ValueError("no"))
        assert [type(e) for e in caught.value.exceptions] == [ValueError]
        assert [future.cancelled() for future in futures] == [True, True]
        assert await hosts.notes(key) == ["in", "cancelled", "cleaned up"]

    async def test_map_is_at_once_and_in_order(self, hosts: HostsUnderTest, key: str) -> None:
        """Results stand where their items stood."""

        def meet_in(key: str, i: int) -> int:
            return int(bodies.meet(key, 4, i))

        assert await hosts.on(meet_in).map([key] * 8, range(8), limit=4) == list(range(8))

    async def test_as_completed_gives_what_is_done_first(
        self, hosts: HostsUnderTest, key: str
    ) -> None:
        """A call that is held comes last."""
        held = hosts.aside(bodies.hold, key, "held")
        quick = [hosts.aside(bodies.same, i) for i in range(3)]
        found = []
        async for future in as_completed([held, *quick]):
            found.append(await future)
            if len(found) == 3:
                await hosts.release(key)
        assert sorted(found[:3]) == [0, 1, 2]
        assert found[3] == "held"

    async def test_gather_puts_results_in_place(self, hosts: HostsUnderTest) -> None:
        """Of calls in several channels and on several hosts."""
        futures = [hosts.aside(bodies.same, i, host=i % len(hosts.devices)) for i in range(12)]
        assert await gather(*futures) == list(range(12))


class Dependencies(Suite):
    """Futures as arguments."""

    async def test_future_is_replaced_by_its_value(self, hosts: HostsUnderTest) -> None:
        """At any depth, and as often as it is there; arrays and plain values."""
        x = await device_put(np.arange(4, dtype=np.float32), hosts.device)
        early = colocated_python(bodies.add)(x, 1)
        plain = hosts.on(bodies.same)({"n": 5})
        total = hosts.on(bodies.total)
        assert await total(as_argument(early)) == 10.0
        assert await total([early, {"deep": (early, 1)}], more=plain) == 26.0

    async def test_chain_of_futures(self, hosts: HostsUnderTest) -> None:
        """A hundred calls that are submitted before the first one has run."""
        add = colocated_python(bodies.add)
        value = await device_put(np.zeros(3, np.float32), hosts.device)
        for _ in range(100):
            value = add(as_argument(value), 1)
        assert (await device_get(await value)).tolist() == [100.0] * 3

    async def test_future_of_a_coroutine_body(self, hosts: HostsUnderTest) -> None:
        """A plain body takes what a coroutine makes, and the other way round."""
        slow, add = hosts.on(bodies.add_async), hosts.on(bodies.add)
        assert await slow(as_argument(add(as_argument(slow(1, 2)), 3)), 4) == 10

    async def test_future_of_another_channel(self, hosts: HostsUnderTest, key: str) -> None:
        """The call waits for it; the calls behind it wait, too."""
        held = hosts.aside(bodies.hold, key, 7)
        taking = hosts.on(bodies.add)(as_argument(held), 1)
        behind = hosts.on(bodies.note)(key, "behind")
        await hosts.held(key)
        assert await hosts.notes(key) == ["in"]
        assert not taking.done()
        await hosts.release(key)
        assert await gather(taking, behind) == [8, "behind"]
        assert await hosts.notes(key) == ["in", "out", "behind"]

    async def test_future_of_another_host(self, hosts: HostsUnderTest) -> None:
        """Plain values go from host to host."""
        last = len(hosts.devices) - 1
        early = hosts.on(bodies.same)([1, "two"])
        assert await hosts.on(bodies.same, last)({"k": early}) == {"k": [1, "two"]}

    async def test_failed_future_fails_its_dependents(
        self, hosts: HostsUnderTest, key: str
    ) -> None:
        """With the same exception; they never run. It counts as retrieved."""
        failed = hosts.on(bodies.fail)(KeyError("early"))
        chained = hosts.on(bodies.add_noted)(key, as_argument(failed), 1)
        last = hosts.on(bodies.add_noted)(key, as_argument(chained), 2)
        with pytest.raises(KeyError, match="early") as caught:
            await last
        assert caught.value.__notes__[0].startswith("colocated call fail ")
        with pytest.raises(KeyError) as first:
            await failed
        assert first.value is caught.value
        assert await hosts.notes(key) == []

    async def test_cancelled_future_cancels_its_dependents(
        self, hosts: HostsUnderTest, key: str
    ) -> None:
        """They say what they depend on."""
        held = hosts.aside(bodies.hold, key)
        await hosts.held(key)
        early = hosts.on(bodies.pass_gate)(f"{key}.out")
        late = hosts.on(bodies.add_noted)(key, as_argument(early), 1)
        early.cancel()
        with pytest.raises(CallCancelledError, match="it depends on"):
            await late
        await hosts.release(key)
        await held
        assert await hosts.notes(key) == ["in", "out"]

    async def test_cancelled_coroutine_cancels_its_dependents(
        self, hosts: HostsUnderTest, key: str
    ) -> None:
        """Also those that are at its host already, waiting for it."""
        early = hosts.on(bodies.hold_async)(key)
        late = hosts.on(bodies.add_noted)(key, as_argument(early), 1)
        later = hosts.aside(bodies.add_noted, key, as_argument(late), 2)
        await hosts.held(key)
        early.cancel()
        for future in (late, later):
            with pytest.raises(CallCancelledError, match="it depends on"):
                await future
        assert await hosts.on(bodies.notes)(key) == ["in", "cancelled", "cleaned up"]

    async def test_failing_coroutine_fails_its_dependents(self, hosts: HostsUnderTest) -> None:
        """With the very exception, noted once; who caught it may go on."""

        async def fail_late() -> None:
            await asyncio.sleep(0.01)
            raise KeyError("late")

        early = hosts.on(fail_late)()
        late = [hosts.aside(bodies.add, as_argument(early), i) for i in range(5)]
        errors = await gather(early, *late, return_exceptions=True)
        assert len({id(error) for error in errors}) == 1
        assert isinstance(errors[0], KeyError)
        assert len(errors[0].__notes__) == 1

    async def test_body_waits_for_calls_of_its_own(self, hosts: HostsUnderTest) -> None:
        """A colocated function that a body captures runs on its host."""
        inner = hosts.on(bodies.add)

        def outer(n: int) -> int:
            futures = [inner(i, n) for i in range(3)]
            return sum(f.result(bodies.TIMEOUT) for f in futures)

        async def outer_async(n: int) -> int:
            return sum(await gather(*(inner(i, n) for i in range(3))))

        assert await hosts.on(outer)(10) == 33
        assert await hosts.on(outer_async)(10) == 33

    async def test_returned_future_is_refused(self, hosts: HostsUnderTest) -> None:
        """What a body returns has to be there."""
        inner = hosts.on(bodies.same)

        def forget() -> object:
            return [inner(1)]

        with pytest.raises(ArgumentError, match="ArrayFuture"):
            await hosts.on(forget)()
