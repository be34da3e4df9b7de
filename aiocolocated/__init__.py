# SPDX-License-Identifier: Apache-2.0
"""Await ordinary Python that runs next to JAX devices.

:func:`colocated_python` turns a function into one whose call returns an :class:`ArrayFuture` at
once; channels keep order, task groups give concurrency, and the event loop is never blocked.
"""

from __future__ import annotations

from aiocolocated import from_thread as from_thread
from aiocolocated._cache import CacheInfo as CacheInfo
from aiocolocated._channels import TaskChannel as TaskChannel
from aiocolocated._channels import TaskChannelStatistics as TaskChannelStatistics
from aiocolocated._channels import open_task_channel as open_task_channel
from aiocolocated._contexts import jax_scope as jax_scope
from aiocolocated._exceptions import AiocolocatedError as AiocolocatedError
from aiocolocated._exceptions import ArgumentError as ArgumentError
from aiocolocated._exceptions import ArrayDeletedError as ArrayDeletedError
from aiocolocated._exceptions import BodyError as BodyError
from aiocolocated._exceptions import CallCancelledError as CallCancelledError
from aiocolocated._exceptions import ChannelClosedError as ChannelClosedError
from aiocolocated._exceptions import ChannelStoppedError as ChannelStoppedError
from aiocolocated._exceptions import DeadlockError as DeadlockError
from aiocolocated._exceptions import ForkedProcessError as ForkedProcessError
from aiocolocated._exceptions import NotShippableError as NotShippableError
from aiocolocated._exceptions import RemoteError as RemoteError
from aiocolocated._exceptions import ShutdownError as ShutdownError
from aiocolocated._exceptions import SpecError as SpecError
from aiocolocated._exceptions import TracedCallError as TracedCallError
from aiocolocated._exceptions import WorkerLimitError as WorkerLimitError
from aiocolocated._exceptions import WouldBlock as WouldBlock
from aiocolocated._functions import ColocatedFunction as ColocatedFunction
from aiocolocated._functions import cache_info as cache_info
from aiocolocated._functions import clear_caches as clear_caches
from aiocolocated._functions import colocated_cpu_devices as colocated_cpu_devices
from aiocolocated._functions import colocated_python as colocated_python
from aiocolocated._futures import ArrayFuture as ArrayFuture
from aiocolocated._futures import as_argument as as_argument
from aiocolocated._runtime import CallInfo as CallInfo
from aiocolocated._runtime import Runtime as Runtime
from aiocolocated._runtime import RuntimeStatistics as RuntimeStatistics
from aiocolocated._runtime import configure as configure
from aiocolocated._runtime import runtime as runtime
from aiocolocated._settings import Settings as Settings
from aiocolocated._taskgroups import TaskGroup as TaskGroup
from aiocolocated._types import CallState as CallState
from aiocolocated._waiting import as_completed as as_completed
from aiocolocated._waiting import gather as gather
from aiocolocated._waiting import wait_until_ready as wait_until_ready

__version__ = "0.1.0"

__all__ = [
    "AiocolocatedError",
    "ArgumentError",
    "ArrayDeletedError",
    "ArrayFuture",
    "BodyError",
    "CacheInfo",
    "CallCancelledError",
    "CallInfo",
    "CallState",
    "ChannelClosedError",
    "ChannelStoppedError",
    "ColocatedFunction",
    "DeadlockError",
    "ForkedProcessError",
    "NotShippableError",
    "RemoteError",
    "Runtime",
    "RuntimeStatistics",
    "Settings",
    "ShutdownError",
    "SpecError",
    "TaskChannel",
    "TaskChannelStatistics",
    "TaskGroup",
    "TracedCallError",
    "WorkerLimitError",
    "WouldBlock",
    "as_argument",
    "as_completed",
    "cache_info",
    "clear_caches",
    "colocated_cpu_devices",
    "colocated_python",
    "configure",
    "from_thread",
    "gather",
    "jax_scope",
    "open_task_channel",
    "runtime",
    "wait_until_ready",
]

for _name in __all__:
    _object = globals()[_name]
    if getattr(_object, "__module__", "").startswith("aiocolocated._"):
        try:
            _object.__module__ = "aiocolocated"
        except AttributeError:  # an instance
            continue
del _name, _object
