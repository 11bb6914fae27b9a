"""The two figures of a comparison as inline SVG: error over depth, and error over positions and hooks.

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
from harness.report.png import data_uri, indexed_png
from harness.store.hooks import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.store import HookRow

__all__ = ["HEAT_LEVELS", "depth_figure", "heat_map", "kind_of"]

_WIDTH, _HEIGHT = 720, 236
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 8, 38
_BLOCK = re.compile(r"blocks\.(\d+)\.(.*)")
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_MIN_DECADES, _MANY_DECADES = 2, 6
_TICK_SPACING = 34  # px; closer labels would touch

#: (red, green, blue, alpha) per level: no row; a quarter decade each up to the bound; above it by 1, 3, 10; NaN.
#: Alpha instead of lightness makes one palette serve both backgrounds.
HEAT_LEVELS = (
    (0, 0, 0, 0),
    *((0, 114, 178, alpha) for alpha in (12, 34, 58, 84, 112, 142, 174, 208)),
    *((213, 94, 0, alpha) for alpha in (170, 215, 255)),
    (204, 51, 153, 255),
)
_BELOW, _NAN_LEVEL = 8, 12
_HEAT_HEIGHT = 6  # px per row of cells, at most
_HEAT_MAX_HEIGHT = 230
_MAX_OUTLINES = 200


def kind_of(hook: str) -> str:
    """``attn``, ``mlp``, ``block``, ``norm``, ``embed`` or ``other``: what a hook reads, and so its marker."""
    match = _BLOCK.fullmatch(hook)
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
    """Aggregate errors of engine and reference over the hooks in forward order, with the bound as a band; log scale."""
    if not rows:
        return Markup()
    axes = _Axes.around(
        [v for row in rows for v in (row.err_engine, row.err_reference, row.bound)], len(rows)
    )
    steps = "".join(f"V{axes.y(row.bound)}H{axes.x(i + 0.5)}" for i, row in enumerate(rows))
    dash = min(max(round(0.8 * (axes.x(1) - axes.x(0))), 4), 20)
    dashes = "".join(
        f"M{axes.x(i) - dash // 2} {axes.y(row.err_reference)}h{dash}" for i, row in enumerate(rows)
    )
    parts = [
        f'<path class=band d="M{axes.x(-0.5)} {_HEIGHT - _BOTTOM}{steps}V{_HEIGHT - _BOTTOM}z"/>',
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
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role=img aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


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
    return f'<path class=grid d="{lines}"/>{labels}{_block_ticks(axes, rows)}'


def _block_ticks(axes: _Axes, rows: Sequence[HookRow]) -> str:
    where: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        if match := _BLOCK.fullmatch(row.hook):
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


def heat_map(rows: Sequence[HookRow], max_rows: int, max_columns: int) -> Markup:
    """Each row's error over its bound: positions across (requests side by side), hooks down; log colour.

    Cells hold the largest of what they stand for, so pooling to the caps hides no outlier. Rows that failed a gate of
    their own are outlined.

    Args:
        rows: hooks in forward order.
        max_rows: more hooks are pooled, first by block.
        max_columns: more positions are pooled.
    """
    shown = [row for row in rows if row.row_errors]
    if not shown:
        return Markup()
    widths = [
        max(len(row.row_errors[request]) if request < len(row.row_errors) else 0 for row in shown)
        for request in range(max(len(row.row_errors) for row in shown))
    ]
    pool = max(1, -(-sum(widths) // max_columns))
    starts = [sum(-(-width // pool) for width in widths[:request]) for request in range(len(widths))]
    group_of, labels = _groups([row.hook for row in shown], max_rows)
    lines: list[list[list[float | None]]] = [[] for _ in labels]
    for row, group in zip(shown, group_of, strict=True):
        lines[group].append(_cells(row, widths, pool))
    grid = [[_worst(column) for column in zip(*group, strict=True)] for group in lines]
    per_column = pool * max(row.rows_per_error for row in shown)
    failed = {
        (starts[request] + position // (pool * row.rows_per_error), group)
        for row, group in zip(shown, group_of, strict=True)
        for request, position in row.failed_rows
        if request < len(starts)
    }
    return _heat_svg(grid, labels, starts, sorted(failed)[:_MAX_OUTLINES], per_column)


def _cells(row: HookRow, widths: Sequence[int], pool: int) -> list[float | None]:
    """Error over bound per cell of one hook, None where a request has no such row.

    Every row has a bound of its own, of which only that of the worst row is on record. A row beyond it in a hook that
    passes was within its own, hence at most 1 there.
    """
    bound = row.bound if math.isnan(row.row_bound) else row.row_bound
    most = 1.0 if row.passed else math.inf
    cells: list[float | None] = []
    for request, width in enumerate(widths):
        errors = row.row_errors[request] if request < len(row.row_errors) else ()
        for start in range(0, width, pool):
            part = map(number, errors[start : start + pool])
            worst = _worst([error / bound if bound > 0 else math.nan for error in part])
            cells.append(most if worst is not None and worst > most else worst)
    return cells


def _worst(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return max(present, key=lambda value: math.inf if math.isnan(value) else value, default=None)


def _groups(hooks: Sequence[str], max_rows: int) -> tuple[list[int], list[str]]:
    """Line of each hook, and the lines' labels (block, or kind of hook): one each, or by block, or several blocks."""
    matches = [_BLOCK.fullmatch(hook) for hook in hooks]
    names = [match[1] if match else kind_of(hook) for match, hook in zip(matches, hooks, strict=True)]
    if len(names) <= max_rows:
        return list(range(len(names))), names
    blocks = list(dict.fromkeys(names))
    step = -(-len(blocks) // max_rows)
    return [blocks.index(name) // step for name in names], blocks[::step]


def _level(value: float | None) -> int:
    if value is None:
        return 0
    if math.isnan(value):
        return _NAN_LEVEL
    if value > 1:
        return _BELOW + (3 if value > 10 else 2 if value > 3 else 1)  # the steps of the key
    return 1 if value <= 0 else min(max(_BELOW + math.ceil(4 * math.log10(value)), 1), _BELOW)


def _heat_svg(
    grid: list[list[float | None]],
    labels: list[str],
    starts: list[int],
    outlined: list[tuple[int, int]],
    per_column: int,
) -> Markup:
    image = data_uri(indexed_png([[_level(value) for value in line] for line in grid], HEAT_LEVELS))
    n_columns, n_rows = len(grid[0]), len(grid)
    width, height = _WIDTH - _LEFT - _RIGHT, min(n_rows * _HEAT_HEIGHT, _HEAT_MAX_HEIGHT)
    place = f"x={_LEFT} y=4 width={width} height={height}"
    parts = [f'<image href="{image}" {place} preserveAspectRatio=none /><rect {place} class=frame />']
    free_from = -math.inf
    for line, label in enumerate(labels):
        y = round(4 + (line + 0.5) * height / n_rows + 4)
        fresh = line == 0 or label != labels[line - 1]
        if fresh and y >= free_from:
            parts.append(f"<text x={_LEFT - 6} y={y} class=end>{escape(label)}</text>")
            free_from = y + 13
    for request, start in enumerate(starts):
        x = round(_LEFT + start / n_columns * width)
        parts.append(f'<path class=cut d="M{x} 4v{height}"/>' if start else "")
        if request == 0 or width * (start - starts[request - 1]) / n_columns > _TICK_SPACING:
            parts.append(f"<text x={x} y={height + 18} class=start>{request}:0</text>")
    for column, line in outlined:
        corner = f"x={_LEFT + column / n_columns * width:.1f} y={4 + line / n_rows * height:.1f}"
        size = f"width={width / n_columns:.1f} height={height / n_rows:.1f}"
        parts.append(f"<rect {corner} {size} class=out />")
    unit = f"request:position, {per_column} positions per cell" if per_column > 1 else "request:position"
    parts.append(f"<text x={_LEFT + width // 2} y={height + 32}>{unit}</text>")
    label = "Row errors over their bound, hooks down, positions across"
    return Markup(  # noqa: S704 - every text in it was escaped
        f'<svg viewBox="0 0 {_WIDTH} {height + 38}" role=img aria-label="{label}">{"".join(parts)}</svg>'
    )
