"""The spread of sound engines' comparisons as Markdown: quantiles, a histogram, and what other constants would do."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from harness.trial.spread import quantile
from harness.trial.tables import table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.trial.spread import Comparison, Spread

__all__ = ["KS", "spread_tables"]

#: Constants that are tried.
KS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0)
_SHARES = (0.5, 0.9, 0.99, 0.999)
#: Borders of the histogram's bins, in shares of the bound.
_EDGES = (*(step / 10 for step in range(11)), math.inf)
_BAR = 50


def spread_tables(some: Sequence[Spread]) -> str:
    """Per dtype the distribution of err(E) / bound, then the constants side by side."""
    parts = []
    for spread in some:
        parts += [
            f"### {spread.dtype}\n",
            *(f"```\n{line}\n```\n" for line in spread.commands),
            _summary(spread),
        ]
        parts += [_quantiles(spread), _histogram(spread)]
    return "\n".join([*parts, _constants(some)])


def _summary(spread: Spread) -> str:
    worst = max(spread.comparisons, key=lambda one: one.share)
    return (
        f"{spread.cases} cases, {spread.red} red; {len(spread.comparisons)} comparisons. Nearest its bound: "
        f"{worst.hook}, {worst.gate}, of {worst.engine}: {worst.share:.2f} of it, so that k = {worst.needed:.2f} would "
        "have done.\n"
    )


def _quantiles(spread: Spread) -> str:
    gates = dict.fromkeys(one.gate for one in spread.comparisons)
    rows = [
        [
            "err(E) / bound",
            "comparisons",
            "exact",
            "half",
            *(f"{100 * s:g} %" for s in _SHARES[1:]),
            "largest",
        ]
    ]
    rows.append(_row("all gates", spread.comparisons))
    rows += [_row(gate, [one for one in spread.comparisons if one.gate == gate]) for gate in gates]
    return table(rows)


def _row(name: str, some: Sequence[Comparison]) -> list[str]:
    """Figures of those that are not exact: an embedding that was looked up says nothing about noise."""
    ordered = sorted(one.share for one in some if one.share > 0)
    figures = [*(quantile(ordered, share) for share in _SHARES), ordered[-1] if ordered else math.nan]
    cells = ["-" if math.isnan(figure) else f"{figure:.2f}" for figure in figures]
    return [name, str(len(some)), str(len(some) - len(ordered)), *cells]


def _histogram(spread: Spread) -> str:
    """Counts per tenth of the bound; what is exact is left out."""
    counts = []
    for low, high in itertools.pairwise(_EDGES):
        here = sum(low < one.share <= high for one in spread.comparisons)
        label = f"{low:.1f} to {high:.1f}" if math.isfinite(high) else "over its bound"
        counts.append((label, here))
    most = max(count for _, count in counts) or 1
    lines = [f"{label:>14} {n:>6} {'#' * math.ceil(_BAR * n / most)}".rstrip() for label, n in counts]
    return "\n".join(["```", *lines, "```\n"])


def _constants(some: Sequence[Spread]) -> str:
    """What would be red with another k: on sound engines each is a false alarm."""
    rows = [["would be red with k", *(f"{k:g}" for k in KS)]]
    for spread in some:
        found = [spread.red_at(k) for k in KS]
        rows.append(
            [f"{spread.dtype}: of {len(spread.comparisons)} comparisons", *(str(n) for n, _ in found)]
        )
        rows.append([f"{spread.dtype}: of {spread.cases} cases", *(str(n) for _, n in found)])
    return table(rows)
