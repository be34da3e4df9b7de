# SPDX-License-Identifier: Apache-2.0
"""Links: the connection to one host, and what is under way there."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiocolocated import _service
from aiocolocated._exceptions import HostLostError
from aiocolocated._loops import Wakes
from aiocolocated._settings import LOCK
from aiocolocated.hosts import _parcels, _shared, _wire

if TYPE_CHECKING:
    from aiocolocated._specs import Devices
    from aiocolocated.hosts._forwarded import Forwarded
    from aiocolocated.hosts.remote import HostSet


class Link:
    """The connection to one host, and what is under way there."""

    def __init__(self, hosts: HostSet, name: str, index: int, devices: Devices) -> None:
        self.hosts = hosts
        self.name = name
        self.process_index = index
        self.devices = devices
        self.generation = 0
        self.lost: HostLostError | None = None
        self.outgoing: list[Any] = []
        self.calls: dict[int, Forwarded] = {}
        self.specs: dict[int, tuple[Any, ...]] = {}
        self.transmit: Callable[[bytes], None] = lambda data: None
        self._send_lock = threading.Lock()
        self.take_log: Callable[[Any], None] = lambda record: None
        self.sent_bytes = self.received_bytes = 0
        self.sent_messages = self.received_messages = 0
        self.functions = 0  # that it was told
        self.handles = 0  # of arrays that it keeps
        self._pid = 0

    def post(self, message: Any, wakes: Wakes) -> None:
        """Have a message sent, in order (under the lock)."""
        self.outgoing.append(message)
        wakes.flush(self.flush)

    def flush(self) -> None:
        """Send what has been collected (without the lock)."""
        if self.outgoing:
            with self._send_lock:
                with LOCK:
                    messages, self.outgoing = self.outgoing, []
                    transmit = self.transmit  # not that of a host restarted meanwhile
                if messages and self.lost is None:
                    data = pickle.dumps(messages, 5)
                    self.sent_bytes += len(data)
                    self.sent_messages += len(messages)
                    transmit(data)

    def receive(self, data: bytes) -> None:
        """Take what the host has sent (the thread that receives)."""
        self.received_bytes += len(data)
        wakes = Wakes()
        try:
            self._receive(pickle.loads(data), wakes)
        finally:
            wakes.pay()

    def _receive(self, messages: list[Any], wakes: Wakes) -> None:
        self.received_messages += len(messages)
        for message in messages:
            kind = message[0]
            if kind == _wire.SPEC:
                self.specs[message[1]] = self.hosts.load(message[2], ())
            elif kind == _wire.RELEASED:
                _parcels.released(message[1], self, message[2])
            elif kind == _wire.KNOWN_CLASS:
                self.hosts.class_blobs.setdefault(message[1], message[2])
            elif kind == _wire.LOG:
                self.take_log(message[1])
            elif kind == _wire.PONG:
                pass  # any message is a sign of life
            elif (call := self.calls.get(message[1])) is not None:
                if kind != _wire.DISPATCHED:
                    del self.calls[message[1]]
                try:
                    call.answer(self, message, wakes)
                except BaseException:  # one broken answer must not lose the others
                    _service.logger.exception("aiocolocated: internal error in an answer")

    def answered(self, pid: int, *, shared: bool) -> None:
        """The host is up, and its process is this one; perhaps it can look into the memory of this one."""
        self._pid = pid
        if shared:
            _parcels.release_to[pid] = self.release
        else:
            _parcels.stop_sharing()

    def release(self, key: int, reuse: bool) -> None:
        """Tell the host that a parcel of its is not needed any more (service thread)."""
        wakes = Wakes()
        with LOCK:
            if self.lost is None:
                self.post((_wire.RELEASE, key, reuse), wakes)
        wakes.pay()

    def lose(self, error: HostLostError) -> None:
        """The host is gone: so is all that was on it (any thread)."""
        wakes = Wakes()
        with LOCK:
            if self.lost is not None:
                return
            self.lost = error
            calls, self.calls = self.calls, {}
            self.outgoing = []
            self.specs = {}
        _parcels.lost(self)
        _parcels.release_to.pop(self._pid, None)
        _shared.kept.forget(self._pid)
        for call in calls.values():
            try:
                call.answer(self, (None, call.number, error), wakes)
            except BaseException:  # nor must the others go on waiting
                _service.logger.exception("aiocolocated: internal error in an answer")
        wakes.pay()

    def check(self) -> None:
        """Raise if the host is gone."""
        if self.lost is not None:
            raise HostLostError(*self.lost.args)

    def has(self, generation: int) -> bool:
        """Whether what it was told in a generation is there."""
        return self.lost is None and self.generation == generation
