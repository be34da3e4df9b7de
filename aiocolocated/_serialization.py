# SPDX-License-Identifier: Apache-2.0
"""Shipping code: cloudpickle, with devices by platform and id and JAX objects by reference."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dis
import functools
import importlib
import inspect
import io
import itertools
import marshal
import pickle
import socket
import sys
import threading
import types
import uuid
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import anyio
import anyio.abc
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
    asyncio.Runner,
    asyncio.TaskGroup,
    asyncio.Timeout,
    anyio.CancelScope,
    anyio.CapacityLimiter,
    anyio.Condition,
    anyio.Event,
    anyio.Lock,
    anyio.Semaphore,
    anyio.abc.AsyncResource,
    anyio.abc.TaskGroup,
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
_BUFFERS = (io.BytesIO, io.StringIO)  # values, and no files
_refused_here: list[type[Any]] = []  # the library's own, added by higher layers
_by_reference: list[type[Any]] = []
_bases_by_reference: list[type[Any]] = []
_opaque: list[type[Any]] = []


def refuse(kind: type[Any]) -> None:
    """Never ship instances of ``kind``."""
    _refused_here.append(kind)


def explains_itself(kind: type[Any]) -> None:
    """Instances of ``kind`` refuse to be pickled in words: do not look for a reason inside them."""
    _opaque.append(kind)


def carry_by_reference(kind: type[Any]) -> None:
    """Within the process, carry instances of ``kind`` as they are."""
    _by_reference.append(kind)


def carry_classes_by_reference(base: type[Any]) -> None:
    """Within the process, carry what is derived from ``base`` as it is."""
    _bases_by_reference.append(base)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle is not typed
    def __init__(self, file: io.BytesIO, references: list[Any], copied: type | None = None) -> None:
        super().__init__(file)
        self._references = references
        self._copied = copied  # a class to be copied

    def persistent_id(self, obj: Any) -> int | None:
        if (
            _compat.is_by_reference(obj)
            or type(obj) in _by_reference
            or (
                isinstance(obj, type)
                and obj is not self._copied
                and (issubclass(obj, tuple(_bases_by_reference)) or _stays(obj))
            )
        ):
            self._references.append(obj)
            return len(self._references) - 1
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _compat.Device):
            return _find_device, (obj.platform, obj.id)
        if _is_refused(obj):
            kind = type(obj)
            raise TypeError(
                f"objects of type {kind.__module__}.{kind.__qualname__} are not shipped"
            )
        if isinstance(obj, types.ModuleType) and not _is_importable(obj):
            # cloudpickle would copy it, and with it what is to be shared.
            raise TypeError(f"module {obj.__name__} was not imported, and hosts cannot import it")
        if type(obj) is functools.cached_property:  # has a lock on Python 3.11
            return _cached_property, (obj.func, obj.attrname)
        if isinstance(obj, types.CodeType):
            # cloudpickle drops the file's name, and with it the source lines of tracebacks.
            with contextlib.suppress(ValueError):  # made by a tool, with constants of other kinds
                return marshal.loads, (marshal.dumps(obj),)
        if isinstance(obj, (types.FunctionType, type)) and (depth := _decorators_of(obj)):
            return _find_decorated, (obj.__module__, obj.__qualname__, depth)
        reduced = super().reducer_override(obj)
        if obj is self._copied and isinstance(reduced, tuple) and len(reduced[1]) == 6:
            # By the name that cloudpickle gives a class, loading finds the class itself and
            # overwrites its methods. Under a new one it makes another class.
            skeleton, arguments, *rest = cast("Any", reduced)
            *arguments, _, extra = arguments
            return skeleton, (*arguments, uuid.uuid4().hex, extra), *rest
        return reduced


def _stays(cls: type) -> bool:
    """Whether a class is carried by reference in the process, though other hosts get a copy.

    That is one that cannot be imported: of the program's main module, or made in a function. Instances
    of a copy would be none of the class, for the caller who gets them back.

    Raises:
        TypeError: it could not be copied.
    """
    if cls in _shippable or _is_found(cls) or _decorators_of(cls):
        return cls in _shippable
    _shippable.add(cls)  # now, because it may refer to itself
    try:
        _Pickler(io.BytesIO(), [], cls).dump(cls)
    except BaseException:
        _shippable.discard(cls)
        raise
    return True


_shippable: weakref.WeakSet[type] = weakref.WeakSet()


def _is_found(cls: type) -> bool:
    """Whether another process finds a class by its module and name."""
    return not _is_copied_module(cls.__module__) and cls is next(
        _layers(sys.modules.get(cls.__module__), cls.__qualname__), None
    )


def _is_copied_module(module: str) -> bool:
    by_value = cloudpickle.list_registry_pickle_by_value()
    return module == "__main__" or any(f"{module}.".startswith(f"{name}.") for name in by_value)


def _cached_property(function: Callable[[Any], Any], name: str) -> Any:
    made = functools.cached_property(function)
    made.__set_name__(object, name)
    return made


def _is_refused(obj: Any) -> bool:
    return (isinstance(obj, _REFUSED) and not isinstance(obj, _BUFFERS)) or (
        type(obj) in _refused_here
    )


def _is_importable(module: types.ModuleType) -> bool:
    """Whether another process finds the module by its name."""
    return sys.modules.get(module.__name__) is module and (
        module.__spec__ is not None or module.__name__ == "__main__"
    )


def _decorators_of(function: types.FunctionType | type) -> int:
    """How many decorators are around a function or class under its name in an importable module.

    cloudpickle takes functions of such modules by reference, but only if it finds them under their
    name. That is where a colocated function is, so it would copy the body and the module's globals.
    """
    module = function.__module__
    if _is_copied_module(module):
        return 0
    layers = _layers(sys.modules.get(module), function.__qualname__)
    return next((depth for depth, layer in enumerate(layers) if layer is function), 0)


def _layers(module: types.ModuleType | None, name: str) -> Iterator[Any]:
    """What a name of a module stands for, then what its decorators were given."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    while found is not None:
        yield found
        found = getattr(found, "__wrapped__", None)


def _find_decorated(module: str, name: str, depth: int) -> Any:
    return next(itertools.islice(_layers(importlib.import_module(module), name), depth, None))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, references: list[Any]) -> None:
        super().__init__(file)
        self._references = references

    def persistent_load(self, pid: int) -> Any:
        return self._references[pid]


# For devices of other processes, added by higher layers.
device_finders: list[Callable[[str, int], Any]] = []


def _find_device(platform: str, device_id: int) -> _compat.Device:
    for find in device_finders:
        if (found := find(platform, device_id)) is not None:
            return found
    devices = {d.id: d for d in jax.devices(platform)}
    try:
        return devices[device_id]
    except KeyError:
        raise ValueError(
            f"this host has no {platform} device {device_id}; it has {sorted(devices)}"
        ) from None


def dumps(obj: Any, copied: type | None = None) -> tuple[bytes, list[Any]]:
    """Pickle by value; arrays and jitted functions come in a list of references beside it.

    So do classes that cannot be imported, but for the one that is to be ``copied``.
    """
    references: list[Any] = []
    file = io.BytesIO()
    _Pickler(file, references, copied).dump(obj)
    return file.getvalue(), references


def loads(data: bytes, references: list[Any]) -> Any:
    """Undo :func:`dumps` in this process. Unpickling runs code: it trusts the sender."""
    return _Unpickler(io.BytesIO(data), references).load()


def copy_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Ship a function or class within the process: through the pickler, as if to another host.

    Raises:
        NotShippableError: naming the captured variable.
    """
    try:
        copied = function if isinstance(function, type) else None
        return cast("Callable[..., Any]", loads(*dumps(function, copied)))
    except Exception as error:
        raise _explain(function, error) from error


def _explain(function: Callable[..., Any], error: BaseException) -> NotShippableError:
    name = getattr(function, "__qualname__", None) or repr(function)
    kind = "class" if isinstance(function, type) else "function"
    culprit = _find_culprit(function, depth=0)
    if culprit is None:
        return NotShippableError(f"colocated {kind} {name} cannot be shipped: {error}")
    return NotShippableError(
        f"colocated {kind} {name} cannot be shipped: {culprit}. Bodies are copied to their host: "
        "make it inside the body, keep it in an importable module, or pass plain values as arguments"
    )


def _find_culprit(holder: Any, depth: int) -> str | None:
    """Words for the captured variable that does not pickle."""
    for what, value in _held(holder) if depth <= 5 else ():
        try:
            loads(*dumps(value))
        except Exception as error:
            opaque = _is_refused(value) or isinstance(value, tuple(_opaque))
            inner = None if opaque else _find_culprit(value, depth + 1)
            if inner is not None:
                return f"{inner}, by way of {what}"
            where = f" of {_name(holder)}" if depth or not _is_function(holder) else ""
            return f"{what}{where} is a {type(value).__qualname__}: {error}"
    return None


def _is_function(holder: Any) -> bool:
    return isinstance(holder, (types.FunctionType, functools.partial))


def _name(holder: Any) -> str:
    return getattr(holder, "__qualname__", None) or type(holder).__qualname__


def _held(holder: Any) -> Iterator[tuple[str, Any]]:
    """What a function, class or object refers to, with words for each."""
    if isinstance(holder, types.FunctionType):
        code = holder.__code__
        for name, cell in zip(code.co_freevars, holder.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not assigned yet
                yield f"captured variable {name!r}", cell.cell_contents
        for name in sorted(_globals_of(code) & holder.__globals__.keys()):
            yield f"global {name!r}", holder.__globals__[name]
        for parameter in inspect.signature(holder, follow_wrapped=False).parameters.values():
            if parameter.default is not inspect.Parameter.empty:
                yield f"default of parameter {parameter.name!r}", parameter.default
    elif isinstance(holder, functools.partial):
        yield "the function of the partial", holder.func
        for i, value in enumerate(holder.args):
            yield f"argument {i} of the partial", value
        for name, value in holder.keywords.items():
            yield f"argument {name!r} of the partial", value
    elif isinstance(holder, types.MethodType):
        yield "the object of the method", holder.__self__
    elif not isinstance(holder, types.ModuleType):
        for name, value in dict(getattr(holder, "__dict__", {})).items():
            yield f"attribute {name!r}", value


def _globals_of(code: types.CodeType) -> set[str]:
    """Names that a function reads as globals, in its inner functions too."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _globals_of(constant)
    return names
