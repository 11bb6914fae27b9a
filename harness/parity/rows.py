"""What is compared: captures as one tensor per request, looked at as one long list of rows, and checked before use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch

from harness.errors import CaptureError, UsageError
from harness.parity.metrics import CHUNK, row_spans
from harness.parity.types import RowRef
from harness.points import HookPoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "Captures",
    "Rows",
    "check",
    "depth_of",
    "forward_order",
    "gather",
    "lengths_of",
    "ref_of",
    "spans",
]

#: One (n_i, width) tensor per request.
Rows: TypeAlias = Sequence[torch.Tensor]
#: Hook name → rows.
Captures: TypeAlias = Mapping[str, Rows]


def _place(name: str) -> tuple[int, int, int]:
    try:
        point = HookPoint.parse(name)
    except UsageError:  # logits, say: computed after every hook point
        return (3, 0, 0)
    return (point.stage, point.block, point.within)


def forward_order(names: Iterable[str]) -> list[str]:
    """Sort names as the forward computes them; a name that is no hook point (``logits``) comes last."""
    return sorted(names, key=lambda name: (_place(name), name))


def depth_of(name: str, n_layers: int) -> int:
    """How many blocks' rounding the value carries; all of them for a name that is no hook point."""
    try:
        return HookPoint.parse(name).depth(n_layers)
    except UsageError:
        return n_layers


def lengths_of(rows: Rows) -> tuple[int, ...]:
    """Rows per request."""
    return tuple(int(tensor.shape[0]) for tensor in rows)


def ref_of(index: int, lengths: Sequence[int]) -> RowRef:
    """The request and position of the ``index``-th row of all."""
    position = index
    for request, length in enumerate(lengths):
        if position < length:
            return RowRef(request, position)
        position -= length
    msg = f"row {index} past the end: there are {sum(lengths)}"
    raise IndexError(msg)


def spans(lengths: Sequence[int], width: int) -> Iterator[list[tuple[int, slice]]]:
    """Cut all requests' rows into groups of at most :data:`~harness.parity.metrics.CHUNK` elements.

    Yields:
        For each group its parts (request, rows); short requests share a group, long ones are cut.
    """
    group: list[tuple[int, slice]] = []
    elements = 0
    for request, length in enumerate(lengths):
        for span in row_spans(length, width):
            size = (span.stop - span.start) * width
            if group and elements + size > CHUNK:
                yield group
                group, elements = [], 0
            group.append((request, span))
            elements += size
    if group:
        yield group


def gather(rows: Rows, group: Iterable[tuple[int, slice]]) -> torch.Tensor:
    """The rows of one group as one (n, width) fp64 tensor."""
    return torch.cat([rows[request][span] for request, span in group]).double()


def _check_hook(hook: str, side: str, rows: Rows, truth: Rows) -> None:
    if len(rows) != len(truth):
        msg = f"{hook}: {side} has {len(rows)} requests, the truth {len(truth)}"
        raise CaptureError(msg)
    for request, (tensor, expected) in enumerate(zip(rows, truth, strict=True)):
        where = f"{hook}, request {request}"
        if tensor.ndim != 2:
            msg = f"{where}: {side} holds a tensor of shape {tuple(tensor.shape)}; rows are (n, width)"
            raise CaptureError(msg)
        if tensor.shape[0] != expected.shape[0]:
            msg = f"{where}: {side} has {tensor.shape[0]} rows, the truth {expected.shape[0]}"
            raise CaptureError(msg)
        if tensor.shape[1] != expected.shape[1]:
            msg = f"{where}: {side} has width {tensor.shape[1]}, the truth {expected.shape[1]}"
            raise CaptureError(msg)


def _check_truth(hook: str, truth: Rows) -> None:
    for request, tensor in enumerate(truth):
        if tensor.ndim != 2 or tensor.shape[1] == 0:
            shape = tuple(tensor.shape)
            msg = f"{hook}, request {request}: the truth holds a tensor of shape {shape}; rows are (n, width)"
            raise CaptureError(msg)
        for span in row_spans(*tensor.shape):
            bad = ~torch.isfinite(tensor[span]).all(dim=1)
            if bool(bad.any()):
                row = span.start + int(bad.nonzero()[0])
                where = f"{hook}, request {request}, position {row}"
                msg = f"{where}: the truth itself is not finite, nothing can be judged"
                raise CaptureError(msg)
    if len({tensor.shape[1] for tensor in truth}) > 1:
        msg = f"{hook}: the truth's requests have different widths"
        raise CaptureError(msg)
    if not sum(lengths_of(truth)):
        msg = f"{hook}: no rows; a comparison of nothing is not a pass"
        raise CaptureError(msg)


def check(
    engine: Captures, truth: Captures, same: Sequence[Captures], hooks: Sequence[str] | None
) -> list[str]:
    """Check that everything to be compared is there and has the truth's shape.

    Args:
        engine: what is judged.
        truth: T.
        same: the realisations of R.
        hooks: what to compare; None for all of the truth's, and then the engine may not have others.

    Returns:
        The hooks to compare, in forward order.

    Raises:
        CaptureError: a hook, request or row is missing or surplus, a width differs, the truth is not finite, or there
            is nothing to compare. Nothing is broadcast.
    """
    sides = [("the engine", engine), *(("the reference at the engine's dtype", side) for side in same)]
    wanted = list(truth if hooks is None else hooks)
    if not wanted or not same:
        msg = (
            "nothing to compare: no hooks"
            if not wanted
            else "no reference at the engine's dtype to compare with"
        )
        raise CaptureError(msg)
    for side, captures in [("the truth", truth), *sides]:
        if missing := [hook for hook in wanted if hook not in captures]:
            msg = (
                f"{side} lacks {len(missing)} of {len(wanted)} hooks: {', '.join(forward_order(missing)[:5])}"
            )
            raise CaptureError(msg)
    if hooks is None and (surplus := [hook for hook in engine if hook not in truth]):
        msg = f"the engine captured hooks the truth lacks, which nobody would judge: {', '.join(surplus[:5])}"
        raise CaptureError(msg)
    for hook in wanted:
        _check_truth(hook, truth[hook])
        for side, captures in sides:
            _check_hook(hook, side, captures[hook], truth[hook])
    return forward_order(wanted)
