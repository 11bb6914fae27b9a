"""Rebuilding logits, losses and figures of them: the arithmetic, on made-up tensors."""

from __future__ import annotations

import math

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
            next_token_loss(ForwardResult({}, [2], [[0]], prompts=[[4, 5]]))


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

    @pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
    def test_a_reference_that_overflows_excuses_no_flip(self, value):
        far = [torch.tensor([[2.0, 3.0, 0.0], [1.0, 1.001, 0.0]])]
        broken = [torch.tensor([[3.0, 2.0, value], [1.0, 1.001, 0.0]])]
        (flip,) = logit_figures(far, self.truth, [*self.noise, broken], k=3.0).flips
        assert not flip.legitimate
        assert flip.allowed == pytest.approx(6 * 0.01, rel=1e-4)

    def test_a_value_that_is_not_finite_shows(self):
        broken = [torch.tensor([[3.0, math.nan, 0.0], [1.0, 1.001, 0.0]])]
        assert logit_figures(broken, self.truth, self.noise, k=3.0).max_kl == math.inf

    def test_every_figure_against_its_definition(self):
        truth = [normal(3, 7), normal(4, 7, seed=1)]
        engine = [t + 0.8 * normal(*t.shape, seed=2 + i) for i, t in enumerate(truth)]
        engine[1][3] = -truth[1][3]
        sames = [
            [t + size * normal(*t.shape, seed=4 + i) for i, t in enumerate(truth)] for size in (0.2, 0.1)
        ]
        sames[1][1][3] = (
            truth[1][3] + 0.9
        )  # the largest error of that row is the second realisation's, at every token
        figures = logit_figures(engine, truth, sames, k=1.5)
        rows = [(q, row) for q, t in enumerate(truth) for row in range(len(t))]

        def divergence(x):
            p, q = (torch.softmax(v.double(), 0).tolist() for v in x)
            return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))

        def five(x):
            return set(sorted(range(7), key=lambda token: -x[token])[:5])

        pairs = [(truth[q][row].tolist(), engine[q][row].tolist()) for q, row in rows]
        best = [(t.index(max(t)), e.index(max(e))) for t, e in pairs]
        assert figures.rows == 7
        assert figures.max_kl == pytest.approx(max(divergence((truth[q][r], engine[q][r])) for q, r in rows))
        assert figures.max_kl_reference == pytest.approx(
            max(divergence((truth[q][r], one[q][r])) for q, r in rows for one in sames)
        )
        assert figures.top1 == pytest.approx(sum(t == e for t, e in best) / 7)
        assert figures.top5 == pytest.approx(sum(len(five(t) & five(e)) / 5 for t, e in pairs) / 7)
        flipped = [i for i, (t, e) in enumerate(best) if t != e]
        assert {rows[i][0] for i in flipped} == {0, 1}
        assert [(flip.where.request, flip.where.position) for flip in figures.flips] == [
            rows[i] for i in flipped
        ]
        for flip, i in zip(figures.flips, flipped, strict=True):
            (q, row), (a, b) = rows[i], best[i]
            noise = max(float((one[q][row].double() - truth[q][row].double()).abs().max()) for one in sames)
            assert (flip.truth, flip.engine) == (a, b)
            assert flip.margin == pytest.approx(float(truth[q][row, a].double() - truth[q][row, b].double()))
            assert flip.allowed == pytest.approx(2 * 1.5 * noise)
        assert figures.to_json()["flips"] == len(flipped)
        assert figures.to_json()["top1"] == figures.top1

    def test_rounding_makes_no_divergence_negative(self):
        rows = [normal(40, 9)]
        close = [rows[0] + 1e-7]
        figures = logit_figures(close, rows, [close], k=3.0)
        assert 0 <= figures.max_kl < 1e-12
        with pytest.raises(ValueError, match="zip"):
            logit_figures([*close, *close], rows, [close], k=3.0)


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
