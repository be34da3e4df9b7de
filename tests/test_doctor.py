# SPDX-License-Identifier: Apache-2.0
"""``python -m aiocolocated doctor``, in processes of its own, and the rest of the command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import jax
import pytest

import aiocolocated
from aiocolocated import _doctor
from aiocolocated.__main__ import main

ROOT = Path(__file__).resolve().parent.parent
SELF_TESTS = [
    "execution streams",
    "callback programs",
    "tracebacks",
    "configuration",
    "JAX backend",
    "in-process host",
    "detached devices",
    "host processes",
]
HIDDEN = """
import sys
sys.modules["zmq"] = None
from aiocolocated.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run an interpreter from outside of the checkout, on two CPU devices."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd="/",
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
        | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def doctor(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "aiocolocated", "doctor", *arguments, **variables)


def checks(report: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["status"] for check in report["checks"]}


def test_doctor_in_words():
    """Versions, devices, extras, launchers, a line for each self-test, and that nothing is wrong."""
    result = doctor()
    assert result.returncode == 0, result.stdout + result.stderr
    text = result.stdout
    for package, version in _doctor.versions().items():
        assert re.search(rf"^  {package} +{re.escape(version)}", text, re.MULTILINE), package
    assert re.findall(r"^  PASS  (.*?)  ", text, re.MULTILINE) == SELF_TESTS
    assert "colocated cpu devices: cpu:0 cpu:1" in text
    assert "JAX_NUM_CPU_DEVICES=2" in text
    assert sys.executable in text
    assert "What to do" not in text
    assert text.endswith("Nothing is wrong.\n")


def test_doctor_as_json():
    """One object, and nothing else, on standard output."""
    result = doctor("--json")
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["ok"] is True
    assert report["versions"]["aiocolocated"] == aiocolocated.__version__
    assert report["versions"]["jax"] == jax.__version__
    assert report["devices"] == report["colocated_cpu_devices"] == ["cpu:0", "cpu:1"]
    assert [launcher["name"] for launcher in report["launchers"]] == ["processes", "by hand"]
    assert report["extras"]["hosts"] == {"installed": True, "missing": [], "advice": ""}
    assert checks(report) == dict.fromkeys(SELF_TESTS, "PASS")
    timings = {check["name"]: check["timings"] for check in report["checks"]}
    assert set(timings["in-process host"]) == {"first call", "call", "coroutine", "array"}
    sizes = {f"{size} {way}" for size in ("1 MiB", "16 MiB") for way in ("to", "from")}
    assert set(timings["host processes"]) == {"start-up", "call", "end", *sizes}
    assert all(0 < seconds < 60 for found in timings.values() for seconds in found.values())


def test_doctor_without_pyzmq():
    """It says what to install, and does not fail for it: hosts are an extra."""
    result = run("-c", HIDDEN, "doctor", "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    command = "pip install 'aiocolocated[hosts]'"
    assert report["extras"]["hosts"] == {
        "installed": False,
        "missing": ["pyzmq"],
        "advice": command,
    }
    assert command in report["versions"]["pyzmq"]
    assert checks(report) == dict.fromkeys(SELF_TESTS, "PASS") | {"host processes": "SKIP"}
    assert command in report["checks"][-1]["found"]
    text = run("-c", HIDDEN, "doctor").stdout
    assert re.search(r"^  hosts +without pyzmq: pip install", text, re.MULTILINE)
    assert re.search(r"^  SKIP  host processes", text, re.MULTILINE)


def test_doctor_with_a_broken_backend():
    """It fails, says what to do, and does not blame what only needs the backend."""
    result = doctor(JAX_PLATFORMS="cuda,no_such_platform")
    assert result.returncode == 1
    assert re.search(r"^  FAIL  JAX backend", result.stdout, re.MULTILINE)
    assert "What to do: set JAX_PLATFORMS=cpu" in result.stdout
    assert result.stdout.count("FAIL") == 1


def test_doctor_with_a_host_that_cannot_start():
    """It fails and says why: here another version."""
    script = """
import sys
import aiocolocated
from aiocolocated.__main__ import main
aiocolocated.__version__ = "0.0.0"
sys.exit(main(["doctor", "--json"]))
"""
    result = run("-c", script)
    assert result.returncode == 1
    check = json.loads(result.stdout)["checks"][-1]
    assert check["name"] == "host processes"
    assert check["status"] == "FAIL"
    assert "HostStartError" in check["found"]
    assert "0.0.0" in check["found"]
    assert check["advice"]


def test_doctor_does_not_wait_for_what_hangs():
    """A self-test has a time limit, after which it fails and says where it stands; so does the process."""
    start = time.monotonic()
    result = doctor("--timeout", "0.05")  # no interpreter starts in that
    assert result.returncode == 1
    assert time.monotonic() - start < 60
    assert "not over after 0.05 s; it stands at" in result.stdout
    assert "'--timeout' gives it more time" in result.stdout


def test_doctor_looks_before_it_starts_a_backend():
    """What needs no backend comes first, so that a backend that hangs hides nothing of it."""
    script = """
from aiocolocated import _compat, _doctor
_doctor.versions(), _doctor.about_platform(), _doctor.extras(), _doctor.launchers()
_doctor._streams(), _doctor._programs(), _doctor._tracebacks(), _doctor._configuration()
assert not _compat.backend_started()
"""
    result = run("-c", script)
    assert result.returncode == 0, result.stderr


def test_extras_are_those_of_the_package():
    """The doctor's table names every extra for users, with its packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for extra, packages in _doctor.EXTRAS.items():
        required = {
            re.match(r"[\w-]+", requirement)[0]
            for requirement in project["optional-dependencies"][extra]
        }
        assert required - {"aiocolocated"} == set(packages), extra
    others = {"benchmarks", "docs", "lint", "tests"}  # for people who work on the library
    assert set(project["optional-dependencies"]) == set(_doctor.EXTRAS) | others


@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--help"], ["host", "--help"]])
def test_help(arguments, capsys):
    """Every command explains itself."""
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: python -m aiocolocated")
    assert len(text) > 150


@pytest.mark.parametrize("arguments", [[], ["cure"], ["doctor", "--timeout", "0"]])
def test_wrong_arguments(arguments, capsys):
    """They end with status 2, and say what is expected."""
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert "usage: python -m aiocolocated" in capsys.readouterr().err
