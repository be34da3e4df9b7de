# SPDX-License-Identifier: Apache-2.0
"""Names that several layers share."""

from __future__ import annotations

import enum
from typing import Any, Literal, TypeAlias

PyTree: TypeAlias = Any
OnError: TypeAlias = Literal["continue", "stop"]


class CallState(enum.IntEnum):
    """Where a call is. Order matters: everything from ``READY`` on is settled.

    ``QUEUED -> RUNNING -> DISPATCHED -> READY``, or ``FAILED``, or ``CANCELLED``, from any of the
    first three. *Dispatched*: the body has returned, its arrays exist and may still be computing.
    """

    QUEUED = 0
    RUNNING = 1
    DISPATCHED = 2
    READY = 3
    FAILED = 4
    CANCELLED = 5


# Plain ints for the hot path: comparing enum members costs three times as much.
QUEUED, RUNNING, DISPATCHED, READY, FAILED, CANCELLED = (int(s) for s in CallState)


def publish(namespace: dict[str, Any], module: str) -> None:
    """Make the names in ``__all__`` say that they live in ``module``, where tracebacks find them."""
    for name in namespace["__all__"]:
        value = namespace[name]
        if getattr(value, "__module__", "").startswith("aiocolocated."):
            try:
                value.__module__ = module
            except AttributeError:  # an instance
                continue
