"""TransformerLens' bridge on transformers: ``TransformerBridge.run_with_cache``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformer_lens.model_bridge import TransformerBridge

from .padding import Padded, PaddedRunner

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["boot"]


class Bridge(PaddedRunner):
    """The bridge, asked for blocks' outputs; its forward always has a head, kept to one position."""

    packages = ("transformer-lens",)

    def collect_one(self, padded: Padded) -> dict[int, torch.Tensor]:
        """Block → (batch, longest, width)."""
        names = [f"blocks.{block}.hook_out" for block in range(self.model.cfg.n_layers)]
        _, cache = self.model.run_with_cache(
            padded.ids,
            attention_mask=padded.mask,
            names_filter=names,
            return_type=None,
            logits_to_keep=1,
            use_cache=False,
        )
        return {block: cache[name] for block, name in enumerate(names)}

    def plain_one(self, padded: Padded) -> None:
        """The bridge's forward."""
        self.model(
            padded.ids, attention_mask=padded.mask, return_type=None, logits_to_keep=1, use_cache=False
        )


def boot(task: Mapping[str, Any]) -> Bridge:
    """Load the checkpoint, with no processing of its weights."""
    model = TransformerBridge.boot_transformers(
        task["checkpoint"], device="cpu", dtype=getattr(torch, task["dtype"])
    )
    return Bridge(model.eval(), task)
