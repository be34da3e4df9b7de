# SPDX-License-Identifier: Apache-2.0
"""JAX configuration (contract C11): what was in force at submission is so in the body, and only there."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import mesh as jax_mesh, source_info_util
from jax.experimental.compute_on import compute_on
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Mesh

from aiocolocated import (
    BodyError,
    TaskChannel,
    TaskGroup,
    _compat,
    colocated_python,
    jax_scope,
    open_task_channel,
)
from aiocolocated._contexts import SCOPE_OPTIONS
from aiocolocated.testing import Gate

TIMEOUT = 20.0  # seconds; only a bug takes that long

USER = jax.make_user_context("nobody")
VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


# --- every thread-local context of JAX --------------------------------------------------------------


class Case(NamedTuple):
    """A context, and how code sees that it is in force."""

    enter: Callable[[], Any]
    read: Callable[[], Any]


def state(name: str, value: Any) -> Case:
    """An option of JAX's configuration."""
    option = name if name.startswith("jax") else f"jax_{name}"
    return Case(lambda: getattr(jax, name)(value), lambda: getattr(jax.config, option))


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices("cpu")).reshape(2, 4), ("a", "b"))


@contextlib.contextmanager
def legacy_mesh():
    """``with mesh:``, of which newer JAX warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with mesh():
            yield


def equation_context() -> Any:
    """The context that JAX keeps with an equation that is traced now."""
    return jax.make_jaxpr(lambda x: x + 1)(1.0).eqns[0].ctx


def host_compute() -> Any:
    return compute_on("device_host")


VALUES = {
    "check_tracer_leaks": True,
    "debug_infs": True,
    "debug_key_reuse": True,
    "debug_nans": True,
    "default_matmul_precision": "highest",
    "default_prng_impl": "rbg",
    "disable_jit": True,
    "enable_checks": True,
    "enable_custom_prng": True,
    "enable_x64": True,
    "explain_cache_misses": True,
    "legacy_prng_key": "error",
    "log_compiles": True,
    "no_execution": True,
    "no_tracing": True,
    "numpy_dtype_promotion": "strict",
    "numpy_rank_promotion": "raise",
    "softmax_custom_jvp": True,
    "threefry_partitionable": False,
    "transfer_guard_device_to_device": "log",
    "transfer_guard_device_to_host": "disallow",
    "transfer_guard_host_to_device": "disallow",
}

CASES = {name: state(name, value) for name, value in VALUES.items()} | {
    "default_device": Case(
        lambda: jax.default_device(jax.devices("cpu")[3]),
        lambda: jax.config.jax_default_device,
    ),
    "transfer_guard": Case(
        lambda: jax.transfer_guard("disallow"),
        lambda: (
            jax.config.jax_transfer_guard_host_to_device,
            jax.config.jax_transfer_guard_device_to_device,
            jax.config.jax_transfer_guard_device_to_host,
        ),
    ),
    "checking_leaks": Case(jax.checking_leaks, lambda: jax.config.jax_check_tracer_leaks),
    "set_mesh": Case(
        lambda: jax.set_mesh(mesh()),
        lambda: (jax.sharding.get_mesh(), jax.sharding.get_abstract_mesh()),
    ),
    "use_abstract_mesh": Case(
        lambda: jax.sharding.use_abstract_mesh(mesh().abstract_mesh), jax.sharding.get_abstract_mesh
    ),
    "with mesh": Case(legacy_mesh, lambda: jax_mesh.thread_resources.env.physical_mesh),
    "named_scope": Case(
        lambda: jax.named_scope("scope"), lambda: str(source_info_util.current_name_stack())
    ),
    "set_xla_metadata": Case(
        lambda: set_xla_metadata(key="value"), lambda: dict(equation_context().xla_metadata or {})
    ),
    "user context": Case(lambda: USER("somebody"), lambda: USER.value),
}
if len(inspect.signature(compute_on).parameters) == 1:  # no context manager since JAX 0.12
    CASES["compute_on"] = Case(host_compute, lambda: equation_context().compute_type)

# What else this JAX has of the kind; the guards that name one thread are not carried to another.
OTHERS = sorted(
    name
    for name, value in vars(jax).items()
    if type(value) is type(jax.enable_x64) and name not in CASES and name != "thread_guard"
)
for name in OTHERS:
    if isinstance(getattr(jax, name).value, bool):
        CASES[name] = state(name, not getattr(jax, name).value)
    elif name == "array_garbage_collection_guard":
        CASES[name] = state(name, "log")


def observe(x, which):
    """What a body sees of a context."""
    return CASES[which].read()


def observe_and_fail(x, which, error):
    raise error(CASES[which].read())


def thread(x):
    return threading.get_ident()


def pristine(x):
    """Whether nothing is in force on a worker."""
    return _compat.capture_config() is None


look = colocated_python(observe)
look_and_fail = colocated_python(observe_and_fail)
name_thread = colocated_python(thread)
is_pristine = colocated_python(pristine)

every = pytest.mark.parametrize("which", sorted(CASES))


def numbers():
    return jnp.arange(3.0)


@pytest.fixture
def channel():
    """A channel with a thread of its own, which is new."""
    channel = TaskChannel(dedicated_thread=True)
    yield channel
    asyncio.run(channel.aclose())


def test_every_context_is_covered():
    """A context manager that a newer JAX has must get its case."""
    covered = set(CASES) | {"thread_guard"}
    assert set(OTHERS) <= covered, "give it a value above, and add it to capture_config"
    assert set(SCOPE_OPTIONS) <= covered


@every
def test_context_is_in_force_in_the_body(which, channel):
    """On a fresh thread and on a reused one, as it was at submission, and gone for the next call."""
    case = CASES[which]
    x = numbers()
    before = case.read()
    with case.enter():
        inside = case.read()
        futures = [channel.submit_nowait(look, x, which)]
        futures.append(channel.submit_nowait(look, x, which))
    assert inside != before, "the case shows nothing"
    assert case.read() == before
    futures.append(channel.submit_nowait(look, x, which))
    with case.enter():
        futures.append(channel.submit_nowait(look, x, which))
    futures.append(channel.submit_nowait(look, x, which))
    results = [future.result(TIMEOUT) for future in futures]
    assert results == [inside, inside, before, inside, before]
    assert channel.submit_nowait(is_pristine, x).result(TIMEOUT) is True


@every
@pytest.mark.parametrize("error", [KeyError, StopIteration, SystemExit])
def test_context_is_gone_after_an_exception(which, error, channel):
    """Also when the body raises, whatever it raises; the error shows what was in force."""
    case = CASES[which]
    x = numbers()
    before = case.read()
    with case.enter():
        inside = case.read()
        failing = channel.submit_nowait(look_and_fail, x, which, error)
    raised = failing.exception(TIMEOUT)
    if error is not KeyError:
        assert type(raised) is BodyError
        raised = raised.__cause__
    assert type(raised) is error
    assert raised.args == (inside,)
    assert channel.submit_nowait(look, x, which).result(TIMEOUT) == before
    assert channel.submit_nowait(is_pristine, x).result(TIMEOUT) is True


@every
def test_context_is_in_force_for_run(which, channel):
    """TaskChannel.run treats its callable like a body."""
    case = CASES[which]
    before = case.read()
    with case.enter():
        inside = case.read()
        first = channel.run(case.read)
    second = channel.run(case.read)
    assert first.result(TIMEOUT) == inside
    assert second.result(TIMEOUT) == before


@every
def test_context_is_captured_at_submission(which, channel):
    """Not when the body starts, and not where its future is awaited."""
    case = CASES[which]
    x = numbers()
    gate = Gate()
    before = case.read()
    channel.run(gate.wait)
    with case.enter():
        inside = case.read()
        first = channel.submit_nowait(look, x, which)
    second = channel.submit_nowait(look, x, which)
    with case.enter():
        gate.open()
        assert second.result(TIMEOUT) == before
    assert first.result(TIMEOUT) == inside


@pytest.mark.parametrize("which", sorted(SCOPE_OPTIONS))
def test_scope_puts_every_option_in_force(which, channel):
    """jax_scope does for bodies what JAX's own context does, and touches nothing on this thread."""
    case = CASES[which]
    value = {
        "default_device": jax.devices("cpu")[3],
        "named_scope": "scope",
        "set_mesh": mesh(),
        "transfer_guard": "disallow",
    }.get(which, VALUES.get(which))
    x = numbers()
    before = case.read()
    with case.enter():
        inside = case.read()
    with jax_scope(**{which: value}):
        assert case.read() == before
        assert _compat.capture_config() is None
        futures = [channel.submit_nowait(look, x, which), channel.run(case.read)]
    futures.append(channel.submit_nowait(look, x, which))
    assert [future.result(TIMEOUT) for future in futures] == [inside, inside, before]
    assert channel.submit_nowait(is_pristine, x).result(TIMEOUT) is True


# --- effects, and all at once -----------------------------------------------------------------------


def compute(x):
    return jnp.arange(2.0), jnp.zeros(2), jnp.zeros(2, int)


def test_contexts_do_what_they_say():
    """A body computes as its submitter would have: in 64 bits, on the default device, unjitted."""
    function = colocated_python(compute)
    device = jax.devices("cpu")[5]
    x = numbers()
    with jax.enable_x64(True), jax.default_device(device):
        wide = function(x)
    narrow = function(x)
    for array in wide.result(TIMEOUT):
        assert array.dtype.itemsize == 8
        assert array.device == device
    for array in narrow.result(TIMEOUT):
        assert array.dtype.itemsize == 4
        assert array.device == jax.devices("cpu")[0]
    with jax.debug_nans(True):
        bad = colocated_python(lambda x: jnp.log(-1.0 - x))(x)
    with pytest.raises(FloatingPointError):
        bad.result(TIMEOUT)
    with jax.set_mesh(mesh()):
        placed = colocated_python(lambda x: jax.device_put(np.ones(8), jax.P("a")))(x)
    assert placed.result(TIMEOUT).sharding.mesh.shape == {"a": 2, "b": 4}


def test_many_contexts_at_once(channel):
    """They are all in force together, and all gone together."""
    together = ["enable_x64", "default_matmul_precision", "named_scope", "default_device",
                "numpy_rank_promotion", "set_mesh", "user context", "debug_infs", "with mesh"]  # fmt: skip
    x = numbers()
    with contextlib.ExitStack() as stack:
        for which in together:
            stack.enter_context(CASES[which].enter())
        inside = [CASES[which].read() for which in together]
        futures = [channel.submit_nowait(look, x, which) for which in together]
        twice = jax.named_scope("inner")
        with twice:
            nested = channel.submit_nowait(look, x, "named_scope")
    assert [future.result(TIMEOUT) for future in futures] == inside
    assert nested.result(TIMEOUT) == "scope/inner"
    assert channel.submit_nowait(is_pristine, x).result(TIMEOUT) is True


def test_body_of_a_body_sees_the_same(channel):
    """A nested call captures what is in force in the body that makes it."""

    def outer(x):
        inner = look(x, "enable_x64").result(TIMEOUT)
        with jax.default_matmul_precision("highest"):
            precision = look(x, "default_matmul_precision").result(TIMEOUT)
        return inner, precision, look(x, "default_matmul_precision").result(TIMEOUT)

    function = colocated_python(outer)
    x = numbers()
    with jax.enable_x64(True):
        assert function(x).result(TIMEOUT) == (True, "highest", None)
    with jax_scope(enable_x64=True):
        assert function(x).result(TIMEOUT) == (True, "highest", None)
    assert function(x).result(TIMEOUT) == (False, "highest", None)


@pytest.mark.asyncio
async def test_every_way_to_submit_captures():
    """Calls, submit, start_soon and map; what was held back by a limit, too."""
    x = numbers()
    async with asyncio.timeout(TIMEOUT):
        async with open_task_channel(max_pending=10) as channel, TaskGroup(limit=1) as group:
            with jax.enable_x64(True):
                futures = [look(x, "enable_x64"), channel.submit_nowait(look, x, "enable_x64")]
                started = [group.start_soon(look, x, "enable_x64") for _ in range(3)]
            with jax_scope(enable_x64=True):
                futures.append(await channel.submit(look, x, "enable_x64"))
                mapped = await look.map([x, x, x], ["enable_x64"] * 3, limit=1)
            plain = await look.map([x], ["enable_x64"])
            results = [await future for future in futures]
        assert results == [True] * 3
        assert [future.result() for future in started] == [True] * 3
        assert mapped == [True] * 3
        assert plain == [False]


@pytest.mark.asyncio
async def test_submit_that_waits_for_room_captures_at_the_call():
    """The configuration is that of the call expression, not that of the moment room is granted."""
    x = numbers()
    gate = Gate()
    async with asyncio.timeout(TIMEOUT), open_task_channel(max_pending=1) as channel:
        running = channel.run(gate.wait)
        queued = await channel.submit(look, x, "enable_x64")
        with jax_scope(enable_x64=True):
            waiting = asyncio.ensure_future(channel.submit(look, x, "enable_x64"))
            while not channel.statistics().waiting_for_room:
                await asyncio.sleep(0.001)
        gate.open()
        assert await (await waiting) is True
        assert await queued is False
        await running


# --- what is not carried ----------------------------------------------------------------------------


@pytest.mark.skipif(not _compat.HAS_EXECUTION_STREAMS, reason="this JAX has no execution streams")
def test_execution_stream_is_the_channels_own(channel):
    """The submitter's stream is not carried: that of the channel orders its work."""
    before = _compat.get_execution_stream()
    _compat.set_execution_stream(12345)
    try:
        seen = channel.run(_compat.get_execution_stream)
        again = channel.run(_compat.get_execution_stream)
    finally:
        _compat.set_execution_stream(before)
    assert seen.result(TIMEOUT) == again.result(TIMEOUT) == channel._stream
    other = TaskChannel().run(_compat.get_execution_stream).result(TIMEOUT)
    assert other not in (12345, channel._stream)


def test_thread_guard_is_not_carried(channel):
    """The guard is about the thread that set it: bodies run on others all the same."""
    x = numbers()
    with jax.thread_guard(True):
        future = channel.submit_nowait(colocated_python(lambda x: x + 1), x)
        seen = channel.run(lambda: jax.thread_guard.value)
    np.testing.assert_array_equal(np.asarray(future.result(TIMEOUT)), [1, 2, 3])
    assert seen.result(TIMEOUT) is False


def test_configuration_of_the_process_is_no_context(channel):
    """jax.config.update is for all threads: bodies see it as it is when they run."""
    before = jax.config.jax_numpy_rank_promotion
    jax.config.update("jax_numpy_rank_promotion", "warn")
    try:
        x = numbers()
        assert _compat.capture_config() is None
        assert channel.submit_nowait(look, x, "numpy_rank_promotion").result(TIMEOUT) == "warn"
        with jax.numpy_rank_promotion("raise"):
            inside = channel.submit_nowait(look, x, "numpy_rank_promotion")
        assert inside.result(TIMEOUT) == "raise"
        assert channel.submit_nowait(look, x, "numpy_rank_promotion").result(TIMEOUT) == "warn"
    finally:
        jax.config.update("jax_numpy_rank_promotion", before)
    assert channel.submit_nowait(look, x, "numpy_rank_promotion").result(TIMEOUT) == before


def test_override_back_to_an_earlier_process_value_is_carried(channel):
    """A context counts also if it says what the process said before, once a call has seen the change."""
    x = numbers()
    before = jax.config.jax_numpy_rank_promotion
    assert channel.submit_nowait(look, x, "numpy_rank_promotion").result(TIMEOUT) == before
    jax.config.update("jax_numpy_rank_promotion", "warn")
    try:
        assert channel.submit_nowait(look, x, "numpy_rank_promotion").result(TIMEOUT) == "warn"
        with jax.numpy_rank_promotion(before):
            inside = channel.submit_nowait(look, x, "numpy_rank_promotion")
        assert inside.result(TIMEOUT) == before
    finally:
        jax.config.update("jax_numpy_rank_promotion", before)


# --- contextvars ------------------------------------------------------------------------------------


def read_and_set(x, value):
    before = VARIABLE.get()
    VARIABLE.set(value)
    return before


def test_context_variables_are_captured(channel):
    """The body runs in a copy of the submitter's context, made at the call; nothing comes back."""
    function = colocated_python(read_and_set)
    x = numbers()
    token = VARIABLE.set("submitter")
    try:
        first = channel.submit_nowait(function, x, "body")
        VARIABLE.set("later")
        second = channel.submit_nowait(function, x, "body")
        ran = channel.run(VARIABLE.get)
        assert first.result(TIMEOUT) == "submitter"
        assert second.result(TIMEOUT) == "later"
        assert ran.result(TIMEOUT) == "later"
        assert VARIABLE.get() == "later"
    finally:
        VARIABLE.reset(token)
    assert channel.submit_nowait(function, x, "body").result(TIMEOUT) == "unset"


@pytest.mark.asyncio
async def test_context_variables_of_tasks_do_not_mix():
    """Each task's bodies see that task's values."""
    function = colocated_python(read_and_set)
    x = numbers()

    async def task(name):
        VARIABLE.set(name)
        return [await function(x, "body") for _ in range(5)]

    async with asyncio.timeout(TIMEOUT):
        results = await asyncio.gather(*(task(f"task {i}") for i in range(4)))
    assert results == [[f"task {i}"] * 5 for i in range(4)]
    assert VARIABLE.get() == "unset"


# --- scopes and tasks -------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_interleaved_scopes_of_two_tasks_never_mix():
    """A enters, B enters, A leaves, B leaves: each sees its own and, afterwards, none."""
    x = numbers()
    turns = {name: asyncio.Event() for name in ("B in", "A out", "B out", "end")}

    async def see():
        precision = await look(x, "default_matmul_precision")
        return precision, await look(x, "enable_x64")

    async def a():
        seen = [await see()]
        with jax_scope(enable_x64=True):
            seen.append(await see())
            turns["B in"].set()
            await turns["A out"].wait()
            seen.append(await see())
        seen.append(await see())
        turns["B out"].set()
        await turns["end"].wait()
        return [*seen, await see()]

    async def b():
        seen = [await see()]
        await turns["B in"].wait()
        with jax_scope(default_matmul_precision="highest"):
            seen.append(await see())
            turns["A out"].set()
            await turns["B out"].wait()
            seen.append(await see())
        seen.append(await see())
        turns["end"].set()
        return seen

    async with asyncio.timeout(TIMEOUT):
        seen_by_a, seen_by_b = await asyncio.gather(a(), b())
    none = (None, False)
    assert seen_by_a == [none, (None, True), (None, True), none, none]
    assert seen_by_b == [none, ("highest", False), ("highest", False), none]
    assert await see() == none


@pytest.mark.asyncio
async def test_nothing_of_a_scope_is_in_force_on_the_loop():
    """While a task waits inside a scope, the loop's thread has JAX's plain configuration."""
    x = numbers()
    gate = Gate()
    held = colocated_python(hold)
    async with asyncio.timeout(TIMEOUT):
        with jax_scope(enable_x64=True, default_device=jax.devices("cpu")[3]):
            future = held(x, gate)
            waiting = asyncio.ensure_future(wait(future))
            await asyncio.sleep(0)
            assert _compat.capture_config() is None
            assert jnp.zeros(1).dtype == jnp.float32
        assert await look(x, "enable_x64") is False if gate.is_open else True
        gate.open()
        dtype, device = await waiting
    assert dtype == np.float64
    assert device == jax.devices("cpu")[3]


def hold(x, gate):
    gate.wait()
    array = jnp.zeros(1)
    return array.dtype, array.device


async def wait(future):
    return await future


@pytest.mark.asyncio
async def test_child_tasks_inherit_a_scope():
    """A task that is started inside a scope keeps it, also after its parent has left."""
    x = numbers()
    left = asyncio.Event()

    async def child():
        before = await look(x, "enable_x64")
        await left.wait()
        return before, await look(x, "enable_x64")

    async with asyncio.timeout(TIMEOUT):
        with jax_scope(enable_x64=True):
            task = asyncio.create_task(child())
            await asyncio.sleep(0)
        left.set()
        assert await task == (True, True)
        assert await look(x, "enable_x64") is False


@pytest.mark.asyncio
async def test_scopes_nest():
    """The inner one wins; leaving it brings the outer one back."""
    x = numbers()
    async with asyncio.timeout(TIMEOUT):
        with jax_scope(enable_x64=True, default_matmul_precision="float32"):
            with jax_scope(default_matmul_precision="highest"):
                assert await look(x, "default_matmul_precision") == "highest"
                assert await look(x, "enable_x64") is True
                with jax_scope(enable_x64=False):
                    assert await look(x, "enable_x64") is False
            assert await look(x, "default_matmul_precision") == "float32"
        assert await look(x, "default_matmul_precision") is None


@pytest.mark.asyncio
async def test_scope_wins_over_the_thread():
    """A scope is put in force on top of what the submitting thread has."""
    x = numbers()
    with jax.default_matmul_precision("float32"), jax_scope(default_matmul_precision="highest"):
        both = look(x, "default_matmul_precision")
    async with asyncio.timeout(TIMEOUT):
        assert await both == "highest"


@pytest.mark.asyncio
async def test_scope_can_be_entered_again():
    """One scope object serves many times, nested even."""
    x = numbers()
    scope = jax_scope(enable_x64=True)
    async with asyncio.timeout(TIMEOUT):
        for _ in range(2):
            with scope:
                with scope:
                    assert await look(x, "enable_x64") is True
                assert await look(x, "enable_x64") is True
            assert await look(x, "enable_x64") is False


def test_scopes_left_out_of_order_leave_nothing_behind():
    """In one context, too: each takes its own options away and no others."""
    x = numbers()
    first, second = jax_scope(enable_x64=True), jax_scope(default_matmul_precision="highest")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert look(x, "enable_x64").result(TIMEOUT) is False
    assert look(x, "default_matmul_precision").result(TIMEOUT) == "highest"
    second.__exit__(None, None, None)
    assert look(x, "default_matmul_precision").result(TIMEOUT) is None
    assert look(x, "enable_x64").result(TIMEOUT) is False


@pytest.mark.asyncio
async def test_tasks_that_share_a_context_are_not_stuck_with_a_scope():
    """Tasks may be given one context; when all have left their scopes nothing is in force."""
    x = numbers()
    shared = contextvars.copy_context()
    entered, leave = asyncio.Event(), asyncio.Event()

    async def a():
        with jax_scope(enable_x64=True):
            await entered.wait()
        leave.set()

    async def b():
        with jax_scope(default_matmul_precision="highest"):
            entered.set()
            await leave.wait()
            return await look(x, "default_matmul_precision"), await look(x, "enable_x64")

    async with asyncio.timeout(TIMEOUT):
        tasks = [asyncio.create_task(task(), context=shared) for task in (a, b)]
        _, seen = await asyncio.gather(*tasks)
        after = await asyncio.create_task(wait(look(x, "enable_x64")), context=shared)
        shared_call = shared.run(look, x, "enable_x64")
        assert await shared_call is False
    assert seen == ("highest", False)
    assert after is False


def test_scope_of_a_thread():
    """Scripts and threads have scopes as well; other threads do not see them."""
    x = numbers()
    seen = []
    with jax_scope(enable_x64=True):
        other = threading.Thread(target=lambda: seen.append(look(x, "enable_x64").result(TIMEOUT)))
        other.start()
        other.join(TIMEOUT)
        seen.append(look(x, "enable_x64").result(TIMEOUT))
    assert seen == [False, True]


def test_scope_refuses_what_it_does_not_know():
    """An option by another name, or one that this JAX lacks, is refused in words at once."""
    with pytest.raises(
        TypeError, match=r"jax_scope\(\) has no option 'x64'; there are: .*enable_x64"
    ):
        jax_scope(x64=True)
    with pytest.raises(TypeError, match="no option 'thread_guard'"):
        jax_scope(thread_guard=True)


def test_scope_with_a_wrong_value_fails_the_call(channel):
    """JAX's own error of a value that it does not take arrives with the call; nothing is left behind."""
    x = numbers()
    with jax_scope(enable_x64=True, default_matmul_precision="no such precision"):
        future = channel.submit_nowait(look, x, "enable_x64")
    with pytest.raises(ValueError, match="no such precision"):
        future.result(TIMEOUT)
    assert channel.submit_nowait(is_pristine, x).result(TIMEOUT) is True


# --- pool threads -----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_contexts_do_not_stay_on_pool_threads():
    """Workers that served configured, failing and plain calls in turn are pristine in the end."""
    x = numbers()
    async with asyncio.timeout(TIMEOUT):
        for i in range(30):
            which = sorted(CASES)[i % len(CASES)]
            with CASES[which].enter():
                futures = [look(x, which), look_and_fail(x, which, KeyError)]
            for future in futures:
                with contextlib.suppress(KeyError):
                    await future
            assert await is_pristine(x) is True
    assert _compat.capture_config() is None
