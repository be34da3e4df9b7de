# SPDX-License-Identifier: Apache-2.0
"""Misuse in words: what is used in the wrong way says so, names it, and says what to do instead."""

from __future__ import annotations

import asyncio
import copy
import functools
import pickle

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aiocolocated
from aiocolocated import (
    ArgumentError,
    ArrayFuture,
    DeadlockError,
    TaskChannel,
    TaskGroup,
    TracedCallError,
    as_completed,
    colocated_python,
    gather,
    wait_until_ready,
)

TIMEOUT = 20.0  # seconds; only a bug takes that long


@colocated_python
def double(x):
    return x * 2


def numbers():
    return jnp.arange(3.0)


@pytest.fixture
def future():
    """A finished call; what is refused has nothing to do with waiting."""
    future = double(numbers())
    future.result(TIMEOUT)
    return future


# --- a future is no array ---------------------------------------------------------------------------


USES = {
    "bool": (bool, "has no truth value: await it first"),
    "if": (lambda f: 1 if f else 2, "has no truth value: await it first"),
    "not": (lambda f: not f, "has no truth value: await it first"),
    "and": (lambda f: f and 1, "has no truth value: await it first"),
    "iter": (iter, "is not iterable: await it first"),
    "list": (list, "is not iterable: await it first"),
    "unpacking": (lambda f: [*f], "is not iterable: await it first"),
    "in": (lambda f: 1 in f, "'ArrayFuture' is not iterable"),
    "vmap": (jax.vmap(lambda x: x), "is no array: await it first"),
    "grad": (jax.grad(lambda x: x), "is no array: await it first"),
    "device_put": (jax.device_put, "is no array: await it first"),
    "index": (lambda f: jnp.ones(3)[f], "is no array: await it first"),
    "sin": (jnp.sin, "is no array: await it first"),
    "asarray": (jnp.asarray, "is no array: await it first"),
    "add": (lambda f: jnp.ones(3) + f, "is no array: await it first"),
    "radd": (lambda f: f + jnp.ones(3), "is no array: await it first"),
    "matmul": (lambda f: jnp.matmul(jnp.ones((3, 3)), f), "is no array: await it first"),
    "jit": (jax.jit(lambda x: x), "is no array: await it first"),
    "numpy": (np.asarray, "is no array: await it first"),
    "numpy add": (lambda f: np.ones(3) + f, "is no array: await it first"),
    "numpy sum": (np.sum, "is no array: await it first"),
}


@pytest.mark.parametrize("which", USES)
def test_future_used_as_a_value_is_refused(which, future):
    """Truth, iteration, JAX and NumPy: each says what the future is and that it must be awaited."""
    use, words = USES[which]
    with pytest.raises((TypeError, ValueError), match=words) as caught:
        use(future)
    if which != "in":
        assert "<ArrayFuture double ready" in str(caught.value)
        assert __file__ in str(caught.value)


@pytest.mark.parametrize(
    "use",
    [
        len,
        float,
        int,
        lambda f: f[0],
        lambda f: f + 1,
        lambda f: -f,
        lambda f: f < f,
        lambda f: f(),
        lambda f: f.shape,
        lambda f: next(f),
    ],
)
def test_future_has_no_other_ways_of_a_value(use, future):
    """Everything else that values can do is an error, never something else."""
    with pytest.raises((TypeError, AttributeError), match="ArrayFuture"):
        use(future)


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps, copy.copy, copy.deepcopy])
def test_future_cannot_be_copied(dumps, future):
    """Neither pickled nor copied, alone or inside of something."""
    for value in (future, [future]):
        if dumps is copy.copy and value is not future:
            continue
        with pytest.raises(TypeError, match="an ArrayFuture cannot be pickled: await it"):
            dumps(value)


def test_future_is_not_made_directly():
    """The words name the ways to get one."""
    with pytest.raises(TypeError, match="not made directly: call a colocated function"):
        ArrayFuture()


def test_future_can_be_compared_and_hashed(future):
    """By identity, as other futures."""
    other = double(numbers())
    assert future == future
    assert future != other
    assert len({future, other, future}) == 2
    other.result(TIMEOUT)


def test_future_is_a_leaf_of_trees(future):
    """JAX's tree functions leave it alone."""
    assert jax.tree.leaves({"a": [future]}) == [future]


# --- waiting in the wrong place ---------------------------------------------------------------------


@pytest.mark.asyncio
async def test_jax_block_until_ready_on_the_loop_is_refused():
    """It would stop the loop; a finished future is no wait."""
    gate = aiocolocated.testing.Gate()
    channel = TaskChannel()
    pending = channel.run(gate.wait)
    with pytest.raises(DeadlockError, match="Use 'await fut' instead"):
        jax.block_until_ready([pending])
    gate.open()
    async with asyncio.timeout(TIMEOUT):
        await pending
    assert jax.block_until_ready([pending]) == [pending]
    await channel.aclose()


def test_awaiting_without_a_loop_is_refused():
    """An unfinished future needs one."""
    gate = aiocolocated.testing.Gate()
    pending = TaskChannel().run(gate.wait)
    with pytest.raises(RuntimeError, match="no running event loop"):
        pending.__await__().send(None)
    gate.open()
    pending.result(TIMEOUT)


# --- calls while JAX traces -------------------------------------------------------------------------


def under_scan(f):
    jax.lax.scan(lambda c, x: (c, f(x)), 0.0, jnp.ones(3))


TRANSFORMATIONS = {
    "jit": lambda f: jax.jit(f)(1.0),
    "vmap": lambda f: jax.vmap(f)(jnp.ones(2)),
    "grad": lambda f: jax.grad(f)(1.0),
    "value_and_grad": lambda f: jax.value_and_grad(f)(1.0),
    "jvp": lambda f: jax.jvp(f, (1.0,), (1.0,)),
    "vjp": lambda f: jax.vjp(f, 1.0),
    "linearize": lambda f: jax.linearize(f, 1.0),
    "scan": under_scan,
    "while_loop": lambda f: jax.lax.while_loop(lambda x: False, f, 1.0),
    "fori_loop": lambda f: jax.lax.fori_loop(0, 2, lambda i, x: f(x), 1.0),
    "cond": lambda f: jax.lax.cond(True, f, lambda x: x, 1.0),
    "map": lambda f: jax.lax.map(f, jnp.ones(2)),
    "checkpoint": lambda f: jax.checkpoint(f)(1.0),
    "eval_shape": lambda f: jax.eval_shape(f, 1.0),
    "make_jaxpr": lambda f: jax.make_jaxpr(f)(1.0),
    "nested": lambda f: jax.jit(jax.vmap(jax.grad(f)))(jnp.ones(2)),
}

CALLS = {
    "call": lambda x: double(x),
    "call of a captured array": lambda x: double(CAPTURED[0]),
    "specialized": lambda x: double.specialize(devices=jax.devices("cpu")[0])(x),
    "submit_nowait": lambda x: TaskChannel().submit_nowait(double, x),
    "run": lambda x: TaskChannel().run(double._base.function, x),
}
CAPTURED = []


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("call", ["call", "call of a captured array"])
def test_call_under_a_transformation_is_refused(transformation, call):
    """Also on a concrete array: a traced function runs once, not once for each of its calls."""
    CAPTURED[:] = [numbers()]
    with pytest.raises(TracedCallError, match="double was called while JAX traces") as caught:
        TRANSFORMATIONS[transformation](CALLS[call])
    assert "io_callback" in str(caught.value)
    CAPTURED.clear()
    assert double(numbers()).result(TIMEOUT).shape == (3,)


@pytest.mark.parametrize("call", CALLS)
def test_every_way_to_submit_under_jit_is_refused(call):
    """Calls, specialized ones, and channels."""
    CAPTURED[:] = [numbers()]
    with pytest.raises(TracedCallError, match="double was called while JAX traces"):
        jax.jit(CALLS[call])(1.0)
    CAPTURED.clear()


@pytest.mark.asyncio
async def test_start_soon_under_jit_is_refused():
    """Task groups too, and the group goes on."""
    async with asyncio.timeout(TIMEOUT), TaskGroup() as group:
        for function in (double, double._base.function):
            with pytest.raises(TracedCallError):
                jax.jit(lambda x, function=function: group.start_soon(function, x))(1.0)
        group.start_soon(double, numbers())
    assert len(group.results()) == 1


def test_leaked_tracer_is_refused():
    """An argument that escaped from a trace is no array, though nothing is traced any more."""
    leaked = []
    jax.make_jaxpr(lambda x: leaked.append(x) or x)(1.0)
    for tree in (leaked[0], {"a": [leaked[0], numbers()]}):
        with pytest.raises(TracedCallError, match="double was called while JAX traces"):
            double(tree)


@pytest.mark.asyncio
async def test_waiting_for_a_tracer_is_refused():
    """A tracer is never computed."""
    leaked = []
    jax.make_jaxpr(lambda x: leaked.append(x) or x)(1.0)
    with pytest.raises(TracedCallError, match="wait_until_ready was called while JAX traces"):
        await wait_until_ready([numbers(), leaked[0]])


def test_call_under_jit_that_is_disabled_works():
    """With disable_jit nothing is traced."""
    with jax.disable_jit():
        future = jax.jit(lambda x: [double(x)].pop)(numbers())()
    np.testing.assert_array_equal(np.asarray(future.result(TIMEOUT)), [0, 2, 4])


def test_trace_in_another_thread_does_not_matter():
    """Only the calling thread's own trace counts."""
    results = []

    def traced(x):
        results.append(asyncio.run(asyncio.wait_for(asyncio.to_thread(call), TIMEOUT)))
        return x

    def call():
        return double(numbers()).result(TIMEOUT)

    jax.make_jaxpr(traced)(1.0)
    np.testing.assert_array_equal(np.asarray(results[0]), [0, 2, 4])


# --- arguments of a wrong kind ----------------------------------------------------------------------


async def coroutine():
    """Never run."""


def generator():
    yield


async def agenerator():
    yield


ARGUMENTS = {
    "coroutine": (coroutine, "is a coroutine"),
    "generator": (generator, "is a generator"),
    "asynchronous generator": (agenerator, "is an async_generator"),
    "asyncio future": (lambda: asyncio.get_running_loop().create_future(), "is a _?Future"),
    "asyncio task": (asyncio.current_task, "is a _?Task"),
}


@pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")
@pytest.mark.parametrize("which", ARGUMENTS)
@pytest.mark.asyncio
async def test_argument_that_must_be_awaited_first_is_refused(which):
    """A forgotten await is named with its path, before anything is submitted."""
    make, words = ARGUMENTS[which]
    x = numbers()
    with pytest.raises(
        ArgumentError, match=rf"call of double: args\[0\] \(parameter 'x'\) {words}"
    ):
        double(make())
    with pytest.raises(ArgumentError, match=rf"call of double: args\[0\]\['a'\]\[1\] .*{words}"):
        double({"a": [x, make()]})
    with pytest.raises(ArgumentError, match=rf"kwargs\['x'\] {words}"):
        double(x=[make()][0])


# --- functions of a wrong kind ----------------------------------------------------------------------


class Service:
    """A class whose methods somebody colocates."""

    @colocated_python
    def method(self, x):
        return x

    @staticmethod
    @colocated_python
    def static(x):
        return x * 3


FUNCTIONS = {
    "class": (Service, "got the class Service"),
    "colocated": (double, "is a colocated function already"),
    "number": (3, "takes a function, got 3"),
    "None": (None, "takes a function, got None"),
    "array": (np.ones(1), "takes a function, got"),
}


@pytest.mark.parametrize("which", FUNCTIONS)
def test_function_of_a_wrong_kind_is_refused(which):
    """Decorating says what it takes, and what it got."""
    function, words = FUNCTIONS[which]
    with pytest.raises(ArgumentError) as caught:
        colocated_python(function)
    assert words in str(caught.value)


@pytest.mark.parametrize("function", [coroutine, functools.partial(coroutine), 3, None])
@pytest.mark.asyncio
async def test_channel_refuses_what_it_cannot_run(function):
    """A channel takes colocated functions and ordinary callables."""
    channel = TaskChannel()
    for submit in (channel.run, channel.submit_nowait):
        with pytest.raises(ArgumentError, match="a channel runs ordinary callables, got"):
            submit(function)
    with pytest.raises(ArgumentError, match="a channel runs ordinary callables, got"):
        await channel.submit(function)
    assert channel.statistics().submitted == 0
    await channel.aclose()


# --- methods ----------------------------------------------------------------------------------------


def test_colocated_method_is_refused():
    """An instance's method says what to do instead; a static method is a function like others."""
    with pytest.raises(TypeError, match=r"Service\.method is a colocated function on a class"):
        Service().method(numbers())
    with pytest.raises(TypeError, match="make it a staticmethod or a module-level function"):
        _ = Service().method
    assert Service.method is vars(Service)["method"]
    np.testing.assert_array_equal(
        np.asarray(Service().static(numbers()).result(TIMEOUT)), [0, 3, 6]
    )
    np.testing.assert_array_equal(np.asarray(Service.static(numbers()).result(TIMEOUT)), [0, 3, 6])


@pytest.mark.parametrize("dumps", [pickle.dumps, copy.copy, copy.deepcopy])
def test_colocated_function_cannot_be_pickled(dumps):
    """By the user; other colocated functions may capture it."""
    with pytest.raises(TypeError, match="ColocatedFunction double> cannot be pickled"):
        dumps(double)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, r"double\(\): missing a required argument: 'x'"),
        ((1, 2), {}, r"double\(\): too many positional arguments"),
        ((), {"x": 1, "y": 2}, r"double\(\): got an unexpected keyword argument 'y'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_at_the_call(args, kwargs, words):
    """Before submission, in the words of any Python function."""
    with pytest.raises(TypeError, match=words):
        double(*args, **kwargs)


@colocated_python
def keywords(x, **others):
    """Takes keywords of any name."""
    return sorted(others)


def test_keyword_may_be_named_self():
    """The call's own names are positional-only."""
    assert keywords(numbers(), self=1, fn=2).result(TIMEOUT) == ["fn", "self"]


# --- helpers of the API -----------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, -1])
@pytest.mark.asyncio
async def test_map_with_a_limit_that_makes_no_sense(limit):
    """A limit is at least 1."""
    with pytest.raises(ValueError, match="limit must be at least 1"):
        await double.map([numbers()], limit=limit)


@pytest.mark.asyncio
async def test_as_completed_takes_futures_only():
    """The words show what it got."""
    with pytest.raises(TypeError, match="as_completed takes array futures, got 3"):
        async for _ in as_completed([3]):
            pass


@pytest.mark.asyncio
async def test_gather_of_what_cannot_be_awaited_is_refused():
    """asyncio's own words."""
    with pytest.raises(TypeError, match="awaitable"):
        await gather(3)


def test_create_task_takes_coroutines_and_futures_only():
    """The words show what it got, and the group is not harmed."""

    async def main():
        async with TaskGroup() as group:
            with pytest.raises(
                ArgumentError, match="create_task takes a coroutine or an array future"
            ):
                group.create_task(double)
            group.create_task(double(numbers()))

    asyncio.run(asyncio.wait_for(main(), TIMEOUT))
