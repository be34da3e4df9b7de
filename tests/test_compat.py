# SPDX-License-Identifier: Apache-2.0
"""Every shim over private JAX and CPython, on the versions in use."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import pickle
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from late_arrays import Late

from aiocolocated import _compat

TIMEOUT = 20.0  # seconds; only a bug takes that long


def in_thread(function):
    """The result of a function in a new thread."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(TIMEOUT)
    (result,) = results
    return result


def mesh():
    return Mesh(np.array(jax.devices("cpu")), ("x",))


# --- arrays -----------------------------------------------------------------------------------------


def test_array_impl_is_the_type_of_concrete_arrays():
    """Every concrete array but typed keys has this very type; tracers and keys have another."""
    sharded = jax.device_put(jnp.arange(8.0), NamedSharding(mesh(), P("x")))
    strings = jax.device_put(np.array(["a"], np.dtypes.StringDType()), jax.devices("cpu")[0])
    for array in (jnp.ones(2), jnp.ones((0,)), jnp.float32(1), sharded, strings):
        assert type(array) is _compat.ArrayImpl
        assert isinstance(array, jax.Array)
    assert type(jax.random.key(0)) is not _compat.ArrayImpl
    seen = []
    jax.make_jaxpr(lambda x: seen.append(type(x)))(1.0)
    assert seen[0] is not _compat.ArrayImpl


def test_device_is_the_type_of_devices():
    """isinstance works with it."""
    assert all(isinstance(device, _compat.Device) for device in jax.devices("cpu"))
    assert not isinstance("cpu:0", _compat.Device)


def test_key_data_is_the_array_behind_a_key():
    """The same numbers as the public function gives, without a computation."""
    for key in (jax.random.key(3), jax.random.split(jax.random.key(3), 4)):
        data = _compat.key_data(key)
        assert type(data) is _compat.ArrayImpl
        np.testing.assert_array_equal(np.asarray(data), np.asarray(jax.random.key_data(key)))
        assert _compat.key_data(key) is data
    key.delete()
    assert data.is_deleted()


def test_all_ready_and_ready_or_raise_of_ready_arrays():
    """Ready, of any number and sharding of arrays."""
    sharded = jax.device_put(jnp.arange(8.0), NamedSharding(mesh(), P("x")))
    strings = jax.device_put(np.array(["a"], np.dtypes.StringDType()), jax.devices("cpu")[0])
    trees = ([], [jnp.ones(2)], [jnp.ones(2)] * 10, [sharded], [sharded, jnp.ones(1)], [strings])
    for arrays in trees:
        jax.block_until_ready(arrays)
        assert _compat.all_ready(arrays) is True
        assert _compat.ready_or_raise(arrays) is True
        assert _compat.ready_or_raise(tuple(arrays)) is True


def test_all_ready_and_ready_or_raise_of_pending_arrays():
    """Not ready until the last is computed, and nobody waits."""
    late = Late()
    pending = in_thread(lambda: late.array(jnp.ones(2)))
    for arrays in ([pending], [jnp.ones(2), pending], [pending, pending]):
        assert _compat.all_ready(arrays) is False
        assert _compat.ready_or_raise(arrays) is False
    late.release()
    pending.block_until_ready()
    assert _compat.all_ready([pending]) is True
    assert _compat.ready_or_raise([pending]) is True


def test_all_ready_and_ready_or_raise_of_failed_arrays():
    """A failed array is ready, and only the second function tells."""
    late = Late()
    failed = in_thread(lambda: late.array(jnp.ones(2)))
    late.fail()
    with pytest.raises(jax.errors.JaxRuntimeError):
        failed.block_until_ready()
    for arrays in ([failed], [jnp.ones(2), failed]):
        assert _compat.all_ready(arrays) is True
        with pytest.raises(jax.errors.JaxRuntimeError, match="told to fail"):
            _compat.ready_or_raise(arrays)


@pytest.mark.parametrize("sharded", [False, True])
def test_all_ready_and_ready_or_raise_of_deleted_arrays(sharded):
    """A deleted array is skipped by the first function and an error for the second; no crash."""
    deleted = jnp.arange(8.0)
    if sharded:
        deleted = jax.device_put(deleted, NamedSharding(mesh(), P("x")))
    deleted.block_until_ready()
    deleted.delete()
    for arrays in ([deleted], [jnp.ones(2), deleted], [deleted, jnp.ones(2)], [deleted, deleted]):
        jax.block_until_ready([a for a in arrays if a is not deleted])
        assert _compat.all_ready(arrays) is True
        with pytest.raises(RuntimeError, match="deleted"):
            _compat.ready_or_raise(arrays)


def test_ready_or_raise_leaves_arrays_as_they_are():
    """Whatever it blocks on shares their memory and is gone afterwards."""
    array = jnp.arange(1000.0)
    pointer = array.unsafe_buffer_pointer()
    before = len(jax.live_arrays())
    assert _compat.ready_or_raise([array])
    assert len(jax.live_arrays()) == before
    assert array.unsafe_buffer_pointer() == pointer
    reference = weakref.ref(array)
    del array
    assert reference() is None


def test_ready_or_raise_keeps_nothing_in_its_traceback():
    """The error's frames do not hold the arrays."""
    array, deleted = jnp.ones(2), jnp.ones(3)
    jax.block_until_ready([array, deleted])
    deleted.delete()
    reference = weakref.ref(array)
    arrays = [array, deleted]
    del array
    kept = None
    try:
        _compat.ready_or_raise(arrays)
    except RuntimeError as error:
        kept = error
    arrays.clear()
    assert reference() is None
    assert kept is not None


def test_device_list_has_the_order_of_the_sharding():
    """Devices of every kind of sharding, in the order that counts."""
    devices = jax.devices("cpu")
    assert _compat.device_list(SingleDeviceSharding(devices[3])) == (devices[3],)
    backwards = Mesh(np.array(devices[5:1:-1]), ("x",))
    for spec in (P("x"), P()):
        sharding = NamedSharding(backwards, spec)
        assert _compat.device_list(sharding) == tuple(devices[5:1:-1])
        array = jax.device_put(jnp.arange(8.0), sharding)
        assert _compat.device_list(array.sharding) == tuple(devices[5:1:-1])
    grid = Mesh(np.array(devices).reshape(2, 4), ("a", "b"))
    assert _compat.device_list(NamedSharding(grid, P("b"))) == tuple(devices)
    key = jax.device_put(jax.random.key(0), devices[2])
    assert _compat.device_list(key.sharding) == (devices[2],)


# --- tracing ----------------------------------------------------------------------------------------


TRACES = {
    "jit": lambda f: jax.jit(f)(1.0),
    "vmap": lambda f: jax.vmap(f)(jnp.ones(2)),
    "grad": lambda f: jax.grad(f)(1.0),
    "jvp": lambda f: jax.jvp(f, (1.0,), (1.0,)),
    "linearize": lambda f: jax.linearize(f, 1.0),
    "scan": lambda f: jax.lax.scan(lambda c, x: (f(c), x), 1.0, jnp.ones(2)),
    "while": lambda f: jax.lax.while_loop(lambda x: f(x) < 0, lambda x: x, 1.0),
    "cond": lambda f: jax.lax.cond(True, f, lambda x: x, 1.0),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f))(1.0),
    "eval_shape": lambda f: jax.eval_shape(f, 1.0),
    "make_jaxpr": lambda f: jax.make_jaxpr(f)(1.0),
}


@pytest.mark.parametrize("which", TRACES)
def test_tracing_inside_transformations(which):
    """True under every transformation, false outside, after one, and in other threads."""
    seen = []

    def function(x):
        seen.append((_compat.tracing(), in_thread(_compat.tracing)))
        return x * 1.0

    assert _compat.tracing() is False
    TRACES[which](function)
    assert (True, False) in seen
    assert not [inside for inside, _ in seen if not inside]
    assert _compat.tracing() is False


def test_tracing_ends_with_an_error():
    """A trace that fails is over."""
    with pytest.raises(ZeroDivisionError):
        jax.jit(lambda x: 1 // 0)(1.0)
    assert _compat.tracing() is False


# --- by reference -----------------------------------------------------------------------------------


def test_by_reference_types():
    """Arrays, keys, jitted functions and custom derivatives; not functions or NumPy."""
    for value in (
        jnp.ones(2),
        jax.random.key(0),
        jax.device_put(jnp.arange(8.0), NamedSharding(mesh(), P("x"))),
        jax.jit(lambda x: x),
        jax.jit(lambda x, n: x, static_argnums=1),
        jax.custom_jvp(lambda x: x),
        jax.custom_vjp(lambda x: x),
        jnp.matmul,
        jax.nn.relu,
    ):
        assert _compat.is_by_reference(value), value
    for value in (
        np.ones(2),
        np.float32(1),
        1,
        None,
        len,
        lambda x: x,
        jax.vmap(lambda x: x),
        "text",
    ):
        assert not _compat.is_by_reference(value), value


# --- execution streams ------------------------------------------------------------------------------


@pytest.mark.skipif(not _compat.HAS_EXECUTION_STREAMS, reason="this JAX has no execution streams")
def test_execution_stream_belongs_to_its_thread():
    """What one thread sets no other sees; it can be set back."""
    before = _compat.get_execution_stream()
    _compat.set_execution_stream(1 << 40)
    try:
        assert _compat.get_execution_stream() == 1 << 40
        assert in_thread(_compat.get_execution_stream) != 1 << 40
        assert jnp.ones(2).sum() == 2
    finally:
        _compat.set_execution_stream(before)
    assert _compat.get_execution_stream() == before


@pytest.mark.skipif(not _compat.HAS_EXECUTION_STREAMS, reason="this JAX has no execution streams")
def test_execution_stream_does_not_queue_behind_another():
    """Work of one stream is computed while another's on the same device is held up."""
    late = Late()
    x = jnp.arange(3.0)
    before = _compat.get_execution_stream()
    _compat.set_execution_stream(1 << 41)
    try:
        pending = late.array(x)
        _compat.set_execution_stream(1 << 42)
        np.testing.assert_array_equal(np.asarray(x + 1), [1, 2, 3])
        assert not pending.is_ready()
    finally:
        _compat.set_execution_stream(before)
        late.release()
    np.testing.assert_array_equal(np.asarray(pending), [0, 1, 2])


def test_stand_ins_without_execution_streams():
    """A JAX without streams gets functions that do nothing."""
    assert _compat._set_nothing(5) is None
    assert _compat._always_zero() == 0
    for function in (_compat.set_execution_stream, _compat._set_nothing):
        function(_compat.get_execution_stream())


# --- configuration ----------------------------------------------------------------------------------


def test_pristine_configuration_is_none():
    """The common case, on this thread and on new ones."""
    assert _compat.capture_config() is None
    assert in_thread(_compat.capture_config) is None


def test_captured_configuration_can_be_applied_and_taken_back():
    """A snapshot is in force inside the block on any thread, in whatever order blocks nest."""
    with jax.enable_x64(True):
        wide = _compat.capture_config()
    with jax.default_matmul_precision("highest"), jax.named_scope("scope"):
        precise = _compat.capture_config()
    assert wide is not None
    assert precise is not None

    def see():
        return jnp.zeros(1).dtype, jax.config.jax_default_matmul_precision

    def apply():
        seen = [see()]
        with _compat.applied_config(wide):
            seen.append(see())
            with _compat.applied_config(precise):
                seen.append(see())
            seen.append(see())
        seen.append(see())
        return seen, _compat.capture_config()

    f32, f64 = np.dtype("float32"), np.dtype("float64")
    expected = [(f32, None), (f64, None), (f64, "highest"), (f64, None), (f32, None)]
    for seen, left in (apply(), in_thread(apply)):
        assert seen == expected
        assert left is None


def test_applied_configuration_goes_with_an_error():
    """Whatever the block raises passes, and the thread is as it was."""
    with jax.debug_nans(True):
        snapshot = _compat.capture_config()
    for error in (KeyError, StopIteration, KeyboardInterrupt):
        with pytest.raises(error), _compat.applied_config(snapshot):
            raise error
        assert _compat.capture_config() is None


def test_configuration_that_fails_to_apply_leaves_nothing():
    """What was applied before the failing part is taken back."""
    with jax.enable_x64(True):
        snapshot = _compat.capture_config()

    class Broken:
        def swap_local(self, value):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        _compat.applied_config((*snapshot, (Broken(), 1))).__enter__()
    assert _compat.capture_config() is None


def test_user_contexts_are_found_whenever_they_were_made():
    """Before and after the first capture; those that are gone do no harm."""
    assert _compat.capture_config() is None
    for i in range(3):
        context = jax.make_user_context(None)
        with context(i):
            snapshot = _compat.capture_config()
        assert snapshot is not None
        assert context.value is None

        def see(context=context, snapshot=snapshot):
            with _compat.applied_config(snapshot):
                return context.value

        assert in_thread(see) == i
        del context, see, snapshot
        gc.collect()
    assert _compat.capture_config() is None


def test_private_names_of_the_configuration_exist():
    """The states that capture_config looks at one by one are there in this JAX."""
    source = inspect.getsource(_compat)
    missing = [
        line.split('"')[1]
        for line in source.splitlines()
        if line.startswith("_") and "_local_reader(" in line
        if line.split('"')[1] not in _compat._config.config_states
    ]
    assert missing == []


# --- caches, backends, CPython ----------------------------------------------------------------------


class Cache:
    """What jax.clear_caches() may clear."""

    def __init__(self):
        self.cleared = 0

    def cache_clear(self):
        self.cleared += 1


def test_registered_cache_is_cleared_with_jax():
    """jax.clear_caches() calls cache_clear; JAX holds the cache weakly."""
    cache = Cache()
    _compat.register_cache(cache, "test")
    jax.clear_caches()
    assert cache.cleared == 1
    reference = weakref.ref(cache)
    del cache
    gc.collect()
    assert reference() is None
    jax.clear_caches()


def test_backend_has_started():
    """Which the tests' arrays have done."""
    jnp.ones(1)
    assert _compat.backend_started() is True


def test_backend_has_not_started_by_importing(run_script):
    """Importing the library and making things starts no backend."""
    run_script("""
        import aiocolocated
        from aiocolocated import _compat
        function = aiocolocated.colocated_python(lambda x: x).specialize(out_specs_fn=lambda x: x)
        channel = aiocolocated.TaskChannel()
        assert not _compat.backend_started()
        import jax
        jax.devices()
        assert _compat.backend_started()
    """).check()


def test_pytree_registration_registers_a_like_class():
    """Whatever way a class was registered: what it says makes a pytree of the class's likes."""

    @jax.tree_util.register_pytree_node_class
    class Node:
        def __init__(self, child, label):
            self.child, self.label = child, label

        def tree_flatten(self):
            return (self.child,), self.label

        @classmethod
        def tree_unflatten(cls, label, children):
            return cls(*children, label)

    @jax.tree_util.register_pytree_with_keys_class
    class Keyed(Node):
        def tree_flatten_with_keys(self):
            return ((jax.tree_util.GetAttrKey("child"), self.child),), self.label

    @dataclasses.dataclass
    class Data:
        child: object
        label: str
        dropped: int = 0

    jax.tree_util.register_dataclass(Data, ["child"], ["label"], drop_fields=["dropped"])

    for cls in (Node, Keyed, Data):
        register, (same, *arguments) = _compat.pytree_registration(cls)
        assert same is cls
        # A class with the same attributes, which JAX does not know.
        copy = type(cls.__name__, cls.__bases__, dict(vars(cls)))
        if cls is not Data:
            arguments[1] = copy.tree_unflatten
        register(copy, *arguments)
        leaves, tree = jax.tree.flatten(copy(1, "label"))
        assert leaves == [1]
        made = jax.tree.unflatten(tree, [2])
        assert type(made) is copy
        assert (made.child, made.label) == (2, "label")
    ((path, _),) = jax.tree_util.tree_flatten_with_path(Keyed(1, "label"))[0]
    assert jax.tree_util.keystr(path) == ".child"
    for cls in (int, object, type("Unknown", (), {})):
        assert _compat.pytree_registration(cls) is None


def test_colocated_cpu_devices_is_jax_own():
    """JAX's look-up is there, for devices and meshes."""
    devices = jax.devices("cpu")
    assert list(_compat.colocated_cpu_devices(tuple(devices))) == devices
    assert _compat.colocated_cpu_devices(mesh()).devices.tolist() == devices


def test_exit_hook_runs_before_threads_are_joined(run_script):
    """A thread that only the hook lets go does not hang the interpreter."""
    finished = run_script("""
        import threading
        from aiocolocated import _compat
        leave = threading.Event()
        threading.Thread(target=lambda: (leave.wait(20), print("thread"))).start()
        _compat.register_at_exit(lambda: (print("hook"), leave.set()))
        print("main")
    """).check()
    assert finished.stdout.split() == ["main", "hook", "thread"]


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock])
def test_reset_lock_unlocks(make):
    """A lock that another thread holds is free afterwards, as a forked child needs it."""
    lock = make()
    in_thread(lock.acquire)
    assert lock.acquire(blocking=False) is False
    _compat.reset_lock(lock)
    assert lock.acquire(blocking=False) is True
    lock.release()


def test_snapshot_is_not_meant_to_travel():
    """Configuration objects are this process's own."""
    with jax.enable_x64(True):
        snapshot = _compat.capture_config()
    with pytest.raises((TypeError, pickle.PicklingError, AttributeError)):
        pickle.dumps(snapshot)
