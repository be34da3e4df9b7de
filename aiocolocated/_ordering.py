# SPDX-License-Identifier: Apache-2.0
"""Pure state machines: the order of a channel's calls, and gates across channels.

No threads, no loop, no JAX: every decision is made here, under the caller's lock, and tested alone.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, Protocol, TypeVar

from aiocolocated._types import QUEUED, READY, OnError


class OrderedCall(Protocol):
    """What a channel must know of a call."""

    _state: int
    _blocked: int  # dependencies that are not dispatched yet
    _wide: bool  # a multi-device program, which needs the gate
    _light: bool  # its body is a coroutine
    _gate: Gate[Any] | None  # of the object whose method it is, or of all transfers
    _size: int  # what a budget counts
    _group: Any  # the hosts that it goes to, of a call to other processes


C = TypeVar("C", bound=OrderedCall)

# Calls of a channel that are on other hosts at once: their arguments take memory there.
MOST_AHEAD = 512


class Ticket(Generic[C]):
    """A call that waits for room in a bounded channel, outside of its queue."""

    __slots__ = ("call", "error", "waiter")

    def __init__(self, call: C, waiter: Any) -> None:
        self.call = call
        self.waiter = waiter
        self.error: BaseException | None = None


class Gate(Generic[C]):
    """Caps what is under way at once, whichever channel it is in.

    One gate caps the multi-device programs of the process: too many collectives in flight hang JAX's
    CPU backend, because each occupies threads of one pool until all of its participants have arrived.
    Every colocated object has one for the methods that run at once.

    A channel that is claimed for a call of the gate has a place in it until a worker gets to it: else
    the next call of a channel that a worker serves already would come first, time and again.
    """

    __slots__ = ("holders", "limit", "parked", "places")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.holders: set[C] = set()  # under way
        self.places: dict[ChannelOrder[C], None] = {}  # claimed, not under way yet
        self.parked: dict[ChannelOrder[C], None] = {}  # first come, first served

    def has_room(self, order: ChannelOrder[C]) -> bool:
        """Whether the first call of a channel may enter."""
        if len(self.holders) + len(self.places) >= self.limit and order not in self.places:
            self._drop_lost_places()
            return len(self.holders) + len(self.places) < self.limit
        return True

    def _drop_lost_places(self) -> None:
        """A channel loses its place with the call that it had it for."""
        lost = [
            order
            for order in self.places
            if not order.claimed or order.running is not None or not order.needs(self)
        ]
        for order in lost:
            del self.places[order]

    def hold_place(self, order: ChannelOrder[C]) -> None:
        """A channel is claimed for a call of this gate."""
        self.places[order] = None

    def enter(self, call: C, order: ChannelOrder[C]) -> None:
        if self.places:
            self.places.pop(order, None)
        self.holders.add(call)

    def leave(self, call: C) -> list[ChannelOrder[C]]:
        """One is over; as :meth:`admit`."""
        self.holders.discard(call)
        return self.admit() if self.parked else []

    def admit(self) -> list[ChannelOrder[C]]:
        """Claim parked channels for the room there is; the caller hands them to workers.

        A parked channel may have lost the call that it was parked for. It must not take the room
        with it, or the channels behind it wait for ever.
        """
        claimed: list[ChannelOrder[C]] = []
        self._drop_lost_places()
        while self.parked and len(self.holders) + len(self.places) < self.limit:
            order = next(iter(self.parked))
            del self.parked[order]
            if order.claim():
                claimed.append(order)
        return claimed


class Budget(Gate[C]):
    """A gate that caps the sum of its calls' sizes. One that is larger than all there is goes alone.

    First come, first served: a small call does not overtake a large one that waits, unless it needs no
    room at all. A call has its room from the moment when its channel is claimed for it until
    :meth:`give_back`, which may be long after its body has ended.
    """

    __slots__ = ("capacity", "taken")

    def __init__(self, capacity: int) -> None:
        super().__init__(0)  # of a gate without places a channel has to ask every time
        self.capacity = capacity
        self.taken = 0

    def has_room(self, order: ChannelOrder[C]) -> bool:
        """Whether the first call of a channel may enter; if so, it has its room."""
        call = order._first()
        assert call is not None
        if call not in self.holders:
            if call._size:
                if self.parked and next(iter(self.parked)) is not order:
                    return False
                if self.taken and self.taken + call._size > self.capacity:
                    return False
            self.parked.pop(order, None)
            self.holders.add(call)
            self.taken += call._size
        return True

    def hold_place(self, order: ChannelOrder[C]) -> None:
        """It has room already."""

    def enter(self, call: C, order: ChannelOrder[C]) -> None:
        """It has entered already."""

    def leave(self, call: C) -> list[ChannelOrder[C]]:
        """Its body has ended, but what it began may go on."""
        return []

    def give_back(self, call: C) -> list[ChannelOrder[C]]:
        """Nothing of a call goes on, or it never began; as :meth:`admit`."""
        if call in self.holders:
            self.holders.remove(call)
            self.taken -= call._size
        return self.admit() if self.parked else []

    def admit(self) -> list[ChannelOrder[C]]:
        claimed: list[ChannelOrder[C]] = []
        while self.parked:
            order = next(iter(self.parked))
            if order.claim():
                claimed.append(order)
            elif order in self.parked:
                if order.needs(self):
                    break
                del self.parked[order]  # the call that it was parked for is gone
        return claimed


class ChannelOrder(Generic[C]):
    """A FIFO of calls, of which at most one runs.

    ``claimed`` is true from the moment the channel is handed to a worker until the worker finds
    nothing to run: it makes sure that one worker at a time serves a channel.

    Calls to other hosts are sent ahead: while some are under way there, more may follow them to the same
    hosts, which keep their order. Whatever goes elsewhere waits until they are over.
    """

    __slots__ = (
        "ahead",
        "ahead_group",
        "claimed",
        "closed",
        "gate",
        "in_flight",
        "lane",
        "max_in_flight",
        "max_pending",
        "on_error",
        "pending",
        "queue",
        "room",
        "running",
        "stopped",
        "wide",
    )

    def __init__(
        self,
        gate: Gate[C],
        *,
        lane: Any = None,
        max_pending: int | None = None,
        max_in_flight: int = 8,
        on_error: OnError = "continue",
    ) -> None:
        self.gate = gate
        self.lane = lane  # the channel this is the order of
        self.max_pending = max_pending
        self.max_in_flight = max_in_flight
        self.on_error = on_error
        self.queue: deque[C] = deque()
        self.room: deque[Ticket[C]] | None = None  # first come, first served
        self.pending = 0  # queued and not settled
        self.in_flight = 0  # dispatched, arrays still computing
        self.running: C | None = None
        self.ahead = 0  # sent to other hosts, and not over
        self.ahead_group: Any = None  # those hosts
        self.claimed = False
        self.wide = False  # a call turned out to be a multi-device program: expect more of them
        self.closed = False
        self.stopped: BaseException | None = None

    # -- submission ------------------------------------------------------------------------------

    def has_room(self) -> bool:
        """Whether a call may be pushed without overtaking one that waits for room."""
        return self.max_pending is None or (self.waiting < self.max_pending and not self.room)

    @property
    def waiting(self) -> int:
        """Calls that have not begun: of those sent ahead only the first has."""
        return self.pending + self.ahead - 1 if self.ahead > 1 else self.pending

    def push(self, call: C) -> bool:
        """Append ``call``; true when the caller must hand the channel to a worker."""
        self.queue.append(call)
        self.pending += 1
        return not self.claimed and self.claim()

    def wait_for_room(self, ticket: Ticket[C]) -> None:
        if self.room is None:
            self.room = deque()
        self.room.append(ticket)

    def admit(self) -> Ticket[C] | None:
        """Push the first call that waits for room, if there is room now; its ticket."""
        if not self.room or self.max_pending is None or self.waiting >= self.max_pending:
            return None
        ticket = self.room.popleft()
        self.queue.append(ticket.call)
        self.pending += 1
        return ticket

    # -- running ---------------------------------------------------------------------------------

    def claim(self) -> bool:
        """Claim the channel for a worker if its first call may start now."""
        if self.claimed:
            return False
        call = self._head()
        if call is None:
            return False
        self.claimed = True
        if call._gate is not None:
            call._gate.hold_place(self)
        if call._wide or self.wide:
            self.gate.places[self] = None
        return True

    def next(self) -> C | None:
        """Start the next call, or give the claim up."""
        queue = self.queue
        call = queue[0] if queue else None
        if (
            call is None
            or call._state != QUEUED
            or call._blocked
            or call._wide
            or (
                (gate := call._gate) is not None
                and (gate.places or len(gate.holders) >= gate.limit)
            )
            or self.wide
            or self.in_flight
            or self.ahead
        ):  # not the common case
            call = self._head()
            if call is None:
                self.claimed = False
                return None
        queue.popleft()
        self.pending -= 1
        self.running = call
        if call._wide or self.wide:
            call._wide = True
            self.gate.enter(call, self)
        if call._gate is not None:
            call._gate.enter(call, self)
        return call

    def needs(self, gate: Gate[C]) -> bool:
        """Whether the first call may start, as soon as ``gate`` lets it."""
        call = self._first()
        return call is not None and (
            call._gate is gate or (gate is self.gate and (self.wide or call._wide))
        )

    def _head(self) -> C | None:
        """The first call, if it may start now; a gate without room remembers the channel."""
        call = self._first()
        if call is None:
            return None
        if (call._wide or self.wide) and not self.gate.has_room(self):
            self.gate.parked[self] = None
            return None
        if call._gate is not None and not call._gate.has_room(self):
            call._gate.parked[self] = None
            return None
        return call

    def _first(self) -> C | None:
        """The first call, if it may start as far as this channel goes."""
        queue = self.queue
        while queue:
            call = queue[0]
            if call._state >= READY:  # cancelled or failed in the queue: leaves a tombstone
                queue.popleft()
                continue
            if call._blocked or self.in_flight >= self.max_in_flight:
                return None
            if self.ahead and (call._group is not self.ahead_group or self.ahead >= MOST_AHEAD):
                return None
            return call
        return None

    # -- what happens to calls -------------------------------------------------------------------

    def settled_in_queue(self) -> None:
        """A queued call was cancelled or failed; its tombstone is skipped later."""
        self.pending -= 1

    def dispatched(self) -> None:
        self.in_flight += 1

    def computed(self) -> bool:
        """A dispatched call's arrays are there; true when the channel must be handed out."""
        self.in_flight -= 1
        return self.claim()

    def body_ended(self) -> None:
        self.running = None

    def sent_ahead(self, group: Any) -> None:
        """The call that was to run is on its way to other hosts."""
        self.running = None
        self.ahead += 1
        self.ahead_group = group

    def over_there(self) -> bool:
        """The body of a call that was sent ahead is over; true when the channel must be handed out."""
        self.ahead -= 1
        if not self.ahead:
            self.ahead_group = None
        # Not for each one: many calls follow together, in one message.
        return bool(self.queue) and self.ahead <= MOST_AHEAD // 2 and self.claim()

    def put_back(self, call: C) -> None:
        """The call that runs takes its turn again: it found out what else it has to wait for."""
        self.running = None
        self.queue.appendleft(call)
        self.pending += 1

    def stop(self, error: BaseException) -> list[C]:
        """Stop for good after a failure; the queued calls, which will never run."""
        self.stopped = error
        return [c for c in self.queue if c._state < READY]

    def turn_away(self) -> list[Ticket[C]]:
        """Empty the waiting room."""
        tickets = list(self.room or ())
        self.room = None
        return tickets

    @property
    def light(self) -> bool:
        """Whether the next thing takes a moment: to start a coroutine, or to settle one that ended."""
        return self.running is not None or (bool(self.queue) and self.queue[0]._light)

    @property
    def idle(self) -> bool:
        """Nothing queued, running or computing."""
        return (
            not self.pending
            and self.running is None
            and not self.in_flight
            and not self.ahead
            and not self.room
        )
