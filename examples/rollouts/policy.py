# SPDX-License-Identifier: Apache-2.0
"""A small policy in plain JAX, and REINFORCE to improve it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

Params: TypeAlias = dict[str, jax.Array]
Array: TypeAlias = jax.Array | npt.NDArray[Any]


class Learner(NamedTuple):
    """Weights of the policy with what Adam keeps about them: means of gradients and squares."""

    params: Params
    mean: Params
    square: Params
    updates: jax.Array


class Episodes(NamedTuple):
    """One episode per environment, step by step.

    Attributes:
        observations: ``f32[steps, n, ...]``.
        actions: ``i32[steps, n]``.
        rewards: ``f32[steps, n]``.
        playing: ``bool[steps, n]``, false after the end of an episode.
    """

    observations: jax.Array
    actions: jax.Array
    rewards: jax.Array
    playing: jax.Array


def new_learner(inputs: int, actions: int, seed: int = 0, width: int = 32) -> Learner:
    """A policy that acts at random."""
    key1, key2 = jax.random.split(jax.random.PRNGKey(seed))
    params = {
        "w1": jax.random.normal(key1, (inputs, width)) * (1 / inputs) ** 0.5,
        "b1": jnp.zeros(width),
        "w2": jax.random.normal(key2, (width, actions)) * 0.01,
        "b2": jnp.zeros(actions),
    }
    zeros = jax.tree.map(jnp.zeros_like, params)
    return Learner(params, zeros, zeros, jnp.float32(0))


def logits(params: Params, observations: Array) -> jax.Array:
    """``f32[..., actions]`` for ``observations``: ``f32[..., inputs]``."""
    return jnp.tanh(observations @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


@jax.jit
def sample(params: Params, observations: Array, seed: int, step: int) -> jax.Array:
    """Actions ``i32[n]``, drawn from the policy; seed and step decide how the dice fall."""
    key = jax.random.fold_in(jax.random.PRNGKey(seed), step)
    return jax.random.categorical(key, logits(params, observations))


def act(
    params: Params, observations: npt.NDArray[np.float32], seed: int, step: int
) -> npt.NDArray[np.int32]:
    """As :func:`sample`, on the device of ``params``, from NumPy to NumPy.

    With an accelerator these are two transfers; on a CPU-only machine next to nothing.
    """
    return np.asarray(sample(params, observations, seed, step))


def stack(steps: Sequence[Sequence[Array]], length: int) -> Episodes:
    """Put steps together, filled up to ``length`` so that one compiled update serves all."""
    parts = [np.stack([np.asarray(part) for part in parts]) for parts in zip(*steps, strict=True)]
    rest = length - len(steps)
    padded = [np.pad(part, [(0, rest)] + [(0, 0)] * (part.ndim - 1)) for part in parts]
    return Episodes(*map(jnp.asarray, padded))


@partial(jax.jit, static_argnames=("rate", "discount"))
def improve(
    learner: Learner, episodes: Episodes, *, rate: float = 0.02, discount: float = 0.99
) -> Learner:
    """One step of REINFORCE; actions count by how much more than usual came after them."""

    def add(later: jax.Array, reward: Any) -> tuple[jax.Array, jax.Array]:
        value = reward + discount * later
        return value, value

    playing = episodes.playing.astype(jnp.float32)
    total = playing.sum()
    _, values = jax.lax.scan(
        add, jnp.zeros_like(episodes.rewards[0]), episodes.rewards, reverse=True
    )
    usual = (values * playing).sum() / total
    spread = jnp.sqrt((jnp.square(values - usual) * playing).sum() / total)
    weights = (values - usual) / (spread + 1e-6) * playing

    def loss(params: Params) -> jax.Array:
        logp = jax.nn.log_softmax(logits(params, episodes.observations))
        taken = jnp.take_along_axis(logp, episodes.actions[..., None], axis=-1)[..., 0]
        return -(taken * weights).sum() / total

    grads = jax.grad(loss)(learner.params)
    updates = learner.updates + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, learner.mean, grads)
    square = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, learner.square, grads)
    scale = rate * jnp.sqrt(1 - 0.99**updates) / (1 - 0.9**updates)
    params = jax.tree.map(
        lambda p, m, v: p - scale * m / (jnp.sqrt(v) + 1e-8), learner.params, mean, square
    )
    return Learner(params, mean, square, updates)


def learn(learner: Learner, played: Sequence[Episodes]) -> tuple[Learner, jax.Array]:
    """Improve the policy by what several pools have played; also their mean return, ``f32[]``."""
    episodes = Episodes(*(jnp.concatenate(parts, axis=1) for parts in zip(*played, strict=True)))
    return improve(learner, episodes), episodes.rewards.sum(axis=0).mean()
