"""Has an error grown, or is it the same error rounded in another way?

Two runs of the same code with the same versions on the same machine give the same bits, so there a small step means
something. Kernels that round in another order give other errors that are just as right, so there only a large one does.
Runs given as baselines replace both guesses by what was measured. ``docs/runs.md`` has the figures behind the numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from harness.history.figures import HookFigure

__all__ = ["ALIKE", "UNLIKE", "Rule", "Spread", "mean_growth"]

#: (case key, label, hook)
Key = tuple[str, str, str]

#: Shares below this are taken as this where factors are formed: next to nothing, doubled, is still next to nothing.
_SMALL = 0.02
#: Comparisons of fewer hooks have no mean worth judging.
MIN_HOOKS = 5
#: Where runs repeat to the bit, a step below this is another rounding of the last bit, carried through the layers.
_LEAST_STEP, _LEAST_MEAN = 0.05, 1.1


@dataclass(frozen=True)
class Rule:
    """When a share of the bound has grown.

    A hook has grown where its share rose by more than ``step`` and more than ``factor`` times; a comparison has grown
    where the geometric mean of its hooks' factors is above ``mean``.
    """

    name: Literal["alike", "unlike", "measured", "given"]
    step: float
    factor: float
    mean: float

    def limit(self, share: float) -> float:
        """The largest share that is no growth from ``share``."""
        return max(share + self.step, share * self.factor)


#: Same versions, machine and mode. Of 38,000 such hooks 36 moved at all, by 0.10 and 1.26 times at most.
ALIKE = Rule("alike", step=0.2, factor=1.25, mean=1.25)
#: Anything that may round otherwise. Between eager and compiled, 31,500 hooks moved by 0.66 at most, means by 2.03.
UNLIKE = Rule("unlike", step=0.7, factor=2.0, mean=2.5)


class Spread:
    """What the first run's shares may become before they have grown.

    Args:
        first: the shares of the first run.
        repeats: those of runs like it; none leaves ``rule`` as it is.
        rule: judges where nothing was measured.
    """

    def __init__(
        self,
        first: Mapping[Key, HookFigure],
        repeats: Sequence[Mapping[Key, HookFigure]] = (),
        rule: Rule = UNLIKE,
    ) -> None:
        self._high = {key: figure.share for key, figure in first.items()}
        self._range: dict[Key, float] = {}
        self.rule = rule
        if repeats:
            self._measure(first, repeats)

    def _measure(self, first: Mapping[Key, HookFigure], repeats: Sequence[Mapping[Key, HookFigure]]) -> None:
        """Widen each hook by its own range, and at least by twice the widest: few repeats see little of a tail."""
        widest, mean = 0.0, 1.0
        for key, figure in first.items():
            shares = [figure.share, *(repeat[key].share for repeat in repeats if key in repeat)]
            finite = [share for share in shares if math.isfinite(share)]
            if len(finite) < 2:
                continue
            self._high[key] = max(finite)
            self._range[key] = max(finite) - min(finite)
            widest = max(widest, self._range[key])
        for repeat in repeats:
            for pairs in _by_comparison(first, repeat).values():
                growth = mean_growth(pairs)
                mean = max(mean, growth, 1 / growth)
        self.rule = Rule(
            "measured",
            step=max(min(2 * widest, UNLIKE.step), _LEAST_STEP),
            factor=1.0,
            mean=max(min(mean**2, UNLIKE.mean), _LEAST_MEAN),
        )

    def limit(self, key: Key) -> float:
        """The largest share that is no growth of this hook."""
        high = self._high[key]
        return max(self.rule.limit(high), high + self._range.get(key, 0.0))

    def high(self, key: Key) -> float:
        """The largest share of this hook among the first run and the runs like it."""
        return self._high[key]


def _by_comparison(
    first: Mapping[Key, HookFigure], second: Mapping[Key, HookFigure]
) -> dict[tuple[str, str], list[tuple[float, float]]]:
    grouped: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for key in first.keys() & second.keys():
        grouped.setdefault(key[:2], []).append((first[key].share, second[key].share))
    return grouped


def mean_growth(pairs: Iterable[tuple[float, float]]) -> float:
    """Geometric mean of after / before over the hooks of a comparison; 1 where there are too few, or none moved."""
    logs = [
        math.log(max(after, _SMALL) / max(before, _SMALL))
        for before, after in pairs
        if math.isfinite(before) and math.isfinite(after)
    ]
    return math.exp(math.fsum(logs) / len(logs)) if len(logs) >= MIN_HOOKS else 1.0
