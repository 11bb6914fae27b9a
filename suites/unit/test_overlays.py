"""Families: what other packages bring, what is refused, and that both sides' tables are of the same families."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from harness.errors import UsageError
from harness.geometry import Geometry
from harness.models.tiny import TINY_MODELS
from harness.points import ATTN_OUT, MLP_OUT, TEMPLATES
from harness.reference import families
from harness.reference.families import FAMILIES, ModuleTree, architecture_of, known_trees
from harness.vllm.boot import chosen_taps
from harness.vllm.overlays import Overlay, TapSpec, find, get_overlay, known_architectures
from harness.vllm.spec import HarnessSpec

THEIRS = Overlay("TheirForCausalLM", block="their.layers.{i}")


def bring(monkeypatch: pytest.MonkeyPatch, module: Any, group: str, **objects: Any) -> None:
    points = [
        SimpleNamespace(name=name, value=f"their.module:{name}", load=lambda found=found: found)
        for name, found in objects.items()
    ]
    monkeypatch.setattr(module, "entry_points", lambda *, group: points if group == wanted else [])
    wanted = group


def test_both_tables_are_of_the_same_families() -> None:
    assert set(known_architectures()) == set(FAMILIES)
    assert {model.architecture for model in TINY_MODELS} == set(FAMILIES)


def test_an_overlay_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    bring(monkeypatch, find, "harness.overlays", TheirForCausalLM=THEIRS, LlamaForCausalLM=THEIRS)
    assert get_overlay("TheirForCausalLM") is THEIRS
    assert get_overlay("LlamaForCausalLM") is THEIRS, "another package's wins"
    assert "TheirForCausalLM" in known_architectures()


def test_a_tree_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = ModuleTree(mlp="their.{i}.ffn")
    families._brought.cache_clear()
    bring(monkeypatch, families, "harness.module_trees", TheirForCausalLM=tree)
    try:
        assert known_trees()["TheirForCausalLM"] is tree
        assert architecture_of(SimpleNamespace(architectures=["TheirForCausalLM"])) == "TheirForCausalLM"
    finally:
        families._brought.cache_clear()


def test_what_is_no_overlay_and_no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    bring(monkeypatch, find, "harness.overlays", TheirForCausalLM="a string")
    with pytest.raises(UsageError, match=r"their\.module:TheirForCausalLM.* gave str, no Overlay"):
        get_overlay("TheirForCausalLM")
    families._brought.cache_clear()
    bring(monkeypatch, families, "harness.module_trees", TheirForCausalLM=3)
    try:
        with pytest.raises(UsageError, match=r"gave int for TheirForCausalLM, no ModuleTree"):
            known_trees()
    finally:
        families._brought.cache_clear()


def test_an_unknown_architecture_is_told_what_there_is() -> None:
    with pytest.raises(
        UsageError, match=r"'Mamba.* has no decoder overlay.*LlamaForCausalLM.*docs/hook-points"
    ):
        get_overlay("MambaForCausalLM")


@pytest.mark.parametrize(
    ("architecture", "name", "value"),
    [
        ("StableLmForCausalLM", "use_parallel_residual", True),
        ("StableLmForCausalLM", "qk_layernorm", True),
        ("FalconForCausalLM", "bias", True),
        ("OPTForCausalLM", "do_layer_norm_before", False),
    ],
)
def test_a_config_that_vllm_computes_otherwise_is_refused(
    architecture: str, name: str, value: object
) -> None:
    overlay = get_overlay(architecture)
    config = next(model for model in TINY_MODELS if model.architecture == architecture).config()
    overlay.check(config)
    setattr(config, name, value)
    with pytest.raises(
        UsageError, match=rf"{architecture} with {name}={value!r} cannot be captured from vLLM: "
    ):
        overlay.check(config)


@pytest.mark.parametrize("architecture", ["CohereForCausalLM", "FalconForCausalLM"])
def test_parts_of_a_sum_are_not_served_by_ranks(architecture: str) -> None:
    overlay = get_overlay(architecture)
    config = next(model for model in TINY_MODELS if model.architecture == architecture).config()
    whole, parts = ({tap.name for tap in overlay.taps(config, ranks)} for ranks in (1, 2))
    assert whole - parts == {t.format(i=i) for i in range(4) for t in (ATTN_OUT, MLP_OUT)}
    assert "ranks together" in overlay.nonfiring_hooks(2)[ATTN_OUT]
    assert ATTN_OUT not in overlay.nonfiring_hooks(1)


def test_taps_from_elsewhere_are_refused_where_they_cannot_be_served() -> None:
    cohere, neox = get_overlay("CohereForCausalLM"), get_overlay("GPTNeoXForCausalLM")
    branch = TapSpec("blocks.0.attn.hook_out", "model.layers.0.self_attn", 64)
    cohere.refuse([branch], 1)
    with pytest.raises(UsageError, match=r"attn\.hook_out' cannot be served by Cohere.*each rank has a part"):
        cohere.refuse([branch], 2)
    with pytest.raises(UsageError, match=r"hook_q' cannot be served by GPTNeoX.*interleaves"):
        neox.refuse([TapSpec("blocks.0.attn.hook_q", "model.layers.0.attention.query_key_value", 64)], 1)


@pytest.mark.parametrize(
    ("architecture", "asked", "message"),
    [
        ("LlamaForCausalLM", "embed.hook_out", r'or "every"; write \[\'embed\.hook_out\'\]'),
        (
            "LlamaForCausalLM",
            ["blocks.*.attn.hook_pattern"],
            "known but cannot be installed: it is rebuilt from",
        ),
        (
            "GPT2LMHeadModel",
            ["blocks.*.attn.hook_rot_q"],
            "known but cannot be installed: positions are learned",
        ),
        ("LlamaForCausalLM", ["blocks.*.attn.hook_nope"], "matches none of the 50 points"),
        ("LlamaForCausalLM", [], "hook_points is empty"),
    ],
)
def test_points_that_cannot_be_installed(architecture: str, asked: Any, message: str) -> None:
    config = next(model for model in TINY_MODELS if model.architecture == architecture).config()
    spec = HarnessSpec(tuple(get_overlay(architecture).taps(config, 1, TEMPLATES)))
    with pytest.raises(UsageError, match=message):
        chosen_taps(spec, asked, config)
    assert len(chosen_taps(spec, "every", config)) == len(spec.taps)


@pytest.mark.parametrize("tiny", TINY_MODELS, ids=lambda tiny: tiny.name)
def test_sizes_are_read_by_any_name(tiny: Any) -> None:
    geometry = Geometry.of(tiny.config())
    assert geometry == Geometry(4, 64, 2, tiny.num_key_value_heads, 32)
    assert geometry.row_width("blocks.0.attn.hook_k") == 32 * tiny.num_key_value_heads
    assert geometry.shape("blocks.0.attn.hook_z") == (2, 32)
    assert geometry.shape("blocks.0.mlp.hook_in") == (64,)
    assert set(geometry.widths([t.format(i=0) for t in TEMPLATES])) == {t.format(i=0) for t in TEMPLATES}
