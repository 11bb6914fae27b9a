"""The part of a worker's RPC surface that hands out parameters, numbers and logits; it needs no tap."""

from __future__ import annotations

from typing import Any

import torch

from harness.vllm import internals
from harness.vllm.wire import decode_tensor, encode_tensor

__all__ = ["ParameterExtension"]


class ParameterExtension:
    """Mixed into the capture worker."""

    def tl_get_param(self, name: str) -> dict[str, Any] | None:
        """A parameter or buffer of this rank's model by dot path, encoded; None where this rank lacks it.

        Of a vocabulary-parallel one only this rank's real rows are sent, with the number of the first under ``start``.
        """
        model = internals.model_of(self)
        found = internals.resolve_dot_path(model, name)
        if not isinstance(found, torch.Tensor):
            return None
        rows = internals.vocabulary_rows(internals.resolve_dot_path(model, name.rpartition(".")[0]))
        if rows is None:
            return {**encode_tensor(found), "split": internals.is_split(found)}
        begin, end = rows
        return {**encode_tensor(found[: end - begin]), "start": begin}

    def tl_get_logits_processor(self) -> dict[str, Any] | None:
        """Soft-cap and scale of this rank's logits processor; None where it has none (an earlier stage)."""
        return internals.logits_processor(internals.model_of(self))

    def tl_get_attention(self, path: str) -> dict[str, Any] | None:
        """Scale, window and soft-cap of the attention module at ``path``; None on ranks that do not hold it."""
        module = internals.resolve_dot_path(internals.model_of(self), path)
        return None if module is None else internals.attention_rule(module)

    def tl_compute_logits(self, rows: dict[str, Any]) -> dict[str, Any] | None:
        """The model's own logits of post-weight rows (n, width), encoded (n, d_vocab); None on ranks that get none."""
        if internals.logits_processor(internals.model_of(self)) is None:
            return None
        hidden = decode_tensor(rows).to(device=self.device, dtype=internals.activation_dtype(self))  # type: ignore[attr-defined]
        logits = internals.compute_logits(self, hidden)
        return None if logits is None else encode_tensor(logits)
