"""Verdict JSON read back as flat rows, one per hook: what the data frames and the report both show."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["HookRow", "hook_rows", "number"]


@dataclass(frozen=True)
class HookRow:
    """One hook of one comparison; errors are relative, ``‖X - T‖₂ / ‖T‖₂``, and NaN where nothing was recorded.

    ``err_engine`` to ``bound`` are the aggregate over all rows; the ``gate_…`` figures are those of the gate that
    came nearest its bound (or passed it by most), which is what decides the hook.
    """

    hook: str
    order: int  #: place in forward order
    depth: int
    passed: bool
    err_engine: float
    err_reference: float
    floor: float
    bound: float
    gate: str
    gate_row: tuple[int, int] | None  #: (request, position) of the row it judges, if it judges one
    gate_engine: float
    gate_reference: float
    gate_floor: float
    gate_bound: float
    row_bound: float  #: bound of the worst-row gate, NaN if there is none
    ratio: float  #: gate_engine / gate_bound; at most 1 when passed
    required_k: float  #: the smallest k that would have passed
    n_rows: int
    n_massive: int
    max_abs: float
    worst_request: int
    worst_position: int
    worst_channel: int
    min_cosine: float
    max_ulps: float
    amplification: float
    failed_rows: tuple[
        tuple[int, int], ...
    ]  #: (request, position) of the row behind each failed gate that names one
    row_errors: Sequence[Sequence[Any]]  #: as recorded, per request; read each with :func:`number`
    rows_per_error: int  #: consecutive positions each row error is the largest of

    @property
    def badness(self) -> tuple[bool, float]:
        """Sorts hooks from comfortable to worst; a NaN is worse than any number."""
        return (not self.passed, math.inf if math.isnan(self.ratio) else self.ratio)


def number(value: Any) -> float:
    """Read a JSON number, or the string that stands for one JSON has no word for; NaN for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def hook_rows(verdict: Mapping[str, Any]) -> list[HookRow]:
    """The hooks of a verdict (``CaseVerdict.to_json()``), in the forward order they were recorded in."""
    return [_hook_row(hook, order) for order, hook in enumerate(verdict.get("hooks") or ())]


def _hook_row(hook: Mapping[str, Any], order: int) -> HookRow:
    gates = hook.get("gates") or [{}]
    deciding = max(gates, key=_gate_badness)
    first = gates[0]
    worst = hook.get("worst") or {}
    row_gate: Mapping[str, Any] = next((gate for gate in gates if gate.get("name") == "worst row"), {})
    return HookRow(
        hook=str(hook.get("hook", "?")),
        order=order,
        depth=int(hook.get("depth") or 0),
        passed=bool(hook.get("passed")),
        err_engine=number(first.get("err_engine")),
        err_reference=number(first.get("err_reference")),
        floor=number(first.get("floor")),
        bound=number(first.get("bound")),
        gate=_gate_name(deciding),
        gate_row=_row_of(deciding),
        gate_engine=number(deciding.get("err_engine")),
        gate_reference=number(deciding.get("err_reference")),
        gate_floor=number(deciding.get("floor")),
        gate_bound=number(deciding.get("bound")),
        row_bound=number(row_gate.get("bound")),
        ratio=_ratio(deciding),
        required_k=number(deciding.get("required_k")),
        n_rows=int(hook.get("n_rows") or 0),
        n_massive=int(hook.get("n_massive") or 0),
        max_abs=number(hook.get("max_abs")),
        worst_request=int(worst.get("request") or 0),
        worst_position=int(worst.get("position") or 0),
        worst_channel=int(hook.get("worst_channel") or 0),
        min_cosine=number(hook.get("min_cosine")),
        max_ulps=number(hook.get("max_ulps")),
        amplification=number(hook.get("amplification")),
        failed_rows=tuple(place for gate in gates if not gate.get("passed") and (place := _row_of(gate))),
        row_errors=hook.get("row_errors") or (),
        rows_per_error=int(hook.get("rows_per_error") or 1),
    )


def _gate_name(gate: Mapping[str, Any]) -> str:
    name = str(gate.get("name", "?"))
    channels = gate.get("slice")
    return f"{name} [{channels[0]}:{channels[1]}]" if channels else name


def _row_of(gate: Mapping[str, Any]) -> tuple[int, int] | None:
    where = gate.get("where")
    return (int(where.get("request") or 0), int(where.get("position") or 0)) if where else None


def _ratio(gate: Mapping[str, Any]) -> float:
    error, bound = number(gate.get("err_engine")), number(gate.get("bound"))
    if bound == 0:
        return 0.0 if error == 0 else math.inf
    return error / bound


def _gate_badness(gate: Mapping[str, Any]) -> tuple[bool, float]:
    ratio = _ratio(gate)
    return (not gate.get("passed"), math.inf if math.isnan(ratio) else ratio)
