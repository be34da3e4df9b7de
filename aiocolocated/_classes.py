# SPDX-License-Identifier: Apache-2.0
"""Colocated classes: their instances live on a host, what the user holds is a proxy."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, overload

import jax

from aiocolocated import _compat, _serialization, _specs, _values
from aiocolocated._decorators import colocated_python
from aiocolocated._exceptions import ArgumentError, DeadlockError
from aiocolocated._functions import ColocatedFunction
from aiocolocated._futures import wait_for_call
from aiocolocated._lifetimes import Handle
from aiocolocated._objects import HostObject, MethodCode
from aiocolocated._settings import LOCK
from aiocolocated._specializations import Kind, kind_of
from aiocolocated._streams import ColocatedGenerator, check_read_ahead
from aiocolocated._submission import submit
from aiocolocated._waiters import waiting_body
from aiocolocated._workers import local
from aiocolocated.hosts.inprocess import inprocess_host

if TYPE_CHECKING:
    from types import TracebackType

    from aiocolocated._specs import Devices

# What Python calls without awaiting, and wants a plain value of at once.
_SYNCHRONOUS = {
    "__len__": "len(obj)",
    "__length_hint__": "operator.length_hint(obj)",
    "__contains__": "x in obj",
    "__bool__": "bool(obj)",
    "__int__": "int(obj)",
    "__float__": "float(obj)",
    "__complex__": "complex(obj)",
    "__index__": "operator.index(obj)",
    "__bytes__": "bytes(obj)",
    "__format__": "format(obj)",
    "__next__": "next(obj)",
    "__anext__": "anext(obj)",
    "__reversed__": "reversed(obj)",
}
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


class ColocatedObject:
    """An object that lives on a host; base of what :func:`colocated_python_class` returns.

    The instance itself is made on the host at its first method call. Methods, sync and async, return
    an :class:`ArrayFuture`, generator methods an :class:`ArrayStream`.

    ``await obj.aclose()``, or leaving ``async with obj:``, closes it; so does dropping the last
    reference to it and its methods, in the background.

    .. versionadded:: 0.1
    """

    _aiocolocated_class: Any = None  # a `_ClassInfo`, of the classes that are made

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        info: _ClassInfo = self._aiocolocated_class
        if info is None:
            raise TypeError("ColocatedObject is not made directly: use colocated_python_class")
        info.check_constructor(args, kwargs)
        host_object = HostObject(
            info.cls,
            inprocess_host(),
            args,
            kwargs,
            max_concurrency=info.max_concurrency,
            dedicated_thread=info.dedicated_thread,
        )
        fields = self.__dict__
        fields["_aiocolocated_object"] = host_object
        fields["_aiocolocated_handle"] = Handle(host_object)
        for name in info.synchronous:  # for 'await obj.__len__()'; Python looks at the class
            function = inspect.getattr_static(info.cls, name)
            fields[name] = _colocated(self, name, function, operator.attrgetter(name))

    async def aclose(self) -> None:
        """Take no more calls, wait for those under way, and close the instance on its host.

        That is to call its ``aclose`` or ``close``, if it has one, then its destructor. What was never
        made has nothing to close. Closing twice is fine.

        Raises:
            Exception: what closing raised, to those who wait for it then.
            DeadlockError: inside a method of this object, which would wait for itself.

        Cancellation: stops the wait; the object is closed all the same.
        """
        host_object: HostObject = self.__dict__["_aiocolocated_object"]
        body = local.call or waiting_body()
        if body is not None and body._object is host_object:
            raise DeadlockError(
                f"aclose of the {_name(self)} object was called inside its own method "
                f"{body._plan.name}: it would wait for itself"
            )
        closing = host_object.close()
        report = closing._report
        if report is None or not report.retrieved:
            await wait_for_call(closing)

    async def __aenter__(self) -> Any:
        info: _ClassInfo = self._aiocolocated_class
        if info.enter is not None:
            try:
                await _colocated(
                    self, "__aenter__", info.enter, _of_instance(info.enter), anywhere=True
                )()
            except BaseException:
                await self.aclose()
                raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> bool:
        info: _ClassInfo = self._aiocolocated_class
        suppress = False
        try:
            if info.exit is not None:
                leave = _colocated(
                    self, "__aexit__", info.exit, _of_instance(info.exit), anywhere=True
                )
                suppress = await leave(_Raised(kind, exc))
        finally:
            await self.aclose()
            del exc, tb
        return suppress

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(
            f"cannot set {name!r} of a colocated {_name(self)}: the object is on its host. "
            "Give it a method that does"
        )

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"cannot delete {name!r} of a colocated {_name(self)}")

    if not TYPE_CHECKING:  # to type checkers a colocated object has whatever its class has

        def __getattr__(self, name: str) -> NoReturn:
            info: _ClassInfo = self._aiocolocated_class
            raise AttributeError(
                f"a colocated {_name(self)} has no method or property {name!r}. Attributes of the "
                "instance stay on its host: give it a method that returns them"
                if info is not None
                else name
            )

    else:

        def __getattr__(self, name: str) -> Any: ...
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
        def __getitem__(self, key: Any) -> Any: ...
        def __aiter__(self) -> Any: ...

    def __init_subclass__(cls, /, _aiocolocated: bool = False, **options: Any) -> None:
        if not _aiocolocated:
            raise TypeError(
                f"{cls.__name__} subclasses a colocated class: subclass the plain one "
                "(its __wrapped__), then use colocated_python_class on the result"
            )
        super().__init_subclass__(**options)

    def __repr__(self) -> str:
        host_object: HostObject = self.__dict__["_aiocolocated_object"]
        state = (
            "closed" if host_object.closing is not None else "open" if host_object.made else "new"
        )
        return f"<colocated {_name(self)} {state} calls={host_object.calls}>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a colocated {_name(self)} stays on its host and is not shipped: pass what its methods "
            "return"
        )


def _name(obj: ColocatedObject) -> str:
    return type(obj).__qualname__


class _ClassInfo:
    """What the proxies of one class share."""

    def __init__(
        self,
        cls: type[Any],
        *,
        max_concurrency: int,
        devices: Devices | None,
        read_ahead: int | None,
        dedicated_thread: bool,
    ) -> None:
        self.cls = cls
        self.max_concurrency = max_concurrency
        self.devices = devices
        self.read_ahead = check_read_ahead(cls.__qualname__, read_ahead)
        self.dedicated_thread = dedicated_thread
        self.synchronous = [name for name in _SYNCHRONOUS if _has(cls, name)]
        self.enter: Callable[..., Any] | None = None
        self.exit: Callable[..., Any] | None = None
        if _has(cls, "__aenter__"):
            self.enter, self.exit = _enter, _exit
        elif _has(cls, "__enter__"):
            self.enter, self.exit = _enter_sync, _exit_sync

    def check_constructor(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse arguments that the constructor does not take where they are given."""
        for leaf in jax.tree_util.tree_leaves((args, kwargs)):
            _values.refuse_argument(leaf, f"constructor of {self.cls.__qualname__}")
        try:
            signature = inspect.signature(self.cls)
        except (TypeError, ValueError):  # a class that does not say
            return
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.cls.__qualname__}(): {error}") from None


def _has(cls: type[Any], name: str) -> bool:
    """Whether a class defines what :class:`object` does not."""
    return inspect.getattr_static(cls, name, None) is not inspect.getattr_static(object, name, None)


async def _enter(self: Any) -> None:
    await self.__aenter__()  # its result is most often the instance, which stays


async def _exit(self: Any, raised: _Raised) -> bool:
    return bool(await self.__aexit__(raised.kind, raised.error, None))


def _enter_sync(self: Any) -> None:
    self.__enter__()


def _exit_sync(self: Any, raised: _Raised) -> bool:
    return bool(self.__exit__(raised.kind, raised.error, None))


class _Raised:
    """What an ``async with`` block raised. What cannot be shipped is told of all the same."""

    def __init__(self, kind: type[BaseException] | None, error: BaseException | None) -> None:
        self.kind = kind
        self.error = error

    def __reduce__(self) -> Any:
        kind, error = self.kind, self.error
        try:
            _serialization.loads(*_serialization.dumps((kind, error)))
        except Exception:
            kind, error = RuntimeError, RuntimeError(f"{type(error).__qualname__}: {error}")
        return _Raised, (kind, error)


def _iterate(self: Any) -> Any:
    return aiter(self) if hasattr(type(self), "__aiter__") else iter(self)


# --- methods of a proxy --------------------------------------------------------------------------


def _colocated(
    obj: ColocatedObject,
    name: str,
    function: Callable[..., Any],
    getter: Callable[[Any], Callable[..., Any]],
    kind: Kind | None = None,
    anywhere: bool = False,
) -> Any:
    """A method of an object: of its class, or one that is made here and takes the instance."""
    fields = obj.__dict__
    host_object: HostObject = fields["_aiocolocated_object"]
    code = host_object.methods.get(name)
    if code is None:
        made = MethodCode(host_object, name, function, getter, kind, anywhere)
        with LOCK:  # the object must know of every one
            code = host_object.methods.get(name)
            if code is None:
                code = host_object.methods[name] = made
    devices = obj._aiocolocated_class.devices
    method = ColocatedFunction[..., Any](code, devices=devices, keep=fields["_aiocolocated_handle"])
    if "generator" not in code.kind:
        return method
    return ColocatedGenerator(method, default=obj._aiocolocated_class.read_ahead)


def _of_instance(function: Callable[..., Any]) -> Callable[[Any], Callable[..., Any]]:
    return lambda instance: functools.partial(function, instance)


class _Method:
    """A method: made for each object when it is first looked at."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.function = function

    def __get__(self, obj: ColocatedObject | None, owner: type | None = None) -> Any:
        if obj is None:
            return self
        method = obj.__dict__.get(self.name)
        if method is None:
            getter = operator.attrgetter(self.name)
            method = _colocated(obj, self.name, self.function, getter)
            obj.__dict__[self.name] = method  # found first from now on
        return method

    def __repr__(self) -> str:
        return f"<method {self.name} of a colocated class>"


class _Property:
    """A property: ``await obj.name`` reads it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, obj: ColocatedObject | None, owner: type | None = None) -> Any:
        if obj is None:
            return self
        name = self.name
        frame = sys._getframe(1)
        key = f"await obj.{name}"
        read = obj.__dict__.get(key)
        if read is None:
            read = obj.__dict__[key] = _colocated(
                obj,
                name,
                lambda self: None,
                lambda instance: lambda: getattr(instance, name),
                anywhere=True,
            )
        return submit(read._prepare_call(None, (), {}, frame.f_code, frame.f_lasti))


class _ClassFunction:
    """A static or class method: a colocated function, with or without an object."""

    def __init__(self, cls: type[Any], name: str, devices: Devices | None) -> None:
        self._cls = cls
        self._name = name
        self._devices = devices
        self._function: Any = None

    def __get__(self, obj: ColocatedObject | None, owner: type | None = None) -> Any:
        if self._function is None:
            function = colocated_python(getattr(self._cls, self._name))
            self._function = (
                function if self._devices is None else function.specialize(devices=self._devices)
            )
        return self._function


def _refusal(name: str, expression: str, way: str) -> Callable[..., NoReturn]:
    def refuse(self: ColocatedObject, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(f"{expression} on a colocated {_name(self)}: {way}")

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
        if name in _NOT_PROXIED or (name in _COMPARISONS and not _has(cls, name)):
            continue
        if name in fields:  # of the instance, whatever default the class has for it
            namespace[name] = _Property(name)
            continue
        attribute = inspect.getattr_static(cls, name)
        if name in _SYNCHRONOUS:
            way = f"Python wants a plain value at once; use 'await obj.{name}(...)'"
            if name in ("__next__", "__anext__"):
                way = "use 'async for'"
            namespace[name] = _refusal(name, _SYNCHRONOUS[name], way)
        elif name in _REFUSED:
            way = "use 'async with'" if "__e" in name else "give the class a method that does it"
            namespace[name] = _refusal(name, _REFUSED[name], way)
        elif isinstance(attribute, (staticmethod, classmethod)):
            namespace[name] = _ClassFunction(cls, name, devices)
        elif isinstance(attribute, (property, functools.cached_property)) or (
            inspect.isdatadescriptor(attribute)
        ):
            namespace[name] = _Property(name)
        elif inspect.isroutine(attribute) or isinstance(attribute, functools.partialmethod):
            function = getattr(cls, name) if not inspect.isfunction(attribute) else attribute
            namespace[name] = _Method(name, function)
        else:
            namespace[name] = attribute  # a constant of the class
    if "__len__" in namespace or "__bool__" in namespace:
        way = "its truth is on its host; use 'obj is not None', or 'await obj.__len__()'"
        namespace["__bool__"] = _refusal("__bool__", "bool(obj)", way)
    if _has(cls, "__aiter__") or _has(cls, "__iter__"):
        namespace["__aiter__"] = _aiter
        way = "use 'async for', or from_thread.iterate(obj) where there is no loop"
        namespace["__iter__"] = _refusal("__iter__", "iterating", way)
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
    kind: Kind = "asynchronous generator" if _has(cls, "__aiter__") else "generator"
    return _colocated(self, "__iter__", _iterate, _of_instance(_iterate), kind)()


@overload
def colocated_python_class(
    cls: type[Any],
    /,
    *,
    max_concurrency: int = 1,
    devices: Any = None,
    read_ahead: int | None = None,
    dedicated_thread: bool = False,
) -> type[ColocatedObject]: ...
@overload
def colocated_python_class(
    *,
    max_concurrency: int = 1,
    devices: Any = None,
    read_ahead: int | None = None,
    dedicated_thread: bool = False,
) -> Callable[[type[Any]], type[ColocatedObject]]: ...
def colocated_python_class(
    cls: type[Any] | None = None,
    /,
    *,
    max_concurrency: int = 1,
    devices: _compat.Device | Sequence[_compat.Device] | jax.sharding.Mesh | None = None,
    read_ahead: int | None = None,
    dedicated_thread: bool = False,
) -> Any:
    """Make a class whose instances live on hosts, next to the devices.

    Making an object makes nothing on the host yet. The real instance is made there by its first
    method call, on a worker thread; what its constructor raises is raised by that call, and the next
    one tries again. Its class is shipped as a colocated function is, its constructor's arguments too.

    Args:
        cls: a plain class; it is not changed, and is the result's ``__wrapped__``.
        max_concurrency: methods of one object that run at once, whoever calls them.
        devices: where methods run that get no arrays, and what they return is placed.
        read_ahead: items that the object's streams may be ahead of their consumers (default 2), with
            ``async for`` over the object itself, too.
        dedicated_thread: run the constructor, every method and the closing on one thread of the
            object's own, for what is bound to a thread (an SQLite connection). Plain methods only.

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
        )
    if not isinstance(cls, type):
        raise ArgumentError(f"colocated_python_class takes a class, got {cls!r}")
    if issubclass(cls, ColocatedObject):
        raise ArgumentError(f"{cls.__qualname__} is a colocated class already")
    if max_concurrency < 1:
        raise ValueError(f"max_concurrency must be at least 1, got {max_concurrency!r}")
    where = _specs.as_devices(devices) if devices is not None else None
    namespace = _namespace(cls, where)
    if dedicated_thread:
        _refuse_coroutines(cls)
    namespace["_aiocolocated_class"] = _ClassInfo(
        cls,
        max_concurrency=max_concurrency,
        devices=where,
        read_ahead=read_ahead,
        dedicated_thread=dedicated_thread,
    )
    return types.new_class(
        cls.__name__,
        (ColocatedObject,),
        {"_aiocolocated": True},
        lambda own: own.update(namespace),
    )


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


_serialization.explains_itself(ColocatedObject)
_values.refuse(ColocatedObject, "it stays on its host; pass what its methods return")
