"""A call checked before anything is sent: what runs, what is edited, and where its rows belong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.errors import UsageError
from harness.interventions import parse_interventions, plan_programs
from harness.masks import read_mask, shift_edits
from harness.tokens import check_prompts, token_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from harness.interventions import Edit

__all__ = ["Call", "Limits", "check_stops"]


@dataclass(frozen=True)
class Call:
    """A checked call.

    Attributes:
        prompts: the real token ids, which are what is sent.
        edits: per request, positions counting from its first real token.
        starts: column of each request's first row in the padded batch.
        columns: of that batch; 0 where there is no padding.
    """

    prompts: list[list[int]]
    edits: list[tuple[Edit, ...]]
    starts: list[int]
    columns: int


@dataclass(frozen=True)
class Limits:
    """What one engine can serve.

    Attributes:
        vocab_size: ids run from 0 to one below this.
        max_model_len: places a request has, its new tokens included.
        widths: hook → width, of every hook that can be edited, in forward order.
        nonfireable: known hooks that cannot be, with the reason.
        max_programs: distinct combinations of edits in one call.
        dtype: the engine's.
    """

    vocab_size: int
    max_model_len: int
    widths: Mapping[str, int]
    nonfireable: Mapping[str, str]
    max_programs: int
    dtype: torch.dtype

    def check(self, input_ids: Any, attention_mask: Any, intervene: Any, k: int) -> Call:
        """Check everything a call of ``k`` new tokens brings.

        Raises:
            UsageError: a prompt, mask, edit or number of tokens that cannot be served.
        """
        if type(k) is not int or k < 1:
            msg = f"max_new_tokens must be an integer from 1, not {k!r}"
            raise UsageError(msg)
        if attention_mask is None:
            real, starts, columns = input_ids, None, 0
        else:
            rows = token_rows(input_ids)  # pads may be no token of the vocabulary at all
            spans = read_mask(attention_mask, rows)
            real = [row[begin:end] for row, (begin, end) in zip(rows, spans, strict=True)]
            starts, columns = [begin for begin, _ in spans], max(map(len, rows))
        prompts = check_prompts(real, vocab_size=self.vocab_size, max_len=self.max_model_len, new_tokens=k)
        starts = [0] * len(prompts) if starts is None else starts
        edits = parse_interventions(
            intervene,
            widths=self.widths,
            nonfireable=self.nonfireable,
            lengths=[begin + len(prompt) + k - 1 for begin, prompt in zip(starts, prompts, strict=True)],
            dtype=self.dtype,
        )
        edits = shift_edits(edits, starts)
        plan_programs(edits, limit=self.max_programs)
        return Call(prompts, edits, starts, columns)


def check_stops(stop_token_ids: Any, vocab_size: int) -> list[int]:
    """Stop tokens as a list of ids.

    Raises:
        UsageError: something else.
    """
    if isinstance(stop_token_ids, Iterable) and not isinstance(stop_token_ids, str | bytes):
        stops = list(stop_token_ids)
        if all(type(token) is int and 0 <= token < vocab_size for token in stops):
            return stops
    msg = f"stop_token_ids is {stop_token_ids!r}; it is a list of token ids from 0 to {vocab_size - 1}"
    raise UsageError(msg)
