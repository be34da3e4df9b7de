# SPDX-License-Identifier: Apache-2.0
"""A tokenizer in pure Python: byte-pair encoding, trained on the text that it is for.

Nothing here knows about asyncio, JAX or aiocolocated, and nothing releases the GIL.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TypeAlias

Pair: TypeAlias = tuple[int, int]

BYTES = 256  # the first tokens are the bytes

# Merges never cross the border of two words. Every character is in exactly one of them, and the bound
# on their length keeps lines of 10 000 dashes from taking the square of that in time.
_WORDS = re.compile(r"\s?\w{1,32}|\s?[^\s\w]{1,32}|\s{1,32}")


def split(text: str) -> list[bytes]:
    """The words of a text, in UTF-8; put together they are the text."""
    return [word.encode("utf-8", "surrogatepass") for word in _WORDS.findall(text)]


def merge(word: Sequence[int], pair: Pair, token: int) -> list[int]:
    """The word with a token in place of each pair of two others."""
    merged: list[int] = []
    for part in word:
        if merged and (merged[-1], part) == pair:
            merged[-1] = token
        else:
            merged.append(part)
    return merged


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What the tokens mean: the bytes first, then each pair that was merged, in that order.

    Attributes:
        merges: token ``256 + i`` stands for the two tokens ``merges[i]``.
    """

    merges: tuple[Pair, ...]

    @property
    def size(self) -> int:
        """How many tokens there are."""
        return BYTES + len(self.merges)

    @cached_property
    def ranks(self) -> dict[Pair, int]:
        """Which token a pair becomes."""
        return {pair: BYTES + i for i, pair in enumerate(self.merges)}

    @cached_property
    def spellings(self) -> list[bytes]:
        """The bytes of each token."""
        spelled = [bytes([byte]) for byte in range(BYTES)]
        for left, right in self.merges:
            spelled.append(spelled[left] + spelled[right])
        return spelled

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        tokens: list[int] = []
        for word in split(text):
            tokens += self._encode_word(word)
        return tokens

    def _encode_word(self, word: bytes) -> Sequence[int]:
        """The tokens of a word: pairs are merged in the order in which they were learned."""
        parts: Sequence[int] = word
        ranks = self.ranks
        while len(parts) > 1:
            token, pair = min((ranks.get(p, self.size), p) for p in itertools.pairwise(parts))
            if token == self.size:
                break
            parts = merge(parts, pair, token)
        return parts

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of some tokens."""
        spelled = b"".join(self.spellings[token] for token in tokens)
        return spelled.decode("utf-8", "surrogatepass")


def train(texts: Iterable[str], size: int) -> Vocabulary:
    """Learn up to ``size`` tokens from texts: again and again, the commonest pair becomes one.

    The same texts in the same order give the same vocabulary; of pairs that are as common as each other
    the one with the larger tokens is merged.
    """
    common = collections.Counter(word for text in texts for word in split(text))
    words: list[Sequence[int]] = list(common)
    weights = list(common.values())
    counts: collections.Counter[Pair] = collections.Counter()
    where: dict[Pair, set[int]] = collections.defaultdict(set)  # the words that have a pair

    def count(number: int, sign: int) -> None:
        word = words[number]
        for pair in itertools.pairwise(word):
            counts[pair] += sign * weights[number]
            where[pair].add(number)

    for number in range(len(words)):
        count(number, 1)
    merges: list[Pair] = []
    while BYTES + len(merges) < size and counts:
        pair = max(counts, key=lambda pair: (counts[pair], pair))
        if counts[pair] < 2:
            break  # a pair that was seen once is no rule
        for number in where.pop(pair):
            count(number, -1)
            words[number] = merge(words[number], pair, BYTES + len(merges))
            count(number, 1)
        del counts[pair]
        merges.append(pair)
    return Vocabulary(tuple(merges))
