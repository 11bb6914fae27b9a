"""Hooks of the reference read what they promise, exactly once, and leave nothing behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from harness.errors import CaptureError, UsageError
from harness.interventions import Edit
from harness.reference import families
from harness.reference.families import ModuleTree
from harness.reference.hooks import capturing, hidden_of
from harness.reference.run import forward_logits, run_reference
from suites.unit.small_llama import IDS, POINTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TestHooks:
    def test_output_is_read_by_type(self) -> None:
        rows = torch.randn(1, 3, 4)
        assert hidden_of(rows, "h") is rows
        assert hidden_of((rows, None), "h") is rows
        for wrong in (rows[0], torch.arange(6).reshape(1, 2, 3), (None, rows), {"a": rows}):
            with pytest.raises(CaptureError, match="h: its module returned"):
                hidden_of(wrong, "h")

    def test_capture_is_a_copy(self, model: PreTrainedModel) -> None:
        # What a fused add + norm does: the next module writes into the tensor that was handed out.
        clean = run_reference(model, [IDS], ["embed.hook_out"])
        handle = model.model.layers[0].register_forward_pre_hook(lambda _module, args: (args[0].add_(64.0),))
        dirty = run_reference(model, [IDS], ["embed.hook_out"])
        handle.remove()
        assert torch.equal(clean.captured["embed.hook_out"][0], dirty.captured["embed.hook_out"][0])

    def test_unknown_architecture(self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(families, "FAMILIES", {"OtherForCausalLM": ModuleTree()})
        with pytest.raises(UsageError, match=r"LlamaForCausalLM.*it has: OtherForCausalLM"):
            run_reference(model, [IDS], POINTS)

    def test_a_pattern_is_read_and_not_edited(self, model: PreTrainedModel) -> None:
        name = "blocks.0.attn.hook_pattern"
        edit = Edit(name, "suppress", 0.0, torch.zeros(()), None)
        with pytest.raises(UsageError, match=name):
            run_reference(model, [IDS], [name], [(edit,)])

    @pytest.mark.parametrize("asked", ["blocks.9.hook_out", "blocks.0.attn.hook_attn_scores", "embed"])
    def test_wrong_names(self, model: PreTrainedModel, asked: str) -> None:
        with pytest.raises(UsageError, match=asked):
            run_reference(model, [IDS], [asked])

    def test_hooks_are_removed(self, model: PreTrainedModel) -> None:
        run_reference(model, [IDS], POINTS)
        with pytest.raises(RuntimeError, match="on purpose"), capturing(model, POINTS):
            raise RuntimeError("on purpose")
        assert not any(module._forward_hooks for module in model.modules())

    def test_fires_exactly_once(self, model: PreTrainedModel) -> None:
        with (
            pytest.raises(CaptureError, match="14 hooks of the reference never fired"),
            capturing(model, POINTS),
        ):
            pass
        with capturing(model, POINTS):
            forward_logits(model, IDS)
            with pytest.raises(CaptureError, match="ran twice"):
                forward_logits(model, IDS)
