# SPDX-License-Identifier: Apache-2.0
"""Await ordinary Python that runs next to JAX devices.

:func:`colocated_python` turns a function into one whose call returns an :class:`ArrayFuture` at
once; channels keep order, task groups give concurrency, and the event loop is never blocked.
"""

from aiocolocated import from_thread as from_thread
from aiocolocated._blocks import open_task_channel as open_task_channel
from aiocolocated._cache import CacheInfo as CacheInfo
from aiocolocated._callback_errors import callback_error as callback_error
from aiocolocated._callbacks import (
    debug_callback as debug_callback,
    io_callback as io_callback,
    pure_callback as pure_callback,
)
from aiocolocated._channels import (
    TaskChannel as TaskChannel,
    TaskChannelStatistics as TaskChannelStatistics,
)
from aiocolocated._classes import colocated_python_class as colocated_python_class
from aiocolocated._contexts import jax_scope as jax_scope
from aiocolocated._decorators import colocated_python as colocated_python
from aiocolocated._devices import (
    colocated_cpu_devices as colocated_cpu_devices,
    one_device_per_host as one_device_per_host,
)
from aiocolocated._effects import effects_barrier as effects_barrier
from aiocolocated._exceptions import (
    AiocolocatedError as AiocolocatedError,
    ArgumentError as ArgumentError,
    ArrayDeletedError as ArrayDeletedError,
    BodyError as BodyError,
    CallCancelledError as CallCancelledError,
    ChannelClosedError as ChannelClosedError,
    ChannelStoppedError as ChannelStoppedError,
    DeadlockError as DeadlockError,
    ForkedProcessError as ForkedProcessError,
    HostError as HostError,
    HostLostError as HostLostError,
    HostStartError as HostStartError,
    NotShippableError as NotShippableError,
    ObjectClosedError as ObjectClosedError,
    RemoteError as RemoteError,
    ShutdownError as ShutdownError,
    SpecError as SpecError,
    StaleHandleError as StaleHandleError,
    TracedCallError as TracedCallError,
    WorkerLimitError as WorkerLimitError,
    WouldBlock as WouldBlock,
)
from aiocolocated._fanout import on_each_host as on_each_host
from aiocolocated._functions import (
    ColocatedFunction as ColocatedFunction,
    cache_info as cache_info,
    clear_caches as clear_caches,
)
from aiocolocated._futures import ArrayFuture as ArrayFuture, as_argument as as_argument
from aiocolocated._jitted import (
    JittedFunction as JittedFunction,
    awaitable_jit as awaitable_jit,
)
from aiocolocated._proxies import ColocatedObject as ColocatedObject
from aiocolocated._runtime import (
    CallInfo as CallInfo,
    Runtime as Runtime,
    RuntimeStatistics as RuntimeStatistics,
    configure as configure,
    runtime as runtime,
)
from aiocolocated._settings import Settings as Settings
from aiocolocated._streams import (
    ArrayStream as ArrayStream,
    ColocatedGenerator as ColocatedGenerator,
)
from aiocolocated._taskgroups import TaskGroup as TaskGroup
from aiocolocated._transfers import device_get as device_get, device_put as device_put
from aiocolocated._types import CallState as CallState, publish as _publish
from aiocolocated._waiting import (
    as_completed as as_completed,
    gather as gather,
    wait_until_ready as wait_until_ready,
)
from aiocolocated.hosts._views import HostStatistics as HostStatistics
from aiocolocated.hosts.controller import (
    Hosts as Hosts,
    RemoteHost as RemoteHost,
    open_hosts as open_hosts,
)

__version__ = "0.4.0"

__all__ = [
    "AiocolocatedError",
    "ArgumentError",
    "ArrayDeletedError",
    "ArrayFuture",
    "ArrayStream",
    "BodyError",
    "CacheInfo",
    "CallCancelledError",
    "CallInfo",
    "CallState",
    "ChannelClosedError",
    "ChannelStoppedError",
    "ColocatedFunction",
    "ColocatedGenerator",
    "ColocatedObject",
    "DeadlockError",
    "ForkedProcessError",
    "HostError",
    "HostLostError",
    "HostStartError",
    "HostStatistics",
    "Hosts",
    "JittedFunction",
    "NotShippableError",
    "ObjectClosedError",
    "RemoteError",
    "RemoteHost",
    "Runtime",
    "RuntimeStatistics",
    "Settings",
    "ShutdownError",
    "SpecError",
    "StaleHandleError",
    "TaskChannel",
    "TaskChannelStatistics",
    "TaskGroup",
    "TracedCallError",
    "WorkerLimitError",
    "WouldBlock",
    "as_argument",
    "as_completed",
    "awaitable_jit",
    "cache_info",
    "callback_error",
    "clear_caches",
    "colocated_cpu_devices",
    "colocated_python",
    "colocated_python_class",
    "configure",
    "debug_callback",
    "device_get",
    "device_put",
    "effects_barrier",
    "from_thread",
    "gather",
    "io_callback",
    "jax_scope",
    "on_each_host",
    "one_device_per_host",
    "open_hosts",
    "open_task_channel",
    "pure_callback",
    "runtime",
    "wait_until_ready",
]

_publish(globals(), "aiocolocated")
