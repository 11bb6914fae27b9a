"""What a comparison concludes: plain frozen records, JSON-able, shared by the verdict, the store and the report.

Every error here is relative, ``err(X) = ‖X - T‖₂ / ‖T‖₂`` of one row (or, for a hook, the root mean square of that over
its rows), where T is the truth, R the reference at the engine's dtype and E the engine.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["CaseVerdict", "Divergence", "Gate", "HookVerdict", "RowRef"]


@dataclass(frozen=True)
class RowRef:
    """One row of one request."""

    request: int  #: index in the batch
    position: int  #: absolute position in the sequence


@dataclass(frozen=True)
class Gate:
    """One of the conditions that must all hold for a hook to pass.

    ``passed`` is ``err_engine <= bound`` with ``bound = k * max(err_reference, floor)``. Errors are infinite where a
    value is not finite; of the gates of rows the one that needs the largest k is kept.
    """

    name: str  #: ``aggregate``, ``worst row``, ``worst slice``, ``massive rows``, ``massive rows, other channels``
    err_engine: float
    #: The reference's own error on the same data: the largest of its realisations, for a row or slice at least its
    #: aggregate.
    err_reference: float
    floor: float  #: what the dtype alone can cost at this depth
    bound: float
    required_k: float  #: the smallest k that would have passed
    passed: bool
    where: RowRef | None = None  #: for row gates
    slice: tuple[int, int] | None = None  #: for slice gates, channels [from, to)


@dataclass(frozen=True)
class HookVerdict:
    """One hook over all rows of a case."""

    hook: str
    depth: int  #: blocks of rounding the value carries
    passed: bool
    gates: tuple[Gate, ...]
    n_rows: int
    n_massive: int  #: rows with massive activations, judged by their own gates
    max_abs: float  #: largest |E - T|
    worst: RowRef  #: the row of the largest relative error
    worst_channel: int  #: the channel of the largest |E - T| in that row
    min_cosine: float  #: smallest cosine between an E row and its T row
    max_ulps: float  #: largest |E - T| in units in the last place of the engine's dtype at T's magnitude
    amplification: float | None = (
        None  #: err_engine of this hook over that of the hook before it in forward order
    )
    row_errors: tuple[tuple[float, ...], ...] = ()  #: err(E) per request and position, for the heat map

    @property
    def err_engine(self) -> float:
        """Aggregate error of the engine, the figure of the error-over-depth curve."""
        return self.gates[0].err_engine

    @property
    def err_reference(self) -> float:
        """Aggregate error of the reference."""
        return self.gates[0].err_reference

    @property
    def floor(self) -> float:
        """Noise floor of the aggregate gate."""
        return self.gates[0].floor

    @property
    def worst_gate(self) -> Gate:
        """The gate that needs the largest k."""
        return max(self.gates, key=lambda gate: gate.required_k)


@dataclass(frozen=True)
class Divergence:
    """Where a failure began, and the known mistake it looks like."""

    hook: str  #: first hook in forward order that failed
    pattern: str  #: ``one row``, ``rows from 64 on``, ``all rows``, ``the prompt's rows``, …
    where: RowRef  #: its first failing row
    last_good: str | None  #: the failing hook's predecessor
    explanation: str | None  #: "equals blocks.5.hook_out of the reference", None where nothing known fits
    match_error: float | None = None  #: relative distance to what the explanation names
    sentence: str = ""  #: all of it in one line for a person


@dataclass(frozen=True)
class CaseVerdict:
    """All hooks of one case."""

    passed: bool
    k: float
    dtype: str  #: of the engine
    hooks: tuple[HookVerdict, ...]  #: in forward order
    divergence: Divergence | None = None
    notes: tuple[str, ...] = field(default=())  #: what else a person should know, recorded and never asserted
    failed_requests: tuple[int, ...] = ()  #: those with a row that a gate blames

    @property
    def worst(self) -> HookVerdict:
        """The hook that needs the largest k."""
        return max(self.hooks, key=lambda hook: hook.worst_gate.required_k)

    def to_json(self) -> dict[str, Any]:
        """Nested plain dicts, ready for ``json.dumps``."""
        return asdict(self)
