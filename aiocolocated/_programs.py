# SPDX-License-Identifier: Apache-2.0
"""Programs with callbacks, as JAX dispatches them.

JAX runs such a program inline, on the dispatching thread, if its inputs are ready and nothing else is
in that thread's queue: then its callbacks see the thread's context, its errors come at once, and
nothing occupies XLA's few threads. So off a loop's thread that is arranged for.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from aiocolocated import _callback_errors, _compat, _hostloop, _values
from aiocolocated._settings import LOCK
from aiocolocated._waiters import own_body, waiting
from aiocolocated._workers import local


class Run(Protocol):
    """A callback's coroutine."""

    def cancel(self) -> None: ...


class Dispatch:
    """A program that this thread dispatches, with the coroutines that its callbacks started inline."""

    __slots__ = ("runs",)

    def __init__(self) -> None:
        self.runs: list[Run] = []


class _Here(threading.local):
    dispatch: Dispatch | None = None
    retries = False  # who called the program calls it again


here = _Here()

# Not the numbers of channels, which count from one.
_streams = itertools.count(1 << 40)


def new_stream() -> int:
    """An execution stream with nothing in its queue."""
    return next(_streams)


class _Again(BaseException):
    """A program was not run, see :func:`call`."""


_ran: weakref.WeakSet[Any] = weakref.WeakSet()  # programs that may


def call(jitted: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a jitted function, so that no other call of it waits for a callback of this one.

    JAX lets nobody else in while the first call with such arguments runs, for all the time that its
    callbacks take, and they may wait for one of the others. So this first call ends before it runs.
    """
    here.retries = True
    try:
        try:
            return jitted(*args, **kwargs)
        except _Again:
            here.retries = False
        return jitted(*args, **kwargs)
    finally:
        here.retries = False
        del args, kwargs  # a traceback keeps this frame


def _dispatch(program: Any, args: Sequence[Any], run: Callable[[], Any]) -> Any:
    if here.retries:
        here.retries = False
        with LOCK:
            if program not in _ran:
                _ran.add(program)
                raise _Again
    outer = here.dispatch
    stream = _compat.get_execution_stream()
    failed = _compat.drop_failed_tokens(program)
    if failed and local.call is None:
        with LOCK:
            _failed.extend(e for e in failed if not _callback_errors.is_callbacks(e))
    _callback_errors.tend_soon()
    alone = len(_compat.program_devices(program)) == 1
    own_loop = _hostloop.of_this_thread()
    # A user's loop must not wait for inputs. The library's has to see the program end: if code on it
    # then waited for its arrays, callbacks could not run there. But not while there are some that go
    # on there: the inputs may need them.
    inputs = [a for x in args if (a := _values.array_of(x)) is not None]
    if own_loop is None:
        on_loop = asyncio._get_running_loop() is not None
    else:
        on_loop = own_loop.has_other_callbacks() and not _compat.all_ready(inputs)
    if own_loop is not None:
        own_loop.occupants.append(own_body())
    here.dispatch = dispatch = Dispatch()
    try:
        if not on_loop:
            _compat.block_on_inputs(inputs)
            if alone:  # programs with collectives have to stay in one order on all their devices
                _compat.set_execution_stream(new_stream())
        result = run()
        if own_loop is not None and not (on_loop or alone):
            _block_on(program)
    except BaseException:
        for started in dispatch.runs:  # nobody will collect them
            started.cancel()
        raise
    finally:
        here.dispatch = outer
        if own_loop is not None:
            own_loop.occupants.pop()
        _compat.set_execution_stream(stream)
        del args, inputs, run, dispatch  # a traceback keeps this frame
    if on_loop or not alone:
        _remember(program, stream)
        if not (result or on_loop) and own_body() is not None:
            with waiting():  # no array will tell the call of an error
                for _, token in _compat.output_tokens(program):
                    token.block_until_ready()
    return result


def _block_on(program: Any) -> None:
    for _, token in _compat.output_tokens(program):
        with contextlib.suppress(RuntimeError):  # its arrays have it, too
            token.block_until_ready()


# --- what is in flight --------------------------------------------------------------------------------

# The last program of each queue, as JAX has one per execution stream (by default: thread) and device.
# Next to each token whether a call of the library has its errors.
_in_flight: dict[tuple[Any, Any], tuple[Any, bool]] = {}
_failed: list[Exception] = []  # of JAX's own ordered callbacks, dropped so that others go on


def _remember(program: Any, stream: int) -> None:
    queue = stream or ("thread", threading.get_ident())
    owned = local.call is not None
    with LOCK:
        for device, token in _compat.output_tokens(program):
            _in_flight[queue, device] = token, owned


def in_flight() -> bool:
    """Whether programs with effects may be unfinished."""
    return bool(_in_flight)


def block_until_over() -> list[Exception]:
    """Wait for the effects of every program dispatched so far (worker thread).

    Returns:
        JAX's errors of those that no call of the library raises.
    """
    with LOCK:
        waiting_for = list(_in_flight.items())
        errors = _failed.copy()
        _failed.clear()
    for queue, (token, owned) in waiting_for:
        try:
            token.block_until_ready()
        except Exception as error:
            if not owned:
                errors.append(error.with_traceback(None))  # it has this frame, and so the list
        with LOCK:
            if _in_flight.get(queue, (None, False))[0] is token:
                del _in_flight[queue]
    return errors


def watch() -> None:
    """Take part in every dispatch of a program with callbacks, from now on."""
    global _watching
    with LOCK:
        if _watching:
            return
        _watching = True
        _compat.watch_programs(_dispatch)


_watching = False
