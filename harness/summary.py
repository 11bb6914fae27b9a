"""The end of a run: accounting, report, and the few lines a person reads first."""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING

from harness.errors import HarnessError
from harness.report import build_report
from harness.store import hook_rows, read_run, tally, why_not_green, write_parquet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from harness.session import ParitySession
    from harness.store import HookRow, RunRecords

__all__ = ["finish", "summary_lines"]


def finish(run: ParitySession, exit_status: int) -> list[str]:
    """Close what is open, write the end record, the parquet files and the report.

    Returns:
        What keeps the run from being green, one clause each; empty if it is.
    """
    run.pool.close()
    counts = tally(read_run(run.folder)).to_json()
    run.write(
        {
            "type": "end",
            "exit_status": exit_status,
            "counts": counts,
            "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
    )
    write_parquet(run.folder)
    build_report(run.folder)
    return why_not_green(read_run(run.folder))


def _worst(records: RunRecords) -> dict[tuple[str, str], tuple[float, str, HookRow]]:
    """(model, dtype) → the hook that came closest to its bound: (ratio, mode, row)."""
    worst: dict[tuple[str, str], tuple[float, str, HookRow]] = {}
    for case in records.cases:
        for entry in case.verdicts:
            for row in hook_rows(entry.get("verdict") or {}):
                key = (case.model, case.dtype)
                if key not in worst or row.badness > worst[key][2].badness:
                    worst[key] = (row.ratio, case.mode, row)
    return worst


def summary_lines(run: ParitySession) -> Iterator[str]:
    """Cases, where parity broke and began, the worst figures, where the report is."""
    try:
        records = read_run(run.folder)
    except HarnessError as error:
        yield f"no summary: {error}"
        return
    total = tally(records).total
    comparisons = sum(
        len((entry.get("verdict") or {}).get("hooks") or ())
        for case in records.cases
        for entry in case.verdicts
    )
    skipped = ", ".join(f"{count} {kind}" for kind, count in sorted(total.skipped.items()))
    yield (
        f"{total.declared} cases declared, {total.executed} executed, {total.failed} failed, {total.error} errors"
        + (f", skipped: {skipped}" if skipped else "")
        + f"; {comparisons:,} hook comparisons"
    )
    for case in records.cases:
        for entry in case.verdicts:
            divergence = (entry.get("verdict") or {}).get("divergence")
            if divergence and case.outcome == "failed":
                yield f"began: {case.id}: {divergence.get('sentence')}"
    for case in records.cases:
        if case.outcome == "skipped" and case.expectation:
            yield f"known bug: {case.id}: {case.reason}"
    for (model, dtype), (ratio, mode, row) in _worst(records).items():
        yield (
            f"{model} {dtype}: worst {row.hook} ({mode}), {row.gate} err {row.gate_engine:.2e} is {ratio:.2f} of its "
            f"bound {row.gate_bound:.2e}; reference {row.gate_reference:.2e}, floor {row.gate_floor:.2e}"
        )
    problems = why_not_green(records)
    yield "not green: " + "; ".join(problems) if problems else "parity holds"
    if total.lost or total.not_run or total.error:
        yield f"the rest of it: pytest --resume {shlex.quote(str(run.folder))}"
    yield f"report: {run.folder / 'index.html'}"
