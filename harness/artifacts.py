"""What a failed comparison leaves behind, so that it can be looked at and run again: numbers, token ids, specs.

Two files per comparison below the run's folder, ``artifacts/<case>/<n>.json`` and ``<n>.safetensors``. The first says
which engine ran what, and which rows were kept; the second holds those rows, for each hook

- ``<hook>/engine``, (rows, width) at the engine's dtype;
- ``<hook>/truth``, the same rows of the truth, at its own dtype;
- ``<hook>/reference``, of the reference itself, at the engine's dtype;
- ``<hook>/noisiest``, per row the reference's realisation with the largest error, which is what the bound comes from.

Kept are the rows that gates blame, then those of the largest error, of the hook where the failure began first. The size
is capped per case and per run; what did not fit is counted.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.store.writer import dump

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import torch

    from harness.backend import BootConfig
    from harness.interventions import Edit, Requests
    from harness.parity.rows import Captures
    from harness.parity.types import CaseVerdict, HookVerdict

__all__ = ["CASE_BYTES", "FOLDER", "ROWS", "RUN_BYTES", "Evidence", "save", "slug", "specs_of"]

FOLDER = "artifacts"
#: Most rows kept of one hook.
ROWS = 8
#: Bytes of tensors one case may leave, and all files of one run.
CASE_BYTES, RUN_BYTES = 8 << 20, 200 << 20
_LONGEST_SLUG = 100


@dataclass(frozen=True)
class Evidence:
    """One failed comparison.

    Attributes:
        kind: ``values`` of hooks, the ``change`` edits made to them, or ``logits``.
        config: the engine.
        prompts, new_tokens: token ids per request.
        edits: per request, or None.
        sides: engine, truth, and the reference's realisations, R itself first; each hook → one (n_i, width) per
            request. Called only where something is going to be written.
    """

    kind: str
    config: BootConfig
    prompts: Sequence[Sequence[int]]
    new_tokens: Sequence[Sequence[int]]
    edits: Requests | None
    sides: Callable[[], tuple[Captures, Captures, Sequence[Captures]]]


def _size(path: Path) -> int:
    """Bytes of a file; 0 of one that is gone by now, as another worker's is that has got its name."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def save(
    run: Path,
    case: str,
    number: int,
    label: str,
    verdict: CaseVerdict,
    evidence: Evidence,
    *,
    case_bytes: int = CASE_BYTES,
    run_bytes: int = RUN_BYTES,
) -> dict[str, Any]:
    """Write the evidence of a failed comparison.

    Args:
        run: the run's folder.
        case: id of the case.
        number: of the comparison within its case.
        label: its name in the record.
        verdict: what failed.
        evidence: its values.
        case_bytes: cap on what one case leaves.
        run_bytes: and on all of a run.

    Returns:
        For the record: ``label``, ``call`` and ``tensors`` (paths relative to the run), ``bytes``, the ``engine``, the
        ``first`` hook kept with its ``rows``, how many ``hooks`` were kept and how many failing ones ``left_out``; or
        ``label`` and ``error`` where the disk refused it, which must not turn a verdict into something else.
    """
    folder = run / FOLDER / slug(case)
    # Files of this number and above are of an earlier attempt at the case, and are about to be replaced.
    own = sum(_size(p) for p in folder.glob("*.safetensors") if int(p.stem) < number)
    others = sum(_size(p) for p in (run / FOLDER).glob("*/*") if p.parent != folder)
    room = min(case_bytes - own, run_bytes - others - own)
    tensors, kept, left_out = _chosen(verdict, evidence, room)
    call = {
        "schema": 1,
        "case": case,
        "label": label,
        "kind": evidence.kind,
        "began": verdict.divergence.sentence if verdict.divergence else "",
        "k": verdict.k,
        "engine": json.loads(evidence.config.to_json()) | {"path": ""},
        "prompts": [list(ids) for ids in evidence.prompts],
        "new_tokens": [list(ids) for ids in evidence.new_tokens],
        "intervene": specs_of(evidence.edits),
        "captured": [hook.hook for hook in verdict.hooks],
        "hooks": kept,
        "left_out": left_out,
    }
    paths = {"call": folder / f"{number}.json", "tensors": folder / f"{number}.safetensors"}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(paths["tensors"], _safetensors(tensors))
        _write(paths["call"], dump(call).encode())
    except OSError as error:
        return {"label": label, "error": f"not written: {error.strerror or error}"}
    sizes = sum(path.stat().st_size for path in paths.values())
    places = {name: str(path.relative_to(run)) for name, path in paths.items()}
    first = {"first": {name: kept[0][name] for name in ("hook", "rows")}} if kept else {}
    counts = {"bytes": sizes, "hooks": len(kept), "left_out": left_out}
    return {"label": label, **places, "engine": evidence.config.id, **first, **counts}


def slug(case: str) -> str:
    """A folder's name for a case: readable, and of this case alone."""
    name = re.sub(r"[^\w.+=-]+", "_", case.rpartition("::")[2]).strip("_.")[:_LONGEST_SLUG]
    return f"{name}~{hashlib.sha256(case.encode()).hexdigest()[:8]}"


def specs_of(edits: Requests | None) -> list[dict[str, Any]] | None:
    """Edits as the specs they were read from, one set per request; None where there are none."""
    if not edits or not any(edits):
        return None
    return [{edit.hook: _spec(edit) for edit in one} for one in edits]


def _spec(edit: Edit) -> dict[str, Any]:
    spec: dict[str, Any] = {"op": edit.op}
    if edit.op == "scale":
        spec["factor"] = edit.scale
    elif edit.op != "suppress":
        spec["value"] = edit.bias.tolist()
    return spec if edit.pos is None else {**spec, "pos": list(edit.pos)}


def _chosen(
    verdict: CaseVerdict, evidence: Evidence, room: int
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]], int]:
    """Tensors by name, what they are, and how many failing hooks found no room."""
    import torch

    engine, truth, same = evidence.sides()
    tensors: dict[str, torch.Tensor] = {}
    kept: list[dict[str, Any]] = []
    left_out = 0
    for hook in _by_interest(verdict):
        places = list(_places(hook))
        per_row = [one[hook.hook][places[0][0]][:1].nbytes for one in (engine, truth, same[0], same[0])]
        places = places[: max(0, room) // max(1, sum(per_row))]
        if not places:
            left_out += not hook.passed
            continue
        stacks = [
            torch.stack([side[hook.hook][request][row] for request, row in places])
            for side in (engine, truth, *same)
        ]
        sides = {"engine": stacks[0], "truth": stacks[1], "reference": stacks[2]}
        sides["noisiest"] = _noisiest(stacks[1], stacks[2:])
        tensors |= {f"{hook.hook}/{name}": stack.contiguous().cpu() for name, stack in sides.items()}
        room -= sum(stack.nbytes for stack in sides.values())
        gates = [
            {"name": g.name, "err_engine": g.err_engine, "bound": g.bound, "passed": g.passed}
            for g in hook.gates
        ]
        kept.append({"hook": hook.hook, "passed": hook.passed, "rows": places, "gates": gates})
    return tensors, kept, left_out


def _by_interest(verdict: CaseVerdict) -> Iterator[HookVerdict]:
    """The hook where it began, the one before it, then the other failing ones, worst first."""
    first = next((i for i, hook in enumerate(verdict.hooks) if not hook.passed), None)
    if first is None:
        return
    yield verdict.hooks[first]
    if first:
        yield verdict.hooks[first - 1]
    failing = [hook for hook in verdict.hooks[first + 1 :] if not hook.passed]
    yield from sorted(failing, key=lambda hook: -hook.worst_gate.required_k)


def _places(hook: HookVerdict) -> Iterator[tuple[int, int]]:
    """At most :data:`ROWS` (request, row): those that failed gates blame, then those of the largest error."""
    blamed = [(g.where.request, g.where.position) for g in hook.gates if g.where is not None and not g.passed]
    errors = [(e, i, j) for i, rows in enumerate(hook.row_errors) for j, e in enumerate(rows)]
    # NaN is worse than any number, and compares with none.
    largest = sorted(errors, key=lambda one: float("-inf") if math.isnan(one[0]) else -one[0])
    places = dict.fromkeys([*blamed, *((i, j) for _, i, j in largest[: 2 * ROWS])])
    yield from list(places)[:ROWS]


def _noisiest(truth: torch.Tensor, same: Sequence[torch.Tensor]) -> torch.Tensor:
    import torch

    errors = torch.stack([(one.double() - truth.double()).norm(dim=-1) for one in same])
    pick = errors.nan_to_num(float("inf")).argmax(dim=0)
    return torch.stack([same[int(which)][row] for row, which in enumerate(pick)])


def _safetensors(tensors: dict[str, torch.Tensor]) -> bytes:
    from safetensors.torch import save as serialise

    return serialise(tensors)


def _write(path: Path, data: bytes) -> None:
    """All of it or nothing."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(data)
    part.replace(path)
