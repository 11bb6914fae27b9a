"""Cases that fail on purpose, on an engine that is right: what it gave is spoilt before it is judged."""

from __future__ import annotations

SOURCE = '''
import pytest

PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13]]

def test_green(parity):
    """All is well."""
    parity.check(PROMPTS, parity.forward(PROMPTS))

def test_red(parity):
    """One row of one hook is wrong; | and <script> are in its title."""
    result = parity.forward(PROMPTS, max_new_tokens=3)
    result.captured["blocks.1.hook_out"][1, 2, 7] += 3.0
    parity.check(PROMPTS, result, label="spoilt")

def test_red_edit(parity):
    """An edited row is wrong."""
    forward = parity.forward
    def spoilt(*args, **kwargs):
        result = forward(*args, **kwargs)
        if kwargs.get("intervene"):
            result.captured["blocks.2.mlp.hook_out"][0, 4] *= 1.5
        return result
    parity.forward = spoilt
    parity.check_edits(PROMPTS, {"blocks.1.hook_out": {"op": "scale", "factor": 1.5, "pos": [1, 2]}})

def test_red_logits(parity):
    """One row of logits is wrong."""
    result = parity.forward(PROMPTS, return_logits=True)
    rows = [result.logit_rows(i).clone() for i in range(2)]
    rows[0][4, 100] += 40
    parity.check_logits(PROMPTS, rows)

def test_red_without_numbers(parity):
    assert 1 == 2, "50% of it,\\nno comparison"
'''
