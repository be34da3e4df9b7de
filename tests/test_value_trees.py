# SPDX-License-Identifier: Apache-2.0
"""Value trees (contract C9): every kind of value, nested anyhow, through every kind of body.

And strict mode, in which plain Python goes by value, as it does to other hosts.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import enum
import queue
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from stream_bodies import TIMEOUT, warm_up

from aiocolocated import (
    ArgumentError,
    TaskChannel,
    _serialization,
    cache_info,
    colocated_python,
    colocated_python_class,
    configure,
    from_thread,
    jax_scope,
)
from aiocolocated.testing import Recorder

pytestmark = pytest.mark.timeout(120)

# The same examples in every run: one that fails is one that can be looked at.
EXAMPLES = settings(max_examples=60, deadline=None, database=None, derandomize=True)


@pytest.fixture(autouse=True)
def _around():
    warm_up()
    yield
    STATE.clear()


@pytest.fixture(params=[False, True], ids=["by reference", "strict"])
def strict(request) -> bool:
    configure(strict=request.param)
    return request.param


# --- kinds of values --------------------------------------------------------------------------------


@dataclasses.dataclass
class Options:
    """A Python value, whatever is in it."""

    name: str
    extra: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    number: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    w: Any
    steps: Any


@jax.tree_util.register_pytree_node_class
class Box:
    """A registered pytree with data that is no leaf."""

    def __init__(self, content, label):
        self.content = content
        self.label = label

    def tree_flatten(self):
        return (self.content,), self.label

    @classmethod
    def tree_unflatten(cls, label, children):
        return cls(*children, label)


Pair = collections.namedtuple("Pair", ["left", "right"])


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Plain:
    """An ordinary object."""

    def __init__(self, value):
        self.value = value


def make_arrays() -> dict[str, jax.Array]:
    key = jax.random.key(5)
    return {
        "float32": jnp.arange(3.0),
        "0-d": jnp.float32(-0.0),
        "zero size": jnp.zeros((2, 0, 3)),
        "bool": jnp.array([True, False]),
        "bfloat16": jnp.ones(2, jnp.bfloat16),
        "int8": jnp.array([-128, 127], jnp.int8),
        "complex": jnp.array([1j]),
        "key": key,
        "keys": jax.random.split(key, 3),
        "weak": jnp.asarray(1),
    }


NARROW = (
    "bool", "int8", "uint16", "int32", "float16", "float32", "complex64", ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
)  # fmt: skip
WIDE = ("int64", "uint64", "float64", "complex128")
SHAPES = ((), (0,), (2,), (2, 0, 3), (2, 3))


@st.composite
def numpy_values(draw, dtypes=NARROW):
    shape = draw(st.sampled_from(SHAPES))
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    start = draw(st.integers(0, 3))
    value = (np.arange(start, start + int(np.prod(shape))) % 5).reshape(shape).astype(dtype)
    if draw(st.booleans()):
        value = value.T
    if shape == () and draw(st.booleans()):
        return value[()]  # a scalar
    return value


TEXT = st.text(st.characters(codec=None), max_size=5) | st.sampled_from(
    ["", "\0", "a\0b", "\U0001f600\u200d", "\ud800", "\udfff!", "\u0130", "e\u0301"]
)
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 2**31, 2**40, -(2**63), 2**64, 2**200]),
    st.integers(),
    st.floats(),
    st.sampled_from([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 5e-324]),
    st.complex_numbers(),
    st.binary(max_size=6),
    st.sampled_from([b"", b"\0", b"a\0\0"]),
    TEXT,
    st.sampled_from([*Color, *Level]),
    st.builds(Frozen, st.integers()),
    st.sets(st.integers(), max_size=3),
    st.frozensets(TEXT, max_size=3),
    st.builds(range, st.integers(0, 9)),
    st.binary(max_size=3).map(bytearray),
)


def trees(arrays: dict[str, jax.Array], numpy=None) -> st.SearchStrategy[Any]:
    """Any of these, nested in each other."""
    in_array = st.sampled_from([arrays[name] for name in arrays])
    leaves = PLAIN | in_array | (numpy_values() if numpy is None else numpy)
    leaves |= st.builds(Options, TEXT, PLAIN | in_array)

    def nested(inner):
        return st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(TEXT, inner, max_size=3),
            st.dictionaries(st.integers(-3, 3), inner, max_size=3),
            st.dictionaries(TEXT, inner, max_size=2).map(collections.OrderedDict),
            st.builds(Pair, inner, inner),
            st.builds(State, inner, inner),
            st.builds(Box, inner, TEXT),
        )

    return st.recursive(leaves, nested, max_leaves=8)


def assert_same(got: Any, sent: Any, strict: bool) -> None:
    """Equal, types included; NumPy has become a JAX array of the same dtype."""
    if isinstance(sent, jax.Array):
        assert got is sent  # arrays are not copied, whatever the mode
    elif isinstance(sent, (np.ndarray, np.generic)):
        assert isinstance(got, jax.Array)
        assert got.dtype == sent.dtype
        assert got.shape == sent.shape
        assert np.asarray(got).tobytes() == sent.tobytes()
    elif type(sent) in (float, complex):
        assert type(got) is type(sent)
        for part in ("real", "imag"):  # bit by bit: nan, and minus zero
            assert struct.pack("d", getattr(got, part)) == struct.pack("d", getattr(sent, part))
    else:
        assert type(got) is type(sent)
        if isinstance(sent, dict):
            assert got.keys() == sent.keys()
            for key in sent:
                assert_same(got[key], sent[key], strict)
        elif isinstance(sent, (list, tuple)):
            assert len(got) == len(sent)
            for one, other in zip(got, sent, strict=True):
                assert_same(one, other, strict)
        elif isinstance(sent, (State, Box, Options)):
            if isinstance(sent, Options) and not strict:
                assert got is sent  # no tree: by reference
            for name in vars(sent):
                assert_same(getattr(got, name), getattr(sent, name), strict)
        else:
            assert got == sent
            if not strict:
                assert got is sent


# --- every kind of body -----------------------------------------------------------------------------


def same(x, tree):
    return tree


async def same_async(x, tree):
    await asyncio.sleep(0)
    return tree


def yields(x, tree):
    yield tree


async def yields_async(x, tree):
    await asyncio.sleep(0)
    yield tree


class Echo:
    def method(self, x, tree):
        return tree

    async def coroutine(self, x, tree):
        return tree

    def items(self, x, tree):
        yield tree

    async def items_async(self, x, tree):
        yield tree


def _take_one(function: Any) -> Callable[..., Any]:
    def way(*args: Any, **kwargs: Any) -> Any:
        (item,) = from_thread.iterate(function(*args, **kwargs))
        return item

    return way


def _wait(function: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs).result(TIMEOUT)


WAYS = {
    "function": lambda obj: _wait(colocated_python(same)),
    "coroutine": lambda obj: _wait(colocated_python(same_async)),
    "stream": lambda obj: _take_one(colocated_python(yields)),
    "async stream": lambda obj: _take_one(colocated_python(yields_async)),
    "method": lambda obj: _wait(obj.method),
    "async method": lambda obj: _wait(obj.coroutine),
    "method's stream": lambda obj: _take_one(obj.items),
    "async method's stream": lambda obj: _take_one(obj.items_async),
}


@pytest.fixture(params=WAYS)
def way(request):
    """There and back again through a body of one kind."""
    return WAYS[request.param](colocated_python_class(Echo)())


def test_any_tree_round_trips(way, strict):
    """Equal, types included, arrays the same objects; NumPy as JAX arrays of their dtype."""
    arrays = make_arrays()
    x = jnp.zeros(1)

    @EXAMPLES
    @given(trees(arrays))
    def check(tree):
        assert_same(way(x, tree), tree, strict)

    check()


KINDS = {
    "none": None,
    "zero": 0,
    "false": False,
    "zero point": 0.0,
    "minus zero": -0.0,
    "empty text": "",
    "empty bytes": b"",
    "empty tuple": (),
    "empty dict": {},
    "40 bits": 2**40,
    "70 bits": 2**70,
    "nan": float("nan"),
    "complex": complex(float("nan"), -0.0),
    "bytes": b"a\0\0b\0",
    "text": "a\0\U0001f600\ud800z",
    "enum": Color.BLUE,
    "int enum": Level.HIGH,
    "named tuple": Pair(1, [Pair(None, 0)]),
    "state": State(None, 3),
    "box": Box([True, None], "\ud800"),
    "options": Options("name", {"a": [1, 2.5]}),
    "frozen": Frozen(2**40),
    "class": Options,
    "function": make_arrays,
}


@pytest.mark.parametrize("which", KINDS)
def test_plain_value_round_trips(which, way, strict):
    """Every kind alone, in a list, and by keyword."""
    value, x = KINDS[which], jnp.zeros(1)
    assert_same(way(x, value), value, strict)
    assert_same(way(x, tree=[value, {"k": value}]), [value, {"k": value}], strict)


def test_every_array_round_trips_alone(way, strict):
    """Also where it says on which device the call runs."""
    for array in make_arrays().values():
        assert way(array, array) is array
        assert way(array, [array, None])[0] is array


@pytest.mark.parametrize("dtype", NARROW, ids=lambda d: np.dtype(d).name)
def test_numpy_round_trips_as_jax_array(dtype, way, strict):
    """Arrays and scalars of every narrow dtype."""
    x = jnp.zeros(1)
    for value in (np.ones((2, 3), dtype), np.ones((0, 2), dtype), np.ones((), dtype)[()]):
        assert_same(way(x, {"k": value}), {"k": value}, strict)


def test_wide_numpy_anywhere_in_a_tree_is_refused(way, strict):
    """With x64 off it would lose bits: the dtype is named, and nothing is truncated."""
    arrays = make_arrays()
    x = jnp.zeros(1)
    configure(strict=strict)

    @settings(EXAMPLES, max_examples=20)
    @given(trees(arrays), numpy_values(WIDE), trees(arrays))
    def check(before, wide, after):
        with pytest.raises(ArgumentError, match=f"{wide.dtype} would become .*x64"):
            way(x, {"a": before, "b": [wide], "c": after})

    check()


@pytest.mark.parametrize("dtype", WIDE)
def test_wide_numpy_is_kept_where_x64_is_on(dtype, way, strict):
    """The dtype and every bit."""
    with jax_scope(enable_x64=True):
        value = np.array([2**40 + 1, 0]).astype(dtype)
        got = way(jnp.zeros(1), [value, value[0]])
    assert_same(got, [value, value[0]], strict)


def test_trees_with_other_values_share_a_specialization(strict):
    """Static values are no part of the key, whatever they are; the tree's form is."""
    function = _wait(colocated_python(same))
    x = jnp.zeros(1)
    function(x, {"a": [1, "text"], "b": x})
    before = cache_info()

    @EXAMPLES
    @given(PLAIN.filter(lambda v: v is not None), PLAIN.filter(lambda v: v is not None))
    def check(one, other):
        tree = {"a": [one, other], "b": x}
        assert_same(function(x, tree), tree, strict)

    check()
    assert cache_info().misses == before.misses
    assert cache_info().size == before.size


def test_methods_and_streams_share_specializations_too(way, strict):
    """A step number costs nothing but itself."""
    x = jnp.zeros(1)
    way(x, -1)
    before = cache_info().misses
    for step in range(30):
        assert way(x, step) == step
    assert cache_info().misses == before


# --- what is refused --------------------------------------------------------------------------------


def generator():
    yield 1


async def coroutine():
    """Never run."""


async def asynchronous_generator():
    yield 1


# Refused in every mode, because something was forgotten: a call, an await, an iteration.
FORGOTTEN = {
    "generator": generator,
    "coroutine": coroutine,
    "async_generator": asynchronous_generator,
    "ArrayStream": lambda: colocated_python(yields)(jnp.zeros(1), 1),
    "Echo": lambda: colocated_python_class(Echo)(),
}
# Refused where values are shipped.
UNSHIPPABLE = {
    "lock": threading.Lock,
    "RLock": threading.RLock,
    "threading.Event": threading.Event,
    "Condition": threading.Condition,
    "Semaphore": threading.Semaphore,
    "Barrier": lambda: threading.Barrier(2),
    "queue": queue.Queue,
    "asyncio.Event": asyncio.Event,
    "asyncio.Lock": asyncio.Lock,
    "asyncio.Queue": asyncio.Queue,
    "Thread": threading.Thread,
    "TaskChannel": TaskChannel,
}

iterators = pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")


def make_it(x, which):
    return [1, {"k": ({**FORGOTTEN, **UNSHIPPABLE})[which]()}]


async def make_it_async(x, which):
    return make_it(x, which)


def yield_it(x, which):
    yield 0
    yield make_it(x, which)


async def yield_it_async(x, which):
    yield 0
    yield make_it(x, which)


def _take_all(function: Any) -> Callable[..., Any]:
    return lambda *args: list(from_thread.iterate(function(*args)))


RESULTS = {
    "function": _wait(colocated_python(make_it)),
    "coroutine": _wait(colocated_python(make_it_async)),
    "stream": _take_all(colocated_python(yield_it)),
    "async stream": _take_all(colocated_python(yield_it_async)),
}


@iterators
@pytest.mark.parametrize("which", FORGOTTEN)
def test_forgotten_thing_is_refused_as_an_argument(which, way, strict):
    """At the call, by its kind and where it stands."""
    value = FORGOTTEN[which]()
    with pytest.raises(ArgumentError, match=rf"\['k'\]\[1\].* is an? {which}"):
        way(jnp.zeros(1), {"k": [1, value]})
    if hasattr(value, "close"):
        value.close()


@iterators
@pytest.mark.parametrize("which", FORGOTTEN)
@pytest.mark.parametrize("result", RESULTS)
def test_forgotten_thing_is_refused_as_a_result(which, result, strict):
    """When the body has returned or yielded it."""
    with pytest.raises(ArgumentError, match=f" is an? {which}|returned an? {which}"):
        RESULTS[result](jnp.zeros(1), which)


@pytest.mark.parametrize("which", UNSHIPPABLE)
def test_unshippable_argument_is_refused_in_strict_mode(which, way):
    """By its path; a program that passes locally passes on other hosts."""
    configure(strict=True)
    with pytest.raises(ArgumentError, match=r"\['k'\]\[1\].* is a.*strict mode"):
        way(jnp.zeros(1), {"k": [1, UNSHIPPABLE[which]()]})


@pytest.mark.parametrize("which", UNSHIPPABLE)
@pytest.mark.parametrize("result", RESULTS)
def test_unshippable_result_is_refused_in_strict_mode(which, result):
    """By its path, after the items before it."""
    configure(strict=True)
    with pytest.raises(ArgumentError, match=r"result\[1\]\['k'\].* is a.*strict mode"):
        RESULTS[result](jnp.zeros(1), which)


def test_sockets_and_files_are_refused_in_strict_mode(way, tmp_path):
    """They belong to this process."""
    configure(strict=True)
    left, right = socket.socketpair()
    with left, right, open(tmp_path / "file", "w") as file:
        for value in (left, file):
            with pytest.raises(ArgumentError, match=r"\[0\].* is a.*strict mode"):
                way(jnp.zeros(1), [value])


def test_unshippable_value_inside_an_object_is_refused_by_the_objects_path(way):
    """What is inside is no leaf: the object is named, and the reason."""
    configure(strict=True)
    with pytest.raises(ArgumentError, match=r"\['deep'\]\[0\].* is a Plain: .*lock"):
        way(jnp.zeros(1), {"deep": [Plain(threading.Lock())]})


def test_unshippable_things_pass_where_nothing_is_shipped(way):
    """In process, with strict mode off, they go by reference."""
    configure(strict=False)
    for make in (threading.Lock, threading.Event, queue.Queue):
        value = make()
        assert way(jnp.zeros(1), [value])[0] is value


def test_refused_argument_leaves_the_function_usable(way):
    """Nothing is stuck."""
    configure(strict=True)
    x = jnp.zeros(1)
    for _ in range(2):
        with pytest.raises(ArgumentError):
            way(x, threading.Lock())
        assert way(x, [1]) == [1]


# --- strict mode ------------------------------------------------------------------------------------

STATE: dict[str, Any] = {}  # of the module, which the bodies below share with the tests


def spoil(x, value, how):
    """Change an argument in every way there is."""
    if how == "list":
        value.append("spoiled")
    elif how == "nested":
        value["deep"][0].append("spoiled")
    elif how == "dict":
        value["spoiled"] = True
    elif how == "dataclass":
        value.name = "spoiled"
    elif how == "object":
        value.value = "spoiled"
    elif how == "set":
        value.add("spoiled")
    else:
        value.extend(b"spoiled")
    return None


async def spoil_async(x, value, how):
    spoil(x, value, how)


def spoil_stream(x, value, how):
    yield spoil(x, value, how)


async def spoil_stream_async(x, value, how):
    yield spoil(x, value, how)


class Spoiler:
    def __init__(self, value=None):
        self.value = value

    def method(self, x, value, how):
        return spoil(x, value, how)

    def of_constructor(self, x, how):
        return spoil(x, self.value, how)

    def get(self, x):
        return STATE["list"]


SPOILED = {
    "list": lambda: [1],
    "nested": lambda: {"deep": [[1]]},
    "dict": lambda: {"a": 1},
    "dataclass": lambda: Options("name", [1]),
    "object": lambda: Plain(1),
    "set": lambda: {1},
    "bytearray": lambda: bytearray(b"a"),
}


def _content(value: Any) -> Any:
    return vars(value) if hasattr(value, "__dict__") else value


@pytest.mark.parametrize("how", SPOILED)
@pytest.mark.parametrize("body", ["function", "coroutine", "stream", "async stream", "method"])
def test_what_a_body_does_to_its_argument_does_not_show(how, body):
    """As on another host, where it has a copy."""
    configure(strict=True)
    call = {
        "function": lambda: _wait(colocated_python(spoil)),
        "coroutine": lambda: _wait(colocated_python(spoil_async)),
        "stream": lambda: _take_one(colocated_python(spoil_stream)),
        "async stream": lambda: _take_one(colocated_python(spoil_stream_async)),
        "method": lambda: _wait(colocated_python_class(Spoiler)().method),
    }[body]()
    value, x = SPOILED[how](), jnp.zeros(1)
    assert call(x, value, how) is None
    assert call(x, value=value, how=how) is None
    assert _content(value) == _content(SPOILED[how]())


@pytest.mark.parametrize("how", ["list", "dict", "object"])
def test_what_a_body_does_to_a_constructors_argument_does_not_show(how):
    """It is shipped as a call's arguments are."""
    configure(strict=True)
    value, x = SPOILED[how](), jnp.zeros(1)
    spoiler = colocated_python_class(Spoiler)(value)
    spoiler.of_constructor(x, how).result(TIMEOUT)
    assert _content(value) == _content(SPOILED[how]())


def test_unshippable_constructor_argument_is_refused_in_strict_mode():
    """By the first method call, with its path."""
    configure(strict=True)
    spoiler = colocated_python_class(Spoiler)({"k": threading.Lock()})
    with pytest.raises(ArgumentError, match=r"constructor of Spoiler.*\['k'\].*strict mode"):
        spoiler.of_constructor(jnp.zeros(1), "list").result(TIMEOUT)


def give_state(x):
    return STATE["list"]


def yield_state(x):
    yield STATE["list"]


@pytest.mark.parametrize("body", ["function", "stream", "method"])
def test_result_is_apart_from_what_the_body_keeps(body):
    """What the caller does to it does not show in the body, nor the other way round."""
    configure(strict=True)
    STATE["list"] = kept = [1]
    call = {
        "function": lambda: _wait(colocated_python(give_state)),
        "stream": lambda: _take_one(colocated_python(yield_state)),
        "method": lambda: _wait(colocated_python_class(Spoiler)().get),
    }[body]()
    got = call(jnp.zeros(1))
    assert got == [1]
    got.append(2)
    kept.append(3)
    assert got == [1, 2]
    assert kept == [1, 3]


def test_without_strict_mode_values_go_by_reference():
    """Which is what makes strict mode worth having."""
    configure(strict=False)
    value = [1]
    _wait(colocated_python(spoil))(jnp.zeros(1), value, "list")
    assert value == [1, "spoiled"]


def test_one_object_in_two_places_stays_one(way, strict):
    """Within a call; and a value that contains itself arrives so."""
    x = jnp.zeros(1)
    shared = Plain([1])
    shared.me = shared
    first, second = way(x, [shared, {"k": shared}])[0], None
    assert first.me is first
    first, second = (lambda t: (t[0], t[1]["k"]))(way(x, [shared, {"k": shared}]))
    assert first is second
    assert (first is shared) != strict


def test_strict_mode_ships_the_values_of_futures():
    """What another body returned goes by value, too."""
    configure(strict=True)
    STATE["list"] = [1]
    early = colocated_python(give_state)(jnp.zeros(1))
    late = colocated_python(spoil)(jnp.zeros(1), early, "list")
    late.result(TIMEOUT)
    assert early.result(TIMEOUT) == [1]
    assert STATE["list"] == [1]


def test_strict_mode_carries_what_jax_made_by_reference(way):
    """Arrays and jitted functions are not copied, wherever they are."""
    configure(strict=True)
    array = jnp.arange(4.0)
    jitted = jax.jit(lambda x: x + 1)
    colocated = colocated_python(same)
    tree = {"a": [array], "o": Options("n", array), "f": jitted, "c": colocated, "p": Plain(array)}
    got = way(jnp.zeros(1), tree)
    assert got["a"][0] is array
    assert got["o"].extra is array
    assert got["p"].value is array
    assert got["f"] is jitted
    assert got["c"] is colocated


def test_strict_mode_copies_memory_that_numpy_owns_inside_of_objects():
    """It is part of a Python value there, and no array of the tree."""
    configure(strict=True)
    value = Options("n", np.ones(3))

    def body(x, value):
        value.extra[:] = 7
        return value

    got = _wait(colocated_python(body))(jnp.zeros(1), value)
    assert isinstance(got.extra, np.ndarray)
    assert got.extra.tolist() == [7, 7, 7]
    assert value.extra.tolist() == [1, 1, 1]


def test_strict_mode_costs_nothing_where_nothing_can_change(monkeypatch):
    """Calls with arrays, numbers and text, and such results, are not pickled at all."""
    configure(strict=True)
    x = jnp.zeros(1)
    function = _wait(colocated_python(same))
    for value in (x, 1, 2.5, "text", b"bytes", None, True, 1j, [1]):
        function(x, value)  # shipped and specialized
    counted = Recorder()
    dumps = _serialization.dumps

    def counting(obj):
        counted.record("dumps")
        return dumps(obj)

    monkeypatch.setattr(_serialization, "dumps", counting)
    for value in (x, 1, 2.5, "text", b"bytes", None, True, 1j):
        assert function(x, value) is value or value == 2.5
    assert counted.count("dumps") == 0
    assert function(x, [1]) == [1]
    assert counted.count("dumps") == 2  # there and back


@pytest.mark.strict_values(False)
def test_mark_turns_strict_mode_off():
    """For one test of a suite that has it on."""
    value = [1]
    assert _wait(colocated_python(same))(jnp.zeros(1), value) is value


def test_strict_mode_is_on_in_tests():
    """The test kit's plugin turns it on."""
    value = [1]
    assert _wait(colocated_python(same))(jnp.zeros(1), value) is not value
    configure(strict=False)
    assert _wait(colocated_python(same))(jnp.zeros(1), value) is value
    with pytest.raises(ValueError, match="strict must be a bool"):
        configure(strict=1)
