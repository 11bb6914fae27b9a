"""Prompts of different lengths as one rectangle, and which row of which prompt each of its cells is, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Rectangle", "edited"]


class Rectangle:
    """Prompts padded on the left, as generation asks, and their edits.

    Step 0 computes every column of the prompts, each later step one: the token that the step before it gave.

    Attributes:
        ids: (batch, longest) int64, 0 on padding.
        mask: the same, 1 on tokens.
        positions: the same, of each token in its prompt; 0 on padding.
        edits: point → prompt → edit.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], edits: Sequence[Sequence[Mapping[str, Any]]]
    ) -> None:
        self._lengths = [len(prompt) for prompt in prompts]
        self._longest = max(self._lengths)
        self.ids = torch.zeros(len(prompts), self._longest, dtype=torch.int64)
        self.mask = torch.zeros_like(self.ids)
        for row, prompt in enumerate(prompts):
            self.ids[row, self._longest - len(prompt) :] = torch.tensor(prompt)
            self.mask[row, self._longest - len(prompt) :] = 1
        self.positions = (self.mask.cumsum(dim=1) - 1).clamp(min=0)
        self.edits: dict[str, dict[int, Mapping[str, Any]]] = {}
        for row, here in enumerate(edits):
            for edit in here:
                self.edits.setdefault(edit["hook"], {})[row] = edit

    def _first(self, step: int, prompt: int) -> int:
        """The row in a step's first column; below 0 where that is padding."""
        length = self._lengths[prompt]
        return length + step - 1 if step else length - self._longest

    def edited(self, name: str, step: int, value: torch.Tensor) -> torch.Tensor:
        """A point's value at a step, (batch, columns, width), with its edits made; itself where there are none."""
        edits = self.edits.get(name, {})
        if not edits:
            return value
        columns: dict[int, slice | list[int]] = {}
        for prompt, edit in edits.items():
            first = self._first(step, prompt)
            rows = edit["rows"]
            columns[prompt] = (
                slice(max(0, -first), None)
                if rows is None
                else [row - first for row in rows if 0 <= row - first < value.shape[1]]
            )
        return edited(value, edits, columns)

    def rows(self, steps: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One (rows, width) per prompt out of one (batch, columns, width) per step."""
        return [
            torch.cat(
                [value[prompt, max(0, -self._first(step, prompt)) :] for step, value in enumerate(steps)]
            )
            for prompt in range(len(self._lengths))
        ]


def edited(
    value: torch.Tensor, edits: Mapping[int, Mapping[str, Any]], columns: Mapping[int, slice | list[int]]
) -> torch.Tensor:
    """A point's value with its edits made, as a new tensor.

    Args:
        value: (batch, columns, width).
        edits: prompt → the edit there.
        columns: prompt → where it is made.
    """
    value = value.clone()
    for prompt, edit in edits.items():
        at = columns[prompt]
        rows = value[prompt, at].float()
        # A scale of 0 makes the row the bias, whatever was in it: inf · 0 would be NaN.
        kept = rows * edit["scale"] if edit["scale"] else torch.zeros_like(rows)
        value[prompt, at] = (kept + edit["bias"]).to(value.dtype)
    return value
