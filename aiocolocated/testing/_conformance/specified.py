# SPDX-License-Identifier: Apache-2.0
"""Specs: arguments and results are checked, and tell where a call goes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from aiocolocated import SpecError, as_argument, colocated_python, device_put
from aiocolocated.testing._conformance import bodies
from aiocolocated.testing._conformance.base import HostsUnderTest, Suite


class Specs(Suite):
    """Arguments and results are checked."""

    async def test_arguments_unlike_their_specs_are_refused(self, hosts: HostsUnderTest) -> None:
        """With the path of what differs: shape, dtype, tree, sharding."""
        sharding = SingleDeviceSharding(hosts.device)
        spec = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=sharding)
        function = colocated_python(bodies.add).specialize(in_specs=((spec, {"b": spec}), {}))
        good = await device_put(np.ones(3, np.float32), hosts.device)
        for bad in (np.ones(4, np.float32), np.ones(3, np.int32)):
            wrong = await device_put(bad, hosts.device)
            with pytest.raises(SpecError, match=r"args\[1\]\['b'\]"):
                function(good, {"b": wrong})
        elsewhere = await device_put(np.ones(3, np.float32), hosts.devices[-1][-1])
        with pytest.raises(SpecError):
            function(good, {"b": elsewhere})
        with pytest.raises(SpecError):
            function(good, [good])

    async def test_futures_are_checked_when_they_are_known(self, hosts: HostsUnderTest) -> None:
        """A future's value is checked before the body runs."""
        sharding = SingleDeviceSharding(hosts.device)
        spec = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=sharding)
        function = colocated_python(bodies.add).specialize(in_specs=((spec, spec), {}))
        good = hosts.on(bodies.make)((3,), "float32")
        wrong = hosts.on(bodies.make)((4,), "float32")
        assert (await function(as_argument(good), as_argument(good))).shape == (3,)
        with pytest.raises(SpecError, match=r"args\[1\].*\n?.*3.*4"):
            await function(as_argument(good), as_argument(wrong))

    @pytest.mark.parametrize(
        "wrong",
        [
            ((4,), "float32"),
            ((3,), "int32"),
            ((3,), "bfloat16"),
        ],
        ids=str,
    )
    async def test_wrong_result_is_refused(self, hosts: HostsUnderTest, wrong: Any) -> None:
        """It names the function, the path, what was expected and what came."""
        sharding = SingleDeviceSharding(hosts.device)
        spec = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=sharding)
        make = hosts.on(bodies.make).specialize(out_specs_fn=lambda *args: spec)
        assert (await make((3,), "float32")).shape == (3,)
        with pytest.raises(SpecError, match="make") as caught:
            await make(*wrong)
        assert "result" in str(caught.value)
        assert "float32[3]" in str(caught.value)

    async def test_result_of_another_tree_or_device_is_refused(self, hosts: HostsUnderTest) -> None:
        """The same for trees and shardings."""
        spec = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=SingleDeviceSharding(hosts.device))
        other = hosts.devices[0][1]

        def body(which: str) -> Any:
            x = jnp.ones(3)
            if which == "device":
                return [jax.device_put(x, other)]
            return (x, x) if which == "tree" else [jax.device_put(x, hosts_device)]

        hosts_device = hosts.device
        checked = hosts.on(body).specialize(out_specs_fn=lambda which: [spec])
        assert (await checked("right"))[0].shape == (3,)
        for which in ("tree", "device"):
            with pytest.raises(SpecError, match="result"):
                await checked(which)

    async def test_nothing_is_frozen_without_specs(self, hosts: HostsUnderTest) -> None:
        """Every call may return something else."""
        make, same = hosts.on(bodies.make), hosts.on(bodies.same)
        for n in range(4):
            assert (await make((n,), "float32")).shape == (n,)
        for value in (1, "two", [3.0], {"four": None}):
            assert await same(value) == value

    async def test_call_without_devices_is_refused(self, hosts: HostsUnderTest) -> None:
        """There is nothing to tell where it goes."""
        with pytest.raises(SpecError, match="devices"):
            await colocated_python(bodies.same)(1)

    async def test_arrays_of_different_devices_are_refused(self, hosts: HostsUnderTest) -> None:
        """As JAX does; both are named."""
        x = await device_put(np.ones(3, np.float32), hosts.device)
        y = await device_put(np.ones(3, np.float32), hosts.devices[-1][-1])
        with pytest.raises(SpecError, match=r"args\[1\]"):
            await colocated_python(bodies.add)(x, y)
