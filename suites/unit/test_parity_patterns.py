"""Failing rows in words: the simplest pattern that holds all of them and hardly any other."""

from __future__ import annotations

import math

import pytest
import torch

from harness.parity.patterns import channels, describe
from harness.parity.types import RowRef


def said(lengths, *rows: tuple[int, int], **known) -> str:
    return describe([RowRef(*row) for row in rows], lengths, **known)


def of(request: int, *positions: int) -> list[tuple[int, int]]:
    return [(request, position) for position in positions]


def test_nine_rows_of_ten_are_nearly_all():
    assert said((10,), *of(0, *range(10))) == "all rows"
    assert said((10,), *of(0, 0, 1, 2, 3, 5, 6, 7, 8, 9)) == "9 of all 10 rows"
    assert said((10,), *of(0, *range(9))) == "rows up to 8"
    assert said((10,), *of(0, *range(8))) == "rows up to 7"
    assert said((10, 10), *of(0, *range(9))) == "rows up to 8, request 0 only"
    assert said((10, 10), *of(0, 0, 1, 2, 3, 5, 6, 7, 8, 9)) == "all rows of request 0"
    assert said((4, 1), *of(0, *range(4))) == "all rows of request 0"
    assert said((4, 0), *of(0, 0, 1)) == "rows up to 1"


def test_requests_are_named_up_to_four():
    rows = [(q, p) for q in range(5) for p in range(2)]
    assert said((2,) * 9, *rows[:8]) == "all rows of requests 0, 1, 2, 3"
    assert said((2,) * 9, *rows) == "all rows of requests 0, 1, 2, 3, …"


def test_prompt_and_decode_rows():
    known = {"prompt_lengths": (3, 4)}
    prompt, decode = [*of(0, 0, 1, 2), *of(1, 0, 1, 2, 3)], [*of(0, 3, 4), *of(1, 4, 5)]
    assert said((5, 6), *prompt, **known) == "the prompt's rows"
    assert said((5, 6), *decode, **known) == "the decode rows"
    assert said((5, 6), *of(0, 3, 4), **known) == "the decode rows, request 0 only"
    assert said((5, 16), (0, 0), (1, 1), **known) == "2 of 21 rows, all among the prompt's rows"
    assert said((5, 16), (0, 0), (1, 14), **known) == "2 of 21 rows"


def test_chunks_of_a_step():
    last, later = "the rows of each prompt's last chunk", "all rows but the first chunk's (from 4 on)"
    assert said((5, 9), (0, 4), (1, 8), step=4) == last
    ends = [*of(0, 4, 5, 6), *of(1, 8, 9)]
    assert said((7, 10), *ends, step=4) == said((9, 12), *ends, step=4, prompt_lengths=(7, 10)) == last
    assert (
        said((5, 9), *of(0, *range(4)), *of(1, *range(4)), step=4) == "the rows of the first chunk (up to 3)"
    )
    assert said((9, 7), *of(0, *range(4, 9)), *of(1, 4, 5, 6), step=4) == later
    prompts = {"prompt_lengths": (10, 10), "step": 4}
    assert said((12, 12), *of(0, *range(4, 10)), *of(1, *range(4, 10)), **prompts) == later
    assert said((5, 9), (0, 4), (1, 8)) == "the last row of every request"


@pytest.mark.parametrize(
    ("positions", "step", "text"),
    [
        ((1, 4, 7), None, "every row with position % 3 == 1"),
        ((0, 3, 6, 9), 3, "every row with position % 3 == 0, once per step"),
        ((0, 2, 4, 6, 8), 3, "every row with position % 2 == 0"),
        ((0, 1, 2, 5), None, "4 of 10 rows"),
        ((2, 3), None, "rows 2 to 3"),
        ((6, 7, 8, 9), None, "rows from 6 on"),
        ((4,), None, "one row"),
    ],
)
def test_patterns_of_position(positions, step, text):
    assert said((10,), *of(0, *positions), step=step) == text


def test_two_rows_make_no_series():
    assert said((8,), *of(0, 1, 5)) == "2 of 8 rows"


def test_one_position_of_every_request():
    assert said((5, 5), (0, 0), (1, 0)) == "the first row of every request"
    assert said((5, 6), (0, 2), (1, 2)) == "row 2 of every request"
    assert said((5, 6, 6), (0, 2), (1, 2)) == "row 2 of every request, requests 0, 1 only"


def test_channels_hold_nearly_all_of_the_error():
    def where(*energies: float, scale: float = 1.0) -> str:
        return channels(
            torch.tensor([energies], dtype=torch.float64).sqrt() * scale, torch.tensor([scale]).double()
        )

    assert where(0, 0, 1, 0) == "only channel 2"
    assert where(1, 0) == "only channel 0"
    assert where(0, 1, 1, 0) == where(0, 1, 1, 0, scale=1e-3) == "only channels 1 to 2"
    assert where(1, 1, 1, 0) == ""
    assert where(4, 0, 996, 0, 0, 0) == "only channel 2"  # less than half a percent lies before
    assert where(6, 0, 994, 0, 0, 0) == "only channels 0 to 2"
    assert where(0, 0, 996, 0, 4, 0) == "only channel 2"
    assert where(0, 0, 994, 0, 6, 0) == "only channels 2 to 4"
    assert where(5) == where(0, 0, 0) == where(math.inf, 0, 0, 0) == ""


def test_rows_count_by_their_own_size():
    difference = torch.tensor([[3.0, 0, 0, 0], [0, 0, 0, 1e3]], dtype=torch.float64)
    assert channels(difference, torch.tensor([1e-6, 1e6]).double()) == "only channel 0"
