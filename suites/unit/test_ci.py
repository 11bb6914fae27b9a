"""What a CI gets of a run: JUnit properties, GitHub's summary and annotations, escaped for where each is shown."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from harness.ci import began, error_commands, publish, step_summary
from harness.store import CaseResult, RunRecords, read_run
from suites.unit.synthetic_run import SENTENCE, declaration, make_verdict, result, write_run


def records_of(tmp_path: Path, **more: str) -> RunRecords:
    good, bad = declaration(1), {**declaration(2), "file": "suites/test_a.py", "line": 12}
    verdict = make_verdict(broken_from="blocks.5.mlp.hook_out")
    results = [result(good), result(bad, "failed", [verdict], message="AssertionError: 50%\nof it", **more)]
    return read_run(write_run(tmp_path / "run", [good, bad], results))


def test_junit_says_which_engine_and_where_it_began(red_run) -> None:
    cases = {
        case.get("name").partition("[")[0]: case
        for case in ET.parse(red_run.folder / "junit.xml").iter("testcase")
    }
    said = {p.get("name"): p.get("value") for p in cases["test_red"].iter("property")}
    engine = said.pop("engine")
    assert engine.startswith("hf-tiny-llama-fp32-eager-tp1-step64")
    assert float(said.pop("worst_ratio")) > 1
    assert said.pop("began").startswith("blocks.1.hook_out is")
    assert said == {
        "model": "tiny-llama",
        "dtype": "fp32",
        "mode": "eager",
        "topology": "tp1",
        "backend": "hf",
        "worst_hook": "blocks.1.hook_out",
    }
    green = {p.get("name"): p.get("value") for p in cases["test_green"].iter("property")}
    assert float(green["worst_ratio"]) <= 1
    assert "began" not in green
    names = [p.get("name") for p in cases["test_green"].iter("property")]
    assert len(names) == len(set(names))


def test_a_real_run_writes_summary_and_error_commands(red_run) -> None:
    summary = (red_run.folder / "summary.md").read_text(encoding="utf-8")
    assert "**❌ Not green: 4 cases failed**" in summary
    assert "| **all** | 5 | 1 | 4 | 0 | 0 | 0 | 0 |" in summary
    assert "(https://github.example/me/project/actions/runs/7#artifacts)" in summary
    errors = [line for line in red_run.stdout.splitlines() if line.startswith("::error ")]
    assert len(errors) == 4
    line = 1 + next(
        i
        for i, text in enumerate((red_run.folder / "test_mini.py").read_text().splitlines())
        if "def test_red(" in text
    )
    place = f"::error file={red_run.folder.name}/test_mini.py,line={line},title="
    assert errors[0].startswith(place)
    assert "::failed: blocks.1.hook_out is" in errors[0]
    assert errors[3].endswith("::failed: AssertionError: 50%25 of it,")


def test_a_green_run_is_said_to_be(tmp_path: Path) -> None:
    case = declaration(1)
    records = read_run(write_run(tmp_path, [case], [result(case)]))
    summary = step_summary(records, {})
    assert "**✅ Parity holds**" in summary
    assert "where it began" not in summary
    assert error_commands(records, tmp_path, {}) == []


def test_nothing_is_done_outside_of_a_ci(tmp_path: Path) -> None:
    records = records_of(tmp_path)
    assert publish(records.folder, tmp_path, {}) == []
    assert publish(records.folder, tmp_path, {"GITHUB_ACTIONS": "false"}) == []


def test_summaries_of_several_steps_add_up_and_a_missing_one_is_no_crash(tmp_path: Path) -> None:
    records, target = records_of(tmp_path), tmp_path / "summary.md"
    for _ in range(2):
        assert publish(records.folder, tmp_path, {"GITHUB_STEP_SUMMARY": str(target)}) == []
    assert target.read_text(encoding="utf-8").count("## vLLM parity") == 2
    (said,) = publish(records.folder, tmp_path, {"GITHUB_STEP_SUMMARY": str(tmp_path / "no" / "file")})
    assert said.startswith("no step summary")


def test_what_is_shown_cannot_be_markup_or_a_command(tmp_path: Path) -> None:
    case = {
        **declaration(1, model="<script>|`x`"),
        "id": "a.py::t[<b>|@me\n::warning::x]",
        "file": "a,b:c.py",
    }
    bad = result(case, "failed", message="100%\r\n::set-output name=x::y")
    records = read_run(write_run(tmp_path / "run", [case], [bad]))
    summary = step_summary(records, {})
    shown, _, as_code = summary.partition("Run one")
    assert "<b>" not in shown
    assert "@me" not in shown
    assert [line for line in as_code.splitlines() if "<b>" in line] == [
        f"    {' '.join(bad['rerun'].split())}"
    ]
    row = next(line for line in summary.splitlines() if "| failed |" in line and "::" in line)
    assert row.replace("\\|", "").count("|") == 4
    (line,) = error_commands(records, tmp_path, {})
    assert "\n" not in line
    assert "file=a%2Cb%3Ac.py,line=1,title=a.py%3A%3At[<b>|@me%0A%3A%3Awarning" in line
    assert line.endswith("::failed: 100%25")


def test_annotations_are_as_many_as_are_shown(tmp_path: Path) -> None:
    cases = [declaration(n) for n in range(60)]
    records = read_run(write_run(tmp_path, cases, [result(case, "failed") for case in cases]))
    assert len(error_commands(records, tmp_path, {})) == 10
    summary = step_summary(records, {})
    assert "| and 10 more |" in summary
    assert len(summary) < 1 << 20


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (CaseResult("a", message="E one\ntwo"), "E one"),
        (CaseResult("a", outcome="lost", reason="started and never finished"), "started and never finished"),
    ],
)
def test_where_it_began_in_words(case: CaseResult, said: str) -> None:
    assert began(case) == said


def test_where_it_began_is_the_verdicts_sentence(tmp_path: Path) -> None:
    assert began(records_of(tmp_path).cases[1]) == SENTENCE
