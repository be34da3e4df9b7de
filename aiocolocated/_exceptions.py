# SPDX-License-Identifier: Apache-2.0
"""The error tree.

::

    AiocolocatedError
      CallCancelledError      the call was cancelled, you were not
      BodyError               the body raised something that must not travel as itself
      RemoteError             the body raised something that cannot be pickled back
      WouldBlock              a bounded channel is full            (also anyio.WouldBlock)
      DeadlockError           this wait could never end            (also RuntimeError)
      WorkerLimitError        too many bodies wait inside bodies   (also RuntimeError)
      ChannelClosedError      the channel was closed by us         (also anyio.ClosedResourceError)
      ChannelStoppedError     an earlier call broke an ``on_error="stop"`` channel
      ObjectClosedError       the object was closed by us          (also anyio.ClosedResourceError)
      ArgumentError           an argument cannot be passed         (also TypeError)
        TracedCallError       called under jit, vmap or grad
      SpecError               shapes, dtypes, shardings or trees differ (also ValueError)
      NotShippableError       the body's code cannot be shipped    (also TypeError)
      ArrayDeletedError       a deleted or donated array           (also RuntimeError)
      HostError               something is wrong with a host       (also RuntimeError)
        HostStartError        it did not start
        HostLostError         it ended, or does not answer
        StaleHandleError      an array was lost with its host
      ForkedProcessError      used in a forked child               (also RuntimeError)
      ShutdownError           used while the interpreter exits     (also RuntimeError)

Whatever a body raises arrives as itself, so ``except KeyError`` works; these classes are only for
what the library has to say. Each is made from the arguments in ``args``, so it survives pickling.
"""

from __future__ import annotations

import anyio


class AiocolocatedError(Exception):
    """Base of every error of this library."""


class CallCancelledError(AiocolocatedError):
    """The call was cancelled: by ``cancel()``, its owner block, or its last waiter.

    You get it when you wait for a call that somebody else cancelled. When your own task is
    cancelled you get :exc:`asyncio.CancelledError` instead. It is an ordinary :exc:`Exception`
    because a task group would swallow a bare ``CancelledError``.
    """


class BodyError(AiocolocatedError, RuntimeError):
    """The body raised an exception that would break its waiter; ``__cause__`` is the original.

    Stands in for ``StopIteration``, ``StopAsyncIteration``, ``GeneratorExit``,
    ``KeyboardInterrupt``, ``SystemExit``, ``CancelledError`` and every other exception that is no
    :exc:`Exception`; in :meth:`ArrayFuture.block_until_ready` also for ``AttributeError``, which
    :func:`jax.block_until_ready` would swallow.
    """


class RemoteError(AiocolocatedError):
    """A body on another host raised an exception that cannot be unpickled here.

    Args:
        type_name: qualified name of the original exception's type.
        message: its text.
        traceback_text: the formatted traceback from its host.
    """

    def __init__(self, type_name: str, message: str, traceback_text: str = "") -> None:
        super().__init__(type_name, message, traceback_text)
        self.type_name = type_name
        self.message = message
        self.traceback_text = traceback_text

    def __str__(self) -> str:
        text = f"{self.type_name}: {self.message}"
        return f"{text}\n{self.traceback_text}" if self.traceback_text else text


class WouldBlock(AiocolocatedError, anyio.WouldBlock):
    """A bounded channel has no room now; ``await channel.submit(...)`` waits for it."""


class DeadlockError(AiocolocatedError, RuntimeError):
    """A synchronous wait was refused because it could never end.

    Raised for an unfinished future on a running loop's thread, and in a body that waits for work
    queued behind itself.
    """


class WorkerLimitError(AiocolocatedError, RuntimeError):
    """More bodies wait for other bodies than ``worker_ceiling`` threads allow."""


class ChannelClosedError(AiocolocatedError, anyio.ClosedResourceError):
    """The channel was closed; it takes no more calls. Closing it twice is fine."""


class ChannelStoppedError(AiocolocatedError):
    """An earlier call of an ``on_error="stop"`` channel failed or was cancelled."""


class ObjectClosedError(AiocolocatedError, anyio.ClosedResourceError):
    """The colocated object was closed; its methods take no more calls. Closing it twice is fine."""


class ArgumentError(AiocolocatedError, TypeError):
    """An argument of a colocated call is of a kind that cannot be passed."""


class TracedCallError(ArgumentError):
    """A colocated function was called while JAX traces (jit, vmap, grad, scan, ...)."""


class SpecError(AiocolocatedError, ValueError):
    """Arguments or results differ from their specs; the message names path, expected and got."""


class NotShippableError(AiocolocatedError, TypeError):
    """The body captures something that cannot be shipped; the message names the variable."""


class ArrayDeletedError(AiocolocatedError, RuntimeError):
    """An array was deleted or donated before or while it was awaited."""


class HostError(AiocolocatedError, RuntimeError):
    """Something is wrong with a host that is another process."""


class HostStartError(HostError):
    """A host did not start, or its Python, JAX or aiocolocated differs from the controller's."""


class HostLostError(HostError):
    """The host of a call, object or array has ended or does not answer; the message says which.

    What runs on other hosts goes on. ``await hosts.restart(name)`` starts the host again.
    """


class StaleHandleError(HostError):
    """An array was lost with its host, which was restarted since then, or with all hosts."""


class ForkedProcessError(AiocolocatedError, RuntimeError):
    """The process was forked after the library had started; use ``spawn`` or ``forkserver``."""


class ShutdownError(AiocolocatedError, RuntimeError):
    """The interpreter is exiting; new calls are refused."""
