"""What the templates show of each case: worded, ordered and cut down to what a reader needs.

A failing comparison is shown whole. The passing comparisons of a case are merged, each hook by the one that came
nearest its bound: a page with every row of every comparison would be too big to open, and ``results.parquet`` has them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.report.depth import depth_figure
from harness.report.heat import heat_map
from harness.report.ledger import known_bug
from harness.report.maps import paired_maps
from harness.report.numbers import count, duration, ratio, sci, ulps
from harness.report.ranks import layout_caption, layout_figure
from harness.report.steps import Files, Step, files, steps
from harness.report.text import short_values, shortened, value_text
from harness.store import hook_rows
from harness.store.hooks import number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from markupsafe import Markup

    from harness.store import CaseResult, HookRow

__all__ = ["ICONS", "SEVERITY", "CaseView", "Comparison", "anchors", "case_view", "comparisons"]

ICONS = {"passed": "✓", "failed": "✗", "skipped": "\N{EN DASH}", "error": "!", "lost": "!", "not-run": "!"}
#: Outcomes, worst first.
SEVERITY = ("failed", "error", "lost", "not-run", "passed", "skipped")
_HEAT_PASSING, _HEAT_FAILING = (128, 40), (128, 160)  # rows, columns
_MAX_MESSAGE, _MAX_DETAILS = 4000, 24
_BEFORE, _AFTER = 4, 8  # hooks shown before and from the first failure on
_DRAWN = ("maps", "layout")  # details shown as figures
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
_GATES = {
    "aggregate": "all rows",
    "worst row": "row",
    "worst slice": "slice",
    "massive rows": "massive",
    "massive rows, other channels": "massive, rest",
}


@dataclass(frozen=True)
class Comparison:
    """One verdict of one case, its hooks in forward order."""

    label: str
    passed: bool
    k: float
    hooks: tuple[HookRow, ...]
    gates: dict[str, list[Mapping[str, Any]]]  #: of each hook, as recorded
    sentence: str  #: where it began and what it looks like, empty if it passed
    notes: tuple[str, ...]
    measured: str  #: what was recorded beside the verdict, in one line

    @property
    def worst(self) -> HookRow | None:
        """The hook nearest its bound, or furthest beyond it."""
        return max(self.hooks, key=lambda row: row.badness, default=None)


@dataclass(frozen=True)
class Panel:
    """A table of hooks with its figures."""

    title: str
    passed: bool
    sentence: str
    notes: tuple[str, ...]
    rows: list[dict[str, Any]]
    near: list[dict[str, Any]]  #: the rows around the first failure, where the table is long
    full: bool  #: all columns, as for failures
    sources: list[tuple[str, str]]  #: label and measurements of the comparisons; several add a column
    figure: Markup
    heat: Markup
    heat_of: str
    k: str


@dataclass(frozen=True)
class CaseView:
    """One case, ready to be shown."""

    case: CaseResult
    found: list[Comparison]
    anchor: str
    icon: str
    variant: str  #: the test's other parameters, which tell cases of one title apart
    config: str  #: ``bf16 compiled tp2``
    seconds: str
    ratio: str
    worst: HookRow | None
    panels: list[Panel]
    on_purpose: list[str]  #: comparisons that fail in a case that passes: planted faults, found
    details: list[tuple[str, list[tuple[str, str]]]]
    figures: list[tuple[str, Markup]]  #: caption and figure
    message: str
    passing: list[str] = field(default_factory=list)
    outcome: str = ""  #: for a person: the class of a skip stands for it
    steps: list[Step] = field(default_factory=list)  #: from a failed case to its tensors and its cause
    files: list[Files] = field(default_factory=list)  #: what it left
    known: str = ""  #: what the ledger of known bugs says of it
    kind: str = "error"  #: the outcome, one of :data:`SEVERITY`
    same_as: str = ""  #: anchor of the case that already shows this message


def anchors(cases: Sequence[CaseResult]) -> dict[str, str]:
    """Case id → ``case-…``, made of the id, the same in every run, unique in this one."""
    taken: dict[str, str] = {}
    used: set[str] = set()
    for case in cases:
        base = "case-" + (_UNSAFE.sub("-", case.id).strip("-") or "x")
        name, n = base, 1
        while name in used:
            n += 1
            name = f"{base}-{n}"
        used.add(name)
        taken[case.id] = name
    return taken


def comparisons(case: CaseResult) -> list[Comparison]:
    """The verdicts of a case that compare hooks."""
    return [
        Comparison(
            label=str(entry.get("label") or "comparison"),
            passed=bool(verdict.get("passed")),
            k=number(verdict.get("k")),
            hooks=tuple(hook_rows(verdict)),
            gates={
                str(hook.get("hook", "?")): hook.get("gates") or [] for hook in verdict.get("hooks") or ()
            },
            sentence=_sentence(verdict),
            notes=tuple(map(str, verdict.get("notes") or ())),
            measured=short_values(entry.get("detail")),
        )
        for entry in case.verdicts
        if (verdict := entry.get("verdict"))
    ]


def case_view(
    case: CaseResult, anchor: str, *, full: bool, run: str, ledger: Sequence[Mapping[str, Any]] = ()
) -> CaseView:
    """Build the view of one case.

    Args:
        case: as recorded.
        anchor: its place in the page.
        full: show failing comparisons with every column, opened.
        run: its folder, as commands name it.
        ledger: known bugs, as recorded.
    """
    found = comparisons(case)
    failed = [comparison for comparison in found if not comparison.passed]
    passed = [comparison for comparison in found if comparison.passed]
    judged = passed if case.outcome == "passed" else found
    worst = max((row for c in judged for row in c.hooks), key=lambda row: row.badness, default=None)
    panels = [] if case.outcome == "passed" else [_panel([comparison], full=full) for comparison in failed]
    if passed and not panels:
        panels.append(_panel(passed, full=False))
    return CaseView(
        case=case,
        found=found,
        anchor=anchor,
        icon=ICONS.get(case.outcome, "!"),
        variant=_variant(case),
        config=" ".join(filter(None, (case.dtype, case.mode, case.topology))),
        seconds=duration(case.seconds),
        ratio=ratio(worst.ratio) if worst else "",
        worst=worst,
        panels=panels,
        on_purpose=[_one_line(comparison) for comparison in failed] if case.outcome == "passed" else [],
        passing=[_one_line(comparison) for comparison in passed] if panels and failed else [],
        details=_details(case),
        figures=_figures(case),
        message=shortened(case.message, _MAX_MESSAGE) if not _says_nothing_new(case.message, failed) else "",
        outcome=(case.skip_class or case.outcome).replace("-", " "),
        kind=case.outcome if case.outcome in SEVERITY else "error",
        steps=steps(case, run),
        files=files(case) if case.outcome != "passed" else [],
        known=known_bug(case, ledger),
    )


def _variant(case: CaseResult) -> str:
    """``200`` for ``test_x[<engine>-200]``: what is left of a test's parameters without the engine."""
    parameters = case.id.rpartition("[")[2].removesuffix("]") if case.id.endswith("]") else ""
    if not case.engine or case.engine not in parameters:
        return ""
    before, _, after = parameters.partition(case.engine)
    return " ".join(filter(None, (before.removesuffix("-"), after.removeprefix("-"))))


def _sentence(verdict: Mapping[str, Any]) -> str:
    """The divergence in words; put together here where the verdict brought none."""
    divergence = verdict.get("divergence") or {}
    if divergence.get("sentence"):
        return str(divergence["sentence"])
    if divergence.get("hook"):
        explanation = f"; {divergence['explanation']}" if divergence.get("explanation") else ""
        return f"{divergence['hook']} is the first hook over its bound ({divergence.get('pattern', '?')}){explanation}"
    return ""


def _says_nothing_new(message: str, failed: Sequence[Comparison]) -> bool:
    """Whether an assertion's message is the divergence sentence that is shown anyway."""
    text = message.strip().removeprefix("AssertionError: ").strip()
    return any(text == comparison.sentence for comparison in failed)


def _one_line(comparison: Comparison) -> str:
    worst = comparison.worst
    if worst is None:
        return comparison.label
    summary = (
        f"{comparison.label}: {count(len(comparison.hooks), 'hook')}, worst {ratio(worst.ratio)} of its bound"
    )
    return f"{summary} ({worst.hook}). {comparison.sentence}".rstrip()


def _panel(found: Sequence[Comparison], *, full: bool) -> Panel:
    merged = _merged(found)
    rows = [row for _, row in merged]
    source, _ = max(merged, key=lambda pair: pair[1].badness, default=(0, None))
    pictured = found[source]
    only = found[0] if len(found) == 1 else None
    lines = [
        {
            **_cells(row),
            "source": index + 1,
            "gates": _gates(found[index].gates.get(row.hook, ())) if full else [],
        }
        for index, row in merged
    ]
    k = {f"{comparison.k:g}" for comparison in found}
    return Panel(
        title=only.label if only else count(len(found), "comparison"),
        passed=all(comparison.passed for comparison in found),
        sentence=only.sentence if only else "",
        notes=tuple(dict.fromkeys(note for comparison in found for note in comparison.notes)),
        rows=lines,
        near=_around_first_failure(lines) if full else [],
        full=full,
        sources=[(comparison.label, comparison.measured) for comparison in found],
        figure=depth_figure(rows),
        heat=heat_map(pictured.hooks, *(_HEAT_FAILING if full else _HEAT_PASSING)),
        heat_of="" if only else pictured.label,
        k=", ".join(sorted(k)),
    )


def _around_first_failure(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    first = next((place for place, line in enumerate(lines) if not line["passed"]), None)
    if first is None or len(lines) <= _BEFORE + _AFTER:
        return []
    start = min(max(first - _BEFORE, 0), len(lines) - _BEFORE - _AFTER)
    return lines[start : start + _BEFORE + _AFTER]


def _merged(found: Sequence[Comparison]) -> list[tuple[int, HookRow]]:
    """Per hook the row nearest its bound, with the number of the comparison it comes from, in forward order."""
    longest = max(found, key=lambda comparison: len(comparison.hooks))
    order = dict.fromkeys(row.hook for row in longest.hooks)
    best: dict[str, tuple[int, HookRow]] = {}
    for index, comparison in enumerate(found):
        for row in comparison.hooks:
            order.setdefault(row.hook)
            if row.hook not in best or row.badness > best[row.hook][1].badness:
                best[row.hook] = (index, row)
    return [best[hook] for hook in order]


def _gates(recorded: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All gates of one hook as text."""
    lines = []
    for gate in recorded:
        where, channels = gate.get("where") or {}, gate.get("slice")
        error, bound = number(gate.get("err_engine")), number(gate.get("bound"))
        place = f"{where.get('request', 0)}:{where.get('position', 0)}" if where else ""
        lines.append(
            {
                "passed": bool(gate.get("passed")),
                "name": str(gate.get("name", "?")),
                "place": place
                or (f"channels {channels[0]} to {channels[1] - 1}" if channels else "all rows"),
                "engine": sci(error),
                "reference": sci(number(gate.get("err_reference"))),
                "floor": sci(number(gate.get("floor"))),
                "bound": sci(bound),
                "ratio": ratio(error / bound) if bound else ratio(0.0 if error == 0 else math.inf),
                "k": ratio(number(gate.get("required_k"))),
            }
        )
    return lines


def _cells(row: HookRow) -> dict[str, Any]:
    """One line of the table, as text."""
    name, _, channels = row.gate.partition(" [")
    place = f"{row.gate_row[0]}:{row.gate_row[1]}" if row.gate_row else channels.rstrip("]")
    return {
        "hook": row.hook,
        "passed": row.passed,
        "gate": " ".join(filter(None, (_GATES.get(name, name), place))),
        "engine": sci(row.gate_engine),
        "reference": sci(row.gate_reference),
        "floor": sci(row.gate_floor),
        "bound": sci(row.gate_bound),
        "by": "R" if row.gate_reference >= row.gate_floor else "F",
        "ratio": ratio(row.ratio),
        "k": ratio(row.required_k),
        "at": f"{row.worst_request}:{row.worst_position}",
        "channel": row.worst_channel,
        "cosine": sci(1 - row.min_cosine),
        "ulps": ulps(row.max_ulps),
        "amplification": "" if math.isnan(row.amplification) else ratio(row.amplification),
    }


def _figures(case: CaseResult) -> list[tuple[str, Markup]]:
    """Figures of what a case recorded beside its comparisons: pairs of maps, rank layouts; with their captions."""
    found = [(entry.get("detail") or {}) for entry in case.verdicts if isinstance(entry.get("detail"), dict)]
    figures = []
    for detail in found:
        if isinstance(maps := detail.get("maps"), dict):
            figures.append((str(maps.get("title") or ""), paired_maps(maps)))
        if isinstance(layout := detail.get("layout"), dict):
            figures.append((layout_caption(layout), layout_figure(layout)))
    return [(caption, figure) for caption, figure in figures if figure]


def _details(case: CaseResult) -> list[tuple[str, list[tuple[str, str]]]]:
    """What was measured where no hooks were compared: (label, [(name, value)])."""
    shown = []
    for entry in case.verdicts:
        detail = entry.get("detail")
        if not isinstance(detail, dict):
            detail = {} if detail is None else {"detail": detail}
        pairs = [(str(name), value_text(value)) for name, value in detail.items() if name not in _DRAWN]
        if pairs and not entry.get("verdict"):
            cut = (
                [("…", f"{len(pairs) - _MAX_DETAILS} more in results.jsonl")]
                if len(pairs) > _MAX_DETAILS
                else []
            )
            shown.append((str(entry.get("label") or "detail"), pairs[:_MAX_DETAILS] + cut))
    return shown
