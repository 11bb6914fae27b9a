"""How much memory an engine keeps for keys and values. On CPU vLLM writes all of it at boot: it is resident."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from harness.errors import UsageError
from harness.vllm.environment import require_vllm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.geometry import Geometry

__all__ = ["kv_cache_argument"]

#: Positions in one block on CPU, where the caller names no ``block_size``.
_BLOCK = 128
#: At most, on CPU, where the caller names no size: room for 23,000 tokens of a 135M model, and quick to allocate.
_MOST = 1 << 30
#: At least, for what a family keeps beyond keys and values of the sizes that its config names.
_LEAST = 64 << 20
#: Requests at once where the caller leaves their number to vLLM, which then takes no fewer.
_MANY = 256


def kv_cache_argument(
    vllm_kwargs: Mapping[str, Any], geometry: Geometry, dtype: str, max_model_len: int
) -> dict[str, int]:
    """``kv_cache_memory_bytes``, bytes of each rank, for an engine.

    The caller's, or that of ``VLLM_CPU_KVCACHE_SPACE``. Else on CPU as much as can be used: room for ``max_num_seqs``
    requests of full length, so that none is ever preempted, but from 64 MiB to 1 GiB. On CUDA nothing: vLLM measures.

    Args:
        vllm_kwargs: what else it is made with.
        geometry: of its model.
        dtype: torch's name.
        max_model_len: tokens of the longest request.

    Raises:
        UsageError: on CPU, where vLLM lets ``VLLM_CPU_KVCACHE_SPACE`` win, it contradicts the caller; one request
            of full length does not fit; this machine has not so much free.
    """
    block = vllm_kwargs.get("block_size") or _BLOCK
    per_block = block * _per_token(geometry, dtype)
    per_request = -(-max_model_len // block)
    # One more each: a sliding window lies across one block more than it fills. And one that vLLM keeps for itself.
    most = ((vllm_kwargs.get("max_num_seqs") or _MANY) * (per_request + 1) + 1) * per_block
    size = _fixed(vllm_kwargs.get("kv_cache_memory_bytes"), min(max(most, _LEAST), _MOST))
    if size is None:
        return {}
    _check(size, per_request * per_block, max_model_len)
    return {"kv_cache_memory_bytes": size}


def _per_token(geometry: Geometry, dtype: str) -> int:
    """As vLLM lays them out: K and V per layer, KV head and position. Of the whole model, though a rank has a share."""
    import torch

    return int(2 * geometry.layers * geometry.kv_heads * geometry.head_dim * getattr(torch, dtype).itemsize)


def _fixed(asked: int | None, default: int) -> int | None:
    """The size where it is fixed: what was asked for, or the variable's; on CPU else ``default``."""
    require_vllm()
    import torch

    if torch.cuda.is_available():
        return None if asked is None else int(asked)
    space = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "")
    if not space.isdigit() or not int(space):
        return default if asked is None else int(asked)
    if asked is not None and int(asked) != int(space) << 30:
        msg = (
            f"kv_cache_memory_bytes={asked} would be ignored: vLLM's CPU platform takes VLLM_CPU_KVCACHE_SPACE={space} "
            "(GiB) instead; unset that, or bound the cache by num_gpu_blocks_override"
        )
        raise UsageError(msg)
    return int(space) << 30


def _check(size: int, needed: int, max_model_len: int) -> None:
    import psutil

    if needed > size:
        msg = (
            f"the KV cache of {size / 2**20:.0f} MiB cannot hold one request of {max_model_len} tokens, "
            f"which needs {needed / 2**20:.0f} MiB: lower max_model_len or raise kv_cache_memory_bytes "
            f"(VLLM_CPU_KVCACHE_SPACE, in GiB)"
        )
        raise UsageError(msg)
    free = psutil.virtual_memory().available
    if size > free:
        msg = f"a KV cache of {size / 2**30:.1f} GiB was asked for, this machine has {free / 2**30:.1f} GiB free"
        raise UsageError(msg)
