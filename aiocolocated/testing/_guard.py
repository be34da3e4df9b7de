# SPDX-License-Identifier: Apache-2.0
"""The blocked-loop guard: calls that would block the event loop raise instead.

blockbuster patches the standard library's blocking functions. This file adds JAX's, which wait for
computations inside C++, a few that blockbuster lacks, a record of what was caught, and regions where
blocking is allowed.
"""

from __future__ import annotations

import contextlib
import contextvars
import copyreg
import dataclasses
import functools
import importlib
import os
import queue
import sys
import threading
import types
from collections.abc import Callable, Generator, Iterable, Iterator
from time import perf_counter, sleep
from typing import Any

from aiocolocated.testing._gap import loop_stack

_POLL = 0.0005  # seconds
_OWN_FOLDER = os.path.dirname(os.path.abspath(__file__))
_PACKAGE_FOLDER = os.path.dirname(_OWN_FOLDER)

_allowed: contextvars.ContextVar[bool] = contextvars.ContextVar("allow_blocking", default=False)


@contextlib.contextmanager
def allow_blocking() -> Generator[None]:
    """Let the code in a block call blocking functions on the event loop.

    Holds for the current task, also across ``await``, and for tasks that it starts inside the block.

    Ordering: none. Cancellation: none. Thread safety: any thread.

    Example:
        >>> with allow_blocking():
        ...     weights = Path("weights").read_bytes()

    .. versionadded:: 0.1
    """
    token = _allowed.set(True)
    try:
        yield
    finally:
        _allowed.reset(token)


@dataclasses.dataclass(frozen=True, slots=True)
class BlockedCall:
    """A call that a :class:`BlockingGuard` refused.

    .. versionadded:: 0.1
    """

    function: str
    """What was called, such as ``"jax.Array.__float__"``."""
    stack: str
    """Where: the last lines of the stack."""


class BlockingGuard:
    """Refuses blocking calls on event loops while it is entered; from :func:`forbid_blocking`.

    Args:
        grace: seconds that a computation, or a thread, may still take when a loop waits for it.

    .. versionadded:: 0.1
    """

    def __init__(self, *, grace: float = 0.02) -> None:
        self.grace = grace
        self._calls: list[BlockedCall] = []

    @property
    def calls(self) -> list[BlockedCall]:
        """Every call refused so far, also where something caught the error; a copy."""
        return list(self._calls)

    def clear(self) -> None:
        """Forget the calls, after a test has expected them."""
        self._calls.clear()

    def __enter__(self) -> BlockingGuard:
        _Engine.shared().add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        tb: types.TracebackType | None,
    ) -> None:
        _Engine.shared().remove(self)


def forbid_blocking(*, grace: float = 0.02) -> BlockingGuard:
    """Make blocking calls on the thread of a running asyncio event loop raise, in a block.

    Refused are the standard library's (``time.sleep``, file and socket calls, a lock that another
    thread holds, ``Thread.join``, ...) and JAX's: ``jax.block_until_ready``, ``jax.device_get``,
    ``numpy.asarray`` of an array, ``float``, ``int``, ``bool``, ``str`` and ``.item()`` of one, if it is
    not computed within ``grace``, and ``jax.effects_barrier``. Other threads are not affected. The
    limits are in ``docs/how-to/testing.md``; :func:`measure_loop_gap` has none of them, and no names.

    Args:
        grace: seconds that a computation may still take when it is waited for. The default
            does not fail a test for looking at a number that is ready any moment.

    Returns:
        A context manager that gives itself, a :class:`BlockingGuard`.

    Raises:
        blockbuster.BlockingError: from the blocking call, in place of it.
        ImportError: on entering, where blockbuster is not installed.

    Ordering: none. Cancellation: none. Thread safety: patches modules and types for the whole process:
    enter and leave it where no other thread does. It may be nested.

    Example:
        >>> with forbid_blocking() as guard:
        ...     asyncio.run(main())
        >>> assert not guard.calls

    .. versionadded:: 0.1
    """
    return BlockingGuard(grace=grace)


class _Engine:
    """The patches, put in place for the first guard and taken away with the last."""

    _instance: _Engine | None = None

    @classmethod
    def shared(cls) -> _Engine:
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def __init__(self) -> None:
        try:
            from blockbuster import BlockBuster
        except ImportError as error:
            raise ImportError(
                "the blocked-loop guard needs blockbuster: pip install 'aiocolocated[testing]'"
            ) from error
        self.guards: list[BlockingGuard] = []
        functions = BlockBuster().functions | dict(_rules(self))
        for name, function in functions.items():
            function.can_block_functions += _MAY_READ
            function.full_name = name
            function.can_block_predicate = _or_allowed(function.can_block_predicate)
        self._functions: list[Any] = list(functions.values())
        self._refused = _refused_error(self)
        self._originals: dict[int, tuple[str, str]] = {}  # of patched built-in functions
        self._undo: list[Callable[[], None]] = []

    def add(self, guard: BlockingGuard) -> None:
        self.guards.append(guard)
        if len(self.guards) > 1:
            return
        import blockbuster.blockbuster as implementation

        try:
            # blockbuster has no hook for what it refuses, and an error that is swallowed has to count.
            self._set(implementation, "BlockingError", self._refused)
            self._set_reducer()
            for function in self._functions:
                self._undo.append(function.deactivate)
                function.activate()
                if function.activated:
                    self._name(function)
        except BaseException:
            self.remove(guard)
            raise

    def remove(self, guard: BlockingGuard) -> None:
        self.guards.remove(guard)
        if not self.guards:
            while self._undo:
                self._undo.pop()()
            self._originals.clear()

    def record(self, function: str) -> None:
        if self.guards:
            self.guards[-1]._calls.append(BlockedCall(function, loop_stack(sys._getframe())))

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def _name(self, function: Any) -> None:
        """Give a patched function its name, by which it pickles, and can be captured by a body."""
        owner, original = function.module, function.original_func
        wrapper = getattr(owner, function.func_name)
        wrapper.__name__ = function.func_name
        if isinstance(owner, types.ModuleType):
            wrapper.__module__, wrapper.__qualname__ = owner.__name__, function.func_name
            if isinstance(original, types.BuiltinFunctionType):
                self._originals[id(original)] = owner.__name__, function.func_name
        else:
            wrapper.__module__ = owner.__module__
            wrapper.__qualname__ = f"{owner.__qualname__}.{function.func_name}"
        wrapper.__doc__ = original.__doc__

    def _set_reducer(self) -> None:
        """Pickle ``sleep`` of an early ``from time import sleep``: ``time.sleep`` is not it any more."""
        kind = types.BuiltinFunctionType
        previous = copyreg.dispatch_table.get(kind)

        def reduce_builtin(function: Any) -> Any:
            if (name := self._originals.get(id(function))) is not None:
                return _current, name
            return function.__reduce_ex__(4) if previous is None else previous(function)

        def undo() -> None:
            if previous is None:
                copyreg.dispatch_table.pop(kind, None)
            else:
                copyreg.dispatch_table[kind] = previous

        copyreg.dispatch_table[kind] = reduce_builtin
        self._undo.append(undo)


def _current(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _or_allowed(predicate: Callable[..., bool]) -> Callable[..., bool]:
    def may_block(*args: Any, **kwargs: Any) -> bool:
        return _allowed.get() or predicate(*args, **kwargs)

    return may_block


def _refused_error(engine: _Engine) -> type[Exception]:
    from blockbuster import BlockingError

    class RecordedBlockingError(BlockingError):
        def __init__(self, function: str) -> None:
            super().__init__(function)
            engine.record(function)
            jax_call = function.startswith(("jax.", "numpy."))
            remedy = (
                "`await aiocolocated.wait_until_ready(tree)` first"
                if jax_call
                else "run it in a thread, such as with `await channel.run(function, ...)`"
            )
            text = (
                f"Blocking call to {function} on the event loop's thread: {remedy}, or allow it "
                "with aiocolocated.testing.allow_blocking()"
            )
            self.args = (text,)

    RecordedBlockingError.__name__ = RecordedBlockingError.__qualname__ = BlockingError.__name__
    RecordedBlockingError.__module__ = BlockingError.__module__
    return RecordedBlockingError


# --- what blocks ------------------------------------------------------------------------------------

# Methods of a concrete array that copy it to the host or wait for it. `__buffer__` (Python >= 3.12) is
# what NumPy's own functions and ufuncs take first.
_ARRAY_METHODS = (
    *("block_until_ready", "item", "tolist", "tobytes"),
    *("__array__", "__bool__", "__complex__", "__float__", "__index__", "__int__", "__buffer__"),
    *("__dlpack__", "__format__", "__reduce__", "__repr__", "__str__"),
)
_NUMPY_FUNCTIONS = ("array", "asanyarray", "asarray", "ascontiguousarray", "copy")
# An import reads files, once per process, and so does JAX when it starts a backend; it looks at the
# paths in a traceback to hide its own frames.
_MAY_READ = [
    ("<frozen importlib._bootstrap>", {"_find_and_load"}),
    ("jax/_src/xla_bridge.py", {"backends"}),
    ("jax/_src/traceback_util.py", {"_path_starts_with", "include_filename"}),
    ("pytest_timeout.py", {"dump_stacks", "timeout_sigalrm"}),  # tells of a stuck test
]
# For a diagnosis: pytest on a failed assertion, asyncio's debug mode on a slow callback.
_MAY_SHOW = [
    ("_pytest/_io/saferepr.py", {"repr", "repr_instance", "saferepr"}),
    ("reprlib.py", {"repr_instance"}),
]


def _rules(engine: _Engine) -> Iterator[tuple[str, Any]]:
    """What blockbuster lacks, by name."""
    from blockbuster import BlockBusterFunction as Function

    def join_is_short(thread: threading.Thread, timeout: float | None = None) -> bool:
        if timeout is not None and timeout <= 0:
            return True
        # Loops join the thread that shut their executor down, just before it ends.
        return _within_grace(engine, lambda: not thread.is_alive())

    yield (
        "threading.Thread.join",
        Function(
            threading.Thread,
            "join",
            can_block_predicate=join_is_short,
            can_block_functions=[("asyncio/unix_events.py", {"_join_threads"})],
        ),
    )
    # It waits for the new thread to run, which takes over a second on a loaded machine. asyncio's
    # own executor does it; this library promises not to.
    start = Function(threading.Thread, "start", can_block_predicate=_not_called_by_us)
    yield "threading.Thread.start", start
    get = Function(queue.SimpleQueue, "get", can_block_predicate=_get_is_short)
    yield "queue.SimpleQueue.get", get

    import jax
    import numpy as np

    from aiocolocated import _compat

    def in_tree(*args: Any, **kwargs: Any) -> bool:
        return _ready_soon(engine, jax.tree.leaves((args, kwargs)))

    def in_array(array: Any, *args: Any, **kwargs: Any) -> bool:
        return _ready_soon(engine, [array])

    def in_items(*args: Any, **kwargs: Any) -> bool:
        value = args[0] if args else next(iter(kwargs.values()), None)
        return _ready_soon(engine, value[:16] if isinstance(value, list | tuple) else [value])

    for name in ("block_until_ready", "device_get"):
        yield f"jax.{name}", Function(jax, name, can_block_predicate=in_tree)
    yield "jax.effects_barrier", Function(jax, "effects_barrier")
    methods: list[tuple[Any, str, str, Any]] = [
        (_compat.ArrayImpl, "jax.Array", name, in_array) for name in _ARRAY_METHODS
    ]
    functions = [(np, "numpy", name, in_items) for name in _NUMPY_FUNCTIONS]
    for owner, prefix, name, predicate in (*methods, *functions):
        if hasattr(owner, name):
            rule = Function(
                owner, name, can_block_predicate=predicate, can_block_functions=[*_MAY_SHOW]
            )
            yield f"{prefix}.{name}", rule


def _get_is_short(items: Any, block: bool = True, timeout: float | None = None) -> bool:
    return not block or (timeout is not None and timeout <= 0) or not items.empty()


def _not_called_by_us(*args: Any, **kwargs: Any) -> bool:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_filename.startswith(_OWN_FOLDER)
        or "blockbuster" in frame.f_code.co_filename
    ):
        frame = frame.f_back
    return frame is None or not frame.f_code.co_filename.startswith(_PACKAGE_FOLDER)


def _ready_soon(engine: _Engine, leaves: Iterable[Any]) -> bool:
    """Whether every array among ``leaves`` is computed within the grace of the guard."""
    arrays = [array for leaf in leaves if (array := _concrete(leaf)) is not None]
    if not arrays:
        return True
    from aiocolocated import _compat

    try:
        return _within_grace(engine, lambda: _compat.all_ready(arrays))
    except RuntimeError:  # deleted meanwhile, or donated: nothing to wait for
        return True


def _within_grace(engine: _Engine, reached: Callable[[], bool]) -> bool:
    deadline = perf_counter() + (engine.guards[-1].grace if engine.guards else 0.0)
    while not reached():
        if perf_counter() >= deadline:
            return False
        sleep(_POLL)
    return True


def _concrete(leaf: Any) -> Any:
    """The array behind a leaf that can be waited for, or None."""
    from aiocolocated import _compat

    if type(leaf) is _compat.ArrayImpl:
        return leaf
    import jax.core
    import jax.numpy as jnp

    if (
        isinstance(leaf, jax.Array)
        and not isinstance(leaf, jax.core.Tracer)
        and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ):
        return _compat.key_data(leaf)
    return None
