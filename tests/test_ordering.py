# SPDX-License-Identifier: Apache-2.0
"""Order (contracts C1, C3, C3b): the pure state machine alone, and channels and calls as a whole.

The two rule-based machines drive random histories. The first plays the part of the library around
``_ordering``: submission, workers, completion. The second drives real channels and real calls, whose
bodies wait for orders, and compares everything that can be seen with a model of a page.
"""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import time
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from late_arrays import Late

from aiocolocated import (
    CallCancelledError,
    ChannelStoppedError,
    TaskChannel,
    WouldBlock,
    _submission,
    colocated_python,
    configure,
)
from aiocolocated._ordering import ChannelOrder, Gate, Ticket
from aiocolocated._types import CANCELLED, QUEUED, READY, RUNNING

pytestmark = pytest.mark.timeout(100)


class FakeCall:
    """What an order sees of a call."""

    _light = False

    def __init__(
        self, name: int = 0, *, wide: bool = False, blocked: int = 0, gate: Gate | None = None
    ) -> None:
        self.name = name
        self._state = QUEUED
        self._wide = wide
        self._blocked = blocked
        self._gate = gate

    def __repr__(self) -> str:
        return f"<call {self.name}>"


def new_order(gate: Gate | None = None, **options: Any) -> ChannelOrder:
    return ChannelOrder(gate or Gate(8), **options)


# --- one step at a time ---------------------------------------------------------------------------


def test_push_claims_idle_channel_once():
    """The first call hands the channel to a worker; the next ones find it handed out."""
    order = new_order()
    assert order.push(FakeCall())
    assert not order.push(FakeCall())


def test_next_gives_calls_in_order_then_gives_claim_up():
    """A worker gets the calls first in, first out, and loses the channel when there are no more."""
    order = new_order()
    calls = [FakeCall(i) for i in range(3)]
    for call in calls:
        order.push(call)
    started = []
    while (call := order.next()) is not None:
        started.append(call)
        order.body_ended()
    assert started == calls
    assert not order.claimed
    assert order.idle


def test_blocked_head_holds_its_place():
    """A call with unfinished dependencies keeps the calls behind it waiting, and no claim."""
    order = new_order()
    head, behind = FakeCall(0, blocked=1), FakeCall(1)
    assert not order.push(head)
    assert not order.push(behind)
    assert order.next() is None
    head._blocked = 0
    assert order.claim()
    assert order.next() is head


def test_settled_head_is_skipped():
    """Calls that were cancelled in the queue are passed over and do not count as pending."""
    order = new_order()
    dead, live = FakeCall(0, blocked=1), FakeCall(1)
    order.push(dead)
    order.push(live)
    dead._state = CANCELLED
    order.settled_in_queue()
    assert order.pending == 1
    assert order.claim()
    assert order.next() is live


def test_max_in_flight_holds_next_call_until_computed():
    """With as many calls computing as allowed, the next one starts when one of them is ready."""
    order = new_order(max_in_flight=1)
    first, second = FakeCall(0), FakeCall(1)
    order.push(first)
    order.push(second)
    assert order.next() is first
    order.body_ended()
    order.dispatched()
    assert order.next() is None
    assert not order.idle
    assert order.computed()
    assert order.next() is second


def test_room_is_granted_first_come_first_served():
    """Room goes to the submitters that wait, in their order, and to nobody else before them."""
    order = new_order(max_pending=1)
    order.push(FakeCall(0))
    assert not order.has_room()
    tickets = [Ticket(FakeCall(i), None) for i in (1, 2)]
    for ticket in tickets:
        order.wait_for_room(ticket)
    assert order.admit() is None
    order.next()
    assert not order.has_room()  # there is room, but not for those who come later
    assert order.admit() is tickets[0]
    assert order.admit() is None
    assert order.turn_away() == [tickets[1]]
    assert not order.room


def test_stop_returns_what_will_never_run():
    """Stopping lists the queued calls that are not over."""
    order = new_order(on_error="stop")
    calls = [FakeCall(i) for i in range(3)]
    for call in calls:
        order.push(call)
    calls[1]._state = CANCELLED
    assert order.stop(ValueError()) == [calls[0], calls[2]]


def test_gate_caps_wide_calls_of_all_channels():
    """Beyond the limit a wide call waits, narrow ones of other channels do not."""
    gate = Gate(1)
    first, second, narrow = (new_order(gate) for _ in range(3))
    call = FakeCall(wide=True)
    assert first.push(call)
    assert first.next() is call
    assert not second.push(FakeCall(wide=True))
    assert narrow.push(FakeCall())
    assert narrow.next() is not None
    assert gate.leave(call) == [second]
    assert second.next() is not None


def test_gate_passes_over_channel_that_lost_its_call():
    """A parked channel whose wide call was cancelled does not keep the room from the next one."""
    gate = Gate(1)
    running, lost, waiting = (new_order(gate) for _ in range(3))
    running.push(FakeCall(wide=True))
    call = running.next()
    dead = FakeCall(wide=True)
    lost.push(dead)
    waiting.push(FakeCall(wide=True))
    dead._state = CANCELLED
    lost.settled_in_queue()
    assert gate.leave(call) == [waiting]


def test_gate_passes_over_channel_with_narrow_call_in_front():
    """A parked channel that goes on with a narrow call does not use up the room either."""
    gate = Gate(1)
    running, changed, waiting = (new_order(gate) for _ in range(3))
    running.push(FakeCall(wide=True))
    call = running.next()
    dead = FakeCall(wide=True)
    changed.push(dead)
    changed.push(FakeCall())
    waiting.push(FakeCall(wide=True))
    dead._state = CANCELLED
    changed.settled_in_queue()
    assert gate.leave(call) == [changed, waiting]


def test_gate_with_higher_limit_admits_several():
    """After the limit was raised there is room for more than one parked channel at a time."""
    gate = Gate(1)
    running, *parked = (new_order(gate) for _ in range(4))
    running.push(FakeCall(wide=True))
    running.next()
    for order in parked:
        order.push(FakeCall(wide=True))
    gate.limit = 3
    assert gate.admit() == parked[:2]


def test_object_gate_lets_the_channel_in_that_waits_longest():
    """A worker that goes on with its channel does not pass those that wait for the same object."""
    gate = Gate(1)
    served, *waiting = (new_order() for _ in range(3))
    calls = [FakeCall(i, gate=gate) for i in range(2)]
    for call in calls:
        served.push(call)
    assert served.next() is calls[0]
    for order in waiting:
        assert not order.push(FakeCall(gate=gate))
    served.body_ended()
    assert gate.leave(calls[0]) == waiting[:1]
    assert served.next() is None  # although the object is at rest: its next method has a place
    for i, order in enumerate(waiting):
        call = order.next()
        assert call is not None
        order.body_ended()
        assert gate.leave(call) == [*waiting, served][i + 1 : i + 2]
        assert order.next() is None
    assert served.next() is calls[1]


def test_object_gate_holds_other_calls_of_a_channel_back():
    """A method that waits for its object keeps its place in the channel: program order."""
    gate = Gate(1)
    first, second = new_order(), new_order()
    running, method, after = FakeCall(0, gate=gate), FakeCall(1, gate=gate), FakeCall(2)
    first.push(running)
    assert first.next() is running
    assert not second.push(method)
    assert not second.push(after)
    assert gate.leave(running) == [second]
    assert second.next() is method


@pytest.mark.parametrize("then", ["nothing", "a call of no object", "a blocked call"])
def test_object_gate_passes_the_place_of_a_cancelled_call_on(then):
    """A channel that was let in and lost its call does not keep the others out."""
    gate = Gate(1)
    lost, waiting = new_order(), new_order()
    dead = FakeCall(0, gate=gate)
    assert lost.push(dead)  # it has a place now
    if then == "a call of no object":
        lost.push(FakeCall(1))
    elif then == "a blocked call":
        lost.push(FakeCall(1, gate=gate, blocked=1))
    assert not waiting.push(FakeCall(2, gate=gate))
    dead._state = CANCELLED
    lost.settled_in_queue()
    assert gate.admit() == [waiting]
    assert waiting.next() is not None


def test_object_gate_lets_in_as_many_as_its_limit():
    """With room for two, the third waits, whichever of the two leaves."""
    gate = Gate(2)
    orders = [new_order() for _ in range(4)]
    calls = [FakeCall(i, gate=gate) for i in range(4)]
    assert [order.push(call) for order, call in zip(orders, calls, strict=True)] == [
        *(True, True, False, False)
    ]
    assert [order.next() for order in orders[:2]] == calls[:2]
    assert gate.leave(calls[1]) == [orders[2]]
    assert gate.leave(calls[0]) == [orders[3]]
    assert [order.next() for order in orders[2:]] == calls[2:]


# --- random histories of the orders alone ----------------------------------------------------------


@dataclasses.dataclass
class Lane:
    """A model of one channel: what the order should do next."""

    order: ChannelOrder
    max_pending: int | None
    max_in_flight: int
    waiting: list[Ticket] = dataclasses.field(default_factory=list)
    live: list[FakeCall] = dataclasses.field(default_factory=list)
    running: FakeCall | None = None
    computing: list[FakeCall] = dataclasses.field(default_factory=list)
    handed_out: bool = False


def any_lane(chosen):
    """A rule applies while it can be said of any channel."""
    return precondition(lambda self: any(chosen(lane) for lane in self.lanes))


class OrderMachine(RuleBasedStateMachine):
    """Four channels, their gate and those of two objects, in random hands."""

    @initialize(data=st.data())
    def open(self, data):
        self.gate = Gate(data.draw(st.integers(1, 2), "gate limit"))
        self.objects = [Gate(data.draw(st.integers(1, 2), "max_concurrency")) for _ in range(2)]
        self.lanes = []
        for _ in range(4):
            pending = data.draw(st.sampled_from([None, 1, 2]), "max_pending")
            in_flight = data.draw(st.integers(1, 2), "max_in_flight")
            order = ChannelOrder(self.gate, max_pending=pending, max_in_flight=in_flight)
            self.lanes.append(Lane(order, pending, in_flight))
        self.by_order = {id(lane.order): lane for lane in self.lanes}
        self.count = 0

    def lane(self, data, chosen=lambda lane: True):
        return data.draw(st.sampled_from([x for x in self.lanes if chosen(x)]), "lane")

    def hand_out(self, lane):
        assert not lane.handed_out
        lane.handed_out = True

    def admit(self, lane):
        order = lane.order
        while (ticket := order.admit()) is not None:
            assert ticket is lane.waiting.pop(0)
            lane.live.append(ticket.call)
        if order.claim():
            self.hand_out(lane)

    def leave(self, gate, call):
        for order in gate.leave(call):
            self.hand_out(self.by_order[id(order)])

    def gates(self, lane, call):
        """What a call in a channel goes through."""
        wide = call._wide or lane.order.wide
        return [gate for gate in (call._gate, self.gate if wide else None) if gate is not None]

    @rule(
        data=st.data(),
        wide=st.sampled_from([True, False]),
        blocked=st.sampled_from([0, 0, 0, 1]),
        method_of=st.sampled_from([None, 0, 0, 1]),
    )
    def submit(self, data, wide, blocked, method_of):
        gate = None if method_of is None else self.objects[method_of]
        call = FakeCall(self.count, wide=wide, blocked=blocked, gate=gate)
        lane = self.lane(data)
        self.count += 1
        order = lane.order
        full = lane.max_pending is not None and len(lane.live) >= lane.max_pending
        assert order.has_room() == (not full and not lane.waiting)
        if order.has_room():
            lane.live.append(call)
            if order.push(call):
                self.hand_out(lane)
        else:
            ticket = Ticket(call, None)
            lane.waiting.append(ticket)
            order.wait_for_room(ticket)

    @any_lane(lambda lane: lane.handed_out and lane.running is None)
    @rule(data=st.data())
    def work(self, data):
        lane = self.lane(data, lambda x: x.handed_out and x.running is None)
        held = [(gate, len(gate.holders)) for gate in (self.gate, *self.objects)]
        places = [gate for gate, _ in held if lane.order in gate.places]
        call = lane.order.next()
        if call is None:
            lane.handed_out = False
        else:
            assert call is lane.live.pop(0), "a call overtook another"
            assert not call._blocked
            assert len(lane.computing) < lane.max_in_flight
            for gate, holders in held:
                if gate in self.gates(lane, call):
                    assert holders < gate.limit
                    if gate not in places:
                        assert not any(o.needs(gate) for o in gate.parked), "others came first"
            call._state = RUNNING
            lane.running = call
            self.admit(lane)

    @any_lane(lambda lane: lane.running is not None)
    @rule(data=st.data(), late=st.booleans(), turned_out_wide=st.booleans())
    def end_body(self, data, late, turned_out_wide):
        lane = self.lane(data, lambda x: x.running is not None)
        order = lane.order
        call, lane.running = lane.running, None
        order.body_ended()
        call._state = READY
        if call._gate is not None:
            self.leave(call._gate, call)
        if late:
            order.dispatched()
            lane.computing.append(call)
            if turned_out_wide and not call._wide and self.gate.has_room(order):
                call._wide = order.wide = True
                self.gate.enter(call, order)
        elif call._wide:
            self.leave(self.gate, call)

    @any_lane(lambda lane: lane.computing)
    @rule(data=st.data())
    def compute(self, data):
        lane = self.lane(data, lambda x: x.computing)
        call = data.draw(st.sampled_from(lane.computing), "call")
        lane.computing.remove(call)
        if lane.order.computed():
            self.hand_out(lane)
        if call._wide:
            self.leave(self.gate, call)

    @any_lane(lambda lane: any(c._blocked for c in lane.live))
    @rule(data=st.data())
    def unblock(self, data):
        lane = self.lane(data, lambda x: any(c._blocked for c in x.live))
        call = data.draw(st.sampled_from([c for c in lane.live if c._blocked]), "call")
        call._blocked = 0
        if lane.order.claim():
            self.hand_out(lane)

    @any_lane(lambda lane: lane.live)
    @rule(data=st.data())
    def cancel(self, data):
        lane = self.lane(data, lambda x: x.live)
        call = data.draw(st.sampled_from(lane.live), "call")
        lane.live.remove(call)
        call._state = CANCELLED
        lane.order.settled_in_queue()
        self.admit(lane)
        for gate in (self.gate, call._gate):
            for order in gate.admit() if gate is not None else ():
                self.hand_out(self.by_order[id(order)])

    @any_lane(lambda lane: lane.waiting)
    @rule(data=st.data())
    def give_up(self, data):
        lane = self.lane(data, lambda x: x.waiting)
        ticket = data.draw(st.sampled_from(lane.waiting), "ticket")
        lane.waiting.remove(ticket)
        lane.order.room.remove(ticket)

    @invariant()
    def agrees(self):
        for lane in getattr(self, "lanes", ()):
            order = lane.order
            assert order.claimed == lane.handed_out
            assert order.running is lane.running
            assert order.pending == len(lane.live)
            assert order.in_flight == len(lane.computing)
            assert list(order.room or ()) == lane.waiting
            assert lane.max_pending is None or order.pending <= lane.max_pending
            assert order.idle == (not (lane.live or lane.running or lane.computing or lane.waiting))
        if hasattr(self, "gate"):
            wide = {c for x in self.lanes for c in (x.running, *x.computing) if c and c._wide}
            assert self.gate.holders == wide
            assert len(wide) <= self.gate.limit
            running = [x.running for x in self.lanes if x.running is not None]
            for gate in self.objects:
                assert gate.holders == {c for c in running if c._gate is gate}
                assert len(gate.holders) <= gate.limit

    @invariant()
    def nothing_is_forgotten(self):
        """A channel that could start a call is in a worker's hands, unless only a gate's room, taken
        by or promised to others, keeps it."""
        if not hasattr(self, "gate"):
            return
        free = [
            lane
            for lane in self.lanes
            if lane.running is None
            and lane.live
            and not lane.live[0]._blocked
            and len(lane.computing) < lane.max_in_flight
        ]
        promised = [(x, self.gates(x, x.live[0])) for x in free if x.handed_out]
        for lane in free:
            if lane.handed_out:
                continue
            full = [
                gate
                for gate in self.gates(lane, lane.live[0])
                if len(gate.holders) + sum(gate in gates for _, gates in promised) >= gate.limit
            ]
            assert full, "a channel that could go on was forgotten"


def test_orders_in_random_histories():
    """Order, limits and hand-overs hold in every history, and no channel is ever forgotten."""
    run_state_machine_as_test(
        OrderMachine,
        settings=settings(
            max_examples=200, stateful_step_count=50, deadline=None, derandomize=True
        ),
    )


# --- random histories of real channels and calls ---------------------------------------------------


@dataclasses.dataclass(eq=False, repr=False)
class ModelLane:
    """What a channel must look like from outside."""

    channel: TaskChannel
    max_pending: int | None
    max_in_flight: int
    stops: bool
    started: queue.SimpleQueue[ModelCall]
    queue: list[ModelCall] = dataclasses.field(default_factory=list)
    waiting: list[tuple[ModelCall, asyncio.Task]] = dataclasses.field(default_factory=list)
    calls: list[ModelCall] = dataclasses.field(default_factory=list)
    stopped: bool = False
    wide: bool = False  # one of its calls turned out to be a program over several devices

    @property
    def running(self) -> ModelCall | None:
        return next((call for call in self.calls if call.runs), None)

    @property
    def computing(self) -> list[ModelCall]:
        return [call for call in self.calls if call.computes]

    @property
    def full(self) -> bool:
        return self.max_pending is not None and len(self.queue) >= self.max_pending


@dataclasses.dataclass(eq=False, repr=False)
class ModelCall:
    """What a call must look like from outside, and the string that its body hangs on."""

    name: int
    lane: ModelLane
    needs: list[ModelCall]
    by_run: bool
    broad: bool  # its result is on several devices
    wide: bool  # the gate counts it
    orders: queue.SimpleQueue = dataclasses.field(default_factory=queue.SimpleQueue)
    future: Any = None
    state: str = "queued"
    runs: bool = False  # the body, also of a cancelled call
    computes: bool = False  # the arrays, also those of a cancelled call
    late: Late | None = None
    error: BaseException | type[BaseException] | None = None
    doomed: ModelCall | None = None  # what it needs had failed before it was submitted
    waiters: dict[asyncio.Task, str] = dataclasses.field(default_factory=dict)

    @property
    def over(self) -> bool:
        return self.state in ("ready", "failed", "cancelled")

    def reached(self, phase: str) -> bool:
        return self.over or self.state == phase

    def __repr__(self) -> str:
        return f"call {self.name}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # for hypothesis
        printer.text(repr(self))


def obey(call: ModelCall, x: jax.Array, *needs: Any) -> jax.Array:
    """The body of every call: tells of its start, and does as it is told."""
    assert all(isinstance(need, jax.Array) for need in needs)
    call.lane.started.put(call)
    kind, value = call.orders.get(timeout=20)
    if kind == "raise":
        raise value
    return x if kind == "return" else value[0].array(value[1])


obey_colocated = colocated_python(obey)


class ChannelMachine(RuleBasedStateMachine):
    """Three real channels, real calls, and a model that knows what must happen.

    After every step the machine waits until all that is due has happened, and nothing else.
    """

    PATIENCE = 20.0  # seconds; only a bug takes that long
    GATE = 1
    LATES = 5  # JAX's CPU client has eight threads here; two such programs would hang it

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.started: queue.SimpleQueue[ModelCall] = queue.SimpleQueue()
        self.calls: list[ModelCall] = []
        configure(multi_device_in_flight=self.GATE)
        devices = jax.devices("cpu")
        mesh = jax.sharding.Mesh(np.array(devices[:2]), ("d",))
        everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        self.narrow = jax.device_put(np.zeros(2, np.float32), devices[0])
        self.broad = jax.device_put(np.zeros(2, np.float32), everywhere)
        self.lanes: list[ModelLane] = []
        self.failed = False

    @initialize(max_pending=st.integers(1, 2), stops=st.booleans())
    def open(self, max_pending, stops):
        for pending, in_flight, stop in ((None, 2, False), (max_pending, 1, False), (2, 8, stops)):
            channel = TaskChannel(
                max_pending=pending,
                max_in_flight=in_flight,
                on_error="stop" if stop else "continue",
            )
            self.lanes.append(ModelLane(channel, pending, in_flight, stop, self.started))

    # -- the model -----------------------------------------------------------------------------------

    def end(self, call, state, error=None):
        """A call is over; what that means for dependents, dependencies and the channel."""
        if call.over:
            return
        if call.state == "queued":
            call.lane.queue.remove(call)
        call.state, call.error = state, error
        if state != "ready":
            for dependent in self.calls:
                if dependent.state == "queued" and call in dependent.needs:
                    self.end(dependent, state, error)
        if state == "cancelled":
            for need in call.needs:
                self.waiter_was_cancelled(need)
        if state != "ready" and call.lane.stops and not call.lane.stopped:
            call.lane.stopped = True
            for dead in list(call.lane.queue):
                self.end(dead, "failed", ChannelStoppedError)

    def waiter_was_cancelled(self, call):
        """The last waiter takes the call with it; unfinished dependents are waiters, too."""
        needed = any(call in other.needs and not other.over for other in self.calls)
        awaited = any(not call.reached(phase) for phase in call.waiters.values())
        if not (awaited or needed):
            self.end(call, "cancelled")

    def is_next(self, call):
        lane = call.lane
        return (
            lane.queue[:1] == [call]
            and lane.running is None
            and len(lane.computing) < lane.max_in_flight
            and all(need.reached("dispatched") for need in call.needs)
        )

    def may_start(self, call):
        wide = call.wide or call.lane.wide
        return self.is_next(call) and not (wide and self.in_gate >= self.GATE)

    @property
    def in_gate(self):
        return sum(call.wide and (call.runs or call.computes) for call in self.calls)

    def take(self, call):
        """A call has got its place."""
        call.doomed = next((n for n in call.needs if n.state in ("failed", "cancelled")), None)
        for calls in (self.calls, call.lane.calls, call.lane.queue):
            calls.append(call)

    # -- model and library -----------------------------------------------------------------------------

    def do(self, step):
        """Run one step on the loop, and all that follows from it."""

        async def main():
            async with asyncio.timeout(60):
                await step()
                await self.follow()

        try:
            self.loop.run_until_complete(main())
        except BaseException:
            self.failed = True
            raise

    async def follow(self):
        """Wait until everything that is due has started, and all that can be seen agrees."""
        deadline = time.monotonic() + self.PATIENCE
        while True:
            await self.end_doomed()
            while not self.started.empty():
                call = self.started.get()
                await self.end_doomed()
                assert self.may_start(call), f"{call!r} must not start now"
                call.lane.queue.remove(call)
                call.state, call.runs = "running", True
                call.wide |= call.lane.wide
            await self.end_doomed()
            due = [call for call in self.calls if call.state == "queued" and self.may_start(call)]
            differences = self.differences()
            if not due and not differences and self.started.empty():
                break
            assert time.monotonic() < deadline, f"due: {due}; {'; '.join(differences)}"
            await asyncio.sleep(0.0005)
        for call in self.calls:
            if call.state == "failed":
                self.check_error(call, call.future.exception())
            for task, phase in list(call.waiters.items()):
                if call.reached(phase):
                    del call.waiters[task]
                    await self.check_waiter(call, task)

    async def end_doomed(self):
        """What needs a failed call fails when it is its turn, without being run."""
        await self.give_room()
        for call in self.calls:
            if call.doomed and self.is_next(call) and call.future.done():
                self.end(call, call.doomed.state, call.doomed.error)
                await self.give_room()

    async def give_room(self):
        """Submitters that wait get in, in order, or are turned away."""
        for lane in self.lanes:
            while lane.waiting and (lane.stopped or not lane.full):
                call, submitter = lane.waiting.pop(0)
                await asyncio.wait([submitter], timeout=10)
                assert submitter.done(), f"the submitter of {call!r} still waits"
                if lane.stopped:
                    assert isinstance(submitter.exception(), ChannelStoppedError)
                else:
                    call.future = submitter.result()
                    self.take(call)

    def differences(self):
        found = []
        for call in self.calls:
            state = call.future.state.name.lower()
            if state != call.state:
                found.append(f"{call!r} is {state}, not {call.state}")
        for i, lane in enumerate(self.lanes):
            seen = lane.channel.statistics()
            for name, expected in {
                "queued": len(lane.queue),
                "running": int(lane.running is not None),
                "in_flight": len(lane.computing),
                "waiting_for_room": len(lane.waiting),
                "submitted": len(lane.calls),
                "failed": sum(call.state == "failed" for call in lane.calls),
                "cancelled": sum(call.state == "cancelled" for call in lane.calls),
                "abandoned": int(lane.running is not None and lane.running.over),
            }.items():
                if getattr(seen, name) != expected:
                    found.append(f"channel {i}: {name} is {getattr(seen, name)}, not {expected}")
        if len(_submission.gate.holders) != self.in_gate:
            found.append(f"{len(_submission.gate.holders)} in the gate, not {self.in_gate}")
        return found

    async def check_waiter(self, call, task):
        await asyncio.wait([task], timeout=10)
        assert task.done(), f"a waiter of {call!r} still waits"
        if call.state == "failed":
            self.check_error(call, task.exception())
        elif call.state == "cancelled":
            assert isinstance(task.exception(), CallCancelledError)
        else:
            assert isinstance(task.result(), jax.Array)

    def check_error(self, call, error):
        if isinstance(call.error, type):
            assert isinstance(error, call.error), f"{call!r} failed with {error!r}"
        else:
            assert error is call.error, f"{call!r} failed with {error!r}, not {call.error!r}"

    # -- what may happen -------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        lane=st.integers(0, 2),
        kind=st.sampled_from(["run", "run wide", "run wide", "nowait", "wait"]),
    )
    def submit(self, data, lane, kind):
        lane = self.lanes[lane]
        by_run, broad = kind.startswith("run"), kind == "run wide"
        # A colocated call wants all its arrays on one device list; `run` does not care.
        needs = [c for c in self.calls[-8:] if (by_run or not c.by_run) and not c.doomed]
        # What would be decided by a race is left out: a call that is struck by two errors, or that
        # is needed by one that fails when its turn comes, or needed in the step in which its last
        # other waiter leaves.
        if needs and not lane.stops and not (kind == "wait" and lane.full):
            needs = data.draw(st.lists(st.sampled_from(needs), max_size=2, unique=True), "needs")
            needs = [need for need in needs if need.state in ("failed", "cancelled")][:1] or needs
        else:
            needs = []
        call = ModelCall(len(self.calls), lane, needs, by_run, broad, wide=broad)
        args = (call, self.broad if broad else self.narrow, *(need.future for need in needs))

        def submit_now():
            if kind == "nowait":
                return lane.channel.submit_nowait(obey_colocated, *args)
            return lane.channel.run(obey, *args)

        async def step():
            if kind == "wait":
                submitter = asyncio.create_task(lane.channel.submit(obey_colocated, *args))
                lane.waiting.append((call, submitter))
                await asyncio.sleep(0)
            elif lane.stopped:
                with pytest.raises(ChannelStoppedError):
                    submit_now()
            elif lane.full:
                with pytest.raises(WouldBlock):
                    submit_now()
            else:
                call.future = submit_now()
                self.take(call)

        self.do(step)

    @precondition(lambda self: any(lane.waiting for lane in self.lanes))
    @rule(data=st.data())
    def give_up_submitting(self, data):
        lane = data.draw(st.sampled_from([lane for lane in self.lanes if lane.waiting]))
        place = data.draw(st.integers(0, len(lane.waiting) - 1))

        async def step():
            _, submitter = lane.waiting.pop(place)
            submitter.cancel()
            await asyncio.wait([submitter], timeout=10)
            assert submitter.cancelled()

        self.do(step)

    @precondition(lambda self: any(call.runs for call in self.calls))
    @rule(data=st.data(), kind=st.sampled_from(["return", "raise", "late", "late broad"]))
    def end_body(self, data, kind):
        call = data.draw(st.sampled_from([c for c in self.calls if c.runs]), "call")

        pending = [c for c in self.calls if c.computes]
        broad_pending = any(c.broad for c in pending)
        broad = call.broad or (kind == "late broad" and call.by_run)

        async def step():
            call.runs = False
            if kind == "raise":
                error = ValueError(call.name)
                call.orders.put(("raise", error))
                self.end(call, "failed", error)
            elif kind == "return" or len(pending) >= self.LATES or (broad and broad_pending):
                call.orders.put(("return", None))
                self.end(call, "ready")
            else:
                call.late, call.computes = Late(), True
                call.broad = broad
                if broad and not call.wide:
                    call.wide = call.lane.wide = True
                call.orders.put(("late", (call.late, self.broad if call.broad else self.narrow)))
                if not call.over:
                    call.state = "dispatched"

        self.do(step)

    @precondition(lambda self: any(call.computes for call in self.calls))
    @rule(data=st.data(), fail=st.booleans())
    def end_computation(self, data, fail):
        lane = data.draw(st.sampled_from([lane for lane in self.lanes if lane.computing]))
        call = min(lane.computing, key=lambda c: c.late.number)  # JAX computes them in order

        async def step():
            call.computes = False
            if fail and not call.broad:  # or JAX waits for ever for the other device
                call.late.fail()
                self.end(call, "failed", jax.errors.JaxRuntimeError)
            else:
                call.late.release()
                self.end(call, "ready")

        self.do(step)

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def cancel(self, data):
        call = data.draw(st.sampled_from(self.calls[-8:]), "call")

        async def step():
            assert call.future.cancel() == (not call.over)
            self.end(call, "cancelled")

        self.do(step)

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), phase=st.sampled_from(["dispatched", "ready"]))
    def wait(self, data, phase):
        call = data.draw(st.sampled_from(self.calls[-8:]), "call")

        async def ready():
            return await call.future

        async def step():
            wait = ready() if phase == "ready" else call.future.wait_dispatched()
            call.waiters[asyncio.create_task(wait)] = phase
            await asyncio.sleep(0)

        self.do(step)

    @precondition(lambda self: any(call.waiters for call in self.calls))
    @rule(data=st.data())
    def cancel_waiter(self, data):
        call = data.draw(st.sampled_from([c for c in self.calls if c.waiters]), "call")
        task = data.draw(st.sampled_from(list(call.waiters)))

        async def step():
            del call.waiters[task]
            task.cancel()
            await asyncio.wait([task], timeout=10)
            assert task.cancelled()
            self.waiter_was_cancelled(call)

        self.do(step)

    def teardown(self):
        """Let everything end: nothing may be stuck."""

        async def step():
            while busy := [call for call in self.calls if call.runs or call.computes]:
                call = min(busy, key=lambda c: c.late.number if c.late else 0)
                if call.runs:
                    call.runs = False
                    call.orders.put(("return", None))
                else:
                    call.computes = False
                    call.late.release()
                self.end(call, "ready")
                await self.follow()
            assert not any(lane.queue or lane.waiting for lane in self.lanes)
            for lane in self.lanes:
                await lane.channel.aclose()

        try:
            if not self.failed:
                self.do(step)
        finally:
            for call in self.calls:  # nothing may hang on a failed history
                call.orders.put(("return", None))
                if call.late is not None:
                    call.late.release()
                call.future = call.error = None  # hypothesis keeps what was drawn
                call.waiters.clear()
            for lane in self.lanes:
                lane.channel = None  # a stopped one keeps the error, and so its frames
            del self.narrow, self.broad
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()


def test_channels_in_random_histories():
    """Whatever happens to calls, channels show what the model says and nothing else."""
    run_state_machine_as_test(
        ChannelMachine,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
