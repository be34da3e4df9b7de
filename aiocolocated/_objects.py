# SPDX-License-Identifier: Apache-2.0
"""The life of an object on its hosts: made at its first method call, closed when its calls are over."""

from __future__ import annotations

import inspect
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aiocolocated import _service, _settings, _shipping, _specs
from aiocolocated._channels import new_channel
from aiocolocated._exceptions import ObjectClosedError, SpecError
from aiocolocated._futures import ArrayFuture, wait_for_call
from aiocolocated._lifetimes import HERE, dropped_gate, track, untrack
from aiocolocated._loops import Wakes
from aiocolocated._ordering import Gate
from aiocolocated._plans import NoArguments
from aiocolocated._remote_objects import CloseAllPlan, ObjectCode, RemoteClosePlan
from aiocolocated._settings import LOCK
from aiocolocated._specializations import FunctionCode, Kind, kind_of
from aiocolocated._submission import submit, take
from aiocolocated._threads import OwnThread
from aiocolocated._types import READY
from aiocolocated._workers import pool
from aiocolocated.hosts.remote import hosts_are_open

if TYPE_CHECKING:
    from aiocolocated._calls import Call
    from aiocolocated._specs import Devices
    from aiocolocated.hosts._groups import Code, Group
    from aiocolocated.hosts.base import Host
    from aiocolocated.hosts.remote import HostSet

_SELF = object()  # stands for the instance where only a method's other parameters matter


class HostObject:
    """One object, as its host sees it: this process, and the controller of what is on other hosts.

    Every host that its methods are called on makes an instance of its own. Calls hold this, whoever else
    does; what the user holds is a :class:`Handle`.
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
        "codes",
        "ended",
        "gate",
        "home",
        "host",
        "instance",
        "load",
        "made",
        "methods",
        "name",
        "options",
        "places",
        "recreate",
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
        recreate: bool = False,
        name: str | None = None,
    ) -> None:
        self.cls = cls
        self.host = host
        self.load = load
        self.name = cls.__qualname__ if name is None else name
        self.options = (max_concurrency, dedicated_thread)
        self.recreate = recreate
        # Where its methods were called: groups of hosts, None for this process; with their devices.
        self.places: dict[Group | None, Devices | None] = {}
        self.home: Devices | None = None  # where those go that have nothing to tell their devices
        self.codes: dict[HostSet, ObjectCode] = {}
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
        self._args: tuple[Any, ...] | None = args
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
                self.instance = self.construct()
                self.made = True
                if None not in self.places:
                    self.called_on(None, None)
                if not hosts_are_open():  # which may have to make it, too
                    self._args, self._kwargs = None, {}
                with LOCK:
                    if self.closing is None:  # else that call has it
                        track(self)
                    _service.watch(+1)  # until it is closed: its handle's finalizer says so there
            return self.instance

    def construct(self) -> Any:
        cls = self.load()
        args, kwargs = self._args or (), self._kwargs
        if _settings.strict:
            where = f"constructor of {self.name}"
            args, kwargs = _shipping.by_value((args, kwargs), where, _specs.argument_path)
        return cls(*args, **kwargs)

    def forget(self) -> None:
        """Drop the instance; what it has for a ``__del__`` runs here (worker thread)."""
        for reference in self.methods.valuerefs():
            method = reference()
            if method is not None:
                method.body = None
                method.cache.clear()  # its entries have the method, and so the object
        self._args, self._kwargs = None, {}
        self.instance = None
        if self.thread is not None:
            self.thread.stop()
        if self.made:
            with LOCK:
                _service.watch(-1)

    @property
    def used(self) -> bool:
        """Whether there is anything to close, or may be when calls are over (no lock)."""
        return self.made or (self.called and any(map(_may_be_open, tuple(self.places))))

    @property
    def closes_asynchronously(self) -> bool:
        """Whether closing it is a coroutine."""
        return kind_of(getattr(self.cls, "aclose", None)) == "coroutine"

    # -- where it is ----------------------------------------------------------------------------------

    def called_on(self, group: Group | None, devices: Devices | None) -> None:
        """A method is about to be called on these hosts, or in this process, for the first time."""
        with LOCK:
            if group in self.places:
                return
            self.places[group] = devices
            self.home = devices if len(self.places) == 1 else None
            known = len(self.places) > 1
        if known:  # methods without arrays have a specialization for the one place there was
            for reference in self.methods.valuerefs():
                method = reference()
                if method is not None:
                    method.cache.clear()

    def not_called_here(self) -> None:
        """The call for which this process was noted went to hosts instead (under the lock)."""
        if not self.made:
            self.places.pop(None, None)

    def devices_of_home(self) -> Devices | None:
        """Where a method goes that has nothing to tell its devices: where the others went.

        Raises:
            SpecError: that is not one place.
        """
        if len(self.places) > 1:
            places = ["this process" if g is None else g.name for g in tuple(self.places)]
            raise SpecError(
                f"the {self.name} object is on {' and on '.join(places)}, and this call has no arrays "
                "to tell which is meant: use colocated_python_class(..., devices=...), or "
                "method.specialize(devices=...)"
            )
        return self.home

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Its constructor's; ``None`` if they were let go."""
        args, kwargs = self._args, self._kwargs
        return None if args is None else (args, kwargs)

    def code_on(self, hosts: HostSet) -> ObjectCode:
        """What these hosts have to be told of it (worker thread)."""
        code = self.codes.get(hosts)
        if code is None:
            options = (*self.options, self.closes_asynchronously)
            code = ObjectCode(hosts, self.cls, self.name, options, self.recreate)
            self.codes[hosts] = code
        return code

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
                call: ArrayFuture[None]
                places = {None if group is None else group.hosts for group in self.places}
                if len(places) > 1:
                    call = _new_call(
                        self, CloseAllPlan(self.name, partial(_close_all, self, places))
                    )
                    call._light = True
                else:
                    call = self._closing_call(*(places or {None}), dropped=dropped)
                if not self.used:
                    self._args, self._kwargs = None, {}
                    if self.thread is not None:
                        self.thread.stop()
                    plan: Any = call._plan
                    plan.let_go()
                    call._state = READY
                    self.closing = call
                    return call
                call._blocked = bool(self.calls)
                if dropped and call._group is None:
                    call._gate = dropped_gate
                self.closing = call
                take(call)
                if call._channel._order.push(call):
                    pool.schedule(call._channel)
            return self.closing

    def _closing_call(self, hosts: HostSet | None, *, dropped: bool = False) -> ArrayFuture[None]:
        """The call that closes its instances on some hosts, or in this process."""
        call: ArrayFuture[None]
        if hosts is None:
            plan = ClosePlan(self)
            call = _new_call(self, plan)
            call._thread = self.thread
            call._light = plan.light or self.thread is not None
        else:
            call = _new_call(self, RemoteClosePlan(self, hosts, dropped=dropped))
            call._group = hosts.all
            call._light = True
        return call


def _may_be_open(group: Group | None) -> bool:
    return group is None or any(link.lost is None for link in group.links)


def _new_call(owner: HostObject, plan: Any) -> ArrayFuture[None]:
    channel = new_channel(f"close {owner.name}")
    call: ArrayFuture[None] = ArrayFuture._create(plan, (), {}, channel, None, None, HERE, 0)
    return call


async def _close_all(owner: HostObject, places: set[HostSet | None]) -> None:
    """Close an object's instances, in this process and on hosts."""
    calls = [owner._closing_call(hosts) for hosts in places]
    del owner
    for call in calls:
        submit(call)
    errors: list[BaseException] = []
    for call in calls:
        try:
            await wait_for_call(call)
        except BaseException as error:
            errors.append(error)
    try:
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise BaseExceptionGroup("closing failed in several places", errors)
    finally:
        del calls, errors


class ClosePlan(NoArguments):
    """Closes an instance (a ``Plan``): its ``aclose`` or ``close``, then its destructor."""

    __slots__ = ("closes", "host", "light", "name")
    devices = None

    def __init__(self, owner: HostObject) -> None:
        self.closes: HostObject | None = owner  # until it has: the object has the call
        self.host = owner.host.name
        self.name = f"{owner.name}.aclose"
        self.light = owner.closes_asynchronously

    def let_go(self) -> None:
        """There is nothing to close."""
        self.closes = None

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

    def make_code(self, hosts: HostSet) -> Code:
        name = self.name.removeprefix(f"{self.object.name}.")
        return hosts.method_code(self.object.code_on(hosts), self._getter, self.kind, name)

    def mark(self, call: Call) -> None:
        owner = self.object
        if None not in owner.places:
            owner.called_on(None, None)
        call._object = owner
        call._gate = owner.gate
        if owner.thread is not None:
            call._thread = owner.thread
            call._light = True
        elif self.kind == "coroutine":
            call._light = True
