"""What the figures of trials have in common: frame, axes, legend and colours of one SVG file. Lengths are SVG units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Frame", "colour"]

#: Told apart by dash and marker too, not by colour alone.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc3399", "#7a5c00", "#555555")
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.g{stroke:#8884;fill:none}.k{stroke:#333;stroke-dasharray:4 3}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.k{stroke:#ddd}}"
)
_WIDTH, _RIGHT, _BOTTOM = 760, 16, 74
_COLUMNS, _COLUMN, _LINE = 2, 350, 16


def colour(number: int) -> str:
    """Of the curve with this number, counted from 0; after the last colour they begin again."""
    return _COLOURS[number % len(_COLOURS)]


@dataclass(frozen=True)
class Frame:
    """Where curves are drawn, with room for labels around it and for a legend of two columns below.

    Attributes:
        height: of the figure with one line of legend.
        left, top: the frame's other edges.
    """

    height: int
    left: int
    top: int = 20

    @property
    def right(self) -> int:
        """The frame's right edge."""
        return _WIDTH - _RIGHT

    @property
    def foot(self) -> int:
        """The frame's lower edge."""
        return self.height - _BOTTOM

    @property
    def tall(self) -> int:
        """Height of the frame."""
        return self.foot - self.top

    def x(self, part: float) -> float:
        """At this part of the frame's width."""
        return self.left + part * (self.right - self.left)

    def grid(self, heights: Iterable[float]) -> str:
        """Lines across the frame."""
        lines = "".join(f"M{self.left} {y:.1f}H{self.right}" for y in heights)
        return f'<path class="g" d="{lines}"/>'

    def levels(self, labels: Iterable[tuple[float, str]]) -> str:
        """What (y, text) stands left of the frame."""
        return "".join(
            f'<text x="{self.left - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>'
            for y, text in labels
        )

    def ticks(self, labels: Iterable[tuple[float, str]], name: str) -> str:
        """What (x, text) stands below the frame, and below that what the axis is."""
        texts = "".join(
            f'<text x="{x:.1f}" y="{self.foot + 16}" text-anchor="middle">{escape(text)}</text>'
            for x, text in labels
        )
        middle = f"{(self.left + self.right) / 2:.0f}"
        return f'{texts}<text x="{middle}" y="{self.foot + 32}" text-anchor="middle">{escape(name)}</text>'

    def key(self, number: int, label: str, dash: str = "") -> str:
        """The legend's entry of a curve; ``dash`` is an attribute."""
        x = self.left + 8 + number % _COLUMNS * _COLUMN
        y = self.height - 28 + number // _COLUMNS * _LINE
        return (
            f'<path d="M{x} {y - 4}h18" stroke="{colour(number)}" stroke-width="2"{dash}/>'
            f'<text x="{x + 24}" y="{y}">{escape(label)}</text>'
        )

    def figure(self, title: str, parts: Sequence[str], curves: int) -> Markup:
        """The whole file: parts that are markup already, and room for the legend of so many curves."""
        height = self.height + max(0, (curves - 1) // _COLUMNS) * _LINE
        return Markup(  # noqa: S704 - whoever made a part has escaped the text in it
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">'
            f"<title>{escape(title)}</title><style>{_STYLE}</style>{''.join(parts)}</svg>\n"
        )
