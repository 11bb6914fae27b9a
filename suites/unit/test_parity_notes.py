"""Notes beside a verdict, to the letter: a person reads them, and nothing else says what they say."""

from __future__ import annotations

import math

import pytest
import torch

from harness.parity.measure import measure
from harness.parity.notes import case_notes

PLAIN = [torch.tensor([[1.1, 2.3], [3.7, 4.9]]), torch.tensor([[5.3, 6.1]])]


def notes(engine, sames, *, wrong_dtype=(), vague=None):
    truth = [t.double() for t in PLAIN]
    tables = {
        hook: measure(rows, truth, [one[hook] for one in sames], dtype="float32", slices=1)
        for hook, rows in engine.items()
    }
    return case_notes(engine, sames, tables, "float32", wrong_dtype=wrong_dtype, vague=vague or {})


def through(dtype: torch.dtype) -> list[torch.Tensor]:
    return [t.to(dtype).float() for t in PLAIN]


def test_a_sound_case_has_none():
    assert notes({"a": PLAIN}, [{"a": PLAIN}]) == ()


def test_wrong_dtypes_are_grouped_and_the_first_hooks_named():
    narrow, half = [PLAIN[0], PLAIN[1].bfloat16()], [t.half() for t in PLAIN]
    engine = {"a": narrow, "b": half, "c": narrow, "d": narrow, "e": narrow, "f": PLAIN}
    assert notes(engine, [dict.fromkeys(engine, PLAIN)], wrong_dtype=["a", "b", "c", "d", "e"]) == (
        "captured as bfloat16 where the engine runs float32: a, c, d and 1 more",
        "captured as float16 where the engine runs float32: b",
    )
    assert notes(
        dict.fromkeys("acd", narrow), [dict.fromkeys("acd", PLAIN)], wrong_dtype=["a", "c", "d"]
    ) == ("captured as bfloat16 where the engine runs float32: a, c, d",)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.bfloat16, "bfloat16"), (torch.float16, "float16 or TF32")],
)
def test_values_that_went_through_a_narrower_format_are_told(dtype, name):
    engine = {"a": through(dtype), "b": PLAIN, "c": through(dtype)}
    sames = [dict.fromkeys(engine, PLAIN), dict.fromkeys(engine, PLAIN)]
    assert notes(engine, sames) == (
        f"effective dtype: every value of a, c fits {name}, though captured as float32",
    )


def test_values_narrow_on_the_other_side_too_are_no_finding():
    narrow = {"a": through(torch.bfloat16)}
    assert notes(narrow, [{"a": PLAIN}, narrow]) == ()
    assert notes(narrow, [{"a": through(torch.float8_e4m3fn)}]) == ()
    assert len(notes(narrow, [{"a": through(torch.float16)}])) == 1
    zero = {"a": [torch.zeros_like(t) for t in PLAIN]}
    assert not any("effective dtype" in note for note in notes(zero, [{"a": PLAIN}]))
    assert notes(narrow, [zero]) == ()


def test_rows_without_content_are_counted_and_the_first_is_named():
    zero = [PLAIN[0].clone(), torch.zeros(1, 2)]
    one = [torch.tensor([[1.1, 2.3], [7.3, 7.3]]), torch.full((1, 2), 7.3)]
    sames = [dict.fromkeys("abcd", PLAIN)]
    assert notes({"a": PLAIN, "b": zero, "c": one, "d": one}, sames) == (
        "all zero where the truth varies: 1 of 3 rows of b, first request 1 position 0",
        "constant where the truth varies: 2 of 3 rows of c, first request 0 position 1; and 1 more hooks",
    )


def test_a_reference_that_is_not_finite_is_named():
    broken = [PLAIN[0], torch.tensor([[math.inf, 1.0]])]
    engine = {"a": PLAIN, "b": PLAIN}
    assert notes(engine, [dict.fromkeys("ab", PLAIN), {"a": PLAIN, "b": broken}]) == (
        "the reference at the engine's dtype is not finite in b; there the floor and its other rows decide",
    )


def test_rows_hardly_judged_are_counted():
    engine = dict.fromkeys("abc", PLAIN)
    assert notes(engine, [engine], vague={"a": 2, "b": 0, "c": 1}) == (
        "hardly judged: 3 row(s) are so noisy at this dtype that half of one may be wrong: a, c",
    )
