# SPDX-License-Identifier: Apache-2.0
"""Running a call: its body on a worker thread or on the host's loop, then what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Sequence
from functools import partial
from time import monotonic
from typing import Any

import jax

from aiocolocated import _compat, _contexts, _readiness, _service, _settings, _shipping, _specs
from aiocolocated._callback_errors import unwrapped
from aiocolocated._calls import Call
from aiocolocated._coroutines import CoroutineBody
from aiocolocated._exceptions import CallCancelledError
from aiocolocated._hostloop import host_loop
from aiocolocated._loops import Wakes
from aiocolocated._owners import FailureReport
from aiocolocated._protocols import Args, Body, Kwargs, Plan
from aiocolocated._raising import as_raisable, from_body, get_traceback, set_traceback
from aiocolocated._settings import LOCK
from aiocolocated._threads import ThreadBody
from aiocolocated._types import CANCELLED, DISPATCHED, FAILED, QUEUED, READY, RUNNING
from aiocolocated._values import Late
from aiocolocated._workers import local, pool

ArrayImpl = _compat.ArrayImpl


class RunnableCall(Call):
    """A call that a worker can execute."""

    __slots__ = ()

    def _is_quick(self) -> bool:
        body: Any = self._body
        if body is not None:  # it has ended
            return body.error is None and type(body.value) in _QUICK_RESULTS
        return self._light and not self._convert and self._config is None and self._plan.is_loaded()

    def _execute(self, wakes: Wakes) -> bool:
        """Run the body and settle; false if a coroutine goes on by itself.

        Its channel comes back to a worker when the coroutine has ended, and this settles then.
        """
        error: BaseException | None = None
        value: Any = None
        arrays: Sequence[Any] = ()
        ready = True
        late = self._light and self._body is not None
        local.call = self
        try:
            if late:
                value, arrays = self._take_outcome()
            else:
                self._started = monotonic()
                if self._look is not None and self._look_ahead():
                    local.call = None
                    return True
                if self._group is not None:
                    self._forward(wakes)
                    local.call = None
                    return True
                if self._light:
                    self._launch()
                    local.call = None
                    return False
                value, arrays = self._run_body()
            if arrays:
                ready = _readiness.check(arrays)
        except BaseException as exc:
            error = self._as_error(exc)
        local.call = None
        if self._nested_channel is not None:
            self._nested_channel = None
        order = self._channel._order
        with LOCK:
            order.body_ended()
            gate = self._gate
            if gate is not None and (admitted := gate.leave(self)):
                self._channel._hand_out(admitted)
            if error is not None:
                if self._state == RUNNING:
                    self._fail(wakes, error, get_traceback(error))
                elif late:
                    self._report_late(error)
                self._computed(wakes)
            elif ready:
                if self._state == RUNNING:
                    self._settle(wakes, READY, value)
                if (
                    order.pending
                    and self._owner is None
                    and self._release is None
                    and not (self._wide or self._light)
                ):
                    self._loop = None  # the common case of what follows
                    if gate is not None and self._object is not None:
                        self._object.call_over(wakes)
                        self._object = None
                else:
                    self._computed(wakes)
            else:
                order.in_flight += 1
                computing.add(self)
                if not self._wide and self._plan.dispatches and _on_several_devices(arrays):
                    self._wide = order.wide = True
                    order.gate.enter(self, order)
                self._dispatched(value, wakes)
        if not ready:
            _readiness.when_ready(arrays, partial(self._arrays_ready, arrays))
        # The frames of a failed body refer to this one (``f_back``), which must hold nothing then.
        del self, error, value, arrays
        return True

    def _dispatched(self, value: Any, wakes: Wakes) -> None:
        """The body has returned; its arrays are still computing (under the lock)."""
        if self._state == RUNNING:
            self._state = DISPATCHED
            self._value = value
            if self._dispatch_waiters is not None:
                self._wake_dispatched(wakes)
            if self._dependents is not None:
                self._unblock_dependents()

    def _break_off(self, error: BaseException, wakes: Wakes) -> None:
        """Something of ours broke while the call ran: its waiters get that."""
        with LOCK:
            if self._channel._order.running is self:
                self._channel._order.body_ended()
                if self._gate is not None:
                    self._channel._hand_out(self._gate.leave(self))
            self._fail(wakes, error, error.__traceback__)
            if self._owner is not None or self._loop is not None or self._object is not None:
                self._computed(wakes)

    def _look_ahead(self) -> bool:
        """Find out what the call has to wait for, and let it take its turn again.

        For calls whose needs are in their arguments' values: they wait in their channel for arrays that
        are still computing, or for room, without a thread. False if it may go on at once, or was
        cancelled meanwhile.
        """
        look, self._look = self._look, None
        assert look is not None
        arrays = look(self)
        if arrays is None:
            return False
        pending = not _compat.all_ready(arrays)
        with LOCK:
            if self._state != RUNNING:
                return False
            self._state = QUEUED
            self._started = 0.0
            self._channel._order.put_back(self)
            if pending:
                self._blocked += 1
                self._inputs = _readiness.when_ready(arrays, self._inputs_ready)
        return True

    def _bind_now(self) -> None:
        """Make the arguments what the body is to see."""
        if self._convert:
            self._convert = False
            self._args, self._kwargs = self._bind(self._args, self._kwargs)

    def _with_values(self) -> tuple[Args, Kwargs]:
        """The arguments with the values of futures in their place, and no more."""
        values = self._values(self._args, self._kwargs)
        leaves, tree = jax.tree_util.tree_flatten((self._args, self._kwargs))
        leaves = [values.get(id(x), x) for x in leaves]
        result: tuple[Args, Kwargs] = jax.tree_util.tree_unflatten(tree, leaves)
        return result

    def _inputs_ready(self) -> None:
        """The poller found every array computed (service thread)."""
        with LOCK:
            self._inputs = None
            self._blocked -= 1
            if not self._blocked and self._state == QUEUED:
                self._channel._resume()

    def _run_body(self) -> tuple[Any, Sequence[Any]]:
        plan, args, kwargs = self._plan, self._args, self._kwargs
        context = self._context
        config, self._config = self._config, None
        self._args = self._kwargs = self._context = None  # type: ignore[assignment]
        try:
            body = plan.body()
            assert context is not None
            options = context.get(_contexts.scope)
            if config is None and not options:
                if self._convert:
                    args, kwargs = self._bind(args, kwargs)
                if _settings.strict and plan.ships:
                    args, kwargs = self._ship(args, kwargs)
                value = context.run(body, *args, **kwargs)
            else:
                # Placing NumPy values depends on the configuration, too.
                with _contexts.in_force(config, options or ()):
                    if self._convert:
                        args, kwargs = self._bind(args, kwargs)
                    if _settings.strict and plan.ships:
                        args, kwargs = self._ship(args, kwargs)
                    value = context.run(body, *args, **kwargs)
                    del args, kwargs
                    args, kwargs = (), {}
                    return plan.finish(value)
        except BaseException:
            body = plan = None  # type: ignore[assignment] # of a stream, they have it
            raise
        finally:
            del self, args, kwargs, context
        return plan.finish(value)

    def _launch(self) -> None:
        """Have the body run elsewhere: a coroutine on the host's loop, or its object's own thread."""
        plan, args, kwargs = self._plan, self._args, self._kwargs
        context = self._context
        config, self._config = self._config, None
        self._args = self._kwargs = self._context = None  # type: ignore[assignment]
        try:
            assert context is not None
            # First: without it nobody would close the coroutine.
            host = host_loop() if self._thread is None else None
            options = context.get(_contexts.scope) or ()
            with _in_force(config, options):
                if self._convert:
                    args, kwargs = self._bind(args, kwargs)
                if _settings.strict and plan.ships:
                    args, kwargs = self._ship(args, kwargs)
                if self._thread is not None:
                    run = partial(_load_and_call, plan, args, kwargs)
                    self._body = ThreadBody(self, run, context, config, options)
                    self._thread.put(self._body)
                    return
                coroutine = context.run(context.run(plan.body), *args, **kwargs)
            assert host is not None
            if not inspect.isawaitable(coroutine):
                raise TypeError(f"{plan.name} is a coroutine function, but gave {coroutine!r}")
            body = CoroutineBody(self, coroutine, context, host, config, options, self._one_task)
            self._body = body
            body.start()
        finally:
            del self, args, kwargs, context

    # -- on other hosts ---------------------------------------------------------------------------------

    def _forward(self, wakes: Wakes) -> None:
        """Send the call to the hosts of its devices."""
        plan, args, kwargs = self._plan, self._args, self._kwargs
        context = self._context
        config, self._config = self._config, None
        self._args = self._kwargs = self._context = None  # type: ignore[assignment]
        try:
            assert context is not None
            options = context.get(_contexts.scope) or ()
            if self._convert:
                args, kwargs = self._bind(args, kwargs)
            self._group.send(self, plan, args, kwargs, config, options, wakes)
        finally:
            del self, args, kwargs, context

    def _is_sent(self, body: Body, wakes: Wakes) -> bool:
        """The call is about to go; false if it was cancelled meanwhile (under the lock)."""
        order = self._channel._order
        if self._state != RUNNING:
            order.body_ended()
            self._leave_own_gate()
            self._computed(wakes)
            return False
        order.sent_ahead(self._group)
        computing.add(self)
        self._sent = True
        self._body = body
        if self._dependents is not None:
            self._unblock_followers()
        return True

    def _dispatched_there(self, value: Any, wakes: Wakes) -> None:
        """Its body has returned, its arrays are still computing (under the lock)."""
        order = self._channel._order
        order.in_flight += 1
        self._dispatched(value, wakes)
        self._left_hosts(order.over_there(), wakes)

    def _over_there(
        self, value: Any, error: BaseException | None, dispatched: bool, wakes: Wakes
    ) -> None:
        """Nothing of it runs on its hosts any more (under the lock)."""
        order = self._channel._order
        computing.discard(self)
        self._sent = False
        body: Any = self._body
        self._body = None
        if self._state >= READY:
            if self._state == CANCELLED and body.late is not None:
                self._report_late(body.late)
        elif error is not None:
            failure, traceback = error, get_traceback(error)
            for dependency in self._dependencies or ():
                if dependency._state == FAILED:  # then it is that error that has come back
                    dependency._pass_error_on(self)
                    failure, traceback = dependency._value, dependency._traceback
            self._fail(wakes, failure, traceback)
        else:
            self._settle(wakes, READY, value)
        self._left_hosts(order.computed() if dispatched else order.over_there(), wakes)
        self._computed(wakes)

    def _leave_own_gate(self) -> None:
        gate = self._gate
        if gate is not None and (admitted := gate.leave(self)):
            self._channel._hand_out(admitted)

    def _left_hosts(self, claimed: bool, wakes: Wakes) -> None:
        channel = self._channel
        self._leave_own_gate()
        if claimed:
            pool.schedule(channel)
        if channel._order.room:
            channel._admit(wakes)

    def _take_outcome(self) -> tuple[Any, Sequence[Any]]:
        """What a coroutine that has ended gave."""
        body: Any = self._body
        self._body = None
        error = body.error
        try:
            if self._state == CANCELLED and (
                error is None
                or isinstance(error, asyncio.CancelledError)
                or self._thread is not None
                or not body.cancelled  # it failed by itself, just before
            ):
                return None, ()
            if error is not None:
                raise error
            with _in_force(body.config, body.options):
                return self._plan.finish(body.value)
        finally:
            del self, body, error

    def _ship(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Arguments by value, as another host would see them."""
        shipped: tuple[Args, Kwargs] = _shipping.by_value(
            (args, kwargs), f"call of {self._plan.name}", _specs.argument_path
        )
        return shipped

    def _bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments as the body sees them."""
        return self._plan.bind(args, kwargs, self._values(args, kwargs))

    def _values(self, args: Args, kwargs: Kwargs) -> dict[int, Any]:
        """The values of the futures among the arguments, by their ids."""
        wakes = Wakes()
        values: dict[int, Any] = {}
        try:
            with LOCK:
                for dependency in self._plan.futures(args, kwargs):
                    if dependency._state == FAILED:
                        dependency._pass_error_on(self)
                        raise set_traceback(dependency._value, dependency._traceback)
                    if dependency._state == CANCELLED:
                        self._cancel(wakes, f": it depends on {dependency._describe()}")
                        raise CallCancelledError(*dependency._value.args)
                    value = dependency._value
                    if dependency._state < DISPATCHED:  # it goes to the same hosts, before this one
                        value = Late(dependency._body)
                    values[id(dependency)] = value
        finally:
            wakes.pay()
        return values

    def _as_error(self, error: BaseException) -> BaseException:
        """The exception that waiters get: traceback from the body on, notes attached once."""
        error = unwrapped(error)
        set_traceback(error, from_body(get_traceback(error)))
        error = as_raisable(error, self._plan.name)
        if isinstance(error, jax.errors.JaxRuntimeError) and _NOT_HERE in str(error):
            with contextlib.suppress(Exception):
                error.add_note(
                    "a program was to run over devices of other processes. Outside of bodies: compute in "
                    "a colocated function, or fetch arrays with 'await device_get(x)'. In bodies that run "
                    "on several hosts: open_hosts(collectives=True), or compute shard by shard"
                )
        try:
            notes: Sequence[str] = getattr(error, "__notes__", ())
            if not any(note.startswith("colocated call ") for note in notes):
                error.add_note(self._title())
        except BaseException:  # an exception class that does not want notes
            _service.logger.debug("no note on %s", type(error).__name__, exc_info=True)
        return error

    def _report_late(self, error: BaseException) -> None:
        """A cancelled coroutine's clean-up failed: its waiters are gone (under the lock)."""
        take_late = getattr(self._plan, "take_late", None)
        if take_late is not None:  # on a host: the controller reports it
            take_late(self, error)
            return
        report = FailureReport(error, self._describe(), self._loop)
        if self._owner is not None:
            self._owner.call_failed(report)

    def _arrays_ready(self, arrays: Sequence[Any]) -> None:
        """The poller found every array computed (service thread)."""
        error: BaseException | None = None
        try:
            _readiness.check(arrays)
        except Exception as exc:
            error = self._as_error(exc)
        wakes = Wakes()
        with LOCK:
            computing.discard(self)
            if self._channel._order.computed():
                pool.schedule(self._channel)
            if self._state == DISPATCHED:
                if error is not None:
                    self._fail(wakes, error, get_traceback(error))
                else:
                    self._settle(wakes, READY, self._value)
            self._computed(wakes)
        wakes.pay()


# What JAX says of a program with a device of another process's client.
_NOT_HERE = "Unknown PjRt global device ID"


# Results that need no more than a look.
_QUICK_RESULTS = frozenset({ArrayImpl, type(None), bool, int, float, str})


# Calls whose body has returned and whose arrays are computing; for `runtime.calls()` and exit.
computing: set[Call] = set()


def _load_and_call(plan: Plan, args: Args, kwargs: Kwargs) -> Any:
    try:
        return plan.body()(*args, **kwargs)
    finally:
        del args, kwargs  # a traceback keeps this frame


def _in_force(
    config: Any, options: tuple[tuple[str, Any], ...]
) -> contextlib.AbstractContextManager[None]:
    if config is None and not options:
        return contextlib.nullcontext()
    return _contexts.in_force(config, options)


def _on_several_devices(arrays: Sequence[Any]) -> bool:
    return any(len(a.sharding.device_set) > 1 for a in arrays)
