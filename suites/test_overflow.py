"""An edit that overflows spoils its own request, and no later one: vLLM hands blocks of the KV cache on as they are."""

from __future__ import annotations

import pytest

from harness.prompts import of_length
from suites.trial import expect_red

one_engine = pytest.mark.parity(
    models=("tiny-llama",),
    backends=("vllm",),
    steps=(64,),
    smoke={"dtypes": ("fp32",), "modes": ("eager",)},
)
#: As many as run at once, so often that every block of the cache has been used.
REQUESTS, CALLS = 16, 8


def judge_overflow(parity):
    """The same prompts before and after requests that overflowed agree in every bit."""
    prompts = [of_length(parity, n, seed=n) for n in (50, 14)]
    longest = [of_length(parity, parity.config.max_model_len - 1, seed=n) for n in range(REQUESTS)]
    edit = {"blocks.0.hook_out": {"op": "scale", "factor": 3e38}}
    before = parity.forward(prompts)
    for _ in range(CALLS):
        spoilt = parity.forward(longest, intervene=edit)
        assert not spoilt.captured["ln_final.hook_normalized"].isfinite().all()
    after = parity.forward(prompts)
    parity.bit_equal(
        list(after.captured.values()),
        list(before.captured.values()),
        label="after an overflow",
        what="captures after requests that overflowed",
    )


@one_engine
def test_an_overflow_stays_with_its_request(parity):
    """Captures after requests whose edits overflowed equal those from before, in every bit."""
    judge_overflow(parity)


@one_engine
def test_an_overflow_that_is_left_is_caught(parity):
    """With the KV cache left as it is, zero times NaN reaches the next request."""
    expect_red(
        parity, "edits.OverflowLeft", judge_overflow, "captures after requests that overflowed: .* differ"
    )
