"""Row joining, padding and request ids: what stands between scattered steps and one tensor per request."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import CaptureError
from harness.results import ForwardResult, Ragged, Segment, join_segments, match_request_id, pad_rows
from harness.vllm.accumulator import Accumulator, StepRows


def rows(n: int, width: int = 3) -> torch.Tensor:
    """Rows that name themselves."""
    return torch.arange(n * width, dtype=torch.float32).reshape(n, width)


@given(n=st.integers(1, 60), cuts=st.lists(st.integers(0, 60), max_size=6), data=st.data())
def test_any_chunking_joins_to_the_whole(n, cuts, data):
    """However the rows were cut, and in whatever order the chunks are read, the whole comes out."""
    whole = rows(n)
    edges = sorted({0, n, *(c for c in cuts if c < n)})
    chunks = [Segment(a, whole[a:b]) for a, b in itertools.pairwise(edges)]
    shuffled = data.draw(st.permutations(chunks))
    assert torch.equal(join_segments(shuffled, n, what="x"), whole)


@given(n=st.integers(2, 40), redo=st.integers(1, 40), surplus=st.integers(0, 3))
def test_first_write_wins(n, redo, surplus):
    """Rows computed again after a preemption, or past the end, change nothing."""
    whole = rows(n)
    again = torch.full((min(redo, n) + surplus, 3), -1.0)
    joined = join_segments([Segment(0, whole), Segment(0, again), Segment(n, again)], n, what="x")
    assert torch.equal(joined, whole)


@given(n=st.integers(2, 40), hole=st.integers(0, 39))
def test_a_hole_is_an_error(n, hole):
    """A position no step has computed is named, never served as zeros."""
    hole %= n
    whole = rows(n)
    parts = [Segment(0, whole[:hole]), Segment(hole + 1, whole[hole + 1 :])]
    with pytest.raises(CaptureError, match=rf"x: 1 of {n} rows were never captured \(positions {hole}\)"):
        join_segments(parts, n, what="x")


def test_nothing_at_all_is_an_error():
    with pytest.raises(CaptureError, match="3 of 3 rows"):
        join_segments([], 3, what="x")


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_padding_and_back(lengths):
    """Padding is zeros on the right, and taking it off gives the rows again."""
    parts = [rows(n) + i for i, n in enumerate(lengths)]
    padded = pad_rows(parts)
    assert padded.shape == (len(lengths), max(lengths), 3)
    assert all(
        torch.equal(a, b)
        for a, b in zip(ForwardResult({"h": padded}, lengths, []).rows_by_hook()["h"], parts, strict=True)
    )
    assert all(not padded[i, n:].any() for i, n in enumerate(lengths))


@given(
    batches=st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=5), min_size=1, max_size=6),
    data=st.data(),
)
def test_accumulator_sorts_interleaved_requests(batches, data):
    """Requests interleaved over steps, in any order within a step, come out whole and their own."""
    accumulator = Accumulator()
    accumulator.arm(["h"])
    seen: dict[str, int] = {}
    held: list[torch.Tensor] = []
    for batch in batches:
        order = data.draw(st.permutations([(f"r{i}", count) for i, count in enumerate(batch)]))
        shares, step, row = [], [], 0
        for request, count in order:
            start = seen.get(request, 0)
            shares.append(StepRows(request, start, count, row))
            step.append(torch.stack([torch.tensor([float(request[1:]), start + p]) for p in range(count)]))
            seen[request] = start + count
            row += count
        accumulator.wait(shares, sum(share.count for share in shares))
        held += step
        # Some steps wait for the next, as in step buffers with room for both.
        if batch is batches[-1] or data.draw(st.booleans()):
            assert accumulator.filled == sum(len(rows) for rows in held)
            accumulator.add({"h": torch.cat(held)})
            held.clear()
    for request, total in seen.items():
        got = accumulator.read(request, "h")
        expected = torch.tensor([[float(request[1:]), float(p)] for p in range(total)])
        assert torch.equal(got, expected)


ids = st.text(alphabet="ab-01", min_size=1, max_size=6)


@given(names=st.lists(ids, min_size=1, max_size=6, unique=True))
def test_request_ids_match_exactly(names):
    """An id finds its own engine request among any others, or says that it is not clear which."""
    internal = [f"{name}-0123abcd" for name in names]
    for name, full in zip(names, internal, strict=True):
        try:
            assert match_request_id(name, internal) == full
        except CaptureError as error:
            assert "must match exactly one" in str(error)  # noqa: PT017 - ambiguity is allowed, a wrong match is not


def test_a_prefix_is_no_match():
    """``a`` must not find ``a-b-…`` (vLLM 10583, 27987)."""
    assert match_request_id("a", ["a-b-0123abcd", "a-0123abcd"]) == "a-0123abcd"
    with pytest.raises(CaptureError, match="found none"):
        match_request_id("a", ["a-b-0123abcd", "a-0"])
    with pytest.raises(CaptureError, match="must match exactly one"):
        match_request_id("a", ["a-0123abcd", "a-4567abcd"])


def test_a_step_that_is_the_whole_request_is_not_copied():
    """The rows of most prompts come in one step: a copy of them would serve nothing."""
    whole = rows(9)
    joined = join_segments([Segment(0, whole)], 7, what="x")
    assert torch.equal(joined, whole[:7])
    assert joined.data_ptr() == whole.data_ptr()
    with pytest.raises(CaptureError, match="1 of 10 rows"):
        join_segments([Segment(0, whole)], 10, what="x")
    with pytest.raises(CaptureError, match=r"1 of 9 rows were never captured \(positions 0\)"):
        join_segments([Segment(1, whole)], 9, what="x")


@pytest.mark.usefixtures("another_default")
def test_rows_keep_their_dtype():
    """Out of order or padded: the engine's dtype stays, whatever the process has for a default."""
    whole = rows(6).bfloat16()
    joined = join_segments([Segment(4, whole[4:]), Segment(0, whole[:4])], 6, what="x")
    assert joined.dtype == torch.bfloat16
    assert torch.equal(joined, whole)
    assert pad_rows([whole, whole[:2]]).dtype == torch.bfloat16


def test_a_segment_that_is_all_of_it_is_not_copied():
    whole = rows(5)
    assert join_segments([Segment(0, whole)], 5, what="x").data_ptr() == whole.data_ptr()
    assert torch.equal(join_segments([Segment(0, whole)], 3, what="x"), whole[:3])
    with pytest.raises(CaptureError, match=r"1 of 5 rows .*positions 0\)"):
        join_segments([Segment(1, whole)], 5, what="x")


def test_rows_past_the_end_are_cut_where_steps_follow_one_another():
    """What an asynchronous scheduler computed beyond the stop changes nothing, and costs no copy."""
    whole = rows(9)
    joined = join_segments([Segment(0, whole[:4]), Segment(4, whole[4:])], 7, what="x")
    assert torch.equal(joined, whole[:7])
    surplus = join_segments([Segment(0, whole[:5]), Segment(5, whole[5:])], 5, what="x")
    assert torch.equal(surplus, whole[:5])
    assert surplus.data_ptr() == whole.data_ptr()


def test_a_single_row_is_not_copied_and_no_row_is_none():
    one = rows(1)
    assert join_segments([Segment(0, one)], 1, what="x").data_ptr() == one.data_ptr()
    assert join_segments([Segment(0, one)], 0, what="x").shape == (0, 3)


def test_logits_nobody_asked_for_are_told_so():
    with pytest.raises(CaptureError) as caught:
        ForwardResult({}, [1], [[0]]).logit_rows(0)
    assert str(caught.value) == "this forward was run without logits; ask for them with return_logits=True"


def test_a_later_segment_past_the_end_is_cut():
    """Read before the one it follows, so that its rows are looked at one by one."""
    whole = rows(9)
    joined = join_segments([Segment(4, whole[4:]), Segment(0, whole[:5])], 7, what="x")
    assert torch.equal(joined, whole[:7])


@pytest.mark.parametrize(("n", "shown"), [(8, "0, 1, 2, 3, 4, 5, 6, 7)"), (9, "0, 1, 2, 3, 4, 5, 6, 7, …)")])
def test_how_many_missing_positions_are_shown(n, shown):
    with pytest.raises(CaptureError) as caught:
        join_segments([], n, what="x")
    assert str(caught.value).endswith(f"(positions {shown}")


def test_rows_of_a_pattern_are_its_queries():
    """(batch, heads, queries, keys), padded on the left by two: row q holds every head's weights of query q."""
    square = torch.arange(2 * 3 * 5 * 5, dtype=torch.float32).reshape(2, 3, 5, 5)
    result = ForwardResult({"blocks.0.attn.hook_pattern": square}, [3, 5], [], starts=[2, 0])
    got = result.rows("blocks.0.attn.hook_pattern", 0)
    assert got.shape == (3, 3, 3)
    for query in range(3):
        for head in range(3):
            assert torch.equal(got[query, head], square[0, head, 2 + query, 2:])
    assert torch.equal(result.rows_by_hook()["blocks.0.attn.hook_pattern"][1][4], square[1, :, 4].flatten())


def test_rows_survive_a_padding_that_fails(monkeypatch):
    """Memory may run out on the second hook: what was captured is still there, and asked for again it is padded."""
    given = {"a": [rows(2), rows(3)], "b": [rows(3), rows(2)]}
    kept = {name: [one.clone() for one in some] for name, some in given.items()}
    result = ForwardResult(Ragged(["a", "b"], given, {}, [0, 0], 3, {}), [2, 3], [[1], [1]])
    padded = []

    def fails_once(*args, **kwargs):
        padded.append(pad_rows(*args, **kwargs))
        if len(padded) == 2:
            raise MemoryError
        return padded[-1]

    monkeypatch.setattr("harness.results.pad_rows", fails_once)
    with pytest.raises(MemoryError):
        _ = result.captured
    assert torch.equal(result.rows("b", 0), kept["b"][0])
    assert list(result.captured) == ["a", "b"]
    assert len(padded) == 3
    assert torch.equal(result.rows("a", 0), kept["a"][0])


def test_padding_wants_a_start_per_request():
    with pytest.raises(ValueError, match="zip"):
        pad_rows([rows(2), rows(3)], starts=[0])


def test_an_unclear_request_is_told_with_what_was_found():
    with pytest.raises(CaptureError, match=r"a-0123abcd, a-4567abcd"):
        match_request_id("a", ["a-0123abcd", "a-4567abcd"])
