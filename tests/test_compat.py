# SPDX-License-Identifier: Apache-2.0
"""Every shim over private JAX and CPython does on the JAX in use what the library expects of it."""

from __future__ import annotations

import contextlib
import gc
import inspect
import threading
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import source_info_util
from jax.experimental import io_callback
from jax.experimental.compute_on import compute_on
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from late_arrays import Late

from aiocolocated import TaskChannel, _compat
from aiocolocated._contexts import SCOPE_OPTIONS

pytestmark = pytest.mark.timeout(60)


def in_thread(function):
    """What ``function`` returns in a thread of its own."""
    results = []

    def run():
        try:
            results.append((function(), None))
        except BaseException as error:
            results.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert results, "the thread hangs"
    value, error = results[0]
    if error is not None:
        raise error
    return value


@pytest.fixture
def x() -> jax.Array:
    return jax.block_until_ready(jnp.arange(8.0))


# --- execution streams ------------------------------------------------------------------------------


def test_execution_streams_exist():
    """The supported versions of JAX all have them; without, order on the device would be weaker."""
    assert _compat.HAS_EXECUTION_STREAMS


def test_execution_stream_belongs_to_the_thread():
    """A thread reads back what it has set, and no other thread sees it."""
    before = _compat.get_execution_stream()
    both = threading.Barrier(2, timeout=10)
    seen = {}

    def use(stream):
        first = _compat.get_execution_stream()
        _compat.set_execution_stream(stream)
        both.wait()
        seen[stream] = first, _compat.get_execution_stream()

    threads = [threading.Thread(target=use, args=(stream,)) for stream in (1001, 1002)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert {stream: own for stream, (_, own) in seen.items()} == {1001: 1001, 1002: 1002}
    assert not {first for first, _ in seen.values()} & {1001, 1002}
    assert _compat.get_execution_stream() == before


def test_execution_stream_may_be_set_back():
    """What was read can be set again."""

    def use():
        before = _compat.get_execution_stream()
        _compat.set_execution_stream(77)
        _compat.set_execution_stream(before)
        return _compat.get_execution_stream() == before

    assert in_thread(use)


def test_program_on_another_stream_does_not_wait(x):
    """A program of one stream is not held up by a pending one of another stream of the same thread."""
    late = Late()

    def use():
        _compat.set_execution_stream(2001)
        pending = late.array(x)
        _compat.set_execution_stream(2002)
        jax.block_until_ready(x + 1)
        return pending

    pending = in_thread(use)
    assert not pending.is_ready()
    late.release()
    jax.block_until_ready(pending)


def test_jax_without_execution_streams_is_found_out(monkeypatch):
    """A JAX that lacks the functions gives none, and the stand-ins do nothing."""
    from jax._src.lib import _jax as lib

    assert _compat._stream_functions() is not None
    monkeypatch.delattr(lib, "set_execution_stream_id")
    assert _compat._stream_functions() is None
    assert _compat._set_nothing(5) is None
    assert _compat._always_zero() == 0


# --- configuration ----------------------------------------------------------------------------------

VALUES = {
    "array_garbage_collection_guard": "log",
    "default_device": "device",
    "default_matmul_precision": "float32",
    "default_prng_impl": "rbg",
    "legacy_prng_key": "error",
    "numpy_dtype_promotion": "strict",
    "numpy_rank_promotion": "raise",
    "transfer_guard_device_to_device": "disallow",
    "transfer_guard_device_to_host": "disallow",
    "transfer_guard_host_to_device": "log",
}
NOT_CAPTURED = {
    "thread_guard",  # names one thread, so that no other can be in it
    "jax2tf_associative_scan_reductions",  # only read by the conversion to TensorFlow
}
STATES = {
    name: state
    for name in dir(jax)
    if type(state := getattr(jax, name, None)) is type(jax.enable_x64) and name not in NOT_CAPTURED
}
user_context = jax.make_user_context()


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), ("d",))


@contextlib.contextmanager
def legacy_mesh():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with mesh():
            yield


def opposite(name: str) -> object:
    """A value that a context does not have by default."""
    value = VALUES.get(name)
    if value == "device":
        return jax.devices()[3]
    if value is None:
        assert isinstance(STATES[name].value, bool), f"teach this test a value of jax.{name}"
        return not STATES[name].value
    return value


OTHERS = {
    "disable_jit": lambda: jax.disable_jit(True),
    "legacy mesh": legacy_mesh,
    "named_scope": lambda: jax.named_scope("a_scope"),
    "set_mesh": lambda: jax.set_mesh(mesh()),
    "set_xla_metadata": lambda: set_xla_metadata(a_key="a_value"),
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
    "user context": lambda: user_context("a value"),
}
if "f" not in inspect.signature(compute_on).parameters:  # a decorator since JAX 0.12
    OTHERS["compute_on"] = lambda: compute_on("device_host")
CONTEXTS = [*sorted(STATES), *OTHERS]


def entered(name: str):
    """JAX's own context manager of that name, with a value that is not the default."""
    return OTHERS[name]() if name in OTHERS else STATES[name](opposite(name))


@pytest.fixture(autouse=True)
def _clean():
    assert _compat.capture_config() is None, "something before this test left a configuration"
    yield
    assert _compat.capture_config() is None, "this test left a configuration behind"


def test_every_scope_option_is_tested():
    """All options of jax_scope are contexts of the JAX in use, and tested here."""
    assert set(SCOPE_OPTIONS) <= {*STATES, *OTHERS}


@pytest.mark.parametrize("name", CONTEXTS)
def test_context_is_captured_and_put_in_force(name):
    """It is captured inside only, and in force in another thread inside only."""
    value = opposite(name) if name in STATES else None
    with entered(name):
        snapshot = _compat.capture_config()
    assert snapshot is not None
    assert _compat.capture_config() is None

    def use():
        assert _compat.capture_config() is None
        with _compat.applied_config(snapshot):
            inside = _compat.capture_config()
            if name in STATES:
                assert STATES[name].value == value
        assert _compat.capture_config() is None
        return inside

    assert in_thread(use) == snapshot
    assert in_thread(use) == snapshot  # a snapshot may be used again


@pytest.mark.parametrize("name", CONTEXTS)
def test_context_is_taken_back(name):
    """After an exception in the block, and where the thread has that context itself, too."""
    with entered(name):
        snapshot = _compat.capture_config()
        with _compat.applied_config(snapshot):
            assert _compat.capture_config() == snapshot
        assert _compat.capture_config() == snapshot

    def use():
        with pytest.raises(KeyError, match="body"), _compat.applied_config(snapshot):
            raise KeyError("body")
        return _compat.capture_config()

    assert in_thread(use) is None


def test_several_contexts_are_captured_together():
    """A snapshot has all that is in force, innermost values, and outlives the contexts."""
    names = ("enable_x64", "set_mesh", "named_scope", "transfer_guard_device_to_host", "debug_nans")
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.default_matmul_precision("bfloat16"))
        for name in names:
            stack.enter_context(entered(name))
        stack.enter_context(jax.default_matmul_precision("float32"))
        snapshot = _compat.capture_config()

    def use():
        with _compat.applied_config(snapshot):
            assert jax.default_matmul_precision.value == "float32"
            assert jax.enable_x64.value
            assert jax.debug_nans.value
            assert jax.sharding.get_abstract_mesh().axis_names == ("d",)
            return _compat.capture_config()

    assert in_thread(use) == snapshot


def test_half_applied_configuration_is_taken_back():
    """If one part cannot be put in force, none stays in force."""

    class Broken:
        def swap_local(self, value):
            raise KeyError("broken")

    with entered("enable_x64"):
        snapshot = _compat.capture_config()
    with (
        pytest.raises(KeyError, match="broken"),
        _compat.applied_config((*snapshot, (Broken(), 1))),
    ):
        pytest.fail("the block was entered")
    assert _compat.capture_config() is None


def test_context_with_the_default_value_is_harmless():
    """A context that sets what is the default anyway may be captured or not, and changes nothing."""
    with jax.enable_x64(False):
        snapshot = _compat.capture_config()

    def use():
        with _compat.applied_config(snapshot or ()):
            return jax.enable_x64.value

    assert in_thread(use) is False


def test_global_configuration_is_not_captured():
    """What jax.config.update sets is in force in every thread already."""
    jax.config.update("jax_default_matmul_precision", "float32")
    try:
        assert _compat.capture_config() is None
        assert in_thread(lambda: jax.default_matmul_precision.value) == "float32"
    finally:
        jax.config.update("jax_default_matmul_precision", None)
    assert _compat.capture_config() is None


def test_user_context_made_later_is_captured():
    """User contexts are found whenever they are made, several at once, each with its own value."""
    assert _compat.capture_config() is None
    first, second = jax.make_user_context(), jax.make_user_context("default")
    with first(1), user_context("mine"), second("2"):
        snapshot = _compat.capture_config()

    def use():
        with _compat.applied_config(snapshot):
            return first.value, second.value, user_context.value

    assert in_thread(use) == (1, "2", "mine")


@pytest.mark.parametrize("name", ["legacy mesh", "set_mesh"])
def test_mesh_works_in_the_other_thread(x, name):
    """A partition spec without a mesh means the captured one, in eager code and under jit."""
    with entered(name):
        snapshot = _compat.capture_config()

    def constrain(x):
        return jax.lax.with_sharding_constraint(x, PartitionSpec("d"))

    def use():
        with _compat.applied_config(snapshot):
            return jax.jit(constrain)(x)

    expected = NamedSharding(mesh(), PartitionSpec("d"))
    assert in_thread(use).sharding.is_equivalent_to(expected, 1)
    with pytest.raises((RuntimeError, ValueError)):
        in_thread(lambda: jax.jit(constrain)(x))


def test_nested_legacy_meshes_are_entered_in_order(x):
    """The innermost of several meshes counts, and the thread's own stack is as before."""
    inner = Mesh(np.array(jax.devices()[:2]), ("inner",))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with mesh(), inner:
            snapshot = _compat.capture_config()

    def use():
        with _compat.applied_config(snapshot):
            with_inner = jax.jit(
                lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec("inner"))
            )(x)
        assert _compat.capture_config() is None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            with mesh():
                outer = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec("d")))(
                    x
                )
        return with_inner, outer

    with_inner, outer = in_thread(use)
    assert len(with_inner.sharding.device_set) == 2
    assert len(outer.sharding.device_set) == 8


def test_legacy_mesh_is_put_in_force_without_a_warning():
    """The deprecation warning is for who wrote `with mesh:`, not for the library."""
    with entered("legacy mesh"):
        snapshot = _compat.capture_config()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with _compat.applied_config(snapshot):
            pass


def test_named_scopes_nest_in_the_other_thread():
    """Scopes that the other thread enters itself are inside of the captured ones."""
    with jax.named_scope("outer"), jax.named_scope("inner"):
        snapshot = _compat.capture_config()

    def use():
        with _compat.applied_config(snapshot), jax.named_scope("own"):
            return str(source_info_util.current_name_stack())

    assert in_thread(use) == "outer/inner/own"


# --- tracing ----------------------------------------------------------------------------------------

TRANSFORMATIONS = {
    "eval_shape": lambda f, x: jax.eval_shape(f, x),
    "grad": lambda f, x: jax.grad(lambda x: f(x).sum())(x),
    "jit": lambda f, x: jax.jit(f)(x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "make_jaxpr": lambda f, x: jax.make_jaxpr(f)(x),
    "map": lambda f, x: jax.lax.map(f, x),
    "remat": lambda f, x: jax.checkpoint(f)(x),
    "scan": lambda f, x: jax.lax.scan(lambda c, x: (c, f(x)), 0.0, x),
    "shard_map": lambda f, x: jax.shard_map(
        f, mesh=mesh(), in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d")
    )(x),
    "vjp": lambda f, x: jax.vjp(f, x),
    "vmap": lambda f, x: jax.vmap(f)(x),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformation_is_seen(x, name):
    """Inside of it this thread traces, and other threads do not; afterwards nobody does."""
    seen = []

    def body(x):
        seen.append((_compat.tracing(), in_thread(_compat.tracing)))
        return x

    assert not _compat.tracing()
    TRANSFORMATIONS[name](body, x)
    assert set(seen) == {(True, False)}
    assert not _compat.tracing()


def test_failed_transformation_leaves_no_trace(x):
    """After an exception in the traced function nobody traces."""

    def body(x):
        raise KeyError("traced")

    for transform in TRANSFORMATIONS.values():
        with pytest.raises(KeyError, match="traced"):
            transform(body, x)
        assert not _compat.tracing()


@pytest.mark.parametrize("kind", ["io", "pure"])
def test_callback_is_not_traced(x, kind):
    """A host callback inside a compiled program runs ordinary Python on concrete arrays."""
    seen = []

    def callback(x):
        seen.append(_compat.tracing())
        return np.asarray(x)

    call = io_callback if kind == "io" else jax.pure_callback
    jax.block_until_ready(jax.jit(lambda x: call(callback, x, x))(x))
    assert seen == [False]


def test_function_that_is_not_compiled_is_not_traced(x):
    """Under disable_jit a jitted function is called as it is."""
    seen = []
    with jax.disable_jit():
        jax.jit(lambda x: seen.append(_compat.tracing()))(x)
    assert seen == [False]


# --- arrays -----------------------------------------------------------------------------------------


def test_type_of_concrete_arrays(x, cpu_mesh):
    """Every concrete array but a typed key is of that very type; a tracer is not."""
    spread = jax.device_put(x, NamedSharding(cpu_mesh, PartitionSpec("x")))
    for array in (x, spread, x[0], jnp.zeros((0, 3)), jnp.ones(2, jnp.bfloat16), x + 1):
        assert type(array) is _compat.ArrayImpl
    assert type(jax.random.key(0)) is not _compat.ArrayImpl
    jax.jit(lambda x: _refuse_concrete(x))(x)


def _refuse_concrete(x):
    assert type(x) is not _compat.ArrayImpl
    return x


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_key_data_is_the_array_behind_a_key(impl):
    """The same numbers as jax.random.key_data, in a concrete array, for one key and for many."""
    for key in (jax.random.key(7, impl=impl), jax.random.split(jax.random.key(7, impl=impl), 3)):
        data = _compat.key_data(key)
        assert type(data) is _compat.ArrayImpl
        assert data.dtype == jnp.uint32
        np.testing.assert_array_equal(data, jax.random.key_data(key))


def test_key_data_dispatches_nothing(x):
    """It gives the array of a key that is still being computed, at once."""
    late = Late()

    def use():
        _compat.set_execution_stream(3001)
        seed = late.array(x)[:2].astype(jnp.uint32)
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return key, _compat.key_data(key).is_ready()

    key, ready = in_thread(use)
    assert not ready
    late.release()
    jax.block_until_ready(key)
    assert _compat.key_data(key).is_ready()


def test_all_ready_tells_pending_arrays(x):
    """False as long as one array is computed; no arrays, and any iterable, will do."""
    late = Late()
    pending = in_thread(lambda: late.array(x))
    assert _compat.all_ready([])
    assert _compat.all_ready([x, x])
    assert not _compat.all_ready([x, pending])
    assert not _compat.all_ready(a for a in (pending, x))
    late.release()
    jax.block_until_ready(pending)
    assert _compat.all_ready([x, pending])


def test_deleted_and_donated_arrays_are_ready(x):
    """They do not crash the process: there is nothing to wait for."""
    deleted, donated = x + 1, x + 2
    deleted.delete()
    donated_to = jax.jit(lambda x: x * 2, donate_argnums=0)(donated)
    assert _compat.all_ready([deleted, donated, donated_to]) or not donated_to.is_ready()
    assert _compat.all_ready([deleted, donated])


def test_array_deleted_while_it_is_computed_is_ready(x):
    """Deleting a pending array ends the wait for it."""
    late = Late()
    pending = in_thread(lambda: late.array(x))
    assert not _compat.all_ready([pending])
    pending.delete()
    assert _compat.all_ready([pending])
    late.release()


def test_failed_array_is_ready_and_raises(x):
    """A failed computation is over, and only then its error can be had."""
    late = Late()
    pending = in_thread(lambda: late.array(x))
    assert _compat.ready_or_raise([x, pending]) is False
    late.fail()
    with pytest.raises(jax.errors.JaxRuntimeError, match="told to fail"):
        jax.block_until_ready(pending)
    assert _compat.all_ready([x, pending])
    with pytest.raises(jax.errors.JaxRuntimeError, match="told to fail"):
        _compat.ready_or_raise([x, pending])


def test_ready_or_raise_tells_pending_arrays(x):
    """It does not wait: false while one array is computed, true when all are, or there is none."""
    late = Late()
    pending = in_thread(lambda: late.array(x))
    assert _compat.ready_or_raise([pending, x]) is False
    assert not pending.is_ready()
    late.release()
    jax.block_until_ready(pending)
    assert _compat.ready_or_raise([pending, x]) is True
    assert _compat.ready_or_raise([]) is True


def test_ready_or_raise_raises_for_deleted_arrays(x, cpu_mesh):
    """A deleted array among computed ones raises, of one device and of several; a pending one waits."""
    late = Late()
    pending = in_thread(lambda: late.array(x))
    for array in (x, jax.device_put(x, NamedSharding(cpu_mesh, PartitionSpec("x")))):
        deleted = array + 1
        deleted.delete()
        with pytest.raises(RuntimeError, match="deleted"):
            _compat.ready_or_raise([x, deleted])
        assert _compat.ready_or_raise([pending, deleted, x]) is False
    late.release()


def test_ready_or_raise_keeps_the_arrays_as_they_are(x, cpu_mesh):
    """What it looks at is not deleted, not copied and not kept."""
    spread = jax.device_put(x, NamedSharding(cpu_mesh, PartitionSpec("x")))
    for make in (lambda: x + 1, lambda: spread + 1, lambda: jnp.zeros((0, 3))):
        array = jax.block_until_ready(make())
        held = weakref.ref(array)
        assert _compat.ready_or_raise([array]) is True
        assert not array.is_deleted()
        del array
        assert held() is None


@pytest.mark.parametrize("order", [range(8), [3, 1, 7, 0, 2, 6, 4, 5], [5, 2]])
def test_device_list_is_in_the_order_of_the_mesh(cpu_devices, order):
    """Devices come in the mesh's order, whatever the spec; a single device is a list of one."""
    devices = [cpu_devices[i] for i in order]
    meshes = [Mesh(np.array(devices), ("a",)), Mesh(np.array(devices).reshape(2, -1), ("a", "b"))]
    for mesh in meshes:
        for spec in (PartitionSpec(), PartitionSpec("a"), PartitionSpec(mesh.axis_names[::-1])):
            assert _compat.device_list(NamedSharding(mesh, spec)) == tuple(devices)
    assert _compat.device_list(SingleDeviceSharding(devices[0])) == (devices[0],)


def test_device_list_of_a_result_is_that_of_its_inputs(cpu_devices):
    """Also for shardings that XLA has chosen."""
    devices = [cpu_devices[i] for i in (3, 1, 7, 0)]
    mesh = Mesh(np.array(devices).reshape(2, 2), ("a", "b"))
    x = jax.device_put(np.ones((4, 8)), NamedSharding(mesh, PartitionSpec("a", "b")))
    result = jax.jit(lambda x: x.T.reshape(2, 16))(x)
    assert _compat.device_list(result.sharding) == tuple(devices)


def test_what_is_carried_by_reference(x, cpu_mesh):
    """Arrays, keys, jitted functions and custom derivatives are; ordinary values are not."""

    @jax.custom_vjp
    def vjp(x):
        return x

    vjp.defvjp(lambda x: (x, x), lambda x, g: (g,))

    @jax.custom_jvp
    def jvp(x):
        return x

    spread = jax.device_put(x, NamedSharding(cpu_mesh, PartitionSpec("x")))
    jitted = (jax.jit(jnp.sin), jax.jit(lambda x: x, static_argnums=(), donate_argnums=0))
    for value in (x, spread, jax.random.key(0), *jitted, vjp, jvp):
        assert _compat.is_by_reference(value)
    for value in (
        np.ones(3),
        3,
        "text",
        None,
        [x],
        test_execution_streams_exist,
        cpu_mesh,
        jax.jit,
    ):
        assert not _compat.is_by_reference(value)


# --- the rest ---------------------------------------------------------------------------------------


def test_colocated_cpu_devices_are_found(cpu_devices):
    """JAX's own look-up takes devices and meshes."""
    found = _compat.colocated_cpu_devices(cpu_devices[:4])
    assert [d.platform for d in found] == ["cpu"] * 4
    mesh = _compat.colocated_cpu_devices(Mesh(np.array(cpu_devices).reshape(2, 4), ("a", "b")))
    assert isinstance(mesh, Mesh)
    assert mesh.axis_names == ("a", "b")
    assert mesh.devices.shape == (2, 4)


class Cache:
    def __init__(self) -> None:
        self.cleared = 0

    def cache_clear(self) -> None:
        self.cleared += 1


def test_registered_cache_is_cleared_with_those_of_jax():
    """jax.clear_caches() clears it, each time, as long as somebody holds it."""
    cache = Cache()
    _compat.register_cache(cache, "aiocolocated_test")
    assert cache.cleared == 0
    jax.clear_caches()
    jax.clear_caches()
    assert cache.cleared == 2
    held = weakref.ref(cache)
    del cache
    gc.collect()
    assert held() is None
    jax.clear_caches()


def test_backend_start_is_seen(run_script):
    """Importing the library starts no backend; asking JAX for devices does."""
    run_script("""
        import aiocolocated
        from aiocolocated import _compat
        import jax

        assert not _compat.backend_started()
        jax.devices()
        assert _compat.backend_started()
    """).check()


def test_exit_hook_runs_before_threads_are_joined(run_script):
    """A thread that waits for the hook does not hold the exit up, and atexit comes later."""
    finished = run_script("""
        import atexit
        import threading

        from aiocolocated import _compat

        go = threading.Event()

        def wait():
            print("waited", go.wait(20))

        def hook():
            print("hook")
            go.set()

        threading.Thread(target=wait).start()
        atexit.register(print, "atexit")
        _compat.register_at_exit(hook)
        print("end")
    """).check()
    assert finished.stdout.split() == ["end", "hook", "waited", "True", "atexit"]


@pytest.mark.parametrize("kind", [threading.Lock, threading.RLock])
def test_reset_lock_unlocks(kind):
    """A lock that another thread holds, as after a fork, is free and works again."""
    lock = kind()
    in_thread(lock.acquire)
    assert not lock.acquire(blocking=False)
    _compat.reset_lock(lock)
    assert lock.acquire(blocking=False)
    assert not in_thread(lambda: lock.acquire(blocking=False))
    lock.release()
    assert in_thread(lambda: (lock.acquire(blocking=False), lock.release())[0])


def test_library_lock_can_be_reset():
    """The library's own lock is of a kind that can."""
    from aiocolocated._settings import LOCK

    assert hasattr(LOCK, "_at_fork_reinit")


def test_channel_streams_differ():
    """Every channel has a stream of its own, never that of an OS thread or of another one."""
    streams = [TaskChannel()._stream for _ in range(100)]
    assert len(set(streams)) == 100
    assert _compat.get_execution_stream() not in streams
