"""The harness on trial: broken engine paths that the activation suite must turn red, for the right reason.

Each case boots a worker with one planted mistake and runs a check of ``test_activations`` on it. The case passes when
that check fails and its message names the mistake. The healthy engine passes the same checks in ``test_activations``.
"""

from __future__ import annotations

import pytest

from harness.errors import CaptureError
from suites import test_activations
from suites.trial import expect_red


def one_prompt(parity):
    """A prompt that one step takes."""
    test_activations.test_prompt_length(parity, 33)


#: Fault → the check that must catch it, and what its message must say.
FAULTS = {
    "ResidualHalfDropped": (test_activations.test_ragged_batch, r"residual"),
    "PostWeightNorm": (
        test_activations.test_ragged_batch,
        r"ln_final\.hook_normalized is the first .*weight",
    ),
    "LayerOffByOne": (
        test_activations.test_ragged_batch,
        r"blocks\.0\.hook_out .*equals blocks\.1\.hook_out",
    ),
    "RowsOffByOne": (one_prompt, r"shifted by one row|one row"),
    "AnotherRequestsRows": (test_activations.test_ragged_batch, r"request"),
    "StaleBuffer": (test_activations.test_call_again, r"the call before \(first call\)"),
    "DecodeOverwritesPrefill": (
        test_activations.test_decode_steps,
        r"request 0 position 0 holds request 0 position 5",  # the first decode row of a five-token prompt
    ),
    "WaitingOverwritten": (
        test_activations.test_decode_steps,
        r"in other places .*request 0 position 5 holds request \d position",
    ),
    "ZerosServed": (test_activations.test_ragged_batch, r"zero"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parity(
    models=("tiny-llama",), backends=("vllm",), smoke={"dtypes": ("fp32",), "modes": ("eager",)}
)
def test_planted_fault_is_caught(parity, fault):
    """A worker with this mistake turns the activation suite red, and the message names the mistake."""
    check, says = FAULTS[fault]
    expect_red(parity, f"workers.{fault}", check, says)


@pytest.mark.parity(
    models=("tiny-llama",), backends=("vllm",), modes=("compiled",), smoke={"dtypes": ("fp32",)}
)
def test_hooks_installed_after_compiling_are_reported_dead(parity):
    """Hooks added after boot never fire in a compiled engine: an error that names them, never zeros."""
    with parity.planted("workers.LateHooks") as faulty, pytest.raises(CaptureError) as caught:
        test_activations.test_prompt_length(faulty, 7)
    parity.note("LateHooks", message=str(caught.value))
    assert "embed.hook_out never fired" in str(caught.value)
