# SPDX-License-Identifier: Apache-2.0
"""Calls that run once on every host."""

from __future__ import annotations

import sys
from typing import Any, ParamSpec, TypeVar

from aiocolocated._channels import new_channel
from aiocolocated._devices import one_device_per_host
from aiocolocated._functions import ColocatedFunction
from aiocolocated._futures import ArrayFuture
from aiocolocated._submission import submit

P = ParamSpec("P")
R = TypeVar("R")


def on_each_host(
    function: ColocatedFunction[P, R], devices: Any, /, *args: P.args, **kwargs: P.kwargs
) -> list[ArrayFuture[R]]:
    """Call a function once on every host, each call by itself.

    Unlike one call over all hosts, each has a result and an error of its own, and a host that is lost
    fails its own call only.

    Args:
        function: a colocated function without devices of its own.
        devices: as for :func:`one_device_per_host`.
        *args: plain Python and NumPy values; they go to every host.
        **kwargs: likewise.

    Returns:
        A future for each host, in the order of :func:`one_device_per_host`; for :func:`gather` and
        :func:`as_completed`.

    Raises:
        SpecError: the function has devices already.

    Ordering: none between the hosts: each call has a channel of its own.

    Example:
        >>> async for future in as_completed(on_each_host(load_shard, hosts, "corpus")):
        ...     print(await future)

    .. versionadded:: 0.4
    """
    frame = sys._getframe(1)
    futures: list[ArrayFuture[R]] = []
    for device in one_device_per_host(devices):
        there = function.specialize(devices=device)
        call = there._prepare_call(new_channel(), args, kwargs, frame.f_code, frame.f_lasti)
        futures.append(submit(call))
    return futures
