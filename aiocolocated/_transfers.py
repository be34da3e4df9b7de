# SPDX-License-Identifier: Apache-2.0
"""Transfers: ``device_put`` and ``device_get`` off the loop, with a bound on the bytes in flight.

A transfer is a call like any other, in a channel of its own. It first looks at its leaves on a worker,
then waits in its channel, without a thread, for those that are still computing and for room among the
bytes in flight, and then moves the leaves part by part.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.core import Tracer

from aiocolocated import _compat, _readiness, _remote_transfers, _specs, _values
from aiocolocated._calls import Call
from aiocolocated._channels import TaskChannel, new_channel
from aiocolocated._exceptions import ArrayDeletedError
from aiocolocated._execution import RunnableCall
from aiocolocated._futures import ArrayFuture
from aiocolocated._loops import Wakes
from aiocolocated._owners import Owner, current_owner
from aiocolocated._remote_plans import RemoteSpecialization
from aiocolocated._remote_transfers import fetch_there, get_there, is_remote, put_there
from aiocolocated._submission import submit, transfers
from aiocolocated._types import RUNNING
from aiocolocated._workers import local
from aiocolocated.hosts.remote import hosts_are_open

if TYPE_CHECKING:
    from types import CodeType

    from aiocolocated._protocols import Args, CallChannel, Kwargs

# A transfer that is cancelled stops between two parts: whole leaves, up to so many and so large.
_PART_LEAVES = 64
_PART_BYTES = 16 << 20

_tree_flatten = jax.tree_util.tree_flatten
_tree_leaves = jax.tree_util.tree_leaves
_tree_unflatten = jax.tree_util.tree_unflatten


def device_put(
    x: Any,
    device: Any = None,
    *,
    src: Any = None,
    donate: Any = False,
    may_alias: Any = None,
) -> ArrayFuture[Any]:
    """Transfer a tree to devices, off the loop: :func:`jax.device_put` as a submitted call.

    Takes what JAX's function takes and gives what it gives. All leaves are on their way at once; those
    that are array futures, or still computing, are waited for first, without a thread.

    Args:
        x: pytree of arrays, NumPy arrays, Python scalars, typed PRNG keys and array futures. NumPy arrays
            must not be changed until the transfer is ready, nor later on the CPU backend, where JAX may
            go on to use their memory whatever ``may_alias`` is.
        device: ``None`` for the default device, a device, sharding, format or partition spec, or a tree
            of these that is a prefix of ``x``.
        src: where ``x`` is, as for JAX; rarely needed.
        donate: whether ``x`` may be used up, or a prefix tree of that. A tree with anything donated is
            moved in one part.
        may_alias: whether results may share memory with JAX arrays of ``x``, or a prefix tree of that.

    Returns:
        A future of the tree on its devices. It belongs to the block around it and may be an argument of
        other calls, which start when the arrays exist, before the bytes have arrived.

    Raises:
        TracedCallError: called while JAX traces.
        ArgumentError: a leaf is a coroutine, a stream or the like.
        ArrayDeletedError: of the future: a leaf was deleted or donated; the message has its path.
        Exception: of the future: what JAX raises, with a note that has the path of the leaf.

    Ordering: none, neither between transfers nor with other calls: each has a channel of its own. What
        depends on a transfer takes its future as an argument. ``channel.submit(device_put, x)`` gives it
        a place in a channel.

    Transfers start as their inputs are ready, first come, first served, while their bytes fit into
    ``transfer_bytes_in_flight`` (:func:`configure`); a larger one goes alone.

    Cancellation: a queued transfer never starts, and drops its inputs; one that runs stops between
        leaves, and drops what it has made. What was donated by then is gone.

    Thread safety: any thread; without a loop use ``device_put(x).result()``.

    Example:
        >>> batch = await device_put(numpy_batch, sharding)

    Source: ``jax.device_put`` (JAX 0.10).

    .. versionadded:: 0.3
    """
    options = {"src": src, "donate": donate, "may_alias": may_alias}
    frame = sys._getframe(1)
    return submit(_put.prepare(None, (x, device), options, frame.f_code, frame.f_lasti))


def device_get(x: Any) -> ArrayFuture[Any]:
    """Transfer a tree to the host, off the loop: :func:`jax.device_get` as a submitted call.

    Gives what JAX's function gives: a NumPy array for each array, read-only, of the CPU backend often
    without a copy; other leaves as they are. The copies of all leaves are begun before the first is
    waited for.

    Args:
        x: pytree of arrays of any kind and of array futures. What is still computing is waited for
            first, without a thread.

    Returns:
        A future of the tree of NumPy arrays. It belongs to the block around it and may be an argument of
        other calls.

    Raises:
        TracedCallError: called while JAX traces.
        ArgumentError: a leaf is a coroutine, a stream or the like.
        ArrayDeletedError: of the future: a leaf was deleted or donated; the message has its path.
        RuntimeError: of the future: a leaf has shards in other processes (JAX's own error, which says
            what to do), or its computation failed; a note has the path of the leaf.

    Ordering, cancellation, thread safety and the bound on the bytes in flight: as for
    :func:`device_put`.

    Example:
        >>> metrics = await device_get(train_step(state))

    Source: ``jax.device_get`` (JAX 0.10).

    .. versionadded:: 0.3
    """
    frame = sys._getframe(1)
    return submit(_get.prepare(None, (x,), {}, frame.f_code, frame.f_lasti))


class _Parcel:
    """The leaves of one transfer: those that are still to be moved, and those that have been."""

    __slots__ = ("leaves", "made", "options", "remote", "sizes", "stopped", "tree", "whole")

    def __init__(self, x: Any, **options: Any) -> None:
        self.leaves, self.tree = _tree_flatten(x)
        self.options = options  # of `jax.device_put`
        self.sizes: list[int] = []
        self.made: list[Any] = []
        self.whole = False  # moved in one part
        self.remote = False  # from or to other hosts
        self.stopped = False  # the call was cancelled meanwhile

    def parts(self) -> Iterator[tuple[int, int]]:
        """Where each part starts and stops."""
        start = size = 0
        if not self.whole:
            for i, more in enumerate(self.sizes):
                if i - start == _PART_LEAVES or (i > start and size + more > _PART_BYTES):
                    yield start, i
                    start, size = i, 0
                size += more
        yield start, len(self.leaves)

    def numbered(self) -> Any:
        """The tree, with the number of each leaf in its place."""
        return _tree_unflatten(self.tree, range(len(self.leaves)))

    def describe(self, number: int) -> str:
        """Words for a leaf, with its path."""
        try:
            path, _ = jax.tree_util.tree_flatten_with_path(self.numbered())[0][number]
            where = f"x{jax.tree_util.keystr(path)}"
        except Exception:  # a container of the user's that does not take numbers
            where = f"leaf {number} of x"
        return f"{where} ({_specs.describe(self.leaves[number])})"

    def drop(self) -> None:
        """Let go of everything but what is still on its way.

        One leaf at a time: a large one takes milliseconds, and threads that want the interpreter lock
        get it in between.
        """
        self.stopped = True
        while self.leaves:
            self.leaves.pop()
        while self.made and _compat.all_ready(_arrays_in(self.made[-1:])):
            self.made.pop()


class _Transfer:
    """What transfers of one kind run (a ``Plan``)."""

    name: str
    host = "in-process"
    devices = None
    ships = False
    dispatches = False

    def pack(self, x: Any) -> _Parcel:
        """The arguments of the call as a parcel."""
        return _Parcel(x)

    def sizes(self, leaves: Sequence[Any]) -> list[int]:
        """The bytes to move for each leaf."""
        raise NotImplementedError

    def may_compute(self, sources: Sequence[Any]) -> bool:
        """Whether JAX may run a program over several devices."""
        return False

    def begin(self, parcel: _Parcel) -> None:
        """Comes before the first part."""

    def move(self, parcel: _Parcel, start: int, stop: int) -> Sequence[Any]:
        """Move some leaves."""
        raise NotImplementedError

    # -- submitting ---------------------------------------------------------------------------------

    def prepare(
        self,
        channel: CallChannel | None,
        args: Args,
        kwargs: Kwargs,
        code: CodeType,
        lasti: int,
        owner: Owner | None = None,
    ) -> ArrayFuture[Any]:
        if _compat.tracing():
            raise _values.refuse_traced(self.name)
        parcel = self.pack(*args, **kwargs)
        kinds = set(map(type, parcel.leaves))
        for kind in kinds:
            if issubclass(kind, Tracer):  # one that escaped its trace
                raise _values.refuse_traced(self.name)
            if issubclass(kind, _values.unfinished):
                number = [type(x) for x in parcel.leaves].index(kind)
                what = f"{self.name}: {parcel.describe(number)} is"
                raise _values.refused(parcel.leaves[number], what)
        call: ArrayFuture[Any] = ArrayFuture._create(
            self,
            (parcel,),
            {},
            channel or new_channel(self.name),
            owner or current_owner(),
            asyncio._get_running_loop(),
            code,
            lasti,
        )
        call._look = self._look
        if ArrayFuture in kinds:
            call._convert = True
            call._futures = self.futures((parcel,), {})
        if hosts_are_open():
            self.send_at_once(call, parcel)
        return call

    def send_at_once(self, call: ArrayFuture[Any], parcel: _Parcel) -> None:
        """Note where a transfer goes, if that can be seen already: what depends on it may follow it."""

    def is_loaded(self) -> bool:
        return True

    def body(self) -> Callable[..., Any]:
        return self._run

    def futures(self, args: Args, kwargs: Kwargs) -> list[Call]:
        return [x for x in args[0].leaves if type(x) is ArrayFuture]

    # -- on a worker --------------------------------------------------------------------------------

    def bind(self, args: Args, kwargs: Kwargs, values: dict[int, Any]) -> tuple[Args, Kwargs]:
        parcel: _Parcel = args[0]
        leaves = [values[id(x)] if type(x) is ArrayFuture else x for x in parcel.leaves]
        parcel.leaves, parcel.tree = _tree_flatten(_tree_unflatten(parcel.tree, leaves))
        return args, kwargs

    def _look(self, call: RunnableCall) -> list[Any]:
        """Before all else: how much there is to move, and which arrays to wait for."""
        call._bind_now()
        parcel: _Parcel = call._args[0]
        sources = _arrays_in(parcel.leaves)
        parcel.sizes = self.sizes(parcel.leaves)
        call._size = sum(parcel.sizes)
        call._gate = transfers
        call._object = _Room(call)
        call._wide = self.may_compute(sources)
        if call._group is None and hosts_are_open():
            plan = self.there(parcel)
            if plan is not None:
                call._plan = plan
                if plan.flat is not None:
                    call._args = tuple(sources)
                plan.mark(call)
        return sources

    def there(self, parcel: _Parcel) -> RemoteSpecialization | None:
        """The plan of a transfer that hosts see to, and no thread of this process."""
        return None

    def _run(self, parcel: _Parcel) -> _Parcel:
        call = local.call
        self.begin(parcel)
        for start, stop in parcel.parts():
            if call._state != RUNNING:
                parcel.drop()
                break
            parcel.made += self._guard(self.move, parcel, start, stop)
            for i in range(start, stop):
                parcel.leaves[i] = None
        return parcel

    def _guard(
        self,
        act: Callable[[_Parcel, int, int], Sequence[Any]],
        parcel: _Parcel,
        start: int,
        stop: int,
    ) -> Sequence[Any]:
        """Do something with some leaves; if it fails, with one at a time, so that the error names one."""
        try:
            return act(parcel, start, stop)
        except Exception as error:
            # JAX's frames hold the leaves, and tell nobody anything: they are left out.
            for i in range(start, stop):
                if any(a.is_deleted() for a in _arrays_in(parcel.leaves[i : i + 1])):
                    raise ArrayDeletedError(
                        f"{self.name}: {parcel.describe(i)} was deleted or donated before it was "
                        "transferred"
                    ) from error.with_traceback(None)
            if stop - start == 1:
                error.add_note(f"{self.name}: the leaf is {parcel.describe(start)}")
            if stop - start == 1 or parcel.whole:
                raise error.with_traceback(None) from None
        return [y for i in range(start, stop) for y in self._guard(act, parcel, i, i + 1)]

    def finish(self, value: Any) -> tuple[Any, Sequence[Any]]:
        parcel: _Parcel = value
        made = parcel.made
        return None if parcel.stopped else _tree_unflatten(parcel.tree, made), _arrays_in(made)


class _Put(_Transfer):
    name = "device_put"

    def pack(
        self,
        x: Any,
        device: Any = None,
        *,
        src: Any = None,
        donate: Any = False,
        may_alias: Any = None,
    ) -> _Parcel:
        return _Parcel(x, device=device, src=src, donate=donate, may_alias=may_alias)

    def sizes(self, leaves: Sequence[Any]) -> list[int]:
        return [n if type(n := getattr(x, "nbytes", 0)) is int else 0 for x in leaves]

    def there(self, parcel: _Parcel) -> RemoteSpecialization | None:
        options = parcel.options
        if options["donate"] is not False:
            return None
        return put_there(parcel, options["device"])

    def send_at_once(self, call: ArrayFuture[Any], parcel: _Parcel) -> None:
        if call._futures is None and (plan := self.there(parcel)) is not None:
            call._plan = plan
            plan.mark(call)

    def may_compute(self, sources: Sequence[Any]) -> bool:
        return any(len(a.sharding.device_set) > 1 and not is_remote(a) for a in sources)

    def begin(self, parcel: _Parcel) -> None:
        """Give each leaf its own value of what is a prefix of the tree."""
        options = parcel.options
        try:
            spread = {k: _for_each(v, parcel.numbered()) for k, v in options.items()}
        except Exception:  # no prefix: JAX has words for that
            spread = {}
        donate = spread.get("donate")
        device = spread.get("device")
        if any(
            map(is_remote, (*parcel.leaves, *(device if isinstance(device, list) else [device])))
        ):
            parcel.options = spread
            parcel.remote = True
            return
        if donate is False or (isinstance(donate, list) and not any(donate)):
            parcel.options = spread
        else:  # what JAX refuses about any leaf has to come before one of them is used up
            parcel.whole = True

    def move(self, parcel: _Parcel, start: int, stop: int) -> Sequence[Any]:
        options = parcel.options
        leaves = parcel.leaves[start:stop]
        _readiness.check(_arrays_in(leaves))  # or the failure of a computation names no leaf
        if parcel.remote:
            device = options["device"]
            targets = device[start:stop] if isinstance(device, list) else [device] * len(leaves)
            return _remote_transfers.put(leaves, targets)
        if parcel.whole:
            return _tree_leaves(jax.device_put(_tree_unflatten(parcel.tree, leaves), **options))
        options = {k: v[start:stop] if isinstance(v, list) else v for k, v in options.items()}
        made: list[Any] = jax.device_put(leaves, **options)
        return made


class _Get(_Transfer):
    name = "device_get"

    def sizes(self, leaves: Sequence[Any]) -> list[int]:
        kinds = {kind for kind in set(map(type, leaves)) if issubclass(kind, jax.Array)}
        return [x.nbytes if type(x) in kinds else 0 for x in leaves]

    def there(self, parcel: _Parcel) -> RemoteSpecialization | None:
        if sum(parcel.sizes) > _PART_BYTES:  # mapping so much takes a moment
            return None
        return get_there(parcel.leaves, parcel.tree)

    def send_at_once(self, call: ArrayFuture[Any], parcel: _Parcel) -> None:
        if call._futures is not None and (plan := fetch_there(parcel)) is not None:
            call._plan = plan
            call._args = (parcel.leaves[0],)
            call._look = None  # nobody knows how much it will be
            plan.mark(call)

    def begin(self, parcel: _Parcel) -> None:
        """Start every copy, as JAX does for one part."""
        if len(list(parcel.parts())) > 1:
            self._guard(_start_copies, parcel, 0, len(parcel.leaves))

    def move(self, parcel: _Parcel, start: int, stop: int) -> Sequence[Any]:
        leaves = parcel.leaves[start:stop]
        if any(map(is_remote, leaves)):
            return _remote_transfers.get(leaves)
        made: list[Any] = jax.device_get(leaves)
        return made


class _Room:
    """Gives a transfer's room back (a ``CallCounter``)."""

    __slots__ = ("_call",)

    def __init__(self, call: Call) -> None:
        self._call = call

    def call_taken(self) -> None:
        """Not yet, at submission."""

    def call_over(self, wakes: Wakes) -> None:
        """The call is over and nothing of it runs (under the lock)."""
        TaskChannel._hand_out(transfers.give_back(self._call))


def _arrays_in(leaves: Sequence[Any]) -> list[Any]:
    kinds = {kind for kind in set(map(type, leaves)) if issubclass(kind, jax.Array)}
    if not kinds:
        return []
    return [a for x in leaves if type(x) in kinds and (a := _values.array_of(x)) is not None]


def _for_each(option: Any, tree: Any) -> Any:
    """A prefix of a tree as a list with a value for each leaf; a value for all stays as it is."""
    if option is None or jax.tree_util.all_leaves((option,)):
        return option
    values: list[Any] = []

    def add(value: Any, part: Any) -> None:
        values.extend([value] * len(_tree_leaves(part)))

    jax.tree_util.tree_map(add, option, tree, is_leaf=lambda x: x is None)
    return values


def _start_copies(parcel: _Parcel, start: int, stop: int) -> Sequence[Any]:
    with _compat.explicit_device_get():
        for array in _arrays_in(parcel.leaves[start:stop]):
            if not is_remote(array):
                array.copy_to_host_async()
    return ()


_put, _get = _Put(), _Get()

# For channels and task groups, which are given the function.
device_put.__dict__["_prepare_call"] = _put.prepare
device_get.__dict__["_prepare_call"] = _get.prepare
