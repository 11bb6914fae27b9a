"""Time as a ratio: two ways of doing the same, in turn, in one run. Seconds of one machine say nothing alone."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Paired", "Sided", "paired", "sided"]


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


@dataclass(frozen=True)
class Sided:
    """Seconds of several engines of each of two kinds, round by round.

    Two engines that do the same differ in where their memory lies, for as long as they live: more rounds do not average
    that away. It can only cost, so the fastest of each kind is nearest to what its code takes; and what engines of one
    kind differ by says how much of it there is.

    Attributes:
        base: of what is compared with, per engine.
        other: of what is compared, per engine.
    """

    base: tuple[tuple[float, ...], ...]
    other: tuple[tuple[float, ...], ...]

    @property
    def paired(self) -> Paired:
        """The engine of each kind with the smallest median, round by round."""
        return Paired(*(min(kind, key=statistics.median) for kind in (self.base, self.other)))

    @property
    def apart(self) -> float:
        """The most by which two engines of one kind differ, as a share of their time; 0.0 with one of each.

        A path that is slow excuses nothing so: it is slow in every engine of its kind, the fastest too.
        """
        pairs = [two for kind in (self.base, self.other) for two in itertools.permutations(kind, 2)]
        return max((Paired(one, another).ratio - 1 for one, another in pairs), default=0.0)


def sided(
    base: Sequence[Callable[[], float]],
    other: Sequence[Callable[[], float]],
    *,
    rounds: int,
    warm_up: int = 2,
) -> Sided:
    """Run all in turn and return their seconds; each round begins with another of them.

    Args:
        base: each runs once what is compared with, on an engine of its own, and returns its seconds.
        other: each runs once what is compared, and returns its seconds.
        rounds: rounds that count.
        warm_up: rounds before them that do not.
    """
    # One kind after the other by turns, so that a neighbour in time is of the other kind.
    both = [*itertools.zip_longest(base, other)]
    ways = [(kind, way) for pair in both for kind, way in enumerate(pair) if way is not None]
    seconds: list[list[float]] = [[] for _ in ways]
    for number in range(warm_up + rounds):
        for place in range(len(ways)):
            which = (place + number) % len(ways)
            took = ways[which][1]()
            if number >= warm_up:
                seconds[which].append(took)
    kinds = [
        tuple(tuple(some) for some, (of, _) in zip(seconds, ways, strict=True) if of == kind)
        for kind in (0, 1)
    ]
    return Sided(*kinds)


def paired(base: Callable[[], float], other: Callable[[], float], *, rounds: int, warm_up: int = 2) -> Paired:
    """Run both in turn and return their seconds; which goes first changes from round to round.

    Args:
        base: runs once what is compared with, and returns its seconds.
        other: runs once what is compared, and returns its seconds.
        rounds: pairs that count.
        warm_up: pairs before them that do not.
    """
    turns = sided([other], [base], rounds=rounds, warm_up=warm_up)  # the other begins
    return Paired(turns.other[0], turns.base[0])
