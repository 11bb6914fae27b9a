"""Two runs beside each other as one page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.history.compare import SLOWER_FACTOR, SLOWER_SECONDS, why
from harness.history.reading import run_name
from harness.report.compare_words import (
    amount,
    by_check,
    growth_words,
    headline,
    kind_words,
    rule_words,
    settings_words,
)
from harness.report.numbers import count, duration, ratio, sci
from harness.report.pages import RunLinks, page, write_page
from harness.report.sparklines import shares_figure
from harness.report.text import shortened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.history.compare import Comparison, Growth, Hunger, VerdictChange
    from harness.store import CaseResult, RunRecords

__all__ = ["write_comparison"]

_MAX_WHY = 500
#: Entries of one list: a page on which everything is broken must still open.
_MAX_ENTRIES = 400
_MAX_SLOWER = 25


def write_comparison(found: Comparison, target: Path | str) -> Path:
    """Write the page of a comparison.

    Raises:
        UsageError: it cannot be written there.
    """
    target = Path(target)
    links = RunLinks(found.before, target), RunLinks(found.after, target)
    verdicts = {
        kind: _alike_together(
            [_verdict(change, links) for change in found.verdicts if change.kind == kind],
            ("check", "was", "now", "why"),
        )
        for kind in ("worse", "better", "other")
    }
    values = {
        "headline": headline(found),
        "sentence": _sentence(found),
        "broken": found.n_regressions > 0,
        "runs": [_run(found.before, links[0]), _run(found.after, links[1])],
        "across": ", ".join(one.name for one in found.across),
        "baselines": [run_name(one) for one in found.baselines],
        "differs": [
            (
                f"{one.group} {one.name}",
                settings_words(one.name, one.before, 300),
                settings_words(one.name, one.after, 300),
            )
            for one in found.changes
        ],
        "verdicts": verdicts,
        "growths": _alike_together(
            [_growth(growth, links) for growth in found.growths], ("check", "label", "words")
        ),
        "hungrier": [_hunger(hunger, links) for hunger in found.hungrier[:_MAX_ENTRIES]],
        "slower": [
            (
                kind_words(one),
                duration(one.before),
                duration(one.after),
                ratio(one.after / one.before) if one.before else "",
            )
            for one in found.slower[:_MAX_SLOWER]
        ],
        "slower_rule": f"{SLOWER_FACTOR:g} times and {SLOWER_SECONDS:g} s",
        "found": found,
        "rule": rule_words(found.rule, len(found.baselines)),
        "figure": shares_figure(found.figures, found.rule.limit),
        "only": [
            (title, len(cases), by_check(cases), bad)
            for title, cases, bad in (
                ("the first", found.pairs.only_before, 0),
                ("the second", found.pairs.only_after, _n_bad(found.pairs.only_after)),
            )
            if cases
        ],
        "times": [
            (what, duration(was), duration(now), ratio(now / was))
            for what, (was, now) in (
                ("cases that passed in both", found.seconds),
                ("engines that booted in both", found.boots),
            )
            if was
        ],
    }
    return write_page(page("compare.html.j2", values), target)


def _sentence(found: Comparison) -> str:
    parts = [
        count(len(found.worse), "verdict") + " worse" if found.worse else "",
        f"errors grew in {count(len(found.growths), 'comparison')}" if found.growths else "",
        count(len(found.hungrier), "budget") + " hungrier" if found.hungrier else "",
        f"{len(found.slower)} slower" if found.slower and found.timed else "",
    ]
    said = "; ".join(filter(None, parts)) or "nothing became worse"
    return (
        f"{said[0].upper()}{said[1:]}, in {count(len(found.pairs.both), 'case')} that both runs have: "
        f"errors of {count(len(found.figures), 'hook')}, {found.n_same:,} of them equal in every digit."
    )


def _n_bad(cases: tuple[CaseResult, ...]) -> int:
    return sum(case.outcome not in {"passed", "skipped"} for case in cases)


def _run(records: RunRecords, links: RunLinks) -> dict[str, Any]:
    return {
        "name": run_name(records),
        "href": links.index,
        "started": str(records.run.get("started") or "")[:16].replace("T", " "),
        "profile": str(records.run.get("profile") or ""),
        "cases": count(len(records.cases), "case"),
        "ended": records.end is not None,
        "damaged": len(records.damaged),
    }


def _case(case: CaseResult, links: RunLinks) -> dict[str, str]:
    return {
        "title": case.title or case.id,
        "id": case.id,
        "check": f"{case.suite} / {case.check}" if case.check else case.suite,
        "engine": " ".join(filter(None, (case.model, case.dtype, case.mode, case.topology))),
        "href": links.case(case.id),
        "rerun": case.rerun,
    }


def _verdict(change: VerdictChange, links: tuple[RunLinks, RunLinks]) -> dict[str, Any]:
    return {
        **_case(change.after, links[1]),
        "was": change.was,
        "now": change.now,
        "outcome": change.after.outcome,
        "href_before": links[0].case(change.before.id),
        "why": shortened(why(change.after), _MAX_WHY),
    }


def _alike_together(entries: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Cases of one check that went the same way for the same reason are told once, and the others named beneath."""
    told: dict[tuple[str, ...], dict[str, Any]] = {}
    for one in entries:
        key = tuple(one[name] for name in names)
        if key in told:
            told[key]["others"].append(one)
        else:
            told[key] = {**one, "others": []}
    return list(told.values())[:_MAX_ENTRIES]


def _growth(growth: Growth, links: tuple[RunLinks, RunLinks]) -> dict[str, Any]:
    return {
        **_case(growth.case, links[1]),
        "label": growth.label,
        "hook": growth.after.hook,
        "gate": growth.after.gate,
        "words": growth_words(growth),
        "before": ratio(growth.before.share),
        "after": ratio(growth.after.share),
        "limit": ratio(growth.limit),
        "mean": f"{growth.mean:.2f}",
        "errors": [sci(growth.before.err_engine), sci(growth.after.err_engine)],
        "bound": sci(growth.after.bound),
    }


def _hunger(hunger: Hunger, links: tuple[RunLinks, RunLinks]) -> dict[str, Any]:
    unit = hunger.after.unit
    return {
        **_case(hunger.case, links[1]),
        "name": hunger.after.name,
        "before": amount(hunger.before.value, unit),
        "after": amount(hunger.after.value, unit),
        "limit": amount(hunger.before.high, unit),
    }
