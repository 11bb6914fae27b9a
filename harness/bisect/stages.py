"""The forward cut into stages between places where the residual stream can be put right, and words for its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.points import (
    ATTN_IN,
    ATTN_OUT,
    BLOCK_IN,
    BLOCK_OUT,
    EMBED,
    FINAL_NORM,
    HEAD_K,
    HEAD_Q,
    HEAD_V,
    HEAD_Z,
    MLP_IN,
    MLP_OUT,
    ROT_K,
    ROT_Q,
    HookPoint,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

__all__ = ["LOGITS", "Stage", "after", "branch_of", "carries_on", "part_of", "stage_name", "stages_of"]

#: Under this name logits stand where hooks do, after all of them.
LOGITS = "logits"
_STREAM = (EMBED, BLOCK_OUT, FINAL_NORM)
_BRANCHES = {
    EMBED: "embedding",
    BLOCK_IN: "residual stream",
    ATTN_IN: "norm",
    HEAD_Q: "attention",
    HEAD_K: "attention",
    HEAD_V: "attention",
    ROT_Q: "attention",
    ROT_K: "attention",
    HEAD_Z: "attention",
    ATTN_OUT: "attention",
    MLP_IN: "norm",
    MLP_OUT: "MLP",
    BLOCK_OUT: "residual stream",
    FINAL_NORM: "final norm",
    LOGITS: "unembedding",
}
#: What lies just before a point, where the points before it are known to be right.
_PARTS = {
    EMBED: "the embedding",
    BLOCK_IN: "the residual stream on its way in",
    ATTN_IN: "the norm before attention",
    HEAD_Q: "the query projection",
    HEAD_K: "the key projection",
    HEAD_V: "the value projection",
    ROT_Q: "the rotary embedding of queries",
    ROT_K: "the rotary embedding of keys",
    HEAD_Z: "attention itself, from queries, keys and values to the heads' outputs",
    ATTN_OUT: "the output projection of attention",
    MLP_IN: "what leads from attention into the MLP (a norm, a sum)",
    MLP_OUT: "the MLP",
    BLOCK_OUT: "the sum that makes its output",
    FINAL_NORM: "the final norm",
    LOGITS: "the unembedding, or how logits are made",
}
#: Where the points within a branch are not served, its output stands for all of it.
_WHOLE = {
    ATTN_OUT: (HEAD_Z, "attention, its norm included"),
    MLP_OUT: (MLP_IN, "the MLP, its norm included"),
}


@dataclass(frozen=True)
class Stage:
    """A stretch of the forward.

    Attributes:
        name: ``block 3``, ``the embedding``.
        start: the point at which what goes into it can be put right; None at the beginning.
        hooks: its points in forward order; putting the last right puts right what it hands on.
    """

    name: str
    start: str | None
    hooks: tuple[str, ...]

    @property
    def end(self) -> str:
        """Its last point."""
        return self.hooks[-1]


def template_of(hook: str) -> str:
    """The name with the block's index replaced; ``logits`` as it is."""
    return hook if hook == LOGITS else HookPoint.parse(hook).template


def stages_of(hooks: Sequence[str], fixed: Collection[str] = ()) -> list[Stage]:
    """Cut points in forward order at each that holds the whole residual stream.

    Args:
        hooks: what is judged.
        fixed: points that cannot be put right; stages that meet at one are joined.
    """
    stages: list[Stage] = []
    here: list[str] = []
    start: str | None = None
    for hook in hooks:
        here.append(hook)
        if template_of(hook) in _STREAM and hook not in fixed:
            stages.append(Stage(stage_name(here), start, tuple(here)))
            start, here = hook, []
    return [*stages, Stage(stage_name(here), start, tuple(here))] if here else stages


def after(healed: Collection[str], hooks: Sequence[str]) -> list[str]:
    """The points, of all in forward order, that the truth put in at ``healed`` may heal."""
    if not healed:
        return list(hooks)
    begin = min(hooks.index(hook) for hook in healed) + 1
    return [hook for hook in hooks[begin:] if hook not in healed]


def stage_name(hooks: Iterable[str]) -> str:
    """``block 3``, ``blocks 3 to 4`` or what lies outside the blocks."""
    hooks = list(hooks)
    blocks = [HookPoint.parse(hook).block for hook in hooks if hook.startswith("blocks.")]
    if not blocks:
        return _PARTS[template_of(hooks[0])]
    first, last = min(blocks), max(blocks)
    return f"block {first}" if first == last else f"blocks {first} to {last}"


def branch_of(hook: str) -> str:
    """Which branch a point belongs to: ``attention``, ``MLP``, ``norm``, ``residual stream`` and so on."""
    return _BRANCHES[template_of(hook)]


def carries_on(hook: str, later: str) -> bool:
    """Whether two wrong points of one block may have one cause: the stream between attention and MLP goes to both."""
    return template_of(hook) == MLP_IN and template_of(later) == BLOCK_OUT


def part_of(hook: str, served: Collection[str]) -> str:
    """What computes the value at a point from the points before it, in words.

    Args:
        hook: the point.
        served: the points that were looked at: between fewer of them lies more.
    """
    template = template_of(hook)
    if template in _WHOLE:
        within, words = _WHOLE[template]
        block = HookPoint.parse(hook).block
        if within.format(i=block) not in served:
            return words
    return _PARTS[template]
