"""Made-up captures that behave like a transformer's: for testing verdicts, demonstrating reports, and trying faults.

A residual stream whose norm grows from block to block; a first row per request with two massive channels; an engine and
references whose rounding errors are independent of each other, differ from row to row as conditioning does, and are
carried on by the same linear maps, so that errors are correlated between hooks and have few effective dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from harness.parity.floor import full_name, unit_roundoff
from harness.parity.measure import one_thread
from harness.points import all_points

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Stream", "stream"]

#: Own error of one block in unit roundoffs, so that err(R) comes out as measured on SmolLM2 (see ``floor``).
_NOISE = {"float32": 5.0, "float16": 0.8, "bfloat16": 0.8, "float64": 5.0}
_GROWTH = 1.15
_MASSIVE = 400.0
_MASSIVE_CHANNELS = (5, 17)
#: How much larger than the others' a fragile row's error is.
_FRAGILITY = 10.0
#: Directions through which a block passes its input's error on.
_RANK = 8


@dataclass(frozen=True)
class Stream:
    """One synthetic case.

    Attributes:
        engine: E, at the engine's dtype.
        truth: T, one dtype wider.
        same: realisations of R.
        dtype: torch's name of the engine's dtype.
        n_layers: number of blocks.
        lengths: rows per request.
    """

    engine: dict[str, list[torch.Tensor]]
    truth: dict[str, list[torch.Tensor]]
    same: list[dict[str, list[torch.Tensor]]]
    dtype: str
    n_layers: int
    lengths: tuple[int, ...]


@dataclass
class _Side:
    """One computation: its residual stream and how noisy it is. The truth's noise is 0."""

    noise: float
    random: torch.Generator
    stream: torch.Tensor
    captured: dict[str, torch.Tensor]

    def gauss(self, *shape: int) -> torch.Tensor:
        """Independent standard normal numbers of this side's own, fp64."""
        return torch.randn(shape, generator=self.random, dtype=torch.float64)

    def emit(self, hook: str, exact: torch.Tensor, carried: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Capture ``exact`` plus the error carried in plus this block's own, (N, width), and return it."""
        value = exact + carried + self.noise * rows * exact.abs() * self.gauss(*exact.shape)
        self.captured[hook] = value
        return value


@one_thread()
def stream(
    seed: int,
    *,
    dtype: str = "float32",
    width: int = 64,
    n_layers: int = 4,
    lengths: Sequence[int] = (9, 24, 1),
    noise_ratio: float = 1.0,
    realisations: int = 1,
    fragile_rows: int = 0,
) -> Stream:
    """Make one case.

    Args:
        seed: of everything.
        dtype: the engine's.
        width: channels, at least 20.
        n_layers: blocks, at least 2; the second makes the first row of each request massive.
        lengths: rows per request.
        noise_ratio: the engine's noise over the reference's, before both are rounded to ``dtype``.
        realisations: how many references.
        fragile_rows: rows whose second block hangs on one neuron: a single random number decides their error.
    """
    name = full_name(dtype)
    random = torch.Generator().manual_seed(seed)
    count = sum(lengths)

    def gauss(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    unit = _NOISE[name] * unit_roundoff(name)
    embedding = gauss(count, width)
    noises = [0.0, noise_ratio * unit, *[unit] * realisations]
    sides = [
        _Side(n, torch.Generator().manual_seed(1000 * seed + i), embedding, {}) for i, n in enumerate(noises)
    ]
    for side in sides:
        side.captured["embed.hook_out"] = embedding
    conditioning = (0.4 * gauss(count, 1)).exp()
    fragile = torch.randperm(count, generator=random)[:fragile_rows]
    firsts = torch.tensor([sum(lengths[:i]) for i, n in enumerate(lengths) if n])
    for block in range(n_layers):
        for part in ("attn", "mlp"):
            exact = 0.4 * _GROWTH**block * gauss(count, width)
            if (block, part) == (1, "mlp"):
                exact[firsts[:, None], torch.tensor(_MASSIVE_CHANNELS)] = _MASSIVE * (
                    1 + 0.01 * gauss(len(firsts), 1)
                )
            passing = 0.3 * gauss(width, _RANK) @ gauss(_RANK, width) / (width * _RANK) ** 0.5
            neuron = gauss(width)
            before = sides[0].stream
            rms, size = _rms(before), _rms(exact).median()
            for side in sides:
                # A block reads the normalised stream, and so passes relative errors on.
                carried = size * ((side.stream - before) / rms) @ passing
                if (block, part) == (1, "mlp") and fragile_rows:
                    carried[fragile] += _FRAGILITY * side.noise * side.gauss(len(fragile), 1) * neuron
                side.stream = side.stream + side.emit(
                    f"blocks.{block}.{part}.hook_out", exact, carried, conditioning
                )
        for side in sides:
            side.captured[f"blocks.{block}.hook_out"] = side.stream
    for side in sides:
        side.captured["ln_final.hook_normalized"] = side.stream / _rms(side.stream)
    wider = torch.float64 if name in {"float32", "float64"} else torch.float32
    truth, engine, *same = (
        _split(side, wider if i == 0 else getattr(torch, name), n_layers, lengths)
        for i, side in enumerate(sides)
    )
    return Stream(engine, truth, same, name, n_layers, tuple(lengths))


def _rms(rows: torch.Tensor) -> torch.Tensor:
    return rows.square().mean(dim=1, keepdim=True).sqrt()


def _split(
    side: _Side, dtype: torch.dtype, n_layers: int, lengths: Sequence[int]
) -> dict[str, list[torch.Tensor]]:
    return {
        hook: [rows.contiguous() for rows in side.captured[hook].to(dtype).split(list(lengths))]
        for hook in all_points(n_layers)
    }
