"""What a forward gives back, and how scattered rows become one tensor per request.

Rows arrive in pieces: a prompt in chunks, decode steps one by one, requests interleaved, a preempted request
twice. They are joined by exact request key and absolute position and by nothing else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from harness.errors import CaptureError
from harness.points import REBUILT_TEMPLATES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["NO_TOKEN", "ForwardResult", "Ragged", "Segment", "join_segments", "match_request_id", "pad_rows"]


#: Stands for the new token of a backend that has neither tokens nor logits; it is never fed to anything.
NO_TOKEN = -1
#: How names end of points whose value is a matrix of queries by keys.
_SQUARE = tuple(template.partition("{i}")[2] for template in REBUILT_TEMPLATES)


@dataclass
class Ragged:
    """Captures as they came, each request's rows for themselves.

    Attributes:
        names: hooks, in forward order.
        rows: hook → one (n_i, width) per request; emptied as they are padded.
        whole: hook → (batch, heads, seq, seq), of the hooks that have no rows; those that were padded join them.
        starts, columns: where :func:`pad_rows` is to put the rows.
        heads: hook → heads that its rows are made of.
    """

    names: Sequence[str]
    rows: dict[str, list[torch.Tensor]]
    whole: dict[str, torch.Tensor]
    starts: Sequence[int]
    columns: int
    heads: Mapping[str, int]

    def padded(self) -> dict[str, torch.Tensor]:
        """Hook → (batch, seq, width) or, made of heads, (batch, seq, heads, head_dim).

        Each hook's rows are let go of once they are padded, so that a call's captures do not lie there twice; those
        that a worker has lent are one piece of memory, which goes with the last of them.
        """
        for name in self.names:
            if name not in self.whole:
                padded = pad_rows(self.rows[name], starts=self.starts, columns=self.columns)
                self.whole[name] = self._by_head(name, padded)
                del self.rows[name]
        done, self.whole = self.whole, {}  # the caller's now, who may let go of some
        return {name: done[name] for name in self.names}

    def row(self, name: str, request: int) -> torch.Tensor | None:
        """One request's rows, (n, width) or (n, heads, head_dim); None where they are no longer here or never were."""
        return self._by_head(name, self.rows[name][request]) if name in self.rows else None

    def _by_head(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        return rows.unflatten(-1, (self.heads[name], -1)) if name in self.heads else rows


class ForwardResult:
    """One forward over a batch.

    Args:
        captured: what :attr:`captured` is, or what it is made of once somebody asks for it.

    Attributes:
        hooks: names of what was captured, in forward order.
        lengths: rows per request: prompt tokens plus fed-back decode tokens (``n_prompt + k - 1``).
        new_tokens: greedy token ids per request, ``k`` each; :data:`NO_TOKEN` from a backend that makes none.
        logits: (batch, seq, d_vocab) fp32, -inf on padding; None where none were asked for.
        raw_output: the engine's own output, for those who need more; None across a process border.
        stats: fires per hook, forward steps, seconds, whatever the backend measured; JSON-able.
        starts: column of each request's first row; 0 but for a batch that was padded on the left.
        prompts: the real token ids that were run, without padding.
    """

    def __init__(
        self,
        captured: dict[str, torch.Tensor] | Ragged,
        lengths: list[int],
        new_tokens: list[list[int]],
        *,
        logits: torch.Tensor | None = None,
        raw_output: Any = None,
        stats: dict[str, Any] | None = None,
        starts: list[int] | None = None,
        prompts: list[list[int]] | None = None,
    ) -> None:
        self._given = captured
        self.hooks = list(captured.names if isinstance(captured, Ragged) else captured)
        self.lengths = lengths
        self.new_tokens = new_tokens
        self.logits = logits
        self.raw_output = raw_output
        self.stats = stats or {}
        self.starts = starts or [0] * len(lengths)
        self.prompts = prompts or []

    @cached_property
    def captured(self) -> dict[str, torch.Tensor]:
        """Hook name → (batch, seq, width), or (batch, seq, heads, head_dim) where rows are made of heads, at the
        engine's dtype, on CPU, zeros right of each row's end; attention scores and patterns (batch, heads, seq of
        queries, seq of keys), -inf and 0 where nothing is seen.

        Of requests of unlike lengths it is larger than what was captured, and making it takes as long as a copy; where
        each request is looked at for itself, :meth:`rows` does without.
        """  # noqa: D205 - the value is the summary
        return self._given.padded() if isinstance(self._given, Ragged) else self._given

    def rows(self, hook: str, request: int) -> torch.Tensor:
        """The real rows of one request, without padding: a view, which keeps alive what else the call captured.

        Returns:
            (n_rows, width), or (n_rows, heads, head_dim); of scores and patterns (n_rows, heads, n_rows): a row per
            query.
        """
        if isinstance(self._given, Ragged) and (found := self._given.row(hook, request)) is not None:
            return found
        here = self._span(request)
        if hook.endswith(_SQUARE):
            return self.captured[hook][request, :, here, here].transpose(0, 1)
        return self.captured[hook][request, here]

    def rows_by_hook(self) -> dict[str, list[torch.Tensor]]:
        """All captures without padding, heads one after the other: hook → one (n_rows, width) per request."""
        return {
            hook: [self.rows(hook, i).flatten(1) for i in range(len(self.lengths))] for hook in self.hooks
        }

    def logit_rows(self, request: int) -> torch.Tensor:
        """The logits of one request's real rows, (n_rows, d_vocab) fp32.

        Raises:
            CaptureError: none were asked for.
        """
        if self.logits is None:
            msg = "this forward was run without logits; ask for them with return_logits=True"
            raise CaptureError(msg)
        return self.logits[request, self._span(request)]

    def _span(self, request: int) -> slice:
        begin = self.starts[request]
        return slice(begin, begin + self.lengths[request])


@dataclass(frozen=True)
class Segment:
    """Consecutive rows of one request as one step produced them.

    Attributes:
        start: absolute position of the first row.
        rows: (n, width).
    """

    start: int
    rows: torch.Tensor


def join_segments(segments: Iterable[Segment], n_rows: int, *, what: str) -> torch.Tensor:
    """Put segments in their places: (n_rows, width). First write wins; positions ≥ ``n_rows`` are dropped.

    Segments that follow one another, as they do unless a request was preempted, are not looked at row by row, and one
    that is all of it is not copied.

    A preempted request is computed again from position 0, so a later row for a covered position is normal; rows
    past the end come from a forward that an asynchronous scheduler had started before the request stopped.

    Args:
        segments: in the order they were computed.
        n_rows: rows the request must have.
        what: names the request and the hook in errors.

    Raises:
        CaptureError: a position in ``[0, n_rows)`` that no segment covers.
    """
    segments = list(segments)
    if in_a_row := _consecutive(segments, n_rows):
        return in_a_row[0] if len(in_a_row) == 1 else torch.cat(in_a_row)
    joined: torch.Tensor | None = None
    seen = torch.zeros(n_rows, dtype=torch.bool, device="cpu")
    for segment in segments:
        if joined is None:
            joined = segment.rows.new_empty((n_rows, *segment.rows.shape[1:]))
        end = min(segment.start + segment.rows.shape[0], n_rows)
        if segment.start >= end:
            continue
        fresh = ~seen[segment.start : end]
        target = joined[segment.start : end]
        target[fresh] = segment.rows[: end - segment.start][fresh]
        seen[segment.start : end] = True
    if joined is None or not bool(seen.all()):
        missing = (~seen).nonzero().flatten().tolist()
        shown = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        msg = f"{what}: {len(missing)} of {n_rows} rows were never captured (positions {shown})"
        raise CaptureError(msg)
    return joined


def _consecutive(segments: Sequence[Segment], n_rows: int) -> list[torch.Tensor]:
    """Their rows up to ``n_rows``, where each begins at the end of the one before; empty where one does not."""
    found, end = [], 0
    for segment in segments:
        if segment.start != end:
            return []
        here = segment.rows[: n_rows - end]
        if here.shape[0]:
            found.append(here)
        end += segment.rows.shape[0]
    return found if end >= n_rows else []


def pad_rows(
    rows: Sequence[torch.Tensor],
    *,
    starts: Sequence[int] | None = None,
    columns: int | None = None,
    fill: float = 0.0,
) -> torch.Tensor:
    """Stack ragged (n_i, width) tensors into (batch, columns, width), with ``fill`` where there is no row.

    Args:
        rows: one tensor per request.
        starts: column of each request's first row, 0 by default.
        columns: at least as many as the rows need, which is the default.
        fill: what stands elsewhere.
    """
    begins = [0] * len(rows) if starts is None else list(starts)
    needed = max(begin + one.shape[0] for begin, one in zip(begins, rows, strict=True))
    shape = (len(rows), max(needed, columns or 0), rows[0].shape[1])
    padded = torch.empty(shape, dtype=rows[0].dtype, device=rows[0].device)
    for index, (begin, one) in enumerate(zip(begins, rows, strict=True)):
        end = begin + one.shape[0]
        padded[index, :begin], padded[index, end:] = fill, fill
        padded[index, begin:end] = one
    return padded


def match_request_id(external: str, internal: Sequence[str] | Mapping[str, Any]) -> str:
    """Find the engine's internal id of a request by its exact external id.

    vLLM runs ``f"{external}-{8 hex digits}"`` (older releases: the external id itself). A bare prefix is not a match:
    ``a`` must not find ``a-b-0123abcd``.

    Raises:
        CaptureError: no match, or more than one.
    """
    pattern = re.compile(re.escape(external) + r"(-[0-9a-f]{8})?")
    hits = [name for name in internal if pattern.fullmatch(name)]
    if len(hits) != 1:
        found = ", ".join(hits) if hits else "none"
        msg = f"request id {external!r} must match exactly one engine request, found {found} among {len(internal)}"
        raise CaptureError(msg)
    return hits[0]
