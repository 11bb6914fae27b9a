"""Two runs beside each other as text for a terminal."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

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
from harness.report.numbers import count, duration, ratio
from harness.report.text import shortened
from harness.report.visible import visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from harness.history.compare import Comparison, Growth, Hunger, Slower, VerdictChange
    from harness.store import CaseResult, RunRecords

__all__ = ["compare_text"]

_MAX_LINE = 240


def compare_text(found: Comparison, limit: int = 20) -> str:
    """The comparison for a terminal; of each list the first ``limit``, and how many more there are."""
    return visible("\n".join(_lines(found, limit)) + "\n")


def _lines(found: Comparison, limit: int) -> Iterator[str]:
    yield f"before  {_run(found.before)}"
    yield f"after   {_run(found.after)}"
    for one in found.across:
        yield f"across  {one.name}" + (f": {one.before} and {one.after}" if one.before else "")
    yield from _changes(found, limit)
    yield ""
    yield (
        f"{count(len(found.pairs.both), 'case')} in both; errors of {count(len(found.figures), 'hook')} compared, "
        f"{found.n_same:,} of them equal in every digit"
    )
    yield f"rule: {rule_words(found.rule, len(found.baselines))}"
    yield from _section("verdicts that are worse", [*map(_verdict, found.worse)], limit)
    yield from _section("errors that grew", [*map(_growth, found.growths)], limit)
    yield from _section("hungrier", [*map(_hunger, found.hungrier)], limit)
    title = "slower" if found.timed else "slower, not counted without --time"
    said = f"over {SLOWER_FACTOR:g} times and {SLOWER_SECONDS:g} s" if found.slower else ""
    yield from _section(title, [*map(_slower, found.slower)], limit, said)
    for kind, title in (("better", "verdicts that are better"), ("other", "verdicts that changed otherwise")):
        changed = [change for change in found.verdicts if change.kind == kind]
        if changed:
            yield from _section(title, [*map(_verdict, changed)], limit)
    for run, cases in (("before", found.pairs.only_before), ("after", found.pairs.only_after)):
        if cases:
            yield from _section(f"cases only {run}", [*map(_missing, _grouped(cases))], limit, n=len(cases))
    yield ""
    yield headline(found)


def _run(records: RunRecords) -> str:
    ended = "" if records.end is not None else ", not ended"
    damaged = f", {count(len(records.damaged), 'damaged line')}" if records.damaged else ""
    return f"{run_name(records)}  {count(len(records.cases), 'case')}{ended}{damaged}"


def _changes(found: Comparison, limit: int) -> Iterator[str]:
    if not found.changes:
        yield "versions, machine, options: no difference"
        return
    yield "what differs:"
    for change in found.changes[: max(limit, 1)]:
        was, now = (settings_words(change.name, text) for text in (change.before, change.after))
        yield f"  {change.group} {change.name}: {was} -> {now}"
    yield from _more(len(found.changes), limit)


def _section(
    title: str, entries: Sequence[Sequence[str]], limit: int, said: str = "", n: int | None = None
) -> Iterator[str]:
    yield ""
    yield f"{title}: {len(entries) if n is None else n}" + (f" ({said})" if said else "")
    for first, *rest in entries[:limit]:
        yield f"  {first}"
        yield from (f"      {shortened(line, _MAX_LINE)}" for line in rest if line)
    yield from _more(len(entries), limit)


def _more(n: int, limit: int) -> Iterator[str]:
    if n > limit:
        yield f"  and {n - limit:,} more: --limit {n}, --format json or --html FILE"


def _verdict(change: VerdictChange) -> list[str]:
    return [f"{change.was} -> {change.now}: {change.after.id}", why(change.after)]


def _growth(growth: Growth) -> list[str]:
    shares = f"{ratio(growth.before.share)} -> {ratio(growth.after.share)}"
    return [
        f"{shares} of the bound, at most {ratio(growth.limit)}: {growth.case.id}",
        f"{growth.label}: {growth_words(growth)}",
    ]


def _hunger(hunger: Hunger) -> list[str]:
    was, now, most = (
        amount(value, hunger.after.unit)
        for value in (hunger.before.value, hunger.after.value, hunger.before.high)
    )
    return [f"{hunger.after.name}: {was} -> {now}, at most {most}", hunger.case.id]


def _slower(slower: Slower) -> list[str]:
    return [f"{duration(slower.before)} -> {duration(slower.after)}: {kind_words(slower)}"]


def _grouped(cases: Sequence[CaseResult]) -> list[tuple[str, int, str]]:
    """(check, number, outcomes that are no pass)."""
    other: dict[str, Counter[str]] = {}
    for case in cases:
        name = by_check([case])[0][0]
        other.setdefault(name, Counter()).update([case.outcome] if case.outcome != "passed" else [])
    return [
        (name, n, ", ".join(f"{k} {outcome}" for outcome, k in other[name].items()))
        for name, n in by_check(cases)
    ]


def _missing(group: tuple[str, int, str]) -> list[str]:
    name, n, other = group
    return [f"{name}: {n}" + (f" ({other})" if other else "")]
