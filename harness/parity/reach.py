"""How far edits can reach: which rows of which hooks may differ from a clean run, by the model's structure alone.

An edit changes its own rows; within a block the MLP and the residual sum act row by row; attention carries a change to
every later position. Everything outside is untouched, so an engine must give the very same bits there.

Blocks are taken to be sequential, attention and then the MLP on what it has led to. In a parallel block (GPT-J) the MLP
reads what attention reads, so it is reached by less than is said here, never by more: the answer stays right, and some
rows that must keep their bits are not asked about. Norms after a branch and factors on one act row by row and change
nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from harness.points import (
    ATTN_IN,
    ATTN_OUT,
    BLOCK_IN,
    BLOCK_OUT,
    EMBED,
    FINAL_NORM,
    HEAD_K,
    HEAD_Q,
    HEAD_V,
    HEAD_Z,
    MLP_IN,
    MLP_OUT,
    ROT_K,
    ROT_Q,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from harness.interventions import Edit

__all__ = ["reach"]


def reach(edits: Iterable[Edit], *, n_layers: int, n_rows: int, same_tokens: int) -> dict[str, torch.Tensor]:
    """Hook → (n_rows,) bool: rows that may differ, for every hook point there may be, in forward order.

    Args:
        edits: of one request.
        n_layers: blocks of the model, each of them causal attention and an MLP on one residual stream.
        n_rows: rows the request has.
        same_tokens: rows whose token is the same with and without the edits; later ones are fed another token, and may
            differ everywhere.
    """
    edited = {edit.hook: edit.touches(n_rows) for edit in edits}
    rows: dict[str, torch.Tensor] = {}

    def at(hook: str, *sources: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(n_rows, dtype=torch.bool)
        for source in sources:
            mask |= source
        mask[edited.get(hook, [])] = True
        rows[hook] = mask
        return mask

    other = torch.arange(n_rows) >= same_tokens
    stream = at(EMBED, other)
    for block in range(n_layers):
        entering = at(BLOCK_IN.format(i=block), stream)
        read = at(ATTN_IN.format(i=block), entering)
        q, k, v = (at(part.format(i=block), read) for part in (HEAD_Q, HEAD_K, HEAD_V))
        rot_q, rot_k = at(ROT_Q.format(i=block), q), at(ROT_K.format(i=block), k)
        z = at(HEAD_Z.format(i=block), rot_q, (rot_k | v).cummax(dim=0).values)
        attn = at(ATTN_OUT.format(i=block), z)
        mlp = at(MLP_OUT.format(i=block), at(MLP_IN.format(i=block), entering, attn))
        stream = at(BLOCK_OUT.format(i=block), entering, attn, mlp)
    at(FINAL_NORM, stream)
    return rows
