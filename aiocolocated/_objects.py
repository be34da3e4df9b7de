# SPDX-License-Identifier: Apache-2.0
"""The life of an object on a host: made at its first method call, closed when its calls are over."""

from __future__ import annotations

import inspect
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from aiocolocated import _service, _settings, _shipping, _specs
from aiocolocated._channels import new_channel
from aiocolocated._exceptions import ObjectClosedError
from aiocolocated._futures import ArrayFuture
from aiocolocated._lifetimes import HERE, dropped_gate, track, untrack
from aiocolocated._loops import Wakes
from aiocolocated._ordering import Gate
from aiocolocated._settings import LOCK
from aiocolocated._specializations import FunctionCode, Kind, kind_of
from aiocolocated._submission import take
from aiocolocated._threads import OwnThread
from aiocolocated._types import READY
from aiocolocated._workers import pool

if TYPE_CHECKING:
    from aiocolocated._calls import Call
    from aiocolocated.hosts.base import Host

_SELF = object()  # stands for the instance where only a method's other parameters matter


class HostObject:
    """One object, as its host sees it.

    Calls hold it, whoever else does; what the user holds is a :class:`Handle`.
    """

    __slots__ = (
        "__weakref__",
        "_args",
        "_kwargs",
        "_lock",
        "called",
        "calls",
        "closing",
        "cls",
        "ended",
        "gate",
        "host",
        "instance",
        "load",
        "made",
        "methods",
        "name",
        "streams",
        "thread",
    )

    def __init__(
        self,
        cls: type[Any],
        host: Host,
        load: Callable[[], Callable[..., Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        max_concurrency: int,
        dedicated_thread: bool,
    ) -> None:
        self.cls = cls
        self.host = host
        self.load = load
        self.name = cls.__qualname__
        self.gate: Gate[Any] = Gate(max_concurrency)
        self.thread = OwnThread(f"aiocolocated-object-{self.name}") if dedicated_thread else None
        self.calls = 0  # submitted, or waiting for room, and not over
        self.called = False
        self.closing: ArrayFuture[None] | None = None  # the call that closes it
        self.instance: Any = None
        self.made = False  # its constructor has returned
        self.ended = False  # objects do not, by themselves
        # Weakly: they have the object. Who uses the object has those that were used.
        self.methods: weakref.WeakValueDictionary[str, MethodCode] = weakref.WeakValueDictionary()
        self.streams: weakref.WeakSet[Any] = weakref.WeakSet()  # of its generator methods
        self._args = args
        self._kwargs = kwargs
        self._lock = threading.Lock()

    # -- on the host ------------------------------------------------------------------------------

    def get(self) -> Any:
        """The instance, made if there is none (worker thread).

        Raises:
            Exception: the constructor's; the next call tries again.
        """
        with self._lock:
            if not self.made:
                cls = self.load()
                args, kwargs = self._args, self._kwargs
                if _settings.strict:
                    where = f"constructor of {self.name}"
                    args, kwargs = _shipping.by_value((args, kwargs), where, _specs.argument_path)
                self.instance = cls(*args, **kwargs)
                self.made = True
                self._args, self._kwargs = (), {}
                with LOCK:
                    if self.closing is None:  # else that call has it
                        track(self)
                    _service.watch(+1)  # until it is closed: its handle's finalizer says so there
            return self.instance

    def forget(self) -> None:
        """Drop the instance; what it has for a ``__del__`` runs here (worker thread)."""
        for reference in self.methods.valuerefs():
            method = reference()
            if method is not None:
                method.body = None
                method.cache.clear()  # its entries have the method, and so the object
        self._args, self._kwargs = (), {}
        self.instance = None
        if self.thread is not None:
            self.thread.stop()
        if self.made:
            with LOCK:
                _service.watch(-1)

    @property
    def used(self) -> bool:
        """Whether there is anything to close, or may be when calls are over (no lock)."""
        return self.made or self.called

    # -- counting (under the lock) ------------------------------------------------------------------

    def call_taken(self) -> None:
        """A call has got its place, or waits for one."""
        if self.closing is not None:
            raise ObjectClosedError(f"the {self.name} object is closed: its methods take no calls")
        self.calls += 1
        self.called = True

    def call_over(self, wakes: Wakes) -> None:
        """A call is over."""
        self.calls -= 1
        closing = self.closing
        if closing is not None and not self.calls:
            closing._blocked -= 1
            closing._channel._resume()

    # -- closing ----------------------------------------------------------------------------------

    def close(self, *, dropped: bool = False) -> ArrayFuture[None]:
        """Take no more calls; the call that closes the instance once those taken are over."""
        with LOCK:
            if self.closing is None:
                for source in list(self.streams):
                    if not source.ended:
                        source.close()
                untrack(self)
                plan = ClosePlan(self)
                call: ArrayFuture[None] = ArrayFuture._create(
                    plan, (), {}, new_channel(f"close {self.name}"), None, None, HERE, 0
                )
                if not self.used:
                    self._args, self._kwargs = (), {}
                    if self.thread is not None:
                        self.thread.stop()
                    plan.closes = None
                    call._state = READY
                    self.closing = call
                    return call
                call._thread = self.thread
                call._light = plan.light or self.thread is not None
                call._blocked = bool(self.calls)
                call._gate = dropped_gate if dropped else None
                self.closing = call
                take(call)
                if call._channel._order.push(call):
                    pool.schedule(call._channel)
            return self.closing


class ClosePlan:
    """Closes an instance (a ``Plan``): its ``aclose`` or ``close``, then its destructor."""

    __slots__ = ("closes", "host", "light", "name")
    devices = None
    ships = False
    dispatches = False

    def __init__(self, owner: HostObject) -> None:
        self.closes: HostObject | None = owner  # until it has: the object has the call
        self.host = owner.host.name
        self.name = f"{owner.name}.aclose"
        self.light = kind_of(getattr(owner.cls, "aclose", None)) == "coroutine"

    def is_loaded(self) -> bool:
        return False

    def body(self) -> Callable[..., Any]:
        return self._aclose if self.light else self._close

    async def _aclose(self) -> BaseException | _Done:
        """Its error is a result here: the instance is dropped in :meth:`finish`, off the loop."""
        owner = self.closes
        assert owner is not None
        try:
            if owner.made:
                await owner.instance.aclose()
        except BaseException as error:
            return error
        finally:
            del owner
        return _Done()

    def _close(self) -> None:
        owner = self.closes
        assert owner is not None
        try:
            if owner.made:
                _call_close(owner.instance)
        except BaseException as error:
            _clear_frames(error)
            raise
        finally:
            owner.forget()
            self.closes = None
            del owner

    def futures(self, args: Any, kwargs: Any) -> Sequence[Any]:
        return ()

    def bind(self, args: Any, kwargs: Any, values: Any) -> Any:
        return args, kwargs

    def finish(self, value: Any) -> tuple[Any, Sequence[Any]]:
        owner, self.closes = self.closes, None
        if owner is None:  # after `_close`
            return None, ()
        try:
            if isinstance(value, BaseException):
                _clear_frames(value)
                raise value
        finally:
            owner.forget()
            del owner, value
        return None, ()


class _Done:
    """A result that no loop's thread looks at, see `_QUICK_RESULTS`."""


def _call_close(instance: Any) -> None:
    for name in ("aclose", "close"):
        close = getattr(instance, name, None)
        if close is not None:
            result = close()
            if inspect.isawaitable(result):
                if inspect.iscoroutine(result):
                    result.close()  # or Python says that it was never awaited
                raise TypeError(
                    f"{type(instance).__qualname__}.{name}() gave {result!r}: only an 'async def "
                    "aclose' of the class itself is awaited"
                )
            return


def _clear_frames(error: BaseException) -> None:
    """Let go of the instance, which is ``self`` in the frames that the error came through.

    Or its destructor would run where the error is dropped: in the caller's thread.
    """
    seen: set[int] = set()
    chained: list[BaseException | None] = [error]
    while chained:
        one = chained.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            chained += (one.__cause__, one.__context__)


class MethodCode(FunctionCode):
    """What all specializations of one method of one object share."""

    __slots__ = ("_getter",)

    def __init__(
        self,
        owner: HostObject,
        name: str,
        function: Callable[..., Any],
        getter: Callable[[Any], Callable[..., Any]],
        kind: Kind | None = None,
        anywhere: bool = False,
    ) -> None:
        # The signature without `self`, whatever that is.
        super().__init__(types.MethodType(function, _SELF), owner.host)
        self.name = f"{owner.name}.{name}"
        self.kind = kind or self.kind
        self.special = True
        self.anywhere = anywhere
        self.object = owner
        self._getter = getter

    def load(self) -> Callable[..., Any]:
        return self._make_and_call  # called where the body is: in its context and configuration

    def _make_and_call(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self.body = self._getter(self.object.get())
            return self.body(*args, **kwargs)
        finally:
            del self, args, kwargs  # a traceback keeps this frame

    def mark(self, call: Call) -> None:
        owner = self.object
        call._object = owner
        call._gate = owner.gate
        if owner.thread is not None:
            call._thread = owner.thread
            call._light = True
        elif self.kind == "coroutine":
            call._light = True
