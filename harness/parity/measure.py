"""One pass over a hook's rows: every per-row figure the gates, the report and the explanations need."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from harness.parity import metrics
from harness.parity.rows import gather, lengths_of, ref_of, spans

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from harness.parity.rows import Rows
    from harness.parity.types import RowRef

__all__ = ["MASSIVE_ROW", "MASSIVE_SELF", "RowTable", "measure", "one_thread"]

#: A row is massive where its norm exceeds the hook's median row norm this many times …
MASSIVE_ROW = 10.0
#: … or where it exceeds, this many times, its own norm without its massive channels: what an error in the other
#: channels is diluted by. This half needs no other rows, so it holds for a prompt of one token and for a batch of
#: first tokens, whose median is itself massive. (SmolLM2's first rows: 100 to 190 medians, and 4 to 19 times the rest.)
MASSIVE_SELF = 5.0


@dataclass(frozen=True)
class RowTable:
    """Figures of one hook, N rows of all requests in order, M realisations of the reference, S channel slices.

    Everything is fp64 unless said otherwise. Errors are 0 where nothing differs, infinity where a value is not finite.
    """

    lengths: tuple[int, ...]  #: rows per request, N in all
    width: int
    spans: tuple[tuple[int, int], ...]  #: channel ranges of the slices
    norms: torch.Tensor  #: (N,) ‖T‖
    massive: torch.Tensor  #: (N,) bool
    engine: torch.Tensor  #: (N,) err(E)
    same: torch.Tensor  #: (M, N) err(R)
    engine_rest: (
        torch.Tensor
    )  #: (N,) err(E) without the row's massive channels, relative to what remains of T
    same_rest: torch.Tensor  #: (M, N) likewise of R
    truth_slices: torch.Tensor  #: (N, S) ‖T‖² of each slice over the row's
    engine_slices: torch.Tensor  #: (N, S) ‖E - T‖² of each slice over the row's ‖T‖²
    same_slices: torch.Tensor  #: (M, N, S) likewise of R
    max_abs: torch.Tensor  #: (N,) largest |E - T|
    channel: torch.Tensor  #: (N,) int64, where that is
    cosine: torch.Tensor  #: (N,)
    ulps: torch.Tensor  #: (N,)
    zero: torch.Tensor  #: (N,) bool: E is all zero and T is not
    constant: torch.Tensor  #: (N,) bool: E is one value throughout, not zero, and T is not

    def ref(self, index: int) -> RowRef:
        """Request and position of a row."""
        return ref_of(index, self.lengths)

    @property
    def informative(self) -> torch.Tensor:
        """(N,) bool: rows that are not zero on every side, and so say something."""
        return (self.norms > 0) | (self.engine > 0) | (self.same > 0).any(dim=0)


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it torch computes on one thread; afterwards on as many as before.

    Judging is many small operations, and each waits for its slowest thread. Beside a busy engine on two cores that made
    one comparison of SmolLM2 (305 rows, 92 hooks) take 6 to 40 s where a single thread takes 1.6 s.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _massive(norms: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    median = norms[norms > 0].median()  # NaN where every row is zero, which nothing exceeds
    return (norms > MASSIVE_ROW * median) | (norms > MASSIVE_SELF * rest)


def _scales(truth: Rows, lengths: Sequence[int], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm of each truth row, and its norm without massive channels."""
    norms, rest = [], []
    for group in spans(lengths, width):
        t = gather(truth, group)
        norms.append(metrics.row_norms(t))
        rest.append(metrics.row_norms(t.masked_fill(metrics.massive_channels(t), 0.0)))
    return torch.cat(norms), torch.cat(rest)


def _errors_of(
    x: torch.Tensor,
    t: torch.Tensor,
    hidden: torch.Tensor,
    scale: torch.Tensor,
    cut: Sequence[tuple[int, int]],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row errors, row errors without massive channels, and slice energies over the squared norm, of one span."""
    errors = metrics.row_errors(x, t, scale)
    others = errors
    if bool(hidden.any()):
        without = metrics.row_errors(x.masked_fill(hidden, 0.0), t.masked_fill(hidden, 0.0))
        # Only where something is hidden, so that no row's figure depends on the rows it shares a span with.
        others = torch.where(hidden.any(dim=1), without, errors)
    energies = metrics.slice_energies(x, t, cut)
    energies = torch.where(energies == 0, 0.0, energies / scale.square().unsqueeze(1))
    return errors, others, energies


def measure(engine: Rows, truth: Rows, same: Sequence[Rows], *, dtype: str, slices: int) -> RowTable:
    """Measure one hook.

    Args:
        engine: E, one (n_i, width) tensor per request.
        truth: T, of the same shapes and finite; :func:`harness.parity.rows.check` sees to both.
        same: realisations of R.
        dtype: the engine's, for ulps.
        slices: contiguous channel ranges to look at separately.
    """
    lengths, width = lengths_of(truth), int(truth[0].shape[1])
    cut = metrics.slice_spans(width, slices)
    norms, rest_norms = _scales(truth, lengths, width)
    scale = metrics.denominators(norms)
    columns: list[list[torch.Tensor]] = []
    at = 0
    for group in spans(lengths, width):
        t, e = gather(truth, group), gather(engine, group)
        here = slice(at, at + t.shape[0])
        at = here.stop
        hidden = metrics.massive_channels(t)
        of_engine = _errors_of(e, t, hidden, scale[here], cut)
        of_same = [_errors_of(gather(r, group), t, hidden, scale[here], cut) for r in same]
        share = metrics.slice_energies(t, None, cut) / scale[here].square().unsqueeze(1)
        flat = (e == e[:, :1]).all(dim=1) & ~(t == t[:, :1]).all(dim=1)
        zero = flat & (e[:, 0] == 0)
        columns.append(
            [
                *of_engine,
                *(torch.stack(parts) for parts in zip(*of_same, strict=True)),
                torch.nan_to_num(share),
                *metrics.max_abs(e, t),
                metrics.cosines(e, t),
                metrics.ulps(e, t, dtype),
                zero,
                flat & ~zero,
            ]
        )
    row_axes = (0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0)
    joined = [
        torch.cat(parts, dim=axis) for parts, axis in zip(zip(*columns, strict=True), row_axes, strict=True)
    ]
    (
        err_e,
        rest_e,
        slices_e,
        err_r,
        rest_r,
        slices_r,
        share,
        largest,
        channel,
        cosine,
        ulps,
        zero,
        constant,
    ) = joined
    return RowTable(
        lengths=lengths, width=width, spans=tuple(cut), norms=norms, massive=_massive(norms, rest_norms),
        engine=err_e, same=err_r, engine_rest=rest_e, same_rest=rest_r,
        truth_slices=share, engine_slices=slices_e, same_slices=slices_r,
        max_abs=largest, channel=channel, cosine=cosine, ulps=ulps, zero=zero, constant=constant,
    )  # fmt: skip
