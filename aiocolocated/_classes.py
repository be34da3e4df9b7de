# SPDX-License-Identifier: Apache-2.0
"""Colocated classes: which of a class's names its proxies have, and what stands there."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, overload

from aiocolocated import _compat, _serialization, _specs
from aiocolocated._exceptions import ArgumentError
from aiocolocated._proxies import (
    SYNCHRONOUS,
    ClassFunction,
    ClassInfo,
    ColocatedObject,
    Method,
    Property,
    has,
    iterate,
    method_of,
    name_of,
    of_instance,
)
from aiocolocated._specializations import Kind, kind_of
from aiocolocated.hosts import _wire

if TYPE_CHECKING:
    import jax

    from aiocolocated._specs import Devices

# What has no place for an ``await`` at all.
_REFUSED = {
    "__setitem__": "obj[key] = value",
    "__delitem__": "del obj[key]",
    "__enter__": "with obj",
    "__exit__": "with obj",
    "__await__": "await obj",
    **{f"__i{name}__": "an augmented assignment" for name in (
        "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and",
        "xor", "or",
    )},
}  # fmt: skip
# What `object` has, too. Equality is that of the proxies: they have to be hashable.
_COMPARISONS = {"__lt__", "__le__", "__gt__", "__ge__"}
# What a proxy has of its own, or a class keeps to itself.
_NOT_PROXIED = {
    *(set(dir(object)) - _COMPARISONS),
    *("__del__", "__getattr__", "__dict__", "__weakref__", "__module__", "__slots__", "__doc__"),
    *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__"),
    *("__setstate__", "__getnewargs__", "__getnewargs_ex__", "__copy__", "__deepcopy__"),
    *("__class_getitem__", "__aenter__", "__aexit__", "__iter__", "__aiter__", "__orig_bases__"),
    *("__parameters__", "__abstractmethods__", "__match_args__", "__post_init__", "__wrapped__"),
    *("__static_attributes__", "__firstlineno__", "__type_params__", "aclose"),
}


def _refusal(name: str, expression: str, way: str) -> Callable[..., NoReturn]:
    def refuse(self: ColocatedObject, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(f"{expression} on a colocated {name_of(self)}: {way}")

    refuse.__name__ = name
    return refuse


def _namespace(cls: type[Any], devices: Devices | None) -> dict[str, Any]:
    namespace: dict[str, Any] = {
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__wrapped__": cls,
    }
    fields = _annotated(cls)
    for name in dict.fromkeys((*dir(cls), *fields)):
        if name in _NOT_PROXIED or (name in _COMPARISONS and not has(cls, name)):
            continue
        if name in fields:  # of the instance, whatever default the class has for it
            namespace[name] = Property(name)
            continue
        attribute = inspect.getattr_static(cls, name)
        if name in SYNCHRONOUS:
            way = f"Python wants a plain value at once; use 'await obj.{name}(...)'"
            if name in ("__next__", "__anext__"):
                way = "use 'async for'"
            namespace[name] = _refusal(name, SYNCHRONOUS[name], way)
        elif name in _REFUSED:
            way = "use 'async with'" if "__e" in name else "give the class a method that does it"
            namespace[name] = _refusal(name, _REFUSED[name], way)
        elif isinstance(attribute, (staticmethod, classmethod)):
            namespace[name] = ClassFunction(cls, name, devices)
        elif isinstance(attribute, (property, functools.cached_property)) or (
            inspect.isdatadescriptor(attribute)
        ):
            namespace[name] = Property(name)
        elif inspect.isroutine(attribute) or isinstance(attribute, functools.partialmethod):
            function = getattr(cls, name) if not inspect.isfunction(attribute) else attribute
            namespace[name] = Method(name, function)
        else:
            namespace[name] = attribute  # a constant of the class
    for name, expression in _REFUSED.items():
        if name.startswith("__i") and f"__{name[3:]}" in namespace:  # Python would fall back to it
            namespace[name] = _refusal(name, expression, "give the class a method that does it")
    if "__len__" in namespace or "__bool__" in namespace:
        way = "its truth is on its host; use 'obj is not None', or 'await obj.__len__()'"
        namespace["__bool__"] = _refusal("__bool__", "bool(obj)", way)
    if has(cls, "__aiter__") or has(cls, "__iter__") or has(cls, "__getitem__"):
        # With `__getitem__` alone Python would call it until it raises an IndexError, for ever.
        namespace["__aiter__"] = _aiter
        way = "use 'async for', or from_thread.iterate(obj) where there is no loop"
        namespace["__iter__"] = _refusal("__iter__", "iterating", way)
        for name, expression in (("__reversed__", "reversed(obj)"), ("__contains__", "x in obj")):
            if not has(cls, name):
                namespace[name] = _refusal(name, expression, way)
    return namespace


def _annotated(cls: type[Any]) -> set[str]:
    """Names that a class annotates as attributes of its instances."""
    found: set[str] = set()
    for base in cls.__mro__:
        for name, annotation in inspect.get_annotations(base).items():
            if "ClassVar" not in str(annotation):
                found.add(name)
    return found


def _aiter(self: ColocatedObject) -> Any:
    cls = self._aiocolocated_class.cls
    kind: Kind = "asynchronous generator" if has(cls, "__aiter__") else "generator"
    return method_of(self, "__iter__", iterate, of_instance(iterate), kind)()


@overload
def colocated_python_class(
    cls: type[Any],
    /,
    *,
    max_concurrency: int = 1,
    devices: Any = None,
    read_ahead: int | None = None,
    dedicated_thread: bool = False,
    recreate: bool = False,
) -> type[ColocatedObject]: ...
@overload
def colocated_python_class(
    *,
    max_concurrency: int = 1,
    devices: Any = None,
    read_ahead: int | None = None,
    dedicated_thread: bool = False,
    recreate: bool = False,
) -> Callable[[type[Any]], type[ColocatedObject]]: ...
def colocated_python_class(
    cls: type[Any] | None = None,
    /,
    *,
    max_concurrency: int = 1,
    devices: _compat.Device | Sequence[_compat.Device] | jax.sharding.Mesh | None = None,
    read_ahead: int | None = None,
    dedicated_thread: bool = False,
    recreate: bool = False,
) -> Any:
    """Make a class whose instances live on hosts, next to the devices.

    Making an object makes nothing on the host yet. The real instance is made there by its first
    method call, on a worker thread; what its constructor raises is raised by that call, and the next
    one tries again. Its class is shipped as a colocated function is, its constructor's arguments too.
    Every host that methods are called on makes an instance of its own. A call without arrays goes where
    the other calls of the object went.

    Args:
        cls: a plain class; it is not changed, and is the result's ``__wrapped__``.
        max_concurrency: methods of one object that run at once, whoever calls them.
        devices: where methods run that get no arrays, and what they return is placed.
        read_ahead: items that the object's streams may be ahead of their consumers (default 2), with
            ``async for`` over the object itself, too.
        dedicated_thread: run the constructor, every method and the closing on one thread of the
            object's own, for what is bound to a thread (an SQLite connection). Plain methods only.
        recreate: make the object anew, with the same constructor arguments, where a host process was
            lost and restarted. Without it the calls on that host raise :exc:`HostLostError` from then on.

    Returns:
        A class. ``isinstance(obj, result)`` is true, ``isinstance(obj, cls)`` is not. Of the methods,
        plain and coroutine ones return an :class:`ArrayFuture`, generators of both kinds an
        :class:`ArrayStream`; static and class methods are colocated functions. ``await obj.name``
        reads a property. ``obj(...)``, ``obj[...]`` and operators are awaited; ``async for`` iterates
        what has ``__iter__`` or ``__aiter__``; ``async with`` enters what can be entered, then closes
        it. What Python wants a plain value of at once (``len``, ``in``, ``bool``) is refused in words.

    Raises:
        ArgumentError: ``cls`` is no class, or a colocated one; with ``dedicated_thread``, it has
            coroutine methods.
        ValueError: ``max_concurrency`` is less than 1.

    Ordering: method calls go to the caller's current channel, as calls of functions do.

    Closing: ``async with obj``, ``await obj.aclose()``, or dropping the last reference.

    Thread safety: objects may be used from any thread and loop.

    Example:
        >>> @colocated_python_class
        ... class Counter:
        ...     def __init__(self, start): self.value = start
        ...     def add(self, x):
        ...         self.value += int(x.sum())
        ...         return self.value
        >>> async with Counter(10) as counter:
        ...     total = await counter.add(x)

    Source: ``jax.experimental.colocated_python.colocated_python_class`` (JAX 0.10).

    .. versionadded:: 0.2
    """
    if cls is None:
        return functools.partial(
            colocated_python_class,
            max_concurrency=max_concurrency,
            devices=devices,
            read_ahead=read_ahead,
            dedicated_thread=dedicated_thread,
            recreate=recreate,
        )
    given: Any = cls
    if not isinstance(given, type):
        raise ArgumentError(f"colocated_python_class takes a class, got {cls!r}")
    if issubclass(cls, ColocatedObject):
        raise ArgumentError(f"{cls.__qualname__} is a colocated class already")
    concurrency: Any = max_concurrency
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
        raise ValueError(f"max_concurrency must be an int of at least 1, got {concurrency!r}")
    if dedicated_thread and max_concurrency > 1:
        raise ValueError("with dedicated_thread=True, max_concurrency is 1: there is one thread")
    where = _specs.as_devices(devices) if devices is not None else None
    namespace = _namespace(cls, where)
    if dedicated_thread:
        _refuse_coroutines(cls)
    namespace["_aiocolocated_class"] = ClassInfo(
        cls,
        max_concurrency=max_concurrency,
        devices=where,
        read_ahead=read_ahead,
        dedicated_thread=dedicated_thread,
        recreate=recreate,
    )
    return types.new_class(
        cls.__name__,
        (ColocatedObject,),
        {"_aiocolocated": True},
        lambda own: own.update(namespace),
    )


def _reduce(cls: type[ColocatedObject]) -> Any:
    """To other hosts a colocated class goes as what it was made of; there is one of it on each."""
    info: ClassInfo = cls._aiocolocated_class
    make = functools.partial(
        _remake,
        info.cls,
        max_concurrency=info.max_concurrency,
        devices=info.devices,
        read_ahead=info.read_ahead,
        dedicated_thread=info.dedicated_thread,
        recreate=info.recreate,
    )
    return _wire._make_class, (_wire.id_of_class(cls), make)


def _remake(cls: type[Any], **options: Any) -> type[ColocatedObject]:
    make = functools.partial(colocated_python_class, cls, **options)
    made = make()
    info: ClassInfo = made._aiocolocated_class
    info.complete = functools.partial(_complete, made, make)
    return made


def _complete(made: type[ColocatedObject], make: Callable[[], type[ColocatedObject]]) -> None:
    """Add what the class had not yet: it was being unpickled, and one of its methods refers to ``made``."""
    for name, attribute in vars(make()).items():
        if name not in ("__dict__", "__weakref__"):
            setattr(made, name, attribute)


_serialization.carry_classes_by_reference(ColocatedObject)
_wire.register_class_reducer(ColocatedObject, _reduce)


def _refuse_coroutines(cls: type[Any]) -> None:
    for name in dir(cls):
        attribute = inspect.getattr_static(cls, name)
        if isinstance(attribute, (staticmethod, classmethod)):
            continue
        if inspect.isroutine(attribute) and kind_of(attribute) in (
            "coroutine",
            "asynchronous generator",
        ):
            raise ArgumentError(
                f"{cls.__qualname__}.{name} is asynchronous and would run on the host's event loop; "
                "with dedicated_thread=True, a class has plain methods only"
            )
