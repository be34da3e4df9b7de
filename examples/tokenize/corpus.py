# SPDX-License-Identifier: Apache-2.0
"""The text: licences and documentation that installed packages brought along."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
from collections.abc import Iterator
from importlib.metadata import PackagePath
from pathlib import Path

SUFFIXES = (".md", ".rst", ".txt")
NAMES = re.compile(r"METADATA$|(AUTHORS|COPYING|LICEN[CS]E|NOTICE)\b")
DATA = {"data", "test", "tests"}  # folders whose text files are rarely prose


def is_text(file: PackagePath) -> bool:
    """Whether a file is a licence, a description or documentation, by its name."""
    if DATA.intersection(file.parts[:-1]):
        return False
    return file.suffix in SUFFIXES or NAMES.match(file.name) is not None


def read_documents(limit: int | None = None) -> list[str]:
    """The texts, each once, in the order of the names of their packages and files.

    Args:
        limit: bytes in all, the rest is left out; ``None`` reads everything.
    """
    seen: set[bytes] = set()
    documents: list[str] = []
    room = limit
    for content in _contents():
        digest = hashlib.sha256(content).digest()
        if digest in seen:
            continue
        seen.add(digest)
        documents.append(content[:room].decode("utf-8", "replace"))
        if room is not None:
            room -= len(content)
            if room <= 0:
                break
    return documents


def _contents() -> Iterator[bytes]:
    packages = importlib.metadata.distributions()
    for package in sorted(packages, key=lambda package: str(package.name)):
        for file in sorted(filter(is_text, package.files or ())):
            path = Path(file.locate())
            if path.is_file():  # what is listed may have been removed
                yield path.read_bytes()


def cut(documents: list[str], length: int) -> list[str]:
    """Pieces of up to ``length`` characters, which end with a line where there is one."""
    pieces: list[str] = []
    for document in documents:
        start = 0
        while start < len(document):
            end = start + length
            if end < len(document):
                end = document.rfind("\n", start, end) + 1 or end
            pieces.append(document[start:end])
            start = end
    return pieces
