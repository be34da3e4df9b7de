# SPDX-License-Identifier: Apache-2.0
"""``python -m aiocolocated``: what is run from a shell."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

_HOST = """\
Serve one controller as a host process. The library starts it: it reads one line of JSON from standard
input, which has the addresses, the key and the devices, and ends when standard input ends, as it does
when the controller is gone. By hand it is started with --connect, as ManualLauncher says, and ends with
its connection. The key never stands on a command line.
"""

_DOCTOR = """\
Print versions, devices, extras and launchers, and try each kind of host, with timings. Each self-test
says PASS, FAIL or SKIP, and what to do. The exit status is 1 if one fails. It starts JAX, and one host
process if pyzmq is installed; both are gone when it is over.
"""


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"must be seconds, more than 0, got {text}")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the first argument says; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m aiocolocated",
        description="Await ordinary Python that runs next to JAX devices.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor = commands.add_parser(
        "doctor", help="say what is installed and whether it works", description=_DOCTOR
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.add_argument(
        "--timeout",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="for each self-test (%(default)g)",
    )
    host = commands.add_parser(
        "host", help="be a host process (started by launchers)", description=_HOST
    )
    host.add_argument(
        "--connect",
        metavar="FILE",
        help="read the addresses and keys from a file, or from standard input (-), which may end then",
    )
    options = parser.parse_args(arguments)
    # Imported when asked for: a host process needs no doctor, and `--help` neither.
    if options.command == "host":
        from aiocolocated import _hostprocess

        _hostprocess.main(options.connect)
        return 0
    from aiocolocated import _doctor

    return _doctor.run(as_json=options.json, timeout=options.timeout)


if __name__ == "__main__":
    sys.exit(main())
