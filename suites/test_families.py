"""Every decoder family, at every point it has: captures, edits, logits and patterns against its own reference."""

from __future__ import annotations

import pytest
import torch

from harness.errors import UsageError
from harness.models.tiny import TINY_MODELS
from harness.points import ATTN_SCORES, HEAD_K, HEAD_Q, PATTERN, ROT_K, ROT_Q
from harness.prompts import of_length
from harness.reference.families import tree_of_config
from suites import test_activations, test_interventions, test_logits

FAMILIES = tuple(model.name for model in TINY_MODELS if model.name != "tiny-llama-tied")
#: Llama's, for the points that other suites leave out, and two whose forward has the least in common with it.
SMOKE = ("tiny-llama", "tiny-gpt2", "tiny-cohere")
every_family = pytest.mark.parity(
    models=FAMILIES,
    extra_models=FAMILIES,
    backends=("vllm",),
    steps=(64,),
    every_point=True,
    smoke={"models": SMOKE, "dtypes": ("fp32",), "modes": ("eager",)},
    full={},
)


@every_family
def test_captures(parity):
    """Ragged batches, chunks and decode steps: every point of the family has the reference's value."""
    missing = set(parity.hook_points) - set(parity.engine.supported_hook_points)
    assert not missing, f"the engine lacks points that both tables have: {sorted(missing)}"
    test_activations.test_ragged_batch(parity)
    test_activations.test_prompt_length(parity, 200)
    test_activations.test_decode_steps(parity)


@every_family
@pytest.mark.parametrize("rotation", [0, 3])
def test_edits(parity, rotation):
    """Edits at every kind of point, as canonical values, do downstream what they do in the reference."""
    # Below fp32 a small edit may drown in noise, experts' above all; at fp32 each one must show.
    test_interventions.rotate(parity, rotation, must_bite=parity.config.dtype == "float32")


@every_family
def test_every_logit(parity):
    """Logits rebuilt, read from the engine and made by its own head, decode rows included; W_U is the checkpoint's."""
    test_logits.test_every_position(parity)
    test_logits.test_a_second_and_a_third_opinion(parity)
    test_logits.test_the_unembedding_is_the_checkpoint_s(parity)
    test_logits.test_logits_of_an_edited_call(parity)


@every_family
def test_patterns(parity):
    """Patterns rebuilt from captured queries and keys are transformers' own weights, at decode steps too."""
    lacks = tree_of_config(parity.hf_config).lacks
    if PATTERN in lacks:
        parity.not_applicable(f"transformers gives no weights: {lacks[PATTERN]}")
    names = [PATTERN.format(i=i) for i in range(parity.n_layers)]
    for n, k in ((1, 1), (33, 4), (70, 1)):  # longer than every window, and in two chunks
        prompt = of_length(parity, n)
        result = parity.forward([prompt], capture=names, max_new_tokens=k)
        parity.check([prompt], result, label=f"patterns of {n} tokens")


@every_family
def test_shapes(parity):
    """Heads come as (batch, seq, heads, head_dim), scores as (batch, heads, seq, seq); edits of those are refused."""
    geometry = parity.geometry
    batch = [of_length(parity, n, seed=n) for n in (5, 12)]
    pattern, scores = PATTERN.format(i=1), ATTN_SCORES.format(i=1)
    heads = [name for name in parity.hook_points if geometry.heads_at(name) is not None]
    result = parity.forward(batch, capture=[*heads, pattern, scores])
    assert {name: tuple(result.captured[name].shape) for name in heads} == {
        name: (2, 12, *geometry.shape(name)) for name in heads
    }
    assert tuple(result.captured[scores].shape) == (2, geometry.heads, 12, 12)
    weights = torch.softmax(result.captured[scores][1].float(), dim=-1)
    eps = torch.finfo(result.captured[pattern].dtype).eps
    assert torch.allclose(weights, result.captured[pattern][1].float(), atol=8 * eps)
    assert bool((result.captured[scores][0, :, 5:] == -torch.inf).all())
    assert not bool(result.captured[pattern][0, :, 5:].any())
    with pytest.raises(UsageError, match=r"hook_pattern.*cannot be edited"):
        parity.forward(batch, intervene={pattern: {"op": "suppress"}})


@pytest.mark.parity(
    models=("tiny-llama",),
    backends=("vllm",),
    topologies=("tp2", "tp2pp2"),
    extra_topologies=("tp2", "tp2pp2"),
    steps=(64,),
    every_point=True,
    smoke={"dtypes": ("fp32",), "modes": ("eager",), "topologies": ("tp2",)},
)
def test_heads_of_every_rank(parity):
    """Heads that ranks have their share of come together in order, and edits land on the rank that has them."""
    test_captures(parity)
    test_edits(parity, 0)
    test_patterns(parity)


@pytest.mark.parity(
    models=("tiny-llama",), backends=("vllm",), dtypes=("fp32",), modes=("eager",), steps=(64,)
)
def test_points_left_out(parity):
    """An engine booted for some points serves those, and says of the others how to have them."""
    rotary = [template.format(i=1) for template in (ROT_Q, ROT_K)]
    prompts = [of_length(parity, 12)]
    with parity.variant(hook_points=rotary) as few:
        few.check(prompts, few.forward(prompts))
        few.check(prompts, few.forward(prompts, capture=[PATTERN.format(i=1)]), label="pattern")
        for name in (HEAD_Q.format(i=1), HEAD_K.format(i=0), "blocks.1.hook_out"):
            with pytest.raises(UsageError, match=rf"{name}.*left out at boot"):
                few.forward(prompts, capture=[name])
        with pytest.raises(UsageError, match=r"rebuilt from hook_rot_q and hook_rot_k"):
            few.forward(prompts, capture=[PATTERN.format(i=0)])
