# SPDX-License-Identifier: Apache-2.0
"""Closing what lives on a host when nobody refers to it any more, or the interpreter exits."""

from __future__ import annotations

from typing import Any, Protocol

from aiocolocated import _service
from aiocolocated._ordering import Gate
from aiocolocated._runtime import before_exit


class Closable(Protocol):
    """An object or a stream, as its host sees it."""

    made: bool  # whether there is anything to close
    ended: bool  # all by itself
    closing: Any  # the call that closes it

    @property
    def used(self) -> bool:
        """Whether there is anything to close, or may be once calls are over."""
        ...

    def close(self, *, dropped: bool = False) -> Any:
        """Begin to close it, once; the call that does."""


# Things that were dropped are closed one after the other, in the order in which they were dropped.
dropped_gate: Gate[Any] = Gate(1)

# The code that submits calls which no code of the user submits.
HERE = (lambda: None).__code__


class Handle:
    """What keeps something on a host open; whoever uses it has this, and its calls have not."""

    __slots__ = ("closable",)

    def __init__(self, closable: Closable) -> None:
        self.closable = closable

    def __del__(self) -> None:
        # The collector may call this anywhere: no lock, no thread start, no loop.
        closable = self.closable
        if closable.closing is None and not closable.ended and closable.used:
            _service.inbox.put(_Dropped(self.closable))


class _Dropped:
    """The message of a handle's finalizer to the service thread."""

    __slots__ = ("_closable",)

    def __init__(self, closable: Closable) -> None:
        self._closable = closable

    def __call__(self) -> None:
        self._closable.close(dropped=True)


# What was not closed. At exit it is, when no other call is in flight any more. Not weakly: for what is
# only in a reference cycle the collector calls every `__del__` and `finally` itself, where it runs.
_open: set[Closable] = set()


def track(closable: Closable) -> None:
    """Close it at exit, if it is open then."""
    _open.add(closable)


def untrack(closable: Closable) -> None:
    _open.discard(closable)


@before_exit
def _close_all() -> None:
    for closable in list(_open):
        if closable.made:
            closable.close(dropped=True)
