# SPDX-License-Identifier: Apache-2.0
"""The model: a small MLP on scikit-learn's bundled handwritten digits, in plain JAX."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

Params: TypeAlias = dict[str, jax.Array]
Images: TypeAlias = npt.NDArray[np.float32]
Labels: TypeAlias = npt.NDArray[np.int64]

HELD_OUT = 400
"""Images that training never sees, out of 1797."""


class Digits(NamedTuple):
    """The data set, split. Images are ``f32[n, 64]`` in 0..1, labels ``i64[n]`` in 0..9."""

    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels


def load_digits() -> Digits:
    """Read the digits that scikit-learn bundles and split them, always the same way."""
    # Imported here: a server that finds its weights in a file does not need scikit-learn.
    from sklearn import datasets  # type: ignore[import-untyped, unused-ignore]

    images, labels = map(np.asarray, datasets.load_digits(return_X_y=True))
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(images))
    test, train = order[:HELD_OUT], order[HELD_OUT:]
    return Digits(images[train], labels[train], images[test], labels[test])


@jax.jit
def forward(params: Params, pixels: jax.Array | Images) -> jax.Array:
    """Logits ``f32[n, 10]`` of ``pixels``: ``f32[n, 64]``."""
    hidden = jax.nn.relu(pixels @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def infer(params: Params, pixels: bytes) -> Images:
    """Run the model where its parameters live, from ``f32[1, 64]`` as bytes to ``f32[1, 10]``.

    With an accelerator these are two transfers, on a CPU-only machine next to nothing.
    """
    images = np.frombuffer(pixels, np.float32).reshape(1, 64)
    return np.asarray(forward(params, images))


def train(digits: Digits, *, steps: int = 1500, batch: int = 128, seed: int = 0) -> Params:
    """Train with Adam. The loop is one compiled program and takes a second or two on a CPU."""
    key1, key2, key3 = jax.random.split(jax.random.key(seed), 3)
    params: Params = {
        "w1": jax.random.normal(key1, (64, 128)) * (2 / 64) ** 0.5,
        "b1": jnp.zeros(128),
        "w2": jax.random.normal(key2, (128, 10)) * (1 / 128) ** 0.5,
        "b2": jnp.zeros(10),
    }
    images, labels = jnp.asarray(digits.train_images), jnp.asarray(digits.train_labels, jnp.int32)

    def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        logp = jax.nn.log_softmax(forward(params, x))
        return -jnp.mean(jnp.take_along_axis(logp, y[:, None], axis=1))

    def step(
        state: tuple[Params, Params, Params], rows_and_t: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[Params, Params, Params], None]:
        params, m, v = state
        rows, t = rows_and_t
        grads = jax.grad(loss)(params, images[rows], labels[rows])
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
        v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, grads)
        # Decoupled weight decay (1e-4) keeps the small model from memorising the training set.
        params = jax.tree.map(
            lambda p, m, v: (
                p * (1 - 1e-4) - 2e-3 * (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8)
            ),
            params,
            m,
            v,
        )
        return (params, m, v), None

    @jax.jit
    def run(params: Params) -> Params:
        zeros = jax.tree.map(jnp.zeros_like, params)
        rows = jax.random.randint(key3, (steps, batch), 0, len(images))
        times = jnp.arange(1, steps + 1, dtype=jnp.float32)
        (params, _, _), _ = jax.lax.scan(step, (params, zeros, zeros), (rows, times))
        return params

    trained: Params = run(params)
    return trained


def load_or_train(path: Path | None) -> Params:
    """Read the weights from ``path``, or train them (and write them there, for the next start)."""
    if path is not None and path.exists():
        with np.load(path) as stored:
            return {name: jnp.asarray(value) for name, value in stored.items()}
    params = train(load_digits())
    if path is not None:
        # Written beside and renamed, so that another process never reads half a file.
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".npz", delete=False) as file:
            np.savez(file, allow_pickle=False, **{k: np.asarray(v) for k, v in params.items()})
        os.replace(file.name, path)
    return params
