"""The spread of sound engines' comparisons as one SVG file: how many need more than a given k."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING

from harness.trial.drawing import Frame, colour

if TYPE_CHECKING:
    from collections.abc import Sequence

    from markupsafe import Markup

    from harness.trial.spread import Spread

__all__ = ["spread_figure"]

_FRAME = Frame(height=280, left=64)
_LARGEST = 4.0
_STEPS = 160


def spread_figure(some: Sequence[Spread]) -> Markup:
    """One falling line per dtype, the share of comparisons above each k (logarithmic), and a rule at the k in use."""
    least = min((1 / len(spread.comparisons) for spread in some), default=0.1)
    decades = max(math.ceil(-math.log10(least)), 1)
    parts = [_axes(decades)]
    parts += [_rule(k, decades) for k in sorted({one.k for spread in some for one in spread.comparisons[:1]})]
    for number, spread in enumerate(some):
        dash = f' stroke-dasharray="{8 * number} 3"' if number else ""
        label = f"{spread.dtype}: {len(spread.comparisons)} comparisons of {spread.cases} cases"
        parts += [
            f'<path d="{_path(spread, decades)}" fill="none" stroke="{colour(number)}" stroke-width="2"{dash}/>',
            _FRAME.key(number, label, dash),
        ]
    title = "Share of comparisons of sound engines that would be red, by the constant k"
    return _FRAME.figure(title, parts, len(some))


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
    return _FRAME.x(k / _LARGEST)


def _y(share: float, decades: int) -> float:
    return _FRAME.top - math.log10(share) / decades * _FRAME.tall


def _rule(k: float, decades: int) -> str:
    if not 0 < k <= _LARGEST:
        return ""
    low, high, x = _y(10.0**-decades, decades), _y(1.0, decades), _x(k)
    line = f'<path class="k" d="M{x:.1f} {high:.1f}V{low:.1f}"/>'
    return f'{line}<text x="{x + 5:.1f}" y="{high + 12:.1f}">k = {k:g}</text>'


def _axes(decades: int) -> str:
    levels = [(_y(share, decades), share) for share in (10.0**-power for power in range(decades + 1))]
    ticks = _FRAME.ticks(
        ((_x(k), f"{k:g}") for k in (0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4)),
        "k: share of comparisons with err(E) above k times max(err(R), floor)",
    )
    labels = _FRAME.levels((y, f"{100 * share:g} %") for y, share in levels)
    return f"{_FRAME.grid(y for y, _ in levels)}{labels}{ticks}"
