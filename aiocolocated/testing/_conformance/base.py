# SPDX-License-Identifier: Apache-2.0
"""What the conformance tests have in common: where their calls go, and how they look there."""

from __future__ import annotations

import dataclasses
import inspect
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from aiocolocated import ArrayFuture, ColocatedFunction, TaskChannel, colocated_python
from aiocolocated.testing._conformance import bodies


@dataclasses.dataclass(frozen=True)
class HostsUnderTest:
    """Where the calls of a :class:`HostConformance` go.

    Args:
        devices: for each host its devices, two or more of one platform.
        by_value: plain Python values are copied on their way (strict mode, other processes).
        handles: arrays that stay on the hosts have no values here.
        received_bytes: how many bytes have come from the hosts so far, if anybody counts them.
    """

    devices: Sequence[Sequence[Any]]
    by_value: bool
    handles: bool
    received_bytes: Callable[[], int] | None = None

    @property
    def device(self) -> Any:
        """The first device of the first host."""
        return self.devices[0][0]

    @property
    def all_devices(self) -> list[Any]:
        return [device for devices in self.devices for device in devices]

    @property
    def mesh(self) -> Mesh:
        """Over all devices: axis ``"host"``, and axis ``"x"`` within a host."""
        return Mesh(np.array([list(d) for d in self.devices], dtype=object), ("host", "x"))

    def host_mesh(self, host: int = 0) -> Mesh:
        """Over the devices of one host, with the axis ``"x"``."""
        return Mesh(np.array(list(self.devices[host]), dtype=object), ("x",))

    def on(self, function: Callable[..., Any], host: int = 0) -> ColocatedFunction[..., Any]:
        """A function that runs on the first device of a host."""
        colocated: ColocatedFunction[..., Any] = colocated_python(function)
        return colocated.specialize(devices=self.devices[host][0])

    def aside(self, function: Callable[..., Any], *args: Any, host: int = 0) -> ArrayFuture[Any]:
        """A call beside all others, in a channel of its own."""
        return TaskChannel().submit_nowait(self.on(function, host), *args)

    async def release(self, key: str, host: int = 0) -> None:
        """Let the body go that holds at a gate."""
        await self.aside(bodies.open_gate, f"{key}.out", host=host)

    async def held(self, key: str, host: int = 0) -> None:
        """Wait until a body holds at a gate."""
        await self.aside(bodies.pass_gate, f"{key}.in", host=host)

    async def notes(self, key: str, host: int = 0) -> list[Any]:
        notes: list[Any] = await self.aside(bodies.notes, key, host=host)
        return notes


class Suite:
    """Base of the parts: marks coroutine tests, and has the fixtures."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, function in vars(cls).items():
            if name.startswith("test_") and inspect.iscoroutinefunction(function):
                pytest.mark.asyncio(function)

    @pytest.fixture
    def hosts(self) -> HostsUnderTest:
        """Where calls go; every host kind overrides it, with any scope."""
        raise NotImplementedError("override the fixture 'hosts': it returns a HostsUnderTest")

    @pytest.fixture
    def key(self) -> str:
        """A name for what one test does on the hosts."""
        return uuid.uuid4().hex


def same_structure(one: Any, other: Any) -> bool:
    """Whether two trees differ in nothing but their leaves."""
    structures: list[Any] = [jax.tree.structure(tree) for tree in (one, other)]
    return bool(structures[0] == structures[1])


def same_leaves(one: Any, other: Any) -> bool:
    """Whether two trees are equal, down to types, dtypes and bits of NumPy values."""
    if not same_structure(one, other):
        return False
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        a_array, b_array = hasattr(a, "dtype"), hasattr(b, "dtype")
        if a_array != b_array:
            return False
        if a_array:
            if a.dtype != b.dtype or a.shape != b.shape:
                return False
            if not np.array_equal(np.asarray(a), np.asarray(b)):
                return False
        elif type(a) is not type(b) or a != b:
            return False
    return True
