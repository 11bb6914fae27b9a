"""Error over depth as inline SVG: engine, reference and bound, hook by hook.

Coordinates are whole pixels of a fixed drawing width and colours come from the page's style sheet, which keeps a
figure near two kilobytes and right in light and dark.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from harness.report.numbers import ratio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.store import HookRow

__all__ = ["BLOCK", "depth_figure", "kind_of"]

_WIDTH, _HEIGHT = 720, 236
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 10, 8, 38
BLOCK = re.compile(r"blocks\.(\d+)\.(.*)")
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_MIN_DECADES, _MANY_DECADES = 2, 6
_TICK_SPACING = 34  # px; closer labels would touch


def kind_of(hook: str) -> str:
    """``attn``, ``mlp``, ``block``, ``norm``, ``embed`` or ``other``: what a hook reads, and so its marker."""
    match = BLOCK.fullmatch(hook)
    if match:
        return match[2].split(".")[0] if match[2].startswith(("attn.", "mlp.")) else "block"
    return "norm" if hook.startswith("ln_") else "embed" if hook.startswith("embed") else "other"


@dataclass(frozen=True)
class _Axes:
    """Maps hook number and error to pixels; zeros lie on the lower edge, infinities and NaN on the upper."""

    n: int
    low: int  #: decade of the lower edge
    high: int

    @classmethod
    def around(cls, values: Sequence[float], n: int) -> _Axes:
        logs = [math.log10(value) for value in values if math.isfinite(value) and value > 0] or [0.0]
        low, high = math.floor(min(logs)), math.ceil(max(logs))
        return cls(n, min(low, high - _MIN_DECADES), high)

    def x(self, index: float) -> int:
        return round(_LEFT + (index + 0.5) / self.n * (_WIDTH - _LEFT - _RIGHT))

    def y(self, value: float) -> int:
        if math.isnan(value) or value == math.inf:
            return _TOP
        if value <= 0:
            return _HEIGHT - _BOTTOM
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return round(_HEIGHT - _BOTTOM - min(max(share, 0), 1) * (_HEIGHT - _BOTTOM - _TOP))


def depth_figure(rows: Sequence[HookRow]) -> Markup:
    """Aggregate errors of engine and reference over the hooks in forward order; log scale.

    Two bands lie behind them: up to the bound, and within it up to max(err(R), floor), of which the bound is k times.
    """
    if not rows:
        return Markup()
    axes = _Axes.around(
        [v for row in rows for v in (row.err_engine, row.err_reference, row.bound)], len(rows)
    )
    noise = [max(row.err_reference, row.floor) for row in rows]
    dash = min(max(round(0.8 * (axes.x(1) - axes.x(0))), 4), 20)
    dashes = "".join(
        f"M{axes.x(i) - dash // 2} {axes.y(row.err_reference)}h{dash}" for i, row in enumerate(rows)
    )
    parts = [
        f'<path class=band d="{_steps(axes, [row.bound for row in rows])}"/>',
        f'<path class=noise d="{_steps(axes, noise)}"/>',
        _grid(axes, rows),
        f'<path class=ref d="{dashes}"/>',
    ]
    for failed in (False, True):
        marks: dict[str, str] = {}
        for i, row in enumerate(rows):
            if row.passed != failed:
                kind = kind_of(row.hook)
                marks[kind] = marks.get(kind, "") + _marker(kind, axes.x(i), axes.y(row.err_engine))
        name = "bad " if failed else ""
        parts += [f'<path class="{name}m-{kind}" d="{path}"/>' for kind, path in marks.items()]
    parts.append(_first_failure(axes, rows))
    worst = max(rows, key=lambda row: row.badness)
    label = f"Error over depth, {len(rows)} hooks; worst {ratio(worst.ratio)} of its bound at {worst.hook}"
    return Markup(  # noqa: S704 - every text in it was escaped
        f'<svg class=depth viewBox="0 0 {_WIDTH} {_HEIGHT}" data-box="{_LEFT} {_WIDTH - _RIGHT} {_TOP} '
        f'{_HEIGHT - _BOTTOM}" data-n={len(rows)} role=img aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def _steps(axes: _Axes, values: Sequence[float]) -> str:
    """The outline of a band from the lower edge up to a value per hook."""
    foot = _HEIGHT - _BOTTOM
    steps = "".join(f"V{axes.y(value)}H{axes.x(i + 0.5)}" for i, value in enumerate(values))
    return f"M{axes.x(-0.5)} {foot}{steps}V{foot}z"


def _marker(kind: str, x: int, y: int) -> str:
    """A shape per kind: triangle, square, dot (the style sheet rounds a line of no length), diamond."""
    if kind == "attn":
        return f"M{x} {y - 4}l4 7h-8z"
    if kind == "mlp":
        return f"M{x - 3} {y - 3}h6v6h-6z"
    if kind == "block":
        return f"M{x} {y}h0"
    return f"M{x} {y - 5}l5 5-5 5-5-5z"


def _grid(axes: _Axes, rows: Sequence[HookRow]) -> str:
    """Decade lines with labels, and the block numbers below."""
    step = 2 if axes.high - axes.low > _MANY_DECADES else 1
    decades = range(axes.low, axes.high + 1, step)
    lines = "".join(f"M{_LEFT} {axes.y(10.0**d)}H{_WIDTH - _RIGHT}" for d in decades)
    labels = "".join(
        f"<text x={_LEFT - 6} y={axes.y(10.0**d) + 4} class=end>10{str(d).translate(_SUPERSCRIPT)}</text>"
        for d in decades
    )
    middle = (_TOP + _HEIGHT - _BOTTOM) // 2
    unit = f'<text x=12 y={middle} transform="rotate(-90 12 {middle})">relative error</text>'
    return f'<path class=grid d="{lines}"/>{labels}{unit}{_block_ticks(axes, rows)}'


def _block_ticks(axes: _Axes, rows: Sequence[HookRow]) -> str:
    where: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        if match := BLOCK.fullmatch(row.hook):
            where.setdefault(int(match[1]), []).append(axes.x(i))
    texts, free_from = [], -math.inf
    for block, places in sorted(where.items()):
        x = round(sum(places) / len(places))
        if x >= free_from:
            texts.append(f"<text x={x} y={_HEIGHT - _BOTTOM + 15}>{block}</text>")
            free_from = x + _TICK_SPACING
    name = "block" if where else "hooks in forward order"
    texts.append(f"<text x={(_LEFT + _WIDTH - _RIGHT) // 2} y={_HEIGHT - 6} class=name>{name}</text>")
    return "".join(texts)


def _first_failure(axes: _Axes, rows: Sequence[HookRow]) -> str:
    """A line at the first hook over its bound, named: that is where to look."""
    for i, row in enumerate(rows):
        if not row.passed:
            x = axes.x(i)
            left_half = x < _WIDTH / 2
            text = f"<text x={x + 6 if left_half else x - 6} y={_TOP + 9} class={'start' if left_half else 'end'}>"
            return f'<path class=first d="M{x} {_TOP}V{_HEIGHT - _BOTTOM}"/>{text}first: {escape(row.hook)}</text>'
    return ""
