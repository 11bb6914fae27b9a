"""Which of a run's engines a test is for."""

from __future__ import annotations

from typing import Any

import pytest

from harness.errors import UsageError
from harness.limits import configs_of, in_profile
from harness.plan import DEFAULT_MODELS, EVERY_POINT, Plan

SMOKE = Plan()
FULL = Plan(profile="full")


def engines(plan: Plan, **limits: Any) -> set[tuple[str, str, str, str]]:
    found = configs_of(plan, limits)
    return {(config.model, config.short_dtype, config.mode, str(config.topology)) for config in found}


def test_a_test_without_limits_runs_on_the_whole_plan():
    assert [c.id for c in configs_of(SMOKE, {})] == [c.id for c in SMOKE.configs()]


@pytest.mark.parametrize(
    ("limits", "place", "values"),
    [
        ({"models": ["tiny-llama"]}, 0, {"tiny-llama"}),
        ({"dtypes": ["bf16"]}, 1, {"bf16"}),
        ({"modes": ["eager"]}, 2, {"eager"}),
        ({"extra_topologies": ["tp2"]}, 3, {"tp1", "tp2"}),
        ({"extra_topologies": ["tp2"], "topologies": ["tp2"]}, 3, {"tp2"}),
        ({"extra_models": ["tiny-gpt2"]}, 0, {*DEFAULT_MODELS, "tiny-gpt2"}),
        ({"tokenizer": True}, 0, {"smollm2-135m"}),
    ],
)
def test_limits_narrow_or_add_along_one_axis(limits: dict[str, Any], place: int, values: set[str]):
    assert {engine[place] for engine in engines(SMOKE, **limits)} == values


@pytest.mark.parametrize("limits", [{"steps": [16]}, {"backends": ["hf"]}, {"models": ["tiny-gpt2"]}])
def test_a_test_may_be_for_no_engine_of_the_plan(limits: dict[str, Any]):
    assert not engines(SMOKE, **limits)


def test_the_profile_makes_a_test_shorter():
    limits = {"smoke": {"modes": ["eager"]}, "full": {"dtypes": ["fp32"]}}
    assert {mode for _, _, mode, _ in engines(SMOKE, **limits)} == {"eager"}
    assert {dtype for _, dtype, _, _ in engines(FULL, **limits)} == {"fp32"}
    assert {mode for _, _, mode, _ in engines(FULL, **limits)} == {"eager", "compiled"}
    assert engines(Plan(profile="nightly"), **limits) == engines(Plan(profile="nightly"))


def test_full_is_as_smoke_unless_it_says_otherwise():
    assert in_profile("full", {"smoke": {"draws": 2}, "draws": 9})["draws"] == 2
    assert in_profile("full", {"smoke": {"draws": 2}, "full": {}, "draws": 9})["draws"] == 9


def test_the_profile_never_takes_the_last_engine():
    asked = Plan(modes=("compiled",))
    assert engines(asked, smoke={"modes": ["eager"]}) == engines(asked)


def test_every_point_is_an_option_of_the_engines():
    assert all(c.options.items() >= EVERY_POINT.items() for c in configs_of(SMOKE, {"every_point": True}))
    assert not any(EVERY_POINT.keys() & c.options.keys() for c in configs_of(SMOKE, {}))


def test_ranks_that_there_are_not_are_refused():
    with pytest.raises(UsageError, match="tp0"):
        configs_of(SMOKE, {"extra_topologies": ["tp0"]})
