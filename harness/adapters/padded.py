"""What adapters on transformers share: prompts in one rectangle, rows out of every step of it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .names import everywhere, patterns
from .rectangle import Rectangle

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["PaddedBackend", "Passes", "declared", "tokenizer_of"]


def declared(names: Iterable[str], **more: Any) -> dict[str, Any]:
    """Capabilities of a library in whose hooks a user's own code runs: everything, at these points."""
    names = list(names)
    flags = dict.fromkeys(("batch", "decode", "edit_per_prompt", "edit_positions", "logits"), True)
    return {"capture": patterns(names), "edit": everywhere(names), **flags, **more}


@dataclass(frozen=True)
class Passes:
    """What the forwards of one call gave: the prompts', and one for each new token but the last.

    Attributes:
        values: point → one (batch, columns, width) per forward.
        logits: one (batch, columns, vocabulary) per forward; at least the last column.
        tokens: (batch, new) int64 where the library generated; None: what the logits say.
    """

    values: Mapping[str, Sequence[torch.Tensor]]
    logits: Sequence[torch.Tensor]
    tokens: torch.Tensor | None = None


class PaddedBackend:
    """Base of such an adapter; a subclass has ``packages``, ``capabilities``, ``boot`` and ``call``."""

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
        batch = Rectangle(prompts, edits)
        passes = self.call(batch, list(capture), new_tokens, logits=logits)
        tokens = passes.tokens
        if tokens is None:
            tokens = torch.stack([one[:, -1].argmax(dim=-1) for one in passes.logits], dim=1)
        found: dict[str, Any] = {
            "captured": {name: batch.rows(passes.values[name]) for name in capture},
            "new_tokens": tokens.tolist(),
        }
        if logits:
            found["logits"] = [rows.float() for rows in batch.rows(passes.logits)]
        return found

    def call(self, batch: Rectangle, capture: list[str], new_tokens: int, *, logits: bool) -> Passes:
        """Run one rectangle, with the library's way to run a forward for one new token, and to generate for more.

        Args:
            batch: what to run, and its edits.
            capture: points wanted, by their canonical names.
            new_tokens: greedy, and not ended by any token.
            logits: whether those of every column are wanted, and not just the last one's.
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
