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
from aiocolocated._callback_errors import unwrapped
from aiocolocated._exceptions import ArrayDeletedError

_FIRST_PAUSE = 50e-6  # seconds
_AGE_FRACTION = 0.05
_LONGEST_PAUSE = 0.02
_PAUSE_PER_PENDING = 50e-6  # keeps the poller below some percent of a core


class Poll:
    """A wait for arrays."""

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
            self.stop()
            self.done()
            return
        now = monotonic()
        longest = _LONGEST_PAUSE + _pending * _PAUSE_PER_PENDING
        pause = min(max(_FIRST_PAUSE, (now - self.since) * _AGE_FRACTION), longest)
        _service.call_at(now + pause, self.check)

    def stop(self) -> None:
        """Let go of the arrays: there is nothing to wait for any more (any thread)."""
        self.arrays = ()


_pending = 0


def when_ready(arrays: Sequence[Any], done: Callable[[], None]) -> Poll:
    """Call ``done`` on the service thread once every array is computed, failed or deleted.

    Who gives up before that calls ``stop()`` on what is returned; ``done`` is called then as well.
    """
    poll = Poll(arrays, done)
    _service.post(poll.start)
    return poll


def check(arrays: Sequence[Any]) -> bool:
    """Whether every array is computed; if so, raises the error of a failed or deleted one.

    Failed arrays count as ready, so this look is needed after every wait.
    """
    array = None
    try:
        return _compat.ready_or_raise(arrays)
    except RuntimeError as error:
        found = unwrapped(error)
        if found is error:
            found = None  # type: ignore[assignment] # a traceback keeps this frame
            for array in arrays:
                if array.is_deleted():
                    raise ArrayDeletedError(
                        f"an array of shape {array.shape} and dtype {array.dtype} was deleted or donated "
                        "before it was awaited"
                    ) from error
            raise
    finally:
        array = None
        del arrays
    try:
        raise found  # not above, or its context would no longer be its own
    finally:
        del found
