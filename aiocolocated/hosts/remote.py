# SPDX-License-Identifier: Apache-2.0
"""Hosts in other processes, as their controller sees them, and which of them a device belongs to."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any

from aiocolocated import _serialization, _service, _specs
from aiocolocated._exceptions import HostError, SpecError
from aiocolocated._loops import Wakes
from aiocolocated._ordering import Gate
from aiocolocated._settings import LOCK
from aiocolocated.hosts import _wire
from aiocolocated.hosts._groups import Code, CodePeer, Group, GroupPeer
from aiocolocated.hosts._links import Link
from aiocolocated.hosts._references import Reference

if TYPE_CHECKING:
    from aiocolocated._specs import Devices

_FORGET_AFTER = 0.005  # seconds that dropped handles are collected

_numbers = itertools.count(1)  # of whatever hosts are told; for all sets, so that one says which


class HostSet:
    """All hosts of one controller."""

    def __init__(
        self, name: str, devices: Sequence[Sequence[Any]], *, collectives: bool = False
    ) -> None:
        self.name = name
        self.collectives = collectives
        self.links = tuple(
            Link(self, f"{name}-{i}", i, tuple(own)) for i, own in enumerate(devices)
        )
        # Of the calls over several hosts of a cluster one begins when the bodies before it are over: after
        # one that has failed on some hosts only, nothing may run that the others could meet.
        self.collective_gate: Gate[Any] = Gate(1)
        self.broken: Callable[[str], None] = lambda why: None  # has the cluster given up
        self.numbers = _numbers
        self.classes: set[str] = set()
        self.class_blobs: dict[str, Any] = {}
        self.dropped: SimpleQueue[tuple[Group, tuple[int, ...], int, int]] = SimpleQueue()
        self.forgetting = False
        self._lock = threading.RLock()
        self._groups: dict[tuple[Link, ...], Group] = {}
        self._codes: weakref.WeakKeyDictionary[Any, Code] = weakref.WeakKeyDictionary()
        self._channels: weakref.WeakKeyDictionary[Any, Code] = weakref.WeakKeyDictionary()
        self._class_messages: dict[str, Any] = {}
        self._class_parts: list[Any] = []  # what these refer to
        self.all = self.group(self.links)

    def group(self, links: tuple[Link, ...]) -> Group:
        with self._lock:
            found = self._groups.get(links)
            if found is None:
                found = self._groups[links] = Group(self, links)
            return found

    def owns(self, array: Any) -> bool:
        return hosts_of(next(iter(array.sharding.device_set))) is self

    def restarted(self, link: Link) -> None:
        """A host has come back, with nothing on it (under the lock)."""
        link.lost = None
        link.generation += 1
        link.functions = link.handles = 0
        link.outgoing = list(self._class_messages.values())
        for group in self._groups.values():
            if link in group.links:
                group.epochs = tuple(other.generation for other in group.links)

    # -- code -------------------------------------------------------------------------------------------

    def code_of(self, plan: Any) -> Code:
        base = plan._base
        code = self._codes.get(base)
        if code is None:
            code = self.code_for(base, lambda: plan.make_code(self))
        return code

    def code_for(self, key: Any, make: Callable[[], Code]) -> Code:
        """The code that a function, class or method has here, made by ``make`` if there is none."""
        with self._lock:
            code = self._codes.get(key)
            if code is None:
                code = self._codes[key] = make()
            return code

    def function_code(self, function: Callable[..., Any], kind: str, name: str) -> Code:
        """Ship a function or class.

        Raises:
            NotShippableError: naming the captured variable.
        """
        try:
            peer = CodePeer(self.all)
            pickled = _wire.dumps(function, peer)
        except Exception as error:
            raise _serialization._explain(function, error) from error
        code = Code(
            self,
            lambda number: (
                _wire.FUNCTION,
                number,
                kind,
                name,
                pickled.data,
                pickled.words,
            ),
            (pickled.held, pickled.parcels),  # it may be told to more hosts at any time
        )
        code.captured = peer.references
        return code

    def method_code(self, of: Code, getter: Any, kind: str, name: str) -> Code:
        """Ship how a method is got from its object."""
        pickled = _wire.dumps(getter, GroupPeer(self.all))
        code = Code(
            self,
            lambda number: (_wire.METHOD, number, of.number, kind, name, pickled.data),
            (pickled.held, pickled.parcels),
        )
        return code.after(of)

    def channel_code(self, channel: Any) -> Code | None:
        """What hosts have to be told of a channel, if it is not like any other."""
        order = channel._order
        if not channel._dedicated and order.on_error == "continue" and order.max_in_flight == 8:
            return None
        options = {
            "name": channel.name,
            "max_in_flight": order.max_in_flight,
            "on_error": order.on_error,
            "dedicated_thread": channel._dedicated,
        }
        with self._lock:
            code = self._channels.get(channel)
            if code is None:
                code = self._channels[channel] = Code(
                    self, lambda number: (_wire.CHANNEL, number, channel._number, options)
                )
        return code

    def define_class(self, class_id: str, cls: type) -> None:
        pickled = _wire.dumps_class(cls, GroupPeer(self.all))
        message = (_wire.CLASS, class_id, pickled.data, pickled.words)
        with LOCK:
            self._class_messages[class_id] = message
            self._class_parts.append((pickled.held, pickled.parcels))
            for link in self.links:
                if link.lost is None:
                    link.outgoing.append(message)  # the call that needs it flushes

    # -- values -----------------------------------------------------------------------------------------

    @staticmethod
    def array_reference(group: Group, number: int, leaf: int) -> Reference:
        """What keeps an array on the hosts of a group."""
        with LOCK:
            for link in group.links:
                link.handles += 1
        return Reference(group, number, leaf)

    def load(self, data: bytes, things: Sequence[Any]) -> Any:
        loading.hosts = self
        try:
            return _wire.loads(data, things, self._class)
        finally:
            loading.hosts = None

    def load_error(self, parts: Any, host: str) -> BaseException:
        return _wire.load_error(parts, host, self._class)

    def _class(self, class_id: str) -> type:
        found = _wire.known_class(class_id)
        if found is None:
            blob = self.class_blobs.get(class_id)
            if blob is None:
                raise HostError(f"class {class_id} is not known to the controller")
            found = self.load(blob, ())
            assert isinstance(found, type)
        return found

    # -- handles ----------------------------------------------------------------------------------------

    def forget_soon(self) -> None:
        """Collect dropped handles for a moment (service thread)."""
        _service.call_at(monotonic() + _FORGET_AFTER, self.forget)

    def forget(self) -> None:
        """Tell hosts what nobody refers to any more, behind its last use."""
        self.forgetting = False
        lists: dict[Link, list[tuple[int, int]]] = {}
        while True:
            try:
                group, epochs, number, leaf = self.dropped.get_nowait()
            except Empty:
                break
            for link, epoch in zip(group.links, epochs, strict=True):
                if link.generation == epoch:
                    lists.setdefault(link, []).append((number, leaf))
        wakes = Wakes()
        with LOCK:
            for link, pairs in lists.items():
                link.handles -= sum(leaf >= 0 for _, leaf in pairs)
                if link.lost is None:
                    link.post((_wire.FORGET, pairs), wakes)
        wakes.pay()


# --- which hosts a device belongs to --------------------------------------------------------------------

_by_device: dict[Any, Link] = {}
_groups: dict[Devices, Group | None] = {}


def add_devices(hosts: HostSet) -> None:
    """Have calls on these devices go to their hosts."""
    with LOCK:
        for link in hosts.links:
            for device in link.devices:
                _by_device[device] = link


def remove_devices(hosts: HostSet) -> None:
    with LOCK:
        for link in hosts.links:
            for device in link.devices:
                _by_device.pop(device, None)
        for devices in [d for d, group in _groups.items() if group and group.hosts is hosts]:
            del _groups[devices]
    _wire.forget_fixed()


def hosts_of(device: Any) -> HostSet | None:
    link = _by_device.get(device)
    return None if link is None else link.hosts


def hosts_are_open() -> bool:
    """Whether any device of another process is known."""
    return bool(_by_device)


def link_of(device: Any) -> Link | None:
    """The host of a device; ``None`` for those of this process."""
    return _by_device.get(device)


def _name_of_host(device: Any) -> str | None:
    link = _by_device.get(device)
    return None if link is None else link.name


_specs.name_of_host = _name_of_host


def group_of(devices: Devices | None) -> Group | None:
    """The hosts of devices; ``None`` for devices of this process.

    Raises:
        SpecError: some are here and some are there, or of closed hosts.
    """
    if devices is None or not _by_device:
        return None
    found = _groups.get(devices)
    if found is None:
        links = [_by_device.get(device) for device in devices]
        if links[0] is None and not any(links):
            return None
        known = [link for link in links if link is not None]
        if len(known) < len(links) or len({id(link.hosts) for link in known}) > 1:
            raise SpecError(
                f"devices of several sets of hosts in one call: {_specs.names(devices)}"
            )
        unique = sorted(set(known), key=lambda link: link.process_index)
        found = known[0].hosts.group(tuple(unique))
        with LOCK:
            if len(_groups) > 4096:
                _groups.clear()
            _groups[devices] = found
    return found


class _Loading(threading.local):
    hosts: HostSet | None = None  # whose message this thread reads


loading = _Loading()


def _find_device(platform: str, device_id: int) -> Any:
    """The device that a host's message means, or ``None``: several sets of hosts may use one id."""
    if loading.hosts is not None:
        for link in loading.hosts.links:
            for device in link.devices:
                if device.id == device_id:
                    return device
    return None


_serialization.device_finders.append(_find_device)
