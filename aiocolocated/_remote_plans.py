# SPDX-License-Identifier: Apache-2.0
"""Specializations for devices of other processes: arguments go there, handles come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from aiocolocated import _compat, _specs
from aiocolocated._futures import ArrayFuture
from aiocolocated._plans import NoArguments, collect
from aiocolocated._settings import LOCK
from aiocolocated._specializations import FunctionCode, Specialization
from aiocolocated.hosts.remote import group_of

if TYPE_CHECKING:
    from aiocolocated._calls import Call
    from aiocolocated._protocols import Args, Kwargs
    from aiocolocated._specs import Devices, KeyPath
    from aiocolocated.hosts._groups import Code, Group
    from aiocolocated.hosts.remote import HostSet


class RemoteSpecialization(Specialization):
    """A function prepared for one set of input specs and the devices of some hosts."""

    __slots__ = ("group", "per_host", "place_ids")

    follows = False  # it needs its code on the hosts, and arguments
    opens = False  # a stream
    dropped = False  # it closes what nobody refers to

    def __init__(
        self,
        base: FunctionCode,
        in_specs: Any,
        out_specs_fn: Callable[..., Any] | None,
        devices: Devices,
        group: Group,
        flat: tuple[tuple[Any, Any], ...] | None = None,
        reduce: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        super().__init__(base, in_specs, out_specs_fn, devices, flat, reduce)
        self.group = group
        self.place_ids = tuple(device.id for device in devices)
        self.per_host = False  # the only argument is a list of (args, kwargs), one for each host
        self.special = True

    def of_one_call(self) -> RemoteSpecialization:
        assert self.devices is not None
        return RemoteSpecialization(
            self._base,
            self.in_specs,
            self.out_specs_fn,
            self.devices,
            self.group,
            reduce=self.reduce,
        )

    @property
    def host(self) -> str:
        return self.group.name

    def mark(self, call: Call) -> None:
        call._group = self.group
        call._light = True
        call._passable = self.reduce is None
        # What fails on one host only must not keep others waiting for it.
        call._waits_here = self.in_specs is not None or self.group.collective
        if self.group.collective:
            call._gate = self.group.hosts.collective_gate
        owner = self._base.object
        if owner is not None:  # its gate and its thread are those of the instance, on the hosts
            call._object = owner
            if self.group not in owner.places:
                owner.called_on(self.group, self.devices)

    def for_hosts(self, args: Any) -> Sequence[Any]:
        """What each host gets, if that is not the same: ``(args, kwargs)`` for each."""
        return args  # type: ignore[no-any-return]

    @property
    def asynchronous(self) -> bool:
        """Whether the body is a coroutine, whose clean-up is waited for."""
        return self._base.kind == "coroutine"

    def is_loaded(self) -> bool:
        return False

    def make_code(self, hosts: HostSet) -> Code:
        """What hosts have to be told of the function."""
        return self._base.make_code(hosts)

    def bind(self, args: Args, kwargs: Kwargs, values: dict[int, Any]) -> tuple[Args, Kwargs]:
        """Put values in place of futures, and check the specs that could not be checked."""
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        if any(type(x) is ArrayFuture for x in leaves):
            leaves = [values[id(x)] if type(x) is ArrayFuture else x for x in leaves]
            args, kwargs = jax.tree_util.tree_unflatten(tree, leaves)
        what = f"call of {self.name}"

        def name_path(path: KeyPath) -> str:
            return _specs.argument_path(path, self._base.function)

        if self.in_specs is not None:
            error = _specs.difference(what, self.in_specs, (args, kwargs), name_path)
            if error is not None:
                raise error
        with_path = jax.tree_util.tree_flatten_with_path((args, kwargs))[0]
        arrays = [(p, x) for p, x in with_path if isinstance(x, jax.Array)]
        _specs.common_devices(what, arrays, self.devices, name_path)
        if self.out_specs_fn is not None and self.in_specs is None:
            self._set_out(_specs.specs_of(args, kwargs))
        return args, kwargs

    def finish(self, value: Any) -> tuple[Any, Sequence[Any]]:
        """Check a result; its arrays are handles, and what waits for them is their host."""
        if type(value) is not _compat.ArrayImpl:
            value, _ = collect(self.name, value)
        if self.out_specs_fn is not None:
            self._check_result(value)
        return value, ()


class RemoteClosing(NoArguments):
    """What the closing of something on hosts says (part of a ``Plan``)."""

    __slots__ = ()
    devices = None
    follows = True
    opens = False
    reduce = None
    asynchronous = True
    nothing = None  # what it gives if there is nothing to close

    def is_loaded(self) -> bool:
        return False

    def body(self) -> Callable[..., Any]:
        raise AssertionError  # it runs on the hosts


def following(plan: Specialization, futures: Sequence[Any]) -> Specialization:
    """The plan of a call that is told its devices by the futures among its arguments only."""
    for future in futures:
        if future._group is not None:
            return RemoteSpecialization(
                plan._base,
                plan.in_specs,
                plan.out_specs_fn,
                future._plan.devices,
                future._group,
                reduce=plan.reduce,
            )
    return plan


def reroute(call: Any) -> Sequence[Any] | None:
    """Have a call go to other hosts if that is where the values of its futures are (worker thread).

    ``None`` if they are here; else the call takes its turn again, behind what is under way elsewhere.
    """
    args, kwargs = call._with_values()
    plan: Specialization = call._plan

    def name_path(path: KeyPath) -> str:
        return _specs.argument_path(path, plan._base.function)

    with_path = jax.tree_util.tree_flatten_with_path((args, kwargs))[0]
    arrays = [(p, x) for p, x in with_path if isinstance(x, jax.Array)]
    devices = _specs.common_devices(f"call of {plan.name}", arrays, None, name_path)
    group = group_of(devices)
    if group is None:
        return None
    assert devices is not None
    there = RemoteSpecialization(
        plan._base, plan.in_specs, plan.out_specs_fn, devices, group, reduce=plan.reduce
    )
    with LOCK:
        gate, call._gate = call._gate, None  # the object's, of this process
        if gate is not None:
            call._channel._hand_out(gate.leave(call))
        call._thread = None
        call._plan = there
        call._args, call._kwargs = args, kwargs
        if call._object is not None:
            call._object.not_called_here()
    there.mark(call)
    return ()
