"""``vllm-parity compare``: what is printed, the exit status, and options that cannot be."""

from __future__ import annotations

import json

import pytest

from harness.cli import BROKEN, OK, USAGE, main
from harness.history import read_records
from suites.unit.synthetic_runs import run, verdict_json


def test_the_planted_regression_is_named_and_is_1(tmp_path, capsys):
    hook = "blocks.1.mlp.hook_out"
    before = run(tmp_path / "a")
    after = run(
        tmp_path / "b",
        outcomes=["passed", "failed", "passed", "passed"],
        verdict=lambda n: verdict_json(seed=n, broken_from=hook if n == 1 else None),
    )
    page = tmp_path / "page.html"
    assert main(["compare", str(before), str(after), "--html", str(page)]) == BROKEN
    out = capsys.readouterr().out
    assert "verdicts that are worse: 1\n  passed -> failed: suites/test_activations.py" in out
    assert f"{hook} is the first hook over its bound" in out
    assert f"first {hook}" in out
    assert out.endswith("2 regressions\n")
    assert page.is_file()
    assert main(["compare", str(after), str(before)]) == OK
    out = capsys.readouterr().out
    assert "verdicts that are better: 1" in out
    assert out.endswith("no regression\n")


def test_json(tmp_path, capsys):
    before = run(tmp_path / "a")
    after = run(
        tmp_path / "b",
        outcomes=["passed", "failed", "lost", "not-run"],
        verdict=lambda n: verdict_json(seed=n, scale=9),
    )
    assert main(["compare", str(before), str(after), "--format", "json"]) == BROKEN
    document = json.loads(capsys.readouterr().out)
    assert document["regressions"] == 3 + len(document["grown"])
    assert [one["after"] for one in document["verdicts"]] == ["failed", "lost", "not-run"]
    assert {one["case"] for one in document["grown"]} == {case.id for case in read_records(after).cases[:2]}
    assert document["grown"][0]["after"]["share"] > document["grown"][0]["limit"]
    assert document["rule"]["name"] == "alike"


def test_a_long_list_is_cut_and_says_so(tmp_path, capsys):
    before = run(tmp_path / "a", outcomes=["passed"] * 6)
    after = run(tmp_path / "b", outcomes=["failed"] * 6)
    assert main(["compare", str(before), str(after), "--limit", "2"]) == BROKEN
    out = capsys.readouterr().out
    assert "verdicts that are worse: 6" in out
    assert out.count("passed -> failed") == 2
    assert "and 4 more" in out


@pytest.mark.parametrize(
    "options",
    [
        ["--limit", "-1"],
        ["--step", "nan"],
        ["--factor", "0.5"],
        ["--across", "size"],
        ["--format", "xml"],
        ["--baseline", "no/such"],
        ["--html", "no/such/folder/page.html"],
        ["--html", "results.jsonl"],
    ],
)
def test_bad_options_are_one_line(tmp_path, capsys, options):
    folder = str(run(tmp_path / "a"))
    assert main(["compare", folder, folder, *options]) == USAGE
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
