"""Looking must not change what is looked at: an engine with every point tapped against one with nothing in it."""

from __future__ import annotations

import pytest

from harness.prompts import of_length


@pytest.mark.parity(backends=("vllm",))
def test_taps_change_no_bit(parity):
    """Raw logits of every position, prompt and decode, are the same bits as a plain vLLM engine's."""
    small = (
        parity.vocab_size > 10_000
    )  # vLLM hands raw logits out as Python lists, a million of them per 20 rows
    prompts = [of_length(parity, n, seed=i) for i, n in enumerate((1, 7, 20) if small else (1, 7, 33, 150))]
    captured = parity.forward(
        prompts, max_new_tokens=3
    )  # captured calls before, to catch what they leave behind
    watched = parity.engine.raw_logits(prompts, max_new_tokens=3)
    assert [len(rows) for rows in watched] == captured.lengths
    plain = parity.plain_logits(prompts, max_new_tokens=3)
    parity.bit_equal(watched, plain, label="observer effect", what="raw logits, tapped against plain vLLM")
