"""Attention masks and padded results: spans in, rows at their places out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.interventions import Edit
from harness.masks import read_mask, shift_edits
from harness.results import ForwardResult, pad_rows


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=4))
def test_any_contiguous_span_is_read(parts):
    rows = [[7] * (a + n + b) for a, n, b in parts]
    mask = [[0] * a + [1] * n + [0] * b for a, n, b in parts]
    assert read_mask(mask, rows) == [(a, a + n) for a, n, _ in parts]


def test_tensors_and_one_flat_row():
    assert read_mask(torch.tensor([[0, 1, 1]]), [[7, 7, 7]]) == [(1, 3)]
    assert read_mask([0, 1, 1], [[7, 7, 7]]) == [(1, 3)]
    assert read_mask([[False, True, True]], [[7, 7, 7]]) == [(1, 3)]


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        ([[1, 0, 1]], "hole at position 1"),
        ([[0, 0, 0]], "no real token"),
        ([[1, 1]], "2 values for 3 tokens"),
        ([[1, 1, 0.5]], "holds 0.5"),
        ([[1] * 3] * 2, "2 rows for 1 prompts"),
    ],
)
def test_refusals(mask, reason):
    with pytest.raises(UsageError, match=reason):
        read_mask(mask, [[7, 7, 7]])


def test_edits_move_with_the_padding():
    def edit(pos):
        return Edit("embed.hook_out", "suppress", 0.0, torch.zeros(()), pos)

    ((moved,), (whole,)) = shift_edits([(edit((3, 5)),), (edit(None),)], [3, 2])
    assert moved.pos == (0, 2)
    assert whole.pos is None
    with pytest.raises(UsageError, match="position 2 of request 0 is padding"):
        shift_edits([(edit((2, 5)),)], [3])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=4), st.integers(0, 9))
def test_padded_results_give_their_rows_back(parts, columns):
    rows = [torch.full((n, 2), float(i + 1)) for i, (_, n) in enumerate(parts)]
    starts = [a for a, _ in parts]
    padded = pad_rows(rows, starts=starts, columns=columns, fill=-1.0)
    result = ForwardResult({"h": padded}, [n for _, n in parts], [[0]] * len(parts), starts=starts)
    assert padded.shape[1] == max(columns, *(a + n for a, n in parts))
    assert all(torch.equal(result.rows("h", i), one) for i, one in enumerate(rows))
    assert int((padded != -1.0).sum()) == sum(one.numel() for one in rows)
