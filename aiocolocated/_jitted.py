# SPDX-License-Identifier: Apache-2.0
"""Jitted functions that can be awaited."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, cast

import jax

from aiocolocated import _compat
from aiocolocated._channels import current_channel, new_channel
from aiocolocated._futures import ArrayFuture
from aiocolocated._plans import RunPlan
from aiocolocated._submission import submit

P = ParamSpec("P")
R = TypeVar("R")

_get_running_loop = asyncio._get_running_loop


class JittedFunction(Generic[P, R]):
    """A jitted function whose call returns an :class:`ArrayFuture` at once; see :func:`awaitable_jit`.

    .. versionadded:: 0.3
    """

    __slots__ = ("__dict__", "__weakref__", "_first", "_jitted", "_plan")

    def __init__(self, jitted: Callable[P, R]) -> None:
        self._jitted: Any = jitted
        self._plan = RunPlan(jitted)
        self._first: tuple[Any, ...] = ()  # the object whose method it is
        functools.update_wrapper(cast("Any", self), jitted)

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> JittedFunction[..., R]:
        if instance is None:
            return self
        bound = JittedFunction[..., R](self._jitted)
        bound._first = (instance,)
        return bound

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> ArrayFuture[R]:
        """Trace, compile and dispatch in the current channel, off the loop."""
        if _compat.tracing():  # inside another jitted function: a part of that
            return cast("ArrayFuture[R]", self._jitted(*self._first, *args, **kwargs))
        frame = sys._getframe(1)
        channel = current_channel(_get_running_loop())
        return submit(self._prepare_call(channel, args, kwargs, frame.f_code, frame.f_lasti))

    @property
    def _prepare_call(self) -> Callable[..., ArrayFuture[R]]:
        """For channels and task groups."""
        first, prepare = self._first, self._plan.prepare
        if not first:
            return prepare

        def prepare_bound(channel: Any, args: Any, *rest: Any) -> ArrayFuture[R]:
            return prepare(channel, (*first, *args), *rest)

        return prepare_bound

    async def warm_up(self, *specs: Any, **kwspecs: Any) -> None:
        """Trace and compile for some arguments, ahead of the first call, off the loop.

        Args:
            *specs: as the function's arguments, with :class:`jax.ShapeDtypeStruct` (and its sharding, where
                the call's arrays have one of their own) or arrays in place of arrays.
            **kwspecs: its keyword arguments.

        Raises:
            Exception: what tracing or compiling raised.

        Ordering: none; takes a channel of its own, and several warm-ups overlap.

        Cancellation: compiling cannot be interrupted; it goes on in the background.

        Example:
            >>> await step.warm_up(params, jax.ShapeDtypeStruct((128, 784), "float32"))
        """
        frame = sys._getframe(1)
        plan = RunPlan(functools.partial(_compile, self._jitted))
        plan.name = f"warm_up of {self._plan.name}"
        channel = new_channel(plan.name)
        args = (*self._first, *specs)
        await submit(plan.prepare(channel, args, kwspecs, frame.f_code, frame.f_lasti))

    def __repr__(self) -> str:
        return f"<awaitable {self._plan.name}>"


def _compile(jitted: Any, *specs: Any, **kwspecs: Any) -> None:
    # JAX keeps the executable beside the lowering, where a call with such arguments finds it.
    jitted.lower(*specs, **kwspecs).compile()


def awaitable_jit(fn: Callable[P, R]) -> JittedFunction[P, R]:
    """Make a jitted function awaitable: it is traced, compiled and dispatched off the event loop.

    Calling a jitted function in a coroutine stops the loop while JAX traces and compiles (seconds),
    while it runs a callback of the program (any time), and on CPU while it computes what it runs inline.

    Args:
        fn: a function, which is jitted with :func:`jax.jit`, or what ``jax.jit`` returned, with options
            of its own (``static_argnames``, ``donate_argnums``, ``out_shardings``, ...).

    Returns:
        A :class:`JittedFunction`. Its call returns an :class:`ArrayFuture` at once and takes array
        futures as arguments, arrays of any sharding, and whatever else the jitted function takes.

    Raises:
        ArgumentError: ``fn`` is a coroutine function, or not callable.

    Ordering: as for a colocated function: the current channel, in program order.

    Cancellation: a call that runs cannot be interrupted; its result is discarded.

    Thread safety: any thread.

    Example:
        >>> @awaitable_jit
        ... def step(params, batch):
        ...     return update(params, io_callback(look_up, spec, batch))
        >>> params = await step(params, await fetch())

    Source: :func:`jax.jit`.

    .. versionadded:: 0.3
    """
    if isinstance(fn, JittedFunction):
        return fn
    RunPlan(fn)  # refuses coroutine functions, and what cannot be called
    if not hasattr(fn, "lower"):
        fn = jax.jit(fn)
    return JittedFunction(fn)
