"""The sensitivity curve as one SVG file: share of faults seen against their size in multiples of the noise."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from harness.trial.records import ABOVE, share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.trial.records import Curve
    from harness.trial.sweep import Tried

__all__ = ["COLOURS", "EDGES", "STYLE", "sensitivity_figure"]

#: Borders of the points' bins, in multiples of the noise; what is larger is in the last.
EDGES = (0.4, 0.75, 1.25, 1.75, 2.25, 2.75, 3.5, 5.0, 8.0, 16.0, 64.0)
_WIDTH, _HEIGHT = 760, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 20, 74
#: Told apart by dash and marker too, not by colour alone.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc3399", "#7a5c00", "#555555")
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.g{stroke:#8884;fill:none}.k{stroke:#333;stroke-dasharray:4 3}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.k{stroke:#ddd}}"
)


def sensitivity_figure(curves: Sequence[Curve]) -> Markup:
    """One line per engine: the share of faults that turn the verdict red, and dashed the share with the hook named."""
    parts = [f"<style>{STYLE}</style>", _axes()]
    for number, curve in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        parts += [_line(_points(curve.tried, named=named), colour, dashed=named) for named in (False, True)]
        x, y = _LEFT + 8 + number % 2 * 350, _HEIGHT - 28 + number // 2 * 16
        label = f"{curve.engine} ({len(curve.tried)} faults)"
        parts.append(
            f'<path d="M{x} {y - 4}h18" stroke="{colour}" stroke-width="2"/>'
            f'<text x="{x + 24}" y="{y}">{escape(label)}</text>'
        )
    height = _HEIGHT + max(0, (len(curves) - 1) // 2) * 16
    title = "Share of planted faults that turn the verdict red, by size in multiples of the noise"
    return Markup(  # noqa: S704 - every text in it was escaped
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">'
        f"<title>{title}</title>{''.join(parts)}</svg>\n"
    )


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
    return _LEFT + (math.log(multiple) - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)


def _y(part: float) -> float:
    return _HEIGHT - _BOTTOM - part * (_HEIGHT - _BOTTOM - _TOP)


def _line(points: Sequence[tuple[float, float]], colour: str, *, dashed: bool) -> str:
    path = "L".join(f"{_x(m):.1f} {_y(s):.1f}" for m, s in points)
    dash = ' stroke-dasharray="2 4"' if dashed else ""
    dots = "" if dashed else "".join(f'<circle cx="{_x(m):.1f}" cy="{_y(s):.1f}" r="3"/>' for m, s in points)
    return (
        f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/><g fill="{colour}">{dots}</g>'
        if points
        else ""
    )


def _axes() -> str:
    lines = "".join(f"M{_LEFT} {_y(s):.1f}H{_WIDTH - _RIGHT}" for s in (0, 0.25, 0.5, 0.75, 1))
    labels = "".join(
        f'<text x="{_LEFT - 6}" y="{_y(s) + 4:.1f}" text-anchor="end">{s:.0%}</text>' for s in (0, 0.5, 1)
    )
    ticks = "".join(
        f'<text x="{_x(m):.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{m:g}</text>'
        for m in (0.5, 1, 2, 3, 5, 10, 30, 100)
    )
    rule = f'<path class="k" d="M{_x(ABOVE):.1f} {_TOP}V{_HEIGHT - _BOTTOM}"/>'
    name = (
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2:.0f}" y="{_HEIGHT - _BOTTOM + 32}" text-anchor="middle">'
        "size of the fault over the noise of the rows it touches (dotted: seen, and the hook it begins at named first)"
        "</text>"
    )
    return f'<path class="g" d="{lines}"/>{rule}{labels}{ticks}{name}'
