# SPDX-License-Identifier: Apache-2.0
"""Arrays on hosts: shards, transfers, handles and what they keep alive."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from aiocolocated import (
    HostError,
    SpecError,
    as_argument,
    colocated_python,
    device_get,
    device_put,
    gather,
    wait_until_ready,
)
from aiocolocated.testing._conformance import bodies
from aiocolocated.testing._conformance.base import HostsUnderTest, Suite


class Placement(Suite):
    """Arrays over several devices and hosts."""

    async def test_array_over_the_devices_of_a_host(self, hosts: HostsUnderTest) -> None:
        """A body computes with it as with any array, and so does a jitted function in it."""
        mesh = hosts.host_mesh()
        value = np.arange(16, dtype=np.float32).reshape(8, 2)
        for spec in (P("x"), P(), P(None, None)):
            x = await device_put(value, NamedSharding(mesh, spec))
            y = await colocated_python(lambda x: jax.jit(lambda x: x * 2 + 1)(x))(x)
            assert y.sharding.is_equivalent_to(x.sharding, 2)
            assert np.array_equal(await device_get(y), value * 2 + 1)
            total = await colocated_python(lambda x: float(jnp.sum(x)))(x)
            assert total == float(value.sum())

    async def test_every_host_sees_its_own_shards(self, hosts: HostsUnderTest) -> None:
        """The array is the global one, of which it can address its part."""
        n = len(hosts.all_devices)
        value = np.arange(2 * n, dtype=np.float32).reshape(n, 2)
        x = await device_put(value, NamedSharding(hosts.mesh, P(("host", "x"))))
        assert x.shape == (n, 2)
        expected = {d.id: value[i : i + 1].tolist() for i, d in enumerate(hosts.all_devices)}

        def look(x: Any, expected: dict[int, Any]) -> bool:
            seen = dict(bodies.shards(x))
            assert {d.id for d in x.sharding.device_set} == set(expected)
            assert set(seen) == {d.id for d in x.sharding.addressable_devices}
            return all(expected[i] == numbers for i, numbers in seen.items())

        assert await colocated_python(look)(x, expected) is True

    @pytest.mark.parametrize(
        "spec", [P("host", "x"), P("host"), P(None, "x"), P(), P(("host", "x"))], ids=str
    )
    async def test_global_result(self, hosts: HostsUnderTest, spec: Any) -> None:
        """Hosts give their shards of an array, and it is fetched as one."""
        n = len(hosts.all_devices)
        value = np.arange(4 * n * n, dtype=np.float32).reshape(2 * n, 2 * n)
        sharding = NamedSharding(hosts.mesh, spec)
        x = await device_put(value, sharding)
        y = await colocated_python(bodies.double_shards)({"a": x})
        assert y["a"].sharding == sharding
        assert np.array_equal(await device_get(y["a"]), value * 2)
        z = colocated_python(bodies.double_shards)(as_argument(colocated_python(bodies.same)(x)))
        assert np.array_equal(await device_get(await z), value * 2)

    async def test_hosts_have_to_agree(self, hosts: HostsUnderTest) -> None:
        """Results that are no arrays are equal, or put together in a way that is given."""
        n = len(hosts.devices)
        sharding = NamedSharding(hosts.mesh, P(("host", "x")))
        x = await device_put(np.zeros(len(hosts.all_devices), np.float32), sharding)
        number = colocated_python(lambda x: [s.device.id for s in x.addressable_shards])
        ids = await number.specialize(reduce="list")(x)
        assert ids == [[d.id for d in devices] for devices in hosts.devices]
        if n > 1:
            with pytest.raises(SpecError, match="different results"):
                await number(x)
        assert await colocated_python(bodies.same_too)(x, {"equal": [1]}) == {"equal": [1]}
        words: Any = await colocated_python(bodies.words)(x)
        assert words["words"] == {"to", "be", "or", "not"}  # of each process in its own order
        assert words["x"].sharding == sharding

    async def test_one_array_of_each_host(self, hosts: HostsUnderTest) -> None:
        """They are apart: dropping one does not free the others."""
        sharding = NamedSharding(hosts.mesh, P(("host", "x")))
        x = await device_put(np.zeros(len(hosts.all_devices), np.float32), sharding)

        def body(x: Any) -> Any:
            device = x.addressable_shards[0].device
            return jax.device_put(jnp.full((3,), device.id), device)

        arrays = await colocated_python(body).specialize(reduce="list")(x)
        firsts = [devices[0] for devices in hosts.devices]
        assert [array.devices() for array in arrays] == [{device} for device in firsts]
        last = arrays.pop()
        del arrays
        gc.collect()
        for host in range(len(hosts.devices)):
            await hosts.aside(bodies.live_arrays, host=host)  # dropped handles are told of by then
        assert (await device_get(last)).tolist() == [firsts[-1].id] * 3
        one = await colocated_python(bodies.double_shards).specialize(reduce=lambda v: v[0])(x)
        gc.collect()
        await hosts.on(bodies.same_async)(None)
        assert (await device_get(one)).tolist() == [0] * len(hosts.all_devices)

    async def test_cancelled_call_on_all_hosts(self, hosts: HostsUnderTest, key: str) -> None:
        """Every host cleans up, and what is behind in the channel waits for all."""
        sharding = NamedSharding(hosts.mesh, P(("host", "x")))
        x = await device_put(np.zeros(len(hosts.all_devices), np.float32), sharding)
        held = colocated_python(bodies.hold_too)(x, key)
        for host in range(len(hosts.devices)):
            await hosts.held(key, host)
        assert held.cancel()
        for host in range(len(hosts.devices)):
            assert await hosts.on(bodies.notes, host)(key) == ["in", "cancelled", "cleaned up"]

    async def test_body_on_all_hosts_fails_once(self, hosts: HostsUnderTest) -> None:
        """One error, or a group of one for each host."""
        sharding = NamedSharding(hosts.mesh, P(("host", "x")))
        x = await device_put(np.zeros(len(hosts.all_devices), np.float32), sharding)

        def body(x: Any) -> None:
            raise KeyError("everywhere")

        with pytest.raises((KeyError, ExceptionGroup)) as caught:
            await colocated_python(body)(x)
        if len(hosts.devices) > 1:
            errors = [caught.value]
            if isinstance(caught.value, ExceptionGroup):
                errors = list(caught.value.exceptions)
            assert {type(error) for error in errors} == {KeyError}
        assert await colocated_python(bodies.same_too)(x, 1) == 1


class Transfers(Suite):
    """``device_put``, ``device_get`` and waiting."""

    async def test_put_and_get_a_tree(self, hosts: HostsUnderTest) -> None:
        """Numbers become arrays; a tree of devices tells each leaf its own."""
        tree = {"a": np.arange(4, dtype=np.int32), "b": [1.5, 2], "c": np.zeros((0, 3), np.float32)}
        there = await device_put(tree, hosts.device)
        assert {d for x in jax.tree.leaves(there) for d in x.devices()} == {hosts.device}
        back = await device_get(there)
        assert back["a"].tolist() == [0, 1, 2, 3]
        assert [float(x) for x in back["b"]] == [1.5, 2.0]
        assert back["c"].shape == (0, 3)
        last = hosts.devices[-1][-1]
        apart = await device_put({"a": tree["a"], "b": tree["a"]}, {"a": hosts.device, "b": last})
        assert [apart[k].devices() for k in "ab"] == [{hosts.device}, {last}]

    async def test_move_between_devices_and_hosts(self, hosts: HostsUnderTest) -> None:
        """To another device, another host, other shardings, and to this process."""
        n = len(hosts.all_devices)
        value = np.arange(4 * n, dtype=np.float32)
        x = await device_put(value, hosts.device)
        for target in (
            hosts.devices[0][1],
            hosts.devices[-1][0],
            NamedSharding(hosts.mesh, P(("host", "x"))),
            NamedSharding(hosts.mesh, P("host")),
            NamedSharding(hosts.host_mesh(len(hosts.devices) - 1), P("x")),
            hosts.device,
        ):
            x = await device_put(x, target)
            assert np.array_equal(await device_get(x), value)
        here = await device_put(x, jax.local_devices()[0])
        assert np.array_equal(np.asarray(here), value)

    async def test_get_of_many_arrays(self, hosts: HostsUnderTest) -> None:
        """Of all hosts, together with what is here."""
        there = [
            await hosts.aside(bodies.make, (i + 1,), "float32", i, host=i % len(hosts.devices))
            for i in range(6)
        ]
        got = await device_get([*there, "text", np.ones(2), jnp.ones(2)])
        assert [x.tolist() for x in got[:6]] == [[float(i)] * (i + 1) for i in range(6)]
        assert got[6] == "text"

    async def test_wait_until_ready(self, hosts: HostsUnderTest) -> None:
        """An array that a call has given is ready; waiting for it gives it back."""
        x = await hosts.on(bodies.make)((3,), "float32")
        assert (await wait_until_ready({"x": x}))["x"] is x


class Handles(Suite):
    """Arrays that are in another process (``HostsUnderTest.handles``)."""

    @pytest.fixture
    def far(self, hosts: HostsUnderTest) -> HostsUnderTest:
        """The hosts, if arrays on them are not in this process."""
        if not hosts.handles:
            pytest.skip("arrays are in this process")
        return hosts

    async def test_computing_with_a_handle_raises(self, far: HostsUnderTest) -> None:
        """It never gives numbers that nobody computed."""
        x = await far.on(bodies.make)((3,), "float32")
        for use in (
            lambda x: x + 1,
            lambda x: jnp.sum(x),
            lambda x: jax.jit(lambda x: x * 2)(x),
            lambda x: np.asarray(x),
            lambda x: float(x[0]),
            lambda x: x.addressable_data(0),
        ):
            with pytest.raises(Exception) as caught:  # noqa: PT011 # JAX's own, of several kinds
                use(x)
            assert not isinstance(caught.value, SystemError)
        assert "Array" in repr(x) or "array" in repr(x)
        assert x.shape == (3,)
        assert (await device_get(x)).tolist() == [1, 1, 1]

    async def test_array_that_the_library_did_not_make(self, far: HostsUnderTest) -> None:
        """It is refused in words."""
        fake = jax.device_put(np.ones(3, np.float32), far.device)
        for call in (
            lambda: colocated_python(bodies.same)(fake),
            lambda: far.on(bodies.same)([fake, 1]),
            lambda: device_get(fake),
        ):
            with pytest.raises(HostError, match="not made by the library"):
                await call()

    async def test_array_of_another_host(self, far: HostsUnderTest) -> None:
        """A call on one host refuses it, and says how it gets there."""
        if len(far.devices) < 2:
            pytest.skip("there is one host")
        x = await far.on(bodies.make)((3,), "float32")
        last = len(far.devices) - 1
        for argument in (bodies.Options("hidden", x), [bodies.Options("deep", [x])]):
            with pytest.raises(HostError, match="device_put"):
                await far.on(bodies.same, last)(argument)
        moved = await device_put(x, far.devices[last][0])
        assert await far.on(bodies.total, last)(moved) == 3.0

    async def test_dropped_handles_are_freed(self, far: HostsUnderTest) -> None:
        """The host has no more arrays after ten thousand of them than before."""
        make = far.on(bodies.make)
        await make((3,), "float32")
        before = await self._settled(far)
        for _ in range(20):
            await gather(*(make((2,), "float32") for _ in range(500)))
        assert await self._settled(far, before) <= before

    async def test_what_is_inside_of_dropped_results_is_freed(self, far: HostsUnderTest) -> None:
        """Of trees and objects, of failed uses, and of futures that nobody awaited."""
        make = far.on(lambda: {"a": jnp.ones(3), "o": bodies.Options("o", jnp.ones(4))})
        before = await self._settled(far)
        kept = (await make())["o"]
        for _ in range(10):
            make()
            with pytest.raises(KeyError):
                await far.on(lambda tree: bodies.fail(KeyError("missing")))(as_argument(make()))
        x = await make()
        y = x["a"]
        del x
        assert await self._settled(far, before + 2) == before + 2
        assert (await device_get([y, kept.extra]))[0].tolist() == [1, 1, 1]
        del y, kept
        assert await self._settled(far, before) == before

    async def test_handle_lives_as_long_as_its_use(self, far: HostsUnderTest, key: str) -> None:
        """Dropped while a call with it is still queued, it is there when the call runs."""
        x = await far.on(bodies.make)((3,), "float32")
        held = far.on(bodies.hold)(key)
        late = colocated_python(bodies.total)(x)
        del x
        gc.collect()
        await far.held(key)
        await far.release(key)
        assert await late == 3.0
        await held

    async def test_result_that_nobody_fetches_stays(self, far: HostsUnderTest) -> None:
        """Of 64 MiB no more than a few words come over the wire."""
        if far.received_bytes is None:
            pytest.skip("nobody counts what is received")
        await far.on(bodies.make)((1,), "float32")
        before = far.received_bytes()
        x = await far.on(bodies.make)((16 << 20,), "float32")
        y = await colocated_python(bodies.add)(x, 1)
        assert y.shape == (16 << 20,)
        assert far.received_bytes() - before < 20_000

    async def _settled(self, hosts: HostsUnderTest, wanted: int = -1) -> int:
        """How many arrays the host has, once what was dropped is gone."""
        count = 0
        for _ in range(100):
            gc.collect()
            previous, count = count, int(await hosts.aside(bodies.live_arrays))
            if count <= wanted or (wanted < 0 and count == previous):
                break
            # Dropped handles are told of together, a moment later.
            await hosts.aside(bodies.same_async, None)
        return count
