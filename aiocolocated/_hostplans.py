# SPDX-License-Identifier: Apache-2.0
"""What calls from a controller run in a host process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from aiocolocated import _compat, _shipping, _specs
from aiocolocated._calls import Call
from aiocolocated._exceptions import ArgumentError
from aiocolocated._futures import ArrayFuture
from aiocolocated._objects import HostObject, MethodCode
from aiocolocated._specializations import FunctionCode, Specialization
from aiocolocated.hosts import _wire
from aiocolocated.hosts.inprocess import inprocess_host


class Pickles(Protocol):
    """What reads and writes values for the controller."""

    def load(self, data: bytes, things: Sequence[Any]) -> Any:
        """Unpickle a value that refers to ``things``."""

    def pickle_result(self, value: Any, where: str) -> Result:
        """Pickle what a body returned."""
        ...

    def release(self, key: int, reuse: bool) -> None:
        """Say that a parcel is not needed any more."""


class HostCode(FunctionCode):
    """A function from the controller, unpickled when it is first called."""

    __slots__ = ("_unpickle",)

    def __init__(self, kind: Any, name: str, unpickle: Callable[[], Any]) -> None:
        super().__init__(_not_loaded, inprocess_host())
        self.kind = kind
        self.special = kind == "coroutine"
        self.name = name
        self.anywhere = True  # the controller has looked
        self._unpickle = unpickle

    def load(self) -> Callable[..., Any]:
        body = self.body
        if body is None:
            body = self.function = self.body = self._unpickle()
        assert body is not None
        return body


def _not_loaded() -> None:
    raise AssertionError


class HostedObject(HostObject):
    """An object of the controller's: its class and arguments are unpickled when it is made."""

    __slots__ = ("_asynchronous", "_discard", "_unpickle")

    def __init__(
        self,
        name: str,
        cls: HostCode,
        options: tuple[int, bool, bool],
        unpickle: Callable[[], Any],
        discard: Callable[[], None],
    ) -> None:
        max_concurrency, dedicated_thread, self._asynchronous = options
        super().__init__(
            object,
            inprocess_host(),
            cls.load,
            (),
            {},
            max_concurrency=max_concurrency,
            dedicated_thread=dedicated_thread,
            name=name,
        )
        self._unpickle: Callable[[], Any] | None = unpickle
        self._discard = discard  # releases what is not unpickled

    @property
    def closes_asynchronously(self) -> bool:
        return self._asynchronous

    def construct(self) -> Any:
        if self._unpickle is not None:
            try:
                self._args, self._kwargs = self._unpickle()
            except Exception as error:
                raise ArgumentError(
                    f"constructor of {self.name}: the arguments cannot be unpickled on this host: "
                    f"{type(error).__name__}: {error}"
                ) from error
            self._unpickle = None
        return super().construct()

    def forget(self) -> None:
        if self._unpickle is not None:
            self._discard()
        self._unpickle = None
        super().forget()


class HostMethod(MethodCode):
    """A method of such an object; how it is got from the instance is unpickled at the first call."""

    __slots__ = ()

    def __init__(
        self, owner: HostedObject, kind: Any, name: str, unpickle: Callable[[], Any]
    ) -> None:
        super().__init__(
            owner,
            name,
            _not_loaded,
            lambda instance: unpickle()(instance),
            kind,
            anywhere=True,  # the controller has looked
        )


class Result:
    """What a body returned, pickled before anything else runs that may change it."""

    __slots__ = ("arrays", "pickled", "value")

    def __init__(self, value: Any, pickled: _wire.Pickled, arrays: list[Any]) -> None:
        self.pickled = pickled
        self.arrays = arrays
        # Parcels are for the controller, and cannot be unpacked here.
        self.value = value if pickled.parcels else None

    def copy(self, server: Pickles) -> Any:
        """What another call of this host gets of it."""
        if self.pickled.parcels:
            return _shipping.by_value(self.value, "a future's value", _specs.result_path)
        return server.load(self.pickled.data, self.arrays)


class HostSpecialization(Specialization):
    """A function of the controller, for some devices."""

    __slots__ = ("_server",)

    def __init__(self, server: Pickles, code: FunctionCode, devices: tuple[Any, ...]) -> None:
        super().__init__(code, None, None, devices)
        self._server = server

    def finish(self, value: Any) -> tuple[Any, Sequence[Any]]:
        value, arrays = super().finish(value)
        if type(value) not in _AS_IS:
            value = self._server.pickle_result(value, f"what {self.name} returned")
        return value, arrays

    def take_late(self, call: Call, error: BaseException) -> None:
        """The clean-up of a cancelled body failed: the controller hears of it (under the lock)."""
        answer: Any = call._release
        answer.__self__.late = error


# Nobody can change these.
_AS_IS = frozenset({_compat.ArrayImpl, type(None), bool, int, float, complex, str, bytes})


class HostPlan:
    """What one call from the controller runs (a ``Plan``), when its arguments are still pickled."""

    __slots__ = ("_data", "_server", "_things", "devices", "host", "keys", "name", "plan")
    ships = False
    dispatches = False

    def __init__(
        self,
        server: Pickles,
        plan: HostSpecialization,
        data: bytes,
        things: list[Any],
        keys: tuple[int, ...],
    ) -> None:
        self._server = server
        self.keys = keys  # of parcels that are not unpacked yet
        self._data: bytes | None = data
        self._things = things
        self.plan = plan
        self.devices = plan.devices
        self.host = plan.host
        self.name = plan.name

    def is_loaded(self) -> bool:
        return False

    def body(self) -> Callable[..., Any]:
        return self.plan.body()

    def futures(self, args: Any, kwargs: Any) -> Sequence[Any]:
        return [x for x in self._things if type(x) is ArrayFuture]

    def bind(self, args: Any, kwargs: Any, values: dict[int, Any]) -> tuple[Any, Any]:
        """Unpickle the arguments (worker thread)."""
        things = [values[id(x)] if type(x) is ArrayFuture else x for x in self._things]
        things = [x.copy(self._server) if type(x) is Result else x for x in things]
        assert self._data is not None
        data, self._data = self._data, None
        self._things = []
        try:
            args, kwargs = self._server.load(data, things)
        except Exception as error:
            raise ArgumentError(
                f"call of {self.name}: the arguments cannot be unpickled on this host: "
                f"{type(error).__name__}: {error}"
            ) from error
        self.keys = ()
        self.plan._base.load()
        return self.plan.bind(args, kwargs, {})

    def release(self) -> None:
        """Nobody will unpack them: the call is over. What was unpacked in part may still be looked at."""
        keys, self.keys = self.keys, ()
        for key in keys:
            self._server.release(key, reuse=False)

    def finish(self, value: Any) -> tuple[Any, Sequence[Any]]:
        return self.plan.finish(value)

    def take_late(self, call: Call, error: BaseException) -> None:
        """See :meth:`HostSpecialization.take_late`."""
        self.plan.take_late(call, error)
