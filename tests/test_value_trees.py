# SPDX-License-Identifier: Apache-2.0
"""Value trees (contract C9): every kind of value, nested anyhow, through every kind of body."""

from __future__ import annotations

import collections
import struct
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from stream_bodies import warm_up
from value_bodies import WAYS, Box, Color, Echo, Frozen, Level, Options, Pair, State, same, wait

from aiocolocated import (
    ArgumentError,
    cache_info,
    colocated_python,
    colocated_python_class,
    configure,
    jax_scope,
)

pytestmark = pytest.mark.timeout(120)

# The same examples in every run: one that fails is one that can be looked at.
EXAMPLES = settings(max_examples=40, deadline=None, database=None, derandomize=True)


@pytest.fixture(autouse=True)
def _around():
    warm_up()
    yield
    ARRAYS.clear()


@pytest.fixture(params=[False, True], ids=["by reference", "strict"])
def strict(request) -> bool:
    configure(strict=request.param)
    return request.param


# --- any tree ----------------------------------------------------------------------------------------


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


ARRAY_NAMES = (
    "float32", "0-d", "zero size", "bool", "bfloat16", "int8", "complex", "key", "keys", "weak",
)  # fmt: skip
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


# Filled by a test: strategies live for ever, and arrays should not.
ARRAYS: dict[str, jax.Array] = {}


def trees() -> st.SearchStrategy[Any]:
    """Any of these, nested in each other."""
    array = st.sampled_from(ARRAY_NAMES).map(lambda name: ARRAYS[name])
    leaves = PLAIN | array | numpy_values() | st.builds(Options, TEXT, PLAIN | array)

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


@pytest.fixture(params=WAYS)
def way(request):
    """There and back again through a body of one kind."""
    return WAYS[request.param](colocated_python_class(Echo)())


def test_any_tree_round_trips(way, strict):
    """Equal, types included, arrays the same objects; NumPy as JAX arrays of their dtype."""
    ARRAYS.update(make_arrays())
    x = jnp.zeros(1)

    @EXAMPLES
    @given(trees())
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


def test_plain_value_round_trips(way, strict):
    """Every kind alone, in a list, and by keyword."""
    x = jnp.zeros(1)
    for value in KINDS.values():
        assert_same(way(x, value), value, strict)
        assert_same(way(x, tree=[value, {"k": value}]), [value, {"k": value}], strict)


def test_every_array_round_trips_alone(way, strict):
    """Also where it says on which device the call runs."""
    for array in make_arrays().values():
        assert way(array, array) is array
        assert way(array, [array, None])[0] is array


def test_numpy_round_trips_as_jax_array(way, strict):
    """Arrays and scalars of every narrow dtype."""
    x = jnp.zeros(1)
    for dtype in NARROW:
        value = [np.ones((2, 3), dtype), np.ones((0, 2), dtype), np.ones((), dtype)[()]]
        assert_same(way(x, {"k": value}), {"k": value}, strict)


def test_wide_numpy_anywhere_in_a_tree_is_refused(way, strict):
    """With x64 off it would lose bits: the dtype is named, and nothing is truncated."""
    ARRAYS.update(make_arrays())
    x = jnp.zeros(1)

    @settings(EXAMPLES, max_examples=15)
    @given(trees(), numpy_values(WIDE), trees())
    def check(before, wide, after):
        with pytest.raises(ArgumentError, match=f"{wide.dtype} would become .*x64"):
            way(x, {"a": before, "b": [wide], "c": after})

    check()


def test_wide_numpy_is_kept_where_x64_is_on(way, strict):
    """The dtype and every bit."""
    for dtype in WIDE:
        value = np.array([2**40 + 1, 0]).astype(dtype)
        with jax_scope(enable_x64=True):
            got = way(jnp.zeros(1), [value, value[0]])
        assert_same(got, [value, value[0]], strict)


def test_trees_with_other_values_share_a_specialization(strict):
    """Static values are no part of the key, whatever they are; the tree's form is."""
    function = wait(colocated_python(same))
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
    assert cache_info().currsize <= before.currsize


def test_methods_and_streams_share_specializations_too(way, strict):
    """A step number costs nothing but itself."""
    x = jnp.zeros(1)
    way(x, -1)
    before = cache_info().misses
    for step in range(30):
        assert way(x, step) == step
    assert cache_info().misses == before
