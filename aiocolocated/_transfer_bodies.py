# SPDX-License-Identifier: Apache-2.0
"""What transfers run on host processes: packing shards of arrays, and making arrays of packed parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from aiocolocated import _compat
from aiocolocated.hosts._parcels import Parcel
from aiocolocated.hosts._wire import Plain

Index = tuple[tuple[int, int], ...]  # start and stop for each axis


class Parts:
    """Parts of arrays, for the controller or for another host; no tree, so that they are not placed."""

    def __init__(self, parts: list[tuple[Index, Parcel]]) -> None:
        self.parts = parts


def place(
    leaves: Sequence[tuple[tuple[int, ...], Any, Any, Sequence[tuple[Index, Parcel]]]],
) -> list[Any]:
    """Make arrays of which this host has some shards (body)."""
    return [_make(*leaf) for leaf in leaves]


def _make(
    shape: tuple[int, ...], dtype: Any, sharding: Any, parts: Sequence[tuple[Index, Parcel]]
) -> Any:
    known = {index: parcel.arrays()[0] for index, parcel in parts}

    def part(slices: Any) -> Any:
        index = index_of(slices, shape)
        if index not in known:
            known[index] = assemble(index, dtype, known)
        return known[index]

    return jax.make_array_from_callback(shape, sharding, part, dtype=dtype)


def pack(arrays: Sequence[Any], wanted: Sequence[Sequence[int]], shared: bool) -> list[Parts]:
    """Pack the shards on some devices of this host (body)."""
    packed: list[Parts] = []
    for array, devices in zip(arrays, wanted, strict=True):
        shards = {shard.device.id: shard for shard in array.addressable_shards}
        parts = [shards[i] for i in devices]
        packed.append(
            Parts(
                [
                    (index_of(s.index, array.shape), Parcel([np.asarray(s.data)], shared=shared))
                    for s in parts
                ]
            )
        )
    return packed


def place_one(leaves: Sequence[Any]) -> Any:
    """Make an array of which this host has some shards (body)."""
    return _make(*leaves[0])


class Fetched:
    """A result on its way to the controller; no tree, so that nothing of it is placed."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree


class Wanted:
    """A result to be packed; no tree either: its arrays may be on any devices of their host."""

    def __init__(self, result: Any) -> None:
        self.result = result


def fetch(wanted: Wanted) -> Fetched | Plain:
    """Pack the arrays in a result (body)."""
    fetched = Fetched(jax.tree_util.tree_map(_packed, wanted.result))
    if is_packed(fetched.tree):  # one array, and nothing of the user's around it
        return Plain(fetched, [fetched.tree.parcel])
    return fetched


def _packed(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    if is_key(leaf):
        data = np.asarray(_compat.key_data(leaf))
        return _PackedArray(Parcel([data]), _compat.key_impl(leaf.dtype))
    return _PackedArray(Parcel([np.asarray(leaf)]), None)


class _PackedArray:
    def __init__(self, parcel: Parcel, impl: str | None) -> None:
        self.parcel = parcel
        self.impl = impl  # of typed keys


def is_packed(leaf: Any) -> bool:
    return isinstance(leaf, _PackedArray)


def unpack(leaf: Any) -> Any:
    if not isinstance(leaf, _PackedArray):
        return leaf
    data = leaf.parcel.arrays()[0]
    return data if leaf.impl is None else jax.random.wrap_key_data(data, impl=leaf.impl)


def pack_whole(*arrays: Any) -> Plain:
    """Pack arrays of which this host has all (body)."""
    parcels = [Parcel([np.asarray(array.addressable_shards[0].data)]) for array in arrays]
    return Plain(parcels, parcels)


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed keys."""
    return isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


# --- indices ---------------------------------------------------------------------------------------------


def index_of(slices: Sequence[slice], shape: Sequence[int]) -> Index:
    return tuple(s.indices(n)[:2] for s, n in zip(slices, shape, strict=True))


def assemble(index: Index, dtype: Any, known: dict[Index, Any]) -> Any:
    """A part of an array, from other parts of it that cover it."""
    for other, array in known.items():
        if all(a <= c and d <= b for (a, b), (c, d) in zip(other, index, strict=True)):
            inside = tuple(slice(c - a, d - a) for (a, _), (c, d) in zip(other, index, strict=True))
            return array[inside]
    made = np.empty([stop - start for start, stop in index], dtype)
    for other, array in known.items():
        common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(other, index, strict=True)]
        if all(start < stop for start, stop in common):
            there = tuple(slice(s - a, e - a) for (s, e), (a, _) in zip(common, other, strict=True))
            here = tuple(slice(s - c, e - c) for (s, e), (c, _) in zip(common, index, strict=True))
            made[here] = array[there]
    return made


def overlap(one: Index, other: Index) -> bool:
    return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True))
