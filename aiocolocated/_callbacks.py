# SPDX-License-Identifier: Apache-2.0
"""``io_callback``, ``pure_callback`` and ``debug_callback``, of plain functions and of coroutines."""

from __future__ import annotations

import contextvars
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from aiocolocated import _callback_errors, _compat, _overlap as _overlap, _programs, _specs
from aiocolocated._callback_results import ResultSpecs, is_key
from aiocolocated._callback_runs import CoroutineRun, Running, abandon, collect, ticket_for
from aiocolocated._exceptions import ArgumentError, CallCancelledError

# An array, to which the lowering appends those of the callbacks that have to start first.
_TICKET = jax.ShapeDtypeStruct((1,), np.int32)


class _Target:
    """What JAX calls: equal for equal callbacks, so that JAX's caches find them again."""

    __slots__ = (
        "__weakref__",
        "_config",
        "_key",
        "_keys",
        "_ranks",
        "_specs",
        "function",
        "part",
        "what",
    )

    def __init__(
        self,
        kind: str,
        function: Callable[..., Any],
        specs: ResultSpecs | None,
        keys: tuple[tuple[int, str], ...],
        ranks: tuple[int, ...],
        part: str = "all",
        config: _compat.Snapshot | None = None,
    ) -> None:
        self.what = f"{kind} of {_name(function)}"
        self.function = function
        self.part = part
        self._specs = specs
        self._keys = keys
        self._ranks = ranks
        self._config = config
        self._key = (kind, function, specs, keys, ranks, part, config)

    def __eq__(self, other: object) -> bool:
        return type(other) is _Target and other._key == self._key

    def __hash__(self) -> int:
        try:
            return hash((self.what, self.function, self.part))
        except TypeError:  # a callable that cannot be hashed
            return hash((self.what, id(self.function), self.part))

    def in_part(self, part: str) -> _Target:
        kind, function, specs, keys, ranks, _, config = self._key
        return _Target(kind, function, specs, keys, ranks, part, config)

    # -- called by JAX ----------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outer = sys.exception()
        tickets = np.empty(0, np.int32)
        try:
            if self.part == "debug":
                args, kwargs = args
            if self.part == "finish":
                tickets = np.asarray(args[0])
                run = collect(int(tickets.flat[0])) if tickets.size else None
                if run is not None:
                    return self._result_of(run.wait())
                if self._key[0] == "io_callback":
                    raise CallCancelledError(f"{self.what}: another callback of its program failed")
                args = args[1:]  # of a pure callback that JAX repeats
            leading = self._leading_dimensions(args, kwargs) if self.part == "start" else ()
            if self._keys:
                args, kwargs = self._with_keys(args, kwargs)
            if self.part == "start":
                ticket = ticket_for(self._start(args, kwargs))
                return np.full((*leading, 1), ticket, np.int32)
            if _is_async(self.function):
                return self._result_of(self._start(args, kwargs).wait())
            return self._result_of(self._call(args, kwargs))
        except BaseException as error:
            inline = _programs.here.dispatch is not None
            failed = _callback_errors.keep(error, self.what, outer, inline)
            abandon(tickets.ravel().tolist())
        finally:
            del args, kwargs, outer
        try:
            raise failed from None
        finally:
            del failed  # its traceback has this frame

    def _call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        stream = _compat.get_execution_stream()
        _compat.set_execution_stream(_programs.new_stream())  # not behind the program itself
        try:
            with Running(self.what):
                if _programs.here.dispatch is None and self._config is not None:
                    with _compat.applied_config(self._config):
                        return self.function(*args, **kwargs)
                return self.function(*args, **kwargs)
        finally:
            _compat.set_execution_stream(stream)
            del args, kwargs

    def _start(self, args: Sequence[Any], kwargs: dict[str, Any]) -> CoroutineRun:
        # JAX's own entries (a CPU device by default, no mesh) come after those of the program.
        config = _compat.capture_config() or ()
        dispatch = _programs.here.dispatch
        if dispatch is None:
            context = contextvars.Context()
            config = (*(self._config or ()), *config)
        else:
            context = contextvars.copy_context()
        run = CoroutineRun(
            self.what, functools.partial(self.function, *args, **kwargs), context, config or None
        )
        if dispatch is not None:
            dispatch.runs.append(run)
        run.begin()
        return run

    def _leading_dimensions(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, ...]:
        """Those that vmap has put before the arguments' own."""
        if not self._ranks:  # nothing but a pure callback is vectorized
            return ()
        leaves = jax.tree_util.tree_leaves((args, kwargs))
        pairs = zip(leaves, self._ranks, strict=True)
        return np.broadcast_shapes(*(x.shape[: x.ndim - rank] for x, rank in pairs))

    def _with_keys(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves, tree = jax.tree_util.tree_flatten((tuple(args), kwargs))
        for index, impl in self._keys:
            leaves[index] = jax.random.wrap_key_data(leaves[index], impl=impl)
        result: tuple[tuple[Any, ...], dict[str, Any]]
        result = jax.tree_util.tree_unflatten(tree, leaves)
        return result

    def _result_of(self, value: Any) -> Any:
        if inspect.iscoroutine(value):
            value.close()
            raise ArgumentError(
                f"{self.what} returned a coroutine: pass the coroutine function itself, defined with "
                "'async def'"
            )
        if self._specs is None:
            return None
        return self._specs.leaves_of(value, self.what)


def _name(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    # Not its `repr`: that of an object may show, and wait for, arrays.
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    if hasattr(function, "_prepare_call"):  # a colocated function or method: its call is awaited
        return True
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )


def _without_keys(args: Any, kwargs: Any) -> tuple[Any, Any, tuple[tuple[int, str], ...]]:
    """Arguments with the integers behind typed keys, and where those are; JAX passes no keys."""
    leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
    keys = tuple((i, _compat.key_impl(x.dtype)) for i, x in enumerate(leaves) if is_key(x))
    if not keys:
        return args, kwargs, ()
    for i, _ in keys:
        leaves[i] = jax.random.key_data(leaves[i])
    args, kwargs = jax.tree_util.tree_unflatten(tree, leaves)
    return args, kwargs, keys


def _prepared(
    kind: str, function: Any, specs: ResultSpecs | None, args: Any, kwargs: Any
) -> tuple[_Target, Any, Any]:
    if not callable(function):
        raise ArgumentError(f"{kind} needs a function, got {_specs.describe(function)}")
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise ArgumentError(
            f"{kind} of {_name(function)}: a generator gives its items over time, and a callback "
            "returns once; collect them in the callback"
        )
    _programs.watch()
    args, kwargs, keys = _without_keys(args, kwargs)
    ranks: tuple[int, ...] = ()
    if kind == "pure_callback":
        ranks = tuple(np.ndim(x) for x in jax.tree_util.tree_leaves((args, kwargs)))
    target = _Target(kind, function, specs, keys, ranks, config=_compat.capture_config())
    return target, args, kwargs


def io_callback(
    callback: Callable[..., Any],
    result_shape_dtypes: Any,
    *args: Any,
    sharding: Any = None,
    ordered: bool = False,
    **kwargs: Any,
) -> Any:
    """Call a function, or a coroutine function, that has side effects from jitted code.

    :func:`jax.experimental.io_callback`, which also takes an ``async def``. Its coroutine runs on the
    library's own event loop, in a thread of the library, so that a jitted function may be called
    anywhere, on the thread of a running event loop as well, without waiting for itself.

    Args:
        callback: called with the arguments as :class:`jax.Array` on the first CPU device (typed PRNG keys
            as keys). JAX operations, colocated calls and whatever asyncio offers work in a coroutine.
        result_shape_dtypes: pytree of what it returns: shapes and dtypes, key dtypes too.
        *args: pytrees of arrays and of typed keys.
        sharding: the device that calls it (JAX 0.10.0: a ``SingleDeviceSharding``).
        ordered: keep the order of all ordered callbacks that one thread dispatches.
        **kwargs: as ``*args``.

    Returns:
        pytree of :class:`jax.Array`, as ``result_shape_dtypes``.

    Raises:
        ArgumentError: a callback that is no function, or a spec that is none.
        SpecError: ``result_shape_dtypes`` has 64 bits where x64 is off.
        SpecError: from the program: the result is not as ``result_shape_dtypes`` says. 64-bit floats
            become 32-bit ones where x64 is off, as in JAX, and integers if that changes none.
        Exception: from the program, what the callback raised: as it is where the library waits
            (:meth:`TaskChannel.run`, :func:`awaitable_jit`, :func:`wait_until_ready`,
            :func:`effects_barrier`); as JAX's own error where JAX does, see :func:`callback_error`.

    Ordering: unordered callbacks of coroutines overlap if neither needs the other's result and both are
        in the same function that JAX lowers (not in two inner jitted functions, nor in two loops), on
        one device or in a ``shard_map``: all have started before the program waits for one. In other
        cases they usually come one after the other, as all callbacks of plain functions do. Ordered ones
        never overlap.

    Cancellation: if the program fails while it runs inline, its coroutines are cancelled; otherwise
        nothing cancels them.

    Contexts: where JAX runs the program inline, the callback sees the context variables and the JAX
        configuration of the thread that dispatched it. That is always so in :meth:`TaskChannel.run` and
        :func:`awaitable_jit` for programs of one device. Elsewhere (several devices, inputs that are not
        ready) it has an empty context, and the configuration in which the program was traced.

    Transformations: as JAX's: ``vmap`` makes one call per element (not ordered ones), ``shard_map`` one
        per device, jit over sharded arguments one; no differentiation.

    Thread safety: a plain function may be called by several threads at once.

    Example:
        >>> async def look_up(ids):
        ...     reply = await client.get(url, params={"ids": ids.tolist()})
        ...     return np.asarray(reply.json(), np.float32)
        >>> @jax.jit
        ... def step(ids):
        ...     rows = io_callback(look_up, jax.ShapeDtypeStruct(ids.shape, "float32"), ids)
        ...     return rows.sum()

    Source: ``jax.experimental.io_callback`` (JAX 0.10).

    .. versionadded:: 0.3
    """
    specs = ResultSpecs(result_shape_dtypes, vectorized=False)
    target, args, kwargs = _prepared("io_callback", callback, specs, args, kwargs)
    if ordered or not _is_async(callback):
        leaves = _compat.io_callback(
            target, specs.flat, *args, sharding=sharding, ordered=ordered, **kwargs
        )
    else:
        ticket = _compat.io_callback(
            target.in_part("start"), _TICKET, *args, sharding=sharding, **kwargs
        )
        leaves = _compat.io_callback(
            target.in_part("finish"), specs.flat, ticket, sharding=sharding
        )
    return specs.unflattened(leaves)


def pure_callback(
    callback: Callable[..., Any],
    result_shape_dtypes: Any,
    *args: Any,
    sharding: Any = None,
    vmap_method: str | None = None,
    **kwargs: Any,
) -> Any:
    """Call a function, or a coroutine function, without side effects from jitted code.

    :func:`jax.pure_callback`, which also takes an ``async def``; see :func:`io_callback` for where it
    runs, what it sees, and how its errors arrive. JAX may drop a call, repeat it, or move it.

    Args:
        callback: a pure function of its arguments.
        result_shape_dtypes: pytree of what it returns, for a call without ``vmap``.
        *args: pytrees of arrays and of typed keys.
        sharding: the device that calls it.
        vmap_method: what ``vmap`` does; ``None`` refuses it. With ``"expand_dims"`` and
            ``"broadcast_all"`` one call gets all elements, and returns them with a dimension in front.
        **kwargs: as ``*args``.

    Returns:
        pytree of :class:`jax.Array`, as ``result_shape_dtypes``.

    Raises: as for :func:`io_callback`.

    Ordering: none. Callbacks of coroutines overlap as those of :func:`io_callback` do.

    Transformations: as JAX's. To differentiate, give the function that calls it a ``jax.custom_jvp``.

    Example:
        >>> y = pure_callback(evaluate, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")

    Source: ``jax.pure_callback`` (JAX 0.10).

    .. versionadded:: 0.3
    """
    vectorized = vmap_method not in (None, "sequential", "sequential_unrolled")
    specs = ResultSpecs(result_shape_dtypes, vectorized)
    target, args, kwargs = _prepared("pure_callback", callback, specs, args, kwargs)
    call = functools.partial(jax.pure_callback, sharding=sharding, vmap_method=vmap_method)
    # "legacy_vectorized" does not tell the start which shape the tickets have to have.
    if _is_async(callback) and vmap_method != "legacy_vectorized":
        ticket = call(target.in_part("start"), _TICKET, *args, **kwargs)
        # The arguments once more, because JAX may repeat this part alone.
        leaves = call(target.in_part("finish"), specs.flat, ticket, *args, **kwargs)
    else:
        leaves = call(target, specs.flat, *args, **kwargs)
    return specs.unflattened(leaves)


def debug_callback(
    callback: Callable[..., Any] | None = None,
    *args: Any,
    ordered: bool = False,
    partitioned: bool = False,
    **kwargs: Any,
) -> Callable[..., None] | None:
    """Call a function, or a coroutine function, from jitted code to look at values.

    ``jax.debug.callback``, which also takes an ``async def``; see :func:`io_callback` for where it
    runs, what it sees, and how its errors arrive. The program waits for the coroutine.

    Two forms, as JAX has them: ``debug_callback(ordered=True)(report, loss)`` passes every keyword of
    the second call on to the callback; ``debug_callback(report, loss, ordered=True)`` does both at once.

    Args:
        callback: its result is ignored. Without it the call returns a function that takes it.
        *args: pytrees of arrays, of typed keys, and of plain Python values.
        ordered: keep the order of all ordered ones that one thread dispatches.
        partitioned: one call per device, with its part, instead of one with everything.
        **kwargs: as ``*args``.

    Raises: as for :func:`io_callback`.

    Transformations: as JAX's: it may be dropped, repeated or moved; ``grad`` and ``vmap`` work.

    Example:
        >>> debug_callback(report, step=step, loss=loss)    # async def report(step, loss)

    Source: ``jax.debug.callback`` (JAX 0.10).

    .. versionadded:: 0.3
    """
    options = {"ordered": ordered, "partitioned": partitioned}
    if callback is None:
        if args or kwargs:
            raise ArgumentError(
                "debug_callback got arguments without a callback: debug_callback(ordered=True)(callback, "
                "*args), or debug_callback(callback, *args, ordered=True)"
            )
        return functools.partial(_debug_callback, options)
    _debug_callback(options, callback, *args, **kwargs)
    return None


def _debug_callback(
    options: dict[str, bool], callback: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> None:
    target, args, kwargs = _prepared("debug_callback", callback, None, args, kwargs)
    # In one piece: its keywords may have the names of options.
    _compat.debug_callback(target.in_part("debug"), args, kwargs, **options)
