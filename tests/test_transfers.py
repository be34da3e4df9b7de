# SPDX-License-Identifier: Apache-2.0
"""``device_put`` and ``device_get`` off the loop: JAX's results, room for bytes, order, cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from late_arrays import Late

import aiocolocated
from aiocolocated import (
    ArgumentError,
    ArrayDeletedError,
    CallCancelledError,
    TaskChannel,
    TaskGroup,
    TracedCallError,
    WouldBlock,
    _submission,
    _transfers,
    colocated_python,
    configure,
    device_get,
    device_put,
    gather,
    jax_scope,
    open_task_channel,
    runtime,
)
from aiocolocated._ordering import Budget, ChannelOrder, Gate as OrderGate
from aiocolocated._types import CANCELLED, QUEUED, RUNNING
from aiocolocated.testing import Gate, Recorder, Rendezvous, allow_blocking

pytestmark = pytest.mark.timeout(40)

TIMEOUT = 10.0
STRINGS = np.dtypes.StringDType()


class Leaf:
    """A leaf of ``device_get`` that is host Python: it waits, and notes that it was looked at."""

    def __init__(
        self, gate: Gate | None = None, recorder: Recorder | None = None, name: object = 0
    ) -> None:
        self.gate = gate
        self.recorder = recorder
        self.name = name
        self.made: list[weakref.ref[np.ndarray]] = []

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        if self.recorder is not None:
            self.recorder.record("start", name=self.name)
        if self.gate is not None:
            self.gate.wait()
        made = np.zeros(3)
        self.made.append(weakref.ref(made))
        return made


def holds(
    bytes_: int, gate: Gate | None = None, recorder: Recorder | None = None, name: object = 0
):
    """A tree of so many bytes whose ``device_get`` waits for a gate."""
    return [jnp.zeros(bytes_, jnp.uint8), Leaf(gate, recorder, name)]


@colocated_python
def be_late(x: jax.Array, late: Late) -> jax.Array:
    return late.array(x)


async def eventually(condition: Callable[[], object], what: str) -> None:
    """Wait until something that no future tells of has happened."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        await asyncio.sleep(0.001)


def in_flight() -> int:
    return runtime.statistics().transfer_bytes


def states() -> list[tuple[str, str]]:
    return [(call.function, call.state) for call in runtime.calls()]


@pytest.fixture(autouse=True)
def _nothing_left() -> Any:
    """Every byte is given back, and nothing keeps a place."""
    yield
    deadline = time.monotonic() + TIMEOUT
    while runtime.calls() and time.monotonic() < deadline:
        time.sleep(0.001)
    budget = _submission.transfers
    assert (budget.taken, budget.holders, budget.parked) == (0, set(), {})


# --- the same as JAX --------------------------------------------------------------------------------


def layout(device: Any) -> Format:
    return Format(Layout((1, 0)), SingleDeviceSharding(device))


def tree() -> dict[str, Any]:
    return {
        "numpy": np.arange(8.0, dtype=np.float32),
        "wide": np.arange(8),
        "scalars": [1, 2.5, True, 3j, np.float32(4)],
        "empty": np.zeros((0, 3), np.int8),
        "jax": (jnp.arange(8), jnp.ones((8, 2))),
        "nothing": None,
    }


PLACES: dict[str, Callable[[list[Any], Mesh], Any]] = {
    "default": lambda devices, mesh: None,
    "device": lambda devices, mesh: devices[3],
    "one": lambda devices, mesh: SingleDeviceSharding(devices[2]),
    "replicated": lambda devices, mesh: NamedSharding(mesh, P()),
    "prefix": lambda devices, mesh: {
        "numpy": NamedSharding(mesh, P(mesh.axis_names[0])),
        "wide": devices[1],
        "scalars": None,
        "empty": SingleDeviceSharding(devices[5]),
        "jax": (devices[4], NamedSharding(mesh, P())),
        "nothing": None,
    },
    "memory": lambda devices, mesh: jax.memory.Space.Device,
}


def assert_same(got: Any, expected: Any) -> None:
    """Trees of the same arrays, of the same kind and in the same place."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert type(a) is type(b)
        if isinstance(a, jax.Array):
            assert (a.aval, a.sharding, a.committed) == (b.aval, b.sharding, b.committed)
            assert a.is_ready()
        elif isinstance(a, np.ndarray):
            assert (a.dtype, a.shape, a.flags.writeable) == (b.dtype, b.shape, b.flags.writeable)
        with allow_blocking():
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("part", [1, 64])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.asyncio
async def test_put_gives_what_jax_gives(where, part, cpu_devices, cpu_mesh, monkeypatch):
    """Values, dtypes, shardings, commitment and weak types; whatever the second argument is."""
    monkeypatch.setattr(_transfers, "_PART_LEAVES", part)
    place = PLACES[where](cpu_devices, cpu_mesh)
    with allow_blocking():
        expected = jax.device_put(tree(), place)
    assert_same(await device_put(tree(), place), expected)


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_there_and_back(cpu_devices, cpu_mesh):
    """NumPy arrays come back as they were, read-only, from one device and from several."""
    x = np.arange(16.0, dtype=np.float32)
    for place in (cpu_devices[1], NamedSharding(cpu_mesh, P(cpu_mesh.axis_names[0]))):
        there = await device_put({"x": x, "y": [x + 1]}, place)
        with allow_blocking():
            expected = jax.device_get(there)
        assert_same(await device_get(there), expected)


@pytest.mark.asyncio
async def test_get_passes_other_leaves():
    """What is no array stays what it is: the very same objects, as JAX has it."""
    thing, text, array = object(), "text", np.arange(3)
    got = await device_get({"a": thing, "b": [text, None, 3, array], "c": jnp.ones(2)})
    assert got["a"] is thing
    assert got["b"][:3] == [text, None, 3]
    assert got["b"][3] is array
    assert type(got["c"]) is np.ndarray


@pytest.mark.asyncio
async def test_trees_without_leaves():
    """Empty trees and ``None`` go both ways."""
    for x in (None, {}, [], {"a": (None, [])}):
        assert await device_put(x) == x
        assert await device_get(x) == x
        assert await device_put(x, donate=True) == x


@pytest.mark.asyncio
async def test_put_takes_a_spec_a_format_and_prefixes_of_options(cpu_devices, cpu_mesh):
    """A partition spec means the mesh in force; donate and may_alias may be trees, too."""
    axis = cpu_mesh.axis_names[0]
    with jax_scope(set_mesh=cpu_mesh):
        spread = await device_put([np.ones(8), np.zeros(8)], [P(axis), P()])
    assert [x.sharding.spec for x in spread] == [P(axis), P()]
    placed = await device_put({"a": np.ones((2, 3))}, layout(cpu_devices[1]))
    assert placed["a"].format.layout.major_to_minor == (1, 0)
    x = {"a": [jnp.ones(2), jnp.ones(3)], "b": jnp.ones(4)}
    for options in (
        {"donate": {"a": True, "b": False}},
        {"donate": False, "may_alias": {"a": [None, False], "b": True}},
        {"src": cpu_devices[0]},
    ):
        moved = await device_put(x, {"a": cpu_devices[1], "b": None}, **options)
        assert [a.device for a in jax.tree.leaves(moved)] == [*cpu_devices[1:2] * 2, cpu_devices[0]]
        x = {"a": [jnp.ones(2), jnp.ones(3)], "b": jnp.ones(4)}


@pytest.mark.asyncio
async def test_put_copies_or_shares_as_jax_does(cpu_devices):
    """Without a copy asked for, an array that is in its place already is the result."""
    x = await device_put(np.ones(4), cpu_devices[1])
    assert (await device_put(x)) is x
    copy = await device_put(x, cpu_devices[1], may_alias=False)
    assert copy.unsafe_buffer_pointer() != x.unsafe_buffer_pointer()
    memory = np.zeros(4096 + 64, np.uint8)
    aligned = memory[-memory.ctypes.data % 64 :][:4096]
    given = await device_put(aligned, cpu_devices[0])
    with allow_blocking():
        as_jax = jax.device_put(aligned, cpu_devices[0])
    assert given.unsafe_buffer_pointer() == as_jax.unsafe_buffer_pointer()


@pytest.mark.asyncio
async def test_keys_and_strings(cpu_devices):
    """Typed PRNG keys stay keys both ways; strings become StringDType arrays."""
    key = jax.random.key(7)
    keys = await device_put({"k": key, "n": jax.random.split(key, 3)}, cpu_devices[2])
    assert jnp.issubdtype(keys["k"].dtype, jax.dtypes.prng_key)
    assert keys["n"].devices() == {cpu_devices[2]}
    back = await device_get(keys)
    assert (jax.random.key_data(back["k"]) == jax.random.key_data(key)).all()
    text = await device_put(np.array(["a", "b" * 100], STRINGS), cpu_devices[0])
    assert (await device_get(text)).tolist() == ["a", "b" * 100]


def test_signature_is_that_of_jax():
    """The same names, kinds and defaults of parameters."""

    def parameters(function: Callable[..., Any]) -> list[tuple[Any, ...]]:
        found = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in found]

    assert parameters(device_put) == parameters(jax.device_put)
    assert [name for name, *_ in parameters(device_get)] == ["x"]  # the tests' guard hides JAX's


# --- a call like any other --------------------------------------------------------------------------


def test_from_synchronous_code():
    """In a script, in a thread, and in a body."""
    assert device_get(device_put(np.arange(3))).result(TIMEOUT).tolist() == [0, 1, 2]

    @colocated_python
    def body(x: jax.Array) -> object:
        return device_get(device_put(x + 1)).result(TIMEOUT).tolist()

    assert body(jnp.arange(3)).result(TIMEOUT) == [1, 2, 3]
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(device_get(jnp.ones(2)).result()))
    thread.start()
    thread.join()
    assert results[0].tolist() == [1, 1]


@pytest.mark.all_loops
@pytest.mark.asyncio
async def test_futures_among_the_leaves(cpu_devices):
    """They are waited for and replaced by their trees; prefixes are of the tree with these."""
    gate = Gate()

    @colocated_python
    def make(x: jax.Array) -> object:
        gate.wait()
        return {"p": x, "q": [x + 1, np.int32(5)]}

    made = make(jnp.zeros(2))
    put = device_put(
        {"made": made, "own": 1}, {"made": {"p": cpu_devices[1], "q": None}, "own": None}
    )
    got = device_get([put, made])
    assert {"device_put", "device_get"} <= {name for name, state in states() if state == "queued"}
    gate.open()
    (there, same) = await got
    assert there["made"]["q"][0].tolist() == same["q"][0].tolist() == [1, 1]
    assert (await put)["made"]["p"].device == cpu_devices[1]


@pytest.mark.asyncio
async def test_as_an_argument_of_later_calls():
    """A body sees what was transferred."""

    @colocated_python
    def add(x: jax.Array, y: np.ndarray) -> jax.Array:
        return x + y

    async with open_task_channel() as channel:
        total = channel.run(jnp.add, device_put(np.ones(3)), 1)
        y = add(device_put(np.ones(3, np.float32)), device_get(total))
        assert (await device_get(y)).tolist() == [3, 3, 3]


@pytest.mark.asyncio
async def test_failed_and_cancelled_dependencies():
    """The dependency's own exception, and its cancellation, are the transfer's."""

    @colocated_python
    def fail(x: jax.Array) -> jax.Array:
        raise KeyError("mine")

    failing = fail(jnp.ones(1))
    with pytest.raises(KeyError, match="mine") as caught:
        await device_get(device_put({"a": failing}))
    assert caught.value is failing.exception()
    gate = Gate()

    @colocated_python
    def wait(x: jax.Array) -> jax.Array:
        gate.wait()
        return x

    waiting = wait(jnp.ones(1))
    put = device_put(waiting)
    waiting.cancel()
    gate.open()
    with pytest.raises(CallCancelledError, match="depends on"):
        await put


@pytest.mark.asyncio
async def test_visible_and_owned():
    """Listed while in flight; a block waits for it; it is off the loop's thread."""
    gate, recorder = Gate(), Recorder()
    async with asyncio.timeout(TIMEOUT):
        async with open_task_channel():
            got = device_get(holds(8, gate, recorder))
            await recorder.wait_for("start")
            (call,) = runtime.calls()
            assert (call.function, call.state) == ("device_get", "running")
            assert call.where.startswith(__file__)
            assert in_flight() == 8
            gate.open()
        assert got.done()  # the block was left after it


@pytest.mark.asyncio
async def test_each_has_a_channel_of_its_own():
    """Transfers overlap with the bodies of the task's channel, and with each other."""
    gate, together = Gate(), Rendezvous(2)

    class Meets:
        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            together.wait()
            return np.zeros(1)

    @colocated_python
    def wait(x: jax.Array) -> jax.Array:
        gate.wait()
        return x

    body = wait(jnp.ones(1))
    await gather(device_get(Meets()), device_get(Meets()), device_put(1))
    assert not body.done()
    gate.open()
    await body


@pytest.mark.asyncio
async def test_in_a_channel_on_request():
    """``submit`` and ``run`` give a transfer a place in the channel's order, bounds included."""
    gate, recorder = Gate(), Recorder()

    @colocated_python
    def wait(x: jax.Array) -> jax.Array:
        recorder.record("start", name="body")
        gate.wait()
        return x

    channel = TaskChannel(max_pending=2)
    body = channel.submit_nowait(wait, jnp.ones(1))
    await recorder.wait_for("start")
    first = await channel.submit(device_get, Leaf(None, recorder, "first"))
    second = channel.run(device_put, 2)
    with pytest.raises(WouldBlock):
        channel.submit_nowait(device_get, 3)
    assert channel.statistics().queued == 2
    gate.open()
    assert (await gather(body, first, second))[2] == 2
    assert recorder.sequence("start", "name") == ["body", "first"]
    assert channel.statistics().submitted == 3
    await channel.aclose()


@pytest.mark.asyncio
async def test_in_a_task_group():
    """Started by a group: its limit counts, and a failure cancels the others."""
    gate, recorder = Gate(), Recorder()
    async with TaskGroup(limit=1) as group:
        group.start_soon(device_get, Leaf(gate, recorder, 1))
        group.start_soon(device_get, Leaf(None, recorder, 2))
        await recorder.wait_for("start")
        gate.open()
    assert [x.tolist() for x in group.results()] == [[0, 0, 0]] * 2
    blocked = Gate()
    with pytest.raises(ExceptionGroup) as caught:
        async with TaskGroup() as group:
            waits = group.start_soon(device_get, holds(8, blocked, recorder))
            waits.add_done_callback(lambda _: blocked.open())
            await recorder.wait_for("start", 3)
            group.start_soon(device_put, object())
    assert [type(error) for error in caught.value.exceptions] == [TypeError]
    assert waits.cancelled()


def test_refused_at_once():
    """What cannot be transferred, and calls while JAX traces."""

    async def coroutine() -> None: ...

    for transfer in (device_put, device_get):
        with pytest.raises(TracedCallError, match=transfer.__name__):
            jax.jit(transfer)(1)
        with pytest.raises(ArgumentError, match=r"x\['a'\]\[1\].*a coroutine: await it first"):
            transfer({"a": [1, coroutine()]})
        with pytest.raises(TypeError):
            transfer()
    escaped: list[Any] = []
    jax.jit(lambda x: escaped.append(x) or x)(1)
    with pytest.raises(TracedCallError):
        device_get(escaped)


@pytest.mark.asyncio
async def test_jax_configuration_of_the_caller(cpu_devices):
    """In force for the transfer, wherever it runs."""
    with jax_scope(enable_x64=True, default_device=cpu_devices[6]):
        x = await device_put(np.ones(2))
    assert (x.dtype, x.device) == (np.float64, cpu_devices[6])
    with jax.default_device(cpu_devices[5]):
        later = device_put(np.ones(2))
    assert (await later).device == cpu_devices[5]
    assert (await device_put(np.ones(2))).dtype == np.float32


@pytest.mark.asyncio
async def test_transfer_guards():
    """A transfer is explicit: only a guard against explicit ones refuses it."""
    with jax_scope(transfer_guard="disallow"):
        assert (await device_get(await device_put(np.ones(2)))).tolist() == [1, 1]
    with jax_scope(transfer_guard="disallow_explicit"):
        refused = device_put(np.ones(2))
    with pytest.raises(RuntimeError, match="Disallowed host-to-device"):
        await refused


# --- waiting without a thread -----------------------------------------------------------------------


@pytest.mark.parametrize("transfer", [device_put, device_get])
@pytest.mark.asyncio
async def test_waits_for_its_inputs_without_a_thread(transfer):
    """Arrays that still compute hold no worker and no room."""
    configure(worker_limit=1, transfer_bytes_in_flight=1)
    late, other = Late(), jnp.ones(1)
    with allow_blocking():
        array = late.array(jnp.ones(4))
    waiting = [transfer({"a": [array, 1]}) for _ in range(3)]
    assert (await device_get(other)).tolist() == [1]  # the only worker is free
    assert states() == [(transfer.__name__, "queued")] * 3
    assert in_flight() == 0
    late.release()
    for tree in await gather(*waiting):
        assert tree["a"][0].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("transfer", [device_put, device_get])
@pytest.mark.asyncio
async def test_waits_for_the_arrays_of_a_future(transfer):
    """A call that is dispatched gives arrays that still compute: these are waited for, too."""
    late = Late()
    made = be_late(jnp.ones(2), late)
    transferred = transfer(made)
    await made.wait_dispatched()
    await device_put(1)
    assert transferred.state is aiocolocated.CallState.QUEUED
    late.release()
    assert (await transferred).tolist() == [1, 1]


@pytest.mark.asyncio
async def test_cancelled_while_its_inputs_compute():
    """The arrays are let go at once; nothing waits for them any more."""
    late = Late()
    with allow_blocking():
        array = late.array(jnp.ones(2))
    gone = weakref.ref(array)
    waiting = device_get([array])
    await device_put(1)
    del array
    assert waiting.cancel()
    await eventually(lambda: gone() is None, "the array is dropped")
    assert runtime.calls() == []
    late.release()


@pytest.mark.asyncio
async def test_failed_input():
    """The error of a leaf's computation, with the leaf's path."""
    for transfer in (device_put, device_get):
        late = Late()
        with allow_blocking():
            array = late.array(jnp.ones(2))
        failed = transfer({"ok": jnp.ones(1), "bad": [array]})
        late.fail()
        with pytest.raises(RuntimeError, match="told to fail") as caught:
            await failed
        assert any("x['bad'][0] (float32[2]" in note for note in caught.value.__notes__)


# --- bytes in flight --------------------------------------------------------------------------------


def asks(count: int) -> Callable[[], bool]:
    """Whether so many transfers have room or wait for it."""
    budget = _submission.transfers
    return lambda: len(budget.holders) + len(budget.parked) == count


@pytest.mark.asyncio
async def test_bytes_in_flight_are_bounded():
    """Transfers that do not fit wait their turn, first come, first served."""
    configure(transfer_bytes_in_flight=100)
    gates, recorder = [Gate() for _ in range(4)], Recorder()
    calls = []
    for i, size in enumerate((60, 30, 50, 10)):
        calls.append(device_get(holds(size, gates[i], recorder, i)))
        await eventually(asks(i + 1), "it has room, or waits for it")
    await recorder.wait_for("start", 2)
    await device_put([])  # time in which the others would start
    assert sorted(recorder.sequence("start", "name")) == [0, 1]  # nor does the last overtake
    assert in_flight() == 90
    gates[1].open()
    await calls[1]
    assert recorder.count("start") == 2  # 60 + 50 > 100
    gates[0].open()
    await recorder.wait_for("start", 4)
    assert in_flight() == 60
    gates[2].open()
    gates[3].open()
    await gather(*calls)
    assert in_flight() == 0


@pytest.mark.asyncio
async def test_a_transfer_larger_than_the_bound_goes_alone():
    """It starts when nothing else is in flight, and nothing starts beside it."""
    configure(transfer_bytes_in_flight=10)
    gates, recorder = [Gate() for _ in range(3)], Recorder()
    calls = []
    for i, size in enumerate((5, 1000, 5)):
        calls.append(device_get(holds(size, gates[i], recorder, i)))
        await eventually(asks(i + 1), "it has room, or waits for it")
    for i in range(3):
        await recorder.wait_for("start", i + 1)
        await device_put([])
        assert recorder.sequence("start", "name") == list(range(i + 1))
        gates[i].open()
        await calls[i]


@pytest.mark.asyncio
async def test_bound_raised_while_transfers_wait():
    """``configure`` admits what fits now; a bound has to be a positive whole number."""
    configure(transfer_bytes_in_flight=10)
    gate, recorder = Gate(), Recorder()
    calls = [device_get(holds(10, gate, recorder)) for _ in range(3)]
    await recorder.wait_for("start")
    await device_put([])
    assert recorder.count("start") == 1
    configure(transfer_bytes_in_flight=30)
    await recorder.wait_for("start", 3)
    gate.open()
    await gather(*calls)
    for wrong in (0, -1, 1.5, True, None):
        with pytest.raises(ValueError, match="transfer_bytes_in_flight"):
            configure(transfer_bytes_in_flight=wrong)


@pytest.mark.asyncio
async def test_room_is_held_until_the_bytes_have_arrived(cpu_devices, monkeypatch):
    """A transfer that is dispatched and not ready is in flight."""
    late = Late()

    def put(x: Any, device: Any = None, **options: Any) -> Any:
        return [late.array(jnp.asarray(a)) for a in x]

    monkeypatch.setattr(jax, "device_put", put)
    transfer = device_put(np.ones(4, np.float32))
    await transfer.wait_dispatched()
    assert (transfer.done(), in_flight()) == (False, 16)
    late.release()
    await transfer
    await eventually(lambda: in_flight() == 0, "the room is given back")


@pytest.mark.asyncio
async def test_failed_transfer_gives_its_room_back():
    """Also the one of an object that raises whatever it likes."""

    class Broken:
        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            raise SystemExit("no")

    with pytest.raises(aiocolocated.BodyError, match="SystemExit"):
        await device_get([jnp.ones(3), Broken()])
    await eventually(lambda: in_flight() == 0, "the room is given back")


# --- cancellation -----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_cancelled_in_the_queue():
    """It never starts, drops its inputs at once, and lets those behind it in."""
    configure(transfer_bytes_in_flight=10)
    gate, recorder = Gate(), Recorder()
    first = device_get(holds(5, gate, recorder, "first"))
    await recorder.wait_for("start")
    leaf = Leaf(None, recorder, "large")
    dropped = weakref.ref(leaf)
    large = device_get([jnp.zeros(50, jnp.uint8), leaf])
    await eventually(asks(2), "it waits for room")
    small = device_get(holds(5, gate, recorder, "small"))
    await eventually(asks(3), "it waits, too")
    del leaf
    assert large.cancel()
    assert dropped() is None
    await recorder.wait_for("start", 2)
    gate.open()
    await gather(first, small)
    assert recorder.sequence("start", "name") == ["first", "small"]
    with pytest.raises(CallCancelledError, match=r"device_get.*queued"):
        await large


@pytest.mark.asyncio
async def test_cancelled_before_a_worker_has_looked():
    """One that no worker has seen yet never starts either."""
    configure(worker_limit=1)
    gate, recorder = Gate(), Recorder()
    first = device_get(Leaf(gate, recorder, "first"))
    await recorder.wait_for("start")
    second = device_get(Leaf(None, recorder, "second"))
    assert second.cancel()
    gate.open()
    await first
    await device_put([])
    assert recorder.count("start") == 1


@pytest.mark.asyncio
async def test_cancelled_while_a_worker_looks():
    """Nor does one that is cancelled while a worker finds out how large it is."""
    gate, recorder = Gate(), Recorder()

    class Slow:
        @property
        def nbytes(self) -> int:
            recorder.record("look")
            gate.wait()
            return 8

        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            recorder.record("start")
            return np.zeros(1)

    call = device_put(Slow())
    await recorder.wait_for("look")
    assert call.cancel()
    gate.open()
    await eventually(lambda: not runtime.calls(), "it is over")
    assert call.cancelled()
    assert recorder.count("start") == 0


@pytest.mark.parametrize("who", ["cancel", "waiter", "block"])
@pytest.mark.asyncio
async def test_cancelled_in_progress(who, monkeypatch):
    """It stops before the next leaf, drops what it has made, and gives its room back."""
    monkeypatch.setattr(_transfers, "_PART_LEAVES", 1)
    gate, recorder = Gate(), Recorder()
    leaves = [jnp.ones(3), Leaf(), Leaf(gate, recorder, 1), Leaf(None, recorder, 2), Leaf()]

    async def work() -> None:
        async with open_task_channel():
            await device_get(leaves)

    task = asyncio.create_task(work()) if who == "block" else None
    call = device_get(leaves) if task is None else None
    waiter = asyncio.ensure_future(call) if who == "waiter" else None
    await recorder.wait_for("start")
    if task is not None:
        task.cancel()
        await eventually(lambda: ("device_get", "abandoned") in states(), "the call is cancelled")
        assert not task.done()  # the block waits until nothing of it runs
    elif waiter is not None:
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
    else:
        call.cancel()
    assert in_flight() == 12
    gate.open()
    await eventually(lambda: not runtime.calls(), "the transfer is over")
    if task is not None:
        with pytest.raises(asyncio.CancelledError):
            await task
    assert in_flight() == 0
    assert recorder.sequence("start", "name") == [1]
    assert [len(leaf.made) for leaf in leaves[1:]] == [1, 1, 0, 0]
    assert leaves[1].made[0]() is None


@pytest.mark.asyncio
async def test_cancelled_put_waits_for_what_is_under_way(monkeypatch):
    """Bytes that JAX moves already count until they have arrived."""
    monkeypatch.setattr(_transfers, "_PART_LEAVES", 1)
    late, gate, recorder = Late(), Gate(), Recorder()

    def put(x: Any, device: Any = None, **options: Any) -> Any:
        recorder.record("start")
        if recorder.count("start") == 1:
            return [late.array(jnp.ones(1))]
        gate.wait()
        return [jnp.ones(1)]

    monkeypatch.setattr(jax, "device_put", put)
    call = device_put([np.ones(1), np.ones(1), np.ones(1)])
    await recorder.wait_for("start", 2)
    call.cancel()
    gate.open()
    await eventually(lambda: runtime.statistics().running == 1, "it is abandoned")
    await asyncio.sleep(0.005)
    assert in_flight() == 24
    late.release()
    await eventually(lambda: in_flight() == 0, "the room is given back")
    assert recorder.count("start") == 2


@pytest.mark.asyncio
async def test_storm_of_cancellations(cpu_devices):
    """Whenever they are cancelled, the rest gives right values and nothing is left."""
    configure(transfer_bytes_in_flight=4000)
    chance = random.Random(5)
    kept, cancelled = [], []
    for i in range(300):
        x = np.full(chance.randrange(400), i, np.float32)
        call = device_put(x, chance.choice(cpu_devices))
        if chance.random() < 0.5:
            call = device_get(call)
        if chance.random() < 0.4:
            cancelled.append(call)
        else:
            kept.append((i, call))
        if chance.random() < 0.3 and cancelled:
            cancelled.pop(chance.randrange(len(cancelled))).cancel()
        if chance.random() < 0.1:
            await asyncio.sleep(0)
    for call in cancelled:
        call.cancel()
    with allow_blocking():
        for i, array in zip([i for i, _ in kept], await gather(*[c for _, c in kept]), strict=True):
            assert (np.asarray(array) == i).all()
    await eventually(lambda: not runtime.calls(), "all are over")
    assert in_flight() == 0


# --- errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [1, 64])
@pytest.mark.parametrize("transfer", [device_put, device_get])
@pytest.mark.asyncio
async def test_deleted_array_is_named(transfer, part, monkeypatch):
    """Deleted before the call, while it waits, or key or not: an error with the leaf's path."""
    monkeypatch.setattr(_transfers, "_PART_LEAVES", part)
    gone = jnp.ones((2, 3))
    gone.delete()
    with pytest.raises(ArrayDeletedError, match=r"x\['a'\]\[1\] \(float32\[2,3\] on .* donated"):
        await transfer({"a": [jnp.ones(1), gone]})
    key = jax.random.key(1)
    key.delete()
    with pytest.raises(ArrayDeletedError, match=r"x\[0\] \(key"):
        await transfer([key])
    late = Late()
    with allow_blocking():
        array = late.array(jnp.ones(2))
    waiting = transfer(array)
    await device_put([])
    array.delete()
    with pytest.raises(ArrayDeletedError, match=r"x \(float32\[2\]"):
        await waiting
    late.release()


@pytest.mark.asyncio
async def test_donated_array_is_named(cpu_devices):
    """A jitted function has used it up."""
    x = jnp.ones(4)
    with allow_blocking():
        jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(x))
    assert x.is_deleted()
    with pytest.raises(ArrayDeletedError, match=r"x\['w'\]"):
        await device_put({"w": x}, cpu_devices[1], donate=True)


@pytest.mark.parametrize("transfer", [device_put, device_get])
@pytest.mark.asyncio
async def test_deleted_at_any_moment(transfer, cpu_devices, cpu_mesh):
    """Another thread deletes while transfers run: a value or the error with words, never a crash."""
    boxes: queue.SimpleQueue[jax.Array | None] = queue.SimpleQueue()

    def delete() -> None:
        while (array := boxes.get()) is not None:
            array.delete()

    thread = threading.Thread(target=delete)
    thread.start()
    spread = NamedSharding(cpu_mesh, P(cpu_mesh.axis_names[0]))
    for i in range(60):
        array = await device_put(np.ones(800), (cpu_devices[0], spread)[i % 2])
        transferred = transfer([array], *[cpu_devices[1]] * (transfer is device_put))
        boxes.put(array)
        with contextlib.suppress(ArrayDeletedError):
            await transferred
    boxes.put(None)
    thread.join()


@pytest.mark.parametrize("part", [1, 64])
@pytest.mark.asyncio
async def test_refused_leaf_is_named(part, cpu_devices, cpu_mesh, monkeypatch):
    """JAX's own error, with a note that has the leaf's path."""
    monkeypatch.setattr(_transfers, "_PART_LEAVES", part)
    sharded = NamedSharding(cpu_mesh, P(cpu_mesh.axis_names[0]))
    for leaf, place, kind in (
        (object(), None, TypeError),
        ("text", cpu_devices[0], TypeError),
        (np.ones(3), sharded, ValueError),
        (1 << 70, None, OverflowError),
        (np.ones(3), "cpu:0", ValueError),
    ):
        with pytest.raises(kind) as caught:
            await device_put({"good": np.ones(8), "list": [leaf]}, {"good": None, "list": place})
        notes = caught.value.__notes__
        assert sum("the leaf is x['list'][0] (" in note for note in notes) == 1
        assert any(note.startswith("colocated call device_put") for note in notes)


@pytest.mark.asyncio
async def test_prefix_that_does_not_fit():
    """JAX's own words."""
    with pytest.raises(ValueError, match="tree prefix"):
        await device_put({"a": [1, 2]}, {"b": None})
    with pytest.raises(ValueError, match="cannot be True at the same time"):
        await device_put([1, 2], donate=True, may_alias=True)


@pytest.mark.asyncio
async def test_array_of_other_processes():
    """JAX's own error, which says what to do, with the leaf's path."""
    pathways = pytest.importorskip("jaxlib._pathways")
    client = pathways._create_cpu_client({10**6}, {10**6: 0, 5: 1, 6: 1})
    elsewhere = np.array([d for d in client.devices() if d.process_index == 1])
    sharding = NamedSharding(Mesh(elsewhere, ("x",)), P("x"))
    array = jax.make_array_from_single_device_arrays((4,), sharding, [], dtype=np.float32)
    with pytest.raises(RuntimeError, match="addressable_shards") as caught:
        await device_get({"here": jnp.ones(2), "there": array})
    assert any("x['there'] (float32[4]" in note for note in caught.value.__notes__)


# --- donation, programs over several devices --------------------------------------------------------


@pytest.mark.asyncio
async def test_donated_tree_goes_in_one_part(monkeypatch):
    """So that what JAX refuses about one leaf is said before another one is used up."""
    monkeypatch.setattr(_transfers, "_PART_LEAVES", 1)
    calls: list[Any] = []
    original = jax.device_put

    def put(x: Any, **options: Any) -> Any:
        calls.append(options["donate"])
        return original(x, **options)

    monkeypatch.setattr(jax, "device_put", put)
    await device_put([1, 2, 3], donate=[False, True, False])
    await device_put([1, 2, 3], donate=True)
    assert calls == [[False, True, False], True]
    await device_put([1, 2, 3], donate=[False, False, False])
    assert len(calls) == 5


@pytest.mark.asyncio
async def test_resharding_counts_as_a_program_over_several_devices(cpu_devices, cpu_mesh):
    """JAX may run collectives to move what is on several devices; fresh values need none."""
    configure(multi_device_in_flight=1)
    everywhere = NamedSharding(cpu_mesh, P())
    spread = NamedSharding(cpu_mesh, P(cpu_mesh.axis_names[0]))
    x = await device_put(np.arange(8.0), everywhere)
    late = Late()
    async with open_task_channel() as channel:
        program = channel.run(late.array, x)
        await program.wait_dispatched()
        moved = device_put(x, spread)
        fresh = device_put(np.arange(8.0), spread)
        back = device_get(x)
        await gather(fresh, back)
        assert not moved.dispatched()
        late.release()
        assert (await moved).sharding == spread


# --- memory -----------------------------------------------------------------------------------------


class Array(np.ndarray):
    """NumPy arrays that weak references can tell apart from their copies."""


def tracked(size: int) -> tuple[Array, weakref.ref[Array]]:
    x = np.ones(size).view(Array)
    return x, weakref.ref(x)


@pytest.mark.asyncio
async def test_inputs_are_let_go():
    """After a transfer, and after one that failed, nothing of the library holds its leaves."""
    x, ref = tracked(5)
    done = device_put([x], may_alias=False)
    await done
    del x
    gc.collect()
    assert ref() is None
    x, ref = tracked(5)
    failed = device_put([x, object()])
    error = None
    try:
        await failed
    except TypeError as caught:
        error = caught
    del x
    gc.collect()
    assert error is not None
    assert ref() is None


@pytest.mark.asyncio
async def test_large_trees_are_moved_in_parts(monkeypatch):
    """Parts end after so many leaves and before too many bytes; a large leaf is a part of its own."""
    monkeypatch.setattr(_transfers, "_PART_LEAVES", 3)
    monkeypatch.setattr(_transfers, "_PART_BYTES", 100)
    parts: list[list[int]] = []
    original = jax.device_put

    def put(x: Any, **options: Any) -> Any:
        parts.append([a.nbytes for a in x])
        return original(x, **options)

    monkeypatch.setattr(jax, "device_put", put)
    sizes = [1, 1, 1, 1, 50, 50, 51, 500, 2, 0, 0, 0]
    await device_put([np.zeros(n, np.uint8) for n in sizes])
    assert parts == [[1, 1, 1], [1, 50], [50], [51], [500], [2, 0, 0], [0]]


@pytest.mark.asyncio
async def test_all_copies_begin_before_the_first_is_waited_for(monkeypatch):
    """So that they overlap where they take time."""
    monkeypatch.setattr(_transfers, "_PART_LEAVES", 1)
    recorder = Recorder()
    array = jnp.ones(2)
    original = type(array).copy_to_host_async

    def copy(self: Any) -> None:
        recorder.record("copy")
        original(self)

    monkeypatch.setattr(type(array), "copy_to_host_async", copy)
    await device_get([Leaf(None, recorder), array, jnp.zeros(3)])
    assert [event.name for event in recorder.events][:3] == ["copy", "copy", "start"]


# --- the state machine alone ------------------------------------------------------------------------


class FakeCall:
    """What an order sees of a transfer."""

    _blocked = 0
    _wide = _light = False

    def __init__(self, size: int, budget: Budget[Any]) -> None:
        self._state = QUEUED
        self._size = size
        self._gate = budget


@pytest.mark.parametrize("seed", range(20))
def test_budget_alone(seed: int) -> None:
    """Random histories: never more than the capacity but for one alone, first come first served."""
    chance = random.Random(seed)
    budget: Budget[Any] = Budget(10)
    gate: OrderGate[Any] = OrderGate(8)
    arrived: list[Any] = []  # that wait, in the order of asking
    claimed: list[ChannelOrder[Any]] = []
    running: list[Any] = []
    orders: dict[Any, ChannelOrder[Any]] = {}

    def hand_out(more: list[ChannelOrder[Any]]) -> None:
        for order in more:
            assert order not in claimed
            assert arrived.pop(0) is order.queue[0]
            claimed.append(order)

    def submit() -> None:
        call = FakeCall(chance.choice([0, 1, 3, 5, 9, 25]), budget)
        orders[call] = order = ChannelOrder(gate)
        if order.push(call):
            assert not arrived or not call._size
            claimed.append(order)
        else:
            arrived.append(call)

    def serve() -> None:
        order = claimed.pop(chance.randrange(len(claimed)))
        call = order.next()
        if call is not None:
            call._state = RUNNING
            running.append(call)

    def cancel(call: Any) -> None:
        call._state = CANCELLED
        orders[call].settled_in_queue()
        if call in arrived:
            arrived.remove(call)
        hand_out(budget.give_back(call))

    def end() -> None:
        call = running.pop(chance.randrange(len(running)))
        orders[call].body_ended()
        assert budget.leave(call) == []
        hand_out(budget.give_back(call))

    for _ in range(300):
        queued = [c for c in orders if c._state == QUEUED]
        choices = [submit] + [serve] * bool(claimed) + [end] * bool(running)
        if queued and chance.random() < 0.2:
            cancel(chance.choice(queued))
        else:
            chance.choice(choices)()
        assert budget.taken == sum(c._size for c in budget.holders)
        large = [c for c in budget.holders if c._size]
        assert budget.taken <= budget.capacity or len(large) == 1
        for call in list(orders):
            if call._state not in (QUEUED, RUNNING):
                del orders[call]
    while claimed or running:
        if claimed:
            serve()
        else:
            end()
    assert not arrived
    assert (budget.taken, budget.holders, budget.parked) == (0, set(), {})
