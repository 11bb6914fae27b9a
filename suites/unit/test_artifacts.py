"""What a failed comparison leaves behind: the right rows, within the caps, readable and able to be run again."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harness.artifacts import FOLDER, ROWS, Evidence, save, slug, specs_of
from harness.backend import BootConfig
from harness.cli import main
from harness.errors import UsageError
from harness.interventions import parse_interventions
from harness.parity.verdict import compare
from harness.repro import find_case, write_script
from harness.store import CaseResult, RunRecords, read_run
from suites.unit import mini_suite

CONFIG = BootConfig("hf", "tiny-llama", "/somewhere/private", mode="eager")
HOOKS = ("embed.hook_out", "blocks.0.hook_out", "blocks.1.hook_out")


def failed(wrong: dict[str, list[int]], rows: int = 20, width: int = 16):
    """A verdict in which these rows of these hooks are wrong, and its evidence."""
    generator = torch.Generator().manual_seed(0)
    truth = {hook: [torch.randn(rows, width, generator=generator).double()] for hook in HOOKS}
    same = [{h: [(t[0] * (1 + e)).float()] for h, t in truth.items()} for e in (1e-7, -3e-7)]
    engine = {hook: [one[0].float().clone()] for hook, one in truth.items()}
    for hook, places in wrong.items():
        engine[hook][0][places] += torch.arange(1, len(places) + 1).float().unsqueeze(1)
    verdict = compare(engine, truth, same, dtype="float32", n_layers=2)
    assert not verdict.passed
    evidence = Evidence("values", CONFIG, [list(range(rows))], [[1]], None, lambda: (engine, truth, same))
    return verdict, evidence


def kept(run: Path, entry: dict) -> tuple[dict, dict[str, torch.Tensor]]:
    return json.loads((run / entry["call"]).read_text()), load_file(run / entry["tensors"])


def test_the_worst_rows_of_the_origin_first_and_of_the_hook_before_it(tmp_path: Path) -> None:
    wrong = list(range(5, 17))
    verdict, evidence = failed({HOOKS[1]: wrong, HOOKS[2]: [3]})
    entry = save(tmp_path, "suites/a.py::test_b[c]", 0, "prefill", verdict, evidence)
    call, tensors = kept(tmp_path, entry)
    assert [one["hook"] for one in call["hooks"]] == [HOOKS[1], HOOKS[0], HOOKS[2]]
    assert [one["passed"] for one in call["hooks"]] == [False, True, False]
    places = [row for _, row in call["hooks"][0]["rows"]]
    assert len(places) == ROWS
    assert set(places) <= set(wrong)
    assert call["hooks"][2]["rows"][0] == [0, 3]
    engine, truth, same = evidence.sides()
    assert torch.equal(tensors[f"{HOOKS[1]}/engine"], engine[HOOKS[1]][0][places])
    assert torch.equal(tensors[f"{HOOKS[1]}/truth"], truth[HOOKS[1]][0][places])
    assert torch.equal(tensors[f"{HOOKS[1]}/reference"], same[0][HOOKS[1]][0][places])
    assert torch.equal(tensors[f"{HOOKS[1]}/noisiest"], same[1][HOOKS[1]][0][places])
    assert call["prompts"] == [list(range(20))]
    assert call["engine"]["path"] == "", "where a checkpoint lies is this machine's business"
    assert entry["bytes"] == sum(path.stat().st_size for path in (tmp_path / FOLDER).glob("*/*"))


def test_caps_hold_and_what_found_no_room_is_counted(tmp_path: Path) -> None:
    verdict, evidence = failed({HOOKS[1]: [1, 2, 3], HOOKS[2]: [3]})
    row = 16 * (4 + 8 + 4 + 4)
    entry = save(tmp_path, "a", 0, "x", verdict, evidence, case_bytes=3 * row)
    call, _ = kept(tmp_path, entry)
    assert [len(one["rows"]) for one in call["hooks"]] == [3]
    assert entry["left_out"] == call["left_out"] == 1
    second = save(tmp_path, "a", 1, "y", verdict, evidence, case_bytes=3 * row)
    assert (second["hooks"], second["left_out"]) == (0, 2)
    replaced = save(tmp_path, "a", 0, "x", verdict, evidence, case_bytes=3 * row)
    assert replaced["hooks"] == 1, "an attempt before this one takes no room"
    elsewhere = save(tmp_path, "b", 0, "x", verdict, evidence, run_bytes=10)
    assert (elsewhere["hooks"], elsewhere["left_out"]) == (0, 2)


def test_values_that_are_no_numbers_are_kept_as_they_are(tmp_path: Path) -> None:
    verdict, evidence = failed({HOOKS[1]: [4]})
    engine, truth, same = evidence.sides()
    engine[HOOKS[1]][0][9] = float("nan")
    verdict = compare(engine, truth, same, dtype="float32", n_layers=2)
    call, tensors = kept(tmp_path, save(tmp_path, "a", 0, "x", verdict, evidence))
    assert [0, 9] in call["hooks"][0]["rows"]
    assert bool(tensors[f"{HOOKS[1]}/engine"].isnan().any())
    json.loads(json.dumps(call), parse_constant=pytest.fail)


def test_a_full_disk_does_not_change_the_verdict(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    entry = save(tmp_path, "a", 0, "x", *failed({HOOKS[1]: [4]}))
    assert entry["label"] == "x"
    assert entry["error"].startswith("not written: ")


def test_a_case_has_a_folder_of_its_own() -> None:
    one, other = slug("s/t.py::test_a[x/../y-<z>]"), slug("s/t.py::test_a[x/../y-(z)]")
    assert one != other
    assert "/" not in one
    assert len(slug("a" * 400)) < 120


def test_edits_are_written_as_the_specs_they_were_read_from() -> None:
    specs = {
        "blocks.0.hook_out": {"op": "add", "value": [0.1, 0.2], "pos": [1]},
        "blocks.1.hook_out": {"op": "scale", "factor": 0.25},
        "blocks.0.mlp.hook_out": {"op": "suppress"},
        "embed.hook_out": {"op": "set", "value": 0.3},
    }
    widths = dict.fromkeys(specs, 2)
    edits = parse_interventions([specs, None], widths=widths, nonfireable={}, lengths=[3, 3])
    again = parse_interventions(specs_of(edits), widths=widths, nonfireable={}, lengths=[3, 3])
    assert [[e.digest for e in one] for one in again] == [[e.digest for e in one] for one in edits]
    assert specs_of([(), ()]) is specs_of(None) is None


# --- a real run ---------------------------------------------------------------------------------------------


def test_failed_cases_of_a_run_say_what_they_left(red_run) -> None:
    cases = {case.check: case for case in read_run(red_run.run).cases}
    assert {name: len(case.artifacts) for name, case in cases.items()} == {
        "green": 0,
        "red": 1,
        "red_edit": 1,
        "red_logits": 1,
        "red_without_numbers": 0,
    }
    call, tensors = kept(red_run.run, cases["red"].artifacts[0])
    assert call["hooks"][0]["hook"] == "blocks.1.hook_out"
    assert call["hooks"][0]["rows"][0] == [1, 2]
    gap = tensors["blocks.1.hook_out/engine"][0] - tensors["blocks.1.hook_out/truth"][0]
    assert int(gap.abs().argmax()) == 7
    assert [len(tokens) for tokens in call["new_tokens"]] == [3, 3]
    edited, _ = kept(red_run.run, cases["red_edit"].artifacts[0])
    assert edited["intervene"][0] == {"blocks.1.hook_out": {"op": "scale", "factor": 1.5, "pos": [1, 2]}}
    logits, _ = kept(red_run.run, cases["red_logits"].artifacts[0])
    assert (logits["kind"], logits["hooks"][0]["rows"][0]) == ("logits", [0, 4])


@pytest.mark.parametrize("name", ["red", "red_edit", "red_logits"])
def test_repro_shows_the_numbers_and_its_script_runs(red_run, name, capsys) -> None:
    case = next(case for case in read_run(red_run.run).cases if case.check == name)
    assert main(["repro", case.id, "--run", str(red_run.run)]) == 0
    out = capsys.readouterr().out
    assert "over its bounds" in out
    assert "worst channels" in out
    assert f"the case again: {case.rerun}" in out
    assert f"what is wrong by itself: vllm-parity bisect {shlex.quote(case.id)} --run" in out
    if name == "red":
        assert "blocks.1.hook_out: over its bounds" in out
        assert out.split("worst channels:\n")[1].split()[0] == "7"
    python = out.split("  in Python:\n")[1].split("\n\nthe case")[0]
    held = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(python)], capture_output=True, text=True, check=True
    )
    errors = [float(one) for one in re.findall(r"\d\.\d+e?[-+]?\d*", held.stdout)]
    verdicts = [one["verdict"] for one in case.verdicts if one["verdict"]]
    verdict = next(one for one in verdicts if not one["passed"])
    first = next(hook for hook in verdict["hooks"] if not hook["passed"])
    row = next(gate for gate in first["gates"] if gate["name"] == "worst row")
    assert errors[0] == pytest.approx(row["err_engine"], rel=1e-3), (
        "the rows in hand are those that were judged"
    )
    script = red_run.run / Path(case.artifacts[0]["call"]).with_name("repro.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        env=mini_suite.environment(),
        cwd=red_run.folder,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "parity holds" in done.stdout, "the engine was right: only what was judged had been spoilt"


def test_repro_says_what_it_cannot_show(red_run, capsys, monkeypatch) -> None:
    monkeypatch.chdir(red_run.folder)
    for name, says in [
        ("test_green", "there is nothing to reproduce"),
        ("test_red", "failed cases of"),
        ("test_blue", "no case of"),
    ]:
        assert main(["repro", name]) == 2
        assert says in capsys.readouterr().err
    assert main(["repro", "test_red_without"]) == 0
    assert "no tensors were kept" in capsys.readouterr().out
    monkeypatch.chdir(red_run.folder.parent)
    assert main(["repro", "test_red"]) == 2
    assert "no run to go on with below 'reports'" in capsys.readouterr().err


def test_records_cannot_name_files_elsewhere_or_put_code_into_a_script(tmp_path: Path) -> None:
    case = CaseResult("a", outcome="failed", artifacts=({"call": "../x.json", "tensors": "y"},))
    records = RunRecords(tmp_path, {"provenance": {"versions": {"vllm": '"""\nimport os'}}}, (case,))
    assert find_case(records, "a") is case
    from harness.repro import lines_of

    with pytest.raises(UsageError, match="is not a file below"):
        list(lines_of(records, case))
    call = {"case": '"""\nprint(1)\n"""', "label": "\\", "began": ""}
    script = write_script(records, call, tmp_path / "0.json").read_text()
    assert script.count('"""') == 2
    assert compile(script, "repro.py", "exec")
    assert os.linesep + "print(1)" not in script
