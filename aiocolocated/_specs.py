# SPDX-License-Identifier: Apache-2.0
"""Specs: what arguments and results must look like, and how a difference is put into words."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from aiocolocated import _compat
from aiocolocated._exceptions import SpecError

Devices: TypeAlias = tuple[_compat.Device, ...]
KeyPath: TypeAlias = tuple[Any, ...]


def spec_of(x: Any) -> jax.ShapeDtypeStruct:
    """The spec of an array: shape, dtype and, for a JAX array, sharding."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))


def specs_of(args: Any, kwargs: Any) -> Any:
    """The specs of a call's arguments, as ``in_specs`` has them; Python values stay what they are."""
    return jax.tree_util.tree_map(
        lambda x: spec_of(x) if isinstance(x, (jax.Array, np.ndarray, np.generic)) else x,
        (args, kwargs),
    )


def argument_path(path: KeyPath, function: Callable[..., Any] | None = None) -> str:
    """Words for a key path into ``(args, kwargs)``: ``args[0]['w'] (parameter 'params')``."""
    root, *rest = path
    text = ("args" if root.idx == 0 else "kwargs") + jax.tree_util.keystr(tuple(rest))
    if root.idx == 0 and rest and function is not None:
        try:
            names = list(inspect.signature(function).parameters)
        except (TypeError, ValueError):
            return text
        if rest[0].idx < len(names):
            return f"{text} (parameter {names[rest[0].idx]!r})"
    return text


def result_path(path: KeyPath) -> str:
    """Words for a key path into a result."""
    return "result" + jax.tree_util.keystr(path)


def describe(x: Any) -> str:
    """Words for a leaf: ``f32[8,128] on NamedSharding(...)``, or its type."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        text = f"{x.dtype}[{','.join(map(str, x.shape))}]"
        sharding = getattr(x, "sharding", None)
        return text if sharding is None else f"{text} on {sharding}"
    return (
        f"a {type(x).__name__} ({str(x)[:60]!r})" if isinstance(x, str) else f"{type(x).__name__}"
    )


def leaf_differs(spec: jax.ShapeDtypeStruct, x: Any) -> str | None:
    """In which respect an array differs from a spec; a spec without sharding accepts any."""
    if x.shape != spec.shape:
        return "shape"
    if x.dtype != spec.dtype:
        return "dtype"
    if spec.sharding is not None and isinstance(x, jax.Array):
        sharding = x.sharding
        if (
            sharding is not spec.sharding
            and sharding != spec.sharding
            and not sharding.is_equivalent_to(spec.sharding, len(spec.shape))
        ):
            return "sharding"
    return None


def difference(
    what: str, expected: Any, got: Any, name_path: Callable[[KeyPath], str]
) -> SpecError | None:
    """The first difference of a tree from a tree of specs, in words; ``None`` if it fits."""
    expected_leaves, expected_def = jax.tree_util.tree_flatten_with_path(expected)
    got_leaves, got_def = jax.tree_util.tree_flatten_with_path(got)
    if expected_def != got_def:  # type: ignore[operator]
        return SpecError(f"{what}: the tree differs: expected {expected_def}, got {got_def}")
    for (path, spec), (_, leaf) in zip(expected_leaves, got_leaves, strict=True):
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
            return SpecError(
                f"{what}: {name_path(path)} must be an array: expected {describe(spec)}, "
                f"got {describe(leaf)}"
            )
        respect = leaf_differs(spec, leaf)
        if respect is not None:
            return SpecError(
                f"{what}: {name_path(path)} has another {respect}: expected {describe(spec)}, "
                f"got {describe(leaf)}"
            )
    return None


def check_specs(what: str, tree: Any) -> None:
    """Refuse a tree of specs with a leaf that is none."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            raise SpecError(
                f"{what}: the leaf at {jax.tree_util.keystr(path) or 'the top'} must be a "
                f"jax.ShapeDtypeStruct, got {describe(leaf)}"
            )


def as_devices(devices: Any) -> Devices:
    """A device, a sequence of devices, a mesh, or hosts with their devices as a tuple of devices."""
    if isinstance(devices, _compat.Device):
        return (devices,)
    if isinstance(devices, jax.sharding.Mesh):
        return tuple(devices.devices.flat)
    try:
        result = tuple(getattr(devices, "devices", devices))
    except TypeError:
        result = ()
    if not result or not all(isinstance(d, _compat.Device) for d in result):
        raise SpecError(
            "devices must be a jax.Device, a non-empty sequence of them, or a jax.sharding.Mesh, "
            f"got {devices!r}"
        )
    return result


def common_devices(
    what: str,
    arrays: Iterable[tuple[KeyPath, Any]],
    given: Devices | None,
    name_path: Callable[[KeyPath], str],
) -> Devices | None:
    """The one device list that all arrays, and ``devices=`` if given, agree on, as JAX demands."""
    devices = given
    origin = "devices="
    for path, array in arrays:
        found = _compat.device_list(array.sharding)
        if devices is None:
            devices, origin = found, name_path(path)
        elif found != devices:
            raise SpecError(
                f"{what}: all arrays must be on one device list, but {name_path(path)} is on "
                f"{names(found)} and {origin} on {names(devices)}; device_put moves arrays"
            )
    return devices


def _name(device: _compat.Device) -> str:
    name = str(device)
    # What JAX calls every device of another process.
    if name == "NonAddressable":
        return f"device {device.id} of {name_of_host(device) or f'process {device.process_index}'}"
    return name


def name_of_host(device: _compat.Device) -> str | None:
    """The name of a device's host, if it is known; replaced where hosts are."""
    return None


def names(devices: Sequence[_compat.Device]) -> str:
    shown = ", ".join(map(_name, devices[:8]))
    return f"[{shown}{', ...' if len(devices) > 8 else ''}]"
