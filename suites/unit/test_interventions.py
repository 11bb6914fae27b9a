"""Edits as a user writes them: every way to say one, and a clear refusal of each that cannot be done."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UnsupportedError, UsageError
from harness.interventions import OPS, parse_interventions
from suites.unit.edit_specs import (
    ADD,
    CALLED,
    HOOK,
    POINTS,
    REFUSED,
    ROW,
    WIDTH,
    at,
    parse,
    read,
    refusal,
)


class TestSpecs:
    @pytest.mark.parametrize(
        ("spec", "scale", "bias"),
        [
            ({"op": "suppress"}, 0.0, 0.0),
            ({"op": "scale", "factor": -1.5}, -1.5, 0.0),
            ({"op": "scale", "factor": 0.1}, float(np.float32(0.1)), 0.0),
            ({"op": "add", "value": 0.1}, 1.0, 0.1),
            ({"op": "add", "value": ROW}, 1.0, ROW),
            ({"op": "set", "value": 2}, 0.0, 2.0),
            ({"op": "set", "value": ROW}, 0.0, ROW),
        ],
    )
    def test_ops(self, spec, scale, bias):
        edit = read(spec)
        assert (edit.hook, edit.op, edit.scale, edit.pos) == (HOOK, spec["op"], scale, None)
        assert torch.equal(edit.bias, torch.tensor(bias, dtype=torch.float32))

    @pytest.mark.parametrize(
        "value",
        [
            0.5,
            [0.5],
            (0.5,),
            np.float32(0.5),
            np.float16(0.5),
            np.array(0.5),
            np.array([0.5]),
            torch.tensor(0.5),
            torch.tensor([[0.5]], dtype=torch.bfloat16),
            torch.nn.Parameter(torch.tensor(0.5)),
        ],
    )
    @pytest.mark.parametrize("op", ["scale", "add", "set"])
    def test_one_number(self, op, value):
        edit = read({"op": op, OPS[op]: value})
        number = edit.scale if op == "scale" else edit.bias
        assert number == 0.5
        assert edit.bias.shape == ()
        assert edit.bias.dtype == torch.float32
        assert not edit.bias.requires_grad

    @pytest.mark.parametrize(
        "value",
        [
            ROW,
            tuple(ROW),
            [ROW],
            [*map(np.float32, ROW)],
            [*map(torch.tensor, ROW)],
            [torch.tensor(ROW[:2]), torch.tensor(ROW[2:])],
            np.array(ROW),
            np.array(ROW[::-1], dtype=np.float16)[::-1],
            np.broadcast_to(np.array(ROW), (1, WIDTH)),  # read-only
            *(
                torch.tensor(ROW, dtype=d)
                for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
            ),
            torch.tensor([ROW]),
            torch.nn.Parameter(torch.tensor(ROW)),
        ],
    )
    def test_one_number_per_channel(self, value):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            edit = read({"op": "set", "value": value})
        assert edit.bias.tolist() == ROW
        assert edit.bias.dtype == torch.float32
        assert not edit.bias.requires_grad

    def test_integers_are_numbers(self):
        assert read({"op": "add", "value": torch.arange(WIDTH)}).bias.tolist() == [0.0, 1.0, 2.0, 3.0]
        assert read({"op": "add", "value": range(WIDTH)}).bias.tolist() == [0.0, 1.0, 2.0, 3.0]

    def test_the_edit_keeps_its_own_numbers(self):
        value = torch.tensor(ROW)
        edit = read({"op": "add", "value": value})
        value.zero_()
        assert edit.bias.tolist() == ROW

    @pytest.mark.parametrize("default", [torch.float32, torch.bfloat16, torch.float64])
    def test_numbers_are_rounded_to_fp32_whatever_torch_makes_of_a_list(self, default):
        before = torch.get_default_dtype()
        torch.set_default_dtype(default)  # vLLM does, while it loads a model
        try:
            edits = [read({"op": "add", "value": v}) for v in (0.1, [0.1], np.float64(0.1), [0.1] * WIDTH)]
            suppressed = read({"op": "suppress"})
        finally:
            torch.set_default_dtype(before)
        assert {n for edit in edits for n in edit.bias.reshape(-1).tolist()} == {float(np.float32(0.1))}
        assert suppressed.key == read({"op": "suppress"}).key

    @pytest.mark.parametrize(
        ("pos", "expected"),
        [
            (None, None),
            (0, (0,)),
            (4, (4,)),
            ([3], (3,)),
            ([4, 0, 2], (0, 2, 4)),
            ((1, 2), (1, 2)),
            (range(1, 4), (1, 2, 3)),
            (range(4, 0, -2), (2, 4)),
            (np.int64(3), (3,)),
            (np.array([3, 1]), (1, 3)),
            (torch.tensor(2), (2,)),
            (torch.tensor([2, 0]), (0, 2)),
        ],
    )
    def test_positions(self, pos, expected):
        assert read({**ADD, "pos": pos}).pos == expected

    def test_touches(self):
        assert read(ADD).touches(3) == [0, 1, 2]
        edit = read({**ADD, "pos": [4, 0, 2]})
        assert [edit.touches(n) for n in (0, 1, 3, 5, 9)] == [[], [0], [0, 2], [0, 2, 4], [0, 2, 4]]


class TestBatches:
    def test_nothing(self):
        assert parse(None) == parse({}) == parse([None, {}]) == [(), ()]
        assert parse([], []) == []

    def test_one_set_for_the_batch(self):
        first, second = parse({HOOK: {**ADD, "pos": 2}})
        assert first == second
        assert [edit.hook for edit in first] == [HOOK]

    def test_one_set_per_request(self):
        first, second = parse([{HOOK: {**ADD, "pos": 4}}, {POINTS[0]: ADD}])
        assert [(e.hook, e.pos) for e in (*first, *second)] == [(HOOK, (4,)), (POINTS[0], None)]
        assert [len(edits) for edits in parse([None, {HOOK: ADD}])] == [0, 1]
        assert [len(edits) for edits in parse(({HOOK: ADD}, None))] == [1, 0]

    @given(st.permutations(POINTS))
    def test_edits_come_in_forward_order(self, hooks):
        (edits,) = parse(dict.fromkeys(hooks, ADD), [1])
        assert [edit.hook for edit in edits] == POINTS

    def test_same_numbers_are_the_same_edit(self):
        forms = [ROW, torch.tensor(ROW), np.array(ROW)]
        assert len({read({"op": "set", "value": form}).digest for form in forms}) == 1
        assert read({"op": "suppress"}).digest == read({"op": "set", "value": 0}).digest
        here, there = read({**ADD, "pos": 1}), read({**ADD, "pos": 2})
        assert here.key == there.key
        assert here.digest != there.digest
        others = [read({"op": "add", "value": v}).key for v in (0.5, 0.25, ROW)]
        assert (
            len({*others, read({"op": "set", "value": 0.5}).key, read({"op": "scale", "factor": 0.5}).key})
            == 5
        )


class TestRefusals:
    @pytest.mark.parametrize("mistake", REFUSED)
    def test_refused(self, mistake):
        assert not isinstance(refusal(*REFUSED[mistake]), NotImplementedError)

    @pytest.mark.parametrize("mistake", CALLED)
    def test_callables_are_not_built(self, mistake):
        error = refusal(*CALLED[mistake])
        assert isinstance(error, NotImplementedError)
        assert isinstance(error, UnsupportedError)
        assert "suppress, scale, add, set" in str(error)

    @pytest.mark.parametrize(
        ("value", "dtype", "reason"),
        [
            (65520.0, torch.float16, "65520.0, which is too large for float16"),
            ([0, 0, 0, -7e4], torch.float16, "element 3 is -70000.0, which is too large for float16"),
            (3.4e38, torch.bfloat16, "which is too large for bfloat16"),
            (3.5e38, torch.float32, "which is too large for float32"),
            (1e39, torch.float64, "which is too large for float32"),
        ],
    )
    def test_values_must_be_finite_at_the_engines_dtype(self, value, dtype, reason):
        refusal(*at({"op": "set", "value": value}, "key 'value'", reason), dtype=dtype)

    @pytest.mark.parametrize(
        ("value", "dtype"), [(65504.0, torch.float16), (3.38e38, torch.bfloat16), (3.4e38, torch.float32)]
    )
    def test_the_largest_values_that_fit(self, value, dtype):
        assert read({"op": "set", "value": value}, dtype=dtype).bias == float(np.float32(value))

    def test_a_mistake_in_a_later_request_says_which(self):
        refusal([{HOOK: ADD}, {HOOK: {**ADD, "pos": 3}}], ["request 1, which has 3 rows (0 to 2)"])
        refusal([None, {"blocks.9.hook_out": ADD}], ["unknown hook 'blocks.9.hook_out'"])

    def test_long_values_are_shown_short(self):
        error = refusal({HOOK: torch.ones(3, 3)}, [f"hook {HOOK!r}: its spec is tensor("])
        assert len(str(error)) < 200


def test_the_position_that_stands_twice_is_the_one_named():
    with pytest.raises(UsageError, match="position 5 is named twice"):
        parse_interventions(
            {"embed.hook_out": {"op": "suppress", "pos": [3, 5, 4, 5]}},
            widths={"embed.hook_out": 2},
            nonfireable={},
            lengths=[9],
        )


def test_the_element_that_is_not_finite_is_named_in_two_as_in_many():
    with pytest.raises(UsageError, match="element 1 is inf, which is not finite"):
        parse_interventions(
            {"embed.hook_out": {"op": "add", "value": [0.0, float("inf")]}},
            widths={"embed.hook_out": 2},
            nonfireable={},
            lengths=[9],
        )
