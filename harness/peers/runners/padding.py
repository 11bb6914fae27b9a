"""What is fed to a model that takes rectangles: prompts sorted by length, a few at a time, padded on the right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["Padded", "in_micro_batches", "rows_of"]


@dataclass(frozen=True)
class Padded:
    """Some of the prompts: which, and (batch, longest) token ids and mask, int64."""

    numbers: list[int]
    ids: torch.Tensor
    mask: torch.Tensor


def in_micro_batches(prompts: Sequence[Sequence[int]], size: int) -> Iterator[Padded]:
    """All prompts, ``size`` at a time, the shortest first, so that few rows are padding."""
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    for begin in range(0, len(order), size):
        numbers = order[begin : begin + size]
        longest = len(prompts[numbers[-1]])
        ids = torch.zeros(len(numbers), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, number in enumerate(numbers):
            prompt = prompts[number]
            ids[row, : len(prompt)] = torch.tensor(prompt)
            mask[row, : len(prompt)] = 1
        yield Padded(numbers, ids, mask)


def rows_of(
    collected: Sequence[tuple[Padded, Mapping[int, torch.Tensor]]], prompt: int
) -> dict[int, torch.Tensor]:
    """One prompt's rows: block → (length, width), of {block: (batch, longest, width)} per micro-batch."""
    for padded, values in collected:
        if prompt in padded.numbers:
            row = padded.numbers.index(prompt)
            length = int(padded.mask[row].sum())
            return {block: value[row, :length] for block, value in values.items()}
    raise KeyError(prompt)


class PaddedRunner:
    """Base of the peers that run on a transformers model."""

    packages: tuple[str, ...] = ()

    def __init__(self, model: Any, task: Mapping[str, Any]) -> None:
        self.model = model
        self.micro_batch = int(task["micro_batch"])

    @torch.no_grad()
    def collect(self, prompts: Sequence[Sequence[int]]) -> list[tuple[Padded, dict[int, torch.Tensor]]]:
        """Block → (batch, longest, width) per micro-batch."""
        return [(padded, self.collect_one(padded)) for padded in in_micro_batches(prompts, self.micro_batch)]

    @torch.no_grad()
    def plain(self, prompts: Sequence[Sequence[int]]) -> None:
        """Nothing is kept."""
        for padded in in_micro_batches(prompts, self.micro_batch):
            self.plain_one(padded)

    def collect_one(self, padded: Padded) -> dict[int, torch.Tensor]:
        """One micro-batch: block → (batch, longest, width)."""
        raise NotImplementedError

    def plain_one(self, padded: Padded) -> None:
        """One micro-batch, nothing collected."""
        self.model(input_ids=padded.ids, attention_mask=padded.mask, use_cache=False)

    def residuals(self, collected: Any, prompt: int) -> dict[int, torch.Tensor]:
        """Block → (length, width)."""
        return rows_of(collected, prompt)
