"""Families by points: what a run found, and a reason wherever it found nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from harness.cli import main
from harness.report.families import family_tables
from harness.store import read_run
from suites.unit.synthetic_run import declaration, make_verdict, result, write_run

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """GPT-2 at fp32 eager: one capture, one edited call, one planted fault whose figures are nobody's."""
    case = declaration(0, model="tiny-gpt2", dtype="fp32", mode="eager")
    sound = make_verdict("fp32", layers=4)
    broken = make_verdict("fp32", layers=4, broken_from="embed.hook_out")
    found = result(case, verdicts=[sound, sound, broken], seconds=12.0)
    for entry, label in zip(
        found["verdicts"], ("activations", "rotation 0: values", "planted: activations"), strict=True
    ):
        entry["label"] = label
    return write_run(tmp_path / "run", [case], [found])


def test_each_entry_is_a_figure_or_a_reason(run: Path) -> None:
    text = family_tables([read_run(run)])
    (row,) = [line for line in text.splitlines() if line.startswith("| tiny-gpt2")]
    cells = [cell.strip() for cell in row.strip("|").split("|")][1:]
    assert len(cells) == 5
    for cell in cells:
        captured, edited = map(float, cell.split(" / "))
        assert 0 <= captured == edited <= 3, "the planted fault's figures are not among them"
    assert "At most 3 is parity" in text
    assert "tiny-gpt2 12" in text


def test_a_model_without_a_verdict_is_not_left_out(tmp_path: Path) -> None:
    case = declaration(0, model="tiny-opt", dtype="fp32", mode="eager")
    lost = result(case, outcome="error", message="the engine did not boot")
    fine = declaration(1, model="tiny-gpt2", dtype="fp32", mode="eager")
    found = result(fine, verdicts=[make_verdict("fp32", layers=4)])
    text = family_tables([read_run(write_run(tmp_path / "run", [case, fine], [lost, found]))])
    (row,) = [line for line in text.splitlines() if line.startswith("| tiny-opt (broken)")]
    assert {cell.strip() for cell in row.strip("|").split("|")[1:]} == {"[1]"}
    assert "[1] no verdict: a case of this model failed or could not be judged" in text


def test_the_command_prints_them(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["families", str(run)]) == 0
    assert "## fp32, eager" in capsys.readouterr().out
    assert main(["families", str(run), str(run)]) == 0
    assert "tiny-gpt2 24" in capsys.readouterr().out, "two runs count together"
    assert main(["families", str(run / "nothing")]) == 2
