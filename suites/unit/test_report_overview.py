"""What the report says beside single cases: budgets with their targets, time and boots, and what it must not say."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from harness.provenance import redact_text
from harness.report.budgets import bars
from harness.report.numbers import size
from harness.report.pack import Pack
from harness.report.timing import boots_figure, model_times
from harness.report.view import case_view
from harness.store import CaseResult, read_run
from suites.unit.synthetic_run import declaration, report, result, write_run

if TYPE_CHECKING:
    from pathlib import Path

    from harness.report.budgets import Bar

MIB = 2**20
HF = "hf_" + "a1B2" * 8


def budget(*details: dict[str, Any]) -> list[Bar]:
    found = tuple({"label": "budget", "verdict": None, "detail": detail} for detail in details)
    case = CaseResult("t", suite="budgets", outcome="passed", verdicts=found)
    return bars([case_view(case, "case-t", full=False, run="reports/x")])


def test_the_banner_says_what_was_asserted_and_not_where_the_traceback_begins(tmp_path: Path) -> None:
    case = declaration(1)
    message = "parity = <Parity object>\n\n>   assert 3 <= 1\nE   AssertionError: too slow\nE   assert 3 <= 1"
    page = report(tmp_path, [case], [result(case, "failed", message=message)])
    banner = re.search(r'<div class="banner .*?</p>', page.source, re.DOTALL)
    assert banner
    assert "AssertionError: too slow" in banner[0]
    assert "Parity object" not in banner[0]


def test_a_ratio_stands_beside_its_target_and_quartiles() -> None:
    (bar,) = budget({"ratio": 1.047, "quartiles": [1.006, 1.089], "rounds": 15, "target": 1.10})
    assert bar.measured == "1.047 times plain vLLM, quartiles 1.006 to 1.089"
    assert bar.target == "at most 1.10 times"
    assert "15 pairs" in bar.source
    assert bar.share == pytest.approx(1.047 / 1.10)
    assert bar.holds
    assert bar.percent(bar.low) < bar.percent(bar.share) < bar.percent(bar.high) < bar.percent(1.5) == 100


@pytest.mark.parametrize(
    ("detail", "measured", "target", "holds"),
    [
        (
            {"promised": [MIB, MIB], "held": [MIB, 1.04 * MIB]},
            "1.04 MiB on the fullest of 2 ranks",
            "1.05 MiB",
            True,
        ),
        ({"promised": [MIB], "held": [1.06 * MIB]}, "1.06 MiB", "1.05 MiB", False),
        ({"plain": MIB, "tapped": 3 * MIB, "capture_state": MIB}, "2 MiB over plain vLLM", "1.5 MiB", False),
        (
            {"plain": 0, "tapped": MIB, "capture_state": MIB, "target": 2 * MIB},
            "1 MiB over plain vLLM",
            "2 MiB",
            True,
        ),
        ({"bytes": 3 * MIB, "captured_per_call": 100}, "3 MiB", "4 MiB", True),
        ({"bytes": 7 * MIB, "captured_per_call": 6 * MIB}, "7 MiB", "6 MiB", False),
    ],
)
def test_memory_stands_beside_what_was_promised(
    detail: dict[str, Any], measured: str, target: str, holds: bool
) -> None:
    (bar,) = budget(detail)
    assert (bar.measured, bar.target, bar.holds) == (measured, target, holds)


def test_details_that_are_no_budget_make_no_bar() -> None:
    assert not budget({"ratio": 0.2}, {"ratio": "NaN", "target": 1.1}, {"promised": [], "held": []}, {})
    assert not budget({"promised": [1, 2], "held": [1]}, {"promised": [0], "held": [0]})
    assert not budget({"bytes": 9 * MIB, "captured_per_call": 1}, {"caught_by": "judge_growth"}), "planted"


def test_a_broken_budget_is_marked_in_words(tmp_path: Path) -> None:
    case = declaration(0, suite="budgets")
    record = result(case, "failed", message="AssertionError: too much")
    record["verdicts"] = [
        {
            "label": "peak of a forward",
            "verdict": None,
            "detail": {"plain": 0, "tapped": 9e6, "capture_state": 1e6},
        }
    ]
    page = report(tmp_path, [case], [record])
    assert "broken: peak of a forward" in page.words
    assert "1.5 times the capture state" in page.words


def test_time_is_told_per_model_with_its_boots(tmp_path: Path) -> None:
    cases = [declaration(n, model=("a", "b")[n % 2]) for n in range(4)]
    folder = write_run(
        tmp_path, cases, [result(case, seconds=10.0 * (i + 1)) for i, case in enumerate(cases)]
    )
    longest, other = model_times(read_run(folder))
    assert (longest.model, longest.n_cases, longest.seconds, longest.share) == ("b", 2, 60.0, 1.0)
    assert (other.model, other.seconds) == ("a", 40.0)


def test_boots_are_columns_in_their_order() -> None:
    engines = [
        {"id": "<one>", "boot_seconds": 30.0, "config": {"mode": "compiled"}},
        {"id": "two", "boot_seconds": 2.0, "config": {"mode": "eager"}},
        {"id": "three", "boot_seconds": None, "error": "EngineError: no"},
        {"id": "four", "boot_seconds": None},
    ]
    figure = str(boots_figure(engines))
    assert [figure.index(f"class={kind} ") for kind in ("boot", "boot-eager", "boot-failed")] == sorted(
        figure.index(f"class={kind} ") for kind in ("boot", "boot-eager", "boot-failed")
    )
    assert "&lt;one&gt;: 30 s" in figure
    assert "three: did not boot" in figure
    assert "3 boots" in figure
    assert boots_figure([]) == boots_figure(engines[2:]) == ""


def test_pieces_are_found_again_under_their_keys() -> None:
    pack = Pack()
    keys = [pack.add("x" * 200_000) for _ in range(4)]
    assert keys == ["0.0", "0.1", "1.0", "1.1"]
    assert sum(map(len, pack.texts())) < 5_000


@pytest.mark.parametrize(
    ("value", "expected"), [(712, "712 B"), (1.07 * MIB, "1.07 MiB"), (2**41, "2,048 GiB")]
)
def test_sizes_have_units(value: float, expected: str) -> None:
    assert size(value) == expected


@pytest.mark.parametrize(
    "text",
    [
        f"401 for {HF} at the hub",
        "HF_TOKEN=abcd1234",
        "{'WANDB_API_KEY': 'abcd1234'}",
        "Authorization: Bearer abcd1234efgh",
        "https://me:abcd1234@registry.example/simple",
        "pytest --hf-token abcd1234",
    ],
)
def test_secrets_do_not_reach_the_page(tmp_path: Path, text: str) -> None:
    cases = [declaration(0, title=text), declaration(1)]
    records = [
        result(cases[0], "failed", message=text, rerun=text),
        result(cases[1], "skipped", skip_class="no-hardware", reason=text),
    ]
    page = report(tmp_path, cases, records)
    for place in (page.source, page.text, *page.bodies):
        assert "abcd1234" not in place
        assert HF not in place
    assert "[redacted]" in page.text


def test_what_only_looks_like_a_secret_stays() -> None:
    for text in (
        "max_num_batched_tokens=2048",
        "256 tokens: 3 flips",
        "--max-tokens 64",
        "key = value",
        "KEYS",
    ):
        assert redact_text(text) == text


def test_each_class_of_skip_stands_by_itself(tmp_path: Path) -> None:
    cases = [declaration(n) for n in range(3)]
    records = [
        result(cases[0]),
        result(cases[1], "skipped", skip_class="no-hardware", reason="one GPU"),
        result(cases[2], "skipped", skip_class="not-installed", reason="no Ray here"),
    ]
    page = report(tmp_path, cases, records)
    assert "2 skipped with a reason: 1 no-hardware, 1 not-installed" in page.text
    assert "1 no hardware, 1 not installed" in page.text
