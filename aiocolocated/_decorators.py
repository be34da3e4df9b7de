# SPDX-License-Identifier: Apache-2.0
"""The decorator: what kind of colocated function it makes of a function."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, ParamSpec, TypeVar, overload

from aiocolocated._exceptions import ArgumentError
from aiocolocated._functions import ColocatedFunction
from aiocolocated._specializations import FunctionCode
from aiocolocated._streams import ColocatedGenerator
from aiocolocated.hosts.inprocess import inprocess_host

P = ParamSpec("P")
R = TypeVar("R")


@overload
def colocated_python(fun: Callable[P, Coroutine[Any, Any, R]]) -> ColocatedFunction[P, R]: ...
@overload
def colocated_python(  # type: ignore[overload-overlap] # an iterator is a result, too
    fun: Callable[P, AsyncIterator[R]],
) -> ColocatedGenerator[P, R]: ...
@overload
def colocated_python(  # type: ignore[overload-overlap]
    fun: Callable[P, Iterator[R]],
) -> ColocatedGenerator[P, R]: ...
@overload
def colocated_python(fun: Callable[P, R]) -> ColocatedFunction[P, R]: ...
def colocated_python(fun: Callable[..., Any]) -> Any:
    """Make a function run on the hosts of its arguments' devices, awaitably.

    The body sees :class:`jax.Array` arguments on CPU devices beside the accelerators (see
    :func:`colocated_cpu_devices`), is ordinary Python, and returns a pytree. Its code is shipped by
    value once, on first use: what it captures is copied, except arrays and jitted functions, which
    are carried by reference in process. Keep what it shares with others in an importable module.

    Args:
        fun: a function, coroutine function, or generator function of either kind. It is not changed.
            A plain body runs on a worker thread, a coroutine on the host's own event loop.

    Returns:
        A function with the same signature that returns an :class:`ArrayFuture` at once, for a
        generator function an :class:`ArrayStream`.

    Raises:
        ArgumentError: ``fun`` is a class, colocated already, or no callable.

    Ordering: calls go to the current task channel: two calls of one task run one after the other,
    in the order of the call expressions. ``gather(f(x), f(y))`` is *one* channel; for concurrency
    use :meth:`TaskGroup.start_soon`, :meth:`ColocatedFunction.map`, or several channels or tasks.

    Thread safety: may be called from any thread, with or without a loop.

    Example:
        >>> @colocated_python
        ... def normalize(x):                      # x: u8[batch, pixel]
        ...     return x.astype("float32") / 255
        >>> y = await normalize(x)                 # y: f32[batch, pixel], on x's devices

    Source: ``jax.experimental.colocated_python.colocated_python`` (JAX 0.10).

    .. versionadded:: 0.1
    """
    if isinstance(fun, (ColocatedFunction, ColocatedGenerator)):
        raise ArgumentError(f"{fun!r} is a colocated function already")
    if isinstance(fun, type):
        raise ArgumentError(
            f"colocated_python takes a function, got the class {fun.__qualname__}; for classes there "
            "is colocated_python_class"
        )
    if not callable(fun):
        raise ArgumentError(f"colocated_python takes a function, got {fun!r}")
    function = ColocatedFunction[..., Any](FunctionCode(fun, inprocess_host()))
    return ColocatedGenerator(function) if "generator" in function._base.kind else function
