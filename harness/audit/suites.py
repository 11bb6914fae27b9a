"""The suites on one backend, as a pytest of its own."""

from __future__ import annotations

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
    done = subprocess.run([*command, "--report-dir", str(folder)], check=False)
    runs = [run for run in folder.glob("*") if run.is_dir()]
    if not runs:
        msg = f"pytest ended with {done.returncode} before the first case; what it printed says why"
        raise UsageError(msg)
    return done.returncode, runs[0]
