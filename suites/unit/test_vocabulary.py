"""Hook names, topologies, configs and the wire format."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.backend import BootConfig, Topology, load_backend
from harness.errors import UsageError
from harness.plan import Plan
from harness.points import HookPoint, all_points, check_capture, nonfireable_points, select
from harness.vllm.overlays import get_overlay
from harness.vllm.wire import decode_tensor, encode_block, encode_tensor


@given(n=st.integers(1, 40))
def test_points_are_in_forward_order(n):
    names = all_points(n)
    by_name = sorted(names)
    assert sorted(by_name, key=HookPoint.parse) == names
    assert len(names) == 3 * n + 2
    assert not set(names) & set(nonfireable_points(n))


def test_patterns_do_not_cross_dots():
    assert select(["blocks.*.hook_out"], all_points(2)) == ["blocks.0.hook_out", "blocks.1.hook_out"]
    with pytest.raises(UsageError, match="matches none"):
        select(["block.*"], all_points(2))


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ("embed.hook_out", "not the string"),
        (["blocks.7.hook_out"], r"did you mean 'blocks\.\d\.hook_out'"),
        (["unembed.hook_out"], "known but cannot fire"),
        ([3], "hook names are strings"),
    ],
)
def test_wrong_captures_are_refused(requested, message):
    with pytest.raises(UsageError, match=message):
        check_capture(requested, all_points(2), nonfireable_points(2))


@pytest.mark.parametrize("text", ["tp1", "tp2", "pp2", "tp2pp2"])
def test_topology_round_trip(text):
    assert str(Topology.parse(text)) == text


@pytest.mark.parametrize("text", ["", "tp0", "2", "tp-1", "pp2tp2"])
def test_topology_refuses(text):
    with pytest.raises(UsageError, match="is not of the form"):
        Topology.parse(text)


def test_configs_round_trip_and_name_themselves():
    for config in Plan(profile="nightly").configs():
        assert BootConfig.from_json(config.to_json()) == config
    ids = [config.id for config in Plan(profile="nightly").configs()]
    assert len(set(ids)) == len(ids)
    assert all("/" not in BootConfig("vllm", "a/b", "", options={"e": {"x": "/y"}}).id for _ in (0,))


def test_unknown_backend_names_those_there_are():
    with pytest.raises(UsageError, match=r"no backend 'vlm' is installed; there are: hf, vllm"):
        load_backend("vlm")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3), (1, 2, 4)])
def test_wire_round_trip(dtype, shape):
    """Every bit arrives, at its dtype and shape, and in memory of its own."""
    tensor = (torch.randn(shape) * 100).to(dtype)
    back = decode_tensor(encode_tensor(tensor))
    assert back.dtype == dtype
    assert torch.equal(back, tensor)
    back.zero_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_is_its_parts_one_after_the_other(dtype):
    parts = [torch.randn(n, 6).to(dtype) for n in (3, 0, 5)]
    block = encode_block([parts[0], parts[1].clone(), parts[2].flip(0)])
    want = torch.cat([parts[0], parts[1], parts[2].flip(0)])
    assert torch.equal(decode_tensor(block), want)
    view = decode_tensor({**block, "data": bytes(block["data"])}, copy=False)
    assert torch.equal(view, want)
    assert encode_block([torch.empty(0, 6)])["shape"] == [0, 6]


@pytest.mark.parametrize(
    "payload",
    [
        {},
        {"dtype": "float32", "shape": [2], "data": b"1234567"},
        {"dtype": "os", "shape": [1], "data": b""},
        {"dtype": "nn", "shape": [1], "data": b""},
    ],
)
def test_wire_refuses_damaged_payloads(payload):
    with pytest.raises(ValueError, match="tensor payload"):
        decode_tensor(payload)


def test_unknown_architecture_lists_those_with_an_overlay():
    with pytest.raises(
        UsageError, match=r"'LlamaForCasualLM' has no decoder overlay \(nearest: LlamaForCausalLM\)"
    ):
        get_overlay("LlamaForCasualLM")


def test_a_wrong_name_is_found_behind_a_right_one():
    with pytest.raises(UsageError, match=r"unknown hook 'embed.hook_outt'.* did you mean 'embed.hook_out'"):
        check_capture(["embed.hook_out", "embed.hook_outt"], ["embed.hook_out", "blocks.0.hook_out"], {})
    with pytest.raises(UsageError, match=r"capture holds 7 \(int\)"):
        check_capture(["embed.hook_out", 7], ["embed.hook_out"], {})
