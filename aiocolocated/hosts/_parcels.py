# SPDX-License-Identifier: Apache-2.0
"""Parcels: NumPy arrays on their way to another process of this machine, not through the connection.

The sender copies them into shared memory and sends where that is. Who gets them maps it, and says when
nothing looks at it any more: then the sender uses the memory again. What is small, or goes to a process
that cannot look into this one, travels in the message.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from aiocolocated import _service, _values
from aiocolocated._settings import LOCK
from aiocolocated.hosts import _shared

SMALL = 1 << 17  # bytes; up to there a message is quicker

# Whether every process that this one sends to can look into it. One that runs elsewhere cannot.
sharing = _shared.AVAILABLE

_keys = itertools.count(1)
_sent: dict[int, tuple[_shared.Segment, set[Any]]] = {}  # what receivers still look at

# For each process that sends to this one: tells it that a parcel is not needed any more, and whether its
# memory may be used again.
release_to: dict[int, Callable[[int, bool], None]] = {}


class Parcel:
    """Some arrays, packed by the sender; unpacked by the receiver, where they are first looked at."""

    __slots__ = (
        "__weakref__",
        "_arrays",
        "_layout",
        "_owned",
        "_reuse",
        "_segment",
        "_token",
        "key",
    )

    def __init__(self, arrays: Sequence[Any], *, shared: bool = True) -> None:
        self.key = 0  # what the sender knows it by, if it is in shared memory
        self._token: _shared.Token | None = None
        self._owned = False  # by the receiver: another process waits to hear of its end
        self._reuse = True
        self._segment: _shared.Segment | None = None
        self._arrays: list[Any] | None = None
        arrays = [np.asarray(a) for a in arrays]
        if (
            shared
            and sharing
            and sum(a.nbytes for a in arrays) >= SMALL
            and not any(a.dtype.hasobject or a.dtype.kind == "T" for a in arrays)
        ):
            self._segment = _shared.share(arrays)
            self._token = self._segment.token
            self.key = next(_keys)
            offsets = self._segment.offsets
            self._layout: Any = [
                (a.shape, a.dtype, offset) for a, offset in zip(arrays, offsets, strict=True)
            ]
        else:
            self._layout = arrays

    def __reduce__(self) -> Any:
        return self.reduce()

    # -- the sender -------------------------------------------------------------------------------------

    def reduce(self) -> Any:
        """How it travels. Whoever passes on another process's parcel keeps it until it has arrived."""
        if self._owned:
            self._reuse = False
            return _passed_on, (self._token, self._layout)
        return _arrived, (self.key, self._token, self._layout)

    @property
    def is_own(self) -> bool:
        """Whether its memory is this process's, which receivers tell when they do not need it."""
        return self._segment is not None

    def claim(self, receivers: Sequence[Any]) -> None:
        """It is sent; keep it until each receiver has released it (under the lock)."""
        if self._segment is not None:
            _sent[self.key] = (self._segment, set(receivers))

    # -- the receiver -------------------------------------------------------------------------------------

    def arrays(self, *, private: bool = False) -> list[Any]:
        """The arrays, in memory that nobody writes to; with ``private`` the caller may.

        Raises:
            OSError: the sender is gone.
        """
        if self._arrays is None:
            if self._token is None:
                self._arrays = list(self._layout)
            else:
                dropped = functools.partial(_dropped, self._token[0], self.key, self._reuse)
                if not self._owned:
                    dropped = functools.partial(_dropped, 0, 0, False)
                keep = self._owned and self._reuse and not private
                data = _shared.attach(self._token, private=private, keep=keep, dropped=dropped)
                self._owned = False
                self._arrays = [
                    np.frombuffer(
                        data, dtype, count=int(np.prod(shape, dtype=np.int64)), offset=offset
                    ).reshape(shape)
                    for shape, dtype, offset in self._layout
                ]
        return self._arrays

    def __del__(self) -> None:
        if self._owned and self._token is not None:
            pid, key, reuse = self._token[0], self.key, self._reuse
            _service.inbox.put(functools.partial(_release, pid, key, reuse))


def _arrived(key: int, token: _shared.Token | None, layout: Any) -> Parcel:
    parcel = _passed_on(token, layout)
    parcel.key = key
    parcel._owned = token is not None
    return parcel


def _passed_on(token: _shared.Token | None, layout: Any) -> Parcel:
    parcel = Parcel(())
    parcel._token = token
    parcel._layout = layout
    return parcel


def _dropped(pid: int, key: int, reuse: bool, unmap: Callable[[], Any]) -> None:
    """Nothing looks at a parcel any more (any thread, under any lock)."""
    if _service.running:
        _service.inbox.put(functools.partial(_unmap, pid, key, reuse, unmap))
    else:
        unmap()  # the hosts are closed


def _unmap(pid: int, key: int, reuse: bool, unmap: Callable[[], Any]) -> None:
    unmap()
    _release(pid, key, reuse)


def _release(pid: int, key: int, reuse: bool) -> None:
    if key and (tell := release_to.get(pid)) is not None:
        tell(key, reuse)


def released(key: int, receiver: Any, reuse: bool) -> None:
    """A receiver does not need a parcel any more (the thread that receives)."""
    with LOCK:
        segment, receivers = _sent.get(key, (None, set()))
        receivers.discard(receiver)
        if segment is None or receivers:
            return
        del _sent[key]
    if reuse:
        segment.recycle()
    else:
        segment.close()


def lost(receiver: Any) -> None:
    """A receiver is gone, with all that it had."""
    with LOCK:
        keys = [key for key, (_, receivers) in _sent.items() if receiver in receivers]
    for key in keys:
        released(key, receiver, reuse=False)


def array_parcel(array: Any) -> Any:
    """How a large array among other values travels: as a parcel, or ``None`` if it is small."""
    if array.nbytes < SMALL or array.dtype.hasobject or not sharing:
        return None
    return Parcel([array])


def probe() -> _shared.Token | None:
    """What a process tries to attach, to see whether it can."""
    global _probe
    if _probe is None and _shared.AVAILABLE:
        _probe = _shared.share([b"probe"])
    return None if _probe is None else _probe.token


_probe: _shared.Segment | None = None


def reaches(token: Sequence[int] | None) -> bool:
    """Whether this process can attach another's :func:`probe`; if not, nothing is shared with it."""
    global sharing
    reached = False
    if token is not None:
        pid, fd, inode, nbytes = token
        with contextlib.suppress(OSError, ValueError):
            reached = bytes(_shared.attach((pid, fd, inode, nbytes))) == b"probe"
    sharing = sharing and reached
    return reached


def stop_sharing() -> None:
    """Some process cannot look into this one."""
    global sharing
    sharing = False


def only_array(parcel: Parcel) -> Any:
    """The array of a parcel with one, which its receiver may write to."""
    return parcel.arrays(private=True)[0]


class Packed:
    """Stands for a large NumPy array that is a leaf of the arguments: it is copied for this one place."""

    __slots__ = ("parcel",)

    def __init__(self, array: Any) -> None:
        self.parcel = Parcel([array])


def pack_leaves(tree: Any) -> Any:
    """Have the large arrays of a tree travel as parcels of their own."""
    leaves, treedef = jax.tree_util.tree_flatten(tree)
    if not sharing or not any(type(x) is np.ndarray and x.nbytes >= SMALL for x in leaves):
        return tree
    return jax.tree_util.tree_unflatten(
        treedef,
        [
            Packed(x)
            if type(x) is np.ndarray and x.nbytes >= SMALL and not x.dtype.hasobject
            else x
            for x in leaves
        ],
    )


def first_array(parcel: Parcel) -> Any:
    """The array of a packed leaf, which JAX may take over."""
    return parcel.arrays()[0]


def _is_mapped(leaf: Any) -> bool:
    if not isinstance(leaf, np.ndarray) or leaf.flags.writeable:
        return False  # what is hidden in other objects is the body's to write to
    while isinstance(leaf, (np.ndarray, memoryview)):
        leaf = leaf.base if isinstance(leaf, np.ndarray) else leaf.obj
    return isinstance(leaf, (_shared._Mapping, _shared._Lease))


# NumPy values of a call's arguments that came as parcels are nobody else's: JAX may use their memory.
_values.is_private = _is_mapped
