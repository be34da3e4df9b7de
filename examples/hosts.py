# SPDX-License-Identifier: Apache-2.0
"""Where the Python of an example runs: in its own process, or in host processes (``--hosts``).

The examples are handed CPU devices, and this file alone decides whose. That takes three things of a
program. Arrays cross between these devices and those of its model by ``device_put`` and ``device_get``;
only colocated functions look into an array that is on the former; and bodies get what they need as
arguments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from aiocolocated import Hosts, colocated_cpu_devices, open_hosts

if TYPE_CHECKING:
    import jax


class Here(NamedTuple):
    """This process, in the place of host processes."""

    devices: Sequence[jax.Device]


def open_hosts_or_here(
    count: int, devices: Sequence[jax.Device]
) -> Hosts | contextlib.nullcontext[Here]:
    """Host processes with a CPU device each, or, if ``count`` is 0, the CPU devices beside others.

    What is returned is to be entered, with ``async with`` or, where no event loop runs, with ``with``.
    """
    if count:
        return open_hosts("processes", n=count, cpu_devices=1)
    return contextlib.nullcontext(Here(colocated_cpu_devices(devices)))
