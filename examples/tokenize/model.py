# SPDX-License-Identifier: Apache-2.0
"""A small language model: the next token from the 16 before it, by an MLP with Adam."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from aiocolocated import awaitable_jit

Params: TypeAlias = dict[str, jax.Array]

CONTEXT = 16  # tokens that the model sees
ROW = CONTEXT + 1  # and the one that it has to predict


class State(NamedTuple):
    """All that a step depends on.

    Attributes:
        step: ``i32[]``, steps taken.
        params: ``f32`` weights.
        mean: Adam's running mean of the gradients, as ``params``.
        square: its running mean of their squares, as ``params``.
    """

    step: jax.Array
    params: Params
    mean: Params
    square: Params


def new_state(vocabulary: int, seed: int = 0, width: int = 32, hidden: int = 64) -> State:
    """A model for so many tokens that has learned nothing."""
    key1, key2, key3 = jax.random.split(jax.random.key(seed), 3)
    inputs = CONTEXT * width
    params = {
        "embedding": jax.random.normal(key1, (vocabulary, width)),
        "w1": jax.random.normal(key2, (inputs, hidden)) * inputs**-0.5,
        "w2": jax.random.normal(key3, (hidden, vocabulary)) * hidden**-0.5,
        "bias": jnp.zeros(vocabulary),
    }
    zeros = {name: jnp.zeros_like(value) for name, value in params.items()}
    return State(jnp.int32(0), params, zeros, jax.tree.map(jnp.copy, zeros))


@awaitable_jit
@partial(jax.jit, donate_argnums=0)
def train_step(state: State, rows: jax.Array) -> tuple[State, jax.Array]:
    """One step of Adam on ``rows``: ``u16[rows, 17]``; also the loss before it, ``f32[]``."""

    def loss(params: Params) -> jax.Array:
        seen = params["embedding"][rows[:, :CONTEXT]].reshape(len(rows), -1)
        logits = jax.nn.relu(seen @ params["w1"]) @ params["w2"] + params["bias"]
        right = rows[:, CONTEXT:].astype(jnp.int32)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), right, axis=1))

    before, grads = jax.value_and_grad(loss)(state.params)
    step = state.step + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mean, grads)
    square = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state.square, grads)
    rate = 1e-2 * jnp.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    params = jax.tree.map(
        lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), state.params, mean, square
    )
    return State(step, params, mean, square), before
