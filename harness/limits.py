"""Which of a run's engines a test is for: what its ``parity`` marker says, read for the run's profile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.plan import EVERY_POINT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.backend import BootConfig
    from harness.plan import Plan

__all__ = ["configs_of", "in_profile"]


def in_profile(profile: str, limits: Mapping[str, Any]) -> dict[str, Any]:
    """A marker's arguments as they hold in a profile; ``full`` is as ``smoke`` unless the test says otherwise."""
    smoke = limits.get("smoke", {})
    shorter = {"smoke": smoke, "full": limits.get("full", smoke)}.get(profile, {})
    return {**limits, **shorter}


def configs_of(plan: Plan, limits: Mapping[str, Any]) -> list[BootConfig]:
    """The engines of a plan that a test runs on, in the plan's order.

    Args:
        plan: of the run.
        limits: arguments of the test's marker.

    Raises:
        UsageError: the marker adds ranks that cannot be.
    """
    extra = limits.get("extra_models", ()), limits.get("extra_topologies", ())
    # What is added has to be named by the test's own limits, so a plain test stays on what was asked for.
    every = [config for config in plan.configs(*extra) if _wanted(config, limits)]
    # The profile makes a run shorter, and never takes the last engine a test was asked to run on.
    shorter = in_profile(plan.profile, limits)
    configs = [config for config in every if _wanted(config, shorter)] or every
    if limits.get("every_point"):
        configs = [config.with_options(**EVERY_POINT) for config in configs]
    return configs


def _wanted(config: BootConfig, limits: Mapping[str, Any]) -> bool:
    named = {
        "models": config.model,
        "dtypes": config.short_dtype,
        "modes": config.mode,
        "topologies": str(config.topology),
        "steps": config.max_num_batched_tokens,
        "backends": config.backend,
    }
    if any(axis in limits and value not in limits[axis] for axis, value in named.items()):
        return False
    if limits.get("tokenizer"):
        from harness.models import resolve

        return resolve(config.model).has_tokenizer is not False
    return True
