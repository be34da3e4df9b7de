# SPDX-License-Identifier: Apache-2.0
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false
"""The only file that touches private or experimental JAX, and private CPython.

Each shim names the versions that need it. Everything here was run on JAX 0.10.0, 0.10.2 and 0.12;
``tests/test_compat.py`` runs every shim on the JAX in use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import filterfalse
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import jax
import jax.experimental
import jaxlib.version
from jax._src import (
    callback as _callback,
    config as _config,
    core as _core,
    debugging as _debugging,
    dispatch as _dispatch,
    mesh as _mesh,
    source_info_util as _source_info,
    tree_util as _tree_util,
)
from jax._src.array import ArrayImpl as _ArrayImpl
from jax._src.interpreters import mlir as _mlir, pxla as _pxla
from jax._src.lib import xla_client as _xla_client  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from types import TracebackType

    from jaxlib._jax import Device as Device  # `jax.Device` is a variable to some type checkers
else:
    Device = jax.Device

# --- arrays ---------------------------------------------------------------------------------------

# ``type(x)`` of every concrete array but typed PRNG keys. ``jax.Array`` is abstract: isinstance
# against it is ten times slower and also true for tracers. All versions.
ArrayImpl: type[Any] = _ArrayImpl

# Methods of a C++ class, mapped over arrays by C code. All versions.
_is_ready: Callable[[Any], bool] = ArrayImpl.is_ready
_is_deleted: Callable[[Any], bool] = ArrayImpl.is_deleted
_clone: Callable[[Any], Any] = ArrayImpl.clone
_block: Callable[[Any], Any] = ArrayImpl.block_until_ready


def key_data(key: Any) -> Any:
    """The uint32 array behind a typed PRNG key, without dispatching anything.

    ``jax.random.key_data`` is public but runs a computation; keys have no ``is_ready``. All versions.
    """
    return key._base_array


def all_ready(arrays: Iterable[Any]) -> bool:
    """Whether every array is computed, has failed, or is deleted.

    ``is_ready()`` on a deleted array crashes the process on jaxlib <= 0.11.1, so no bytecode may run
    between the ``is_deleted`` and the ``is_ready`` of one array: the whole loop is in C.
    """
    return all(map(_is_ready, filterfalse(_is_deleted, arrays)))


try:
    _batched_block_until_ready: Callable[[Sequence[Any]], Any] = (
        _xla_client.batched_block_until_ready
    )
except AttributeError:  # not seen yet; the public function is only slower
    _batched_block_until_ready = jax.block_until_ready

_JAXLIB = tuple(int(part) for part in jaxlib.version.__version__.split(".")[:3] if part.isdecimal())
_DELETION_CRASHES = _JAXLIB < (0, 11, 2)  # that of an array which another thread blocks on


def ready_or_raise(arrays: Sequence[Any]) -> bool:
    """Whether every array is computed; if so, raises the error of a failed or deleted one.

    Only blocking shows a failure. It gives up the interpreter lock, and if another thread deletes the
    array meanwhile, the process crashes on jaxlib <= 0.11.1. There it blocks on clones, which share the
    buffers and are nobody else's. As in ``all_ready``, no bytecode may run between the ``is_deleted``
    and the cloning of one array.
    """
    alive: Sequence[Any] = arrays
    try:
        if _DELETION_CRASHES:
            try:
                alive = list(map(_clone, filterfalse(_is_deleted, arrays)))
            except RuntimeError:  # an array whose first device is of another process
                arrays = [part for a in arrays for part in _parts_here(a)]
                alive = list(map(_clone, filterfalse(_is_deleted, arrays)))
            ready = all(map(_is_ready, alive)) if len(alive) != 1 else _is_ready(alive[0])
        else:
            ready = all_ready(arrays)
        if ready:
            if len(alive) == 1:
                _block(alive[0])  # at two thirds of the cost
            else:
                _batched_block_until_ready(alive)
            if len(alive) != len(arrays):
                raise RuntimeError("Array has been deleted.")
        return ready
    finally:
        del arrays, alive  # a traceback keeps this frame


def _parts_here(array: Any) -> list[Any]:
    """An array, or its parts in this process if it has others: JAX <= 0.12 cannot clone those."""
    if array.is_deleted() or array.is_fully_addressable:
        return [array]
    return [shard.data for shard in array.addressable_shards]


def device_list(sharding: Any) -> tuple[Any, ...]:
    """Devices of a sharding, in order. Public API only has the unordered ``device_set``."""
    return tuple(sharding._device_assignment)


# What is copied to the host in this scope is explicit to JAX's transfer guards, as in ``jax.device_get``.
# All versions; without it a guard that disallows implicit transfers might refuse ours.
explicit_device_get: Callable[[], contextlib.AbstractContextManager[None]] = getattr(
    _config, "explicit_device_get_scope", contextlib.nullcontext
)

# --- tracing --------------------------------------------------------------------------------------

_top_level_trace = _core.EvalTrace


def tracing() -> bool:
    """Whether this thread is inside a JAX transformation (``jax.core`` no longer exports it)."""
    return type(_core.trace_state_strong_ref.value) is not _top_level_trace


try:
    tracing()
except AttributeError:  # a JAX that keeps its trace elsewhere

    def tracing() -> bool:
        return not _core.trace_state_clean()


# --- functions that must be shipped by reference ----------------------------------------------------

_jitted_type = type(jax.jit(lambda: None))


def is_jitted(obj: object) -> bool:
    """Whether ``obj`` is what ``jax.jit`` returns."""
    return type(obj) is _jitted_type


def is_by_reference(obj: object) -> bool:
    """Whether an in-process pickler must carry ``obj`` by reference.

    A pickled copy of a jitted function recompiles; ``custom_vjp`` fails to unpickle on JAX <= 0.10.2;
    a copied array loses its sharding and its memory is taken twice.
    """
    kind = type(obj)
    return (
        kind is _ArrayImpl
        or kind is _jitted_type
        or kind is jax.custom_jvp
        or kind is jax.custom_vjp
        or isinstance(obj, jax.Array)
    )


# --- pytrees --------------------------------------------------------------------------------------


def pytree_registration(cls: type) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """A function of JAX and its arguments that register a class as a pytree once more.

    For other processes. JAX tells only the functions that a class was registered with (JAX 0.10 to 0.12);
    without them such a class is a leaf there. Names of its children in paths are lost, unless the class
    has ``tree_flatten_with_keys``.
    """
    entry = getattr(_tree_util, "_registry", {}).get(cls)
    if entry is None:
        return None
    flatten, unflatten = entry
    if getattr(flatten, "__module__", None) == _tree_util.__name__ and hasattr(flatten, "__code__"):
        names = inspect.getclosurevars(flatten).nonlocals
        data, meta = names.get("data_fields"), names.get("meta_fields")
        if data is not None and meta is not None:
            fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
            dropped = {f.name for f in fields if f.init} - {*data, *meta}
            return _register_dataclass, (cls, list(data), list(meta), tuple(dropped))
    if hasattr(cls, "tree_flatten_with_keys"):
        with_keys = methodcaller("tree_flatten_with_keys")
        register = jax.tree_util.register_pytree_with_keys
        return register, (cls, with_keys, unflatten, flatten)
    return jax.tree_util.register_pytree_node, (cls, flatten, unflatten)


def _register_dataclass(
    cls: type, data: list[str], meta: list[str], dropped: tuple[str, ...]
) -> None:
    jax.tree_util.register_dataclass(cls, data, meta, drop_fields=dropped)


# --- execution streams ----------------------------------------------------------------------------


# JAX's CPU client keeps one in-order queue per (execution stream, device); the default stream is the
# OS thread. Private in every version (``jaxlib.xla_client.execution_stream_id`` is a context manager
# over these two and ten times slower). A JAX without them keeps one stream per worker thread: bodies
# still run one at a time and in order, but the device work of two calls of a channel that ran on
# different workers may overlap.
def _stream_functions() -> tuple[Callable[[int], None], Callable[[], int]] | None:
    try:
        from jax._src.lib import _jax as lib  # type: ignore[attr-defined]

        lib.set_execution_stream_id(lib.get_execution_stream_id())
        return lib.set_execution_stream_id, lib.get_execution_stream_id
    except (ImportError, AttributeError):
        return None


def _set_nothing(stream: int) -> None:
    return None


def _always_zero() -> int:
    return 0


_streams = _stream_functions()
HAS_EXECUTION_STREAMS = _streams is not None
set_execution_stream, get_execution_stream = _streams or (_set_nothing, _always_zero)

# --- programs with callbacks -------------------------------------------------------------------------

# Experimental or in a private place in every version.
io_callback: Callable[..., Any] = jax.experimental.io_callback
debug_callback: Callable[..., Any] = jax.debug.callback

# How a program with callbacks is dispatched: always by this Python method, in every version.
_executable: Any = _pxla.ExecuteReplicated
HAS_PROGRAMS = all(
    hasattr(_executable, name)
    for name in ("has_host_callbacks", "ordered_effects", "_local_devices")
)


def watch_programs(around: Callable[[Any, Sequence[Any], Callable[[], Any]], Any]) -> None:
    """Have ``around(program, arguments, run)`` dispatch every program that has host callbacks.

    JAX has no hook there. A JAX without these attributes dispatches as it does without the library.
    """
    if not HAS_PROGRAMS:
        return
    original = _executable.__call__

    @functools.wraps(original)
    def call(self: Any, *args: Any) -> Any:
        if self.has_host_callbacks or self.ordered_effects:
            return around(self, args, functools.partial(original, self, *args))
        return original(self, *args)

    _executable.__call__ = call


def watch_lowering(lowered: Callable[[Any, Any, list[Any]], None]) -> None:
    """Have ``lowered(target, results, host_callbacks)`` called for each callback of the
    library's.

    JAX's own lowering, registered again with that after it; for programs on one device, or on each of
    the devices of a ``shard_map``, where no partitioner comes between.
    """

    def watched(lower: Callable[..., Any]) -> Callable[..., Any]:
        def lowering(ctx: Any, *args: Any, callback: Any, **params: Any) -> Any:
            results = lower(ctx, *args, callback=callback, **params)
            target = getattr(callback, "callback_func", None)
            context = ctx.module_context
            devices = getattr(context.axis_context, "num_devices", 1)
            if hasattr(target, "part") and (devices == 1 or devices is None):
                lowered(target, results, context.host_callbacks)
            return results

        return lowering

    for primitive, lower in (
        (_callback.io_callback_p, _callback.io_callback_lowering),
        (_callback.pure_callback_p, _callback.pure_callback_lowering),
    ):
        _mlir.register_lowering(primitive, watched(lower), cacheable=False)


def program_devices(program: Any) -> Sequence[Any]:
    """The devices of this process that a program runs on."""
    devices: Sequence[Any] = program._local_devices
    return devices


def drop_failed_tokens(program: Any) -> list[Exception]:
    """Forget this thread's tokens of failed ordered effects that a program would wait for.

    JAX <= 0.11.2 keeps such a token for ever, and every later ordered callback of the thread fails
    with it; newer ones fail once more. Blocks as JAX would in a moment.
    """
    errors: list[Exception] = []
    tokens = _dispatch.runtime_tokens.current_tokens
    for effect in program.ordered_effects:
        token = tokens.get(effect)
        try:
            if token is not None:
                token.block_until_ready()
        except RuntimeError as error:
            del tokens[effect]
            errors.append(error.with_traceback(None))  # it has this frame, and so the list
    return errors


def drop_failed_tokens_if(ours: Callable[[Exception], bool]) -> None:
    """Forget this thread's tokens that have failed with some errors; JAX waits for all others at exit."""
    runtime = _dispatch.runtime_tokens
    tables: tuple[dict[Any, Any], ...] = (runtime.current_tokens, runtime.output_runtime_tokens)
    for tokens in tables:
        for key, token in list(tokens.items()):
            try:
                token.block_until_ready()
            except Exception as error:
                if ours(error):
                    del tokens[key]


def output_tokens(program: Any) -> list[tuple[Any, Any]]:
    """Each device of a program that was just dispatched, with what to block on for its effects."""
    tokens = _dispatch.runtime_tokens.output_runtime_tokens
    return [(d, tokens[d]) for d in program._local_devices if d in tokens]


def block_on_inputs(arrays: Iterable[Any]) -> None:
    """Wait until arrays are computed; failed ones and deleted ones are left to who uses them.

    On clones, see ``ready_or_raise``.
    """
    for clone in list(map(_clone, filterfalse(_is_deleted, arrays))):
        with contextlib.suppress(RuntimeError):
            _block(clone)


def key_impl(dtype: Any) -> str:
    """The name of a key dtype's implementation; public API only has that of an array. All versions."""
    name: str = dtype._impl.name
    return name


# --- errors of callbacks ----------------------------------------------------------------------------


def drop_callback_records(ours: Callable[[BaseException | None], bool]) -> None:
    """Keep JAX's loggers from what they say of each exception that leaves a callback, for some.

    Their names are those of JAX's modules; in every version.
    """

    def wanted(record: logging.LogRecord) -> bool:
        return not (record.exc_info and ours(record.exc_info[1]))

    for module in (_callback, _debugging):
        logging.getLogger(module.__name__).addFilter(wanted)


# jaxlib makes tracebacks of lines; no public way makes frames without variables and callers. Private in
# every version. With a JAX that has it no more, errors that are kept hold what their frames do.
def _traceback_functions() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    try:
        from jax._src.lib import _jax as lib  # type: ignore[attr-defined]

        lib.Traceback.traceback_from_frames([lib.Frame("file", "function", 1, 1)])
        return lib.Traceback.traceback_from_frames, lib.Frame
    except (ImportError, AttributeError, TypeError):
        return None


_traceback_of = _traceback_functions()


def without_frames(traceback: TracebackType) -> TracebackType:
    """A traceback of the same lines, whose frames have neither variables nor callers."""
    if _traceback_of is None:
        return traceback
    make, line = _traceback_of
    lines = []
    at: TracebackType | None = traceback
    while at is not None:
        code = at.tb_frame.f_code
        first = code.co_firstlineno
        lines.append(line(code.co_filename, code.co_name, first, at.tb_lineno or first))
        at = at.tb_next
    made: TracebackType = make(lines[::-1])
    return made


# --- thread-local configuration -------------------------------------------------------------------

_State = Any
Snapshot = tuple[tuple[Any, Any], ...]

_get_local = methodcaller("get_local")
_unset = _config.config_ext.unset
_trace_context = _config.trace_context

# Not captured: the trace itself, the guard that names one thread, and MLIR's own cache.
_NOT_CAPTURED = {
    "trace_state",
    "trace_state_strong_ref",
    "axis_env_state",
    "mlir_thread_local_context",
    "post_hook",
    "jax_thread_guard",
    "mesh_context_manager",  # the stack of ``with mesh:``, re-entered mesh by mesh below
}


def _find_states() -> tuple[_State, ...]:
    """Every thread-local configuration object of this JAX.

    ``set_mesh`` moved from ``jax._src.config`` to ``jax._src.mesh`` in 0.11.2, the layout mode is in
    ``jax._src.layout`` since 0.12: look for the objects instead of knowing their names.
    """
    from jax._src import layout as _layout

    kind = _config.config_ext.Config
    found: dict[int, Any] = {
        id(s): s for s in _config.config_states.values() if isinstance(s, kind)
    }
    for module in (_config, _mesh, _layout):
        for value in vars(module).values():
            if isinstance(value, kind):
                found[id(value)] = value
            elif isinstance(inner := getattr(value, "_obj", None), kind):
                found[id(inner)] = inner  # a user context
    if _user_context is not None:  # those that were made before this file was imported
        for value in gc.get_objects():
            if type(value) is _user_context:
                found[id(value._obj)] = value._obj
    return tuple(s for s in found.values() if s.name not in _NOT_CAPTURED)


def _watch_user_contexts() -> list[_State]:
    """A list to which ``jax.make_user_context`` adds what it makes; JAX keeps none."""
    made: list[_State] = []
    if _user_context is not None:
        original = _user_context.__init__

        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            made.append(self._obj)

        _user_context.__init__ = init
    return made


_user_context: Any = getattr(_config, "UserConfig", None)
_user_contexts = _watch_user_contexts()
_states: tuple[_State, ...] = ()
_clean_trace_context: Any = None
_user_contexts_seen = 0
_source = _source_info._source_info_context


def _local_reader(name: str) -> Callable[[], Any]:
    state = _config.config_states.get(name)
    return state.get_local if state is not None else (lambda: _unset)


# States that a public context manager sets and that ``trace_context()`` does not cover. One name
# and one call each: a loop over them takes four times as long.
_nans = _local_reader("jax_debug_nans")
_infs = _local_reader("jax_debug_infs")
_leaks = _local_reader("jax_check_tracer_leaks")
_prng = _local_reader("jax_default_prng_impl")
_legacy = _local_reader("jax_legacy_prng_key")
_compiles = _local_reader("jax_log_compiles")
_misses = _local_reader("jax_explain_cache_misses")
_no_tracing = _local_reader("jax_no_tracing")
_h2d = _local_reader("jax_transfer_guard_host_to_device")
_d2d = _local_reader("jax_transfer_guard_device_to_device")
_d2h = _local_reader("jax_transfer_guard_device_to_host")
_checks = _local_reader("jax_enable_checks")
_custom_prng = _local_reader("jax_enable_custom_prng")
_gc_guard = _local_reader("jax_array_garbage_collection_guard")
_tf_scan = _local_reader("jax2tf_associative_scan_reductions")


def capture_config() -> Snapshot | None:
    """This thread's JAX configuration where it differs from the process-wide one, else ``None``.

    The common case is two comparisons (about 0.5 us): ``trace_context()`` is a tuple of everything
    that jit keys on, and the others are the rest that has a public context manager.
    """
    global _clean_trace_context, _states
    if (
        _trace_context() == _clean_trace_context
        and _nans() is _unset
        and _infs() is _unset
        and _leaks() is _unset
        and _prng() is _unset
        and _legacy() is _unset
        and _compiles() is _unset
        and _misses() is _unset
        and _no_tracing() is _unset
        and _h2d() is _unset
        and _d2d() is _unset
        and _d2h() is _unset
        and _gc_guard() is _unset
        and _tf_scan() is _unset
        and _checks() is _unset
        and _custom_prng() is _unset
        and not _source.context.name_stack.stack
    ):
        return None
    if not _states:
        _states = _find_states()
    context = _trace_context()
    _find_user_contexts()
    snapshot = [(state, value) for state in _states if (value := state.get_local()) is not _unset]
    meshes = _config.mesh_context_manager.value
    if meshes:
        snapshot.append((_MESHES, meshes))
    names = _source.context.name_stack
    if names.stack:
        snapshot.append((_NAMES, names))
    if snapshot:
        return tuple(snapshot)
    _clean_trace_context = context
    return None


def _find_user_contexts() -> None:
    """Add the objects behind ``jax.make_user_context`` that were made since the last look."""
    global _states, _user_contexts_seen
    if len(_user_contexts) == _user_contexts_seen:
        return
    new = _user_contexts[_user_contexts_seen:]
    _user_contexts_seen += len(new)
    known = {id(s) for s in _states}
    _states = (*_states, *(s for s in new if id(s) not in known))


_MESHES = object()
_NAMES = object()


def snapshot_by_name(snapshot: Snapshot) -> list[tuple[str, Any]]:
    """A snapshot for another process: states by name. Users' own contexts stay here."""
    names = {id(_MESHES): "meshes", id(_NAMES): "names"}
    user = {id(s) for s in _user_contexts}
    return [(names.get(id(s)) or s.name, value) for s, value in snapshot if id(s) not in user]


def snapshot_from_names(named: list[tuple[str, Any]]) -> Snapshot:
    """Undo :func:`snapshot_by_name`."""
    global _states
    if not _states:
        _states = _find_states()
    states: dict[str, Any] = {s.name: s for s in _states}
    states |= {"meshes": _MESHES, "names": _NAMES}
    return tuple((states[name], value) for name, value in named)


class applied_config:
    """Context manager: puts a snapshot in force on this thread and takes it back, also on error."""

    __slots__ = ("_exits", "_snapshot")

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._exits: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        try:
            for state, value in self._snapshot:
                self._exits.append(_apply(state, value))
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        while self._exits:
            self._exits.pop()()


def _apply(state: Any, value: Any) -> Callable[[], None]:
    if state is _MESHES:
        return _apply_meshes(value)
    if state is _NAMES:
        manager = _source_info.set_name_stack(value)
        manager.__enter__()
        return lambda: manager.__exit__(None, None, None)
    hook = getattr(state, "_update_thread_local_hook", None)
    previous = state.swap_local(value)
    if hook:
        hook(value)

    def undo() -> None:
        state.set_local(previous)
        if hook:
            hook(None if previous is _unset else previous)

    return undo


def _apply_meshes(meshes: tuple[Any, ...]) -> Callable[[], None]:
    """Re-enter the legacy ``with mesh:`` stack without its deprecation warning (JAX >= 0.12)."""
    resources = _mesh.thread_resources
    env = resources.env
    depth = len(resources.stack)
    local = _config.mesh_context_manager.get_local()
    for mesh in meshes:
        env = resources.stack[-1].with_mesh(mesh)
        resources.stack.append(env)
    resources.env = env
    _config.mesh_context_manager.set_local(meshes)

    def undo() -> None:
        del resources.stack[depth:]
        resources.env = resources.stack[-1]
        _config.mesh_context_manager.set_local(local)

    return undo


# --- colocated Python, caches ------------------------------------------------------------------------


def colocated_cpu_devices(devices_or_mesh: Any) -> Any:
    """JAX's own look-up of the CPU devices beside some devices (experimental in every version)."""
    from jax.experimental import colocated_python

    return colocated_python.colocated_cpu_devices(devices_or_mesh)


def register_cache(cache: Any, name: str) -> None:
    """Have ``jax.clear_caches()`` call ``cache.cache_clear()``; JAX holds ``cache`` weakly."""
    from jax.extend.backend import register_backend_cache

    register_backend_cache(cache, name)


def backend_started() -> bool:
    """Whether a JAX backend has been initialised already."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


# --- CPython ----------------------------------------------------------------------------------------


def register_at_exit(function: Callable[[], None]) -> None:
    """Call ``function`` at interpreter exit *before* threads are joined.

    ``concurrent.futures`` uses the same hook; ``atexit`` runs too late, after the join.
    CPython 3.9 to 3.15.
    """
    threading._register_atexit(function)  # type: ignore[attr-defined]


# CPython 3.12 starts no thread from the moment on when the main thread has ended; 3.11 and 3.13 do
# until the threads are joined, that is during the functions of ``register_at_exit``.
STARTS_THREADS_AT_EXIT = sys.version_info[:2] != (3, 12)


def reset_lock(lock: Any) -> None:
    """Unlock ``lock`` in a forked child, as ``threading`` does with its own. CPython 3.9 on."""
    lock._at_fork_reinit()
