"""Faults of every kind at sizes from a tenth down to the noise, one at a time: which does the verdict see, and where.

The verdict is a function given by the caller, so that what is tried is what judges engines (``Parity.verdict_of``) and
nothing built for the trial.

**Noise** is what a fault has to stand out from: the root mean square, over the rows that it touches, of what stands in
their bound, ``max(err(R), floor)``: the reference's own error there, or what the dtype alone may cost. A size over
that noise is the fault's *multiple*; the rule allows k of them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from harness.parity.floor import carried, floor, full_name
from harness.parity.measure import measure, one_thread
from harness.parity.rows import Captures, depth_of
from harness.trial.kinds import KINDS, plant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from harness.parity.types import CaseVerdict
    from harness.trial.kinds import Kind, Layout, Planted

__all__ = ["LARGEST", "SWEEPS", "Sweep", "Tried", "row_noise", "sweep"]

#: The largest size that is planted for its own sake …
LARGEST = 0.1
#: … and the largest that stands for a multiple of the noise: at bf16 that of a deep row can be some hundredths.
_LIMIT = 0.5


@dataclass(frozen=True)
class Sweep:
    """How densely sizes are tried, and how often.

    Attributes:
        multiples: of the noise at the touched rows.
        per_decade: sizes per decade from :data:`LARGEST` down to the largest multiple; 0: only the multiples.
        draws: times each size is planted, with other rows, channels and directions.
        hooks: at most so many hooks per kind, of different kinds of points.
    """

    multiples: tuple[float, ...]
    per_decade: int
    draws: int
    hooks: int

    def sizes(self, noise: float) -> list[float]:
        """Sizes to plant where the noise is ``noise``, the largest first."""
        near = [size for times in self.multiples if (size := times * noise) <= _LIMIT]
        far = []
        size = LARGEST
        while self.per_decade and size > max(near, default=noise):
            far.append(size)
            size *= 10 ** (-1 / self.per_decade)
        return sorted({*near, *far}, reverse=True)


#: By profile of the run.
SWEEPS = {
    "smoke": Sweep((1.5, 3.1, 30.0), per_decade=0, draws=1, hooks=1),
    "full": Sweep((0.5, 1.0, 1.5, 2.0, 2.5, 3.1, 4.0, 6.0), per_decade=1, draws=1, hooks=2),
    "nightly": Sweep((0.5, 1.0, 1.5, 2.0, 2.5, 3.1, 3.5, 4.0, 6.0), per_decade=2, draws=3, hooks=4),
}


@dataclass(frozen=True)
class Tried:
    """One planted fault and what became of it.

    Attributes:
        kind: its name in :data:`~harness.trial.kinds.KINDS`.
        hook: where it begins.
        seed: of its rows, channels and direction.
        size: how far it moves its rows, relative to their norms, root mean square.
        noise: of those rows.
        caught: whether the verdict is red.
        named: the hook the verdict blames first; empty where it is green.
        placed: whether the row the verdict names is one that was touched.
        explained: the known mistake it was taken for; empty where none fits, as none should for most kinds.
    """

    kind: str
    hook: str
    seed: int
    size: float
    noise: float
    caught: bool
    named: str
    placed: bool
    explained: str = ""

    @property
    def multiple(self) -> float:
        """Its size in units of the noise."""
        return self.size / self.noise if self.noise else math.inf

    @property
    def right(self) -> bool:
        """Whether the hook it begins at is the one that is blamed first."""
        return self.named == self.hook

    def to_json(self) -> dict[str, Any]:
        """Plain fields, figures in four digits."""
        return asdict(self) | {"size": float(f"{self.size:.4g}"), "noise": float(f"{self.noise:.4g}")}


@one_thread()
def row_noise(
    truth: Captures,
    same: Sequence[Captures],
    *,
    dtype: str,
    n_layers: int,
    calibrated: Mapping[str, float] | None = None,
) -> dict[str, list[torch.Tensor]]:
    """``max(err(R), floor)`` of every row, hook → one (n_i,) fp64 tensor per request.

    Args:
        truth: T.
        same: realisations of R; the largest of their errors counts.
        dtype: the engine's.
        n_layers: blocks of the model.
        calibrated: hook → R's aggregate error on other rows, as the verdict takes it.
    """
    name = full_name(dtype)
    tables = {
        hook: measure(same[0][hook], truth[hook], [one[hook] for one in same], dtype=name, slices=1)
        for hook in truth
    }
    factors = carried({hook: table.norms for hook, table in tables.items()})
    noise = {}
    for hook, table in tables.items():
        rows = table.informative & ~table.massive
        ordinary = table.same[:, rows if bool(rows.any()) else slice(None)]
        pooled = max(float(ordinary.square().mean(dim=1).sqrt().max()), (calibrated or {}).get(hook, 0.0))
        least = max(pooled, floor(name, depth_of(hook, n_layers))) * factors[hook]
        noise[hook] = list(torch.maximum(table.same.amax(dim=0), least).split(list(table.lengths)))
    return noise


def sweep(
    clean: Mapping[str, Sequence[torch.Tensor]],
    noise: Mapping[str, Sequence[torch.Tensor]],
    judge: Callable[[dict[str, list[torch.Tensor]]], CaseVerdict],
    layout: Layout,
    how: Sweep,
    *,
    kinds: Sequence[Kind] = KINDS,
) -> Iterator[Tried]:
    """Plant one fault after the other.

    Args:
        clean: captures of a sound engine: hook → one (n_i, width) tensor per request.
        noise: from :func:`row_noise`.
        judge: the verdict on captures.
        layout: of the call.
        how: which sizes, how often, at how many hooks.
        kinds: of faults.
    """
    for number, kind in enumerate(kinds):
        for hook in _hooks(kind, list(clean), number, how.hooks):
            for draw in range(how.draws):
                seed = 1000 * number + draw
                probe = plant(kind, clean, hook, LARGEST, layout, seed=seed)
                if not probe.rows:
                    continue
                level = _level(noise[hook], probe)
                for size in how.sizes(level):
                    planted = plant(kind, clean, hook, size, layout, seed=seed)
                    yield _tried(kind, hook, seed, planted, level, judge(planted.captured))


def _hooks(kind: Kind, hooks: list[str], number: int, count: int) -> list[str]:
    """``count`` of the hooks a kind fits, spread over the model, starting elsewhere for each kind."""
    fitting = [hook for hook in hooks if kind.fits(hook)]
    if kind.drifts:
        return fitting[:1]
    begin = number * 3 % len(fitting)
    stride = max(len(fitting) // count, 1)
    return list(dict.fromkeys(fitting[(begin + stride * i) % len(fitting)] for i in range(count)))


def _level(noise: Sequence[torch.Tensor], planted: Planted) -> float:
    touched = torch.cat([noise[request][mask] for request, mask in planted.rows.items()])
    return float(touched.square().mean().sqrt())


def _tried(kind: Kind, hook: str, seed: int, planted: Planted, noise: float, verdict: CaseVerdict) -> Tried:
    found = verdict.divergence
    named = next((one.hook for one in verdict.hooks if not one.passed), "")
    placed = False
    if found is not None:
        mask = planted.rows.get(found.where.request)
        placed = mask is not None and bool(mask[found.where.position])
    explained = (found.explanation or "") if found is not None else ""
    return Tried(kind.name, hook, seed, planted.size, noise, not verdict.passed, named, placed, explained)
