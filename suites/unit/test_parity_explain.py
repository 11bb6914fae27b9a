"""Where a failure began: every known mistake is planted and named, and what is no known mistake is not given a name."""

# ruff: noqa: ARG005  (row patterns are functions of request and position, whichever they look at)
from __future__ import annotations

import math

import pytest
import torch

from harness.parity import candidates
from harness.parity.patterns import describe
from harness.parity.synthetic import Stream, stream
from harness.parity.types import RowRef
from harness.parity.verdict import compare

LENGTHS = (12, 20, 9)
BLOCK = "blocks.2.hook_out"
MLP = "blocks.2.mlp.hook_out"
FINAL = "ln_final.hook_normalized"


@pytest.fixture(params=["float32", "bfloat16"])
def c(request) -> Stream:
    return stream(11, dtype=request.param, lengths=LENGTHS, realisations=3)


def diverge(c: Stream, **clues):
    verdict = compare(c.engine, c.truth, c.same, dtype=c.dtype, n_layers=c.n_layers, **clues)
    assert not verdict.passed
    return verdict.divergence


def as_engine(c: Stream, rows: torch.Tensor) -> torch.Tensor:
    return rows.to(getattr(torch, c.dtype))


def put(c: Stream, hook: str, values, request: int | None = None) -> None:
    """Give the engine other values: ``values(request)`` at the engine's dtype."""
    for q in range(len(LENGTHS)) if request is None else [request]:
        c.engine[hook][q] = as_engine(c, values(q))


def noisy(c: Stream, hook: str) -> list[torch.Tensor]:
    """Another realisation of the reference: what an engine would hold where it held another hook's values."""
    return c.same[1][hook]


def test_another_layer(c):
    put(c, BLOCK, lambda q: noisy(c, "blocks.1.hook_out")[q])
    found = diverge(c)
    assert found.explanation == "equals blocks.1.hook_out of the reference, so it is off by 1 layer"
    assert (found.hook, found.pattern, found.last_good) == (BLOCK, "all rows", MLP)


def test_residual_missing(c):
    put(c, BLOCK, lambda q: noisy(c, MLP)[q])
    found = diverge(c)
    assert found.explanation == f"equals {MLP} of the reference, so the residual half is missing"
    assert found.sentence.startswith(
        f"{BLOCK} is the first hook that fails (all rows; the hook before, {MLP}, is good): it equals {MLP} of the "
        f"reference, so the residual half is missing (distance "
    )
    assert found.match_error < (1e-6 if c.dtype == "float32" else 2e-2)


def test_mlp_half_missing(c):
    put(c, BLOCK, lambda q: c.engine[BLOCK][q].double() - c.engine[MLP][q].double())
    assert "residual half alone: blocks.2.mlp.hook_out is missing" in diverge(c).explanation


def test_attention_missing(c):
    put(c, BLOCK, lambda q: c.engine[BLOCK][q].double() - c.engine["blocks.2.attn.hook_out"][q].double())
    assert diverge(c).explanation == "lacks blocks.2.attn.hook_out in its sum"


@pytest.mark.parametrize(
    ("sign", "text"), [(-1, "lacks blocks.1.hook_out in its sum"), (1, "holds blocks.1.hook_out twice")]
)
def test_what_came_in_is_missing_or_there_twice(c, sign, text):
    before = [t.double() for t in c.engine["blocks.1.hook_out"]]
    engine = [t.double() for t in c.engine[BLOCK]]
    put(c, BLOCK, lambda q: engine[q] + sign * before[q])
    assert diverge(c).explanation == text


@pytest.mark.parametrize(
    ("factor", "text"), [(1, "holds blocks.2.mlp.hook_out twice"), (-2, "residual half twice")]
)
def test_counted_twice(c, factor, text):
    engine = [t.double() for t in c.engine[BLOCK]]
    twice = {1: lambda q: engine[q] + c.engine[MLP][q], -2: lambda q: 2 * engine[q] - c.engine[MLP][q]}[
        factor
    ]
    put(c, BLOCK, twice)
    assert text in diverge(c).explanation


def test_residual_added_to_a_delta(c):
    put(c, MLP, lambda q: noisy(c, BLOCK)[q])
    assert "the residual stream was added" in diverge(c).explanation


def test_norm_not_applied(c):
    put(c, FINAL, lambda q: 0.5 * noisy(c, "blocks.3.hook_out")[q])
    # Half of it, so that no other hook equals it; each row then has its own factor to the normalised one.
    assert "direction and another length" in diverge(c).explanation
    put(c, FINAL, lambda q: noisy(c, "blocks.3.hook_out")[q])
    assert "the norm was not applied" in diverge(c).explanation


@pytest.mark.parametrize("n", [1, 3])
def test_rows_shifted(c, n):
    put(c, MLP, lambda q: noisy(c, MLP)[q].roll(n, dims=0))
    found = diverge(c)
    rows = "one row" if n == 1 else "3 rows"
    assert f"equals the reference's rows shifted by {rows}" in found.explanation


def test_another_requests_rows(c):
    put(c, MLP, lambda q: noisy(c, MLP)[1][: LENGTHS[2]], request=2)
    found = diverge(c)
    assert found.explanation == "equals the rows of request 1 of the reference, at the same positions"
    assert found.pattern == "all rows of request 2"


def test_requests_swapped(c):
    ours = [noisy(c, MLP)[q].clone() for q in range(3)]
    c.engine[MLP][0][:9], c.engine[MLP][2][:9] = ours[2][:9], ours[0][:9]
    assert "holds other requests' rows (request 0 holds 2's, 2 holds 0's)" in diverge(c).explanation


def test_one_row_of_another_request(c):
    c.engine[BLOCK][0][7] = noisy(c, BLOCK)[1][15]
    found = diverge(c)
    assert found.pattern == "one row"
    assert found.explanation == "equals the row of request 1 at position 15 of the reference"
    assert "one row, request 0 position 7" in found.sentence


def test_one_row_repeated(c):
    put(c, MLP, lambda q: noisy(c, MLP)[1][4].expand(LENGTHS[q], -1), request=0)
    assert "is one row repeated: that of request 1 position 4" in diverge(c).explanation


def test_rows_reversed(c):
    put(c, MLP, lambda q: noisy(c, MLP)[q].flip(0))
    assert "holds the reference's rows in other places" in diverge(c).explanation


def test_decode_overwrote_prefill(c):
    prompts = [8, 15, 6]
    for q, n in enumerate(prompts):
        c.engine[BLOCK][q][: LENGTHS[q] - n] = noisy(c, BLOCK)[q][n:]
    found = diverge(c, prompt_lengths=prompts)
    assert "holds decode rows where the prompt's belong" in found.explanation
    assert "decode overwrote prefill" in found.explanation


def test_stale_buffer(c):
    before = stream(99, dtype=c.dtype, lengths=LENGTHS)
    c.engine[MLP][1][5:] = before.engine[MLP][1][5:]
    found = diverge(c, earlier=[("call 3", before.engine)])
    assert "holds rows of an earlier call, call 3 (at the same places)" in found.explanation
    assert found.pattern == "rows from 5 on, request 1 only"


def test_this_calls_rows_are_named_before_an_earlier_calls_equal_ones(c):
    """The same prompts were run before, so both hold the row; the mix-up within this call is the nearer reason."""
    c.engine[BLOCK][0][7] = noisy(c, BLOCK)[1][15]
    found = diverge(c, earlier=[("call 3", c.truth)])
    assert found.explanation == "equals the row of request 1 at position 15 of the reference"


def test_norm_weight_folded(c):
    weight = 0.5 + torch.rand(64, generator=torch.Generator().manual_seed(0))
    ours = [t.double() for t in noisy(c, FINAL)]
    for values, text in (
        (lambda q: ours[q] * weight, "times the final norm's weight"),
        (lambda q: ours[q] * (1 + weight), r"times (1 + the final norm's weight)"),
        (lambda q: ours[q] / weight, "over the final norm's weight"),
        (lambda q: ours[q] * weight / (1 + weight), "the refold is the wrong one"),
    ):
        put(c, FINAL, values)
        assert text in diverge(c, final_norm_weight=weight).explanation
    assert diverge(c).explanation is None  # without the weight nothing is known


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        (1 / 8, "1/√width: the embedding's √width is missing"),
        (8, "√width is applied where"),
        (2, "times 2"),
        (-1, "times -1"),
        (1.75, "times 1.75"),
    ],
)
def test_scaled(c, factor, text):
    put(c, "embed.hook_out", lambda q: factor * c.engine["embed.hook_out"][q].double())
    found = diverge(c)
    assert text in found.explanation
    assert "no hook comes before it" in found.sentence


@pytest.mark.parametrize(
    ("factor", "text"), [(1.00001, "(1 +1e-05)"), (0.9998, "(1 -0.0002)"), (1.02, "1.02")]
)
def test_a_factor_near_one_is_told_by_what_it_differs_by(factor, text):
    assert candidates._known_factor(factor, 64) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "is all zeros"),
        (0.5, "holds one constant in every channel"),
        (math.nan, "holds NaN or infinity"),
    ],
)
def test_empty(c, value, text):
    put(c, MLP, lambda q: torch.full((LENGTHS[q], 64), value))
    assert text in diverge(c).explanation


def test_zero_rows_are_noted(c):
    c.engine[MLP][1][3:5] = 0
    verdict = compare(c.engine, c.truth, c.same, dtype=c.dtype, n_layers=c.n_layers)
    assert any("all zero where the truth varies: 2 of 41 rows" in note for note in verdict.notes)
    assert verdict.divergence.explanation == "is all zeros"


@pytest.mark.parametrize(("sign", "text"), [(1, "it was applied where"), (-1, "it did not bite")])
def test_edit_leaked_or_did_not_bite(c, sign, text):
    edit = 2 * torch.randn(64, generator=torch.Generator().manual_seed(5))
    c.engine[MLP][0][4:] += sign * as_engine(c, edit)
    found = diverge(c, edits=[("add at 0", torch.ones(64)), ("add at 4", edit)])
    assert f"the edit add at 4: {text}" in found.explanation


@pytest.mark.parametrize(
    ("order", "text"),
    [
        ([1, 0], "channels 0 to 31 hold 32 to 63, channels 32 to 63 hold 0 to 31"),
        ([0, 0], "channels 32 to 63 hold 0 to 31"),
        ([0, None], "channels 32 to 63 are zero"),
        ([0, 2, 1, 3], "channels 16 to 31 hold 32 to 47"),
    ],
)
def test_ranks_parts(c, order, text):
    def values(q):
        parts = noisy(c, MLP)[q].chunk(len(order), dim=1)
        return torch.cat([torch.zeros_like(parts[0]) if i is None else parts[i] for i in order], dim=1)

    put(c, MLP, values)
    assert text in diverge(c).explanation


@pytest.mark.parametrize("seed", range(5))
def test_random_rows_have_no_explanation(c, seed):
    random = torch.Generator().manual_seed(seed)
    for q, n in enumerate(LENGTHS):
        c.engine[BLOCK][q] = as_engine(c, 5 * torch.randn(n, 64, generator=random))
    clues = {
        "earlier": [("before", stream(99, lengths=LENGTHS).truth)],
        "edits": [("an edit", torch.randn(64, generator=random))],
        "prompt_lengths": [8, 15, 6],
        "step": 4,
    }
    found = diverge(c, **clues)
    assert found.explanation is None
    assert found.match_error is None
    assert "no known mistake fits" in found.sentence


def test_noise_too_large_has_no_explanation(c):
    for q, n in enumerate(LENGTHS):
        noise = torch.randn(n, 64, generator=torch.Generator().manual_seed(q))
        c.engine[MLP][q] = as_engine(c, c.truth[MLP][q].double() * (1 + 0.2 * noise))
    assert diverge(c).explanation is None


def test_a_shared_giant_channel_is_no_likeness(c):
    """Right massive channels and random others: as a whole the row equals many, without its giants none."""
    row = c.engine[BLOCK][1][0]
    others = [i for i in range(64) if i not in (5, 17)]
    row[others] = as_engine(c, 5 * torch.randn(62, generator=torch.Generator().manual_seed(0)))
    found = diverge(c)
    assert found.where == RowRef(1, 0)
    assert found.explanation is None


def test_a_giant_channel_halved_is_not_a_scaled_row(c):
    c.engine[BLOCK][1][0, [5, 17]] *= 0.5
    found = diverge(c)
    assert found.explanation is None
    assert "only channels 5 to 17" in found.sentence


def test_zero_candidates_match_nothing(c):
    """A hook that is zero in the truth, an edit of zeros and a zero call before are near to nothing."""
    for side in (c.engine, c.truth, *c.same):
        side["blocks.1.attn.hook_out"] = [torch.zeros_like(t) for t in side["blocks.1.attn.hook_out"]]
    for q, n in enumerate(LENGTHS):
        c.engine[MLP][q] = as_engine(
            c, 1e-12 * torch.randn(n, 64, generator=torch.Generator().manual_seed(q))
        )
    zeros = {hook: [torch.zeros_like(t) for t in rows] for hook, rows in c.truth.items()}
    assert diverge(c, edits=[("nothing", torch.zeros(64))], earlier=[("blank", zeros)]).explanation is None


def test_equal_rows_do_not_make_a_shift(c):
    """A prompt of one repeated token: every row of the embedding is every other row."""
    hook = "embed.hook_out"
    for side in (c.engine, c.truth, *c.same):
        side[hook] = [side[hook][0][:1].expand(n, -1).clone() for n in LENGTHS]
    c.engine[hook][0][5] = as_engine(c, torch.randn(64, generator=torch.Generator().manual_seed(0)))
    assert diverge(c).explanation is None


def test_a_few_spoilt_rows_do_not_hide_the_reason(c):
    put(c, BLOCK, lambda q: noisy(c, MLP)[q])
    c.engine[BLOCK][1][3] = 7
    assert "the residual half is missing" in diverge(c).explanation


def test_later_hooks_are_counted(c):
    for hook in ("blocks.1.hook_out", BLOCK, FINAL):
        put(c, hook, lambda q, hook=hook: c.engine[hook][q] * 3)
    found = diverge(c)
    assert found.hook == "blocks.1.hook_out"
    assert "2 of the 7 hooks after it fail too" in found.sentence


ALL = [(q, p) for q, n in enumerate(LENGTHS) for p in range(n)]


@pytest.mark.parametrize(
    ("test", "text"),
    [
        (lambda q, p: True, "all rows"),
        (lambda q, p: (q, p) == (1, 3), "one row"),
        (lambda q, p: q == 1, "all rows of request 1"),
        (lambda q, p: q != 1, "all rows of requests 0, 2"),
        (lambda q, p: p >= 5, "rows from 5 on"),
        (lambda q, p: p < 3, "rows up to 2"),
        (lambda q, p: p == 0, "the first row of every request"),
        (lambda q, p: p == LENGTHS[q] - 1, "the last row of every request"),
        (lambda q, p: p == 3, "row 3 of every request"),
        (lambda q, p: 3 <= p <= 6, "rows 3 to 6"),
        (lambda q, p: p >= (8, 15, 6)[q], "the decode rows"),
        (lambda q, p: p < (8, 15, 6)[q], "the prompt's rows"),
        (
            lambda q, p: (p >= 4 if q != 1 else p >= 12) and p < (8, 15, 6)[q],
            "the rows of each prompt's last chunk",
        ),
        (lambda q, p: p < 4, "the rows of the first chunk (up to 3)"),
        (lambda q, p: p % 4 == 3, "every row with position % 4 == 3, once per step"),
        (lambda q, p: p % 3 == 1, "every row with position % 3 == 1"),
        (lambda q, p: q == 1 and p >= 9, "rows from 9 on, request 1 only"),
        (lambda q, p: q == 1 and p >= 15, "the decode rows, request 1 only"),
        (
            lambda q, p: (q, p) in {(0, 1), (1, 7), (1, 8), (2, 2)},
            "4 of 41 rows, all among the prompt's rows",
        ),
        (lambda q, p: (q, p) in {(0, 1), (1, 7), (1, 18), (2, 2)}, "4 of 41 rows"),
    ],
)
def test_patterns(test, text):
    rows = [RowRef(q, p) for q, p in ALL if test(q, p)]
    assert describe(rows, LENGTHS, prompt_lengths=[8, 15, 6], step=4) == text


def test_a_pattern_forgives_a_row_that_kept_its_bound():
    rows = [RowRef(q, p) for q, p in ALL if p >= 2 and (q, p) != (1, 4)]
    assert describe(rows, LENGTHS) == "rows from 2 on"


def test_nearly_all_rows_are_named_by_what_they_are_or_counted():
    """Rows 0 to 4 of four requests are right, a tenth of all: it is not "all rows" that are wrong."""
    lengths = [33, 1, 120, 7]
    every = [(q, p) for q, n in enumerate(lengths) for p in range(n)]
    assert describe([RowRef(q, p) for q, p in every if p >= 5], lengths) == "rows from 5 on"
    assert describe([RowRef(q, p) for q, p in every if (q, p) != (2, 60)], lengths) == "160 of all 161 rows"
