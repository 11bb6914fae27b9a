"""How each check went from run to run."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import UsageError
from harness.history.changes import changes
from harness.history.figures import worst_share
from harness.history.reading import read_records, run_name
from harness.store import RESULTS
from harness.store.hooks import number

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from harness.history.changes import Change
    from harness.store import CaseResult, RunRecords

__all__ = ["GOOD", "Check", "Point", "SeenRun", "Skipped", "Trend", "find_runs", "trend_of"]

#: A check shows the first of these that a case of it has: skipped only where all of them were.
_WORST_FIRST = ("failed", "error", "lost", "not-run", "passed", "skipped")
GOOD = ("passed", "skipped")


@dataclass(frozen=True)
class Skipped:
    """A folder that gave no run, and why."""

    folder: Path
    reason: str


@dataclass(frozen=True)
class Point:
    """A check in one run.

    Attributes:
        outcome: the worst of its cases, empty where the run had none.
        n_cases, n_bad: of them, those that neither passed nor were skipped.
        share: the largest err(E) / bound of all hooks, NaN where none was compared.
        seconds: of all its cases, NaN where none finished.
        worst: id of the case that decides the outcome.
    """

    outcome: str = ""
    worst: str = ""
    n_cases: int = 0
    n_bad: int = 0
    share: float = math.nan
    seconds: float = math.nan


@dataclass(frozen=True)
class Check:
    """One check over all runs.

    Attributes:
        engine: model, dtype, mode and topology, empty where all engines are taken together.
        points: one per run, oldest first.
        engines: the same check on each engine, empty for one of those.
    """

    suite: str
    check: str
    title: str
    engine: str
    points: tuple[Point, ...]
    engines: tuple[Check, ...] = ()

    @property
    def last(self) -> Point:
        """The newest run that had it."""
        return next((point for point in reversed(self.points) if point.outcome), Point())

    def broken_since(self) -> int | None:
        """The run from which on it has not been good, None where its newest is good."""
        since = None
        for place, point in enumerate(self.points):
            if point.outcome in GOOD:
                since = None
            elif point.outcome and since is None:
                since = place
        return since


@dataclass(frozen=True)
class SeenRun:
    """What is kept of a run: a year of nights with all their verdicts would fill the memory.

    Attributes:
        records: without the verdicts of the cases.
        points: (suite, check, engine) → point, with engine empty for all of a check's engines together.
    """

    records: RunRecords
    points: Mapping[tuple[str, str, str], Point]


@dataclass(frozen=True)
class Trend:
    """Several runs, oldest first, and their checks.

    Attributes:
        differs: per run, what differs from the one before; empty for the first.
    """

    runs: tuple[RunRecords, ...]
    differs: tuple[tuple[Change, ...], ...]
    checks: tuple[Check, ...]
    skipped: tuple[Skipped, ...]


def find_runs(folders: Iterable[Path | str]) -> tuple[list[SeenRun], list[Skipped]]:
    """Read runs, and the runs directly below folders that are none themselves; oldest first, each once.

    Folders in which nothing can be read are named with the reason, and the others are read.

    Raises:
        UsageError: a folder does not exist, or there is no run in any.
    """
    runs: dict[Path, SeenRun] = {}
    skipped: list[Skipped] = []
    named = [Path(folder) for folder in folders]
    for folder in named:
        if not folder.is_dir():
            msg = f"{str(folder)!r} is no folder: name runs, or a folder of runs such as reports"
            raise UsageError(msg)
        inside = (
            [folder] if (folder / RESULTS).exists() else sorted(p for p in folder.iterdir() if p.is_dir())
        )
        for place in inside:
            if place.resolve() in runs:
                continue
            try:
                if not (place / RESULTS).exists():
                    skipped.append(Skipped(place, f"no {RESULTS} in it"))
                    continue
                runs[place.resolve()] = _seen(read_records(place))
            except UsageError as error:
                skipped.append(Skipped(place, str(error)))
    if not runs:
        reasons = "; ".join(dict.fromkeys(one.reason for one in skipped)) or "they are empty"
        msg = f"no run in {', '.join(map(str, named))}: {reasons}"
        raise UsageError(msg)
    return sorted(runs.values(), key=lambda run: _age(run.records)), skipped


def _age(records: RunRecords) -> tuple[float, str]:
    """Sorts runs; one whose start was lost goes by its name, before the others."""
    try:
        started = datetime.fromisoformat(str(records.run.get("started"))).timestamp()
    except (ValueError, OverflowError, OSError):
        started = 0.0
    return started, run_name(records)


def _seen(records: RunRecords) -> SeenRun:
    cases = tuple(replace(case, verdicts=()) for case in records.cases)
    return SeenRun(replace(records, cases=cases), _points(records))


def trend_of(runs: Sequence[SeenRun], skipped: Sequence[Skipped] = ()) -> Trend:
    """Put runs beside each other, check by check.

    Args:
        runs: oldest first, at least one.
        skipped: folders that were no runs, to be named with the rest.
    """
    records = tuple(run.records for run in runs)
    titles = {(case.suite, case.check): case.title for one in records for case in one.cases}
    return Trend(
        runs=records,
        differs=((), *(tuple(_notable(a, b)) for a, b in itertools.pairwise(records))),
        checks=tuple(_checks([run.points for run in runs], titles)),
        skipped=tuple(skipped),
    )


def _notable(before: RunRecords, after: RunRecords) -> Iterable[Change]:
    """Of what differs, versions, commit, machine and devices: options differ between any two runs."""
    return (one for one in changes(before, after) if one.group not in {"options", "environment", "engines"})


def _points(records: RunRecords) -> dict[tuple[str, str, str], Point]:
    k = number(records.run.get("k"))
    grouped: dict[tuple[str, str, str], list[tuple[CaseResult, float]]] = {}
    for case in records.cases:
        engine = " ".join(filter(None, (case.model, case.dtype, case.mode, case.topology)))
        judged = case, worst_share(case, k)
        for name in ("", engine) if engine else ("",):
            grouped.setdefault((case.suite, case.check or case.id, name), []).append(judged)
    return {key: _point(cases) for key, cases in grouped.items()}


def _point(cases: Sequence[tuple[CaseResult, float]]) -> Point:
    outcomes = [(_outcome(case), case.id) for case, _ in cases]
    outcome, worst = min(outcomes, key=lambda one: _WORST_FIRST.index(one[0]))
    seconds = [case.seconds for case, _ in cases if math.isfinite(case.seconds)]
    shares = [share for _, share in cases if not math.isnan(share)]
    return Point(
        outcome=outcome,
        worst=worst,
        n_cases=len(cases),
        n_bad=sum(one not in GOOD for one, _ in outcomes),
        share=max(shares, default=math.nan),
        seconds=math.fsum(seconds) if seconds else math.nan,
    )


def _outcome(case: CaseResult) -> str:
    """The outcome; failed for one that passed only when repeated, error for one this version does not know."""
    if case.outcome == "passed" and "failed" in case.earlier:
        return "failed"
    return case.outcome if case.outcome in _WORST_FIRST else "error"


def _checks(
    columns: Sequence[Mapping[tuple[str, str, str], Point]], titles: dict[tuple[str, str], str]
) -> Iterable[Check]:
    keys = dict.fromkeys(key for column in reversed(columns) for key in column)

    def check(key: tuple[str, str, str], engines: tuple[Check, ...] = ()) -> Check:
        suite, name, engine = key
        points = tuple(column.get(key, Point()) for column in columns)
        return Check(suite, name, titles.get((suite, name), ""), engine, points, engines)

    for key in sorted(keys, key=lambda key: key[0]):
        if not key[2]:
            engines = tuple(check(other) for other in keys if other[:2] == key[:2] and other[2])
            yield check(key, engines)
