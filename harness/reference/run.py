"""Run the reference over token ids, one sequence at a time, edited or not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from harness.errors import UsageError
from harness.points import TEMPLATES, check_capture, nonfireable_points
from harness.reference.experts import routed
from harness.reference.families import tree_of
from harness.reference.hooks import capturing, points_of
from harness.reference.truth import exact_forward
from harness.tokens import check_prompts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from harness.interventions import Edit, Requests
    from harness.reference.experts import Choice, Routing

__all__ = ["ReferenceRun", "forward_logits", "per_sequence", "run_reference", "teacher_forced"]


@dataclass
class ReferenceRun:
    """What one model computed for some sequences. The tensors may be shared with a cache: read them only.

    Attributes:
        prompts: token ids per sequence, n_i each.
        captured: hook → per sequence (n_i, width), at the model's dtype, on the CPU.
        logits: per sequence (n_i, d_vocab), the model's own, cast to fp32.
        routing: per sequence, which experts its tokens went to.
    """

    prompts: list[list[int]]
    captured: dict[str, list[torch.Tensor]]
    logits: list[torch.Tensor]
    routing: list[Routing] = field(default_factory=list)


def teacher_forced(prompts: Sequence[Sequence[int]], new_tokens: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return what to run so that each row an engine computed while generating is computed too.

    The last new token was sampled and never fed back: n_prompt + k - 1 ids per request.

    Raises:
        UsageError: not one list of new tokens per prompt, or a prompt without a new token.
    """
    if len(prompts) != len(new_tokens):
        msg = (
            f"{len(prompts)} prompts but {len(new_tokens)} lists of new tokens; there must be one per prompt"
        )
        raise UsageError(msg)
    for number, new in enumerate(new_tokens):
        if not len(new):
            msg = f"prompt {number} has no new token; a forward always samples at least one"
            raise UsageError(msg)
    return [[*prompt, *new[:-1]] for prompt, new in zip(prompts, new_tokens, strict=True)]


def forward_logits(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """Run one sequence alone, without padding or cache: the model's own logits, (n, d_vocab) fp32."""
    with exact_forward(model.dtype):
        logits = model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False).logits[0]
    # Outside: within, an fp64 tensor stays what it is.
    return logits.detach().to("cpu", torch.float32)


def run_reference(
    model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    capture: Sequence[str],
    edits: Requests | None = None,
    *,
    choices: Sequence[Choice] = (),
    like: Routing | None = None,
) -> ReferenceRun:
    """Run the sequences one at a time (so that nothing depends on the batch) and capture the asked hooks.

    A model at fp64 runs, and is edited, so that it stays in fp64, see :mod:`harness.reference.truth`.

    Args:
        model: a loaded model.
        sequences: token ids, n_i each.
        capture: hook names; the values are those after the edits.
        edits: per sequence; positions that a sequence does not reach are left out. None: nothing is edited.
        choices: which experts tokens go to instead, see :func:`harness.reference.experts.routed`; of every sequence.
        like: a routing to follow, see there.

    Raises:
        UsageError: a wrong hook name, ids that :func:`~harness.tokens.check_prompts` refuses, or edits that are not one
            tuple per sequence.
        CaptureError: a hook that did not fire exactly once.
    """
    supported = points_of(model)
    missing = nonfireable_points(model.config.num_hidden_layers, tree_of(model).missing)
    names = check_capture(capture, supported, missing)
    prompts = check_prompts(
        sequences, vocab_size=model.config.vocab_size, max_len=model.config.max_position_embeddings
    )
    # A pattern can be read and not changed: what is computed from it has been computed already.
    editable = tree_of(model).points(model.config.num_hidden_layers, TEMPLATES)
    check_capture([edit.hook for here in edits or () for edit in here], editable, missing)
    run = ReferenceRun(prompts=prompts, captured={name: [] for name in names}, logits=[])
    for ids, edits_here in zip(prompts, per_sequence(edits, prompts), strict=True):
        with (
            routed(model, choices=choices, like=like) as routing,
            capturing(model, names, edits_here) as captured,
        ):
            run.logits.append(forward_logits(model, ids))
        run.routing.append(routing)
        for name in names:
            run.captured[name].append(captured[name][0])
    return run


def per_sequence(edits: Requests | None, prompts: list[list[int]]) -> list[tuple[Edit, ...]]:
    """One tuple of edits per sequence."""
    if edits is None:
        return [()] * len(prompts)
    if len(edits) != len(prompts):
        msg = f"{len(prompts)} sequences but {len(edits)} tuples of edits; there must be one per sequence"
        raise UsageError(msg)
    return [tuple(here) for here in edits]
