# SPDX-License-Identifier: Apache-2.0
"""What a call needs of its channel, and of its plan: what it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from aiocolocated._loops import Wakes
from aiocolocated._ordering import ChannelOrder, Ticket
from aiocolocated._workers import Worker

Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]


class CallChannel(Protocol):
    """What a call needs of its channel. All but ``name`` is called under the lock."""

    _order: ChannelOrder[Any]
    _number: int
    _stream: int
    _worker: Worker | None
    _nested: bool
    _dedicated: bool
    _submitted: int
    _runnable_since: float

    @property
    def name(self) -> str:
        """For errors and listings."""
        ...

    def _admit(self, wakes: Wakes) -> None:
        """Give places that became free to calls that wait for room."""

    def _resume(self) -> None:
        """The first call may be able to start now."""

    def _call_left_queue(self, wakes: Wakes) -> None:
        """A queued call was settled."""

    def _call_failed(self, error: BaseException, wakes: Wakes, *, cancelled: bool) -> None:
        """A call failed or was cancelled."""

    def _became_idle(self, wakes: Wakes) -> None:
        """Nothing is queued, running or computing."""

    def _leave_gate(self, call: Any) -> None:
        """A multi-device program is computed."""

    def _hand_out(self, orders: list[ChannelOrder[Any]]) -> None:
        """Have workers serve channels that a gate has admitted."""

    def _refuse_own_body(self, what: str) -> None:
        """Refuse a wait inside a body of this channel."""

    def _give_up(self, ticket: Ticket[Any]) -> None:
        """A submitter that waits for room was cancelled."""


class CallCounter(Protocol):
    """What must know of its calls: an object of its methods'. All under the lock."""

    def call_taken(self) -> None:
        """A call has got its place.

        Raises:
            ObjectClosedError: no more calls are taken.
        """

    def call_over(self, wakes: Wakes) -> None:
        """A call is over and nothing of it runs."""


class Body(Protocol):
    """A body that runs elsewhere than on a worker of this process."""

    def cancel(self, wakes: Wakes) -> None:
        """Have it cancelled (under the lock)."""


class Plan(Protocol):
    """What a call runs, and how its results are checked."""

    @property
    def name(self) -> str:
        """Of the function, for errors and listings."""
        ...

    @property
    def host(self) -> str:
        """Of the host that runs the body."""
        ...

    @property
    def devices(self) -> Any:
        """Where the call runs, a tuple of devices; ``None`` if that is not known."""
        ...

    @property
    def ships(self) -> bool:
        """Whether plain Python arguments go by value, in strict mode and to other hosts."""
        ...

    @property
    def dispatches(self) -> bool:
        """Whether the body is a JAX program, so that its arrays say which devices it runs on."""
        ...

    def is_loaded(self) -> bool:
        """Whether ``body()`` takes a moment."""
        ...

    def body(self) -> Callable[..., Any]:
        """The function to call, shipped if that is needed (worker thread)."""
        ...

    def futures(self, args: Args, kwargs: Kwargs) -> Sequence[Any]:
        """The futures among the arguments."""
        ...

    def bind(self, args: Args, kwargs: Kwargs, values: dict[int, Any]) -> tuple[Args, Kwargs]:
        """Arguments as the body sees them; ``values`` by ``id`` of their future (worker thread)."""
        ...

    def finish(self, value: Any) -> tuple[Any, Sequence[Any]]:
        """The result as the caller sees it, and the arrays to wait for (worker thread)."""
        ...
