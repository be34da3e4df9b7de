# SPDX-License-Identifier: Apache-2.0
"""Transfers to, from and between hosts in other processes.

An array is packed into parcels, a part for each host, which travels once however many of its devices
want it. Between two hosts of one machine the parts do not pass through the controller: it passes on
where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from aiocolocated import _compat, _values
from aiocolocated._channels import new_channel
from aiocolocated._futures import ArrayFuture
from aiocolocated._lifetimes import HERE
from aiocolocated._remote_plans import RemoteSpecialization
from aiocolocated._specializations import FunctionCode
from aiocolocated._submission import submit
from aiocolocated._workers import local
from aiocolocated.hosts import _parcels
from aiocolocated.hosts._parcels import Parcel
from aiocolocated.hosts._wire import Fixed, Plain
from aiocolocated.hosts.inprocess import inprocess_host
from aiocolocated.hosts.remote import group_of, hosts_of

if TYPE_CHECKING:
    from aiocolocated._calls import Call
    from aiocolocated.hosts._groups import Group

Index = tuple[tuple[int, int], ...]  # start and stop for each axis


# --- on the hosts ---------------------------------------------------------------------------------------


class _Parts:
    """Parts of arrays, for the controller or for another host; no tree, so that they are not placed."""

    def __init__(self, parts: list[tuple[Index, Parcel]]) -> None:
        self.parts = parts


def _place(
    leaves: Sequence[tuple[tuple[int, ...], Any, Any, Sequence[tuple[Index, Parcel]]]],
) -> list[Any]:
    """Make arrays of which this host has some shards (body)."""
    return [_make(*leaf) for leaf in leaves]


def _make(
    shape: tuple[int, ...], dtype: Any, sharding: Any, parts: Sequence[tuple[Index, Parcel]]
) -> Any:
    known = {index: parcel.arrays()[0] for index, parcel in parts}
    shards: list[Any] = []
    for device, slices in sharding.addressable_devices_indices_map(shape).items():
        index = _index(slices, shape)
        part = known.get(index)
        if part is None:
            part = known[index] = _assemble(index, dtype, known)
        shards.append(jax.device_put(part, device))
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _pack(arrays: Sequence[Any], wanted: Sequence[Sequence[int]], shared: bool) -> list[_Parts]:
    """Pack the shards on some devices of this host (body)."""
    packed: list[_Parts] = []
    for array, devices in zip(arrays, wanted, strict=True):
        shards = {shard.device.id: shard for shard in array.addressable_shards}
        parts = [shards[i] for i in devices]
        packed.append(
            _Parts(
                [
                    (_index(s.index, array.shape), Parcel([np.asarray(s.data)], shared=shared))
                    for s in parts
                ]
            )
        )
    return packed


def _place_one(leaves: Sequence[Any]) -> Any:
    """Make an array of which this host has some shards (body)."""
    return _make(*leaves[0])


class _Fetched:
    """A result on its way to the controller; no tree, so that nothing of it is placed."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree


class _Wanted:
    """A result to be packed; no tree either: its arrays may be on any devices of their host."""

    def __init__(self, result: Any) -> None:
        self.result = result


def _fetch(wanted: _Wanted) -> _Fetched:
    """Pack the arrays in a result (body)."""
    return _Fetched(jax.tree_util.tree_map(_packed, wanted.result))


def _packed(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    if _is_key(leaf):
        data = np.asarray(_compat.key_data(leaf))
        return _PackedArray(Parcel([data]), _compat.key_impl(leaf.dtype))
    return _PackedArray(Parcel([np.asarray(leaf)]), None)


class _PackedArray:
    def __init__(self, parcel: Parcel, impl: str | None) -> None:
        self.parcel = parcel
        self.impl = impl  # of typed keys


def _is_packed(leaf: Any) -> bool:
    return isinstance(leaf, _PackedArray)


def _unpack(leaf: Any) -> Any:
    if not isinstance(leaf, _PackedArray):
        return leaf
    data = leaf.parcel.arrays()[0]
    return data if leaf.impl is None else jax.random.wrap_key_data(data, impl=leaf.impl)


def _pack_whole(*arrays: Any) -> Plain:
    """Pack arrays of which this host has all (body)."""
    parcels = [Parcel([np.asarray(array.addressable_shards[0].data)]) for array in arrays]
    return Plain(parcels, parcels)


_pack_whole_code = FunctionCode(_pack_whole, inprocess_host())
_fetch_code = FunctionCode(_fetch, inprocess_host())
_place_one_code = FunctionCode(_place_one, inprocess_host())
_place_code = FunctionCode(_place, inprocess_host())
_pack_code = FunctionCode(_pack, inprocess_host())


# --- indices ---------------------------------------------------------------------------------------------


def _index(slices: Sequence[slice], shape: Sequence[int]) -> Index:
    return tuple(s.indices(n)[:2] for s, n in zip(slices, shape, strict=True))


def _assemble(index: Index, dtype: Any, known: dict[Index, Any]) -> Any:
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


def _overlap(one: Index, other: Index) -> bool:
    return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True))


# --- on the controller -----------------------------------------------------------------------------------


def is_remote(x: Any) -> bool:
    """Whether an array, sharding or device belongs to hosts in other processes."""
    if isinstance(x, jax.Array):
        x = x.sharding
    if isinstance(x, jax.sharding.Sharding):
        x = next(iter(x.device_set))
    return isinstance(x, _compat.Device) and hosts_of(x) is not None


def _call(
    code: FunctionCode,
    group: Group,
    devices: tuple[Any, ...],
    args: list[Any],
    reduce: Callable[[list[Any]], Any] | None = None,
) -> ArrayFuture[Any]:
    plan = RemoteSpecialization(code, None, None, devices, group, reduce=reduce)
    plan.per_host = True
    outer = local.call  # of the user's
    line = (HERE, 0) if outer is None else (outer._code, outer._lasti)
    call: ArrayFuture[Any] = ArrayFuture._create(
        plan, (args,), {}, new_channel(code.name), None, None, *line
    )
    plan.mark(call)
    return submit(call)


def put(leaves: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Put arrays where their shardings say, some of which belong to hosts (worker thread)."""
    results: list[Any] = list(leaves)
    shardings = [
        jax.sharding.SingleDeviceSharding(s) if isinstance(s, _compat.Device) else s
        for s in shardings
    ]
    local: dict[int, Any] = {}
    remote: dict[Group, list[int]] = {}
    for i, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        if is_remote(leaf) and leaf.sharding == sharding:
            continue
        if is_remote(sharding):
            group = group_of(_compat.device_list(sharding))
            assert group is not None
            remote.setdefault(group, []).append(i)
        else:
            local[i] = leaf
    if local:
        fetched = get(list(local.values()))
        for i, value in zip(local, fetched, strict=True):
            results[i] = jax.device_put(value, shardings[i])
    calls = [
        (numbers, _put_group(group, [leaves[i] for i in numbers], [shardings[i] for i in numbers]))
        for group, numbers in remote.items()
    ]
    for numbers, (call, wraps, _) in calls:  # what is on its way lives until it has arrived
        for i, made, wrap in zip(numbers, call.result(), wraps, strict=True):
            results[i] = wrap(made)
    return results


def _put_group(
    group: Group, leaves: Sequence[Any], shardings: Sequence[Any]
) -> tuple[ArrayFuture[Any], list[Callable[[Any], Any]], Any]:
    """Send arrays to a group of hosts; the call, what makes results of its arrays, its arguments."""
    args, wraps, devices = _packed_for(group, leaves, shardings)
    return _call(_place_code, group, devices, args), wraps, args


def _packed_for(
    group: Group, leaves: Sequence[Any], shardings: Sequence[Any]
) -> tuple[list[Any], list[Callable[[Any], Any]], tuple[Any, ...]]:
    """Arrays packed for hosts: what each gets, what makes results of what they give, all devices."""
    per_host: list[list[Any]] = [[] for _ in group.links]
    wraps: list[Callable[[Any], Any]] = []
    devices: dict[Any, None] = {}
    for leaf, sharding in zip(leaves, shardings, strict=True):
        source, wrap = _source(leaf)
        wraps.append(wrap)
        shape, dtype = source.shape, source.dtype
        if source is not leaf and isinstance(leaf, jax.Array):
            sharding = _compat_sharding(leaf, sharding)
        sharding.shard_shape(shape)  # raises if it does not fit
        devices.update(dict.fromkeys(_compat.device_list(sharding)))
        indices = {
            device: _index(slices, shape)
            for device, slices in sharding.devices_indices_map(shape).items()
        }
        parts = _parts_of(source) if isinstance(source, jax.Array) else None
        for link, sent in zip(group.links, per_host, strict=True):
            wanted = dict.fromkeys(i for d, i in indices.items() if d in link.devices)
            if parts is not None:
                chosen = [(i, p) for i, p in parts if any(_overlap(i, w) for w in wanted)]
                if not chosen:  # of size zero
                    chosen = parts[:1]
            else:
                chosen = [(w, Parcel([source[tuple(slice(*s) for s in w)]])) for w in wanted]
            sent.append((shape, dtype, Fixed(sharding), chosen))
    args: list[Any] = [((leaves_of_host,), {}) for leaves_of_host in per_host]
    return args, wraps, tuple(devices)


class PutThere(RemoteSpecialization):
    """What a transfer from this process to hosts runs: nothing here but the packing."""

    __slots__ = ("_bare", "_sharding", "_tree", "_wraps")

    def __init__(self, parcel: Any, sharding: Any, group: Group) -> None:
        # One array, and no tree around it: what the hosts make is the result, which may be passed on there.
        single = jax.tree_util.treedef_is_leaf(parcel.tree) and not _is_key(parcel.leaves[0])
        code = _place_one_code if single else _place_code
        super().__init__(code, None, None, _compat.device_list(sharding), group)
        self.name = "device_put"
        self.per_host = True
        self._bare = single
        self._tree = parcel.tree
        self._sharding = sharding
        self._wraps: list[Callable[[Any], Any]] = []

    def mark(self, call: Call) -> None:
        call._group = self.group
        call._light = True
        call._passable = self._bare

    def for_hosts(self, args: Any) -> Sequence[Any]:
        parcel = args
        per_host: list[list[Any]] = [[] for _ in self.group.links]
        for i, leaf in enumerate(parcel.leaves):
            try:
                packed, wraps, _ = _packed_for(self.group, [leaf], [self._sharding])
            except Exception as error:
                error.add_note(f"device_put: the leaf is {parcel.describe(i)}")
                raise
            self._wraps += wraps
            for sent, (one, _) in zip(per_host, packed, strict=True):
                sent += one[0]
        return [
            Plain(((sent,), {}), [part for *_, parts in sent for _, part in parts])
            for sent in per_host
        ]

    def finish(self, value: Any) -> tuple[Any, Sequence[Any]]:
        if self._bare:
            return value, ()
        leaves = [wrap(made) for wrap, made in zip(self._wraps, value, strict=True)]
        return jax.tree_util.tree_unflatten(self._tree, leaves), ()


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def put_there(parcel: Any, device: Any) -> PutThere | None:
    """The plan of a transfer from this process to the hosts of one sharding, if it is one."""
    if not is_remote(device) or any(map(is_remote, parcel.leaves)):
        return None
    if isinstance(device, _compat.Device):
        device = jax.sharding.SingleDeviceSharding(device)
    group = group_of(_compat.device_list(device))
    assert group is not None
    return PutThere(parcel, device, group)


class FetchThere(RemoteSpecialization):
    """What the transfer of a result runs that a host may not have yet: nothing here."""

    __slots__ = ()

    def __init__(self, devices: tuple[Any, ...], group: Group) -> None:
        super().__init__(_fetch_code, None, None, devices, group)
        self.name = "device_get"

    def mark(self, call: Call) -> None:
        call._group = self.group
        call._light = True

    def bind(self, args: Any, kwargs: Any, values: dict[int, Any]) -> tuple[Any, Any]:
        return (_Wanted(values[id(args[0])]),), {}

    def finish(self, value: Any) -> tuple[Any, Sequence[Any]]:
        return jax.tree_util.tree_map(_unpack, value.tree, is_leaf=_is_packed), ()


def fetch_there(parcel: Any) -> FetchThere | None:
    """The plan of fetching the result of a call on one host, if it is that."""
    if len(parcel.leaves) != 1 or not jax.tree_util.treedef_is_leaf(parcel.tree):
        return None
    future = parcel.leaves[0]
    if not future._passable or len(future._group.links) > 1:
        return None
    return FetchThere(future._plan.devices, future._group)


class GetThere(RemoteSpecialization):
    """What a transfer of whole arrays from one host runs: nothing here."""

    __slots__ = ("_tree", "_wraps")

    def __init__(self, leaves: Sequence[Any], tree: Any, group: Group) -> None:
        devices = _compat.device_list(leaves[0].sharding)
        flat = ((None, None),) * len(leaves)  # there is nothing to look at in the arguments
        super().__init__(_pack_whole_code, None, None, devices, group, flat)
        self.name = "device_get"
        self._tree = tree
        self._wraps = [_source(leaf)[1] for leaf in leaves]

    def mark(self, call: Call) -> None:
        call._group = self.group
        call._light = True

    def finish(self, value: Any) -> tuple[Any, Sequence[Any]]:
        leaves = [wrap(parcel.arrays()[0]) for wrap, parcel in zip(self._wraps, value, strict=True)]
        return jax.tree_util.tree_unflatten(self._tree, leaves), ()


def get_there(leaves: Sequence[Any], tree: Any) -> GetThere | None:
    """The plan of a transfer of whole arrays from one host, if it is one."""
    if not leaves or not all(isinstance(x, jax.Array) and is_remote(x) for x in leaves):
        return None
    groups = {group_of(_compat.device_list(x.sharding)) for x in leaves}
    group = groups.pop()
    if (
        groups
        or group is None
        or len(group.links) > 1
        or not all(x.sharding.is_fully_replicated for x in leaves)
    ):
        return None
    return GetThere(leaves, tree, group)


def _compat_sharding(key: Any, sharding: Any) -> Any:
    """The sharding of the data behind typed keys that are sharded so: one more axis, not sharded."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        spec = (*sharding.spec, *(None,) * (key.ndim - len(sharding.spec)), None)
        return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*spec))
    return sharding


def _source(leaf: Any) -> tuple[Any, Callable[[Any], Any]]:
    """A leaf as an array with bytes, and what makes a leaf of such an array."""
    if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        impl = _compat.key_impl(leaf.dtype)
        data = _compat.key_data(leaf)
        return (
            data if is_remote(data) else np.asarray(data),
            lambda made: jax.random.wrap_key_data(made, impl=impl),
        )
    if is_remote(leaf):
        return leaf, lambda made: made
    data = np.asarray(leaf)
    if not _values.is_numpy(data) or data.dtype.kind == "T":
        raise TypeError(
            f"a value of dtype {data.dtype} cannot be put on devices of other processes"
        )
    return data.astype(jax.dtypes.canonicalize_dtype(data.dtype), copy=False), lambda made: made


def _parts_of(array: Any) -> list[tuple[Index, Parcel]]:
    """The parts of an array on hosts, each once, still packed."""
    return get_parts([array])[0]


def get_parts(arrays: Sequence[Any]) -> list[list[tuple[Index, Parcel]]]:
    """Have hosts pack arrays, each part once."""
    groups: dict[Group, list[int]] = {}
    for i, array in enumerate(arrays):
        group = group_of(_compat.device_list(array.sharding))
        assert group is not None
        groups.setdefault(group, []).append(i)
    results: list[list[tuple[Index, Parcel]]] = [[] for _ in arrays]
    calls = []
    for group, numbers in groups.items():
        wanted: list[list[list[int]]] = [[] for _ in group.links]
        for i in numbers:
            array = arrays[i]
            seen: set[Index] = set()
            chosen: list[list[int]] = [[] for _ in group.links]
            for device, slices in array.sharding.devices_indices_map(array.shape).items():
                index = _index(slices, array.shape)
                if index not in seen:
                    seen.add(index)
                    where = next(k for k, link in enumerate(group.links) if device in link.devices)
                    chosen[where].append(device.id)
            for k, ids in enumerate(chosen):
                wanted[k].append(ids)
        own = [arrays[i] for i in numbers]
        args: list[Any] = [((own, ids, _parcels.sharing), {}) for ids in wanted]
        devices = _compat.device_list(own[0].sharding)
        calls.append((numbers, _call(_pack_code, group, devices, args, reduce=list)))
    for numbers, call in calls:
        for packed in call.result():
            for i, parts in zip(numbers, packed, strict=True):
                results[i] += parts.parts
    return results


def get(leaves: Sequence[Any]) -> list[Any]:
    """Fetch the arrays of hosts among some leaves, as :func:`jax.device_get` would (worker thread)."""
    results: list[Any] = list(leaves)
    remote: list[tuple[int, Any, Callable[[Any], Any]]] = []
    for i, leaf in enumerate(leaves):
        if is_remote(leaf):
            source, wrap = _source(leaf)
            remote.append((i, source, wrap))
        else:
            results[i] = jax.device_get(leaf)
    if remote:
        for (i, source, wrap), parts in zip(
            remote, get_parts([source for _, source, _ in remote]), strict=True
        ):
            known = {index: parcel.arrays()[0] for index, parcel in parts}
            whole: Index = tuple((0, n) for n in source.shape)
            value = known.get(whole)
            results[i] = wrap(_assemble(whole, source.dtype, known) if value is None else value)
    return results
