"""The sensitivity curve as one SVG file: share of faults seen against their size in multiples of the noise."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from harness.trial.drawing import Frame, colour
from harness.trial.records import ABOVE, share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from markupsafe import Markup

    from harness.trial.records import Curve
    from harness.trial.sweep import Tried

__all__ = ["EDGES", "sensitivity_figure"]

#: Borders of the points' bins, in multiples of the noise; what is larger is in the last.
EDGES = (0.4, 0.75, 1.25, 1.75, 2.25, 2.75, 3.5, 5.0, 8.0, 16.0, 64.0)
_FRAME = Frame(height=300, left=56)


def sensitivity_figure(curves: Sequence[Curve]) -> Markup:
    """One line per engine: the share of faults that turn the verdict red, and dashed the share with the hook named."""
    parts = [_axes()]
    for number, curve in enumerate(curves):
        parts += [
            _line(_points(curve.tried, named=named), colour(number), dashed=named) for named in (False, True)
        ]
        parts.append(_FRAME.key(number, f"{curve.engine} ({len(curve.tried)} faults)"))
    title = "Share of planted faults that turn the verdict red, by size in multiples of the noise"
    return _FRAME.figure(title, parts, len(curves))


def _points(tried: Sequence[Tried], *, named: bool) -> list[tuple[float, float]]:
    """(multiple, share) per bin that holds any fault; ``named``: seen and with the right hook first."""
    points = []
    for low, high in zip(EDGES, (*EDGES[1:], math.inf), strict=True):
        here = [one for one in tried if low <= one.multiple < high]
        if here:
            middle = math.sqrt(low * high) if math.isfinite(high) else low * 1.4
            seen = share(here, "caught")
            right = sum(one.caught and one.right for one in here) / len(here)
            points.append((middle, right if named else seen))
    return points


def _x(multiple: float) -> float:
    low, high = math.log(EDGES[0]), math.log(EDGES[-1] * 2)
    return _FRAME.x((math.log(multiple) - low) / (high - low))


def _y(part: float) -> float:
    return _FRAME.foot - part * _FRAME.tall


def _line(points: Sequence[tuple[float, float]], stroke: str, *, dashed: bool) -> str:
    path = "L".join(f"{_x(m):.1f} {_y(s):.1f}" for m, s in points)
    dash = ' stroke-dasharray="2 4"' if dashed else ""
    dots = "" if dashed else "".join(f'<circle cx="{_x(m):.1f}" cy="{_y(s):.1f}" r="3"/>' for m, s in points)
    return (
        f'<path d="M{path}" fill="none" stroke="{stroke}" stroke-width="2"{dash}/><g fill="{stroke}">{dots}</g>'
        if points
        else ""
    )


def _axes() -> str:
    grid = _FRAME.grid(_y(part) for part in (0, 0.25, 0.5, 0.75, 1))
    rule = f'<path class="k" d="M{_x(ABOVE):.1f} {_FRAME.top}V{_FRAME.foot}"/>'
    levels = _FRAME.levels((_y(part), f"{part:.0%}") for part in (0, 0.5, 1))
    ticks = _FRAME.ticks(
        ((_x(multiple), f"{multiple:g}") for multiple in (0.5, 1, 2, 3, 5, 10, 30, 100)),
        "size of the fault over the noise of the rows it touches (dotted: seen, and the hook it begins at named first)",
    )
    return f"{grid}{rule}{levels}{ticks}"
