# SPDX-License-Identifier: Apache-2.0
"""A training whose state is worth saving: an MLP on handwritten digits, with Adam."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

Params: TypeAlias = dict[str, jax.Array]


class State(NamedTuple):
    """All that a step depends on, and so all that has to be saved.

    Attributes:
        step: ``i32[]``, steps taken.
        params: ``f32`` weights.
        mean: Adam's running mean of the gradients, as ``params``.
        square: its running mean of their squares, as ``params``.
        key: ``u32[2]``; with ``step`` it decides which images a batch has.
    """

    step: jax.Array
    params: Params
    mean: Params
    square: Params
    key: jax.Array


def new_state(width: int = 512, seed: int = 0) -> State:
    """A network of 64 inputs, two hidden layers and 10 outputs that has learned nothing."""
    key1, key2, key3, key = jax.random.split(jax.random.PRNGKey(seed), 4)
    params = {
        "w1": jax.random.normal(key1, (64, width)) * (2 / 64) ** 0.5,
        "w2": jax.random.normal(key2, (width, width)) * (2 / width) ** 0.5,
        "w3": jax.random.normal(key3, (width, 10)) * (1 / width) ** 0.5,
    }
    zeros = {name: jnp.zeros_like(value) for name, value in params.items()}
    return State(jnp.int32(0), params, zeros, jax.tree.map(jnp.copy, zeros), key)


@jax.jit
def forward(params: Params, images: jax.Array) -> jax.Array:
    """Logits ``f32[n, 10]`` of ``images``: ``f32[n, 64]``."""
    hidden = jax.nn.relu(images @ params["w1"])
    return jax.nn.relu(hidden @ params["w2"]) @ params["w3"]


@partial(jax.jit, donate_argnums=0)
def train_step(state: State, images: jax.Array, labels: jax.Array) -> State:
    """One step of Adam on a batch of 256; the old state is donated."""
    step = state.step + 1
    rows = jax.random.randint(jax.random.fold_in(state.key, step), (256,), 0, len(images))

    def loss(params: Params) -> jax.Array:
        logp = jax.nn.log_softmax(forward(params, images[rows]))
        return -jnp.mean(jnp.take_along_axis(logp, labels[rows, None], axis=1))

    grads = jax.grad(loss)(state.params)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mean, grads)
    square = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state.square, grads)
    rate = 1e-3 * jnp.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    params = jax.tree.map(
        lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), state.params, mean, square
    )
    return State(step, params, mean, square, state.key)


@jax.jit
def accuracy(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Share of the images that are recognised, ``f32[]``."""
    return jnp.mean(forward(params, images).argmax(axis=1) == labels)
