# SPDX-License-Identifier: Apache-2.0
"""JAX's transformations against the callbacks (contract C18): each cell of the documentation's table."""

from __future__ import annotations

import re

import callback_table
import jax
import numpy as np
import pytest
from callback_rows import ROWS, VMAP_METHODS, Row
from callback_table import OURS, REFERENCE, outcome

from aiocolocated import pure_callback

CELLS = [
    pytest.param(row, column, way, id=f"{row.run.__name__[1:]}-{column.replace(', ', '-')}-{way}")
    for row in ROWS
    for column in row.columns
    for way in OURS
]


@pytest.mark.parametrize(("row", "column", "way"), CELLS)
def test_cell(row: Row, column: str, way: str) -> None:
    """The same as JAX's own function of a plain function gives, or what the row says is better."""
    expected = outcome(row, column, REFERENCE)
    found = outcome(row, column, way)
    better, older = row.better.get(column), row.older.get(column)
    if better is None:
        assert found == expected
    else:
        assert found == outcome(row, column, OURS[0])  # whatever the callback is
        assert re.search(better.shows, str(found))
        assert not re.search(better.shows, str(expected))
        assert len(found.calls) == len(expected.calls) or expected.error
        if found.kind and expected.kind:
            assert issubclass(found.kind, expected.kind)
        if not (found.kind or expected.kind):
            assert found.value == expected.value
    if older is not None:
        assert bool(re.match(older.refused, found.error)) == (jax.__version_info__ < older.since)


def test_vmap_methods_are_those_of_jax() -> None:
    """The table has every method that the JAX in use has."""
    with pytest.raises(ValueError, match="allowed methods") as caught:
        pure_callback(
            lambda x: x, jax.ShapeDtypeStruct((), np.float32), 1.0, vmap_method="none such"
        )
    assert set(re.findall(r"'(\w+)'", str(caught.value))) == set(VMAP_METHODS)


def test_page_is_as_the_cells_say() -> None:
    """`python tests/callback_table.py` would change nothing."""
    written = callback_table.PAGE.read_text(encoding="utf-8")
    assert callback_table.page(written) == written
