# SPDX-License-Identifier: Apache-2.0
"""Shipping code: cloudpickle, with devices by platform and id and JAX objects by reference."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import io
import marshal
import pickle
import socket
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import cloudpickle
import jax

from aiocolocated import _compat
from aiocolocated._exceptions import NotShippableError

# Some of these pickle without complaint and arrive dead: an asyncio.Event's copy wakes nobody.
_REFUSED: tuple[type[Any], ...] = (
    asyncio.Event,
    asyncio.Lock,
    asyncio.Condition,
    asyncio.Semaphore,
    asyncio.Queue,
    asyncio.Future,
    asyncio.AbstractEventLoop,
    asyncio.Task,
    concurrent.futures.Future,
    concurrent.futures.Executor,
    threading.Thread,
    threading.Event,
    threading.Condition,
    threading.Semaphore,
    threading.Barrier,
    socket.socket,
    io.IOBase,
    types.GeneratorType,
    types.CoroutineType,
    types.AsyncGeneratorType,
)
_refused_here: list[type[Any]] = []  # the library's own, added by higher layers
_by_reference: list[type[Any]] = []


def refuse(kind: type[Any]) -> None:
    """Never ship instances of ``kind``."""
    _refused_here.append(kind)


def carry_by_reference(kind: type[Any]) -> None:
    """Within the process, carry instances of ``kind`` as they are."""
    _by_reference.append(kind)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle is not typed
    def __init__(self, file: io.BytesIO, references: list[Any]) -> None:
        super().__init__(file)
        self._references = references

    def persistent_id(self, obj: Any) -> int | None:
        if _compat.is_by_reference(obj) or type(obj) in _by_reference:
            self._references.append(obj)
            return len(self._references) - 1
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _compat.Device):
            return _find_device, (obj.platform, obj.id)
        if isinstance(obj, _REFUSED) or type(obj) in _refused_here:
            raise TypeError(f"a {type(obj).__module__}.{type(obj).__qualname__} is not shipped")
        if isinstance(obj, types.CodeType):
            # cloudpickle drops the file's name, and with it the source lines of tracebacks.
            return marshal.loads, (marshal.dumps(obj),)
        return super().reducer_override(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, references: list[Any]) -> None:
        super().__init__(file)
        self._references = references

    def persistent_load(self, pid: int) -> Any:
        return self._references[pid]


@functools.cache
def _devices(platform: str) -> dict[int, _compat.Device]:
    return {d.id: d for d in jax.devices(platform)}


def _find_device(platform: str, device_id: int) -> _compat.Device:
    try:
        return _devices(platform)[device_id]
    except KeyError:
        raise ValueError(
            f"this host has no {platform} device {device_id}; it has {sorted(_devices(platform))}"
        ) from None


def dumps(obj: Any) -> tuple[bytes, list[Any]]:
    """Pickle by value; arrays and jitted functions come in a list of references beside it."""
    references: list[Any] = []
    file = io.BytesIO()
    _Pickler(file, references).dump(obj)
    return file.getvalue(), references


def loads(data: bytes, references: list[Any]) -> Any:
    """Undo :func:`dumps` in this process. Unpickling runs code: it trusts the sender."""
    return _Unpickler(io.BytesIO(data), references).load()


def copy_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Ship a function within the process: through the pickler, as if to another host.

    Raises:
        NotShippableError: naming the captured variable.
    """
    try:
        data, references = dumps(function)
    except Exception as error:
        raise _explain(function, error) from error
    return cast("Callable[..., Any]", loads(data, references))


def _explain(function: Callable[..., Any], error: BaseException) -> NotShippableError:
    name = getattr(function, "__qualname__", repr(function))
    culprit = _find_culprit(function, depth=0)
    if culprit is None:
        return NotShippableError(f"colocated function {name} cannot be shipped: {error}")
    return NotShippableError(
        f"colocated function {name} cannot be shipped: {culprit}. Bodies are copied to their host: "
        "make it inside the body, keep it in an importable module, or pass plain values as arguments"
    )


def _find_culprit(function: Any, depth: int) -> str | None:
    """Words for the captured variable that does not pickle."""
    if not isinstance(function, types.FunctionType) or depth > 5:
        return None
    for kind, name, value in _captured(function):
        try:
            dumps(value)
        except Exception as error:
            inner = _find_culprit(value, depth + 1)
            if inner is not None:
                return f"{inner}, by way of {kind} {name!r}"
            where = f" of {function.__qualname__}" if depth else ""
            return f"{kind} {name!r}{where} is a {type(value).__qualname__}: {error}"
    return None


def _captured(function: types.FunctionType) -> Iterator[tuple[str, str, Any]]:
    captured = inspect.getclosurevars(function)
    for name, value in captured.nonlocals.items():
        yield "captured variable", name, value
    for name, value in captured.globals.items():
        yield "global", name, value
    for parameter in inspect.signature(function).parameters.values():
        if parameter.default is not inspect.Parameter.empty:
            yield "default of parameter", parameter.name, parameter.default
