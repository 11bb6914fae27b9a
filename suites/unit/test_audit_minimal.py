"""The smallest call that shows a failure, found on a backend with a planted fault, and the script about it."""

from __future__ import annotations

import ast
import json
from types import SimpleNamespace

import pytest
import torch

from harness.adapters import ADAPTERS
from harness.adapters.repros import REPROS
from harness.audit import Smallest, asked_of, audit_text, find_smallest, minimal_script
from harness.audit.findings import Audit, Failure, Suite
from harness.backend import BootConfig
from harness.errors import EngineError
from harness.reference.backend import ReferenceBackend
from harness.reference.families import ModuleTree
from harness.reference.weights import final_norm_weight

NORM = "ln_final.hook_normalized"
SET = {NORM: {"op": "set", "value": 0.5}}
SHOWN = Smallest("tiny-llama", "float32", NORM, (5, 6, 7), SET, 0, (0.4126, 0.4865), (0.5, 0.5), 9e4)


class Broken:
    """The reference itself, with edits of the final norm made after its weight."""

    alive = True

    def __init__(self, folder):
        self.config = BootConfig("hf", "tiny-llama", str(folder), "float32", mode="eager")
        self._backend = ReferenceBackend.boot(self.config)
        self._weight = final_norm_weight(folder).float()
        self.calls = []

    def forward(self, prompts, *, capture, intervene=None):
        self.calls.append((capture, intervene))
        result = self._backend.forward(prompts, capture=capture, intervene=intervene)
        if NORM in (intervene or {}) and NORM in capture:
            result.captured[NORM] = result.captured[NORM] / self._weight
        return result


def test_the_first_short_call_that_is_clearly_wrong_is_found(tiny_folder):
    engine = Broken(tiny_folder)
    # What failed had three prompts and a value per channel; "suppress" shows nothing here, 0 / weight is 0.
    asked = [(NORM, [(NORM, "suppress"), (NORM, "set")])]
    found = find_smallest(engine, str(tiny_folder), asked, k=3.0)
    assert found is not None
    assert (found.hook, found.edits, found.prompt) == (NORM, SET, (5, 6, 7))
    assert found.expected == (0.5, 0.5, 0.5)
    weight = final_norm_weight(tiny_folder).float()
    assert found.found == pytest.approx((0.5 / weight[:3]).tolist(), abs=1e-5)
    assert found.share > 10
    assert [edits for _, edits in engine.calls] == [None, {NORM: {"op": "suppress"}}, SET]


def test_where_no_short_call_is_wrong_nothing_is_shown(tiny_folder):
    engine = Broken(tiny_folder)
    assert find_smallest(engine, str(tiny_folder), [("blocks.0.hook_out", [(NORM, "set")])], k=3.0) is None
    assert len(engine.calls) == 2


def test_a_backend_that_dies_meanwhile_says_so(tiny_folder):
    class Dead:
        alive = False
        config = BootConfig("x", "tiny-llama", str(tiny_folder), "float32", mode="eager")

        def forward(self, *_prompts, **_asked):
            raise EngineError("its worker died")

    with pytest.raises(EngineError, match="its worker died"):
        find_smallest(Dead(), str(tiny_folder), [(NORM, [])], k=3.0)


def test_what_was_asked_is_read_from_what_the_failure_left(tmp_path):
    call = {"intervene": [{NORM: {"op": "set", "value": [1.0]}}, None, {NORM: {"op": "set", "value": 2}}]}
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts" / "0.json").write_text(json.dumps(call))
    verdicts = (
        {"label": "a", "verdict": {"divergence": None}},
        {"label": "b", "verdict": {"divergence": {"hook": NORM}}},
        {"label": "c", "verdict": None},
    )
    artifacts = (
        {"label": "a", "call": "artifacts/none.json"},
        {"label": "b", "call": "artifacts/0.json"},
        {"label": "b", "error": "no room"},
    )
    case = SimpleNamespace(verdicts=verdicts, artifacts=artifacts)
    assert list(asked_of(SimpleNamespace(folder=tmp_path), case)) == [(NORM, [(NORM, "set")])]


def test_a_script_needs_the_library_and_transformers_alone():
    script = minimal_script(SHOWN, "transformer-lens-vllm@there/python", ModuleTree())
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0]
        for node in ast.walk(ast.parse(script))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert imported == {"torch", "transformers", "transformer_lens"}
    assert 'edits = {"ln_final.hook_normalized": {"op": "set", "value": 0.5}}' in script
    assert "print(found[0, :3].tolist())  # 0.4126, 0.4865" in script
    assert "print(kept[0][0, :3].tolist())  # 0.5000, 0.5000" in script
    assert len([line for line in script.splitlines() if line.strip()]) <= 25
    assert "tokenizer" not in script


def test_a_checkpoint_without_a_tokenizer_is_said_to_be_so(tmp_path):
    assert "it has no tokenizer" in minimal_script(SHOWN, "transformer-lens-vllm@x", ModuleTree(), tmp_path)
    (tmp_path / "tokenizer.json").touch()
    assert "tokenizer" not in minimal_script(SHOWN, "transformer-lens-vllm@x", ModuleTree(), tmp_path)


@pytest.mark.parametrize("hook", [NORM, "blocks.2.attn.hook_out", "blocks.1.hook_out", "embed.hook_out"])
@pytest.mark.parametrize("at", ["", NORM, "blocks.0.attn.hook_out"])
def test_the_half_in_transformers_gives_what_the_reference_gives(tiny_folder, hook, at):
    """Run as it is printed, on a library that is stood in for by nothing: its own lines are left out."""
    spec = {at: {"op": "scale", "factor": 0.5}} if at else {}
    shown = Smallest("tiny-llama", "float32", hook, (5, 6, 7), spec, 0, (), (), 20.0)
    script = minimal_script(shown, "transformer-lens@x", ModuleTree())
    repro = REPROS["transformer_lens_bridge"]
    lines = repro.edited if spec else repro.clean
    assert lines in script
    script = script.replace(lines, "found = torch.zeros(3, 3)").replace(repro.imports, "")
    space = {}
    exec(script.replace("path/to/tiny-llama", str(tiny_folder)), space)
    config = BootConfig("hf", "tiny-llama", str(tiny_folder), "float32", mode="eager")
    expected = ReferenceBackend.boot(config).forward([[5, 6, 7]], capture=[hook], intervene=spec or None)
    torch.testing.assert_close(space["kept"][0].detach(), expected.rows(hook, 0), atol=1e-5, rtol=1e-4)


def test_every_adapter_has_its_lines_and_they_parse():
    assert set(REPROS) == {adapter.module for adapter in ADAPTERS.values()}
    for repro in REPROS.values():
        ast.parse(f"{repro.imports}\n{repro.clean}\n{repro.edited}")


@pytest.mark.parametrize(
    ("backend", "tree"),
    [
        ("mine@there/python", ModuleTree()),
        ("vllm-lens@there/python", ModuleTree()),  # asked for no edit
        ("transformer-lens@there/python", ModuleTree(plus_one=True)),
    ],
)
def test_no_script_is_made_up_where_it_would_not_be_right(backend, tree):
    assert minimal_script(SHOWN, backend, tree) == ""


def test_the_part_for_an_issue_shows_the_script_or_else_the_case():
    suite = Suite("interventions", 0, 1, 0, 0, 0)
    failure = Failure("id", "Title", "failed", "it begins", "pytest this")
    audit = Audit("mine@p", "command", "2026-01-02", 3.0, {}, [], [], [], [suite], [failure])
    assert "> pytest this" in audit_text(audit)
    audit.smallest = SHOWN
    text = audit_text(audit)
    assert "set 0.5 at `ln_final.hook_normalized`. Row 0 begins 0.4126, 0.4865 where" in text
    assert "> pytest this" in text
    audit.script = "import torch"
    text = audit_text(audit)
    assert "> ```python\n> import torch\n> ```" in text
    assert "pytest this" not in text
    assert json.loads(json.dumps(audit.to_json()))["smallest"]["share"] == 9e4
