"""Drivers and workers that make logits wrongly, in ways that real projects have shipped (see ``docs/faults.md``)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from harness.vllm.driver import VLLMDriver
from harness.vllm.logits import SequenceLogits, Unembedding
from harness.vllm.worker import CaptureWorker

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "BiasDropped",
    "EmbeddingThoughUntied",
    "LeftPaddingAsRight",
    "MaskIgnored",
    "PadColumnsKept",
    "PreWeightNorm",
    "ScaleBeforeCap",
    "ScaledAndCapped",
    "SoftCapSkipped",
]


class _Changed(SequenceLogits):
    """An unembedding changed after it was read."""

    def change(self, unembedding: Unembedding) -> Unembedding:
        """What this fault makes of it."""
        raise NotImplementedError

    def find(self) -> Unembedding | str:
        """Read, then change."""
        found = super().find()
        return found if isinstance(found, str) else self.change(found)


class _Uncapped(_Changed):
    def change(self, unembedding: Unembedding) -> Unembedding:
        return replace(unembedding, soft_cap=None)


class SoftCapSkipped(VLLMDriver):
    """Logits are not capped (lmdeploy 2842)."""

    logits_class = _Uncapped


class _ScaledFirst(Unembedding):
    def logits(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        plain = replace(self, soft_cap=None)
        made = Unembedding.logits(plain, rows, out)
        return made if self.soft_cap is None else made.div_(self.soft_cap).tanh_().mul_(self.soft_cap)


class _WrongOrder(_Changed):
    def change(self, unembedding: Unembedding) -> Unembedding:
        return _ScaledFirst(**vars(unembedding))


class ScaleBeforeCap(VLLMDriver):
    """The scale is applied before the soft-cap (HF 31891's family)."""

    logits_class = _WrongOrder


class ScaledAndCapped(CaptureWorker):
    """No fault: the engine's own logits processor gets a scale beside its soft-cap; no family here has both."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load, then set the scale."""
        super().load_model(*args, **kwargs)
        self.model_runner.get_model().logits_processor.scale = 0.5


class _Padded(_Changed):
    def change(self, unembedding: Unembedding) -> Unembedding:
        # vLLM pads vocabularies to 64 rows; a bias or a norm offset makes a zero row's logit the largest one.
        missing = -unembedding.weight.shape[0] % 64
        return replace(
            unembedding,
            weight=torch.nn.functional.pad(unembedding.weight, (0, 0, 0, missing)),
            bias=None
            if unembedding.bias is None
            else torch.nn.functional.pad(unembedding.bias, (0, missing)),
        )


class PadColumnsKept(VLLMDriver):
    """Padding columns of the vocabulary take part (vLLM 20843)."""

    logits_class = _Padded


class _Embedding(_Changed):
    def change(self, unembedding: Unembedding) -> Unembedding:
        weight = self._get_param("model.embed_tokens.weight")
        return unembedding if weight is None else replace(unembedding, weight=weight.float())


class EmbeddingThoughUntied(VLLMDriver):
    """The embedding is taken for the unembedding of a model that does not share them (vLLM 51063's family)."""

    logits_class = _Embedding


class _Unbiased(_Changed):
    def change(self, unembedding: Unembedding) -> Unembedding:
        return replace(unembedding, bias=None)


class BiasDropped(VLLMDriver):
    """The head's bias is left out."""

    logits_class = _Unbiased


class PreWeightNorm(VLLMDriver):
    """The normalised rows go into the head without the norm's weight (vLLM 3653's family)."""

    def _emitted(self, keys: list[str], lengths: list[int]) -> list[torch.Tensor]:
        weight = self.get_param("model.norm.weight")
        assert weight is not None  # noqa: S101 - it is planted on Llama only
        return [rows / weight for rows in super()._emitted(keys, lengths)]


class LeftPaddingAsRight(VLLMDriver):
    """The first n tokens are taken for the real ones, wherever padding stands (an early version of the original)."""

    def forward(self, input_ids: Any, *, attention_mask: Any | None = None, **kwargs: Any) -> Any:
        """Push every mask to the left."""
        return super().forward(input_ids, attention_mask=_pushed(attention_mask), **kwargs)


def _pushed(mask: Sequence[Sequence[int]] | None) -> list[list[int]] | None:
    return None if mask is None else [sorted(row, reverse=True) for row in mask]


class MaskIgnored(VLLMDriver):
    """Padding is sent as content (HF 29029's family)."""

    def forward(self, input_ids: Any, *, attention_mask: Any | None = None, **kwargs: Any) -> Any:
        """Drop the mask."""
        del attention_mask
        return super().forward(input_ids, **kwargs)
