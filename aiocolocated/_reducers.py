# SPDX-License-Identifier: Apache-2.0
"""Reducers: one result of what the body gave on each of several hosts."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, cast

from aiocolocated._exceptions import SpecError

Reducer: TypeAlias = (
    Literal["equal", "list", "any", "all", "intersection"] | Callable[[list[Any]], Any]
)


def _equal(values: list[Any]) -> Any:
    for i, value in enumerate(values):
        if type(value) is not type(values[0]) or value != values[0]:
            raise SpecError(
                f"the hosts gave different results: {values[0]!r} on the first, {value!r} on number {i}"
            )
    return values[0]


def _intersection(values: list[Any]) -> Any:
    return functools.reduce(operator.and_, map(set, values))


_NAMED: dict[str, Callable[[list[Any]], Any]] = {
    "equal": _equal,
    "list": list,
    "any": any,
    "all": all,
    "intersection": _intersection,
}


def reducer(given: Reducer | None) -> Callable[[list[Any]], Any] | None:
    """The function behind a name.

    Raises:
        SpecError: there is no such reducer.
    """
    if given is None or callable(given):
        return given
    try:
        return _NAMED[cast("str", given)]
    except (KeyError, TypeError):
        raise SpecError(
            f"reduce must be one of {', '.join(map(repr, _NAMED))} or a function of the list of the "
            f"hosts' results, got {given!r}"
        ) from None
