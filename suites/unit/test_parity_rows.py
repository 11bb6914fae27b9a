"""What is compared: rows of all requests in order, in pieces of bounded size, and only of one shape."""

from __future__ import annotations

import math

import pytest
import torch

from harness.errors import CaptureError
from harness.parity import metrics, rows
from harness.parity.types import RowRef

BLOCK, LAST = "blocks.0.hook_out", "ln_final.hook_normalized"


def ones(*lengths: int, width: int = 2) -> list[torch.Tensor]:
    return [torch.ones(length, width) for length in lengths]


def refused(engine, truth, same, hooks=None) -> str:
    with pytest.raises(CaptureError) as caught:
        rows.check(engine, truth, same, hooks)
    return str(caught.value)


def test_names_are_sorted_as_the_forward_computes_them():
    ordered = [
        "embed.hook_out",
        "blocks.2.mlp.hook_out",
        "blocks.2.hook_out",
        "blocks.10.hook_out",
        LAST,
        "logits",
    ]
    assert rows.forward_order(ordered[::-1]) == ordered
    assert rows.forward_order(["b", "a"]) == ["a", "b"]


def test_what_is_no_hook_point_carries_every_block():
    assert [rows.depth_of(name, 7) for name in ("embed.hook_out", BLOCK, LAST, "logits")] == [0, 1, 7, 7]


def test_rows_are_counted_through_all_requests():
    assert rows.lengths_of(ones(2, 0, 1)) == (2, 0, 1)
    assert [rows.ref_of(i, (2, 0, 1)) for i in range(3)] == [RowRef(0, 0), RowRef(0, 1), RowRef(2, 0)]
    with pytest.raises(IndexError, match="row 3 past the end: there are 3"):
        rows.ref_of(3, (2, 0, 1))


def test_short_requests_share_a_piece_and_long_ones_are_cut(monkeypatch):
    monkeypatch.setattr(metrics, "CHUNK", 8)
    monkeypatch.setattr(rows, "CHUNK", 8)
    pieces = list(rows.spans((1, 3, 2, 5, 0, 1), 2))
    assert pieces == [
        [(0, slice(0, 1)), (1, slice(0, 3))],
        [(2, slice(0, 2))],
        [(3, slice(0, 4))],
        [(3, slice(4, 5)), (5, slice(0, 1))],
    ]
    shared = [[request for request, _ in piece] for piece in rows.spans((4, 2, 2, 2, 2, 2), 2)]
    assert shared == [[0], [1, 2], [3, 4], [5]]
    assert list(rows.spans((), 2)) == []
    assert list(rows.spans((9, 1), 100)) == [[(i // 9, slice(i % 9, i % 9 + 1))] for i in range(10)]


def test_a_piece_is_gathered_in_fp64():
    captured = [torch.arange(6).reshape(3, 2).bfloat16(), torch.full((2, 2), 9.0).bfloat16()]
    joined = rows.gather(captured, [(0, slice(1, 3)), (1, slice(0, 1))])
    assert joined.dtype == torch.float64
    assert joined.tolist() == [[2, 3], [4, 5], [9, 9]]


def test_hooks_come_back_in_forward_order():
    truth = {LAST: ones(2), BLOCK: ones(2)}
    assert rows.check(truth, truth, [truth], None) == [BLOCK, LAST]
    assert rows.check({LAST: ones(2), "other": ones(1)}, truth, [truth], [LAST]) == [LAST]


def test_nothing_to_compare_is_said_to_be_so():
    some = {BLOCK: ones(2)}
    assert refused(some, some, [some], []) == "nothing to compare: no hooks"
    assert refused({}, {}, [{}]) == "nothing to compare: no hooks"
    assert refused(some, some, []) == "no reference at the engine's dtype to compare with"


def test_hooks_that_a_side_lacks_are_named():
    names = [f"blocks.{i}.hook_out" for i in range(7)]
    truth = {name: ones(2) for name in names}
    some = {name: ones(2) for name in names[:1]}
    five = ", ".join(names[1:6])
    assert refused(some, truth, [truth]) == f"the engine lacks 6 of 7 hooks: {five}"
    assert (
        refused(truth, truth, [truth, some])
        == f"the reference at the engine's dtype lacks 6 of 7 hooks: {five}"
    )
    assert refused(truth, some, [truth], names) == f"the truth lacks 6 of 7 hooks: {five}"
    surplus = "the engine captured hooks the truth lacks, which nobody would judge"
    assert refused(truth, some, [truth]) == f"{surplus}: {five}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (ones(2), "{side} has 1 requests, the truth 2"),
        (ones(2, 3, 1), "{side} has 3 requests, the truth 2"),
        ([torch.ones(2, 2), torch.ones(1, 3, 2)], "holds a tensor of shape (1, 3, 2); rows are (n, width)"),
        (ones(2, 4), "has 4 rows, the truth 3"),
        ([torch.ones(2, 2), torch.ones(3, 1)], "has width 1, the truth 2"),
    ],
)
def test_another_shape_than_the_truth_has_is_refused(given, message):
    truth = {BLOCK: ones(2, 3)}
    for side, engine, same in (
        ("the engine", {BLOCK: given}, [truth]),
        ("the reference at the engine's dtype", truth, [truth, {BLOCK: given}]),
    ):
        expected = (
            f"{BLOCK}: {message.format(side=side)}"
            if "{side}" in message
            else f"{BLOCK}, request 1: {side} {message}"
        )
        assert refused(engine, truth, same) == expected


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        (
            [torch.ones(2, 2), torch.ones(2)],
            ", request 1: the truth holds a tensor of shape (2,); rows are (n, width)",
        ),
        ([torch.ones(2, 0)], ", request 0: the truth holds a tensor of shape (2, 0); rows are (n, width)"),
        ([torch.ones(2, 2), torch.ones(2, 3)], ": the truth's requests have different widths"),
        (ones(0, 0), ": no rows; a comparison of nothing is not a pass"),
    ],
)
def test_a_truth_that_is_no_rows_is_refused(truth, message):
    side = {BLOCK: truth}
    assert refused(side, side, [side]) == BLOCK + message


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_truth_that_is_not_finite_names_its_first_such_row(monkeypatch, bad):
    """Also where it lies in a later piece, and where one channel of the row is finite."""
    monkeypatch.setattr(metrics, "CHUNK", 4)
    truth = {BLOCK: ones(1, 6)}
    truth[BLOCK][1][3:5, 1] = bad
    where = f"{BLOCK}, request 1, position 3"
    assert refused(truth, truth, [truth]) == f"{where}: the truth itself is not finite, nothing can be judged"


def test_a_request_without_rows_beside_others_is_no_fault():
    side = {BLOCK: ones(0, 1, width=1)}
    assert rows.check(side, side, [side], None) == [BLOCK]
