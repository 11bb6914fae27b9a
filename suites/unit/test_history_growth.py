"""Errors of two runs beside each other: clean ones are green whatever their noise, and what grew is named."""

from __future__ import annotations

import math

import pytest

from harness.history import compare_runs, read_records
from harness.history.figures import HookFigure
from harness.history.growth import ALIKE, UNLIKE, Spread
from suites.unit.synthetic_run import declaration, make_verdict, result, write_run
from suites.unit.synthetic_runs import OTHER_TORCH, compared, rewrite, run, verdict_json

# --- clean pairs


def test_a_run_and_itself(tmp_path):
    found = compared(run(tmp_path / "a"), tmp_path / "a")
    assert found.n_regressions == 0
    assert found.n_same == len(found.figures) == 4 * 11
    assert not found.changes
    assert found.rule is ALIKE


def test_noise_of_another_rounding_is_no_regression(tmp_path):
    before = run(tmp_path / "a", verdict=lambda n: verdict_json(seed=n))
    for trial in range(1, 21):
        after = run(
            tmp_path / f"b{trial}",
            verdict=lambda n, trial=trial: verdict_json(seed=100 * trial + n),
            versions=OTHER_TORCH,
        )
        found = compared(before, after)
        assert found.rule is UNLIKE
        assert found.n_same < len(found.figures)
        assert found.n_regressions == 0


def test_where_a_label_stands_several_times_their_order_is_nothing(tmp_path):
    case = declaration(0)
    folders = []
    for name, seeds in (("a", (0, 3, 6)), ("b", (6, 0, 3))):
        verdicts = [make_verdict(layers=2, seed=seed) for seed in seeds]
        record = result(case, "passed", verdicts)
        for entry in record["verdicts"]:
            entry["label"] = "edits: values"
        folders.append(write_run(tmp_path / name, [case], [record]))
    found = compared(*folders)
    assert found.n_same == len(found.figures)


# --- errors that grew


@pytest.mark.parametrize(
    ("versions", "scale", "grown"),
    [({}, 1.05, False), ({}, 2.0, True), (OTHER_TORCH, 2.0, False), (OTHER_TORCH, 6.0, True)],
)
def test_one_hook(tmp_path, versions, scale, grown):
    """Where nothing else differs a small step means something; where rounding may differ only a large one does."""
    hook = "blocks.1.mlp.hook_out"
    before = run(tmp_path / "a", verdict=lambda _: verdict_json(seed=1))
    after = run(
        tmp_path / "b",
        verdict=lambda n: verdict_json(seed=1, scale=scale, hook=hook if n == 2 else "none"),
        versions=versions,
    )
    found = compared(before, after)
    assert bool(found.growths) is grown
    if grown:
        (growth,) = found.growths
        assert growth.case.id.endswith("-2]")
        assert growth.first == growth.after.hook == hook
        assert (growth.n_grown, growth.n_hooks) == (1, 11)
        assert growth.after.share > growth.limit > growth.before.share


def test_all_hooks_a_little(tmp_path):
    """No hook alone is conspicuous, all together are: the geometric mean finds it."""
    before = run(tmp_path / "a", verdict=lambda _: verdict_json(seed=1, scale=0.3))
    after = run(tmp_path / "b", verdict=lambda _: verdict_json(seed=1, scale=0.9), versions=OTHER_TORCH)
    found = compared(before, after)
    assert len(found.growths) == 4
    assert all(growth.n_grown == 0 and growth.first == "" for growth in found.growths)
    assert all(growth.mean > growth.mean_limit for growth in found.growths)


def test_smaller_errors_are_no_regression(tmp_path):
    before = run(tmp_path / "a")
    after = run(tmp_path / "b", verdict=lambda n: verdict_json(seed=n, scale=0.1))
    assert compared(before, after).n_regressions == 0


def test_an_error_that_is_no_number_has_grown(tmp_path):
    def nan(record):
        if record["type"] == "case":
            for gate in record["verdicts"][0]["verdict"]["hooks"][3]["gates"]:
                gate["err_engine"] = "NaN"
        return record

    before, after = run(tmp_path / "a"), run(tmp_path / "b")
    rewrite(after, nan)
    found = compared(before, after)
    assert len(found.growths) == 4
    assert found.growths[0].after.share == math.inf
    assert compared(after, before).n_regressions == 0
    assert compared(after, after).n_regressions == 0


def test_another_k_does_not_move_the_figures(tmp_path):
    def doubled(record):
        record["k"] = 6.0 if record["type"] == "run" else None
        for entry in record.get("verdicts", ()):
            entry["verdict"]["k"] = 6.0
            for gate in (gate for hook in entry["verdict"]["hooks"] for gate in hook["gates"]):
                gate["bound"] *= 2
        return record

    before, after = run(tmp_path / "a"), run(tmp_path / "b")
    rewrite(after, doubled)
    found = compared(before, after)
    assert all(was == pytest.approx(now) for was, now, _ in found.figures)
    assert ("options", "k") in {(change.group, change.name) for change in found.changes}


def test_baselines_measure_the_spread(tmp_path):
    """Noise that the fixed rule would call growth is no growth among runs that have as much; a shift beyond it is."""
    noisy = [run(tmp_path / f"r{i}", verdict=lambda n, i=i: verdict_json(seed=50 * i + n)) for i in range(5)]
    first, *more = [read_records(folder) for folder in noisy]
    newest = more.pop()
    assert compare_runs(first, newest).growths
    found = compare_runs(first, newest, baselines=more)
    assert found.rule.name == "measured"
    assert found.n_regressions == 0
    worse = run(tmp_path / "worse", verdict=lambda n: verdict_json(seed=250 + n, scale=3.5))
    assert len(compare_runs(first, read_records(worse), baselines=more).growths) == 4


def test_baselines_that_repeat_to_the_bit_make_the_rule_strict(tmp_path):
    before = run(tmp_path / "a", verdict=lambda _: verdict_json(seed=1))
    again = run(tmp_path / "a2", verdict=lambda _: verdict_json(seed=1))
    after = run(tmp_path / "b", verdict=lambda _: verdict_json(seed=1, scale=1.2))
    assert not compared(before, after).growths
    assert len(compared(before, after, baselines=[read_records(again)]).growths) == 4


def figures(**shares):
    return {
        ("case", "label", hook): HookFigure(
            "label", hook, 0, share, share, 1.0, 1.0, "aggregate", passed=True
        )
        for hook, share in shares.items()
    }


def test_the_spread_starts_from_the_largest_seen():
    spread = Spread(figures(a=0.3), [figures(a=0.5), figures(a=0.4)])
    assert spread.high(("case", "label", "a")) == 0.5
    assert spread.limit(("case", "label", "a")) == pytest.approx(0.5 + 2 * 0.2)


def test_a_hook_that_jumps_may_jump_as_far_again_and_others_may_not():
    spread = Spread(figures(a=0.1, b=0.3), [figures(a=1.0, b=0.3)])
    assert spread.limit(("case", "label", "a")) == pytest.approx(1.0 + 0.9)
    assert spread.limit(("case", "label", "b")) == pytest.approx(0.3 + UNLIKE.step)


def test_a_baseline_without_the_hook_measures_nothing_of_it():
    spread = Spread(figures(a=0.3), [figures(b=0.9)])
    assert spread.limit(("case", "label", "a")) == pytest.approx(0.35)


def test_means_may_move_as_those_of_the_baselines_did():
    names = "abcdef"
    first, repeat = (figures(**dict.fromkeys(names, share)) for share in (0.3, 0.36))
    assert Spread(first, [repeat]).rule.mean == pytest.approx(1.2**2)
    assert Spread(repeat, [first]).rule.mean == pytest.approx(1.2**2)
    assert Spread(first, [first]).rule.mean == 1.1


@pytest.mark.parametrize(
    ("group", "name", "value", "rule"),
    [
        ("versions", "torch", "2.14", UNLIKE),
        ("versions", "harness", "9", ALIKE),
        ("machine", "cpu", "another", UNLIKE),
        ("machine", "memory_gib", 1.0, ALIKE),
        ("env", "OMP_NUM_THREADS", "64", UNLIKE),
        ("env", "VLLM_CACHE_ROOT", "/elsewhere", ALIKE),
        ("project", "commit", "another", ALIKE),
    ],
)
def test_what_may_round_otherwise(tmp_path, group, name, value, rule):
    before, after = run(tmp_path / "a"), run(tmp_path / "b")

    def changed(record):
        if record["type"] == "run":
            record["provenance"][group][name] = value
        return record

    rewrite(after, changed)
    assert compared(before, after).rule is rule


def test_nothing_known_is_not_alike(tmp_path):
    def bare(record):
        return {**record, "provenance": None} if record["type"] == "run" else record

    folder = run(tmp_path / "a")
    rewrite(folder, bare)
    assert compared(folder, folder).rule is UNLIKE


def test_the_rule_can_be_given(tmp_path):
    before, after = (
        run(tmp_path / "a"),
        run(tmp_path / "b", verdict=lambda n: verdict_json(seed=n, scale=1.1)),
    )
    assert not compared(before, after).growths
    assert compared(before, after, step=0.0, factor=1.0).growths
