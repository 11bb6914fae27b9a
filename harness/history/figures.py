"""The figures of a case that can grow from run to run: errors as shares of their bounds, and noted budgets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.errors import UsageError
from harness.history.reading import as_mapping
from harness.store import hook_rows
from harness.store.hooks import number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.store import CaseResult

__all__ = ["Budget", "HookFigure", "budgets", "hook_figures", "worst_share"]

_MIB = 2**20
#: As the suite that notes it: what taps hold may be this much more than the plan says.
_STATE_TOLERANCE = 1.05
#: As the suite: allocators keep this much without anything having leaked, bytes.
_GROWTH_TOLERANCE = 4 * _MIB
#: Peaks of resident memory in two clean runs were 6 % of the capture state apart.
_PEAK_TOLERANCE = 0.25


@dataclass(frozen=True)
class HookFigure:
    """The worst of one hook in one comparison of a case, by the gate that decides it.

    Attributes:
        share: err(E) / bound, with the bound at the k that runs are compared at; NaN counts as infinite.
        order: place in forward order.
    """

    label: str
    hook: str
    order: int
    share: float
    err_engine: float
    err_reference: float
    bound: float
    gate: str
    passed: bool


@dataclass(frozen=True)
class Budget:
    """A figure noted beside a verdict, with the range in which it counts as the same.

    Attributes:
        unit: ``B`` or empty for a ratio.
        low, high: another run's figure is hungrier where its ``low`` is above this one's ``high``.
    """

    name: str
    unit: str
    value: float
    low: float
    high: float


def hook_figures(case: CaseResult, k: float = math.nan) -> dict[tuple[str, str], HookFigure]:
    """(label, hook) → its worst figure; a label that a case uses several times counts once, with the worst.

    Comparisons of one label come in any order (some suites go through a set), so their number cannot tell them apart.

    Args:
        case: of any outcome.
        k: shares are given for bounds with this k; NaN leaves each with its own.

    Raises:
        UsageError: a verdict that cannot be read.
    """
    found: dict[tuple[str, str], HookFigure] = {}
    try:
        for entry in case.verdicts:
            verdict = entry.get("verdict")
            if not verdict:
                continue
            own_k = number(verdict.get("k"))
            scale = own_k / k if k > 0 and own_k > 0 else 1.0
            label = str(entry.get("label") or "comparison")
            for row in hook_rows(verdict):
                figure = HookFigure(
                    label=label,
                    hook=row.hook,
                    order=row.order,
                    share=math.inf if math.isnan(row.ratio) else row.ratio * scale,
                    err_engine=row.gate_engine,
                    err_reference=row.gate_reference,
                    bound=row.gate_bound / scale,
                    gate=row.gate,
                    passed=row.passed,
                )
                before = found.get((label, row.hook))
                if before is None or (figure.passed, -figure.share) < (before.passed, -before.share):
                    found[label, row.hook] = figure
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        msg = (
            f"a verdict of {case.id} cannot be read ({type(error).__name__}: {error}): its record is damaged"
        )
        raise UsageError(msg) from error
    return found


def worst_share(case: CaseResult, k: float = math.nan) -> float:
    """The largest share of a case; NaN where it compared no hook.

    A case that passes although a comparison in it failed wanted that failure: only those that passed count there.
    """
    shares = [
        figure.share for figure in hook_figures(case, k).values() if figure.passed or case.outcome != "passed"
    ]
    return max(shares, default=math.nan)


def budgets(case: CaseResult) -> dict[str, Budget]:
    """Name → figure, for every memory figure and every ratio to a plain engine that the case noted.

    None for a case that caught a planted fault: how hungry a broken engine is says nothing.
    """
    found: dict[str, Budget] = {}
    entries = [as_mapping(entry) for entry in case.verdicts]
    if any("caught_by" in as_mapping(noted.get("detail")) for noted in entries):
        return found
    for noted in entries:
        budget = _budget(str(noted.get("label") or ""), as_mapping(noted.get("detail")))
        if budget is not None and math.isfinite(budget.value):
            same = found.get(budget.name)
            found[budget.name] = budget if same is None or budget.value > same.value else same
    return found


def _budget(label: str, detail: Mapping[str, Any]) -> Budget | None:
    if label == "tap state":
        held = detail.get("held")
        value = math.fsum(map(number, held)) if isinstance(held, list) else math.nan
        return Budget("tap state, all ranks", "B", value, value, value * _STATE_TOLERANCE)
    if label.startswith("growth over"):
        value, call = number(detail.get("bytes")), number(detail.get("captured_per_call"))
        allowed = max(_GROWTH_TOLERANCE, call if math.isfinite(call) else 0.0)
        return Budget(label, "B", value, value, max(value, 0.0) + allowed)
    if label == "peak of a forward":
        value = number(detail.get("tapped")) - number(detail.get("plain"))
        state = number(detail.get("capture_state"))
        return Budget(
            "peak of a forward over plain vLLM's", "B", value, value, value + _PEAK_TOLERANCE * state
        )
    quartiles = detail.get("quartiles")
    if "ratio" in detail and isinstance(quartiles, list) and len(quartiles) == 2:
        low, high = map(number, quartiles)
        return Budget(f"{label}, of plain vLLM's time", "", number(detail["ratio"]), low, high)
    return None
