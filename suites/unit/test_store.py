"""The store: what is on disk survives a kill, and nothing that did not run counts as green."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.errors import HarnessError, UsageError
from harness.parity.types import CaseVerdict, Divergence, Gate, HookVerdict, RowRef
from harness.store import (
    RESULTS,
    RunStore,
    ensure_writable,
    hook_rows,
    is_green,
    read_run,
    tally,
    to_frames,
    why_not_green,
    write_parquet,
)

RUN = {"run_id": "r1", "started": "2026-11-29T17:44:55+00:00", "k": 3.0}


def declared(*names: str, **more: Any) -> dict[str, Any]:
    cases = [
        {"id": name, "suite": "activations", "check": "hooks", "model": "tiny", "dtype": "bf16", **more}
        for name in names
    ]
    return {"type": "declared", "cases": cases}


def case(name: str, outcome: str = "passed", **more: Any) -> dict[str, Any]:
    return {"type": "case", "id": name, "outcome": outcome, "seconds": 0.5, **more}


def write(folder: Path, *records: dict[str, Any]) -> Path:
    with RunStore.create(folder, RUN) as store:
        for record in records:
            store.append(record)
    return folder


def verdict(*, passed: bool = True, n_rows: int = 6) -> CaseVerdict:
    def hook(name: str, err: float, row_err: float, reference: float) -> HookVerdict:
        gates = tuple(
            Gate(
                kind,
                e,
                reference,
                1e-3,
                3 * max(reference, 1e-3),
                e / max(reference, 1e-3),
                e <= 3 * max(reference, 1e-3),
                where,
            )
            for kind, e, where in (("aggregate", err, None), ("worst row", row_err, RowRef(0, 2)))
        )
        rows = (tuple(err * (1 + i / 100) for i in range(n_rows)),)
        ok = all(gate.passed for gate in gates)
        return HookVerdict(name, 1, ok, gates, n_rows, 0, 0.1, RowRef(0, 2), 7, 0.9999, 2.0, None, rows)

    hooks = (
        hook("embed.hook_out", 1e-3, 2e-3, 0.0),
        hook("blocks.0.hook_out", 2e-3, 2.4e-3 if passed else 0.5, 2e-3),
    )
    divergence = (
        None
        if passed
        else Divergence("blocks.0.hook_out", "one row", RowRef(0, 2), None, None, None, "it began here")
    )
    return CaseVerdict(passed, 3.0, "bf16", hooks, divergence)


def entry(result: CaseVerdict, label: str = "prefill") -> dict[str, Any]:
    return {"label": label, "verdict": result.to_json(), "detail": {}}


# --- on disk ------------------------------------------------------------------------------------------------


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    engine = {"type": "engine", "id": "e", "boot_seconds": 21.4, "describe": {"runner": "V1"}}
    write(
        tmp_path,
        declared("a", "b"),
        engine,
        {"type": "started", "id": "a"},
        case("a", rerun="pytest a"),
        {"type": "end", "exit_status": 1},
    )
    records = read_run(tmp_path)
    assert records.run["schema"] == 1
    assert [c.outcome for c in records.cases] == ["passed", "not-run"]
    assert (records.cases[0].rerun, records.cases[0].model, records.cases[0].seconds) == (
        "pytest a",
        "tiny",
        0.5,
    )
    assert records.engines[0]["boot_seconds"] == 21.4
    assert records.end is not None
    assert records.damaged == ()


def test_a_killed_process_loses_the_running_case_only(tmp_path: Path) -> None:
    script = f"""
import os
from harness.store import RunStore
store = RunStore.create({str(tmp_path)!r}, {RUN!r})
store.append({declared("a", "b", "c")!r})
store.append({{"type": "started", "id": "a"}})
store.append({case("a")!r})
store.append({{"type": "started", "id": "b"}})
os.write(store._descriptor, b'{{"type": "case", "id": "b", "outc')
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == -signal.SIGKILL
    records = read_run(tmp_path)
    assert [c.outcome for c in records.cases] == ["passed", "lost", "not-run"]
    assert "never finished" in records.cases[1].reason
    assert records.damaged == (6,)
    assert not is_green(records)

    with RunStore.resume(tmp_path, {**RUN, "run_id": "r1"}) as store:
        for name in ("b", "c"):
            store.append({"type": "started", "id": name})
            store.append(case(name))
    assert is_green(read_run(tmp_path)), "the half line must not have swallowed the first record after it"


def test_cut_anywhere_it_is_readable_and_not_green(tmp_path: Path) -> None:
    full = write(
        tmp_path / "full",
        declared("a", "b"),
        {"type": "started", "id": "a"},
        case("a"),
        {"type": "started", "id": "b"},
        case("b", "failed"),
    )
    data = (full / RESULTS).read_bytes()
    cut = tmp_path / "cut"
    cut.mkdir()
    for length in range(len(data)):
        (cut / RESULTS).write_bytes(data[:length])
        assert not is_green(read_run(cut))


def test_numbers_json_cannot_say_survive_and_stay_strict_json(tmp_path: Path) -> None:
    odd = {"nan": math.nan, "inf": -math.inf, 3: "int key", "path": Path("x"), "set": {2, 1}}
    write(tmp_path, declared("a"), case("a", verdicts=[{"label": "x", "verdict": None, "detail": odd}]))

    def refuse(word: str) -> float:
        raise AssertionError(word)

    lines = [
        json.loads(line, parse_constant=refuse) for line in (tmp_path / RESULTS).read_text().splitlines()
    ]
    detail = lines[-1]["verdicts"][0]["detail"]
    assert math.isnan(float(detail["nan"]))
    assert float(detail["inf"]) == -math.inf
    assert (detail["path"], detail["set"], detail["3"]) == ("x", [1, 2], "int key")


def test_row_errors_are_pooled_where_it_passed_and_kept_where_it_failed(tmp_path: Path) -> None:
    good, bad = verdict(n_rows=241), verdict(passed=False, n_rows=241)
    write(tmp_path, declared("a"), case("a", "failed", verdicts=[entry(good), entry(bad)]))
    kept, whole = (hook_rows(e["verdict"])[1] for e in read_run(tmp_path).cases[0].verdicts)
    assert len(kept.row_errors[0]) <= 40
    assert kept.rows_per_error == 7
    assert max(kept.row_errors[0]) == pytest.approx(max(good.hooks[1].row_errors[0]), rel=5e-3)
    assert len(whole.row_errors[0]) == 241
    assert whole.rows_per_error == 1


@pytest.mark.parametrize(
    "record",
    [
        {"type": "verdict"},
        {"type": "case", "id": "a"},
        {"type": "case", "id": "a", "outcome": "ok"},
        {"type": "case", "id": "a", "outcome": "skipped", "skip_class": "lazy"},
    ],
)
def test_a_record_that_means_nothing_is_refused(tmp_path: Path, record: dict[str, Any]) -> None:
    with (
        RunStore.create(tmp_path, RUN) as store,
        pytest.raises(ValueError, match=r"is not one of|needs outcome"),
    ):
        store.append(record)


def test_a_folder_holds_one_run(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path, RUN)
    store.close()
    store.close()
    with pytest.raises(HarnessError, match="closed"):
        store.append(case("a"))
    with pytest.raises(UsageError, match=r"already holds results.*resume"):
        RunStore.create(tmp_path, RUN)
    with pytest.raises(UsageError, match=r"no results.jsonl to resume"):
        RunStore.resume(tmp_path / "other", RUN)
    with pytest.raises(UsageError, match="no results to read"):
        read_run(tmp_path / "other")


def test_results_of_a_newer_version_are_refused(tmp_path: Path) -> None:
    with RunStore.create(tmp_path, {**RUN, "schema": 2}):
        pass
    with pytest.raises(UsageError, match="schema 2"):
        read_run(tmp_path)


def test_a_full_disk_is_an_error_that_names_the_file() -> None:
    store = RunStore(Path("/dev/full"), os.open("/dev/full", os.O_WRONLY))
    with pytest.raises(HarnessError, match="cannot append to /dev/full: No space left"):
        store.append(case("a"))
    store.close()


def test_unwritable_folders_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ensure_writable(tmp_path / "new" / "deep")
    assert list((tmp_path / "new" / "deep").iterdir()) == []
    candidates = [tmp_path / "file", tmp_path / "file" / "run", Path("/proc/parity"), tmp_path / "nul\0"]
    for folder in candidates:
        with pytest.raises(
            UsageError, match=r"cannot write to report folder .*: .*; name a folder"
        ) as caught:
            ensure_writable(folder)
        assert "\n" not in str(caught.value)


# --- accounting ---------------------------------------------------------------------------------------------


def test_every_case_is_counted_once(tmp_path: Path) -> None:
    write(
        tmp_path,
        declared("a", "b", "c", "d", "e", "f", "g"),
        case("a"),
        case("b", "failed"),
        case("c", "error"),
        case("d", "skipped", skip_class="no-hardware", reason="needs 2 GPUs"),
        case("g", "skipped", skip_class="not-installed", reason="no Ray here"),
        {"type": "started", "id": "e"},
    )
    counted = tally(read_run(tmp_path))
    suite = counted.suites["activations"]
    assert suite == counted.total
    assert (
        suite.declared,
        suite.executed,
        suite.passed,
        suite.failed,
        suite.error,
        suite.lost,
        suite.not_run,
    ) == (7, 2, 1, 1, 1, 1, 1)
    assert suite.declared == suite.executed + suite.error + suite.lost + suite.not_run + suite.n_skipped
    assert counted.to_json()["total"]["skipped"] == {"no-hardware": 1, "not-installed": 1}


NO_HARDWARE = case("b", "skipped", skip_class="no-hardware", reason="needs 2 GPUs")
NOT_INSTALLED = case("b", "skipped", skip_class="not-installed", reason="no Ray here")


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([declared("a", "b"), case("a"), case("b")], None),
        ([declared("a", "b"), case("a"), NO_HARDWARE], None),
        ([declared("a", "b"), case("a"), NOT_INSTALLED], None),
        (
            [declared("a"), case("a", "error"), case("a")],
            None,
        ),  # a dead engine, repeated: no verdict was undone
        ([declared("a", "b"), case("a"), case("b", "failed")], "1 case failed"),
        ([declared("a", "b"), case("a"), case("b", "error")], "1 case could not be judged"),
        ([declared("a", "b"), case("a"), {"type": "started", "id": "b"}], "1 case lost"),
        ([declared("a", "b", "c"), case("a")], "2 cases did not run"),
        ([declared("b"), NO_HARDWARE], "nothing ran"),
        ([], "nothing ran"),
        ([declared("a", "b"), case("a"), case("b", "skipped", reason="because")], "without a class"),
        (
            [declared("a", "b"), case("a"), case("b", "skipped", skip_class="known-bug", reason=" ")],
            "without a class",
        ),
        (
            [declared("a", "b"), case("a"), case("b", "skipped", skip_class="upstream-failed", reason="e")],
            "something they need",
        ),
        ([declared("a"), case("a"), case("z")], "without being declared"),
        ([declared("a"), case("a", "failed"), case("a")], "passed only when repeated"),
        ([declared("a"), case("a"), {"type": "end", "exit_status": 3}], "exit status 3"),
    ],
)
def test_green_means_it_ran(tmp_path: Path, records: list[dict[str, Any]], reason: str | None) -> None:
    run = read_run(write(tmp_path, *records))
    assert is_green(run) is (reason is None)
    assert reason is None or any(reason in line for line in why_not_green(run))


# --- frames -------------------------------------------------------------------------------------------------


def test_frames_have_a_row_per_case_and_per_hook(tmp_path: Path) -> None:
    verdicts = [
        entry(verdict()),
        entry(verdict(passed=False), "decode"),
        {"label": "note", "verdict": None, "detail": {}},
    ]
    write(tmp_path, declared("a", "b"), case("a", "failed", verdicts=verdicts))
    cases, hooks = to_frames(read_run(tmp_path))
    assert list(cases["outcome"]) == ["failed", "not-run"]
    assert (cases["worst_hook"][0], cases["divergence"][0], cases["n_hooks"][0]) == (
        "blocks.0.hook_out",
        "it began here",
        4,
    )
    assert cases["worst_ratio"][0] == pytest.approx(0.5 / 6e-3)
    assert list(hooks["verdict"]) == ["prefill"] * 2 + ["decode"] * 2
    assert list(hooks["order"]) == [0, 1, 0, 1]
    last = hooks.iloc[3]
    assert (last["gate"], last["passed"], last["k"], last["required_k"]) == ("worst row", False, 3.0, 250.0)
    assert last["err_engine"] == 2e-3, "the aggregate, whichever gate decided"


def test_parquet_keeps_its_schema_when_empty(tmp_path: Path) -> None:
    empty = write_parquet(write(tmp_path / "empty"))
    full = write_parquet(write(tmp_path / "full", declared("a"), case("a", verdicts=[entry(verdict())])))
    for one, other in zip(empty, full, strict=True):
        assert list(pd.read_parquet(one).dtypes) == list(pd.read_parquet(other).dtypes)
    assert [path.name for path in full] == ["cases.parquet", "results.parquet"]
