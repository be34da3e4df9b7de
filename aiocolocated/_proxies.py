# SPDX-License-Identifier: Apache-2.0
"""Proxies: what the user holds of an object that lives on a host."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import jax

from aiocolocated import _serialization, _values
from aiocolocated._decorators import colocated_python
from aiocolocated._exceptions import DeadlockError
from aiocolocated._functions import ColocatedFunction
from aiocolocated._futures import wait_for_call
from aiocolocated._lifetimes import Handle
from aiocolocated._objects import HostObject, MethodCode
from aiocolocated._settings import LOCK
from aiocolocated._specializations import Kind
from aiocolocated._streams import ColocatedGenerator, check_read_ahead
from aiocolocated._submission import submit
from aiocolocated._waiters import waiting_body
from aiocolocated._workers import local
from aiocolocated.hosts.inprocess import inprocess_host

if TYPE_CHECKING:
    from types import TracebackType

    from aiocolocated._specs import Devices
    from aiocolocated.hosts.base import Shipped

# What Python calls without awaiting, and wants a plain value of at once.
SYNCHRONOUS = {
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


class ColocatedObject:
    """An object that lives on a host; base of what :func:`colocated_python_class` returns.

    The instance itself is made on the host at its first method call. Methods, sync and async, return
    an :class:`ArrayFuture`, generator methods an :class:`ArrayStream`.

    ``await obj.aclose()``, or leaving ``async with obj:``, closes it; so does dropping the last
    reference to it and its methods, in the background.

    .. versionadded:: 0.2
    """

    __array_ufunc__ = None  # or NumPy would make an array of futures of `array + obj`
    _aiocolocated_class: Any = None  # a `ClassInfo`, of the classes that are made

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        info: ClassInfo | None = self._aiocolocated_class
        if info is None:
            raise TypeError("ColocatedObject is not made directly: use colocated_python_class")
        if info.complete is not None:
            info.complete()
            info = self._aiocolocated_class
            assert info is not None
        info.check_constructor(args, kwargs)
        host_object = HostObject(
            info.cls,
            info.host,
            info.load,
            args,
            kwargs,
            max_concurrency=info.max_concurrency,
            dedicated_thread=info.dedicated_thread,
            recreate=info.recreate,
        )
        fields = self.__dict__
        fields["_aiocolocated_object"] = host_object
        fields["_aiocolocated_handle"] = Handle(host_object)
        for name in info.synchronous:  # for 'await obj.__len__()'; Python looks at the class
            function = inspect.getattr_static(info.cls, name)
            fields[name] = method_of(self, name, function, operator.attrgetter(name))

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
                f"aclose of the {name_of(self)} object was called inside its own method "
                f"{body._plan.name}: it would wait for itself"
            )
        closing = host_object.close()
        report = closing._report
        if report is None or not report.retrieved:
            await wait_for_call(closing)

    async def __aenter__(self) -> Any:
        info: ClassInfo = self._aiocolocated_class
        if info.enter is not None:
            try:
                await method_of(
                    self, "__aenter__", info.enter, of_instance(info.enter), anywhere=True
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
        info: ClassInfo = self._aiocolocated_class
        suppress = False
        try:
            if info.exit is not None:
                leave = method_of(
                    self, "__aexit__", info.exit, of_instance(info.exit), anywhere=True
                )
                suppress = await leave(_Raised(kind, exc))
        finally:
            await self.aclose()
            del exc, tb
        return suppress

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(
            f"cannot set {name!r} of a colocated {name_of(self)}: the object is on its host. "
            "Give it a method that does"
        )

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"cannot delete {name!r} of a colocated {name_of(self)}")

    if not TYPE_CHECKING:  # to type checkers a colocated object has whatever its class has

        def __getattr__(self, name: str) -> NoReturn:
            info: ClassInfo = self._aiocolocated_class
            raise AttributeError(
                f"a colocated {name_of(self)} has no method or property {name!r}. Attributes of the "
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
            "closed"
            if host_object.closing is not None
            else "open"
            if host_object.made or host_object.codes
            else "new"
        )
        return f"<colocated {name_of(self)} {state} calls={host_object.calls}>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a colocated {name_of(self)} stays on its host and is not shipped: pass what its methods "
            "return"
        )


def name_of(obj: ColocatedObject) -> str:
    return type(obj).__qualname__


class ClassInfo:
    """What the proxies of one class share."""

    def __init__(
        self,
        cls: type[Any],
        *,
        max_concurrency: int,
        devices: Devices | None,
        read_ahead: int | None,
        dedicated_thread: bool,
        recreate: bool,
    ) -> None:
        self.cls = cls
        self.host = inprocess_host()
        self._shipped: Shipped | None = None  # all objects share the copy, if it is one
        self.max_concurrency = max_concurrency
        self.devices = devices
        self.read_ahead = check_read_ahead(cls.__qualname__, read_ahead)
        self.dedicated_thread = dedicated_thread
        self.recreate = recreate
        self.complete: Callable[[], None] | None = None  # before the first object, on another host
        self.synchronous = [name for name in SYNCHRONOUS if has(cls, name)]
        self.enter: Callable[..., Any] | None = None
        self.exit: Callable[..., Any] | None = None
        if has(cls, "__aenter__"):
            self.enter, self.exit = _enter, _exit
        elif has(cls, "__enter__"):
            self.enter, self.exit = _enter_sync, _exit_sync

    def load(self) -> Callable[..., Any]:
        """The class on the host (worker thread)."""
        if self._shipped is None:
            self._shipped = self.host.load(self.cls)
        assert self._shipped.body is not None
        return self._shipped.body

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


def has(cls: type[Any], name: str) -> bool:
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


def iterate(self: Any) -> Any:
    return aiter(self) if hasattr(type(self), "__aiter__") else iter(self)


# --- methods of a proxy --------------------------------------------------------------------------


def method_of(
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


def of_instance(function: Callable[..., Any]) -> Callable[[Any], Callable[..., Any]]:
    return functools.partial(functools.partial, function)  # which can be sent to hosts


def _reader(name: str, instance: Any) -> Callable[[], Any]:
    return functools.partial(getattr, instance, name)


class Method:
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
            method = method_of(obj, self.name, self.function, getter)
            obj.__dict__[self.name] = method  # found first from now on
        return method

    def __repr__(self) -> str:
        return f"<method {self.name} of a colocated class>"


class Property:
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
            read = obj.__dict__[key] = method_of(
                obj,
                name,
                lambda self: None,
                functools.partial(_reader, name),
                anywhere=True,
            )
        return submit(read._prepare_call(None, (), {}, frame.f_code, frame.f_lasti))


class ClassFunction:
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


_serialization.explains_itself(ColocatedObject)
_values.refuse(ColocatedObject, "it stays on its host; pass what its methods return")
