# SPDX-License-Identifier: Apache-2.0
"""The same load on the same server, three ways: ``python -m examples.demo``.

For each mode the server is started for real and gets a few hundred PNGs of handwritten digits over
HTTP, many at a time, while its health check is probed every few milliseconds. This happens twice:
with the disk of this machine, and with a slower one (SIMULATED: the log write sleeps, too).

* ``aiocolocated``: this library.
* ``jax-inline``: plain JAX colocated calls, made directly on the event loop.
* ``jax-to-thread``: the same calls through ``asyncio.to_thread``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from examples.server import model, work
from examples.server.__main__ import MODES
from examples.server.launch import run_server

PROBES = 16  # connections: a probe that waits for its answer must not hold up the others
PROBE_PERIOD = 0.01  # seconds between two probes


@dataclasses.dataclass
class Measured:
    """What one mode did; times in milliseconds."""

    accuracy: float
    failed: int
    logged: int
    requests_per_second: float
    latency_p50: float
    latency_p99: float
    healthz_p99: float
    worst_loop_gap: float


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` % of ``values`` do not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(len(ordered) * percent / 100) - 1]


async def probe_health(
    url: str, due: float, period: float, latencies: list[float], stop: asyncio.Event
) -> None:
    """Ask ``/healthz`` at ``due`` and every ``period`` seconds, on a connection kept open.

    Appends the seconds from when a probe was due to its answer. Late probes are not made up for. A
    plain socket, because a busy HTTP client adds milliseconds of its own.
    """
    address = httpx.URL(url)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    while not stop.is_set():
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readuntil(b"}")  # the body is a small JSON object
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the health check failed: {head!r}")
        answered = time.perf_counter()
        latencies.append(answered - due)
        due = max(due + period, answered)
    writer.close()
    await writer.wait_closed()


async def measure(url: str, uploads: list[bytes], labels: list[int], concurrency: int) -> Measured:
    """Send every upload once, ``concurrency`` at a time, and probe the health check meanwhile."""
    latencies: list[float] = []
    health: list[float] = []
    correct = failed = 0
    todo = iter(list(zip(uploads, labels, strict=True)))

    async def send(client: httpx.AsyncClient) -> None:
        nonlocal correct, failed
        for png, label in todo:
            start = time.perf_counter()
            response = await client.post("/predict", content=png)
            latencies.append(time.perf_counter() - start)
            if response.status_code == 200:
                correct += response.json()["digit"] == label
            else:
                failed += 1

    async with contextlib.AsyncExitStack() as stack:
        # A client each: in a shared connection pool some requests wait far longer than others, and
        # that would be measured. `verify=False` as there is no TLS to load certificates for.
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(base_url=url, timeout=60, verify=False)
            )
            for _ in range(concurrency)
        ]
        # Connect before the clock starts.
        await asyncio.gather(*(client.get("/healthz") for client in clients))
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            start = time.perf_counter()
            for i in range(PROBES):
                due = start + i * PROBE_PERIOD
                probe = probe_health(url, due, PROBES * PROBE_PERIOD, health, stop)
                group.create_task(probe)
            await asyncio.gather(*map(send, clients))
            elapsed = time.perf_counter() - start
            stop.set()
        stats = (await clients[0].get("/stats")).json()

    return Measured(
        accuracy=correct / len(uploads),
        failed=failed,
        logged=0,
        requests_per_second=len(uploads) / elapsed,
        latency_p50=percentile(latencies, 50) * 1e3,
        latency_p99=percentile(latencies, 99) * 1e3,
        healthz_p99=percentile(health, 99) * 1e3,
        worst_loop_gap=stats["worst_loop_gap_ms"],
    )


async def run_mode(
    mode: str,
    slow_disk_ms: float,
    folder: Path,
    uploads: list[bytes],
    labels: list[int],
    concurrency: int,
) -> Measured:
    """Start the server in ``mode``, load it, stop it with SIGTERM and read its log."""
    log = folder / f"{mode}-{slow_disk_ms}.jsonl"
    async with run_server(
        *("--mode", mode, "--log", str(log), "--weights", str(folder / "digits.npz")),
        *("--slow-disk-ms", str(slow_disk_ms)),
    ) as server:
        measured = await measure(server.url, uploads, labels, concurrency)
        server.terminate()
        code = await server.wait()
    if code != 0:
        raise RuntimeError(f"the server in mode {mode} exited with code {code} after SIGTERM")
    measured.logged = sum(1 for line in log.read_text().splitlines() if json.loads(line))
    return measured


def print_table(results: dict[tuple[str, float], Measured], args: argparse.Namespace) -> None:
    """One column per mode, one group of rows per disk."""
    rows = [
        ("accuracy on held-out digits", "accuracy", ".3f"),
        ("requests per second", "requests_per_second", ".0f"),
        ("latency p50 (ms)", "latency_p50", ".1f"),
        ("latency p99 (ms)", "latency_p99", ".1f"),
        ("/healthz p99 under load (ms)", "healthz_p99", ".1f"),
        ("worst event-loop gap (ms)", "worst_loop_gap", ".1f"),
    ]
    print(f"\n{args.requests} PNG uploads, {args.concurrency} at a time: decode, infer, log")
    print(f"{'':32}" + "".join(f"{mode:>15}" for mode in args.modes))
    for disk in dict.fromkeys(disk for _, disk in results):
        slow = f"SIMULATED slow disk: a write sleeps {disk:g} ms more"
        print(slow if disk else "the disk of this machine")
        for title, field, form in rows:
            values = (getattr(results[mode, disk], field) for mode in args.modes)
            print(f"  {title:30}" + "".join(f"{value:>15{form}}" for value in values))
    print(flush=True)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--requests", type=int, default=model.HELD_OUT)
    add("--concurrency", type=int, default=32)
    add("--modes", nargs="+", choices=MODES, default=list(MODES))
    add("--slow-disk-ms", type=float, default=20, help="of the simulated disk; 0 leaves it out")
    return parser.parse_args()


def main() -> int:
    """Run every mode and print the table.

    Returns:
        The exit code: 0 if every request of every mode was answered and logged, and at least 90 %
        of the answers are right.
    """
    args = parse_arguments()
    results: dict[tuple[str, float], Measured] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print("drawing the uploads ...", flush=True)
        # No JAX in this process: a GPU that is in use here has no memory for the server. The first
        # server trains the model, the others find its weights.
        digits = model.load_digits()
        chosen = [i % model.HELD_OUT for i in range(args.requests)]
        drawn = [work.encode_png(image) for image in digits.test_images[: args.requests]]
        uploads = [drawn[i] for i in chosen]
        labels = [int(digits.test_labels[i]) for i in chosen]
        gc.freeze()  # a full collection here would look like a slow server
        for disk in dict.fromkeys((0.0, args.slow_disk_ms)):
            for mode in args.modes:
                print(f"running the server: {mode}{', slow disk' if disk else ''} ...", flush=True)
                results[mode, disk] = asyncio.run(
                    run_mode(mode, disk, folder, uploads, labels, args.concurrency)
                )
    print_table(results, args)
    problems = [
        f"{mode}: {measured.failed} requests failed, accuracy {measured.accuracy:.3f}, "
        f"{measured.logged} of {args.requests} predictions in the log"
        for (mode, _), measured in results.items()
        if measured.failed or measured.accuracy < 0.9 or measured.logged != args.requests
    ]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
