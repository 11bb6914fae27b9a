"""Next-token loss of a forward: which logit row predicts which token, ragged and padded batches included."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from harness.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.results import ForwardResult

__all__ = ["next_token_loss", "token_losses"]


def token_losses(logits: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """-log p of each token after the first, given the rows before it: (n - 1,) fp32 from logits (n, d_vocab)."""
    targets = torch.tensor(list(tokens[1:]), dtype=torch.int64, device=logits.device)
    return torch.nn.functional.cross_entropy(logits[: len(targets)], targets, reduction="none")


def next_token_loss(result: ForwardResult) -> torch.Tensor:
    """Mean of :func:`token_losses` over every token whose predecessor was run, new ones left out: a scalar.

    Args:
        result: a forward with logits.

    Raises:
        UsageError: no prompt has two real tokens.
    """
    joined = torch.cat([token_losses(result.logit_rows(i), ids) for i, ids in enumerate(result.prompts)])
    if not joined.numel():
        msg = "a loss needs a prompt of at least two tokens: the first one is predicted by nothing"
        raise UsageError(msg)
    return joined.mean()
