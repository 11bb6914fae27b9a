"""Every decoder family: captures, edits and logits by the family's own conventions, against its own reference."""

from __future__ import annotations

import pytest

from harness.models.tiny import TINY_MODELS
from suites import test_activations, test_interventions, test_logits

#: All but Llama, which every other suite runs on.
FAMILIES = tuple(model.name for model in TINY_MODELS if model.family != "Llama")
#: Two whose forward has the least in common with Llama's.
SMOKE = ("tiny-gpt2", "tiny-cohere")
every_family = pytest.mark.parity(
    models=FAMILIES,
    extra_models=FAMILIES,
    backends=("vllm",),
    steps=(64,),
    smoke={"models": SMOKE, "dtypes": ("fp32",), "modes": ("eager",)},
)


@every_family
def test_captures(parity):
    """Ragged batches, chunks and decode steps: every point of the family has the reference's value."""
    test_activations.test_ragged_batch(parity)
    test_activations.test_prompt_length(parity, 200)
    test_activations.test_decode_steps(parity)


@every_family
@pytest.mark.parametrize("rotation", [1, 4])
def test_edits(parity, rotation):
    """Edits at every kind of point, as canonical values, do downstream what they do in the reference."""
    test_interventions.test_every_op_at_every_hook(parity, rotation)


@every_family
def test_every_logit(parity):
    """Logits rebuilt, read from the engine and made by its own head, decode rows included; W_U is the checkpoint's."""
    test_logits.test_every_position(parity)
    test_logits.test_a_second_and_a_third_opinion(parity)
    test_logits.test_the_unembedding_is_the_checkpoint_s(parity)
    test_logits.test_logits_of_an_edited_call(parity)
