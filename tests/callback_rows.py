# SPDX-License-Identifier: Apache-2.0
"""The rows of the table of JAX's transformations against the callbacks: what each cell does.

A row is a function of a cell, which stands for a callback function with a callback: ``cell(x)`` is
twice ``x``, if the row says nothing else. ``debug_callback``, which gives no value, gets one that JAX
computes, so that a row is the same for all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

IO, ORDERED, PURE, DEBUG = COLUMNS = (
    "io_callback",
    "io_callback, ordered",
    "pure_callback",
    "debug_callback",
)
WITH_RESULTS = (IO, ORDERED, PURE)
VMAP_METHODS = (
    "sequential",
    "sequential_unrolled",
    "expand_dims",
    "broadcast_all",
    "legacy_vectorized",
)


@dataclasses.dataclass(frozen=True)
class Better:
    """Where the library does not give the outcome of JAX's own function.

    Attributes:
        note: what differs, for the page.
        shows: a regular expression that the library's outcome has, and JAX's has not.
    """

    note: str
    shows: str


@dataclasses.dataclass(frozen=True)
class Older:
    """Where older versions of JAX refuse what newer ones do.

    Attributes:
        since: the first version that does not.
        note: for the page.
        refused: a regular expression that the refusal has.
    """

    since: tuple[int, ...]
    note: str
    refused: str


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """One row.

    Attributes:
        section: heading of its part of the page.
        label: what the first column says.
        run: what is done with a cell; the value is compared.
        columns: where it makes sense.
        better: by column.
        older: by column.
        notes: by column, why it is as it is.
        in_order: columns whose calls come in the program's order; others may come in any.
    """

    section: str
    label: str
    run: Callable[[Any], Any]
    columns: tuple[str, ...] = COLUMNS
    better: dict[str, Better] = dataclasses.field(default_factory=dict)
    older: dict[str, Older] = dataclasses.field(default_factory=dict)
    notes: dict[str, str] = dataclasses.field(default_factory=dict)
    in_order: tuple[str, ...] = (ORDERED,)


ROWS: list[Row] = []
_section = ""


def row(label: str, **options: Any) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Make a function the next row."""

    def add(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        ROWS.append(Row(_section, label, run, **options))
        return run

    return add


NOT_NEEDED = {PURE: "JAX drops a pure callback if nothing needs a value from it."}


def spec(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def three() -> jax.Array:
    return jnp.arange(3.0)


# --- calls ------------------------------------------------------------------------------------------

_section = "Calls"


@row("`jax.jit`")
def _jit(cell):
    return jax.jit(cell)(three())


@row("not jitted")
def _eager(cell):
    return cell(three())


@row("`jax.disable_jit`")
def _disable_jit(cell):
    with jax.disable_jit():
        return jax.jit(cell)(three())


@row("`jit` in `jit`")
def _nested(cell):
    inner = jax.jit(cell)
    return jax.jit(lambda x: inner(x) + 1)(three())


@row("`jax.jit(f).lower(x).compile()`, called")
def _ahead_of_time(cell):
    return jax.jit(cell).lower(three()).compile()(three())


@row("`jax.eval_shape`")
def _eval_shape(cell):
    return jnp.zeros(jax.eval_shape(cell, three()).shape)


@row("`jax.export`")
def _export(cell):
    return jax.export.export(jax.jit(cell))(three()).call(three())


@row("two in one program")
def _two(cell):
    return jax.jit(lambda x: cell(x) + cell(x + 10))(1.0)


@row("two in one program, `ordered=True`", columns=(DEBUG,), in_order=(DEBUG,))
def _two_ordered(cell):
    return jax.jit(lambda x: cell(x, ordered=True) + cell(x + 10, ordered=True))(1.0)


@row("result not used", notes=NOT_NEEDED)
def _not_used(cell):
    return jax.jit(lambda x: (cell(x), x)[1])(three())


@row("over after `jax.effects_barrier()`: 2 devices", columns=(IO, ORDERED, DEBUG), in_order=())
def _effects_barrier(cell):
    # JAX waits for no program of several devices by itself. The pause gives no order: without the
    # barrier there would be no calls yet, not only sometimes.
    f = jax.shard_map(lambda x: cell(x, pause=0.02), mesh=two_devices(), **PARTS)
    jax.jit(f)(sharded())
    jax.effects_barrier()
    return np.int32(len(cell.calls))


# --- vmap -------------------------------------------------------------------------------------------

_section = "`vmap`"


@row("`jax.vmap` over 3")
def _vmap(cell):
    return jax.vmap(cell)(three())


def _with_method(method: str) -> Callable[[Any], Any]:
    def run(cell):
        def f(x, y):  # the shape in which the callback gets y, which is not mapped, depends on it
            return cell(x, y, body=lambda x, y: x + y, vmap_method=method)

        if method == "legacy_vectorized":  # demands that all are mapped
            return jax.vmap(lambda x: f(x, x))(three())
        return jax.vmap(f, (0, None))(three(), jnp.float32(7))

    run.__name__ = f"_vmap_{method}"
    return run


for _method in VMAP_METHODS:
    row(f'`vmap_method="{_method}"`, over 3', columns=(PURE,))(_with_method(_method))


@row('`vmap` of `vmap`, over 2 x 2 (`"sequential"`)')
def _vmap_twice(cell):
    options = {"vmap_method": "sequential"} if cell.column == PURE else {}
    return jax.vmap(jax.vmap(lambda x: cell(x, **options)))(jnp.arange(4.0).reshape(2, 2))


@row("`vmap` over something else")
def _vmap_unmapped(cell):
    y = jnp.float32(7)
    return jax.vmap(lambda x: x + cell(y))(three())


@row("`vmap` over the predicate of `cond`")
def _vmap_cond(cell):
    return jax.vmap(lambda x: jax.lax.cond(x > 0, cell, lambda x: x, x))(three())


@row("`vmap` over the predicate of `while_loop`")
def _vmap_while(cell):
    loop = lambda x: jax.lax.while_loop(lambda x: x < 2, lambda x: cell(x) + 1, x)  # noqa: E731
    return jax.vmap(loop)(jnp.arange(2.0))


# --- differentiation --------------------------------------------------------------------------------

_section = "Differentiation"


@row("`grad` by what the callback does not depend on")
def _grad_independent(cell):
    return jax.jit(jax.grad(lambda x, y: x * cell(y)))(3.0, 5.0)


@row("`grad` through it")
def _grad(cell):
    return jax.jit(jax.grad(lambda x: x * cell(x)))(3.0)


@row("`grad` past it: `jax.lax.stop_gradient`")
def _stop_gradient(cell):
    return jax.jit(jax.grad(lambda x: x * cell(jax.lax.stop_gradient(x))))(3.0)


@row("`grad` through `jax.custom_vjp`")
def _custom_vjp(cell):
    f = jax.custom_vjp(lambda x: cell(x))
    f.defvjp(lambda x: (cell(x), None), lambda _, g: (2 * g,))
    return jax.jit(jax.value_and_grad(f))(3.0)


@row("`grad` through `jax.custom_jvp`")
def _custom_jvp(cell):
    f = jax.custom_jvp(lambda x: cell(x))
    f.defjvp(lambda x, t: (f(*x), 2 * t[0]))
    return jax.jit(jax.value_and_grad(f))(3.0)


@row("`grad` of `jax.checkpoint`", notes={DEBUG: "Once more where JAX computes the values again."})
def _checkpoint(cell):
    f = jax.checkpoint(lambda x: jnp.sin(x) * cell(jax.lax.stop_gradient(x)))
    return jax.jit(jax.grad(f))(3.0)


@row("`grad` of `jax.lax.scan` over 2")
def _grad_scan(cell):
    def f(x):
        return jax.lax.scan(lambda c, y: (c * cell(y), None), x, jnp.arange(1.0, 3.0))[0]

    return jax.jit(jax.grad(f))(3.0)


# --- control flow -----------------------------------------------------------------------------------

_section = "Control flow"


@row("`jax.lax.scan` over 3")
def _scan(cell):
    return jax.jit(lambda x: jax.lax.scan(lambda c, y: (c + cell(y), c), 0.0, x))(three())


@row("`jax.lax.map` over 3")
def _map(cell):
    return jax.jit(lambda x: jax.lax.map(cell, x))(three())


@row("`jax.lax.fori_loop` of 3")
def _fori_loop(cell):
    return jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, x: cell(x) + i, x))(1.0)


@row("`jax.lax.while_loop` of 3: its body")
def _while_body(cell):
    return jax.jit(lambda x: jax.lax.while_loop(lambda x: x < 8, cell, x))(1.0)


@row("`jax.lax.while_loop` of 2: its condition")
def _while_condition(cell):
    return jax.jit(lambda x: jax.lax.while_loop(lambda x: cell(x) < 8, lambda x: x + 2, x))(1.0)


@row("`jax.lax.cond`: the branch taken")
def _cond(cell):
    return jax.jit(lambda x: jax.lax.cond(x > 0, cell, lambda x: cell(x + 10), x))(-1.0)


@row("`jax.lax.switch`: the branch taken")
def _switch(cell):
    branches = [lambda x, i=i: cell(x + 10 * i) for i in range(3)]
    return jax.jit(lambda i, x: jax.lax.switch(i, branches, x))(1, 1.0)


# --- devices ----------------------------------------------------------------------------------------

_section = "Several devices"

PARTS: dict[str, Any] = {"in_specs": P("x"), "out_specs": P("x")}
SINCE_0_10_2 = {
    ORDERED: Older(
        (0, 10, 2), "Refused by XLA in JAX before 0.10.2.", r"JaxRuntimeError: .*RET_CHECK"
    )
}


def two_devices() -> Mesh:
    return Mesh(np.array(jax.devices("cpu")[:2]), ("x",))


def sharded() -> jax.Array:
    return jax.device_put(jnp.arange(4.0), NamedSharding(two_devices(), P("x")))


@row("`jit` over an array on another device")
def _other_device(cell):
    return jax.jit(cell)(jax.device_put(three(), jax.devices("cpu")[1]))


@row("`jit` over a sharded array: all of it at once", older=SINCE_0_10_2)
def _sharded(cell):
    return jax.jit(cell)(sharded())


@row("`jit` over a replicated array", older=SINCE_0_10_2)
def _replicated(cell):
    return jax.jit(cell)(jax.device_put(three(), NamedSharding(two_devices(), P())))


@row("... `sharding=`, the device that calls", columns=WITH_RESULTS, older=SINCE_0_10_2)
def _sharding(cell):
    device = SingleDeviceSharding(jax.devices("cpu")[1])
    return jax.jit(lambda x: cell(x, sharding=device))(sharded())


@row("... `ordered=True`", columns=(DEBUG,))
def _ordered_sharded(cell):
    return jax.jit(lambda x: cell(x, ordered=True))(sharded())


@row("... `partitioned=True`: 2 devices, each its part", columns=(DEBUG,))
def _partitioned(cell):
    return jax.jit(lambda x: cell(x, partitioned=True))(sharded())


@row("... a mesh with explicit axes", older=SINCE_0_10_2)
def _explicit(cell):
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Explicit,), devices=jax.devices("cpu")[:2])
    with jax.set_mesh(mesh):
        return jax.jit(cell)(jax.device_put(jnp.arange(4.0), NamedSharding(mesh, P("x"))))


@row("`jax.shard_map`: 2 devices, each its part", in_order=())
def _shard_map(cell):
    return jax.jit(jax.shard_map(cell, mesh=two_devices(), **PARTS))(sharded())


@row("... `sharding=`", columns=WITH_RESULTS)
def _shard_map_sharding(cell):
    device = SingleDeviceSharding(jax.devices("cpu")[1])
    f = jax.shard_map(lambda x: cell(x, sharding=device), mesh=two_devices(), **PARTS)
    return jax.jit(f)(sharded())


@row("... over one of a mesh's two axes", in_order=())
def _shard_map_one_axis(cell):
    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("x", "y"))
    f = jax.shard_map(cell, mesh=mesh, axis_names={"x"}, **PARTS)
    return jax.jit(f)(jax.device_put(jnp.arange(4.0), NamedSharding(mesh, P("x"))))


# --- values -----------------------------------------------------------------------------------------

_section = "Values"


@row(
    "typed PRNG keys as arguments",
    better=dict.fromkeys(
        COLUMNS,
        Better(
            "The callback gets keys. JAX's own gives it the integers behind them.", r"key<fry>\[\]"
        ),
    ),
)
def _key_argument(cell):
    def last(key):
        data = jax.random.key_data(key) if hasattr(key, "sharding") else key
        return data[..., 1]

    return jax.jit(lambda k: cell(k, body=last, spec=spec("uint32")))(jax.random.key(7))


NO_KEYS = dict.fromkeys(
    COLUMNS, Better("JAX's own refuses typed keys as results (`TypeError`).", r"key<fry>\[\d?\] \[")
)


@row("typed PRNG keys as results", columns=WITH_RESULTS, better=NO_KEYS)
def _key_result(cell):
    key_spec = jax.eval_shape(jax.random.key, 0)
    return jax.jit(lambda x: cell(x, body=lambda _: jax.random.key(7), spec=key_spec))(1.0)


@row('... and `vmap` over 2 (`vmap_method="expand_dims"`)', columns=(IO, PURE), better=NO_KEYS)
def _key_vmap(cell):
    options = {"vmap_method": "expand_dims"} if cell.column == PURE else {}
    keys = jax.random.split(jax.random.key(7), 2)
    key_spec = jax.ShapeDtypeStruct((), keys.dtype)
    return jax.vmap(lambda k: cell(k, body=lambda k: k, spec=key_spec, **options))(keys)


@row("no arguments")
def _no_arguments(cell):
    return jax.jit(lambda x: x + cell(body=lambda: np.float32(3), spec=spec("float32")))(1.0)


@row("pytrees and keywords as arguments")
def _tree_arguments(cell):
    def total(tree, *, scale):
        return (tree["a"] + tree["b"][0]) * scale

    return jax.jit(lambda x: cell({"a": x, "b": (x, None)}, body=total, scale=x))(three())


@row("a string as argument")
def _text_argument(cell):
    def repeated(x, text):
        return x * len(text)

    return jax.jit(lambda x: cell(x, "text", body=repeated, spec=spec("float32", 3)))(three())


@row("several results in a pytree", columns=WITH_RESULTS)
def _tree_result(cell):
    return jax.jit(lambda x: cell(x, body=lambda x: {"a": x, "b": (x * 2, [x * 3])}))(three())


@row("no results", columns=WITH_RESULTS, notes=NOT_NEEDED)
def _no_result(cell):
    return jax.jit(lambda x: (cell(x, body=lambda x: None), x)[1])(three())


@row("arguments and results of zero size", notes=NOT_NEEDED)
def _zero_size(cell):
    return jax.jit(cell)(jnp.zeros((0, 3)))


@row("bool, int8, float16, bfloat16, complex64")
def _dtypes(cell):
    values = [np.ones(2, name) for name in ("bool", "int8", "float16", jnp.bfloat16, "complex64")]
    return jax.jit(lambda xs: cell(xs, body=lambda xs: xs))(values)


@row("x64 off: float64 for float32", columns=WITH_RESULTS)
def _float64(cell):
    return jax.jit(lambda x: cell(x, body=np.float64, spec=spec("float32", 3)))(three())


@row(
    "x64 off: a large int64 for int32",
    columns=WITH_RESULTS,
    better=dict.fromkeys(
        COLUMNS,
        Better(
            "JAX's own wraps it: `2**40 + 3` arrives as 3. A small one is passed by both.",
            r"SpecError: .*expected int32\[\], got int64\[\]",
        ),
    ),
)
def _int64(cell):
    large = np.int64(2**40 + 3)
    return jax.jit(lambda x: cell(x, body=lambda _: large, spec=spec("int32")))(1.0)


@row(
    "x64 off: `result_shape_dtypes` of 64 bits",
    columns=WITH_RESULTS,
    better=dict.fromkeys(
        COLUMNS, Better("JAX's own raises a plain `ValueError`, which this is, too.", "^SpecError")
    ),
)
def _spec64(cell):
    return jax.jit(lambda x: cell(x, body=np.float64, spec=spec("float64", 3)))(three())


@row("x64 on: 64-bit arguments and results")
def _x64(cell):
    with jax.enable_x64(True):
        return jax.jit(cell)(np.arange(3) + 2**40)


@row("donated arguments")
def _donated(cell):
    x = three()
    return jax.jit(cell, donate_argnums=0)(x), np.bool_(x.is_deleted())


@row(
    "a result of another shape",
    columns=WITH_RESULTS,
    better=dict.fromkeys(
        COLUMNS,
        Better(
            "`callback_error` finds the `SpecError`. JAX's own names no callback.",
            r"JaxRuntimeError: SpecError: .*expected float32\[3\], got float32\[2\]",
        ),
    ),
)
def _wrong_shape(cell):
    return jax.jit(lambda x: cell(x, body=lambda x: x[:2], spec=spec("float32", 3)))(three())
