"""Whether a peer returned the right values at all: the residual stream after each block, row by row.

This tells right from wrong (another layer's, another row's, half of the stream), no more. Whether values are as near as
the dtype allows is what the suites judge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.points import BLOCK_OUT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch

__all__ = ["BOUNDS", "judge_values", "truth_of"]

#: Largest relative error of a row that passes, by dtype: a hundred times what a right one has, a hundredth of what a
#: wrong one has.
BOUNDS = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.05}

Truth = "Mapping[tuple[int, int], torch.Tensor]"


def truth_of(model: str, prompts: Sequence[Sequence[int]]) -> dict[tuple[int, int], torch.Tensor]:
    """(prompt, block) → (length, width) at fp64, by transformers, one prompt at a time."""
    from harness.reference.backend import boot_reference

    with boot_reference(model, "float64") as reference:
        names = [name for name in reference.supported_hook_points if _is_block(name)]
        result = reference.forward([list(prompt) for prompt in prompts], capture=names)
    return {
        (prompt, block): result.rows(name, prompt)
        for prompt in range(len(prompts))
        for block, name in enumerate(names)
    }


def _is_block(name: str) -> bool:
    return name.startswith("blocks.") and name == BLOCK_OUT.format(i=name.split(".")[1])


def judge_values(
    file: Path, truth: Mapping[tuple[int, int], torch.Tensor], bound: float
) -> tuple[float, str]:
    """The largest relative error of a row, and what is wrong: where it begins, or nothing.

    Args:
        file: safetensors with ``prompt/block`` → (length, width).
        truth: (prompt, block) → (length, width).
        bound: what a row may err by.
    """
    from safetensors.torch import load_file

    found = {tuple(int(part) for part in name.split("/")): value for name, value in load_file(file).items()}
    if not found:
        return float("inf"), "it returned no values"
    worst, wrong = 0.0, ""
    for key in sorted(found, key=lambda key: (key[1], key[0])):
        prompt, block = key
        here = f"block {block} of prompt {prompt}"
        if (prompt, block) not in truth:
            return float("inf"), f"{here} does not exist"
        value, expected = found[key].double(), truth[prompt, block].double()
        if value.shape != expected.shape:
            return (
                float("inf"),
                f"{here} has shape {tuple(value.shape)} and should have {tuple(expected.shape)}",
            )
        errors = (value - expected).norm(dim=-1) / expected.norm(dim=-1)
        error = float(errors.nan_to_num(nan=float("inf")).max())
        worst = max(worst, error)
        if not wrong and not error <= bound:
            wrong = f"wrong values from {here} on, row {int(errors.nan_to_num(nan=float('inf')).argmax())}: "
            wrong += f"relative error {error:.2g}, at most {bound:g} is noise"
    return worst, wrong
