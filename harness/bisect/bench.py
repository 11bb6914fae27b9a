"""One call on one engine, run as often as it takes, with the truth put in where a probe wants it.

The truth is put in at single rows: of each failing request, the first that is wrong at any point. All rows before it
are right at every point, and so are the keys and values it reads: putting right this one row puts right everything it
depends on. Later rows may be wrong for having read it, so they are not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from harness.bisect.stages import LOGITS
from harness.parity.floor import carried
from harness.parity.floor import floor as noise_floor
from harness.parity.gates import judge
from harness.parity.measure import measure, one_thread
from harness.parity.rows import depth_of, ref_of
from harness.parity.verdict import compare
from harness.points import TEMPLATES
from harness.reference.run import teacher_forced
from harness.routing import follow_routes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from harness.check import Parity
    from harness.interventions import Requests
    from harness.parity.rows import Captures
    from harness.parity.types import RowRef
    from harness.reference.references import Pair
    from harness.results import ForwardResult

__all__ = ["MOST_ROWS", "Bench", "Call", "Reading", "Sides", "failing_rows"]

#: Most rows, each of another request, at which the truth is put in at once.
MOST_ROWS = 4


@dataclass(frozen=True)
class Call:
    """What is asked of an engine.

    Attributes:
        prompts: token ids per request.
        new_tokens: greedy steps, from 1.
        intervene: a spec set (or None) per request, or None where nothing is edited.
    """

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int = 1
    intervene: tuple[Mapping[str, Any] | None, ...] | None = None

    def only(self, requests: Sequence[int]) -> Call:
        """The same with some of its requests, in the order given."""
        edits = None if self.intervene is None else tuple(self.intervene[i] for i in requests)
        if edits is not None and not any(edits):
            edits = None
        return replace(self, prompts=tuple(self.prompts[i] for i in requests), intervene=edits)

    def specs(self, request: int) -> Mapping[str, Any]:
        """What is edited in a request."""
        return (self.intervene[request] if self.intervene else None) or {}


@dataclass(frozen=True)
class Reading:
    """One point at the rows that are looked at, by the gate that is furthest beyond its bound.

    Attributes:
        err, bound: relative errors, see :class:`harness.parity.types.Gate`.
        share: the error in multiples of its bound; above 1 it is wrong.
        where: request and position of the worst row.
    """

    err: float
    bound: float
    share: float
    where: RowRef


@dataclass(frozen=True)
class Sides:
    """Engine, truth and realisations of the reference, hook → (n_i, width) per request; logits under ``logits``."""

    engine: Captures
    truth: Captures
    same: Sequence[Captures]

    def at(self, rows: Sequence[RowRef]) -> Sides:
        """Only these rows, each as a request of its own."""

        def cut(side: Captures) -> dict[str, list[torch.Tensor]]:
            return {
                hook: [requests[row.request][row.position : row.position + 1] for row in rows]
                for hook, requests in side.items()
            }

        return Sides(cut(self.engine), cut(self.truth), [cut(one) for one in self.same])


class Bench:
    """A call on an engine, and what it is judged with.

    Args:
        parity: the engine and its reference.
        call: what is run.
        disturbed: whether another call comes before each run, for faults that only a second call shows.
        rows: the rows to look at; by default those that :attr:`rows` finds.
    """

    def __init__(
        self, parity: Parity, call: Call, *, disturbed: bool = False, rows: Sequence[RowRef] | None = None
    ) -> None:
        self.parity = parity
        self.call = call
        self.disturbed = disturbed
        #: Runs so far.
        self.runs = 0
        self._rows = None if rows is None else list(rows)

    @cached_property
    def hooks(self) -> list[str]:
        """Points that both sides have, in forward order."""
        from harness.reference.families import tree_of_config

        known = set(tree_of_config(self.parity.hf_config).points(self.parity.n_layers, TEMPLATES))
        return [hook for hook in self.parity.engine.supported_hook_points if hook in known]

    @cached_property
    def judged(self) -> list[str]:
        """What is judged, in forward order: the points, then the logits."""
        return [*self.hooks, LOGITS]

    @cached_property
    def plain(self) -> ForwardResult:
        """The call as it was."""
        return self._forward(self.call.intervene)

    @cached_property
    def sequences(self) -> list[list[int]]:
        """Token ids of every row, those generated in the plain run among them."""
        return teacher_forced(self.call.prompts, self.plain.new_tokens)

    @cached_property
    def edits(self) -> Requests | None:
        """The call's own edits, as the reference reads them."""
        if self.call.intervene is None:
            return None
        return self.parity.edits(list(self.call.intervene), [len(ids) for ids in self.sequences])

    @cached_property
    def sides(self) -> Sides:
        """The plain run beside its reference, which has all its realisations for what failed with few."""
        engine = self._values(self.plain)
        sides = self._beside(engine, self._pair())
        verdict = self._compare(sides)
        seen: set[object] = set()
        while follow_routes(self.parity, self.sequences, engine, verdict, self.edits, seen=seen):
            sides = self._beside(engine, self._pair())
            verdict = self._compare(sides)
        if verdict.passed:
            return sides
        return self._beside(engine, self._pair(verdict.failed_requests))

    @property
    def rows(self) -> list[RowRef]:
        """The rows to look at: the first wrong one of each of a few failing requests; none where all is right."""
        if self._rows is None:
            self._rows = self._found[:MOST_ROWS]
        return self._rows

    @cached_property
    def failing_requests(self) -> list[int]:
        """Requests with a wrong row."""
        return [row.request for row in self._found]

    def first_wrong(self, request: int) -> RowRef | None:
        """The first wrong row of a request; None where all of its rows are right."""
        return next((row for row in self._found if row.request == request), None)

    @cached_property
    def _found(self) -> list[RowRef]:
        parity = self.parity
        wrong = failing_rows(
            self.sides, dtype=parity.config.dtype, n_layers=parity.n_layers, k=parity.k, noise=parity.noise
        )
        first: dict[int, RowRef] = {}
        for row in sorted((one for rows in wrong.values() for one in rows), key=lambda r: r.position):
            first.setdefault(row.request, row)
        return [first[request] for request in sorted(first)]

    def readings(self, healed: Sequence[str] = ()) -> dict[str, Reading]:
        """How far off each judged point is at :attr:`rows` with the truth put in there at ``healed``.

        Raises:
            CaptureError: the engine contradicts itself.
        """
        if not healed:
            return self._read(self.sides.at(self.rows))
        values = self._values(self._forward(self.healing(healed)))
        # Rows from the first healed one on may have other tokens than the plain run: only rows up to it are compared.
        return self._read(replace(self.sides, engine=values).at(self.rows))

    def row_bounds(self) -> dict[str, float]:
        """What the relative error of the first of :attr:`rows` may be at each point.

        Where that is kept, and only a slice of channels is wrong, half of the error it has: a fix takes it below.
        """
        bounds = {}
        for hook in self._compare(self.sides.at(self.rows[:1])).hooks:
            whole = hook.gates[0]
            bounds[hook.hook] = whole.bound if hook.passed or not whole.passed else whole.err_engine / 2
        return bounds

    def healing(self, healed: Sequence[str]) -> list[dict[str, Any]]:
        """Specs per request: the call's own, and the truth's values at the rows that are looked at."""
        specs = [dict(self.call.specs(request)) for request in range(len(self.call.prompts))]
        for row in self.rows:
            for hook in healed:
                value = self.sides.truth[hook][row.request][row.position]
                specs[row.request][hook] = {"op": "set", "value": value.float(), "pos": row.position}
        return specs

    @property
    def fixed(self) -> list[str]:
        """Where the truth cannot be put in: logits, and points that the call edits itself in these requests."""
        return [LOGITS, *dict.fromkeys(hook for row in self.rows for hook in self.call.specs(row.request))]

    @property
    def edited(self) -> set[str]:
        """Points that the call edits, in whichever request."""
        return {hook for request in range(len(self.call.prompts)) for hook in self.call.specs(request)}

    def own_logits_are_right(self) -> bool | None:
        """Whether the engine's own logits, which no hook and no edit touches, are; None where it gives none."""
        backend = self.parity.config.backend
        if self.call.intervene is not None or (backend != "vllm" and self.call.new_tokens > 1):
            return None
        more = {"max_new_tokens": self.call.new_tokens} if self.call.new_tokens > 1 else {}
        rows = self.parity.engine.raw_logits([list(ids) for ids in self.call.prompts], **more)
        truth, same = ([one[LOGITS] for one in many] for many in ([self.sides.truth], self.sides.same))
        if [len(one) for one in rows] != [len(one) for one in truth[0]]:
            return None
        verdict = compare(
            {LOGITS: rows},
            {LOGITS: truth[0]},
            [{LOGITS: one} for one in same],
            dtype=self.parity.config.dtype,
            n_layers=self.parity.n_layers,
            k=self.parity.k,
            check_dtype=False,
            explain=False,
        )
        return verdict.passed

    def _forward(self, intervene: Any) -> ForwardResult:
        self.runs += 1
        if self.disturbed:  # the same lengths, other values
            others = [list(reversed(ids)) for ids in self.call.prompts]
            self.parity.forward(others, capture=self.hooks, max_new_tokens=self.call.new_tokens)
        return self.parity.forward(
            [list(ids) for ids in self.call.prompts],
            capture=self.hooks,
            intervene=None if intervene is None else list(intervene),
            max_new_tokens=self.call.new_tokens,
            return_logits=True,
        )

    def _values(self, result: ForwardResult) -> dict[str, list[torch.Tensor]]:
        logits = [result.logit_rows(i) for i in range(len(result.lengths))]
        return {**result.rows_by_hook(), LOGITS: logits}

    def _pair(self, more_for: Sequence[int] = ()) -> Pair:
        return self.parity.reference(
            self.sequences, self.hooks, edits=self.edits, logits=True, more_for=more_for
        )

    def _beside(self, engine: Captures, pair: Pair) -> Sides:
        truth, *same = ({**run.captured, LOGITS: run.logits} for run in (pair.truth, *pair.same))
        return Sides(engine, truth, same)

    def _compare(self, sides: Sides) -> Any:
        return compare(
            sides.engine,
            sides.truth,
            sides.same,
            dtype=self.parity.config.dtype,
            n_layers=self.parity.n_layers,
            k=self.parity.k,
            noise=self.parity.noise,
            check_dtype=False,
            explain=False,
        )

    def _read(self, sides: Sides) -> dict[str, Reading]:
        found: dict[str, Reading] = {}
        for hook in self._compare(sides).hooks:
            gate = max(hook.gates, key=lambda g: g.err_engine / g.bound)
            where = self.rows[(gate.where or hook.worst).request]
            found[hook.hook] = Reading(gate.err_engine, gate.bound, gate.err_engine / gate.bound, where)
        return found


@one_thread()
def failing_rows(
    sides: Sides, *, dtype: str, n_layers: int, k: float, noise: Mapping[str, float]
) -> dict[str, list[RowRef]]:
    """The rows that failed gates blame, by point; points that hold are left out."""
    tables = {
        hook: measure(sides.engine[hook], rows, [one[hook] for one in sides.same], dtype=dtype, slices=8)
        for hook, rows in sides.truth.items()
    }
    factors = carried({hook: table.norms for hook, table in tables.items()})
    found: dict[str, list[RowRef]] = {}
    for hook, table in tables.items():
        floor = noise_floor(dtype, depth_of(hook, n_layers))
        judged = judge(table, k=k, floor=floor, noise=noise.get(hook, 0.0), carried=factors[hook])
        if not judged.passed:
            blamed = judged.failing.nonzero().flatten().tolist()
            found[hook] = [ref_of(index, table.lengths) for index in blamed]
    return found
