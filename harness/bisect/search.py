"""The search itself, which knows no engine: which stages, and which points in them, are wrong by themselves.

A probe puts the truth in at some points and says how far off every point is then. Two questions are asked of it:

- *Which stage is the last wrong one?* With the truth put in at its end all later points heal, at its beginning they do
  not; this is found by halving.
- *What is wrong in a stage by itself?* With the truth put in at its beginning, the first point that is wrong has only
  right ones before it. The truth is put in there too, and so on until the stage is right.

The first wrong stage is where the first wrong point of an untouched run lies; between it and the last, each next one
shows once the truth is put in at the end of the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from harness.bisect.stages import Stage

__all__ = ["MOST_STAGES", "Culprit", "Found", "Probe", "Probed", "Search", "Site", "fewest", "first_true"]

#: Points at which the truth is put in → point → its error in multiples of its bound.
Probe: TypeAlias = Callable[[tuple[str, ...]], Mapping[str, float]]
#: Most wrong stages that are looked into; the last one is known beyond that.
MOST_STAGES = 4


@dataclass(frozen=True)
class Probed:
    """One probe: where the truth was put in, and each point's error in multiples of its bound."""

    healed: tuple[str, ...]
    shares: Mapping[str, float]


@dataclass(frozen=True)
class Site:
    """A point that is wrong though all that leads to it is right.

    Attributes:
        hook: the point.
        share: its error then, in multiples of its bound.
    """

    hook: str
    share: float


@dataclass(frozen=True)
class Culprit:
    """A stage that was looked into.

    Attributes:
        stage: which.
        sites: what is wrong by itself in it, in forward order; none where it only adds a little to what others lost.
        heals: whether every later point is right once the truth is put in at all of them.
        after: first point that is wrong then, None where it heals.
    """

    stage: Stage
    sites: tuple[Site, ...]
    heals: bool
    after: str | None


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        first: the first wrong point of the untouched run; None: all are right.
        culprits: the stages looked into, in forward order.
        last: the last stage at whose beginning the truth does not help; None where all is right.
        probes: every probe made, in order.
    """

    first: str | None
    culprits: tuple[Culprit, ...] = ()
    last: Stage | None = None
    probes: tuple[Probed, ...] = ()

    @property
    def wrong(self) -> list[tuple[Culprit, Site]]:
        """Every point that is wrong by itself, in forward order."""
        return [(culprit, site) for culprit in self.culprits for site in culprit.sites]


def first_true(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The smallest number in [low, high) for which ``holds``, or ``high``; once it holds it must go on holding."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def fewest(items: Sequence[int], fails: Callable[[Sequence[int]], bool]) -> list[int]:
    """A smallest subset, in the sense that none of it can be left out, for which ``fails``; ``items`` all do.

    None of them is tried first, then halves before single items: one needed of n costs about 2 · log2 n calls.
    """
    if not items or fails([]):
        return []
    kept = list(items)
    size = len(kept) // 2
    while size:
        at = 0
        while at < len(kept):
            rest = kept[:at] + kept[at + size :]
            if fails(rest):
                kept = rest
            else:
                at += size
        size //= 2
    return kept


@dataclass
class Search:
    """One search.

    Attributes:
        stages: in forward order.
        probe: asked at most once for each set of points.
        fixed: points at which the truth cannot be put in.
    """

    stages: Sequence[Stage]
    probe: Probe
    fixed: Collection[str] = ()
    probes: dict[tuple[str, ...], Mapping[str, float]] = field(default_factory=dict)

    def shares(self, *healed: str) -> Mapping[str, float]:
        """Each point's error, in multiples of its bound, with the truth put in at ``healed``."""
        if healed not in self.probes:
            self.probes[healed] = self.probe(healed)
        return self.probes[healed]

    def wrong(self, shares: Mapping[str, float], begin: int = 0, besides: Collection[str] = ()) -> str | None:
        """The first wrong point from a stage on; a NaN counts as wrong."""
        return next(
            (
                h
                for stage in self.stages[begin:]
                for h in stage.hooks
                if h not in besides and _over(shares[h])
            ),
            None,
        )

    def run(self) -> Found:
        """Search, and say what was found."""
        first = self.wrong(self.shares())
        if first is None:
            return Found(None, probes=self._probes())
        last = self._last()
        at = self._stage(first)
        culprits = [self.look_into(at)]
        while at < last and len(culprits) < MOST_STAGES and self.stages[at].end not in self.fixed:
            following = self.wrong(self.shares(self.stages[at].end), at + 1)
            if following is None:
                break
            at = self._stage(following)
            culprits.append(self.look_into(at))
        return Found(first, tuple(culprits), self.stages[last], self._probes())

    def look_into(self, index: int) -> Culprit:
        """What is wrong by itself in a stage."""
        stage = self.stages[index]
        healed = [] if stage.start is None else [stage.start]
        sites: list[Site] = []
        while True:
            shares = self.shares(*healed)
            wrong = self.wrong(shares, index, healed)
            if wrong is None or wrong not in stage.hooks:
                return Culprit(stage, tuple(sites), wrong is None, wrong)
            sites.append(Site(wrong, shares[wrong]))
            if wrong in self.fixed:
                return Culprit(stage, tuple(sites), heals=False, after=wrong)
            healed.append(wrong)

    def _last(self) -> int:
        """Index of the last stage at whose beginning the truth does not help."""

        def heals(index: int) -> bool:
            start = self.stages[index].start
            return start is not None and self.wrong(self.shares(start), index) is None

        return first_true(1, len(self.stages), heals) - 1

    def _stage(self, hook: str) -> int:
        return next(i for i, stage in enumerate(self.stages) if hook in stage.hooks)

    def _probes(self) -> tuple[Probed, ...]:
        return tuple(Probed(healed, shares) for healed, shares in self.probes.items())


def _over(share: float) -> bool:
    return not share <= 1
