# SPDX-License-Identifier: Apache-2.0
"""The tokenizer example: the program itself, the vocabulary, and the promises of ``open_batches``."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from aiocolocated import HostLostError, open_hosts
from examples.tokenize import Flow, Tokens, bpe, corpus, make_encode, open_batches, open_workers

ROOT = Path(__file__).parents[2]
LIMIT = 200_000
SHAPE = (8, 17)

needs_zmq = pytest.mark.skipif(
    importlib.util.find_spec("zmq") is None, reason="host processes need pyzmq"
)
KINDS = ["threads", pytest.param("processes", marks=needs_zmq)]


@pytest.fixture(scope="module")
def documents() -> list[str]:
    """The first documents that there are."""
    return corpus.read_documents(LIMIT)


@pytest.fixture(scope="module")
def vocabulary(documents: list[str]) -> bpe.Vocabulary:
    """What was learned of them."""
    return bpe.train(documents, 400)


@pytest.fixture(scope="module")
def pieces(documents: list[str]) -> list[str]:
    """The documents in some 50 pieces."""
    return corpus.cut(documents, 4000)[:50]


@pytest.fixture(scope="module")
def expected(pieces: list[str], vocabulary: bpe.Vocabulary) -> Tokens:
    """Their tokens, one piece after the other."""
    return np.concatenate([np.array(vocabulary.encode(piece), np.uint16) for piece in pieces])


def run_program(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m examples.tokenize`` on a little text."""
    command = [sys.executable, "-m", "examples.tokenize", "--limit-bytes", str(LIMIT)]
    return subprocess.run(
        [*command, "--vocabulary", "400", "--rows", "32", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=100,
    )


def figures(output: str, title: str) -> list[float]:
    """The numbers in a row of the program's table."""
    row = re.search(rf"^{title}.*?((\s+[\d.]+)+)$", output, re.M)
    assert row is not None, output
    return [float(number) for number in row[1].split()]


# --- the program --------------------------------------------------------------------------------------


def check_table(output: str, kinds: int) -> None:
    """A column for each kind of workers; the loss falls, and the bound is kept."""
    first, last = figures(output, "loss, first 10"), figures(output, "loss, last 10")
    assert len(first) == len(last) == kinds
    assert all(np.subtract(first, last) > 0.5)
    assert all(1 < most <= 8 for most in figures(output, r"pieces held \(bound 8\)"))
    assert all(rate > 0 for rate in figures(output, "tokens per second"))
    assert len(figures(output, "worst event-loop gap")) == kinds


def test_program_learns_with_threads() -> None:
    """The program exits with 0 and prints what it did."""
    done = run_program("--workers", "threads", "--ahead", "8")
    assert done.returncode == 0, done.stdout + done.stderr
    check_table(done.stdout, 1)


@needs_zmq
def test_program_has_the_same_tokens_with_processes() -> None:
    """Threads and processes give the same tokens, and the model learns the same from them."""
    done = run_program("--ahead", "8")
    assert done.returncode == 0, done.stdout + done.stderr
    check_table(done.stdout, 2)
    assert done.stdout.endswith("the same tokens: yes\n")
    threads, processes = figures(done.stdout, "loss, last 10")
    assert abs(threads - processes) < 1e-2


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--count", "0"], 2, "--count, --rows and --ahead must be at least 1"),
        (["--vocabulary", "100"], 2, "--vocabulary must be from 256"),
        (["--workers", "threads", "--rows", "100000"], 1, "the text does not fill a batch"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    arguments: list[str], code: int, text: str
) -> None:
    """The program says so, without a traceback."""
    done = run_program(*arguments)
    assert done.returncode == code
    assert text in done.stderr
    assert "Traceback" not in done.stderr


# --- the text -----------------------------------------------------------------------------------------


def test_documents_are_read_once_and_in_order(documents: list[str]) -> None:
    """The same text each time, without repetitions, and up to a limit."""
    assert documents == corpus.read_documents(LIMIT)
    assert len(set(documents)) == len(documents) > 5
    assert 0.9 * LIMIT < sum(len(document.encode()) for document in documents) < 1.1 * LIMIT
    more = corpus.read_documents(2 * LIMIT)
    assert more[: len(documents) - 1] == documents[:-1]


@pytest.mark.parametrize("length", [1, 100, 4000, 10**9])
def test_pieces_make_up_the_documents(documents: list[str], length: int) -> None:
    """Nothing is lost, no piece is too long, and most end with a line."""
    few = [*documents[:3], "no line ends here" * 1000, ""]
    pieces = corpus.cut(few, length)
    assert "".join(pieces) == "".join(few)
    assert all(0 < len(piece) <= length for piece in pieces)
    if length == 4000:
        assert corpus.cut(["one\ntwo\nthree\n"], 9) == ["one\ntwo\n", "three\n"]


# --- the vocabulary -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        " \n\t  ",
        "The licence, Version 2.0 (the 'Licence')",
        "naïve café \N{SNOWMAN} \N{GRINNING FACE} 漢字",
        "NUL \0, a lone surrogate \ud800",
        "=" * 10_000,
        "x" * 10_000,
    ],
    ids=["empty", "letter", "space", "prose", "unicode", "odd", "line", "word"],
)
def test_encoding_can_be_undone(vocabulary: bpe.Vocabulary, text: str) -> None:
    """Any text comes back."""
    assert vocabulary.decode(vocabulary.encode(text)) == text


def test_encoding_of_the_text_is_shorter_and_can_be_undone(
    documents: list[str], vocabulary: bpe.Vocabulary
) -> None:
    """What was learned makes fewer tokens of the text than it has bytes."""
    assert vocabulary.size == 400
    for document in documents[:20]:
        tokens = vocabulary.encode(document)
        assert vocabulary.decode(tokens) == document
        assert max(tokens) < vocabulary.size
    tokens = vocabulary.encode("".join(documents))
    assert len(tokens) < 0.7 * LIMIT


def test_pairs_are_learned_by_their_number() -> None:
    """A small text, with a result that can be checked by hand."""
    assert bpe.train(["abab"], 300).merges == ((97, 98),)
    learned = bpe.train(["abc abc abc bc"], 300)
    assert learned.merges == ((98, 99), (97, 256), (32, 257))
    assert learned.encode("abc abc") == [257, 258]
    assert bpe.train([], 300).size == 256


def test_training_is_deterministic(
    documents: list[str], vocabulary: bpe.Vocabulary, run_script: Callable[..., Any]
) -> None:
    """The same text gives the same vocabulary, whatever the seed of Python's hashes."""
    assert bpe.train(documents, 400) == vocabulary
    source = f"""
        from examples.tokenize import bpe, corpus
        print(bpe.train(corpus.read_documents({LIMIT}), 400).merges)
    """
    for_another_seed = run_script(source, PYTHONHASHSEED="1").check().stdout
    assert for_another_seed == f"{vocabulary.merges}\n"


# --- batches ------------------------------------------------------------------------------------------


def other_tasks() -> set[asyncio.Task[object]]:
    """Tasks of this loop beside the running one."""
    return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[return-value]


@pytest.mark.asyncio
@pytest.mark.strict_values(True)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [1, 3])
async def test_tokens_come_in_order(
    pieces: list[str], vocabulary: bpe.Vocabulary, expected: Tokens, kind: Any, workers: int
) -> None:
    """The batches are the tokens of the pieces, one after the other, whoever made them."""
    flow = Flow()
    async with open_workers(kind, workers) as devices:
        assert len(devices) == workers
        async with open_batches(pieces, vocabulary, devices, SHAPE, flow=flow) as batches:
            found = [batch async for batch in batches]
    assert {batch.shape for batch in found} == {SHAPE}
    full = len(expected) - len(expected) % (SHAPE[0] * SHAPE[1])
    assert np.array_equal(np.concatenate(found).ravel(), expected[:full])
    assert (flow.held, flow.tokens) == (0, len(expected))


@pytest.mark.asyncio
@pytest.mark.parametrize("ahead", [1, 4])
async def test_pieces_are_bounded(
    pieces: list[str], vocabulary: bpe.Vocabulary, ahead: int
) -> None:
    """However slow the consumer is, no more pieces than promised were taken from the text."""
    taken = 0

    def text() -> Any:
        nonlocal taken
        for piece in pieces:
            taken += 1
            yield piece

    flow = Flow()
    async with (
        open_workers("threads", 2) as devices,
        open_batches(text(), vocabulary, devices, SHAPE, ahead=ahead, flow=flow) as batches,
    ):
        first = await anext(batches)
        await asyncio.sleep(0.05)  # time enough to take more, if that were allowed
        assert first.shape == SHAPE
        assert taken == ahead
        async for _ in batches:
            assert flow.held <= ahead
    assert (taken, flow.most) == (len(pieces), ahead)


@pytest.mark.asyncio
@pytest.mark.parametrize("leave", ["break", "raise", "cancel"])
async def test_leaving_early_stops_everything(
    pieces: list[str], vocabulary: bpe.Vocabulary, leave: str
) -> None:
    """After the block nothing runs any more; what was queued never started."""
    before = other_tasks()
    flow = Flow()

    async def consume() -> None:
        devices = [jax.devices()[0]] * 2
        async with open_batches(pieces, vocabulary, devices, SHAPE, ahead=40, flow=flow) as batches:
            async for _ in batches:
                if leave == "raise":
                    raise KeyError("enough")
                if leave == "cancel":
                    await asyncio.Event().wait()
                break

    if leave == "break":
        await consume()
    elif leave == "cancel":
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(consume(), 0.2)
    else:
        with pytest.raises(ExceptionGroup) as raised:
            await consume()
        assert [repr(error) for error in raised.value.exceptions] == ["KeyError('enough')"]
        del raised
    assert flow.held == 39
    assert other_tasks() == before


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_error_of_a_worker_ends_the_block(
    pieces: list[str], vocabulary: bpe.Vocabulary, kind: Any
) -> None:
    """A piece that cannot be tokenized raises where the batches are taken."""
    wrong: Any = b"no text"
    async with open_workers(kind, 1) as devices:
        with pytest.raises(ExceptionGroup) as raised:
            async with open_batches([*pieces[:5], wrong], vocabulary, devices, SHAPE) as batches:
                async for _ in batches:
                    pass
        assert [type(error) for error in raised.value.exceptions] == [TypeError]
        del raised


@needs_zmq
@pytest.mark.asyncio
async def test_lost_process_ends_the_block(pieces: list[str], vocabulary: bpe.Vocabulary) -> None:
    """What the others do is stopped, and the error says which process it was."""
    with pytest.raises(ExceptionGroup) as raised:
        async with (
            open_hosts("processes", n=2, cpu_devices=1) as hosts,
            open_batches(pieces, vocabulary, hosts.devices, SHAPE) as batches,
        ):
            await anext(batches)
            os.kill(hosts[1].pid, signal.SIGKILL)
            async for _ in batches:
                pass
    assert {type(error) for error in raised.value.exceptions} == {HostLostError}
    assert "host-1" in str(raised.value.exceptions[0])
    del raised


@pytest.mark.asyncio
async def test_vocabulary_is_shipped_once(
    pieces: list[str],
    vocabulary: bpe.Vocabulary,
    expected: Tokens,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The function takes it along with its first call; after that calls pass text only."""
    pickled: list[bpe.Vocabulary] = []

    def state_of(vocabulary: bpe.Vocabulary) -> dict[str, Any]:
        pickled.append(vocabulary)
        return vars(vocabulary)

    monkeypatch.setattr(bpe.Vocabulary, "__getstate__", state_of)
    encode = make_encode(vocabulary)
    lanes = [encode.specialize(devices=device) for device in jax.devices()[:2]]
    found = [await lanes[i % 2](piece) for i, piece in enumerate(pieces)]
    assert {type(tokens) for tokens in found} == {bytes}
    assert np.array_equal(np.frombuffer(b"".join(found), np.uint16), expected)
    assert pickled == [vocabulary]
