"""TransformerLens' bridge on transformers: ``run_with_cache`` and ``generate`` inside ``hooks``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformer_lens.model_bridge import TransformerBridge

from .names import translated
from .padded import PaddedBackend, Passes, declared, tokenizer_of

if TYPE_CHECKING:
    from .rectangle import Rectangle

__all__ = ["NAMES", "Backend"]

#: Canonical name → the bridge's; both are TransformerLens', so a difference here would be a finding by itself.
NAMES = {
    "embed.hook_out": "embed.hook_out",
    "blocks.{i}.attn.hook_out": "blocks.{i}.attn.hook_out",
    "blocks.{i}.mlp.hook_out": "blocks.{i}.mlp.hook_out",
    "blocks.{i}.hook_out": "blocks.{i}.hook_out",
    "ln_final.hook_normalized": "ln_final.hook_normalized",
}


class Backend(PaddedBackend):
    """The bridge."""

    packages = ("transformer-lens",)
    capabilities: ClassVar[dict[str, Any]] = declared(NAMES)

    @classmethod
    def boot(cls, config: Any) -> Backend:
        """Load the checkpoint; one without a tokenizer gets an empty one, as the bridge insists on having one."""
        model = TransformerBridge.boot_transformers(
            config.path, device="cpu", dtype=getattr(torch, config.dtype), tokenizer=tokenizer_of(config.path)
        )
        return cls(model.eval())

    def call(self, batch: Rectangle, capture: list[str], new_tokens: int, *, logits: bool) -> Passes:
        """See the base."""
        del logits  # those of every column come in any case
        own = {name: translated(NAMES, name) for name in {*capture, *batch.edits}}
        passes = (
            self._generate(batch, own, new_tokens) if new_tokens > 1 else self._forward(batch, capture, own)
        )
        # Below fp32 the bridge's own norm hands out fp32, where transformers rounds before the weight; every other
        # point comes at the model's dtype.
        dtype = passes.logits[0].dtype
        values = {name: [value.to(dtype) for value in passes.values[name]] for name in capture}
        return Passes(values, passes.logits, passes.tokens)

    def _forward(self, batch: Rectangle, capture: list[str], own: dict[str, str]) -> Passes:
        def hook(name: str, value: torch.Tensor, hook: Any) -> torch.Tensor:
            del hook
            return batch.edited(name, 0, value)

        with self.model.hooks(fwd_hooks=[(own[name], partial(hook, name)) for name in batch.edits]):
            logits, cache = self.model.run_with_cache(
                batch.ids, attention_mask=batch.mask, names_filter=[own[name] for name in capture]
            )
        return Passes({name: [cache[own[name]]] for name in capture}, [logits])

    def _generate(self, batch: Rectangle, own: dict[str, str], new_tokens: int) -> Passes:
        """Every hook is called once a step, and what it returns is what the cache of keys and values is made of."""
        seen: dict[str, list[torch.Tensor]] = {name: [] for name in own}
        logits: list[torch.Tensor] = []

        def hook(name: str, value: torch.Tensor, hook: Any) -> torch.Tensor:
            del hook
            value = batch.edited(name, len(seen[name]), value)
            seen[name].append(value.clone())
            return value

        # The bridge gives out logits of the last column only.
        handle = self.model.original_model.register_forward_hook(
            lambda _module, _args, output: logits.append(output.logits)
        )
        try:
            with self.model.hooks(fwd_hooks=[(own[name], partial(hook, name)) for name in own]):
                ids = self.model.generate(
                    batch.ids,
                    attention_mask=batch.mask,
                    max_new_tokens=new_tokens,
                    do_sample=False,
                    stop_at_eos=False,
                    return_type="tokens",
                    verbose=False,
                )
        finally:
            handle.remove()
        return Passes(seen, logits, ids[:, batch.ids.shape[1] :])
