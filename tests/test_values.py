# SPDX-License-Identifier: Apache-2.0
"""Values (contract C9): what arguments and results may be, where NumPy goes, what stays Python."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import datetime
import enum
import fractions

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from aiocolocated import ArgumentError, TaskChannel, colocated_python, from_thread, jax_scope
from aiocolocated._values import is_numpy, placement, private_copy

TIMEOUT = 20.0  # seconds; only a bug takes that long

STRINGS = np.dtypes.StringDType()


class Box:
    """A Python value: what is in it is no leaf."""

    def __init__(self, value):
        self.value = value


@dataclasses.dataclass
class Settings:
    """A plain dataclass: a Python value, whatever it holds."""

    rate: float
    table: np.ndarray


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    """A dataclass that is a pytree."""

    w: jax.Array
    steps: int


class Pair(collections.namedtuple("Pair", ["left", "right"])):
    __slots__ = ()


class Color(enum.Enum):
    RED = 1


@colocated_python
def same(x, value=None):
    """The second argument, as the body sees it, inside of a value that is no tree."""
    return Box(value)


@colocated_python
def give(x, box):
    """What the box holds, as a result."""
    return box.value


def numbers(device=None):
    return jax.device_put(np.arange(3, dtype=np.float32), device)


def seen(value, x=None):
    """What a body sees in place of an argument."""
    return same(numbers() if x is None else x, value).result(TIMEOUT).value


def given(value, x=None):
    """What a caller gets for a result."""
    return give(numbers() if x is None else x, Box(value)).result(TIMEOUT)


ways = pytest.mark.parametrize("way", [seen, given], ids=["argument", "result"])


# --- JAX arrays -------------------------------------------------------------------------------------


def jax_arrays():
    devices = jax.devices("cpu")
    mesh = Mesh(np.array(devices), ("a",))
    key = jax.random.key(7)
    with jax.enable_x64(True):
        double = jnp.arange(3.0)
    return {
        "float32": jnp.ones((2, 3)),
        "scalar": jnp.float32(3),
        "weakly typed": jnp.asarray(1.0),
        "zero size": jnp.ones((0, 3)),
        "float64": double,
        "bool": jnp.array([True, False]),
        "complex": jnp.array([1j]),
        "bfloat16": jnp.ones(2, jnp.bfloat16),
        "float8": jnp.ones(2, jnp.float8_e4m3fn),
        "int4": jnp.ones(2, jnp.int4),
        "uint2": jnp.ones(2, jnp.uint2),
        "key": key,
        "keys": jax.random.split(key, (2, 2)),
        "no keys": jax.random.split(key, 0),
        "rbg key": jax.random.key(7, impl="rbg"),
        "legacy key": jax.random.PRNGKey(7),
        "strings": jax.device_put(
            np.array(["a", "longer than the inline size"], dtype=STRINGS), devices[0]
        ),
        "sharded": jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("a"))),
        "replicated": jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P())),
        "sharded keys": jax.device_put(jax.random.split(key, 8), NamedSharding(mesh, P("a"))),
    }


@ways
@pytest.mark.parametrize(
    "which",
    [
        "float32", "scalar", "weakly typed", "zero size", "float64", "bool", "complex", "bfloat16",
        "float8", "int4", "uint2", "key", "keys", "no keys", "rbg key", "legacy key", "strings",
        "sharded", "replicated", "sharded keys",
    ],
)  # fmt: skip
def test_jax_array_passes_as_it_is(which, way):
    """Every kind of jax.Array goes in and comes out as the same object, nothing copied."""
    array = jax_arrays()[which]
    assert way(array, x=array) is array
    (nested,) = way([{"k": array}], x=array)
    assert nested["k"] is array


@pytest.mark.asyncio
async def test_computed_keys_and_strings_can_be_awaited():
    """Results that JAX has no is_ready for, or no computations on, are awaited like others."""
    async with asyncio.timeout(TIMEOUT):
        keys = await colocated_python(lambda key: jax.random.split(key, 4))(jax.random.key(0))
        assert keys.shape == (4,)
        assert jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)
        bits = await colocated_python(lambda key: jax.random.uniform(key, (3,)))(keys[0])
        np.testing.assert_array_equal(
            np.asarray(bits),
            np.asarray(jax.random.uniform(jax.random.split(jax.random.key(0), 4)[0], (3,))),
        )
        text = await colocated_python(lambda x: np.array(["a", "bc"], dtype=STRINGS))(keys)
        assert isinstance(text, jax.Array)
        assert np.asarray(text).tolist() == ["a", "bc"]
        assert (await give(keys, Box(jnp.ones((0,))))).shape == (0,)


def test_key_can_be_the_only_argument():
    """A key tells the devices of its call."""
    device = jax.devices("cpu")[3]
    key = jax.device_put(jax.random.key(0), device)
    result = colocated_python(lambda key: np.ones(2, np.float32))(key).result(TIMEOUT)
    assert result.device == device


def test_array_in_other_memory_passes():
    """Memory kinds of a device are part of its sharding."""
    device = jax.devices("cpu")[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    for kind in kinds:
        array = jax.device_put(
            jnp.ones(2), jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
        )
        assert given(array, x=array) is array


# --- NumPy ------------------------------------------------------------------------------------------


DTYPES = [
    "bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32", "complex64",
    ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4,
    ml_dtypes.uint4,
]  # fmt: skip


@ways
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_numpy_value_is_placed_with_its_dtype(dtype, way):
    """Arrays and scalars become jax.Arrays on the call's device, the dtype and the values kept."""
    device = jax.devices("cpu")[2]
    array = np.array([[1, 0, 1]]).astype(dtype)
    for value in (array, array[0, 0], array[:0], array[0, 0].reshape(())):
        placed = way(value, x=numbers(device))
        assert type(placed) is type(numbers())
        assert placed.dtype == np.dtype(dtype)
        assert placed.shape == value.shape
        assert placed.device == device
        assert placed.committed
        np.testing.assert_array_equal(np.asarray(placed), value)


@ways
def test_numpy_strings_are_placed(way):
    """StringDType arrays become JAX arrays of strings."""
    value = np.array(["a", "b", "c" * 100], dtype=STRINGS)
    placed = way(value)
    assert isinstance(placed, jax.Array)
    assert np.asarray(placed).tolist() == value.tolist()


@ways
def test_numpy_value_is_placed_as_device_put_does(way, cpu_devices):
    """On several devices it is replicated; the memory order and a view's strides do not matter."""
    mesh = Mesh(np.array(cpu_devices), ("a",))
    x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("a")))
    value = np.arange(6, dtype=np.int32).reshape(2, 3)
    for view in (value, value.T, value[::-1], np.asfortranarray(value)):
        placed = way(view, x=x)
        assert placed.is_fully_replicated
        assert placed.sharding.device_set == set(cpu_devices)
        assert [s.device for s in placed.addressable_shards] == cpu_devices
        np.testing.assert_array_equal(np.asarray(placed), view)


@pytest.mark.parametrize("size", [1000, 1 << 22])
@pytest.mark.parametrize("offset", [0, 4])
def test_numpy_argument_may_be_written_to_once_its_call_is_dispatched(size, offset):
    """The body's array is its own: JAX shares memory that is aligned, and copies other memory late."""
    memory = np.empty(size * 4 + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    value = memory[start : start + size * 4].view(np.float32)
    for _ in range(3):
        value[:] = 1
        future = same(numbers(), value)
        async_result = from_thread.wait(future.wait_dispatched(), TIMEOUT)
        value[:] = 2
        assert float(async_result.value.max()) == 1.0


BUFFER = np.zeros(1 << 20, np.float32)


def fill(x, n):
    BUFFER[:] = n
    return BUFFER


def test_numpy_result_is_apart_from_the_body_that_returned_it():
    """A body may return a buffer that its next call writes to."""
    function = colocated_python(fill)
    x = numbers()
    first, second = function(x, 1), function(x, 2)
    assert float(first.result(TIMEOUT).max()) == 1.0
    assert float(second.result(TIMEOUT).min()) == 2.0


@pytest.mark.asyncio
async def test_numpy_is_placed_off_the_loop(no_blocking):
    """A large NumPy argument costs the loop nothing."""
    value = np.ones(1 << 22, np.float32)
    async with asyncio.timeout(TIMEOUT):
        box = await same(numbers(), value)
    assert box.value.shape == value.shape
    assert no_blocking.calls == []


WIDE = ["int64", "uint64", "float64", "complex128"]


@ways
@pytest.mark.parametrize("dtype", WIDE)
def test_numpy_value_that_would_lose_bits_is_refused(dtype, way):
    """64 bits with x64 off: named with its path, never silently narrowed."""
    where = "argument" if way is seen else "result"
    for value in (np.ones(2, dtype), np.dtype(dtype).type(1)):
        with pytest.raises(ArgumentError) as caught:
            way({"a": [value]})
        text = str(caught.value)
        path = "args[1]['a'][0] (parameter 'value')" if where == "argument" else "result['a'][0]"
        assert path in text
        assert ("same" if where == "argument" else "give") in text
        assert f"{dtype} would become" in text
        assert "x64" in text


@ways
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("scope", [jax_scope, lambda enable_x64: jax.enable_x64(enable_x64)])
def test_numpy_value_keeps_64_bits_where_x64_is_on(dtype, way, scope):
    """On for the task or for the thread that submits: the dtype is kept."""
    with scope(enable_x64=True):
        placed = way(np.ones(2, dtype))
    assert placed.dtype == dtype


@ways
@pytest.mark.parametrize(
    "value",
    [
        np.ones(2, np.longdouble),
        np.zeros(2, [("a", "i4"), ("b", "f4")]),
        np.zeros(2, [("a", "O")]),
        np.void(b"ab"),
    ],
    ids=["longdouble", "structured", "objects", "void"],
)
def test_numpy_value_without_a_counterpart_is_refused(value, way):
    """What JAX has no dtype for is named, with its path."""
    if value.dtype == np.float64:
        pytest.skip("long double is double here")
    with pytest.raises(ArgumentError, match="not a valid JAX") as caught:
        way([value])
    assert "[0]" in str(caught.value)
    assert caught.value.__cause__ is not None


@ways
def test_masked_array_is_refused(way):
    """Placing one would drop its mask."""
    with pytest.raises(ArgumentError, match="masked"):
        way([np.ma.masked_array(np.ones(2, np.float32), [True, False])])


@ways
@pytest.mark.parametrize(
    "value",
    [
        np.array([b"a", b"bc"]),
        np.array(["a", "bc"]),
        np.array([object(), None]),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.timedelta64(3, "s"),
        np.str_("a"),
        np.bytes_(b"a"),
        np.dtype("float32"),
        np.random.default_rng(0),
    ],
    ids=["bytes", "unicode", "object", "datetime", "timedelta", "str_", "bytes_", "dtype", "rng"],
)
def test_numpy_value_that_is_no_number_stays_python(value, way):
    """It is passed by reference, as a Python value."""
    assert way(value) is value


def test_numpy_arguments_reach_run_as_they_are():
    """TaskChannel.run changes nothing: its callable gets and returns NumPy."""
    channel = TaskChannel()
    value = np.ones(2)
    got = channel.run(lambda a: Box(a), value).result(TIMEOUT).value
    assert got is value
    assert channel.run(lambda: value).result(TIMEOUT) is value


# --- Python values ----------------------------------------------------------------------------------


PYTHON = {
    "zero": 0,
    "one": 1,
    "large int": 2**40,
    "huge int": 2**100,
    "float": 1.5,
    "nan": float("nan"),
    "complex": 1j,
    "bool": True,
    "false": False,
    "text": "text",
    "empty text": "",
    "bytes": b"bytes",
    "bytearray": bytearray(b"bytes"),
    "set": {1, 2},
    "frozenset": frozenset((1, 2)),
    "range": range(3),
    "slice": slice(1, 2),
    "ellipsis": ...,
    "not implemented": NotImplemented,
    "date": datetime.date(2020, 1, 1),
    "fraction": fractions.Fraction(1, 3),
    "enum": Color.RED,
    "class": Settings,
    "function": numbers,
    "object": object(),
    "exception": ValueError("no error, a value"),
    "dataclass": Settings(0.1, np.ones(2)),
    "box": Box(np.ones(2)),
    "deque": collections.deque([1]),
}


@ways
@pytest.mark.parametrize("which", PYTHON)
def test_python_value_passes_by_reference(which, way):
    """The very object: no copy, no conversion to an array, no loss of type or size."""
    value = PYTHON[which]
    assert way(value) is value
    assert way({"k": (value,)})["k"][0] is value


@ways
def test_none_is_not_zero(way):
    """None, 0, False and an empty container are different things and stay so."""
    for value in (None, 0, False, 0.0, "", (), [], {}):
        got = way(value)
        assert type(got) is type(value)
        assert got == value
    assert way([None, 0, False]) == [None, 0, False]


def test_python_values_do_not_specialize():
    """Any number of different values share one specialization, and each call gets its own."""
    from aiocolocated import cache_info

    before = cache_info().misses
    x = numbers()
    for i in range(20):
        assert seen(i, x) == i
        assert seen(f"{i}", x) == f"{i}"
    assert cache_info().misses == before + 1


# --- trees ------------------------------------------------------------------------------------------


def tree():
    return {
        "list": [jnp.ones(2), 1, None],
        "tuple": (np.float32(2.0), "text", ()),
        "pair": Pair(jnp.zeros(3), {"deep": [np.ones(1, np.int32)]}),
        "ordered": collections.OrderedDict([("b", jnp.ones(1)), ("a", 2)]),
        "default": collections.defaultdict(list, {"k": [jnp.ones(1)]}),
        "state": State(jnp.ones((2, 2)), 3),
        "settings": Settings(0.5, np.ones(2)),
        3: None,
    } | {}


@ways
def test_tree_keeps_its_structure(way):
    """Every kind of container comes back as itself; NumPy leaves are JAX arrays, the rest as it was."""
    value = {k if isinstance(k, str) else "three": v for k, v in tree().items()}
    got = way(value)
    assert jax.tree.structure(got) == jax.tree.structure(value)
    assert type(got["pair"]) is Pair
    assert type(got["ordered"]) is collections.OrderedDict
    assert type(got["default"]) is collections.defaultdict
    assert type(got["state"]) is State
    assert got["state"].w is value["state"].w
    assert got["state"].steps == 3
    assert got["settings"] is value["settings"]
    assert got["list"][0] is value["list"][0]
    assert isinstance(got["tuple"][0], jax.Array)
    assert isinstance(got["pair"].right["deep"][0], jax.Array)
    assert got["list"][1:] == [1, None]


def test_keyword_arguments_are_trees_too():
    """By position and by keyword, arguments are treated alike."""
    seen = []

    def look(x, *rest, flag, **more):
        return Box((rest, flag, more))

    function = colocated_python(look)
    rest, flag, more = (
        function(numbers(), np.int32(1), 2, flag=np.bool_(True), more=[np.float32(3), "s"])
        .result(TIMEOUT)
        .value
    )
    assert isinstance(rest[0], jax.Array)
    assert rest[1] == 2
    assert isinstance(flag, jax.Array)
    assert isinstance(more["more"][0], jax.Array)
    assert more["more"][1] == "s"
    assert seen == []


def test_same_leaf_twice_is_placed_twice_or_once_but_right():
    """One NumPy array in two places of a tree arrives in both."""
    value = np.ones(2, np.float32)
    left, right = seen((value, value))
    np.testing.assert_array_equal(np.asarray(left), np.asarray(right))
    x = numbers()
    left, right = seen((x, x))
    assert left is x
    assert right is x


# --- futures ----------------------------------------------------------------------------------------


def test_future_in_a_tree_is_replaced_by_its_value():
    """Wherever it is nested, and however often; a future of a tree becomes that tree."""
    x = numbers()
    early = give(x, Box({"a": x, "n": np.int32(4), "s": "text"}))
    got = seen([early, {"deep": (early, 1)}], x)
    assert got[0]["a"] is x
    assert got[0]["n"] is got[1]["deep"][0]["n"]
    assert isinstance(got[0]["n"], jax.Array)
    assert got[1]["deep"][0]["s"] == "text"
    assert got[1]["deep"][1] == 1


def test_future_of_none_and_of_an_empty_tree_are_values():
    """A dependency may have no leaves at all."""
    x = numbers()
    for value in (None, (), {}, [None]):
        assert seen(give(x, Box(value)), x) == value


def test_future_as_argument_of_run():
    """TaskChannel.run's callable sees arrays, too."""
    channel = TaskChannel()
    x = numbers()
    early = give(x, Box([x]))
    assert channel.run(lambda tree: tree["k"][0], {"k": early}).result(TIMEOUT) is x


# --- results that can only be mistakes --------------------------------------------------------------


async def coroutine():
    """Never run."""


def generator():
    yield


async def agenerator():
    yield


MISTAKES = {
    "coroutine": (coroutine, "coroutine"),
    "generator": (generator, "generator"),
    "asynchronous generator": (agenerator, "async_generator"),
    "future": (lambda: give(numbers(), Box(1)), "ArrayFuture"),
}


# JAX is about to stop taking iterators for leaves, and says so.
iterators = pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")


@iterators
@pytest.mark.parametrize("nested", [lambda v: v, lambda v: [1, {"k": v}]], ids=["plain", "nested"])
@pytest.mark.parametrize("which", MISTAKES)
def test_result_that_must_be_run_first_is_refused(which, nested):
    """A forgotten await or call is said in words that name it, by a colocated call and by run."""
    make, name = MISTAKES[which]
    function = colocated_python(lambda x: nested(make()))
    channel = TaskChannel()
    for future in (function(numbers()), channel.run(lambda: nested(make()))):
        with pytest.raises(ArgumentError, match=f"returned an? {name}") as caught:
            future.result(TIMEOUT)
        assert "<lambda>" in str(caught.value)


@iterators
def test_every_forgotten_coroutine_is_closed():
    """No warning about coroutines that were never awaited follows the error."""
    function = colocated_python(lambda x: [coroutine(), {"k": coroutine()}, generator()])
    with pytest.raises(ArgumentError, match="returned a coroutine"):
        function(numbers()).result(TIMEOUT)


# --- decisions, alone -------------------------------------------------------------------------------


def test_is_numpy_tells_numbers_from_the_rest():
    """Numbers, booleans and StringDType become arrays; objects, fixed strings and dates do not."""
    for value in (np.ones(1), np.int8(1), np.bool_(1), np.ones(1, ml_dtypes.bfloat16)):
        assert is_numpy(value)
    assert is_numpy(np.array(["a"], dtype=STRINGS))
    for value in (1, 1.0, True, "a", None, jnp.ones(1), np.array(["a"]), np.array([None])):
        assert not is_numpy(value)
    assert not is_numpy(np.datetime64("2020-01-01"))


def test_placement_is_the_device_or_all_of_them(cpu_devices):
    """One device: itself; several: replicated in their order."""
    one = placement((cpu_devices[3],))
    assert one.device_set == {cpu_devices[3]}
    several = placement(tuple(cpu_devices[4:1:-1]))
    assert several.is_fully_replicated
    assert list(several.mesh.devices.flat) == cpu_devices[4:1:-1]


@pytest.mark.parametrize("dtype", [*DTYPES, *WIDE, STRINGS], ids=lambda d: np.dtype(d).name)
def test_private_copy_is_equal_and_apart(dtype):
    """Whatever the dtype, layout and size; scalars too."""
    value = np.array([[1, 0, 1], [0, 1, 1]]).astype(dtype)
    for part in (value, value.T, value[:, ::2], value[:0], value[0, 0:1].reshape(())):
        copy = private_copy(part)
        assert copy.dtype == part.dtype
        assert copy.shape == part.shape
        assert not np.shares_memory(copy, part)
        np.testing.assert_array_equal(copy, part)
    if dtype is not STRINGS:  # whose scalars are plain text
        assert private_copy(value[1, 1]) == value[1, 1]
