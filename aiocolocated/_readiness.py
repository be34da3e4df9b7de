# SPDX-License-Identifier: Apache-2.0
"""Waiting for arrays: one poller for any number of them.

A thread that blocks on one array cannot see another become ready, and a thread per array is no way
to wait for thousands. So the service thread polls, each array with a pause of about 5 % of its age:
a late result is at most that much later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from aiocolocated import _compat, _service
from aiocolocated._exceptions import ArrayDeletedError

_FIRST_PAUSE = 50e-6  # seconds
_AGE_FRACTION = 0.05
_LONGEST_PAUSE = 0.02
_PAUSE_PER_PENDING = 50e-6  # keeps the poller below some percent of a core


class _Poll:
    __slots__ = ("arrays", "done", "since")

    def __init__(self, arrays: Sequence[Any], done: Callable[[], None]) -> None:
        self.arrays: Sequence[Any] = arrays
        self.done = done
        self.since = monotonic()

    def start(self) -> None:
        global _pending
        _pending += 1
        self.check()

    def check(self) -> None:
        global _pending
        if _compat.all_ready(self.arrays):
            _pending -= 1
            self.arrays = ()
            self.done()
            return
        now = monotonic()
        longest = _LONGEST_PAUSE + _pending * _PAUSE_PER_PENDING
        pause = min(max(_FIRST_PAUSE, (now - self.since) * _AGE_FRACTION), longest)
        _service.call_at(now + pause, self.check)


_pending = 0


def when_ready(arrays: Sequence[Any], done: Callable[[], None]) -> None:
    """Call ``done`` on the service thread once every array is computed, failed or deleted."""
    _service.post(_Poll(arrays, done).start)


def raise_failed(arrays: Sequence[Any]) -> None:
    """Raise the error of a failed or deleted array; for arrays that are known to be ready.

    Failed arrays count as ready, so this look is needed after every wait.
    """
    try:
        _compat.raise_failed(arrays)
    except RuntimeError as error:
        for array in arrays:
            if array.is_deleted():
                raise ArrayDeletedError(
                    f"an array of shape {array.shape} and dtype {array.dtype} was deleted or donated "
                    "before it was awaited"
                ) from error
        raise
