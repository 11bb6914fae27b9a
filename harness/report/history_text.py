"""Checks over several runs as text for a terminal, and as JSON for a program."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from harness.history.reading import run_name
from harness.report.compare_words import settings_words
from harness.report.numbers import count, duration, ratio
from harness.report.visible import visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from harness.history.trend import Check, Trend
    from harness.store import RunRecords

__all__ = ["broken_now", "counts", "history_json", "history_text", "moment"]

_SIGNS = {"passed": "+", "failed": "X", "skipped": "-", "error": "!", "lost": "!", "not-run": "!", "": "."}


def counts(records: RunRecords) -> str:
    """Outcomes of a run's cases, as ``240 passed, 1 failed``."""
    outcomes = Counter(case.outcome for case in records.cases)
    return ", ".join(f"{n:,} {outcome}" for outcome, n in outcomes.most_common()) or "no case"


def moment(records: RunRecords) -> str:
    """When a run started, to the minute, as it was recorded."""
    return str(records.run.get("started") or "")[:16].replace("T", " ")


def broken_now(trend: Trend) -> list[tuple[Check, str]]:
    """Checks that were not good in the newest run that had them, and the run since which they have not been."""
    found = []
    for check in trend.checks:
        since = check.broken_since()
        if since is not None:
            found.append((check, run_name(trend.runs[since])))
    return found


def history_text(trend: Trend) -> str:
    """The history for a terminal."""
    return visible("\n".join(_lines(trend)) + "\n")


def _lines(trend: Trend) -> Iterator[str]:
    yield "runs, oldest first:"
    for number, (records, differs) in enumerate(zip(trend.runs, trend.differs, strict=True), start=1):
        ended = "" if records.end is not None else ", not ended"
        damaged = f", {count(len(records.damaged), 'damaged line')}" if records.damaged else ""
        yield f"{number:>3}  {run_name(records)}  {moment(records)}  {counts(records)}{ended}{damaged}"
        for one in differs:
            was, now = (settings_words(one.name, text, 60) for text in (one.before, one.after))
            yield f"     {one.group} {one.name}: {was} -> {now}"
    yield ""
    yield "checks, a sign per run (+ passed, X failed, ! not judged, - skipped, . not in it), then the newest figures"
    yield "with the range over all runs: worst err(E) / bound, seconds of all its cases"
    width = max((len(f"{check.suite} / {check.check}") for check in trend.checks), default=0)
    for check in trend.checks:
        signs = "".join(_SIGNS.get(point.outcome, "!") for point in check.points)
        share = _ranged([point.share for point in check.points], ratio)
        seconds = _ranged([point.seconds for point in check.points], duration)
        yield f"  {f'{check.suite} / {check.check}':<{width}}  {signs}  {share:<20}  {seconds}".rstrip()
    broken = broken_now(trend)
    yield ""
    yield f"not good in the newest run that had them: {len(broken)}"
    for check, since in broken:
        last = check.last
        yield f"  {check.suite} / {check.check}: {last.n_bad} of {count(last.n_cases, 'case')}, since {since}"
    if trend.skipped:
        yield ""
        yield f"no run: {count(len(trend.skipped), 'folder')}"
        yield from (f"  {one.folder}: {' '.join(one.reason.split())}" for one in trend.skipped)


def _ranged(values: list[float], words: Any) -> str:
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return ""
    newest, low, high = words(known[-1]), words(min(known)), words(max(known))
    return newest if low == high else f"{newest} ({low} to {high})"


def history_json(trend: Trend) -> dict[str, Any]:
    """The whole history as JSON; null for what a run does not have, ``"Infinity"`` for an error without end."""
    return {
        "kind": "history",
        "version": 1,
        "runs": [
            {
                "run_id": run_name(records),
                "folder": str(records.folder),
                "started": records.run.get("started"),
                "profile": records.run.get("profile"),
                "outcomes": Counter(case.outcome for case in records.cases),
                "ended": records.end is not None,
                "damaged_lines": len(records.damaged),
                "differs": [asdict(one) for one in differs],
            }
            for records, differs in zip(trend.runs, trend.differs, strict=True)
        ],
        "checks": [
            {**_check(check), "engines": [_check(engine) for engine in check.engines]}
            for check in trend.checks
        ],
        "skipped": [{"folder": str(one.folder), "reason": one.reason} for one in trend.skipped],
    }


def _check(check: Check) -> dict[str, Any]:
    return {
        "suite": check.suite,
        "check": check.check,
        "engine": check.engine,
        "broken_since": check.broken_since(),
        "points": [
            {
                "outcome": point.outcome or None,
                "worst": point.worst or None,
                "cases": point.n_cases,
                "bad": point.n_bad,
                "share": _number(point.share),
                "seconds": _number(point.seconds),
            }
            for point in check.points
        ],
    }


def _number(value: float) -> float | str | None:
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else "Infinity"
