"""Kinds of faults that can be planted in captured rows: which rows they touch, and in which direction they push.

A fault of size *s* moves each row that it touches by *s* times that row's norm. So a size is a relative error, the same
unit as err(E), whatever the hook's magnitude and however few channels the fault sits in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from harness.points import BLOCK_OUT, HookPoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["KINDS", "Kind", "Layout", "Planted", "plant"]

#: Of all captures: hook → per request (n_i, width).
Captured = dict[str, list[torch.Tensor]]


@dataclass(frozen=True)
class Layout:
    """What a call looked like.

    Attributes:
        prompt_lengths: prompt rows per request; the rest are decode rows.
        lengths: rows per request.
        step: most tokens of one step.
        head_dim: channels of one head.
    """

    prompt_lengths: tuple[int, ...]
    lengths: tuple[int, ...]
    step: int
    head_dim: int

    def longest(self) -> int:
        """The request with the most prompt rows."""
        return max(range(len(self.prompt_lengths)), key=self.prompt_lengths.__getitem__)


#: Request → its rows that are touched, (n_i,) bool; a request that is not there is left alone.
Rows = dict[int, torch.Tensor]


def _mask(length: int, rows: slice | int) -> torch.Tensor:
    mask = torch.zeros(length, dtype=torch.bool)
    mask[rows] = True
    return mask


def _pick(count: int, random: torch.Generator) -> int:
    return int(torch.randint(count, (1,), generator=random))


def _everywhere(layout: Layout, _: torch.Generator) -> Rows:
    return {i: _mask(n, slice(None)) for i, n in enumerate(layout.lengths)}


def _one_position(layout: Layout, random: torch.Generator) -> Rows:
    position = 1 + _pick(min(layout.lengths) - 1, random) if min(layout.lengths) > 1 else 0
    return {i: _mask(n, position) for i, n in enumerate(layout.lengths)}


def _one_row(layout: Layout, random: torch.Generator) -> Rows:
    request = _pick(len(layout.lengths), random)
    return {request: _mask(layout.lengths[request], _pick(layout.lengths[request], random))}


def _one_request(layout: Layout, random: torch.Generator) -> Rows:
    request = _pick(len(layout.lengths), random)
    return {request: _mask(layout.lengths[request], slice(None))}


def _last_chunk(layout: Layout, _: torch.Generator) -> Rows:
    request = layout.longest()
    prompt = layout.prompt_lengths[request]
    return {request: _mask(layout.lengths[request], slice((prompt - 1) // layout.step * layout.step, prompt))}


def _decode(layout: Layout, _: torch.Generator) -> Rows:
    return {
        i: _mask(n, slice(prompt, None))
        for i, (prompt, n) in enumerate(zip(layout.prompt_lengths, layout.lengths, strict=True))
        if n > prompt
    }


def _unit(rows: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = rows.norm(dim=1, keepdim=True)
    return rows / norms.clamp(min=torch.finfo(rows.dtype).tiny)


def _any(rows: torch.Tensor, _: Layout, random: torch.Generator) -> torch.Tensor:
    return _unit(torch.randn(rows.shape, generator=random, dtype=torch.float64))


def _itself(rows: torch.Tensor, _: Layout, __: torch.Generator) -> torch.Tensor:
    return _unit(rows)


def _span(rows: torch.Tensor, width: int, random: torch.Generator) -> torch.Tensor:
    """A random direction in ``width`` neighbouring channels, the same ones of all rows."""
    begin = width * _pick(max(rows.shape[1] // width, 1), random)
    direction = torch.zeros_like(rows)
    direction[:, begin : begin + width] = torch.randn(
        direction[:, begin : begin + width].shape, generator=random, dtype=torch.float64
    )
    return _unit(direction)


def _channel(rows: torch.Tensor, _: Layout, random: torch.Generator) -> torch.Tensor:
    return _span(rows, 1, random)


def _head(rows: torch.Tensor, layout: Layout, random: torch.Generator) -> torch.Tensor:
    return _span(rows, min(layout.head_dim, rows.shape[1]), random)


def _share(rows: torch.Tensor, _: Layout, random: torch.Generator) -> torch.Tensor:
    return _span(rows, max(rows.shape[1] // 2, 1), random)


def _others(rows: torch.Tensor, _: Layout, __: torch.Generator) -> torch.Tensor:
    """Each row's push is what the next touched row holds: another position's, or another request's."""
    return _unit(rows.roll(-1, dims=0))


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        name: for tables.
        rows: which rows it touches.
        direction: where it pushes each: clean rows (n, width) fp64 → (n, width) fp64 of norm 1.
        carried: whether the later blocks' outputs carry the same push on, as a residual stream does.
        drifts: whether it happens again in every later block, and adds up.
    """

    name: str
    rows: Callable[[Layout, torch.Generator], Rows]
    direction: Callable[[torch.Tensor, Layout, torch.Generator], torch.Tensor]
    carried: bool = False
    drifts: bool = False

    def fits(self, hook: str) -> bool:
        """Whether it can be planted at a hook: what is carried on sits in the residual stream."""
        return not (self.carried or self.drifts) or HookPoint.parse(hook).template == BLOCK_OUT


KINDS = (
    Kind("one hook, every row", _everywhere, _any),
    Kind("wrong scale", _everywhere, _itself),
    Kind("one channel", _everywhere, _channel),
    Kind("one head's channels", _everywhere, _head),
    Kind("one of two ranks' channels", _everywhere, _share),
    Kind("the next row leaks in", _everywhere, _others),
    Kind("one position of every request", _one_position, _any),
    Kind("one request", _one_request, _any),
    Kind("one row", _one_row, _any),
    Kind("one channel of one row", _one_row, _channel),
    Kind("the last chunk only", _last_chunk, _any),
    Kind("decode rows only", _decode, _any),
    Kind("carried on by the stream", _everywhere, _any, carried=True),
    Kind("drift in every layer", _everywhere, _itself, carried=True, drifts=True),
)


@dataclass(frozen=True)
class Planted:
    """Captures with a fault in them.

    Attributes:
        captured: the clean rows but for the hooks it touches.
        rows: which rows it touches; none where the call has none of that kind, and then nothing is planted.
        size: what became of the size there after rounding to the engine's dtype: the root mean square, over those
            rows, of how far each was moved relative to its norm.
    """

    captured: Captured
    rows: Rows
    size: float


def plant(
    kind: Kind,
    captured: Mapping[str, Sequence[torch.Tensor]],
    hook: str,
    size: float,
    layout: Layout,
    *,
    seed: int = 0,
) -> Planted:
    """Plant a fault; the captures given are left as they are.

    Args:
        kind: of fault.
        captured: clean rows, hook → one (n_i, width) tensor per request.
        hook: where it begins.
        size: relative to each touched row's norm.
        layout: of the call.
        seed: of its rows, channels and direction.
    """
    spoilt = {name: list(rows) for name, rows in captured.items()}
    random = torch.Generator().manual_seed(seed)
    rows = kind.rows(layout, random)
    if not rows:
        return Planted(spoilt, rows, 0.0)
    chosen = torch.cat([captured[hook][i][mask].double() for i, mask in rows.items()])
    push = size * chosen.norm(dim=1, keepdim=True) * kind.direction(chosen, layout, random)
    for times, name in enumerate(_reached(kind, hook, captured), start=1):
        if kind.drifts:  # of what the stream is there; the drifts of the blocks before are in it
            here = torch.cat([captured[name][i][mask].double() for i, mask in rows.items()])
            push = ((1 + size) ** times - 1) * here
        _add(spoilt[name], rows, push)
    moved = torch.cat([spoilt[hook][i][mask].double() for i, mask in rows.items()]) - chosen
    norms = chosen.norm(dim=1)
    relative = torch.where(norms > 0, moved.norm(dim=1) / norms, 0.0)
    return Planted(spoilt, rows, float(relative.square().mean().sqrt()))


def _reached(kind: Kind, hook: str, captured: Mapping[str, Sequence[torch.Tensor]]) -> list[str]:
    """The hooks it touches, the one it begins at first."""
    if not (kind.carried or kind.drifts):
        return [hook]
    first = HookPoint.parse(hook)
    points = sorted(HookPoint.parse(name) for name in captured)
    return [point.name for point in points if point >= first and point.template == BLOCK_OUT]


def _add(requests: list[torch.Tensor], rows: Rows, push: torch.Tensor) -> None:
    at = 0
    for request, mask in rows.items():
        count = int(mask.sum())
        tensor = requests[request].clone()
        tensor[mask] = (tensor[mask].double() + push[at : at + count]).to(tensor.dtype)
        requests[request] = tensor
        at += count
