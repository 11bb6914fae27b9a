"""Attention patterns of an engine: no kernel materialises them, so they are rebuilt from captured queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from harness import points
from harness.errors import CaptureError
from harness.patterns import AttentionRule, attention_pattern, attention_scores
from harness.vllm import internals
from harness.vllm.overlays import get_overlay

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

__all__ = ["Patterns"]


class Patterns:
    """The points of one engine that are rebuilt.

    Args:
        llm: the engine.
        heads: installed hook → heads its rows are made of.
        hf_config: the model's.
    """

    def __init__(self, llm: Any, heads: Mapping[str, int], hf_config: Any) -> None:
        self._llm = llm
        self._heads = heads
        self._hf_config = hf_config
        self._rules: dict[int, AttentionRule] = {}
        #: Rebuilt point → the queries and keys it is made of.
        self.sources: dict[str, tuple[str, str]] = {}
        rotary = points.ROT_Q not in get_overlay(hf_config.architectures[0]).lacks if heads else True
        pair = (points.ROT_Q, points.ROT_K) if rotary else (points.HEAD_Q, points.HEAD_K)
        for block in range(int(hf_config.num_hidden_layers)):
            q, k = (template.format(i=block) for template in pair)
            if q in heads and k in heads:
                self.sources |= {t.format(i=block): (q, k) for t in points.REBUILT_TEMPLATES}

    def needed(self, names: Collection[str]) -> list[str]:
        """What must be captured for ``names``: themselves, and the queries and keys of those that are rebuilt."""
        found = [name for name in names if name not in self.sources]
        found += [source for name in names for source in self.sources.get(name, ())]
        return list(dict.fromkeys(found))

    def rebuilt(
        self,
        names: Collection[str],
        captured: Mapping[str, Sequence[torch.Tensor]],
        *,
        starts: Sequence[int],
        columns: int,
    ) -> dict[str, torch.Tensor]:
        """Rebuilt point → (batch, heads, seq, seq) at the requests' places; scores are -inf elsewhere.

        Computed in fp32 and rounded once, to the dtype of the queries.

        Args:
            names: points, of which those that are not rebuilt are left alone.
            captured: hook → per request (n, width), queries and keys among them.
            starts: column of each request's first row.
            columns: at least as many as the rows need.
        """
        made = {}
        for name in names:
            if name not in self.sources:
                continue
            point = points.HookPoint.parse(name)
            q, k = (
                [rows.unflatten(1, (self._heads[one], -1)) for rows in captured[one]]
                for one in self.sources[name]
            )
            rule = self._rule(point.block)
            each = [attention_scores(a, b, rule) for a, b in zip(q, k, strict=True)]
            is_pattern = point.template == points.PATTERN
            seq = max(columns, *(begin + one.shape[1] for begin, one in zip(starts, each, strict=True)))
            fill = 0.0 if is_pattern else -torch.inf
            whole = torch.full(
                (len(each), each[0].shape[0], seq, seq), fill, dtype=q[0].dtype, device=q[0].device
            )
            for index, (begin, scores) in enumerate(zip(starts, each, strict=True)):
                here = slice(begin, begin + scores.shape[1])
                whole[index, :, here, here] = attention_pattern(scores) if is_pattern else scores
            made[name] = whole
        return made

    def _rule(self, block: int) -> AttentionRule:
        """The engine's own scale, window and soft-cap."""
        if block not in self._rules:
            path = get_overlay(self._hf_config.architectures[0]).core.format(i=block)
            said = [one for one in internals.call_workers(self._llm, "tl_get_attention", args=(path,)) if one]
            if len({tuple(sorted(one.items())) for one in said}) != 1:
                msg = f"ranks must say one thing about attention at {path}, they said: {said}"
                raise CaptureError(msg)
            self._rules[block] = AttentionRule(**said[0])
        return self._rules[block]
