# SPDX-License-Identifier: Apache-2.0
"""What cannot work is refused at once, in words that name the thing and what to do instead."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import math
import operator
import pickle

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aiocolocated import (
    ArgumentError,
    ArrayFuture,
    ColocatedFunction,
    NotShippableError,
    SpecError,
    TaskChannel,
    TaskGroup,
    TracedCallError,
    as_completed,
    colocated_cpu_devices,
    colocated_python,
    from_thread,
    gather,
    jax_scope,
    open_task_channel,
    runtime,
)
from aiocolocated.testing import Gate

pytestmark = pytest.mark.timeout(40)


@colocated_python
def same(x):
    return x


@colocated_python
def wait(x, gate):
    gate.wait()
    return x


async def coroutine_function(x=0):
    return x


@pytest.fixture
def x() -> jax.Array:
    return jnp.arange(3.0)


@pytest.fixture
def future(x):
    """An array future that is not done yet."""
    gate = Gate()
    call = TaskChannel().submit_nowait(wait, x, gate)
    yield call
    gate.open()
    call.result(timeout=10)


def words(error: BaseException) -> str:
    """What a user reads: the message, and those of the errors behind it."""
    text = str(error)
    for other in (error.__cause__, error.__context__):
        if other is not None:
            text += f"\n{other}"
    return text


# --- a future is no value ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [bool, operator.not_, lambda f: f and 1, lambda f: 1 if f else 2, lambda f: any([f])],
    ids=["bool", "not", "and", "if", "any"],
)
def test_truth_of_future_is_refused(future, use):
    """A future is neither true nor false, and the error says to await it."""
    with pytest.raises(TypeError, match="no truth value: await it first") as caught:
        use(future)
    assert "wait" in str(caught.value)  # the function's name
    assert "test_misuse.py" in str(caught.value)


@pytest.mark.parametrize(
    "use",
    [iter, list, tuple, sorted, lambda f: [*f], lambda f: max(f), lambda f: (lambda a, b: 0)(*f)],
    ids=["iter", "list", "tuple", "sorted", "star", "max", "arguments"],
)
def test_iteration_over_future_is_refused(future, use):
    """Forgetting to await before unpacking is told in words."""
    with pytest.raises(TypeError, match=r"not iterable: await it first|argument after \* must be"):
        use(future)


def test_unpacking_future_is_refused(future):
    """Also where the number of targets is known."""
    with pytest.raises(TypeError, match="not iterable: await it first"):
        _, _ = future


@pytest.mark.parametrize(
    "use",
    [
        len,
        lambda f: f[0],
        lambda f: f[:2],
        operator.index,
        float,
        int,
        complex,
        math.sqrt,
        lambda f: [1, 2][f],
        lambda f: range(f),
        lambda f: f + 1,
        lambda f: 1 - f,
        lambda f: -f,
        lambda f: f @ f,
        lambda f: f < f,
        lambda f: 1 in f,
        lambda f: f(),
    ],
)
def test_future_is_no_number_and_no_sequence(future, use):
    """Every operator names the type of what is in its place."""
    with pytest.raises(TypeError, match=r"ArrayFuture|truth value"):
        use(future)


@pytest.mark.parametrize(
    "use",
    [
        jnp.sin,
        jnp.asarray,
        jnp.array,
        lambda f: jnp.add(f, 1),
        lambda f: jnp.stack([f, f]),
        lambda f: jnp.arange(3.0) + f,
        lambda f: f * jnp.arange(3.0),
        lambda f: jnp.arange(3.0) == f,
        jax.device_put,
        jax.jit(lambda x: x),
        jax.vmap(lambda x: x),
        lambda f: jax.eval_shape(lambda x: x, f),
        lambda f: jax.lax.scan(lambda c, x: (c, x), 0.0, f),
    ],
)
def test_future_is_no_array_of_jax(future, use):
    """Functions of JAX say to await it first, or to pass it to a call, which waits for it."""
    with pytest.raises(TypeError) as caught:
        use(future)
    assert "await it first" in words(caught.value)
    assert "TaskChannel.run" in words(caught.value)


@pytest.mark.parametrize("use", [jax.grad(lambda x: x), jax.jit(lambda x: x, static_argnums=())])
def test_future_is_named_by_transformations(future, use):
    """Where JAX has words of its own, they name the future."""
    with pytest.raises(TypeError, match="ArrayFuture"):
        use(future)


@pytest.mark.parametrize(
    "use",
    [
        np.asarray,
        np.array,
        np.sin,
        lambda f: np.asarray(f, dtype=np.float32),
        lambda f: np.stack([f, f]),
        lambda f: np.ones(3) * f,
        lambda f: f - np.ones(3),
        lambda f: np.testing.assert_array_equal(f, [0, 1, 2]),
    ],
)
def test_future_is_no_array_of_numpy(future, use):
    """It does not become an array of one object."""
    with pytest.raises(TypeError, match="no array: await it first"):
        use(future)


def test_finished_future_is_no_value_either(x):
    """Whether it is done makes no difference to what it is."""
    call = same(x)
    call.result(timeout=10)
    for use, message in (
        (bool, "no truth value: await it first"),
        (list, "not iterable: await it first"),
        (np.asarray, "no array: await it first"),
        (jnp.asarray, "no array: await it first"),
        (pickle.dumps, "cannot be pickled: await it"),
    ):
        with pytest.raises(TypeError, match=message):
            use(call)


def test_future_has_no_attributes_of_an_array(future):
    """Code that looks for arrays by their attributes does not find one."""
    for name in ("shape", "dtype", "sum", "at", "T", "__array_interface__", "__len__"):
        assert not hasattr(future, name)
    assert not isinstance(future, jax.Array)


@pytest.mark.parametrize("use", [pickle.dumps, cloudpickle.dumps, copy.copy, copy.deepcopy])
def test_pickling_future_is_refused(future, use):
    """A future belongs to this process; the error says what to do instead."""
    for value in (future, [future])[: 1 if use is copy.copy else 2]:
        with pytest.raises(TypeError, match="cannot be pickled: await it, or pass it as an arg"):
            use(value)


def test_future_is_not_made_directly():
    """ArrayFuture() and its subclasses are no way to make one."""
    with pytest.raises(TypeError, match="not made directly: call a colocated function"):
        ArrayFuture()


@pytest.mark.asyncio
async def test_future_is_no_stream_and_no_context(x):
    """async for, async with and asyncio.create_task refuse it by name."""
    call = same(x)
    with pytest.raises(TypeError, match="ArrayFuture"):
        async for _ in call:
            pass
    with pytest.raises(TypeError, match="ArrayFuture"):
        async with call:
            pass
    with pytest.raises(TypeError, match="a coroutine was expected, got <ArrayFuture"):
        await asyncio.create_task(call)
    await call


def test_captured_future_is_refused(x):
    """A body's code is shipped, and a captured future cannot be; it is named."""
    captured = same(x)
    captured.result(timeout=10)

    @colocated_python
    def body(x):
        return captured, x

    with pytest.raises(NotShippableError, match="'captured' is a ArrayFuture"):
        body(x).result(timeout=10)


# --- under a transformation -------------------------------------------------------------------------

TRANSFORMATIONS = {
    "checkpoint": lambda f, x: jax.checkpoint(f)(x),
    "cond": lambda f, x: jax.lax.cond(True, f, f, x),
    "eval_shape": lambda f, x: jax.eval_shape(f, x),
    "fori_loop": lambda f, x: jax.lax.fori_loop(0, 2, lambda _, x: f(x), x),
    "grad": lambda f, x: jax.grad(lambda x: f(x)[0])(x),
    "jit": lambda f, x: jax.jit(f)(x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "linearize": lambda f, x: jax.linearize(f, x),
    "make_jaxpr": lambda f, x: jax.make_jaxpr(f)(x),
    "scan": lambda f, x: jax.lax.scan(lambda c, x: (c, f(x)), 0.0, x),
    "vmap": lambda f, x: jax.vmap(f)(x),
    "while_loop": lambda f, x: jax.lax.while_loop(lambda x: True, f, x),
}
CALLS = {
    "call": lambda x: same(x),
    "nested argument": lambda x: same({"a": [x, 3]}),
    "keyword": lambda x: same(x=x),
    "no array": lambda x: same.specialize(devices=jax.devices()[:1])(3),
    "concrete array": lambda x: same(constant()),
    "submit_nowait": lambda x: TaskChannel().submit_nowait(same, x),
    "run": lambda x: TaskChannel().run(jnp.sin, x),
    "run, nested": lambda x: TaskChannel().run(dict, a=[x]),
}
_constants = []


def constant():
    """An array that was made outside of any trace."""
    return _constants[0]


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
def test_call_under_transformation_is_refused(x, transformation):
    """Whatever the arguments, the error names the function and says what can be done inside."""
    _constants[:] = [x]
    try:
        for name, call in CALLS.items():
            with pytest.raises(TracedCallError, match="while JAX traces") as caught:
                TRANSFORMATIONS[transformation](call, x)
            assert name.startswith("run") or "same" in str(caught.value)
            assert "io_callback" in str(caught.value)
    finally:
        _constants.clear()
    assert not runtime.calls()
    assert same(x).result(timeout=10) is x  # and nothing is broken


def test_jitted_colocated_function_is_refused(x):
    """The transformation may be applied to the function itself."""
    for transform in (jax.jit, jax.vmap, jax.grad):
        with pytest.raises(TracedCallError, match="same"):
            transform(same)(x)


@pytest.mark.asyncio
async def test_every_way_to_submit_is_refused_while_tracing(x):
    """Also those that await first, or use a channel or a group."""

    def refused(step):
        def traced(x):
            with pytest.raises(TracedCallError, match="traces"):
                step(x)
            return x

        jax.eval_shape(traced, x)

    def submit(x):
        coroutine = channel.submit(same, x)
        try:
            coroutine.send(None)
        finally:
            coroutine.close()

    def map_one(x):
        coroutine = same.map([x])
        try:
            coroutine.send(None)
        finally:
            coroutine.close()

    async with open_task_channel() as channel, TaskGroup() as group:
        refused(submit)
        refused(map_one)
        refused(lambda x: channel.run(jnp.sin, x))
        refused(lambda x: group.start_soon(same, x))
    assert not runtime.calls()


def test_escaped_tracer_is_refused(x):
    """A tracer that outlived its transformation is no array, in calls and in run."""
    escaped = []
    jax.eval_shape(lambda x: escaped.append(x), x)
    with pytest.raises(TracedCallError, match="traces"):
        same(escaped[0])
    with pytest.raises(TracedCallError, match="traces"):
        same(x, [escaped[0]])
    with pytest.raises(TracedCallError, match="traces"):
        TaskChannel().run(jnp.sin, escaped[0])
    escaped.clear()


def test_traced_call_error_is_an_argument_error(x):
    """Who catches errors of arguments, or type errors, catches it as well."""
    assert issubclass(TracedCallError, ArgumentError)
    assert issubclass(TracedCallError, TypeError)


# --- what can be colocated --------------------------------------------------------------------------


class AsyncCallable:
    async def __call__(self, x):
        return x


class GeneratorCallable:
    def __call__(self, x):
        yield x


def generator_function(x):
    yield x


async def async_generator_function(x):
    yield x


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (coroutine_function, "coroutine function"),
        (functools.partial(coroutine_function, 1), "coroutine function"),
        (AsyncCallable(), "coroutine function"),
        (AsyncCallable().__call__, "coroutine function"),
        (generator_function, "generator function"),
        (functools.partial(generator_function), "generator function"),
        (GeneratorCallable(), "generator function"),
        (lambda x: (yield x), "generator function"),
        (async_generator_function, "asynchronous generator function"),
        (AsyncCallable, "class AsyncCallable"),
        (dict, "class dict"),
        (type, "class type"),
        (None, "None"),
        (3, "3"),
        ("text", "'text'"),
        ([coroutine_function], "coroutine_function"),
        (classmethod(len), "classmethod"),
        (property(len), "property"),
    ],
    ids=str,
)
def test_what_is_no_plain_function_is_refused(function, what):
    """The decorator takes plain functions and says what it got."""
    with pytest.raises(ArgumentError, match="colocated_python takes a") as caught:
        colocated_python(function)
    assert what in str(caught.value)


def test_decorating_twice_is_refused():
    """A colocated function is one already, and so is a specialized one."""
    for function in (same, same.specialize(devices=jax.devices()[:1])):
        with pytest.raises(ArgumentError, match="same> is a colocated function already"):
            colocated_python(function)


def test_decorator_takes_the_function_only():
    """There are no options: they are given to specialize()."""
    with pytest.raises(TypeError, match="positional argument"):
        colocated_python()
    with pytest.raises(TypeError, match="devices"):
        colocated_python(len, devices=jax.devices())


@pytest.mark.parametrize("use", [pickle.dumps, cloudpickle.dumps, copy.copy, copy.deepcopy])
def test_pickling_colocated_function_is_refused(use):
    """It belongs to this process; the error says that others may capture it."""
    for function in (same, same.specialize(devices=jax.devices()[:1])):
        with pytest.raises(TypeError, match="same> cannot be pickled; it can be captured"):
            use(function)


def test_colocated_function_is_not_awaitable():
    """Forgetting the call is an error of Python that names the type."""

    async def forget():
        await same

    with pytest.raises(TypeError, match="ColocatedFunction"):
        asyncio.run(forget())


class WithMethods:
    @colocated_python
    def method(self, x):
        return x

    borrowed = same

    @staticmethod
    @colocated_python
    def static(x):
        return x

    @classmethod
    def factory(cls, x):
        return cls.static(x)


def test_colocated_method_is_refused(x):
    """A method would have to ship its object with every call; the error names the method."""
    for name in ("method", "borrowed"):
        with pytest.raises(TypeError, match="methods cannot be colocated one by one"):
            getattr(WithMethods(), name)
    with pytest.raises(TypeError, match=r"WithMethods\.method"):
        WithMethods().method(x)


def test_colocated_function_on_a_class_works_without_an_object(x):
    """Through the class it is the function; as a staticmethod it works through an instance, too."""
    assert WithMethods.borrowed is same
    assert isinstance(WithMethods.method, ColocatedFunction)
    assert WithMethods().static(x).result(timeout=10) is x
    assert WithMethods.factory(x).result(timeout=10) is x


# --- arguments of a wrong kind ----------------------------------------------------------------------


@pytest.mark.parametrize("argument", [3, "text", None, [1.5], {}, jax.ShapeDtypeStruct((3,), "f4")])
def test_call_without_arrays_is_refused(argument):
    """Nothing says where it should run: the error tells how to."""
    with pytest.raises(SpecError, match=r"same was called without arrays.*specialize\(devices="):
        same(argument)


@pytest.mark.parametrize(
    ("arguments", "keywords"), [((), {"y": 1}), ((1, 2), {}), ((), {"gate": None})]
)
def test_arguments_that_do_not_fit_the_signature_fail_the_call(x, arguments, keywords):
    """As in JAX the function itself raises TypeError; the call fails, and the channel goes on."""
    call = same(x, *arguments, **keywords)
    with pytest.raises(TypeError, match="same"):
        call.result(timeout=10)
    assert same(x).result(timeout=10) is x


@pytest.mark.parametrize("function", [coroutine_function, 3, None, "text", [same]], ids=str)
@pytest.mark.asyncio
async def test_channel_runs_callables_only(x, function):
    """run, submit and submit_nowait refuse coroutine functions and what cannot be called."""
    async with open_task_channel() as channel:
        for submit in (channel.run, channel.submit_nowait):
            with pytest.raises(ArgumentError, match="a channel runs ordinary callables"):
                submit(function, x)
        with pytest.raises(ArgumentError, match="a channel runs ordinary callables"):
            await channel.submit(function, x)
        assert channel.statistics().queued == 0


@pytest.mark.asyncio
async def test_channel_does_not_run_futures_and_coroutines(x):
    """Work that is under way already cannot be submitted again."""
    async with open_task_channel() as channel:
        call, coroutine = same(x), coroutine_function()
        for started in (call, coroutine):
            with pytest.raises(ArgumentError, match="a channel runs ordinary callables"):
                channel.run(started)
        coroutine.close()
        await call


@pytest.mark.parametrize("what", [3, None, coroutine_function, same, len], ids=str)
@pytest.mark.asyncio
async def test_group_task_is_a_coroutine_or_future(what):
    """create_task names what it got instead; the group goes on."""
    async with TaskGroup() as group:
        with pytest.raises(ArgumentError, match="create_task takes a coroutine or an array future"):
            group.create_task(what)


@pytest.mark.parametrize("what", [3, None, "text"])
@pytest.mark.asyncio
async def test_group_call_is_a_callable(what, x):
    """start_soon refuses what cannot be called; the group goes on."""
    async with TaskGroup() as group:
        with pytest.raises(ArgumentError):
            group.start_soon(what, x)


@pytest.mark.asyncio
async def test_waiting_for_a_function_is_refused(x):
    """Forgetting the call in gather and as_completed is told at once."""
    with pytest.raises(TypeError, match=r"awaitable|coroutine"):
        await gather(same)
    with pytest.raises(TypeError, match="array futures"):
        async for _ in as_completed([same]):
            pass


def test_coroutine_instead_of_its_function_is_refused():
    """from_thread.run takes the function, not the coroutine, and no plain function."""
    coroutine = coroutine_function()
    with pytest.raises(TypeError, match="callable"):
        from_thread.run(coroutine)
    coroutine.close()
    with pytest.raises(TypeError, match="await"):
        from_thread.run(len, "abc")
    with pytest.raises(TypeError, match="await"):
        from_thread.wait(3)


@pytest.mark.parametrize("wrong", [3, None, [], "cpu", [3], np.zeros((2, 0))], ids=str)
def test_devices_of_a_wrong_kind_are_refused(wrong):
    """colocated_cpu_devices and specialize say what devices may be."""
    with pytest.raises(SpecError, match=r"devices must be a jax\.Device"):
        colocated_cpu_devices(wrong)
    if wrong is not None:
        with pytest.raises(SpecError, match=r"devices must be a jax\.Device"):
            same.specialize(devices=wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_specs": 1}, r"in_specs must be the pair \(args, kwargs\)"),
        ({"in_specs": ()}, r"in_specs must be the pair \(args, kwargs\)"),
        ({"in_specs": ((3,), {})}, "must be a jax.ShapeDtypeStruct, got int"),
        ({"out_specs_fn": 3}, "out_specs_fn must be callable, got 3"),
    ],
)
def test_specialize_refuses_what_are_no_specs(options, message):
    """Each wrong thing is named together with what it should be."""
    with pytest.raises(SpecError, match=message):
        same.specialize(**options)


def test_specialize_refuses_an_array_for_its_spec(x):
    """An array is not its spec."""
    with pytest.raises(SpecError, match=r"\[0\]\[0\] must be a jax.ShapeDtypeStruct, got float32"):
        same.specialize(in_specs=((x,), {}))


def test_specialize_gives_each_thing_once(x):
    """What is specified stays so."""
    spec = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    options = {
        "in_specs": ((spec,), {}),
        "out_specs_fn": lambda x: x,
        "devices": jax.devices()[0],
    }
    for name, value in options.items():
        once = same.specialize(**{name: value})
        with pytest.raises(SpecError, match=f"same: {name} already specified"):
            once.specialize(**{name: value})
    everything = same.specialize(**options)
    with pytest.raises(SpecError, match="already specified"):
        everything.specialize(**options)
    assert everything(x).result(timeout=10) is x


def test_specialize_refuses_unknown_options():
    """A misspelt option is an error of Python; there is no catch-all."""
    with pytest.raises(TypeError, match="out_specs"):
        same.specialize(out_specs=None)
    parameters = inspect.signature(same.specialize).parameters
    assert list(parameters) == ["in_specs", "out_specs_fn", "devices"]


def test_unknown_scope_option_is_refused_with_the_known_ones():
    """A misspelt option of jax_scope names those that exist."""
    with pytest.raises(TypeError, match=r"no option 'enable_x46'.*enable_x64"):
        jax_scope(enable_x46=True)
