"""Attention masks: where the real tokens of a padded batch lie. An engine takes pads for content, so it gets none."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.interventions import Edit, Requests

__all__ = ["read_mask", "shift_edits"]


def read_mask(attention_mask: Any, rows: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """The real span [from, to) of each row of a padded batch.

    Args:
        attention_mask: (batch, seq) of 0 and 1, as a tensor or lists; pads may stand left, right or on both sides.
        rows: the token ids it belongs to, padding included.

    Raises:
        UsageError: another shape, another value, a row without a real token, a hole between real tokens.
    """
    mask = attention_mask.tolist() if hasattr(attention_mask, "tolist") else attention_mask
    if not isinstance(mask, (list, tuple)):
        msg = f"attention_mask is {attention_mask!r}; it has one row of 0 and 1 per prompt"
        raise UsageError(msg)
    if mask and not hasattr(mask[0], "__len__"):
        mask = [mask]
    if len(mask) != len(rows):
        msg = f"attention_mask has {len(mask)} rows for {len(rows)} prompts"
        raise UsageError(msg)
    spans = []
    for index, (line, row) in enumerate(zip(mask, rows, strict=True)):
        values = line.tolist() if hasattr(line, "tolist") else line
        if not isinstance(values, (list, tuple)):
            msg = f"attention_mask row {index} is {line!r}, not a row of 0 and 1"
            raise UsageError(msg)
        if len(values) != len(row):
            msg = f"attention_mask row {index} has {len(values)} values for {len(row)} tokens"
            raise UsageError(msg)
        odd = next((value for value in values if value not in (0, 1)), None)
        if odd is not None:
            msg = f"attention_mask row {index} holds {odd!r}; a mask is 1 at real tokens and 0 at padding"
            raise UsageError(msg)
        real = [place for place, value in enumerate(values) if value]
        if not real:
            msg = f"attention_mask row {index} has no real token; leave the row out"
            raise UsageError(msg)
        if real[-1] - real[0] + 1 != len(real):
            hole = next(place for place in range(real[0], real[-1]) if not values[place])
            msg = f"attention_mask row {index} has a hole at position {hole}: the real tokens must be contiguous"
            raise UsageError(msg)
        spans.append((real[0], real[-1] + 1))
    return spans


def shift_edits(requests: Requests, starts: Sequence[int]) -> list[tuple[Edit, ...]]:
    """Edits whose positions count from each row's padded beginning → from its first real token.

    Raises:
        UsageError: a position in the padding before the first real token.
    """
    shifted = []
    for index, (edits, start) in enumerate(zip(requests, starts, strict=True)):
        for edit in edits:
            if edit.pos is not None and edit.pos[0] < start:
                msg = (
                    f"hook {edit.hook!r}, key 'pos': position {edit.pos[0]} of request {index} is padding; its real "
                    f"tokens begin at {start}"
                )
                raise UsageError(msg)
        shifted.append(
            tuple(
                edit if edit.pos is None else replace(edit, pos=tuple(p - start for p in edit.pos))
                for edit in edits
            )
        )
    return shifted
