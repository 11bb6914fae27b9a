"""A second opinion on logits: vLLM's own log-prob path in ``raw_logits`` mode, which no tap takes part in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from harness.errors import UsageError
from harness.vllm import internals

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["read_raw_logits"]


def _dense(flat: Any, vocab_size: int) -> list[torch.Tensor]:
    """VLLM's flat log-probs → one (vocab_size,) fp32 tensor per position that has any."""
    rows = []
    for begin, end in zip(flat.start_indices, flat.end_indices, strict=True):
        if begin == end:
            continue  # the first prompt token has no predecessor to predict it
        row = torch.full((vocab_size,), float("nan"))
        ids = torch.tensor(flat.token_ids[begin:end])
        row[ids] = torch.tensor(flat.logprobs[begin:end], dtype=torch.float32)
        rows.append(row)
    return rows


def read_raw_logits(
    llm: Any, prompts: Sequence[list[int]], vocab_size: int, max_new_tokens: int = 1
) -> list[torch.Tensor]:
    """Logits of every position of each prompt and of each fed-back token, (n_prompt + k - 1, vocab_size) fp32.

    Raises:
        UsageError: the engine serves processed log-probs instead (evidence: vLLM 18352, trl 4159).
    """
    from vllm import SamplingParams

    mode = str(llm.llm_engine.model_config.logprobs_mode)
    if "raw_logits" not in mode:
        msg = f"this engine serves {mode}; boot it with logprobs_mode='raw_logits', max_logprobs=-1"
        raise UsageError(msg)
    params = SamplingParams(
        max_tokens=max_new_tokens,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        prompt_logprobs=-1,
        logprobs=-1,
        flat_logprobs=True,
    )
    logits = []
    for output in internals.generate(llm, prompts, params):
        rows = _dense(output.prompt_logprobs, vocab_size) + _dense(output.outputs[0].logprobs, vocab_size)
        logits.append(torch.stack(rows))
    return logits
