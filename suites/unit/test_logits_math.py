"""Rebuilding logits, losses and figures of them: the arithmetic, on made-up tensors."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from harness.errors import CaptureError, UsageError
from harness.loss import next_token_loss, token_losses
from harness.parity.logit_metrics import logit_figures
from harness.results import ForwardResult, pad_rows
from harness.vllm.logits import Unembedding, agreed_processor, assemble_vocabulary


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_order_is_product_bias_cap_scale():
    weight, bias, rows = normal(9, 4), normal(9, seed=1), normal(3, 4, seed=2)
    made = Unembedding(weight, bias, soft_cap=2.0, scale=0.25).logits(rows)
    raw = rows.double() @ weight.double().T + bias.double()
    expected = 2.0 * torch.tanh(raw / 2.0) * 0.25
    torch.testing.assert_close(made.double(), expected, rtol=1e-5, atol=1e-6)
    assert float(made.abs().max()) <= 0.5
    scaled_first = 2.0 * torch.tanh(raw * 0.25 / 2.0)
    assert float((made.double() - scaled_first).abs().max()) > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_rows_are_widened_before_the_product(dtype):
    weight, rows = normal(50, 16), normal(7, 16, seed=3).to(dtype)
    expected = rows.double() @ weight.double().T
    torch.testing.assert_close(Unembedding(weight).logits(rows).double(), expected, rtol=1e-5, atol=1e-5)


def test_blocks_give_what_one_product_gives(monkeypatch):
    weight, rows = normal(50, 16), normal(33, 16, seed=3)
    whole = Unembedding(weight, soft_cap=3.0).logits(rows)
    monkeypatch.setattr("harness.vllm.logits._BLOCK", 16 * 5)
    torch.testing.assert_close(Unembedding(weight, soft_cap=3.0).logits(rows), whole, rtol=1e-6, atol=1e-6)


def test_rows_are_written_where_they_are_wanted():
    weight, rows = normal(5, 4), normal(2, 4, seed=1)
    out = torch.full((4, 5), -math.inf)
    Unembedding(weight).logits(rows, out=out[1:3])
    assert bool((out[[0, 3]] == -math.inf).all())
    assert torch.equal(out[1:3], Unembedding(weight).logits(rows))


def test_processors_must_agree():
    one = {"soft_cap": None, "scale": 1.0, "as_input": False}
    assert agreed_processor([None, one, one]) == one
    assert agreed_processor([None]) is None
    with pytest.raises(CaptureError, match="ranks disagree"):
        agreed_processor([one, {**one, "scale": 2.0}])


class TestShards:
    def test_any_order_and_replicas(self):
        whole = normal(7, 3)
        parts = [(4, whole[4:]), (0, whole[:4]), (4, whole[4:])]
        assert torch.equal(assemble_vocabulary(parts, 7), whole)

    @pytest.mark.parametrize(
        ("cuts", "message"),
        [([(0, 3), (4, 7)], "rows 3 to 4"), ([(0, 5), (4, 7)], "rows 5 to 4"), ([(0, 5)], "hold 5 .* has 7")],
    )
    def test_gaps_overlaps_and_missing_rows(self, cuts, message):
        whole = normal(7, 3)
        with pytest.raises(CaptureError, match=message):
            assemble_vocabulary([(a, whole[a:b]) for a, b in cuts], 7)


class TestLoss:
    def result(self, rows, starts, columns, prompts, new=1):
        logits = pad_rows(rows, starts=starts, columns=columns, fill=-math.inf)
        lengths = [one.shape[0] for one in rows]
        tokens = [[0] * new for _ in rows]
        return ForwardResult({}, lengths, tokens, logits=logits, starts=starts, prompts=prompts)

    def test_by_hand(self):
        logits, tokens = normal(4, 6), [1, 5, 0, 2]
        log_p = torch.log_softmax(logits.double(), dim=1)
        expected = [-float(log_p[i, tokens[i + 1]]) for i in range(3)]
        assert token_losses(logits, tokens).tolist() == pytest.approx(expected, rel=1e-5)

    def test_padding_and_decode_rows_do_not_count(self):
        prompts = [[1, 5, 0], [3, 4]]
        rows = [normal(3 + 2, 6), normal(2 + 2, 6, seed=1)]  # two decode rows each
        want = torch.cat([token_losses(rows[i][: len(p)], p) for i, p in enumerate(prompts)]).mean()
        result = self.result(rows, [2, 1], 5, prompts, new=3)
        assert float(next_token_loss(result)) == pytest.approx(float(want), rel=1e-6)

    def test_one_token_has_no_loss(self):
        with pytest.raises(UsageError, match="at least two tokens"):
            next_token_loss(self.result([normal(1, 6)], [0], 1, [[4]]))

    def test_logits_must_have_been_asked_for(self):
        with pytest.raises(CaptureError, match="return_logits=True"):
            next_token_loss(replace(self.result([normal(2, 6)], [0], 2, [[4, 5]]), logits=None))


class TestFigures:
    truth = (torch.tensor([[3.0, 2.0, 0.0], [1.0, 1.001, 0.0]]),)
    noise = ((torch.tensor([[3.01, 2.0, 0.0], [1.0, 1.002, 0.0]]),),)

    def test_equal_logits(self):
        figures = logit_figures(self.truth, self.truth, self.noise, k=3.0)
        assert (figures.rows, figures.max_kl, figures.top1, figures.top5) == (2, 0.0, 1.0, 1.0)
        assert figures.flips == ()
        assert figures.max_kl_reference > 0

    def test_a_flip_of_a_near_tie_is_legitimate_and_another_is_not(self):
        near = [torch.tensor([[3.0, 2.0, 0.0], [1.001, 1.0, 0.0]])]
        (flip,) = logit_figures(near, self.truth, self.noise, k=3.0).flips
        assert flip.legitimate
        assert (flip.where.position, flip.truth, flip.engine) == (1, 1, 0)
        far = [torch.tensor([[2.0, 3.0, 0.0], [1.0, 1.001, 0.0]])]
        (flip,) = logit_figures(far, self.truth, self.noise, k=3.0).flips
        assert not flip.legitimate
        assert flip.margin == pytest.approx(1.0)

    def test_a_value_that_is_not_finite_shows(self):
        broken = [torch.tensor([[3.0, math.nan, 0.0], [1.0, 1.001, 0.0]])]
        assert logit_figures(broken, self.truth, self.noise, k=3.0).max_kl == math.inf


def test_logits_are_fp32_whatever_the_default_dtype():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = Unembedding(torch.eye(3, dtype=torch.float32), scale=2.0).logits(
            torch.ones(2, 3, dtype=torch.bfloat16)
        )
    finally:
        torch.set_default_dtype(before)
    assert found.dtype == torch.float32
    assert torch.equal(found, torch.full((2, 3), 2.0))


def test_one_shard_is_the_vocabulary():
    whole = torch.arange(6.0).reshape(3, 2)
    assert assemble_vocabulary([(0, whole)], 3).data_ptr() == whole.data_ptr()
