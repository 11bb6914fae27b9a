"""Where an engine's unembedding is found, what is said where there is none, and which row goes where. No engine."""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace

import pytest
import torch

from harness.errors import CaptureError, UsageError
from harness.points import FINAL_NORM
from harness.vllm import internals
from harness.vllm.logits import SequenceLogits, Unembedding

PROCESSOR = {"soft_cap": 30.0, "scale": 0.5, "as_input": False}
HEAD, BIAS, TIED = "lm_head.weight", "lm_head.bias", "model.embed_tokens.weight"
INF = math.inf


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def boot(monkeypatch):
    """A made-up engine of five tokens: what its ranks answer, and its parameters by dot path."""

    def make(
        parameters=(),
        *,
        ranks=(None, PROCESSOR),
        paths=(FINAL_NORM,),
        logprobs=(20, "raw_logprobs"),
        **config,
    ):
        model = SimpleNamespace(max_logprobs=logprobs[0], logprobs_mode=logprobs[1])
        llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=model))
        hf = SimpleNamespace(vocab_size=5, architectures=["LlamaForCausalLM"], **config)
        answers = {(id(llm), "tl_get_logits_processor"): list(ranks)}
        monkeypatch.setattr(internals, "extract_hf_config", lambda one: {id(llm): hf}[id(one)])
        monkeypatch.setattr(internals, "call_workers", lambda one, method: answers[id(one), method])
        return SequenceLogits(llm, dict.fromkeys(paths, "a.path"), dict(parameters).get)

    return make


def test_the_unembedding_is_read_in_fp32_with_what_the_engine_does_to_logits(boot):
    weight, bias = normal(5, 3).bfloat16(), normal(5).bfloat16()
    found = boot({HEAD: weight, BIAS: bias}).find()
    assert found.weight.dtype == found.bias.dtype == torch.float32
    assert torch.equal(found.weight, weight.float())
    assert torch.equal(found.bias, bias.float())
    assert (found.soft_cap, found.scale) == (30.0, 0.5)
    assert boot({HEAD: weight}).find().bias is None


def test_a_tied_embedding_stands_in_where_the_config_says_so(boot):
    own, tied = normal(5, 3), normal(5, 3, seed=1)
    assert torch.equal(boot({TIED: tied}, tie_word_embeddings=True).find().weight, tied)
    assert torch.equal(boot({HEAD: own, TIED: tied}, tie_word_embeddings=True).find().weight, own)
    nowhere = "the model holds its unembedding neither at lm_head.weight nor, tied, at the embedding"
    assert boot({TIED: tied}, tie_word_embeddings=False).find() == nowhere
    assert boot({TIED: tied}).find() == nowhere
    assert boot({}, tie_word_embeddings=True).find() == nowhere


def test_what_is_missing_is_said(boot):
    assert boot(paths=["blocks.0.hook_out"]).find() == f"{FINAL_NORM} is not among the installed hook points"
    no_processor = "the model has no logits processor that takes hidden states"
    assert boot({HEAD: normal(5, 3)}, ranks=[None, None]).find() == no_processor
    assert boot({HEAD: normal(5, 3)}, ranks=[{**PROCESSOR, "as_input": True}]).find() == no_processor
    logits = boot({})
    assert not logits.available
    with pytest.raises(CaptureError, match="the model holds its unembedding neither at"):
        logits.rebuilt([normal(2, 3)], starts=[0], columns=2)


def test_the_workers_are_asked_once(boot, monkeypatch):
    logits = boot({HEAD: normal(5, 3)})
    assert logits.available
    monkeypatch.setattr(internals, "call_workers", None)
    assert logits.available
    assert logits.rebuilt([normal(2, 3)], starts=[0], columns=2).shape == (1, 2, 5)


@pytest.mark.usefixtures("another_default")
def test_rows_are_rebuilt_at_their_places(boot):
    weight, rows = normal(5, 3).float(), [normal(2, 3).float(), normal(3, 3, seed=1).float()]
    made = boot({HEAD: weight}).rebuilt(rows, starts=[1, 0], columns=2)
    assert made.shape == (2, 3, 5)
    assert made.dtype == torch.float32
    expected = [Unembedding(weight, None, 30.0, 0.5).logits(one) for one in rows]
    assert torch.equal(made[0], torch.cat([torch.full((1, 5), -INF).float(), expected[0]]))
    assert torch.equal(made[1], expected[1])
    wide = boot({HEAD: weight}).rebuilt(rows, starts=[0, 0], columns=4)
    assert wide.shape == (2, 4, 5)
    assert bool((wide[0, 2:] == -INF).all())
    assert bool((wide[1, 3] == -INF).all())
    assert bool(torch.isfinite(wide[1, :3]).all())
    with pytest.raises(ValueError, match="zip"):
        boot({HEAD: weight}).rebuilt(rows, starts=[0], columns=3)


@pytest.mark.parametrize(("most", "many"), [(20, "the 20 largest"), (0, "the 0 largest"), (-1, "all")])
def test_log_probs_of_the_last_row_alone_are_warned_of_once(boot, most, many):
    logits = boot(paths=[], logprobs=(most, "raw_logprobs"))
    with pytest.warns(UserWarning, match="no sequence logits") as caught:
        assert logits.fallback() == most
    assert [str(one.message) for one in caught] == [
        (
            f"no sequence logits: {FINAL_NORM} is not among the installed hook points. Only each prompt's last row has "
            f"log-probs ({many}); every other value is -inf"
        )
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert logits.fallback() == most


def test_a_mode_without_log_probs_is_refused_with_the_way_out(boot):
    with pytest.raises(UsageError) as caught:
        boot(paths=[], logprobs=(20, "processed_logits")).fallback()
    assert str(caught.value) == (
        f"no sequence logits: {FINAL_NORM} is not among the installed hook points; and with "
        "logprobs_mode=processed_logits there are no log-probs of the last row either: boot with another mode, or pass "
        "return_logits=False"
    )


def test_log_probs_stand_in_the_prompts_last_row(boot):
    """Of all of the vocabulary or the largest; a token of the padding is no token."""

    def output(*steps):
        entries = [{token: SimpleNamespace(logprob=value) for token, value in step.items()} for step in steps]
        return SimpleNamespace(outputs=[SimpleNamespace(logprobs=entries), None])

    outputs = [output({0: -1.0, 4: -0.5, 5: -0.1}, {1: -9.0}), output({2: -0.25})]
    made = boot().last_rows(outputs, [[7, 7], [7]], [3, 1], starts=[0, 1], columns=2)
    expected = torch.full((2, 3, 5), -INF)
    expected[0, 1, 0], expected[0, 1, 4], expected[1, 1, 2] = -1.0, -0.5, -0.25
    assert torch.equal(made, expected)
    assert boot().last_rows(outputs, [[7, 7], [7]], [3, 1], starts=[0, 1], columns=6).shape == (2, 6, 5)
    for prompts, lengths in (([[7]], [3, 1]), ([[7, 7], [7]], [3])):
        with pytest.raises(ValueError, match="zip"):
            boot().last_rows(outputs, prompts, lengths, starts=[0, 1], columns=2)
