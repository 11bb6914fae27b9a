"""A suite of a few cases that boot no engine, run by a pytest of its own: the plugin from outside, in seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).resolve().parents[2]
#: The second case stops where STOP names a file, after it has written it; the third fails where RED is set.
SUITE = '''
import os, pathlib, time
import pytest

def test_one(parity):
    """The first."""

def test_two(parity):
    if stop := os.environ.get("STOP"):
        pathlib.Path(stop).write_text(str(os.getpid()))
        time.sleep(120)

def test_three(parity):
    assert not os.environ.get("RED"), "red was asked for"

def test_four(parity):
    pytest.skip("not-applicable: it never is")
'''
#: One engine's worth of cases, on the backend that needs no vLLM.
ONE_ENGINE = ("--model", "tiny-llama", "--dtype", "fp32", "--engine-mode", "eager", "--backend", "hf")


def command(folder: Path, *arguments: str, source: str = SUITE) -> list[str]:
    """Write the suite into ``folder`` and say how it is run, with its reports below ``folder``."""
    path = folder / "test_mini.py"
    if not path.exists() or path.read_text(encoding="utf-8") != source:
        path.write_text(source, encoding="utf-8")
    pytest = [sys.executable, "-m", "pytest", "-p", "harness.pytest_plugin", "-p", "no:cacheprovider"]
    # Hypothesis' plugin imports all of Hypothesis at the end of any run: a third of the seconds of one of these.
    return [
        *pytest,
        "-p",
        "no:hypothesispytest",
        str(path),
        "--rootdir",
        str(folder),
        "--report-dir",
        str(folder / "reports"),
        *arguments,
    ]


def environment(**more: str) -> dict[str, str]:
    """This process' environment, with the package on the path and nothing of a CI's own in it."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("GITHUB_", "PYTEST_"))}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), **more}


def run(
    folder: Path, *arguments: str, source: str = SUITE, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the suite to its end; the options of one engine unless the run is gone on with."""
    engine = () if "--resume" in arguments else ONE_ENGINE
    return subprocess.run(
        command(folder, *engine, *arguments, source=source),
        env=environment(**(env or {})),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def only_run(folder: Path) -> Path:
    """The one run below ``folder``."""
    (found,) = (folder / "reports").glob("*/results.jsonl")
    return found.parent
