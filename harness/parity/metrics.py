"""How far one set of rows is from another: fp64 throughout, a bounded number of elements at a time.

Rows are (n, width) tensors of any real dtype on the CPU. Every function converts at most :data:`CHUNK` elements to fp64
at once, so that a capture of gigabytes costs a few tens of megabytes to judge. "Relative" always means relative to the
truth's row: ``‖X - T‖₂ / ‖T‖₂``.

Non-finite values never vanish: a row of X that holds one has error infinity and cosine 0.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from harness.errors import CaptureError
from harness.parity.floor import SIGNIFICAND_BITS, full_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = [
    "CHUNK",
    "aggregate",
    "amplification",
    "cosines",
    "denominators",
    "massive_channels",
    "max_abs",
    "row_errors",
    "row_norms",
    "row_spans",
    "significand_bits",
    "slice_energies",
    "slice_errors",
    "slice_spans",
    "spacing",
    "trusted",
    "ulps",
]

#: Elements converted to fp64 at once: 8 MiB a temporary.
CHUNK = 1 << 20

#: A channel is massive where it exceeds the row's median magnitude this many times: no channel of a Gaussian row does
#: (it would be 13 standard deviations out). Sun et al., "Massive Activations in Large Language Models" (2024), call
#: a value massive from 1000 medians on; what hides its neighbours begins much earlier.
MASSIVE_CHANNEL = 20.0
#: More massive channels than this share of the width (one is always allowed) make a heavy-tailed row instead.
MASSIVE_SHARE = 0.05

#: Exponent of the smallest subnormal: nothing is spaced finer.
_FINEST = {"float64": -1074, "float32": -149, "float16": -24, "bfloat16": -133}
_INT_OF = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def row_spans(n_rows: int, width: int) -> Iterator[slice]:
    """Cut ``n_rows`` rows into spans of at most :data:`CHUNK` elements (at least one row each)."""
    rows = max(1, CHUNK // max(1, width))
    for start in range(0, n_rows, rows):
        yield slice(start, min(start + rows, n_rows))


def _by_span(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], x: torch.Tensor, truth: torch.Tensor
) -> torch.Tensor:
    """Apply a per-row function to fp64 spans of both tensors and join what it gives."""
    if x.shape != truth.shape or x.ndim != 2:
        shapes = f"{tuple(x.shape)} and {tuple(truth.shape)}"
        msg = f"rows to compare must be two (n, width) tensors of one shape, not {shapes}"
        raise CaptureError(msg)
    parts = [function(x[span].double(), truth[span].double()) for span in row_spans(*truth.shape)]
    return torch.cat(parts) if parts else function(x.double(), truth.double())


def _finite(values: torch.Tensor) -> torch.Tensor:
    """Put infinity where a NaN came out, so that comparisons with a bound fail instead of lying."""
    return torch.nan_to_num(values, nan=math.inf, posinf=math.inf)


def row_norms(x: torch.Tensor) -> torch.Tensor:
    """‖x‖₂ of each row: (n,) fp64."""
    return _by_span(lambda a, _: torch.linalg.vector_norm(a, dim=1), x, x)


def denominators(norms: torch.Tensor) -> torch.Tensor:
    """What to divide each row's distance by: its norm, or for an all-zero row the median of the others'.

    A row that is all zeros in the truth (the delta of an intervention before its first position) has no scale of its
    own; a stray value in it is measured against its neighbours. Where all are zero the result is zero: see
    :func:`row_errors`.
    """
    alive = norms > 0
    return torch.where(alive, norms, norms[alive].median()) if bool(alive.any()) else norms


def row_errors(x: torch.Tensor, truth: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """‖x - truth‖₂ / scale of each row: (n,) fp64, 0 where they are equal, infinity where x is not finite.

    Args:
        x: (n, width).
        truth: (n, width).
        scale: (n,) denominators; None takes those of ``truth``. Equal rows are 0 apart even on a zero scale, others
            are infinitely far.
    """
    scale = denominators(row_norms(truth)) if scale is None else scale
    distance = _finite(_by_span(lambda a, t: torch.linalg.vector_norm(a - t, dim=1), x, truth))
    return torch.where(distance == 0, 0.0, distance / scale)


def trusted(errors: torch.Tensor) -> torch.Tensor:
    """R's errors with 0 for those that are not finite: a broken reference must not excuse an engine."""
    return torch.where(torch.isfinite(errors), errors, 0.0)


def aggregate(errors: torch.Tensor) -> float:
    """Root mean square over rows; 0 of no rows."""
    return float(errors.square().mean().sqrt()) if errors.numel() else 0.0


def max_abs(x: torch.Tensor, truth: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest ``|x - truth|`` of each row and the channel it is in: (n,) fp64 and (n,) int64."""
    both = _by_span(lambda a, t: torch.stack(_finite((a - t).abs()).max(dim=1), dim=1), x, truth)
    return both[:, 0], both[:, 1].long()


def cosines(x: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Cosine between the rows: (n,) fp64; 1 for two zero rows, 0 where only one is zero or x is not finite."""

    def function(a: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        norms = torch.linalg.vector_norm(a, dim=1) * torch.linalg.vector_norm(t, dim=1)
        both_zero = (a == 0).all(dim=1) & (t == 0).all(dim=1)
        cosine = torch.nan_to_num((a * t).sum(dim=1) / norms)
        return torch.where(both_zero, 1.0, cosine.clamp(-1.0, 1.0))

    return _by_span(function, x, truth)


def spacing(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """Distance from ``|value|`` to the next larger number of ``dtype``, whatever dtype holds the values: fp64.

    For ``2^e ≤ |v| < 2^(e+1)`` it is ``2^(e+1-p)``, p bits of significand; never below the smallest subnormal.
    """
    name = full_name(dtype)
    _, exponent = torch.frexp(
        values.double().abs()
    )  # |v| = m·2^e with 0.5 ≤ m < 1, hence e here is e+1 above
    exponent = (exponent - SIGNIFICAND_BITS[name]).clamp(min=_FINEST[name])
    exponent = torch.where(values == 0, torch.full_like(exponent, _FINEST[name]), exponent)
    return torch.ldexp(torch.ones(exponent.shape, dtype=torch.float64), exponent)


def ulps(x: torch.Tensor, truth: torch.Tensor, dtype: str) -> torch.Tensor:
    """Largest ``|x - truth|`` of each row in units in the last place of ``dtype`` at the truth's magnitude: (n,) fp64.

    Huge where the truth is nearly zero, as an ulp there is; a figure to read, not to assert.
    """
    return _by_span(lambda a, t: _finite((a - t).abs() / spacing(t, dtype)).amax(dim=1), x, truth)


def slice_spans(width: int, slices: int) -> list[tuple[int, int]]:
    """Cut channels into ``slices`` contiguous ranges ``[from, to)`` of nearly equal size, as ranks shard them."""
    slices = max(1, min(slices, width))
    edges = [round(width * i / slices) for i in range(slices + 1)]
    return list(pairwise(edges))


def slice_energies(
    x: torch.Tensor, truth: torch.Tensor | None, spans: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Sum of squares of ``x - truth`` (of ``x`` where ``truth`` is None) over each channel range: (n, slices) fp64."""

    def function(a: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        squares = (a if truth is None else a - t).square()
        return _finite(torch.stack([squares[:, begin:end].sum(dim=1) for begin, end in spans], dim=1))

    return _by_span(function, x, x if truth is None else truth)


def slice_errors(error: torch.Tensor, truth: torch.Tensor, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Relative error of each channel range over all rows: (slices,) fp64.

    Each row is first scaled to norm 1, so that long rows do not drown short ones, then error and truth are pooled:
    ``√(Σ_rows error / Σ_rows truth)``. A row whose own slice is nearly zero therefore does no harm.

    Args:
        error: (n, slices) sums of squared errors, each row over its squared norm.
        truth: (n, slices) sums of squares of the truth, likewise.
        spans: the channel ranges; one that is zero in the truth is measured against its share of the width.
    """
    width = spans[-1][1]
    share = torch.tensor([(end - begin) / width for begin, end in spans], dtype=torch.float64)
    pooled = truth.mean(dim=0)
    return (error.mean(dim=0) / torch.where(pooled > 0, pooled, share)).sqrt()


def massive_channels(truth: torch.Tensor) -> torch.Tensor:
    """Which channels are massive in their row: (n, width) bool. Meant for a span; see :data:`MASSIVE_CHANNEL`.

    Judged within the row, so that it works for a prompt of one token as for a thousand.
    """
    magnitude = truth.double().abs()
    median = magnitude.median(dim=1, keepdim=True).values
    massive = (magnitude > MASSIVE_CHANNEL * median) & (median > 0)
    few = massive.sum(dim=1, keepdim=True) <= max(1, int(MASSIVE_SHARE * truth.shape[1]))
    return massive & few


def amplification(errors: Sequence[float]) -> list[float | None]:
    """Error of each hook over that of the hook before: what the step between them made of the error it was given.

    None for the first hook and after a hook without error. Large at a hook where an error is born, about 1 where it is
    only carried.
    """
    ratios = (
        after / before if before > 0 and math.isfinite(before) else None for before, after in pairwise(errors)
    )
    return [None, *ratios] if errors else []


def significand_bits(rows: Sequence[torch.Tensor]) -> int | None:
    """How many bits of significand the values really use, the implicit one included.

    24 for honest fp32, 11 where each value went through fp16 or TF32, 8 for bf16. None for other dtypes and where no
    value says anything (all zeros or powers of two). Values that are not finite do not count.
    """
    dtypes = {tensor.dtype for tensor in rows}
    if len(dtypes) != 1 or (dtype := dtypes.pop()) not in _INT_OF:
        return None
    bits = 0
    for tensor in rows:
        for span in row_spans(*tensor.shape):
            part = tensor[span]
            part = torch.where(torch.isfinite(part), part, torch.zeros_like(part)).contiguous()
            bits |= int(np.bitwise_or.reduce(part.view(_INT_OF[dtype]).flatten().numpy()))
    stored = SIGNIFICAND_BITS[full_name(str(dtype))] - 1
    fraction = bits & ((1 << stored) - 1)
    return stored + 1 - ((fraction & -fraction).bit_length() - 1) if fraction else None
