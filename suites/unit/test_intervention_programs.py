"""Edits as they are done and sent: rounding, programs that hold what they must, and the way through JSON."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.interventions import FOREVER, OPS, Edit, plain_specs, plan_programs
from suites.unit.edit_specs import (
    ADD,
    CALLED,
    HOOK,
    POINTS,
    REFUSED,
    ROW,
    WIDTH,
    parse,
    read,
)


class TestApply:
    @pytest.mark.parametrize(
        ("dtype", "step"),
        [(torch.bfloat16, 2.0**-9), (torch.float16, 2.0**-12), (torch.float32, 2.0**-23)],
    )
    @pytest.mark.parametrize("op", ["scale", "add"])
    def test_rounds_once(self, op, dtype, step):
        """What is exact in fp32 is rounded once; the dtype itself has no number between 1.5 and 1.5 + 2 steps."""
        rows = (1 + torch.rand(64, WIDTH, dtype=torch.float64, generator=torch.manual_seed(0))).to(dtype)
        edit = read({"op": op, OPS[op]: 1.5 + step})
        exact = rows.double() * (1.5 + step) if op == "scale" else rows.double() + (1.5 + step)
        got = edit.apply(rows)
        assert got.dtype == dtype
        assert torch.equal(got, exact.to(dtype))
        if dtype != torch.float32:
            rounded = torch.tensor(1.5 + step).to(dtype)
            assert not torch.equal(got, rows * rounded if op == "scale" else rows + rounded)

    def test_a_truth_is_edited_at_its_own_dtype(self):
        rows = torch.rand(9, WIDTH, dtype=torch.float64)
        assert torch.equal(read({"op": "scale", "factor": 1.5}).apply(rows), rows * 1.5)
        value = torch.tensor([0.1, 0.2, 0.3, 0.4])
        assert torch.equal(read({"op": "add", "value": value}).apply(rows), rows + value.double())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    @pytest.mark.parametrize(
        ("spec", "expected"),
        [
            ({"op": "suppress"}, 0.0),
            ({"op": "scale", "factor": 0}, 0.0),
            ({"op": "set", "value": 0.1}, 0.1),
            ({"op": "set", "value": ROW}, ROW),
        ],
    )
    def test_what_was_there_before_is_gone(self, spec, expected, dtype):
        rows = torch.tensor([[1.0, torch.inf, -torch.inf, torch.nan], [-1.0, -0.0, 5e-8, 6e4]], dtype=dtype)
        before = rows.clone()
        got = read(spec).apply(rows)
        wanted = torch.tensor(expected, dtype=torch.float32).to(dtype).expand(2, WIDTH)
        assert torch.equal(got, wanted)
        assert got.dtype == dtype
        assert torch.equal(rows.nan_to_num(7), before.nan_to_num(7))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_the_result_is_the_callers(self, dtype):
        """What it writes there must not change the edit."""
        edit = read({"op": "set", "value": ROW})
        edit.apply(torch.ones(2, WIDTH, dtype=dtype)).mul_(3)
        assert edit.bias.tolist() == ROW

    def test_any_leading_shape(self):
        rows = torch.rand(2, 3, WIDTH)
        assert torch.equal(read({"op": "add", "value": ROW}).apply(rows), rows + torch.tensor(ROW))
        assert read({"op": "suppress"}).apply(rows[:, :0]).shape == (2, 0, WIDTH)


numbers = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.integers(-5, 5)
values = numbers | st.lists(numbers, min_size=WIDTH, max_size=WIDTH)


@st.composite
def specs(draw: Any, n_rows: int, value: Any = values, factor: Any = numbers) -> dict[str, Any]:
    """A spec set for a request of ``n_rows`` rows."""
    drawn = {}
    for hook in draw(st.lists(st.sampled_from(POINTS), unique=True, max_size=4)):
        op = draw(st.sampled_from(list(OPS)))
        spec: dict[str, Any] = {"op": op}
        if OPS[op] is not None:
            spec[OPS[op]] = draw(value if OPS[op] == "value" else factor)
        if draw(st.booleans()):
            rows = st.integers(0, n_rows - 1)
            spec["pos"] = draw(rows | st.lists(rows, unique=True, min_size=1, max_size=n_rows))
        drawn[hook] = spec
    return drawn


# Few different numbers, so that requests often ask for the same.
few = st.sampled_from([0.0, 1.0, [0.0, 1.0, 2.0, 3.0]])
batches = st.lists(st.integers(1, 6), min_size=1, max_size=4).flatmap(
    lambda lengths: st.tuples(
        st.just(lengths),
        st.tuples(*(st.none() | specs(n, value=few, factor=st.sampled_from([0.0, 2.0])) for n in lengths)),
    )
)


class TestPrograms:
    @given(batches)
    def test_each_row_gets_the_edits_that_touch_it(self, batch):
        lengths, sets = batch
        requests = parse(sets, lengths)
        plan = plan_programs(requests, limit=10**6)
        assert len(plan.ranges) == len(requests)
        for edits, ranges, n_rows in zip(requests, plan.ranges, lengths, strict=True):
            for row in range(n_rows + 2):  # and rows that no position names: only the edits of every row
                program = 0
                for begin, end, number in ranges:
                    program = number if begin <= row < end else program
                held = plan.programs[program - 1] if program else ()
                assert [e.key for e in held] == [e.key for e in edits if row in e.touches(row + 1)]
        assert plan.empty == (not any(requests))

    @given(batches)
    def test_equal_edits_share_a_program(self, batch):
        plan = plan_programs(parse(batch[1], batch[0]), limit=10**6)
        assert len({tuple(e.key for e in program) for program in plan.programs}) == len(plan.programs)
        for program in plan.programs:
            assert program
            assert {edit.pos for edit in program} == {None}
            assert len({edit.hook for edit in program}) == len(program)
        numbers_used = {number for ranges in plan.ranges for _, _, number in ranges}
        assert numbers_used == set(range(1, len(plan.programs) + 1))

    @given(batches)
    def test_limit(self, batch):
        requests = parse(batch[1], batch[0])
        needed = len(plan_programs(requests, limit=10**6).programs)
        assert len(plan_programs(requests, limit=needed).programs) == needed
        if needed:
            with pytest.raises(
                UsageError, match=f"needs {needed} distinct .* room for {needed - 1}: send fewer"
            ):
                plan_programs(requests, limit=needed - 1)

    def test_what_shares_a_program(self):
        plan = plan_programs(
            parse([{HOOK: {**ADD, "pos": 1}}, {HOOK: {"op": "add", "value": [0.5]}}]), limit=1
        )
        assert plan.ranges == (((1, 2, 1),), ((0, FOREVER, 1),))

    def test_neighbouring_positions_are_one_range(self):
        set_ = {HOOK: {**ADD, "pos": [0, 1, 2, 4]}, POINTS[0]: {"op": "suppress", "pos": 4}}
        assert plan_programs(parse(set_, [5]), limit=2).ranges == (((0, 3, 1), (4, 5, 2)),)

    def test_a_position_adds_to_what_every_row_gets(self):
        plan = plan_programs(parse({HOOK: {**ADD, "pos": 2}, POINTS[0]: {"op": "suppress"}}, [5]), limit=2)
        assert [[e.hook for e in program] for program in plan.programs] == [[POINTS[0]], [POINTS[0], HOOK]]
        assert plan.ranges == (((0, FOREVER, 1), (2, 3, 2)),)

    def test_nothing_to_do(self):
        plan = plan_programs([(), ()], limit=0)
        assert plan.empty
        assert plan.ranges == ((), ())


def through_json(intervene: Any) -> Any:
    return json.loads(json.dumps(plain_specs(intervene)))


def digests(requests: list[tuple[Edit, ...]]) -> list[list[tuple[Any, ...]]]:
    return [[(edit.op, *edit.digest) for edit in edits] for edits in requests]


class TestPlainSpecs:
    @given(
        specs(5),
        st.sampled_from(
            [lambda v: v, lambda v: torch.tensor(v, dtype=torch.float32), np.float32, np.float64]
        ),
        st.sampled_from([lambda p: p, torch.tensor, np.array]),
    )
    def test_every_bit_survives_json(self, plain, as_numbers, as_positions):
        given_as = {
            hook: {
                key: as_numbers(v) if key in {"value", "factor"} else as_positions(v) if key == "pos" else v
                for key, v in spec.items()
            }
            for hook, spec in plain.items()
        }
        sent = through_json(given_as)
        assert digests(parse(sent, [5])) == digests(parse(given_as, [5])) == digests(parse(plain, [5]))
        assert through_json(sent) == sent

    @given(st.lists(st.floats(width=32), min_size=1))
    def test_fp32_values_are_exact(self, exact):
        tensor = torch.tensor(exact, dtype=torch.float32)
        [back] = through_json([{HOOK: {"op": "set", "value": tensor}}])
        assert np.array_equal(np.float32(back[HOOK]["value"]), tensor.numpy(), equal_nan=True)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_other_dtypes_are_exact_too(self, dtype):
        values = torch.randn(50, generator=torch.manual_seed(0), dtype=torch.float64).to(dtype)
        assert torch.equal(torch.tensor(through_json(values), dtype=dtype), values)

    def test_forms(self):
        assert plain_specs(None) is None
        assert plain_specs([None, {HOOK: {**ADD, "pos": range(2)}}]) == [None, {HOOK: {**ADD, "pos": [0, 1]}}]
        assert plain_specs({HOOK: {**ADD, "pos": (np.int64(1),)}}) == {HOOK: {**ADD, "pos": [1]}}
        given_as = {HOOK: {"op": "add", "value": torch.nn.Parameter(torch.ones(2))}}
        assert plain_specs(given_as) == {HOOK: {"op": "add", "value": [1.0, 1.0]}}

    @pytest.mark.parametrize("mistake", sorted(REFUSED))
    def test_what_is_refused_is_refused_after_json_too(self, mistake):
        """Before JSON where it cannot be sent at all, as the same mistake after it otherwise."""
        with pytest.raises(UsageError) as caught:
            parse(through_json(REFUSED[mistake][0]))
        assert not isinstance(caught.value, NotImplementedError)

    @pytest.mark.parametrize("mistake", CALLED)
    def test_callables_are_not_sent(self, mistake):
        with pytest.raises(NotImplementedError, match=r"^intervene.* is a callable"):
            plain_specs(CALLED[mistake][0])

    @pytest.mark.parametrize(
        ("wrong", "where"),
        [
            ({HOOK: {"op": "set", "value": {1.0}}}, f"intervene['{HOOK}']['value'] is {{1.0}} (set)"),
            ([None, {HOOK: {**ADD, "pos": slice(2)}}], f"intervene[1]['{HOOK}']['pos'] is slice("),
            ({HOOK: {"op": "set", "value": [0.0, 1j]}}, f"intervene['{HOOK}']['value'][1] is 1j (complex)"),
            (np.array([1j]), "intervene[0] is 1j (complex)"),
        ],
    )
    def test_what_json_cannot_carry(self, wrong, where):
        with pytest.raises(UsageError, match=re.escape(where)):
            plain_specs(wrong)
