# SPDX-License-Identifier: Apache-2.0
"""What every host can do."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable
from typing import Any


class Shipped:
    """A function on a host, which forgets it with the last reference to this.

    Hosts hold it weakly: what a function captures may lead back to the function itself.
    """

    __slots__ = ("__weakref__", "body", "function", "lock")

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.body: Callable[..., Any] | None = None  # runs it, once it is there
        self.lock = threading.Lock()


class Host(abc.ABC):
    """A process that owns devices and runs Python for them.

    Attributes:
        name: for errors and listings.
        process_index: the process's index, as :attr:`jax.Device.process_index` has it.
    """

    name: str
    process_index: int

    @abc.abstractmethod
    def load(self, function: Callable[..., Any]) -> Shipped:
        """Ship ``function`` once, and see to its ``body``; called on worker threads only.

        The same function gives the same result, also under concurrent first calls.

        Raises:
            NotShippableError: it captures what cannot be shipped; a later call tries again.
        """

    @property
    @abc.abstractmethod
    def shipped(self) -> int:
        """How many functions live on the host."""
