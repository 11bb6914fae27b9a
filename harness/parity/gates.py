"""The rule, applied to one hook: ``err(E) ≤ k · max(err(R), floor)``, and all gates must hold.

A gate each for the aggregate over ordinary rows, the worst ordinary row, the worst channel slice, and, where there are
rows with massive activations, for the worst of those and for the worst of those without its massive channels. Each
is blind to what another sees: an aggregate to 1 % of rows that are wildly wrong, a row to a fault in a few channels, a
row with a giant channel to everything else in it.

What stands for ``err(R)`` in a row's or a slice's bound is never less than R's aggregate. One row of R is one draw of
noise, and where it happened to come out small it says little about what the next draw may be; the aggregate says how
large draws are. With several realisations of R the largest counts, for the same reason. A case of one row has no
aggregate worth the name, so R's noise may also be measured beforehand, on other rows of the same hook (``noise``). And
where a row's residual stream has shrunk by cancellation, the aggregate and the floor count as often as it has shrunk,
see :func:`harness.parity.floor.carried`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from harness.parity.metrics import aggregate, slice_errors, trusted
from harness.parity.types import Gate

if TYPE_CHECKING:
    from harness.parity.measure import RowTable

__all__ = ["AGGREGATE", "DTYPE", "MASSIVE", "MASSIVE_REST", "ROW", "SLICE", "Judged", "dtype_gate", "judge"]

AGGREGATE = "aggregate"
ROW = "worst row"
SLICE = "worst slice"
MASSIVE = "massive rows"
MASSIVE_REST = "massive rows, other channels"
#: A bound above this share of the row's norm lets a wrong row through; such rows are counted and noted.
VAGUE = 0.5
DTYPE = "dtype"  #: only there when it failed


@dataclass(frozen=True)
class Judged:
    """The gates of one hook, and the rows to blame for those that failed."""

    gates: tuple[Gate, ...]  #: the aggregate first
    failing: torch.Tensor  #: (N,) bool; empty where all passed
    n_massive: int
    n_vague: int  #: rows that might be off by more than VAGUE of their norm and still pass

    @property
    def passed(self) -> bool:
        """Whether every gate held."""
        return all(gate.passed for gate in self.gates)


@dataclass(frozen=True)
class _Rule:
    """The numbers every gate of a hook shares."""

    table: RowTable
    k: float
    floor: float
    carried: torch.Tensor  #: (N,) how many times larger each row's residual stream has been than it is

    def gate(self, name: str, engine: float, reference: float, carried: float) -> Gate:
        floor = self.floor * carried
        base = max(reference, floor)
        return Gate(
            name=name,
            err_engine=engine,
            err_reference=reference,
            floor=floor,
            bound=self.k * base,
            required_k=engine / base,
            passed=engine <= self.k * base,
        )

    def row_gate(
        self, name: str, engine: torch.Tensor, same: torch.Tensor, rows: torch.Tensor, pooled: float
    ) -> tuple[Gate, torch.Tensor]:
        """Judge each of ``rows`` (N, bool) by its own bound; return the worst one's gate and which failed (N, bool)."""
        reference = torch.maximum(same.amax(dim=0), pooled * self.carried)
        base = torch.maximum(reference, self.floor * self.carried)
        needed = torch.where(rows, engine / base, -1.0)
        worst = int(needed.argmax())
        gate = self.gate(name, float(engine[worst]), float(reference[worst]), float(self.carried[worst]))
        return _at_row(gate, self.table, worst), rows & (engine > self.k * base)


def _at_row(gate: Gate, table: RowTable, index: int) -> Gate:
    return Gate(**{**vars(gate), "where": table.ref(index)})


def _pooled(same: torch.Tensor, rows: torch.Tensor) -> float:
    """Aggregate over ``rows`` of the worst realisation."""
    return max(aggregate(one[rows]) for one in same)


def _slice_gate(rule: _Rule, rows: torch.Tensor, pooled: float) -> tuple[Gate, torch.Tensor]:
    """The worst channel slice, and the rows that exceed the bound within it (N, bool)."""
    table = rule.table
    truth = table.truth_slices[rows]
    engine = slice_errors(table.engine_slices[rows], truth, table.spans)
    reference = torch.stack(
        [slice_errors(trusted(one[rows]), truth, table.spans) for one in table.same_slices]
    )
    carried = aggregate(rule.carried[rows])
    base = reference.amax(dim=0).clamp(min=pooled * carried)
    worst = int((engine / base.clamp(min=rule.floor * carried)).argmax())
    gate = rule.gate(SLICE, float(engine[worst]), float(base[worst]), carried)
    share = truth[:, worst].mean()
    energy = table.engine_slices[:, worst]
    # In a slice that is zero in the truth any energy is infinitely much, and none is NaN, which exceeds nothing.
    exceeding = rows & ((energy / share).sqrt() > gate.bound)
    return Gate(**{**vars(gate), "slice": table.spans[worst]}), exceeding


def judge(
    table: RowTable, *, k: float, floor: float, noise: float = 0.0, carried: torch.Tensor | None = None
) -> Judged:
    """Apply the rule to one hook.

    Args:
        table: its figures.
        k: how many times the reference's own error an engine may make.
        floor: from :func:`harness.parity.floor.floor`.
        noise: R's aggregate error at this hook, measured beforehand on enough rows; 0 where it was not.
        carried: (N,) how many times each row's noise counts, from :func:`harness.parity.floor.carried`.
    """
    rule = _Rule(table, k, floor, torch.ones_like(table.norms) if carried is None else carried)
    informative = table.informative
    massive = table.massive
    ordinary = informative & ~massive
    if not bool(ordinary.any()):  # a prompt that is nothing but its massive first token
        ordinary = informative if bool(informative.any()) else torch.ones_like(informative)
    same = trusted(table.same)
    pooled = max(noise, _pooled(same, ordinary))
    factor = aggregate(rule.carried[ordinary])
    overall = rule.gate(AGGREGATE, aggregate(table.engine[ordinary]), pooled * factor, factor)
    row, failing = rule.row_gate(ROW, table.engine, same, ordinary, pooled)
    channels, exceeding = _slice_gate(rule, ordinary, pooled)
    gates = [overall, row, channels]
    if bool(massive.any()):
        pooled_full = max(pooled, _pooled(same, massive))
        full, bad = rule.row_gate(MASSIVE, table.engine, same, massive, pooled_full)
        same_rest = trusted(table.same_rest)
        pooled_rest = max(pooled, _pooled(same_rest, massive))
        rest, bad_rest = rule.row_gate(MASSIVE_REST, table.engine_rest, same_rest, massive, pooled_rest)
        gates += [full, rest]
        failing = failing | bad | bad_rest
    if not bool(failing.any()) and not all(gate.passed for gate in gates):
        # Every row keeps its own bound, and yet together they do not: the slice's rows, or all of them.
        failing = exceeding if not channels.passed and bool(exceeding.any()) else ordinary
    bases = torch.maximum(torch.maximum(same.amax(dim=0), pooled * rule.carried), floor * rule.carried)
    vague = informative & (k * bases > VAGUE)
    return Judged(tuple(gates), failing, int(massive.sum()), int(vague.sum()))


def dtype_gate(k: float, floor: float) -> Gate:
    """The gate of a hook whose captures are not of the engine's dtype: failed whatever the values."""
    return Gate(DTYPE, math.inf, 0.0, floor, k * floor, math.inf, passed=False)
