"""From a red case to its tensors: what the page tells a person to do does it, whatever the record holds."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from typing import Any
from urllib.parse import unquote

import pytest

from harness.report import build_report
from harness.report.steps import files, loading, steps
from harness.store import CaseResult, read_run
from suites.unit.synthetic_run import Page

KEPT: dict[str, Any] = {
    "label": "batch",
    "call": "artifacts/a~1/0.json",
    "tensors": "artifacts/a~1/0.safetensors",
    "bytes": 82_000,
    "hooks": 3,
    "left_out": 0,
    "engine": "e",
    "first": {"hook": "blocks.1.hook_out", "rows": [[2, 18], [0, 5]]},
}


def red(*artifacts: dict[str, Any], outcome: str = "failed", **more: Any) -> CaseResult:
    return CaseResult("s.py::test_a[it's]", outcome=outcome, engine="e", artifacts=artifacts, **more)


def test_the_steps_lead_from_the_rows_to_the_cause() -> None:
    found = steps(red(KEPT), "reports/r")
    assert [shlex.split(step.text)[:2] for step in (found[0], found[2])] == [
        ["vllm-parity", "repro"],
        ["vllm-parity", "bisect"],
    ]
    assert shlex.split(found[0].text)[2:] == ["s.py::test_a[it's]", "--run", "reports/r"]
    assert "load_file('reports/r/artifacts/a~1/0.safetensors')" in found[1].text
    assert "err(E) of rows 2:18, 0:5" in found[1].text


@pytest.mark.parametrize(
    "case", [red(KEPT, outcome="passed"), red(), red({"label": "a", "error": "not written: no space left"})]
)
def test_a_case_that_kept_nothing_has_no_steps(case: CaseResult) -> None:
    assert steps(case, "r") == []


def test_what_was_kept_is_said_and_what_was_not() -> None:
    other = {**KEPT, "engine": "another", "left_out": 2}
    first, second, third = files(red(KEPT, other, {"label": "z", "error": "not written: no space left"}))
    assert first.holds == "3 hooks, 80.1 KiB"
    assert second.holds == "3 hooks, 80.1 KiB, 2 failing hooks found no room, engine another"
    assert (third.tensors, third.error) == ("", "not written: no space left")


def test_records_of_an_older_version_name_the_first_hook_in_their_verdict() -> None:
    hooks = [{"hook": "embed.hook_out", "passed": True}, {"hook": "blocks.0.hook_out", "passed": False}]
    old = {name: value for name, value in KEPT.items() if name not in ("first", "engine")}
    verdicts = ({"verdict": {"passed": False, "hooks": hooks}},)
    assert "'blocks.0.hook_out/engine'" in loading(red(old, verdicts=verdicts), old, "r")
    assert loading(red(old), old, "r") == ""


@pytest.mark.parametrize(
    "first", [{}, {"hook": None}, {"hook": "h", "rows": "x"}, {"hook": "h", "rows": [[1]]}, 7]
)
def test_odd_records_do_no_harm(first: Any) -> None:
    entry = {"call": "a", "tensors": "b", "first": first, "bytes": "many", "hooks": None}
    steps(red(entry), "r")
    assert files(red(entry))[0].holds == ""


def test_nothing_recorded_becomes_code() -> None:
    evil = "'); import os; os.abort() #\n"
    entry = {**KEPT, "tensors": evil, "first": {"hook": evil, "rows": [[0, 1]]}}
    text = loading(red(entry), entry, evil)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "No such file" in done.stderr or "FileNotFoundError" in done.stderr
    (one,) = files(red({**KEPT, "tensors": "javascript:alert(1)"}))
    assert one.links[0] == "./javascript%3Aalert%281%29"
    (other,) = files(red({**KEPT, "call": "//example.org/x"}))
    assert other.links[1].startswith("./")


def test_the_page_of_a_real_red_run_has_all_of_it(red_run) -> None:
    page = Page(build_report(red_run.run))
    run = read_run(red_run.run)
    assert run.run["folder"] == f"reports/{red_run.run.name}", "as it is named where the run was started"
    links = {one.get("href") for one in page.all("a")}
    for case in run.cases:
        for entry in case.artifacts:
            assert (red_run.run / entry["tensors"]).is_file()
            assert {entry["tensors"], entry["call"]} <= {
                unquote(link).removeprefix("./") for link in links if link
            }
    lines = re.findall(r"load_file\('(.*?)'\)", page.text)
    assert len(lines) == 3
    assert all((red_run.folder / line).is_file() for line in lines), "from where the run was started"
    assert page.text.count("No tensors were kept") == 1
