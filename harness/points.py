"""Hook-point names: what can be captured, in forward order, and how a wrong name is refused.

The names are TransformerLens'. A name promises one value whichever backend serves it, so nothing here
knows a backend. Sources: ``contract.md`` conventions as documented in ``docs/hook-points.md``.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "ATTN_IN",
    "ATTN_OUT",
    "ATTN_SCORES",
    "BLOCK_IN",
    "BLOCK_OUT",
    "EMBED",
    "FINAL_NORM",
    "FIREABLE_TEMPLATES",
    "HEAD_K",
    "HEAD_Q",
    "HEAD_V",
    "HEAD_Z",
    "KV_HEAD_TEMPLATES",
    "MLP_IN",
    "MLP_OUT",
    "NONFIREABLE_TEMPLATES",
    "PATTERN",
    "Q_HEAD_TEMPLATES",
    "REBUILT_TEMPLATES",
    "ROT_K",
    "ROT_Q",
    "TEMPLATES",
    "HookPoint",
    "all_points",
    "check_capture",
    "every_point",
    "matching",
    "nonfireable_points",
    "select",
]

EMBED = "embed.hook_out"
BLOCK_IN = "blocks.{i}.hook_in"
ATTN_IN = "blocks.{i}.attn.hook_in"
HEAD_Q = "blocks.{i}.attn.hook_q"
HEAD_K = "blocks.{i}.attn.hook_k"
HEAD_V = "blocks.{i}.attn.hook_v"
ROT_Q = "blocks.{i}.attn.hook_rot_q"
ROT_K = "blocks.{i}.attn.hook_rot_k"
HEAD_Z = "blocks.{i}.attn.hook_z"
ATTN_SCORES = "blocks.{i}.attn.hook_attn_scores"
PATTERN = "blocks.{i}.attn.hook_pattern"
ATTN_OUT = "blocks.{i}.attn.hook_out"
MLP_IN = "blocks.{i}.mlp.hook_in"
MLP_OUT = "blocks.{i}.mlp.hook_out"
BLOCK_OUT = "blocks.{i}.hook_out"
FINAL_NORM = "ln_final.hook_normalized"

#: Templates of every point that can fire, in the order a forward computes them.
TEMPLATES = (
    EMBED,
    BLOCK_IN,
    ATTN_IN,
    HEAD_Q,
    HEAD_K,
    HEAD_V,
    ROT_Q,
    ROT_K,
    HEAD_Z,
    ATTN_OUT,
    MLP_IN,
    MLP_OUT,
    BLOCK_OUT,
    FINAL_NORM,
)
#: Templates of the points every backend serves unless told otherwise.
FIREABLE_TEMPLATES = (EMBED, ATTN_OUT, MLP_OUT, BLOCK_OUT, FINAL_NORM)
#: Templates of the points that nothing holds and that are rebuilt from queries and keys; they cannot be edited.
REBUILT_TEMPLATES = (ATTN_SCORES, PATTERN)
#: Templates whose rows are made of query heads, and of key-value heads.
Q_HEAD_TEMPLATES = (HEAD_Q, ROT_Q, HEAD_Z)
KV_HEAD_TEMPLATES = (HEAD_K, HEAD_V, ROT_K)

_LOGITS = "logits are rebuilt from the final norm instead: use ForwardResult.logits"

#: Templates of the points that exist by name but cannot fire, each with the reason.
NONFIREABLE_TEMPLATES = {
    "unembed.hook_out": _LOGITS,
}

_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
_BEFORE_Z = TEMPLATES.index(HEAD_Z)
_IN_BLOCKS = tuple(
    template
    for template in (*TEMPLATES[:_BEFORE_Z], *REBUILT_TEMPLATES, *TEMPLATES[_BEFORE_Z:])
    if "{i}" in template
)
#: Position of a template inside its block, as the forward computes it.
_WITHIN_BLOCK = {template.removeprefix("blocks.{i}."): place for place, template in enumerate(_IN_BLOCKS)}


@dataclass(frozen=True, order=True)
class HookPoint:
    """One named point, ordered by when the forward computes it.

    Raises:
        UsageError: ``parse`` was given a name that is no hook point at all.
    """

    stage: int  #: 0 embedding, 1 blocks, 2 after the last block
    block: int  #: index of the block, 0 outside the blocks
    within: int  #: order inside the block
    name: str  #: the canonical name

    @classmethod
    def parse(cls, name: str) -> HookPoint:
        """Read a canonical name into its place in the forward."""
        if name == EMBED:
            return cls(0, 0, 0, name)
        if name == FINAL_NORM:
            return cls(2, 0, 0, name)
        match = _BLOCK.fullmatch(name)
        if match and match[2] in _WITHIN_BLOCK:
            return cls(1, int(match[1]), _WITHIN_BLOCK[match[2]], name)
        msg = f"{name!r} is no fireable hook point; the templates are {', '.join(TEMPLATES)}"
        raise UsageError(msg)

    @property
    def template(self) -> str:
        """The name with the block index replaced by ``{i}``."""
        return _BLOCK.sub(r"blocks.{i}.\2", self.name)

    def depth(self, n_layers: int) -> int:
        """How many blocks' rounding the value carries (0 at the embedding, ``n_layers`` after the last)."""
        return (0, self.block + 1, n_layers)[self.stage]


def all_points(n_layers: int) -> list[str]:
    """The points that a model with ``n_layers`` blocks serves unless told otherwise, in forward order."""
    return every_point(n_layers, FIREABLE_TEMPLATES)


def every_point(n_layers: int, templates: Sequence[str] = TEMPLATES) -> list[str]:
    """Every point of some templates (given in forward order) in a model with ``n_layers`` blocks, in forward order."""
    blocks = (t.format(i=i) for i in range(n_layers) for t in templates if "{i}" in t)
    first, last = ([t] if t in templates else [] for t in (EMBED, FINAL_NORM))
    return [*first, *blocks, *last]


def nonfireable_points(n_layers: int, templates: Mapping[str, str] = NONFIREABLE_TEMPLATES) -> dict[str, str]:
    """Every known but not fireable point of a model with ``n_layers`` blocks, with its reason."""
    return {
        template.format(i=i): reason
        for template, reason in templates.items()
        for i in (range(n_layers) if "{i}" in template else (0,))
    }


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Those names that fit one pattern, whose ``*`` does not cross a dot."""
    segments = pattern.split(".")
    return [
        name
        for name in names
        if len(parts := name.split(".")) == len(segments)
        and all(fnmatch.fnmatchcase(p, s) for p, s in zip(parts, segments, strict=True))
    ]


def select(patterns: Iterable[str], available: Sequence[str]) -> list[str]:
    """Expand shell-style patterns (``blocks.*.hook_out``) over ``available``, keeping its order.

    ``*`` does not cross a dot, so ``blocks.*.hook_out`` never means ``blocks.3.attn.hook_out``.

    Raises:
        UsageError: a pattern matches nothing.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        hits = matching(pattern, available)
        if not hits:
            msg = f"hook pattern {pattern!r} matches none of the {len(available)} points of this model"
            raise UsageError(msg)
        chosen.update(hits)
    return [name for name in available if name in chosen]


def check_capture(
    requested: Iterable[str], supported: Sequence[str], nonfireable: dict[str, str]
) -> list[str]:
    """Check a capture request against what a backend serves.

    Returns:
        The requested names without repeats, in forward order as ``supported`` gives it.

    Raises:
        UsageError: a bare string instead of a sequence of names, a name that is not served (with the reason
            where it is known, with the nearest name otherwise).
    """
    if isinstance(requested, str) or not hasattr(requested, "__iter__"):
        msg = f"capture must be a sequence of hook names, not the string {requested!r}; write [{requested!r}]"
        raise UsageError(msg)
    wanted: list[object] = list(requested)
    known = set(supported)
    for name in wanted:
        if not isinstance(name, str):
            msg = f"capture holds {name!r} ({type(name).__name__}); hook names are strings"
            raise UsageError(msg)
        if name in known:
            continue
        if name in nonfireable:
            msg = f"hook {name!r} is known but cannot fire on this backend: {nonfireable[name]}"
            raise UsageError(msg)
        nearest = difflib.get_close_matches(name, [*supported, *nonfireable], n=1, cutoff=0.0)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        msg = f"unknown hook {name!r}: this model serves {len(known)} points{hint}"
        raise UsageError(msg)
    asked = set(wanted)
    return [name for name in supported if name in asked]
