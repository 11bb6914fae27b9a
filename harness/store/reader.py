"""Reading a run back, whatever state it was left in."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import UsageError
from harness.store.hooks import number
from harness.store.intact import require_shape
from harness.store.writer import RESULTS, SCHEMA

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CaseResult", "RunRecords", "read_run"]

_LABELS = ("suite", "check", "title", "model", "dtype", "mode", "topology", "backend", "engine")


@dataclass(frozen=True)
class CaseResult:
    """A case as it was declared, with what became of it.

    Attributes:
        outcome: one of :data:`~harness.store.OUTCOMES`, ``lost`` (started, never finished) or ``not-run``.
        seconds: wall time of the case, NaN if it never finished.
        verdicts: as recorded: label, verdict JSON or None, detail.
        rerun: the command line that runs just this case.
        declared: False for a case that ran without having announced itself.
        earlier: outcomes of attempts before the last, oldest first.
        artifacts: what its failed comparisons left, see :func:`harness.artifacts.save`; paths are relative to the run.
        expectation: the entry of the ledger of known bugs that is about it, if any.
        file, line: where its test stands, relative to pytest's root; line 0 where that was not recorded.
    """

    id: str
    suite: str = ""
    check: str = ""
    title: str = ""
    model: str = ""
    dtype: str = ""
    mode: str = ""
    topology: str = ""
    backend: str = ""
    engine: str = ""
    outcome: str = "not-run"
    skip_class: str = ""
    reason: str = ""
    message: str = ""
    seconds: float = float("nan")
    verdicts: tuple[Mapping[str, Any], ...] = ()
    rerun: str = ""
    declared: bool = True
    earlier: tuple[str, ...] = ()
    artifacts: tuple[Mapping[str, Any], ...] = ()
    expectation: str = ""
    file: str = ""
    line: int = 0

    @property
    def is_known_bug(self) -> bool:
        """Whether it ran, failed, and the ledger excuses that."""
        return self.skip_class == "known-bug" and bool(self.expectation)

    @property
    def said(self) -> str:
        """The message, or else the reason, in a line: of a traceback the one that pytest marks as the error."""
        lines = (self.message or self.reason).strip().splitlines()
        errors = (line[1:].strip() for line in lines if line.startswith("E  "))
        return next(errors, next(iter(lines), ""))


@dataclass(frozen=True)
class RunRecords:
    """All of one run.

    Attributes:
        run: the first ``run`` record; empty if even that was lost.
        cases: in the order they were declared, then any that were not.
        engines: the last record of each engine.
        expectations: the ledger of known bugs, as it last was.
        end: the last ``end`` record, None while the run goes on or after it was killed.
        damaged: numbers of the lines that could not be read, from 1.
    """

    folder: Path
    run: Mapping[str, Any]
    cases: tuple[CaseResult, ...]
    engines: tuple[Mapping[str, Any], ...] = ()
    expectations: tuple[Mapping[str, Any], ...] = ()
    end: Mapping[str, Any] | None = None
    damaged: tuple[int, ...] = ()


@dataclass
class _Gathered:
    run: dict[str, Any] = field(default_factory=dict)
    declared: dict[str, dict[str, Any]] = field(default_factory=dict)
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    expectations: list[dict[str, Any]] = field(default_factory=list)
    events: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    end: dict[str, Any] | None = None

    def take(self, record: Any) -> None:
        require_shape(record)
        kind = record.get("type")
        if kind == "run":
            self.run = self.run or record
            self.expectations = []  # a resumed run reads the ledger anew
            self.end = None  # a resumed run has not ended
        elif kind == "declared":
            self.declared.update({str(case["id"]): case for case in record.get("cases") or ()})
        elif kind == "expectations":
            self.expectations = [dict(entry) for entry in record.get("entries") or ()]
        elif kind == "engine":
            self.engines[str(record["id"])] = record
        elif kind in ("started", "case"):
            self.events.setdefault(str(record["id"]), []).append(record)
        elif kind == "end":
            self.end = record


def read_run(folder: Path | str) -> RunRecords:
    """Read ``results.jsonl`` of a run, finished, running or killed.

    Raises:
        UsageError: no results there, or written by a newer version.
    """
    folder = Path(folder)
    try:
        lines = (folder / RESULTS).read_bytes().splitlines()
    except (OSError, ValueError) as error:  # a path with a null byte is a ValueError
        reason = getattr(error, "strerror", None) or error
        msg = f"no results to read in {str(folder)!r} ({RESULTS}: {reason}): name the folder of a run"
        raise UsageError(msg) from error
    gathered = _Gathered()
    damaged: list[int] = []
    for position, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            gathered.take(json.loads(line))
        except (ValueError, KeyError, RecursionError):
            damaged.append(position)
    _check_schema(gathered.run, folder)
    ids = dict.fromkeys([*gathered.declared, *gathered.events])
    return RunRecords(
        folder=folder,
        run=gathered.run,
        cases=tuple(_case(i, gathered.declared.get(i), gathered.events.get(i, [])) for i in ids),
        engines=tuple(gathered.engines.values()),
        expectations=tuple(gathered.expectations),
        end=gathered.end,
        damaged=tuple(damaged),
    )


def _check_schema(run: Mapping[str, Any], folder: Path) -> None:
    schema = run.get("schema", SCHEMA)
    if schema != SCHEMA:
        msg = f"{str(folder)!r} has results of schema {schema}, this version reads {SCHEMA}: use the one that wrote it"
        raise UsageError(msg)


def _case(case_id: str, declaration: Mapping[str, Any] | None, events: list[dict[str, Any]]) -> CaseResult:
    announced = declaration or {}
    labels = {key: _text(announced.get(key)) for key in (*_LABELS, "rerun")}
    labels["suite"] = labels["suite"] or "(undeclared)" * (declaration is None)
    finished = [event for event in events if event["type"] == "case"]
    common: dict[str, Any] = {**labels, "id": case_id, "declared": declaration is not None}
    common |= {"file": _text(announced.get("file")), "line": int(announced.get("line") or 0)}
    if not events:
        return CaseResult(**common, reason="declared, but nothing was recorded of it")
    if events[-1]["type"] == "started":
        since = _moment(events[-1].get("time"))
        reason = f"started {since}and never finished: its process was killed or died"
        earlier = tuple(_text(event.get("outcome")) for event in finished)
        return CaseResult(**common, outcome="lost", reason=reason, earlier=earlier)
    last = finished[-1]
    common["rerun"] = _text(last.get("rerun")) or common["rerun"]
    return CaseResult(
        **common,
        outcome=_text(last.get("outcome")),
        skip_class=_text(last.get("skip_class")),
        reason=_text(last.get("reason")),
        message=_text(last.get("message")),
        seconds=number(last.get("seconds")),
        verdicts=tuple(last.get("verdicts") or ()),
        earlier=tuple(_text(event.get("outcome")) for event in finished[:-1]),
        artifacts=tuple(last.get("artifacts") or ()),
        expectation=_text(last.get("expectation")),
    )


def _moment(value: Any) -> str:
    """``at 2026-11-29T17:44:55+00:00 ``, from ISO text or seconds since 1970; empty for nothing."""
    if isinstance(value, int | float):
        try:
            value = datetime.fromtimestamp(value, tz=UTC).isoformat(timespec="seconds")
        except (OverflowError, ValueError, OSError):  # no moment that a calendar has
            return ""
    return f"at {value} " if value else ""


def _text(value: Any) -> str:
    return "" if value is None else str(value)
