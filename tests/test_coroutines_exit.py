# SPDX-License-Identifier: Apache-2.0
"""How a process ends with coroutine bodies in flight (contract C16)."""

from __future__ import annotations

import sys
import textwrap

import pytest

HEAD = """
import asyncio, sys, time
import jax, jax.numpy as jnp
from aiocolocated import TaskChannel, TaskGroup, colocated_python, from_thread

x = jnp.ones(2)

def say(*words):
    print(" ".join(map(str, words)) + "\\n", end="", flush=True)

@colocated_python
async def sleep(x, seconds, word=None):
    await asyncio.sleep(seconds)
    if word: say(word)
    return x

@colocated_python
async def nested(x):
    await sleep(await plain(x), 0.1)
    say("ended")

@colocated_python
def plain(x):
    time.sleep(0.1)
    return x

@colocated_python
async def in_thread(x):
    await asyncio.sleep(0.2)
    say(await asyncio.to_thread("ended".lower))

@colocated_python
async def clean_up(x):
    say("started")
    try:
        await asyncio.sleep(100)
    finally:
        await asyncio.sleep(0.2)
        say("ended")
"""

IN_FLIGHT = {
    "sleeping": "sleep(x, 0.3, 'ended')",
    "queued": "sleep(x, 0.2); sleep(x, 0.1, 'ended')",
    "nested": "nested(x)",
    "executor": "in_thread(x)",
    "many": "[TaskChannel().submit_nowait(sleep, x, 0.2) for _ in range(50)]; sleep(x, 0.3, 'ended')",
    "dedicated": "TaskChannel(dedicated_thread=True).submit_nowait(sleep, x, 0.3, 'ended')",
}


@pytest.mark.parametrize(
    ("where", "calls"),
    [
        *(("script", calls) for calls in IN_FLIGHT),
        *(("asyncio.run", calls) for calls in ("sleeping", "nested")),
        *(("warm", calls) for calls in ("queued", "executor")),
    ],
)
def test_exit_waits_for_coroutines(calls, where, run_script):
    """The interpreter goes when all bodies have ended, without a word on stderr."""
    if sys.version_info[:2] == (3, 12) and where != "warm":
        pytest.skip("CPython 3.12 starts no thread at exit, and the host's loop needs one")
    if where == "asyncio.run":
        source = f"async def main(): {IN_FLIGHT[calls]}\nasyncio.run(main())\n"
    else:
        source = ("sleep(x, 0).result()\n" if where == "warm" else "") + IN_FLIGHT[calls] + "\n"
    finished = run_script(HEAD + source + "say('main ended')\n").check()
    assert finished.stdout.splitlines() == ["main ended", "ended"]
    assert finished.stderr == ""


def test_exit_waits_for_clean_up(run_script):
    """That of a cancelled coroutine is waited for, too."""
    source = """
        call = clean_up(x)
        while not call.state.name == "RUNNING": time.sleep(0.001)
        time.sleep(0.1)
        call.cancel()
    """
    finished = run_script(HEAD + textwrap.dedent(source)).check()
    assert finished.stdout.splitlines() == ["started", "ended"]
    assert finished.stderr == ""


def test_exit_grace_names_coroutines(run_script):
    """When the grace is over those that still run are named, and the process ends."""
    source = """
        from aiocolocated import configure
        configure(exit_grace=0.3)
        clean_up(x)
        time.sleep(0.2)
    """
    finished = run_script(HEAD + textwrap.dedent(source)).check(1)
    assert "clean_up on host in-process" in finished.stderr
