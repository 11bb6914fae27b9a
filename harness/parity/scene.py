"""The rows of a failure, and the test every explanation must pass before it may be told.

An explanation names other values that the engine's rows should then equal. It is believed only where the distance to
them is far below the distance to the truth (:data:`NEAR`) and within what noise is allowed, for nearly all failing rows
(:data:`SHARE`). Random rows are about √2 away from everything and so match nothing; an all-zero candidate matches
nothing by definition; and rows with massive channels are compared once more without them, because two rows that share
a giant channel look equal whatever the rest of them holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from harness.parity.metrics import massive_channels
from harness.parity.rows import ref_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.parity.rows import Captures, Rows
    from harness.parity.types import RowRef

__all__ = ["NEAR", "Clues", "Match", "Scene", "distance", "sample"]

#: An explanation must be this much nearer than the truth.
NEAR = 0.1
#: So many of the rows must match; the rest may be spoilt by something else.
SHARE = 0.9
#: Failing rows looked at, spread evenly; enough to tell a pattern, few enough for any width.
MAX_ROWS = 128


@dataclass(frozen=True)
class Clues:
    """What a caller may know beyond the captures; see :func:`harness.parity.verdict.compare`."""

    prompt_lengths: Sequence[int] | None = None
    step: int | None = None
    earlier: Sequence[tuple[str, Captures]] = ()
    final_norm_weight: torch.Tensor | None = None
    edits: Sequence[tuple[str, torch.Tensor]] = ()
    unedited: Captures | None = None


@dataclass(frozen=True)
class Match:
    """An explanation that fits."""

    text: str  #: completes "it …"
    error: float  #: relative distance that :data:`SHARE` of the rows keep
    rank: int  #: lower is more specific


def distance(x: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """Relative distance of each row from its candidate, the larger of with and without massive channels: (m,) fp64.

    Infinite where the candidate is zero or x not finite.
    """

    def relative(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ratio = torch.linalg.vector_norm(a - b, dim=1) / torch.linalg.vector_norm(b, dim=1)
        return torch.nan_to_num(ratio, nan=math.inf)

    full = relative(x, candidate)
    hidden = massive_channels(candidate)
    rows = hidden.any(dim=1)
    if bool(rows.any()):
        rest = relative(
            x[rows].masked_fill(hidden[rows], 0.0), candidate[rows].masked_fill(hidden[rows], 0.0)
        )
        full[rows] = torch.maximum(full[rows], rest)
    return full


def sample(failing: torch.Tensor, lengths: Sequence[int]) -> list[RowRef]:
    """Up to :data:`MAX_ROWS` failing rows, evenly spread: (N,) bool → their places."""
    indices = failing.nonzero().flatten()
    if indices.numel() > MAX_ROWS:
        indices = indices[torch.linspace(0, indices.numel() - 1, MAX_ROWS).round().long()]
    return [ref_of(index, lengths) for index in indices.tolist()]


def take(rows: Rows, refs: Sequence[RowRef]) -> torch.Tensor:
    """The rows at ``refs``: (m, width) fp64."""
    return torch.stack([rows[ref.request][ref.position] for ref in refs]).double()


@dataclass(frozen=True)
class Scene:
    """The failing rows of the first hook that failed.

    Attributes:
        hook: that hook.
        refs: m of its failing rows.
        engine: (m, width) fp64, what the engine gave there.
        own: (m, width) fp64, what it should have given.
        truth: all of the truth.
        bounds: aggregate bound of each judged hook.
        floor: noise floor of ``hook``: distances below it count as equal.
        clues: what the caller knows.
    """

    hook: str
    refs: tuple[RowRef, ...]
    engine: torch.Tensor
    own: torch.Tensor
    truth: Captures
    bounds: Mapping[str, float]
    floor: float
    clues: Clues = field(default_factory=Clues)

    @cached_property
    def errors(self) -> torch.Tensor:
        """(m,) how far each row is from its truth; infinite where that is zero."""
        return distance(self.engine, self.own)

    @property
    def width(self) -> int:
        """Channels of the hook."""
        return int(self.engine.shape[1])

    def limits(self, bound: float | None = None) -> torch.Tensor:
        """(m,) how near each row must be to what is said to explain it."""
        allowed = self.bounds[self.hook] if bound is None else max(bound, self.bounds[self.hook])
        return (NEAR * self.errors).clamp(max=allowed)

    def at(self, hook: str) -> torch.Tensor | None:
        """The truth's rows of another hook at the same places, None where it has none of this width."""
        rows = self.truth.get(hook)
        if rows is None or len(rows) != len(self.truth[self.hook]):
            return None
        own = self.truth[self.hook]
        if any(a.shape != b.shape for a, b in zip(rows, own, strict=True)):
            return None
        return take(rows, self.refs)

    def match(
        self,
        text: str,
        candidate: torch.Tensor,
        rank: int,
        *,
        valid: torch.Tensor | None = None,
        bound: float | None = None,
    ) -> Match | None:
        """Return the explanation if the engine's rows equal ``candidate``.

        Args:
            text: completes "it …".
            candidate: (m, width) fp64.
            rank: how specific it is.
            valid: (m,) bool, rows for which there is a candidate; at least half must have one.
            bound: noise allowed at the hook the candidate comes from.
        """
        chosen = torch.ones(len(self.refs), dtype=torch.bool) if valid is None else valid
        count = int(chosen.sum())
        if count == 0 or 2 * count < len(self.refs):
            return None
        distances = distance(self.engine[chosen], candidate[chosen])
        fits = distances <= self.limits(bound)[chosen]
        if int(fits.sum()) < math.ceil(SHARE * count):
            return None
        return Match(text, float(distances.sort().values[math.ceil(SHARE * count) - 1]), rank)
