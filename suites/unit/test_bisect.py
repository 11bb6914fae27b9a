"""Bisections end to end, on transformers with a fault planted in it: point, row and request; then the files."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harness.artifacts import slug
from harness.backend import BootConfig, Topology
from harness.bisect.bench import Bench, Call
from harness.bisect.case import read_subject
from harness.bisect.figure import MOST_LINES, probe_figure
from harness.bisect.investigate import COMPUTED, READ, REFUSED, SOUND, investigate
from harness.bisect.settings import able, neighbours, try_settings
from harness.bisect.words import needs, sentence
from harness.bisect.write import Subject, write
from harness.capabilities import FULL
from harness.check import Parity
from harness.cli import main
from harness.errors import CaptureError, EngineError, UsageError
from harness.parity.types import RowRef
from harness.plan import Plan
from harness.reference.backend import ReferenceBackend
from harness.session import ParitySession
from harness.store import CaseResult, read_run
from suites.unit import mini_suite

CONFIG = BootConfig("hf", "tiny-llama", "", mode="eager")
PROMPTS = ((5, 6, 7, 8, 9, 10, 11, 12), (21, 22, 23), (31, 32, 33, 34, 35))
CALL = Call(PROMPTS)


class Planted(Parity):
    """An engine in this process: transformers, with whatever is wrong in it."""

    capabilities = FULL

    def __init__(self, session: ParitySession, plant=None, spoil=None) -> None:
        super().__init__(session, CONFIG)
        self.backend = ReferenceBackend.boot(self.config)
        self.spoil = spoil
        self.before: list = []
        if plant is not None:
            plant(self.backend._model.model.layers)

    @property
    def engine(self):
        return self.backend

    def forward(self, prompts, **kwargs):
        result = super().forward(prompts, **kwargs)
        if self.spoil is not None:
            self.spoil(self, result)
        self.before.append(result)
        return result


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory):
    session = ParitySession(Plan(backend="hf"), tmp_path_factory.mktemp("bisect"), argv=[])
    yield session
    session.close()


def louder(module, by: float = 1.5):
    with torch.no_grad():
        module.weight.mul_(by)


def late(module, position: int, length: int | None = None):
    """Wrong from a position on, in sequences of at least some length."""

    def hook(_module, _args, output):
        if output.shape[1] >= (length or 0):
            output = output.clone()
            output[:, position:] *= 1.5
        return output

    module.register_forward_hook(hook)


FAULTS = {
    "norm before attention": (
        lambda layers: louder(layers[2].input_layernorm),
        "blocks.2.attn.hook_in",
        "norm",
        0,
    ),
    "query projection": (
        lambda layers: late(layers[1].self_attn.q_proj, 2),
        "blocks.1.attn.hook_q",
        "attention",
        2,
    ),
    "value projection": (
        lambda layers: louder(layers[0].self_attn.v_proj),
        "blocks.0.attn.hook_v",
        "attention",
        0,
    ),
    "output projection": (
        lambda layers: late(layers[3].self_attn.o_proj, 1),
        "blocks.3.attn.hook_out",
        "attention",
        1,
    ),
    "norm before the MLP": (
        lambda layers: louder(layers[0].post_attention_layernorm),
        "blocks.0.mlp.hook_in",
        "norm",
        0,
    ),
    "the MLP": (lambda layers: louder(layers[2].mlp.down_proj), "blocks.2.mlp.hook_out", "MLP", 0),
    "the sum": (lambda layers: late(layers[1], 2), "blocks.1.hook_out", "residual stream", 2),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_point_and_its_first_row_are_named(session, fault) -> None:
    plant, hook, branch, position = FAULTS[fault]
    result = investigate(Planted(session, plant), CALL)
    assert result.kind == COMPUTED
    assert result.found is not None
    ((culprit, site),) = result.found.wrong
    assert site.hook == hook
    assert culprit.stage.name == f"block {hook.split('.')[1]}"
    assert culprit.heals
    assert culprit.stage == result.found.last
    assert result.narrowed is not None
    assert result.narrowed.row.position == position
    text = sentence(result)
    assert "is wrong by itself" in text
    assert f"of {culprit.stage.name}" in text
    assert hook in text
    assert f"position {position}" in text
    assert branch in ("norm", "attention", "MLP", "residual stream")


def test_a_sound_engine_is_not_blamed(session) -> None:
    said: list[str] = []
    result = investigate(Planted(session), CALL, said.append)
    assert (result.kind, result.found, result.narrowed) == (SOUND, None, None)
    assert sentence(result).startswith("Nothing is wrong by itself")
    assert "edited minus clean" not in sentence(result)
    assert sentence(replace(result, about="change")).endswith("only edited values are bisected.")
    assert said == ["right as it is", "right, after another call, too"]


def test_two_wrong_blocks_are_both_named(session) -> None:
    def plant(layers):
        louder(layers[1].mlp.down_proj)
        louder(layers[3].self_attn.o_proj)

    result = investigate(Planted(session, plant), CALL)
    assert result.found is not None
    assert [site.hook for _, site in result.found.wrong] == [
        "blocks.1.mlp.hook_out",
        "blocks.3.attn.hook_out",
    ]
    assert "wrong by itself as well: blocks.3.attn.hook_out (attention)" in sentence(result)


def test_what_lies_between_attention_and_the_mlp_is_one_cause(session) -> None:
    """What attention adds to the stream is changed after it was read: the MLP is given it, and so is the sum."""

    def plant(layers):
        norm = layers[1].post_attention_layernorm

        def spoil(module, args):
            args[0][..., 0].add_(0.5)  # the residual stream's own memory

        norm.register_forward_pre_hook(spoil)

    result = investigate(Planted(session, plant), CALL)
    assert result.found is not None
    assert [site.hook for _, site in result.found.wrong] == ["blocks.1.mlp.hook_in", "blocks.1.hook_out"]
    assert result.found.culprits[0].heals
    assert "so is blocks.1.hook_out, to which the same sum goes on" in sentence(result)


def test_a_decode_row_and_edits_of_the_call(session) -> None:
    edits = (None, {"blocks.1.hook_out": {"op": "scale", "factor": 1.5}}, None)
    plant = lambda layers: late(layers[2].mlp.down_proj, 9)  # noqa: E731
    result = investigate(Planted(session, plant), Call(PROMPTS, 4, edits))
    assert result.kind == COMPUTED
    assert result.site is not None
    assert result.site.hook == "blocks.2.mlp.hook_out"
    narrowed = result.narrowed
    assert narrowed is not None
    assert narrowed.row == RowRef(0, 9)
    assert (narrowed.beside, narrowed.cut) == ((), True)
    assert narrowed.call == (Call((PROMPTS[0],), 3), RowRef(0, 9)), "two tokens fed back make row 9"


def test_an_edit_that_is_applied_wrongly(session) -> None:
    edits = ({"blocks.1.hook_out": {"op": "add", "value": 0.5, "pos": 2}}, None, None)

    parity = Planted(session)
    forward = parity.backend.forward

    def doubled(spec):
        return {h: {**one, "value": 1.0} if one["op"] == "add" else one for h, one in spec.items()}

    def wrong(prompts, *, intervene=None, **kwargs):
        return forward(
            prompts, intervene=[doubled(one or {}) for one in intervene or PROMPTS[:0]] or None, **kwargs
        )

    parity.backend.forward = wrong
    result = investigate(parity, Call(PROMPTS, 1, edits))
    assert result.kind == COMPUTED
    assert result.site is not None
    assert result.site.hook == "blocks.1.hook_out"
    assert result.narrowed is not None
    assert result.narrowed.unedited is False
    assert "right without its edits" in list(needs(result.narrowed))
    assert "or the edit there, is wrong by itself" in sentence(result)


def test_what_is_only_read_wrongly(session) -> None:
    def zeros(_parity, result):
        result.captured["blocks.1.hook_out"].zero_()

    result = investigate(Planted(session, spoil=zeros), CALL)
    assert (result.kind, result.stays) == (READ, True)
    assert "Nothing is computed wrongly" in sentence(result)
    assert "blocks.1.hook_out is read wrongly" in sentence(result)


def test_what_shows_only_after_another_call(session) -> None:
    def spoil(parity, result):
        fresh = result.captured["blocks.2.mlp.hook_out"].clone()
        if parity.before and parity.before[-1].fresh.shape == fresh.shape:
            result.captured["blocks.2.mlp.hook_out"][:] = parity.before[-1].fresh
        result.fresh = fresh

    result = investigate(Planted(session, spoil=spoil), CALL)
    assert result.kind == READ
    assert result.narrowed is not None
    assert result.narrowed.disturbed
    assert "only after another call" in "\n".join(needs(result.narrowed))


def test_the_neighbour_that_it_takes(session) -> None:
    """Wrong only where three requests are run together, one of them of five tokens."""

    def spoil(_parity, result):
        if 5 in result.lengths and 8 in result.lengths:
            result.captured["blocks.2.attn.hook_out"][result.lengths.index(8), 3] += 1

    result = investigate(Planted(session, spoil=spoil), CALL)
    narrowed = result.narrowed
    assert narrowed is not None
    assert (narrowed.row, narrowed.failing, narrowed.beside) == (RowRef(0, 3), (0,), (2,))
    assert narrowed.cut is False, "the prompt of eight tokens is what it takes"
    assert narrowed.call == (Call((PROMPTS[0], PROMPTS[2])), RowRef(0, 3))
    told = list(needs(narrowed))
    assert "needs request 2 beside it in the batch" in told
    assert told[0].startswith("1 request is wrong; looked at: request 0 from position 3")


def test_a_fault_that_moves_when_the_batch_does(session) -> None:
    """As the first row of a second chunk does."""

    def spoil(_parity, result):
        places = {(8, 3, 5): 3, (8,): 6}
        if (place := places.get(tuple(result.lengths))) is not None:
            result.captured["blocks.2.attn.hook_out"][0, place] += 1

    narrowed = investigate(Planted(session, spoil=spoil), CALL).narrowed
    assert narrowed is not None
    assert (narrowed.row, narrowed.beside, narrowed.cut) == (RowRef(0, 3), (), False)
    assert narrowed.call == (Call((PROMPTS[0],)), RowRef(0, 6))
    assert "needs no other request in the batch: alone it is wrong from position 6 on" in list(
        needs(narrowed)
    )


def test_an_engine_that_contradicts_itself(session) -> None:
    parity = Planted(session)

    def refuse(*_args, **_kwargs):
        raise CaptureError("blocks.1.attn.hook_k: replicas differ\nand more")

    parity.backend.forward = refuse
    result = investigate(parity, CALL)
    assert result.kind == REFUSED
    assert sentence(result).endswith("before anything is compared: blocks.1.attn.hook_k: replicas differ")


# --- other settings -----------------------------------------------------------------------------------------------


def test_settings_that_can_matter() -> None:
    big = BootConfig(
        "vllm",
        "m",
        "",
        dtype="bfloat16",
        topology=Topology(2, 1),
        max_num_batched_tokens=16,
        max_model_len=320,
    )
    long = Call((tuple(range(40)),))
    found = dict(neighbours(big, long, "simpler"))
    assert list(found) == ["eager", "one rank", "the whole batch in one step of 320", "float32"]
    for name, attribute, value in [
        ("eager", "mode", "eager"),
        ("one rank", "topology", Topology()),
        ("the whole batch in one step of 320", "max_num_batched_tokens", 320),
        ("float32", "dtype", "float32"),
    ]:
        assert getattr(found[name], attribute) == value
        assert able(found[name]) != big
    small = BootConfig("vllm", "m", "", mode="eager")
    assert list(neighbours(small, CALL, "simpler")) == []
    assert [name for name, _ in neighbours(small, CALL, "all")] == [
        "compiled",
        "steps of 16 tokens",
        "bfloat16",
    ]
    assert list(neighbours(big, long, "none")) == list(neighbours(CONFIG, long, "all")) == []


def test_an_engine_for_probes_serves_everything() -> None:
    config = BootConfig(
        "vllm", "m", "", options={"worker_cls": "a.B", "hook_points": ["x"], "max_edit_programs": 0}
    )
    options = able(config).options
    assert options["worker_cls"] == "a.B"
    assert options["hook_points"] == "every"
    assert options["max_edit_programs"] > 4
    assert able(config.with_options(max_edit_programs=99)).options["max_edit_programs"] == 99
    assert able(CONFIG) == CONFIG


def test_other_engines_are_tried_and_errors_are_told(session) -> None:
    sound = Planted(session)
    broken = Planted(session, FAULTS["the MLP"][0])

    class Neighbourly(Planted):
        @contextlib.contextmanager
        def like(self, config):
            if config.mode == "compiled":
                raise EngineError("no compiler\nlast lines of a log")
            yield broken if config.dtype == "float16" else sound

    asked = [("a", CONFIG), ("b", replace(CONFIG, dtype="float16")), ("c", replace(CONFIG, mode="compiled"))]
    tried = try_settings(Neighbourly(session), asked, CALL, disturbed=False)
    assert [one.wrong for one in tried] == [False, True, None]
    assert tried[2].error == "no compiler"
    narrowed = investigate(broken, CALL).narrowed
    told = list(needs(narrowed, tried))
    assert told[-3:] == ["a: right there", "b: wrong there, too", "c: not run (no compiler)"]


# --- what it leaves -----------------------------------------------------------------------------------------------


def test_the_files_and_that_the_repro_runs(session, tmp_path: Path) -> None:
    result = investigate(Planted(session, FAULTS["the MLP"][0]), CALL)
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


def test_only_single_rows_are_put_right(session) -> None:
    bench = Bench(Planted(session, FAULTS["query projection"][0]), CALL)
    assert bench.rows == [RowRef(0, 2), RowRef(1, 2), RowRef(2, 2)]
    specs = bench.healing(["blocks.0.hook_out"])
    assert [spec["blocks.0.hook_out"]["pos"] for spec in specs] == [2, 2, 2]
