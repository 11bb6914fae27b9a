"""What a bisection leaves, and the command that runs one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harness.artifacts import slug
from harness.bisect.case import read_subject
from harness.bisect.figure import MOST_LINES, probe_figure
from harness.bisect.investigate import investigate
from harness.bisect.write import Subject, write
from harness.cli import main
from harness.errors import UsageError
from harness.store import CaseResult, read_run
from suites.unit import mini_suite
from suites.unit.planted_engine import CALL, CONFIG, FAULTS, Planted

# --- what it leaves -----------------------------------------------------------------------------------------------


def test_the_files_and_that_the_repro_runs(hf_session, tmp_path: Path) -> None:
    result = investigate(Planted(hf_session, FAULTS["the MLP"][0]), CALL)
    hostile = "a.py::test_b[<script>alert(1)</script>]"
    page = write(tmp_path, Subject(hostile, "activations", "", CONFIG, "pytest 'x'"), result)
    assert page == tmp_path / "index.html"
    source = page.read_text()
    assert "<script" not in source
    assert "blocks.2.mlp.hook_out" in source
    assert "http" not in source.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    ET.parse(tmp_path / "figure.svg")
    record = json.loads((tmp_path / "bisect.json").read_text())
    assert record["kind"] == "computed"
    assert record["sites"][0]["hook"] == "blocks.2.mlp.hook_out"
    assert record["sites"][0]["branch"] == "MLP"
    assert record["sites"][0]["heals"] is True
    assert record["sites"][0]["share"] > 1
    assert record["row"] == {"request": 0, "position": 0}
    truth = load_file(tmp_path / "repro" / "truth.safetensors")
    assert truth["blocks.2.mlp.hook_out"].dtype == torch.float64
    call = json.loads((tmp_path / "repro" / "call.json").read_text())
    assert (call["prompts"], call["row"]) == ([[5]], [0, 0])
    assert call["engine"]["path"] == ""
    done = subprocess.run(
        [sys.executable, str(tmp_path / "repro" / "repro.py")],
        env=mini_suite.environment(),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no longer wrong" in done.stdout, (
        "the engine it boots is sound: the fault was planted in this process"
    )
    assert "blocks.2.mlp.hook_out" in done.stdout


def test_a_figure_has_a_line_per_probe_and_no_markup_of_others() -> None:
    hooks = ["embed.hook_out", "blocks.0.attn.hook_q", "blocks.0.mlp.hook_out", "blocks.0.hook_out", "logits"]
    shares = dict(zip(hooks, (0.1, 5.0, float("inf"), float("nan"), 0.0), strict=True))
    probes = [((), shares), (("embed.hook_out",), shares), (("<b>",), shares)] * 3
    drawn = str(probe_figure(probes, hooks))
    assert drawn.count("<polyline") == MOST_LINES
    assert "<b>" not in drawn
    assert "nan" not in drawn.lower().replace("dominant", "")
    assert probe_figure([], hooks) == ""
    narrow, wide = (
        re.search('points="([^"]*)"', str(probe_figure(probes, hooks, sites)))[1].split()
        for sites in ([], ["blocks.0.attn.hook_q"])
    )
    assert (len(narrow), len(wide)) == (4, 5), "queries are drawn only where they are a site"


# --- the command --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["red", "red_edit"])
def test_a_failed_case_on_a_sound_engine_ends_without_blame(red_run, name, capsys) -> None:
    case = next(case for case in read_run(red_run.run).cases if case.check == name)
    assert main(["bisect", case.id, "--run", str(red_run.run)]) == 0
    out = capsys.readouterr().out
    assert "Nothing is wrong by itself" in out
    page = red_run.run / "bisect" / slug(case.id) / "index.html"
    assert "Nothing is wrong by itself" in page.read_text()
    assert not (page.parent / "repro").exists()


def test_bad_input_is_one_line(red_run, capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(red_run.folder)
    for arguments, says in [
        (["test_green"], "there is nothing to reproduce"),
        (["test_blue"], "no case of"),
        (["test_red_without"], "left no call to bisect"),
        (["test_red_logits", "--comparison", "7"], "left 1, numbered from 0"),
        (["test_red_logits", "--settings", "more"], "invalid choice"),
    ]:
        assert main(["bisect", *arguments]) == 2
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1


def test_records_that_cannot_be_used(red_run, tmp_path: Path) -> None:
    records = read_run(red_run.run)
    case = next(case for case in records.cases if case.check == "red")
    path = red_run.run / case.artifacts[0]["call"]
    kept = path.read_text()
    for spoilt in ("[]", "{}", kept.replace('"prompts":[[', '"prompts":[["a",'), kept[:50]):
        path.write_text(spoilt)
        try:
            with pytest.raises(UsageError, match="run the case again"):
                read_subject(records, case)
        finally:
            path.write_text(kept)
    elsewhere = CaseResult("x", artifacts=({"call": "../../x.json", "tensors": "y"},))
    with pytest.raises(UsageError, match="is not a file below"):
        read_subject(records, elsewhere)
    lost = CaseResult("x", artifacts=({"label": "a", "error": "not written: disk full"},))
    with pytest.raises(UsageError, match="left no call"):
        read_subject(records, lost)
