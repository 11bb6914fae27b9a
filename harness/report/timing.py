"""Where the time went: seconds per model, and every boot in the order it happened."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from harness.report.numbers import duration
from harness.store.hooks import number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.store import CaseResult, RunRecords

__all__ = ["ModelTime", "boots_figure", "model_times"]

_WIDTH, _HEIGHT = 720, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 8, 26
_TICKS = 4
_WIDEST = 22  # px of one boot


@dataclass(frozen=True)
class ModelTime:
    """The time of one model's cases, boots among them."""

    model: str
    family: str  #: its architecture, where an engine said so
    n_cases: int
    seconds: float
    n_boots: int
    boot_seconds: float
    share: float  #: of the longest model's time


def model_times(records: RunRecords) -> list[ModelTime]:
    """Models by time, longest first. A boot counts for the case that needed it first, which is in these sums."""
    cases: dict[str, list[CaseResult]] = {}
    for case in records.cases:
        cases.setdefault(case.model or "no model", []).append(case)
    boots: dict[str, list[float]] = {}
    families: dict[str, str] = {}
    for engine in records.engines:
        model = str((engine.get("config") or {}).get("model") or "")
        seconds = number(engine.get("boot_seconds"))
        if math.isfinite(seconds):
            boots.setdefault(model, []).append(seconds)
        family = (engine.get("describe") or {}).get("architecture")
        families[model] = str(family or families.get(model, ""))
    spent = {model: sum(_finite(case.seconds) for case in members) for model, members in cases.items()}
    longest = max(spent.values(), default=0.0) or 1.0
    return [
        ModelTime(
            model,
            families.get(model, ""),
            len(cases[model]),
            seconds,
            len(boots.get(model, ())),
            sum(boots.get(model, ())),
            seconds / longest,
        )
        for model, seconds in sorted(spent.items(), key=lambda item: -item[1])
    ]


def _finite(seconds: float) -> float:
    return seconds if math.isfinite(seconds) else 0.0


def boots_figure(engines: Sequence[Mapping[str, Any]]) -> Markup:
    """A column per boot in the order of the run, its height the seconds it took; hollow where nothing is compiled."""
    boots = [(engine, number(engine.get("boot_seconds"))) for engine in engines]
    boots = [(engine, seconds) for engine, seconds in boots if math.isfinite(seconds) or engine.get("error")]
    if not any(math.isfinite(seconds) for _, seconds in boots):
        return Markup()
    top = _round_up(max(seconds for _, seconds in boots if math.isfinite(seconds)))
    foot, room = _HEIGHT - _BOTTOM, _HEIGHT - _BOTTOM - _TOP
    step = min((_WIDTH - _LEFT - _RIGHT) / len(boots), _WIDEST)
    parts = [_scale(top, foot, room)]
    for place, (engine, seconds) in enumerate(boots):
        x, width = _LEFT + place * step, max(step - (2 if step > 5 else 0.5), 0.5)
        failed = not math.isfinite(seconds)
        tall = room if failed else max(room * seconds / top, 1)
        kind = "boot-failed" if failed else "boot-eager" if _mode(engine) == "eager" else "boot"
        title = f"{engine.get('id')}: {'did not boot' if failed else duration(seconds)}"
        parts.append(
            f"<rect class={kind} x={x:.1f} y={foot - tall:.1f} width={width:.1f} height={tall:.1f}>"
            f"<title>{escape(title)}</title></rect>"
        )
    parts.append(f"<text x={_LEFT} y={_HEIGHT - 8} class=start>{len(boots)} boots, first to last</text>")
    label = f"Seconds per boot, {len(boots)} boots in order, at most {duration(top)}"
    return Markup(  # noqa: S704 - every text in it was escaped
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role=img aria-label="{label}">{"".join(parts)}</svg>'
    )


def _mode(engine: Mapping[str, Any]) -> str:
    return str((engine.get("config") or {}).get("mode") or "")


def _round_up(seconds: float) -> float:
    """The next of 1, 2, 4, 5, 10, 20, 40, … s, so that the marks are whole numbers or halves."""
    decade = 10.0 ** math.floor(math.log10(max(seconds, 1.0)))
    return next(decade * factor for factor in (1, 2, 4, 5, 10) if decade * factor >= seconds)


def _scale(top: float, foot: int, room: int) -> str:
    marks = [top * i / _TICKS for i in range(_TICKS + 1)]
    lines = "".join(f"M{_LEFT} {foot - room * mark / top:.0f}H{_WIDTH - _RIGHT}" for mark in marks)
    texts = "".join(
        f"<text x={_LEFT - 6} y={foot - room * mark / top + 4:.0f} class=end>{mark:g} s</text>"
        for mark in marks
    )
    return f'<path class=grid d="{lines}"/>{texts}'
