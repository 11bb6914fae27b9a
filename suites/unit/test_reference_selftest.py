"""The reference's self-test, against planted faults: a check that has never failed proves nothing."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch

from harness.models.tiny import TINY_MODELS, TinyModel
from harness.points import FIREABLE_TEMPLATES
from harness.reference import hooks, selftest, truth
from harness.reference.families import FAMILIES, ModuleTree, Reading
from harness.reference.load import load_model
from harness.reference.run import forward_logits, run_reference
from harness.reference.selftest import check_reference
from harness.reference.truth import load_truth
from suites.unit.small_llama import DTYPES, EXTRA, IDS, WIDTH, randomised, tiny_config

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedModel

    from harness.reference.run import ReferenceRun


@dataclasses.dataclass(frozen=True)
class Shifted(ModuleTree):
    """Reads the block before: the off-by-one of `hidden_states`."""

    def reading(self, point: Any) -> Reading:
        return super().reading(dataclasses.replace(point, block=max(point.block - 1, 0)))


def edited(hook: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[ReferenceRun], None]:
    """A fault that changes one hook's rows, or the logits, after they were read."""

    def plant(run: ReferenceRun) -> None:
        if hook == "logits":
            run.logits[0] = edit(run.logits[0])
        else:
            run.captured[hook][0] = edit(run.captured[hook][0])

    return plant


def row(
    position: int, edit: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Edit one row only."""

    def apply(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.clone()
        rows[position] = edit(rows[position])
        return rows

    return apply


WRONG_TREES = {
    "attention and MLP swapped": (
        ModuleTree(attn="model.layers.{i}.mlp", mlp="model.layers.{i}.self_attn"),
        "blocks.2.attn.hook_out: 12 of 12 rows differ from self_attn.o_proj",
    ),
    "residual missing": (
        ModuleTree(block="model.layers.{i}.mlp"),
        "blocks.1.hook_out: 12 of 12 rows differ from the input of block 2",
    ),
    "shifted by one block": (Shifted(), "blocks.1.hook_out: 12 of 12 rows differ from the input of block 2"),
    "attention before its projection": (
        ModuleTree(attn="model.layers.{i}.self_attn.v_proj"),
        "blocks.0.attn.hook_out: shape",
    ),
    "embedding read after a block": (
        ModuleTree(embed="model.layers.0"),
        "embed.hook_out: 12 of 12 rows differ",
    ),
    "another norm": (
        ModuleTree(final_norm="model.layers.3.post_attention_layernorm"),
        "ln_final.hook_normalized: 12 of 12 rows differ from the last block's output",
    ),
    "no such module": (
        ModuleTree(mlp="model.layers.{i}.ffn"),
        "blocks.0.mlp.hook_out: the model has no module",
    ),
    "a norm without weight": (
        ModuleTree(final_norm="model.layers.3"),
        "the model has no model.layers.3.weight",
    ),
}

#: Of the points that are not among the usual five.
WRONG_READINGS = {
    "the MLP's input before its norm": (
        ModuleTree(mlp_in="model.layers.{i}.post_attention_layernorm"),
        "blocks.0.mlp.hook_in: 12 of 12 rows differ from the MLP's output",
    ),
    "the heads' outputs before attention": (
        ModuleTree(projection="q_proj"),
        "blocks.0.attn.hook_z: 12 of 12 rows differ from the last projection's input",
    ),
    "another number of heads": (
        ModuleTree(qkv=("k_proj", "q_proj", "v_proj")),
        "blocks.0.attn.hook_q: shape (12, 32), expected (12, 64)",
    ),
    "no such projection": (
        ModuleTree(qkv=("query", "key", "value")),
        "blocks.0.attn.hook_q: the model has no module",
    ),
}

WRONG_ROWS = {
    "never filled": (
        edited("blocks.1.mlp.hook_out", torch.zeros_like),
        "blocks.1.mlp.hook_out: 12 of 12 rows constant",
    ),
    "one row never filled": (
        edited("blocks.1.mlp.hook_out", row(5, torch.zeros_like)),
        "blocks.1.mlp.hook_out: 1 of 12 rows constant over its channels, the first at position 5",
    ),
    "not a number": (
        edited("blocks.0.hook_out", row(3, lambda r: r * float("nan"))),
        "blocks.0.hook_out: 1 of 12 rows not finite",
    ),
    "rounded": (
        edited("blocks.2.hook_out", lambda rows: rows.bfloat16().float()),
        "blocks.2.hook_out: 12 of 12 rows differ from hidden_states[3]",
    ),
    "another dtype": (
        edited("blocks.2.hook_out", torch.Tensor.bfloat16),
        "blocks.2.hook_out: torch.bfloat16, expected torch.float32",
    ),
    "positions instead of states": (
        edited("embed.hook_out", lambda rows: torch.arange(len(rows))[:, None].expand_as(rows)),
        "embed.hook_out: torch.int64",
    ),
    "a row too few": (
        edited("blocks.3.hook_out", lambda rows: rows[1:]),
        "blocks.3.hook_out: shape (11, 64), expected (12, 64)",
    ),
    "shifted by one row": (
        edited("blocks.3.attn.hook_out", lambda rows: rows.roll(1, 0)),
        "blocks.3.attn.hook_out: 12 of 12 rows differ from self_attn.o_proj",
    ),
    "one row of another position": (
        edited("blocks.3.hook_out", lambda rows: rows[[0, 1, 2, 3, 3, *range(5, 12)]]),
        "blocks.3.hook_out: 1 of 12 rows differ from blocks.2.hook_out + attention + MLP, the worst at position 4",
    ),
    "a thousandth off": (
        edited("blocks.0.mlp.hook_out", row(11, lambda r: r * 1.001)),
        "blocks.0.mlp.hook_out: 1 of 12 rows differ from mlp.down_proj of its input, the worst at position 11",
    ),
    "after the final norm": (
        lambda run: run.captured["blocks.3.hook_out"].__setitem__(
            0, run.captured["ln_final.hook_normalized"][0]
        ),
        "blocks.3.hook_out: 12 of 12 rows differ from blocks.2.hook_out + attention + MLP",
    ),
    "not divided by the weight": (
        edited("ln_final.hook_normalized", lambda rows: rows * torch.linspace(0.5, 1.5, WIDTH)),
        "ln_final.hook_normalized · weight: 12 of 12 rows differ from the head's input",
    ),
    "soft-capped logits": (
        edited("logits", lambda rows: 5 * torch.tanh(rows / 5)),
        "logits: 12 of 12 rows differ",
    ),
    "logits of one row for all": (
        edited("logits", lambda rows: rows[-1:].expand_as(rows)),
        "logits: 11 of 12 rows differ",
    ),
    "a hook missing": (
        lambda run: run.captured.pop("blocks.2.attn.hook_out"),
        "blocks.2.attn.hook_out: not captured",
    ),
}


class TestSelfTest:
    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    @pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
    def test_reference_is_right(self, checkpoint: Path, dtype: torch.dtype, attention: str) -> None:
        assert check_reference(load_model(checkpoint, dtype, attn_implementation=attention), IDS) == []

    @pytest.mark.parametrize("name", ["Llama", *sorted(EXTRA)])
    def test_family_with_divisors_of_zero(self, name: str, tmp_path: Path) -> None:
        randomised(tiny_config(name), name).save_pretrained(tmp_path)
        self.checked(tmp_path, FAMILIES[f"{name}ForCausalLM"])

    @pytest.mark.parametrize("tiny", TINY_MODELS, ids=lambda tiny: tiny.name)
    def test_family_is_as_its_entry_says(self, tiny: TinyModel, tmp_path: Path) -> None:
        tiny.build(tmp_path)
        self.checked(tmp_path, FAMILIES[tiny.architecture])

    @staticmethod
    def checked(tmp_path: Path, tree: ModuleTree) -> None:
        attention = tree.attention or "sdpa"
        assert check_reference(load_model(tmp_path, "bf16", attn_implementation=attention), IDS) == []
        assert check_reference(load_truth(tmp_path, "fp32"), IDS) == []

    @pytest.mark.parametrize("fault", WRONG_TREES)
    def test_wrong_module(self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
        tree, expected = WRONG_TREES[fault]
        monkeypatch.setitem(FAMILIES, "LlamaForCausalLM", tree)
        self.reported(check_reference(model, IDS, FIREABLE_TEMPLATES), expected)

    @pytest.mark.parametrize("fault", WRONG_READINGS)
    def test_wrong_reading(self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
        tree, expected = WRONG_READINGS[fault]
        monkeypatch.setitem(FAMILIES, "LlamaForCausalLM", tree)
        self.reported(check_reference(model, IDS), expected)

    @pytest.mark.parametrize("fault", WRONG_ROWS)
    def test_wrong_rows(self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
        plant, expected = WRONG_ROWS[fault]

        def planted(*args: Any) -> ReferenceRun:
            run = run_reference(*args)
            plant(run)
            return run

        monkeypatch.setattr(selftest, "run_reference", planted)
        self.reported(check_reference(model, IDS), expected)

    def test_batch_sliced(self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hooks, "hidden_of", lambda output, _hook, **_: output[0])
        self.reported(check_reference(model, IDS), "blocks.0.hook_out: shape (64,), expected (12, 64)")

    def test_alias(self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        held: dict[str, torch.Tensor] = {}

        def keeping(*args: Any) -> ReferenceRun:
            run = run_reference(*args)
            held["rows"] = run.captured["blocks.1.hook_out"][0]
            return run

        def reusing(*args: Any) -> torch.Tensor:
            held["rows"].mul_(2)
            return forward_logits(*args)

        monkeypatch.setattr(selftest, "run_reference", keeping)
        monkeypatch.setattr(selftest, "forward_logits", reusing)
        self.reported(check_reference(model, IDS), "blocks.1.hook_out: a later forward changed it")

    @pytest.mark.parametrize(
        "hook", ["blocks.1.attn.hook_out", "blocks.1.mlp.hook_out", "ln_final.hook_normalized"]
    )
    def test_a_twentieth_off_shows_in_bf16(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, hook: str
    ) -> None:
        def planted(*args: Any) -> ReferenceRun:
            run = run_reference(*args)
            edited(hook, row(4, lambda r: r * 1.05))(run)
            return run

        monkeypatch.setattr(selftest, "run_reference", planted)
        problems = check_reference(load_model(checkpoint, "bf16"), IDS)
        self.reported(problems, f"{hook}: 1 of 12 rows differ")

    def test_cancellation_is_no_fault(self, model: PreTrainedModel) -> None:
        # Two equal channels of the residual that the head subtracts from each other, at 1000 times its usual size:
        # what SmolLM2's massive channels do to its logits.
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "model.norm.weight")):
                weight[1] = weight[0]
        model.model.embed_tokens.weight[:, 1] = model.model.embed_tokens.weight[:, 0]
        model.lm_head.weight[:, 0], model.lm_head.weight[:, 1] = 150.0, -150.0
        assert check_reference(model, IDS) == []

    def test_eps_is_the_configs(self, model: PreTrainedModel) -> None:
        model.model.norm.variance_epsilon = 1.0
        self.reported(
            check_reference(model, IDS), "ln_final.hook_normalized: 12 of 12 rows differ from the last block"
        )

    def test_truth_that_is_not_double(self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = load_truth(checkpoint, "fp32")
        assert not check_reference(model, IDS)
        monkeypatch.setattr(truth, "StayInDouble", contextlib.nullcontext)
        self.reported(
            check_reference(model, IDS), "fp64: aten._to_copy.default took fp64 and returned a narrower float"
        )

    @staticmethod
    def reported(problems: list[str], expected: str) -> None:
        assert any(problem.startswith(expected) or expected in problem for problem in problems), problems
