"""Programs that tests run in a process of their own, where what they look at is alone."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def run_probe(program: Any, *arguments: str, timeout: float = 500.0) -> Any:
    """Run a module of this folder as a program: what its one line ``PROBE {…}`` says."""
    done = subprocess.run(
        [sys.executable, program.__file__, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("PROBE ")]
    assert lines, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("PROBE "))
