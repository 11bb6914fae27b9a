"""A plain ``vllm.LLM(...)`` in the same process, before, beside and after an instrumented engine, is untouched."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from suites.probes import plain_llm


@pytest.mark.parity(models=("tiny-llama",), backends=("vllm",), modes=("eager",), dtypes=("fp32",))
def test_plain_engines_are_untouched(parity):
    """Same raw logits, vLLM's own classes, no hook, no buffer, no config, whatever was booted between.

    The plugin's ``configure`` instruments the plain engine made while it is set, and none made after ``clear_config``.
    """
    done = subprocess.run(
        [sys.executable, plain_llm.__file__, parity.config.path, parity.config.mode],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("PROBE ")]
    assert lines, done.stdout[-2000:] + done.stderr[-3000:]
    found = json.loads(lines[0].removeprefix("PROBE "))
    first = found["before"]
    assert first["worker"].startswith("vllm.")
    assert "Observed" not in first["runner"]
    assert (first["hooks"], first["buffers"], first["config"]) == (0, [], {})
    for moment in ("beside", "after", "cleared"):
        assert found[moment] == first, f"{moment} differs from before"
    assert found["captured"] > 0
    assert found["configured rows"] == [3, 7, 42]
    parity.note("plain engines", engines=5, logits_rows=len(first["logits"]), equal="in every bit")
