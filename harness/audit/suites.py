"""The suites on one backend, as a pytest of its own."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DEFAULT_SUITES", "run_suites"]

#: What can be asked of any backend.
DEFAULT_SUITES = ("test_activations.py", "test_interventions.py", "test_logits.py", "test_generation.py")


def run_suites(folder: Path, paths: Sequence[str], options: Sequence[str]) -> tuple[int, Path]:
    """Run pytest and find what it wrote.

    Args:
        folder: of its reports; empty, or not there yet.
        paths: suites; by default those that can be asked of any backend, in ``suites`` below the working directory.
        options: of pytest.

    Returns:
        Its exit status, and the folder of the run.

    Raises:
        UsageError: a suite is not there, or the run was refused before it began.
    """
    paths = list(paths) or [str(Path("suites", name)) for name in DEFAULT_SUITES]
    for path in paths:
        if not Path(path.split("::")[0]).exists():
            msg = f"there is no {path}: run this where the harness' suites are, in a clone, or name them with --suites"
            raise UsageError(msg)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *paths, *options]
    status = _run([*command, "--report-dir", str(folder)])
    runs = [run for run in folder.glob("*") if run.is_dir()]
    if not runs:
        msg = f"pytest ended with {status} before the first case; what it printed says why"
        raise UsageError(msg)
    return status, runs[0]


def _run(command: Sequence[str]) -> int:
    """The exit status of a process that ends in its own time, also where this one is told to.

    Ctrl-C reaches it too, being of the same group; SIGTERM is handed on. Either ends a pytest of this harness with a
    report and without engines left behind, which takes longer than :func:`subprocess.run` waits.
    """
    process = subprocess.Popen(command)
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                return process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
