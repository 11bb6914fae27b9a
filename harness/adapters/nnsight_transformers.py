"""nnsight on transformers: one trace per call, in which values are read, replaced and saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import nnsight
import torch
from nnsight import TransformersModel

from .padded import OPS, PaddedBackend, edited, tokenizer_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MODULES", "Backend"]

#: Canonical name → the module of a Llama whose output nnsight gives. In the order of the forward, as a trace must read.
MODULES = {
    "embed.hook_out": "model.embed_tokens",
    "blocks.{i}.attn.hook_out": "model.layers.{i}.self_attn",
    "blocks.{i}.mlp.hook_out": "model.layers.{i}.mlp",
    "blocks.{i}.hook_out": "model.layers.{i}",
    "ln_final.hook_normalized": "model.norm",
}
_PATTERNS = [name.replace("{i}", "*") for name in MODULES]


class Backend(PaddedBackend):
    """The model under traces."""

    packages = ("nnsight",)
    capabilities: ClassVar[dict[str, Any]] = {
        "capture": _PATTERNS,
        "edit": dict.fromkeys(OPS, _PATTERNS),
        # The norm's module has multiplied its weight in already; the harness takes it out again.
        "emitted": ["ln_final.hook_normalized"],
        "batch": True,
        "edit_per_prompt": True,
        "edit_positions": True,
        "logits": True,
    }

    @classmethod
    def boot(cls, config: Any) -> Backend:
        """Load the checkpoint; offline the task cannot be guessed, so it is named."""
        tokenizer = tokenizer_of(config.path)
        model = TransformersModel(
            config.path,
            task="text-generation",
            dispatch=True,
            dtype=getattr(torch, config.dtype),
            **({} if tokenizer is None else {"tokenizer": tokenizer}),
        )
        return cls(model)

    def call(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        capture: list[str],
        edits: Mapping[str, Mapping[int, Mapping[str, Any]]],
    ) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        """See the base."""
        model = self.model
        names = sorted({*capture, *edits}, key=_place)
        sites = [(name, model.get(_module(name))) for name in names]
        found: dict[str, torch.Tensor] = {}
        with model.trace({"input_ids": ids, "attention_mask": mask}, use_cache=False):
            for name, site in sites:
                output = site.output
                value = output[0] if isinstance(output, tuple) else output
                if name in edits:
                    value = edited(value, edits[name])
                    site.output = (value, *output[1:]) if isinstance(output, tuple) else value
                if name in capture:
                    found[name] = nnsight.save(value.clone())
            logits = nnsight.save(model.lm_head.output)
        return found, logits


def _place(name: str) -> tuple[int, int, int]:
    """Where in the forward: a trace reads modules in the order in which they run."""
    if not name.startswith("blocks."):
        return (0 if name.startswith("embed") else 2, 0, 0)
    _, block, rest = name.split(".", 2)
    return (1, int(block), list(MODULES).index(f"blocks.{{i}}.{rest}"))


def _module(name: str) -> str:
    if not name.startswith("blocks."):
        return MODULES[name]
    _, block, rest = name.split(".", 2)
    return MODULES[f"blocks.{{i}}.{rest}"].format(i=block)
