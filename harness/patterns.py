"""Attention scores and patterns, rebuilt from queries and keys as they meet. Knows no backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["AttentionRule", "attention_pattern", "attention_scores"]


@dataclass(frozen=True)
class AttentionRule:
    """How one attention layer makes scores of queries and keys.

    Attributes:
        scale: factor on their product.
        window: how many positions a query sees, its own included; None: all before it.
        soft_cap: c of ``c · tanh(x / c)``, applied after the scale; None for none.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None


def attention_scores(q: torch.Tensor, k: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    """Scores before the softmax, (heads, n, n) fp32: row is the query, column the key, -inf where it is not seen.

    Args:
        q: (n, heads, head_dim), any float dtype.
        k: (n, kv_heads, head_dim); each key-value head serves heads / kv_heads query heads in a row.
        rule: the layer's.
    """
    n, heads, _ = q.shape
    keys = k.float().repeat_interleave(heads // k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * rule.scale
    if rule.soft_cap is not None:
        scores = torch.tanh(scores / rule.soft_cap) * rule.soft_cap
    places = torch.arange(n, device=q.device)
    back = places[:, None] - places[None, :]
    seen = back >= 0 if rule.window is None else (back >= 0) & (back < rule.window)
    return scores.masked_fill(~seen, -torch.inf)


def attention_pattern(scores: torch.Tensor) -> torch.Tensor:
    """Each row's softmax: (heads, n, n), zero where a key is not seen."""
    return torch.softmax(scores, dim=-1)
