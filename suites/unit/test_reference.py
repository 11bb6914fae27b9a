"""The Hugging Face side: weights are the engine's, the truth is really fp64, hooks read what they promise.

The truth is checked against a Llama written out in numpy below, which shares no line with transformers; the self-test
against planted faults, because a check that has never failed proves nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from harness.backend import BootConfig, Topology
from harness.errors import CaptureError, UsageError
from harness.points import all_points
from harness.reference import hooks, selftest, truth
from harness.reference.backend import ReferenceBackend, boot_reference
from harness.reference.hooks import ModuleTree, capturing, hidden_of, unweight
from harness.reference.load import as_dtype, load_model
from harness.reference.run import References, check_ids, forward_logits, run_reference, teacher_forced
from harness.reference.selftest import check_reference
from harness.reference.truth import RecordNarrowing, StayInDouble, exact_forward, load_truth, truth_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from harness.reference.run import ReferenceRun

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4, 64, 2, 1, 32, 259
POINTS = all_points(LAYERS)
IDS = [7, 3, 200, 14, 99, 99, 0, 258, 13, 5, 6, 7]
PROMPTS = [[5], IDS, [1, 2, 3, 4, 5, 6, 7]]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tiny_config(name: str = "Llama", **more: Any) -> Any:
    import transformers

    fields = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "initializer_range": 0.15,  # the default 0.02 leaves the blocks with next to nothing to say
        "tie_word_embeddings": False,
        "pad_token_id": None,
    }
    return getattr(transformers, f"{name}Config")(**{**fields, **more})


def randomised(config: Any, name: str = "Llama") -> PreTrainedModel:
    """A seeded model whose norm weights lie in 0.5 to 1.5, two of the final norm's near zero."""
    import transformers

    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "norm" in key:
                weight.uniform_(0.5, 1.5)
            elif key.endswith("bias"):
                weight.normal_(std=0.1)
        model.model.norm.weight[3], model.model.norm.weight[9] = 0.0, 1e-7
    return model.eval().requires_grad_(requires_grad=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    randomised(tiny_config()).save_pretrained(folder)
    return folder


@pytest.fixture
def model(checkpoint: Path) -> PreTrainedModel:
    return load_model(checkpoint, "fp32")


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that a test may damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def relative(got: Any, want: Any) -> float:
    got, want = np.asarray(got, dtype=np.float64), np.asarray(want, dtype=np.float64)
    return float((np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)).max())


# ---- an independent Llama --------------------------------------------------------------------------------------


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

    @given(
        st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=8),
        st.sampled_from([*DTYPES, torch.float64]),
    )
    def test_unweight(self, weights: list[float], dtype: torch.dtype) -> None:
        weight = torch.tensor(weights, dtype=dtype)
        rows = torch.linspace(0.5, 2.0, 3 * len(weights), dtype=torch.float64).reshape(3, -1).to(dtype)
        output = rows * weight
        got = unweight(output, weight)
        assert got.dtype == dtype
        small = weight.double().abs() < 1e-6
        assert torch.equal(got[:, small], output[:, small])
        # Below 2⁻¹⁴ fp16 products lose bits that no division brings back.
        exact = ~small & (weight.double().abs() > 1e-3)
        difference = (got - rows).double().abs()[:, exact]
        assert bool((difference <= 1.5 * torch.finfo(dtype).eps * rows.double()[:, exact]).all())

    def test_unknown_architecture(self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hooks, "FAMILIES", {"OtherForCausalLM": ModuleTree()})
        with pytest.raises(UsageError, match=r"LlamaForCausalLM.*it has: OtherForCausalLM"):
            run_reference(model, [IDS], POINTS)

    @pytest.mark.parametrize("asked", ["blocks.9.hook_out", "blocks.0.attn.hook_q", "embed"])
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


class TestRun:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_each_sequence_runs_alone(self, checkpoint: Path, dtype: torch.dtype) -> None:
        model = load_model(checkpoint, dtype)
        run = run_reference(model, PROMPTS, ["blocks.1.hook_out", "embed.hook_out"])
        assert list(run.captured) == ["embed.hook_out", "blocks.1.hook_out"]
        for index, ids in enumerate(PROMPTS):
            alone = run_reference(model, [ids], POINTS)
            assert run.logits[index].shape == (len(ids), VOCAB)
            assert run.logits[index].dtype == torch.float32
            assert torch.equal(run.logits[index], alone.logits[0])
            for hook, rows in run.captured.items():
                assert rows[index].shape == (len(ids), WIDTH)
                assert rows[index].dtype == dtype
                assert torch.equal(rows[index], alone.captured[hook][0])

    @pytest.mark.parametrize(
        ("sequences", "message"),
        [
            ([], "no prompt"),
            ("hello", "no prompt"),
            ([1, 2], "not a list"),
            ([[1], []], "prompt 1 is empty"),
            ([[1, 10]], "position 1: 10 is no token id"),
            ([[-1]], "-1 is no token id"),
            ([[True]], "True is no token id"),
            ([[1.0]], "1.0 is no token id"),
            ([[1, 2, 3, 4]], "has 4 tokens; at most 3"),
        ],
    )
    def test_wrong_ids(self, sequences: Any, message: str) -> None:
        with pytest.raises(UsageError, match=message):
            check_ids(sequences, vocab_size=10, max_len=3)

    def test_id_tensors(self) -> None:
        assert check_ids(torch.tensor([[1, 2], [3, 4]]), vocab_size=9, max_len=9) == [[1, 2], [3, 4]]

    @given(st.lists(st.tuples(st.lists(st.integers(), min_size=1), st.lists(st.integers(), min_size=1))))
    def test_teacher_forced(self, requests: list[tuple[list[int], list[int]]]) -> None:
        forced = teacher_forced([p for p, _ in requests], [new for _, new in requests])
        for ids, (prompt, new) in zip(forced, requests, strict=True):
            assert ids == (prompt + new)[:-1]
            assert len(ids) == len(prompt) + len(new) - 1

    def test_teacher_forced_wants_pairs(self) -> None:
        with pytest.raises(UsageError, match="2 prompts but 1"):
            teacher_forced([[1], [2]], [[3]])
        with pytest.raises(UsageError, match="prompt 0 has no new token"):
            teacher_forced([[1]], [[]])


def entry_bytes(n_rows: int) -> int:
    """Bytes of one cached sequence of an fp32 engine: T in fp64, three realisations of R in fp32, logits in fp32."""
    return n_rows * (len(POINTS) * WIDTH * (8 + 3 * 4) + 2 * VOCAB * 4)


class TestReferences:
    def test_computed_once(self, checkpoint: Path) -> None:
        references = References()
        first = references.get(checkpoint, "fp32", PROMPTS, POINTS)
        assert references.computed == 4 * len(PROMPTS)
        again = references.get(
            str(checkpoint), torch.float32, [PROMPTS[2], PROMPTS[1], PROMPTS[1]], ["embed.hook_out"]
        )
        assert references.computed == 4 * len(PROMPTS)
        assert again.truth.prompts == [PROMPTS[2], PROMPTS[1], PROMPTS[1]]
        assert list(again.same[0].captured) == ["embed.hook_out"]
        assert again.truth.captured["embed.hook_out"][0] is first.truth.captured["embed.hook_out"][2]
        references.get(checkpoint, "bf16", PROMPTS, POINTS)
        assert references.computed == 8 * len(PROMPTS)

    def test_is_what_run_reference_gives(self, checkpoint: Path) -> None:
        pair = References().get(checkpoint, "bf16", PROMPTS, POINTS)
        truth_run = run_reference(load_truth(checkpoint, "bf16"), PROMPTS, POINTS)
        same_run = run_reference(load_model(checkpoint, "bf16", attn_implementation="sdpa"), PROMPTS, POINTS)
        for got, expected in ((pair.truth, truth_run), (pair.same[0], same_run)):
            assert got.prompts == expected.prompts
            for hook in POINTS:
                assert all(map(torch.equal, got.captured[hook], expected.captured[hook]))
            assert all(map(torch.equal, got.logits, expected.logits))

    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    def test_realisations_differ_by_their_noise(self, checkpoint: Path, dtype: str) -> None:
        """The jittered ones start one unit away, are no worse than R by much, and leave the embedding R's own."""
        pair = References().get(checkpoint, dtype, PROMPTS, POINTS)

        def error(run: ReferenceRun, hook: str) -> float:
            rows, truth = (
                torch.cat(run.captured[hook]).double(),
                torch.cat(pair.truth.captured[hook]).double(),
            )
            return float((rows - truth).norm() / truth.norm())

        plain, *moved = pair.same
        assert len(moved) == 2
        for run in moved:
            assert all(map(torch.equal, run.captured["embed.hook_out"], plain.captured["embed.hook_out"]))
            for hook in POINTS[1:]:
                assert not torch.equal(torch.cat(run.captured[hook]), torch.cat(plain.captured[hook]))
                assert error(run, hook) < 4 * error(plain, hook)
        assert not torch.equal(
            torch.cat(moved[0].captured[POINTS[-1]]), torch.cat(moved[1].captured[POINTS[-1]])
        )

    def test_models_are_freed_before_the_next_is_loaded(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        references = References(max_loaded=1)
        loaded: list[int] = []
        for name, real in (("load_truth", load_truth), ("load_model", load_model)):

            def spy(*args: Any, real: Callable[..., Any] = real, **kwargs: Any) -> Any:
                loaded.append(len(references._models))
                return real(*args, **kwargs)

            monkeypatch.setattr(f"harness.reference.run.{name}", spy)
        for ids in ([1], [2], [3], [4]):
            references.get(checkpoint, "fp32", [ids], POINTS)
        assert set(loaded) == {0}
        # Each call begins with the model the one before ended with.
        assert len(loaded) == 5

    def test_least_recently_used_goes_first(self, checkpoint: Path) -> None:
        references = References(max_bytes=2 * entry_bytes(3), max_loaded=2)
        a, b, c = [1, 2, 3], [4, 5, 6], [7, 8, 9]
        for ids in (a, b, a, c):
            references.get(checkpoint, "fp32", [ids], POINTS)
        assert references.computed == 12
        assert references.nbytes == 2 * entry_bytes(3)
        references.get(checkpoint, "fp32", [a, c], POINTS)
        assert references.computed == 12
        references.get(checkpoint, "fp32", [b], POINTS)
        assert references.computed == 16

    def test_a_batch_over_the_limit_still_comes_whole(self, checkpoint: Path) -> None:
        references = References(max_bytes=1)
        pair = references.get(checkpoint, "fp32", PROMPTS, POINTS)
        assert [len(rows) for rows in pair.same[0].captured["embed.hook_out"]] == [
            len(ids) for ids in PROMPTS
        ]
        assert references.nbytes == 0

    @pytest.mark.parametrize(
        ("dtype", "ids", "capture", "message"),
        [
            ("fp64", [[1]], POINTS, "no truth"),
            ("fp32", [[VOCAB]], POINTS, "no token id"),
            ("fp32", [[1] * 129], POINTS, "at most 128"),
            ("fp32", [[1]], ["blocks.4.hook_out"], "unknown hook"),
        ],
    )
    def test_mistakes_cost_no_load(
        self, checkpoint: Path, dtype: str, ids: Any, capture: Any, message: str
    ) -> None:
        references = References()
        with pytest.raises(UsageError, match=message):
            references.get(checkpoint, dtype, ids, capture)
        assert not references._models
        references.close()


class TestBackend:
    @pytest.fixture
    def backend(self, checkpoint: Path) -> ReferenceBackend:
        return boot_reference(checkpoint)

    def test_forward(self, backend: ReferenceBackend) -> None:
        result = backend.forward(PROMPTS, capture=POINTS, max_new_tokens=4, return_logits=True)
        assert result.lengths == [len(ids) + 3 for ids in PROMPTS]
        assert result.logits is not None
        assert result.logits.shape == (3, max(result.lengths), VOCAB)
        assert list(result.captured) == list(backend.supported_hook_points) == POINTS
        for index, ids in enumerate(PROMPTS):
            forced = teacher_forced([ids], [result.new_tokens[index]])
            expected = run_reference(backend._alive(), forced, POINTS)
            for hook in POINTS:
                assert relative(result.rows(hook, index), expected.captured[hook][0]) < 1e-5
                assert not result.captured[hook][index, result.lengths[index] :].any()
            assert bool((result.logits[index, result.lengths[index] :] == float("-inf")).all())
            assert [int(row.argmax()) for row in expected.logits[0][len(ids) - 1 :]] == result.new_tokens[
                index
            ]

    def test_prompt_rows_do_not_depend_on_what_follows(self, backend: ReferenceBackend) -> None:
        one, four = (backend.forward(PROMPTS, capture=POINTS, max_new_tokens=k) for k in (1, 4))
        for hook in POINTS:
            for index, ids in enumerate(PROMPTS):
                assert torch.equal(one.rows(hook, index), four.rows(hook, index)[: len(ids)])

    def test_greedy_is_what_transformers_generates(self, backend: ReferenceBackend) -> None:
        # Its own loop, with its own cache; greedy and without an end token. The mask is said, or the 0 among the ids
        # would be taken for padding.
        ids = torch.tensor([IDS])
        expected = backend._alive().generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert backend.forward([IDS], max_new_tokens=8).new_tokens == [expected[0, len(IDS) :].tolist()]

    def test_capture_is_authoritative(self, backend: ReferenceBackend) -> None:
        result = backend.forward([IDS])
        assert result.captured == {}
        assert result.logits is None
        assert result.lengths == [len(IDS)]

    def test_raw_logits(self, backend: ReferenceBackend) -> None:
        result = backend.forward(PROMPTS, capture=POINTS, return_logits=True)
        assert result.logits is not None
        for index, raw in enumerate(backend.raw_logits(PROMPTS)):
            assert torch.equal(raw, result.logits[index, : len(PROMPTS[index])])

    def test_describe_and_close(self, checkpoint: Path) -> None:
        with boot_reference(checkpoint, "bf16", attn_implementation="eager") as backend:
            told = json.loads(json.dumps(backend.describe()))
            assert (told["dtype"], told["attn_implementation"]) == ("bfloat16", "eager")
        backend.close()
        with pytest.raises(UsageError, match="closed"):
            backend.forward([IDS])

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"mode": "compiled"}, "no compiled mode"),
            ({"topology": Topology(tp=2)}, "tp2"),
            ({"options": {"worker_cls": "x"}}, "'worker_cls'"),
            ({"max_model_len": 129}, "max_model_len is 129"),
            ({"max_model_len": 0}, "max_model_len is 0"),
        ],
    )
    def test_boot_refuses(self, checkpoint: Path, change: dict[str, Any], message: str) -> None:
        config = BootConfig("hf", "tiny", str(checkpoint), mode="eager", max_model_len=64)
        with pytest.raises(UsageError, match=message):
            ReferenceBackend.boot(dataclasses.replace(config, **change))

    @pytest.mark.parametrize("steps", [0, -1, True, 1.5])
    def test_wrong_number_of_tokens(self, backend: ReferenceBackend, steps: Any) -> None:
        with pytest.raises(UsageError, match="max_new_tokens"):
            backend.forward([IDS], max_new_tokens=steps)

    def test_decode_steps_need_positions(self, checkpoint: Path) -> None:
        backend = boot_reference(checkpoint, max_model_len=14)
        assert backend.forward([IDS], max_new_tokens=3).lengths == [14]
        with pytest.raises(UsageError, match="at most 11 fit"):
            backend.forward([IDS], max_new_tokens=4)


# ---- the self-test, and the faults it must see -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shifted(ModuleTree):
    """Reads the block before: the off-by-one of `hidden_states`."""

    def path(self, point: Any) -> str:
        return super().path(dataclasses.replace(point, block=max(point.block - 1, 0)))


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
    "a norm without weight": (ModuleTree(final_norm="model.layers.3"), "has no weight to divide by"),
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

    @pytest.mark.parametrize("family", sorted(hooks.FAMILIES))
    def test_family_is_as_its_entry_says(self, family: str, tmp_path: Path) -> None:
        name = family.removesuffix("ForCausalLM")
        randomised(tiny_config(name), name).save_pretrained(tmp_path)
        assert check_reference(load_model(tmp_path, "bf16", attn_implementation="sdpa"), IDS) == []
        assert check_reference(load_truth(tmp_path, "fp32"), IDS) == []

    @pytest.mark.parametrize("fault", WRONG_TREES)
    def test_wrong_module(self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
        tree, expected = WRONG_TREES[fault]
        monkeypatch.setitem(hooks.FAMILIES, "LlamaForCausalLM", tree)
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
        monkeypatch.setattr(hooks, "hidden_of", lambda output, _hook: output[0])
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
