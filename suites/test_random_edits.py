"""Hypothesis looks for a set of edits on which engine and reference disagree, on one engine kept alive.

A shrunk example is printed as the call that fails; ``prompts`` and ``specs`` can be pasted into a test as they are.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.prompts import of_length
from suites.edits import randn

LENGTHS = (3, 20, 70)

quietly = settings(
    deadline=None, suppress_health_check=list(HealthCheck), database=None, print_blob=False, derandomize=True
)


def _numbers(width):
    scalars = st.floats(-4, 4, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3)
    return scalars | st.builds(randn, st.integers(0, 99), st.just(width), st.sampled_from([0.25, 1.0, 4.0]))


def _positions(rows):
    one = st.integers(0, rows - 1)
    return st.none() | one | st.lists(one, min_size=1, max_size=5, unique=True)


def _spec(width, rows):
    numbers = _numbers(width)
    return st.tuples(
        st.one_of(
            st.just({"op": "suppress"}),
            st.floats(-3, 3, width=32).map(lambda x: {"op": "scale", "factor": x}),
            numbers.map(lambda x: {"op": "add", "value": x}),
            numbers.map(lambda x: {"op": "set", "value": x}),
        ),
        _positions(rows),
    ).map(lambda pair: pair[0] if pair[1] is None else {**pair[0], "pos": pair[1]})


@st.composite
def calls(draw, hooks, width):
    """(prompt numbers, specs, new tokens) of a call that can be served."""
    prompts = draw(st.lists(st.integers(0, len(LENGTHS) - 1), min_size=1, max_size=3))
    k = draw(st.sampled_from([1, 1, 3]))

    def sets(rows):
        return st.dictionaries(st.sampled_from(hooks), _spec(width, rows), max_size=3)

    if draw(st.booleans()):
        specs = draw(sets(min(LENGTHS[i] for i in prompts) + k - 1))
    else:
        specs = [draw(st.none() | sets(LENGTHS[i] + k - 1)) for i in prompts]
    return prompts, specs, k


@st.composite
def refused_calls(draw, hooks, width):
    """The same with one thing broken in it."""
    prompts, specs, k = draw(calls(hooks, width))
    sets = [specs] * len(prompts) if isinstance(specs, dict) else list(specs)
    where = draw(st.integers(0, len(sets) - 1))
    hook = draw(st.sampled_from(hooks))
    rows = LENGTHS[prompts[where]] + k - 1
    bad = draw(
        st.sampled_from(
            [
                {"op": "suppress", "pos": rows},
                {"op": "suppress", "pos": [0, -1]},
                {"op": "suppress", "pos": []},
                {"op": "suppress", "pos": 1.0},
                {"op": "suppress", "value": 1.0},
                {"op": "scale"},
                {"op": "scale", "factor": [1.0] * width},
                {"op": "scale", "factor": float("inf")},
                {"op": "add", "value": [0.0] * (width + 1)},
                {"op": "add", "value": "much"},
                {"op": "set", "value": [[True] * width]},
                {"op": "set", "value": None},
                {"op": "Set", "value": 1.0},
                {"value": 1.0},
                [],
            ]
        )
    )
    sets[where] = {**(sets[where] or {}), hook: bad}
    return prompts, sets, k


tiny = pytest.mark.parity(models=("tiny-llama",))


def _prompts(parity, numbers):
    return [of_length(parity, LENGTHS[i], seed=i) for i in numbers]


@tiny
def test_random_edits_agree_or_leave_no_trace(parity):
    """Random sets of edits: the engine does what the reference does, and no state leaks from one call to the next."""

    @settings(quietly, max_examples=parity.examples)
    @given(calls(parity.hook_points, parity.width))
    def holds(call):
        numbers, specs, k = call
        parity.check_edits(
            _prompts(parity, numbers), specs, max_new_tokens=k, label="random", must_bite=False
        )

    holds()


@tiny
def test_random_mistakes_are_refused_alike(parity):
    """Random sets with one mistake: engine and reference refuse them for the same reason, word for word."""

    @settings(quietly, max_examples=parity.examples)
    @given(refused_calls(parity.hook_points, parity.width))
    def refused(call):
        numbers, specs, k = call
        prompts = _prompts(parity, numbers)
        with pytest.raises(UsageError) as here:
            parity.edits(specs, [len(prompt) + k - 1 for prompt in prompts])
        with pytest.raises(UsageError) as there:
            parity.forward(prompts, intervene=specs, max_new_tokens=k)
        assert str(there.value) == str(here.value)

    refused()
