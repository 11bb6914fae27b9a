"""A plain ``vllm.LLM(...)`` in the same process, before, beside and after an instrumented engine, is untouched."""

from __future__ import annotations

import pytest

from suites.probes import plain_llm, run_probe


@pytest.mark.parity(models=("tiny-llama",), backends=("vllm",), modes=("eager",), dtypes=("fp32",))
def test_plain_engines_are_untouched(parity):
    """Same raw logits, vLLM's own classes, no hook, no buffer, no config, whatever was booted between.

    The plugin's ``configure`` instruments the plain engine made while it is set, and none made after ``clear_config``.
    """
    found = run_probe(plain_llm, parity.config.path, parity.config.mode)
    first = found["before"]
    assert first["worker"].startswith("vllm.")
    assert "Observed" not in first["runner"]
    assert (first["hooks"], first["buffers"], first["config"]) == (0, [], {})
    for moment in ("beside", "after", "cleared"):
        assert found[moment] == first, f"{moment} differs from before"
    assert found["captured"] > 0
    assert found["configured rows"] == [3, 7, 42]
    parity.note("plain engines", engines=5, logits_rows=len(first["logits"]), equal="in every bit")
