# SPDX-License-Identifier: Apache-2.0
"""``python -m aiocolocated``: what is run from a shell."""

from __future__ import annotations

import sys


def main() -> None:
    """Do what the first argument says."""
    if sys.argv[1:2] == ["host"]:
        from aiocolocated import _hostprocess

        _hostprocess.main()
    else:
        sys.exit("usage: python -m aiocolocated host")


if __name__ == "__main__":
    main()
