# SPDX-License-Identifier: Apache-2.0
"""Tools for testing programs that await JAX work: checks for leaks and blocked loops, and helpers.

Installed with the package, ``aiocolocated.testing`` is also a pytest plugin, with fixtures, marks and
settings for everything here; ``docs/how-to/testing.md`` shows them. Nothing in this module needs
pytest, importing it starts no JAX backend, and only :func:`forbid_blocking` needs an extra
(``pip install 'aiocolocated[testing]'``).
"""

from __future__ import annotations

from aiocolocated._types import publish as _publish
from aiocolocated.testing._gap import LoopGap as LoopGap, measure_loop_gap as measure_loop_gap
from aiocolocated.testing._guard import (
    BlockedCall as BlockedCall,
    BlockingGuard as BlockingGuard,
    allow_blocking as allow_blocking,
    forbid_blocking as forbid_blocking,
)
from aiocolocated.testing._leaks import LeakCheck as LeakCheck, LeakError as LeakError
from aiocolocated.testing._recorder import (
    Gate as Gate,
    RecordedEvent as RecordedEvent,
    Recorder as Recorder,
    Rendezvous as Rendezvous,
)

__all__ = [
    "BlockedCall",
    "BlockingGuard",
    "Gate",
    "LeakCheck",
    "LeakError",
    "LoopGap",
    "RecordedEvent",
    "Recorder",
    "Rendezvous",
    "allow_blocking",
    "forbid_blocking",
    "measure_loop_gap",
]

_publish(globals(), "aiocolocated.testing")
