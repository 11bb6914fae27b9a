"""The intervention checks on trial: engines that edit wrongly must turn them red, with hook and position named.

Each case boots a worker with one planted mistake and runs one edited call through ``parity.check_edits``, which the
healthy engine passes in ``test_interventions``; the control case here runs all of those calls on one.
"""

from __future__ import annotations

import pytest

from harness.prompts import of_length
from suites.edits import Sizes, randn
from suites.trial import expect_red

HOOK = "blocks.1.hook_out"
FINAL = "ln_final.hook_normalized"

on_tiny = pytest.mark.parity(
    models=("tiny-llama",), backends=("vllm",), smoke={"dtypes": ("fp32",), "modes": ("eager",)}
)


def _add(parity, hook=HOOK, **more):
    return {hook: {"op": "add", "value": randn(7, parity.width, Sizes(parity).of(hook)), **more}}


def _set(parity, **more):
    return {HOOK: {"op": "set", "value": randn(8, parity.width, Sizes(parity).of(HOOK)), **more}}


def one_row(parity):
    """One request, one row, an added vector."""
    parity.check_edits([of_length(parity, 20)], _add(parity, pos=5))


def one_of_two(parity):
    """Two requests, of which the first is edited."""
    parity.check_edits([of_length(parity, 20), of_length(parity, 9, seed=1)], [_add(parity, pos=5), None])


def set_row(parity):
    """One request, one row, set to a vector."""
    parity.check_edits([of_length(parity, 20)], _set(parity, pos=5))


def final_norm(parity):
    """A vector added to the normalised value before its weight."""
    parity.check_edits([of_length(parity, 20)], _add(parity, FINAL, pos=5))


def last_word(parity):
    """The final norm's last row set to something else, one request: only the next token can show it."""
    specs = {FINAL: {"op": "set", "value": randn(9, parity.width, 2.0), "pos": 19}}
    parity.check_edits([of_length(parity, 20)], specs)


def decoding(parity):
    """Every row, four new tokens."""
    parity.check_edits([of_length(parity, 9)], _add(parity), max_new_tokens=4)


def two_chunks(parity):
    """Every row of a prompt that takes two steps."""
    parity.check_edits([of_length(parity, parity.step + 6)], _add(parity))


#: Fault → the call that must catch it, and what the message must say.
FAULTS = {
    "EditAppliedTwice": (
        one_row,
        r"change made by the edits.*blocks\.1\.hook_out is the first.*position 5.*times 2",
    ),
    "EditOnEveryRequest": (one_of_two, r"no edit reaches it: blocks\.1\.hook_out, request 1 position 5"),
    "EditOnePositionLate": (one_row, r"no edit reaches it: blocks\.1\.hook_out, request 0 position 6"),
    "EditBeforeWeight": (final_norm, r"ln_final\.hook_normalized is the first.*position 5.*weight"),
    "EditOutsideCapture": (set_row, r"blocks\.1\.hook_out, request 0 position 5: set reads back"),
    "EditNotHandedOn": (last_word, r"tokens, request 0 step 0: token \d+ where the truth has \d+"),
    "EditNotReset": (one_row, r"not reverted.*blocks\.1\.hook_out, request 0 position 5"),
    "EditLostAtDecode": (
        decoding,
        r"blocks\.1\.hook_out is the first.*decode.*minus the edit added at blocks\.1\.hook_out: it did not bite",
    ),
    "EditOfDeltaOnly": (set_row, r"blocks\.1\.hook_out, request 0 position 5: set reads back"),
    "EditCancelled": (set_row, r"blocks\.1\.hook_out, request 0 position 5: set reads back"),
    "EditSkippedInLaterChunks": (
        two_chunks,
        r"blocks\.1\.hook_out is the first.*last chunk.*without edits.*position 6[4-9]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@on_tiny
def test_planted_fault_is_caught(parity, fault):
    """A worker that edits like this turns the intervention checks red, and the message says where and how."""
    call, says = FAULTS[fault]
    expect_red(parity, f"edits.{fault}", call, says)


@on_tiny
def test_the_same_calls_on_a_healthy_engine(parity):
    """The control: every call that catches a fault passes where there is none."""
    for call in {call for call, _ in FAULTS.values()}:
        call(parity)
