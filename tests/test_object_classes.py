# SPDX-License-Identifier: Apache-2.0
"""Objects (contract C12): which classes can be wrapped, and what of objects does not ship."""

from __future__ import annotations

import contextlib
import pickle
import textwrap
import threading

import jax
import jax.numpy as jnp
import pytest
from object_bodies import (
    SHARED,
    Counter,
    Decorated,
    DecoratedWithArguments,
    outcome,
)

from aiocolocated import (
    ArgumentError,
    NotShippableError,
    colocated_python,
    colocated_python_class,
    configure,
)

pytestmark = pytest.mark.timeout(40)

ColocatedCounter = colocated_python_class(Counter)


@pytest.fixture
def x() -> jax.Array:
    return jnp.arange(3.0)


# --- wrapping classes -------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_decorated_class_ships_by_reference(x):
    """The class under a decorator in an importable module is not copied: it sees its globals."""
    SHARED["here"] = True
    for cls in (Decorated, DecoratedWithArguments):
        async with cls() as obj:
            assert await obj.shared(x) is True
    async with Decorated() as obj:
        assert await obj.own_class(x) == "object_bodies.Decorated"
    assert Decorated.__name__ == "Decorated"
    assert Decorated.__doc__ == "The name stands for the colocated class."
    assert Decorated.__module__ == "object_bodies"
    assert isinstance(Decorated.__wrapped__, type)


@pytest.mark.asyncio
async def test_local_class_ships_by_value(x):
    """A class of a function is copied with what it captures; what it changes there does not show."""
    seen = []

    class Local(Counter):
        def add(self, x: object) -> int:
            seen.append(1)
            return super().add(x) + len(seen)

    async with colocated_python_class(Local)() as local:
        assert await local.add(x) == 2
        assert await local.add(x) == 4
        assert await local.get.specialize(devices=jax.devices("cpu")[:1])() == 2
    assert seen == []


def test_class_of_main_ships_by_value(run_script):
    """A script's own classes work, decorated or not, with ``super()`` and module globals."""
    finished = run_script(
        textwrap.dedent("""
            import asyncio, jax.numpy as jnp
            from aiocolocated import colocated_python_class
            FACTOR = 3
            class Base:
                def __init__(self, start): self.value = start
                def get(self, x): return self.value
            @colocated_python_class
            class Child(Base):
                def get(self, x): return super().get(x) * FACTOR
            class Plain(Base): pass
            async def main():
                async with Child(7) as child, colocated_python_class(Plain)(8) as plain:
                    print(await child.get(jnp.ones(1)), await plain.get(jnp.ones(1)))
            asyncio.run(main())
        """)
    ).check()
    assert finished.stdout == "21 8\n"
    assert finished.stderr == ""


@pytest.mark.asyncio
async def test_wrapping_does_not_change_the_class(x):
    """The plain class still makes plain instances, and may be wrapped twice."""
    before = dict(vars(Counter))
    other = colocated_python_class(Counter, max_concurrency=2)
    assert dict(vars(Counter)) == before
    assert Counter(1).add(x) == 2
    assert other is not ColocatedCounter
    assert other.__wrapped__ is Counter


@pytest.mark.asyncio
async def test_library_class_is_wrapped_as_it_is(x):
    """Methods, attributes and the context manager of a class of somebody else's."""
    import collections

    deque = colocated_python_class(collections.deque, devices=jax.devices("cpu")[:1])
    async with deque([1, 2], maxlen=3) as items:
        await items.append(3)
        await items.append(4)
        assert await items.__len__() == 3
        assert await items[0] == 2
        assert await items.popleft() == 2
        assert await items.maxlen == 3
        assert [item async for item in items] == [3, 4]
    stack = colocated_python_class(contextlib.ExitStack, devices=jax.devices("cpu")[:1])
    async with stack() as one:
        await one.callback(print, end="")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (Counter(), "takes a class"),
        (print, "takes a class"),
        (ColocatedCounter, "is a colocated class already"),
    ],
)
def test_what_is_no_plain_class_is_refused(wrong, words):
    """In words, where it is wrapped."""
    with pytest.raises(ArgumentError, match=words):
        colocated_python_class(wrong)


@pytest.mark.parametrize("limit", [0, -1])
def test_max_concurrency_below_one_is_refused(limit):
    """No method could ever run."""
    with pytest.raises(ValueError, match="max_concurrency must be an int of at least 1"):
        colocated_python_class(Counter, max_concurrency=limit)


def test_isinstance():
    """An object is an instance of the colocated class, not of the plain one."""
    counter = ColocatedCounter()
    assert isinstance(counter, ColocatedCounter)
    assert not isinstance(counter, Counter)
    assert not issubclass(ColocatedCounter, Counter)
    assert ColocatedCounter.unit == counter.unit == "items"


def test_subclassing_is_refused():
    """The plain class is what can be subclassed."""
    with pytest.raises(TypeError, match="subclass the plain one"):

        class Wrong(ColocatedCounter):
            pass

    class Right(ColocatedCounter.__wrapped__):
        pass

    assert colocated_python_class(Right).__name__ == "Right"


@pytest.mark.asyncio
async def test_inherited_methods_are_methods(x):
    """Base classes and mixins count, and the most derived method wins."""

    class Mixin:
        def twice(self, x: object) -> int:
            return self.add(x) + self.add(x)

    class Child(Mixin, Counter):
        def get(self) -> int:
            return -super().get()

    cls = colocated_python_class(Child, devices=jax.devices("cpu")[:1])
    async with cls(1) as child:
        assert await child.twice(x) == 5
        assert await child.get() == -3


# --- what does not ship -----------------------------------------------------------------------------


@colocated_python
def use(x: object, other: object = None) -> object:
    return x


@pytest.mark.asyncio
async def test_objects_are_refused_as_arguments(x):
    """At the call, naming the argument, also inside a tree and for constructors and methods."""
    counter = ColocatedCounter()
    words = "it stays on its host; pass what its methods return"
    for call in (
        lambda: use(x, counter),
        lambda: use(x, {"key": [counter]}),
        lambda: counter.add(counter),
        lambda: ColocatedCounter(counter),
        lambda: ColocatedCounter(step=counter),
    ):
        with pytest.raises(ArgumentError, match=words) as caught:
            call()
        assert "Counter" in str(caught.value)


@pytest.mark.asyncio
async def test_objects_are_refused_as_captures_and_results(x):
    """By the name of the captured variable, at the first call."""
    counter = ColocatedCounter()

    def body(x: object) -> object:
        return counter.get()

    with pytest.raises(NotShippableError, match="captured variable 'counter'") as caught:
        await colocated_python(body)(x)
    assert "stays on its host" in str(caught.value)

    class Holder:
        def read(self, x: object) -> object:
            return counter.get()

    with pytest.raises(NotShippableError, match="counter"):
        await colocated_python_class(Holder)().read(x)
    SHARED["object"] = counter
    with pytest.raises(ArgumentError, match="it stays on its host"):
        await return_shared(x)
    del SHARED["object"]


@colocated_python
def return_shared(x: object) -> object:
    return SHARED["object"]


def test_pickling_and_copying_are_refused():
    """In words: the object is on its host."""
    import copy

    counter = ColocatedCounter()
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="stays on its host and is not shipped"):
            attempt(counter)


class Keeper:
    """Keeps what it is given."""

    def __init__(self, value: object) -> None:
        self.value = value

    def change(self, x: object, more: list[int]) -> list[int]:
        self.value.append(len(more))
        more.append(0)
        return self.value


@pytest.mark.strict_values
@pytest.mark.asyncio
async def test_values_go_by_value_in_strict_mode(x):
    """Arguments of the constructor and of methods, and results, are copies."""
    given, more = [1], [1, 2]
    async with colocated_python_class(Keeper)(given) as keeper:
        result = await keeper.change(x, more)
        assert result == [1, 2]
        result.append("mine")
        assert await keeper.change(x, more) == [1, 2, 2]
    assert given == [1]
    assert more == [1, 2]


@pytest.mark.asyncio
async def test_values_go_by_reference_otherwise(x):
    """In process, without strict mode, nothing is copied."""
    configure(strict=False)
    given = [1]
    async with colocated_python_class(Keeper)(given) as keeper:
        assert await keeper.change(x, []) is given


@pytest.mark.strict_values
@pytest.mark.asyncio
async def test_constructor_argument_that_does_not_pickle_is_refused_in_strict_mode(x):
    """By the call that makes the instance, with the argument's path."""
    keeper = colocated_python_class(Keeper)(threading.Lock())
    error = await outcome(keeper.change(x, []))
    assert isinstance(error, ArgumentError)
    assert "constructor of Keeper" in str(error)
    await keeper.aclose()
