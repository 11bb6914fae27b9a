"""nnsight on transformers: a trace that saves every block's output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from nnsight import TransformersModel

from .padding import Padded, PaddedRunner

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["boot"]


class Trace(PaddedRunner):
    """The model under traces; logits are kept to one position."""

    packages = ("nnsight",)

    def collect_one(self, padded: Padded) -> dict[int, torch.Tensor]:
        """Block → (batch, longest, width)."""
        inputs = {"input_ids": padded.ids, "attention_mask": padded.mask}
        with self.model.trace(inputs, use_cache=False, logits_to_keep=1):
            values = [layer.output for layer in self.model.model.layers].save()  # type: ignore[attr-defined]  # nnsight gives it to lists
        return dict(enumerate(values))

    def plain_one(self, padded: Padded) -> None:
        """A trace in which nothing is saved."""
        inputs = {"input_ids": padded.ids, "attention_mask": padded.mask}
        with self.model.trace(inputs, use_cache=False, logits_to_keep=1):
            pass


def boot(task: Mapping[str, Any]) -> Trace:
    """Load the checkpoint."""
    model = TransformersModel(
        task["checkpoint"], task="text-generation", dispatch=True, dtype=getattr(torch, task["dtype"])
    )
    return Trace(model, task)
