"""transformers with ``output_hidden_states=True``.

What it gives last is after the final norm, so the last block's residual stream is not among its values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModel

from .padding import Padded, PaddedRunner

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["boot"]


class HiddenStates(PaddedRunner):
    """The model without its head: no logits are computed that nobody asked for."""

    packages = ("accelerate",)

    def collect_one(self, padded: Padded) -> dict[int, torch.Tensor]:
        """Block → (batch, longest, width), all but the last."""
        states = self.model(
            input_ids=padded.ids, attention_mask=padded.mask, use_cache=False, output_hidden_states=True
        ).hidden_states
        return dict(enumerate(states[1:-1]))


def boot(task: Mapping[str, Any]) -> HiddenStates:
    """Load the checkpoint."""
    model = AutoModel.from_pretrained(task["checkpoint"], dtype=getattr(torch, task["dtype"]))
    return HiddenStates(model.eval(), task)
