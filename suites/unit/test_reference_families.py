"""Families whose forward differs from Llama's: the reference reads and edits them by their own conventions.

That each family is as its entry says is `test_reference_selftest`'s; here an entry that says something else is found
out, and edits land as canonical values.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch

from harness.errors import UsageError
from harness.interventions import parse_interventions
from harness.models.tiny import TINY_MODELS
from harness.parity.reach import reach
from harness.points import EMBED, FINAL_NORM, FIREABLE_TEMPLATES, nonfireable_points
from harness.reference import selftest
from harness.reference.backend import boot_reference
from harness.reference.families import FAMILIES
from harness.reference.hooks import emission_of
from harness.reference.load import load_model
from harness.reference.references import References
from harness.reference.run import forward_logits, run_reference
from harness.reference.selftest import check_reference
from harness.reference.truth import load_truth
from harness.reference.weights import emission, final_norm_weight, unembedding_rows
from suites.unit.small_llama import EXTRA, IDS, LAYERS, POINTS, PROMPTS, VOCAB, WIDTH, randomised, tiny_config

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

    from harness.interventions import Edit
    from harness.reference.run import ReferenceRun

NAMES = sorted(EXTRA)
MORE = [tiny for tiny in TINY_MODELS if tiny.family in ("GPT2", "Olmo2", "OPT", "Cohere", "Mixtral")]
N = len(IDS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    for name in NAMES:
        randomised(tiny_config(name), name).save_pretrained(root / name)
    for tiny in MORE:
        (root / tiny.family).mkdir()
        tiny.build(root / tiny.family)
    return {name: root / name for name in [*NAMES, *(tiny.family for tiny in MORE)]}


def entry(name: str) -> str:
    return {tiny.family: tiny.architecture for tiny in MORE}.get(name, f"{name}ForCausalLM")


WRONG_ENTRIES = {
    "Gemma 2 without the one": (
        "Gemma2",
        {"plus_one": False},
        "ln_final.hook_normalized: 12 of 12 rows differ from the last block",
    ),
    "Gemma 2 with its branches added as they are": (
        "Gemma2",
        {"branch_norms": None},
        "blocks.0.hook_out: 12 of 12 rows differ from embed.hook_out + attention + MLP",
    ),
    "Gemma 2 with its norms swapped": (
        "Gemma2",
        {"branch_norms": ("post_feedforward_layernorm", "post_attention_layernorm")},
        "blocks.0.hook_out: 12 of 12 rows differ from embed.hook_out + attention + MLP",
    ),
    "Gemma 2 read after the branch's norm": (
        "Gemma2",
        {"attn": "model.layers.{i}.post_attention_layernorm"},
        "blocks.1.attn.hook_out: 12 of 12 rows differ from self_attn.o_proj",
    ),
    "Granite's embedding as the module returns it": (
        "Granite",
        {"embed_factor": ""},
        "embed.hook_out: 12 of 12 rows differ from the input of block 0",
    ),
    "Granite's branches added as they are": (
        "Granite",
        {"branch_factor": ""},
        "blocks.2.hook_out: 12 of 12 rows differ from blocks.1.hook_out + attention + MLP",
    ),
    "a factor that is not there": (
        "Granite",
        {"embed_factor": "no_such_number"},
        "embed.hook_out: the config has no no_such_number",
    ),
    "GPT-J without its bias": (
        "GPTJ",
        {"layer_norm": False},
        "ln_final.hook_normalized: 12 of 12 rows differ from the last block",
    ),
    "GPT-J with another family's epsilon": (
        "GPTJ",
        {"norm_eps": "rms_norm_eps"},
        "the config has no rms_norm_eps",
    ),
    "GPT-2 without its positions": (
        "GPT2",
        {"positions": ""},
        "embed.hook_out: 12 of 12 rows differ from the input of block 0",
    ),
    "OLMo 2 with its branches added as they are": (
        "Olmo2",
        {"branch_norms": None},
        "blocks.0.hook_out: 12 of 12 rows differ from embed.hook_out + attention + MLP",
    ),
    "OPT's MLP as rows of one sequence each": (
        "OPT",
        {"flat": ()},
        "blocks.0.mlp.hook_out: its module returned torch.float32 of shape (12, 64)",
    ),
    "Cohere's norm as an RMSNorm": (
        "Cohere",
        {"layer_norm": False},
        "ln_final.hook_normalized: 12 of 12 rows differ from the last block",
    ),
    "Mixtral's attention for its experts": (
        "Mixtral",
        {"mlp": "model.layers.{i}.self_attn"},
        "blocks.0.hook_out: 12 of 12 rows differ from embed.hook_out + attention + MLP",
    ),
    "GPT-J's attention for its MLP": (
        "GPTJ",
        {"mlp": "transformer.h.{i}.attn"},
        "blocks.0.mlp.hook_out: 12 of 12 rows differ from mlp.fc_out",
    ),
}


@pytest.mark.parametrize("fault", WRONG_ENTRIES)
def test_a_wrong_entry_is_found_out(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    name, changes, expected = WRONG_ENTRIES[fault]
    model = load_model(folders[name], "fp32")
    monkeypatch.setitem(FAMILIES, entry(name), dataclasses.replace(FAMILIES[entry(name)], **changes))
    problems = check_reference(model, IDS, FIREABLE_TEMPLATES)
    assert any(expected in problem for problem in problems), problems


WRONG_LOGITS = {
    "not soft-capped": ("Gemma2", lambda logits, _: 5.0 * torch.atanh(logits / 5.0)),
    "not scaled": ("Granite", lambda logits, _: logits * 3.0),
    "without the head's bias": ("GPTJ", lambda logits, model: logits - model.lm_head.bias),
}


@pytest.mark.parametrize("fault", WRONG_LOGITS)
def test_wrong_logits_are_found_out(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    name, plant = WRONG_LOGITS[fault]

    def planted(model: PreTrainedModel, *args: Any) -> ReferenceRun:
        run = run_reference(model, *args)
        run.logits[0] = plant(run.logits[0], model)
        return run

    monkeypatch.setattr(selftest, "run_reference", planted)
    problems = check_reference(load_model(folders[name], "fp32"), IDS)
    assert any(problem.startswith("logits: ") for problem in problems), problems


# --- attention ---------------------------------------------------------------------------------------------------


class TestAttention:
    def test_sdpa_leaves_gemmas_soft_cap_out(
        self, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The trap, so that it is noticed should it ever go away; and that nobody falls into it."""
        with pytest.raises(UsageError, match=r"computes rightly with attn_implementation 'eager' only"):
            load_model(folders["Gemma2"], "fp32", attn_implementation="sdpa")
        free = dataclasses.replace(FAMILIES[entry("Gemma2")], attention="")
        right = forward_logits(load_model(folders["Gemma2"], "fp32"), IDS)
        monkeypatch.setitem(FAMILIES, entry("Gemma2"), free)
        wrong = forward_logits(load_model(folders["Gemma2"], "fp32", attn_implementation="sdpa"), IDS)
        assert (right - wrong).norm() > 1e-3 * right.norm()

    @pytest.mark.parametrize("name", NAMES)
    def test_the_reference_takes_the_one_that_is_right(self, folders: dict[str, Path], name: str) -> None:
        only = FAMILIES[entry(name)].attention
        with boot_reference(folders[name], "fp32") as backend:
            assert backend.describe()["attn_implementation"] == (only or "sdpa")
        with (
            pytest.raises(UsageError, match="'eager' only")
            if only
            else boot_reference(folders[name], "fp32", attn_implementation="sdpa")
        ):
            boot_reference(folders[name], "fp32", attn_implementation="sdpa").close()


# --- realisations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_realisations_differ_by_their_noise(folders: dict[str, Path], name: str, dtype: str) -> None:
    pair = References().get(folders[name], dtype, PROMPTS, POINTS)
    plain, *moved = pair.same
    wide = torch.float64 if dtype == "fp32" else torch.float32
    assert {rows.dtype for hook in POINTS for rows in pair.truth.captured[hook]} == {wide}

    def error(run: Any, hook: str) -> float:
        rows, truth = (torch.cat(side.captured[hook]).double() for side in (run, pair.truth))
        return float((rows - truth).norm() / truth.norm())

    for hook in POINTS:
        assert error(plain, hook) < {"fp32": 1e-5, "bf16": 0.05}[dtype]
    for run in moved:
        assert all(map(torch.equal, run.captured[EMBED], plain.captured[EMBED]))
        for hook in POINTS[1:]:
            assert not torch.equal(torch.cat(run.captured[hook]), torch.cat(plain.captured[hook]))
            assert error(run, hook) < 4 * error(plain, hook)


# --- edits -------------------------------------------------------------------------------------------------------

CHANNELS = torch.randn(WIDTH, generator=torch.manual_seed(3)).tolist()
SPECS = {
    "suppress": {"op": "suppress"},
    "scale": {"op": "scale", "factor": -1.7},
    "add": {"op": "add", "value": CHANNELS},
    "set": {"op": "set", "value": CHANNELS},
}


def edits_of(hook: str, spec: str, pos: Sequence[int] = (0, 4, N - 1)) -> tuple[Edit, ...]:
    [edits] = parse_interventions(
        {hook: {**SPECS[spec], "pos": list(pos)}},
        widths=dict.fromkeys(POINTS, WIDTH),
        nonfireable=nonfireable_points(LAYERS),
        lengths=[N],
    )
    return edits


def loaded(folder: Path, kind: str) -> PreTrainedModel:
    return load_truth(folder, "fp32") if kind == "truth" else load_model(folder, kind)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["fp32", "bf16", "truth"])
def test_edits_land_as_canonical_values(folders: dict[str, Path], name: str, kind: str) -> None:
    """Within the rounding of what the module emits, once out and once back, whichever convention is between."""
    model = loaded(folders[name], kind)
    before = run_reference(model, [IDS], POINTS)
    for hook in (EMBED, "blocks.1.attn.hook_out", "blocks.2.mlp.hook_out", "blocks.3.hook_out", FINAL_NORM):
        held = emission_of(model, hook)
        for spec in SPECS:
            edits = edits_of(hook, spec)
            run = run_reference(model, [IDS], POINTS, [edits])
            touched = list(edits[0].pos or ())
            others = [i for i in range(N) if i not in touched]
            was, got = before.captured[hook][0].double(), run.captured[hook][0].double()
            wanted = edits[0].apply(was[touched])
            if held.plain:
                assert torch.equal(run.captured[hook][0][touched], wanted.to(model.dtype))
            eps = torch.finfo(model.dtype).eps
            # What is rounded is the emitted value, old or new, and the division blows that up.
            zeros = torch.zeros(WIDTH, dtype=torch.float64)
            divisor = (held.emitted(zeros + 1) - held.emitted(zeros)).abs()
            emitted = torch.maximum(held.emitted(wanted).abs(), held.emitted(was[touched]).abs())
            allowed = 2 * eps * (emitted / divisor + wanted.abs() + was[touched].abs())
            assert bool(((got[touched] - wanted).abs() <= allowed).all()), (hook, spec)
            assert torch.equal(got[others], was[others]), (hook, spec)
            assert bool((run.logits[0][touched] != before.logits[0][touched]).any(dim=-1).all()), (hook, spec)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_the_model_goes_on_from_what_was_captured(folders: dict[str, Path], name: str, kind: str) -> None:
    """The first block takes in the edited embedding, bit by bit; the head the edited norm's output."""
    model = loaded(folders[name], kind)
    seen: dict[str, torch.Tensor] = {}

    def keep(key: str, module: Any) -> None:
        module.register_forward_pre_hook(lambda _m, args: seen.__setitem__(key, args[0][0].clone()))

    first = FAMILIES[entry(name)].block.format(i=0)
    keep("first block", model.get_submodule(first))
    keep("head", model.get_output_embeddings())
    for spec in SPECS:
        run = run_reference(model, [IDS], [EMBED], [edits_of(EMBED, spec)])
        assert torch.equal(seen["first block"], run.captured[EMBED][0]), spec
        run = run_reference(model, [IDS], [FINAL_NORM], [edits_of(FINAL_NORM, spec)])
        emitted = emission_of(model, FINAL_NORM).emitted(run.captured[FINAL_NORM][0].double())
        eps = torch.finfo(model.dtype).eps
        assert torch.allclose(seen["head"].double(), emitted, rtol=2 * eps, atol=4 * eps), spec


@pytest.mark.parametrize("name", NAMES)
def test_edits_reach_no_further_than_is_said(folders: dict[str, Path], name: str) -> None:
    """`harness.parity.reach` takes blocks to be sequential; GPT-J's are not, and it must still name every row."""
    model = load_model(folders[name], "fp32")
    before = run_reference(model, [IDS], POINTS).captured
    for hook in POINTS:
        edits = edits_of(hook, "add", [4, 7])
        after = run_reference(model, [IDS], POINTS, [edits]).captured
        may_differ = reach(edits, n_layers=LAYERS, n_rows=N, same_tokens=N)
        for other in POINTS:
            differs = (before[other][0] != after[other][0]).any(dim=-1)
            assert not bool((differs & ~may_differ[other]).any()), (hook, other)
        assert bool(may_differ[hook].any())


# --- single tensors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_set_reads_back_as_foretold(folders: dict[str, Path], name: str, dtype: torch.dtype) -> None:
    model = load_model(folders[name], dtype)
    for hook in POINTS:
        edits = edits_of(hook, "set")
        rows = run_reference(model, [IDS], [hook], [edits]).captured[hook][0]
        foretold = emission(folders[name], hook, dtype).read_back(edits[0].bias, dtype)
        assert foretold.dtype == dtype
        for place in edits[0].pos or ():
            assert torch.equal(rows[place], foretold), hook
        error = (foretold.double() - edits[0].bias.double()).norm() / edits[0].bias.norm()
        assert error < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", NAMES)
def test_single_tensors(folders: dict[str, Path], name: str) -> None:
    model = load_model(folders[name], "fp32")
    weight = final_norm_weight(folders[name])
    assert torch.equal(weight, emission_of(model, FINAL_NORM).weight)
    rows = unembedding_rows(folders[name], [3, VOCAB - 1])
    assert torch.equal(rows, model.get_output_embeddings().weight[[3, VOCAB - 1]])
