"""The spread of sound engines' comparisons as one SVG file: how many need more than a given k."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from harness.trial.figure import COLOURS, STYLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.trial.spread import Spread

__all__ = ["spread_figure"]

_WIDTH, _HEIGHT = 760, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 20, 74
_LARGEST = 4.0
_STEPS = 160


def spread_figure(some: Sequence[Spread]) -> Markup:
    """One falling line per dtype, the share of comparisons above each k (logarithmic), and a rule at the k in use."""
    least = min((1 / len(spread.comparisons) for spread in some), default=0.1)
    decades = max(math.ceil(-math.log10(least)), 1)
    parts = [f"<style>{STYLE}</style>", _axes(decades)]
    parts += [_rule(k, decades) for k in sorted({one.k for spread in some for one in spread.comparisons[:1]})]
    for number, spread in enumerate(some):
        colour = COLOURS[number % len(COLOURS)]
        dash = f' stroke-dasharray="{8 * number} 3"' if number else ""
        x, y = _LEFT + 8 + number % 2 * 350, _HEIGHT - 28 + number // 2 * 16
        label = f"{spread.dtype}: {len(spread.comparisons)} comparisons of {spread.cases} cases"
        parts.append(
            f'<path d="{_path(spread, decades)}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
            f'<path d="M{x} {y - 4}h18" stroke="{colour}" stroke-width="2"{dash}/>'
            f'<text x="{x + 24}" y="{y}">{escape(label)}</text>'
        )
    height = _HEIGHT + max(0, (len(some) - 1) // 2) * 16
    title = "Share of comparisons of sound engines that would be red, by the constant k"
    return Markup(  # noqa: S704 - every text in it was escaped
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">'
        f"<title>{title}</title>{''.join(parts)}</svg>\n"
    )


def _path(spread: Spread, decades: int) -> str:
    """Ends where no comparison needs more."""
    ordered = sorted(one.needed for one in spread.comparisons)
    points = []
    for step in range(_STEPS + 1):
        k = _LARGEST * step / _STEPS
        above = len(ordered) - bisect_right(ordered, k)
        if not above:
            break
        points.append(f"{_x(k):.1f} {_y(above / len(ordered), decades):.1f}")
    return "M" + "L".join(points) if points else ""


def _x(k: float) -> float:
    return _LEFT + k / _LARGEST * (_WIDTH - _LEFT - _RIGHT)


def _y(share: float, decades: int) -> float:
    return _TOP - math.log10(share) / decades * (_HEIGHT - _BOTTOM - _TOP)


def _rule(k: float, decades: int) -> str:
    if not 0 < k <= _LARGEST:
        return ""
    low, high, x = _y(10.0**-decades, decades), _y(1.0, decades), _x(k)
    line = f'<path class="k" d="M{x:.1f} {high:.1f}V{low:.1f}"/>'
    return f'{line}<text x="{x + 5:.1f}" y="{high + 12:.1f}">k = {k:g}</text>'


def _axes(decades: int) -> str:
    levels = [10.0**-power for power in range(decades + 1)]
    lines = "".join(f"M{_LEFT} {_y(level, decades):.1f}H{_WIDTH - _RIGHT}" for level in levels)
    labels = "".join(
        f'<text x="{_LEFT - 6}" y="{_y(level, decades) + 4:.1f}" text-anchor="end">{100 * level:g} %</text>'
        for level in levels
    )
    ticks = "".join(
        f'<text x="{_x(k):.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{k:g}</text>'
        for k in (0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4)
    )
    name = (
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2:.0f}" y="{_HEIGHT - _BOTTOM + 32}" text-anchor="middle">'
        "k: share of comparisons with err(E) above k times max(err(R), floor)</text>"
    )
    return f'<path class="g" d="{lines}"/>{labels}{ticks}{name}'
