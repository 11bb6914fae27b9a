"""What a person reads: a sentence, a table that fits a screen, where bounds come from."""

from __future__ import annotations

import dataclasses
import math

import torch

from harness.parity.synthetic import stream
from harness.parity.text import MAX_LINES, failure_message, summary_line
from harness.parity.verdict import compare

BLOCK, MLP = "blocks.2.hook_out", "blocks.2.mlp.hook_out"


def verdict(spoil=None, *, n_layers: int = 4, dtype: str = "float32"):
    c = stream(2, dtype=dtype, realisations=3, n_layers=n_layers)
    if spoil:
        spoil(c)
    return compare(c.engine, c.truth, c.same, dtype=dtype, n_layers=n_layers)


def residual_missing(c):
    c.engine[BLOCK] = [t.clone() for t in c.engine[MLP]]


def everything_wrong(c):
    for hook, rows in c.engine.items():
        c.engine[hook] = [torch.full_like(t, math.nan) for t in rows]


def test_a_pass_is_one_line():
    text = summary_line(verdict())
    assert text.startswith("parity holds at float32: 14 hooks, 34 rows; nearest to its bound is ")
    assert text.endswith("allowed is 3")
    assert "\n" not in text


def test_a_failure_begins_with_its_sentence():
    found = verdict(residual_missing)
    first = failure_message(found).splitlines()[0]
    assert first == f"parity broken: {found.divergence.sentence}" == summary_line(found)
    assert "so the residual half is missing" in first


def test_a_failure_shows_the_figures_and_where_they_come_from():
    text = failure_message(verdict(residual_missing))
    header, row = (
        next(line for line in text.splitlines() if start in line) for start in ("worst gate", f">  {BLOCK}")
    )
    for column in ("err(E)", "err(R)", "floor", "bound", "needs k", "at"):
        assert column in header
    assert row.endswith("request 1 position 18")
    assert "floor = 1 · 2^-24 · √(blocks + 1)" in text
    assert "times the hook before" in text
    around = text[text.index("aggregate error from hook to hook") :]
    assert [name in around for name in ("blocks.2.attn.hook_out", MLP, BLOCK, "blocks.3.mlp.hook_out")] == [
        True
    ] * 4


def test_a_long_failure_fits_a_screen():
    found = verdict(everything_wrong, n_layers=12)
    text = failure_message(found)
    assert len(text.splitlines()) <= MAX_LINES
    assert "38 of 38 hooks fail" in text
    assert "∞" in text
    assert text.count(">") >= 2  # the origin is marked in the table and in the errors around it


def test_notes_are_shown_and_limited():
    found = dataclasses.replace(verdict(residual_missing), notes=tuple(f"remark {i}" for i in range(9)))
    text = failure_message(found)
    assert "note: remark 0" in text
    assert "and 4 more notes" in text


def test_the_wrong_dtype_is_told_in_the_sentence():
    def widen(c):
        c.engine[BLOCK] = [t.float() for t in c.engine[BLOCK]]

    text = failure_message(verdict(widen, dtype="bfloat16"))
    assert "is captured as float32 where the engine runs bfloat16" in text
    assert "note: captured as float32" in text
