"""What a run pays for before its first case: modules that take seconds are imported where they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from suites.unit import mini_suite


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("harness.pytest_plugin", ("torch", "transformers", "vllm", "pandas", "pyarrow")),
        ("harness.__main__", ("torch", "transformers", "vllm", "pandas", "pyarrow")),
        ("harness.check", ("transformers", "vllm", "pandas", "pyarrow")),
        ("harness.summary", ("torch", "transformers", "vllm", "pandas", "pyarrow")),
    ],
)
def test_what_costs_seconds_is_not_imported_by(module: str, heavy: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*(name for name in {heavy!r} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=mini_suite.environment(),
        cwd=mini_suite.ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
