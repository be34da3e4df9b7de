# SPDX-License-Identifier: Apache-2.0
"""A block with a channel of its own."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, cast

from aiocolocated._channels import TaskChannel
from aiocolocated._exceptions import ChannelClosedError
from aiocolocated._owners import Owner, current_owner, enter_owner, leave_owner
from aiocolocated._submission import cancel_owned, settle_owned, stay_cancelled
from aiocolocated._types import OnError


class open_task_channel:
    """Asynchronous context manager: opens, activates, drains and closes a :class:`TaskChannel`.

    Colocated calls that the task makes inside the block go to the channel, and the block owns them:
    leaving it waits for all of them, bodies that were abandoned included, however often the task is
    cancelled meanwhile. Errors that nobody retrieved are raised on leaving as an
    :exc:`ExceptionGroup`. When the block is left by an exception, queued calls are cancelled. Calls
    that others submitted to the channel are waited for, too; a cancellation ends that wait.

    Args: as for :class:`TaskChannel`.

    Ordering: calls of the block run in submission order. Child tasks do not inherit the channel.

    Cancellation: the block cancels its calls, waits until none runs, then re-raises.

    Example:
        >>> async with open_task_channel("train", max_pending=16) as channel:
        ...     loss = await channel.run(train_step, state, batch)

    .. versionadded:: 0.1
    """

    __slots__ = ("_channel", "_options", "_owner")

    def __init__(
        self,
        name: str | None = None,
        *,
        max_pending: int | None = None,
        max_in_flight: int = 8,
        on_error: OnError = "continue",
        dedicated_thread: bool = False,
    ) -> None:
        self._channel = TaskChannel(
            name,
            max_pending=max_pending,
            max_in_flight=max_in_flight,
            on_error=on_error,
            dedicated_thread=dedicated_thread,
        )
        self._owner = Owner(None)

    async def __aenter__(self) -> TaskChannel:
        if self._channel.closed:
            raise ChannelClosedError("open_task_channel() is entered once; call it again")
        self._owner.parent = current_owner()
        enter_owner(self._owner)
        self._channel._activate()
        return self._channel

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._channel._deactivate()
        if isinstance(exc, KeyboardInterrupt):
            self._owner.given_up = True
        if exc is not None:
            cancel_owned(self._owner, "its block was left by an exception")
        self._owner.close_streams()
        cancelled = await settle_owned(
            self._owner, cancelled=isinstance(exc, asyncio.CancelledError)
        )
        self._channel._close()
        if not self._owner.given_up:
            try:
                await self._channel.drain()  # others may have submitted calls to it as well
            except asyncio.CancelledError as error:
                cancelled = error
        leave_owner(self._owner)
        try:
            errors = self._owner.take_unretrieved()
            if exc is not None and not isinstance(exc, asyncio.CancelledError):
                errors = [e for e in errors if e is not exc]
                if errors or cancelled is not None:
                    stay_cancelled()
                if errors:
                    raise BaseExceptionGroup("errors in a task channel's block", [exc, *errors])
                return
            if errors:
                stay_cancelled()
                raise ExceptionGroup("errors in a task channel's block", cast("Any", errors))
            if cancelled is not None and exc is None:
                raise cancelled
        finally:
            del exc, tb, cancelled
