# SPDX-License-Identifier: Apache-2.0
"""Waits that would never end, because the waiting body stands in the way of what it waits for."""

from __future__ import annotations

from collections import deque
from typing import Any, TypeAlias

from aiocolocated._calls import Call
from aiocolocated._exceptions import DeadlockError
from aiocolocated._hostloop import occupants
from aiocolocated._ordering import Gate
from aiocolocated._types import DISPATCHED
from aiocolocated._workers import pool

# Whatever a call needs has to end before it can; of a gate's holders one is enough.
_Node: TypeAlias = "Call | Gate[Any]"


def refuse_cycle(wanted: Call, waiting: Call) -> None:
    """Refuse a wait that the waiting body itself stands in the way of (under the lock).

    Args:
        wanted: the call that is waited for.
        waiting: the call whose body waits.
    """
    needs: dict[_Node, list[_Node]] = {}
    stack: list[_Node] = [wanted]
    several = False  # whether a gate has more holders than one
    while stack:
        node = stack.pop()
        if node in needs:
            continue
        found = needs[node] = [] if node is waiting else _needs(node)
        several = several or (isinstance(node, Gate) and len(found) > 1)
        stack += found
    if waiting not in needs or (several and wanted in _ending(needs, waiting)):
        return
    gate = wanted._gate
    names = " and ".join(call._plan.name for call in occupants())
    if wanted is waiting:
        why = "itself"
    elif gate is not None and waiting in gate.holders:
        why = (
            f"{wanted._plan.name}, which cannot start before that body has returned: max_concurrency "
            f"is {gate.limit} for the methods of their object. Call the plain method instead, or give "
            "the class a higher max_concurrency."
        )
    elif getattr(wanted._plan, "closes", None) is not None:
        why = f"{wanted._plan.name}, which waits for that body to return."
    elif names and _needs_loop(wanted) and wanted._channel is not waiting._channel:
        why = (
            f"{wanted._plan.name}, whose coroutine needs the library's event loop. There the body of "
            f"{names} called a jitted function, which returns only when its callback has, and that "
            "waits for this. Have that body await the function: 'await awaitable_jit(f)(x)', or "
            "'await channel.run(f, x)'."
        )
    else:
        why = (
            f"{wanted._plan.name}, which cannot start before that body has returned: it is behind it "
            f"in channel {waiting._channel.name!r}. Call it directly, or from another channel."
        )
    raise DeadlockError(f"the body of {waiting._plan.name} waits for {why}")


def _needs(node: _Node) -> list[_Node]:
    if isinstance(node, Gate):
        return list(node.holders) if len(node.holders) >= node.limit else []
    order = node._channel._order
    found: list[_Node] = []
    if _needs_loop(node):
        found += [call for call in occupants() if call is not node]
    if order.running is node:  # perhaps abandoned
        if node._waiting_on is not None:
            found.append(node._waiting_on)
        return found
    if node._state >= DISPATCHED:
        return []
    found += node._dependencies or ()
    if order.running is not None:
        found.append(order.running)
    for ahead in order.queue:
        gate: Gate[Any] | None = ahead._gate
        if gate is not None and len(gate.holders) >= gate.limit:
            found.append(gate)
        if ahead is node:
            break
        found += ahead._dependencies or ()
    closes = getattr(node._plan, "closes", None)  # it waits for all calls of an object
    if closes is not None:
        lanes = [lane._order for lane in pool.lanes]
        calls = [call for order in lanes for call in (order.running, *order.queue)]
        found += [call for call in calls if call is not None and call._object is closes]
    return found


def _needs_loop(call: Call) -> bool:
    return call._light and call._thread is None  # its body is a coroutine


def _ending(needs: dict[_Node, list[_Node]], waiting: Call) -> set[_Node]:
    """What ends by itself although ``waiting`` does not."""
    needed_by: dict[_Node, list[_Node]] = {node: [] for node in needs}
    left = {}  # how many of a node's needs have to end yet
    for node, found in needs.items():
        left[node] = min(1, len(found)) if isinstance(node, Gate) else len(found)
        for needed in found:
            needed_by[needed].append(node)
    ending: set[_Node] = set()
    ready = deque(node for node in needs if not left[node] and node is not waiting)
    while ready:
        node = ready.popleft()
        ending.add(node)
        for other in needed_by[node]:
            left[other] -= 1
            if left[other] == 0:
                ready.append(other)
    return ending
