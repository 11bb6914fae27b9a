"""The final norm's weight: both backends leave the same channels alone, and multiplying undoes dividing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.conventions import MIN_DIVISOR, divide_weight, dtype_name, multiply_weight, safe_divisor
from harness.vllm import wire

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
weights = st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=8)


def emitted(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Three normalised rows, and what a norm with this weight returns for them."""
    dtype = weight.dtype
    rows = torch.linspace(0.5, 2.0, 3 * len(weight), dtype=torch.float64).reshape(3, -1).to(dtype)
    return rows, rows * weight


def test_divides_once_and_leaves_tiny_weights_alone():
    rows, weight = torch.tensor([[2.0, 3.0, 5.0]]), torch.tensor([2.0, -1.5, 1e-7])
    assert divide_weight(rows, weight).tolist() == [[1.0, -2.0, 5.0]]
    assert multiply_weight(torch.tensor([[1.0, -2.0, 5.0]]), weight).tolist() == rows.tolist()


@given(weights, st.sampled_from(DTYPES))
def test_dividing_gives_what_was_normalised(weights: list[float], dtype: torch.dtype) -> None:
    weight = torch.tensor(weights, dtype=dtype)
    rows, output = emitted(weight)
    got = divide_weight(output, weight)
    assert got.dtype == dtype
    small = weight.double().abs() < 1e-6
    assert torch.equal(got[:, small], output[:, small])
    # Below 2⁻¹⁴ fp16 products lose bits that no division brings back.
    exact = ~small & (weight.double().abs() > 1e-3)
    difference = (got - rows).double().abs()[:, exact]
    assert bool((difference <= 1.5 * torch.finfo(dtype).eps * rows.double()[:, exact]).all())


@given(weights, st.sampled_from(DTYPES))
def test_multiplying_undoes_dividing(weights: list[float], dtype: torch.dtype) -> None:
    weight = torch.tensor(weights, dtype=dtype)
    _, output = emitted(weight)
    back = multiply_weight(divide_weight(output, weight), weight)
    assert back.dtype == dtype
    small = weight.double().abs() < 1e-6
    assert torch.equal(back[:, small], output[:, small])
    # fp16 has few bits left below 2⁻¹⁴, so tiny outputs come back coarser.
    exact = ~small & (weight.double().abs() > 1e-3)
    difference = (back - output).double().abs()[:, exact]
    assert bool((difference <= 1.5 * torch.finfo(dtype).eps * output.double().abs()[:, exact]).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("steps", [-2, -1, 0, 1, 2])
def test_an_engine_and_its_truth_leave_the_same_channels_alone(dtype: torch.dtype, steps: int) -> None:
    """At the bound itself: fp32(1e-6) lies below 1e-6, and a comparison in fp32 does not see it."""
    at_bound = torch.tensor([MIN_DIVISOR]).to(dtype)
    away = torch.tensor([float(steps > 0)]).to(dtype)
    for _ in range(abs(steps)):
        at_bound = torch.nextafter(at_bound, away)
    engine, truth = safe_divisor(at_bound, dtype), safe_divisor(at_bound.double(), torch.float64)
    assert torch.equal(engine.double(), truth)
    assert bool((truth == 1) == (at_bound.double() < 1e-6))
    assert engine.dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("apply", [divide_weight, multiply_weight])
def test_rows_are_rounded_once_whatever_the_weights_dtype(apply) -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(9, 64).bfloat16(), torch.rand(64) + 0.5
    got = apply(rows, weight)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, apply(rows.float(), weight).bfloat16())
    assert not torch.equal(got, apply(rows, weight.bfloat16()))


@pytest.mark.parametrize("apply", [divide_weight, multiply_weight])
def test_the_weight_comes_to_the_rows(apply) -> None:
    """Captured rows lie on the CPU while the weight is still on the engine's device, or the other way round."""
    got = apply(torch.ones(2, 3, device="meta"), torch.nn.Parameter(torch.ones(3)))
    assert got.device.type == "meta"
    assert not got.requires_grad


def test_dtype_name() -> None:
    assert [dtype_name(dtype) for dtype in DTYPES] == ["float32", "bfloat16", "float16", "float64"]
    assert wire.dtype_name is dtype_name
