"""The size of an engine's KV cache on CPU: as much as its requests can use, within limits, unless somebody says."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch

from harness.errors import UsageError
from harness.geometry import Geometry
from harness.vllm.kv_cache import kv_cache_argument

MIB = 1 << 20
#: SmolLM2-135M: 23,040 bytes per token at bf16, 2.8 MiB per block of 128.
SMOLLM2 = Geometry(layers=30, width=576, heads=9, kv_heads=3, head_dim=64)
TINY = Geometry(layers=4, width=64, heads=4, kv_heads=2, head_dim=16)
BLOCK = 128 * 23040


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 << 30))


def size(geometry: Geometry = SMOLLM2, dtype: str = "bfloat16", length: int = 320, **kwargs: object) -> int:
    return kv_cache_argument(kwargs, geometry, dtype, length)["kv_cache_memory_bytes"]


@pytest.mark.parametrize(("length", "blocks"), [(1, 2), (128, 2), (129, 3), (320, 4)], ids=str)
def test_it_holds_as_many_requests_of_full_length_as_run_at_once(length: int, blocks: int) -> None:
    """Whole blocks, one more for each request, and the one that vLLM keeps for itself."""
    assert size(length=length, max_num_seqs=16) == max((16 * blocks + 1) * BLOCK, 64 * MIB)
    assert size(length=length, max_num_seqs=32) == (32 * blocks + 1) * BLOCK


def test_twice_as_wide_numbers_take_twice_as_much() -> None:
    assert size(dtype="float32", max_num_seqs=16) == 2 * size(dtype="bfloat16", max_num_seqs=16)


def test_a_block_of_another_size_is_filled_up_too() -> None:
    assert size(length=320, max_num_seqs=16, block_size=256) == (16 * 3 + 1) * 2 * BLOCK


def test_it_stays_within_its_limits() -> None:
    assert size(TINY, max_num_seqs=16) == 64 * MIB
    assert size(length=8192, max_num_seqs=16) == 1024 * MIB


@pytest.mark.parametrize("kwargs", [{}, {"max_num_seqs": None}], ids=["unsaid", "none"])
def test_where_vllm_chooses_how_many_run_at_once_it_is_large(kwargs: dict[str, object]) -> None:
    assert size(**kwargs) == 1024 * MIB


def test_the_caller_is_heard_and_so_is_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert size(max_num_seqs=16, kv_cache_memory_bytes=300 * MIB) == 300 * MIB
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert size(max_num_seqs=16) == 2048 * MIB
    assert size(max_num_seqs=16, kv_cache_memory_bytes=2048 * MIB) == 2048 * MIB
    with pytest.raises(
        UsageError, match=r"would be ignored: .*VLLM_CPU_KVCACHE_SPACE=2 \(GiB\).*num_gpu_blocks"
    ):
        size(max_num_seqs=16, kv_cache_memory_bytes=300 * MIB)


@pytest.mark.parametrize("nothing", ["", "0"])
def test_a_variable_that_says_nothing_is_not_heard(monkeypatch: pytest.MonkeyPatch, nothing: str) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", nothing)
    assert size(TINY, max_num_seqs=16) == 64 * MIB


def test_on_a_gpu_vllm_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert kv_cache_argument({"max_num_seqs": 16}, SMOLLM2, "bfloat16", 320) == {}
    assert size(kv_cache_memory_bytes=300 * MIB) == 300 * MIB


def test_one_request_has_to_fit() -> None:
    assert size(length=384, kv_cache_memory_bytes=3 * BLOCK) == 3 * BLOCK
    with pytest.raises(
        UsageError, match=r"of 8 MiB cannot hold one request of 385 tokens, which needs 11 MiB: lower"
    ):
        size(length=385, kv_cache_memory_bytes=3 * BLOCK)
    with pytest.raises(UsageError, match=r"of 1024 MiB cannot hold one request of 131072 tokens"):
        size(length=131072)


def test_it_has_to_fit_into_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=512 * MIB))
    assert size(max_num_seqs=16) < 512 * MIB
    with pytest.raises(UsageError, match=r"a KV cache of 1\.0 GiB was asked for, .* has 0\.5 GiB free"):
        size()
