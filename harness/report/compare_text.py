"""Two runs beside each other as text for a terminal, and as JSON for a program."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from harness.history.compare import SLOWER_FACTOR, SLOWER_SECONDS, why
from harness.history.figures import Budget, HookFigure
from harness.history.reading import run_name
from harness.report.numbers import count, duration, ratio
from harness.report.text import shortened
from harness.report.visible import visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from harness.history.compare import Comparison, Growth, Hunger, Slower, VerdictChange
    from harness.history.growth import Rule
    from harness.store import CaseResult

__all__ = [
    "amount",
    "by_check",
    "compare_json",
    "compare_text",
    "growth_words",
    "headline",
    "kind_words",
    "rule_words",
    "settings_words",
]

_MAX_LINE = 240
_COMMIT = 10  # digits of a commit, as in the report


def headline(found: Comparison) -> str:
    """The outcome in a few words."""
    n = found.n_regressions
    if n:
        return f"{n} regression{'' if n == 1 else 's'}"
    return "no regression"


def rule_words(rule: Rule, n_baselines: int = 0) -> str:
    """How growth was told from noise, in a sentence."""
    origin = {
        "alike": "both runs had the same versions and machine, where errors repeat to the bit",
        "unlike": "versions, machine or engine differ, so the same error may be rounded in another way",
        "measured": f"spread measured over {n_baselines + 1} runs like the first",
        "given": "as asked for",
    }[rule.name]
    hook = f"more than {rule.step:.2g} of the bound"
    if rule.factor > 1:
        hook += f" and {rule.factor:.3g} times"
    return f"a hook has grown by {hook}, a comparison by {rule.mean:.3g} times on average ({origin})"


def kind_words(slower: Slower) -> str:
    """``boot of x``, ``all 12 cases``."""
    if slower.kind.startswith("all"):
        return f"{slower.kind}, {slower.name}"
    return f"{slower.kind} {slower.name}"


def settings_words(name: str, text: str, limit: int = 100) -> str:
    """A setting's value, short; nothing is said to be absent."""
    if name == "commit":
        text = text[:_COMMIT]
    return (text if len(text) <= limit else f"{text[:limit].rstrip()}…") or "(none)"


def growth_words(growth: Growth) -> str:
    """What grew, as ``3 of 14 hooks, first blocks.1.hook_out``."""
    if not growth.n_grown:
        return (
            f"{growth.mean:.2f} times on average over {count(growth.n_hooks, 'hook')}, at most "
            f"{growth.mean_limit:.2f} is noise; most at {growth.after.hook}"
        )
    grew = f"{growth.n_grown} of {count(growth.n_hooks, 'hook')}, first {growth.first}"
    return grew if growth.after.hook == growth.first else f"{grew}, most {growth.after.hook}"


def amount(value: float, unit: str) -> str:
    """A budget's figure: bytes in powers of 1024, or a ratio."""
    if unit != "B":
        return f"{value:.3f}"
    size, name = abs(value), "B"
    for name in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or name == "GiB":
            break
        size /= 1024
    sign = "-" if value < 0 else ""
    return f"{sign}{size:.0f} B" if name == "B" else f"{sign}{size:.1f} {name}"


def by_check(cases: Iterable[CaseResult]) -> list[tuple[str, int]]:
    """``suite / check`` and how many cases of it, in the order they came."""
    return list(Counter(f"{case.suite} / {case.check}" if case.check else case.id for case in cases).items())


def compare_text(found: Comparison, limit: int = 20) -> str:
    """The comparison for a terminal; of each list the first ``limit``, and how many more there are."""
    return visible("\n".join(_lines(found, limit)) + "\n")


def _lines(found: Comparison, limit: int) -> Iterator[str]:
    yield f"before  {run_name(found.before)}  {count(len(found.before.cases), 'case')}"
    yield f"after   {run_name(found.after)}  {count(len(found.after.cases), 'case')}"
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


def compare_json(found: Comparison) -> dict[str, Any]:
    """The whole comparison as JSON; numbers JSON has no word for are strings that ``float()`` reads."""
    document = {
        "kind": "compare",
        "version": 1,
        "regressions": found.n_regressions,
        "before": _run(found, "before"),
        "after": _run(found, "after"),
        "baselines": [run_name(one) for one in found.baselines],
        "across": [asdict(one) for one in found.across],
        "rule": {**asdict(found.rule), "sentence": rule_words(found.rule, len(found.baselines))},
        "differs": [asdict(change) for change in found.changes],
        "cases": {
            "both": len(found.pairs.both),
            "only_before": [case.id for case in found.pairs.only_before],
            "only_after": [{"id": case.id, "outcome": case.outcome} for case in found.pairs.only_after],
        },
        "errors": {"compared": len(found.figures), "equal": found.n_same},
        "verdicts": [
            {
                "kind": change.kind,
                "id": change.after.id,
                "id_before": change.before.id,
                "before": change.was,
                "after": change.now,
                "why": why(change.after),
                "rerun": change.after.rerun,
            }
            for change in found.verdicts
        ],
        "grown": [_plain(growth) for growth in found.growths],
        "hungrier": [_plain(hunger) for hunger in found.hungrier],
        "slower": {"counted": found.timed, "entries": [asdict(slower) for slower in found.slower]},
        "seconds": {"cases": list(found.seconds), "boots": list(found.boots)},
    }
    spelled: dict[str, Any] = _spelled(document)
    return spelled


def _plain(entry: Growth | Hunger) -> dict[str, Any]:
    """Its fields, with the case named and not written out."""
    values = {one.name: getattr(entry, one.name) for one in fields(entry) if one.name != "case"}
    return {
        "case": entry.case.id,
        **{
            name: asdict(value) if isinstance(value, HookFigure | Budget) else value
            for name, value in values.items()
        },
    }


def _run(found: Comparison, which: str) -> dict[str, Any]:
    records = found.before if which == "before" else found.after
    return {
        "run_id": run_name(records),
        "folder": str(records.folder),
        "started": records.run.get("started"),
        "cases": len(records.cases),
        "damaged_lines": len(records.damaged),
    }


def _spelled(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _spelled(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
