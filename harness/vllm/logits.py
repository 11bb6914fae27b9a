"""Every logit, rebuilt in fp32 from the captured final norm: ``post-weight @ W_U.T (+ bias)``, soft-cap, then scale.

The order and the numbers are the engine's own (its ``LogitsProcessor``); only the precision is not, which computes at
the model's dtype. The sampler of an engine gives one position, this gives all of them.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from harness.errors import CaptureError, UsageError
from harness.points import FINAL_NORM
from harness.results import pad_rows
from harness.vllm import internals
from harness.vllm.overlays import get_overlay

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["SequenceLogits", "Unembedding", "agreed_processor", "assemble_vocabulary"]

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
            out = torch.empty((n, self.weight.shape[0]), dtype=torch.float32, device=rows.device)
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
    for begin, part in sorted(dict(reversed(list(parts))).items()):
        if begin != at:
            msg = f"vocabulary rows {at} to {begin} are on no rank, or on two"
            raise CaptureError(msg)
        rows.append(part)
        at += part.shape[0]
    if at != vocab_size:
        msg = f"the ranks hold {at} vocabulary rows, the model has {vocab_size}"
        raise CaptureError(msg)
    return rows[0] if len(rows) == 1 else torch.cat(rows)


class SequenceLogits:
    """One engine's logits at every position, or, where they cannot be had, log-probs of each prompt's last row.

    Args:
        llm: the engine.
        paths: installed hook → dot path of its module.
        get_param: parameter by dot path, joined over ranks.
    """

    def __init__(
        self, llm: Any, paths: Mapping[str, str], get_param: Callable[[str], torch.Tensor | None]
    ) -> None:
        self._llm = llm
        self._paths = paths
        self._get_param = get_param
        self._config = internals.extract_hf_config(llm)
        self._warned = False

    @property
    def available(self) -> bool:
        """Whether every position can be had."""
        return isinstance(self._found, Unembedding)

    @cached_property
    def _found(self) -> Unembedding | str:
        """What :meth:`find` found, on first use and kept."""
        return self.find()

    def find(self) -> Unembedding | str:
        """Read the unembedding from the workers, or say why there is none."""
        if FINAL_NORM not in self._paths:
            return f"{FINAL_NORM} is not among the installed hook points"
        processor = agreed_processor(internals.call_workers(self._llm, "tl_get_logits_processor"))
        if processor is None or processor["as_input"]:
            return "the model has no logits processor that takes hidden states"
        weight = self._get_param("lm_head.weight")
        if weight is None and getattr(self._config, "tie_word_embeddings", False):
            weight = self._get_param(f"{get_overlay(self._config.architectures[0]).embed}.weight")
        if weight is None:
            return "the model holds its unembedding neither at lm_head.weight nor, tied, at the embedding"
        bias = self._get_param("lm_head.bias")
        return Unembedding(
            weight.float(), None if bias is None else bias.float(), processor["soft_cap"], processor["scale"]
        )

    def rebuilt(self, rows: Sequence[torch.Tensor], *, starts: Sequence[int], columns: int) -> torch.Tensor:
        """Logits of every request's post-weight rows at their places, (batch, seq, d_vocab) fp32, -inf on padding."""
        unembedding = self._found
        if isinstance(unembedding, str):
            raise CaptureError(unembedding)
        seq = max(columns, *(begin + one.shape[0] for begin, one in zip(starts, rows, strict=True)))
        shape = (len(rows), seq, unembedding.weight.shape[0])
        logits = torch.empty(shape, dtype=torch.float32, device="cpu")
        for index, (begin, one) in enumerate(zip(starts, rows, strict=True)):
            end = begin + one.shape[0]
            logits[index, :begin] = logits[index, end:] = -torch.inf
            unembedding.logits(one, out=logits[index, begin:end])
        return logits

    def fallback(self) -> int:
        """How many log-probs of a sampled position the engine gives; warns, once, that they are all there is."""
        config = self._llm.llm_engine.model_config
        most, mode = int(config.max_logprobs), str(config.logprobs_mode)
        if "logits" in mode:
            msg = (
                f"no sequence logits: {self._found}; and with logprobs_mode={mode} there are no log-probs of the last "
                "row either: boot with another mode, or pass return_logits=False"
            )
            raise UsageError(msg)
        if not self._warned:
            self._warned = True
            many = "all" if most < 0 else f"the {most} largest"
            warnings.warn(
                f"no sequence logits: {self._found}. Only each prompt's last row has log-probs ({many}); every other "
                "value is -inf",
                stacklevel=4,
            )
        return most

    def last_rows(
        self,
        outputs: Sequence[Any],
        prompts: Sequence[list[int]],
        lengths: Sequence[int],
        *,
        starts: Sequence[int],
        columns: int,
    ) -> torch.Tensor:
        """Log-probs of each prompt's last row, -inf everywhere else: (batch, seq, d_vocab) fp32."""
        vocab_size = int(self._config.vocab_size)
        rows = []
        for output, prompt, length in zip(outputs, prompts, lengths, strict=True):
            request = torch.full((length, vocab_size), -torch.inf, device="cpu")
            for token, entry in output.outputs[0].logprobs[0].items():
                if token < vocab_size:
                    request[len(prompt) - 1, token] = entry.logprob
            rows.append(request)
        return pad_rows(rows, starts=starts, columns=columns, fill=-torch.inf)
