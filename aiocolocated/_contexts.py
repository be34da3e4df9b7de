# SPDX-License-Identifier: Apache-2.0
"""JAX configuration that belongs to a task.

JAX keeps its context managers in thread-locals: lost in every worker thread, visible to all tasks
of a loop, and stuck for ever when two tasks leave them out of order. The library captures them when
a call is submitted (``_compat.capture_config``) and puts them in force around the body only.
``jax_scope`` is for tasks: it is a context variable and touches JAX only where a body runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import jax

from aiocolocated import _compat

if TYPE_CHECKING:
    from types import TracebackType

_Options = tuple[tuple[str, Any], ...]

# JAX's public context managers of one value. What the JAX in use lacks is refused by name.
SCOPE_OPTIONS = (
    "check_tracer_leaks",
    "debug_infs",
    "debug_key_reuse",
    "debug_nans",
    "default_device",
    "default_matmul_precision",
    "default_prng_impl",
    "disable_jit",
    "enable_checks",
    "enable_custom_prng",
    "enable_x64",
    "explain_cache_misses",
    "legacy_prng_key",
    "log_compiles",
    "named_scope",
    "no_execution",
    "no_tracing",
    "numpy_dtype_promotion",
    "numpy_rank_promotion",
    "set_mesh",
    "softmax_custom_jvp",
    "threefry_partitionable",
    "transfer_guard",
    "transfer_guard_device_to_device",
    "transfer_guard_device_to_host",
    "transfer_guard_host_to_device",
)

scope: ContextVar[_Options] = ContextVar("aiocolocated_jax_scope", default=())


class jax_scope:
    """JAX configuration for the bodies that this task submits, safe across ``await``.

    A plain ``with jax.enable_x64(True):`` around an ``await`` leaks into every other task of the
    loop. This scope is a context variable: child tasks inherit it, siblings never see it, and it is
    in force only while a body, or a callable of :meth:`TaskChannel.run`, runs.

    Args:
        **options: JAX's context managers by name, each with its value: ``enable_x64=True``,
            ``default_device=device``, ``default_matmul_precision="float32"``, ``set_mesh=mesh``,
            ``transfer_guard="disallow"``, ``debug_nans=True``, ...

    Raises:
        TypeError: no such option, or the JAX in use does not have it.

    Scopes nest, the inner one wins; they are put in force on top of the thread-local configuration
    of the submitting thread, in the order given.

    Thread safety: a scope belongs to the task or thread that enters it.

    Example:
        >>> with jax_scope(enable_x64=True):
        ...     y = await f(x)                     # f's body computes in 64 bits

    .. versionadded:: 0.1
    """

    __slots__ = ("_options",)

    def __init__(self, **options: Any) -> None:
        for name in options:
            if name not in SCOPE_OPTIONS:
                raise TypeError(
                    f"jax_scope() has no option {name!r}; there are: {', '.join(SCOPE_OPTIONS)}"
                )
            if not hasattr(jax, name):
                raise TypeError(f"jax_scope(): JAX {jax.__version__} has no jax.{name}")
        self._options: _Options = tuple(options.items())

    def __enter__(self) -> jax_scope:
        scope.set(scope.get() + self._options)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        # Its own options go, and no others: a token would bring back what was there before, which
        # tasks that share a context may have left meanwhile.
        left = list(scope.get())
        for option in reversed(self._options):
            for i in reversed(range(len(left))):
                if left[i] is option:
                    del left[i]
                    break
        scope.set(tuple(left))


@contextlib.contextmanager
def in_force(config: _compat.Snapshot | None, options: _Options) -> Generator[None]:
    """A captured configuration, and a scope on top of it, on this thread."""
    with contextlib.ExitStack() as stack:
        if config is not None:
            stack.enter_context(_compat.applied_config(config))
        for name, value in options:
            stack.enter_context(getattr(jax, name)(value))
        yield
