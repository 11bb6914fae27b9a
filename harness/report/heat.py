"""Error over positions and hooks: one character per cell, which the page's script draws and reads out.

Cells cost a byte before packing, and the same text serves the picture, the figure under the pointer and the rows of
one hook.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from markupsafe import Markup

from harness.report.depth import BLOCK, kind_of
from harness.store.hooks import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.store import HookRow

__all__ = ["ALPHABET", "ONE", "cell", "heat_map"]

#: ``.`` no such row; ``~`` not a number; between them steps of a tenth of a decade, each character standing for
#: more than 10^((i - 1 - ONE) / 10) of the bound and at most 10^((i - ONE) / 10), so what is over it never looks as
#: if on it.
ALPHABET = ".0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz~"
ONE = 31
_MAX_OUTLINES = 200


def cell(value: float | None) -> str:
    """The character of an error over its bound, None where there is no row."""
    if value is None:
        return ALPHABET[0]
    if math.isnan(value):
        return ALPHABET[-1]
    if value <= 0:
        return ALPHABET[1]
    place = len(ALPHABET) if value == math.inf else ONE + math.ceil(10 * math.log10(value) - 1e-9)
    return ALPHABET[min(max(place, 1), len(ALPHABET) - 2)]


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
    outlined = " ".join(f"{column},{line}" for column, line in sorted(failed)[:_MAX_OUTLINES])
    label = "Row errors over their bound, hooks down, positions across"
    return Markup(
        '<svg class=heat role=img aria-label="{}" data-starts="{}" data-per={} data-out="{}" data-names="{}" '
        'data-cells="{}"></svg>'
    ).format(
        label,
        " ".join(map(str, starts)),
        per_column,
        outlined,
        " ".join(name.replace(" ", "_") for name in labels),
        " ".join("".join(map(cell, line)) for line in grid),
    )


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
    """Line of each hook, and the lines' names: the hooks themselves, or their blocks, or every so many blocks."""
    if len(hooks) <= max_rows:
        return list(range(len(hooks))), list(hooks)
    names = [match[1] if (match := BLOCK.fullmatch(hook)) else kind_of(hook) for hook in hooks]
    blocks = list(dict.fromkeys(names))
    step = -(-len(blocks) // max_rows)
    return [blocks.index(name) // step for name in names], blocks[::step]
