"""Which rows and channels a failure is in, in words: "rows from 64 on", "the decode rows", "only channels 32 to 63"."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from harness.parity.types import RowRef

__all__ = ["ALL", "ONE", "channels", "describe"]

ALL = "all rows"
ONE = "one row"

#: A pattern names the failing rows if it holds all of them and at most this share of others: a fault is not larger than
#: the noise in every single row.
_COVER = 0.9
#: So much of a failure's energy, at each end, may lie outside the channels it is said to be in.
_TAIL = 0.005


def _suffix(position: int) -> Callable[[int, int], bool]:
    return lambda _, p: p >= position


def _band(first: int, last: int) -> Callable[[int, int], bool]:
    return lambda _, p: first <= p <= last


def _phases(prompt_lengths: Sequence[int] | None) -> Iterator[tuple[str, Callable[[int, int], bool]]]:
    if prompt_lengths is not None:
        yield "the decode rows", lambda q, p: p >= prompt_lengths[q]
        yield "the prompt's rows", lambda q, p: p < prompt_lengths[q]


def _chunks(ends: Sequence[int], step: int | None) -> Iterator[tuple[str, Callable[[int, int], bool]]]:
    """Patterns of a prompt served ``step`` rows at a time; ``ends`` are the prompt rows per request."""
    if step is not None and max(ends) > step:
        yield "the rows of each prompt's last chunk", lambda q, p: (ends[q] - 1) // step * step <= p < ends[q]
        yield f"the rows of the first chunk (up to {step - 1})", _band(0, step - 1)
        yield f"all rows but the first chunk's (from {step} on)", lambda q, p: step <= p < ends[q]


def _positions(
    rows: Sequence[RowRef], lengths: Sequence[int], step: int | None
) -> Iterator[tuple[str, Callable[[int, int], bool]]]:
    """Patterns of position alone."""
    positions = sorted({row.position for row in rows})
    first, last = positions[0], positions[-1]
    if first == last == 0:
        yield "the first row of every request", _band(0, 0)
    yield "the last row of every request", lambda q, p: p == lengths[q] - 1
    yield f"rows from {first} on", _suffix(first)
    yield f"rows up to {last}", _band(0, last)
    yield (f"rows {first} to {last}" if first < last else f"row {first} of every request"), _band(first, last)
    if len(positions) > 2 and (stride := math.gcd(*(p - first for p in positions[1:]))) > 1:
        note = ", once per step" if stride == step else ""
        yield (
            f"every row with position % {stride} == {first % stride}{note}",
            lambda _, p: p % stride == first % stride,
        )


def describe(
    rows: Sequence[RowRef],
    lengths: Sequence[int],
    *,
    prompt_lengths: Sequence[int] | None = None,
    step: int | None = None,
) -> str:
    """Name the failing rows by the simplest pattern that holds just them, or else them and hardly any other.

    Args:
        rows: the failing rows, at least one.
        lengths: rows per request.
        prompt_lengths: prompt rows per request, where known.
        step: rows per step, where known.
    """
    every = [(q, p) for q, n in enumerate(lengths) for p in range(n)]
    failing = {(row.request, row.position) for row in rows}
    if len(failing) == len(every):
        return ALL
    if len(failing) == 1:
        return ONE
    ends = list(lengths if prompt_lengths is None else prompt_lengths)
    requests = sorted({q for q, _ in failing})
    inside = [(q, p) for q, p in every if q in requests]
    some_only = len(requests) < sum(n > 0 for n in lengths)
    whole = f"{ALL} of {_requests(requests)}"
    patterns = [
        *([(whole, _of(requests))] if some_only else []),
        *_phases(prompt_lengths),
        *_chunks(ends, step),
        *_positions(rows, lengths, step),
    ]
    pools = [(every, ""), *([(inside, f", {_requests(requests)} only")] if some_only else [])]
    nearly = []
    for text, test in patterns:
        for pool, suffix in pools:
            held = [row for row in pool if test(*row)]
            if failing == set(held):
                return text + suffix
            if failing.issubset(held) and len(failing) >= _COVER * len(held):
                nearly.append(text + suffix)
    if len(failing) >= _COVER * len(every):
        return f"{len(failing)} of all {len(every)} rows"
    if nearly:
        return nearly[0]
    inside_phase = next(
        (text for text, test in _phases(prompt_lengths) if all(test(*row) for row in failing)), ""
    )
    return f"{len(failing)} of {len(every)} rows" + (f", all among {inside_phase}" if inside_phase else "")


def _of(requests: Sequence[int]) -> Callable[[int, int], bool]:
    return lambda q, _: q in requests


def _requests(requests: Sequence[int]) -> str:
    shown = ", ".join(map(str, requests[:4])) + (", …" if len(requests) > 4 else "")
    return f"request{'s' if len(requests) > 1 else ''} {shown}"


def channels(difference: torch.Tensor, scale: torch.Tensor) -> str:
    """Name the channel range that holds nearly all of an error, or nothing where it is spread over more than half.

    Args:
        difference: (n, width), E - T of the failing rows.
        scale: (n,), norms of T.
    """
    width = difference.shape[1]
    energy = (difference / scale.clamp(min=torch.finfo(torch.float64).tiny).unsqueeze(1)).square().sum(dim=0)
    total = float(energy.sum())
    if width < 2 or not math.isfinite(total) or total == 0:
        return ""
    cumulative = energy.cumsum(0) / total
    first = int((cumulative > _TAIL).nonzero()[0])
    last = int((cumulative >= 1 - _TAIL).nonzero()[0])
    if last - first + 1 > width // 2:
        return ""
    return f"only channel {first}" if first == last else f"only channels {first} to {last}"
