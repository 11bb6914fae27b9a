"""Mixtures of experts: where an engine sends a token to other experts than the truth, and noise may decide that.

A token's experts are a choice made on rounded numbers. Where the truth itself prefers one expert over another by less
than the router's noise, an engine may choose either, and is then judged against the truth that chooses likewise; the
case's record tells which token it was, by what margin, and what noise explains. A choice that noise does not explain
stays an error, and so does whatever the chosen experts did not compute.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from harness.parity.logit_metrics import largest_error
from harness.points import MLP_IN, MLP_OUT, HookPoint
from harness.reference.experts import Choice

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from harness.interventions import Requests
    from harness.judging import Judged
    from harness.parity.rows import Captures
    from harness.parity.types import CaseVerdict, HookVerdict
    from harness.reference.references import Pair
    from harness.reference.run import ReferenceRun

__all__ = ["LOGITS", "follow_routes", "settle_routes"]

#: Under this name logits stand where hooks do.
LOGITS = "logits"
#: A route is the engine's if it takes away this share of a row's error: experts differ by far more than rounding.
_EXPLAINED = 0.5
#: Most tokens of one sequence whose routes are followed; beyond it the routing itself is wrong.
_MOST = 32
#: So many of them are named in the record.
_MOST_TOLD = 8


def follow_routes(
    parity: Judged,
    sequences: Sequence[Sequence[int]],
    rows: Captures,
    verdict: CaseVerdict,
    edits: Requests | None = None,
    *,
    seen: set[object],
) -> bool:
    """Look whether rows of a failed comparison went to other experts within noise, and follow them there.

    Where the inputs of the routers are captured, they say where each token of a failed request went. Otherwise, or
    where that leads nowhere, its worst row at the first hook that failed is tried with each near tie decided the other
    way. Ask again after the next comparison.

    Args:
        parity: the engine on trial; its reference goes that way from now on, for these sequences and their edits.
        sequences: token ids that the reference runs.
        rows: the engine's, hook → per sequence (n, width); logits (n, d_vocab) under :data:`LOGITS`.
        verdict: what the comparison of ``rows`` concluded.
        edits: per sequence.
        seen: empty before the first time; which routes were followed so far. Copies of one sequence that went different
            ways, which one reference cannot follow both, end it there.

    Returns:
        Whether the comparison is worth another look. Always False for models without experts.
    """
    if verdict.passed or not parity.routes.exist:
        return False
    hook = next(one for one in verdict.hooks if not one.passed)
    found: list[tuple[int, _Tie]] = []
    for number in sorted({hook.worst.request, *verdict.failed_requests}):
        one = _one(number, sequences, rows, edits)
        ties = _routes_said(parity, *one) or _route_tried(parity, *one, hook, hook.row_errors[number])
        found += _taken(parity, number, one, ties)
    if not _told(parity, found):
        return False
    routes = tuple(parity.routes.taken(sequences, edits))
    again = routes in seen
    seen.add(routes)
    return not again


def settle_routes(
    parity: Judged, sequences: Sequence[Sequence[int]], rows: Captures, edits: Requests | None = None
) -> None:
    """Follow every token that went to other experts within noise, failed or not.

    A flip to an expert of little weight may hide in a row's noise, and is large beside the change an edit makes.
    """
    if parity.routes.exist:
        found: list[tuple[int, _Tie]] = []
        for number in range(len(sequences)):
            one = _one(number, sequences, rows, edits)
            found += _taken(parity, number, one, _routes_said(parity, *one))
        _told(parity, found)


#: Token ids, edits and rows of one sequence.
_One = tuple["Sequence[int]", "Requests | None", "Mapping[str, torch.Tensor]"]


def _one(number: int, sequences: Sequence[Sequence[int]], rows: Captures, edits: Requests | None) -> _One:
    here = None if edits is None else [edits[number]]
    return sequences[number], here, {name: some[number] for name, some in rows.items()}


def _taken(parity: Judged, number: int, one: _One, ties: Sequence[_Tie]) -> list[tuple[int, _Tie]]:
    """Have the reference of one sequence follow these from now on."""
    if ties:
        parity.routes.take(one[0], one[1], tuple(tie.choice for tie in ties))
    return [(number, tie) for tie in ties]


def _told(parity: Judged, found: Sequence[tuple[int, _Tie]]) -> bool:
    """Put what was followed into the record; whether anything was."""
    if found:
        parity.note(
            "routing",
            followed=len(found),
            largest_share_of_what_noise_explains=max(tie.share(parity.k) for _, tie in found),
            tokens=[f"request {number}, {tie}" for number, tie in found[:_MOST_TOLD]],
            claim=f"a margin within 2 x {parity.k:g} times the reference's own noise is decided by rounding",
        )
    return bool(found)


@dataclasses.dataclass(frozen=True)
class _Tie:
    """A choice that noise may decide: the truth's margin and the most a realisation's logit is off, both in logits."""

    choice: Choice
    margin: float
    noise: float

    def share(self, k: float) -> float:
        """Margin over what noise explains."""
        explained = 2 * k * self.noise
        return self.margin / explained if explained else 0.0 if self.margin == 0 else float("inf")

    def __str__(self) -> str:
        block, position, experts = self.choice
        figures = f"margin {self.margin:.2e}, noise {self.noise:.2e}"
        return f"block {block} position {position}: to experts {experts}, {figures}"


def _routes_said(
    parity: Judged, ids: Sequence[int], edits: Requests | None, rows: Mapping[str, torch.Tensor]
) -> list[_Tie]:
    """Where the engine must have gone by what its routers were given; empty if that is not captured, or was asked."""
    if parity.routes.taken([ids], edits)[0]:
        return []
    routing = parity.reference([ids], [], edits=edits).truth.routing[0]
    names = [MLP_OUT.format(i=i) for i in routing]
    if not {*names, *(MLP_IN.format(i=i) for i in routing)} <= set(rows):
        return []
    said = []
    for i, route in routing.items():
        logits = rows[MLP_IN.format(i=i)].double() @ parity.routes.router(i).double().T
        experts = logits.topk(route.experts.shape[1], dim=1).indices
        said += [
            Choice(i, position, tuple(sorted(here)))
            for position, (here, there) in enumerate(
                zip(experts.tolist(), route.experts.tolist(), strict=True)
            )
            if set(here) != set(there)
        ]
    if not said or len(said) > _MOST:
        return []
    pair = parity.reference([ids], names, edits=edits)
    ways = parity.reference([ids], names, edits=edits, choices=[tuple(said)])

    def explains(choice: Choice) -> bool:
        hook = MLP_OUT.format(i=choice.block)
        row = rows[hook][choice.position].double()
        before, after = (
            float((row - one.truth.captured[hook][0][choice.position].double()).norm())
            for one in (pair, ways)
        )
        return after < before * _EXPLAINED

    ties = [_tie(ways, choice) for choice in said if explains(choice)]
    return [tie for tie in ties if tie.share(parity.k) <= 1]


def _route_tried(
    parity: Judged,
    ids: Sequence[int],
    edits: Requests | None,
    rows: Mapping[str, torch.Tensor],
    hook: HookVerdict,
    errors: Sequence[float],
) -> list[_Tie]:
    """What is taken, and the near tie at a hook's worst row that takes most of its error away; empty if none does."""
    logits = hook.hook == LOGITS
    names = [] if logits else [hook.hook]
    (taken,) = parity.routes.taken([ids], edits)
    position = max(range(len(errors)), key=errors.__getitem__)
    row = rows[hook.hook][position].double()

    def error(run: ReferenceRun) -> float:
        truth = run.logits[0] if logits else run.captured[hook.hook][0]
        return float((row - truth[position].double()).norm())

    pair = parity.reference([ids], names, edits=edits, logits=logits)
    best = error(pair.truth) * _EXPLAINED
    found: list[_Tie] = []
    for tie in _ties(pair, hook.hook, position, parity.k):
        # What was chosen in later blocks was chosen on another truth, and is found again if it still holds.
        kept = [c for c in taken if c.block <= tie.choice.block and c[:2] != tie.choice[:2]]
        if len(kept) >= _MOST:
            continue
        way = parity.reference(
            [ids], names, edits=edits, jitters=0, choices=[(*kept, tie.choice)], logits=logits
        )
        if (left := error(way.truth)) < best:
            best, found = left, [*(_tie(pair, choice) for choice in kept), tie]
    return found


def _tie(pair: Pair, choice: Choice) -> _Tie:
    """By how much the truth prefers others to the experts of a choice, and its router's noise there."""
    route = pair.truth.routing[0][choice.block]
    logits = route.logits[choice.position].double()
    chosen = list(choice.experts)
    others = [expert for expert in range(len(logits)) if expert not in chosen]
    noise = largest_error([run.routing[0][choice.block].logits[choice.position] for run in pair.same], logits)
    return _Tie(choice, max(float(logits[others].max() - logits[chosen].min()), 0.0), noise)


def _ties(pair: Pair, hook: str, position: int, k: float) -> Iterator[_Tie]:
    """The near ties at a position, in blocks up to that of ``hook``, one expert exchanged for another."""
    block = None if hook == LOGITS else HookPoint.parse(hook).block
    for i, route in sorted(pair.truth.routing[0].items()):
        if block is not None and i > block:
            return
        chosen = set(route.experts[position].tolist())
        for out in sorted(chosen):
            for into in sorted(set(range(route.logits.shape[1])) - chosen):
                tie = _tie(pair, Choice(i, position, tuple(sorted({*chosen, into} - {out}))))
                if tie.share(k) <= 1:
                    yield tie
