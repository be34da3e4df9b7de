# SPDX-License-Identifier: Apache-2.0
"""Plans: what a call runs. This one takes any callable as it is."""

from __future__ import annotations

import asyncio
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.core import Tracer

from aiocolocated import _compat, _programs, _values
from aiocolocated._exceptions import ArgumentError
from aiocolocated._futures import ArrayFuture
from aiocolocated._owners import Owner, current_owner

if TYPE_CHECKING:
    from aiocolocated._calls import Call
    from aiocolocated._protocols import Args, CallChannel, Kwargs

ArrayImpl = _compat.ArrayImpl
_tree_flatten = jax.tree_util.tree_flatten
_get_running_loop = asyncio._get_running_loop


def futures_among(args: Args, kwargs: Kwargs) -> list[Call]:
    """The array futures in a call's arguments."""
    return [x for x in _tree_flatten((args, kwargs))[0] if type(x) is ArrayFuture]


def collect(
    name: str, value: Any, place: Callable[[Any, Any], Any] | None = None
) -> tuple[Any, list[Any]]:
    """The arrays in a result; NumPy leaves placed; what can only be a mistake refused."""
    leaves, tree = _tree_flatten(value)
    arrays: list[Any] = []
    numpy_seen = False
    for leaf in leaves:
        array = _values.array_of(leaf)
        if array is not None:
            arrays.append(array)
        elif _values.is_numpy(leaf):
            numpy_seen = True
        elif type(leaf) is ArrayFuture or isinstance(leaf, _values.unfinished):
            for other in leaves:
                if isinstance(other, types.CoroutineType):
                    other.close()
            if type(leaf) is ArrayFuture:
                raise ArgumentError(
                    f"{name} returned an ArrayFuture: call its result(), or await it, in the body"
                )
            raise _values.refused(leaf, f"{name} returned")
    if numpy_seen and place is not None:
        with_path, tree = jax.tree_util.tree_flatten_with_path(value)
        placed = [place(x, path) if _values.is_numpy(x) else x for path, x in with_path]
        arrays = [a for x in placed if (a := _values.array_of(x)) is not None]
        value = jax.tree_util.tree_unflatten(tree, placed)
    return value, arrays


class NoArguments:
    """What a plan says whose calls have no arguments (part of a ``Plan``)."""

    __slots__ = ()
    ships = False
    dispatches = False

    def futures(self, args: Args, kwargs: Kwargs) -> Sequence[Any]:
        return ()

    def bind(self, args: Args, kwargs: Kwargs, values: dict[int, Any]) -> tuple[Args, Kwargs]:
        return args, kwargs


class RunPlan:
    """Any callable, used as it is (a ``Plan``)."""

    __slots__ = ("_function", "host", "name")
    devices = None
    ships = False
    dispatches = True

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise ArgumentError(
                f"a channel runs ordinary callables, got {function!r}; "
                "await coroutines in a task of their own"
            )
        self._function = function
        self.name = getattr(function, "__qualname__", None) or repr(function)
        self.host = "in-process"

    def prepare(
        self,
        channel: CallChannel,
        args: Args,
        kwargs: Kwargs,
        code: types.CodeType,
        lasti: int,
        owner: Owner | None = None,
    ) -> ArrayFuture[Any]:
        if _compat.tracing():
            raise _values.refuse_traced(self.name)
        call: ArrayFuture[Any] = ArrayFuture._create(
            self, args, kwargs, channel, owner or current_owner(), _get_running_loop(), code, lasti
        )
        for leaf in _tree_flatten((args, kwargs))[0]:
            if type(leaf) is ArrayFuture:
                call._convert = True
            elif type(leaf) is ArrayImpl:
                call._wide = call._wide or len(leaf.sharding.device_set) > 1
            elif isinstance(leaf, Tracer):  # one that escaped its trace
                raise _values.refuse_traced(self.name)
        if call._convert:
            call._futures = self.futures(args, kwargs)
        return call

    def is_loaded(self) -> bool:
        return True

    def body(self) -> Callable[..., Any]:
        if _compat.is_jitted(self._function):
            return functools.partial(_programs.call, self._function)
        return self._function

    def futures(self, args: Args, kwargs: Kwargs) -> list[Call]:
        return futures_among(args, kwargs)

    def bind(self, args: Args, kwargs: Kwargs, values: dict[int, Any]) -> tuple[Args, Kwargs]:
        leaves, tree = _tree_flatten((args, kwargs))
        leaves = [values[id(x)] if type(x) is ArrayFuture else x for x in leaves]
        result: tuple[Args, Kwargs] = jax.tree_util.tree_unflatten(tree, leaves)
        return result

    def finish(self, value: Any) -> tuple[Any, Sequence[Any]]:
        if type(value) is ArrayImpl:
            return value, (value,)
        return collect(self.name, value)
