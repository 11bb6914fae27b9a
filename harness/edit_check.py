"""Judging interventions: what an edit did, what it left alone, and that nothing of it stays behind.

Six questions to one edited call, with a clean call before and after it:

- **reverted**: the clean call after is, bit for bit, the clean call before;
- **untouched**: rows no edit can reach (:mod:`harness.parity.reach`), other requests among them, keep every bit;
- **exact**: a row that was set or suppressed reads back as just that;
- **values**: the edited run equals the reference's edited run, by the rule of :mod:`harness.parity.verdict`;
- **tokens**: what is generated is what the edited reference prefers, wherever noise does not decide;
- **change**: edited minus clean equals the reference's, on the rows where that rises above the noise. This sees what
  the values alone hide: an edit applied at twice its strength is small beside a large activation.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from harness.logit_check import greedy_problems
from harness.parity.reach import reach
from harness.parity.text import failure_message
from harness.points import BLOCK_IN, BLOCK_OUT, HookPoint
from harness.reference.run import teacher_forced
from harness.results import NO_TOKEN

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from harness.interventions import Requests
    from harness.judging import Judged
    from harness.parity.rows import Captures
    from harness.parity.types import CaseVerdict
    from harness.reference.references import Pair
    from harness.results import ForwardResult

__all__ = ["BITE", "EditedCall", "problems_of"]

#: A change is judged where it is this many times the reference's own noise in it.
BITE = 10.0

Rows = dict[str, list[torch.Tensor]]


@dataclass
class EditedCall:
    """One edited call between two clean ones, and everything it is judged with.

    Attributes:
        edits: per request.
        clean, edited, after: what the engine gave before, with and after the edits.
    """

    parity: Judged
    prompts: Sequence[Sequence[int]]
    edits: Requests
    clean: ForwardResult
    edited: ForwardResult
    after: ForwardResult
    label: str
    must_bite: bool
    problems: list[str] = field(default_factory=list)
    #: Those of them that a recorded verdict says as well.
    judged: list[str] = field(default_factory=list)

    @property
    def same_tokens(self) -> list[int]:
        """Per request, rows that were fed the same tokens with and without the edits."""
        counts = []
        for prompt, clean, edited in zip(
            self.prompts, self.clean.new_tokens, self.edited.new_tokens, strict=True
        ):
            fed = next((i for i, (a, b) in enumerate(zip(clean, edited, strict=True)) if a != b), len(clean))
            counts.append(len(prompt) + min(fed, len(clean) - 1))
        return counts


def problems_of(call: EditedCall) -> list[str]:
    """Everything that is wrong with an edited call, in words; verdicts are recorded on the way."""
    _reverted(call)
    _untouched(call)
    _exact(call)
    call.parity.settle_routes(call.prompts, call.clean)
    call.parity.settle_routes(call.prompts, call.edited, call.edits)
    with_edits, without = _references(call)
    _values(call, with_edits, without)
    _change(call, with_edits, without)
    # The last hook has none after it: that an edit there was handed on shows in the tokens alone, if there are any.
    if NO_TOKEN not in itertools.chain.from_iterable(call.edited.new_tokens):
        call.problems += greedy_problems(
            call.parity, call.prompts, call.edited.new_tokens, label=f"{call.label}: tokens", edits=call.edits
        )
    if unjudged := [one for one in call.problems if one not in call.judged]:
        call.parity.note(f"{call.label}: beside the verdicts", unjudged=unjudged)
    return call.problems


def _reverted(call: EditedCall) -> None:
    before, after = call.clean.rows_by_hook(), call.after.rows_by_hook()
    found = _first_difference(before, after, None)
    if found or call.clean.new_tokens != call.after.new_tokens:
        call.problems.append(
            f"not reverted: the clean call after the edited one differs from the one before: "
            f"{found or 'its new tokens'}"
        )


def _untouched(call: EditedCall) -> None:
    parity = call.parity
    masks = [
        reach(edits, n_layers=parity.n_layers, n_rows=n_rows, same_tokens=same)
        for edits, n_rows, same in zip(call.edits, call.clean.lengths, call.same_tokens, strict=True)
    ]
    names = call.clean.hooks
    untouched = {name: [~mask[name] for mask in masks] for name in names}
    found = _first_difference(call.clean.rows_by_hook(), call.edited.rows_by_hook(), untouched)
    count = sum(int(mask.sum()) for name in names for mask in untouched[name])
    parity.note(f"{call.label}: untouched", rows=count, claim="equal in every bit")
    if found:
        call.problems.append(f"changed, though no edit reaches it: {found}")


def _first_difference(
    expected: Rows, actual: Rows, where: Mapping[str, list[torch.Tensor]] | None
) -> str | None:
    """The first place, in forward order of hooks, where bits differ, and how many rows do at that hook."""
    for name in expected:
        places = []
        for request, (want, got) in enumerate(zip(expected[name], actual[name], strict=True)):
            bits = (want.contiguous().view(torch.uint8) != got.contiguous().view(torch.uint8)).any(dim=1)
            if where is not None:
                bits &= where[name][request]
            places += [(request, int(row)) for row in bits.nonzero().flatten()]
        if places:
            request, position = places[0]
            gap = (
                expected[name][request][position].double() - actual[name][request][position].double()
            ).abs()
            return (
                f"{name}, request {request} position {position} (largest difference {float(gap.max()):.1e}; "
                f"{len(places)} rows at this hook)"
            )
    return None


def _exact(call: EditedCall) -> None:
    captured = call.edited.rows_by_hook()
    checked = 0
    for request, edits in enumerate(call.edits):
        for edit in edits:
            if edit.scale != 0.0 or edit.hook not in captured:
                continue
            rows = captured[edit.hook][request]
            places = edit.touches(rows.shape[0])
            checked += len(places)
            # Where a module emits another value, what was set went there and back, by rules that foretell every bit.
            how = call.parity.emission(edit.hook)
            want = how.read_back(edit.bias.expand(rows.shape[1]), rows.dtype).expand(len(places), -1)
            got = rows[places]
            if bool((got != want).any()):
                row, channel = (int(i) for i in (got != want).nonzero()[0])
                call.problems.append(
                    f"{edit.hook}, request {request} position {places[row]}: {edit.op} reads back "
                    f"{float(got[row, channel])!r} in channel {channel}, and must be {float(want[row, channel])!r}"
                )
    if checked:
        call.parity.note(
            f"{call.label}: read back", rows=checked, claim="set and suppressed values are exact"
        )


def _references(call: EditedCall, more_for: Sequence[int] = ()) -> tuple[Pair, Pair]:
    """The reference with the edits on the edited tokens, and without them on the clean ones."""
    names = call.clean.hooks
    with_edits = call.parity.reference(
        teacher_forced(call.prompts, call.edited.new_tokens),
        names,
        edits=call.edits,
        more_for=more_for,
        logits=True,
    )
    without = call.parity.reference(
        teacher_forced(call.prompts, call.clean.new_tokens), names, more_for=more_for
    )
    return with_edits, without


def _values(call: EditedCall, with_edits: Pair, without: Pair) -> None:
    parity = call.parity

    def judge(pair: Pair, *, explain: bool) -> CaseVerdict:
        return parity.compare(
            call.prompts,
            call.edited.rows_by_hook(),
            pair.truth.captured,
            [run.captured for run in pair.same],
            noise=parity.noise,
            explain=explain,
            edits=_vectors(call),
            unedited=without.truth.captured,
            kept=_kept(call),
        )

    verdict = judge(with_edits, explain=False)
    if not verdict.passed:
        verdict = judge(_references(call, verdict.failed_requests)[0], explain=True)
    parity.record(f"{call.label}: values", verdict, _shape(call))
    captured = call.edited.rows_by_hook()
    same = [run.captured for run in with_edits.same]
    _keep(call, "values", verdict, lambda: (captured, with_edits.truth.captured, same))
    if not verdict.passed:
        call.judged.append(f"edited values: {failure_message(verdict)}")
        call.problems.append(call.judged[-1])


def _keep(
    call: EditedCall,
    kind: str,
    verdict: CaseVerdict,
    sides: Callable[[], tuple[Captures, Captures, Sequence[Captures]]],
) -> None:
    label, tokens = f"{call.label}: {kind}", call.edited.new_tokens
    call.parity.keep(label, verdict, call.prompts, tokens, sides, call.edits, kind=kind)


def _kept(call: EditedCall) -> dict[str, torch.Tensor]:
    """Block output or input → (N,) factor by which the edits there multiplied each row of all requests."""
    kept: dict[str, torch.Tensor] = {}
    begins = [0, *itertools.accumulate(call.edited.lengths)]
    for begin, n_rows, edits in zip(begins, call.edited.lengths, call.edits, strict=False):
        for edit in edits:
            if HookPoint.parse(edit.hook).template in (BLOCK_IN, BLOCK_OUT):
                row = kept.setdefault(edit.hook, torch.ones(begins[-1], dtype=torch.float64))
                row[[begin + place for place in edit.touches(n_rows)]] *= edit.scale
    return kept


def _vectors(call: EditedCall) -> list[tuple[str, torch.Tensor]]:
    """What was added where, so that a row that lacks it, or has it and should not, is recognised."""
    added = {edit.key: edit for edits in call.edits for edit in edits if edit.op == "add"}
    width = call.parity.geometry.row_width
    return [(f"added at {edit.hook}", edit.bias.expand(width(edit.hook))) for edit in added.values()]


def _change(call: EditedCall, with_edits: Pair, without: Pair) -> None:
    parity = call.parity
    counts = call.same_tokens
    engine = _minus(call.edited.rows_by_hook(), call.clean.rows_by_hook(), counts)

    def sides(edited: Pair, clean: Pair) -> tuple[Rows, list[Rows]]:
        truth = _minus(edited.truth.captured, clean.truth.captured, counts)
        same = [
            _minus(one.captured, other.captured, counts)
            for one, other in zip(edited.same, clean.same, strict=True)
        ]
        return truth, same

    truth, same = sides(with_edits, without)
    bites = _bites(truth, same)
    _require_bite(call, bites)
    hooks = [name for name in truth if any(bool(mask.any()) for mask in bites[name])]
    if not hooks:
        return

    def judge(truth: Rows, same: list[Rows], *, explain: bool) -> CaseVerdict:
        def keep(rows: Rows) -> Rows:
            return {name: _masked(rows[name], bites[name]) for name in hooks}

        return parity.compare(
            call.prompts,
            keep(engine),
            keep(truth),
            [keep(one) for one in same],
            check_dtype=False,
            explain=explain,
        )

    verdict = judge(truth, same, explain=False)
    if not verdict.passed:
        verdict = judge(*sides(*_references(call, verdict.failed_requests)), explain=True)
    parity.record(f"{call.label}: change", verdict, _shape(call))
    _keep(call, "change", verdict, lambda: (engine, truth, same))
    if not verdict.passed:
        call.judged.append(f"change made by the edits (edited - clean): {failure_message(verdict)}")
        call.problems.append(call.judged[-1])


def _minus(edited: Captures, clean: Captures, counts: Sequence[int]) -> Rows:
    """Edited minus clean in fp64, cut to the rows that were fed the same tokens."""
    return {
        name: [
            a[:n].double() - b[:n].double() for a, b, n in zip(edited[name], clean[name], counts, strict=True)
        ]
        for name in edited
    }


def _bites(truth: Rows, same: Sequence[Rows]) -> dict[str, list[torch.Tensor]]:
    """Hook → per request (n,) bool: rows whose change is well above the reference's own noise in it."""
    return {
        name: [
            rows.norm(dim=1)
            > BITE * torch.stack([(one[name][request] - rows).norm(dim=1) for one in same]).amax(dim=0)
            for request, rows in enumerate(truth[name])
        ]
        for name in truth
    }


def _masked(rows: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Rows with those outside the masks at zero, where they say nothing."""
    return [one * mask.unsqueeze(1) for one, mask in zip(rows, masks, strict=True)]


def _require_bite(call: EditedCall, bites: Mapping[str, list[torch.Tensor]]) -> None:
    """An edit that the noise hides shows nothing, whoever applied it."""
    if not call.must_bite:
        return
    for request, edits in enumerate(call.edits):
        for edit in edits:
            mask = bites[edit.hook][request]
            places = [place for place in edit.touches(mask.shape[0]) if bool(mask[place])]
            if not places:
                call.problems.append(
                    f"{edit.hook}, request {request}: the reference's own change by this {edit.op} does not rise "
                    f"{BITE:g} times above its noise, so the case shows nothing; use a stronger edit"
                )


def _shape(call: EditedCall) -> dict[str, Any]:
    return {
        "prompt_lengths": [len(prompt) for prompt in call.prompts],
        "edits": sum(len(edits) for edits in call.edits),
        **call.edited.stats,
    }
