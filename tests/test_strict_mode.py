# SPDX-License-Identifier: Apache-2.0
"""Values that are refused (contract C10), and strict mode: plain Python goes by value in process, too."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stream_bodies import TIMEOUT, warm_up
from value_bodies import WAYS, Echo, Options, Plain, same, take_one, wait, yields

from aiocolocated import (
    ArgumentError,
    TaskChannel,
    _serialization,
    colocated_python,
    colocated_python_class,
    configure,
    from_thread,
)
from aiocolocated.testing import Recorder

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _around():
    warm_up()
    yield
    STATE.clear()


@pytest.fixture(params=[False, True], ids=["by reference", "strict"])
def strict(request) -> bool:
    configure(strict=request.param)
    return request.param


@pytest.fixture(params=WAYS)
def way(request):
    """There and back again through a body of one kind."""
    return WAYS[request.param](colocated_python_class(Echo)())


# --- what is refused --------------------------------------------------------------------------------


def generator():
    yield 1


async def coroutine():
    """Never run."""


async def asynchronous_generator():
    yield 1


# Refused in every mode, because something was forgotten: a call, an await, an iteration.
FORGOTTEN = {
    "generator": generator,
    "coroutine": coroutine,
    "async_generator": asynchronous_generator,
    "ArrayStream": lambda: colocated_python(yields)(jnp.zeros(1), 1),
    "Echo": lambda: colocated_python_class(Echo)(),
}
# Refused where values are shipped.
UNSHIPPABLE = {
    "lock": threading.Lock,
    "RLock": threading.RLock,
    "threading.Event": threading.Event,
    "Condition": threading.Condition,
    "Semaphore": threading.Semaphore,
    "Barrier": lambda: threading.Barrier(2),
    "queue": queue.Queue,
    "asyncio.Event": asyncio.Event,
    "asyncio.Lock": asyncio.Lock,
    "asyncio.Queue": asyncio.Queue,
    "Thread": threading.Thread,
    "TaskChannel": TaskChannel,
}

iterators = pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")


def make_it(x, which):
    return [1, {"k": ({**FORGOTTEN, **UNSHIPPABLE})[which]()}]


async def make_it_async(x, which):
    return make_it(x, which)


def yield_it(x, which):
    yield 0
    yield make_it(x, which)


async def yield_it_async(x, which):
    yield 0
    yield make_it(x, which)


def _take_all(function: Any) -> Callable[..., Any]:
    return lambda *args: list(from_thread.iterate(function(*args)))


RESULTS = {
    "function": wait(colocated_python(make_it)),
    "coroutine": wait(colocated_python(make_it_async)),
    "stream": _take_all(colocated_python(yield_it)),
    "async stream": _take_all(colocated_python(yield_it_async)),
}


@iterators
def test_forgotten_thing_is_refused_as_an_argument(way, strict):
    """At the call, by its kind and where it stands."""
    for which, make in FORGOTTEN.items():
        value = make()
        with pytest.raises(ArgumentError, match=rf"\['k'\]\[1\].* is an? {which}"):
            way(jnp.zeros(1), {"k": [1, value]})
        if hasattr(value, "close"):
            value.close()


@iterators
@pytest.mark.parametrize("result", RESULTS)
def test_forgotten_thing_is_refused_as_a_result(result, strict):
    """When the body has returned or yielded it."""
    for which in FORGOTTEN:
        with pytest.raises(ArgumentError, match=f" is an? {which}|returned an? {which}"):
            RESULTS[result](jnp.zeros(1), which)


def test_unshippable_argument_is_refused_in_strict_mode(way):
    """By its path; a program that passes locally passes on other hosts."""
    configure(strict=True)
    for make in UNSHIPPABLE.values():
        with pytest.raises(ArgumentError, match=r"\['k'\]\[1\].* is a.*strict mode"):
            way(jnp.zeros(1), {"k": [1, make()]})


@pytest.mark.parametrize("result", RESULTS)
def test_unshippable_result_is_refused_in_strict_mode(result):
    """By its path, after the items before it."""
    configure(strict=True)
    for which in UNSHIPPABLE:
        with pytest.raises(ArgumentError, match=r"result\[1\]\['k'\].* is a.*strict mode"):
            RESULTS[result](jnp.zeros(1), which)


def test_sockets_and_files_are_refused_in_strict_mode(way, tmp_path):
    """They belong to this process."""
    configure(strict=True)
    left, right = socket.socketpair()
    with left, right, open(tmp_path / "file", "w") as file:
        for value in (left, file):
            with pytest.raises(ArgumentError, match=r"\[0\].* is a.*strict mode"):
                way(jnp.zeros(1), [value])


def test_unshippable_value_inside_an_object_is_refused_by_the_objects_path(way):
    """What is inside is no leaf: the object is named, and the reason."""
    configure(strict=True)
    with pytest.raises(ArgumentError, match=r"\['deep'\]\[0\].* is a Plain: .*lock"):
        way(jnp.zeros(1), {"deep": [Plain(threading.Lock())]})


def test_unshippable_things_pass_where_nothing_is_shipped(way):
    """In process, with strict mode off, they go by reference."""
    configure(strict=False)
    for make in (threading.Lock, threading.Event, queue.Queue):
        value = make()
        assert way(jnp.zeros(1), [value])[0] is value


def test_refused_argument_leaves_the_function_usable(way):
    """Nothing is stuck."""
    configure(strict=True)
    x = jnp.zeros(1)
    for _ in range(2):
        with pytest.raises(ArgumentError):
            way(x, threading.Lock())
        assert way(x, [1]) == [1]


# --- strict mode ------------------------------------------------------------------------------------

STATE: dict[str, Any] = {}  # of the module, which the bodies below share with the tests


def spoil(x, value, how):
    """Change an argument in every way there is."""
    if how == "list":
        value.append("spoiled")
    elif how == "nested":
        value["deep"][0].append("spoiled")
    elif how == "dict":
        value["spoiled"] = True
    elif how == "dataclass":
        value.name = "spoiled"
    elif how == "object":
        value.value = "spoiled"
    elif how == "set":
        value.add("spoiled")
    else:
        value.extend(b"spoiled")
    return None


async def spoil_async(x, value, how):
    spoil(x, value, how)


def spoil_stream(x, value, how):
    yield spoil(x, value, how)


async def spoil_stream_async(x, value, how):
    yield spoil(x, value, how)


class Spoiler:
    def __init__(self, value=None):
        self.value = value

    def method(self, x, value, how):
        return spoil(x, value, how)

    def of_constructor(self, x, how):
        return spoil(x, self.value, how)

    def get(self, x):
        return STATE["list"]


SPOILED = {
    "list": lambda: [1],
    "nested": lambda: {"deep": [[1]]},
    "dict": lambda: {"a": 1},
    "dataclass": lambda: Options("name", [1]),
    "object": lambda: Plain(1),
    "set": lambda: {1},
    "bytearray": lambda: bytearray(b"a"),
}


def _content(value: Any) -> Any:
    return vars(value) if hasattr(value, "__dict__") else value


@pytest.mark.parametrize("how", SPOILED)
@pytest.mark.parametrize("body", ["function", "coroutine", "stream", "async stream", "method"])
def test_what_a_body_does_to_its_argument_does_not_show(how, body):
    """As on another host, where it has a copy."""
    configure(strict=True)
    call = {
        "function": lambda: wait(colocated_python(spoil)),
        "coroutine": lambda: wait(colocated_python(spoil_async)),
        "stream": lambda: take_one(colocated_python(spoil_stream)),
        "async stream": lambda: take_one(colocated_python(spoil_stream_async)),
        "method": lambda: wait(colocated_python_class(Spoiler)().method),
    }[body]()
    value, x = SPOILED[how](), jnp.zeros(1)
    assert call(x, value, how) is None
    assert call(x, value=value, how=how) is None
    assert _content(value) == _content(SPOILED[how]())


@pytest.mark.parametrize("how", ["list", "dict", "object"])
def test_what_a_body_does_to_a_constructors_argument_does_not_show(how):
    """It is shipped as a call's arguments are."""
    configure(strict=True)
    value, x = SPOILED[how](), jnp.zeros(1)
    spoiler = colocated_python_class(Spoiler)(value)
    spoiler.of_constructor(x, how).result(TIMEOUT)
    assert _content(value) == _content(SPOILED[how]())


def test_unshippable_constructor_argument_is_refused_in_strict_mode():
    """By the first method call, with its path."""
    configure(strict=True)
    spoiler = colocated_python_class(Spoiler)({"k": threading.Lock()})
    with pytest.raises(ArgumentError, match=r"constructor of Spoiler.*\['k'\].*strict mode"):
        spoiler.of_constructor(jnp.zeros(1), "list").result(TIMEOUT)


def give_state(x):
    return STATE["list"]


def yield_state(x):
    yield STATE["list"]


@pytest.mark.parametrize("body", ["function", "stream", "method"])
def test_result_is_apart_from_what_the_body_keeps(body):
    """What the caller does to it does not show in the body, nor the other way round."""
    configure(strict=True)
    STATE["list"] = kept = [1]
    call = {
        "function": lambda: wait(colocated_python(give_state)),
        "stream": lambda: take_one(colocated_python(yield_state)),
        "method": lambda: wait(colocated_python_class(Spoiler)().get),
    }[body]()
    got = call(jnp.zeros(1))
    assert got == [1]
    got.append(2)
    kept.append(3)
    assert got == [1, 2]
    assert kept == [1, 3]


def test_without_strict_mode_values_go_by_reference():
    """Which is what makes strict mode worth having."""
    configure(strict=False)
    value = [1]
    wait(colocated_python(spoil))(jnp.zeros(1), value, "list")
    assert value == [1, "spoiled"]


def test_one_object_in_two_places_stays_one(way, strict):
    """Within a call; and a value that contains itself arrives so."""
    x = jnp.zeros(1)
    shared = Plain([1])
    shared.me = shared
    first, second = way(x, [shared, {"k": shared}])[0], None
    assert first.me is first
    first, second = (lambda t: (t[0], t[1]["k"]))(way(x, [shared, {"k": shared}]))
    assert first is second
    assert (first is shared) != strict


def test_strict_mode_ships_the_values_of_futures():
    """What another body returned goes by value, too."""
    configure(strict=True)
    STATE["list"] = [1]
    early = colocated_python(give_state)(jnp.zeros(1))
    late = colocated_python(spoil)(jnp.zeros(1), early, "list")
    late.result(TIMEOUT)
    assert early.result(TIMEOUT) == [1]
    assert STATE["list"] == [1]


def test_strict_mode_carries_what_jax_made_by_reference(way):
    """Arrays and jitted functions are not copied, wherever they are."""
    configure(strict=True)
    array = jnp.arange(4.0)
    jitted = jax.jit(lambda x: x + 1)
    colocated = colocated_python(same)
    tree = {"a": [array], "o": Options("n", array), "f": jitted, "c": colocated, "p": Plain(array)}
    got = way(jnp.zeros(1), tree)
    assert got["a"][0] is array
    assert got["o"].extra is array
    assert got["p"].value is array
    assert got["f"] is jitted
    assert got["c"] is colocated


def test_strict_mode_copies_memory_that_numpy_owns_inside_of_objects():
    """It is part of a Python value there, and no array of the tree."""
    configure(strict=True)
    value = Options("n", np.ones(3))

    def body(x, value):
        value.extra[:] = 7
        return value

    got = wait(colocated_python(body))(jnp.zeros(1), value)
    assert isinstance(got.extra, np.ndarray)
    assert got.extra.tolist() == [7, 7, 7]
    assert value.extra.tolist() == [1, 1, 1]


def test_strict_mode_costs_nothing_where_nothing_can_change(monkeypatch):
    """Calls with arrays, numbers and text, and such results, are not pickled at all."""
    configure(strict=True)
    x = jnp.zeros(1)
    function = wait(colocated_python(same))
    for value in (x, 1, 2.5, "text", b"bytes", None, True, 1j, [1]):
        function(x, value)  # shipped and specialized
    counted = Recorder()
    dumps = _serialization.dumps

    def counting(obj):
        counted.record("dumps")
        return dumps(obj)

    monkeypatch.setattr(_serialization, "dumps", counting)
    for value in (x, 1, 2.5, "text", b"bytes", None, True, 1j):
        assert function(x, value) is value or value == 2.5
    assert counted.count("dumps") == 0
    assert function(x, [1]) == [1]
    assert counted.count("dumps") == 2  # there and back


@pytest.mark.parametrize(
    "on",
    [
        pytest.param(True, marks=pytest.mark.strict_values),
        pytest.param(False, marks=pytest.mark.strict_values(False)),
    ],
)
def test_mark_and_setting_turn_strict_mode_on_and_off(on):
    """The mark of the test kit for a whole test, and the setting at any time."""
    value, x = [1], jnp.zeros(1)
    function = wait(colocated_python(same))
    assert (function(x, value) is value) != on
    configure(strict=not on)
    assert (function(x, value) is value) == on
    with pytest.raises(ValueError, match="strict must be a bool"):
        configure(strict=1)


@pytest.mark.strict_values
def test_result_that_looks_like_arguments_is_copied(cpu_devices):
    """A pair of a tuple and something empty is no call's arguments."""
    mine: list[int] = []
    kept = colocated_python(keep_list).specialize(devices=cpu_devices[0])
    pair = kept(mine).result(20)
    assert pair == ((1,), [])
    assert pair[1] is not KEPT[-1]


KEPT: list[list[int]] = []


def keep_list(values):
    KEPT.append(values)
    return (1,), values
