"""How modules emit values: both backends leave the same channels alone, and each way undoes the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.conventions import MIN_DIVISOR, Emission, dtype_name, safe_divisor
from harness.interventions import Edit
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
    emission = Emission(weight)
    assert emission.canonical(rows).tolist() == [[1.0, -2.0, 5.0]]
    assert emission.emitted(torch.tensor([[1.0, -2.0, 5.0]])).tolist() == rows.tolist()


@given(weights, st.sampled_from(DTYPES))
def test_dividing_gives_what_was_normalised(weights: list[float], dtype: torch.dtype) -> None:
    weight = torch.tensor(weights, dtype=dtype)
    rows, output = emitted(weight)
    got = Emission(weight).canonical(output)
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
    back = Emission(weight).emitted(Emission(weight).canonical(output))
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
    for plus_one in (False, True):
        weight = torch.tensor([MIN_DIVISOR - float(plus_one)], dtype=torch.float64).to(dtype)
        for _ in range(abs(steps)):
            weight = torch.nextafter(weight, torch.tensor([float(steps > 0)]).to(dtype))
        engine, truth = (safe_divisor(w, plus_one=plus_one) for w in (weight, weight.double()))
        assert bool((truth == 1) == ((weight.double() + float(plus_one)).abs() < 1e-6))
        assert bool((engine == 1) == (truth == 1))

    at_bound = torch.tensor([MIN_DIVISOR]).to(dtype)
    away = torch.tensor([float(steps > 0)]).to(dtype)
    for _ in range(abs(steps)):
        at_bound = torch.nextafter(at_bound, away)
    engine, truth = safe_divisor(at_bound), safe_divisor(at_bound.double())
    assert torch.equal(engine.double(), truth)
    assert bool((truth == 1) == (at_bound.double() < 1e-6))
    assert engine.dtype == torch.promote_types(dtype, torch.float32)


WAYS = [Emission.canonical, Emission.emitted]


@pytest.mark.parametrize("way", WAYS)
def test_rows_are_rounded_once_whatever_the_weights_dtype(way) -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(9, 64).bfloat16(), torch.rand(64) + 0.5
    for more in ({}, {"plus_one": True}, {"offset": torch.rand(64)}, {"factor": 12.3}):
        got = way(Emission(weight, **more), rows)
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, way(Emission(weight, **more), rows.float()).bfloat16())
        assert not torch.equal(got, way(Emission(weight.bfloat16(), **more), rows))


@pytest.mark.parametrize("way", WAYS)
def test_parameters_come_to_the_rows(way) -> None:
    """Captured rows lie on the CPU while a weight is still on the engine's device, or the other way round."""
    parameter = torch.nn.Parameter(torch.ones(3))
    got = way(Emission(parameter, offset=parameter), torch.ones(2, 3, device="meta"))
    assert got.device.type == "meta"
    assert not got.requires_grad


@pytest.mark.parametrize("way", WAYS)
def test_a_plain_value_is_handed_through(way) -> None:
    rows = torch.randn(2, 3)
    assert Emission().plain
    assert way(Emission(), rows) is rows
    assert not any(Emission(**more).plain for more in ({"factor": 2.0}, {"offset": rows}, {"weight": rows}))


def random_emission(seed: int, width: int, dtype: torch.dtype = torch.float64) -> Emission:
    """Each part there or not, the weight's size between a half and two, some of it too small to divide by."""
    draw = torch.Generator().manual_seed(seed)
    weight = (torch.rand(width, generator=draw) * 1.5 + 0.5) * torch.randn(width, generator=draw).sign()
    plus_one = bool(seed & 2)
    weight[: width // 4] = 0.0
    weight = weight.double() - float(plus_one)
    offset = torch.randn(width, generator=draw)
    return Emission(
        weight=weight.to(dtype) if seed & 1 else None,
        plus_one=plus_one,
        offset=offset.to(dtype) if seed & 4 else None,
        factor=float(torch.rand((), generator=draw) * 20 + 0.1) if seed & 8 else 1.0,
    )


@pytest.mark.parametrize("seed", range(16))
def test_emitted_is_what_the_module_computes_and_canonical_undoes_it(seed: int) -> None:
    emission = random_emission(seed, 8)
    canonical = torch.randn(5, 8, dtype=torch.float64)
    divisor = (
        torch.ones(8).double() if emission.weight is None else emission.weight + float(emission.plus_one)
    )
    divisor = torch.where(divisor == 0, 1.0, divisor)
    offset = torch.zeros(8) if emission.offset is None else emission.offset
    emitted = canonical / emission.factor * divisor + offset
    assert torch.allclose(emission.emitted(canonical), emitted, rtol=1e-12, atol=1e-12)
    assert torch.allclose(emission.canonical(emitted), canonical, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("scale", [0.0, 1.0, -1.7])
@pytest.mark.parametrize("value", ["number", "channels"])
def test_an_edit_of_emitted_values_is_the_edit_of_canonical_ones(seed: int, scale: float, value: str) -> None:
    """``e · scale + bias(...)`` is what the module would emit for ``c · scale + value``."""
    emission = random_emission(seed, 8, torch.float32)
    bias = torch.tensor(0.3) if value == "number" else torch.randn(8)
    edit = Edit("h", "any", scale, bias)
    canonical = torch.randn(5, 8, dtype=torch.float64)
    wanted = emission.emitted(edit.apply(canonical))
    added = emission.bias(scale, bias)
    assert added.dtype == torch.float32
    got = emission.emitted(canonical) * scale + added
    assert torch.allclose(got, wanted, rtol=1e-6, atol=1e-6)


def test_a_bias_is_rounded_once() -> None:
    """Small beside the offset: in fp32 arithmetic its last bits would go before the sum is made."""
    emission = Emission(torch.tensor([3.0]), offset=torch.tensor([1000.0]), factor=7.0)
    value = torch.tensor([0.1])
    exact = value.double() * 3.0 / 7.0 + 1000.0 * (1.0 - 0.999)
    assert torch.equal(emission.bias(0.999, value), exact.float())


def test_dtype_name() -> None:
    assert [dtype_name(dtype) for dtype in DTYPES] == ["float32", "bfloat16", "float16", "float64"]
    assert wire.dtype_name is dtype_name
