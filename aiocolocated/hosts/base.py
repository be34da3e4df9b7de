# SPDX-License-Identifier: Apache-2.0
"""What every host can do."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any


class Host(abc.ABC):
    """A process that owns devices and runs Python for them.

    Attributes:
        name: for errors and listings.
        process_index: the process's index, as :attr:`jax.Device.process_index` has it.
    """

    name: str
    process_index: int

    @abc.abstractmethod
    def load(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Ship ``function`` once and return what runs it; called on worker threads only.

        The same function gives the same result, also under concurrent first calls.

        Raises:
            NotShippableError: it captures what cannot be shipped; a later call tries again.
        """

    @property
    @abc.abstractmethod
    def shipped(self) -> int:
        """How many functions live on the host."""
