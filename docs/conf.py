# SPDX-License-Identifier: Apache-2.0
"""Sphinx configuration. It needs no network, unless DOCS_INTERSPHINX=1 asks for outside links."""

from __future__ import annotations

import builtins
import os
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_PROJECT = tomllib.loads(
    (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
)["project"]

project = "aiocolocated"
author = "The aiocolocated authors"
copyright = f"2026, {author}"
version = release = _PROJECT["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"aiocolocated {release}"

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3

add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# Prompts are for reading; the button copies what can be run.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Every reference to a name of the package has to resolve (-n). What lies outside resolves only with
# the inventories of other projects, which are on the network.
nitpick_ignore_regex = [
    ("py:class", r"aiocolocated\._settings\.SettingsChanges"),  # Settings says what its keys are
    ("py:class", r"aiocolocated\.from_thread\._Iteration"),  # an iterator with close()
    ("py:class", r"Reducer"),  # `specialize` says what it may be
    ("py:class", r"_compat\.Device"),  # where a module imports jax for type checkers only
    # Type variables, whose names have modules in front since Sphinx 9.
    ("py:.*", r"(aiocolocated\.(\w+\.)?)?([A-Z](_co|_contra)?|_?P(\.args|\.kwargs)?)"),
]
if os.environ.get("DOCS_INTERSPHINX") == "1":
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "anyio": ("https://anyio.readthedocs.io/en/stable/", None),
        "jax": ("https://docs.jax.dev/en/latest/", None),
        "numpy": ("https://numpy.org/doc/stable/", None),
        "python": ("https://docs.python.org/3", None),
    }
else:
    _packages = (
        "_asyncio anyio asyncio blockbuster cloudpickle collections concurrent contextlib contextvars"
        " enum jax jaxlib logging np numpy os pathlib pytest threading time types typing"
        " typing_extensions"
    )
    _builtins = (name for name in dir(builtins) if not name.startswith("_"))
    _outside = "|".join([*_packages.split(), *_builtins])
    nitpick_ignore_regex.append(("py:.*", rf"({_outside})(\..*)?"))

# The house's own docstring lines, "Ordering: none", are paragraphs of their own with a bold label.
_LABEL = re.compile(r"^(Ordering|Cancellation|Thread safety|Source): +(?=\S)")


def _label_lines(
    app: Sphinx, what: str, name: str, obj: object, options: Any, lines: list[str]
) -> None:
    out: list[str] = []
    inside = False
    for line in lines:
        if _LABEL.match(line):
            out += ["", _LABEL.sub(r"**\1:** ", line)]
            inside = True
        elif inside and line.startswith("    ") and line.strip():
            out.append(line.strip())  # a continuation line, not a block quote
        else:
            if inside:
                out.append("")
            inside = False
            out.append(line)
    lines[:] = out


def setup(app: Sphinx) -> None:
    # Before napoleon (priority 500), which would read a label as an unknown section.
    app.connect("autodoc-process-docstring", _label_lines, priority=400)
