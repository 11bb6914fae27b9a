"""Explanations by what a value was made of: another hook, half a sum, a weight, a factor, an edit, a rank's part."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import torch

from harness.parity.rows import forward_order
from harness.parity.scene import NEAR, SHARE, Match, Scene, distance, take
from harness.points import FINAL_NORM

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "empty_rows",
    "factors",
    "leaked_edits",
    "mixed_parts",
    "other_hooks",
    "sums",
    "unedited_rows",
    "weighted_norms",
]

EMPTY, UNEDITED, EDIT, HOOK, SUM, WEIGHT, PARTS, FACTOR, ROW_FACTOR = 0, 5, 25, 30, 40, 45, 50, 60, 70

_BLOCK = re.compile(r"blocks\.(\d+)\.(attn\.hook_out|mlp\.hook_out|hook_out)")
#: A factor within this share of a known one is that one: bf16 rounds √width by up to 0.4 %.
_FACTOR_TOLERANCE = 0.01
#: A factor this near one is told by what it differs by.
_NEAR_ONE = 1e-2
#: Below this width a factor per row is too free a fit.
_MIN_WIDTH = 16


def empty_rows(scene: Scene) -> Iterator[Match]:
    """Nothing was computed, or nothing usable: all zeros, one constant, or not finite."""
    rows = scene.engine
    varied = ~(scene.own == scene.own[:, :1]).all(dim=1)
    flat = (rows == rows[:, :1]).all(dim=1) & varied
    enough = math.ceil(SHARE * len(scene.refs))
    if int((flat & (rows[:, 0] == 0)).sum()) >= enough:
        yield Match("is all zeros", 0.0, EMPTY)
    elif int(flat.sum()) >= enough:
        yield Match("holds one constant in every channel", 0.0, EMPTY)
    elif int((~torch.isfinite(rows)).any(dim=1).sum()) >= enough:
        yield Match("holds NaN or infinity where the truth is finite", 0.0, EMPTY)


def _block(hook: str) -> tuple[int, str] | None:
    match = _BLOCK.fullmatch(hook)
    return (int(match[1]), match[2]) if match else None


def _reading(hook: str, other: str) -> str:
    """What it means that ``hook`` holds ``other``'s values."""
    if hook == FINAL_NORM:
        return ", so the norm was not applied" if other.endswith(".hook_out") else ""
    here, there = _block(hook), _block(other)
    if here is None or there is None:
        return ""
    if here[1] == there[1]:
        n = there[0] - here[0]
        return f", so it is off by {abs(n)} layer{'s' if abs(n) > 1 else ''}"
    if here == (there[0], "hook_out") and there[1] == "mlp.hook_out":
        return ", so the residual half is missing"
    if here[0] == there[0] and there[1] == "hook_out":
        return ", so the residual stream was added to what should be the delta alone"
    return ""


def other_hooks(scene: Scene) -> Iterator[Match]:
    """The rows of another hook of the reference, at the same places."""
    for other in forward_order(scene.truth):
        if other == scene.hook or (rows := scene.at(other)) is None:
            continue
        text = f"equals {other} of the reference{_reading(scene.hook, other)}"
        match = scene.match(text, rows, HOOK, bound=scene.bounds.get(other))
        if match is not None:
            yield match


def sums(scene: Scene) -> Iterator[Match]:
    """Halves of the residual sum left out or counted twice.

    With ``out = in + attn + mlp``, where ``in`` is the block before, ``out - mlp`` is what an engine that carries the
    residual apart holds as such after attention.
    """
    block = _block(scene.hook)
    if block is None:
        return
    i, part = block
    attn, mlp = scene.at(f"blocks.{i}.attn.hook_out"), scene.at(f"blocks.{i}.mlp.hook_out")
    out = scene.at(f"blocks.{i}.hook_out")
    entering = f"blocks.{i - 1}.hook_out" if i else "embed.hook_out"
    before = scene.at(entering)
    trials: list[tuple[str, torch.Tensor | None]] = []
    if part == "hook_out" and out is not None:
        if mlp is not None:
            trials += [
                (
                    f"equals the residual half alone: blocks.{i}.mlp.hook_out is missing from the sum",
                    out - mlp,
                ),
                (f"holds blocks.{i}.mlp.hook_out twice", out + mlp),
                ("holds the residual half twice", 2 * out - mlp),
            ]
        if attn is not None:
            trials += [
                (f"lacks blocks.{i}.attn.hook_out in its sum", out - attn),
                (f"holds blocks.{i}.attn.hook_out twice", out + attn),
            ]
        if before is not None:
            trials += [
                (f"lacks {entering} in its sum", out - before),
                (f"holds {entering} twice", out + before),
            ]
    elif part == "attn.hook_out" and attn is not None and before is not None:
        trials.append(("equals attention's delta plus the residual stream before it", attn + before))
    for text, candidate in trials:
        if candidate is not None and (match := scene.match(text, candidate, SUM)) is not None:
            yield match


def weighted_norms(scene: Scene) -> Iterator[Match]:
    """The final norm with its weight multiplied in, or divided out once too often."""
    weight = scene.clues.final_norm_weight
    if scene.hook != FINAL_NORM or weight is None or weight.numel() != scene.width:
        return
    w = weight.detach().double().flatten()
    trials = [
        ("equals the reference times the final norm's weight: the weight is folded in", scene.own * w),
        (
            "equals the reference times (1 + the final norm's weight): the weight is folded in",
            scene.own * (1 + w),
        ),
        (
            "equals the reference over the final norm's weight: it was divided out of a value without it",
            scene.own / w,
        ),
        (
            "equals the reference over (1 + the final norm's weight): the refold is the wrong one",
            scene.own / (1 + w),
        ),
        (
            "equals the reference times weight / (1 + weight): the refold is the wrong one",
            scene.own * w / (1 + w),
        ),
        (
            "equals the reference times (1 + weight) / weight: the refold is the wrong one",
            scene.own * (1 + w) / w,
        ),
    ]
    for text, candidate in trials:
        match = scene.match(text, candidate, WEIGHT) if bool(torch.isfinite(candidate).all()) else None
        if match is not None:
            yield match


def _known_factor(a: float, width: int) -> str:
    root = math.sqrt(width)
    known = {
        1 / root: "1/√width: the embedding's √width is missing",
        root: "√width: the embedding's √width is applied where it does not belong",
        2.0: "2",
        0.5: "1/2",
        -1.0: "-1",
    }
    near = (name for value, name in known.items() if math.isclose(a, value, rel_tol=_FACTOR_TOLERANCE))
    # Near one, four digits would show none of what is wrong.
    return next(near, f"{a:.4g}" if abs(a - 1) > _NEAR_ONE else f"(1 {a - 1:+.2g})")


def factors(scene: Scene) -> Iterator[Match]:
    """The truth times one constant (least squares over all failing rows), or times a factor of each row's own."""
    projections = (scene.engine * scene.own).sum(dim=1)
    squares = scene.own.square().sum(dim=1)
    # Each row counts alike whatever its norm: a massive row would else set the factor for all.
    a = float((projections / squares).mean()) if bool((squares > 0).all()) else math.nan
    if not math.isfinite(a) or a == 0:
        return
    text = f"equals the reference times {_known_factor(a, scene.width)}"
    match = scene.match(text, a * scene.own, FACTOR)
    if match is not None:
        yield match
    elif scene.width >= _MIN_WIDTH:
        each = (projections / squares).unsqueeze(1)
        low, high = float(each.min()), float(each.max())
        lengths = f"{low:.3g} to {high:.3g} times"
        text = f"has the reference's direction and another length ({lengths}): a norm too many or too few"
        match = scene.match(text, each * scene.own, ROW_FACTOR)
        if match is not None:
            yield match


def unedited_rows(scene: Scene) -> Iterator[Match]:
    """The rows of the same call without its edits."""
    rows = (scene.clues.unedited or {}).get(scene.hook)
    if rows is None or [r.shape for r in rows] != [r.shape for r in scene.truth[scene.hook]]:
        return
    match = scene.match(
        "equals the same call without edits: the edit does not show here", take(rows, scene.refs), UNEDITED
    )
    if match is not None:
        yield match


def leaked_edits(scene: Scene) -> Iterator[Match]:
    """E - T is a known edit vector (it leaked in), or minus one (it did not bite)."""
    difference = scene.engine - scene.own
    for label, vector in scene.clues.edits:
        edit = vector.detach().double().flatten()
        if edit.numel() != scene.width or not bool(edit.any()):
            continue
        trials = (
            (f"differs by exactly the edit {label}: it was applied where it was not asked for", edit),
            (f"differs by exactly minus the edit {label}: it did not bite", -edit),
        )
        for text, expected in trials:
            distances = distance(difference, expected.expand_as(difference))
            error = float(distances.sort().values[math.ceil(SHARE * len(scene.refs)) - 1])
            if error <= NEAR:
                yield Match(text, error, EDIT)


def mixed_parts(scene: Scene) -> Iterator[Match]:
    """Equal contiguous parts of the channels, as ranks shard them, hold each other's values or none."""
    for count in (2, 4, 8):
        if scene.width % count or scene.width // count < 2:
            continue
        theirs = scene.own.chunk(count, dim=1)
        sources: list[int | None] = []
        columns: list[torch.Tensor] = []
        for part in scene.engine.chunk(count, dim=1):
            if not bool(part.any()):
                sources.append(None)
                columns.append(torch.zeros_like(part))
                continue
            gaps = [float((part - other).norm(dim=1).median()) for other in theirs]
            best = min(range(count), key=gaps.__getitem__)
            sources.append(best)
            columns.append(theirs[best])
        if sources == list(range(count)):
            continue
        size = scene.width // count
        wrong = [(i, j) for i, j in enumerate(sources) if i != j]
        told = ", ".join(
            f"channels {i * size} to {(i + 1) * size - 1} "
            + ("are zero" if j is None else f"hold {j * size} to {(j + 1) * size - 1}")
            for i, j in wrong
        )
        text = f"is the reference with parts of its channels misplaced ({told})"
        match = scene.match(text, torch.cat(columns, dim=1), PARTS)
        if match is not None:
            yield match
            return
