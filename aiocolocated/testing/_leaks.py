# SPDX-License-Identifier: Apache-2.0
"""What a piece of code leaves behind: threads, tasks, arrays, file descriptors."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from time import monotonic, sleep
from types import FrameType, TracebackType
from typing import Any, cast

from aiocolocated.testing._guard import allow_blocking

_STACK_LINES = 8
_DESCRIPTORS = "/proc/self/fd"
# A pool's idle thread waits for work in one of these: (end of file name, function).
_POOLS = {
    "asyncio_": ("concurrent/futures/thread.py", "_worker"),
    "uvloop_": ("concurrent/futures/thread.py", "_worker"),
    "AnyIO worker thread": ("anyio/_backends/_asyncio.py", "run"),
}
_WAITING = ("threading.py", "queue.py", "blockbuster.py")

# Finds leaks of one kind. Told to describe them it may be slow; before, only their number counts.
_Kind = Callable[[bool], list[str]]


class LeakError(AssertionError):
    """Something was left behind: ``leaks`` has a text for each thing.

    .. versionadded:: 0.1
    """

    def __init__(self, *leaks: str) -> None:
        super().__init__(*leaks)
        self.leaks = leaks

    def __str__(self) -> str:
        return "\n".join((f"{len(self.leaks)} left behind:", *self.leaks))


class LeakCheck:
    """Checks that a block leaves nothing behind; a context manager, ``with`` or ``async with``.

    What existed before the block does not count. What is on its way out gets a moment: the check polls
    until all is gone, or ``timeout``. After an exception in the block nothing is checked.

    Args:
        threads: Python threads. Threads of this library, an event loop's own executor and anyio are
            caches and may stay, but have to be idle.
        tasks: unfinished asyncio tasks of the running loop; only with ``async with``.
        arrays: live ``jax.Array`` on the default backend and on the CPU.
        descriptors: open file descriptors, on systems with ``/proc``. Not after a block that started
            something that keeps some for good: JAX's backend, or the host's loop (by a
            coroutine body, or :mod:`aiocolocated.from_thread`).
        collect: run the garbage collector before an array counts as leaked; if false, an array that only a
            reference cycle holds is reported.
        timeout: seconds to wait for what is on its way out.

    Raises:
        LeakError: on leaving; it names threads with their stacks, tasks, shapes of arrays and what
            holds them, and targets of descriptors.

    Ordering: none. Cancellation: ends the check without a result. Thread safety: it sees the whole
    process, so nothing else should start or end things meanwhile.

    Example:
        >>> async with LeakCheck():
        ...     await program()

    .. versionadded:: 0.1
    """

    def __init__(
        self,
        *,
        threads: bool = True,
        tasks: bool = True,
        arrays: bool = True,
        descriptors: bool = True,
        collect: bool = True,
        timeout: float = 2.0,
    ) -> None:
        self._kinds: list[_Kind] = []
        if threads:
            self._kinds += [self._leaked_threads, self._leaked_calls]
        if arrays:
            self._kinds.append(self._leaked_arrays)
        if descriptors:
            self._kinds.append(self._leaked_descriptors)
        self._tasks = tasks
        self._collect = collect
        self._timeout = timeout
        # Last chance to drop references before arrays count as leaked.
        self._release: Callable[[], None] = lambda: None

    # -- before -----------------------------------------------------------------------------------

    def _start(self) -> None:
        with allow_blocking():
            self._take_stock()

    def _take_stock(self) -> None:
        self._lasting = _lasting()
        self._old_threads = weakref.WeakSet(threading.enumerate())
        self._old_idents = set(sys._current_frames())
        self._old_calls = len(_calls())
        # Weakly: the check must not keep arrays alive, and their ids are used again.
        self._old_arrays = {id(array): weakref.ref(array) for array in _live_arrays()}
        self._old_descriptors = _open_descriptors()

    def _start_tasks(self) -> None:
        self._old_tasks = weakref.WeakSet(asyncio.all_tasks())

    # -- after ------------------------------------------------------------------------------------

    def _poll(self, kinds: list[_Kind]) -> Iterator[float]:
        """Yield the seconds to wait until the next look; raise if something stays."""
        deadline = monotonic() + self._timeout
        patience = monotonic() + min(0.05, self._timeout / 2)
        released = collected = False
        pause = 0.0005
        while kinds:
            with allow_blocking():
                kinds = [kind for kind in kinds if kind(False)]
            if not kinds:
                return
            now = monotonic()
            if not released and self._leaked_arrays in kinds:
                released = True
                self._release()
                continue
            if self._collect and not collected and now >= patience and self._leaked_arrays in kinds:
                collected = True
                gc.collect()
                continue
            if now >= deadline:
                with allow_blocking():
                    leaks = [leak for kind in kinds for leak in kind(True)]
                if leaks:
                    raise LeakError(*leaks)
                return
            pause = min(pause * 2, 0.02)
            yield pause

    def _check(self) -> None:
        for pause in self._poll(self._kinds):
            sleep(pause)

    async def _check_tasks(self) -> None:
        if self._tasks:
            for pause in self._poll([self._leaked_tasks]):
                await asyncio.sleep(pause)

    def __enter__(self) -> LeakCheck:
        self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if exc is None:
            self._check()

    async def __aenter__(self) -> LeakCheck:
        self._start()
        self._start_tasks()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if exc is None:
            await self._check_tasks()
            for pause in self._poll(self._kinds):
                await asyncio.sleep(pause)

    # -- kinds of leaks -----------------------------------------------------------------------------

    def _leaked_threads(self, describe: bool) -> list[str]:
        leaks = []
        frames = sys._current_frames()
        del frames[threading.get_ident()]  # it has all the others, and with them their variables
        known = {thread.ident: thread for thread in threading.enumerate()}
        for ident, frame in frames.items():
            thread = known.get(ident)
            if thread is None:  # started by `_thread`, or by C code that runs Python in it now
                if ident not in self._old_idents:
                    leaks.append(f"thread {ident} still runs:\n{_stack(frame)}")
            elif thread not in self._old_threads and not _is_cached(thread.name, frame):
                daemon = ", a daemon," if thread.daemon else ""
                leaks.append(f"thread {thread.name!r}{daemon} still runs:\n{_stack(frame)}")
        return leaks

    def _leaked_calls(self, describe: bool) -> list[str]:
        calls = _calls()
        return [f"call {call!r}" for call in calls] if len(calls) > self._old_calls else []

    def _leaked_tasks(self, describe: bool) -> list[str]:
        current = asyncio.current_task()
        return [
            f"task {task!r}"
            for task in asyncio.all_tasks()
            if task is not current and task not in self._old_tasks
        ]

    def _leaked_arrays(self, describe: bool) -> list[str]:
        old: list[Any] = []
        new: list[Any] = []
        for array in _live_arrays():
            entry = self._old_arrays.get(id(array))
            (old if entry is not None and entry() is array else new).append(array)
        if new:
            # An array keeps its shard, a view of itself, once JAX or the library has looked at it.
            buffers = {_buffer_of(array) for array in old} - {None}
            new = [array for array in new if _buffer_of(array) not in buffers]
        return [f"array {_describe(array, new)}" if describe else "" for array in new]

    def _leaked_descriptors(self, describe: bool) -> list[str]:
        if self._lasting != _lasting():
            return []
        mine = _library_descriptors()
        new = [
            (number, target)
            for number, target in _open_descriptors().items()
            if self._old_descriptors.get(number) != target and number not in mine
        ]
        if [target for _, target in new] == [os.devnull] and _lasting_uvloop():
            return []  # libuv opens it with the first socket of a loop
        return [f"descriptor {number} -> {target}" for number, target in new]


def _stack(frame: FrameType) -> str:
    return "".join(traceback.format_stack(frame)[-_STACK_LINES:]).rstrip()


def _is_cached(name: str, frame: FrameType | None) -> bool:
    """Whether a thread is one that a pool may keep, and idle."""
    if name.startswith("aiocolocated"):
        return True  # whether they are idle, the runtime's list of calls tells
    for prefix, (file, function) in _POOLS.items():
        if name.startswith(prefix):
            while frame is not None and frame.f_code.co_filename.endswith(_WAITING):
                frame = frame.f_back
            return (
                frame is not None
                and frame.f_code.co_filename.replace("\\", "/").endswith(file)
                and frame.f_code.co_name == function
            )
    return False


def _calls() -> list[Any]:
    import aiocolocated

    return list(aiocolocated.runtime.calls())


def _lasting() -> tuple[object, ...]:
    """What lives as long as the process, once it was started, and holds descriptors."""
    from aiocolocated import _hostloop

    return _backend_started(), *map(id, _hostloop._loops)


def _lasting_uvloop() -> bool:
    from aiocolocated import _hostloop

    return any(type(host.loop).__module__.startswith("uvloop") for host in _hostloop._loops)


def _backend_started() -> bool:
    if "jax" not in sys.modules:
        return False
    from aiocolocated import _compat

    return _compat.backend_started()


def _live_arrays() -> list[Any]:
    if not _backend_started():
        return []
    import jax

    arrays: list[Any] = []
    for platform in {jax.default_backend(), "cpu"}:
        try:
            arrays += jax.live_arrays(platform)
        except RuntimeError:  # JAX was told to do without this platform
            continue
    return [array for array in arrays if not (_is_token(array) or array.is_deleted())]


def _is_token(array: Any) -> bool:
    """Whether it may be one of those that JAX keeps for each thread with ordered callbacks."""
    return bool(array.shape == (0,) and array.dtype == bool)


def _buffer_of(array: Any) -> int | None:
    """Address of a computed array on one device; its other Python objects have the same."""
    try:
        return cast("int", array.unsafe_buffer_pointer()) if array.is_ready() else None
    except (RuntimeError, ValueError):  # failed, or on several devices
        return None


def _describe(array: Any, arrays: list[Any]) -> str:
    devices = ", ".join(sorted(str(device) for device in array.devices()))
    shape = ",".join(map(str, array.shape))
    text = f"{array.dtype}[{shape}] on {devices}, {array.nbytes} bytes"
    holders = _holders_of(array, {id(arrays)}, levels=6)
    return f"{text}; held by {holders}" if holders else text


def _holders_of(thing: object, ignored: set[int], levels: int) -> str:
    """One chain of objects that keep ``thing`` alive, as far as the garbage collector knows."""
    holders = gc.get_referrers(thing)
    ignored.add(id(holders))
    for holder in holders:
        if id(holder) in ignored:
            continue
        ignored.add(id(holder))
        fields: dict[Any, Any] = {}
        if isinstance(holder, FrameType):
            code = holder.f_code
            if code.co_filename == __file__:
                continue
            name = f"{code.co_qualname} ({code.co_filename}:{holder.f_lineno})"
        elif isinstance(holder, dict) and (module := _module_of(holder)):
            return f"{module}{_key_of(thing, holder)}"
        elif isinstance(holder, dict):
            name = f"dict{_key_of(thing, holder)}"
        else:
            fields = _fields_of(holder)
            name = f"{type(holder).__qualname__}{_key_of(thing, fields)}"
        outer = _holders_of(holder, ignored | {id(fields)}, levels - 1) if levels > 1 else ""
        return f"{name} in {outer}" if outer else name
    return ""


def _fields_of(thing: object) -> dict[Any, Any]:
    fields = dict(getattr(thing, "__dict__", {}))
    for base in type(thing).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            fields[slot] = getattr(thing, slot, None)
    return fields


def _module_of(namespace: dict[Any, Any]) -> str | None:
    for name, module in list(sys.modules.items()):
        if getattr(module, "__dict__", None) is namespace:
            return f"module {name}"
    return None


def _key_of(thing: object, values: dict[Any, Any]) -> str:
    for key, value in values.items():
        if value is thing:
            return f".{key}"
    return ""


def _open_descriptors() -> dict[int, str]:
    found: dict[int, str] = {}
    try:
        numbers = os.listdir(_DESCRIPTORS)
    except OSError:  # a system without /proc
        return found
    for number in numbers:
        try:
            found[int(number)] = os.readlink(f"{_DESCRIPTORS}/{number}")
        except OSError:  # the one that listed the folder
            continue
    # Memory that the library keeps for the next transfers to hosts.
    return {n: target for n, target in found.items() if "memfd:aiocolocated" not in target}


def _library_descriptors() -> set[int]:
    """Descriptors that the library keeps for a loop and closes with it."""
    from aiocolocated import _loops

    return {fd for bridge in list(_loops._bridges.values()) if (fd := bridge._fd) is not None}
