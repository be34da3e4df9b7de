# SPDX-License-Identifier: Apache-2.0
"""Waiting for effects: of bodies, of channels, and of callbacks in jitted programs."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from aiocolocated import _callback_errors, _callback_runs, _compat, _programs, _service
from aiocolocated._channels import new_channel
from aiocolocated._exceptions import DeadlockError
from aiocolocated._execution import computing
from aiocolocated._futures import ArrayFuture
from aiocolocated._plans import RunPlan
from aiocolocated._runtime import before_exit
from aiocolocated._settings import LOCK
from aiocolocated._submission import calls_in_flight, take
from aiocolocated._waiters import own_body
from aiocolocated._waiting import wait_until_over
from aiocolocated._workers import pool

_PAUSE = 0.005  # seconds between two looks at what does not say when it is over


async def effects_barrier() -> None:
    """Wait until everything that was submitted or dispatched so far has had its effects.

    That is: every colocated call and every callable in a channel, whoever submitted it, also one that
    was cancelled while its body ran; and every callback of every jitted program that was dispatched
    through the library or, once one of its callbacks was traced, directly, by whichever thread.
    :func:`jax.effects_barrier` blocks, and waits for programs of its own thread only.

    Raises:
        Exception: a callback's error, of a program that was called directly, which nobody has got so far.
            Several come in an :class:`ExceptionGroup`. Errors of calls go to those who await them.
        DeadlockError: in a body, or a coroutine callback, that one of the calls waits for; in a callback
            of a program that JAX does not run inline.

    Ordering: takes no channel. What is submitted meanwhile is not waited for.

    Cancellation: stops the wait.

    Thread safety: any loop's thread; ``from_thread.run(effects_barrier)`` elsewhere. In a body its own
    call is not waited for, and in a callback nothing that waits for it.

    Example:
        >>> step(x)                        # jitted; an io_callback writes a line to a log
        >>> await effects_barrier()        # it is written

    Source: ``jax.effects_barrier`` (JAX 0.10).

    .. versionadded:: 0.3
    """
    own = own_body()
    here = _callback_runs.callbacks_here.get()
    if any(place.in_flight for place in here):
        raise DeadlockError(
            "effects_barrier in a callback of a program that JAX runs asynchronously would wait for that "
            "program. Await it outside of callbacks."
        )
    with LOCK:
        calls = [call for call in calls_in_flight() if call is not own]
        running = [call for call in calls if call._channel._order.running is call]
        runs = [run for run in _callback_runs.coroutines_running() if run.place not in here]
    await wait_until_over(cast("list[ArrayFuture[Any]]", calls))
    errors = await new_channel("effects_barrier").run(_programs.block_until_over)
    while any(call._channel._order.running is call for call in running) or any(  # noqa: ASYNC110
        run.is_running() for run in runs
    ):  # nobody is told when an abandoned body, or a coroutine, is over
        await asyncio.sleep(_PAUSE)
    if _callback_errors.has_lost():
        with LOCK:  # calls of later that have failed, and have not been told so yet
            calls = list(computing)
        await wait_until_over(cast("list[ArrayFuture[Any]]", calls))
    _raise(errors)


def _raise(errors: list[Exception]) -> None:
    originals = [_callback_errors.unwrapped(e) for e in errors if not _callback_errors.is_got(e)]
    originals += _callback_errors.take_lost()
    try:
        if len(originals) == 1:
            raise originals[0]
        if originals:
            raise BaseExceptionGroup("errors of callbacks", originals)
    finally:
        errors.clear()
        del originals


@before_exit
def _finish_programs() -> None:
    """At exit: callbacks of programs in flight need the library's threads and loop."""
    if _programs.in_flight():
        here = (lambda: None).__code__
        call: Any = RunPlan(_log_errors).prepare(new_channel("effects"), (), {}, here, 0)
        with LOCK:  # no other calls are taken any more
            take(call)
            if call._channel._order.push(call):
                pool.schedule(call._channel)
    else:
        _callback_errors.log_lost()
        # JAX would print what somebody has got, or is logged.
        _compat.drop_failed_tokens_if(_callback_errors.is_callbacks)


def _log_errors() -> None:
    for error in _programs.block_until_over():
        if not _callback_errors.is_callbacks(error):
            _service.logger.error("a callback failed", exc_info=error)
