# SPDX-License-Identifier: Apache-2.0
"""How a process ends: with calls in flight, after a grace, by Ctrl-C, and in a forked child."""

from __future__ import annotations

import re
import signal
import sys
import textwrap
import time

import pytest

HEAD = """
import asyncio, os, signal, sys, threading, time
import jax, jax.numpy as jnp
import aiocolocated
from aiocolocated import (
    CallCancelledError, ForkedProcessError, ShutdownError, TaskChannel, TaskGroup, colocated_python,
    configure, from_thread, open_task_channel, wait_until_ready,
)

x = jnp.ones(2)

def say(*words):
    # In one piece, so that threads do not mix their lines.
    print(" ".join(map(str, words)) + os.linesep, end="", flush=True)

@colocated_python
def sleep(x, seconds, word=None):
    time.sleep(seconds)
    if word: say(word)
    return x

@colocated_python
def stay(x):  # until the test makes a file
    say("running")
    while not os.path.exists("leave"): time.sleep(0.005)
    say("body ended")
    return x

@jax.jit
def chain(x):
    return jax.lax.fori_loop(0, 40, lambda _, y: y @ x * 1e-3, x)

@jax.jit
def endless(x):
    m = jnp.ones((64, 64)) * x[0]  # hours
    return x + jax.lax.fori_loop(0, 2**30, lambda _, y: y @ m * 1e-2, m)[0, 0]
"""


needs_threads_at_exit = pytest.mark.skipif(
    sys.version_info[:2] == (3, 12), reason="CPython 3.12 starts no thread at exit"
)


def script(source: str) -> str:
    return HEAD + textwrap.dedent(source)


# --- waiting for calls in flight ----------------------------------------------------------------------

IN_FLIGHT = {
    "sleeping": "sleep(x, 0.3, 'ended')",
    "queued": "sleep(x, 0.2); sleep(x, 0.1, 'ended')",
    "dependent": "sleep(TaskChannel().submit_nowait(sleep, x, 0.3), 0, 'ended')",
    "computing": """
        m = jnp.ones((600, 600))
        @colocated_python
        def compute(m):
            chain(m).block_until_ready()
            say("ended")
            return m
        compute(m)
    """,
    "compiling": """
        TaskChannel().run(jax.jit(lambda x: jnp.sin(x @ x.T).sum()), jnp.ones((8, 8)))
        sleep(x, 0.1, 'ended')
    """,
    "pending arrays": """
        m = jnp.ones((600, 600))
        fut = colocated_python(lambda m: chain(m))(m)
        import atexit
        atexit.register(lambda: say("ended" if fut.done() else "left"))
    """,
    "nested three deep": """
        @colocated_python
        def middle(x): time.sleep(0.1); return sleep(x, 0.1).result()
        @colocated_python
        def outer(x): time.sleep(0.1); y = middle(x).result(); say("ended"); return y
        outer(x)
    """,
    "nested, waiting for arrays": """
        m = jnp.ones((600, 600))
        inner = colocated_python(lambda m: chain(m))
        @colocated_python
        def outer(m): y = inner(m).result(); say("ended"); return y
        outer(m)
    """,
    "dedicated thread": "TaskChannel(dedicated_thread=True).submit_nowait(sleep, x, 0.3, 'ended')",
}


# Their loop needs a thread. Not before the submitting loop is gone, which would cancel the coroutine.
COROUTINE = """
    @colocated_python
    def body(x):
        while not os.path.exists("over"): time.sleep(0.005)
        from_thread.run(asyncio.sleep, 0.2); say("ended"); return x
    body(x)
"""


@pytest.mark.parametrize(
    ("where", "calls"),
    [
        *(("script", calls) for calls in IN_FLIGHT),
        *(("asyncio.run", calls) for calls in ("queued", "pending arrays")),
        pytest.param("script", "coroutine of a body", marks=needs_threads_at_exit),
        pytest.param("asyncio.run", "coroutine of a body", marks=needs_threads_at_exit),
    ],
)
def test_exit_waits_for_calls(run_script, calls, where):
    """The interpreter ends when every submitted call is over, with its own code and without a word."""
    source = textwrap.dedent(IN_FLIGHT.get(calls, COROUTINE))
    if where == "asyncio.run":
        source = f"async def main():\n{textwrap.indent(source, '    ')}\nasyncio.run(main())"
    source += "\nsay('end')\nopen('over', 'w').close()\n"
    finished = run_script(script(source)).check()
    assert finished.stdout.splitlines() == ["end", "ended"]
    assert finished.stderr == ""


@needs_threads_at_exit
def test_exit_lets_bodies_meet(run_script):
    """Bodies that need a thread each at the same time get them, though the program has ended."""
    finished = run_script(
        script("""
            from aiocolocated.testing import Rendezvous
            meeting = Rendezvous(5)
            @colocated_python
            def meet(x): meeting.wait(20); say("met"); return x
            for _ in range(5): TaskChannel().submit_nowait(meet, x)
        """)
    ).check()
    assert finished.stdout.splitlines() == ["met"] * 5
    assert finished.stderr == ""


def test_exit_keeps_code(run_script):
    """``sys.exit`` with a call in flight waits and keeps its code."""
    finished = run_script(script("sleep(x, 0.2, 'ended'); sys.exit(3)")).check(3)
    assert finished.stdout == "ended\n"


def test_exit_after_unhandled_error(run_script):
    """A program that dies of an error waits for its calls as well."""
    finished = run_script(script("sleep(x, 0.2, 'ended'); 1 / 0")).check(1)
    assert finished.stdout == "ended\n"
    assert "ZeroDivisionError" in finished.stderr


def test_exit_does_not_wait_for_idle_threads(start_script):
    """Workers, dedicated threads, the service thread and the library's loop end at once when idle."""
    running = start_script(
        script("""
            configure(worker_idle_timeout=300)
            async def main():
                async with TaskGroup() as group:
                    for _ in range(8): group.start_soon(sleep, x, 0.05)
            asyncio.run(main())
            channel = TaskChannel(dedicated_thread=True)
            channel.submit_nowait(sleep, x, 0).result()
            from_thread.run(asyncio.sleep, 0)
            threads = [t for t in threading.enumerate() if t.name.startswith("aiocolocated")]
            assert len(threads) >= 5 and not any(t.daemon for t in threads), threads
            say("end")
        """)
    )
    running.wait_for("end")
    assert running.finish(timeout=4).check().stderr == ""


def test_exit_refuses_new_calls(run_script):
    """A thread that outlives the main one gets a clear error, bodies in flight may still call."""
    finished = run_script(
        script("""
            def work():
                try:
                    while True: sleep(x, 0.01).result()
                except ShutdownError as error:
                    say(error)
            threading.Thread(target=work).start()
            @colocated_python
            def outer(x): time.sleep(0.3); y = sleep(x, 0).result(); say("ended"); return y
            outer(x)
        """)
    ).check()
    assert sorted(finished.stdout.splitlines()) == [
        "ended",
        "the interpreter is exiting: no new calls are taken",
    ]


def test_exit_reports_unretrieved_errors(run_script):
    """Errors that nobody looked at are reported once each, also of futures that are still held."""
    finished = run_script(
        script("""
            @colocated_python
            def fail(x, word): raise ValueError(word)
            held = fail(x, "held")
            fail(x, "dropped")
            seen = fail(x, "seen")
            seen.exception()
            fail(x, "late")
        """)
    ).check()
    assert finished.stderr.count("was never retrieved") == 3
    for word, count in {"held": 1, "dropped": 1, "late": 1, "seen": 0}.items():
        assert finished.stderr.count(f"ValueError: {word}") == count


# --- a grace --------------------------------------------------------------------------------------------

ENDLESS = {
    "sleeping": "sleep(x, 60)",
    "computing": """
        @colocated_python
        def compute(x): return endless(x).block_until_ready()
        compute(x)
    """,
    "pending arrays": """
        compute = colocated_python(lambda x: endless(x))
        compute(x)
    """,
    "nested": """
        @colocated_python
        def outer(x): return sleep(x, 60).result()
        outer(x)
    """,
}


@pytest.mark.parametrize("calls", ENDLESS)
def test_exit_after_grace(run_script, calls):
    """After a finite grace output is flushed, what runs is named, and the process ends with code 1."""
    source = textwrap.dedent(ENDLESS[calls])
    begin = time.monotonic()
    finished = run_script(
        script(f"configure(exit_grace=0.3)\n{source}\nprint('not flushed')\ntime.sleep(0.3)\n"),
        timeout=30,
    ).check(1)
    assert time.monotonic() - begin < 25
    assert finished.stdout == "not flushed\n"
    assert "gave 0.3 s (exit_grace); these calls still run" in finished.stderr
    names = {"sleeping": ["sleep"], "nested": ["sleep", "outer"]}
    for name in names.get(calls, ["compute" if calls == "computing" else "<lambda>"]):
        assert f"  {name} on host in-process" in finished.stderr
    assert re.search(r"submitted at .*script_0\.py:\d+\n", finished.stderr)


def test_exit_after_grace_cancels_what_is_queued(run_script):
    """Queued calls never run and are not listed as running."""
    finished = run_script(
        script("""
            configure(exit_grace=0.3)
            @colocated_python
            def never(x): say("never"); return x
            sleep(x, 60)
            never(x)
        """)
    ).check(1)
    assert finished.stdout == ""
    assert "  sleep on host" in finished.stderr
    assert "never" not in finished.stderr


def test_exit_within_grace(run_script):
    """A grace that suffices changes nothing."""
    finished = run_script(script("configure(exit_grace=30); sleep(x, 0.3, 'ended')")).check()
    assert finished.stdout == "ended\n"
    assert finished.stderr == ""


# --- Ctrl-C ---------------------------------------------------------------------------------------------


def test_interrupt_releases_waiting_thread(start_script, tmp_path):
    """Ctrl-C ends ``result()`` at once and leaves the call alone; exit waits for it."""
    running = start_script(
        script("""
            try:
                stay(x).result()
            except KeyboardInterrupt:
                say("released")
        """)
    )
    running.wait_for("running")
    time.sleep(0.3)  # CPython misses a signal that comes just before it begins to wait for a lock
    running.process.send_signal(signal.SIGINT)
    running.wait_for("released")
    (tmp_path / "leave").touch()
    assert running.finish().check().stdout.splitlines() == ["running", "released", "body ended"]


def test_interrupt_ends_exit(start_script):
    """Ctrl-C while exit waits names what runs and ends the process with code 1."""
    running = start_script(
        script("""
            @colocated_python
            def wait_for_exit(x):
                while not aiocolocated._service.exiting: time.sleep(0.005)
                return x
            stay(wait_for_exit(x))
        """)
    )
    running.wait_for("running")
    running.process.send_signal(signal.SIGINT)
    finished = running.finish().check(1)
    assert "exit was interrupted; these calls still run" in finished.stderr
    assert "  stay on host in-process" in finished.stderr


SCOPES = {
    "TaskGroup": "async with TaskGroup() as group:\n fut = group.start_soon(stay, x)",
    "open_task_channel": "async with open_task_channel():\n fut = stay(x)",
}


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("scope", SCOPES)
def test_second_interrupt_leaves_scope(start_script, tmp_path, scope, loop):
    """The first Ctrl-C releases the waiter and the scope waits; the second leaves the scope's wait."""
    if loop == "uvloop":
        pytest.importorskip("uvloop")
    block = textwrap.indent(SCOPES[scope].replace("\n ", "\n    "), "    ")
    running = start_script(
        script(f"""
import {loop}
async def main():
{block}
        try:
            await fut
        except asyncio.CancelledError:
            say("released")
            raise
try:
    with asyncio.Runner(loop_factory={loop}.new_event_loop) as runner:
        runner.run(main())
except KeyboardInterrupt:
    say("left")
""")
    )
    running.wait_for("running")
    running.process.send_signal(signal.SIGINT)
    running.wait_for("released")
    running.process.send_signal(signal.SIGINT)
    running.wait_for("left")
    (tmp_path / "leave").touch()
    finished = running.finish().check()
    assert finished.stdout.splitlines() == ["running", "released", "left", "body ended"]


# --- fork -----------------------------------------------------------------------------------------------
#
# The children end as those of multiprocessing do: after `threading._shutdown`, without finalizing the
# interpreter. That would crash, or hang, in JAX itself as soon as the parent has computed anything.

FORK = """
import multiprocessing, warnings
warnings.simplefilter("ignore")  # JAX and Python >= 3.12 warn of forks
{before}
def in_child():
    {child}
    say("child ends")
    sys.exit(7)
say("forking")
child = multiprocessing.get_context("fork").Process(target=in_child)
child.start()
{parent}
child.join()
say("child", child.exitcode)
"""


def forked(before: str, child: str, parent: str = "") -> str:
    child = textwrap.indent(textwrap.dedent(child), "    ").strip()
    return HEAD + FORK.format(
        before=textwrap.dedent(before), child=child, parent=textwrap.dedent(parent)
    )


def test_fork_refuses_calls_in_child(run_script):
    """In a forked child a call, a wait and the library's loop raise a clear error; it exits cleanly."""
    finished = run_script(
        forked(
            """
            pending = sleep(x, 0.5)
            from_thread.run(asyncio.sleep, 0)
            channel = TaskChannel()
            channel.submit_nowait(sleep, x, 0.5)
            """,
            """
            async def enter():
                async with open_task_channel() as channel:
                    await channel.submit(sleep, x, 0)
            for attempt in (
                lambda: sleep(x, 0),
                lambda: pending.result(),
                lambda: from_thread.run(asyncio.sleep, 0),
                lambda: asyncio.run(enter()),
                lambda: asyncio.run(channel.drain()),
                lambda: asyncio.run(wait_until_ready(pending)),
            ):
                try:
                    attempt()
                except ForkedProcessError as error:
                    say("refused" if str(os.getpid()) in str(error) else error)
            """,
            "say(pending.result()[0])",
        ),
        timeout=30,
    ).check()
    lines = finished.stdout.splitlines()
    assert lines.count("refused") == 6
    assert lines[-1] == "child 7"
    assert "1.0" in lines  # the parent goes on


def test_fork_disables_exit_hook_and_finalizers_in_child(run_script):
    """The child does not wait for the parent's calls at exit and reports none of its errors."""
    finished = run_script(
        forked(
            """
            @colocated_python
            def fail(x): raise ValueError("unseen")
            failed = fail(x)
            while not failed.done(): time.sleep(0.001)
            slow = sleep(x, 1.5, 'parent body ended')
            """,
            """
            global failed
            del failed
            """,
        ),
        timeout=30,
    ).check()
    lines = finished.stdout.splitlines()
    assert lines.index("child ends") < lines.index("child 7") < lines.index("parent body ended")
    assert finished.stderr.count("ValueError: unseen") == 1


def test_fork_with_lock_held_elsewhere(run_script):
    """A child of a busy process finds the library's lock free, whichever thread held it."""
    finished = run_script(
        forked(
            """
            from aiocolocated._settings import LOCK
            sleep(x, 0).result()
            held, let_go = threading.Event(), threading.Event()
            def hold():
                with LOCK: held.set(); let_go.wait(20)
            threading.Thread(target=hold).start()
            held.wait(20)
            """,
            """
            try: sleep(x, 0)
            except ForkedProcessError: say("refused")
            """,
            "let_go.set()",
        ),
        timeout=30,
    ).check()
    assert finished.stdout.splitlines() == ["forking", "refused", "child ends", "child 7"]


def test_fork_before_first_call(run_script):
    """Parent and child both work when nothing of the library had started."""
    source = """
        import multiprocessing, os, sys
        import aiocolocated, jax, jax.numpy as jnp
        from aiocolocated import colocated_python
        f = colocated_python(lambda x: x + 1)
        def use():
            assert f(jnp.ones(2)).result().tolist() == [2, 2]
        child = multiprocessing.get_context("fork").Process(target=use)
        child.start()
        child.join()
        assert child.exitcode == 0
        use()
    """
    assert run_script(source, timeout=30, PYTHONWARNINGS="ignore").check().stderr == ""
