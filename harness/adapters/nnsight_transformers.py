"""nnsight on transformers: one trace per call, in which values are read, replaced and saved, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import nnsight
import torch
from nnsight import TransformersModel

from .names import block_of, translated
from .padded import PaddedBackend, Passes, declared, tokenizer_of

if TYPE_CHECKING:
    from .rectangle import Rectangle

__all__ = ["MODULES", "Backend"]

#: Canonical name → the module of a Llama whose output nnsight gives. In the order of the forward, as a trace must read.
MODULES = {
    "embed.hook_out": "model.embed_tokens",
    "blocks.{i}.attn.hook_out": "model.layers.{i}.self_attn",
    "blocks.{i}.mlp.hook_out": "model.layers.{i}.mlp",
    "blocks.{i}.hook_out": "model.layers.{i}",
    "ln_final.hook_normalized": "model.norm",
}


class Backend(PaddedBackend):
    """The model under traces."""

    packages = ("nnsight",)
    # The norm's module has multiplied its weight in already; the harness takes it out again.
    capabilities: ClassVar[dict[str, Any]] = declared(MODULES, emitted=["ln_final.hook_normalized"])

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
        # As many tokens as were asked for, whatever they are; an argument of None would count as none given.
        model.pipeline.model.generation_config.eos_token_id = None
        return cls(model)

    def call(self, batch: Rectangle, capture: list[str], new_tokens: int, *, logits: bool) -> Passes:
        """See the base."""
        model = self.model
        names = sorted({*capture, *batch.edits}, key=_place)
        sites = [(name, model.get(translated(MODULES, name))) for name in names]
        seen: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        all_logits: list[torch.Tensor] = []

        def step(number: int) -> None:
            """Read and replace what one forward computes; runs inside a trace."""
            for name, site in sites:
                output = site.output
                value = output[0] if isinstance(output, tuple) else output
                if name in batch.edits:
                    value = batch.edited(name, number, value)
                    site.output = (value, *output[1:]) if isinstance(output, tuple) else value
                seen[name].append(nnsight.save(value.clone()))
            all_logits.append(nnsight.save(model.output.logits))

        inputs = {"input_ids": batch.ids, "attention_mask": batch.mask}
        if new_tokens == 1:
            with model.trace({**inputs, "position_ids": batch.positions}, use_cache=False):
                step(0)
            return Passes(seen, all_logits)
        keep = 0 if logits else 1  # transformers' own words: 0 is every column
        options = {"max_new_tokens": new_tokens, "do_sample": False, "logits_to_keep": keep}
        with model.generate(inputs, **options) as tracer:
            for number in tracer.iter[:new_tokens]:
                step(number)
            ids = tracer.result.save()
        return Passes(seen, all_logits, ids[:, batch.ids.shape[1] :])


def _place(name: str) -> tuple[int, int, int]:
    """Where in the forward: a trace reads modules in the order in which they run."""
    if not name.startswith("blocks."):
        return (0 if name.startswith("embed") else 2, 0, 0)
    rest = name.split(".", 2)[2]
    return (1, block_of(name), list(MODULES).index(f"blocks.{{i}}.{rest}"))
