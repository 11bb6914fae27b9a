"""What a plain backend gave, held against what it was asked for, before a number of it is looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from harness.conventions import dtype_name
from harness.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.elsewhere.plain import Reply
    from harness.geometry import Geometry

__all__ = ["Expected", "check_rows"]


@dataclass(frozen=True)
class Expected:
    """One call: who was asked, and for what.

    Attributes:
        who: the backend, for errors.
        dtype: of captured rows.
        lengths: rows per prompt.
        new_tokens: per prompt.
        vocab: columns of logits.
    """

    who: str
    geometry: Geometry
    dtype: str
    names: Sequence[str]
    lengths: Sequence[int]
    new_tokens: int
    logits: bool
    vocab: int

    def fail(self, what: str) -> CaptureError:
        """An error that is charged to the backend."""
        return CaptureError(f"backend {self.who} returned {what}")


def check_rows(expected: Expected, reply: Reply, *, decode: bool) -> None:
    """Refuse a reply that is not what was asked for.

    Raises:
        CaptureError: points missing or not asked for, another number of prompts, a tensor of another shape or dtype,
            tokens too few, too many or of no vocabulary, logits that are not there.
    """
    if set(reply.captured) != set(expected.names):
        missing = sorted(set(expected.names) - set(reply.captured))
        extra = sorted(set(reply.captured) - set(expected.names))
        what = (
            f"no {', '.join(missing[:3])}" if missing else f"{', '.join(extra[:3])}, which nobody asked for"
        )
        raise expected.fail(what)
    for name in expected.names:
        shape = expected.geometry.shape(name)
        _check(expected, name, reply.captured[name], shape, expected.dtype)
    if expected.logits:
        if reply.logits is None:
            raise expected.fail("no logits, which it declares")
        _check(expected, "logits", reply.logits, (expected.vocab,), "float32")
    if decode or reply.new_tokens:
        counts = [len(tokens) for tokens in reply.new_tokens]
        if counts != [expected.new_tokens] * len(expected.lengths):
            raise expected.fail(f"{counts} new tokens where {expected.new_tokens} each were asked for")
        for prompt, tokens in enumerate(reply.new_tokens):
            wrong = [token for token in tokens if not 0 <= token < expected.vocab]
            if wrong:
                what = f"{wrong[0]} as a new token of prompt {prompt}, of a vocabulary of {expected.vocab}"
                raise expected.fail(what)


def _check(expected: Expected, name: str, found: Sequence[Any], row: tuple[int, ...], dtype: str) -> None:
    if len(found) != len(expected.lengths):
        raise expected.fail(f"{name} of {len(found)} prompts where {len(expected.lengths)} were run")
    for prompt, (tensor, n_rows) in enumerate(zip(found, expected.lengths, strict=True)):
        if not isinstance(tensor, torch.Tensor):
            raise expected.fail(f"{name} of prompt {prompt} as {type(tensor).__name__}, not as a tensor")
        if tuple(tensor.shape) != (n_rows, *row):
            raise expected.fail(
                f"{name} of prompt {prompt} with shape {tuple(tensor.shape)} where {(n_rows, *row)} was asked for"
            )
        if dtype_name(tensor.dtype) != dtype:
            raise expected.fail(
                f"{name} of prompt {prompt} as {dtype_name(tensor.dtype)} where {dtype} was asked for"
            )
