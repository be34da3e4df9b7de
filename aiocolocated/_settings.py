# SPDX-License-Identifier: Apache-2.0
"""Limits and grace periods, the one lock, and what a forked child may not do."""

from __future__ import annotations

import dataclasses
import os
import threading
from typing import Any, TypedDict

from aiocolocated import _compat
from aiocolocated._exceptions import ForkedProcessError

# One re-entrant lock guards every state machine. It is held for a few hundred nanoseconds and no
# user code runs under it on purpose; re-entrant because the garbage collector may run a user's
# ``__del__`` at any allocation, and that may cancel a future.
LOCK = threading.RLock()


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Limits and grace periods of the process; change them with :func:`configure`.

    Attributes:
        worker_limit: bodies that may run at once on pool threads. Bodies that wait inside the
            library do not count.
        worker_ceiling: threads that may exist at all; a wait inside a body beyond it raises
            :exc:`WorkerLimitError`.
        worker_idle_timeout: seconds after which an idle thread ends.
        slow_call: seconds after which a running call is logged, once; ``None`` never.
        slow_callback: seconds after which a callback of a jitted program that is not over is logged,
            once; ``None`` never.
        exit_grace: seconds that interpreter exit waits for submitted calls; ``None`` without limit.
        multi_device_in_flight: programs over several devices, dispatched through
            :meth:`TaskChannel.run`, that may be in flight at once in the process.
        transfer_bytes_in_flight: bytes that :func:`device_put` and :func:`device_get` may have in flight
            at once in the process. A larger transfer goes alone.
        strict: plain Python values go to bodies and back by value on the in-process host too, pickled,
            as they do on other hosts: what a body does to its arguments does not show, and what cannot
            be pickled is refused. Arrays are carried by reference all the same. The pytest plugin
            turns it on.
    """

    worker_limit: int = 64
    worker_ceiling: int = 1024
    worker_idle_timeout: float = 10.0
    slow_call: float | None = 60.0
    slow_callback: float | None = 5.0
    exit_grace: float | None = None
    multi_device_in_flight: int = 8
    transfer_bytes_in_flight: int = 1 << 30
    strict: bool = False

    def __post_init__(self) -> None:
        for name in (
            "worker_limit",
            "worker_ceiling",
            "multi_device_in_flight",
            "transfer_bytes_in_flight",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
        strict: Any = self.strict
        if not isinstance(strict, bool):
            raise ValueError(f"strict must be a bool, got {strict!r}")
        for name in ("worker_idle_timeout", "slow_call", "slow_callback", "exit_grace"):
            value = getattr(self, name)
            if value is None and name != "worker_idle_timeout":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                raise ValueError(f"{name} must be seconds, 0 or more, got {value!r}")


class SettingsChanges(TypedDict, total=False):
    """The keywords of :func:`configure`, for type checkers."""

    worker_limit: int
    worker_ceiling: int
    worker_idle_timeout: float
    slow_call: float | None
    slow_callback: float | None
    exit_grace: float | None
    multi_device_in_flight: int
    transfer_bytes_in_flight: int
    strict: bool


current = Settings()
strict = current.strict  # at hand for every call
started = False  # any thread of the library
forked = False  # after that


def change(**changes: Any) -> Settings:
    """Replace some settings, after checking them."""
    global current, strict
    with LOCK:
        current = dataclasses.replace(current, **changes)
        strict = current.strict
        return current


def refuse_fork() -> ForkedProcessError:
    return ForkedProcessError(
        f"process {os.getpid()} was forked after aiocolocated had started: its threads stayed in the "
        "parent, and JAX hangs in forked children. Start processes with the 'spawn' or 'forkserver' "
        "method, or fork before the first colocated call."
    )


def _after_fork_in_child() -> None:
    global forked
    forked = started
    _compat.reset_lock(LOCK)  # another thread, which the child lacks, may have held it


os.register_at_fork(after_in_child=_after_fork_in_child)
