# SPDX-License-Identifier: Apache-2.0
"""The table of JAX's transformations against the callbacks, from what its cells give.

``python tests/callback_table.py`` writes the page; ``test_callback_table.py`` has a test per cell, and
one that the page is as they say.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["JAX_NUM_CPU_DEVICES"] = "8"
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
from callback_rows import COLUMNS, DEBUG, ORDERED, ROWS, Row

import aiocolocated

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "callback-table.md"
JAX = {
    "io_callback": jax.experimental.io_callback,
    "pure_callback": jax.pure_callback,
    "debug_callback": jax.debug.callback,
}
# Whose function is called, with what kind of callback.
REFERENCE, *OURS = WAYS = ("JAX's", "plain", "async")

# --- one cell ---------------------------------------------------------------------------------------


class Cell:
    """A callback function with callbacks, as a row uses it; notes the calls."""

    def __init__(self, column: str, way: str) -> None:
        self.column = column
        self.calls: list[str] = []
        self._way = way
        self._kind = column.partition(",")[0]
        self._function = JAX[self._kind] if way == REFERENCE else getattr(aiocolocated, self._kind)
        self._options = {"ordered": True} if column == ORDERED else {}

    def __call__(
        self,
        *args: Any,
        body: Callable[..., Any] = lambda x: x * 2,
        spec: Any = None,
        pause: float = 0.0,
        sharding: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Call the callback.

        Args:
            *args: its arguments.
            body: what it computes; for NumPy, and for JAX where that has to.
            spec: ``result_shape_dtypes``; by default as JAX would compute it.
            pause: seconds that it waits first.
            sharding: for the callback function, as other options.
            **kwargs: options of the function, and keyword arguments of the callback.
        """
        options = {
            k: kwargs.pop(k) for k in ("ordered", "partitioned", "vmap_method") if k in kwargs
        }
        options |= self._options
        if self.column == DEBUG:
            self._function(self._callback(body, pause), *args, **options, **kwargs)
            if spec is not None:
                return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), spec)
            return body(*args, **kwargs)
        if spec is None:
            spec = jax.eval_shape(body, *args, **kwargs)
            spec = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), spec)
        if sharding is not None:
            options["sharding"] = sharding
        return self._function(self._callback(body, pause), spec, *args, **options, **kwargs)

    def _callback(self, body: Callable[..., Any], pause: float) -> Callable[..., Any]:
        def call(args: Any, kwargs: Any) -> Any:
            self.calls.append(described((args, kwargs)))
            args, kwargs = jax.tree.map(
                lambda x: x if not_plain(x) else np.asarray(x), (args, kwargs)
            )
            return body(*args, **kwargs)

        def callback(*args: Any, **kwargs: Any) -> Any:
            if pause:
                time.sleep(pause)
            return call(args, kwargs)

        async def async_callback(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(pause)
            return call(args, kwargs)

        chosen = async_callback if self._way == "async" else callback
        chosen.__qualname__ = "f"  # in messages
        return chosen


def is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def not_plain(x: Any) -> bool:
    return isinstance(x, str) or is_key(x)


def described(tree: Any) -> str:
    """A pytree as text: dtypes, shapes and values."""

    def describe(x: Any) -> str:
        if isinstance(x, str):
            return repr(x)
        data = np.asarray(jax.random.key_data(x) if is_key(x) else x)
        return f"{x.dtype}{list(x.shape)} {data.tolist()}"

    return str(jax.tree.map(describe, tree))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a cell gave; equal where nothing tells two apart.

    Attributes:
        calls: each call's arguments.
        value: with dtypes, shapes, values and shardings.
        error: type and reason of the exception instead.
        kind: its type.
    """

    calls: tuple[str, ...]
    value: str = ""
    error: str = ""
    kind: type[Exception] | None = None

    def __str__(self) -> str:
        return self.error or f"{self.value} after {self.calls}"


@functools.cache
def outcome(row: Row, column: str, way: str) -> Outcome:
    """Run a cell, once per process."""
    cell = Cell(column, way)
    value, error, kind = "", "", None
    try:
        result = row.run(cell)
        jax.block_until_ready(result)
        jax.effects_barrier()
        places = [str(x.sharding) for x in jax.tree.leaves(result) if isinstance(x, jax.Array)]
        value = f"{described(result)} on {places}"
    except Exception as raised:
        error, kind = f"{type(raised).__name__}: {reason_of(raised)}", type(raised)
    calls = cell.calls if column in row.in_order else sorted(cell.calls)
    return Outcome(tuple(calls), value, error, kind)


# Reasons that newer versions of JAX give in other words.
_REWORDED = (("Effects not supported in partial-eval of", "Effects not supported in AD of"),)


def reason_of(error: Exception) -> str:
    """The text of an exception, without what is different each time."""
    found = aiocolocated.callback_error(error)
    if found is not None:  # of a callback: JAX's own text is mostly traceback
        return f"{type(found).__name__}: {found}"
    text = str(error)
    if "CpuCallback error" in text:
        return re.findall(r"^\w+: .*", text, re.MULTILINE)[-1]
    text = text.partition("\n")[0]
    text = re.sub(r":? \[?<[\w.]+ object at 0x.*", "", text)
    text = re.sub(r" at path .*", ".", text)
    for old, new in _REWORDED:
        text = text.replace(old, new)
    return text


# --- the page ---------------------------------------------------------------------------------------

_INTRODUCTION = """\
<!-- Written by `python tests/callback_table.py` from what the tests give. Do not edit. -->
# Callbacks under JAX's transformations

What [`io_callback`, `pure_callback` and `debug_callback`](callbacks.md) do under JAX's transformations:
how often a program calls its callback, or that JAX refuses it. Every cell is a test, with a plain function
and with an `async def`. It compares with JAX's own function of a plain function: the calls and their
arguments (and for ordered ones their order), the result with its dtypes and shardings, or the exception's
type and reason. They are the same, apart from cells with a note that says what the library does better.
A plain function and an `async def` differ in no cell; several calls of an `async def` may overlap where
they have no order, as {py:func}`~aiocolocated.io_callback` says. A dash marks what a callback has not, or
has no use for.
"""

_AFTER = {
    "Differentiation": """
So a `pure_callback` is differentiated by what calls it:

```python
import asyncio

import jax
import numpy as np

from aiocolocated import pure_callback


async def evaluate(x):
    await asyncio.sleep(0.01)  # a solver elsewhere, say
    return np.sin(x), np.cos(x)


@jax.custom_jvp
def f(x):
    return f_and_slope(x)[0]


def f_and_slope(x):
    like_x = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pure_callback(evaluate, (like_x, like_x), x, vmap_method="sequential")


@f.defjvp
def f_jvp(primals, tangents):
    y, slope = f_and_slope(*primals)
    return y, slope * tangents[0]


assert jax.jit(jax.grad(f))(0.0) == 1.0
```
""",
}


def _is_older(row: Row, column: str) -> bool:
    older = row.older.get(column)
    return older is not None and jax.__version_info__ < older.since


def text_of(row: Row, column: str, note: Callable[[str], str]) -> str:
    """A cell of the page.

    Args:
        row: which.
        column: which.
        note: makes a footnote of a text, and gives the mark.
    """
    if column not in row.columns:
        return "\N{EN DASH}"
    (found,) = {outcome(row, column, way) for way in OURS}  # the page says that there is but one
    remarks = [row.better[column].note] if column in row.better else []
    if found.error:
        text = "refused"
        remarks.insert(0, f"`` {re.sub(r'[a-z_]+ of f: ', '', found.error)} ``")
    else:
        text = {0: "no calls", 1: "1 call"}.get(len(found.calls), f"{len(found.calls)} calls")
    if remarks:
        text += note(" ".join(remarks))
    if column in row.older:
        text += note(row.older[column].note)
    if column in row.notes:
        text += note(row.notes[column])
    return text


def page(written: str | None = None) -> str:
    """The page, as the cells say.

    Args:
        written: the page as it is: for cells that give something else in a newer JAX than this one.
    """
    notes: dict[str, int] = {}

    def note(text: str) -> str:
        return f"[^{notes.setdefault(text, len(notes) + 1)}]"

    cells = {} if written is None else _cells_of(written)
    parts = [_INTRODUCTION]
    for section, rows in itertools.groupby(ROWS, lambda row: row.section):
        lines = [f"## {section}", "", "| | " + " | ".join(f"`{c}`" for c in COLUMNS) + " |"]
        lines[-1] = lines[-1].replace(", ordered`", "`, ordered")
        lines.append("|---" * (len(COLUMNS) + 1) + "|")
        for row in rows:
            texts = []
            for column in COLUMNS:
                if _is_older(row, column):
                    note(row.older[column].note)
                    texts.append(cells[row.label, column])
                else:
                    texts.append(text_of(row, column, note))
            lines.append(f"| {row.label} | " + " | ".join(texts) + " |")
        parts.append("\n".join(lines) + "\n" + _AFTER.get(section, ""))
    parts.append("".join(f"[^{number}]: {text}\n" for text, number in notes.items()))
    return "\n".join(parts)


def _cells_of(written: str) -> dict[tuple[str, str], str]:
    cells = {}
    for line in written.splitlines():
        label, *texts = (part.strip() for part in line.strip("|").split("|"))
        if len(texts) == len(COLUMNS):
            cells.update({(label, c): text for c, text in zip(COLUMNS, texts, strict=True)})
    return cells


if __name__ == "__main__":
    old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else None
    PAGE.write_text(page(old), encoding="utf-8")
    print(f"wrote {PAGE}")
