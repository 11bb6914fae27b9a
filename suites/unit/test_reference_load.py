"""The reference's weights are the engine's, rounded as the engine rounds them; what is incomplete is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.errors import UsageError
from harness.reference.load import as_dtype, load_model
from harness.reference.selftest import check_reference
from suites.unit.small_llama import DTYPES, HEAD_DIM, IDS, randomised, tiny_config


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that a test may damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


class TestLoad:
    @pytest.mark.parametrize("stored", DTYPES)
    @pytest.mark.parametrize("compute", [torch.float32, torch.float64])
    def test_weights_are_rounded_then_widened(
        self, checkpoint: Path, stored: torch.dtype, compute: torch.dtype
    ) -> None:
        model = load_model(checkpoint, compute, weights_dtype=stored)
        on_disk = load_file(checkpoint / "model.safetensors")
        for name, weight in model.named_parameters():
            assert torch.equal(weight, on_disk[name].to(stored).to(compute)), name
        assert model.dtype == model.config.dtype == compute

    @pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
    def test_rotary_frequencies_stay_fp32(self, checkpoint: Path, dtype: torch.dtype) -> None:
        expected = 1.0 / (10000.0 ** (torch.arange(0, HEAD_DIM, 2, dtype=torch.float32) / HEAD_DIM))
        model = load_model(checkpoint, dtype)
        inv_freq = model.model.rotary_emb.inv_freq
        assert torch.equal(inv_freq, expected)
        # The trap this avoids, so that it is noticed should it ever go away.
        assert model.to(torch.bfloat16).model.rotary_emb.inv_freq.dtype == torch.bfloat16

    def test_tied_weights_stay_tied(self, tmp_path: Path) -> None:
        randomised(tiny_config(tie_word_embeddings=True)).save_pretrained(tmp_path)
        model = load_model(tmp_path, "fp64", weights_dtype="bf16")
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert not check_reference(model, IDS)

    def test_ready_for_inference(self, checkpoint: Path) -> None:
        model = load_model(checkpoint, "bf16", attn_implementation="sdpa")
        assert not model.training
        assert not any(weight.requires_grad for weight in model.parameters())
        assert model.config._attn_implementation == "sdpa"

    def test_dtype_names(self) -> None:
        assert as_dtype("bf16") == as_dtype("bfloat16") == as_dtype(torch.bfloat16) == torch.bfloat16
        with pytest.raises(UsageError, match="'int8' is no dtype"):
            as_dtype("int8")

    def test_missing_weight_is_not_made_up(self, copy: Path) -> None:
        weights = load_file(copy / "model.safetensors")
        del weights["model.layers.2.mlp.up_proj.weight"]
        save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UsageError, match=r"lacks 1 weights .*layers\.2\.mlp\.up_proj"):
            load_model(copy, "fp32")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"hidden_size": 32}, "does not load into transformers"),
            ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "is quantised"),
        ],
    )
    def test_unusable_config(self, copy: Path, change: dict[str, Any], message: str) -> None:
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(UsageError, match=message) as caught:
            load_model(copy, "fp32")
        assert "\n" not in str(caught.value)

    def test_unreadable_checkpoint(self, copy: Path, tmp_path: Path) -> None:
        weights = copy / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
        for path in (copy, tmp_path / "absent"):
            with pytest.raises(UsageError, match=path.name):
                load_model(path, "fp32")
