"""Where a failure began, which rows it is in, and which known mistake it looks like, told in one line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.parity import candidates, moves
from harness.parity.gates import DTYPE
from harness.parity.patterns import ONE, channels, describe
from harness.parity.rows import ref_of
from harness.parity.scene import Clues, Match, Scene, sample, take
from harness.parity.types import Divergence, HookVerdict, RowRef

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from harness.parity.rows import Captures

__all__ = ["Clues", "Failure", "diverge", "explain"]

_SEARCHES = (
    candidates.empty_rows,
    moves.moved_rows,
    moves.stale_rows,
    candidates.unedited_rows,
    candidates.leaked_edits,
    candidates.other_hooks,
    candidates.sums,
    candidates.weighted_norms,
    candidates.mixed_parts,
    candidates.factors,
)
#: Explanations this many times farther than the nearest one are dropped before the most specific is chosen.
_MUCH_FARTHER = 10.0


@dataclass(frozen=True)
class Failure:
    """A case that failed, before it is explained."""

    hooks: tuple[HookVerdict, ...]  #: all of the case, in forward order
    first: int  #: index of the first that failed
    failing: torch.Tensor  #: (N,) bool, its failing rows
    lengths: tuple[int, ...]  #: rows per request
    dtype: str  #: of the engine


def explain(scene: Scene) -> Match | None:
    """Try every known explanation; of those that fit about equally well the most specific is returned."""
    found = [match for search in _SEARCHES for match in search(scene)]
    if not found:
        return None
    nearest = max(min(match.error for match in found), scene.floor)
    fitting = [match for match in found if match.error <= _MUCH_FARTHER * nearest]
    return min(fitting, key=lambda match: (match.rank, match.error))


def diverge(engine: Captures, truth: Captures, failure: Failure, clues: Clues) -> Divergence:
    """Locate and explain the first failure of a case.

    Args:
        engine: E.
        truth: T, with any further hooks that may serve as explanation.
        failure: what failed.
        clues: what else is known.
    """
    verdict = failure.hooks[failure.first]
    last_good = failure.hooks[failure.first - 1].hook if failure.first else None
    if not bool(failure.failing.any()):  # only its dtype is wrong
        found = next(
            str(t.dtype).removeprefix("torch.") for t in engine[verdict.hook] if not _is(t, failure.dtype)
        )
        explanation = f"is captured as {found} where the engine runs {failure.dtype}"
        where = RowRef(0, 0)
        text = _sentence(failure, "all rows", where, "", last_good, Match(explanation, 0.0, 0), told=False)
        return Divergence(verdict.hook, "all rows", where, last_good, explanation, None, text)
    refs = [ref_of(index, failure.lengths) for index in failure.failing.nonzero().flatten().tolist()]
    pattern = describe(refs, failure.lengths, prompt_lengths=clues.prompt_lengths, step=clues.step)
    scene = _scene(engine, truth, failure, clues)
    narrow = channels(scene.engine - scene.own, scene.own.norm(dim=1)) or _only_slice(verdict)
    match = explain(scene)
    text = _sentence(failure, pattern, refs[0], narrow, last_good, match)
    if narrow:
        pattern = f"{pattern}, {narrow}"
    return Divergence(
        hook=verdict.hook,
        pattern=pattern,
        where=refs[0],
        last_good=last_good,
        explanation=match.text if match else None,
        match_error=match.error if match else None,
        sentence=text,
    )


def _only_slice(verdict: HookVerdict) -> str:
    """Where nothing but a channel slice failed, that slice: the fault is no larger than the noise of all the others."""
    failed = [gate for gate in verdict.gates if not gate.passed]
    if len(failed) != 1 or failed[0].slice is None:
        return ""
    begin, end = failed[0].slice
    return f"only channels {begin} to {end - 1}"


def _is(tensor: torch.Tensor, dtype: str) -> bool:
    return str(tensor.dtype) == f"torch.{dtype}"


def _scene(engine: Captures, truth: Captures, failure: Failure, clues: Clues) -> Scene:
    hook = failure.hooks[failure.first].hook
    refs = sample(failure.failing, failure.lengths)
    return Scene(
        hook=hook,
        refs=tuple(refs),
        engine=take(engine[hook], refs),
        own=take(truth[hook], refs),
        truth=truth,
        bounds={verdict.hook: verdict.gates[0].bound for verdict in failure.hooks},
        floor=failure.hooks[failure.first].floor,
        clues=clues,
    )


def _worst(verdict: HookVerdict) -> str:
    """The figures of the gate that failed by most."""
    gate = max((g for g in verdict.gates if g.name != DTYPE), key=lambda g: g.required_k)
    return f"{gate.name} {gate.err_engine:.1e} where {gate.bound:.1e} is allowed (reference {gate.err_reference:.1e})"


def _sentence(
    failure: Failure,
    pattern: str,
    where: RowRef,
    narrow: str,
    last_good: str | None,
    match: Match | None,
    *,
    told: bool = True,
) -> str:
    """All of it in one line."""
    verdict = failure.hooks[failure.first]
    place = f"{pattern}, request {where.request} position {where.position}" if pattern == ONE else pattern
    place += f", {narrow}" if narrow else ""
    before = f"the hook before, {last_good}, is good" if last_good else "no hook comes before it"
    start = f"{verdict.hook} is the first hook that fails ({place}; {before})"
    later = _later(failure.hooks[failure.first + 1 :])
    if match is None:
        return f"{start}: {_worst(verdict)}; no known mistake fits{later}."
    apart = f" (distance {match.error:.0e})" if told and match.error > 0 else ""
    return f"{start}: it {match.text}{apart}{later}."


def _later(hooks: Sequence[HookVerdict]) -> str:
    if not hooks:
        return ""
    failed = sum(not verdict.passed for verdict in hooks)
    return (
        f"; {failed} of the {len(hooks)} hooks after it fail too"
        if failed
        else "; all hooks after it are good"
    )
