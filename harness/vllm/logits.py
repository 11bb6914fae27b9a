"""Every logit, rebuilt from the captured final norm: ``post-weight @ W_U.T (+ bias)``, soft-cap, then scale, all in fp32.

The order and the numbers are the engine's own (its ``LogitsProcessor``); only the precision is not, which computes at
the model's dtype. The sampler of an engine gives one position, this gives all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from harness.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Unembedding", "agreed_processor", "assemble_vocabulary"]

#: Elements of fp32 input converted at a time: what a call needs beside its result stays near this (16 MiB).
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Unembedding:
    """From the final norm to logits.

    Attributes:
        weight: W_U, (d_vocab, width) fp32, padding rows cut; the one copy there is.
        bias: (d_vocab,) fp32 or None.
        soft_cap: c of ``c · tanh(x / c)``, None for none.
        scale: factor after the soft-cap.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    soft_cap: float | None = None
    scale: float = 1.0

    def logits(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of post-weight rows (n, width) of any dtype: (n, d_vocab) fp32, written into ``out`` where given.

        Rows are converted in blocks and everything after the product happens in place, so the peak beside the result
        does not grow with the vocabulary.
        """
        n, width = rows.shape
        if out is None:
            out = torch.empty((n, self.weight.shape[0]), dtype=torch.float32)
        step = max(1, _BLOCK // width)
        for begin in range(0, n, step):
            part = out[begin : begin + step]
            torch.mm(rows[begin : begin + step].float(), self.weight.T, out=part)
            if self.bias is not None:
                part += self.bias
            if self.soft_cap is not None:
                part.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
            if self.scale != 1.0:
                part *= self.scale
        return out


def agreed_processor(by_rank: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """What the ranks of the last stage say their logits processor does; None where no rank has one.

    Raises:
        CaptureError: ranks that disagree.
    """
    said = {rank: one for rank, one in enumerate(by_rank) if one is not None}
    if len({tuple(sorted(one.items())) for one in said.values()}) > 1:
        msg = f"ranks disagree about their logits processor: {said}"
        raise CaptureError(msg)
    return next(iter(said.values()), None)


def assemble_vocabulary(parts: Sequence[tuple[int, torch.Tensor]], vocab_size: int) -> torch.Tensor:
    """Join vocabulary shards, (first row, (n, …)) each without its padding, in order; replicas are taken once.

    Raises:
        CaptureError: rows missing, or a shard that begins inside another.
    """
    rows: list[torch.Tensor] = []
    at = 0
    for begin, part in sorted({start: tensor for start, tensor in reversed(list(parts))}.items()):
        if begin != at:
            msg = f"vocabulary rows {at} to {begin} are on no rank, or on two"
            raise CaptureError(msg)
        rows.append(part)
        at += part.shape[0]
    if at != vocab_size:
        msg = f"the ranks hold {at} vocabulary rows, the model has {vocab_size}"
        raise CaptureError(msg)
    return rows[0] if len(rows) == 1 else torch.cat(rows)
