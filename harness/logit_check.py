"""Judging logits: by the verdict's rule, and by whether a flipped argmax lies inside the reference's own noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.errors import CaptureError
from harness.parity.logit_metrics import largest_error, logit_figures
from harness.parity.text import failure_message
from harness.parity.verdict import compare
from harness.reference.run import teacher_forced
from harness.routing import LOGITS, follow_routes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from harness.interventions import Requests
    from harness.judging import Judged
    from harness.parity.types import CaseVerdict

__all__ = ["LOGITS", "greedy_problems", "logit_problems"]

_TOLD = 5


def logit_problems(
    parity: Judged,
    sequences: Sequence[Sequence[int]],
    rows: Sequence[torch.Tensor],
    *,
    label: str,
    edits: Requests | None = None,
) -> list[str]:
    """What is wrong with the engine's logits of these sequences, in words; the findings are recorded.

    Args:
        parity: the engine on trial.
        sequences: token ids, decode tokens that were fed back included.
        rows: (n, d_vocab) per sequence.
        label: names the comparison in the record.
        edits: of each sequence, applied in the reference too.

    Raises:
        CaptureError: another number of rows or another vocabulary than the model's.
    """
    vocab = parity.vocab_size
    for request, (ids, one) in enumerate(zip(sequences, rows, strict=True)):
        if tuple(one.shape) != (len(ids), vocab):
            wins = int((one.argmax(dim=1) >= vocab).sum()) if one.shape[-1] > vocab else 0
            msg = (
                f"{label}, request {request}: logits of shape {tuple(one.shape)} where {len(ids)} rows of the model's "
                f"vocabulary of {vocab} were asked for"
                + (f"; a padding column wins in {wins} rows" if wins else "")
            )
            raise CaptureError(msg)
    verdict, truth, same = _judge(parity, sequences, rows, edits)
    seen: set[object] = set()
    while follow_routes(parity, sequences, {LOGITS: rows}, verdict, edits, seen=seen):
        verdict, truth, same = _judge(parity, sequences, rows, edits)
    if not verdict.passed:
        verdict, truth, same = _judge(parity, sequences, rows, edits, again=verdict.failed_requests)
    figures = logit_figures(rows, truth, same, k=parity.k)
    parity.record(label, verdict, {"rows": figures.rows, **figures.to_json()})
    sides = ({LOGITS: rows}, {LOGITS: truth}, [{LOGITS: one} for one in same])
    # Decode tokens that were fed back stand in the sequences themselves.
    parity.keep(label, verdict, sequences, [], lambda: sides, edits, kind=LOGITS)
    wrong = [flip for flip in figures.flips if not flip.legitimate]
    flipped = [
        f"{label}, request {flip.where.request} position {flip.where.position}: token {flip.engine} wins where the "
        f"truth has {flip.truth}, by a margin of {flip.margin:.2e} where noise explains {flip.allowed:.2e}"
        for flip in wrong[:_TOLD]
    ]
    if flipped:
        parity.note(f"{label}: beside the verdict", unjudged=flipped)
    return flipped if verdict.passed else [f"{label}: {failure_message(verdict)}", *flipped]


def greedy_problems(
    parity: Judged,
    prompts: Sequence[Sequence[int]],
    new_tokens: Sequence[Sequence[int]],
    *,
    label: str,
    edits: Requests | None = None,
) -> list[str]:
    """Which new tokens are not the truth's argmax after the same tokens, though noise cannot explain it.

    Each is judged on the engine's own prefix, so a legitimate flip of a near tie does not void what follows.
    """
    pair = parity.reference(teacher_forced(prompts, new_tokens), [], edits=edits, logits=True)
    problems, flips, count = [], 0, 0
    for request, (prompt, tokens) in enumerate(zip(prompts, new_tokens, strict=True)):
        for step, token in enumerate(tokens):
            row = len(prompt) - 1 + step
            truth = pair.truth.logits[request][row].double()
            best = int(truth.argmax())
            count += 1
            if token == best:
                continue
            flips += 1
            noise = largest_error([run.logits[request][row] for run in pair.same], truth)
            margin, allowed = float(truth[best] - truth[token]), 2 * parity.k * noise
            if margin > allowed:
                problems.append(
                    f"{label}, request {request} step {step}: token {token} where the truth has {best}, by a margin "
                    f"of {margin:.2e} where noise explains {allowed:.2e}"
                )
    parity.note(label, tokens=count, flips=flips, claim="every flip inside the reference's noise")
    return problems


def _judge(
    parity: Judged,
    sequences: Sequence[Sequence[int]],
    rows: Sequence[torch.Tensor],
    edits: Requests | None,
    *,
    again: Sequence[int] | None = None,
) -> tuple[CaseVerdict, list[torch.Tensor], list[list[torch.Tensor]]]:
    pair = parity.reference(sequences, [], edits=edits, logits=True, more_for=again or ())
    truth, same = pair.truth.logits, [run.logits for run in pair.same]
    verdict = compare(
        {LOGITS: rows},
        {LOGITS: truth},
        [{LOGITS: one} for one in same],
        dtype=parity.config.dtype,
        n_layers=parity.n_layers,
        k=parity.k,
        check_dtype=False,
        explain=again is not None,
        step=parity.step,
    )
    return verdict, truth, same
