# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning over pools of environments (``python -m examples.rollouts``).

The environments live on hosts, that of the device or with ``--hosts N`` processes of their own. Many
are in a pool, and their steps are coroutines: while one waits, for a simulator behind a network say, the
others go on. The policy is one program on the device for all environments of a pool. Several pools take
turns: one is stepped while the device works for another.

``EnvironmentPool`` and ``play`` are the parts to copy; ``policy.py`` is the learning, ``__main__.py``
the command line.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aiocolocated import TaskGroup, colocated_python_class, open_task_channel
from examples.rollouts import policy
from examples.rollouts.policy import Episodes, Learner, Params

if TYPE_CHECKING:
    import jax

Observations = npt.NDArray[np.float32]


def import_gymnasium() -> ModuleType:
    """The package of the environments, which this example alone needs."""
    try:
        import gymnasium
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "examples.rollouts needs gymnasium: pip install 'aiocolocated[examples]'",
            name=error.name,
        ) from error
    return gymnasium


@dataclasses.dataclass(frozen=True)
class Step:
    """What a step of all environments of a pool gives.

    A plain value to JAX, unlike a named tuple: the arrays come to the caller with it, from a host
    process too, and are not made into JAX arrays that stay on the host. So small ones cost least.

    Attributes:
        observations: ``f32[n, ...]``.
        rewards: ``f32[n]``; 0 where the episode had ended before.
        ended: ``bool[n]``, whether the episode is over.
    """

    observations: Observations
    rewards: npt.NDArray[np.float32]
    ended: npt.NDArray[np.bool_]


class EnvironmentPool:
    """Environments that are stepped at the same time; each plays one episode after ``reset``.

    Args:
        name: of the environment, as gymnasium knows it.
        count: how many.
        latency: SIMULATION: seconds that every step waits, as for a simulator elsewhere.
    """

    def __init__(self, name: str, count: int, latency: float = 0.0) -> None:
        make = import_gymnasium().make
        self._environments = [make(name) for _ in range(count)]
        self._latency = latency
        shape = self._environments[0].observation_space.shape
        self._observations = np.zeros((count, *shape), np.float32)
        self._ended = np.ones(count, bool)

    async def reset(self, seed: int) -> Step:
        """Begin an episode in each environment, the i-th with ``seed + i``."""
        for i, environment in enumerate(self._environments):
            self._observations[i], _ = environment.reset(seed=seed + i)
        self._ended[:] = False
        rewards = np.zeros(len(self._environments), np.float32)
        return Step(self._observations.copy(), rewards, self._ended.copy())

    async def step(self, actions: Sequence[int]) -> Step:
        """Take an action in each environment where the episode is not over yet."""
        rewards = np.zeros(len(self._environments), np.float32)

        async def step(i: int, action: int) -> None:
            if self._latency:
                await asyncio.sleep(self._latency)
            observation, rewards[i], terminated, truncated, _ = self._environments[i].step(action)
            self._observations[i] = observation
            self._ended[i] = terminated or truncated

        async with asyncio.TaskGroup() as group:
            for i, action in enumerate(actions):
                if not self._ended[i]:
                    group.create_task(step(i, action))
        return Step(self._observations.copy(), rewards, self._ended.copy())

    def close(self) -> None:
        """Close the environments; called when the colocated object is closed."""
        for environment in self._environments:
            environment.close()


def make_pools(
    pools: int,
    count: int,
    hosts: Sequence[jax.Device],
    *,
    name: str = "CartPole-v1",
    latency: float = 0.0,
) -> list[Any]:
    """Pools of ``count`` environments each, on hosts in turns, which are named by CPU devices."""
    on_host = [colocated_python_class(EnvironmentPool, devices=host) for host in hosts]
    return [on_host[i % len(hosts)](name, count, latency) for i in range(pools)]


async def play(pool: Any, params: Params, seed: int, limit: int = 500) -> Episodes:
    """Play an episode in every environment of a pool, to the end or for ``limit`` steps.

    The same seed gives the same episodes, whatever goes on beside.
    """
    steps: list[tuple[policy.Array, ...]] = []
    async with open_task_channel("play") as channel:
        step = await pool.reset(seed)
        while len(steps) < limit and not step.ended.all():
            last = step
            actions = await channel.run(policy.act, params, last.observations, seed, len(steps))
            step = await pool.step(actions.tolist())
            steps.append((last.observations, actions, step.rewards, ~last.ended))
        return await channel.run(policy.stack, steps, limit)


def derive(*numbers: int) -> int:
    """A seed of 31 bits for each sequence of numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0]) >> 1


async def train(
    pools: Sequence[Any],
    learner: Learner,
    iterations: int,
    *,
    seed: int = 0,
    report: Callable[[int, float], None] = lambda iteration, mean_return: None,
) -> tuple[Learner, list[float]]:
    """Play and learn from it, again and again.

    Args:
        pools: of environments; each task has one, so that their steps overlap.
        learner: a policy and the state of its learning, on the device where it is to run.
        iterations: how often.
        seed: of all episodes.
        report: gets the number of each iteration, from 1, and the mean return of its episodes.

    Returns:
        The learner, and the mean returns.
    """
    returns: list[float] = []
    for iteration in range(1, iterations + 1):
        async with TaskGroup() as group:
            for number, pool in enumerate(pools):
                group.create_task(play(pool, learner.params, derive(seed, iteration, number)))
        async with open_task_channel("learn") as channel:
            learner, mean_return = await channel.run(policy.learn, learner, group.results())
        returns.append(float(mean_return))
        report(iteration, returns[-1])
    return learner, returns
