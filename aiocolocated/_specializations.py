# SPDX-License-Identifier: Apache-2.0
"""Specializations: a function prepared for one set of specs and devices, and its shipped code."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import jax

from aiocolocated import _cache, _compat, _settings, _shipping, _specs, _values
from aiocolocated._exceptions import SpecError
from aiocolocated._futures import ArrayFuture
from aiocolocated._plans import collect, futures_among

if TYPE_CHECKING:
    from aiocolocated._calls import Call
    from aiocolocated._protocols import Args, Kwargs
    from aiocolocated._specs import Devices, KeyPath
    from aiocolocated.hosts._groups import Code
    from aiocolocated.hosts.base import Host, Shipped
    from aiocolocated.hosts.remote import HostSet

ArrayImpl = _compat.ArrayImpl
Kind: TypeAlias = Literal["function", "coroutine", "generator", "asynchronous generator"]
_TESTS: tuple[tuple[Kind, Callable[[Any], bool]], ...] = (
    ("coroutine", inspect.iscoroutinefunction),
    ("generator", inspect.isgeneratorfunction),
    ("asynchronous generator", inspect.isasyncgenfunction),
)
_tree_flatten = jax.tree_util.tree_flatten


class Specialization:
    """A function prepared for one set of input specs and devices (a ``Plan``)."""

    __slots__ = (
        "_base",
        "_lock",
        "_out",
        "_sharding",
        "_single",
        "devices",
        "flat",
        "in_specs",
        "name",
        "out_specs_fn",
        "per_call",
        "reduce",
        "special",
    )

    ships = True
    dispatches = False

    def __init__(
        self,
        base: FunctionCode,
        in_specs: Any,
        out_specs_fn: Callable[..., Any] | None,
        devices: Devices | None,
        flat: tuple[tuple[Any, Any], ...] | None = None,
        reduce: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.reduce = reduce
        self._base = base
        self.name = base.name
        self.special = base.special  # whether `mark` has anything to note
        self.in_specs = in_specs  # (args, kwargs) of specs; None while they are not known
        self.out_specs_fn = out_specs_fn
        self.devices = devices
        self.flat = flat  # (aval, sharding) per positional argument, if all are arrays
        # Devices or output specs depend on what is not in the specs: on futures, or Python values.
        self.per_call = devices is None or (out_specs_fn is not None and in_specs is None)
        self._lock = threading.RLock()
        self._out: tuple[Any, Any, list[jax.ShapeDtypeStruct]] | None = None
        self._single: tuple[Any, Any] | None = None  # aval and sharding of the last good result
        self._sharding: jax.sharding.Sharding | None = None

    def of_one_call(self) -> Specialization:
        """For one call of a specialization that is ``per_call``; ``bind`` completes it."""
        return Specialization(
            self._base, self.in_specs, self.out_specs_fn, self.devices, None, self.reduce
        )

    @property
    def host(self) -> str:
        return self._base.host.name

    def mark(self, call: Call) -> None:
        """Note at a call what few calls have."""
        self._base.mark(call)

    def is_loaded(self) -> bool:
        return self._base.body is not None

    def body(self) -> Callable[..., Any]:
        return self._base.body or self._base.load()

    def futures(self, args: Args, kwargs: Kwargs) -> list[Call]:
        return futures_among(args, kwargs)

    def bind(self, args: Args, kwargs: Kwargs, values: dict[int, Any]) -> tuple[Args, Kwargs]:
        """Put values in place of futures, check the specs that could not be checked, place NumPy."""
        function = self._base.function
        what = f"call of {self.name}"

        def name_path(path: KeyPath) -> str:
            return _specs.argument_path(path, function)

        leaves, tree = _tree_flatten((args, kwargs))
        futures = [x for x in leaves if type(x) is ArrayFuture]
        if futures:
            leaves = [values[id(x)] if type(x) is ArrayFuture else x for x in leaves]
            args, kwargs = jax.tree_util.tree_unflatten(tree, leaves)
            if self.in_specs is not None:
                error = _specs.difference(what, self.in_specs, (args, kwargs), name_path)
                if error is not None:
                    raise error
        with_path, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
        devices = _specs.common_devices(
            what,
            [(p, x) for p, x in with_path if isinstance(x, jax.Array)],
            self.devices,
            name_path,
        )
        if devices is None:
            devices = next((d for x in futures if (d := x._plan.devices) is not None), None)
        if devices is None and not self._base.anywhere:
            raise no_devices(self._base)
        if self.devices is None and self.per_call:
            self.devices = devices  # for what the body returns
        placed: list[Any] = []
        changed = False
        specs = None
        if self.in_specs is not None:
            specs = jax.tree_util.tree_leaves(self.in_specs)
        for i, (path, leaf) in enumerate(with_path):
            if _values.is_numpy(leaf) and devices is not None:
                sharding = (specs[i].sharding if specs else None) or _values.placement(devices)
                leaf = _values.place(leaf, sharding, f"{what}: {name_path(path)}")
                changed = True
            placed.append(leaf)
        result: tuple[Args, Kwargs] = args, kwargs
        if changed:  # else they stay as they are: JAX sorts the keys of dictionaries
            result = jax.tree_util.tree_unflatten(tree, placed)
        if self.out_specs_fn is not None and self.in_specs is None:
            self._set_out(_specs.specs_of(*result))
        return result

    def finish(self, value: Any) -> tuple[Any, Sequence[Any]]:
        """Check a result, place its NumPy leaves, and list its arrays."""
        if self.reduce is not None:
            value = self.reduce([value])
        if type(value) is ArrayImpl:
            single = self._single
            if self.out_specs_fn is None or (
                single is not None
                and value.aval is single[0]
                and ((s := value.sharding) is single[1] or s == single[1])
            ):
                return value, (value,)
        value, arrays = collect(self.name, value, self.place)
        if _settings.strict:
            value = _shipping.by_value(value, f"what {self.name} returned", _specs.result_path)
        if self.out_specs_fn is not None:
            self._check_result(value)
            if type(value) is ArrayImpl:
                self._single = (value.aval, value.sharding)
        return value, arrays

    def place(self, leaf: Any, path: KeyPath) -> Any:
        if self._sharding is None:
            if self.devices is None:
                raise no_devices(self._base)
            self._sharding = _values.placement(self.devices)
        where = f"{self.name} returned {_specs.result_path(path)}"
        return _values.place(leaf, self._sharding, where)

    def _set_out(self, in_specs: Any) -> None:
        assert self.out_specs_fn is not None
        args, kwargs = in_specs
        expected = self.out_specs_fn(*args, **kwargs)
        _specs.check_specs(f"out_specs_fn of {self.name}", expected)
        leaves, tree = _tree_flatten(expected)
        self._out = (expected, tree, leaves)

    def _check_result(self, value: Any) -> None:
        if self._out is None:
            with self._lock:  # concurrent first calls ask once
                if self._out is None:
                    self._set_out(self.in_specs)
        assert self._out is not None
        expected, tree, specs = self._out
        leaves, got = _tree_flatten(value)
        if got == tree and all(
            isinstance(x, jax.Array) and _specs.leaf_differs(spec, x) is None
            for spec, x in zip(specs, leaves, strict=True)
        ):
            return
        error = _specs.difference(
            f"{self.name} on host {self.host}", expected, value, _specs.result_path
        )
        if error is not None:
            raise error


def no_devices(base: FunctionCode) -> SpecError:
    ways = [] if base.anywhere else [f"{base.name}.specialize(devices=...)"]
    if base.object is not None:
        ways.append("colocated_python_class(..., devices=...)")
    return SpecError(
        f"{base.name} was called without arrays, so there is nothing to tell its devices: use "
        + " or ".join(ways)
    )


def kind_of(function: Any) -> Kind:
    """What calling a function gives; also for callable objects."""
    for kind, test in _TESTS:
        if test(function) or test(getattr(type(function), "__call__", None)):  # noqa: B004
            return kind
    return "function"


class FunctionCode:
    """What all specializations of one function share: its code and its cache."""

    __slots__ = (
        "__weakref__",
        "_shipped",
        "anywhere",
        "body",
        "cache",
        "function",
        "host",
        "kind",
        "name",
        "object",
        "special",
    )

    def __init__(self, function: Callable[..., Any], host: Host) -> None:
        self.function = function
        self.kind = kind_of(function)
        self.special = self.kind == "coroutine"
        self.object: Any = None  # of a method
        self.anywhere = False  # whether it needs no devices until it returns NumPy values
        self.name: str = getattr(function, "__qualname__", None) or repr(function)
        self.host = host
        self.body: Callable[..., Any] | None = None
        self._shipped: Shipped | None = None  # keeps it on the host
        self.cache: _cache.SpecializationCache[Specialization] = _cache.SpecializationCache()

    def mark(self, call: Call) -> None:
        """Note at a call what few calls have, if ``special``."""
        call._light = self.kind == "coroutine"

    def check_signature(self, args: Args, kwargs: Kwargs) -> None:
        """Refuse arguments that the function does not take, at the call and not in its body."""
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):  # a callable that does not say
            return
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}(): {error}") from None

    def make_code(self, hosts: HostSet) -> Code:
        """What hosts in other processes have to be told of it (worker thread)."""
        return hosts.function_code(self.function, self.kind, self.name)

    def load(self) -> Callable[..., Any]:
        self._shipped = self.host.load(self.function)
        self.body = self._shipped.body
        assert self.body is not None
        return self.body
