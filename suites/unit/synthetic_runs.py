"""Several made-up runs that differ in what a test says, and are alike in the rest."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from harness.history import compare_runs, read_records
from harness.store import RESULTS
from suites.unit.synthetic_run import declaration, make_verdict, result, write_run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from harness.history import Comparison

N_CASES, LAYERS = 4, 3
OTHER_TORCH = {"torch": "2.14.0+cpu"}


def verdict_json(*, seed: int = 0, scale: float = 1.0, hook: str = "", **more: Any) -> dict[str, Any]:
    """A verdict with the engine's errors scaled, of one hook or of all."""
    verdict = make_verdict(layers=LAYERS, lengths=(1, 7), seed=seed, **more).to_json()
    for one in verdict["hooks"]:
        if hook in ("", one["hook"]):
            for gate in one["gates"]:
                gate["err_engine"] *= scale
                gate["required_k"] *= scale
    return verdict


def run(
    folder: Path,
    *,
    name: str = "",
    verdict: Callable[[int], dict[str, Any]] | None = None,
    outcomes: Sequence[str] = ("passed",) * N_CASES,
    cases: Sequence[dict[str, Any]] | None = None,
    started: str = "2026-11-29T17:44:55+00:00",
    versions: dict[str, str] | None = None,
    end: bool = True,
    **more: Any,
) -> Path:
    """Write a run of as many cases as there are outcomes; ``lost`` and ``not-run`` leave what they leave."""
    cases = [declaration(n) for n in range(len(outcomes))] if cases is None else cases
    results = []
    for n, (case, outcome) in enumerate(zip(cases, outcomes, strict=True)):
        if outcome == "lost":
            results.append({"type": "started", "id": case["id"]})
        elif outcome != "not-run":
            found = (verdict or (lambda n: verdict_json(seed=n)))(n)
            results.append(result(case, outcome, [found], **more))
    write_run(folder, cases, results, end=end)
    change_run(folder, run_id=name or folder.name, started=started, versions=versions or {})
    return folder


def change_run(folder: Path, *, versions: dict[str, str], **values: Any) -> None:
    """Rewrite the run record."""

    def changed(record: dict[str, Any]) -> dict[str, Any]:
        if record["type"] == "run":
            record |= values
            record["provenance"]["versions"] |= versions
        return record

    rewrite(folder, changed)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Pass each record through ``change``; None drops it."""
    records = [json.loads(line) for line in (folder / RESULTS).read_text().splitlines()]
    kept = [json.dumps(new) for record in records if (new := change(record)) is not None]
    (folder / RESULTS).write_text("".join(f"{line}\n" for line in kept))


def compared(before: Path, after: Path, **options: Any) -> Comparison:
    """The comparison of two folders."""
    return compare_runs(read_records(before), read_records(after), **options)
