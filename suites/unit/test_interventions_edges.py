"""Specs at their edges: how deep, how far, how long; and what a person is told, to the letter."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from harness.errors import UsageError
from harness.interventions import parse_interventions, plain_specs

HOOK, ONE = "blocks.0.hook_out", "blocks.0.mlp.hook_out"
WIDTHS = {ONE: 1, HOOK: 2}


def parsed(spec, hook=HOOK):
    ((edit,),) = parse_interventions({hook: spec}, widths=WIDTHS, nonfireable={}, lengths=[9])
    return edit


def refused(read, *given) -> str:
    with pytest.raises(UsageError) as caught:
        read(*given)
    return str(caught.value)


def nested(levels: int, inner, wrap):
    for _ in range(levels):
        inner = wrap(inner)
    return inner


@pytest.mark.parametrize("wrap", [lambda one: [one], lambda one: {"a": one}], ids=["list", "dict"])
def test_how_deep_specs_may_be(wrap):
    too_deep = "intervene is nested more than 16 deep, or holds itself; specs are dicts of dicts"
    assert plain_specs(nested(17, 1, wrap)) == nested(17, 1, wrap)
    assert refused(plain_specs, nested(18, 1, wrap)) == too_deep
    assert plain_specs(nested(15, np.array([1]), wrap)) == nested(15, [1], wrap)
    assert refused(plain_specs, nested(16, np.array([1]), wrap)) == too_deep


def test_how_far_a_range_may_go():
    far = 1 << 24
    assert plain_specs(range(far, far + 1)) == [far]
    for beyond in (range(far + 1, far + 2), range(far + 1, 0, -far)):
        assert refused(plain_specs, beyond).startswith(
            f"intervene is {beyond!r}, past the end of any sequence"
        )


def test_a_value_that_cannot_say_what_it_holds():
    class Broken:
        def __repr__(self):
            return "<broken>"

        def tolist(self):
            msg = "on strike"
            raise RuntimeError(msg)

    text = refused(plain_specs, {"a": Broken()})
    assert text.startswith("intervene['a'] is <broken>")
    assert text.endswith(", which does not say what it holds (RuntimeError: on strike)")


class Shy:
    """Cannot be shown."""

    def __repr__(self):
        raise ValueError


@pytest.mark.parametrize(
    ("key", "shown"),
    [("z" * 38, "'" + "z" * 38 + "'"), ("z" * 39, "'" + "z" * 36 + "…"), (Shy(), "something")],
    ids=["40", "41", "unshowable"],
)
def test_how_long_a_key_is_shown(key, shown):
    text = refused(parsed, {"op": "add", "value": 1.0, key: 1})
    assert text == f"hook {HOOK!r}, key {shown}: 'add' knows no such key, it takes op, value, pos"


def test_how_many_numbers_are_asked_for():
    two = refused(parsed, {"op": "scale", "factor": [1.0, 2.0]})
    assert two == f"hook {HOOK!r}, key 'factor': it holds 2 numbers; it takes one"
    three = refused(parsed, {"op": "add", "value": [1.0] * 3})
    assert (
        three == f"hook {HOOK!r}, key 'value': it holds 3 numbers; it takes one, or 2, the width of the point"
    )
    assert refused(parsed, {"op": "add", "value": [1.0] * 3}, ONE).endswith(
        "it holds 3 numbers; it takes one"
    )


def test_which_number_is_not_finite():
    where = f"hook {HOOK!r}, key 'value'"
    assert (
        refused(parsed, {"op": "set", "value": [0.0, math.nan]})
        == f"{where}: element 1 is nan, which is not finite"
    )
    assert refused(parsed, {"op": "set", "value": math.inf}) == f"{where}: inf, which is not finite"


def test_which_position_is_there_twice():
    assert "position 1 " in refused(parsed, {"op": "suppress", "pos": [0, 1, 2, 1]})


@pytest.mark.parametrize(
    "spec", [{"op": "suppress"}, {"op": "set", "value": [1.0, 2.0]}, {"op": "scale", "factor": 2}]
)
def test_an_edit_lies_on_the_cpu_whatever_an_engine_has_made_the_default(spec):
    with torch.device("meta"):
        assert parsed(spec).bias.device.type == "cpu"
