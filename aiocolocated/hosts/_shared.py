# SPDX-License-Identifier: Apache-2.0
"""Large buffers from one process of a machine to another, through memory that cannot leak.

A *segment* is an anonymous memory file of the sending process. Its token names the process and the
descriptor; who gets the token maps the file by way of ``/proc``. No name is left anywhere: when
the sender has closed the file and nobody maps it, or all of them were killed, the system frees it.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

Token: TypeAlias = tuple[int, int, int, int]
"""Process, descriptor, inode, bytes. The inode tells when the descriptor means another file."""

ALIGNMENT = 64  # JAX's CPU devices copy what is aligned to less

_MOST_AT_ONCE = 16 << 20  # bytes that are mapped all together
_MOST_FREE = 64  # files in a pool: each has a descriptor
_NO_FILE = (errno.ENOENT, errno.ENXIO)  # nothing there, or a socket by now
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
_MAP_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> Any:
    # The module mmap keeps a descriptor for each mapping (before Python 3.13 always), and keeps the
    # GIL while it unmaps, which takes up to 200 ms for each GiB. This does neither.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
    )
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc


class _Mapping:
    """A part of the address space that NumPy can look at, until the last view is gone."""

    __slots__ = ("__array_interface__", "__weakref__", "_unmap", "dropped", "nbytes")

    def __init__(self, fd: int, nbytes: int, flags: int, *, writable: bool) -> None:
        self.nbytes = nbytes
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        # ctypes asks for the errno of the thread, and lets other threads run meanwhile.
        address = _libc().mmap(None, nbytes, protection, flags, fd, 0)
        if address == _MAP_FAILED:
            error = ctypes.get_errno()
            raise OSError(
                error, f"cannot map {nbytes} bytes of shared memory: {os.strerror(error)}"
            )
        self._unmap: Callable[[], Any] = functools.partial(_libc().munmap, address, nbytes)
        self.dropped: Callable[[Callable[[], Any]], Any] | None = None
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (nbytes,),
            "data": (address, not writable),
        }

    def __del__(self) -> None:
        if not hasattr(self, "dropped"):  # it could not be mapped
            return
        if self.dropped is None:
            self._unmap()
        else:
            self.dropped(self._unmap)


class _Lease:
    """A look at a mapping that is kept for the next segment in the same file."""

    __slots__ = ("__array_interface__", "__weakref__", "_mapping", "dropped")

    def __init__(
        self, mapping: _Mapping, nbytes: int, dropped: Callable[[Callable[[], Any]], Any] | None
    ) -> None:
        self._mapping = mapping
        self.dropped = dropped
        self.__array_interface__ = {**mapping.__array_interface__, "shape": (nbytes,)}

    def __del__(self) -> None:
        if self.dropped is not None:
            self.dropped(_nothing)


def _nothing() -> None:
    """There is nothing to unmap."""


# --- the sender's side --------------------------------------------------------------------------------


class _File:
    """An anonymous file, for one segment after the other."""

    __slots__ = ("_bytes", "capacity", "fd", "inode", "written")

    fd: int
    inode: int
    capacity: int
    written: bool  # it has its pages

    def __init__(self, capacity: int) -> None:
        if sys.platform != "linux" or not hasattr(os, "memfd_create"):
            raise OSError("there are no anonymous memory files on this system")
        self.fd = os.memfd_create("aiocolocated")
        self.capacity = capacity
        self.written = False
        self._bytes: np.ndarray[Any, Any] | None = None
        try:
            os.ftruncate(self.fd, capacity)
            self.inode = os.fstat(self.fd).st_ino
        except BaseException:
            self.close()
            raise

    def bytes(self) -> np.ndarray[Any, Any]:
        """The whole file as an array, which can be kept longer than the file."""
        if self._bytes is None:
            # Pages that are there are mapped three times as fast all together as one by one.
            flags = mmap.MAP_SHARED | (_POPULATE if self.written else 0)
            self._bytes = np.asarray(_Mapping(self.fd, self.capacity, flags, writable=True))
        return self._bytes

    def write(self, array: np.ndarray[Any, Any], offset: int) -> None:
        """Copy the array's elements in C order; the GIL is free meanwhile."""
        if array.nbytes == 0:
            return
        if self.written or not array.flags.c_contiguous:
            target = self.bytes()[offset : offset + array.nbytes]
            np.copyto(target.view(array.dtype).reshape(array.shape), array, casting="no")
            return
        # New pages: the system fills them faster by a write than by a fault for each.
        rest = array.reshape(-1).view(np.uint8).data
        while rest:
            done = os.pwrite(self.fd, rest, offset)  # 2 GiB at most
            rest, offset = rest[done:], offset + done

    def close(self) -> None:
        self._bytes = None
        os.close(self.fd)


class Pool:
    """Files that are free again, for the next segments: new pages cost ten times the copy.

    Args:
        limit: how many bytes it keeps at most; the longest unused go first.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free: list[_File] = []  # the longest unused first
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """How many bytes it keeps."""
        with self._lock:
            return sum(file.capacity for file in self._free)

    def take(self, nbytes: int) -> _File:
        """The smallest free file that holds so many bytes and not far more, or a new one."""
        nbytes = max(nbytes, mmap.PAGESIZE)
        with self._lock:
            fitting = [file for file in self._free if nbytes <= file.capacity <= 2 * nbytes]
            if fitting:
                file = min(fitting, key=lambda file: file.capacity)
                self._free.remove(file)
                return file
        # To a multiple of an eighth of its size, so that it also fits segments of about that size.
        step = max(mmap.PAGESIZE, 1 << (nbytes.bit_length() - 4))
        return _File(-(-nbytes // step) * step)

    def give(self, file: _File) -> None:
        """Take back a file that nobody maps."""
        file.written = True
        gone: list[_File] = []
        with self._lock:
            if file.capacity > self.limit:
                gone.append(file)
            else:
                self._free.append(file)
            kept = sum(file.capacity for file in self._free)
            while kept > self.limit or len(self._free) > _MOST_FREE:
                gone.append(self._free.pop(0))
                kept -= gone[-1].capacity
        for file in gone:
            file.close()

    def clear(self) -> None:
        """Free what is kept."""
        with self._lock:
            gone, self._free = self._free, []
        for file in gone:  # it takes 150 ms for each GiB
            file.close()


pool = Pool(256 << 20)


def _after_fork_in_child() -> None:
    global pool
    parents, pool = pool, Pool(pool.limit)  # its lock may be held for ever
    for file in parents._free:  # what is written to them, the parent would see
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class Segment:
    """Memory that other processes of the machine can attach, until it is closed.

    Dropping it closes it. Thread safety: any thread.

    Attributes:
        token: what :func:`attach` takes; plain integers.
        nbytes: its size.
        offsets: where each buffer of :func:`share` starts.
    """

    __slots__ = ("__weakref__", "_file", "nbytes", "offsets", "token")

    def __init__(self, nbytes: int, offsets: tuple[int, ...] = ()) -> None:
        self._file: _File | None = None
        file = self._file = pool.take(nbytes)
        self.nbytes = nbytes
        self.offsets = offsets
        self.token: Token = (os.getpid(), file.fd, file.inode, nbytes)

    @property
    def closed(self) -> bool:
        """Whether it was closed or recycled."""
        return self._file is None

    @property
    def buffer(self) -> memoryview:
        """Its bytes, to write to. Views may be kept, but after :meth:`recycle` they are another's.

        Raises:
            ValueError: the segment is closed.
        """
        file = self._file
        if file is None:
            raise ValueError("the segment is closed")
        return file.bytes().data[: self.nbytes]

    def close(self) -> None:
        """Let go of it: nobody can attach it any more; who has attached it keeps it."""
        if (file := self._release()) is not None:
            file.close()

    def recycle(self) -> None:
        """Close it, and use its memory again. Only if nobody maps it, or will."""
        if (file := self._release()) is not None:
            pool.give(file)

    def _release(self) -> _File | None:
        with pool._lock:
            file, self._file = self._file, None
        return file

    def __del__(self) -> None:
        # Without the lock, which this thread may hold: nobody else has the segment.
        if (file := self._file) is not None:
            self._file = None
            file.close()


def share(buffers: Sequence[Any]) -> Segment:
    """Copy buffers into a segment, each at a multiple of 64 bytes.

    Args:
        buffers: NumPy arrays, or whatever has the buffer protocol; any shape, strides and size.
            Elements are laid out in C order.

    Raises:
        TypeError: an array of Python objects or of strings of any length: their bytes are pointers.
        OSError: no memory, no descriptors, or no such thing on this system.

    Thread safety: any thread; the GIL is free during copies.
    """
    arrays: list[np.ndarray[Any, Any]] = []
    offsets: list[int] = []
    end = 0
    for buffer in buffers:
        array = np.asarray(buffer if isinstance(buffer, np.ndarray) else memoryview(buffer))
        if array.dtype.hasobject:
            raise TypeError(f"an array of {array.dtype} has no bytes that could be shared")
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        arrays.append(array)
        offsets.append(offset)
        end = offset + array.nbytes
    segment = Segment(end, tuple(offsets))
    try:
        file = segment._file
        assert file is not None
        for array, offset in zip(arrays, offsets, strict=True):
            file.write(array, offset)
    except BaseException:
        segment.close()
        raise
    return segment


# --- the receiver's side ------------------------------------------------------------------------------


def attach(
    token: Token,
    *,
    private: bool = False,
    keep: bool = False,
    dropped: Callable[[Callable[[], Any]], Any] | None = None,
) -> memoryview:
    """The bytes of a segment, here or in another process, without a copy.

    They stay as long as anything looks at them: views, NumPy arrays, and arrays that
    :func:`jax.device_put` made of these on CPU devices. JAX may let go of a NumPy array only with
    the next garbage collection.

    Args:
        token: :attr:`Segment.token`.
        private: the bytes may be written to, which nobody else sees: a page is copied when it is
            first written. Otherwise they are read-only.
        keep: keep the mapping for the next segment in the same memory, which costs a page fault for each
            page otherwise, as much as copying it. Only for segments that are recycled; see :class:`Kept`.
        dropped: is called when the last view is gone, on any thread and under any lock, with a
            function that unmaps the memory; that one may take 200 ms for each GiB, and is to be called
            once. Without it the thread that drops the last view unmaps. An empty segment is never
            mapped: for it ``dropped`` is not called.

    Raises:
        ProcessLookupError: the sender is gone.
        FileNotFoundError: the sender has closed the segment.
        ValueError: the token claims more bytes than the segment has.
        OSError: the system does not let this process look at the sender, or has no descriptors left.

    Thread safety: any thread.
    """
    pid, fd, inode, nbytes = token
    name = f"segment {fd} of process {pid}"
    if keep and (mapping := kept.get(token)) is not None:
        return np.asarray(_Lease(mapping, nbytes, dropped)).data
    try:
        # If the descriptor means something else by now, opening must neither wait nor get a terminal.
        here = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        # Nobody may look at a process that has ended, but was not waited for yet.
        if error.errno not in _NO_FILE and not _ended(pid):
            raise
        here = -1
    try:
        found = os.fstat(here) if here >= 0 else None
        if found is None or found.st_ino != inode:
            if _ended(pid):
                raise ProcessLookupError(f"{name}: the process has ended")
            raise FileNotFoundError(f"{name}: it was closed")
        if nbytes > found.st_size:
            raise ValueError(f"{name}: it has {found.st_size} bytes, not {nbytes}")
        if nbytes == 0:
            return memoryview(bytearray() if private else b"")
        flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        if keep and found.st_size <= kept.limit:
            # Large ones page by page, where they are looked at: this thread may have others to serve.
            flags |= _POPULATE if found.st_size <= _MOST_AT_ONCE else 0
            mapping = _Mapping(here, found.st_size, flags, writable=False)
            kept.add(token, mapping)
            return np.asarray(_Lease(mapping, nbytes, dropped)).data
        mapping = _Mapping(here, nbytes, flags, writable=private)
    finally:
        if here >= 0:
            os.close(here)
    mapping.dropped = dropped
    return np.asarray(mapping).data


class Kept:
    """Mappings of other processes' segments that are kept, as the pools there keep their files.

    Args:
        limit: how many bytes are kept at most; the longest unused go first.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._mappings: dict[tuple[int, int, int], _Mapping] = {}  # the longest unused first
        self._lock = threading.Lock()

    def get(self, token: Token) -> _Mapping | None:
        *key, nbytes = token
        with self._lock:
            mapping = self._mappings.pop(tuple(key), None)  # type: ignore[arg-type]
            if mapping is None or mapping.nbytes < nbytes:
                return None
            self._mappings[tuple(key)] = mapping  # type: ignore[index]
            return mapping

    def add(self, token: Token, mapping: _Mapping) -> None:
        gone: list[_Mapping] = []
        with self._lock:
            self._mappings[token[:3]] = mapping
            size = sum(m.nbytes for m in self._mappings.values())
            while size > self.limit or len(self._mappings) > _MOST_FREE:
                gone.append(self._mappings.pop(next(iter(self._mappings))))
                size -= gone[-1].nbytes
        gone.clear()  # unmaps, not under the lock

    def forget(self, pid: int | None = None) -> None:
        """Let go of the mappings of a process, or of all."""
        with self._lock:
            keys = [key for key in self._mappings if pid in (None, key[0])]
            gone = [self._mappings.pop(key) for key in keys]
        gone.clear()


kept = Kept(256 << 20)


def _ended(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] in b"ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _available() -> bool:
    try:
        segment = share([b"test"])
        try:
            return bytes(attach(segment.token)) == b"test"
        finally:
            segment.close()
    except OSError:  # another system, or one without /proc
        return False


AVAILABLE = _available()
"""Whether this process can share memory. Another process may still be unable to attach it: in a
container of its own it sees other processes, or none."""
