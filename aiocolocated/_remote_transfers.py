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
from aiocolocated._transfer_bodies import (
    Index,
    Wanted,
    assemble,
    fetch,
    index_of,
    is_key,
    is_packed,
    overlap,
    pack,
    pack_whole,
    place,
    place_one,
    unpack,
)
from aiocolocated._workers import local
from aiocolocated.hosts import _parcels
from aiocolocated.hosts._parcels import Parcel
from aiocolocated.hosts._wire import Fixed, Plain
from aiocolocated.hosts.inprocess import inprocess_host
from aiocolocated.hosts.remote import group_of, hosts_of

if TYPE_CHECKING:
    from aiocolocated._calls import Call
    from aiocolocated.hosts._groups import Group

_pack_whole_code = FunctionCode(pack_whole, inprocess_host())
_fetch_code = FunctionCode(fetch, inprocess_host())
_place_one_code = FunctionCode(place_one, inprocess_host())
_place_code = FunctionCode(place, inprocess_host())
_pack_code = FunctionCode(pack, inprocess_host())


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
    here: dict[int, Any] = {}
    remote: dict[Group, list[int]] = {}
    for i, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        if is_remote(leaf) and leaf.sharding == sharding:
            continue
        if is_remote(sharding):
            group = group_of(_compat.device_list(sharding))
            assert group is not None
            remote.setdefault(group, []).append(i)
        else:
            here[i] = leaf
    if here:
        fetched = get(list(here.values()))
        for i, value in zip(here, fetched, strict=True):
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
    devices: dict[Any, None] = {}
    sources = [_source(leaf) for leaf in leaves]
    elsewhere = [source for source, _ in sources if isinstance(source, jax.Array)]
    packed = iter(get_parts(elsewhere))  # of arrays that are on hosts already
    for leaf, sharding, (source, _) in zip(leaves, shardings, sources, strict=True):
        parts = next(packed) if isinstance(source, jax.Array) else None
        shape, dtype = source.shape, source.dtype
        if source is not leaf and isinstance(leaf, jax.Array):
            sharding = _data_sharding(leaf, sharding)
        sharding.shard_shape(shape)  # raises if it does not fit
        devices.update(dict.fromkeys(_compat.device_list(sharding)))
        indices = {
            device: index_of(slices, shape)
            for device, slices in sharding.devices_indices_map(shape).items()
        }
        for link, sent in zip(group.links, per_host, strict=True):
            wanted = dict.fromkeys(i for d, i in indices.items() if d in link.devices)
            if parts is not None:
                chosen = [(i, p) for i, p in parts if any(overlap(i, w) for w in wanted)]
                if not chosen:  # of size zero
                    chosen = parts[:1]
            else:
                chosen = [(w, Parcel([source[tuple(slice(*s) for s in w)]])) for w in wanted]
            sent.append((shape, dtype, Fixed(sharding), chosen))
    args: list[Any] = [((leaves_of_host,), {}) for leaves_of_host in per_host]
    return args, [wrap for _, wrap in sources], tuple(devices)


class PutThere(RemoteSpecialization):
    """What a transfer from this process to hosts runs: nothing here but the packing."""

    __slots__ = ("_bare", "_sharding", "_tree", "_wraps")

    def __init__(self, parcel: Any, sharding: Any, group: Group) -> None:
        # One array, and no tree around it: what the hosts make is the result, which may be passed on there.
        single = jax.tree_util.treedef_is_leaf(parcel.tree) and not is_key(parcel.leaves[0])
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
        return (Wanted(values[id(args[0])]),), {}

    def finish(self, value: Any) -> tuple[Any, Sequence[Any]]:
        return jax.tree_util.tree_map(unpack, value.tree, is_leaf=is_packed), ()


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
    if any(x.is_deleted() for x in leaves):  # the slower way says which
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


def _data_sharding(key: Any, sharding: Any) -> Any:
    """The sharding of the data behind typed keys that are sharded so: one more axis, not sharded."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        spec = (*sharding.spec, *(None,) * (key.ndim - len(sharding.spec)), None)
        return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*spec))
    return sharding


def _source(leaf: Any) -> tuple[Any, Callable[[Any], Any]]:
    """A leaf as an array with bytes, and what makes a leaf of such an array."""
    if is_key(leaf):
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
                index = index_of(slices, array.shape)
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
            results[i] = wrap(assemble(whole, source.dtype, known) if value is None else value)
    return results
