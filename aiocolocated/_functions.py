# SPDX-License-Identifier: Apache-2.0
"""Colocated functions: specs are checked at the call, code is shipped once, calls become futures."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast, final, overload

import jax
from jax.core import Tracer

from aiocolocated import _cache, _compat, _serialization, _settings, _specs, _values
from aiocolocated._calls import Call
from aiocolocated._channels import TaskChannel, current_channel, new_channel
from aiocolocated._devices import spread_over
from aiocolocated._exceptions import ArgumentError, SpecError
from aiocolocated._futures import ArrayFuture
from aiocolocated._owners import Owner, current_owner
from aiocolocated._protocols import Args, Kwargs
from aiocolocated._reducers import Reducer, reducer
from aiocolocated._remote_plans import RemoteSpecialization, following, reroute
from aiocolocated._specializations import FunctionCode, Specialization, no_devices
from aiocolocated._submission import cancel_owned, settle_owned, submit
from aiocolocated._types import READY
from aiocolocated.hosts import _wire
from aiocolocated.hosts.inprocess import inprocess_host
from aiocolocated.hosts.remote import group_of, hosts_are_open

if TYPE_CHECKING:
    from types import CodeType

    from aiocolocated._specs import Devices, KeyPath

P = ParamSpec("P")
R = TypeVar("R")

ArrayImpl = _compat.ArrayImpl
_tree_flatten = jax.tree_util.tree_flatten
_get_running_loop = asyncio._get_running_loop
_tracing = _compat.tracing
_create = ArrayFuture._create


_serialization.refuse(ArrayFuture)
_serialization.refuse(TaskChannel)


# --- the public object -----------------------------------------------------------------------------


@final
class ColocatedFunction(Generic[P, R]):
    """A Python function that runs on the hosts of its arguments' devices.

    Made by :func:`colocated_python`. Calling it submits a call to the current task channel and
    returns an :class:`ArrayFuture` at once.
    """

    __slots__ = (
        "__dict__",
        "__weakref__",
        "_base",
        "_devices",
        "_in_specs",
        "_keep",
        "_last",
        "_out_specs_fn",
        "_reduce",
    )

    def __init__(
        self,
        base: FunctionCode,
        in_specs: Any = None,
        out_specs_fn: Callable[..., Any] | None = None,
        devices: Devices | None = None,
        keep: object = None,
        reduce: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._base = base
        self._keep = keep  # of a method, its object
        self._in_specs = in_specs
        self._out_specs_fn = out_specs_fn
        self._devices = devices
        self._reduce = reduce
        self._last: Specialization | None = None
        functools.update_wrapper(self, base.function)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> ArrayFuture[R]:
        """Submit a call to the current channel.

        Arguments may be any pytree of :class:`jax.Array` (typed PRNG keys included), NumPy arrays
        and scalars (placed on the call's devices, dtype kept), array futures, and plain Python
        values. Arrays are not copied; they must not be deleted, donated or, for Python values,
        mutated until the call is dispatched.

        Raises:
            TypeError: the function does not take such arguments, as for any function.
            SpecError: the arguments differ from ``in_specs``, or are on several device lists.
            TracedCallError: called under jit, vmap, grad or another transformation.
            WouldBlock: the current channel is bounded and full (on a loop's thread).
            ChannelClosedError, ChannelStoppedError: the current channel takes no calls.
        """
        frame = sys._getframe(1)
        call: ArrayFuture[Any] = self._prepare_call(None, args, kwargs, frame.f_code, frame.f_lasti)
        return submit(call)

    def _prepare_call(
        self,
        channel: TaskChannel | None,
        args: Args,
        kwargs: Kwargs,
        code: CodeType,
        lasti: int,
        owner: Owner | None = None,
    ) -> ArrayFuture[Any]:
        """Make a call, for the current channel if none is given."""
        base = self._base
        if _tracing():
            raise _values.refuse_traced(base.name)
        loop = _get_running_loop()
        if channel is None:
            channel = current_channel(loop)
        plan = self._last
        flat = plan.flat if plan is not None else None
        if flat is not None and not kwargs and len(args) == len(flat):
            # The common case: the same specs as last time, at 0.1 us per array.
            for x, (aval, sharding) in zip(args, flat):  # noqa: B905
                if (
                    type(x) is not ArrayImpl
                    or (
                        (a := x.aval) is not aval
                        and (a.shape != aval.shape or a.dtype != aval.dtype)
                    )
                    or ((s := x.sharding) is not sharding and s != sharding)
                ):
                    break
            else:
                call = _create(
                    plan,  # type: ignore[arg-type]
                    args,
                    kwargs,
                    channel,
                    owner or current_owner(),
                    loop,
                    code,
                    lasti,
                )
                if plan.special:  # type: ignore[union-attr]
                    plan.mark(call)  # type: ignore[union-attr]
                return call  # type: ignore[no-any-return]
        plan, futures, convert = self._specialization(args, kwargs)
        if plan.per_call:
            plan, convert = plan.of_one_call(), True
            if plan.devices is None and futures:
                plan = following(plan, futures)
        call = _create(plan, args, kwargs, channel, owner or current_owner(), loop, code, lasti)
        if plan.special:
            plan.mark(call)
        if convert:
            call._futures = futures or None
            call._convert = True
            if plan.devices is None and futures and hosts_are_open():
                call._look = reroute  # the futures' values may turn out to be on other hosts
        return call  # type: ignore[no-any-return]

    def _specialization(
        self, args: Args, kwargs: Kwargs
    ) -> tuple[Specialization, list[Call], bool]:
        leaves, tree = _tree_flatten((args, kwargs))
        futures: list[Call] = []
        parts: list[Any] = []
        convert = static = False
        for leaf in leaves:
            if type(leaf) is ArrayImpl:
                parts.append((leaf.shape, leaf.dtype, leaf.sharding))
            elif type(leaf) is ArrayFuture:
                futures.append(leaf)
                parts.append(ArrayFuture)
                convert = True
            elif isinstance(leaf, Tracer):
                raise _values.refuse_traced(self._base.name)
            elif isinstance(leaf, jax.Array):
                parts.append((leaf.shape, leaf.dtype, leaf.sharding))
            elif _values.is_numpy(leaf):
                parts.append((leaf.shape, leaf.dtype))
                convert = True
            elif isinstance(leaf, _values.unfinished):
                raise self._refused_argument(args, kwargs, leaf)
            else:
                parts.append(None)  # a Python value: its specialization is that of any other value
                static = True
        devices = self._devices
        if devices is None and self._base.object is not None and self._in_specs is None:
            told = any(isinstance(leaf, (jax.Array, ArrayFuture)) for leaf in leaves)
            devices = None if told else self._base.object.devices_of_home()
        key = (
            tree,
            tuple(parts),
            devices,
            _cache.function_key(self._out_specs_fn),
            self._in_specs_key(),
            _cache.function_key(self._reduce),
        )
        make = functools.partial(
            self._specialize, args, kwargs, devices, len(leaves), static, bool(futures)
        )
        plan = self._base.cache.get(key, make)
        if plan is not self._last:
            if self._last is None:
                self._base.cache.add_user(self)
            self._last = plan
        return plan, futures, convert

    def _refused_argument(self, args: Args, kwargs: Kwargs, wrong: Any) -> ArgumentError:
        with_path = jax.tree_util.tree_flatten_with_path((args, kwargs))[0]
        path = next(path for path, leaf in with_path if leaf is wrong)
        where = _specs.argument_path(path, self._base.function)
        return _values.refused(wrong, f"call of {self._base.name}: {where} is")

    def _in_specs_key(self) -> Any:
        if self._in_specs is None:
            return None
        leaves, tree = _tree_flatten(self._in_specs)
        return tree, tuple((s.shape, s.dtype, s.sharding) for s in leaves)

    def _specialize(
        self,
        args: Args,
        kwargs: Kwargs,
        devices: Devices | None,
        count: int,
        static: bool,
        late: bool,
    ) -> Specialization:
        """Check the arguments of a first call and prepare for more like it."""
        base = self._base
        base.check_signature(args, kwargs)
        what = f"call of {base.name}"

        def name_path(path: KeyPath) -> str:
            return _specs.argument_path(path, base.function)

        if self._in_specs is not None and not late:
            error = _specs.difference(what, self._in_specs, (args, kwargs), name_path)
            if error is not None:
                raise error
        if devices is None and self._in_specs is not None:
            devices = _spec_devices(self._in_specs)
        with_path = jax.tree_util.tree_flatten_with_path((args, kwargs))[0]
        devices = _specs.common_devices(
            what, [(p, x) for p, x in with_path if isinstance(x, jax.Array)], devices, name_path
        )
        if devices is None and not late and not base.anywhere:
            raise no_devices(base)
        group = group_of(devices)
        for device in devices or () if group is None else ():
            if device.process_index != base.host.process_index:
                raise SpecError(
                    f"{what}: {device} belongs to process {device.process_index}; the "
                    f"{base.host.name} host only has those of process {base.host.process_index}"
                )
        in_specs = self._in_specs
        if in_specs is None and self._out_specs_fn is not None and not late and not static:
            in_specs = _specs.specs_of(args, kwargs)
        all_arrays = not kwargs and not static and all(type(x) is ArrayImpl for x in args)
        flat = None
        if all_arrays and len(args) == count:
            flat = tuple((x.aval, x.sharding) for x in args)
        if group is not None:
            assert devices is not None
            return RemoteSpecialization(
                base, in_specs, self._out_specs_fn, devices, group, flat, self._reduce
            )
        return Specialization(base, in_specs, self._out_specs_fn, devices, flat, self._reduce)

    def specialize(
        self,
        in_specs: Any = None,
        out_specs_fn: Callable[..., Any] | None = None,
        devices: _compat.Device | Sequence[_compat.Device] | jax.sharding.Mesh | None = None,
        reduce: Reducer | None = None,
    ) -> ColocatedFunction[P, R]:
        """A version of the function with more fixed in advance; each thing can be given once.

        Args:
            in_specs: pytree of :class:`jax.ShapeDtypeStruct` with shardings, in the form
                ``(args, kwargs)``; a call's arguments are checked against it before submission.
            out_specs_fn: called with the input specs as the function is with its arguments; returns
                the pytree of specs that every result is checked against. Runs on a worker thread.
            devices: where to run; needed for calls without arrays.
            reduce: makes one result of those of several hosts: a function of their list, in the order of
                the hosts, or ``"list"``, ``"any"``, ``"all"``, ``"intersection"`` (of sets) or
                ``"equal"``. Without it every host must give the same tree: global arrays, and Python
                values that are equal. Runs on the controller; on one host its list has one result.

        Returns:
            A new function; the original is unchanged. Equal specializations share their entry in the
            cache, and all share the shipped code.

        Raises:
            SpecError: something was given already, or is no tree of specs.

        Source: ``jax.experimental.colocated_python`` (JAX 0.10).

        Example:
            >>> g = f.specialize(devices=jax.devices("cpu")[:1])
            >>> step = await g(3)                  # no array in sight
        """
        for what, new, old in (
            ("in_specs", in_specs, self._in_specs),
            ("out_specs_fn", out_specs_fn, self._out_specs_fn),
            ("devices", devices, self._devices),
            ("reduce", reduce, self._reduce),
        ):
            if new is not None and old is not None:
                raise SpecError(f"{self._base.name}: {what} already specified")
        if in_specs is not None:
            _check_in_specs(self._base.name, in_specs)
            in_specs = (tuple(in_specs[0]), in_specs[1])
        if out_specs_fn is not None and not callable(out_specs_fn):
            raise SpecError(
                f"{self._base.name}: out_specs_fn must be callable, got {out_specs_fn!r}"
            )
        return ColocatedFunction(
            self._base,
            in_specs if in_specs is not None else self._in_specs,
            out_specs_fn or self._out_specs_fn,
            _specs.as_devices(devices) if devices is not None else self._devices,
            self._keep,
            reducer(reduce) or self._reduce,
        )

    async def map(
        self, *iterables: Iterable[Any], limit: int | None = None, devices: Any = None
    ) -> list[R]:
        """Call the function on every item, concurrently, and return the results in order.

        Like ``[await f(x) for x in xs]``, with a channel of its own for each call. Items are taken
        from the iterables only as calls finish.

        Args:
            *iterables: one per positional argument, as for :func:`map`; they end with the shortest.
            limit: calls under way at once; default ``worker_limit``, with ``devices`` two for each.
            devices: spread the calls over these devices, or the hosts of :func:`open_hosts` (one device
                each): every call goes to the one with the fewest calls under way.

        Raises:
            Exception: the first error, after the other calls were cancelled and none runs any more.

        Ordering: none between the calls.

        Cancellation: cancels the calls, waits until none runs, then raises.

        Example:
            >>> images = await decode.map(files, limit=8)
            >>> tokens = await tokenize.map(texts, devices=hosts)
        """
        lanes: list[_Lane] = []
        if devices is not None:
            lanes = [_Lane(self.specialize(devices=device)) for device in spread_over(devices)]
        if limit is None:
            limit = 2 * len(lanes) or _settings.current.worker_limit
        if limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit}")
        frame = sys._getframe(1)
        code, lasti = frame.f_code, frame.f_lasti
        del frame
        owner = Owner(current_owner())
        calls: list[ArrayFuture[Any]] = []
        failed: list[ArrayFuture[Any]] = []
        slots = asyncio.Semaphore(limit)
        cancelled = False

        def over(lane: _Lane | None, call: ArrayFuture[Any]) -> None:
            if call._state != READY:
                failed.append(call)
            if lane is not None:
                lane.calls -= 1
            slots.release()

        try:
            items = zip(*iterables)  # noqa: B905 - ends with the shortest, as map() does
            while True:
                await slots.acquire()
                if failed:
                    break
                args = next(items, None)
                if args is None:
                    slots.release()
                    break
                lane = min(lanes, key=_calls_of, default=None)
                function = self if lane is None else lane.function
                if lane is not None:
                    lane.calls += 1
                call = function._prepare_call(new_channel(), args, {}, code, lasti, owner)
                call.add_done_callback(functools.partial(over, lane))
                calls.append(submit(call))
            for _ in range(limit):
                if failed:
                    return cast("list[R]", [await failed[0]])  # raises
                await slots.acquire()
            if failed:
                return cast("list[R]", [await failed[0]])
            return [call._value for call in calls]
        except KeyboardInterrupt:
            owner.given_up = True
            raise
        except asyncio.CancelledError:
            cancelled = True
            raise
        finally:
            if owner.live:
                cancel_owned(owner, "its map() ended")
                await settle_owned(owner, cancelled=cancelled)
            owner.take_unretrieved()
            owner.closed = True
            del self, calls, over
            failed.clear()

    def __repr__(self) -> str:
        return f"<ColocatedFunction {self._base.name}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} cannot be pickled; it can be captured by other colocated functions"
        )

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> ColocatedFunction[P, R]: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., Any]: ...
    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        raise TypeError(
            f"{self._base.name} is a colocated function on a class: methods cannot be colocated one "
            "by one; make it a staticmethod or a module-level function"
        )


def _reduce(function: ColocatedFunction[Any, Any]) -> Any:
    """To other hosts a colocated function goes as what it was made of, and is made anew there."""
    base = function._base
    if base.object is not None:
        raise TypeError(f"{function!r} is a method of a colocated object, which is not shipped")
    return _remake, (
        base.function,
        function._in_specs,
        function._out_specs_fn,
        function._devices,
        function._reduce,
    )


def _remake(function: Callable[..., Any], *fixed: Any) -> ColocatedFunction[..., Any]:
    in_specs, out_specs_fn, devices, reduce = fixed
    base = FunctionCode(function, inprocess_host())
    return ColocatedFunction(base, in_specs, out_specs_fn, devices, reduce=reduce)


class _Lane:
    """A device that calls of :meth:`ColocatedFunction.map` go to."""

    __slots__ = ("calls", "function")

    def __init__(self, function: ColocatedFunction[Any, Any]) -> None:
        self.function = function
        self.calls = 0  # under way


def _calls_of(lane: _Lane) -> int:
    return lane.calls


_serialization.carry_by_reference(ColocatedFunction)
_wire.register_reducer(ColocatedFunction, _reduce)


def _check_in_specs(name: str, in_specs: Any) -> None:
    if not (
        isinstance(in_specs, (tuple, list))
        and len(in_specs) == 2
        and isinstance(in_specs[0], (tuple, list))
        and isinstance(in_specs[1], dict)
    ):
        raise SpecError(
            f"{name}: in_specs must be the pair (args, kwargs), such as ((spec_of_x,), {{}}), "
            f"got {in_specs!r}"
        )
    _specs.check_specs(f"in_specs of {name}", in_specs)


def _spec_devices(in_specs: Any) -> Devices | None:
    with_path = jax.tree_util.tree_flatten_with_path(in_specs)[0]
    return _specs.common_devices(
        "in_specs",
        [(path, spec) for path, spec in with_path if spec.sharding is not None],
        None,
        _specs.argument_path,
    )


class _JaxCacheHook:
    """Empties the caches with ``jax.clear_caches()``."""

    def cache_clear(self) -> None:
        _cache.clear_all()

    def __hash__(self) -> int:
        return id(self)


_hook = _JaxCacheHook()
_compat.register_cache(_hook, "aiocolocated_specializations")


def clear_caches() -> None:
    """Empty the specialization caches; live functions and calls go on and specialize anew.

    :func:`jax.clear_caches` does the same. Shipped code stays.

    .. versionadded:: 0.1
    """
    _cache.clear_all()


def cache_info() -> _cache.CacheInfo:
    """What the specialization caches hold.

    .. versionadded:: 0.1
    """
    return _cache.info(inprocess_host().shipped)
