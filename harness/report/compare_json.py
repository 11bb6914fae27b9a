"""Two runs beside each other as JSON, for a program that acts on it."""

from __future__ import annotations

import math
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from harness.history.compare import why
from harness.history.figures import Budget, HookFigure
from harness.history.reading import run_name
from harness.report.compare_words import rule_words

if TYPE_CHECKING:
    from harness.history.compare import Comparison, Growth, Hunger
    from harness.store import RunRecords

__all__ = ["compare_json"]


def compare_json(found: Comparison) -> dict[str, Any]:
    """The whole comparison as JSON; numbers JSON has no word for are strings that ``float()`` reads."""
    document = {
        "kind": "compare",
        "version": 1,
        "regressions": found.n_regressions,
        "before": _run(found.before),
        "after": _run(found.after),
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


def _run(records: RunRecords) -> dict[str, Any]:
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
