"""Scores and patterns against a loop over heads, queries and keys."""

from __future__ import annotations

import math

import pytest
import torch

from harness.patterns import AttentionRule, attention_pattern, attention_scores

HEADS, KV_HEADS, DIM, N = 4, 2, 8, 9
RULES = {
    "plain": AttentionRule(0.25),
    "windowed": AttentionRule(0.25, window=3),
    "soft-capped": AttentionRule(0.5, soft_cap=1.5),
    "both": AttentionRule(1.0, window=4, soft_cap=2.0),
}


def rows(heads: int, seed: int) -> torch.Tensor:
    return torch.randn(N, heads, DIM, generator=torch.manual_seed(seed))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_scores(rule: AttentionRule) -> None:
    q, k = rows(HEADS, 1), rows(KV_HEADS, 2)
    got = attention_scores(q, k, rule)
    assert got.shape == (HEADS, N, N)
    for head in range(HEADS):
        for i in range(N):
            for j in range(N):
                seen = j <= i and (rule.window is None or i - j < rule.window)
                if not seen:
                    assert got[head, i, j] == -torch.inf
                    continue
                want = float(q[i, head].double() @ k[j, head // 2].double()) * rule.scale
                if rule.soft_cap is not None:
                    want = rule.soft_cap * math.tanh(want / rule.soft_cap)
                assert got[head, i, j] == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_patterns_are_weights(dtype: torch.dtype) -> None:
    scores = attention_scores(rows(HEADS, 3).to(dtype), rows(KV_HEADS, 4).to(dtype), RULES["windowed"])
    pattern = attention_pattern(scores)
    assert pattern.dtype == torch.float32
    assert torch.allclose(pattern.sum(-1), torch.ones(HEADS, N))
    assert bool((pattern[scores == -torch.inf] == 0).all())
    assert bool((pattern[:, 0, 0] == 1).all())
