# SPDX-License-Identifier: Apache-2.0
"""Objects (contract C12): attributes, operators and the protocols of Python, or the words against them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import operator
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from object_bodies import SHARED, Counter, Noted, outcome

from aiocolocated import ArrayFuture, ObjectClosedError, SpecError, colocated_python_class, gather
from aiocolocated.testing import Gate, Recorder

pytestmark = pytest.mark.timeout(40)


@pytest.fixture
def x() -> jax.Array:
    return jnp.arange(3.0)


@pytest.fixture
def wrap(cpu_devices):
    """Wraps a class for calls without arrays."""
    return functools.partial(colocated_python_class, devices=cpu_devices[:1])


# --- attributes -------------------------------------------------------------------------------------


class Attributes:
    def __init__(self) -> None:
        self.plain = 1
        self.computed = 0

    @property
    def where(self) -> str:
        return threading.current_thread().name

    @functools.cached_property
    def cached(self) -> int:
        self.computed += 1
        return self.computed

    @property
    def array(self) -> jax.Array:
        return jnp.arange(2.0)

    @property
    def numpy(self) -> np.ndarray:
        return np.arange(2, dtype=np.float32)

    @property
    def broken(self) -> None:
        raise KeyError("broken")


@pytest.mark.asyncio
async def test_properties_are_awaited(wrap):
    """``await obj.name`` is a call on a worker, in the order of the channel, and may fail."""
    for cls in (wrap(Attributes), colocated_python_class(Attributes)):  # with and without devices
        async with cls() as obj:
            assert isinstance(future := obj.where, ArrayFuture)
            assert (await future).startswith("aiocolocated-worker")
            assert [await obj.cached for _ in range(3)] == [1, 1, 1]
            np.testing.assert_array_equal(await obj.array, np.arange(2.0))
            with pytest.raises(KeyError, match="broken"):
                await obj.broken


@pytest.mark.asyncio
async def test_property_of_numpy_needs_devices(wrap, cpu_devices):
    """There is no array to tell where the value goes; the error says who can."""
    async with wrap(Attributes)() as obj:
        assert (await obj.numpy).devices() == {cpu_devices[0]}
    async with colocated_python_class(Attributes)() as obj:
        with pytest.raises(
            SpecError, match=r"use colocated_python_class\(\.\.\., devices=\.\.\.\)"
        ):
            await obj.numpy


@pytest.mark.asyncio
async def test_undeclared_attribute_is_refused_in_words(wrap):
    """Nobody knows of it before the instance is made."""
    obj = wrap(Attributes)()
    with pytest.raises(
        AttributeError, match=r"colocated Attributes has no method or property 'plain'"
    ):
        _ = obj.plain
    assert not hasattr(obj, "anything")


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value


@dataclasses.dataclass
class Point:
    x: int
    y: int = 5
    origin = "a constant of the class"

    def norm(self) -> int:
        return self.x**2 + self.y**2


@dataclasses.dataclass(slots=True, order=True, frozen=True)
class SlottedPoint:
    x: int
    y: int = 5


@pytest.mark.asyncio
async def test_slots_and_fields_of_dataclasses_are_awaited(wrap):
    """What the class declares can be read, also where the class has a default for it."""
    async with wrap(Slotted)(3) as slotted:
        assert await slotted.value == 3
    for cls in (Point, SlottedPoint):
        async with wrap(cls)(1, y=2) as point:
            assert await gather(point.x, point.y) == [1, 2]
        async with wrap(cls)(1) as point:
            assert await point.y == 5
    async with wrap(Point)(3, 4) as point:
        assert await point.norm() == 25
        assert point.origin == "a constant of the class"
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        wrap(Point)()


def test_setting_and_deleting_is_refused_in_words(wrap):
    """An assignment cannot be awaited."""
    obj = wrap(Point)(1, 2)
    with pytest.raises(AttributeError, match=r"cannot set 'x' of a colocated Point.*a method that"):
        obj.x = 2
    with pytest.raises(AttributeError, match="cannot set 'new'"):
        obj.new = 2
    with pytest.raises(AttributeError, match="cannot delete 'x' of a colocated Point"):
        del obj.x


# --- calls and operators ------------------------------------------------------------------------------


class Operated:
    """A number with most of what Python has signs for."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __call__(self, x: object, *, times: int = 1) -> int:
        return self.value * times

    def __getitem__(self, key: object) -> object:
        return key

    def __add__(self, other: object) -> int:
        return self.value + other

    def __radd__(self, other: object) -> int:
        return other + self.value

    def __matmul__(self, other: jax.Array) -> jax.Array:
        return self.value * other

    def __neg__(self) -> int:
        return -self.value

    def __abs__(self) -> int:
        return abs(self.value)

    def __lt__(self, other: int) -> bool:
        return self.value < other

    def __divmod__(self, other: int) -> tuple[int, int]:
        return divmod(self.value, other)

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "never"


@pytest.mark.asyncio
async def test_calls_items_and_operators_are_awaited(wrap, x):
    """What gives a result by an expression gives a future."""
    async with wrap(Operated)(7) as obj:
        assert await obj(x) == 7
        assert await obj(x, times=2) == 14
        assert await obj[3] == 3
        assert await obj["key"] == "key"
        assert await (obj + 1) == 8
        assert await (1 + obj) == 8
        np.testing.assert_array_equal(await (obj @ x), np.arange(3.0) * 7)
        assert await (-obj) == -7
        assert await abs(obj) == 7
        assert await (obj < 8) is True
        assert await (obj < 3) is False
        assert await divmod(obj, 4) == (1, 3)
        assert await obj.__call__.specialize(out_specs_fn=None)(x) == 7


def test_equality_hash_and_repr_are_those_of_the_proxy(wrap):
    """They are wanted at once and everywhere, so they do not ask the host."""
    first, second = wrap(Operated)(1), wrap(Operated)(1)
    assert first == first
    assert first != second
    assert len({first, second, first}) == 2
    assert repr(first) == "<colocated Operated new calls=0>"


@pytest.mark.asyncio
async def test_repr_tells_the_state(wrap, recorder):
    """New, open, closed, and how many calls are not over."""
    gate = Gate()
    noted = wrap(Noted)(recorder)
    call = noted.hold(1, gate)
    await recorder.wait_for("start")
    assert repr(noted) == "<colocated Noted open calls=1>"
    gate.open()
    await call
    await noted.aclose()
    assert repr(noted) == "<colocated Noted closed calls=0>"
    assert repr(noted.use) == "<ColocatedFunction Noted.use>"


# --- what Python wants at once --------------------------------------------------------------------------


class Synchronous:
    """A container and a number."""

    def __len__(self) -> int:
        return 3

    def __contains__(self, item: int) -> bool:
        return item < 3

    def __int__(self) -> int:
        return 4

    def __float__(self) -> float:
        return 4.5

    def __complex__(self) -> complex:
        return 4j

    def __index__(self) -> int:
        return 5

    def __bytes__(self) -> bytes:
        return b"6"

    def __reversed__(self) -> object:
        return [2, 1, 0]

    def __length_hint__(self) -> int:
        return 7

    def __next__(self) -> int:
        return 8

    def __iter__(self) -> Synchronous:
        return self

    def __setitem__(self, key: int, value: int) -> None: ...
    def __delitem__(self, key: int) -> None: ...

    def __iadd__(self, other: int) -> Synchronous:
        return self

    def __await__(self) -> object: ...


SYNCHRONOUS = {
    "len": (len, "__len__"),
    "in": (lambda obj: 1 in obj, "__contains__"),
    "bool": (bool, "__len__"),
    "int": (int, "__int__"),
    "float": (float, "__float__"),
    "complex": (complex, "__complex__"),
    "index": (operator.index, "__index__"),
    "bytes": (bytes, "__bytes__"),
    "reversed": (reversed, "__reversed__"),
    "next": (next, "async for"),
    "for": (list, "async for"),
    "setitem": (lambda obj: operator.setitem(obj, 0, 1), "a method that does it"),
    "delitem": (lambda obj: operator.delitem(obj, 0), "a method that does it"),
    "iadd": (lambda obj: operator.iadd(obj, 1), "a method that does it"),
}


@pytest.mark.parametrize("what", SYNCHRONOUS)
def test_what_python_wants_at_once_is_refused_in_words(wrap, what):
    """With the way to ask for it instead, and without making the instance."""
    attempt, instead = SYNCHRONOUS[what]
    obj = wrap(Synchronous)()
    with pytest.raises(TypeError, match="on a colocated Synchronous: ") as caught:
        attempt(obj)
    assert instead in str(caught.value)
    assert "new" in repr(obj)


@pytest.mark.asyncio
async def test_awaiting_an_object_is_refused_in_words(wrap):
    """Its methods are awaited."""
    with pytest.raises(TypeError, match="await obj on a colocated Synchronous"):
        await wrap(Synchronous)()


@pytest.mark.asyncio
async def test_special_methods_can_be_called_by_name(wrap):
    """``await obj.__len__()`` is the way to what ``len(obj)`` cannot give."""
    async with wrap(Synchronous)() as obj:
        assert await obj.__len__() == 3
        assert await obj.__contains__(2) is True
        assert await obj.__contains__(5) is False
        assert await obj.__int__() == 4
        assert await obj.__float__() == 4.5
        assert await obj.__complex__() == 4j
        assert await obj.__index__() == 5
        assert await obj.__bytes__() == b"6"
        assert await obj.__length_hint__() == 7


@pytest.mark.asyncio
async def test_class_without_special_methods_is_refused_by_python(wrap, x):
    """Where the plain class has nothing of the kind, Python's own words are right."""
    obj = wrap(Noted)(Recorder())
    assert obj  # true, as any object
    for attempt in (len, iter, int, lambda obj: obj[0], lambda obj: obj + 1, lambda obj: obj < 1):
        with pytest.raises(TypeError, match="Noted"):
            attempt(obj)
    with pytest.raises(TypeError, match="not callable"):
        obj(x)
    with pytest.raises(TypeError, match="async for"):
        async for _ in obj:
            pass


# --- iterating --------------------------------------------------------------------------------------


class Loader:
    """An iterator, as data loaders have it."""

    def __init__(self, stop: int) -> None:
        self.left = stop

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        self.left -= 1
        return self.left


class AsyncLoader:
    def __init__(self, stop: int) -> None:
        self.left = stop

    def __aiter__(self) -> AsyncLoader:
        return self

    async def __anext__(self) -> int:
        await asyncio.sleep(0)
        if not self.left:
            raise StopAsyncIteration
        self.left -= 1
        return self.left


class Sequence:
    """A container: each loop begins anew."""

    def __iter__(self):
        yield from (1, 2)


@pytest.mark.parametrize("cls", [Loader, AsyncLoader])
@pytest.mark.asyncio
async def test_iterators_are_iterated_as_they_are(wrap, cls):
    """``async for`` takes what the plain class has for ``for`` or ``async for``."""
    async with wrap(cls)(3) as loader:
        assert [item async for item in loader] == [2, 1, 0]
        assert [item async for item in loader] == []


@pytest.mark.asyncio
async def test_containers_are_iterated_anew(wrap):
    """Each ``async for`` makes an iterator of its own."""
    async with wrap(Sequence)() as sequence:
        assert [item async for item in sequence] == [1, 2]
        assert [item async for item in sequence] == [1, 2]


# --- entering ---------------------------------------------------------------------------------------


class Entered(Noted):
    """Notes how it is entered and left."""

    def __init__(self, recorder: Recorder, *, fail: str = "", suppress: bool = False) -> None:
        super().__init__(recorder)
        self.fail = fail
        self.suppress = suppress

    def __enter__(self) -> str:
        self.note("entered")
        if self.fail == "enter":
            raise LookupError("enter")
        return "what enter gives stays on the host"

    def __exit__(self, kind: object, exc: object, tb: object) -> bool:
        self.recorder.record("left", kind=kind, exc=str(exc), tb=tb)
        if self.fail == "exit":
            raise LookupError("exit")
        return self.suppress

    def close(self) -> None:
        self.note("closed")


class EnteredAsync(Entered):
    async def __aenter__(self) -> str:
        await asyncio.sleep(0)
        return super().__enter__()

    async def __aexit__(self, kind: object, exc: object, tb: object) -> bool:
        await asyncio.sleep(0)
        return super().__exit__(kind, exc, tb)


def names(recorder: Recorder) -> list[str]:
    return [event.name for event in recorder.events]


@pytest.mark.parametrize("cls", [Entered, EnteredAsync])
@pytest.mark.asyncio
async def test_async_with_enters_leaves_and_closes(x, recorder, cls):
    """Both context manager protocols go through ``async with``; closing comes last."""
    obj = colocated_python_class(cls)(recorder)
    async with obj as entered:
        assert entered is obj
        await entered.use(x)
    assert names(recorder) == ["made", "entered", "used", "left", "closed", "destroyed"]
    left = recorder.events[3].fields
    assert left == {"kind": None, "exc": "None", "tb": None}
    with pytest.raises(ObjectClosedError):
        obj.use(x)


@pytest.mark.parametrize("cls", [Entered, EnteredAsync])
@pytest.mark.parametrize("suppress", [False, True])
@pytest.mark.asyncio
async def test_exit_sees_and_may_suppress_the_error(recorder, cls, suppress):
    """What the block raised is given to ``__exit__``, whose word counts; then it is closed."""
    with contextlib.nullcontext() if suppress else pytest.raises(KeyError, match="body"):
        async with colocated_python_class(cls)(recorder, suppress=suppress):
            raise KeyError("body")
    assert names(recorder) == ["made", "entered", "left", "closed", "destroyed"]
    assert recorder.events[2].fields == {"kind": KeyError, "exc": "'body'", "tb": None}


@pytest.mark.parametrize("cls", [Entered, EnteredAsync])
@pytest.mark.asyncio
async def test_failing_enter_closes_and_does_not_leave(recorder, cls):
    """As Python does: no ``__exit__``; but the instance is closed, for nobody else will."""
    with pytest.raises(LookupError, match="enter"):
        async with colocated_python_class(cls)(recorder, fail="enter"):
            raise AssertionError("never")
    assert names(recorder)[:3] == ["made", "entered", "closed"]
    assert recorder.count("left") == 0


@pytest.mark.parametrize("cls", [Entered, EnteredAsync])
@pytest.mark.asyncio
async def test_failing_exit_closes_all_the_same(recorder, cls):
    """Its error comes out of the block, with the block's own as context."""
    with pytest.raises(LookupError, match="exit") as caught:
        async with colocated_python_class(cls)(recorder, fail="exit"):
            raise KeyError("body")
    assert isinstance(caught.value.__context__, KeyError)
    assert names(recorder)[:4] == ["made", "entered", "left", "closed"]


@pytest.mark.asyncio
async def test_failing_constructor_fails_the_block(recorder):
    """Entering makes the instance, where there is something to enter."""

    class Wrong(Entered):
        def __init__(self) -> None:
            raise LookupError("made")

        def __del__(self) -> None: ...

    with pytest.raises(LookupError, match="made"):
        async with colocated_python_class(Wrong)():
            raise AssertionError("never")


@pytest.mark.asyncio
async def test_plain_with_is_refused_in_words(recorder):
    """It would have to wait in the loop's thread."""
    obj = colocated_python_class(Entered)(recorder)
    with pytest.raises(TypeError, match="with obj on a colocated Entered: use 'async with'"), obj:
        pass
    assert recorder.events == []


class Unpicklable(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__("not enough to make another")


@pytest.mark.strict_values
@pytest.mark.asyncio
async def test_exit_sees_an_error_that_does_not_pickle(wrap):
    """In strict mode, as on other hosts, it gets one of another kind; the block keeps its own."""
    SHARED.clear()
    error = await outcome(fail_within(wrap(Leaving)()))
    assert isinstance(error, Unpicklable)
    assert isinstance(SHARED["left"], RuntimeError)
    assert "Unpicklable: not enough" in str(SHARED["left"])


class Leaving:
    def __enter__(self) -> None: ...

    def __exit__(self, kind: type, exc: BaseException, tb: object) -> None:
        SHARED["left"] = exc


async def fail_within(obj) -> None:
    async with obj:
        raise Unpicklable(1, 2)


@pytest.mark.asyncio
async def test_object_without_context_manager_is_closed_by_async_with(x):
    """Every object can be in an ``async with``; errors of the block pass through."""
    counter = colocated_python_class(Counter)()
    with pytest.raises(KeyError):
        async with counter:
            await counter.add(x)
            raise KeyError
    with pytest.raises(ObjectClosedError, match="the Counter object is closed"):
        counter.add(x)


class Numbers:
    """A map-style data set: Python's old iteration protocol."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        if index >= len(self):
            raise IndexError(index)
        return index * 10


@pytest.mark.asyncio
async def test_class_with_getitem_alone_is_iterated_on_its_host(cpu_devices):
    """Python itself would ask for one item after the other, for ever: a future is no IndexError."""
    async with colocated_python_class(Numbers, devices=cpu_devices[0])() as numbers:
        assert [item async for item in numbers] == [0, 10, 20]
        assert await numbers[1] == 10
        for use in (list, iter, reversed, lambda obj: 10 in obj):
            with pytest.raises(TypeError, match="'async for'"):
                use(numbers)


class Sum:
    """Adds, and does not say how to add in place."""

    def __add__(self, other):
        return other

    def __radd__(self, other):
        return other


@pytest.mark.asyncio
async def test_no_operator_is_taken_for_another(cpu_devices):
    """`obj += x` would replace the object by a future, and NumPy make an array of futures."""
    async with colocated_python_class(Sum, devices=cpu_devices[0])() as total:
        with pytest.raises(TypeError, match="an augmented assignment"):
            total += 1
        added = np.arange(3.0, dtype=np.float32) + total
        assert isinstance(added, ArrayFuture)
        np.testing.assert_array_equal(await added, [0, 1, 2])


def test_cached_properties_of_a_script_can_be_shipped(run_script):
    """They have a lock on Python 3.11."""
    output = run_script(
        """
        import functools
        import jax
        from aiocolocated import colocated_python_class

        @colocated_python_class(devices=jax.devices("cpu")[0])
        class Model:
            @functools.cached_property
            def weights(self):
                return [1, 2, 3]

            def total(self):
                return sum(self.weights)

        model = Model()
        print(model.total().result(20), model.weights.result(20))
        """
    )
    assert "6 [1, 2, 3]" in output.stdout
