"""What one rank has captured since it was armed: whole steps as they came, sorted out when they are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.results import Segment, join_segments

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

__all__ = ["Accumulator", "StepRows"]


@dataclass(frozen=True)
class StepRows:
    """One request's share of a step: rows ``[row, row + count)`` hold positions ``[start, start + count)``."""

    request: str
    start: int
    count: int
    row: int = 0


@dataclass
class Accumulator:
    """Captured steps of the armed hooks.

    Attributes:
        names: hooks being captured; empty means idle.
        steps: per step, hook → (n_tokens, width) on CPU.
        shares: request → (step index, its rows), in the order they were computed.
    """

    names: tuple[str, ...] = ()
    steps: list[dict[str, torch.Tensor]] = field(default_factory=list)
    shares: dict[str, list[tuple[int, StepRows]]] = field(default_factory=dict)

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

    def release(self, name: str) -> None:
        """Let go of one hook's rows; they cannot be read again."""
        for step in self.steps:
            step.pop(name, None)

    def add(self, rows: Mapping[str, torch.Tensor], shares: Sequence[StepRows]) -> None:
        """Keep one step. ``rows`` must be copies: the step buffers they came from are written again."""
        index = len(self.steps)
        self.steps.append(dict(rows))
        for share in shares:
            self.shares.setdefault(share.request, []).append((index, share))

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
