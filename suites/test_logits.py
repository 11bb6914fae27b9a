"""Every logit the engine's rebuilt unembedding gives equals the reference's, by three independent ways.

Rebuilt from the captured final norm, read from the engine's own log-prob path, and computed by the model's own head
inside the worker: all three are judged against the truth, row by row.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from harness.errors import UsageError
from harness.loss import token_losses
from harness.prompts import of_length
from harness.reference.run import teacher_forced
from harness.reference.weights import unembedding_rows
from suites.edits import randn

TEXT = Path(__file__).parent / "data" / "alice.txt"
#: Models that have what Llama's logits lack: a soft-cap, a scale, a bias, a shared embedding.
FAMILIES = ("tiny-gemma2", "tiny-granite", "tiny-gptj", "tiny-llama-tied")
WINDOW = 256

on_vllm = pytest.mark.parity(backends=("vllm",))
every_family = pytest.mark.parity(extra_models=FAMILIES, smoke={"modes": ("eager",)})
of_vllm = pytest.mark.parity(extra_models=FAMILIES, backends=("vllm",), smoke={"modes": ("eager",)})


def _short(parity):
    """A ragged batch; fewer rows where a row is fifty thousand numbers."""
    lengths = (7, 1, 20) if parity.vocab_size > 10_000 else (33, 1, 70, 7)
    return [of_length(parity, n, seed=i) for i, n in enumerate(lengths)]


@every_family
def test_every_position(parity):
    """Logits of a ragged batch, decode rows too where there are any, equal the reference's; captures keep bits."""
    prompts, steps = _short(parity), 3 if parity.capabilities.decode else 1
    result = parity.forward(prompts, max_new_tokens=steps, return_logits=True)
    sequences = teacher_forced(prompts, result.new_tokens)
    parity.settle_routes(prompts, result)
    parity.check_logits(sequences, [result.logit_rows(i) for i in range(len(prompts))])
    assert bool((result.logits[1, result.lengths[1] :] == -torch.inf).all()), "padding rows are not -inf"
    plain = parity.forward(prompts, max_new_tokens=steps)
    parity.bit_equal(
        list(result.captured.values()), list(plain.captured.values()), label="beside logits", what="captures"
    )


@of_vllm
def test_a_second_and_a_third_opinion(parity):
    """The engine's raw logits, and those of its own head in the worker, equal the reference's too."""
    prompts = _short(parity)
    if parity.routes.exist:  # logits do not say which experts a token went to; captures of the same batch do
        parity.settle_routes(prompts, parity.forward(prompts))
    parity.check_logits(prompts, parity.engine.raw_logits(prompts), label="raw logits")
    parity.check_logits(
        prompts, [rows.float() for rows in parity.engine.worker_logits(prompts)], label="worker"
    )


@of_vllm
def test_the_unembedding_is_the_checkpoint_s(parity):
    """W_U read out of the engine is the checkpoint's tensor element by element: no padding row, no wrong tie."""
    name = "lm_head.weight"
    found = parity.engine.get_param(name)
    if found is None:
        assert parity.hf_config.tie_word_embeddings, f"the engine has no {name} and the model is not tied"
        found = parity.engine.get_param("model.embed_tokens.weight")
    vocab = parity.vocab_size
    want = unembedding_rows(parity.config.path, range(vocab)).to(found.dtype)
    assert tuple(found.shape) == (vocab, want.shape[1])
    parity.bit_equal([found], [want], label="unembedding", what="W_U against the checkpoint's")


@pytest.mark.parity(models=("tiny-llama",), backends=("vllm",), steps=(64,), smoke={"dtypes": ("fp32",)})
def test_a_weight_that_is_gone_is_refused(parity):
    """On CPU vLLM packs linear layers' weights and drops the originals: an error that says so, not an empty tensor."""
    if parity.engine.describe["platform"] != "cpu":
        parity.not_applicable("vLLM keeps plain weights on this platform")
    with pytest.raises(UsageError, match=r"down_proj\.weight is empty: vLLM has packed it"):
        parity.engine.get_param("model.layers.0.mlp.down_proj.weight")


@every_family
def test_logits_of_an_edited_call(parity):
    """Edits at the first and at the last hook show in every logit as they do in the reference's."""
    prompts = [of_length(parity, n, seed=i) for i, n in enumerate((7, 12))]
    specs = [
        {"embed.hook_out": {"op": "scale", "factor": -1.5, "pos": 2}},
        {"ln_final.hook_normalized": {"op": "set", "value": randn(3, parity.width), "pos": [4, 11]}},
    ]
    result = parity.forward(prompts, intervene=specs, return_logits=True)
    edits = parity.edits(specs, result.lengths)
    parity.settle_routes(prompts, result, edits)
    parity.check_logits(prompts, [result.logit_rows(i) for i in range(2)], edits=edits)
    clean = parity.forward(prompts, return_logits=True)
    moved = [float((result.logit_rows(i) - clean.logit_rows(i)).abs().max()) for i in range(2)]
    assert min(moved) > 0.1, f"the edits hardly show: {moved}"


@pytest.mark.parity(tokenizer=True, smoke={"modes": ("compiled",)})
def test_loss_on_real_text(parity):
    """Loss and perplexity on two thousand tokens of a novel: each token's loss, and the mean, are the reference's."""
    ids = [int(i) for i in parity.tokenizer(TEXT.read_text(encoding="utf-8"))["input_ids"]]
    assert len(ids) >= 2000
    windows = [ids[begin : begin + WINDOW] for begin in range(0, len(ids), WINDOW)]
    engine, truth, same = [], [], []
    for window in windows:  # one at a time: a window's logits are 50 MB
        logits = parity.forward([window], capture=[], return_logits=True).logit_rows(0)
        pair = parity.reference([window], [], jitters=0)
        engine.append(token_losses(logits, window))
        truth.append(token_losses(pair.truth.logits[0], window))
        same.append(token_losses(pair.same[0].logits[0], window))
    e, t, r = (torch.cat(losses).double() for losses in (engine, truth, same))
    rms_e, rms_r = (float((x - t).square().mean().sqrt()) for x in (e, r))
    relative = abs(float(e.mean() - t.mean())) / float(t.mean())
    parity.note(
        "loss",
        tokens=len(t),
        engine=float(e.mean()),
        truth=float(t.mean()),
        reference=float(r.mean()),
        perplexity=math.exp(float(e.mean())),
        relative_error=relative,
        rms_per_token=rms_e,
        rms_per_token_reference=rms_r,
    )
    assert rms_e <= parity.k * rms_r, f"per token: rms {rms_e:.2e} nats, the reference's own {rms_r:.2e}"
    if parity.config.dtype == "float32":
        assert relative <= 1e-4, f"loss {float(e.mean()):.6f} against {float(t.mean()):.6f}"


@on_vllm
def test_padded_batches_give_the_unpadded_rows(parity):
    """Left, right and double padding: the real rows' bits are those of the unpadded batch, at their places."""
    prompts = [of_length(parity, n, seed=i) for i, n in enumerate((9, 4, 14))]
    plain = parity.forward(prompts, return_logits=True, max_new_tokens=2)
    for side, lefts in (("right", (0, 0, 0)), ("left", (7, 12, 2)), ("both", (3, 6, 1))):
        padded, mask = _padded(prompts, lefts, 16)
        result = parity.forward(padded, attention_mask=mask, return_logits=True, max_new_tokens=2)
        assert result.starts == list(lefts)
        parity.bit_equal(
            [result.rows(hook, i) for hook in result.captured for i in range(3)],
            [plain.rows(hook, i) for hook in plain.captured for i in range(3)],
            label=f"padded {side}",
            what=f"captured rows of a batch padded {side}",
        )
        parity.bit_equal(
            [result.logit_rows(i) for i in range(3)],
            [plain.logit_rows(i) for i in range(3)],
            label=f"padded {side}: logits",
            what=f"logits of a batch padded {side}",
        )
        assert _only_rows(result, mask), "padding is not 0 in captures and -inf in logits"


@on_vllm
def test_edits_of_a_padded_batch(parity):
    """Positions of edits count from the padded beginning; the edit lands on the same token as without padding."""
    prompts = [of_length(parity, n, seed=i) for i, n in enumerate((9, 14))]
    hook = "blocks.1.hook_out"
    padded, mask = _padded(prompts, (7, 2), 16)
    shifted = [{hook: {"op": "scale", "factor": 3.0, "pos": [2, 8]}}, {hook: {"op": "suppress", "pos": 0}}]
    moved = [{hook: {"op": "scale", "factor": 3.0, "pos": [9, 15]}}, {hook: {"op": "suppress", "pos": 2}}]
    plain = parity.forward(prompts, intervene=shifted)
    result = parity.forward(padded, attention_mask=mask, intervene=moved)
    parity.bit_equal(
        [result.rows(name, i) for name in result.captured for i in range(2)],
        [plain.rows(name, i) for name in plain.captured for i in range(2)],
        label="edited and padded",
        what="captured rows of an edited batch padded on the left",
    )
    with pytest.raises(UsageError, match=r"key 'pos': position 6 of request 0 is padding"):
        parity.forward(padded, attention_mask=mask, intervene={hook: {"op": "suppress", "pos": 6}})


@on_vllm
def test_masks_that_cannot_be_served(parity):
    """Holes, empty rows, other shapes and other values are refused by row and position."""
    prompt = of_length(parity, 4)
    refused = [
        ([[1, 0, 1, 1]], r"row 0 has a hole at position 1"),
        ([[0, 0, 0, 0]], r"row 0 has no real token"),
        ([[1, 1, 1]], r"row 0 has 3 values for 4 tokens"),
        ([[1, 1, 2, 1]], r"row 0 holds 2"),
        ([[1] * 4, [1] * 4], r"2 rows for 1 prompts"),
    ]
    for mask, reason in refused:
        with pytest.raises(UsageError, match=reason):
            parity.forward([prompt], attention_mask=mask)


@pytest.mark.parity(models=("tiny-llama",), backends=("vllm",), smoke={"modes": ("eager",)})
def test_without_the_final_norm_only_the_last_row_has_logprobs(parity):
    """An engine whose final norm is not tapped: log-probs of each prompt's last row, right ones, and -inf elsewhere."""
    prompts = [of_length(parity, n, seed=i) for i, n in enumerate((9, 4))]
    with parity.spare_engine(hook_points=["blocks.*.hook_out"], logprobs_mode="raw_logprobs") as engine:
        result = engine.forward(prompts, capture=["blocks.0.hook_out"], return_logits=True)
    pair = parity.reference(prompts, [], logits=True)
    for i, prompt in enumerate(prompts):
        rows = result.logits[i, : len(prompt)]
        assert bool((rows[:-1] == -torch.inf).all())
        last = [
            torch.log_softmax(x[i][-1].double(), 0)
            for x in (pair.truth.logits, *[r.logits for r in pair.same])
        ]
        noise = max(float((r - last[0]).abs().max()) for r in last[1:])
        assert float((rows[-1].double() - last[0]).abs().max()) <= parity.k * noise


def _padded(prompts, lefts, columns):
    """Rows of ``columns`` ids with pads of another, real token, and their mask."""
    rows, mask = [], []
    for prompt, left in zip(prompts, lefts, strict=True):
        right = columns - left - len(prompt)
        rows.append([5] * left + list(prompt) + [5] * right)
        mask.append([0] * left + [1] * len(prompt) + [0] * right)
    return rows, mask


def _only_rows(result, mask):
    """Whether everything that is no row is empty; decode rows stand right of the real tokens."""
    columns = result.logits.shape[1]
    real = torch.zeros(len(mask), columns, dtype=torch.bool)
    for i, start in enumerate(result.starts):
        real[i, start : start + result.lengths[i]] = True
    empty = all(bool((rows[~real] == 0).all()) for rows in result.captured.values())
    return empty and bool((result.logits[~real] == -torch.inf).all())
