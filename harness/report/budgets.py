"""Budgets: what was measured against what was promised, from the details that the budget suite records."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.report.numbers import size
from harness.store.hooks import number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from harness.report.view import CaseView

__all__ = ["Bar", "bars"]

#: For records that do not say their own target: of a predicted size, times the capture state, and the bytes that
#: allocators may keep whatever a call captures.
_TOLERANCE, _PEAK, _GROWTH = 1.05, 1.5, 4 * 2**20
_SCALE = 1.5  # the bar's whole length, in targets


@dataclass(frozen=True)
class Bar:
    """One budget of one case; shares are of the target, which is 1."""

    view: CaseView
    label: str
    measured: str
    target: str
    source: str  #: where the target comes from
    share: float
    low: float  #: quartiles of the measurements, NaN where there is one only
    high: float

    @property
    def holds(self) -> bool:
        """Whether the promise was kept."""
        return self.share <= 1

    def percent(self, share: float) -> float:
        """Where a share lies on a bar that is half as long again as the target, in percent of its length."""
        return round(100 * min(max(share, 0.0) / _SCALE, 1.0), 1) if math.isfinite(share) else 0.0


def bars(views: Sequence[CaseView]) -> list[Bar]:
    """A bar for each budget that was measured on a sound engine, in the order of the cases."""
    return [
        bar
        for view in views
        if not any("caught_by" in detail for _, detail in _details(view))
        for label, detail in _details(view)
        for read in _READERS
        if (bar := read(view, label, detail)) is not None
    ]


def _details(view: CaseView) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for entry in view.case.verdicts:
        if isinstance(entry.get("detail"), dict) and not entry.get("verdict"):
            yield str(entry.get("label") or "budget"), entry["detail"]


def _ratio(view: CaseView, label: str, detail: Mapping[str, Any]) -> Bar | None:
    found, target = number(detail.get("ratio")), number(detail.get("target"))
    if not (math.isfinite(found) and target > 0):
        return None
    quartiles = [number(value) for value in detail.get("quartiles") or ()]
    spread = len(quartiles) == 2
    return Bar(
        view,
        label,
        f"{found:.3f} times plain vLLM"
        + (f", quartiles {quartiles[0]:.3f} to {quartiles[1]:.3f}" if spread else ""),
        f"at most {target:.2f} times",
        f"median of {detail.get('rounds', '?')} pairs, both engines in turn in one run",
        found / target,
        *((quartiles[0] / target, quartiles[1] / target) if spread else (math.nan, math.nan)),
    )


def _state(view: CaseView, label: str, detail: Mapping[str, Any]) -> Bar | None:
    promised, held = detail.get("promised"), detail.get("held")
    if not (
        isinstance(promised, list) and isinstance(held, list) and promised and len(promised) == len(held)
    ):
        return None
    pairs = [(number(one), number(other)) for one, other in zip(held, promised, strict=True)]
    got, wanted = max(pairs, key=lambda pair: pair[0] / pair[1] if pair[1] else math.inf)
    if not wanted > 0:
        return None
    ranks = f" on the fullest of {len(pairs)} ranks" if len(pairs) > 1 else ""
    source = f"{size(wanted)} computed from the hook specs before the boot, and 5 %"
    share = got / (_TOLERANCE * wanted)
    return Bar(view, label, size(got) + ranks, size(_TOLERANCE * wanted), source, share, math.nan, math.nan)


def _peak(view: CaseView, label: str, detail: Mapping[str, Any]) -> Bar | None:
    plain, tapped, state = (number(detail.get(name)) for name in ("plain", "tapped", "capture_state"))
    if not (math.isfinite(tapped - plain) and state > 0):
        return None
    over, target = tapped - plain, _target(detail, _PEAK * state)
    source = f"{target / state:.3g} times the capture state, {size(state)}"
    return Bar(
        view, label, f"{size(over)} over plain vLLM", size(target), source, over / target, math.nan, math.nan
    )


def _growth(view: CaseView, label: str, detail: Mapping[str, Any]) -> Bar | None:
    grown, one_call = number(detail.get("bytes")), number(detail.get("captured_per_call"))
    if not (math.isfinite(grown) and one_call > 0):
        return None
    target = _target(detail, max(one_call, _GROWTH))
    source = f"what one call captures ({size(one_call)}), or {size(_GROWTH)} if that is more"
    return Bar(view, label, size(grown), size(target), source, grown / target, math.nan, math.nan)


def _target(detail: Mapping[str, Any], otherwise: float) -> float:
    recorded = number(detail.get("target"))
    return recorded if recorded > 0 else otherwise


_READERS: tuple[Callable[[CaseView, str, Mapping[str, Any]], Bar | None], ...] = (
    _ratio,
    _state,
    _peak,
    _growth,
)
