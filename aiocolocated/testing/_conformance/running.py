# SPDX-License-Identifier: Apache-2.0
"""JAX configuration in bodies, coroutine bodies, waiting without a loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import Any

import jax
import numpy as np
import pytest

from aiocolocated import (
    BodyError,
    CallCancelledError,
    DeadlockError,
    TaskChannel,
    TaskGroup,
    as_argument,
    colocated_python,
    device_get,
    device_put,
    gather,
    jax_scope,
)
from aiocolocated.testing._conformance import bodies
from aiocolocated.testing._conformance.base import HostsUnderTest, Suite

OPTIONS: list[tuple[str, Any]] = [
    ("enable_x64", True),
    ("default_matmul_precision", "float32"),
    ("debug_nans", True),
    ("numpy_dtype_promotion", "strict"),
    ("numpy_rank_promotion", "raise"),
    ("default_prng_impl", "rbg"),
    ("disable_jit", True),
    ("threefry_partitionable", False),
]


class Configuration(Suite):
    """What was in force at the call is so in the body, and only there."""

    @pytest.mark.parametrize("function", [bodies.configuration, bodies.configuration_async])
    @pytest.mark.parametrize(("name", "value"), OPTIONS, ids=[name for name, _ in OPTIONS])
    async def test_option_is_in_force(
        self, hosts: HostsUnderTest, name: str, value: Any, function: Any
    ) -> None:
        """Of the thread that submits, and of the task's scope; also after a wait in the body."""
        option = f"jax_{name}"
        look = hosts.on(function)
        outside = await look(option)
        is_async = function is bodies.configuration_async
        assert value != (outside[0] if is_async else outside)
        with getattr(jax, name)(value):
            of_thread = look(option)
        with jax_scope(**{name: value}):
            of_task = await look(option)
        expected = (value, value) if is_async else value
        assert await of_thread == expected
        assert of_task == expected
        assert await look(option) == outside

    async def test_scopes_nest_and_do_not_meet(self, hosts: HostsUnderTest) -> None:
        """The inner one wins; another task sees nothing of it."""
        look = hosts.on(bodies.configuration)
        option = "jax_enable_x64"

        async def task() -> list[bool]:
            with jax_scope(enable_x64=True):
                outer = await look(option)
                with jax_scope(enable_x64=False):
                    inner = await look(option)
                return [outer, inner, await look(option)]

        async def neighbour() -> list[bool]:
            return [await look(option) for _ in range(5)]

        seen, others = await asyncio.gather(task(), neighbour())
        assert seen == [True, False, True]
        assert others == [False] * 5

    async def test_option_does_not_outlive_an_error(self, hosts: HostsUnderTest) -> None:
        """The next call of the channel does not see it."""
        with jax_scope(debug_nans=True), pytest.raises(KeyError):
            await hosts.on(bodies.fail)(KeyError("k"))
        assert await hosts.on(bodies.configuration)("jax_debug_nans") is False

    async def test_mesh_is_in_force(self, hosts: HostsUnderTest) -> None:
        """Of a host's devices, or of all."""
        look = hosts.on(bodies.ambient_mesh)
        n = len(hosts.devices[0])
        with jax_scope(set_mesh=hosts.host_mesh()):
            assert await look() == (("x",), (n,))
        with jax_scope(set_mesh=hosts.mesh):
            assert await look() == (("host", "x"), (len(hosts.devices), n))

    async def test_default_device_is_in_force(self, hosts: HostsUnderTest) -> None:
        """A device of the host, by which arrays of the body are placed."""
        other = hosts.devices[0][1]
        with jax_scope(default_device=other):
            x = await hosts.on(bodies.make)((3,), "float32")
        assert x.devices() == {other}


class Coroutines(Suite):
    """Coroutine bodies run on the event loop of their host."""

    async def test_many_bodies_wait_at_once(self, hosts: HostsUnderTest, key: str) -> None:
        """They hold no threads: two hundred wait for the last one."""

        async def body(key: str, n: int, i: int) -> int:
            bodies.note(key, i)
            async with asyncio.timeout(bodies.TIMEOUT):
                while len(bodies.notes(key)) < n:  # noqa: ASYNC110 # there is nothing to share
                    await asyncio.sleep(0.002)
            return i

        function = hosts.on(body)
        async with TaskGroup() as group:
            for i in range(200):
                group.start_soon(function, key, 200, i)
        assert group.results() == list(range(200))

    async def test_bodies_of_a_channel_follow_each_other(
        self, hosts: HostsUnderTest, key: str
    ) -> None:
        """One that waits keeps those behind it."""

        async def body(key: str, i: int) -> None:
            bodies.note(key, ("in", i))
            await asyncio.sleep(0.001)
            bodies.note(key, ("out", i))

        function = hosts.on(body)
        await gather(*(function(key, i) for i in range(10)))
        seen = await hosts.notes(key)
        assert [tuple(x) for x in seen] == [(w, i) for i in range(10) for w in ("in", "out")]

    async def test_body_uses_what_asyncio_has(self, hosts: HostsUnderTest) -> None:
        """Timeouts, tasks, threads, groups: there is a running loop."""

        async def body() -> list[Any]:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(asyncio.sleep(0.001, i)) for i in range(3)]
            values: list[Any] = [task.result() for task in tasks]
            try:
                async with asyncio.timeout(0.001):
                    await asyncio.sleep(10)
            except TimeoutError:
                values.append("timeout")
            values.append(await asyncio.to_thread(lambda: "thread"))
            return values

        assert await hosts.on(body)() == [0, 1, 2, "timeout", "thread"]

    async def test_body_computes(self, hosts: HostsUnderTest) -> None:
        """With arrays, before and after a wait."""
        x = await device_put(np.arange(3, dtype=np.float32), hosts.device)
        y = await colocated_python(bodies.add_async)(x, 1)
        assert y.devices() == {hosts.device}
        assert (await device_get(y)).tolist() == [1, 2, 3]

    @pytest.mark.no_blocking(False)  # in process the program runs on a worker, and calls back
    async def test_body_runs_a_program_with_callbacks(self, hosts: HostsUnderTest) -> None:
        """Of coroutines, on the host's own loop."""
        assert await hosts.on(bodies.jitted_with_callbacks)(4) == 60.0


class SyncBridge(Suite):
    """Waiting without a loop."""

    def test_result(self, hosts: HostsUnderTest) -> None:
        """It blocks until the value is there, or raises the error."""
        assert hosts.on(bodies.same)([1, "two"]).result(bodies.TIMEOUT) == [1, "two"]
        with pytest.raises(KeyError, match="no"):
            hosts.on(bodies.fail)(KeyError("no")).result(bodies.TIMEOUT)
        error = hosts.on(bodies.fail)(KeyError("no")).exception(bodies.TIMEOUT)
        assert isinstance(error, KeyError)

    def test_calls_of_a_thread_are_in_order(self, hosts: HostsUnderTest, key: str) -> None:
        """As those of a task are."""
        note = hosts.on(bodies.note)
        futures = [note(key, i) for i in range(30)]
        assert futures[-1].result(bodies.TIMEOUT) == 29
        assert hosts.on(bodies.notes)(key).result(bodies.TIMEOUT) == list(range(30))

    def test_result_with_a_timeout(self, hosts: HostsUnderTest, key: str) -> None:
        """It raises, and the call goes on."""
        future = hosts.on(bodies.hold)(key, "value")
        with pytest.raises(TimeoutError):
            future.result(0.02)
        hosts.aside(bodies.open_gate, f"{key}.out").result(bodies.TIMEOUT)
        assert future.result(bodies.TIMEOUT) == "value"

    def test_block_until_ready(self, hosts: HostsUnderTest) -> None:
        """It gives the value; an AttributeError, which JAX would swallow, comes inside another one."""
        future = hosts.on(bodies.make)((3,), "float32")
        assert future.block_until_ready().shape == (3,)
        failed = hosts.on(bodies.fail)(AttributeError("attribute"))
        with pytest.raises(BodyError):
            failed.block_until_ready()

    def test_cancelled_call(self, hosts: HostsUnderTest, key: str) -> None:
        """The one that waits in a thread is released."""
        held = hosts.on(bodies.hold)(key)
        hosts.aside(bodies.pass_gate, f"{key}.in").result(bodies.TIMEOUT)
        assert held.cancel()
        with pytest.raises(CallCancelledError):
            held.result(bodies.TIMEOUT)
        hosts.aside(bodies.open_gate, f"{key}.out").result(bodies.TIMEOUT)

    def test_tree_of_futures(self, hosts: HostsUnderTest) -> None:
        """``jax.block_until_ready`` waits for futures, too."""
        tree = {"a": hosts.on(bodies.make)((2,), "float32"), "b": hosts.on(bodies.same)(1)}
        assert jax.block_until_ready(tree)["a"].done()
        assert tree["b"].result() == 1

    def test_done_callbacks(self, hosts: HostsUnderTest) -> None:
        """They are called, once."""
        called: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future = hosts.on(bodies.same)(5)
        future.add_done_callback(lambda done: called.set_result(done.result()))
        assert called.result(bodies.TIMEOUT) == 5

    def test_threads(self, hosts: HostsUnderTest, key: str) -> None:
        """Each has a channel of its own, so their calls run at once."""
        meet = hosts.on(bodies.meet)
        results: list[Any] = []

        def work(i: int) -> None:
            results.append(meet(key, 3, i).result(bodies.TIMEOUT))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(results) == [0, 1, 2]

    def test_several_loops(self, hosts: HostsUnderTest) -> None:
        """One after the other, and a future of one loop in another."""
        add = hosts.on(bodies.add)

        async def program(n: Any) -> Any:
            first = add(n, 1)
            return await add(as_argument(first), 1)

        assert [asyncio.run(program(i)) for i in range(3)] == [2, 3, 4]

    async def test_blocking_on_the_loop_is_refused(self, hosts: HostsUnderTest, key: str) -> None:
        """An unfinished future on a running loop's thread would never be done."""
        future = hosts.on(bodies.hold)(key)
        await hosts.held(key)
        with pytest.raises(DeadlockError):
            future.result()
        await hosts.release(key)
        await future
        assert future.result() is None

    async def test_channel_of_its_own_body_is_refused(self, hosts: HostsUnderTest) -> None:
        """A body that waits for what is behind itself in a channel of its host."""
        inner = hosts.on(bodies.same)

        def outer() -> str:
            channel = TaskChannel("own")

            def nested() -> str:
                try:
                    channel.submit_nowait(inner, 1).result(bodies.TIMEOUT)
                except DeadlockError:
                    return "refused"
                return "waited"

            answer: str = channel.run(nested).result(bodies.TIMEOUT)
            return answer

        assert await hosts.on(outer)() == "refused"
