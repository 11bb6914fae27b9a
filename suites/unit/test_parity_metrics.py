"""Metrics against definitions written the slow way, and the properties a relative error must have."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from harness.errors import CaptureError
from harness.parity import metrics

SEEDS = st.integers(0, 2**31)
QUICK = settings(max_examples=40, deadline=None)
TORCH = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def pair(seed: int, rows: int = 5, width: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    truth = torch.randn(rows, width, generator=random, dtype=torch.float64)
    return truth + 1e-3 * torch.randn(rows, width, generator=random, dtype=torch.float64), truth


@QUICK
@given(SEEDS, st.integers(-100, 100))
def test_row_errors_do_not_change_with_the_scale(seed, exponent):
    x, truth = pair(seed)
    scaled = metrics.row_errors(x * 2.0**exponent, truth * 2.0**exponent)
    assert torch.equal(scaled, metrics.row_errors(x, truth))


@QUICK
@given(SEEDS, st.integers(1, 9), st.integers(1, 40))
def test_row_errors_and_aggregate_equal_a_loop(seed, rows, width):
    x, truth = pair(seed, rows, width)
    slow = []
    for a, t in zip(x.tolist(), truth.tolist(), strict=True):
        above = math.sqrt(sum((p - q) ** 2 for p, q in zip(a, t, strict=True)))
        slow.append(above / math.sqrt(sum(q * q for q in t)))
    errors = metrics.row_errors(x, truth)
    assert errors.tolist() == pytest.approx(slow, rel=1e-12)
    assert metrics.aggregate(errors) == pytest.approx(math.sqrt(sum(e * e for e in slow) / rows), rel=1e-12)


def test_rows_are_cut_by_elements_and_never_within(monkeypatch):
    monkeypatch.setattr(metrics, "CHUNK", 6)

    def cut(*shape: int) -> list[tuple[int, int]]:
        return [(span.start, span.stop) for span in metrics.row_spans(*shape)]

    assert cut(5, 3) == [(0, 2), (2, 4), (4, 5)]
    assert cut(2, 4) == cut(2, 100) == [(0, 1), (1, 2)]
    assert cut(7, 1) == cut(7, 0) == [(0, 6), (6, 7)]
    assert cut(0, 3) == []


def test_few_elements_are_widened_at_once(monkeypatch):
    """A capture of gigabytes must not become twice as many of fp64."""
    monkeypatch.setattr(metrics, "CHUNK", 6)
    seen = []

    def norms(a, t):
        seen.append((a.dtype, t.dtype, len(a)))
        return a.sum(dim=1)

    metrics._by_span(norms, torch.ones(5, 3), torch.ones(5, 3))
    assert seen == [(torch.float64, torch.float64, n) for n in (2, 2, 1)]


def test_of_no_rows_there_are_no_figures():
    none = torch.ones(0, 3)
    assert metrics.row_errors(none, none).tolist() == metrics.cosines(none, none).tolist() == []
    assert metrics.ulps(none, none, "bf16").dtype == torch.float64
    assert [part.tolist() for part in metrics.max_abs(none, none)] == [[], []]
    assert metrics.aggregate(metrics.row_norms(none)) == 0


@QUICK
@given(SEEDS)
def test_chunks_give_what_one_piece_gives(seed):
    x, truth = pair(seed, 23, 6)
    whole = [metrics.row_errors(x, truth), metrics.ulps(x, truth, "bf16"), *metrics.max_abs(x, truth)]
    original, metrics.CHUNK = metrics.CHUNK, 30
    try:
        pieces = [metrics.row_errors(x, truth), metrics.ulps(x, truth, "bf16"), *metrics.max_abs(x, truth)]
    finally:
        metrics.CHUNK = original
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


@QUICK
@given(st.sampled_from(["float32", "float16", "bfloat16"]), SEEDS, st.integers(-20, 14), st.integers(-3, 3))
def test_ulps_count_steps_of_the_format(dtype, seed, exponent, steps):
    """Walking n representable numbers away from one, without leaving its binade, is n units in the last place."""
    random = torch.Generator().manual_seed(seed)
    value = (torch.randn(1, 1, generator=random, dtype=torch.float64) * 2.0**exponent).to(TORCH[dtype])
    assume(value.item() != 0)
    walked = value.clone()
    integer = torch.int32 if dtype == "float32" else torch.int16
    walked.view(integer).add_(steps)
    assume(math.frexp(walked.item())[1] == math.frexp(value.item())[1])
    assert metrics.ulps(walked, value, dtype).item() == abs(steps)


@pytest.mark.parametrize("dtype", TORCH)
def test_spacing_at_one_and_at_zero(dtype):
    info = torch.finfo(TORCH[dtype])
    at = metrics.spacing(torch.tensor([1.0, 0.0, 1.999, 2.0], dtype=torch.float64), dtype)
    assert at.tolist() == [info.eps, info.smallest_normal * info.eps, info.eps, 2 * info.eps]


def test_ulps_of_wider_values_are_those_of_the_engine_dtype():
    """A truth held in fp64 is measured in steps of bf16, as issue trackers quote them: 0.125 for [16, 32)."""
    assert metrics.spacing(torch.tensor([16.0, 31.9, 32.0]), "bf16").tolist() == [0.125, 0.125, 0.25]


def test_equal_rows_are_zero_apart_even_where_the_truth_is_zero():
    zero = torch.zeros(3, 4)
    assert metrics.row_errors(zero, zero).tolist() == [0, 0, 0]
    assert metrics.cosines(zero, zero).tolist() == [1, 1, 1]
    stray = zero.clone()
    stray[1, 2] = 1e-9
    assert metrics.row_errors(stray, zero).tolist() == [0, math.inf, 0]
    assert metrics.cosines(stray, zero).tolist() == [1, 0, 1]


def test_a_zero_row_is_measured_against_its_neighbours():
    truth = torch.tensor([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0], [3.0, 4.0]])
    x = truth.clone()
    x[0, 0] = 1.0
    assert metrics.row_errors(x, truth).tolist() == pytest.approx([0.2, 0, 0, 0])


def test_cosines_are_told_row_by_row_and_never_leave_their_range():
    x, _ = pair(0, 300, 37)
    assert metrics.cosines(x, x).max() <= 1
    assert metrics.cosines(x, -x).min() >= -1
    mixed = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    assert metrics.cosines(mixed, mixed).tolist() == pytest.approx([1, 1])
    assert metrics.cosines(mixed, mixed.flip(1)).tolist() == pytest.approx([1, 0.96])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_infinitely_far(bad):
    x, truth = pair(0)
    x[2, 3] = bad
    errors = metrics.row_errors(x, truth)
    assert errors[2] == math.inf
    assert bool(torch.isfinite(errors[[0, 1, 3, 4]]).all())
    assert metrics.aggregate(errors) == math.inf
    assert metrics.max_abs(x, truth)[0][2] == math.inf
    assert metrics.ulps(x, truth, "fp32")[2] == math.inf
    assert metrics.cosines(x, truth)[2] == 0


def test_max_abs_names_the_channel():
    x, truth = pair(0)
    x[3, 5] += 2
    largest, channel = metrics.max_abs(x, truth)
    assert channel[3] == 5
    assert largest[3] == pytest.approx(2, abs=0.01)


@QUICK
@given(st.integers(1, 200), st.integers(1, 16))
def test_slices_cover_every_channel_once(width, slices):
    spans = metrics.slice_spans(width, slices)
    assert [c for begin, end in spans for c in range(begin, end)] == list(range(width))
    assert len(spans) == min(width, slices)
    assert max(e - b for b, e in spans) - min(e - b for b, e in spans) <= 1


def test_slice_edges_are_those_of_the_ranks():
    assert {b for b, _ in metrics.slice_spans(576, 8)} >= {0, 288, 144, 432}


def test_slice_errors_find_the_slice_and_ignore_row_norms():
    _, truth = pair(1, 50, 64)
    truth *= 10.0 ** torch.arange(-25, 25).unsqueeze(1).double() / 5
    spans = metrics.slice_spans(64, 8)
    x = truth.clone()
    x[:, 16:24] *= 1.25
    norms = metrics.row_norms(truth).square().unsqueeze(1)
    errors = metrics.slice_errors(
        metrics.slice_energies(x, truth, spans) / norms,
        metrics.slice_energies(truth, None, spans) / norms,
        spans,
    )
    assert errors.tolist() == pytest.approx([0, 0, 0.25, 0, 0, 0, 0, 0])


def test_a_slice_that_is_zero_in_the_truth_is_measured_against_its_share_of_the_width():
    error = torch.tensor([[0.0, 1.0, 0.0], [0.0, 3.0, 4.0]], dtype=torch.float64)
    truth = torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.0, 3.0]], dtype=torch.float64)
    found = metrics.slice_errors(error, truth, [(0, 1), (1, 2), (2, 7)])
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([0, math.sqrt(2 * 7), 1], rel=1e-12)


def test_massive_channels_are_found_in_one_row_and_not_in_gaussian_ones():
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(500, 576, generator=random)
    assert not bool(metrics.massive_channels(rows).any())
    rows[3, 7] = -300
    assert metrics.massive_channels(rows).nonzero().tolist() == [[3, 7]]
    assert metrics.massive_channels(rows[3:4]).nonzero().tolist() == [[0, 7]]
    assert not bool(metrics.massive_channels(torch.zeros(2, 8)).any())


def test_amplification_is_the_ratio_to_the_hook_before():
    assert metrics.amplification([0.0, 1.0, 2.0, 1.0, math.inf, 1.0]) == [
        None,
        None,
        2.0,
        0.5,
        math.inf,
        None,
    ]
    assert metrics.amplification([]) == []


@pytest.mark.parametrize(
    ("through", "bits"),
    [(None, 24), (torch.bfloat16, 8), (torch.float16, 11), (torch.float8_e4m3fn, 4)],
)
def test_significand_bits_tell_what_values_went_through(through, bits):
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(20, 33, generator=random)
    rows = rows if through is None else rows.to(through).float()
    assert metrics.significand_bits([rows[:7], rows[7:]]) == bits


def test_significand_bits_of_tf32_and_of_nothing():
    rows = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    tf32 = (rows.view(torch.int32) & ~0x1FFF).view(torch.float32)
    assert metrics.significand_bits([tf32]) == 11
    assert metrics.significand_bits([torch.zeros(2, 3)]) is None
    assert metrics.significand_bits([rows, rows.bfloat16()]) is None
    assert metrics.significand_bits([torch.tensor([[1.0, 2.0, 0.5, -8.0]])]) is None
    assert metrics.significand_bits([rows, torch.ones(2, 3), torch.ones(0, 3)]) == 24
    assert metrics.significand_bits([torch.tensor([[1.5, math.nan, math.inf]])]) == 2
    assert metrics.significand_bits([torch.ones(2, 3, dtype=torch.int64)]) is None


def test_shapes_are_never_broadcast():
    with pytest.raises(CaptureError, match=r"\(1, 4\) and \(3, 4\)"):
        metrics.row_errors(torch.ones(1, 4), torch.ones(3, 4))
