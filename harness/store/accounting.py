"""Counting: green means that everything declared ran and passed, or says by class and reason why it did not run."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from harness.store.writer import SKIP_CLASSES

if TYPE_CHECKING:
    from harness.store.reader import CaseResult, RunRecords

__all__ = ["SuiteTally", "Tally", "is_green", "tally", "why_not_green"]


@dataclass
class SuiteTally:
    """Numbers of cases; ``declared = executed + error + lost + not_run + all skipped`` holds by construction.

    Attributes:
        error: could not be judged: set-up failed, the engine died, an exception that is no verdict.
        lost: started and never finished.
        not_run: declared and never started.
        undeclared: of the above, those that ran without having been declared.
        unexplained: skipped, but without one of the four classes or without a reason.
        repeated: passed, but only after an earlier attempt in the same run had failed.
    """

    declared: int = 0
    passed: int = 0
    failed: int = 0
    error: int = 0
    lost: int = 0
    not_run: int = 0
    undeclared: int = 0
    unexplained: int = 0
    repeated: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def executed(self) -> int:
        """Cases that reached a verdict, good or bad."""
        return self.passed + self.failed

    @property
    def n_skipped(self) -> int:
        """Cases skipped, whatever the class."""
        return sum(self.skipped.values())

    def count(self, case: CaseResult) -> None:
        """Add one case."""
        self.declared += 1
        self.undeclared += not case.declared
        if case.outcome == "skipped":
            self.skipped[case.skip_class or "unclassified"] += 1
            self.unexplained += case.skip_class not in SKIP_CLASSES or not case.reason.strip()
        elif case.outcome in ("passed", "failed", "error", "lost", "not-run"):
            name = case.outcome.replace("-", "_")
            setattr(self, name, getattr(self, name) + 1)
        else:  # an outcome of another version: never silently green
            self.error += 1
        self.repeated += case.outcome == "passed" and "failed" in case.earlier

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, for the ``end`` record."""
        return {**asdict(self), "skipped": dict(self.skipped), "executed": self.executed}


@dataclass(frozen=True)
class Tally:
    """The accounting of a run."""

    suites: dict[str, SuiteTally]
    total: SuiteTally

    def to_json(self) -> dict[str, Any]:
        """``{"total": …, "suites": {name: …}}``, for the ``end`` record."""
        return {
            "total": self.total.to_json(),
            "suites": {name: suite.to_json() for name, suite in self.suites.items()},
        }


def tally(records: RunRecords) -> Tally:
    """Count the cases of a run, per suite and in total."""
    total = SuiteTally()
    suites: dict[str, SuiteTally] = {}
    for case in records.cases:
        suites.setdefault(case.suite, SuiteTally()).count(case)
        total.count(case)
    return Tally(suites, total)


def why_not_green(records: RunRecords) -> list[str]:
    """Each thing that keeps a run from being green, as a clause for a person; empty if it is green."""
    total = tally(records).total
    upstream = total.skipped["upstream-failed"]
    counts = [
        (total.failed, "failed"),
        (total.error, "could not be judged (error)"),
        (total.lost, "lost: started, never finished"),
        (total.not_run, "did not run"),
        (upstream, "skipped because something they need failed"),
        (total.unexplained, "skipped without a class and a reason"),
        (total.undeclared, "ran without being declared"),
        (total.repeated, "failed at first and passed only when repeated"),
    ]
    reasons = [f"{n} {'case' if n == 1 else 'cases'} {what}" for n, what in counts if n]
    reasons += [
        f"{case.id} passed and is listed as a known bug ({case.expectation}): take it off the list"
        for case in records.cases
        if case.outcome == "passed" and case.expectation
    ]
    reasons += [
        f"known bug {entry.get('id')} of {entry.get('file')} expired on {entry.get('expires')}: renew or remove it"
        for entry in records.expectations
        if entry.get("expired")
    ]
    if not total.executed:
        reasons.append(_nothing(records))
    status = (records.end or {}).get("exit_status")
    if status not in (None, 0) and not reasons:
        reasons.append(f"pytest ended with exit status {status} though no case failed")
    return reasons


def _nothing(records: RunRecords) -> str:
    known = sum(case.is_known_bug for case in records.cases)
    if not known:
        return "nothing ran"
    these = (
        "the one case that ran is a known bug" if known == 1 else f"all {known} cases that ran are known bugs"
    )
    return f"{these}, so nothing was shown to hold"


def is_green(records: RunRecords) -> bool:
    """Whether everything declared passed, or was skipped with a class and a reason, and something ran at all."""
    return not why_not_green(records)
