"""``judge`` on figures small enough to work out by hand: what each gate's bound is made of, and whom it blames."""

from __future__ import annotations

import math

import pytest
import torch

from harness.parity.gates import (
    AGGREGATE,
    DTYPE,
    MASSIVE,
    MASSIVE_REST,
    ROW,
    SLICE,
    Judged,
    dtype_gate,
    judge,
)
from harness.parity.measure import RowTable
from harness.parity.types import Gate, RowRef

FLOOR = 2**-6


def column(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def table(engine, same, **given) -> RowTable:
    """Rows of four channels, by default ordinary, in one request, and as wrong in each half as in the whole."""
    count = len(engine)
    e, r = column(engine), column(same)
    halves = torch.full((count, 2), 0.5, dtype=torch.float64)
    figures = {
        "lengths": (count,),
        "norms": torch.ones(count, dtype=torch.float64),
        "massive": torch.zeros(count, dtype=torch.bool),
        "engine_rest": e,
        "same_rest": r,
        "truth_slices": halves,
        "engine_slices": e.square().unsqueeze(1) * halves,
        "same_slices": r.square().unsqueeze(2) * halves,
        **{
            name: value if name == "lengths" else torch.as_tensor(value).clone()
            for name, value in given.items()
        },
    }
    unread = torch.zeros(count)
    return RowTable(
        width=4, spans=((0, 2), (2, 4)), engine=e, same=r, max_abs=unread, channel=unread.long(), cosine=unread,
        ulps=unread, zero=unread.bool(), constant=unread.bool(), **figures,
    )  # fmt: skip


def judged(t: RowTable, *, k: float = 3.0, floor: float = FLOOR, **options) -> tuple[Judged, dict[str, Gate]]:
    found = judge(t, k=k, floor=floor, **options)
    return found, {gate.name: gate for gate in found.gates}


def flags(*values: int) -> list[bool]:
    return [bool(value) for value in values]


def test_the_aggregate_is_judged_by_the_worst_realisation():
    found, gates = judged(table([3.0, 4.0], [[1.0, 1.0], [2.0, 2.0], [0.5, 0.5]]))
    gate = gates[AGGREGATE]
    assert found.gates[0] is gate
    assert (gate.err_reference, gate.floor, gate.bound) == (2.0, FLOOR, 6.0)
    assert gate.err_engine == pytest.approx(math.sqrt(12.5))
    assert gate.required_k == pytest.approx(math.sqrt(12.5) / 2)
    assert (gate.passed, gate.where, gate.slice) == (True, None, None)
    assert found.passed
    assert found.failing.tolist() == flags(0, 0)


def test_the_floor_decides_where_the_reference_is_better_than_its_dtype():
    _, gates = judged(table([2 * FLOOR, 2 * FLOOR], [[0.0, FLOOR / 4]]), k=4.0)
    for name in (AGGREGATE, ROW, SLICE):
        assert gates[name].floor == FLOOR
        assert gates[name].bound == 4 * FLOOR
        assert gates[name].required_k == pytest.approx(2.0)


def test_what_is_exactly_at_its_bound_passes():
    found, gates = judged(table([3.0], [[1.0]]))
    assert all(gate.err_engine == gate.bound == 3.0 for gate in gates.values())
    assert found.passed
    assert not bool(found.failing.any())


def test_noise_measured_beforehand_stands_in_every_bound():
    _, gates = judged(table([1.0, 1.0], [[1.0, 2.0]]), noise=5.0)
    assert {name: gate.err_reference for name, gate in gates.items()} == {
        AGGREGATE: 5.0,
        ROW: 5.0,
        SLICE: pytest.approx(5.0),
    }
    _, gates = judged(table([1.0, 1.0], [[7.0, 7.0]]), noise=5.0)
    assert [gate.err_reference for gate in gates.values()] == pytest.approx([7.0] * 3)


def test_a_row_has_its_own_bound_and_never_less_than_the_aggregate():
    """The row nearest to its bound is shown, which need not be the one that is furthest off."""
    t = table([6.0, 7.0, 0.0], [[1.0, 3.0, 0.0], [0.0, 2.0, 1.0]], lengths=(1, 2))
    pooled = math.sqrt(10 / 3)
    found, gates = judged(t, k=2.5)
    assert gates[ROW].where == RowRef(0, 0)
    assert gates[ROW].err_reference == pytest.approx(pooled)
    assert gates[ROW].required_k == pytest.approx(6 / pooled)
    assert not gates[ROW].passed
    assert found.failing.tolist() == flags(1, 0, 0)
    _, gates = judged(table([6.0, 17.0, 0.0], [[1.0, 3.0, 0.0], [0.0, 2.0, 1.0]], lengths=(1, 2)))
    assert gates[ROW].where == RowRef(1, 0)
    assert gates[ROW].err_reference == 3.0


def test_what_a_row_has_carried_multiplies_noise_and_floor():
    found, gates = judged(table([1.0, 8.0], [[0.0, 0.0]]), floor=0.1, noise=0.05, carried=column([1.0, 2.0]))
    mean = math.sqrt(2.5)
    assert gates[ROW].where == RowRef(0, 1)
    assert (gates[ROW].floor, gates[ROW].err_reference) == (pytest.approx(0.2), pytest.approx(0.1))
    assert gates[ROW].required_k == pytest.approx(40)
    for name in (AGGREGATE, SLICE):
        assert gates[name].floor == pytest.approx(0.1 * mean)
        assert gates[name].err_reference == pytest.approx(0.05 * mean)
    assert found.failing.tolist() == flags(1, 1)
    allowed, _ = judged(table([0.5], [[0.0]]), floor=0.1, carried=column([2.0]))
    assert allowed.passed
    loud, _ = judged(table([0.5], [[0.0]]), floor=0.01, noise=0.1, carried=column([2.0]))
    assert loud.passed


def test_which_row_needs_most_is_told_after_carrying():
    _, gates = judged(table([1.0, 3.0], [[0.0, 0.0]]), floor=0.1, carried=column([1.0, 4.0]))
    assert gates[ROW].where == RowRef(0, 0)
    _, gates = judged(table([1.0, 3.0], [[0.0, 0.0]]), floor=0.01, noise=0.1, carried=column([1.0, 4.0]))
    assert gates[ROW].where == RowRef(0, 0)


def test_which_slice_needs_most_is_told_after_carrying():
    t = table([3.0], [[0.0]], engine_slices=column([[0.5, 8.0]]), same_slices=column([[[0.0, 0.5]]]))
    _, gates = judged(t, floor=0.1, carried=column([4.0]))
    assert gates[SLICE].slice == (2, 4)
    assert gates[SLICE].required_k == pytest.approx(4.0)


def test_the_worst_slice_has_its_own_bound_and_its_rows_are_blamed():
    t = table(
        [2.0, 2.0, 0.0],
        [[1.0, 1.0, 1.0]],
        engine_slices=column([[1.0, 16.0], [1.0, 16.0], [0.0, 0.0]]),
    )
    found, gates = judged(t)
    gate = gates[SLICE]
    assert gate.err_engine == pytest.approx(math.sqrt(32 / 1.5))
    assert (gate.err_reference, gate.bound) == (pytest.approx(1.0), pytest.approx(3.0))
    assert (gate.slice, gate.where, gate.passed) == ((2, 4), None, False)
    assert gates[AGGREGATE].passed
    assert gates[ROW].passed
    assert not found.passed
    assert found.failing.tolist() == flags(1, 1, 0)


def test_a_slice_is_judged_by_the_worst_realisation_there():
    """Where every side is wrong the slice is not; the one that needs most is another."""
    t = table(
        [2.0, 2.0],
        [[1.0, 1.0], [1.0, 1.0]],
        engine_slices=column([[2.0, 8.0], [2.0, 8.0]]),
        same_slices=column([[[0.5, 8.0], [0.5, 8.0]], [[0.5, 0.5], [0.5, 0.5]]]),
    )
    found, gates = judged(t)
    assert found.passed
    assert gates[SLICE].slice == (0, 2)
    assert gates[SLICE].required_k == pytest.approx(2.0)


def test_rows_exactly_at_the_slice_bound_are_not_blamed_for_it():
    t = table([2.0, 2.0], [[1.0, 1.0]], engine_slices=column([[0.0, 4.5], [0.0, 18.0]]))
    found, gates = judged(t)
    assert gates[SLICE].bound == 3.0
    assert found.failing.tolist() == flags(0, 1)


def test_a_slice_that_is_zero_in_the_truth_has_its_share_of_the_width():
    half = column([[1.0, 0.0], [1.0, 0.0]])
    t = table(
        [1.0, 1.0],
        [[1.0, 1.0]],
        truth_slices=half,
        same_slices=half.unsqueeze(0),
        engine_slices=column([[1.0, 16.0], [1.0, 0.0]]),
    )
    found, gates = judged(t)
    assert gates[SLICE].slice == (2, 4)
    assert gates[SLICE].err_engine == pytest.approx(4.0)
    assert found.failing.tolist() == flags(1, 0)


def test_a_reference_that_is_not_finite_excuses_nobody():
    """Not in its row, its slice, or what is hidden beside massive channels; what else it says still counts."""
    broken = column([[math.inf, 1.0, 1.0], [1.0, 1.0, math.nan]])
    t = table(
        [4.0, 1.0, 4.0],
        broken.tolist(),
        massive=flags(0, 0, 1),
        same_slices=broken.square().unsqueeze(2) * 0.5,
    )
    found, gates = judged(t)
    assert gates[AGGREGATE].err_reference == 1.0
    assert gates[ROW].err_reference == 1.0
    assert gates[SLICE].err_reference == pytest.approx(1.0)
    assert gates[MASSIVE].err_reference == gates[MASSIVE_REST].err_reference == 1.0
    assert found.failing.tolist() == flags(1, 0, 1)


def test_massive_rows_have_their_own_gates():
    t = table(
        [1.0, 5.0, 20.0, 100.0],
        [[1.0, 1.0, 6.0, 8.0]],
        massive=flags(0, 0, 1, 1),
        engine_rest=column([1.0, 5.0, 80.0, 9.0]),
        same_rest=column([[1.0, 1.0, 3.0, 4.0]]),
        lengths=(3, 1),
    )
    found, gates = judged(t)
    assert list(gates) == [AGGREGATE, ROW, SLICE, MASSIVE, MASSIVE_REST]
    assert gates[AGGREGATE].err_engine == pytest.approx(math.sqrt(13))
    assert gates[AGGREGATE].err_reference == gates[ROW].err_reference == 1.0
    assert gates[ROW].where == RowRef(0, 1)
    full, rest = gates[MASSIVE], gates[MASSIVE_REST]
    assert (full.where, full.err_engine, full.err_reference) == (RowRef(1, 0), 100.0, 8.0)
    assert (rest.where, rest.err_engine) == (RowRef(0, 2), 80.0)
    assert rest.err_reference == pytest.approx(math.sqrt(12.5))
    assert found.failing.tolist() == flags(0, 1, 1, 1)
    assert found.n_massive == 2


def test_a_massive_row_is_bounded_by_what_massive_rows_cost_the_reference():
    t = table([1.0, 1.0, 1.0], [[1.0, 3.0, 9.0]], massive=flags(0, 1, 1))
    _, gates = judged(t)
    assert gates[MASSIVE].where == RowRef(0, 1)
    assert gates[MASSIVE].err_reference == pytest.approx(math.sqrt(45))
    assert gates[MASSIVE_REST].err_reference == pytest.approx(math.sqrt(45))
    quiet = table([1.0, 1.0], [[4.0, 1.0]], massive=flags(0, 1))
    _, gates = judged(quiet)
    assert gates[MASSIVE].err_reference == gates[MASSIVE_REST].err_reference == 4.0


def test_massive_rows_have_no_part_in_the_others_gates():
    """Small beside their own bounds, or huge: neither picks the worst ordinary row or is blamed for a slice."""
    quiet = table([0.0, 0.5], [[1.0, 1.0]], massive=flags(1, 0))
    assert judged(quiet)[1][ROW].where == RowRef(0, 1)
    loud = table(
        [9.0, 2.0],
        [[9.0, 1.0]],
        massive=flags(1, 0),
        engine_slices=column([[9.0, 99.0], [1.0, 8.0]]),
        truth_slices=column([[1.0, 0.0], [0.5, 0.5]]),
    )
    found, gates = judged(loud)
    assert gates[SLICE].err_engine == pytest.approx(4.0)
    assert gates[SLICE].err_reference == pytest.approx(1.0)
    assert found.failing.tolist() == flags(0, 1)


@pytest.mark.parametrize("gate", [MASSIVE, MASSIVE_REST])
def test_either_gate_of_massive_rows_blames_them(gate):
    rest = column([1.0, 9.0 if gate == MASSIVE_REST else 1.0])
    t = table(
        [1.0, 1.0 if gate == MASSIVE_REST else 9.0], [[1.0, 1.0]], massive=flags(0, 1), engine_rest=rest
    )
    found, gates = judged(t)
    assert [name for name, one in gates.items() if not one.passed] == [gate]
    assert found.failing.tolist() == flags(0, 1)


def test_a_prompt_of_massive_rows_alone_is_judged_by_all_gates():
    found, gates = judged(table([4.0, 0.0], [[1.0, 0.0]], massive=flags(1, 1), norms=column([1.0, 0.0])))
    assert gates[AGGREGATE].err_engine == 4.0  # the row that is zero on every side is left out
    assert gates[ROW].where == RowRef(0, 0)
    assert len(gates) == 5
    assert found.failing.tolist() == flags(1, 0)


def test_rows_that_are_zero_on_every_side_say_nothing():
    t = table([2.0, 0.0], [[1.0, 0.0]], norms=column([1.0, 0.0]))
    _, gates = judged(t)
    assert (gates[AGGREGATE].err_engine, gates[AGGREGATE].err_reference) == (2.0, 1.0)
    assert gates[SLICE].err_engine == pytest.approx(2.0)
    found, gates = judged(table([0.0, 0.0], [[0.0, 0.0]], norms=column([0.0, 0.0])))
    assert found.passed
    assert {gate.required_k for gate in gates.values()} == {0.0}


@pytest.mark.parametrize("side", ["norms", "engine", "same"])
def test_a_row_that_is_something_on_any_side_is_judged(side):
    """And a row without scale of its own in the truth, but not in an engine, is a row like others."""
    t = table(
        [1.0, 1.0 if side == "engine" else 0.0],
        [[1.0, 1.0 if side == "same" else 0.0], [1.0, 0.0]],
        norms=column([1.0, 1.0 if side == "norms" else 0.0]),
    )
    assert t.informative.tolist() == flags(1, 1)


def test_where_only_the_whole_fails_its_rows_are_blamed():
    sames = [[4.0, 0.0, 0.0], [0.0, 4.0, 4.0]]
    wide = torch.full((2, 3, 2), 200.0, dtype=torch.float64)
    energies = column([[2.0, 2.0], [2.0, 2.0], [99.0, 99.0]])
    t = table([2.0, 2.0, 2.0], sames, same_slices=wide, engine_slices=energies, norms=column([1.0, 1.0, 1.0]))
    found, gates = judged(t, k=0.6)
    assert [name for name, gate in gates.items() if not gate.passed] == [AGGREGATE]
    assert found.failing.tolist() == flags(1, 1, 1)


def test_where_slice_and_whole_fail_the_rows_of_the_slice_are_blamed():
    t = table(
        [2.0, 2.0],
        [[4.0, 0.0], [0.0, 4.0]],
        engine_slices=column([[2.0, 90.0], [2.0, 1.0]]),
    )
    found, gates = judged(t, k=0.6)
    assert [name for name, gate in gates.items() if not gate.passed] == [AGGREGATE, SLICE]
    assert found.failing.tolist() == flags(1, 0)


def test_where_a_row_fails_by_itself_no_other_is_blamed():
    t = table([9.0, 2.0], [[1.0, 1.0]], engine_slices=column([[2.0, 40.0], [2.0, 40.0]]))
    found, gates = judged(t)
    assert not gates[SLICE].passed
    assert found.failing.tolist() == flags(1, 0)


def test_rows_whose_bound_is_wider_than_half_of_them_are_counted():
    t = table([0.0] * 5, [[0.25, 0.26, 0.3, 0.0, 0.0]], norms=column([1.0, 1.0, 1.0, 1.0, 0.0]))
    assert judged(t, k=2.0)[0].n_vague == 2  # half of a row exactly is not more than half
    assert judged(t, k=0.1)[0].n_vague == 0
    for noise, floor in ((0.2, 0.01), (0.0, 0.2)):
        t = table([0.0, 0.0], [[0.0, 0.0]])
        found, _ = judged(t, k=2.0, noise=noise, floor=floor, carried=column([1.0, 2.0]))
        assert found.n_vague == 1
    t = table([0.0] * 3, [[0.0, 0.9, 0.9], [0.2, 0.0, 0.0]])  # a row's largest realisation counts
    assert judged(t, k=0.6)[0].n_vague == 2
    assert judged(table([0.0], [[0.0]], norms=column([0.0])), floor=9.0)[0].n_vague == 0


def test_a_wrong_dtype_fails_whatever_the_values():
    failed = dtype_gate(3.0, 0.25)
    assert (failed.name, failed.err_engine, failed.err_reference) == (DTYPE, math.inf, 0.0)
    assert (failed.floor, failed.bound, failed.required_k, failed.passed) == (0.25, 0.75, math.inf, False)
