"""The figure: each point's error over its bound, for each probe, as one SVG that stands by itself."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from harness.bisect.stages import LOGITS
from harness.points import FIREABLE_TEMPLATES, HookPoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["MOST_LINES", "probe_figure"]

_WIDTH, _LEFT, _RIGHT, _TOP, _HEIGHT, _FOOT = 760, 72, 12, 12, 220, 34
_LEGEND_LINE = 17
#: Most probes drawn; more lines than this cannot be told apart.
MOST_LINES = 6
_SPACING = 30  # px between labels of blocks
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
#: Chosen to differ in lightness too, on white and on black.
_COLOURS = ("#d55e00", "#0072b2", "#009e73", "#b8860b", "#a05195", "#6b7280")
_STYLE = (
    ".bisect text{font:12px system-ui,sans-serif;fill:#444}.bisect .grid{stroke:#8884;fill:none}"
    ".bisect .bound{stroke:#666;stroke-dasharray:5 4;fill:none}.bisect .line{fill:none;stroke-width:1.6}"
    ".bisect .middle{text-anchor:middle}.bisect .end{text-anchor:end}.bisect .start{text-anchor:start}"
    ".bisect .wide{stroke-width:6;stroke-opacity:.35}"
    "@media(prefers-color-scheme:dark){.bisect text{fill:#ccc}.bisect .bound{stroke:#aaa}}"
)


def probe_figure(
    probes: Sequence[tuple[Sequence[str], Mapping[str, float]]],
    hooks: Sequence[str],
    sites: Sequence[str] = (),
) -> Markup:
    """A line per probe over the points in forward order, on a log scale; rings where the truth was put in.

    Args:
        probes: where the truth was put in, and point → error in multiples of its bound; at most
            :data:`MOST_LINES` are drawn.
        hooks: points in forward order; drawn are the usual five kinds, and ``sites``.
        sites: points that are wrong by themselves.
    """
    drawn = [hook for hook in hooks if hook in sites or _usual(hook)]
    probes = list(probes)[:MOST_LINES]
    if not drawn or not probes:
        return Markup()
    logs = [
        math.log10(shares[hook])
        for _, shares in probes
        for hook in drawn
        if hook in shares and math.isfinite(shares[hook]) and shares[hook] > 0
    ]
    low, high = min(-2, math.floor(min(logs, default=0))), max(1, math.ceil(max(logs, default=0)))
    low = max(low, -6)
    foot = _HEIGHT - _FOOT

    def x(index: int) -> float:
        return round(_LEFT + (index + 0.5) / len(drawn) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(share: float) -> float:
        if not math.isfinite(share):
            return _TOP
        level = (math.log10(share) - low) / (high - low) if share > 0 else 0
        return round(foot - min(max(level, 0), 1) * (foot - _TOP), 1)

    parts = [_grid(low, high, y), _blocks(drawn, x, foot)]
    for number, (healed, shares) in enumerate(probes):
        colour = _COLOURS[number]
        points = " ".join(f"{x(i)},{y(shares[hook])}" for i, hook in enumerate(drawn) if hook in shares)
        rings = "".join(
            f'<circle cx="{x(i)}" cy="{y(shares[hook])}" r="4.5" fill="none" stroke="{colour}" stroke-width="2"/>'
            for i, hook in enumerate(drawn)
            if hook in healed
        )
        marks = "".join(
            f'<circle cx="{x(i)}" cy="{y(shares[hook])}" r="2.2" fill="{colour}"/>'
            for i, hook in enumerate(drawn)
            if hook in shares
        )
        top = _HEIGHT + 6 + number * _LEGEND_LINE
        wide = "" if healed else " wide"  # others run along it for a part of the way
        name = f"the truth put in at {' and '.join(healed)}" if healed else "as it is"
        parts.append(
            f'<polyline class="line{wide}" stroke="{colour}" points="{points}"/>{marks}{rings}'
            f'<path stroke="{colour}" stroke-width="3" d="M{_LEFT} {top}h18"/>'
            f'<text class="start" x="{_LEFT + 26}" y="{top + 4}">{escape(name)}</text>'
        )
    height = _HEIGHT + 8 + len(probes) * _LEGEND_LINE
    label = f"Error over bound at {len(drawn)} points, {len(probes)} probes"
    return Markup(  # noqa: S704 - every text in it was escaped
        f'<svg xmlns="http://www.w3.org/2000/svg" class="bisect" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{label}"><style>{_STYLE}</style>{"".join(parts)}</svg>'
    )


def _usual(hook: str) -> bool:
    return hook == LOGITS or HookPoint.parse(hook).template in FIREABLE_TEMPLATES


def _grid(low: int, high: int, y: Callable[[float], float]) -> str:
    step = 1 if high - low <= 6 else 2
    decades = [d for d in range(low, high + 1) if (d - low) % step == 0 or d == 0]
    lines = "".join(f"M{_LEFT} {y(10.0**d)}H{_WIDTH - _RIGHT}" for d in decades if d)
    labels = "".join(
        f'<text class="end" x="{_LEFT - 6}" y="{y(10.0**d) + 4}">10{str(d).translate(_SUPERSCRIPT)}</text>'
        for d in decades
        if d
    )
    middle = (_TOP + _HEIGHT - _FOOT) // 2
    return (
        f'<path class="grid" d="{lines}"/>{labels}<path class="bound" d="M{_LEFT} {y(1)}H{_WIDTH - _RIGHT}"/>'
        f'<text class="end" x="{_LEFT - 6}" y="{y(1) + 4}">bound</text>'
        f'<text class="middle" x="13" y="{middle}" transform="rotate(-90 13 {middle})">error ÷ bound</text>'
    )


def _blocks(drawn: Sequence[str], x: Callable[[int], float], foot: int) -> str:
    where: dict[int, list[float]] = {}
    for index, hook in enumerate(drawn):
        if hook.startswith("blocks."):
            where.setdefault(HookPoint.parse(hook).block, []).append(x(index))
    texts, free = [], -math.inf
    for block, places in where.items():
        at = round(sum(places) / len(places), 1)
        if at >= free:
            texts.append(f'<text class="middle" x="{at}" y="{foot + 15}">{block}</text>')
            free = at + _SPACING
    middle = (_LEFT + _WIDTH - _RIGHT) // 2
    return f'{"".join(texts)}<text class="middle" x="{middle}" y="{foot + 30}">block</text>'
