"""What a run leaves behind: an append-only ``results.jsonl``, its accounting, and data frames made from it.

May import :mod:`harness.errors` only; verdicts reach it as JSON, so it knows no backend and no engine.

One JSON object per line, each with a ``type``, on disk (fsync) before the next thing happens:

============ =========================================================================================================
type         keys
============ =========================================================================================================
run          schema, run_id, started (ISO 8601), command, argv, profile, plan, k, seeds, provenance; again on a resume
declared     cases: list of {id, suite, check, title, model, dtype, mode, topology, backend, engine, rerun, file, line}
expectations entries: the ledger of known bugs, list of {id, case, reason, link, expires, began, file, expired}
engine       id, config, boot_seconds, describe, log, error (null when it booted)
started      id, time (ISO 8601)
case         id, outcome, skip_class, reason, message, seconds, rerun, verdicts: list of {label, verdict, detail},
             artifacts: of failed comparisons, list of {label, call, tensors, bytes, hooks, left_out} (absent if none);
             expectation: "<id> of <file>", the known bug it is listed under (absent if none)
end          exit_status (pytest's), counts, finished (ISO 8601)
============ =========================================================================================================

Numbers that JSON has no word for are the strings ``"NaN"``, ``"Infinity"``, ``"-Infinity"``, which ``float()`` reads.
"""

from __future__ import annotations

from harness.store.accounting import SuiteTally, Tally, is_green, tally, why_not_green
from harness.store.frames import to_frames, write_parquet
from harness.store.hooks import HookRow, hook_rows
from harness.store.reader import CaseResult, RunRecords, read_run
from harness.store.writer import OUTCOMES, RESULTS, SCHEMA, SKIP_CLASSES, RunStore, ensure_writable

__all__ = [
    "OUTCOMES",
    "RESULTS",
    "SCHEMA",
    "SKIP_CLASSES",
    "CaseResult",
    "HookRow",
    "RunRecords",
    "RunStore",
    "SuiteTally",
    "Tally",
    "ensure_writable",
    "hook_rows",
    "is_green",
    "read_run",
    "tally",
    "to_frames",
    "why_not_green",
    "write_parquet",
]
