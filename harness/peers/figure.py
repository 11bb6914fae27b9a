"""A run of peers as a bar figure: one self-contained SVG, right on light and on dark."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from harness.peers.catalogue import OURS
from harness.peers.record import COLLECT, FAILED, PLAIN, WRONG
from harness.report.numbers import duration

if TYPE_CHECKING:
    from harness.peers.record import PeerRecord, Run

__all__ = ["bar_figure"]

_WIDTH, _LEFT, _RIGHT = 760, 270, 70
_ROW, _BAR, _TOP, _BOTTOM = 34, 16, 34, 34
_CAPTION = (
    "bar: median of the rounds; whisker: best to worst; dashed: the same forward with nothing collected"
)
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1f2328}.end{text-anchor:end}.small{font-size:11px;fill:#59636e}"
    ".mid{text-anchor:middle}.bar{fill:#8fb8de}.ours{fill:#0072b2}.bad{fill:#d55e00}"
    ".whisker{stroke:#1f2328;fill:none}.plain{stroke:#1f2328;stroke-width:2;stroke-dasharray:2 2}"
    ".grid{stroke:#d0d7de}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9198a1}.bar{fill:#3f6486}.ours{fill:#56b4e9}"
    ".whisker,.plain{stroke:#e6edf3}.grid{stroke:#3d444d}}"
)


@dataclass(frozen=True)
class _Bar:
    """Seconds of one peer: the median of its rounds, their range, and the median of its plain forward."""

    peer: PeerRecord
    median: float | None
    low: float
    high: float
    plain: float | None

    @classmethod
    def of(cls, peer: PeerRecord, prompts: str) -> _Bar | None:
        found = sorted(peer.seconds(COLLECT, prompts).values())
        plain = peer.median(PLAIN, prompts)
        if peer.state == FAILED or not (found or plain):
            return None
        if not found:
            return cls(peer, None, 0.0, 0.0, plain)
        return cls(peer, peer.median(COLLECT, prompts), found[0], found[-1], plain)


def bar_figure(run: Run, prompts: str = "ragged") -> Markup:
    """A bar per peer that ran, fastest first: the median, a whisker from best to worst round, plain forward dashed."""
    bars = [bar for peer in run.peers if (bar := _Bar.of(peer, prompts)) is not None]
    bars.sort(key=lambda bar: (bar.median is not None, bar.median or 0.0))
    if not bars:
        return Markup()
    top = max(max(bar.high, bar.plain or 0.0) for bar in bars) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / top
    height = _TOP + _ROW * len(bars) + _BOTTOM
    bottom = height - _BOTTOM
    parts = [f'<path class="grid" d="{_grid(scale, top, bottom)}"/>', _labels(scale, top, bottom)]
    parts += [_drawn(bar, number, scale) for number, bar in enumerate(bars)]
    label = (
        f"Seconds to collect every block's residual stream, {prompts}: median of the rounds, best to worst, "
        "dashed: the same forward with nothing collected"
    )
    parts.append(f'<text class="small" x="12" y="20">{_CAPTION}</text>')
    return Markup(  # noqa: S704 - every text in it was escaped
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{escape(label)}"><style>{_STYLE}</style>{"".join(parts)}</svg>\n'
    )


def _step(top: float) -> float:
    """Distance of grid lines: 1, 2 or 5 of a power of ten, such that there are three to seven with that at 0."""
    power = 10.0 ** math.floor(math.log10(top))
    return next(power * part for part in (0.2, 0.5, 1.0, 2.0) if top / (power * part) < 7)


def _ticks(top: float) -> list[float]:
    step = _step(top)
    return [step * number for number in range(int(top / step) + 1)]


def _grid(scale: float, top: float, bottom: int) -> str:
    return "".join(f"M{_LEFT + tick * scale:.1f} {_TOP}V{bottom}" for tick in _ticks(top))


def _labels(scale: float, top: float, bottom: int) -> str:
    return "".join(
        f'<text class="small mid" x="{_LEFT + tick * scale:.1f}" y="{bottom + 18}">{tick:g} s</text>'
        for tick in _ticks(top)
    )


def _drawn(bar: _Bar, number: int, scale: float) -> str:
    middle = _TOP + _ROW * number + _ROW // 2
    kind = "bad" if bar.peer.state == WRONG else "ours" if bar.peer.name.startswith(OURS) else "bar"
    title = bar.peer.title + (" (wrong values)" if bar.peer.state == WRONG else "")
    parts = [f'<text class="end" x="{_LEFT - 10}" y="{middle + 5}">{escape(title)}</text>']
    end = bar.plain or 0.0
    if bar.median is not None:
        end = max(end, bar.high)
        parts.append(
            f'<rect class="{kind}" x="{_LEFT}" y="{middle - _BAR // 2}" width="{bar.median * scale:.1f}" '
            f'height="{_BAR}" rx="2"/>'
        )
        low, high = _LEFT + bar.low * scale, _LEFT + bar.high * scale
        ends = f"M{low:.1f} {middle - 4}v8M{high:.1f} {middle - 4}v8"
        parts.append(f'<path class="whisker" d="M{low:.1f} {middle}H{high:.1f}{ends}"/>')
    if bar.plain is not None:
        parts.append(f'<path class="plain" d="M{_LEFT + bar.plain * scale:.1f} {middle - 13}v26"/>')
    value = bar.median if bar.median is not None else bar.plain or 0.0
    parts.append(
        f'<text class="small" x="{_LEFT + end * scale + 8:.1f}" y="{middle + 4}">{escape(duration(value))}</text>'
    )
    return "".join(parts)
