# SPDX-License-Identifier: Apache-2.0
"""The in-process host: bodies run on worker threads of this process."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from aiocolocated import _serialization
from aiocolocated.hosts.base import Host


class InProcessHost(Host):
    """Ships code through the pickler, so that what works here works on other hosts."""

    name = "in-process"
    process_index = 0

    def __init__(self) -> None:
        self._copies: weakref.WeakKeyDictionary[Any, _Copy] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def load(self, function: Callable[..., Any]) -> Callable[..., Any]:
        with self._lock:
            try:
                copy = self._copies.setdefault(function, _Copy())
            except TypeError:  # a callable object that is not hashable or takes no weak references
                copy = _Copy()
        with copy.lock:
            if copy.body is None:
                copy.body = _serialization.copy_function(function)
            return copy.body

    @property
    def shipped(self) -> int:
        return len(self._copies)


class _Copy:
    __slots__ = ("body", "lock")

    def __init__(self) -> None:
        self.body: Callable[..., Any] | None = None
        self.lock = threading.Lock()


_host: InProcessHost | None = None


def inprocess_host() -> InProcessHost:
    """The one host of this process."""
    global _host
    if _host is None:
        _host = InProcessHost()
    return _host
