# SPDX-License-Identifier: Apache-2.0
"""The reference pages name everything public, once."""

from __future__ import annotations

import collections
import re
from pathlib import Path

import pytest

import aiocolocated
import aiocolocated.testing

PAGES = Path(__file__).resolve().parent.parent / "docs" / "reference"

_DIRECTIVE = re.compile(
    r"^ *\.\. (?P<kind>currentmodule|auto(?:class|data|exception|function|module)):: *"
    r"(?P<name>[\w.]+)",
    re.MULTILINE,
)


def documented() -> collections.Counter[str]:
    """Full names that autodoc puts into the reference, and how often."""
    names: collections.Counter[str] = collections.Counter()
    for page in sorted(PAGES.glob("*.md")):
        module = ""
        for match in _DIRECTIVE.finditer(page.read_text(encoding="utf-8")):
            if match["kind"] == "currentmodule":
                module = match["name"]
            elif match["kind"] == "automodule":
                names[match["name"]] += 1
            else:
                names[f"{module}.{match['name']}"] += 1
    return names


@pytest.mark.parametrize("module", [aiocolocated, aiocolocated.testing], ids=lambda m: m.__name__)
def test_every_public_name_is_in_the_reference_once(module: object) -> None:
    """Neither missing, nor twice, nor a name that does not exist."""
    package = module.__name__
    public = {f"{package}.{name}" for name in module.__all__}
    names = documented()
    assert {name: names[name] for name in public if names[name] != 1} == {}
    here = {name for name in names if name.rpartition(".")[0] == package}
    assert here - public - {aiocolocated.testing.__name__} == set()


def test_every_error_has_a_heading() -> None:
    """`errors.md#wouldblock` is an address that messages and pages can point to."""
    text = (PAGES / "errors.md").read_text(encoding="utf-8")
    headings = set(re.findall(r"^## (\w+)$", text, re.MULTILINE))
    errors = {
        name
        for name in aiocolocated.__all__
        if isinstance(value := getattr(aiocolocated, name), type)
        and issubclass(value, BaseException)
    }
    assert headings == errors
