"""transformers with a forward hook on every block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModel

from .padding import Padded, PaddedRunner

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["boot"]


class Hooks(PaddedRunner):
    """The model without its head, as with ``output_hidden_states``."""

    packages = ("accelerate",)

    def collect_one(self, padded: Padded) -> dict[int, torch.Tensor]:
        """Block → (batch, longest, width)."""
        values: dict[int, torch.Tensor] = {}

        def keep(block: int) -> Any:
            def hook(_module: Any, _args: Any, output: Any) -> None:
                values[block] = output if isinstance(output, torch.Tensor) else output[0]

            return hook

        handles = [layer.register_forward_hook(keep(block)) for block, layer in enumerate(self.model.layers)]
        try:
            self.plain_one(padded)
        finally:
            for handle in handles:
                handle.remove()
        return values


def boot(task: Mapping[str, Any]) -> Hooks:
    """Load the checkpoint."""
    model = AutoModel.from_pretrained(task["checkpoint"], dtype=getattr(torch, task["dtype"]))
    return Hooks(model.eval(), task)
