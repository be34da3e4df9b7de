# SPDX-License-Identifier: Apache-2.0
"""One host, as the controller's program sees it."""

from __future__ import annotations

import dataclasses
from time import monotonic
from typing import Any, final

from aiocolocated._settings import LOCK
from aiocolocated.hosts._supervisor import Supervised


@dataclasses.dataclass(frozen=True, slots=True)
class HostStatistics:
    """A snapshot of one host, see :meth:`Hosts.statistics`.

    Attributes:
        name: of the host.
        pid: of its process, ``None`` if it is not known.
        state: ``"starting"``, ``"up"``, ``"stalled"`` or ``"lost"``.
        generation: how many times it was restarted.
        calls: sent there, and not over.
        handles: arrays that are kept there because something here refers to them.
        functions: functions and classes that it was told.
        sent_bytes: that went there as messages; large buffers go through shared memory instead.
        sent_messages: many go together.
        received_bytes: that came from there.
        received_messages: likewise.
        heartbeat_age: seconds since its last sign of life; ``None`` while there is no process.

    .. versionadded:: 0.4
    """

    name: str
    pid: int | None
    state: str
    generation: int
    calls: int
    handles: int
    functions: int
    sent_bytes: int
    sent_messages: int
    received_bytes: int
    received_messages: int
    heartbeat_age: float | None


@final
class RemoteHost:
    """One host of :class:`Hosts`: ``hosts[0]``, or ``hosts["host-0"]``.

    It stays the same object when the host is restarted, and so do its devices.

    Thread safety: any thread.

    .. versionadded:: 0.4
    """

    __slots__ = ("_host", "_link")

    def __init__(self, host: Supervised) -> None:
        self._host = host
        self._link = host.link

    @property
    def name(self) -> str:
        """Such as ``"host-0"``."""
        return self._link.name

    @property
    def process_index(self) -> int:
        """Its place among the hosts, as :attr:`jax.Device.process_index` has it."""
        return self._link.process_index

    @property
    def devices(self) -> tuple[Any, ...]:
        """Its devices."""
        return self._link.devices

    @property
    def pid(self) -> int | None:
        """The id of its process, or of its last one; ``None`` if there was none or it is not known."""
        return self._host.pid

    @property
    def lost(self) -> bool:
        """Whether it has ended, or was declared lost; a restart makes it false again."""
        return self._link.lost is not None

    @property
    def stalled_for(self) -> float:
        """Seconds without a sign of life, if these are more than ``stalled_after``; else 0."""
        host = self._host
        return monotonic() - host.heard if host.up and host.stalled else 0.0

    @property
    def state(self) -> str:
        """``"starting"``, ``"up"``, ``"stalled"`` or ``"lost"``; ``"lost"`` also when it was closed."""
        host = self._host
        if host.up:
            return "stalled" if host.stalled else "up"
        return "starting" if host.starting is not None else "lost"

    def statistics(self) -> HostStatistics:
        """Counters and gauges of this moment."""
        host, link = self._host, self._link
        with LOCK:
            return HostStatistics(
                name=link.name,
                pid=host.pid,
                state=self.state,
                generation=link.generation,
                calls=len(link.calls),
                handles=link.handles,
                functions=link.functions,
                sent_bytes=link.sent_bytes,
                sent_messages=link.sent_messages,
                received_bytes=link.received_bytes,
                received_messages=link.received_messages,
                heartbeat_age=monotonic() - host.heard if host.up else None,
            )

    def __repr__(self) -> str:
        return f"<RemoteHost {self.name} {self.state} pid={self.pid}>"
