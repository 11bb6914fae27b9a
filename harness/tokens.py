"""Token ids as callers give them, checked once and in the same words for every backend."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from harness.errors import UsageError

__all__ = ["check_prompts", "token_rows"]


def check_prompts(input_ids: Any, *, vocab_size: int, max_len: int, new_tokens: int = 0) -> list[list[int]]:
    """Turn one flat prompt, a (batch, seq) tensor or ragged lists, possibly of tensors, into lists of ids.

    Args:
        input_ids: the prompts; nothing is padded, cut or prepended.
        vocab_size: ids run from 0 to one below this.
        max_len: places a sequence has.
        new_tokens: places that each prompt must leave free for tokens made after it.

    Raises:
        UsageError: text, no prompt, an empty prompt, an id that is no int or outside the vocabulary, or a prompt that
            does not fit.
    """
    prompts = token_rows(input_ids)
    for index, ids in enumerate(prompts):
        _check(index, ids, vocab_size=vocab_size, max_len=max_len, new_tokens=new_tokens)
    return prompts


def token_rows(input_ids: Any) -> list[list[Any]]:
    """Prompts as lists of whatever they hold, one each; the ids are not looked at.

    Raises:
        UsageError: text, no prompt, or something that holds no rows.
    """
    given = _plain(input_ids)
    if not _is_list(given):
        msg = (
            f"input_ids is {reprlib.repr(given)}, not token ids: pass a list of them, or a list of such lists"
        )
        raise UsageError(msg)
    rows = [_plain(row) for row in given]
    if not rows:
        msg = "no prompts: input_ids is empty"
        raise UsageError(msg)
    if not isinstance(rows[0], Iterable):
        rows = [rows]
    prompts = []
    for index, row in enumerate(rows):
        if not _is_list(row):
            msg = f"prompt {index} is {reprlib.repr(row)}, not a list of token ids; turn text into ids first"
            raise UsageError(msg)
        prompts.append([_plain(token) for token in row])
    return prompts


def _check(index: int, ids: list[Any], *, vocab_size: int, max_len: int, new_tokens: int) -> None:
    if not ids:
        msg = f"prompt {index} is empty: there is no position to compute; give it at least one token (BOS will do)"
        raise UsageError(msg)
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int):
            msg = f"prompt {index} holds {reprlib.repr(token)} at position {position}; token ids are integers"
            raise UsageError(msg)
        if not 0 <= token < vocab_size:
            where = f"prompt {index} has token id {token} at position {position}"
            msg = f"{where}, outside the vocabulary of {vocab_size}"
            raise UsageError(msg)
    if len(ids) + new_tokens > max_len:
        if not new_tokens:
            msg = f"prompt {index} has {len(ids)} tokens; at most {max_len} fit: shorten it"
            raise UsageError(msg)
        msg = (
            f"prompt {index} has {len(ids)} tokens and {new_tokens} new ones were asked for, but max_model_len is "
            f"{max_len} and one place must stay free for the next token: shorten it, or boot with more"
        )
        raise UsageError(msg)


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


def _plain(value: Any) -> Any:
    """Lists and numbers in place of tensors, arrays and numpy's scalars, without importing what made them."""
    return value.tolist() if hasattr(value, "tolist") else value
