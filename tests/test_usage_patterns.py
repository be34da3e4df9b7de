# SPDX-License-Identifier: Apache-2.0
"""The workarounds that programs write by hand around JAX's colocated Python, and ours beside them.

A how-to page has each pattern in two sections that arrive at the same `result`. Each runs here in an
interpreter of its own, after the page's first block, and ours has fewer lines of code.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import test_docs

PAGES = [
    "replace-a-dummy-array",
    "pass-a-step-number",
    "iterate-on-the-data-host",
    "one-object-per-host",
]
THEIRS, OURS = "## The workaround", "## With aiocolocated"


def sources(name: str) -> tuple[str, str, str]:
    """A page's first block, the workaround, and ours."""
    page = test_docs.ROOT / "docs" / "how-to" / f"{name}.md"
    lines = page.read_text(encoding="utf-8").splitlines()
    blocks = [block for block in test_docs.blocks_of(page) if block.info == "python"]
    theirs, ours = (
        next(block for block in blocks if block.line > lines.index(heading) + 1)
        for heading in (THEIRS, OURS)
    )
    assert blocks.index(theirs) == 1
    assert blocks.index(ours) == 2
    return blocks[0].source, theirs.source, ours.source


def code_lines(source: str) -> int:
    """How many lines are neither blank nor a comment."""
    lines = (line.strip() for line in source.splitlines())
    return sum(bool(line) and not line.startswith("#") for line in lines)


def result_of(first: str, source: str, folder: Path) -> object:
    """What a section leaves in `result`, when it runs after the page's first block only."""
    folder.mkdir()
    output = folder / "result.json"
    write = f"import json\nfrom pathlib import Path\nPath({str(output)!r}).write_text(json.dumps(result))"
    document = folder / "page.md"
    document.write_text(
        "\n\n".join(f"```python\n{block}\n```" for block in (first, source, write)), "utf-8"
    )
    for state, text in test_docs.results_of(document).values():
        if state != "passed":
            pytest.fail(text, pytrace=False)
    return json.loads(output.read_text("utf-8"))


@pytest.mark.parametrize("name", PAGES)
def test_pattern_takes_fewer_lines_than_its_workaround(name: str) -> None:
    """The imports that a section needs are in it, so they count."""
    _, theirs, ours = sources(name)
    assert "jax_colocated" in theirs
    assert "aiocolocated" not in theirs
    assert "jax_colocated" not in ours
    assert code_lines(ours) < code_lines(theirs)


@pytest.mark.parametrize("name", PAGES)
def test_pattern_gives_what_its_workaround_gives(name: str, tmp_path: Path) -> None:
    """Both sections run alone, and have the same result."""
    first, theirs, ours = sources(name)
    expected = result_of(first, theirs, tmp_path / "theirs")
    assert expected
    assert result_of(first, ours, tmp_path / "ours") == expected
