# SPDX-License-Identifier: Apache-2.0
"""The lookup example: the program, its texts beside plain Python's, and the errors of its service."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import traceback
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.lookup import Tables, UnknownKey, ngrams, overlapping, sampler
from examples.lookup.service import run_service

ROOT = Path(__file__).parents[2]
TEXT = "she sells sea shells by the sea shore, the shells she sells are sea shells for sure. " * 3
PROMPTS = ("shell", "e sea", "shore")
LENGTH = 6


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tables of a small text."""
    path = tmp_path_factory.mktemp("store") / "tables.sqlite"
    assert ngrams.write_tables(path, TEXT) > 100
    return path


def continue_in_a_loop(key: jax.Array, prompts: tuple[str, ...], length: int) -> list[str]:
    """What the program does, without program, service and store: counts are made of the text."""
    circle = TEXT * 2
    texts = list(prompts)
    for step_key in jax.random.split(key, length):
        rows = []
        for order in ngrams.ORDERS:
            counters = [
                Counter(
                    circle[at + order]
                    for at in range(len(TEXT))
                    if circle[at : at + order] == text[-order:]
                )
                for text in texts
            ]
            rows.append(jnp.asarray(ngrams.dense(counters)))
        drawn = np.asarray(ngrams.draw(step_key, rows))
        texts = [text + chr(code) for text, code in zip(texts, drawn, strict=True)]
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def test_program_compares_all_ways() -> None:
    """Four lookups are under way at once or one is, the texts agree, and it ends without a word."""
    command = [sys.executable, "-m", "examples.lookup", "--length", "3", "--latency-ms", "30"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    cells = {
        line[:28].strip(): [
            (float(ms), int(most)) for ms, most in re.findall(r"([\d.]+) ms, (\d) at once", line)
        ]
        for line in done.stdout.splitlines()
        if "at once" in line
    }
    ours, ordered, plain = cells.values()
    assert list(cells)[0::2] == ["aiocolocated.io_callback", "jax.experimental.io_callback"]
    assert [way[1][1] for way in (ours, ordered, plain)] == [4, 1, 1]
    assert min(ordered[1][0], plain[1][0]) > 4 * 30
    assert 30 < ours[1][0] < plain[1][0]
    assert "the same texts in all ways: yes" in done.stdout
    assert "an unknown key raises UnknownKey(" in done.stdout


@pytest.mark.asyncio
async def test_texts_are_those_of_plain_python(store: Path) -> None:
    """The same seeds draw the same characters as a loop over the text itself does."""
    key = jax.random.key(3)
    expected = await asyncio.to_thread(continue_in_a_loop, key, PROMPTS, LENGTH)
    async with run_service(store) as address, Tables(address) as tables:
        drawn = await sampler(overlapping(tables), LENGTH)(key, ngrams.encode(PROMPTS))
    assert ngrams.decode(drawn) == expected
    assert len({*expected}) > 1


@pytest.mark.asyncio
async def test_errors_of_the_service_arrive_as_themselves(store: Path) -> None:
    """No service, then an unknown key; the program works after that."""
    key = jax.random.key(0)
    async with Tables("http://127.0.0.1:9") as nowhere:
        with pytest.raises(httpx.ConnectError):
            await sampler(overlapping(nowhere), LENGTH)(key, ngrams.encode(PROMPTS))
    async with run_service(store) as address, Tables(address) as tables:
        sample = sampler(overlapping(tables), LENGTH)
        for unknown in ("qqqqq", "zebra"):
            with pytest.raises(UnknownKey) as raised:
                await sample(key, ngrams.encode(["shell", unknown, "shore"]))
            order, name = raised.value.args
            assert unknown.endswith(name)
            assert len(name) == order
            assert isinstance(raised.value.__cause__, jax.errors.JaxRuntimeError)
            frames = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
            assert frames[-1] == "rows_of"
            del raised
            assert len(ngrams.decode(await sample(key, ngrams.encode(PROMPTS)))) == len(PROMPTS)


@pytest.mark.asyncio
async def test_service_answers(store: Path) -> None:
    """Rows in the order of the keys; 404 names the key; a delay is kept."""
    async with run_service(store) as address, httpx.AsyncClient(base_url=address) as client:

        async def look_up(table: int, *keys: str) -> tuple[int, Any]:
            reply = await client.post(f"/tables/{table}", json=keys)
            return reply.status_code, reply.json()

        expected = [dict(Counter(b for a, b in pairwise(TEXT) if a == c)) for c in "lb"]
        assert await look_up(1, "l", "b") == (200, expected)
        assert await look_up(1, "l", "Q") == (404, {"unknown key": "Q"})
        assert await look_up(4, "sell") == (404, {"unknown key": "sell"})
        await client.post("/delay/0.2")
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(look_up(2, "se"))
        assert (await client.get("/most")).json() == 3
        assert (await client.get("/most")).json() == 0
