"""The rank layout as inline SVG: hooks down, ranks across, who serves what and how often it ran."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from harness.report.numbers import sci
from harness.store.hooks import number

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["layout_caption", "layout_figure"]

_WIDTH, _LEFT, _TOP = 720, 190, 22
#: Pixels per hook, and hooks up to which each is named and its forwards written.
_TALL, _FLAT, _NAMED = 15, 5, 40


def layout_figure(layout: Mapping[str, Any]) -> Markup:
    """The figure for ``{"ranks", "served", "fires", …}`` as :class:`harness.vllm.layout.Layout` records it."""
    ranks = [str(rank) for rank in layout.get("ranks") or ()]
    served = layout.get("served") or {}
    if not ranks or not isinstance(served, dict) or not served:
        return Markup()
    fires = layout.get("fires") or {}
    named = len(served) <= _NAMED
    line = _TALL if named else _FLAT
    cell = (_WIDTH - _LEFT) / len(ranks)
    parts = [
        f"<text x={_LEFT + (i + 0.5) * cell:.0f} y=14>{escape(rank)}</text>" for i, rank in enumerate(ranks)
    ]
    for row, (hook, holders) in enumerate(served.items()):
        y = _TOP + row * line
        if named:
            parts.append(f"<text x={_LEFT - 6} y={y + 11} class=end>{escape(hook)}</text>")
        counts = fires.get(hook) or ()
        for place, rank in enumerate(holders):
            x = _LEFT + int(rank) * cell
            parts.append(
                f'<rect class=in x={x + 1:.1f} y={y + 1} width={cell - 2:.1f} height={line - 2} fill-opacity=".35"/>'
            )
            if named and place < len(counts):
                parts.append(f"<text x={x + cell / 2:.0f} y={y + 11}>{escape(counts[place])}</text>")
    height = _TOP + line * len(served) + 4
    label = f"Rank layout: {len(served)} hooks on {len(ranks)} ranks"
    return Markup(  # noqa: S704 - every text in it was escaped
        f'<svg viewBox="0 0 {_WIDTH} {height}" role=img aria-label="{label}"><g class=map>{"".join(parts)}</g></svg>'
    )


def layout_caption(layout: Mapping[str, Any]) -> str:
    """What the figure shows, in a sentence."""
    largest = number(layout.get("largest_difference"))
    where = f" at {layout['largest_at']}" if layout.get("largest_at") else ""
    return (
        "Which rank (pipeline stage / tensor-parallel rank) serves which hook, with its forwards in the call it was "
        f"verified on. Largest difference between replicas: {sci(largest)}{where}."
    )
