# SPDX-License-Identifier: Apache-2.0
"""The rollouts example: the program, its pool beside plain gymnasium, its order and its end."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aiocolocated import TaskGroup, runtime
from examples import rollouts
from examples.rollouts import EnvironmentPool, make_pools, play, policy, train

gymnasium = pytest.importorskip("gymnasium")

ROOT = Path(__file__).parents[2]
NAME = "CartPole-v1"
COUNT = 4

needs_zmq = pytest.mark.skipif(
    importlib.util.find_spec("zmq") is None, reason="host processes need pyzmq"
)


def play_in_a_loop(
    seed: int, params: policy.Params, limit: int
) -> list[list[np.ndarray[Any, Any]]]:
    """What ``play`` does, without pools, coroutines and colocated calls: per step, its four parts."""
    environments = [gymnasium.make(NAME) for _ in range(COUNT)]
    observations = np.stack([e.reset(seed=seed + i)[0] for i, e in enumerate(environments)])
    playing = np.ones(COUNT, bool)
    steps = []
    while playing.any() and len(steps) < limit:
        actions = np.asarray(policy.sample(params, jnp.asarray(observations), seed, len(steps)))
        rewards = np.zeros(COUNT, np.float32)
        before, was_playing = observations.copy(), playing.copy()
        for i in np.flatnonzero(playing):
            observations[i], rewards[i], ended, truncated, _ = environments[i].step(int(actions[i]))
            playing[i] = not (ended or truncated)
        steps.append([before, actions, rewards, was_playing])
    for environment in environments:
        environment.close()
    return steps


class Waits:
    """Stands for the waits of the environments: each is counted, and held until ``release``."""

    def __init__(self) -> None:
        self.held: list[asyncio.Event] = []
        self.counts = threading.Condition()
        self.cancelled = 0

    async def sleep(self, seconds: float) -> None:
        event = asyncio.Event()
        with self.counts:
            self.held.append(event)
            self.counts.notify_all()
        try:
            await event.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def wait_for(self, count: int) -> None:
        """Return when so many wait at the same time (not on the loop)."""
        with self.counts:
            assert self.counts.wait_for(lambda: len(self.held) == count, 20)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    """Takes the place of the example's ``asyncio.sleep``."""
    waits = Waits()
    module = types.SimpleNamespace(sleep=waits.sleep, TaskGroup=asyncio.TaskGroup)
    monkeypatch.setattr(rollouts, "asyncio", module)
    return waits


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EnvironmentPool]]:
    """The pools that were closed on their host."""
    closed: list[EnvironmentPool] = []
    close = EnvironmentPool.close

    def record(self: EnvironmentPool) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(EnvironmentPool, "close", record)
    yield closed
    closed.clear()


# --- the program --------------------------------------------------------------------------------------


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m examples.rollouts``."""
    command = [sys.executable, "-m", "examples.rollouts", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)


@pytest.fixture(scope="module")
def learned() -> str:
    """What the program prints about a few iterations."""
    done = run_program("--iterations", "6", "--count", "8")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_program_learns(learned: str) -> None:
    """A few iterations suffice to see the policy improve."""
    found = re.search(
        r"^mean return: ([\d.]+) in the first iteration, ([\d.]+) in the last$", learned, re.M
    )
    assert found, learned
    assert float(found[2]) > 2 * float(found[1])
    assert re.search(r"^\d+ steps of 16 environments in [\d.]+ s$", learned, re.M)


@needs_zmq
def test_program_learns_the_same_from_host_processes(learned: str) -> None:
    """With a process for each pool the same seeds give the same returns, and so the same steps."""
    done = run_program("--iterations", "6", "--count", "8", "--hosts", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    without_seconds = [
        re.sub(r" in [\d.]+ s$", "", text.strip()) for text in (done.stdout, learned)
    ]
    assert without_seconds[0] == without_seconds[1]


def test_program_names_the_package_that_is_missing(tmp_path: Path) -> None:
    """Without gymnasium the program says what to install, and nothing else."""
    (tmp_path / "gymnasium.py").write_text("raise ModuleNotFoundError(name='gymnasium')")
    command = "import sys; sys.path.insert(0, sys.argv.pop()); "
    command += "from examples.rollouts.__main__ import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", command, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    way = "pip install 'aiocolocated[examples]'"
    assert done.stderr == f"error: examples.rollouts needs gymnasium: {way}\n"


# --- the pool -----------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("limit", [500, 12])
async def test_pool_plays_as_plain_gymnasium(limit: int) -> None:
    """The same seeds give the same observations, actions and rewards, to the last bit."""
    params = policy.new_learner(4, 2, seed=1).params
    expected = await asyncio.to_thread(play_in_a_loop, 11, params, limit)
    (pool,) = make_pools(1, COUNT, jax.devices()[:1])
    async with pool:
        for _ in range(2):  # a pool can be used again
            episodes = await play(pool, params, 11, limit)
            for part, name in enumerate(policy.Episodes._fields):
                found = np.asarray(episodes[part])
                steps = np.stack([step[part] for step in expected])
                assert found.shape[0] == limit
                assert np.array_equal(found[: len(steps)], steps), name
                assert not found[len(steps) :].any(), name
    assert limit == 12 or len({int(n) for n in np.asarray(episodes.playing).sum(axis=0)}) > 1


@pytest.mark.asyncio
async def test_ended_episodes_stay_as_they_are() -> None:
    """After its end an environment is not stepped until the next reset."""
    (pool,) = make_pools(1, 2, jax.devices()[:1])
    async with pool:
        await pool.reset(0)
        step = None
        for _ in range(60):  # falls long before
            before, step = step, await pool.step([0, 0])
        assert step.ended.all()
        assert not step.rewards.any()
        assert np.array_equal(step.observations, before.observations)
        await pool.reset(0)
        step = await pool.step([0, 0])
        assert not step.ended.any()
        assert step.rewards.tolist() == [1, 1]


@pytest.mark.asyncio
async def test_environments_and_pools_wait_at_the_same_time(waits: Waits) -> None:
    """The waits of all environments of all pools overlap."""
    params = policy.new_learner(4, 2).params
    pools = make_pools(2, COUNT, jax.devices()[:1], latency=1.0)
    async with pools[0], pools[1]:
        with pytest.raises(ExceptionGroup) as raised:
            async with TaskGroup() as group:
                for seed, pool in enumerate(pools):
                    group.create_task(play(pool, params, seed))
                await asyncio.to_thread(waits.wait_for, 2 * COUNT)
                raise KeyError("enough")
        assert [type(error) for error in raised.value.exceptions] == [KeyError]
        del raised
    assert waits.cancelled == 2 * COUNT


@pytest.mark.asyncio
async def test_error_of_an_environment_ends_the_training() -> None:
    """What gymnasium raises comes through, and names the action."""
    (pool,) = make_pools(1, 2, jax.devices()[:1])
    async with pool:
        await pool.reset(0)
        with pytest.raises(ExceptionGroup) as raised:
            await pool.step([0, 7])
        assert "7" in str(raised.value.exceptions[0])
        del raised


@pytest.mark.asyncio
async def test_unknown_environment_is_told() -> None:
    """The error of the constructor, which runs on the host, is that of the first call."""
    (pool,) = make_pools(1, 2, jax.devices()[:1], name="NoSuchEnvironment-v0")
    async with pool:
        with pytest.raises(gymnasium.error.NameNotFound):
            await pool.reset(0)


# --- training -----------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_same_seed_same_training(closed: list[EnvironmentPool]) -> None:
    """However tasks and bodies interleave, a seed gives one training; another gives another."""

    async def returns(seed: int) -> tuple[list[float], Any]:
        pools = make_pools(2, COUNT, jax.devices()[:1])
        async with pools[0], pools[1]:
            learner = policy.new_learner(4, 2, seed=0)
            learner, means = await train(pools, learner, 3, seed=seed)
        return means, np.asarray(learner.params["w1"]).tobytes()

    first = await returns(5)
    assert await returns(5) == first
    assert await returns(6) != first
    assert len(closed) == 6


@pytest.mark.asyncio
async def test_policy_may_be_on_another_device() -> None:
    """The policy runs and learns where its weights are."""
    host, device = jax.devices()[:2]
    learner = jax.device_put(policy.new_learner(4, 2), device)
    (pool,) = make_pools(1, COUNT, [host])
    async with pool:
        observations = (await pool.reset(0)).observations
        drawn = await asyncio.to_thread(policy.sample, learner.params, observations, 0, 0)
        assert drawn.devices() == {device}
        learner, _ = await train([pool], learner, 1)
    assert learner.params["w1"].devices() == {device}


@pytest.mark.asyncio
async def test_cancelled_training_leaves_nothing(
    waits: Waits, closed: list[EnvironmentPool]
) -> None:
    """The environments' waits are cancelled, the pools closed, and no call or task is left."""
    before = asyncio.all_tasks()

    async def run() -> None:
        pools = make_pools(2, COUNT, jax.devices()[:1], latency=1.0)
        async with pools[0], pools[1]:
            await train(pools, policy.new_learner(4, 2), 100)

    task = asyncio.create_task(run())
    await asyncio.to_thread(waits.wait_for, 2 * COUNT)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    assert waits.cancelled == 2 * COUNT
    assert len(closed) == 2
    assert runtime.calls() == []
    assert asyncio.all_tasks() == before


def test_improve_prefers_what_paid() -> None:
    """The action that was rewarded becomes more likely, and steps after the end count for nothing."""
    learner = policy.new_learner(4, 2)
    observations = jnp.ones((1, 8, 4))
    actions = jnp.arange(8, dtype=jnp.int32)[None] % 2
    playing = (jnp.arange(8) < 6)[None]
    rewards = (actions == 1).astype(jnp.float32)
    episodes = policy.Episodes(observations, actions, rewards, playing)
    better = policy.improve(learner, episodes)
    spoiled = episodes._replace(actions=jnp.where(playing, actions, 0))
    assert np.array_equal(better.params["w2"], policy.improve(learner, spoiled).params["w2"])

    def preference(params: policy.Params) -> float:
        chances = jax.nn.softmax(policy.logits(params, observations[0, 0]))
        return float(chances[1])

    assert preference(better.params) > preference(learner.params)
