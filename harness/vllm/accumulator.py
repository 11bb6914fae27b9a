"""What one rank has captured since it was armed: rows as they came, sorted out when they are read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from harness.results import Segment, join_segments

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

__all__ = ["Accumulator", "StepRows"]


@dataclass(frozen=True)
class StepRows:
    """One request's share of some rows: ``[row, row + count)`` hold positions ``[start, start + count)``."""

    request: str
    start: int
    count: int
    row: int = 0


@dataclass
class Accumulator:
    """Captured rows of the armed hooks.

    Attributes:
        names: hooks being captured; empty means idle.
        steps: what was taken out of the step buffers each time, hook → (n_tokens, width) on CPU.
        shares: request → (index into ``steps``, its rows), in the order they were computed.
        waiting: whose rows still lie in the step buffers, from the first on.
        filled: how many those are.
    """

    names: tuple[str, ...] = ()
    steps: list[dict[str, torch.Tensor]] = field(default_factory=list)
    shares: dict[str, list[tuple[int, StepRows]]] = field(default_factory=dict)
    waiting: list[StepRows] = field(default_factory=list)
    filled: int = 0

    @property
    def armed(self) -> bool:
        """Whether the next step is kept."""
        return bool(self.names)

    def arm(self, names: Iterable[str]) -> None:
        """Forget everything and keep ``names`` from the next step on."""
        self.reset()
        self.names = tuple(names)

    def reset(self) -> None:
        """Forget everything and go idle."""
        self.names = ()
        self.steps = []
        self.shares = {}
        self.waiting, self.filled = [], 0

    def release(self, name: str) -> None:
        """Let go of one hook's rows; they cannot be read again."""
        for step in self.steps:
            step.pop(name, None)

    def wait(self, shares: Iterable[StepRows], total: int) -> None:
        """A step of so many tokens has put its rows behind those that wait already; ``shares`` count from its first."""
        self.waiting += [replace(share, row=self.filled + share.row) for share in shares]
        self.filled += total

    def add(self, rows: Mapping[str, torch.Tensor]) -> None:
        """Keep what waited. ``rows`` must be copies: the step buffers they came from are written again."""
        index = len(self.steps)
        self.steps.append(dict(rows))
        for share in self.waiting:
            self.shares.setdefault(share.request, []).append((index, share))
        self.waiting, self.filled = [], 0

    def n_rows(self, request: str) -> int:
        """One past the highest captured position of a request."""
        return max(share.start + share.count for _, share in self.shares[request])

    def read(self, request: str, name: str, n_rows: int | None = None) -> torch.Tensor:
        """Rows of one request at one hook, (n_rows, width).

        Raises:
            CaptureError: a row below ``n_rows`` was never captured.
        """
        segments = (
            Segment(share.start, self.steps[index][name][share.row : share.row + share.count])
            for index, share in self.shares.get(request, [])
        )
        wanted = self.n_rows(request) if n_rows is None else n_rows
        return join_segments(segments, wanted, what=f"request {request!r}, {name}")
