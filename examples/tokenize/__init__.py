# SPDX-License-Identifier: Apache-2.0
"""A tokenizer in pure Python that feeds a model (``python -m examples.tokenize``).

Texts are cut into pieces, which workers tokenize at the same time. Their tokens are packed into
batches in the order of the text, put on a device, and trained on. A bounded number of pieces is under
way, and leaving the block early stops everything.

The workers are threads of this process, which share one GIL, or host processes, which have one each.
``open_workers`` is the only place that knows which. ``open_batches`` is the part to copy.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import islice
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
import numpy.typing as npt

from aiocolocated import (
    ArrayFuture,
    ColocatedFunction,
    TaskChannel,
    TaskGroup,
    colocated_cpu_devices,
    colocated_python,
    open_hosts,
)
from examples.tokenize.bpe import Vocabulary

Tokens: TypeAlias = npt.NDArray[np.uint16]
Workers: TypeAlias = Literal["threads", "processes"]


@dataclasses.dataclass
class Flow:
    """What went through a pipeline, and how much is in it.

    Attributes:
        held: pieces that are being tokenized, or whose tokens wait for their turn.
        most: the most that were held at a time.
        tokens: how many tokens came out.
        digest: of these tokens, in order.
    """

    held: int = 0
    most: int = 0
    tokens: int = 0
    digest: Any = dataclasses.field(default_factory=hashlib.sha256)

    def enter(self) -> None:
        """A piece is on its way."""
        self.held += 1
        self.most = max(self.most, self.held)

    def leave(self, tokens: Tokens) -> None:
        """Its tokens are out."""
        self.held -= 1
        self.tokens += len(tokens)
        self.digest.update(tokens)


@asynccontextmanager
async def open_workers(kind: Workers, count: int) -> AsyncIterator[Sequence[jax.Device]]:
    """A device for each worker, of this process or of host processes that live as long as the block."""
    if kind == "processes":
        async with open_hosts("processes", n=count, cpu_devices=1) as hosts:
            yield hosts.devices
    else:
        yield [*colocated_cpu_devices(jax.local_devices()[:1])] * count


def make_encode(vocabulary: Vocabulary) -> ColocatedFunction[[str], bytes]:
    """A function that tokenizes where it runs. The vocabulary is shipped with it, once."""

    @colocated_python
    def encode(piece: str) -> bytes:
        # As bytes, which come back by value: an array would stay where it was made.
        return np.array(vocabulary.encode(piece), np.uint16).tobytes()

    return encode


@asynccontextmanager
async def open_batches(
    pieces: Iterable[str],
    vocabulary: Vocabulary,
    devices: Sequence[jax.Device],
    shape: tuple[int, int],
    *,
    ahead: int = 16,
    flow: Flow | None = None,
) -> AsyncIterator[AsyncGenerator[Tokens]]:
    """Tokenize pieces of text next to devices, and pack the tokens, in order, into batches.

    Args:
        pieces: the text.
        vocabulary: what tokenizes it.
        devices: one for each worker; a worker tokenizes one piece at a time.
        shape: rows of a batch and tokens of a row. What does not fill the last batch is left out.
        ahead: pieces that are under way at a time, all workers together.
        flow: counts what goes through.

    Yields:
        The batches. Leaving the block, in whatever way, stops the workers and waits for them.
    """
    flow = flow or Flow()
    encode = make_encode(vocabulary)
    # CPU-bound Python: a second call at a time would only take the GIL from the first. So each worker
    # has a channel, which runs one call after the other.
    lanes = [(TaskChannel(), encode.specialize(devices=device)) for device in devices]
    loads = [0] * len(lanes)  # characters that each was given

    def submit(piece: str) -> ArrayFuture[bytes]:
        least = loads.index(min(loads))
        loads[least] += len(piece)
        channel, encode_there = lanes[least]
        return channel.submit_nowait(encode_there, piece)

    coming: deque[ArrayFuture[bytes]] = deque()

    async def pack() -> AsyncGenerator[Tokens]:
        source = iter(pieces)
        size = shape[0] * shape[1]
        rest = np.empty(0, np.uint16)
        while True:
            for piece in islice(source, ahead - len(coming)):
                flow.enter()
                coming.append(submit(piece))
            if not coming:
                return
            tokens = np.frombuffer(await coming.popleft(), np.uint16)
            flow.leave(tokens)
            rest = np.concatenate([rest, tokens])
            while len(rest) >= size:
                yield rest[:size].reshape(shape)
                rest = rest[size:]

    async with TaskGroup(keep_results=False):
        async with aclosing(pack()) as batches:
            yield batches
        for call in coming:  # the consumer has left before the end
            call.cancel()
