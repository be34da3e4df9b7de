# SPDX-License-Identifier: Apache-2.0
"""Sampling text from a model that lives behind a service (``python -m examples.lookup``).

The model is four tables of character counts, in an SQLite file behind an HTTP server. The loop that
samples is one jitted program. What it looks up depends on what it has just drawn, so nothing can be
fetched ahead: the program has to ask while it runs. In each step it asks for rows of all four tables at
the same time.

``Tables``, ``overlapping`` and ``sampler`` are the parts to copy. ``ngrams.py`` is the model,
``service.py`` the server, ``__main__.py`` the comparison with callbacks that do not overlap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self, TypeAlias

import httpx
import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from aiocolocated import JittedFunction, awaitable_jit, from_thread, io_callback
from examples.lookup import ngrams

Codes: TypeAlias = npt.NDArray[np.uint8]
LookUp: TypeAlias = Callable[[jax.Array], jax.Array]
Sampler: TypeAlias = JittedFunction[[jax.Array, Codes], jax.Array]

TIMEOUT = 30.0  # seconds for an answer; a callback that waits for ever holds its program for ever


class UnknownKey(LookupError):
    """A table has no row for a key. The arguments are the name of the table and the key."""

    def __str__(self) -> str:
        return "table {} has no key {!r}".format(*self.args)


def path_of(contexts: Codes) -> str:
    """Where to ask for the rows of contexts: their length is the name of the table."""
    return f"/tables/{contexts.shape[1]}"


def rows_of(reply: httpx.Response, contexts: Codes) -> ngrams.Rows:
    """The rows in an answer, ``f32[texts, characters]``.

    Raises:
        UnknownKey: there is none for one of the contexts.
        httpx.HTTPStatusError: the service failed.
    """
    if reply.status_code == 404:
        raise UnknownKey(contexts.shape[1], reply.json()["unknown key"])
    return ngrams.dense(reply.raise_for_status().json())


class Tables:
    """A client of the service for coroutine callbacks; ``async with`` closes it."""

    def __init__(self, address: str) -> None:
        # It connects when it is first used, and belongs to that loop then: the one of the callbacks.
        # There are no certificates to load, as there is no TLS.
        self._client = httpx.AsyncClient(base_url=address, timeout=TIMEOUT, verify=False)

    async def rows(self, contexts: jax.Array) -> ngrams.Rows:
        """Counts ``f32[texts, characters]`` of what follows contexts ``u8[texts, order]``; a callback."""
        codes = np.asarray(contexts)
        return rows_of(await self._client.post(path_of(codes), json=ngrams.decode(codes)), codes)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        # On that loop. In a thread without a loop, from_thread takes the library's.
        await asyncio.to_thread(from_thread.run, self._client.aclose)


def spec_of(contexts: jax.Array) -> jax.ShapeDtypeStruct:
    """What a lookup returns."""
    return jax.ShapeDtypeStruct((contexts.shape[0], ngrams.CHARACTERS), jnp.float32)


def overlapping(tables: Tables) -> LookUp:
    """Lookups that overlap: all that do not need each other's rows are under way together."""
    return lambda contexts: io_callback(tables.rows, spec_of(contexts), contexts)


def in_order(tables: Tables) -> LookUp:
    """The same coroutines, each after the one before."""
    return lambda contexts: io_callback(tables.rows, spec_of(contexts), contexts, ordered=True)


def blocking(client: httpx.Client) -> LookUp:
    """What there is without this library: JAX's callback of a function that blocks."""

    def look_up(contexts: jax.Array) -> ngrams.Rows:
        codes = np.asarray(contexts)
        return rows_of(client.post(path_of(codes), json=ngrams.decode(codes)), codes)

    return lambda contexts: jax.experimental.io_callback(look_up, spec_of(contexts), contexts)


def sampler(look_up: LookUp, length: int) -> Sampler:
    """A program that continues texts.

    Args:
        look_up: gives rows ``f32[texts, characters]`` for contexts ``u8[texts, order]``.
        length: characters to add.

    Returns:
        ``sample(key, prompts)``, to be awaited; prompts are ``u8[texts, ngrams.LONGEST]``, and the
        result is ``u8[texts, length]``.
    """

    def step(context: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = [look_up(context[:, -order:]) for order in ngrams.ORDERS]  # four that overlap
        drawn = ngrams.draw(key, rows)
        return jnp.concatenate([context[:, 1:], drawn[:, None]], axis=1), drawn

    @awaitable_jit
    def sample(key: jax.Array, prompts: Codes) -> jax.Array:
        _, drawn = jax.lax.scan(step, jnp.asarray(prompts), jax.random.split(key, length))
        return drawn.T

    return sample
