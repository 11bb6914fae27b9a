"""Two maps of one quantity side by side, the engine's and the reference's, as inline SVG with the numbers in it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from harness.store.hooks import number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["paired_maps"]

_WIDTH, _LEFT, _GAP, _TOP, _CELL = 720, 64, 24, 34, 17
#: How far beyond 0 and 1 still counts as there, and the strongest colour a number can be read on.
_SLACK, _STRONGEST = 0.05, 0.6
#: Columns up to which each cell's number is written into it.
_WRITTEN = 8


def paired_maps(maps: Mapping[str, Any]) -> Markup:
    """The figure for ``{"title", "rows", "columns", "engine", "reference"}``: values from 0 (clear) to 1 (full colour).

    Values outside that range get the other colour. Grids that do not fit their labels give nothing.
    """
    rows, columns = list(map(str, maps.get("rows") or ())), list(map(str, maps.get("columns") or ()))
    grids = [maps.get(side) or [] for side in ("engine", "reference")]
    if not rows or not columns or any(not _fits(grid, rows, columns) for grid in grids):
        return Markup()
    side = (_WIDTH - _LEFT - _GAP) // 2
    height = _TOP + _CELL * len(rows) + 4
    parts = [
        f"<text x={_LEFT - 6} y={_TOP + _CELL * i + 13} class=end>{escape(label)}</text>"
        for i, label in enumerate(rows)
    ]
    for name, grid, left in zip(("engine", "reference"), grids, (_LEFT, _LEFT + side + _GAP), strict=True):
        parts.append(f"<text x={left} y=12 class=start>{name}</text>")
        parts.append(_grid(grid, columns, left, side))
    label = f"{maps.get('title') or 'Two maps'}: engine and reference, {len(rows)} by {len(columns)}"
    return Markup(  # noqa: S704 - every text in it was escaped
        f'<svg viewBox="0 0 {_WIDTH} {height}" role=img aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def _fits(grid: Sequence[Sequence[Any]], rows: Sequence[str], columns: Sequence[str]) -> bool:
    return len(grid) == len(rows) and all(len(line) == len(columns) for line in grid)


def _grid(grid: Sequence[Sequence[Any]], columns: Sequence[str], left: int, side: int) -> str:
    cell = side / len(columns)
    parts = [
        f"<text x={round(left + (i + 0.5) * cell)} y=28>{escape(label.strip() or '␣')}</text>"
        for i, label in enumerate(columns)
    ]
    for i, line in enumerate(grid):
        for j, raw in enumerate(line):
            value = number(raw)
            x, y = left + j * cell, _TOP + i * _CELL
            inside = -_SLACK <= value <= 1 + _SLACK
            share = 0.0 if math.isnan(value) else _STRONGEST * min(abs(value), 1.0)
            parts.append(
                f'<rect class="{"in" if inside else "past"}" x={x:.1f} y={y} width={cell:.1f} height={_CELL} '
                f'fill-opacity="{share:.2f}"/>'
            )
            if len(columns) <= _WRITTEN:
                text = f"{value:.2f}".replace("-0.00", "0.00")
                parts.append(f"<text x={x + cell / 2:.1f} y={y + 13}>{text}</text>")
    return f"<g class=map>{''.join(parts)}</g>"
