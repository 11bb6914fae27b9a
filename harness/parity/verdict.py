"""``compare``: the engine against the truth, judged by what the reference at the engine's dtype gets wrong itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from harness.parity.explain import Clues, Failure, diverge
from harness.parity.floor import carried, full_name
from harness.parity.floor import floor as noise_floor
from harness.parity.gates import DTYPE, Judged, dtype_gate, judge
from harness.parity.measure import RowTable, measure, one_thread
from harness.parity.metrics import aggregate, amplification
from harness.parity.notes import case_notes
from harness.parity.rows import Captures, check, depth_of, ref_of
from harness.parity.types import CaseVerdict, HookVerdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.parity.rows import Rows

__all__ = ["compare", "reference_noise"]


def reference_noise(truth: Captures, same: Captures) -> dict[str, float]:
    """R's aggregate error at each hook: the root mean square of its rows' relative errors.

    Massive rows are left out, and those that overflow in R: an infinite noise would allow an engine anything. 0 where
    no other row says anything.
    """
    noise = {}
    with one_thread():
        for name in truth:
            table = measure(same[name], truth[name], [same[name]], dtype="float32", slices=1)
            rows = table.informative & ~table.massive
            errors = table.engine[rows]
            noise[name] = aggregate(errors[errors.isfinite()])
    return noise


def compare(
    engine: Captures,
    truth: Captures,
    same: Captures | Sequence[Captures],
    *,
    dtype: str,
    n_layers: int,
    k: float = 3.0,
    slices: int = 8,
    hooks: Sequence[str] | None = None,
    noise: Mapping[str, float] | None = None,
    check_dtype: bool = True,
    explain: bool = True,
    prompt_lengths: Sequence[int] | None = None,
    step: int | None = None,
    earlier: Sequence[tuple[str, Captures]] = (),
    final_norm_weight: torch.Tensor | None = None,
    edits: Sequence[tuple[str, torch.Tensor]] = (),
    unedited: Captures | None = None,
    kept: Mapping[str, torch.Tensor] | None = None,
) -> CaseVerdict:
    """Judge every hook of a case; where one fails, say where it began and what it looks like.

    Captures are ``{hook: [one (n_i, width) tensor per request]}``, without padding, on the CPU. Width may differ from
    hook to hook. For interventions pass deltas (edited - clean) on all three sides and ``check_dtype=False``.

    Args:
        engine: E, at the engine's dtype.
        truth: T, at a wider dtype.
        same: R, the reference at the engine's dtype. One realisation, or better several (other attention kernel,
            embedding jittered by a unit in the last place): some rows of real models are so ill-conditioned that one
            realisation can be right by luck. The largest of their errors counts.
        dtype: the engine's, ``bfloat16`` or ``bf16``.
        n_layers: blocks of the model, for the floor.
        k: how many times ``max(err(R), floor)`` is allowed.
        slices: contiguous channel ranges judged separately; 8 catches the edges of 2, 4 and 8 ranks.
        hooks: which to judge; None for all of the truth's. Others in ``truth`` still serve to explain.
        noise: hook → R's aggregate error measured on a calibration text, see :func:`reference_noise`. Needed where a
            case has few rows: the error of one row of R is one draw, and can be small by luck.
        check_dtype: whether engine tensors of another dtype fail.
        explain: whether a failure's beginning is looked for, which takes seconds to a minute; False leaves
            ``divergence`` None.
        prompt_lengths: prompt rows per request; later ones are decode rows. Tells those patterns apart.
        step: ``max_num_batched_tokens``; lets a chunk be named as one.
        earlier: (label, captures) of calls before this one, to recognise stale buffers.
        final_norm_weight: (width,) of the final norm, to recognise it folded in.
        edits: (label, (width,) vector) of interventions, to recognise one that leaked or did not bite.
        unedited: the truth without the interventions, to recognise rows that lack them.
        kept: see :func:`harness.parity.floor.carried`.

    Raises:
        CaptureError: something is missing, surplus or misshapen; see :func:`harness.parity.rows.check`.
        UsageError: an unknown dtype.
    """
    dtype = full_name(dtype)
    sames = [same] if isinstance(same, Mapping) else list(same)
    with one_thread():
        names = check(engine, truth, sames, hooks)
        tables = {
            name: measure(engine[name], truth[name], [one[name] for one in sames], dtype=dtype, slices=slices)
            for name in names
        }
        rule = _Rule(dtype, n_layers, k, noise or {}, kept)
        judged = _judge_all(rule, tables)
        if check_dtype:
            judged = {name: _judge_dtype(rule, name, one, engine[name]) for name, one in judged.items()}
        verdicts = _hook_verdicts(tables, judged, n_layers)
        first = next((i for i, verdict in enumerate(verdicts) if not verdict.passed), None)
        divergence = None
        if first is not None and explain:
            blamed, lengths = judged[names[first]].failing, tables[names[first]].lengths
            failure = Failure(tuple(verdicts), first, blamed, lengths, dtype)
            clues = Clues(prompt_lengths, step, earlier, final_norm_weight, edits, unedited)
            divergence = diverge(engine, truth, failure, clues)
        wrong_dtype = [verdict.hook for verdict in verdicts if _has_dtype_gate(verdict)]
        vague = {name: one.n_vague for name, one in judged.items()}
        notes = case_notes(engine, sames, tables, dtype, wrong_dtype=wrong_dtype, vague=vague)
    return CaseVerdict(
        first is None, k, dtype, tuple(verdicts), divergence, notes, _failed_requests(tables, judged)
    )


@dataclass(frozen=True)
class _Rule:
    """What every hook of a case is judged with."""

    dtype: str
    n_layers: int
    k: float
    noise: Mapping[str, float]
    kept: Mapping[str, torch.Tensor] | None

    def floor(self, hook: str) -> float:
        return noise_floor(self.dtype, depth_of(hook, self.n_layers))


def _judge_all(rule: _Rule, tables: Mapping[str, RowTable]) -> dict[str, Judged]:
    """Apply the rule to hooks in forward order: what a row carries comes from the hooks before."""
    factors = carried({name: table.norms for name, table in tables.items()}, rule.kept)
    return {
        name: judge(
            table, k=rule.k, floor=rule.floor(name), noise=rule.noise.get(name, 0.0), carried=factors[name]
        )
        for name, table in tables.items()
    }


def _judge_dtype(rule: _Rule, hook: str, judged: Judged, rows: Rows) -> Judged:
    """Add the gate that fails, whatever the values, where a request was captured at another dtype."""
    if all(str(tensor.dtype) == f"torch.{rule.dtype}" for tensor in rows):
        return judged
    return replace(judged, gates=(*judged.gates, dtype_gate(rule.k, rule.floor(hook))))


def _hook_verdicts(
    tables: Mapping[str, RowTable], judged: Mapping[str, Judged], n_layers: int
) -> list[HookVerdict]:
    verdicts = [
        _hook_verdict(name, depth_of(name, n_layers), tables[name], one) for name, one in judged.items()
    ]
    grown = amplification([verdict.err_engine for verdict in verdicts])
    return [replace(v, amplification=ratio) for v, ratio in zip(verdicts, grown, strict=True)]


def _failed_requests(tables: Mapping[str, RowTable], judged: Mapping[str, Judged]) -> tuple[int, ...]:
    """Requests of the rows that any hook's gates blame; every hook has the same rows."""
    blamed = torch.stack([one.failing for one in judged.values()]).any(dim=0)
    lengths = next(iter(tables.values())).lengths
    return tuple(sorted({ref_of(row, lengths).request for row in blamed.nonzero().flatten().tolist()}))


def _has_dtype_gate(verdict: HookVerdict) -> bool:
    return any(gate.name == DTYPE for gate in verdict.gates)


def _hook_verdict(name: str, depth: int, table: RowTable, judged: Judged) -> HookVerdict:
    worst = int(table.engine.argmax())
    # Four digits are what a heat map can show, and a third of the bytes of seventeen.
    per_request = table.engine.split(list(table.lengths))
    rows = tuple(tuple(float(f"{error:.4g}") for error in errors.tolist()) for errors in per_request)
    return HookVerdict(
        hook=name,
        depth=depth,
        passed=judged.passed,
        gates=judged.gates,
        n_rows=table.engine.numel(),
        n_massive=judged.n_massive,
        max_abs=float(table.max_abs.max()),
        worst=table.ref(worst),
        worst_channel=int(table.channel[worst]),
        min_cosine=float(table.cosine.min()),
        max_ulps=float(table.ulps.max()),
        row_errors=rows,
    )
