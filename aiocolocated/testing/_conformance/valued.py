# SPDX-License-Identifier: Apache-2.0
"""Arguments and results: every kind of leaf, trees, and code that travels."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import fractions
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from aiocolocated import (
    ArgumentError,
    TaskGroup,
    as_argument,
    colocated_python,
    device_get,
    device_put,
    gather,
    jax_scope,
)
from aiocolocated.testing._conformance import bodies
from aiocolocated.testing._conformance.base import (
    HostsUnderTest,
    Suite,
    same_leaves,
    same_structure,
)

DTYPES = [
    *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32"),
    *("float16", "bfloat16", "float32", "complex64", "float8_e4m3fn", "int4"),
]
WIDE = ["int64", "uint64", "float64", "complex128"]


class Color(enum.Enum):
    RED = "red"


PYTHON: dict[str, Any] = {
    "numbers": (0, 1, -1, 2**40, 2**100, 1.5, 1e400, 1j, True, False),
    "text": ("", "a\0b \N{SNOWMAN} \ud800", b"\0\xff", bytearray(b"a")),
    "nothing": [None, 0, False, 0.0, "", (), [], {}, ...],
    "sets": {1, 2} | {frozenset((3,))},
    "ranges": (range(3), slice(1, 2, None)),
    "dates": (datetime.date(2020, 1, 1), datetime.timedelta(1), fractions.Fraction(1, 3)),
    "enums": [Color.RED, math.inf],
    "classes": [bodies.Options, Color, int],
    "dataclass": bodies.Options("name", [1, {"two": 2}]),
    "dictionary": {"z": 1, "a": [2, (3, None)]},
    "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
    "default": collections.defaultdict(list, {"k": [1]}),
    "deque": collections.deque([1, 2]),
    "pair": bodies.Pair(1, ["two"]),
    "numpy that is no number": np.array(["a", "bc"]),
    "numpy dtype": np.dtype("float32"),
}


def number(dtype: Any) -> Any:
    """Something of a dtype, and not all the same."""
    return np.array([[0, 1, 1], [1, 0, 1]]).astype(jnp.dtype(dtype))


class Values(Suite):
    """What goes in and comes out."""

    @pytest.mark.parametrize("which", PYTHON)
    @pytest.mark.parametrize("function", [bodies.same, bodies.same_async])
    async def test_python_value_stays_what_it_is(
        self, hosts: HostsUnderTest, which: str, function: Any
    ) -> None:
        """Its type and size kept, there and back, by itself and in a tree."""
        value = PYTHON[which]
        same = hosts.on(function)
        for given in (value, {"k": [value, (value,)]}):
            got = await same(given)
            assert repr(got) == repr(given)
            assert type(got) is type(given)
            assert same_structure(got, given)

    async def test_values_go_by_value_or_by_reference(self, hosts: HostsUnderTest) -> None:
        """What a body does to an argument shows only where it is the same object."""

        def spoil(values: list[int], options: bodies.Options) -> int:
            values.append(1)
            options.name = "spoiled"
            return len(values)

        values, options = [0], bodies.Options("name")
        assert await hosts.on(spoil)(values, options) == 2
        assert (len(values) == 1) == hosts.by_value
        assert (options.name == "name") == hosts.by_value

    async def test_values_of_futures_go_by_value_or_by_reference(
        self, hosts: HostsUnderTest
    ) -> None:
        """What two bodies get of one future, and what its caller gets, is apart or the same."""

        def spoil(values: list[int]) -> int:
            values.append(2)
            return len(values)

        early = hosts.on(lambda: [1])()
        first, second = hosts.on(spoil)(as_argument(early)), hosts.on(spoil)(as_argument(early))
        lengths = [await first, await second, len(await early)]
        assert lengths == ([2, 2, 1] if hosts.by_value else [2, 3, 3])

    async def test_result_is_as_it_was_returned(self, hosts: HostsUnderTest, key: str) -> None:
        """Where values go by value: what the host does to it later does not show."""
        if not hosts.by_value:
            pytest.skip("values go by reference")

        def add(key: str, i: int) -> Any:
            bodies.note(key, i)
            return {"all": bodies.notes(key)}

        function = hosts.on(add)
        async with TaskGroup() as group:
            for i in range(100):
                group.start_soon(function, key, i)
        in_order = await gather(*(function(key, i) for i in range(100, 120)))
        assert sorted(len(r["all"]) for r in group.results()) == list(range(1, 101))
        assert [len(r["all"]) for r in in_order] == list(range(101, 121))

    async def test_one_object_in_two_places_stays_one(self, hosts: HostsUnderTest) -> None:
        """Within a call, and also if it contains itself."""
        shared = bodies.Options("shared")
        shared.extra = shared
        one, tree = await hosts.on(bodies.same)([shared, {"k": shared}])
        assert one is tree["k"]
        assert one.extra is one

    @pytest.mark.parametrize("dtype", DTYPES)
    async def test_numpy_value_becomes_an_array(self, hosts: HostsUnderTest, dtype: str) -> None:
        """On the device of the call, the dtype kept, there and back; scalars too."""
        value = number(dtype)
        scalar = value[1, 1]
        got = await hosts.on(bodies.describe)([value, scalar])
        assert got == [("array", dtype, (2, 3)), ("array", dtype, ())]
        back = await hosts.on(bodies.same)(
            {"a": value, "s": scalar, "t": value.T, "n": value[:, :0]}
        )
        assert {type(x) for x in jax.tree.leaves(back)} == {type(jnp.zeros(1))}
        assert back["a"].devices() == {hosts.device}
        assert (back["a"].dtype, back["a"].shape) == (value.dtype, (2, 3))
        fetched = await device_get(back)
        assert same_leaves(fetched, {"a": value, "s": scalar, "t": value.T, "n": value[:, :0]})

    @pytest.mark.parametrize("dtype", WIDE)
    async def test_64_bits_are_kept_or_refused(self, hosts: HostsUnderTest, dtype: str) -> None:
        """Never narrowed: with x64 off there is an error with the path."""
        value = np.ones(2, dtype)
        with pytest.raises(ArgumentError, match=r"args\[0\]\['a'\].*x64"):
            await hosts.on(bodies.same)({"a": value})
        with pytest.raises(ArgumentError, match=r"result.*x64"):
            await hosts.on(bodies.make_numpy)((2,), dtype)
        with jax_scope(enable_x64=True):
            got = await hosts.on(bodies.same)(value)
            assert got.dtype == dtype
            assert same_leaves(await device_get(got), value)

    @pytest.mark.parametrize("dtype", DTYPES)
    async def test_array_keeps_its_dtype(self, hosts: HostsUnderTest, dtype: str) -> None:
        """What a body computes, and what ``device_put`` put there."""
        made = await hosts.on(bodies.make)((3, 2), dtype)
        assert (made.dtype, made.shape) == (jnp.dtype(dtype), (3, 2))
        put = await device_put(number(dtype), hosts.device)
        kept = await colocated_python(bodies.same)(put)
        assert kept.sharding == put.sharding
        fetched = await device_get({"made": made, "put": kept})
        assert same_leaves(
            fetched, {"made": np.ones((3, 2), jnp.dtype(dtype)), "put": number(dtype)}
        )

    async def test_array_of_size_zero(self, hosts: HostsUnderTest) -> None:
        """Whatever its shape."""
        for shape in ((0,), (3, 0), (0, 2, 5)):
            x = await device_put(np.zeros(shape, np.float32), hosts.device)
            y = await colocated_python(bodies.add)(x, 1)
            assert y.shape == shape
            assert (await device_get(y)).shape == shape

    async def test_typed_keys(self, hosts: HostsUnderTest) -> None:
        """They stay keys, of every implementation, and give the same numbers."""

        def draw(key: Any) -> tuple[Any, Any]:
            return jax.random.uniform(key, (3,)), jax.random.split(key, 2)

        for impl in ("threefry2x32", "rbg"):
            key = jax.random.key(7, impl=impl)
            expected = np.asarray(jax.random.uniform(key, (3,)))
            there = await device_put(key, hosts.device)
            assert there.dtype == key.dtype
            numbers, split = await colocated_python(draw)(there)
            assert np.array_equal(await device_get(numbers), expected)
            assert split.shape == (2,)
            back = await device_get(split)
            assert jnp.issubdtype(back.dtype, jax.dtypes.prng_key)
            assert np.array_equal(
                jax.random.key_data(back), jax.random.key_data(jax.random.split(key, 2))
            )

    async def test_array_of_strings(self, hosts: HostsUnderTest) -> None:
        """Of NumPy's ``StringDType``."""
        value = np.array(["a", "", "long " * 20], np.dtypes.StringDType())
        got = await hosts.on(bodies.same)(value)
        assert isinstance(got, jax.Array)
        assert (await device_get(got)).tolist() == value.tolist()

    async def test_large_values(self, hosts: HostsUnderTest) -> None:
        """Several MiB: as an argument, as a result, inside an object, and fetched."""
        value = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
        same = hosts.on(bodies.same)
        back = await same({"x": value, "o": bodies.Options("large", value), "b": value.tobytes()})
        assert np.array_equal(await device_get(back["x"]), value)
        assert isinstance(back["o"].extra, np.ndarray)
        assert np.array_equal(back["o"].extra, value)
        assert back["b"] == value.tobytes()
        total = await hosts.on(bodies.total)(value, value)
        assert total == pytest.approx(2 * float(value.sum()), rel=1e-3, abs=1.0)

    async def test_arrays_inside_of_objects(self, hosts: HostsUnderTest) -> None:
        """They are carried, not copied: in an attribute they are the same arrays."""
        x = await device_put(np.arange(3, dtype=np.float32), hosts.device)

        def look(options: bodies.Options) -> bodies.Options:
            assert isinstance(options.extra["x"], jax.Array)
            return bodies.Options(options.name, [options.extra["x"], options.extra["x"] + 1])

        got = await hosts.on(look)(bodies.Options("carrier", {"x": x}))
        assert got.name == "carrier"
        assert (await device_get(got.extra[0])).tolist() == [0, 1, 2]
        assert (await device_get(got.extra[1])).tolist() == [1, 2, 3]

    async def test_one_array_twice(self, hosts: HostsUnderTest) -> None:
        """In two places of a call, and of a result."""
        x = await device_put(np.arange(3, dtype=np.float32), hosts.device)
        assert await colocated_python(bodies.total)(x, [x, {"k": x}]) == 9.0
        twice = await colocated_python(lambda x: (x, [x]))(x)
        assert (await device_get(twice))[1][0].tolist() == [0, 1, 2]

    async def test_trees(self, hosts: HostsUnderTest) -> None:
        """Every kind of container comes back as itself, with arrays for its NumPy leaves."""
        value = {
            "pair": bodies.Pair(np.ones(2, np.float32), {"deep": [np.int32(1), None]}),
            "ordered": collections.OrderedDict([("b", np.zeros(1, np.float32)), ("a", 2)]),
            "default": collections.defaultdict(list, {"k": [np.ones((), np.int8)]}),
            "state": bodies.State(np.ones((2, 2), np.float32), 3),
            "plain": bodies.Options("n", np.ones(2)),
        }
        got = await hosts.on(bodies.same)(value)
        assert same_structure(got, value)
        assert isinstance(got["state"].w, jax.Array)
        assert isinstance(got["pair"].left, jax.Array)
        assert isinstance(got["pair"].right["deep"][0], jax.Array)
        assert type(got["plain"].extra) is np.ndarray
        assert got["state"].steps == 3
        fetched = await device_get({k: v for k, v in got.items() if k != "plain"})
        assert same_leaves(fetched, {k: v for k, v in value.items() if k != "plain"})

    async def test_keyword_arguments(self, hosts: HostsUnderTest) -> None:
        """They are trees, too, and may be futures."""

        def body(x: Any, /, *rest: Any, flag: Any, **more: Any) -> list[str]:
            return [type(v).__name__ for v in (x, *rest, flag, *more.values())]

        names = await hosts.on(body)(
            1, np.int32(1), "s", flag=np.bool_(True), more=hosts.on(bodies.same)(2.5)
        )
        assert names == ["int", "ArrayImpl", "str", "ArrayImpl", "float"]


class Code(Suite):
    """What travels with a function, and classes that only this program has."""

    async def test_instances_of_a_local_class(self, hosts: HostsUnderTest) -> None:
        """They are instances of the very class on their way back, made here or there."""

        class Point:
            made = 0

            def __init__(self, x: float) -> None:
                self.x = x

            def plus(self, other: Point) -> Point:
                return Point(self.x + other.x)

        class Special(Point):
            pass

        def body(point: Any) -> list[Any]:
            assert isinstance(point, Point)
            assert type(point) is Special
            return [point, point.plus(Point(1)), Special(point.x), Point]

        for i in range(2):
            given, plus, special, kind = await hosts.on(body)(Special(i))
            assert type(given) is Special
            assert type(plus) is Point
            assert type(special) is Special
            assert kind is Point
            assert (given.x, plus.x, special.x) == (i, i + 1, i)

    async def test_local_containers(self, hosts: HostsUnderTest) -> None:
        """Dataclasses, named tuples and enums that cannot be imported."""

        @dataclasses.dataclass(frozen=True)
        class Frozen:
            n: int

        class Couple(NamedTuple):
            left: Any
            right: Any

        level = enum.Enum("level", ["LOW", "HIGH"])

        value = [Frozen(1), Couple(2, [np.float32(3)]), level.HIGH, {level.LOW: Frozen(4)}]
        got = await hosts.on(bodies.same)(value)
        assert got[0] == Frozen(1)
        assert type(got[1]) is Couple
        assert isinstance(got[1].right[0], jax.Array)
        assert got[2] is level.HIGH
        assert got[3] == {level.LOW: Frozen(4)}

    async def test_local_pytrees(self, hosts: HostsUnderTest) -> None:
        """A class that is registered here is a pytree in the body, too."""

        @jax.tree_util.register_pytree_node_class
        class Box:
            def __init__(self, content: Any, label: str) -> None:
                self.content = content
                self.label = label

            def tree_flatten(self) -> tuple[Any, Any]:
                return (self.content,), self.label

            @classmethod
            def tree_unflatten(cls, label: str, children: Any) -> Box:
                (content,) = children
                return cls(content, label)

        @jax.tree_util.register_dataclass
        @dataclasses.dataclass
        class Weights:
            w: Any
            name: str = dataclasses.field(metadata={"static": True}, default="n")

        def body(tree: Any) -> Any:
            leaves = len(jax.tree.leaves(tree))
            return leaves, jax.tree.map(lambda x: x + 1, tree)

        value = [Box(np.float32(1), "label"), Weights(np.ones(2, np.float32), "w")]
        leaves, got = await hosts.on(body)(value)
        assert leaves == 2
        assert type(got[0]) is Box
        assert type(got[1]) is Weights
        assert (got[0].label, got[1].name) == ("label", "w")
        assert float(await device_get(got[0].content)) == 2.0
        assert (await device_get(got[1].w)).tolist() == [2, 2]

    async def test_captured_values(self, hosts: HostsUnderTest) -> None:
        """They are copied with the function: plain values, NumPy, arrays of here and of there."""
        plain, table = {"calls": 0}, np.arange(5, dtype=np.float32)
        here = jnp.arange(5.0)
        there = await device_put(table * 2, hosts.device)

        def body(i: int) -> tuple[int, float, float, float]:
            plain["calls"] += 1
            return plain["calls"], float(table[i]), float(here[i]), float(there[i])

        body_there = hosts.on(body)
        assert await body_there(3) == (1, 3.0, 3.0, 6.0)
        assert await body_there(4) == (2, 4.0, 4.0, 8.0)
        assert plain == {"calls": 0}

    async def test_functions_as_arguments_and_results(self, hosts: HostsUnderTest) -> None:
        """Functions, closures, jitted and colocated ones."""
        factor = 3

        def times(x: Any) -> Any:
            return x * factor

        @jax.jit
        def jitted(x: Any) -> Any:
            return x * factor + 1

        colocated = hosts.on(times)

        def body(functions: list[Any], x: int) -> list[float]:
            results = [f(x) for f in functions]
            return [float(r.result(20) if hasattr(r, "result") else r) for r in results]

        values = await hosts.on(body)([times, jitted, colocated, math.sqrt], 4)
        assert values == [12.0, 13.0, 12.0, 2.0]
        back = await hosts.on(lambda: lambda x: x + factor)()
        assert back(1) == 4

    async def test_captured_jitted_functions(self, hosts: HostsUnderTest) -> None:
        """Also those with rules of their own for derivatives."""

        @jax.custom_vjp
        def odd(x: Any) -> Any:
            return x

        odd.defvjp(lambda x: (x, None), lambda _, g: (g * 10,))

        @jax.jit
        def step(x: Any) -> Any:
            return jax.grad(lambda x: odd(x) * 2)(x)

        assert await hosts.on(lambda x: float(step(x)))(1.0) == 20.0

    async def test_modules(self, hosts: HostsUnderTest) -> None:
        """They are imported there, and their state is one for all bodies."""

        def body(key: str, i: int) -> list[int]:
            bodies.note(key, i)
            return bodies.notes(key)

        await hosts.on(body)("modules", 1)
        assert (await hosts.on(bodies.notes)("modules"))[-1] == 1
        assert await hosts.on(lambda m: m.sqrt(9.0))(math) == 3.0

    async def test_devices_and_shardings(self, hosts: HostsUnderTest) -> None:
        """They travel as what they are."""
        mesh = hosts.host_mesh()
        sharding = NamedSharding(mesh, PartitionSpec("x"))

        def body(things: list[Any]) -> Any:
            device, mesh, sharding, single = things
            assert device in jax.devices()
            assert list(sharding.mesh.devices.flat) == list(mesh.devices.flat)
            assert single.device_set == {device}
            return things, jax.device_put(np.arange(8, dtype=np.float32), sharding)

        given = [hosts.device, mesh, sharding, SingleDeviceSharding(hosts.device)]
        things, made = await hosts.on(body)(given)
        assert things == given
        assert made.sharding == sharding
        assert (await device_get(made)).tolist() == list(range(8))

    async def test_whole_mesh(self, hosts: HostsUnderTest) -> None:
        """A mesh of all hosts is known to each."""

        def body(mesh: Mesh) -> tuple[Any, int]:
            return mesh, len(mesh.local_devices)

        mesh, local = await hosts.on(body)(hosts.mesh)
        assert mesh == hosts.mesh
        assert local == len(hosts.devices[0])
