"""Specs of edits that tests read: points of a small model, and every mistake there is a refusal for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from harness.errors import UsageError
from harness.interventions import Edit, parse_interventions
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
