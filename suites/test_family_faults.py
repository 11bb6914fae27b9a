"""Families on trial: an engine, or an overlay, that follows another family's conventions is caught and explained."""

from __future__ import annotations

import pytest

from harness.errors import CaptureError
from harness.prompts import of_length
from suites import test_activations
from suites.trial import expect_red

HEADS = [f"blocks.*.attn.hook_{part}" for part in ("q", "k", "v", "rot_q", "rot_k", "z")]
#: Model → fault: what it is booted with beside, and what the message must say.
FAULTS = {
    "tiny-gemma": {
        "PlusOneMissing": ({}, r"ln_final\.hook_normalized is the first "),
        "EmbeddingUnscaled": ({}, r"embed\.hook_out is the first .*√width is missing"),
    },
    "tiny-cohere": {"PlainAsFused": ({}, r"blocks\.0\.hook_out is the first .*holds embed\.hook_out twice")},
    "tiny-gptneox": {"ParallelAsSequential": ({}, r"blocks\.1\.mlp\.hook_out is the first ")},
    "tiny-olmo2": {"PostNormIgnored": ({}, r"blocks\.1\.mlp\.hook_out is the first ")},
    "tiny-mistral": {
        "WindowForgotten": (
            {"hook_points": HEADS},
            r"blocks\.0\.attn\.hook_pattern is the first .*rows from 24 on",
        )
    },
    "tiny-mixtral": {"OtherExpert": ({}, r"blocks\.1\.mlp\.hook_out is the first ")},
    "tiny-llama": {
        "RotarySwapped": (
            {"hook_points": HEADS},
            r"blocks\.0\.attn\.hook_q is the first .*equals blocks\.0\.attn\.hook_rot_q of the reference",
        )
    },
}
MODELS = tuple(FAULTS)


def one_pattern(parity):
    """A prompt longer than the window."""
    prompt = of_length(parity, 40)
    parity.check([prompt], parity.forward([prompt], capture=["blocks.0.attn.hook_pattern"]))


@pytest.mark.parity(
    models=MODELS, extra_models=MODELS, backends=("vllm",), dtypes=("fp32",), modes=("eager",), steps=(64,)
)
def test_another_family_s_convention_is_caught(parity):
    """Each convention that families differ by, taken for another's: red, at the first hook it touches, and named."""
    for fault, (options, says) in FAULTS[parity.config.model].items():
        check = one_pattern if fault == "WindowForgotten" else test_activations.test_ragged_batch
        expect_red(parity, f"families.{fault}", check, says, **options)


@pytest.mark.parity(
    models=("tiny-gemma",),
    extra_models=("tiny-gemma",),
    backends=("vllm",),
    dtypes=("fp32",),
    modes=("eager",),
    topologies=("tp2",),
    extra_topologies=("tp2",),
    steps=(64,),
)
def test_a_key_value_head_that_ranks_share(parity):
    """One key-value head on two ranks: right as it is, and caught by hook and ranks where one rank has it otherwise."""
    with parity.variant(hook_points=HEADS) as wide:
        test_activations.test_ragged_batch(wide)
    expect_red(
        parity,
        "families.KvHeadMisreplicated",
        test_activations.test_ragged_batch,
        r"blocks\.1\.attn\.hook_k: replicas differ by up to .* between pp0/tp0 and pp0/tp1",
        errors=(CaptureError,),
        hook_points=HEADS,
    )
