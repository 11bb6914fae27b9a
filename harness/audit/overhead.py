"""What capturing costs: a backend's forward with every point it declares against the same with none."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.budgets.throughput import Paired, paired
from harness.points import all_points

if TYPE_CHECKING:
    from harness.backend import BootConfig
    from harness.pool import Engine, EnginePool

__all__ = ["Overhead", "measure_overhead"]

#: Prompt lengths of the batch, and of the one prompt that a backend without batches gets.
LENGTHS, ALONE = (5, 60, 20, 120, 40, 90, 12, 33), (120,)
ROUNDS = 9


@dataclass(frozen=True)
class Overhead:
    """One backend's figures, of one model.

    Attributes:
        backend, model: which.
        rows, points: of the batch, and captured.
        plain, captured: median seconds of a forward.
        ratio: median over rounds of the second over the first, and its quartiles.
    """

    backend: str
    model: str
    rows: int
    points: int
    plain: float
    captured: float
    ratio: float
    quartiles: tuple[float, float]


def measure_overhead(pool: EnginePool, config: BootConfig, *, layers: int, vocab: int) -> Overhead:
    """Boot a backend and time both in turn, by its own clock where it has one, without the way back.

    Args:
        pool: boots it.
        config: of it, with the checkpoint's folder.
        layers: of the model.
        vocab: token ids run from 0 to one below this.

    Raises:
        EngineError: it did not boot or run.
    """
    engine = pool.get(config)
    rng = random.Random(0)  # noqa: S311 - reproducible, not secret
    lengths = LENGTHS if engine.capabilities.batch else ALONE
    prompts = [[rng.randrange(3, vocab) for _ in range(n)] for n in lengths]
    points = engine.capabilities.points(all_points(layers))
    found = paired(
        lambda: _seconds(engine, prompts, []), lambda: _seconds(engine, prompts, points), rounds=ROUNDS
    )
    return _overhead(config, found, sum(lengths), len(points))


def _seconds(engine: Engine, prompts: list[list[int]], capture: list[str]) -> float:
    return float(engine.forward(prompts, capture=capture).stats["seconds"])


def _overhead(config: BootConfig, found: Paired, rows: int, points: int) -> Overhead:
    import statistics

    return Overhead(
        backend=config.backend_name,
        model=config.model,
        rows=rows,
        points=points,
        plain=statistics.median(found.base),
        captured=statistics.median(found.other),
        ratio=found.ratio,
        quartiles=found.quartiles,
    )
