"""An edit that overflows spoils its own request and no other: vLLM hands blocks of the KV cache on as they are."""

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


#: Requests of a call get blocks that others of it have left: room for four of a block each.
FEW_BLOCKS = {"num_gpu_blocks_override": 5}
#: Finite where the model ends, though the second block's keys and values are not.
OVERFLOWS = {
    "shows": {"blocks.0.hook_out": {"op": "scale", "factor": 3e38}},
    "hidden": {"blocks.0.hook_out": {"op": "scale", "factor": 3e38}, "blocks.1.hook_out": {"op": "suppress"}},
}
whichever = pytest.mark.parametrize("overflow", OVERFLOWS)


def judge_later_calls(parity, overflow):
    """The same prompts before and after requests that overflowed agree in every bit."""
    prompts = [of_length(parity, n, seed=n) for n in (50, 14)]
    longest = [of_length(parity, parity.config.max_model_len - 1, seed=n) for n in range(REQUESTS)]
    before = parity.forward(prompts)
    for _ in range(CALLS):
        spoilt = parity.forward(longest, intervene=OVERFLOWS[overflow])
        assert not spoilt.captured["blocks.0.hook_out"].isfinite().all()
    after = parity.forward(prompts)
    parity.bit_equal(
        list(after.captured.values()),
        list(before.captured.values()),
        label="after an overflow",
        what="captures after requests that overflowed",
    )


def judge_neighbours(parity, overflow, lengths=(50, 51, *range(18, 26))):
    """Requests that start in a block which another of the same call has spoilt and left agree in every bit as well."""
    prompts = [of_length(parity, n, seed=n) for n in lengths]
    clean, mixed = (
        parity.forward(prompts, intervene=[edit, *[None] * len(prompts[1:])], max_new_tokens=2)
        for edit in (None, OVERFLOWS[overflow])
    )
    assert not mixed.rows("blocks.0.hook_out", 0).isfinite().all()
    others = range(1, len(prompts))
    parity.bit_equal(
        [mixed.rows(hook, i) for hook in mixed.hooks for i in others],
        [clean.rows(hook, i) for hook in clean.hooks for i in others],
        label="beside an overflow",
        what="captures beside a request that overflowed",
    )


@one_engine
@whichever
def test_an_overflow_stays_with_its_call(parity, overflow):
    """Captures after requests whose edits overflowed equal those from before, in every bit."""
    judge_later_calls(parity, overflow)


@one_engine
@whichever
def test_an_overflow_stays_with_its_request(parity, overflow):
    """Captures of a batch in which one request overflows and ends first equal those of the same batch without edits."""
    with parity.variant(**FEW_BLOCKS) as engine:
        judge_neighbours(engine, overflow)


@one_engine
@whichever
@pytest.mark.parametrize(
    ("judge", "says", "options"),
    [
        (judge_later_calls, "after requests that overflowed", {}),
        (judge_neighbours, "beside a request that overflowed", FEW_BLOCKS),
    ],
    ids=["later-calls", "neighbours"],
)
def test_an_overflow_that_is_left_is_caught(parity, judge, says, options, overflow):
    """With the KV cache left as it is, zero times NaN reaches another request."""

    def check(faulty):
        judge(faulty, overflow)

    expect_red(parity, "edits.OverflowLeft", check, f"captures {says}: .* differ", **options)


@pytest.mark.parity(
    models=("tiny-llama",),
    backends=("vllm",),
    topologies=("tp2",),
    extra_topologies=("tp2",),
    steps=(64,),
    smoke={"dtypes": ("fp32",), "modes": ("eager",)},
)
def test_an_overflow_is_read_where_ranks_must_agree(parity):
    """Infinity less infinity is no difference between replicas: the spoilt request's rows are served."""
    judge_neighbours(parity, "shows", (50, 21))
