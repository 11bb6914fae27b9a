"""A run's records read as an audit of its backend."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from harness.capabilities import FLAGS, FULL, Capabilities
from harness.errors import UsageError
from harness.interventions import OPS
from harness.points import TEMPLATES, HookPoint
from harness.store import hook_rows, tally

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from harness.audit.overhead import Overhead
    from harness.audit.smallest import Smallest
    from harness.store import CaseResult, HookRow, RunRecords

__all__ = ["Audit", "Failure", "Flag", "Point", "Suite", "audit_of"]

SCHEMA = 1
#: Labels of verdicts on edited calls end in these.
_EDITED = (": values", ": change")
_LOGITS = "logits"


@dataclass(frozen=True)
class Worst:
    """Comparisons of one kind at one point.

    Attributes:
        comparisons: how many.
        failed: how many of them.
        share: of the bound that the worst used; above 1 where it failed.
    """

    comparisons: int = 0
    failed: int = 0
    share: float = 0.0

    def with_row(self, row: HookRow) -> Worst:
        """One comparison more."""
        return Worst(
            self.comparisons + 1,
            self.failed + (not row.passed),
            row.ratio if not row.ratio <= self.share else self.share,
        )


@dataclass(frozen=True)
class Point:
    """One kind of point: what is declared there, and what was found.

    Attributes:
        template: its name with ``{i}`` for the block, or ``logits``.
        capture: whether it is declared.
        ops: which edits are.
        emitted: whether what the module returns is translated.
        captured, edited: comparisons of clean and of edited calls.
    """

    template: str
    capture: bool
    ops: tuple[str, ...]
    emitted: bool
    captured: Worst
    edited: Worst


@dataclass(frozen=True)
class Flag:
    """A yes-or-no capability.

    Attributes:
        name, meaning: of it.
        declared: by the backend.
        skipped: cases that were not applicable for the lack of it.
    """

    name: str
    meaning: str
    declared: bool
    skipped: int


@dataclass(frozen=True)
class Suite:
    """Numbers of cases of one suite."""

    name: str
    passed: int
    failed: int
    error: int
    not_applicable: int
    other: int  #: lost, never run, or skipped for another reason

    @property
    def verdict(self) -> str:
        """In a word."""
        if self.failed:
            return "fails"
        if self.error or self.other:
            return "not judged"
        return "holds" if self.passed else "not applicable"


@dataclass(frozen=True)
class Failure:
    """A case that did not pass.

    Attributes:
        id, title: of the case.
        outcome: ``failed`` or ``error``.
        begins: where, in a sentence.
        rerun: the command that runs it alone.
    """

    id: str
    title: str
    outcome: str
    begins: str
    rerun: str


@dataclass
class Audit:
    """All of it.

    Attributes:
        backend: as it was named on the command line.
        boots: per engine, its model, what it said of itself, and why it did not boot.
        versions: of the harness' side.
        overhead: what capturing costs, where it was measured.
        smallest: the smallest call that shows the first failure, where one was found.
        script: it, with the library and transformers alone; empty where it cannot be written so.
    """

    backend: str
    command: str
    date: str
    k: float
    versions: dict[str, str]
    boots: list[dict[str, Any]]
    flags: list[Flag]
    points: list[Point]
    suites: list[Suite]
    failures: list[Failure]
    overhead: list[Overhead] = field(default_factory=list)
    smallest: Smallest | None = None
    script: str = ""

    @property
    def verdict(self) -> str:
        """In a sentence."""
        failing = [suite.name for suite in self.suites if suite.verdict == "fails"]
        if failing:
            return f"parity is broken in {', '.join(failing)}"
        if not any(suite.passed for suite in self.suites):
            return "nothing could be judged"
        unjudged = [suite.name for suite in self.suites if suite.verdict == "not judged"]
        if unjudged:
            return f"nothing was found wrong, but cases of {', '.join(unjudged)} could not be judged"
        return "parity holds wherever the backend declares that it can be judged"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        suites = [{**asdict(suite), "verdict": suite.verdict} for suite in self.suites]
        return {"schema": SCHEMA, "verdict": self.verdict, **asdict(self), "suites": suites}


def audit_of(records: RunRecords) -> Audit:
    """Read a run as an audit.

    Raises:
        UsageError: it is of no backend, or of several.
    """
    backends = sorted({case.backend for case in records.cases})
    if len(backends) != 1:
        msg = f"{records.folder} has cases of {', '.join(backends) or 'no backend'}; an audit is of one"
        raise UsageError(msg)
    boots = [_boot(engine) for engine in records.engines]
    capabilities = _capabilities(boots, backends[0])
    provenance = records.run.get("provenance") or {}
    return Audit(
        backend=backends[0],
        command=str(records.run.get("command", "")),
        date=str(records.run.get("started", ""))[:10],
        k=float(records.run.get("k", 3.0)),
        versions=_versions(provenance),
        boots=boots,
        flags=_flags(records, capabilities),
        points=_points(records, capabilities),
        suites=_suites(records),
        failures=[_failure(case) for case in records.cases if case.outcome in ("failed", "error", "lost")],
    )


def _boot(engine: Mapping[str, Any]) -> dict[str, Any]:
    config = engine.get("config") or {}
    error = engine.get("error")
    return {
        "model": config.get("model"),
        "dtype": config.get("dtype"),
        "describe": {k: v for k, v in (engine.get("describe") or {}).items() if k != "worker_pid"},
        # The log's last lines are for whoever has the log.
        "error": str(error).partition("\nlast lines of ")[0] if error else None,
    }


def _capabilities(boots: list[dict[str, Any]], backend: str) -> Capabilities:
    for boot in boots:
        if "capabilities" in boot["describe"]:
            return Capabilities.read(boot["describe"]["capabilities"], backend)
    # Held to everything, or never booted: then nothing is known of it.
    return FULL if any(not boot["error"] for boot in boots) else Capabilities()


def _versions(provenance: Mapping[str, Any]) -> dict[str, str]:
    from harness import __version__

    found = {"vllm-parity": __version__}
    versions = provenance.get("versions") or {}
    return found | {name: str(versions[name]) for name in ("torch", "transformers") if versions.get(name)}


def _flags(records: RunRecords, capabilities: Capabilities) -> list[Flag]:
    return [
        Flag(
            name,
            meaning,
            getattr(capabilities, name),
            sum(
                f"declares no {name} (" in case.reason for case in records.cases if case.outcome == "skipped"
            ),
        )
        for name, meaning in FLAGS.items()
    ]


def _judged(records: RunRecords) -> Iterator[tuple[str, bool, HookRow]]:
    """Every comparison: its point's template, whether of an edited call, its figures."""
    for case in records.cases:
        for entry in case.verdicts:
            label = str(entry.get("label", ""))
            for row in hook_rows(entry.get("verdict") or {}):
                name = _LOGITS if row.hook == _LOGITS else HookPoint.parse(row.hook).template
                yield name, label.endswith(_EDITED), row


def _points(records: RunRecords, capabilities: Capabilities) -> list[Point]:
    worst: dict[tuple[str, bool], Worst] = {}
    for name, is_edited, row in _judged(records):
        worst[name, is_edited] = worst.get((name, is_edited), Worst()).with_row(row)
    found = []
    for template in (*TEMPLATES, _LOGITS):
        known = template != _LOGITS
        hook = template.format(i=0)
        point = Point(
            template,
            capture=bool(capabilities.points([hook])) if known else capabilities.logits,
            ops=tuple(op for op in OPS if known and capabilities.edits(op, hook)),
            emitted=known and capabilities.is_emitted(hook),
            captured=worst.get((template, False), Worst()),
            edited=worst.get((template, True), Worst()),
        )
        found.append(point)
    return found


def _suites(records: RunRecords) -> list[Suite]:
    suites = []
    for name, counts in tally(records).suites.items():
        away = counts.skipped["not-applicable"]
        other = counts.lost + counts.not_run + counts.n_skipped - away
        suites.append(Suite(name, counts.passed, counts.failed, counts.error, away, other))
    return suites


def _failure(case: CaseResult) -> Failure:
    sentences = [
        str(divergence["sentence"])
        for entry in case.verdicts
        if (divergence := (entry.get("verdict") or {}).get("divergence"))
    ]
    begins = sentences[0] if sentences else case.said or case.outcome
    return Failure(case.id, case.title, case.outcome, begins, case.rerun)
