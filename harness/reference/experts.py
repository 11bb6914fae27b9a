"""Mixtures of experts: which experts each token goes to, recorded, and decided otherwise where that is asked for.

Rounding can decide a token's experts where two of them are nearly tied, and then changes its output by as much as the
experts differ. That is a choice, like a sampled token, and no error; so it is dealt with like one. The realisations
of R go the way T goes, and their error is rounding alone. And T itself goes the engine's way where T's own preference
lies within noise, see :mod:`harness.routing`.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from harness.errors import CaptureError
from harness.reference.families import tree_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from transformers import PreTrainedModel

__all__ = ["Choice", "Route", "Routing", "routed"]


class Choice(NamedTuple):
    """A token that goes to other experts than the model prefers."""

    block: int
    position: int
    experts: tuple[int, ...]  #: those it goes to, ascending


@dataclass(frozen=True)
class Route:
    """One block's routing of one sequence.

    Attributes:
        logits: the router's, (n, experts), at the model's dtype.
        experts: those each token went to, (n, k).
    """

    logits: torch.Tensor
    experts: torch.Tensor


#: Block → its routing; empty for a model without experts.
Routing = dict[int, Route]


@contextmanager
def routed(
    model: PreTrainedModel, *, choices: Sequence[Choice] = (), like: Mapping[int, Route] | None = None
) -> Iterator[Routing]:
    """Record the routing of one forward of one sequence, and change it.

    Nothing is touched, bit for bit, where a token goes where it would have gone anyway.

    Args:
        model: of any family; one without experts records nothing.
        choices: at most one per block and position; they stand above ``like``.
        like: the routing of another run of the same tokens, to be followed.

    Raises:
        CaptureError: a choice of another number of experts, or of one that there is not.
    """
    found: Routing = {}
    with ExitStack() as stack:
        for block, gate in _gates(model):
            here = [choice for choice in choices if choice.block == block]
            followed = like[block].experts if like else None
            handle = gate.register_forward_hook(_decide(block, here, followed, found))
            stack.callback(handle.remove)
        yield found


def _gates(model: PreTrainedModel) -> list[tuple[int, torch.nn.Module]]:
    path = tree_of(model).router
    if not path:
        return []
    modules = dict(model.named_modules())
    blocks = range(model.config.num_hidden_layers)
    # Some blocks of a mixture may be dense.
    return [(i, modules[path.format(i=i)]) for i in blocks if path.format(i=i) in modules]


def _decide(block: int, choices: Sequence[Choice], like: torch.Tensor | None, found: Routing) -> Any:
    """A hook on a router, which returns logits (n, experts), weights (n, k) and experts (n, k)."""

    def hook(gate: Any, _args: Any, output: Any) -> Any:
        logits, weights, preferred = output
        experts = preferred.clone() if like is None else like.to(preferred.device, copy=True)
        for choice in choices:
            wanted = set(choice.experts)
            if len(wanted) != experts.shape[1] or not wanted <= set(range(logits.shape[1])):
                msg = f"{choice} cannot be: tokens go to {experts.shape[1]} of {logits.shape[1]} experts"
                raise CaptureError(msg)
            experts[choice.position] = torch.tensor(sorted(wanted))
        found[block] = Route(logits.detach().cpu(), experts.cpu())
        other = (experts.sort(dim=1).values != preferred.sort(dim=1).values).any(dim=1, keepdim=True)
        if not bool(other.any()):
            return None
        chosen = torch.softmax(logits, dim=1, dtype=torch.float32).gather(1, experts)
        if getattr(gate, "norm_topk_prob", True):  # a router without the switch always does
            chosen = chosen / chosen.sum(dim=1, keepdim=True)
        return (
            logits,
            torch.where(other, chosen.to(weights.dtype), weights),
            torch.where(other, experts, preferred),
        )

    return hook
