# SPDX-License-Identifier: Apache-2.0
"""A host process: how it starts, serves one controller, and ends with it."""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import gc
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from aiocolocated import _compat_hosts, _service
from aiocolocated._hostserver import Server
from aiocolocated._settings import LOCK
from aiocolocated.hosts import _parcels
from aiocolocated.hosts._sockets import connect
from aiocolocated.hosts.inprocess import inprocess_host
from aiocolocated.hosts.launchers import die_with_parent, read_config, versions


def main(source: str | None = None) -> None:
    """Serve one controller.

    Args:
        source: a file with its addresses and keys; ``"-"`` reads them from standard input, and so does
            ``None``, where the end of standard input is that of the controller.
    """
    config = read_config(source)
    if "child_of" in config:
        die_with_parent(config["child_of"])
    if source is None:
        line = os.dup(0)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)  # for bodies, and for what they start
        os.close(nothing)
        # Its controller ends it. Not SIG_IGN, which what bodies start would inherit.
        signal.signal(signal.SIGINT, lambda number, frame: None)
        _start_watch(partial(_wait_for_end, line))
        sys.path[:] = config["sys_path"]
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr] # so that lines come at once
    jax.config.update("jax_platforms", "cpu")
    cluster = config.get("cluster")
    if cluster is None:
        process_of = {int(k): v for k, v in config["process_of"].items()}
        _compat_hosts.become_host(config["devices"], process_of, config["devices_by"])
    else:
        jax.config.update("jax_num_cpu_devices", len(config["devices"]))
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(**cluster)
    host = inprocess_host()
    host.name = config["name"]
    host.process_index = int(config["process_of"][str(config["devices"][0])])
    connection = connect(config, monitored=source is not None)
    atexit.register(connection.close)  # what exit hooks log is sent, too
    if source is not None:
        _start_watch(connection.wait_for_loss)
    server = Server(config["name"], connection.send, collectives=cluster is not None)
    _parcels.release_to[config["parent"]] = server.release
    with LOCK:
        _service.watch(+1)  # what is dropped is told of there
        _service.start()
    logging.getLogger().setLevel(config["log_level"])
    server.forward_logs()
    connection.send(
        json.dumps(
            {**versions(), "pid": os.getpid(), "shared": _parcels.reaches(config["probe"])}
        ).encode()
    )
    gc.collect()
    gc.freeze()  # what is here stays: collections look at what calls make only
    contextvars.Context().run(_serve, connection, server)


def _serve(connection: Any, server: Server) -> None:
    while (data := connection.receive()) != b"":
        server.receive(data)


def _start_watch(wait: Callable[[], str | None]) -> None:
    """End this process at once when the controller has, even in the middle of a body."""

    def watch() -> None:
        why = wait()
        if why is not None:
            with contextlib.suppress(Exception):
                sys.stderr.write(f"aiocolocated: the host ends: {why}\n")
            os._exit(1)

    threading.Thread(target=watch, name="aiocolocated-parent", daemon=True).start()


def _wait_for_end(line: int) -> str:
    while os.read(line, 4096):
        pass
    return "the controller has ended"
