"""Time as a ratio: two ways of doing the same, in turn, in one run. Seconds of one machine say nothing alone."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Paired", "paired"]


@dataclass(frozen=True)
class Paired:
    """Seconds of both ways, round by round.

    Attributes:
        base: of what is compared with.
        other: of what is compared.
    """

    base: tuple[float, ...]
    other: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """Other over base, per round."""
        return [b / a for a, b in zip(self.base, self.other, strict=True)]

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios: neighbours in time share what else the machine was doing."""
        return statistics.median(self.ratios)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The middle half of the ratios lies between these."""
        low, _, high = statistics.quantiles(self.ratios, n=4)
        return low, high

    def __str__(self) -> str:
        low, high = self.quartiles
        return f"{self.ratio:.3f} ({low:.3f} to {high:.3f}, {len(self.base)} rounds)"


def paired(base: Callable[[], float], other: Callable[[], float], *, rounds: int, warm_up: int = 2) -> Paired:
    """Run both in turn and return their seconds; which goes first changes from round to round.

    Args:
        base: runs once what is compared with, and returns its seconds.
        other: runs once what is compared, and returns its seconds.
        rounds: pairs that count.
        warm_up: pairs before them that do not.
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(warm_up + rounds):
        order = (0, 1) if number % 2 else (1, 0)
        took = {which: (base, other)[which]() for which in order}
        if number >= warm_up:
            seconds[0].append(took[0])
            seconds[1].append(took[1])
    return Paired(tuple(seconds[0]), tuple(seconds[1]))
