"""Figures of logits that an error norm does not tell: divergence, agreement of ranks, flipped argmaxes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from harness.parity.metrics import trusted
from harness.parity.types import RowRef

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.parity.rows import Rows

__all__ = ["Flip", "LogitFigures", "largest_error", "logit_figures"]

_TOP = 5


@dataclass(frozen=True)
class Flip:
    """A row whose largest logit is another token than the truth's."""

    where: RowRef
    truth: int  #: the truth's token
    engine: int
    margin: float  #: truth's logit of its token minus its logit of the engine's
    allowed: float  #: what noise may move the two by

    @property
    def legitimate(self) -> bool:
        """Whether the margin lies inside the noise."""
        return self.margin <= self.allowed


@dataclass(frozen=True)
class LogitFigures:
    """Over all rows of a case; divergences in nats."""

    rows: int
    max_kl: float  #: largest KL(T‖E) of a row
    max_kl_reference: float  #: largest KL(T‖R) of a row, over the realisations
    top1: float  #: share of rows with the truth's argmax
    top5: float  #: mean share of the truth's five largest among the engine's five largest
    flips: tuple[Flip, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain numbers for the record."""
        return {**asdict(self), "flips": len(self.flips)}


def logit_figures(engine: Rows, truth: Rows, same: Sequence[Rows], *, k: float) -> LogitFigures:
    """Compare logits row by row.

    A flip is legitimate where the truth's margin between the two tokens is at most ``2 k`` times the largest error of
    the reference's realisations in that row: each of the two logits may be off by ``k`` times that.

    Args:
        engine: (n_i, d_vocab) per request.
        truth: T, of the same shapes.
        same: realisations of R.
        k: as in the verdict.
    """
    kl = kl_reference = 0.0
    hits = overlap = count = 0.0
    flips: list[Flip] = []
    for request, (e, t) in enumerate(zip(engine, truth, strict=True)):
        log_t = torch.log_softmax(t.double(), dim=1)
        kl = max(kl, float(_kl(log_t, e).max()))
        kl_reference = max(kl_reference, *(float(_kl(log_t, one[request]).max()) for one in same))
        best_t, best_e = t.argmax(dim=1), e.argmax(dim=1)
        hits += float((best_t == best_e).sum())
        count += t.shape[0]
        top = min(_TOP, t.shape[1])
        five_t, five_e = t.topk(top, dim=1).indices, e.topk(top, dim=1).indices
        overlap += float((five_t.unsqueeze(2) == five_e.unsqueeze(1)).any(dim=2).double().mean(dim=1).sum())
        for row in (best_t != best_e).nonzero().flatten().tolist():
            noise = largest_error([one[request][row] for one in same], t[row])
            a, b = int(best_t[row]), int(best_e[row])
            margin = float(t[row, a].double() - t[row, b].double())
            flips.append(Flip(RowRef(request, row), a, b, margin, 2 * k * noise))
    return LogitFigures(int(count), kl, kl_reference, hits / count, overlap / count, tuple(flips))


def largest_error(same: Sequence[torch.Tensor], truth: torch.Tensor) -> float:
    """The most by which a realisation's logits (d_vocab,) are off; one that is not finite says nothing."""
    errors = torch.stack([(one.double() - truth.double()).abs().max() for one in same])
    return float(trusted(errors).max())


def _kl(log_t: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """KL(T‖X) of each row, from T's log-probabilities and X's logits: (n,) fp64, infinite where X is not finite."""
    log_x = torch.log_softmax(logits.double(), dim=1)
    terms = log_t.exp() * (log_t - log_x)
    return torch.nan_to_num(terms.sum(dim=1), nan=torch.inf).clamp(min=0.0)
