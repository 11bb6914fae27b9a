"""Points an engine serves when it is asked to: inputs of blocks and branches, and heads before and after rotary."""

from __future__ import annotations

import pytest

from harness.errors import UsageError
from harness.models.tiny import TINY_MODELS
from harness.points import HEAD_Z, ROT_K, ROT_Q, TEMPLATES
from harness.prompts import of_length
from harness.reference.families import tree_of_config
from harness.vllm.overlays import get_overlay
from suites import test_activations, test_interventions

FAMILIES = tuple(model.name for model in TINY_MODELS)
every_family = pytest.mark.parity(
    models=FAMILIES,
    extra_models=FAMILIES,
    backends=("vllm",),
    steps=(64,),
    smoke={"models": ("tiny-llama", "tiny-gpt2"), "dtypes": ("fp32",), "modes": ("eager",)},
)


def patterns(parity):
    """Every point that both sides have in this family, as patterns for the boot."""
    config = parity.hf_config
    lacks = {
        **tree_of_config(config).missing,
        **get_overlay(config.architectures[0]).nonfiring_hooks(parity.config.topology.tp),
    }
    return [template.replace("{i}", "*") for template in TEMPLATES if template not in lacks]


@every_family
def test_every_point(parity):
    """Captures at every point there is, ragged, in chunks and at decode steps; then edits at each kind of point."""
    with parity.variant(hook_points=patterns(parity), max_edit_programs=48) as wide:
        assert len(wide.hook_points) > len(parity.hook_points)
        test_activations.test_ragged_batch(wide)
        test_activations.test_prompt_length(wide, 200)
        test_activations.test_decode_steps(wide)
        for rotation in (0, 3):
            test_interventions.test_every_op_at_every_hook(wide, rotation)


@pytest.mark.parity(
    models=("tiny-llama",),
    backends=("vllm",),
    topologies=("tp2", "tp2pp2"),
    extra_topologies=("tp2", "tp2pp2"),
    steps=(64,),
    smoke={"dtypes": ("fp32",), "modes": ("eager",), "topologies": ("tp2",)},
)
def test_heads_of_every_rank(parity):
    """Heads that ranks have their share of come together in order, and edits land on the rank that has them."""
    test_every_point(parity)


@pytest.mark.parity(
    models=("tiny-llama",), backends=("vllm",), dtypes=("fp32",), modes=("eager",), steps=(64,)
)
def test_rows_come_by_head(parity):
    """(batch, seq, heads, head_dim), the same numbers as in one row; what was left out at boot is refused by name."""
    geometry = parity.geometry
    names = [template.format(i=1) for template in (ROT_Q, ROT_K, HEAD_Z)]
    prompts = [of_length(parity, n, seed=n) for n in (5, 12)]
    with parity.variant(hook_points=names) as wide:
        result = wide.forward(prompts)
        assert {name: tuple(rows.shape) for name, rows in result.captured.items()} == {
            name: (2, 12, *geometry.shape(name)) for name in names
        }
        reference = wide.reference(prompts, names)
        for name in names:
            rows = result.rows(name, 1)
            assert rows.shape[1:] == geometry.shape(name)
            gap = (rows.flatten(1).double() - reference.truth.captured[name][1]).norm()
            assert float(gap) < 1e-4 * float(rows.double().norm())
        with pytest.raises(UsageError, match=r"blocks\.1\.attn\.hook_q.*left out at boot"):
            wide.forward(prompts, capture=["blocks.1.attn.hook_q"])
