"""The trial itself: faults are planted where and as large as they say, and what is told of them is what was found."""

from __future__ import annotations

import dataclasses
import math
import re
import xml.etree.ElementTree as ET

import pytest
import torch

from harness.cli import main
from harness.parity.metrics import row_errors
from harness.parity.synthetic import stream
from harness.parity.verdict import compare
from harness.store import read_run
from harness.trial.figure import sensitivity_figure
from harness.trial.kinds import KINDS, Layout, plant
from harness.trial.records import Curve, above, curves, faults, packed, share
from harness.trial.sweep import Sweep, Tried, row_noise, sweep
from harness.trial.tables import curve_tables, percent, smallest
from suites.unit.synthetic_run import declaration, result, write_run

LAYERS = 4
LENGTHS = (9, 24, 12)
LAYOUT = Layout(prompt_lengths=(9, 20, 10), lengths=LENGTHS, step=8, head_dim=16)
BY_NAME = {kind.name: kind for kind in KINDS}
HOOK = "blocks.2.hook_out"


def case(seed: int = 5, dtype: str = "float32"):
    return stream(seed, dtype=dtype, lengths=LENGTHS, realisations=3)


def moved(c, planted, hook: str = HOOK) -> dict[int, list[int]]:
    """Request → its rows that are not what they were."""
    found = {}
    for i, (after, before) in enumerate(zip(planted.captured[hook], c.engine[hook], strict=True)):
        if rows := (after != before).any(dim=1).nonzero().flatten().tolist():
            found[i] = rows
    return found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_fault_moves_the_rows_it_says_by_the_size_it_says(kind):
    c = case()
    before = {hook: [rows.clone() for rows in rows_of] for hook, rows_of in c.engine.items()}
    planted = plant(kind, c.engine, HOOK, 1e-3, LAYOUT, seed=3)
    assert planted.size == pytest.approx(1e-3, rel=0.02)
    assert moved(c, planted) == {i: mask.nonzero().flatten().tolist() for i, mask in planted.rows.items()}
    errors = torch.cat(
        [
            row_errors(planted.captured[HOOK][i][mask], c.engine[HOOK][i][mask].double())
            for i, mask in planted.rows.items()
        ]
    )
    assert torch.allclose(errors, torch.full_like(errors, 1e-3), rtol=0.05), (
        "each row by the same share of its norm"
    )
    later = ["blocks.3.hook_out"] if kind.carried else []
    assert [hook for hook in c.engine if moved(c, planted, hook)] == [HOOK, *later]
    for hook, rows_of in before.items():
        assert all(map(torch.equal, c.engine[hook], rows_of)), "the clean captures are left as they are"


def test_which_rows_the_kinds_touch():
    c = case()

    def rows(name: str) -> dict[int, list[int]]:
        return moved(c, plant(BY_NAME[name], c.engine, HOOK, 0.1, LAYOUT, seed=1))

    assert rows("decode rows only") == {1: [20, 21, 22, 23], 2: [10, 11]}
    assert rows("the last chunk only") == {1: [16, 17, 18, 19]}
    assert len(rows("one request")) == 1
    [(request, found)] = rows("one request").items()
    assert found == list(range(LENGTHS[request]))
    assert [len(found) for found in rows("one row").values()] == [1]
    everywhere = rows("one position of every request")
    assert len(everywhere) == 3
    assert len({tuple(found) for found in everywhere.values()}) == 1


def test_which_channels_the_kinds_touch():
    c = case()

    def channels(name: str) -> set[int]:
        after = torch.cat(plant(BY_NAME[name], c.engine, HOOK, 0.1, LAYOUT, seed=1).captured[HOOK])
        return set((after != torch.cat(c.engine[HOOK])).any(dim=0).nonzero().flatten().tolist())

    assert len(channels("one channel")) == 1
    head, half = sorted(channels("one head's channels")), sorted(channels("one of two ranks' channels"))
    assert head == list(range(head[0], head[0] + 16))
    assert head[0] % 16 == 0
    assert half in ([*range(32)], [*range(32, 64)])
    assert len(channels("wrong scale")) == 64


def test_a_drift_adds_up():
    c = case()
    planted = plant(BY_NAME["drift in every layer"], c.engine, "blocks.0.hook_out", 1e-2, LAYOUT)
    for block in range(LAYERS):
        hook = f"blocks.{block}.hook_out"
        ratio = planted.captured[hook][1] / c.engine[hook][1]
        assert torch.allclose(ratio, torch.full_like(ratio, 1.01 ** (block + 1)), rtol=1e-4)


def test_no_rows_of_that_kind_plants_nothing():
    c = case()
    no_decode = Layout(LENGTHS, LENGTHS, 8, 16)
    planted = plant(BY_NAME["decode rows only"], c.engine, HOOK, 0.1, no_decode)
    assert (planted.rows, planted.size) == ({}, 0.0)
    assert moved(c, planted) == {}


def test_noise_is_never_less_than_the_floor_or_the_calibration_and_follows_a_fragile_row():
    c = stream(5, lengths=LENGTHS, realisations=3, fragile_rows=1)
    noise = row_noise(c.truth, c.same, dtype="fp32", n_layers=LAYERS)
    assert [len(rows) for rows in noise[HOOK]] == list(LENGTHS)
    rows = torch.cat(noise[HOOK])
    assert float(rows.max()) > 2 * float(rows.median()), "the fragile row stands out"
    assert float(rows.min()) >= 2**-24 * 2
    calibrated = row_noise(c.truth, c.same, dtype="fp32", n_layers=LAYERS, calibrated={HOOK: 1.0})
    assert float(torch.cat(calibrated[HOOK]).min()) >= 1.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_verdict_sees_what_is_above_three_times_the_noise(dtype):
    """On made-up captures of a sound engine; suites/test_trial.py does it on real ones."""
    c = case(dtype=dtype)
    noise = row_noise(c.truth, c.same, dtype=dtype, n_layers=LAYERS)

    def judge(rows):
        return compare(
            rows, c.truth, c.same, dtype=dtype, n_layers=LAYERS, prompt_lengths=LAYOUT.prompt_lengths
        )

    assert judge(c.engine).passed
    tried = list(
        sweep(c.engine, noise, judge, LAYOUT, Sweep((0.5, 3.3, 6.0), per_decade=0, draws=1, hooks=1))
    )
    assert {one.kind for one in tried} == set(BY_NAME)
    loud = above(tried)
    assert share(loud, "caught") > 0.95
    assert share([one for one in loud if one.caught], "right") > 0.95
    assert share([one for one in tried if one.multiple < 1], "caught") < 0.3


def test_a_blind_verdict_is_told_apart():
    """A rule with k = 100 sees nothing near the noise: the shares of the sweep say so."""
    c = case()
    noise = row_noise(c.truth, c.same, dtype="fp32", n_layers=LAYERS)

    def judge(rows):
        return compare(rows, c.truth, c.same, dtype="fp32", n_layers=LAYERS, k=100.0)

    tried = list(sweep(c.engine, noise, judge, LAYOUT, Sweep((6.0,), per_decade=0, draws=1, hooks=1)))
    unseen = [one for one in tried if not one.caught]
    assert len(unseen) > 0.7 * len(tried), "the others sit in rows whose massive channels make sizes small"


def test_sizes():
    how = Sweep((1.0, 3.0), per_decade=1, draws=1, hooks=1)
    assert how.sizes(1e-4) == pytest.approx([1e-1, 1e-2, 1e-3, 3e-4, 1e-4])
    assert how.sizes(0.4) == pytest.approx([0.4]), "1.2 of a row is no longer a small fault"
    assert Sweep((1.0,), per_decade=2, draws=1, hooks=1).sizes(0.9) == [], (
        "and where all is noise nothing is planted"
    )
    assert Sweep((1.0,), per_decade=0, draws=1, hooks=1).sizes(1e-3) == [1e-3]


def one(multiple: float, *, caught: bool, kind: str = "one row", named: str = HOOK) -> Tried:
    return Tried(kind, HOOK, 0, multiple * 1e-6, 1e-6, caught, named if caught else "", caught)


def test_the_smallest_that_is_always_seen():
    tried = [
        one(1, caught=False),
        one(2, caught=True),
        one(2.5, caught=False),
        one(4, caught=True),
        one(9, caught=True),
    ]
    assert smallest(tried).multiple == pytest.approx(4)
    assert smallest([one(9, caught=False)]) is None


@pytest.mark.parametrize(
    ("value", "text"), [(1.0, "100 %"), (0.9999, "99.9 %"), (0.5, "50 %"), (math.nan, "-")]
)
def test_nearly_all_is_not_all(value, text):
    assert percent(value) == text


def trial_run(folder, tried, *, broken: bool = False):
    swept = declaration(0, suite="trial", check="sensitivity", model="tiny-llama")
    planted = declaration(1, suite="faults", check="planted_fault", model="tiny-llama")
    missed = declaration(2, suite="faults", check="planted_fault", model="tiny-llama")
    found = result(swept)
    found["verdicts"] = [{"label": "sensitivity", "verdict": None, "detail": packed(tried)}]
    seen = result(planted)
    detail = {"caught_by": "a|check", "message": "zero"}
    seen["verdicts"] = [{"label": "ZerosServed", "verdict": None, "detail": detail}]
    return write_run(
        folder, [swept, planted, missed], [found, seen, result(missed, "failed" if broken else "passed")]
    )


def test_there_and_back(tmp_path):
    tried = [one(1.5, caught=False), one(6, caught=True, named="embed.hook_out")]
    [curve] = curves([read_run(trial_run(tmp_path / "r", tried))])
    assert (curve.model, curve.dtype, curve.mode) == ("tiny-llama", "bf16", "compiled")
    assert [dataclasses.replace(t, size=pytest.approx(t.size)) for t in curve.tried] == tried
    assert not curve.tried[1].right


def test_records_of_another_version(tmp_path):
    """A column more is left out; a record without one that is needed is no record."""
    tried = [one(6, caught=True)]
    run = read_run(trial_run(tmp_path / "r", tried))
    detail = run.cases[0].verdicts[0]["detail"]
    detail["columns"].append("mood")
    detail["faults"][0].append("good")
    assert curves([run])[0].tried == tuple(tried)
    detail["columns"][0] = "sort"
    assert curves([run])[0].tried == ()


def test_a_fault_that_nothing_saw_is_not_left_out(tmp_path):
    found = faults([read_run(trial_run(tmp_path / "r", [], broken=True))])
    assert [(f.name, f.caught, f.explained) for f in found] == [
        ("ZerosServed", True, True),
        ("test_planted_fault[tiny-llama-bf16-compiled-2]", False, False),
    ]


def test_the_command(tmp_path, capsys):
    tried = [one(1.5, caught=False), one(6, caught=True), one(40, caught=True, named="embed.hook_out")]
    folder, svg = trial_run(tmp_path / "r", tried, broken=True), tmp_path / "curve.svg"
    assert main(["trial", str(folder), "--svg", str(svg)]) == 0
    text = capsys.readouterr().out
    assert "Of the 2 above 3 times the noise 100 % turn the verdict red; of those 50 % name the hook" in text
    assert "| one row | 3 | 6.0e-06 | 6.00 | 1.50 |" in text
    assert "| `ZerosServed` | faults | tiny-llama | caught | a\\|check |" in text
    assert "NOT CAUGHT" in text
    assert "Of 2 planted engines 1 were caught" in text
    root = ET.parse(svg).getroot()
    assert root.tag.endswith("svg")
    assert "tiny-llama, bf16, compiled" in "".join(root.itertext())


def test_the_command_refuses(tmp_path, capsys):
    nothing = write_run(tmp_path / "n", [declaration(0)], [result(declaration(0))])
    assert main(["trial", str(nothing)]) == 5
    assert "planted no fault and compared nothing" in capsys.readouterr().out
    folder = trial_run(tmp_path / "r", [one(6, caught=True)])
    assert main(["trial", str(folder), "--svg", str(tmp_path / "no" / "such.svg")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(["trial", str(tmp_path / "absent")]) == 2


def test_the_figure_escapes_and_asks_for_nothing():
    curve = Curve("<script>", "fp32", "eager", "tp1", "hf", "pytest", (one(6, caught=True),))
    figure = str(sensitivity_figure([curve]))
    assert "<script>" not in figure
    ET.fromstring(figure)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", figure)
    assert "<script>" in curve_tables([curve]), "Markdown is read as text"
