"""How near their bounds the comparisons of sound engines came: what the one constant of the verdict is chosen by.

A *comparison* is one gate of one hook of one call. What a run's planted engines were found to do is not in its
verdicts, so every verdict that is there counts, also that of a case that failed: on a sound engine a false alarm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.store.hooks import number
from harness.trial.records import engine_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from harness.store.reader import CaseResult, RunRecords

__all__ = ["Comparison", "Spread", "quantile", "spreads"]


@dataclass(frozen=True)
class Comparison:
    """One gate of one hook.

    Attributes:
        case: number of its case among those of the dtype.
        hook, gate: which.
        needed: the smallest k that would have passed, err(E) / max(err(R), floor); infinite where a value is no number.
        k: of the run.
        engine: in words.
    """

    case: int
    hook: str
    gate: str
    needed: float
    k: float
    engine: str

    @property
    def share(self) -> float:
        """err(E) / bound; above 1 is red."""
        return self.needed / self.k


@dataclass(frozen=True)
class Spread:
    """All comparisons at one dtype.

    Attributes:
        cases: that compared anything and ended in a verdict, green or red.
        red: of those.
        comparisons: in the order they were made.
        commands: of the runs, each once.
    """

    dtype: str
    cases: int
    red: int
    comparisons: tuple[Comparison, ...]
    commands: tuple[str, ...]

    def red_at(self, k: float) -> tuple[int, int]:
        """How many comparisons, and cases with one, would be red with another k."""
        found = [one.case for one in self.comparisons if one.needed > k]
        return len(found), len(set(found))


def spreads(runs: Iterable[RunRecords]) -> list[Spread]:
    """What some runs compared, per dtype in alphabetical order; dtypes without any are left out."""
    made: dict[str, list[Comparison]] = {}
    cases: dict[str, list[bool]] = {}
    commands: dict[str, dict[str, None]] = {}
    for records in runs:
        for case in records.cases:
            if case.outcome not in ("passed", "failed"):
                continue
            here = list(_compared(case, len(cases.get(case.dtype, ()))))
            if here:
                made.setdefault(case.dtype, []).extend(here)
                cases.setdefault(case.dtype, []).append(case.outcome == "failed")
                commands.setdefault(case.dtype, {})[str(records.run.get("command", ""))] = None
    return [
        Spread(dtype, len(cases[dtype]), sum(cases[dtype]), tuple(made[dtype]), tuple(commands[dtype]))
        for dtype in sorted(made)
    ]


def _compared(case: CaseResult, place: int) -> Iterator[Comparison]:
    for entry in case.verdicts:
        verdict: Mapping[str, Any] = entry.get("verdict") or {}
        k = number(verdict.get("k"))
        for hook in verdict.get("hooks") or ():
            for gate in hook.get("gates") or ():
                needed = number(gate.get("required_k"))
                needed = math.inf if math.isnan(needed) else needed
                yield Comparison(
                    place, str(hook.get("hook")), str(gate.get("name")), needed, k, engine_of(case)
                )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of an ascending list does not exceed; NaN of none."""
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else math.nan
