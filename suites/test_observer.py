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
    captured = parity.forward(prompts, max_new_tokens=3)  # first, to catch what a captured call leaves behind
    idle = parity.engine.raw_logits(prompts, max_new_tokens=3)
    watched = parity.engine.raw_logits(prompts, max_new_tokens=3, capture=parity.hook_points)
    plain = parity.plain_logits(prompts, max_new_tokens=3)
    parity.bit_equal(watched, plain, label="captured", what="raw logits, captured against plain vLLM")
    parity.bit_equal(idle, plain, label="idle", what="raw logits, taps idle against plain vLLM")
    greedy = [rows[-3:].argmax(dim=1).tolist() for rows in plain]
    assert captured.new_tokens == greedy
