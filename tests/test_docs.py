# SPDX-License-Identifier: Apache-2.0
"""Runs every Python block of the README and of the documentation.

The blocks of one file run in order, in one fresh interpreter on 8 CPU devices, as if typed into
`python -m asyncio`: they share a namespace (that of `__main__`), and a block may `await` at top
level. A block after the line `<!-- skip: reason -->` is shown but not run.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import dataclasses
import functools
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
import types
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
FILES = [path for path in FILES if path.is_file() and "_build" not in path.parts]
TIMEOUT = 100.0  # seconds for all blocks of a file
MAX_SKIPPED = 5

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}) *(?P<info>[^`]*)$")
_SKIP = re.compile(r"^ *<!-- *skip:(?P<reason>.*)-->\s*$")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: `line` is that of its first line of code, `skip` the reason not to run it."""

    path: Path
    line: int
    info: str
    source: str
    skip: str | None

    @property
    def where(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def blocks_of(path: Path) -> list[Block]:
    """All fenced blocks of a Markdown file, whatever their language."""
    blocks = []
    skip: str | None = None
    lines = iter(enumerate(path.read_text(encoding="utf-8").splitlines(), start=1))
    for number, line in lines:
        opening = _FENCE.match(line)
        if opening is None:
            if comment := _SKIP.match(line):
                skip = comment["reason"].strip()
            elif line.strip():
                skip = None
            continue
        # A fence is closed by one of the same character, at least as long, with nothing after it.
        fence, indent = opening["fence"], len(opening["indent"])
        body = []
        for _, inner in lines:
            closing = inner.strip()
            if len(closing) >= len(fence) and set(closing) == {fence[0]}:
                break
            body.append(inner[indent:] if not inner[:indent].strip() else inner)
        blocks.append(Block(path, number + 1, opening["info"].strip(), "\n".join(body), skip))
        skip = None
    return blocks


def run_blocks(path: Path, report: Path) -> None:
    """Run the blocks of `path` until one fails; write a line per block to `report`."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins  # JAX looks them up in its caller's globals
    main.__file__ = str(path)
    sys.modules["__main__"] = main
    with report.open("w", encoding="utf-8", buffering=1) as out, asyncio.Runner() as runner:

        def write(**entry: object) -> None:
            out.write(json.dumps(entry) + "\n")

        for block in blocks_of(path):
            if block.info != "python" or block.skip is not None:
                continue
            write(line=block.line, state="started")
            try:
                # The empty lines make line numbers, in tracebacks too, those of the Markdown file.
                code = compile(
                    "\n" * (block.line - 1) + block.source,
                    str(path),
                    "exec",
                    flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
                    dont_inherit=True,
                )
                if code.co_flags & inspect.CO_COROUTINE:
                    runner.run(types.FunctionType(code, main.__dict__)())
                else:
                    exec(code, main.__dict__)
            except BaseException:
                write(line=block.line, state="failed", text=traceback.format_exc())
                return
            write(line=block.line, state="passed")


@functools.cache
def results_of(path: Path) -> dict[int, tuple[str, str]]:
    """Per block, by line: (state, text). Runs the file's blocks once in a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.jsonl")
        work = Path(folder, "work")
        work.mkdir()
        env = os.environ | {
            "JAX_NUM_CPU_DEVICES": "8",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
        }
        try:
            process = subprocess.run(
                [sys.executable, __file__, str(path), str(report)],
                cwd=work,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                timeout=TIMEOUT,
                check=False,
            )
            output = process.stdout
            ending = f"the process ended with status {process.returncode}"
            clean = process.returncode == 0
        except subprocess.TimeoutExpired as error:
            output = (error.stdout or b"").decode("utf-8", "replace")
            ending = f"the process was killed after {TIMEOUT:.0f} s"
            clean = False
        entries: list[dict[str, Any]] = []
        if report.exists():
            entries = [json.loads(line) for line in report.read_text("utf-8").splitlines()]
    states = {entry["line"]: (entry["state"], entry.get("text", "")) for entry in entries}
    # Ends that no exception tells of: a hang or a crash in a block, or at exit after the last one.
    if not clean:
        line, (state, text) = list(states.items())[-1] if states else (0, ("started", ""))
        if state != "failed":
            states[line] = ("failed", f"{text}{ending}, here or at exit")
    return {line: (state, f"{text}\n{output}") for line, (state, text) in states.items()}


ALL_BLOCKS = [block for path in FILES for block in blocks_of(path)]
PYTHON_BLOCKS = [block for block in ALL_BLOCKS if block.info == "python"]


@pytest.mark.parametrize(
    "block", [pytest.param(b, id=b.where) for b in PYTHON_BLOCKS if b.skip is None]
)
def test_block_runs(block: Block) -> None:
    """The block runs to its end without an error."""
    results = results_of(block.path)
    state, text = results.get(block.line, ("not run", ""))
    if state == "not run":
        if any(state == "failed" for state, _ in results.values()):
            pytest.skip("an earlier block of this file failed")
        pytest.fail(f"{block.where}: not run\n{results}")
    if state != "passed":
        pytest.fail(f"{block.where}: {text}", pytrace=False)


def test_skipped_blocks_are_few_and_have_a_reason() -> None:
    """Blocks that are not run are exceptions, and each says why."""
    skipped = [block for block in PYTHON_BLOCKS if block.skip is not None]
    assert [block.where for block in skipped if not block.skip] == []
    assert len(skipped) <= MAX_SKIPPED, [block.where for block in skipped]


def test_python_is_only_in_blocks_that_run() -> None:
    """Other spellings of a Python block would not be collected, so there are none."""
    other = re.compile(
        r"^(py|python3|pycon|ipython3?|python\b.+|\{(code|code-block|sourcecode)\} *py.*)$"
    )
    assert [b.where for b in ALL_BLOCKS if other.match(b.info)] == []


if __name__ == "__main__":
    run_blocks(Path(sys.argv[1]), Path(sys.argv[2]))
