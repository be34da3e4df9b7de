# SPDX-License-Identifier: Apache-2.0
"""Teach a small policy to balance a pole (gymnasium's CartPole-v1), in pools of environments."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from contextlib import AsyncExitStack

import jax

from examples.hosts import open_hosts_or_here
from examples.rollouts import import_gymnasium, make_pools, policy, train


async def run(args: argparse.Namespace) -> list[float]:
    """Train in all pools; returns the mean return of each iteration."""
    device = jax.devices()[0]
    learner = jax.device_put(policy.new_learner(4, 2, args.seed), device)

    def report(iteration: int, mean_return: float) -> None:
        if iteration % 5 == 0 or iteration == 1:
            print(f"iteration {iteration:3}: mean return {mean_return:5.1f}", flush=True)

    async with open_hosts_or_here(args.hosts, [device]) as hosts, AsyncExitStack() as stack:
        pools = make_pools(args.pools, args.count, hosts.devices, latency=args.latency_ms / 1e3)
        for pool in pools:
            await stack.enter_async_context(pool)
        _, returns = await train(pools, learner, args.iterations, seed=args.seed, report=report)
    return returns


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.rollouts", description=__doc__)
    add = parser.add_argument
    add("--iterations", type=int, default=25, help="updates of the policy (%(default)s)")
    add("--pools", type=int, default=2, help="pools of environments (%(default)s)")
    add("--count", type=int, default=16, help="environments in each (%(default)s)")
    add("--hosts", type=int, default=0, help="processes that the pools are in; 0: this one")
    add("--seed", type=int, default=0, help="of the policy and the environments (%(default)s)")
    add("--latency-ms", type=float, default=0, help="SIMULATION: every step takes longer")
    args = parser.parse_args()
    if min(args.iterations, args.pools, args.count) < 1:
        parser.error("--iterations, --pools and --count must be at least 1")
    return args


def main() -> int:
    """Run the program; returns the exit status."""
    args = parse_arguments()
    try:
        import_gymnasium()
    except ModuleNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    start = time.perf_counter()
    returns = asyncio.run(run(args))
    seconds = time.perf_counter() - start
    steps = round(sum(returns) * args.pools * args.count)  # a step's reward is 1
    print(
        f"mean return: {returns[0]:.1f} in the first iteration, {returns[-1]:.1f} in the last\n"
        f"{steps} steps of {args.pools * args.count} environments in {seconds:.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
