# SPDX-License-Identifier: Apache-2.0
"""Values as another host would get them: plain Python by value, arrays by reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from aiocolocated import _compat, _serialization
from aiocolocated._exceptions import ArgumentError

if TYPE_CHECKING:
    from aiocolocated._specs import KeyPath

# Nothing can be done to these that another host would not see.
_IMMUTABLE = frozenset(
    {
        _compat.ArrayImpl,
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
    }  # and nothing that has parts
)


def by_value(tree: Any, where: str, name_path: Callable[[KeyPath], str]) -> Any:
    """A copy of a tree, made by pickling it; its arrays and jitted functions are the same objects.

    Raises:
        ArgumentError: a leaf cannot be pickled; the message has its path.
    """
    if type(tree) in _IMMUTABLE:
        return tree
    if (
        type(tree) is tuple
        and len(tree) == 2
        and type(tree[0]) is tuple
        and type(tree[1]) is dict
        and not tree[1]
        and _IMMUTABLE.issuperset(map(type, tree[0]))
    ):  # the arguments of most calls
        return tree
    try:
        return _serialization.loads(*_serialization.dumps(tree))
    except Exception as error:
        raise _explain(tree, where, name_path, error) from error


def _explain(
    tree: Any, where: str, name_path: Callable[[KeyPath], str], error: Exception
) -> ArgumentError:
    way = "values are pickled (strict mode), as they are for other hosts"
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        try:
            _serialization.loads(*_serialization.dumps(leaf))
        except Exception as reason:
            return ArgumentError(
                f"{where}: {name_path(path)} is a {type(leaf).__qualname__}: {reason}; {way}"
            )
    return ArgumentError(f"{where}: {error}; {way}")
