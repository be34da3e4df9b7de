# SPDX-License-Identifier: Apache-2.0
"""Exceptions on their way from a body to whoever waits: which frames they show, and what those hold."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from aiocolocated import _compat
from aiocolocated._exceptions import BodyError

_PACKAGE = __name__.partition(".")[0]

# Not by the exception's own attributes: its class may have replaced them.
get_traceback: Callable[[BaseException], TracebackType | None] = vars(BaseException)[
    "__traceback__"
].__get__
set_traceback = BaseException.with_traceback  # returns the exception
get_cause: Callable[[BaseException], BaseException | None] = vars(BaseException)[
    "__cause__"
].__get__
set_cause: Callable[[BaseException, BaseException], None] = vars(BaseException)["__cause__"].__set__
_get_context: Callable[[BaseException], BaseException | None] = vars(BaseException)[
    "__context__"
].__get__
_set_context: Callable[[BaseException, BaseException | None], None] = vars(BaseException)[
    "__context__"
].__set__
_is_context_hidden: Callable[[BaseException], bool] = vars(BaseException)[
    "__suppress_context__"
].__get__
_members: Callable[[BaseException], tuple[BaseException, ...]] = vars(BaseExceptionGroup)[
    "exceptions"
].__get__


def text_of(error: BaseException) -> str:
    """Its text, also if its class cannot make one."""
    try:
        return str(error)
    except BaseException:
        return "(its text cannot be made)"


def origin_of(error: BaseException) -> BaseException | None:
    """What a printed traceback shows above an exception: its cause, or else its context."""
    if (cause := get_cause(error)) is not None:
        return cause
    return None if _is_context_hidden(error) else _get_context(error)


def from_body(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without the library's frames at its start."""
    while traceback is not None and _is_ours(traceback):
        traceback = traceback.tb_next
    return traceback


def _is_ours(traceback: TracebackType) -> bool:
    name = traceback.tb_frame.f_globals.get("__name__", "")
    return isinstance(name, str) and (name.startswith((_PACKAGE + "._", _PACKAGE + ".hosts")))


def as_raisable(error: BaseException, what: str) -> Exception:
    """The exception itself, or a :exc:`BodyError` in place of one that would break its waiter."""
    if isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration)):
        return error
    instead = BodyError(f"{what} raised {type(error).__name__}: {text_of(error)}")
    set_cause(instead, error)
    return instead


def drop_frames(error: BaseException, outer: BaseException | None = None) -> None:
    """Give an exception, and those it comes from, tracebacks of the same lines that hold nothing.

    A frame holds its variables, its callers' frames, and so theirs.

    Args:
        error: the exception.
        outer: what was being handled when its body was called: that is somebody else's, and becomes
            nobody's context.
    """
    todo: list[BaseException | None] = [error]
    seen: set[int] = set()
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if (traceback := get_traceback(one)) is not None:
            set_traceback(one, _compat.without_frames(traceback))
        if outer is not None and _get_context(one) is outer:
            _set_context(one, None)
        todo += get_cause(one), _get_context(one)
        if isinstance(one, BaseExceptionGroup):
            todo += _members(one)
