"""TransformerLens' bridge on transformers: ``run_with_cache`` inside ``hooks``, with no processing of weights."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformer_lens.model_bridge import TransformerBridge

from .padded import OPS, PaddedBackend, edited, tokenizer_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NAMES", "Backend"]

#: Canonical name → the bridge's; both are TransformerLens', so a difference here would be a finding by itself.
NAMES = {
    "embed.hook_out": "embed.hook_out",
    "blocks.{i}.attn.hook_out": "blocks.{i}.attn.hook_out",
    "blocks.{i}.mlp.hook_out": "blocks.{i}.mlp.hook_out",
    "blocks.{i}.hook_out": "blocks.{i}.hook_out",
    "ln_final.hook_normalized": "ln_final.hook_normalized",
}
_PATTERNS = [name.replace("{i}", "*") for name in NAMES]


class Backend(PaddedBackend):
    """The bridge."""

    packages = ("transformer-lens",)
    capabilities: ClassVar[dict[str, Any]] = {
        "capture": _PATTERNS,
        "edit": dict.fromkeys(OPS, _PATTERNS),
        "batch": True,
        "edit_per_prompt": True,
        "edit_positions": True,
        "logits": True,
    }

    @classmethod
    def boot(cls, config: Any) -> Backend:
        """Load the checkpoint; one without a tokenizer gets an empty one, as the bridge insists on having one."""
        model = TransformerBridge.boot_transformers(
            config.path, device="cpu", dtype=getattr(torch, config.dtype), tokenizer=tokenizer_of(config.path)
        )
        return cls(model.eval())

    def call(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        capture: list[str],
        edits: Mapping[str, Mapping[int, Mapping[str, Any]]],
    ) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        """See the base."""
        names = {name: _translated(name) for name in {*capture, *edits}}
        hooks = [(names[name], partial(_hook, here)) for name, here in edits.items()]
        with self.model.hooks(fwd_hooks=hooks):
            logits, cache = self.model.run_with_cache(
                ids, attention_mask=mask, names_filter=[names[name] for name in capture]
            )
        # Below fp32 the bridge's own norm hands out fp32, where transformers rounds before the weight; every other
        # point comes at the model's dtype.
        dtype = logits.dtype
        return {name: cache[names[name]].to(dtype) for name in capture}, logits


def _hook(edits: Mapping[int, Mapping[str, Any]], tensor: torch.Tensor, hook: Any) -> torch.Tensor:
    del hook
    return edited(tensor, edits)


def _translated(name: str) -> str:
    if not name.startswith("blocks."):
        return NAMES[name]
    _, block, rest = name.split(".", 2)
    return NAMES[f"blocks.{{i}}.{rest}"].format(i=block)
