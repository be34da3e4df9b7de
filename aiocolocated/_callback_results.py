# SPDX-License-Identifier: Apache-2.0
"""What a callback returns, checked against ``result_shape_dtypes``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aiocolocated import _compat, _specs
from aiocolocated._exceptions import ArgumentError, SpecError


class ResultSpecs:
    """What a callback must return."""

    __slots__ = ("_leaves", "_paths", "_tree", "_vectorized", "flat")

    def __init__(self, tree: Any, vectorized: bool) -> None:
        with_path, self._tree = jax.tree_util.tree_flatten_with_path(tree)
        self._paths = tuple(path for path, _ in with_path)
        self._leaves = tuple(_spec(path, leaf) for path, leaf in with_path)
        self._vectorized = vectorized  # vmap may have added dimensions in front
        self.flat = [_physical(spec) for spec in self._leaves]

    def __eq__(self, other: object) -> bool:
        return type(other) is ResultSpecs and (self._tree, self._leaves, self._vectorized) == (
            other._tree,
            other._leaves,
            other._vectorized,
        )

    def __hash__(self) -> int:
        return hash((self._tree, len(self._leaves)))

    def leaves_of(self, value: Any, what: str) -> list[np.ndarray[Any, Any]]:
        """The leaves of a result, checked.

        Raises:
            SpecError: the result is not as ``result_shape_dtypes`` says.
        """
        with_path, tree = jax.tree_util.tree_flatten_with_path(value)
        # JAX only counts the leaves; a list for a tuple is fine, another key is not.
        if tuple(path for path, _ in with_path) != self._paths:
            raise SpecError(
                f"{what}: the result's tree differs from result_shape_dtypes: expected {self._tree}, "
                f"got {tree}"
            )
        return [
            self._leaf(f"{what}: {_specs.result_path(path)}", spec, leaf)
            for (path, leaf), spec in zip(with_path, self._leaves, strict=True)
        ]

    def unflattened(self, leaves: Sequence[Any]) -> Any:
        """The tree of a program's values, with typed keys again."""
        wrapped = [
            jax.random.wrap_key_data(x, impl=_compat.key_impl(spec.dtype)) if is_key(spec) else x
            for x, spec in zip(leaves, self._leaves, strict=True)
        ]
        return jax.tree_util.tree_unflatten(self._tree, wrapped)

    def _leaf(self, where: str, spec: jax.ShapeDtypeStruct, leaf: Any) -> np.ndarray[Any, Any]:
        got = leaf
        dtype = spec.dtype
        if is_key(spec):
            if not (isinstance(leaf, jax.Array) and leaf.dtype == dtype):
                raise _differs(where, "dtype", spec, got)
            got, spec = jax.random.key_data(leaf), _physical(spec)
            dtype = spec.dtype
        elif isinstance(leaf, jax.Array) and is_key(leaf):
            raise _differs(where, "dtype", spec, got)
        array = np.asarray(got)
        if array.dtype != dtype:
            scalar = type(leaf) in (bool, int, float, complex)
            held = _as_scalar(leaf, dtype) if scalar else _canonical(array)
            if held is None or held.dtype != dtype:
                raise _differs(where, "dtype", spec, leaf)
            array = held
        rank = len(spec.shape)
        shape = array.shape[array.ndim - rank :] if self._vectorized else array.shape
        if shape != tuple(spec.shape):
            raise _differs(where, "shape", spec, leaf)
        return array


_HOLDS: dict[type, tuple[Any, ...]] = {
    bool: (np.bool_,),
    int: (jnp.integer, jnp.floating),
    float: (jnp.floating,),
    complex: (jnp.complexfloating,),
}


def _as_scalar(value: Any, dtype: Any) -> np.ndarray[Any, Any] | None:
    """A Python scalar as an array of a dtype that can hold it."""
    if not any(jnp.issubdtype(dtype, kind) for kind in _HOLDS[type(value)]):
        return None
    try:
        array = np.asarray(value, dtype)
    except (OverflowError, TypeError, ValueError):
        return None
    if jnp.issubdtype(dtype, jnp.integer) and int(array) != value:  # int4 wraps round
        return None
    return array


def _canonical(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """64 bits as the 32 that JAX makes of them where x64 is off; integers only if none changes."""
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if dtype == array.dtype:
        return None
    held = array.astype(dtype)
    if array.dtype.kind in "iu" and not np.array_equal(held, array):
        return None
    return held


def _differs(where: str, respect: str, spec: Any, got: Any) -> SpecError:
    return SpecError(
        f"{where} has another {respect}: expected {_specs.describe(spec)}, "
        f"got {_specs.describe(got) if hasattr(got, 'dtype') else repr(got)[:80]}"
    )


def _spec(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, type) or not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise ArgumentError(
            f"result_shape_dtypes{jax.tree_util.keystr(path)} must have a shape and a dtype (a "
            f"jax.ShapeDtypeStruct, say), got {leaf if isinstance(leaf, type) else _specs.describe(leaf)}"
        )
    dtype = leaf.dtype
    if not is_key(leaf):
        dtype = np.dtype(dtype)
        if (held := jax.dtypes.canonicalize_dtype(dtype)) != dtype:
            raise SpecError(
                f"result_shape_dtypes{jax.tree_util.keystr(path)} has dtype {dtype}, which JAX makes "
                f"{held}, because x64 is off"
            )
    return jax.ShapeDtypeStruct(tuple(leaf.shape), dtype)


def is_key(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _physical(spec: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    if not is_key(spec):
        return spec
    data = jax.eval_shape(jax.random.key_data, spec)
    return jax.ShapeDtypeStruct(data.shape, data.dtype)
