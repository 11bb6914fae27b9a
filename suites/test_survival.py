"""A run killed with an engine under it loses the running case, leaves no process behind, and can be gone on with.

It is a run of its own, of one engine and two checks, started and stopped from here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness.cli import main
from harness.store import is_green, read_run

CASES = [f"suites/test_activations.py::test_{name}" for name in ("ragged_batch", "decode_steps")]
ENGINE = ["--model", "tiny-llama", "--dtype", "fp32", "--engine-mode", "eager"]


def command(reports: Path, *arguments: str) -> list[str]:
    pytest_ = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *CASES]
    return [*pytest_, "--report-dir", str(reports), *arguments]


def results_of(reports: Path) -> list[Path]:
    return list(reports.glob("*/results.jsonl"))


def wait_for(what, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(found)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda number: number.name)
def test_a_run_killed_under_an_engine(pytestconfig, tmp_path, number):
    """Stopped once its first case has a result: no orphan, a report of what ran, and the rest on ``--resume``."""
    environment = {n: v for n, v in os.environ.items() if not n.startswith("GITHUB_")}
    root = pytestconfig.rootpath
    process = subprocess.Popen(
        # A shell has what it starts in the background ignore Ctrl-C, and that is handed down.
        ["env", "--default-signal=INT", *command(tmp_path, *ENGINE)],
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def one_is_done() -> bool:
        return process.poll() is not None or any(
            path.read_text(encoding="utf-8").count('"type":"case"') for path in results_of(tmp_path)
        )

    try:
        assert wait_for(one_is_done, 240)
        started = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.send_signal(number)
        out, _ = process.communicate(timeout=90)
    assert started, f"nothing ran beside pytest itself:\n{out}"
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive, f"still there after {number.name}: {alive}"

    (results,) = results_of(tmp_path)
    before = read_run(results.parent)
    outcomes = [case.outcome for case in before.cases]
    assert outcomes[0] == "passed"
    assert set(outcomes[1:]) <= {"lost", "not-run", "error"}
    assert main(["report", str(results.parent)]) == 4
    assert (results.parent / "index.html").is_file()

    done = subprocess.run(
        command(tmp_path, "--resume", "last"),
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed, 1 deselected" in done.stdout
    after = read_run(results.parent)
    assert is_green(after)
    assert [case.outcome for case in after.cases] == ["passed", "passed"]
    assert after.cases[0].verdicts == before.cases[0].verdicts
