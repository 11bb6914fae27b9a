"""Two runs beside each other: what became worse in the second, and what else is different."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from harness.history.changes import alike, changes
from harness.history.figures import budgets, hook_figures
from harness.history.growth import ALIKE, UNLIKE, Rule, Spread, mean_growth
from harness.history.pairing import engine_keys, pair_cases
from harness.store import SKIP_CLASSES
from harness.store.hooks import number

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from harness.history.changes import Change
    from harness.history.figures import Budget, HookFigure
    from harness.history.pairing import Across, Pair, Pairs
    from harness.store import CaseResult, RunRecords

__all__ = ["Comparison", "Growth", "Hunger", "Slower", "VerdictChange", "compare_runs", "why"]

#: A case or a boot is called slower from here on. In clean pairs of runs at most 1 of 244 cases was, 3 of 66 boots.
SLOWER_FACTOR, SLOWER_SECONDS = 2.0, 5.0
#: All cases, or all boots, together: clean pairs were within 1.13.
SLOWER_TOTAL = 1.25
_BAD = ("failed", "error", "lost", "not-run")


@dataclass(frozen=True)
class VerdictChange:
    """A case that ended otherwise; ``other`` is neither better nor worse, as from failed to error."""

    kind: Literal["worse", "better", "other"]
    before: CaseResult
    after: CaseResult
    was: str
    now: str


@dataclass(frozen=True)
class Growth:
    """A comparison of a case in which errors grew.

    Attributes:
        first: the first hook in forward order that grew; empty where only the mean did.
        before, after: the hook that grew furthest beyond its limit.
        limit: the largest share of the bound that would have been no growth of that hook.
        n_grown, n_hooks: hooks that grew, hooks in both runs.
        mean: geometric mean of the growth of all hooks, and the largest that is none.
    """

    case: CaseResult
    label: str
    first: str
    before: HookFigure
    after: HookFigure
    limit: float
    n_grown: int
    n_hooks: int
    mean: float
    mean_limit: float


@dataclass(frozen=True)
class Hunger:
    """A noted budget above its range in the first run."""

    case: CaseResult
    before: Budget
    after: Budget


@dataclass(frozen=True)
class Slower:
    """A case, a boot, or all of either that took longer, seconds."""

    kind: Literal["case", "boot", "all cases", "all boots"]
    name: str
    before: float
    after: float


@dataclass(frozen=True)
class Comparison:
    """What a person or a CI acts on.

    Attributes:
        figures: (share before, share after, whether it grew) of each hook in both runs.
        n_same: of those, how many are equal in every digit.
        seconds, boots: of all cases that passed in both runs, and of all engines that booted in both; before, after.
        timed: whether slower counts as a regression.
    """

    before: RunRecords
    after: RunRecords
    baselines: tuple[RunRecords, ...]
    across: tuple[Across, ...]
    rule: Rule
    pairs: Pairs
    changes: tuple[Change, ...]
    verdicts: tuple[VerdictChange, ...]
    growths: tuple[Growth, ...]
    hungrier: tuple[Hunger, ...]
    slower: tuple[Slower, ...]
    figures: tuple[tuple[float, float, bool], ...]
    n_same: int
    seconds: tuple[float, float]
    boots: tuple[float, float]
    timed: bool = False

    @property
    def worse(self) -> tuple[VerdictChange, ...]:
        """The verdicts that changed for the worse."""
        return tuple(change for change in self.verdicts if change.kind == "worse")

    @property
    def n_regressions(self) -> int:
        """Cases and comparisons that became worse; slower ones only where time was asked for."""
        slower = len(self.slower) if self.timed else 0
        return len(self.worse) + len(self.growths) + len(self.hungrier) + slower


def compare_runs(
    before: RunRecords,
    after: RunRecords,
    *,
    baselines: Sequence[RunRecords] = (),
    across: Sequence[Across] = (),
    step: float | None = None,
    factor: float | None = None,
    timed: bool = False,
) -> Comparison:
    """Find what became worse from ``before`` to ``after``.

    Args:
        before: what counts as good.
        after: what is judged against it; of cases that only one of them has nothing is.
        baselines: runs like ``before``, from which the spread of each figure is measured.
        across: labels in which cases may differ and still be paired.
        step: instead of the rule's own, see :class:`harness.history.growth.Rule`.
        factor: likewise.
        timed: count what became slower as a regression.

    Raises:
        UsageError: no case in common, several cases for one, a damaged verdict.
    """
    pairs = pair_cases(before, after, across)
    k = number(before.run.get("k"))
    shares = _Shares(
        {pair.key: hook_figures(pair.before, k) for pair in pairs.both},
        {pair.key: hook_figures(pair.after, k) for pair in pairs.both},
    )
    repeats = [_like(before, one, across) for one in baselines]
    spread = Spread(
        _flat(shares.before),
        [_flat({key: hook_figures(case, k) for key, case in cases.items()}) for cases in repeats],
        ALIKE if not across and alike(before, after) else UNLIKE,
    )
    given = {name: value for name, value in (("step", step), ("factor", factor)) if value is not None}
    if given:
        spread.rule = replace(spread.rule, name="given", **given)
    found = _Found()
    for pair in pairs.both:
        found.judge(pair, shares, spread)
        found.weigh(pair, [cases[pair.key] for cases in repeats if pair.key in cases])
    seconds = [
        (pair.after.id, pair.before.seconds, pair.after.seconds)
        for pair in pairs.both
        if pair.before.outcome == pair.after.outcome == "passed"
    ]
    boots = list(_boots(before, after, across))
    return Comparison(
        before=before,
        after=after,
        baselines=tuple(baselines),
        across=tuple(across),
        rule=spread.rule,
        pairs=pairs,
        changes=tuple(changes(before, after)),
        verdicts=tuple(change for pair in pairs.both if (change := _verdict_change(pair)) is not None),
        growths=tuple(sorted(found.growths, key=lambda one: one.limit - one.after.share)),
        hungrier=tuple(found.hungrier),
        slower=(*_slower("case", "all cases", seconds), *_slower("boot", "all boots", boots)),
        figures=tuple(found.figures),
        n_same=found.n_same,
        seconds=_total(seconds),
        boots=_total(boots),
        timed=timed,
    )


def _like(before: RunRecords, baseline: RunRecords, across: Sequence[Across]) -> dict[str, CaseResult]:
    """Key → case of a run like the first, under the keys by which the first is paired."""
    same = [replace(one, after=one.before) for one in across]
    return {pair.key: pair.after for pair in pair_cases(before, baseline, same).both}


@dataclass(frozen=True)
class _Shares:
    """Case key → its figures, in either run."""

    before: dict[str, dict[tuple[str, str], HookFigure]]
    after: dict[str, dict[tuple[str, str], HookFigure]]


def _flat(
    shares: Mapping[str, Mapping[tuple[str, str], HookFigure]],
) -> dict[tuple[str, str, str], HookFigure]:
    return {(case, *key): figure for case, figures in shares.items() for key, figure in figures.items()}


@dataclass
class _Found:
    """What comparing case by case brings to light."""

    growths: list[Growth] = field(default_factory=list)
    hungrier: list[Hunger] = field(default_factory=list)
    figures: list[tuple[float, float, bool]] = field(default_factory=list)
    n_same: int = 0

    def judge(self, pair: Pair, shares: _Shares, spread: Spread) -> None:
        """Compare the errors of one case, comparison by comparison."""
        before, after = shares.before[pair.key], shares.after[pair.key]
        by_label: dict[str, list[HookFigure]] = {}
        for key, figure in after.items():
            if key in before:
                by_label.setdefault(key[0], []).append(figure)
        for label, figures in by_label.items():
            figures.sort(key=lambda figure: figure.order)
            limits = {one.hook: spread.limit((pair.key, label, one.hook)) for one in figures}
            grown = [one for one in figures if one.share > limits[one.hook]]
            mean = mean_growth((spread.high((pair.key, label, one.hook)), one.share) for one in figures)
            for one in figures:
                was = before[label, one.hook]
                self.figures.append((was.share, one.share, one.share > limits[one.hook]))
                self.n_same += was.share == one.share and was.err_engine == one.err_engine
            if not grown and mean <= spread.rule.mean:
                continue
            worst = max(grown or figures, key=lambda one: _beyond(one.share, limits[one.hook]))
            self.growths.append(
                Growth(
                    case=pair.after,
                    label=label,
                    first=grown[0].hook if grown else "",
                    before=before[label, worst.hook],
                    after=worst,
                    limit=limits[worst.hook],
                    n_grown=len(grown),
                    n_hooks=len(figures),
                    mean=mean,
                    mean_limit=spread.rule.mean,
                )
            )

    def weigh(self, pair: Pair, like: Iterable[CaseResult]) -> None:
        """Compare the budgets a case noted; of several runs like the first, the hungriest counts."""
        first = budgets(pair.before)
        for name, repeat in ((n, b) for case in like for n, b in budgets(case).items()):
            if name in first and repeat.high > first[name].high:
                first[name] = repeat
        for name, now in budgets(pair.after).items():
            if name in first and now.low > first[name].high:
                self.hungrier.append(Hunger(pair.after, first[name], now))


def _beyond(share: float, limit: float) -> float:
    return math.inf if share == math.inf else share - limit


def _verdict_change(pair: Pair) -> VerdictChange | None:
    was, now = _ended(pair.before), _ended(pair.after)
    if was == now:
        return None
    ranks = _rank(pair.before), _rank(pair.after)
    kind: Literal["worse", "better", "other"] = "other"
    if ranks[1] > ranks[0]:
        kind = "worse"
    elif ranks[1] < ranks[0]:
        kind = "better"
    return VerdictChange(kind, pair.before, pair.after, was, now)


def _ended(case: CaseResult) -> str:
    """The outcome with what qualifies it."""
    if case.outcome == "skipped":
        return f"skipped ({case.skip_class or 'no class'})"
    if case.outcome == "passed" and "failed" in case.earlier:
        return "passed when repeated"
    return case.outcome or "no outcome"


def _rank(case: CaseResult) -> int:
    """0 passed; 1 skipped for a reason, which judges nothing; 2 bad. Failed to error is a change within the last."""
    if case.outcome == "passed":
        return 2 if "failed" in case.earlier else 0
    explained = case.skip_class in SKIP_CLASSES and case.skip_class != "upstream-failed"
    return 1 if case.outcome == "skipped" and explained else 2


def why(case: CaseResult) -> str:
    """Where a case broke, in a line: the divergence of its first failing comparison, or its reason or message."""
    for entry in case.verdicts:
        verdict = entry.get("verdict")
        divergence = (verdict or {}).get("divergence")
        if divergence and case.outcome in _BAD and divergence.get("sentence"):
            return str(divergence["sentence"])
    return next(iter(case.reason.strip().splitlines()), case.said)


def _boots(
    before: RunRecords, after: RunRecords, across: Sequence[Across]
) -> Iterable[tuple[str, float, float]]:
    """(engine of the second run, seconds before, seconds after) of engines that booted in both."""
    keys = engine_keys(before, across)
    first: dict[str, float] = {}
    for engine in before.engines:
        first.setdefault(keys[str(engine["id"])], number(engine.get("boot_seconds")))
    keys = engine_keys(after, across)
    for engine in after.engines:
        name = str(engine["id"])
        if keys[name] in first:
            yield name, first[keys[name]], number(engine.get("boot_seconds"))


def _slower(
    one: Literal["case", "boot"],
    together: Literal["all cases", "all boots"],
    times: Sequence[tuple[str, float, float]],
) -> Iterable[Slower]:
    was, now = _total(times)
    if now > was * SLOWER_TOTAL and now - was > SLOWER_SECONDS:
        yield Slower(together, f"{len(times)} together", was, now)
    found = [
        Slower(one, name, was, now)
        for name, was, now in times
        if now > SLOWER_FACTOR * was and now - was > SLOWER_SECONDS
    ]
    yield from sorted(found, key=lambda slower: slower.before - slower.after)


def _total(times: Iterable[tuple[str, float, float]]) -> tuple[float, float]:
    both = [(was, now) for _, was, now in times if math.isfinite(was) and math.isfinite(now)]
    return math.fsum(was for was, _ in both), math.fsum(now for _, now in both)
