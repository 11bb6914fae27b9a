"""Checks over several runs: order, gaps, since when something is broken, and folders that are no runs."""

from __future__ import annotations

import json
import math

import pytest

from harness.cli import OK, USAGE, main
from harness.history import find_runs, trend_of
from harness.history.trend import Check, Point
from suites.unit.synthetic_run import declaration
from suites.unit.synthetic_runs import rewrite, run, verdict_json

NIGHTS = ["2026-11-27T02:00:00+0000", "2026-11-28T02:00:00+0000", "2026-11-29T02:00:00+0000"]


def nights(tmp_path, *outcomes, **more):
    """A run per night, its folder's name in no order."""
    return [
        run(tmp_path / f"run-{len(outcomes) - n}", outcomes=each, started=NIGHTS[n], **more)
        for n, each in enumerate(outcomes)
    ]


def points(*outcomes):
    return Check("suite", "check", "", "", tuple(Point(outcome=outcome) for outcome in outcomes))


def test_runs_are_found_below_folders_and_put_in_order(tmp_path):
    nights(tmp_path / "reports", ["passed"], ["passed"], ["passed"])
    runs, skipped = find_runs([tmp_path / "reports", tmp_path / "reports" / "run-2"])
    assert [one.records.run["run_id"] for one in runs] == ["run-3", "run-2", "run-1"]
    assert not skipped


def test_folders_that_are_no_runs_are_named_and_the_rest_is_read(tmp_path, capsys):
    reports = tmp_path / "reports"
    newer, verdict, _ = nights(reports, ["passed"], ["passed"], ["passed"])
    rewrite(newer, lambda record: {**record, "schema": 2} if record["type"] == "run" else record)

    def damaged(record):
        if record["type"] == "case":
            record["verdicts"][0]["verdict"]["hooks"] = [{"hook": "x", "depth": "deep"}]
        return record

    rewrite(verdict, damaged)
    (reports / "benchmarks").mkdir()
    (reports / "other").mkdir()
    (reports / "other" / "results.jsonl").write_text('{"something": "else"}\n')
    (reports / "README.md").write_text("a file is no folder")
    assert main(["history", str(reports)]) == OK
    out = capsys.readouterr().out
    assert "no run: 3 folders" in out
    assert "benchmarks: no results.jsonl in it" in out
    assert "other: " in out
    assert "without a run in it" in out
    assert "schema 2" in out
    assert "1 lost, 1 damaged line" in out, "a run with a verdict that cannot be read is a run all the same"
    assert "  2  run-1 " in out


@pytest.mark.parametrize("make", [None, "empty", "foreign"])
def test_no_run_at_all_is_an_error(tmp_path, capsys, make):
    if make:
        (tmp_path / "reports").mkdir()
    if make == "foreign":
        (tmp_path / "reports" / "x").mkdir()
    assert main(["history", str(tmp_path / "reports")]) == USAGE
    assert str(tmp_path / "reports") in capsys.readouterr().err


def test_a_check_over_its_runs(tmp_path):
    nights(
        tmp_path, ["passed", "passed"], ["passed", "failed"], ["passed", "skipped"], skip_class="no-hardware"
    )
    runs, _ = find_runs([tmp_path])
    trend = trend_of(runs)
    (check,) = trend.checks
    assert [point.outcome for point in check.points] == ["passed", "failed", "passed"]
    assert [point.n_bad for point in check.points] == [0, 1, 0]
    assert check.points[1].worst.endswith("-1]")
    assert all(0 < point.share < 1 for point in check.points)
    assert check.points[0].seconds == pytest.approx(2 * 0.84)
    assert [engine.engine for engine in check.engines] == ["smollm2-135m bf16 compiled tp1"]
    assert check.broken_since() is None


@pytest.mark.parametrize(
    ("outcomes", "since"),
    [
        (("passed", "failed", "failed"), 1),
        (("failed", "passed", "error"), 2),
        (("failed", "", "lost"), 0),
        (("failed", "passed", ""), None),
        (("failed", "skipped"), None),
        (("", ""), None),
    ],
)
def test_broken_since(outcomes, since):
    assert points(*outcomes).broken_since() == since


def test_the_newest_point_is_the_newest_run_that_had_it():
    assert points("passed", "failed", "").last.outcome == "failed"
    assert points("", "").last == Point()


def test_checks_that_come_and_go(tmp_path):
    run(tmp_path / "a", cases=[declaration(0, check="old")], outcomes=["passed"], started=NIGHTS[0])
    run(tmp_path / "b", cases=[declaration(0, check="new")], outcomes=["lost"], started=NIGHTS[1])
    trend = trend_of(find_runs([tmp_path])[0])
    found = {check.check: [point.outcome for point in check.points] for check in trend.checks}
    assert found == {"new": ["", "lost"], "old": ["passed", ""]}
    new = next(check for check in trend.checks if check.check == "new")
    assert math.isnan(new.points[1].share)
    assert math.isnan(new.points[1].seconds)


def test_a_failure_wanted_by_a_passing_case_is_not_its_share(tmp_path):
    """Cases with planted faults pass because a comparison in them failed."""
    folder = run(
        tmp_path / "a",
        outcomes=["passed"],
        verdict=lambda _: verdict_json(broken_from="blocks.0.mlp.hook_out"),
    )
    (check,) = trend_of(find_runs([folder])[0]).checks
    assert check.points[0].share < 1


def test_text_names_what_is_broken_since_when_and_what_changed(tmp_path, capsys):
    nights(tmp_path, ["passed"], ["failed"], ["failed"])
    rewrite(
        tmp_path / "run-2",
        lambda record: (
            record
            if record["type"] != "run"
            else {**record, "provenance": {**record["provenance"], "project": {"commit": "abc"}}}
        ),
    )
    assert main(["history", str(tmp_path)]) == OK
    out = capsys.readouterr().out
    assert "activations / every_hook  +XX  0." in out
    assert (
        "not good in the newest run that had them: 1\n  activations / every_hook: 1 of 1 case, since run-2"
        in out
    )
    assert "project commit: fdb591c0e1 -> abc" in out


def test_json_and_the_choice_of_runs(tmp_path, capsys):
    nights(tmp_path, ["passed"], ["failed"], ["lost"])
    assert main(["history", str(tmp_path), "--format", "json", "--last", "2"]) == OK
    document = json.loads(capsys.readouterr().out)
    assert [one["run_id"] for one in document["runs"]] == ["run-2", "run-1"]
    (check,) = document["checks"]
    assert [point["outcome"] for point in check["points"]] == ["failed", "lost"]
    assert check["points"][1]["share"] is None
    assert check["broken_since"] == 0
    assert main(["history", str(tmp_path), "--profile", "full"]) == USAGE
    assert "there are smoke" in capsys.readouterr().err
    assert main(["history", str(tmp_path), "--last", "0"]) == USAGE


def test_verdicts_are_not_kept(tmp_path):
    """A year of nights with all of them would fill the memory."""
    nights(tmp_path, ["passed"], ["failed"])
    runs, _ = find_runs([tmp_path])
    assert not any(case.verdicts for one in runs for case in one.records.cases)
