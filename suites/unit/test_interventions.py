"""Edits: every way to say one, a clear refusal of each that cannot be done, and programs that hold what they must."""

from __future__ import annotations

import json
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UnsupportedError, UsageError
from harness.interventions import FOREVER, OPS, Edit, parse_interventions, plain_specs, plan_programs
from harness.points import all_points, nonfireable_points

WIDTH, LENGTHS = 4, (5, 3)
POINTS = all_points(2)
HOOK = "blocks.1.hook_out"
ROW = [0.5, -1.25, 3.0, 0.0]
ADD = {"op": "add", "value": 0.5}


def parse(
    intervene: Any, lengths: Any = LENGTHS, dtype: torch.dtype = torch.float32
) -> list[tuple[Edit, ...]]:
    return parse_interventions(
        intervene,
        widths=dict.fromkeys(POINTS, WIDTH),
        nonfireable=nonfireable_points(2),
        lengths=lengths,
        dtype=dtype,
    )


def read(spec: Any, **more: Any) -> Edit:
    """The one edit of one request."""
    [[edit]] = parse({HOOK: spec}, (5,), **more)
    return edit


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


def at(spec: Any, *parts: str) -> Any:
    """A refused spec at :data:`HOOK`; the message must have the hook and ``parts`` in it."""
    return ({HOOK: spec}, [f"hook {HOOK!r}", *parts])


BIG = 10**400
REFUSED = {
    "text": ("suppress", ["intervene is 'suppress' (str)", "dict {hook: spec}"]),
    "number": (3, ["intervene is 3 (int)"]),
    "too few sets": ([{}], ["1 spec sets for 2 requests"]),
    "too many sets": ([None] * 3, ["3 spec sets for 2 requests"]),
    "set is a list": ([{}, [HOOK]], [f"the spec set of request 1 is [{HOOK!r}] (list)"]),
    "hook is no string": ({3: ADD}, ["request 0 has the key 3 (int)", "names of hooks"]),
    "unknown hook": (
        {"blocks.1.hook_ot": ADD},
        ["unknown hook 'blocks.1.hook_ot'", "did you mean 'blocks.1.hook_out'"],
    ),
    "block past the end": ({"blocks.2.hook_out": ADD}, ["unknown hook 'blocks.2.hook_out'"]),
    "hook cannot fire": (
        {"unembed.hook_out": ADD},
        ["'unembed.hook_out' is known but cannot", "rebuilt from the final norm"],
    ),
    "spec is a number": at(0.0, "its spec is 0.0 (float)", "{'op': 'add', 'value': 0.5}"),
    "spec is a list": at(["suppress"], "its spec is ['suppress'] (list)"),
    "spec is None": at(None, "its spec is None (NoneType)"),
    "no op": at({"value": 1.0}, "key 'op': is missing", "suppress, scale, add, set"),
    "unknown op": at({"op": "zero"}, "key 'op': is 'zero' (str)", "suppress, scale, add, set"),
    "op is a list": at({"op": ["add"]}, "key 'op': is ['add'] (list)"),
    "position": at({**ADD, "position": 1}, "key 'position': 'add' knows no such key", "did you mean 'pos'"),
    "positions": at({**ADD, "positions": 1}, "did you mean 'pos'"),
    "POS": at({**ADD, "POS": 1}, "key 'POS'", "did you mean 'pos'"),
    "vlaue": at({"op": "set", "vlaue": 1}, "key 'vlaue'", "did you mean 'value'"),
    "no hint": at({**ADD, "when": 1}, "key 'when'", "it takes op, value, pos"),
    "key is a number": at({**ADD, 1: 1}, "key 1: 'add' knows no such key"),
    "factor for add": at({**ADD, "factor": 2}, "key 'factor': 'add' knows no such key", "op, value, pos"),
    "value for suppress": at(
        {**ADD, "op": "suppress"}, "key 'value': 'suppress' knows no such key, it takes op, pos"
    ),
    "no factor": at({"op": "scale"}, "key 'factor': 'scale' needs it"),
    "no value to add": at({"op": "add"}, "key 'value': 'add' needs it"),
    "no value to set": at({"op": "set", "pos": 1}, "key 'value': 'set' needs it"),
    "value is None": at({"op": "set", "value": None}, "key 'value': None (NoneType) is neither a number"),
    "value is text": at({"op": "set", "value": "0.5"}, "key 'value': '0.5' (str) is neither a number"),
    "value is a dict": at({"op": "set", "value": {"a": 1}}, "key 'value': {'a': 1} (dict) is neither"),
    "value is a set": at({"op": "set", "value": {1}}, "key 'value' is {1} (set)"),
    "value is ragged": at(
        {"op": "set", "value": [[1.0], [2.0, 3.0, 4.0]]}, "key 'value'", "neither a number"
    ),
    "text in a list": at({"op": "set", "value": ["a", 1, 2, 3]}, "key 'value'", "neither a number"),
    "no numbers": at(
        {"op": "add", "value": []}, "key 'value': it holds 0 numbers; it takes one, or 4, the width"
    ),
    "too few numbers": at({"op": "add", "value": ROW[:3]}, "key 'value': it holds 3 numbers"),
    "too many numbers": at({"op": "add", "value": torch.zeros(2, WIDTH)}, "key 'value': it holds 8 numbers"),
    "a factor per channel": at(
        {"op": "scale", "factor": ROW}, "key 'factor': it holds 4 numbers; it takes one"
    ),
    "complex": at({"op": "add", "value": 1j}, "key 'value' is 1j (complex)", "real numbers"),
    "complex array": at({"op": "add", "value": np.array([1j] * 4)}, "key 'value'[0] is 1j (complex)"),
    "complex tensor": at(
        {"op": "add", "value": torch.zeros(4) * 1j}, "key 'value': a tensor of complex numbers"
    ),
    "bool": at({"op": "add", "value": True}, "key 'value': True (bool) holds bools"),
    "bool factor": at({"op": "scale", "factor": False}, "key 'factor': False (bool) holds bools"),
    "bool in a list": at({"op": "add", "value": [True, 0.5, 1, 2]}, "key 'value'", "holds bools"),
    "numpy bool in a list": at({"op": "add", "value": [np.True_, 0.5, 1, 2]}, "key 'value'", "holds bools"),
    "torch bool in a list": at({"op": "add", "value": [torch.tensor(True), 0.5, 1, 2]}, "holds bools"),
    "bool array": at({"op": "add", "value": np.ones(4, dtype=bool)}, "key 'value'", "holds bools"),
    "bool tensor": at({"op": "add", "value": torch.ones(4) > 0}, "key 'value': a tensor of bools"),
    "nan": at({"op": "set", "value": float("nan")}, "key 'value': nan, which is not finite"),
    "inf": at(
        {"op": "add", "value": [0, 1, float("-inf"), 2]},
        "key 'value': element 2 is -inf, which is not finite",
    ),
    "inf factor": at(
        {"op": "scale", "factor": torch.tensor(torch.inf)}, "key 'factor': inf, which is not finite"
    ),
    "too large": at({"op": "add", "value": 1e39}, "key 'value': 1e+39, which is too large for float32"),
    "too large in a list": at(
        {"op": "add", "value": [0, 1e39, 0, 0]}, "element 1 is 1e+39, which is too large for"
    ),
    "too large a tensor": at(
        {"op": "add", "value": torch.tensor(1e39, dtype=torch.float64)}, "too large for float32"
    ),
    "too large an int": at({"op": "scale", "factor": BIG}, "key 'factor': 1000", "is too large for float32"),
    "pos is a bool": at({**ADD, "pos": True}, "key 'pos': True (bool) is no position"),
    "pos is a float": at({**ADD, "pos": 1.0}, "key 'pos': 1.0 (float) is neither an int nor a list"),
    "pos is text": at({**ADD, "pos": "1"}, "key 'pos': '1' (str) is neither an int nor a list"),
    "pos is a slice": at({**ADD, "pos": slice(1, 3)}, "key 'pos' is slice(1, 3, None) (slice)"),
    "pos is a dict": at({**ADD, "pos": {1: 2}}, "key 'pos': {1: 2} (dict) is neither"),
    "pos is empty": at({**ADD, "pos": []}, "key 'pos': the list is empty"),
    "pos is an empty range": at({**ADD, "pos": range(3, 3)}, "key 'pos': the list is empty"),
    "bool in pos": at({**ADD, "pos": [0, True]}, "key 'pos': True (bool) is no position"),
    "numpy bool in pos": at({**ADD, "pos": [0, np.True_]}, "key 'pos': True (bool) is no position"),
    "mask as pos": at({**ADD, "pos": torch.ones(3) > 0}, "key 'pos': True (bool) is no position"),
    "float in pos": at({**ADD, "pos": [0, 1.0]}, "key 'pos': 1.0 (float) is no position"),
    "list in pos": at({**ADD, "pos": [[0, 1]]}, "key 'pos': [0, 1] (list) is no position"),
    "None in pos": at({**ADD, "pos": [None]}, "key 'pos': None (NoneType) is no position"),
    "negative": at({**ADD, "pos": -1}, "key 'pos': -1 is negative; positions count from 0"),
    "negative in a list": at({**ADD, "pos": [1, -2]}, "key 'pos': -2 is negative"),
    "doubled": at({**ADD, "pos": [2, 1, 2]}, "key 'pos': position 2 is named twice"),
    "past the end": at(
        {**ADD, "pos": 5}, "key 'pos': position 5 is past the end of request 0", "5 rows (0 to 4)"
    ),
    "past the end of one": at({**ADD, "pos": [0, 4]}, "key 'pos': position 4 is past the end of request 1"),
    "past any end": at(
        {**ADD, "pos": range(2, 10**12)}, "key 'pos' is range(2, 1000000000000), past the end of any"
    ),
}

CALLED = {
    "all": (max, ["intervene is a callable"]),
    "a set": ([None, max], ["the spec set of request 1 is a callable"]),
    "a spec": at(max, "is a callable"),
    "the op": at({"op": max}, "key 'op' is a callable"),
    "the value": at({"op": "set", "value": lambda rows: rows}, "key 'value' is a callable"),
    "the factor": at({"op": "scale", "factor": float}, "key 'factor' is a callable"),
    "pos": at({**ADD, "pos": len}, "key 'pos' is a callable"),
    "a key of no op": at({"op": "add", "fn": max}, "key 'fn' is a callable"),
    "in a value": at({"op": "set", "value": [max, 1, 2, 3]}, "key 'value'[0] is a callable"),
    "in pos": at({**ADD, "pos": [0, max]}, "key 'pos'[1] is a callable"),
}


def refusal(intervene: Any, parts: list[str], **more: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        parse(intervene, **more)
    message = str(caught.value)
    assert "\n" not in message
    assert [part for part in parts if part not in message] == [], message
    return caught.value


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
