# SPDX-License-Identifier: Apache-2.0
"""The package is built in layers: a file imports only from files that stand before it in LAYERS."""

from __future__ import annotations

import ast
import graphlib
import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "aiocolocated"

# From the bottom up. Order counts within a layer too: a file may import those listed before it.
# The files that one `folder/*` entry stands for may import each other, without a cycle.
LAYERS: dict[str, tuple[str, ...]] = {
    "L0": ("_exceptions", "_compat", "_compat_hosts", "_types"),
    "L1": (
        "_specs",
        "_reducers",
        "_values",
        "_serialization",
        "_cache",
        "_contexts",
        "_ordering",
        "_raising",
        "_overlap",
    ),
    "L2": (
        "_settings",
        "_loops",
        "_service",
        "_workers",
        "_shipping",
        "_callback_errors",
        "_hostloop",
        "_readiness",
        "_owners",
        "_waiters",
        "_protocols",
        "_coroutines",
        "_threads",
        "_calls",
        "_deadlocks",
        "_programs",
        "_callback_runs",
        "_execution",
        "_futures",
        "_submission",
        "_plans",
        "_channels",
        "_blocks",
        "_runtime",
    ),
    "L3": ("hosts/*",),
    "L4": (
        "_devices",
        "_specializations",
        "_remote_plans",
        "_functions",
        "_fanout",
        "_taskgroups",
        "_waiting",
        "_lifetimes",
        "_transfer_bodies",
        "_remote_transfers",
        "_transfers",
        "_sources",
        "_remote_streams",
        "_streams",
        "_decorators",
        "_remote_objects",
        "_objects",
        "_proxies",
        "_classes",
        "_callback_results",
        "_callbacks",
        "_jitted",
        "_effects",
    ),
    "L5": (
        "from_thread",
        "_hostplans",
        "_hostserver",
        "_hostprocess",
        "__init__",
        "_doctor",
        "__main__",
        "testing/*",
    ),
}
ORDER = [entry for layer in LAYERS.values() for entry in layer]

# (importer, imported) pairs that may go upwards under `if TYPE_CHECKING:`. Keep it short.
TYPE_ONLY: set[tuple[str, str]] = set()

# What only `_compat` may touch. `jaxlib` and everything private of `jax` are in it.
PRIVATE_JAX = re.compile(r"^(jax\.experimental|jax(\.\w+)*\._(?!_)\w*|jaxlib)(\.|$)")

# Modules that `import aiocolocated` must not bring in.
EXTRAS = {
    *("blockbuster", "fastapi", "httpx", "PIL", "pytest", "ray"),
    *("sklearn", "starlette", "tqdm", "uvicorn", "uvloop", "zmq"),
}

FILES = {
    path.relative_to(PACKAGE).with_suffix("").as_posix(): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def entry_of(file: str) -> str | None:
    """The entry of LAYERS that stands for a file (`_futures`, `hosts/base`), or None."""
    return next((entry for entry in ORDER if fnmatch(file, entry)), None)


def file_of(module: str) -> str | None:
    """The file of a dotted module name of the package, or None if it is no module of it."""
    parts = module.split(".")
    if parts[0] != PACKAGE.name:
        return None
    inner = "/".join(parts[1:])
    candidates = (inner, f"{inner}/__init__") if inner else ("__init__",)
    return next((name for name in candidates if name in FILES), None)


def type_checking_nodes(tree: ast.AST) -> set[ast.AST]:
    """Every node below an `if TYPE_CHECKING:`."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for statement in node.body:
                found.update(ast.walk(statement))
    return found


def absolute_module(file: str, node: ast.ImportFrom) -> str:
    """The module that a `from ... import` names, with leading dots resolved."""
    if node.level == 0:
        return node.module or ""
    package = [PACKAGE.name, *file.split("/")][: -node.level]
    return ".".join([*package, node.module] if node.module else package)


def imports_of(file: str) -> set[tuple[str, bool]]:
    """(imported file, only for types) for every import of the package, wherever in the file."""
    tree = ast.parse(FILES[file].read_text(encoding="utf-8"))
    for_types = type_checking_nodes(tree)
    found: set[tuple[str, bool]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = absolute_module(file, node)
            # `from aiocolocated import _cache` imports a module, `from ._cache import X` a name.
            submodules = [f"{module}.{alias.name}" for alias in node.names]
            names = [name if file_of(name) else module for name in submodules]
        else:
            continue
        found.update((target, node in for_types) for name in names if (target := file_of(name)))
    return {(target, types) for target, types in found if target != file}


def dotted(node: ast.AST) -> str | None:
    """`a.b.c` for a chain of attributes on a name, else None."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def jax_names_of(file: str) -> set[str]:
    """Dotted names of jax and jaxlib that a file imports, uses, or has as a string."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(FILES[file].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            found.add(dotted(node) or "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)  # for import_module and sys.modules
    return {name for name in found if re.fullmatch(r"jax(lib)?(\.\w+)*", name)}


def test_files_all_in_table() -> None:
    """Every file of the package has its place in LAYERS, and LAYERS names no file that is gone."""
    assert {file for file in FILES if entry_of(file) is None} == set()
    assert {e for e in ORDER if not any(fnmatch(file, e) for file in FILES)} == set()


def test_imports_from_lower_layers_only() -> None:
    """Wherever in the file the import stands, also for types, unless TYPE_ONLY allows it."""
    wrong = []
    for file in FILES:
        for target, types in imports_of(file):
            upper, lower = entry_of(file), entry_of(target)
            if upper is None or lower is None or (upper == lower and "*" in upper):
                continue
            if types and (file, target) in TYPE_ONLY:
                continue
            if ORDER.index(lower) >= ORDER.index(upper):
                wrong.append(f"{file} imports {target}")
    assert sorted(wrong) == []


def test_imports_without_cycle() -> None:
    """No two files import each other at run time, directly or through others."""
    graph = {f: {target for target, types in imports_of(f) if not types} for f in FILES}
    list(graphlib.TopologicalSorter(graph).static_order())


def test_private_jax_in_compat_only() -> None:
    """`_compat` is the only file that a change inside JAX can break."""
    wrong = {
        file: names
        for file in FILES
        if file not in ("_compat", "_compat_hosts")
        and (names := sorted(filter(PRIVATE_JAX.match, jax_names_of(file))))
    }
    assert wrong == {}


def test_import_is_light() -> None:
    """`import aiocolocated` starts no JAX backend and imports nothing that is an extra."""
    script = f"""
import sys, threading
import aiocolocated
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "a JAX backend was started"
found = sorted(set(sys.modules) & {EXTRAS!r})
assert not found, f"imported {{found}}"
assert threading.active_count() == 1, threading.enumerate()
"""
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
