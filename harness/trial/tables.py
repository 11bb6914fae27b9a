"""A trial as Markdown: what is seen of faults of each kind and size, and which planted engine was caught by what."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from harness.trial.kinds import KINDS
from harness.trial.records import ABOVE, above, share

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from harness.trial.records import Curve, Fault
    from harness.trial.sweep import Tried

__all__ = ["BANDS", "curve_tables", "fault_tables", "in_band", "percent", "smallest", "table"]

#: Multiples of the noise that are shown together, [from, to).
BANDS = ((0.0, 1.25), (1.25, 2.0), (2.0, 3.0), (3.0, 5.0), (5.0, 30.0), (30.0, math.inf))
_ORDER = {kind.name: place for place, kind in enumerate(KINDS)}


def in_band(tried: Iterable[Tried], band: tuple[float, float]) -> list[Tried]:
    """Those whose multiple lies in a band."""
    return [one for one in tried if band[0] <= one.multiple < band[1]]


def smallest(tried: Iterable[Tried]) -> Tried | None:
    """The smallest fault from which on up every one was seen, in multiples; None where not even the largest was."""
    found = None
    for one in sorted(tried, key=lambda t: t.multiple, reverse=True):
        if not one.caught:
            break
        found = one
    return found


def curve_tables(curves: Sequence[Curve]) -> str:
    """Per engine: shares seen by multiple of the noise, then the smallest fault of each kind that is always seen."""
    parts = []
    for curve in curves:
        parts += [
            f"### {curve.engine}\n",
            f"```\n{curve.command}\n```\n",
            _summary(curve.tried),
            _bands(curve.tried),
            _kinds(curve.tried),
        ]
    return "\n".join(parts)


def fault_tables(faults: Sequence[Fault]) -> str:
    """Planted engines: one line per fault, one column per dtype, mode and topology, and the check that caught it."""
    places = sorted({(f.dtype, f.mode, f.topology) for f in faults})
    rows = [["fault", "suite", "model", *(" ".join(place) for place in places), "caught by"]]
    lines: dict[tuple[str, str, str], list[Fault]] = {}
    for fault in faults:
        lines.setdefault((fault.suite, fault.name, fault.model), []).append(fault)
    for (suite, name, model), found in sorted(lines.items()):
        cells = [_cell([f for f in found if (f.dtype, f.mode, f.topology) == place]) for place in places]
        by = ", ".join(sorted({fault.by for fault in found if fault.by})) or "the engine's own error"
        rows.append([f"`{name}`", suite, model, *cells, by])
    caught, explained = (sum(getattr(f, what) for f in faults) for what in ("caught", "explained"))
    told = f"{explained} with the mistake named as its case demands"
    head = f"Of {len(faults)} planted engines {caught} were caught, {told}.\n"
    return f"{head}\n{table(rows)}" if faults else ""


def percent(value: float) -> str:
    """``99.4 %``; a dash for NaN. Never rounded up to all."""
    if math.isnan(value):
        return "-"
    return f"{math.floor(1000 * value) / 10:g} %"


def _summary(tried: Sequence[Tried]) -> str:
    loud = above(tried)
    red = [one for one in loud if one.caught]
    seen, right, placed = share(loud, "caught"), share(red, "right"), share(red, "placed")
    return (
        f"{len(tried)} faults. Of the {len(loud)} above {ABOVE:g} times the noise {percent(seen)} turn the verdict "
        f"red; of those {percent(right)} name the hook it begins at first, and {percent(placed)} a row that it "
        "touches.\n"
    )


def _cell(found: Sequence[Fault]) -> str:
    if not found:
        return "-"
    if not all(fault.caught for fault in found):
        return "NOT CAUGHT"
    return "caught" if all(fault.explained for fault in found) else "caught, NOT EXPLAINED"


def _bands(tried: Sequence[Tried]) -> str:
    rows = [["times the noise", "faults", "red", "hook named", "row named"]]
    for low, high in BANDS:
        here = in_band(tried, (low, high))
        red = [one for one in here if one.caught]
        label = f"{low:g} to {high:g}" if math.isfinite(high) else f"{low:g} and more"
        figures = (share(here, "caught"), share(red, "right"), share(red, "placed"))
        rows.append([label, str(len(here)), *map(percent, figures)])
    return table(rows)


def _kinds(tried: Sequence[Tried]) -> str:
    rows = [["kind", "faults", "always red from", "times the noise", "largest not seen, times the noise"]]
    for kind in sorted({one.kind for one in tried}, key=lambda name: (_ORDER.get(name, len(_ORDER)), name)):
        here = [one for one in tried if one.kind == kind]
        least = smallest(here)
        missed = max((one.multiple for one in here if not one.caught), default=0.0)
        seen = ["never", "-"] if least is None else [f"{least.size:.1e}", f"{least.multiple:.2f}"]
        rows.append([kind, str(len(here)), *seen, f"{missed:.2f}" if missed else "-"])
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is its head."""
    head, *body = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
