"""Faults that sit in few places: the call that must notice each, and where its message must say that it begins.

The second block's MLP is wrong in one channel, row, request, chunk or phase, on one rank or at one dtype only, and what
it leads to in later blocks with it; or every block drifts by a ten-thousandth.
"""

from __future__ import annotations

import pytest

from harness.prompts import of_length
from suites import test_activations
from suites.trial import expect_red

MLP = r"blocks\.1\.mlp\.hook_out is the first"

on_tiny = pytest.mark.parity(
    models=("tiny-llama",),
    backends=("vllm",),
    modes=("eager",),
    steps=(64,),
    smoke={"dtypes": ("fp32",)},
)


def ragged(parity):
    """Prompts of other lengths, in chunks."""
    test_activations.test_ragged_batch(parity)


def short(parity):
    """One prompt of ten."""
    prompts = [of_length(parity, 10)]
    parity.check(prompts, parity.forward(prompts))


def many(parity):
    """Sixty-four requests."""
    prompts = [of_length(parity, 2 + i % 3, seed=i) for i in range(64)]
    parity.check(prompts, parity.forward(prompts))


def chunks(parity):
    """A prompt that takes three steps."""
    prompts = [of_length(parity, 2 * parity.step + 22)]
    parity.check(prompts, parity.forward(prompts))


def decoding(parity):
    """Prompts with decode steps."""
    test_activations.test_decode_steps(parity)


#: Fault → the call that must catch it, and what the message must say.
FAULTS = {
    "OneChannel": (short, rf"{MLP}.*only channel 7"),
    "OneRowOfEach": (ragged, rf"{MLP}.*row 5 of every request"),
    "OneRequestOf64": (many, rf"{MLP}.*all rows of request 37"),
    "OnlyLastChunk": (chunks, rf"{MLP}.*the rows of each prompt's last chunk"),
    "OnlyWhileDecoding": (decoding, rf"{MLP}.*the decode rows"),
}
#: Fault → the only dtype it is one at, the call, the message.
BY_DTYPE = {
    "DriftsPerLayer": ("fp32", short, r"blocks\.0\.hook_out is the first"),
    "MatmulInTf32": ("fp32", short, MLP),
    "AttentionInInt4": ("bf16", short, r"blocks\.1\.attn\.hook_out is the first"),
}


@pytest.mark.parametrize("fault", FAULTS)
@on_tiny
def test_planted_fault_is_caught(parity, fault):
    """Wrong in one place and right in all others: red, and the place is named."""
    check, says = FAULTS[fault]
    expect_red(parity, f"narrow.{fault}", check, says)


@pytest.mark.parametrize("fault", BY_DTYPE)
@pytest.mark.parity(models=("tiny-llama",), backends=("vllm",), modes=("eager",), steps=(64,))
def test_a_fault_of_one_dtype_is_caught_there(parity, fault):
    """Red at the dtype that has it; at the other, where rounding swallows it or it is not there, it is sound."""
    dtype, check, says = BY_DTYPE[fault]
    if parity.config.short_dtype == dtype:
        expect_red(parity, f"narrow.{fault}", check, says)
    else:
        with parity.planted(f"narrow.{fault}") as sound:
            check(sound)


@pytest.mark.parity(
    models=("tiny-llama",),
    backends=("vllm",),
    modes=("eager",),
    steps=(64,),
    topologies=("tp2",),
    extra_topologies=("tp2",),
    smoke={"dtypes": ("fp32",)},
)
def test_one_rank_s_wrong_share_is_caught(parity):
    """Wrong before the sum over ranks, so that the replicas agree on it: only the values can tell."""
    expect_red(parity, "narrow.OneRanksShare", short, MLP)


@on_tiny
def test_the_same_calls_on_a_healthy_engine(parity):
    """The control: every call that catches a fault passes where there is none."""
    for call in {call for call, _ in FAULTS.values()}:
        call(parity)
