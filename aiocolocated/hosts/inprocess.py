# SPDX-License-Identifier: Apache-2.0
"""The in-process host: bodies run on worker threads of this process."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from aiocolocated import _serialization
from aiocolocated.hosts.base import Host, Shipped


class InProcessHost(Host):
    """Ships code through the pickler, so that what works here works on other hosts."""

    name = "in-process"
    process_index = 0

    def __init__(self) -> None:
        # By id: functions may be equal, unhashable, or take no weak references.
        self._copies: weakref.WeakValueDictionary[int, Shipped] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def load(self, function: Callable[..., Any]) -> Shipped:
        with self._lock:
            copy = self._copies.get(id(function))
            if copy is None:
                copy = self._copies[id(function)] = Shipped(function)
        with copy.lock:
            if copy.body is None:
                copy.body = _serialization.copy_function(function)
        return copy

    @property
    def shipped(self) -> int:
        return len(self._copies)


_host: InProcessHost | None = None


def inprocess_host() -> InProcessHost:
    """The one host of this process."""
    global _host
    if _host is None:
        _host = InProcessHost()
    return _host
