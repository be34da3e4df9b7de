# SPDX-License-Identifier: Apache-2.0
"""Errors of callbacks in jitted code, found again behind JAX's own error.

XLA carries nothing but text from a callback to whoever waits for the program. So each error is kept
here under a number, and the number is part of the text.
"""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from time import monotonic
from types import TracebackType

import jax

from aiocolocated import _compat, _service, _settings
from aiocolocated._raising import (
    as_raisable,
    drop_frames,
    from_body,
    get_cause,
    get_traceback,
    origin_of,
    set_cause,
    set_traceback,
    text_of,
)

_KEPT = 256  # errors; each holds what its exception holds, but no frame's variables
_MARK = re.compile(r"\[aiocolocated callback error ([0-9a-f]+)-(\d+)\]")
_PAUSE = 0.02  # seconds from an error's delivery to the first look at what it holds since then
_LONGEST_PAUSE = 1.0
_PATIENCE = 10.0  # seconds until an error that nobody has got is logged

_JaxError: type[BaseException] = jax.errors.JaxRuntimeError
_process = os.urandom(6).hex()  # a text may come from another process
_number = 0
_lock = threading.Lock()


class CallbackFailed(Exception):
    """What JAX is told; its text ends with the mark."""


class _Kept:
    """An error, with what it was like when its callback raised it."""

    __slots__ = ("error", "got", "logged", "since", "traceback", "trimmed", "what")

    def __init__(self, error: BaseException, what: str, got: bool) -> None:
        self.error = error
        self.what = what
        self.traceback = self.trimmed = get_traceback(error)
        self.since = monotonic()
        self.got = got  # somebody has it
        self.logged = False

    def restored(self) -> BaseException:
        """The exception, with the callback's own traceback: raising it may have made it longer."""
        self.got = True
        tend_soon()
        set_traceback(self.error, self.traceback)
        return self.error

    def trim(self) -> None:
        """Take off the frames of those who have got it since: their variables may be arrays."""
        if get_traceback(self.error) is not self.trimmed:
            drop_frames(self.error)
            self.trimmed = get_traceback(self.error)

    def log(self) -> None:
        self.logged = True
        info: tuple[type[BaseException], BaseException, TracebackType | None]
        info = type(self.error), self.error, self.traceback
        _service.logger.error(
            "%s failed, and nobody has asked for its error", self.what, exc_info=info
        )


_errors: OrderedDict[int, _Kept] = OrderedDict()


def keep(
    error: BaseException, what: str, outer: BaseException | None = None, inline: bool = False
) -> CallbackFailed:
    """Keep a callback's error.

    Args:
        error: what the callback raised.
        what: kind and name of the callback.
        outer: the exception that its thread was handling when JAX called it.
        inline: JAX raises it to whoever called the program, at once.

    Returns:
        The exception to raise into XLA.
    """
    global _number
    # Nobody says when the error is of no more use, and its frames lead to the arguments of all callers.
    set_traceback(error, from_body(get_traceback(error)))
    drop_frames(error, outer)
    kept, oldest = _Kept(error, what, inline), None
    with _lock:
        _number = number = _number + 1
        _errors[number] = kept
        if len(_errors) > _KEPT:
            oldest = _errors.popitem(last=False)[1]
    if oldest is not None and not (oldest.got or oldest.logged):
        oldest.log()
    tend_soon()
    failed = CallbackFailed(
        f"{what} raised {type(error).__qualname__}: {text_of(error)}\n"
        f"[aiocolocated callback error {_process}-{number}]"
    )
    return failed.with_traceback(kept.traceback)


# JAX logs each exception of a callback with its traceback. Those kept here reach who waits; of one that
# reaches nobody there is a record of ours.
_compat.drop_callback_records(lambda error: isinstance(error, CallbackFailed))


# --- from JAX's error to the callback's ---------------------------------------------------------------


def _number_in(error: BaseException) -> int | None:
    """The number in an exception's text. The text may quote other errors; its own mark is the last."""
    marks = _MARK.findall(text_of(error))
    return int(marks[-1][1]) if marks and marks[-1][0] == _process else None


def is_callbacks(error: BaseException) -> bool:
    """Whether JAX raised it because a callback failed whose error is kept, or was."""
    return isinstance(error, _JaxError) and _number_in(error) is not None


def _behind(error: BaseException) -> _Kept | None:
    """The callback's error behind an exception of JAX's.

    A callback that calls jitted code, and does not handle JAX's error for a callback in that, passes it
    on: then that callback's.
    """
    found: _Kept | None = None
    while (number := _number_in(error)) is not None:
        kept = _errors.get(number)
        if kept is None or kept is found:
            break
        kept.got = True
        found, error = kept, kept.error
        if not isinstance(error, _JaxError):
            break
    return found


def unwrapped(error: BaseException) -> BaseException:
    """What a waiter gets: the callback's error with JAX's as its last cause, or else ``error`` itself."""
    if not isinstance(error, _JaxError):
        return error
    kept = _behind(error)
    if kept is None:
        return error
    found = kept.restored()
    _add_cause(found, error)
    return as_raisable(found, kept.what)


def _add_cause(error: BaseException, cause: BaseException) -> None:
    """Make JAX's error the origin of all that an exception comes from, once."""
    seen = {id(error)}
    last = error
    while (origin := origin_of(last)) is not None:
        if id(origin) in seen:  # they go round in a circle
            return
        if is_callbacks(origin):
            if _number_in(origin) == _number_in(cause):
                return
            break  # of an earlier failure with the same exception
        seen.add(id(origin))
        last = origin
    if id(cause) not in seen:
        drop_frames(cause)
        set_cause(last, cause)


def callback_error(exc: BaseException) -> BaseException | None:
    """Find the exception that a callback raised behind the error that JAX raised for it.

    A jitted function that is called directly raises JAX's own error when one of its callbacks fails,
    and so does whatever blocks on its results: a ``JaxRuntimeError`` with nothing but text. Where the
    library runs the program or waits for it, it raises the original by itself.

    Args:
        exc: an exception; its causes, its contexts and the members of groups are searched too.

    Returns:
        The original exception, with type, arguments and traceback, or ``None``: no callback of this
        library's functions failed in this process, or it is one of the oldest (the last 256 are kept).

    Whoever asks has got the error: it is neither logged (after 10 s, or at exit) nor raised by
    :func:`effects_barrier`, as one is that nobody has got.

    Thread safety: any thread.

    Example:
        >>> try:
        ...     y = step(x)                            # jitted, with an io_callback inside
        ... except jax.errors.JaxRuntimeError as exc:
        ...     if isinstance(callback_error(exc), ConnectionError):
        ...         y = step_without_lookup(x)

    .. versionadded:: 0.3
    """
    with _lock:
        known = {id(kept.error) for kept in _errors.values()}
    todo: list[BaseException | None] = [exc]
    seen: set[int] = set()
    while todo:
        error = todo.pop(0)
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        if id(error) in known and not is_callbacks(error):
            return error
        if (kept := _behind(error)) is not None:
            return kept.restored()
        if isinstance(error, BaseExceptionGroup):
            todo += error.exceptions
        todo += get_cause(error), error.__context__
    return None


# --- errors that nobody has got -----------------------------------------------------------------------


def is_got(error: BaseException) -> bool:
    """Whether somebody has got the callback's error behind one of JAX's, or it was logged and let go."""
    number = _number_in(error) if isinstance(error, _JaxError) else None
    if number is None:
        return False
    kept = _errors.get(number)
    return kept is None or kept.got


def has_lost() -> bool:
    """Whether there are errors that nobody has got so far."""
    with _lock:
        return any(not kept.got for kept in _errors.values())


def take_lost() -> list[BaseException]:
    """The errors that nobody has got so far; with this, somebody has."""
    with _lock:
        lost = [kept for kept in _errors.values() if not kept.got]
    return [as_raisable(kept.restored(), kept.what) for kept in lost]


def log_lost() -> None:
    """Log what nobody has got, or ever will."""
    _log(_errors.values(), 0.0)


def _log(entries: Iterable[_Kept], patience: float) -> bool:
    """Log those that have waited for so many seconds; whether there are others."""
    waiting = False
    for kept in list(entries):
        if not (kept.got or kept.logged):
            if monotonic() - kept.since >= patience:
                kept.log()
            else:
                waiting = True
    return waiting


_looks = 0  # that were begun, each with a pause twice as long as the one before
_soon = False  # whether the next is the first of such


def tend_soon() -> None:
    """Have the service thread look after the errors that are kept, if there are any."""
    global _looks, _soon
    if not _errors or _soon or _settings.forked:
        return
    _soon = True
    _looks += 1
    _service.post(partial(_tend_after, _PAUSE, _looks))


def _tend_after(pause: float, looks: int) -> None:
    _service.call_at(monotonic() + pause, partial(_tend, pause, looks))


def _tend(pause: float, looks: int) -> None:
    """Free what waiters' frames hold, and log what nobody has got for long (service thread)."""
    global _soon
    if looks != _looks:
        return  # others have begun
    _soon = False
    with _lock:
        entries = list(_errors.values())
    for kept in entries:
        kept.trim()
    if _log(entries, _PATIENCE) or pause < _LONGEST_PAUSE:
        _tend_after(min(2 * pause, _LONGEST_PAUSE), looks)
