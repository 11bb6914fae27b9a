"""Small figures for pages about several runs, as inline SVG: how a value went, and one run's errors over another's."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["shares_figure", "sparkline"]

_WIDTH, _HEIGHT, _PAD = 132, 26, 3
_SIZE, _EDGE, _RIM, _MOST = 380, 34, 8, 1.2  # px of the drawing and its margins; largest share drawn
_CELLS = 60
_TICKS = (0.0, 0.5, 1.0)
#: Hooks in a cell from which on it is drawn darker.
_LEVELS = (1, 4, 16, 64)


def sparkline(values: Sequence[float], label: str, *, limit: float | None = None) -> Markup:
    """A value from run to run, from 0 up to its largest; a run without one leaves a gap, an infinite one is on top.

    Args:
        values: one per run, oldest first; NaN where there was none.
        label: what it says to who cannot see it.
        limit: drawn as a line across where the values come anywhere near it.
    """
    finite = [value for value in values if math.isfinite(value)]
    known = sum(not math.isnan(value) for value in values)
    if not known or (known == 1 and limit is None):  # one value without a scale says nothing
        return Markup()
    top = max(finite, default=0.0)
    if limit is not None and (top > limit / 2 or len(finite) < known):
        top = max(top, limit)
    top = top or 1.0
    step = (_WIDTH - 2 * _PAD) / max(len(values) - 1, 1)
    places: list[tuple[float, float] | None] = [
        None
        if math.isnan(value)
        else (_PAD + step * i, _HEIGHT - _PAD - min(value / top, 1.0) * (_HEIGHT - 2 * _PAD))
        for i, value in enumerate(values)
    ]
    parts = [f'<path d="{_line(places)}"/>', *_lone(places)]
    last = next(place for place in reversed(places) if place is not None)
    parts.append(f'<circle cx="{last[0]:.0f}" cy="{last[1]:.1f}" r="2.5"/>')
    if limit is not None and top >= limit:
        height = _HEIGHT - _PAD - limit / top * (_HEIGHT - 2 * _PAD)
        parts.insert(0, f'<path class="limit" d="M0 {height:.1f}H{_WIDTH}"/>')
    return Markup(  # noqa: S704 - the only text in it was escaped
        f'<svg class="spark" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )


def _line(places: Sequence[tuple[float, float] | None]) -> str:
    path, pen = "", "M"
    for place in places:
        if place is None:
            pen = "M"
            continue
        path += f"{pen}{place[0]:.0f} {place[1]:.1f}"
        pen = "L"
    return path


def _lone(places: Sequence[tuple[float, float] | None]) -> list[str]:
    """Dots for values between two gaps, through which no line goes."""
    around = [None, *places, None]
    return [
        f'<circle cx="{place[0]:.0f}" cy="{place[1]:.1f}" r="1.5"/>'
        for i, place in enumerate(around)
        if place is not None and around[i - 1] is None and around[i + 1] is None
    ]


def shares_figure(figures: Sequence[tuple[float, float, bool]], limit: Callable[[float], float]) -> Markup:
    """Shares of the bound, after over before: shaded by the number of hooks, those that grew as marks on top.

    Args:
        figures: (before, after, whether it grew) of each hook.
        limit: the largest share after that is no growth from a share before.
    """
    if not figures:
        return Markup()
    cells: Counter[tuple[int, int]] = Counter()
    grown: dict[tuple[int, int], None] = {}
    for before, after, has_grown in figures:
        if has_grown:
            grown[_place(before), _SIZE - _place(after)] = None
        else:
            cells[_cell(before), _cell(after)] += 1
    side = (_SIZE - _EDGE - _RIM) / _CELLS
    shades: dict[int, str] = {}
    for (x, y), n in sorted(cells.items()):
        level = sum(n >= least for least in _LEVELS)
        left, top = _EDGE + x * side, _SIZE - _EDGE - (y + 1) * side
        shades[level] = shades.get(level, "") + f"M{left:.1f} {top:.1f}h{side:.1f}v{side:.1f}h-{side:.1f}z"
    parts = [
        *_frame(),
        *(f'<path class="level{level}" d="{path}"/>' for level, path in sorted(shades.items())),
        f'<path class="equal" d="M{_place(0)} {_SIZE - _place(0)}L{_place(_MOST)} {_SIZE - _place(_MOST)}"/>',
        f'<path class="limit" d="{_limit_line(limit)}"/>',
        *(f'<circle class="grown" cx="{x}" cy="{y}" r="4"/>' for x, y in grown),
    ]
    n_grown = sum(has_grown for _, _, has_grown in figures)
    label = f"Shares of the bound of {len(figures)} hooks, after over before; {n_grown} grew"
    return Markup(  # noqa: S704 - the only text in it was escaped
        f'<svg class="shares" viewBox="0 0 {_SIZE} {_SIZE}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )


def _place(share: float) -> int:
    """Pixels from the left, or from below, of a share; what is over the edge lies on it."""
    inside = min(max(share, 0.0), _MOST) / _MOST
    return round(_EDGE + inside * (_SIZE - _EDGE - _RIM))


def _cell(share: float) -> int:
    return min(int(min(max(share, 0.0), _MOST) / _MOST * _CELLS), _CELLS - 1)


def _frame() -> list[str]:
    low, high = _place(0), _SIZE - _place(0)
    parts = []
    for tick in _TICKS:
        at = _place(tick)
        parts.append(f'<path class="grid" d="M{at} {high}V{_RIM}M{low} {_SIZE - at}H{_SIZE - _RIM}"/>')
        parts.append(f'<text x="{at}" y="{high + 13}">{tick:g}</text>')
        parts.append(f'<text class="end" x="{low - 5}" y="{_SIZE - at + 4}">{tick:g}</text>')
    middle = (_SIZE + _EDGE) // 2
    parts.append(f'<text x="{middle}" y="{_SIZE - 6}">share of the bound before</text>')
    parts.append(f'<text x="10" y="{middle - 20}" transform="rotate(-90 10 {middle - 20})">after</text>')
    return parts


def _limit_line(limit: Callable[[float], float]) -> str:
    shares = [i / 20 * _MOST for i in range(21)]
    drawn = [(share, limit(share)) for share in shares if limit(share) <= _MOST]
    return "".join(
        f"{'L' if i else 'M'}{_place(before)} {_SIZE - _place(after)}"
        for i, (before, after) in enumerate(drawn)
    )
