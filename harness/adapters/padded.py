"""What adapters on transformers share: prompts padded into one rectangle, edits of its rows, rows out of it."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["OPS", "PaddedBackend", "edited", "tokenizer_of"]

OPS = ("suppress", "scale", "add", "set")


def edited(value: torch.Tensor, edits: Mapping[int, Mapping[str, Any]]) -> torch.Tensor:
    """A point's value with its edits made, as a new tensor.

    Args:
        value: (batch, longest, width).
        edits: prompt → the edit there.
    """
    value = value.clone()
    for prompt, edit in edits.items():
        at = slice(None) if edit["rows"] is None else edit["rows"]
        rows = value[prompt, at].float()
        # A scale of 0 makes the row the bias, whatever was in it: inf · 0 would be NaN.
        kept = rows * edit["scale"] if edit["scale"] else torch.zeros_like(rows)
        value[prompt, at] = (kept + edit["bias"]).to(value.dtype)
    return value


class PaddedBackend:
    """Base of such an adapter; a subclass has ``packages``, ``points``, ``capabilities``, ``boot`` and ``call``."""

    #: Distributions whose versions are told.
    packages: tuple[str, ...] = ()

    def __init__(self, model: Any) -> None:
        self.model = model

    def describe(self) -> dict[str, Any]:
        """Versions."""
        return {name: version(name) for name in (*self.packages, "transformers", "torch")}

    @torch.no_grad()
    def run(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        capture: Sequence[str],
        edits: Sequence[Sequence[Mapping[str, Any]]],
        new_tokens: int,
        logits: bool,
    ) -> dict[str, Any]:
        """See :class:`harness.elsewhere.PlainBackend`."""
        del new_tokens  # one: decode is not declared
        lengths = [len(prompt) for prompt in prompts]
        ids = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
            mask[row, : len(prompt)] = 1
        by_hook: dict[str, dict[int, Mapping[str, Any]]] = {}
        for row, here in enumerate(edits):
            for edit in here:
                by_hook.setdefault(edit["hook"], {})[row] = edit
        captured, all_logits = self.call(ids, mask, list(capture), by_hook)
        found: dict[str, Any] = {
            "captured": {name: [captured[name][row, :n] for row, n in enumerate(lengths)] for name in capture}
        }
        if logits:
            found["logits"] = [all_logits[row, :n].float() for row, n in enumerate(lengths)]
        return found

    def call(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        capture: list[str],
        edits: Mapping[str, Mapping[int, Mapping[str, Any]]],
    ) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        """Run one rectangle.

        Args:
            ids: (batch, longest) int64.
            mask: the same, 0 on padding.
            capture: points wanted, by their canonical names.
            edits: point → prompt → edit.

        Returns:
            Point → (batch, longest, width), and logits (batch, longest, vocabulary).
        """
        raise NotImplementedError

    def close(self) -> None:
        """Free the model; safe to call twice."""
        self.model = None


def tokenizer_of(path: str) -> Any:
    """A tokenizer that knows nothing, for a library that insists on one; None for a checkpoint that has its own."""
    if any(
        (Path(path) / name).is_file()
        for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    ):
        return None
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    end = "<|endoftext|>"
    model = Tokenizer(WordLevel({end: 0}, unk_token=end))
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token=end, pad_token=end)
