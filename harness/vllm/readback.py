"""Captured rows on their way from the ranks to the driver: verified on the first call, joined, one copy at a time."""

from __future__ import annotations

import os
from functools import cached_property
from typing import TYPE_CHECKING, Any

from harness.errors import CaptureError
from harness.points import FINAL_NORM
from harness.vllm import internals
from harness.vllm.layout import Layout, Place, join_shares, verify_layout
from harness.vllm.lending import borrow, where_lent
from harness.vllm.wire import decode_block

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

__all__ = ["Readback"]


class Readback:
    """Reads what one engine's ranks have captured.

    Args:
        llm: the engine.
        heads: hook → heads that its rows are made of, where each rank has its share of them.
    """

    def __init__(self, llm: Any, heads: Mapping[str, int]) -> None:
        self._llm = llm
        self._heads = heads

    @cached_property
    def layout(self) -> Layout:
        """Which rank serves what, as far as it has been seen."""
        return Layout([Place(*place) for place in internals.call_workers(self._llm, "tl_place")])

    @cached_property
    def way(self) -> str:
        """How rows come here from the ranks, see :func:`harness.vllm.lending.where_lent`."""
        content = os.urandom(16)
        lent = internals.call_workers(self._llm, "tl_lend", args=(content,))
        found = where_lent(lent, content)
        internals.call_workers(self._llm, "tl_take_back")
        return found

    def collect(
        self, names: Sequence[str], keys: Sequence[str], lengths: Sequence[int], *, edited: bool
    ) -> dict[str, list[torch.Tensor]]:
        """Captured rows per request: hook → one (n, width) each.

        A hook's first call reads every replica and verifies the layout; later ones read one. Edits are applied by each
        rank for itself, and after the last all-reduce nothing would show that one of them did not: edited calls are
        always verified.

        Raises:
            CaptureError: a hook was silent, a row is missing, or the ranks do not fit together.
        """
        expected = dict(zip(keys, lengths, strict=True))
        fresh = [name for name in names if edited or name not in self.layout.served]
        # A call's captures may be as large as the step buffers themselves: nothing of them should lie there twice.
        release = [name for name in names if name != FINAL_NORM]  # logits are still to be made of that
        answers = internals.call_workers(
            self._llm, "tl_read_blocks", args=(list(names), expected, bool(fresh), release, self.way)
        )
        by_rank = [_by_request(seen, blocks, address, expected) for seen, blocks, address in answers]
        if fresh:
            fired = internals.call_workers(self._llm, "tl_fires_since_armed")
            verify_layout(self.layout, fresh, by_rank, fired, heads=self._heads)
        return {name: self._rows(name, keys, by_rank) for name in names}

    def _rows(
        self, name: str, keys: Sequence[str], by_rank: Sequence[Mapping[str, Mapping[str, torch.Tensor]]]
    ) -> list[torch.Tensor]:
        heads = self._heads.get(name, 0)
        found = []
        for number, key in enumerate(keys):
            rows = join_shares(self.layout, name, [rank.get(key, {}) for rank in by_rank], heads)
            if rows is None:
                msg = f"{name} never fired for request {number}: it is installed, but no forward ran it"
                raise CaptureError(msg)
            found.append(rows)
        return found


def _by_request(
    seen: Sequence[str],
    blocks: Mapping[str, Any],
    address: Sequence[int] | None,
    lengths: Mapping[str, int],
) -> dict[str, dict[str, torch.Tensor]]:
    """One rank's blocks as request key → hook → (n, width): views."""
    lent = None if address is None else borrow(address)
    counts = [lengths[key] for key in seen]
    parts = {
        name: block if isinstance(block, list) else decode_block(block, lent).split(counts)
        for name, block in blocks.items()
    }
    return {key: {name: some[number] for name, some in parts.items()} for number, key in enumerate(seen)}
