# SPDX-License-Identifier: Apache-2.0
"""Kinds of Python values, and bodies of every kind that give back what they get.

Code of an importable module is shipped by reference.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import jax
from stream_bodies import TIMEOUT

from aiocolocated import colocated_python, from_thread


@dataclasses.dataclass
class Options:
    """A Python value, whatever is in it."""

    name: str
    extra: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    number: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    w: Any
    steps: Any


@jax.tree_util.register_pytree_node_class
class Box:
    """A registered pytree with data that is no leaf."""

    def __init__(self, content, label):
        self.content = content
        self.label = label

    def tree_flatten(self):
        return (self.content,), self.label

    @classmethod
    def tree_unflatten(cls, label, children):
        return cls(*children, label)


Pair = collections.namedtuple("Pair", ["left", "right"])


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Plain:
    """An ordinary object."""

    def __init__(self, value):
        self.value = value


# --- bodies -----------------------------------------------------------------------------------------


def same(x, tree):
    return tree


async def same_async(x, tree):
    await asyncio.sleep(0)
    return tree


def yields(x, tree):
    yield tree


async def yields_async(x, tree):
    await asyncio.sleep(0)
    yield tree


class Echo:
    def method(self, x, tree):
        return tree

    async def coroutine(self, x, tree):
        return tree

    def items(self, x, tree):
        yield tree

    async def items_async(self, x, tree):
        yield tree


def take_one(function: Any) -> Callable[..., Any]:
    def way(*args: Any, **kwargs: Any) -> Any:
        (item,) = from_thread.iterate(function(*args, **kwargs))
        return item

    return way


def wait(function: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs).result(TIMEOUT)


WAYS = {
    "function": lambda obj: wait(colocated_python(same)),
    "coroutine": lambda obj: wait(colocated_python(same_async)),
    "stream": lambda obj: take_one(colocated_python(yields)),
    "async stream": lambda obj: take_one(colocated_python(yields_async)),
    "method": lambda obj: wait(obj.method),
    "async method": lambda obj: wait(obj.coroutine),
    "method's stream": lambda obj: take_one(obj.items),
    "async method's stream": lambda obj: take_one(obj.items_async),
}
