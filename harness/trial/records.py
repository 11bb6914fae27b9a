"""What trials left in runs' records: each engine's sensitivity curve, and which planted engine was caught by what."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from harness.store.hooks import number
from harness.trial.sweep import Tried

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from harness.store.reader import CaseResult, RunRecords

__all__ = [
    "ABOVE",
    "BLIND",
    "CAUGHT",
    "LABEL",
    "NAMED",
    "Curve",
    "Fault",
    "above",
    "curves",
    "engine_of",
    "faults",
    "packed",
    "share",
]

#: Of the finding that holds a sweep.
LABEL = "sensitivity"
#: Multiples of the noise above which a fault has to be seen …
ABOVE = 3.0
#: … in this share of cases, and, of those seen, with the right hook named first in this one.
CAUGHT = 0.99
NAMED = 0.95
#: Multiples of the noise below which nothing is promised.
BLIND = 2.0

#: How the names of suites end whose cases each plant a fault.
_SUITES = "faults"
_COLUMNS = tuple(field.name for field in fields(Tried))


def packed(tried: Sequence[Tried]) -> dict[str, Any]:
    """A sweep as a finding's detail: column names once, then one list per fault."""
    rows = [one.to_json() for one in tried]
    return {"planted": len(tried), "columns": list(_COLUMNS), "faults": [list(row.values()) for row in rows]}


def above(tried: Iterable[Tried]) -> list[Tried]:
    """Those larger than :data:`ABOVE` times the noise."""
    return [one for one in tried if one.multiple > ABOVE]


def share(tried: Sequence[Tried], what: str) -> float:
    """Of how many a field is true; NaN of none."""
    return sum(bool(getattr(one, what)) for one in tried) / len(tried) if tried else float("nan")


@dataclass(frozen=True)
class Curve:
    """The sweep on one engine."""

    model: str
    dtype: str
    mode: str
    topology: str
    backend: str
    command: str  #: of the run
    tried: tuple[Tried, ...]

    @property
    def engine(self) -> str:
        """Which one, in words."""
        return engine_of(self)


@dataclass(frozen=True)
class Fault:
    """A planted engine as a run's records tell of it: one broken worker, driver or rank under one check.

    Attributes:
        caught: something turned red on it.
        explained: … and said what is wrong, as its case demands; the case passed.
        by: the check that turned red; empty where an error of the engine's own told it.
        message: first line of what was said.
    """

    name: str
    suite: str
    model: str
    dtype: str
    mode: str
    topology: str
    caught: bool
    explained: bool
    by: str
    message: str


def engine_of(found: Curve | CaseResult) -> str:
    """Which engine something was found on, in words."""
    return f"{found.model}, {found.dtype}, {found.mode}, {found.topology}, {found.backend}"


def curves(runs: Iterable[RunRecords]) -> list[Curve]:
    """Every sweep of some runs."""
    found = []
    for records in runs:
        command = str(records.run.get("command", ""))
        for case in records.cases:
            for detail in _details(case, LABEL):
                place = (case.model, case.dtype, case.mode, case.topology, case.backend)
                found.append(Curve(*place, command, tuple(_unpacked(detail))))
    return found


def faults(runs: Iterable[RunRecords]) -> list[Fault]:
    """Every planted engine of some runs, in the order they ran.

    A fault that nothing saw leaves no finding: its case fails, and stands here by the case's own name.
    """
    found = []
    for records in runs:
        for case in records.cases:
            here = [_fault(case, *told) for told in _told(case)]
            if (
                not here
                and case.suite.endswith(_SUITES)
                and case.outcome not in ("passed", "skipped", "not-run")
            ):
                here = [_fault(case, case.id.partition("::")[2], None)]
            found += here
    return found


def _told(case: CaseResult) -> list[tuple[str, Mapping[str, Any]]]:
    """(fault, detail) of each finding that holds what was said of one."""
    details = [(str(entry.get("label")), entry.get("detail") or {}) for entry in case.verdicts]
    return [(label, detail) for label, detail in details if isinstance(detail.get("message"), str)]


def _fault(case: CaseResult, name: str, detail: Mapping[str, Any] | None) -> Fault:
    return Fault(
        name=name,
        suite=case.suite,
        model=case.model,
        dtype=case.dtype,
        mode=case.mode,
        topology=case.topology,
        caught=detail is not None,
        explained=detail is not None and case.outcome == "passed",
        by=str((detail or {}).get("caught_by") or ""),
        message=(detail or {}).get("message", ""),
    )


def _details(case: CaseResult, label: str) -> list[Mapping[str, Any]]:
    return [entry["detail"] for entry in case.verdicts if entry.get("label") == label and entry.get("detail")]


def _unpacked(detail: Mapping[str, Any]) -> Iterable[Tried]:
    """The faults of a finding; columns of another version that are not known here are left out."""
    columns, rows = detail.get("columns"), detail.get("faults")
    if not isinstance(columns, list) or not isinstance(rows, list):
        return
    for row in rows:
        named = dict(zip(map(str, columns), row, strict=False)) if isinstance(row, list) else {}
        if {*_COLUMNS} - {"explained"} <= set(named):
            yield Tried(
                kind=str(named["kind"]),
                hook=str(named["hook"]),
                seed=named["seed"] if isinstance(named["seed"], int) else 0,
                size=number(named["size"]),
                noise=number(named["noise"]),
                caught=named["caught"] is True,
                named=str(named["named"]),
                placed=named["placed"] is True,
                explained=str(named.get("explained") or ""),
            )
