"""The records as data frames and Parquet, for questions the report does not answer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.store.hooks import hook_rows, number
from harness.store.reader import read_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd

    from harness.store.reader import CaseResult, RunRecords

__all__ = ["to_frames", "write_parquet"]

_KEYS = ("id", "suite", "check", "model", "dtype", "mode", "topology", "backend", "engine")
#: Column → pandas dtype, fixed so that an empty run has the same schema as a full one.
_CASE_COLUMNS = {
    "run_id": "string",
    **dict.fromkeys(_KEYS, "string"),
    **dict.fromkeys(("title", "outcome", "skip_class", "reason", "message", "rerun"), "string"),
    "seconds": "float64",
    "n_verdicts": "int64",
    "n_hooks": "int64",
    "worst_hook": "string",
    "worst_ratio": "float64",
    "required_k": "float64",
    "divergence": "string",
}
_HOOK_FLOATS = (
    *("k", "err_engine", "err_reference", "floor", "bound", "gate_engine", "gate_reference", "gate_floor"),
    *("gate_bound", "ratio", "required_k", "max_abs", "min_cosine", "max_ulps", "amplification"),
)
_HOOK_INTS = ("order", "depth", "n_rows", "n_massive", "worst_request", "worst_position", "worst_channel")
_HOOK_COLUMNS = {
    "run_id": "string",
    **dict.fromkeys(_KEYS, "string"),
    **dict.fromkeys(("outcome", "verdict", "hook", "gate"), "string"),
    "passed": "bool",
    **dict.fromkeys(_HOOK_INTS, "int64"),
    **dict.fromkeys(_HOOK_FLOATS, "float64"),
}


def to_frames(records: RunRecords) -> tuple[pd.DataFrame, pd.DataFrame]:
    """One row per case; one row per case, verdict and hook. Errors are relative (see :class:`HookRow`)."""
    run_id = str(records.run.get("run_id", ""))
    cases = _frame([{"run_id": run_id, **_case_row(case)} for case in records.cases], _CASE_COLUMNS)
    hooks = _frame(
        [{"run_id": run_id, **row} for case in records.cases for row in _hooks_of(case)], _HOOK_COLUMNS
    )
    return cases, hooks


def write_parquet(folder: Path | str) -> tuple[Path, Path]:
    """Write ``cases.parquet`` and ``results.parquet`` (the hooks) next to ``results.jsonl``.

    Raises:
        UsageError: the folder holds no results.
    """
    cases, hooks = to_frames(read_run(folder))
    paths = Path(folder) / "cases.parquet", Path(folder) / "results.parquet"
    for frame, path in zip((cases, hooks), paths, strict=True):
        frame.to_parquet(path, index=False)
    return paths


def _frame(rows: list[dict[str, Any]], columns: dict[str, str]) -> pd.DataFrame:
    import pandas as pd  # slow to import, and a run that writes records needs none of it

    return pd.DataFrame(rows, columns=list(columns)).astype(columns)


def _verdicts(case: CaseResult) -> Iterator[tuple[str, dict[str, Any]]]:
    for entry in case.verdicts:
        if entry.get("verdict"):
            yield str(entry.get("label", "")), entry["verdict"]


def _case_row(case: CaseResult) -> dict[str, Any]:
    verdicts = [verdict for _, verdict in _verdicts(case)]
    hooks = [row for verdict in verdicts for row in hook_rows(verdict)]
    worst = max(hooks, key=lambda row: row.badness, default=None)
    sentences = (str((verdict.get("divergence") or {}).get("sentence") or "") for verdict in verdicts)
    fields = {name: getattr(case, name) for name in _CASE_COLUMNS if hasattr(case, name)}
    return {
        **fields,
        "n_verdicts": len(verdicts),
        "n_hooks": len(hooks),
        "worst_hook": worst.hook if worst else "",
        "worst_ratio": worst.ratio if worst else float("nan"),
        "required_k": worst.required_k if worst else float("nan"),
        "divergence": next(filter(None, sentences), ""),
    }


def _hooks_of(case: CaseResult) -> Iterator[dict[str, Any]]:
    keys = {name: getattr(case, name) for name in _KEYS}
    for label, verdict in _verdicts(case):
        for row in hook_rows(verdict):
            fields = {name: getattr(row, name) for name in _HOOK_COLUMNS if hasattr(row, name)}
            yield {**keys, **fields, "outcome": case.outcome, "verdict": label, "k": number(verdict.get("k"))}
