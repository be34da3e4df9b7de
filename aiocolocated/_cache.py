# SPDX-License-Identifier: Apache-2.0
"""The specialization cache: one entry per function, specs and devices, least recently used out."""

from __future__ import annotations

import dataclasses
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
V = TypeVar("V")

_MAXSIZE = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class CacheInfo:
    """What the specialization caches hold.

    Attributes:
        misses: specializations made since the process started.
        currsize: specializations held now.
        maxsize: the bound per function.
        functions: colocated functions alive.
        shipped: functions whose code was shipped to this process's host.
    """

    misses: int
    currsize: int
    maxsize: int
    functions: int
    shipped: int


class CacheUser(Protocol):
    """What keeps the entry that it used last at hand."""

    _last: Any


class SpecializationCache(Generic[V]):
    """Specializations of one function; concurrent first calls make one."""

    __slots__ = ("__weakref__", "_entries", "_lock", "_users")

    def __init__(self) -> None:
        self._users: weakref.WeakSet[CacheUser] = weakref.WeakSet()
        self._entries: OrderedDict[Hashable, V] = OrderedDict()
        self._lock = threading.RLock()
        _all.add(self)

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The entry of ``key``, made by ``make`` if absent. ``make`` must be quick: others wait."""
        global _misses
        with self._lock:
            value = self._entries.get(key)
            if value is not None:
                self._entries.move_to_end(key)
                return value
            value = self._entries[key] = make()
            with _misses_lock:
                _misses += 1
            if len(self._entries) > _MAXSIZE:
                self._entries.popitem(last=False)
            return value

    def add_user(self, user: CacheUser) -> None:
        """Note that ``user`` keeps an entry at hand."""
        with self._lock:
            self._users.add(user)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            for user in listed(self._users):
                user._last = None

    def __len__(self) -> int:
        return len(self._entries)


_all: weakref.WeakSet[SpecializationCache[Any]] = weakref.WeakSet()
_misses = 0
_misses_lock = threading.Lock()


def listed(members: weakref.WeakSet[T]) -> list[T]:
    """The members, although other threads may add some and the collector take some away."""
    while True:
        try:
            return list(members)
        except RuntimeError:  # changed size during iteration
            continue


def clear_all() -> None:
    for cache in listed(_all):
        cache.clear()


def info(shipped: int) -> CacheInfo:
    caches = listed(_all)
    return CacheInfo(_misses, sum(map(len, caches)), _MAXSIZE, len(caches), shipped)


def function_key(function: Callable[..., Any] | None) -> Hashable:
    """A key that is equal for functions made anew by the same code over equal values.

    ``f.specialize(out_specs_fn=lambda x: spec)`` in a loop must not make an entry each time.
    """
    if not isinstance(function, types.FunctionType):
        try:
            hash(function)
        except TypeError:
            return type(function), id(function)  # its entry keeps it alive
        return function
    try:
        cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
        key = (function.__code__, id(function.__globals__), function.__defaults__, cells)
        hash(key)
    except (TypeError, ValueError):  # unhashable, or a variable that is not assigned yet
        return function
    return key if not function.__kwdefaults__ else function
