"""The top of the page: one sentence of verdict, the tightest comparisons, what was skipped and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.report.numbers import count, ratio, sci
from harness.report.view import ICONS, SEVERITY
from harness.store import tally, why_not_green

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.report.view import CaseView
    from harness.store import RunRecords, SuiteTally

__all__ = ["Banner", "banner", "closest", "skips"]

_N_CLOSEST = 8


@dataclass(frozen=True)
class Banner:
    """The verdict in one sentence."""

    kind: str  #: ``holds``, ``broken`` or ``incomplete``
    icon: str
    headline: str
    sentence: str
    remarks: list[str]
    anchor: str = ""  #: of the case the sentence speaks of: the first that broke, or the tightest


def banner(records: RunRecords, views: Sequence[CaseView]) -> Banner:
    """Say what the run proved, or what broke first."""
    total = tally(records).total
    reasons = why_not_green(records)
    remarks = [f"not green: {'; '.join(reasons)}"] if total.failed and len(reasons) > 1 else []
    if records.end is None:
        remarks.append("the run has not ended: it is still going, or was killed")
    if records.damaged:
        remarks.append(
            f"{count(len(records.damaged), 'line')} of results.jsonl cannot be read (cut off by a kill)"
        )
    if total.failed:
        broken = [view for view in views if view.case.outcome == "failed"]
        headline = (
            "BUDGET BROKEN" if all(view.case.suite == "budgets" for view in broken) else "PARITY BROKEN"
        )
        told, anchor = _first_sentence(broken)
        sentence = f"{total.failed:,} of {count(total.declared, 'case')}; first: {told}"
        return Banner("broken", ICONS["failed"], headline, sentence, remarks, anchor)
    if reasons:
        sentence, anchor = "; ".join(reasons), ""
        stuck = [view for view in views if view.case.outcome in ("error", "lost", "not-run")]
        if stuck:
            stuck.sort(key=lambda view: SEVERITY.index(view.case.outcome))
            told, anchor = _first_sentence(stuck)
            sentence += f". First: {told}"
        known_only = (
            len(reasons) == 1 and any(view.case.is_known_bug for view in views) and not total.executed
        )
        headline = "KNOWN BUGS ONLY" if known_only else "NOT GREEN" if total.declared else "NOTHING RAN"
        return Banner("incomplete", "!", headline, sentence, remarks, anchor)
    nearest = next((line["view"].anchor for line in closest(views)), "")
    return Banner("holds", ICONS["passed"], "PARITY HOLDS", _holds(total, views), remarks, nearest)


def _holds(total: SuiteTally, views: Sequence[CaseView]) -> str:
    tightest = closest(views)[:1]
    n_hooks = sum(len(comparison.hooks) for view in views for comparison in view.found)
    parts = [f"{total.passed:,} of {count(total.declared, 'case')}"]
    if n_hooks:
        parts.append(count(n_hooks, "hook comparison"))
    for line in tightest:
        case = line["view"].case
        where = " ".join(filter(None, (case.model, case.dtype, case.mode)))
        parts.append(f"worst {line['ratio']} of its bound ({line['hook']}, {where})")
    sentence = ", ".join(parts)
    if total.n_skipped:
        classes = ", ".join(f"{n} {name}" for name, n in total.skipped.items())
        sentence += f"; {total.n_skipped:,} skipped with a reason: {classes}"
    return sentence


def _first_sentence(views: Sequence[CaseView]) -> tuple[str, str]:
    """The first divergence in words, or else the first message, or the name of the case; and the case's anchor."""
    for view in views:
        case = view.case
        sentence = next((c.sentence for c in view.found if not c.passed and c.sentence), "")
        if sentence:
            where = " ".join(filter(None, (case.model, case.dtype, case.mode, case.topology)))
            return f"{sentence} ({where})" if where else sentence, view.anchor
    case = views[0].case
    return ": ".join(filter(None, ((case.title or case.id).rstrip("."), case.said))), views[0].anchor


def closest(views: Sequence[CaseView]) -> list[dict[str, Any]]:
    """The passing cases nearest their bound, one line each, tightest first."""
    passing = [view for view in views if view.case.outcome == "passed" and view.worst]
    passing.sort(key=lambda view: view.worst.badness if view.worst else (False, 0.0), reverse=True)
    return [
        {
            "view": view,
            "hook": row.hook,
            "gate": row.gate,
            "engine": sci(row.gate_engine),
            "reference": sci(row.gate_reference),
            "floor": sci(row.gate_floor),
            "bound": sci(row.gate_bound),
            "ratio": ratio(row.ratio),
            "k": ratio(row.required_k),
        }
        for view in passing[:_N_CLOSEST]
        if (row := view.worst)
    ]


def skips(views: Sequence[CaseView]) -> list[tuple[str, str, list[CaseView]]]:
    """Skipped cases by class and reason."""
    groups: dict[tuple[str, str], list[CaseView]] = {}
    for view in views:
        if view.case.outcome == "skipped":
            groups.setdefault(
                (view.case.skip_class or "unclassified", view.case.reason or "no reason given"), []
            ).append(view)
    return [(skip_class, reason, members) for (skip_class, reason), members in sorted(groups.items())]
