"""Which engine a draw is made on: chosen by its seed alone, so that a case keeps its name however a run is narrowed.

A suite that asks for ``draw`` beside ``parity`` has one case per draw, on that draw's engine, and not one per engine.
What it does there is the suite's own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.backend import BootConfig

_T = TypeVar("_T")

__all__ = ["ANYTHING", "QUICK", "Axes", "Draw", "deal", "draws"]


@dataclass(frozen=True)
class Axes:
    """What draws are made from. A value that stands there twice comes twice as often.

    Each axis is a deck of its own that is shuffled and dealt, and shuffled again: every few draws all its values came.

    Attributes:
        threads: per mode; 0 is what the engine takes by itself, and shares the engine that other suites booted.
        plain: models that are drawn on one rank only.
    """

    models: tuple[str, ...]
    dtypes: tuple[str, ...]
    modes: tuple[str, ...]
    topologies: tuple[str, ...]
    steps: tuple[int, ...]
    threads: dict[str, tuple[int, ...]]
    plain: tuple[str, ...] = ()


#: One engine that nearly every suite boots, and the same on one thread.
QUICK = Axes(("tiny-llama",), ("fp32",), ("eager",), ("tp1",), (64,), {"eager": (0, 1)})
ANYTHING = Axes(
    models=("tiny-llama",) * 4 + ("smollm2-135m",),
    dtypes=("fp32", "bf16"),
    modes=("eager", "eager", "compiled"),
    topologies=("tp1", "tp1", "tp2", "pp2"),
    steps=(16, 64, 256),
    # A compiled engine takes half a minute to boot, so that few are booted for their threads alone.
    threads={"eager": (1, 2, 3), "compiled": (0, 0, 1)},
    plain=("smollm2-135m",),
)


@dataclass(frozen=True)
class Draw:
    """One draw: its seed, and the engine it is made on.

    Attributes:
        threads: of the engine's arithmetic, per rank; 0: as it boots.
    """

    seed: int
    model: str
    dtype: str
    mode: str
    topology: str
    step: int
    threads: int

    @classmethod
    def of(cls, seed: int, axes: Axes) -> Draw:
        """The draw of a seed."""
        model = _card("model", axes.models, seed)
        mode = _card("mode", axes.modes, seed)
        return cls(
            seed=seed,
            model=model,
            dtype=_card("dtype", axes.dtypes, seed),
            mode=mode,
            topology="tp1" if model in axes.plain else _card("topology", axes.topologies, seed),
            step=_card("step", axes.steps, seed),
            threads=_card("threads", axes.threads[mode], seed),
        )

    def fits(self, config: BootConfig) -> bool:
        """Whether an engine of the run is the one it is made on, but for its threads."""
        here = (
            config.model,
            config.short_dtype,
            config.mode,
            str(config.topology),
            config.max_num_batched_tokens,
        )
        return here == (self.model, self.dtype, self.mode, self.topology, self.step)


def _card(axis: str, values: tuple[_T, ...], seed: int) -> _T:
    """The seed's card of an axis' deck."""
    deal, place = divmod(seed, len(values))
    deck = list(values)
    random.Random(f"{axis}-{deal}").shuffle(deck)  # noqa: S311 - reproducible, not secret
    return deck[place]


def draws(count: int, axes: Axes) -> tuple[Draw, ...]:
    """The draws of the seeds from 0 on."""
    return tuple(Draw.of(seed, axes) for seed in range(count))


def deal(some: Sequence[Draw], configs: Sequence[BootConfig]) -> list[tuple[BootConfig, Draw]]:
    """Each draw with its engine; those whose engine the run does not have are left out."""
    return [
        (config.with_options(threads=draw.threads) if draw.threads else config, draw)
        for draw in some
        for config in configs
        if draw.fits(config)
    ]
