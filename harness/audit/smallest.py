"""The smallest call that shows a failure: one prompt of three tokens, and at most one edit with one number in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.errors import CaptureError, EngineError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from harness.pool import Engine
    from harness.store import CaseResult, RunRecords

__all__ = ["Smallest", "asked_of", "find_smallest"]

PROMPT = (5, 6, 7)
#: Channels that are shown.
_SHOWN = 3
#: In multiples of the bound: below this, three rows could be over it by chance.
_CLEAR = 10.0
#: One number for each op, of a size at which a wrong edit cannot hide.
_SIMPLE: dict[str, dict[str, Any]] = {
    "suppress": {"op": "suppress"},
    "scale": {"op": "scale", "factor": 0.5},
    "add": {"op": "add", "value": 0.5},
    "set": {"op": "set", "value": 0.5},
}


@dataclass(frozen=True)
class Smallest:
    """A call, and what came of it.

    Attributes:
        model, dtype: of the engine.
        hook: the point that is wrong.
        prompt: token ids.
        edits: point → spec, or empty.
        row: the first wrong one.
        found, expected: its first channels, of the backend and of transformers.
        share: the error in multiples of its bound.
    """

    model: str
    dtype: str
    hook: str
    prompt: tuple[int, ...]
    edits: dict[str, dict[str, Any]]
    row: int
    found: tuple[float, ...]
    expected: tuple[float, ...]
    share: float


def asked_of(records: RunRecords, case: CaseResult) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Where each failed comparison of a case began, and the edits of its call, (point, op), in its own order."""
    from harness.repro import read_call

    first = {
        str(entry.get("label")): str(divergence["hook"])
        for entry in case.verdicts
        if (divergence := (entry.get("verdict") or {}).get("divergence"))
    }
    for kept in case.artifacts:
        hook = first.get(str(kept.get("label")))
        if hook is None or "call" not in kept:
            continue
        sets: Sequence[Mapping[str, Any] | None] = read_call(records, kept).get("intervene") or []
        edits = [(at, str(spec["op"])) for one in sets for at, spec in (one or {}).items()]
        yield hook, list(dict.fromkeys(edits))


def find_smallest(
    engine: Engine, path: str, asked: Sequence[tuple[str, list[tuple[str, str]]]], *, k: float
) -> Smallest | None:
    """Try short calls of the kind that failed, clean ones first, until one is clearly wrong.

    Args:
        engine: the backend, booted.
        path: folder of the checkpoint.
        asked: see :func:`asked_of`.
        k: as in the run.

    Returns:
        The first that is wrong by ten times its bound or more; None where the failure needs more than that.

    Raises:
        EngineError: the backend died.
    """
    tried = []
    for hook, edits in asked:
        for at, op in [("", ""), *edits]:
            call = (hook, {at: _SIMPLE[op]} if at and op in _SIMPLE else {})
            if call in tried:
                continue
            tried.append(call)
            try:
                found = _try(engine, path, *call, k=k)
            except (CaptureError, UsageError):  # another kind of failure than a wrong value
                continue
            except EngineError:
                if not engine.alive:
                    raise
                continue
            if found is not None:
                return found
    return None


def _try(
    engine: Engine, path: str, hook: str, edits: dict[str, dict[str, Any]], *, k: float
) -> Smallest | None:
    import torch

    from harness.geometry import Geometry
    from harness.interventions import parse_interventions
    from harness.models import load_config
    from harness.parity.verdict import compare
    from harness.points import every_point, nonfireable_points
    from harness.reference.references import References

    config = engine.config
    geometry = Geometry.of(load_config(path))
    result = engine.forward([list(PROMPT)], capture=[hook], intervene=edits or None)
    requests = parse_interventions(
        edits or None,
        widths=geometry.widths(every_point(geometry.layers)),
        nonfireable=nonfireable_points(geometry.layers),
        lengths=[len(PROMPT)],
        dtype=getattr(torch, config.dtype),
    )
    pair = References(max_loaded=2).get(path, config.dtype, [PROMPT], [hook], edits=requests)
    verdict = compare(
        {hook: [result.rows(hook, 0)]},
        pair.truth.captured,
        [one.captured for one in pair.same],
        dtype=config.dtype,
        n_layers=geometry.layers,
        k=k,
        explain=False,
    )
    share = max((gate.err_engine / gate.bound for gate in verdict.hooks[0].gates if gate.bound), default=0.0)
    if verdict.passed or not share >= _CLEAR:
        return None
    row = verdict.hooks[0].worst.position

    def shown(rows: torch.Tensor) -> tuple[float, ...]:
        return tuple(round(float(value), 6) for value in rows[row].flatten()[:_SHOWN])

    return Smallest(
        config.model,
        config.dtype,
        hook,
        PROMPT,
        edits,
        row,
        shown(result.rows(hook, 0)),
        shown(pair.truth.captured[hook][0]),
        share,
    )
