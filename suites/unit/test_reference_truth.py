"""The truth is really fp64, and right: it equals a Llama written in numpy that shares no line with transformers."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from harness.errors import UsageError
from harness.reference import truth
from harness.reference.run import run_reference
from harness.reference.truth import RecordNarrowing, StayInDouble, exact_forward, load_truth, truth_dtype
from suites.unit.small_llama import DTYPES, HEAD_DIM, HEADS, IDS, KV_HEADS, LAYERS, POINTS, relative

if TYPE_CHECKING:
    from pathlib import Path


def numpy_llama(
    weights: dict[str, np.ndarray], ids: list[int], *, eps: float, theta: float
) -> dict[str, np.ndarray]:
    """Llama in fp64, from its papers' formulas; only the rotary angles are fp32, as the model defines them."""
    n = len(ids)
    inv_freq = 1.0 / (theta ** (torch.arange(0, HEAD_DIM, 2, dtype=torch.float32) / HEAD_DIM))
    angles = torch.arange(n).float()[:, None] * inv_freq
    cos, sin = angles.cos().numpy().astype(np.float64), angles.sin().numpy().astype(np.float64)

    def norm(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)

    def rotate(x: np.ndarray) -> np.ndarray:  # (n, head_dim): pairs are (j, j + head_dim / 2)
        a, b = x[:, : HEAD_DIM // 2], x[:, HEAD_DIM // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def attention(x: np.ndarray, at: str) -> np.ndarray:
        q, k, v = (x @ weights[f"{at}.{p}_proj.weight"].T for p in "qkv")
        heads = []
        for head in range(HEADS):
            shared = slice(head * KV_HEADS // HEADS * HEAD_DIM, (head * KV_HEADS // HEADS + 1) * HEAD_DIM)
            scores = (
                rotate(q[:, head * HEAD_DIM : (head + 1) * HEAD_DIM]) @ rotate(k[:, shared]).T / HEAD_DIM**0.5
            )
            scores[np.triu_indices(n, 1)] = -np.inf
            odds = np.exp(scores - scores.max(axis=-1, keepdims=True))
            heads.append(odds / odds.sum(axis=-1, keepdims=True) @ v[:, shared])
        return np.concatenate(heads, axis=-1) @ weights[f"{at}.o_proj.weight"].T

    def mlp(x: np.ndarray, at: str) -> np.ndarray:
        gate = x @ weights[f"{at}.gate_proj.weight"].T
        return (gate / (1 + np.exp(-gate)) * (x @ weights[f"{at}.up_proj.weight"].T)) @ weights[
            f"{at}.down_proj.weight"
        ].T

    out = {"embed.hook_out": weights["model.embed_tokens.weight"][ids]}
    x = out["embed.hook_out"]
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        out[f"blocks.{i}.attn.hook_out"] = attention(
            norm(x) * weights[f"{at}.input_layernorm.weight"], f"{at}.self_attn"
        )
        x = x + out[f"blocks.{i}.attn.hook_out"]
        out[f"blocks.{i}.mlp.hook_out"] = mlp(
            norm(x) * weights[f"{at}.post_attention_layernorm.weight"], f"{at}.mlp"
        )
        x = out[f"blocks.{i}.hook_out"] = x + out[f"blocks.{i}.mlp.hook_out"]
    last = weights["model.norm.weight"]
    small = np.abs(last) < 1e-6
    out["ln_final.hook_normalized"] = np.where(small, norm(x) * last, norm(x))
    out["logits"] = (norm(x) * last) @ weights["lm_head.weight"].T
    return out


def by_numpy(checkpoint: Path, ids: list[int], rounded_to: torch.dtype) -> dict[str, np.ndarray]:
    stored = load_file(checkpoint / "model.safetensors")
    config = json.loads((checkpoint / "config.json").read_text())
    weights = {name: value.to(rounded_to).double().numpy() for name, value in stored.items()}
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    return numpy_llama(weights, ids, eps=config["rms_norm_eps"], theta=theta)


class TestTruth:
    def test_truth_of_an_fp32_engine_is_fp64(self, checkpoint: Path) -> None:
        run = run_reference(load_truth(checkpoint, "fp32"), [IDS], POINTS)
        expected = by_numpy(checkpoint, IDS, torch.float32)
        errors = {hook: relative(run.captured[hook][0], expected[hook]) for hook in POINTS}
        assert {rows[0].dtype for rows in run.captured.values()} == {torch.float64}
        assert max(errors.values()) < 1e-12, errors
        # Logits are handed out in fp32: half a unit in the last place is all they may lose.
        assert relative(run.logits[0], expected["logits"]) < 2**-24

    def test_fp64_alone_is_no_truth(self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(truth, "StayInDouble", contextlib.nullcontext)
        run = run_reference(load_truth(checkpoint, "fp32"), [IDS], POINTS)
        expected = by_numpy(checkpoint, IDS, torch.float32)
        assert relative(run.captured["blocks.3.hook_out"][0], expected["blocks.3.hook_out"]) > 1e-9

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_truth_of_a_narrow_engine_has_its_weights(self, checkpoint: Path, dtype: torch.dtype) -> None:
        run = run_reference(load_truth(checkpoint, dtype), [IDS], POINTS)
        expected, unrounded = (by_numpy(checkpoint, IDS, d) for d in (dtype, torch.float32))
        for hook in POINTS:
            assert run.captured[hook][0].dtype == torch.float32
            assert relative(run.captured[hook][0], expected[hook]) < 1e-5
            assert relative(run.captured[hook][0], unrounded[hook]) > 1e-4

    def test_dtypes(self) -> None:
        assert [truth_dtype(name) for name in ("bf16", "float16", torch.float32)] == [
            torch.float32,
            torch.float32,
            torch.float64,
        ]
        with pytest.raises(UsageError, match="float64 has no truth"):
            truth_dtype("fp64")

    @pytest.mark.parametrize("narrow", DTYPES)
    def test_stays_in_double(self, narrow: torch.dtype) -> None:
        x = torch.randn(3, 4, dtype=torch.float64)
        with StayInDouble(), RecordNarrowing() as recorder:
            kept = [
                x.to(narrow),
                x.to("cpu", narrow),
                x.to(dtype=narrow),
                x.type(narrow),
                x.float(),
                x.half(),
                x.bfloat16(),
                torch.nn.functional.softmax(x, dim=-1, dtype=narrow),
                x.softmax(-1, narrow),
                torch.sum(x, dim=-1, dtype=narrow),
                torch.zeros_like(x, dtype=narrow),
            ]
            free = [
                torch.arange(3).to(narrow),
                torch.ones(2, dtype=torch.float32).to(narrow),
                torch.ones(2, dtype=narrow),
            ]
        assert {tensor.dtype for tensor in kept} == {torch.float64}
        assert {tensor.dtype for tensor in free} == {narrow}
        assert not recorder.found
        assert x.to(narrow).dtype == narrow

    def test_narrowing_is_recorded(self) -> None:
        with RecordNarrowing() as recorder:
            torch.ones(2, dtype=torch.float64).float()
            torch.ones(2).double()
        assert recorder.found == {"aten._to_copy.default": 1}

    def test_matmul_precision_is_full_and_put_back(self) -> None:
        torch.set_float32_matmul_precision("medium")
        try:
            with exact_forward(torch.float32):
                assert torch.get_float32_matmul_precision() == "highest"
                assert not torch.is_grad_enabled()
            assert torch.get_float32_matmul_precision() == "medium"
        finally:
            torch.set_float32_matmul_precision("highest")
