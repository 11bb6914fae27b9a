"""The library with no suite around it: a bridge on a real engine does what users of TransformerLens expect of one."""

from __future__ import annotations

import pytest

from suites.probes import lent_rows, library, run_probe


@pytest.mark.parity(tokenizer=True, backends=("vllm",), dtypes=("fp32",), smoke={"modes": ("eager",)})
def test_a_bridge_on_a_real_engine(parity):
    """Text in, logits, loss, cache, edits and new tokens out; and without the final norm, its fallback and refusals."""
    found = run_probe(library, parity.config.path, parity.config.mode)
    n = found["prompt"]
    assert found["cache"] == {
        f"blocks.{i}.mlp.hook_out": [1, n, parity.width] for i in range(parity.n_layers)
    }
    assert found["logits"] == [1, n, parity.vocab_size]
    assert found["one"] == [None, ["embed.hook_out"]]
    assert found["same"]
    assert found["loss"][0] == found["loss"][1] > 0
    assert found["edit bites"]
    assert found["clean after"]
    assert found["generated"].startswith(found["next"])
    assert found["generated edited"]
    assert found["suppressed"]
    assert found["unset"]
    assert found["read"]
    assert found["removed"] == [3 * parity.n_layers + 2, 0]
    assert found["runs on"]
    assert found["norm"] == [parity.width]
    assert found["missing"] is None
    assert len(found["warnings"]) == 1
    assert "ln_final.hook_normalized is not among the installed hook points" in found["warnings"][0]
    assert found["fallback"] == [20, True]
    assert len(found["refused"]) == 2
    assert all("needs logits at every position" in message for message in found["refused"])
    parity.note("bridge", next_token=found["next"], loss=found["loss"][0], generated=found["generated"])


@pytest.mark.parity(
    models=("tiny-llama",), backends=("vllm",), dtypes=("fp32",), steps=(64,), smoke={"modes": ("eager",)}
)
def test_rows_are_the_caller_s(parity):
    """Rows that an engine in another process lent stay as they are when it goes on, when it ends, and when one writes.

    Memory that is lent a second time is caught: the earlier call's rows change.
    """
    found = run_probe(lent_rows, parity.config.path, parity.config.mode, "harness.vllm.worker.CaptureWorker")
    assert all(found.values()), found
    found = run_probe(lent_rows, parity.config.path, parity.config.mode, "harness.faults.workers.LoanReused")
    assert found["lent"]
    assert not found["kept"], "memory was lent twice, and nothing of it was seen"
    parity.note("LoanReused", caught_by="rows of the call before", message="they changed")
