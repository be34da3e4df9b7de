# SPDX-License-Identifier: Apache-2.0
"""References: what keeps arrays, results and code alive on hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiocolocated import _service
from aiocolocated._exceptions import ArrayDeletedError, HostError, StaleHandleError

if TYPE_CHECKING:
    from aiocolocated.hosts._groups import Group

FUTURE, CODE, STREAM = -1, -2, -3  # in place of the number of an array


class Reference:
    """What keeps something alive on hosts: an array, the result of a call, or code."""

    __slots__ = ("__weakref__", "epochs", "group", "leaf", "number")

    def __init__(self, group: Group, number: int, leaf: int) -> None:
        self.group = group
        self.epochs = group.epochs
        self.number = number
        self.leaf = leaf

    def __del__(self) -> None:
        # The collector may call this anywhere: no lock.
        hosts = self.group.hosts
        hosts.dropped.put((self.group, self.epochs, self.number, self.leaf))
        if not hosts.forgetting:
            hosts.forgetting = True
            _service.inbox.put(hosts.forget_soon)

    def word(self, group: Group) -> tuple[int, int]:
        """What a group of hosts knows it by.

        Raises:
            StaleHandleError: it was lost with a host.
        """
        if self.group is not group or self.epochs is not group.epochs:
            self._check(group)
        return (self.number, self.leaf)

    def _check(self, group: Group) -> None:
        own = dict(zip(self.group.links, self.epochs, strict=True))
        for link in group.links:
            if link not in own:
                raise HostError(
                    f"an array of {self.group.name} was passed to a call on {group.name}: move it there "
                    "with 'await device_put(x, sharding)'"
                )
            if own[link] != link.generation or link.lost is not None:
                raise StaleHandleError(
                    f"this array was lost with {link.name}, which has been "
                    + ("lost" if link.lost is not None else "restarted since then")
                )


def reference_of(array: Any) -> Reference:
    """What stands behind a handle.

    Raises:
        HostError: the library did not make it.
    """
    reference = getattr(array, "_aiocolocated", None)
    if array.is_deleted():
        raise ArrayDeletedError(
            f"an array of shape {array.shape} and dtype {array.dtype} was deleted or donated"
        )
    if reference is None:
        raise HostError(
            f"an array of shape {array.shape} on devices of other hosts was not made by the library, so "
            "no host has it: use what colocated calls and 'await device_put(x, sharding)' return"
        )
    return reference  # type: ignore[no-any-return]
