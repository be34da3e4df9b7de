# SPDX-License-Identifier: Apache-2.0
"""Coroutine callbacks of one program, made to overlap.

A callback of a coroutine is two callbacks: a start, which submits the coroutine and returns a ticket,
and a finish, which takes the ticket and waits. XLA orders them by data alone, and would as soon wait for
the first as start the second. So while JAX lowers a program, every start is moved before the finishes
that it does not need, and each finish gets the tickets of all starts before it as one more operand: data
that XLA has to respect.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from aiocolocated import _compat

_PYTHON_CALLBACK = re.compile(r"xla_ffi_(partitioned_)?python_\w+_callback")


def lowered(target: Any, results: Any, callbacks: list[Any]) -> None:
    """JAX has lowered an ``io_callback`` or a ``pure_callback`` of this library.

    Args:
        target: what it calls.
        results: the operation's values.
        callbacks: the module's host callbacks so far; operations name theirs by its index.
    """
    callbacks[-1].part = target.part
    if target.part not in ("start", "finish"):
        return
    this, starts, finishes = None, [], []
    here: Any = ir.InsertionPoint.current
    for op in here.block:
        callback = _callback(op.operation, callbacks)
        part = getattr(callback, "part", None)
        if callback is callbacks[-1]:
            this = op.operation
        # vmap may have given tickets a shape.
        elif part == "start" and _rank(op.operation.results[0]) == 1:
            starts.append(op.operation)
        elif part == "finish" and _rank(op.operation.operands[0]) == 1:
            finishes.append(op.operation)
    assert this is not None
    if target.part == "finish":
        others = [start for start in starts if start.results[0] != this.operands[0]]
        if others and _rank(this.operands[0]) == 1:
            _need(this, others)
    elif finishes and _rank(this.results[0]) == 1:
        _order(this, finishes)


def _callback(operation: Any, callbacks: list[Any]) -> Any:
    """The host callback that an operation calls."""
    if operation.name != "stablehlo.custom_call":
        return None
    # Other calls may have an index as well.
    if not _PYTHON_CALLBACK.fullmatch(
        ir.StringAttr(operation.attributes["call_target_name"]).value
    ):
        return None
    config = operation.attributes["mhlo.backend_config"]
    return callbacks[ir.IntegerAttr(config["index"]).value]


def _need(finish: Any, starts: list[Any]) -> None:
    """Have a finish need the tickets of other starts, after its own."""
    with ir.InsertionPoint(finish):
        tickets = [finish.operands[0], *(start.results[0] for start in starts)]
        finish.operands[0] = stablehlo.concatenate(tickets, 0)


def _rank(ticket: Any) -> int:
    rank: int = ir.RankedTensorType(ticket.type).rank
    return rank


def _operation(value: Any) -> Any:
    """The operation that made a value; ``None`` for an argument of a block."""
    owner = value.owner
    return None if isinstance(owner, ir.Block) else getattr(owner, "operation", owner)


def _operands(operation: Any) -> Iterator[Any]:
    """What an operation takes, its regions included."""
    yield from operation.operands
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield from _operands(inner.operation)


def _order(start: Any, finishes: list[Any]) -> None:
    """Move a start before the finishes of its block that it does not need, and have them need it.

    Args:
        start: the operation that was just appended to its block.
        finishes: operations of that block, in order.
    """
    operations = [op.operation for op in start.block]
    place = {operation: at for at, operation in enumerate(operations)}
    for finish in finishes:
        needed = _needed(start, place, place[finish])
        if place[finish] not in needed:
            break
    else:
        return
    for at in sorted(needed):
        operations[at].move_before(finish)
    for other in finishes[finishes.index(finish) :]:
        if place[other] not in needed:
            _need(other, [start])


def _needed(start: Any, place: dict[Any, int], first: int) -> set[int]:
    """The places, from ``first`` on, of a start and of what it is computed from."""
    needed: set[int] = set()
    todo = [start]
    while todo:
        operation = todo.pop()
        at = place.get(operation, -1)  # of other blocks: this one lies inside them
        if at >= first and at not in needed:
            needed.add(at)
            todo += [o for value in _operands(operation) if (o := _operation(value)) is not None]
    return needed


_compat.watch_lowering(lowered)
