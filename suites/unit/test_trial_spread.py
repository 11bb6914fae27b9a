"""How near sound engines come to their bounds: read back from records, counted, shown, and never mixed with faults."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import pytest

from harness.cli import main
from harness.store import read_run
from harness.trial.spread import Comparison, Spread, quantile, spreads
from harness.trial.spread_figure import spread_figure
from harness.trial.spread_text import spread_tables
from suites.unit.synthetic_run import declaration, result, write_run


def verdict(*needed, k=3.0, hook="blocks.0.hook_out"):
    gates = [{"name": f"gate {i}", "required_k": one, "passed": False} for i, one in enumerate(needed)]
    return {"k": k, "hooks": [{"hook": hook, "gates": gates}]}


def case(number, outcome, *verdicts, dtype="fp32", **more):
    declared = declaration(number, dtype=dtype)
    found = result(declared, outcome, **more)
    found["verdicts"] = [{"label": "activations", "verdict": one, "detail": {}} for one in verdicts]
    return declared, found


def run(folder, *cases):
    return write_run(folder, [declared for declared, _ in cases], [found for _, found in cases])


@pytest.fixture
def folder(tmp_path):
    """Three cases at fp32, one of them red and one of nothing, and one at bf16; the others do not count."""
    return run(
        tmp_path / "r",
        case(0, "passed", verdict(0.0, 1.2, 2.0), verdict(0.3)),
        case(1, "failed", verdict(0.6, "Infinity", hook="ln_final.hook_normalized")),
        case(2, "passed", None),
        case(3, "passed", verdict(1.0, k=2.0), dtype="bf16"),
        case(4, "error", verdict(9.0)),
        case(5, "skipped", verdict(9.0), skip_class="known-bug"),
    )


def test_every_gate_of_every_case_that_ended_in_a_verdict(folder):
    bf16, fp32 = spreads([read_run(folder)])
    assert (bf16.dtype, bf16.cases, bf16.red) == ("bf16", 1, 0)
    assert (fp32.dtype, fp32.cases, fp32.red) == ("fp32", 2, 1)
    assert [one.needed for one in fp32.comparisons] == [0.0, 1.2, 2.0, 0.3, 0.6, math.inf]
    assert [one.case for one in fp32.comparisons] == [0, 0, 0, 0, 1, 1]
    assert fp32.comparisons[2].share == pytest.approx(2 / 3)
    assert bf16.comparisons[0].share == pytest.approx(0.5), "of that run's own bound"
    assert len(spreads([read_run(folder)] * 2)[1].commands) == 1, "a command is named once"
    assert spreads([read_run(folder)] * 2)[1].cases == 4


def test_what_is_no_number_needs_every_k(tmp_path):
    [spread] = spreads([read_run(run(tmp_path / "r", case(0, "failed", verdict("NaN", None))))])
    assert [one.needed for one in spread.comparisons] == [math.inf, math.inf]
    assert spread.red_at(1e9) == (2, 1)


def test_other_constants(folder):
    fp32 = spreads([read_run(folder)])[1]
    assert fp32.red_at(0.5) == (4, 2)
    assert fp32.red_at(1.2) == (2, 2), "equal passes"
    assert fp32.red_at(3.0) == (1, 1)


@pytest.mark.parametrize(("share", "value"), [(0.5, 2.0), (0.51, 3.0), (0.99, 4.0), (1.0, 4.0), (0.0, 1.0)])
def test_quantiles(share, value):
    assert quantile([1.0, 2.0, 3.0, 4.0], share) == value
    assert math.isnan(quantile([], share))


def test_the_tables(folder):
    text = spread_tables(spreads([read_run(folder)]))
    assert "2 cases, 1 red; 6 comparisons. Nearest its bound: ln_final.hook_normalized, gate 1, of" in text
    assert "| all gates | 6 | 1 | 0.40 | inf | inf | inf | inf |" in text, "what is exact is counted apart"
    assert "| gate 2 | 1 | 0 | 0.67 | 0.67 | 0.67 | 0.67 | 0.67 |" in text
    assert re.search(r"^    0\.6 to 0\.7      1 #+$", text, re.MULTILINE)
    assert re.search(r"^over its bound      1 #+$", text, re.MULTILINE)
    assert "| fp32: of 6 comparisons | 3 | 2 | 1 | 1 | 1 | 1 |" in text
    assert "| fp32: of 2 cases | 2 | 2 | 1 | 1 | 1 | 1 |" in text


def test_each_comparison_is_in_one_bin(folder):
    fp32 = spreads([read_run(folder)])[1]
    bins = re.findall(r"^ *(?:[\d.]+ to [\d.]+|over its bound) +(\d+)", spread_tables([fp32]), re.MULTILINE)
    assert len(bins) == 11
    assert sum(map(int, bins)) == 5


def test_the_command(folder, tmp_path, capsys):
    svg = tmp_path / "spread.svg"
    assert main(["trial", str(folder), "--spread-svg", str(svg)]) == 0
    out = capsys.readouterr().out
    assert "## Sound engines" in out
    assert "## Sensitivity" not in out
    root = ET.parse(svg).getroot()
    assert "fp32: 6 comparisons of 2 cases" in "".join(root.itertext())


def test_the_command_refuses(tmp_path, folder, capsys):
    assert main(["trial", str(folder), "--svg", str(tmp_path / "no.svg")]) == 2
    assert "--svg" in capsys.readouterr().err
    assert main(["trial", str(folder), "--spread-svg", str(tmp_path / "no" / "such.svg")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert not (tmp_path / "no.svg").exists()


def test_the_figure_falls_escapes_and_asks_for_nothing():
    made = tuple(Comparison(0, "h", "g", needed, 3.0, "e") for needed in (0.5, 1.5, 2.5))
    figure = str(spread_figure([Spread("<script>", 1, 0, made, ("pytest",))]))
    assert "<script>" not in figure
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", figure)
    [line] = [
        p
        for p in ET.fromstring(figure).iter("{http://www.w3.org/2000/svg}path")
        if p.get("stroke-width") == "2"
    ][:1]
    heights = [float(point.split()[1]) for point in line.get("d")[1:].split("L")]
    assert heights == sorted(heights), "down the page"
    assert len(set(heights)) == 3
    assert "k = 3" in figure
