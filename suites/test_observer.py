"""Looking must not change what is looked at: an engine with every point tapped against one with nothing in it."""

from __future__ import annotations

import pytest

from harness.prompts import of_length

#: Dtypes at which fused code rounds less often than torch does.
FUSED_NARROW = ("bfloat16", "float16")


@pytest.mark.parity(backends=("vllm",))
def test_taps_change_no_bit(parity):
    """Raw logits of every position, prompt and decode, are the same bits as a plain vLLM engine's.

    Compiled below fp32 that is asked of an engine without room for edits: the arithmetic of edits makes inductor fuse
    otherwise, and last bits move. There the engine with room is judged by the verdict's rule instead, against the
    reference, and the largest difference goes into the record.
    """
    # vLLM hands raw logits out as Python lists, a million of them per 20 rows.
    small = parity.vocab_size > 10_000
    prompts = [of_length(parity, n, seed=i) for i, n in enumerate((1, 7, 20) if small else (1, 7, 33, 150))]
    plain = parity.plain_logits(prompts, max_new_tokens=3)
    if parity.config.mode == "compiled" and parity.config.dtype in FUSED_NARROW:
        with parity.spare_engine(max_edit_programs=0) as watched:
            _same_bits(parity, watched, prompts, plain)
        judged = parity.engine.raw_logits(prompts, max_new_tokens=3, capture=parity.hook_points)
        gap = max(float((a - b).abs().max()) for a, b in zip(judged, plain, strict=True))
        parity.note("with room for edits", largest_difference=gap)
        of_prompts = [rows[: len(prompt)] for rows, prompt in zip(judged, prompts, strict=True)]
        parity.check_logits(prompts, of_prompts, label="with room for edits")
        return
    captured = _same_bits(parity, parity.engine, prompts, plain)
    assert captured.new_tokens == [rows[-3:].argmax(dim=1).tolist() for rows in plain]


def _same_bits(parity, engine, prompts, plain):
    """An engine's raw logits, captured and idle, against a plain one's; a captured call goes before, for its traces."""
    captured = engine.forward(prompts, capture=parity.hook_points, max_new_tokens=3)
    idle = engine.raw_logits(prompts, max_new_tokens=3)
    watched = engine.raw_logits(prompts, max_new_tokens=3, capture=parity.hook_points)
    parity.bit_equal(watched, plain, label="captured", what="raw logits, captured against plain vLLM")
    parity.bit_equal(idle, plain, label="idle", what="raw logits, taps idle against plain vLLM")
    return captured
