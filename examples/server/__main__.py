# SPDX-License-Identifier: Apache-2.0
"""Command line of the server: ``python -m examples.server --port 8000``."""

from __future__ import annotations

import argparse
import contextlib
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import jax
import uvicorn

from examples.server import model
from examples.server.app import Predictor, Service, create_app

MODES = ("aiocolocated", "jax-inline", "jax-to-thread")


class Server(uvicorn.Server):
    """uvicorn, with a ready line on stdout, a health check that knows, and exit code 0."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            print(f"serving on http://{host}:{port}", flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM: admit nothing more, answer what is in flight, then exit with code 0."""
        self._service.draining = True
        if sig == signal.SIGTERM:
            self.should_exit = True  # uvicorn's own handler would also die of the signal at the end
        else:
            super().handle_exit(sig, frame)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.server", description=__doc__)
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000, help="0 takes a free one; the ready line says which")
    add("--mode", choices=MODES, default=MODES[0], help="the last two are for comparison")
    add("--weights", type=Path, help="a .npz file: read if it exists, else trained and written")
    add("--log", type=Path, default=Path("predictions.jsonl"), help="the prediction log")
    add("--max-in-flight", type=int, default=64, help="requests at a time; more get a 503")
    add("--workers", type=int, default=32, help="most worker threads (aiocolocated)")
    add("--hosts", type=int, default=0, help="processes that decode and record; 0: this one")
    add("--slow-disk-ms", type=float, default=0, help="SIMULATION: each log write takes longer")
    args = parser.parse_args()
    if args.hosts and args.mode != "aiocolocated":
        parser.error("--hosts needs --mode aiocolocated")
    return args


@contextlib.contextmanager
def open_predictor(args: argparse.Namespace, params: model.Params) -> Iterator[Predictor]:
    """The predictor of the chosen mode. Imports are local: the baselines run without ours."""
    log, slow_disk = str(args.log.absolute()), args.slow_disk_ms / 1e3
    if args.mode == "aiocolocated":
        import aiocolocated
        from examples.hosts import open_hosts_or_here
        from examples.server.predict import Predictor as AiocolocatedPredictor

        # Log writes wait for the disk, not for a core: as many at a time as the disk likes.
        aiocolocated.configure(worker_limit=args.workers)
        # Not `async with`: the event loop is uvicorn's.
        with open_hosts_or_here(args.hosts, jax.devices()[:1]) as hosts:
            yield AiocolocatedPredictor(params, log, hosts.devices, slow_disk=slow_disk)
    else:
        from examples.server.baselines import PlainJaxPredictor

        to_thread = args.mode == "jax-to-thread"
        yield PlainJaxPredictor(params, log, to_thread=to_thread, slow_disk=slow_disk)


def main() -> None:
    """Train or load the model, then serve until SIGTERM or Ctrl-C."""
    args = parse_arguments()
    params = model.load_or_train(args.weights)
    with open_predictor(args, params) as predictor:
        service = Service(predictor, max_in_flight=args.max_in_flight)
        config = uvicorn.Config(
            create_app(service),
            host=args.host,
            port=args.port,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=30,
        )
        with contextlib.suppress(KeyboardInterrupt):  # after Ctrl-C and draining
            Server(config, service).run()


if __name__ == "__main__":
    main()
