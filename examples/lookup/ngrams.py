# SPDX-License-Identifier: Apache-2.0
"""The model: how often each character followed each context of some lengths, in an SQLite file."""

from __future__ import annotations

import collections
import json
import pydoc_data.topics
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

ORDERS = (1, 2, 3, 5)  # lengths of contexts; a table for each
LONGEST = max(ORDERS)
WEIGHTS = (0.1, 0.2, 0.3, 0.4)  # how much each table counts
CHARACTERS = 128  # ASCII

Rows = npt.NDArray[np.float32]


def read_text(length: int = 100_000) -> str:
    """English text that every Python brings along: what ``help()`` knows of the language."""
    text = " ".join(pydoc_data.topics.topics.values()).encode("ascii", "ignore").decode()
    return " ".join(text.split())[:length]


def write_tables(path: Path, text: str) -> int:
    """Write the tables of a text; returns how many rows they have.

    The text counts as a circle, so that something follows every context in it.
    """
    rows: list[tuple[int, str, str]] = []
    for order in ORDERS:
        counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        circle = text + text[:order]
        for start in range(len(text)):
            counts[circle[start : start + order]][circle[start + order]] += 1
        rows += ((order, key, json.dumps(counter)) for key, counter in counts.items())
    with closing(sqlite3.connect(path)) as store, store:
        store.execute("CREATE TABLE counts (name INT, key TEXT, row TEXT, PRIMARY KEY (name, key))")
        store.executemany("INSERT INTO counts VALUES (?, ?, ?)", rows)
    return len(rows)


def encode(texts: Sequence[str]) -> npt.NDArray[np.uint8]:
    """``u8[texts, length]`` of texts of one length."""
    return np.array([list(text.encode("ascii")) for text in texts], np.uint8)


def decode(codes: npt.ArrayLike) -> list[str]:
    """The texts of ``u8[texts, length]``."""
    return [bytes(row).decode("ascii") for row in np.asarray(codes, np.uint8)]


def dense(rows: Sequence[dict[str, int]]) -> Rows:
    """Rows of a table, as they are stored, as ``f32[rows, characters]``."""
    counts = np.zeros((len(rows), CHARACTERS), np.float32)
    for row, stored in zip(counts, rows, strict=True):
        for character, count in stored.items():
            row[ord(character)] = count
    return counts


def draw(key: jax.Array, rows: Sequence[jax.Array]) -> jax.Array:
    """The next character of each text, ``u8[texts]``.

    Args:
        key: typed PRNG key.
        rows: one ``f32[texts, characters]`` for each of ``ORDERS``. Their weighted product decides: a
            character that never followed the longest context cannot follow.
    """
    logits = sum(weight * jnp.log(row) for weight, row in zip(WEIGHTS, rows, strict=True))
    return jax.random.categorical(key, logits).astype(jnp.uint8)
