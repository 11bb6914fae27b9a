"""Boot an instrumented vLLM engine: everything that can be known to be wrong is said before a weight is loaded."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from harness import points
from harness.backend import DTYPES
from harness.errors import EngineError, UsageError
from harness.geometry import Geometry
from harness.models import load_config, resolve
from harness.vllm import internals
from harness.vllm.environment import boot_environment, require_ray, require_vllm
from harness.vllm.kv_cache import kv_cache_argument
from harness.vllm.overlays import get_overlay
from harness.vllm.spec import EDIT_PROGRAMS, HarnessSpec
from harness.vllm.wire import dtype_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.bridge import RemoteBridge
    from harness.vllm.overlays import Overlay, TapSpec

__all__ = ["boot_vllm", "check_boot", "chosen_taps"]

log = logging.getLogger(__name__)

#: What the captures depend on, and why nothing else is accepted.
_FORCED: dict[str, tuple[Any, str]] = {
    "skip_tokenizer_init": (
        True,
        "token ids are sent and compared; a second tokenizer would only add BOS doubts",
    ),
    "enable_prefix_caching": (
        False,
        (
            "a prefix hit skips rows: captures misalign, edits miss cached positions, and an edited forward would "
            "poison the K/V of a clean one"
        ),
    ),
    "disable_log_stats": (True, "the statistics thread reads engine state while captures are collected"),
}


def _positive_int(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        msg = f"{name} must be an integer from 1, not {value!r}"
        raise UsageError(msg)
    return value


def _check_forced(kwargs: dict[str, Any]) -> None:
    for name, (value, reason) in _FORCED.items():
        if name in kwargs and kwargs[name] != value:
            msg = f"{name}={kwargs[name]!r} cannot be used here, it is always {value!r}: {reason}"
            raise UsageError(msg)
    if kwargs.get("worker_extension_cls"):
        msg = "worker_extension_cls cannot be used here: the capture worker already carries the harness' extension"
        raise UsageError(msg)
    internals.refuse_arguments(kwargs)


def _short_context(hf_config: Any) -> int | None:
    """Up to how many positions a model with longrope uses its short factors; None of others."""
    rope = getattr(hf_config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    found = rope.get("original_max_position_embeddings") or getattr(
        hf_config, "original_max_position_embeddings", None
    )
    return int(found) if found else None


def _context_limit(hf_config: Any, max_model_len: int | None) -> int:
    limit = int(getattr(hf_config, "max_position_embeddings", 0) or 0)
    short = _short_context(hf_config)
    if max_model_len is None:
        return short or limit or 2048
    _positive_int("max_model_len", max_model_len)
    if short and max_model_len > short:
        msg = (
            f"max_model_len={max_model_len} exceeds the {short} positions for which this model has its short longrope "
            "factors: vLLM would then take the long ones for every prompt, transformers takes them for long ones alone"
        )
        raise UsageError(msg)
    if limit and max_model_len > limit:
        msg = f"max_model_len={max_model_len} exceeds the {limit} positions this model was built for"
        raise UsageError(msg)
    return max_model_len


def _check_topology(geometry: Geometry, tp: int, pp: int, *, devices: bool) -> None:
    """Ranks that cannot share this model, or that this machine has no device for."""
    import torch

    heads, kv_heads = geometry.heads, geometry.kv_heads
    if heads % tp or (kv_heads % tp and tp % kv_heads):
        fits = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        msg = (
            f"tensor_parallel_size={tp} does not divide the {heads} attention heads and {kv_heads} KV heads: "
            f"take one of {', '.join(map(str, fits))}"
        )
        raise UsageError(msg)
    if pp > geometry.layers:
        msg = f"pipeline_parallel_size={pp} is more than the model's {geometry.layers} layers"
        raise UsageError(msg)
    # On CPU ranks share the cores, which is slow and allowed.
    if devices and torch.cuda.is_available() and tp * pp > torch.cuda.device_count():
        msg = f"{tp} x {pp} ranks need as many devices, this machine has {torch.cuda.device_count()}"
        raise UsageError(msg)


_REBUILT = (
    "it is rebuilt from hook_rot_q and hook_rot_k, in families without rotary from hook_q and hook_k: name them \
in hook_points at boot. It cannot be edited"
)
_LEFT_OUT = "it was left out at boot; name it, or a pattern it fits, in hook_points"


def _missing_points(hf_config: Any, tensor_parallel_size: int) -> dict[str, str]:
    """Points of this model that no tap can be put on → why."""
    layers = int(hf_config.num_hidden_layers)
    found = points.nonfireable_points(layers, _overlay_of(hf_config).nonfiring_hooks(tensor_parallel_size))
    return found | dict.fromkeys(points.every_point(layers, points.REBUILT_TEMPLATES), _REBUILT)


def _overlay_of(hf_config: Any) -> Overlay:
    return get_overlay((getattr(hf_config, "architectures", None) or ["(none named)"])[0])


def check_boot(
    path: str,
    *,
    dtype: str | None = None,
    max_model_len: int | None = None,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    planned: bool = False,
) -> tuple[Any, HarnessSpec, str, int]:
    """Everything that can be refused without loading vLLM or a weight.

    ``planned``: the engine is not to boot here and now, so neither devices nor weights have to be there.

    Returns:
        The Hugging Face config, a tap for every point there is, the dtype's name and the context length.

    Raises:
        UsageError: vLLM missing, checkpoint unreadable, architecture without overlay, sizes that make no sense.
    """
    require_vllm()
    _positive_int("tensor_parallel_size", tensor_parallel_size)
    _positive_int("pipeline_parallel_size", pipeline_parallel_size)
    hf_config = load_config(path, weights=not planned)
    geometry = Geometry.of(hf_config)
    _check_topology(geometry, tensor_parallel_size, pipeline_parallel_size, devices=not planned)
    overlay = _overlay_of(hf_config)
    overlay.check(hf_config)
    spec = HarnessSpec(tuple(overlay.taps(hf_config, tensor_parallel_size, points.TEMPLATES)))
    own = getattr(hf_config, "dtype", None) or "float32"
    name = DTYPES.get(dtype or "", dtype) or (own if isinstance(own, str) else dtype_name(own))
    if name not in DTYPES.values():
        msg = f"dtype={name!r} is not known: pass one of {', '.join(DTYPES.values())}, or none for the checkpoint's own"
        raise UsageError(msg)
    return hf_config, spec, name, _context_limit(hf_config, max_model_len)


def chosen_taps(
    spec: HarnessSpec,
    hook_points: Sequence[str] | Literal["every"] | None,
    hf_config: Any,
    tensor_parallel_size: int = 1,
) -> tuple[TapSpec, ...]:
    """Those taps of every one there is that :func:`boot_vllm` is asked for by its ``hook_points``.

    Raises:
        UsageError: no point is asked for, or a pattern fits none.
    """
    every = [tap.name for tap in spec.taps]
    if hook_points == "every":
        return spec.taps
    if hook_points is None:
        chosen = set(points.all_points(int(hf_config.num_hidden_layers)))
    else:
        if isinstance(hook_points, str):
            msg = f'hook_points is a sequence of names or patterns, or "every"; write [{hook_points!r}]'
            raise UsageError(msg)
        missing = _missing_points(hf_config, tensor_parallel_size)
        for pattern in hook_points:
            known = points.matching(pattern, [*missing, *every])
            if known and not points.matching(pattern, every):
                msg = f"hook_points: {pattern!r} is known but cannot be installed: {missing[known[0]]}"
                raise UsageError(msg)
        chosen = set(points.select(hook_points, every))
        if not chosen:
            msg = "hook_points is empty: name at least one, or leave it out for the usual ones"
            raise UsageError(msg)
    return tuple(tap for tap in spec.taps if tap.name in chosen)


def boot_vllm(
    model_name: str,
    tokenizer: Any | None = None,
    dtype: str | None = None,
    gpu_memory_utilization: float = 0.5,
    max_model_len: int | None = None,
    max_num_batched_tokens: int = 2048,
    enable_batching: bool = False,
    enable_position_interventions: bool = False,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    hook_points: Sequence[str] | Literal["every"] | None = None,
    max_edit_programs: int = EDIT_PROGRAMS,
    **vllm_kwargs: Any,
) -> RemoteBridge:
    """Boot an engine whose hook points can be captured.

    Args:
        model_name: a bundled name (``smollm2-135m``), a local checkpoint folder or a Hugging Face id.
        tokenizer: a Hugging Face tokenizer; by default the checkpoint's own, where it has one.
        dtype: torch's name or dtype; None takes the checkpoint's own. Always passed on explicitly, because vLLM's
            ``auto`` turns an fp32 checkpoint into fp16.
        gpu_memory_utilization: share of the device's memory vLLM may use (CUDA).
        max_model_len: longest prompt plus new tokens. On CPU the KV cache has room for ``max_num_seqs`` requests of
            it, 1 GiB at most.
        max_num_batched_tokens: tokens per step; longer prompts are served in chunks.
        enable_batching: run eagerly instead of compiled, as in the original. Batches work either way.
        enable_position_interventions: accepted for the original's sake; positions always work.
        tensor_parallel_size: ranks that share each layer; must divide the heads.
        pipeline_parallel_size: stages the layers are cut into.
        hook_points: names or patterns (``blocks.*.hook_out``, ``blocks.*.attn.hook_?``) to install, of every point the
            family has; by default the embedding, each block's attention, MLP and output, and the final norm. Points
            left out cost no memory and cannot be captured. ``every`` takes all of them.
        max_edit_programs: distinct combinations of edits one call may use; each costs 4 · (width + 16) bytes per point.
            With 0 nothing can be edited, and taps change no bit of the results either, see ``docs/interventions.md``.
        **vllm_kwargs: anything else ``vllm.LLM`` takes. ``worker_cls`` must name a subclass of the capture worker.

    Raises:
        UsageError: what was asked for cannot be had; raised before weights are loaded.
        EngineError: vLLM failed to boot, or a hook point is on no rank.
    """
    del enable_position_interventions
    _check_forced(vllm_kwargs)
    on_ray = vllm_kwargs.get("distributed_executor_backend") == "ray"
    if on_ray:
        require_ray()
    _positive_int("max_num_batched_tokens", max_num_batched_tokens)
    path = str(resolve(model_name).fetch())
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    hf_config, spec, name, length = check_boot(
        path,
        dtype=name,
        max_model_len=max_model_len,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
    )
    vllm_kwargs.setdefault("max_num_seqs", min(16, max_num_batched_tokens))
    if vllm_kwargs["max_num_seqs"] is not None:
        _positive_int("max_num_seqs", vllm_kwargs["max_num_seqs"])
    vllm_kwargs |= kv_cache_argument(vllm_kwargs, Geometry.of(hf_config), name, length)
    taps = chosen_taps(spec, hook_points, hf_config, tensor_parallel_size)
    left_out = [tap.name for tap in spec.taps if tap not in taps]
    spec = replace(spec, taps=taps)
    if max_edit_programs != 0:
        _positive_int("max_edit_programs", max_edit_programs)
    spec = replace(spec, max_programs=max_edit_programs)
    if on_ray:
        vllm_kwargs["distributed_executor_backend"] = internals.ray_backend()
    from harness.vllm.worker import WORKER_CLASS

    arguments = {
        "enforce_eager": enable_batching,
        "worker_cls": WORKER_CLASS,
        **vllm_kwargs,
        **{key: value for key, (value, _) in _FORCED.items()},
        "model": path,
        "dtype": name,
        "gpu_memory_utilization": gpu_memory_utilization,
        "max_model_len": length,
        "max_num_batched_tokens": max_num_batched_tokens,
        "tensor_parallel_size": tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
        "additional_config": {**vllm_kwargs.get("additional_config", {}), **spec.to_config()},
    }
    started = time.monotonic()
    llm = _boot(arguments)
    non_fireable = {**_missing_points(hf_config, tensor_parallel_size), **dict.fromkeys(left_out, _LEFT_OUT)}
    seconds = time.monotonic() - started
    return _wrap(llm, spec, path, tokenizer, non_fireable=non_fireable, boot_seconds=seconds)


def _boot(arguments: dict[str, Any]) -> Any:
    from vllm import LLM

    ranks = arguments["tensor_parallel_size"] * arguments["pipeline_parallel_size"]
    with boot_environment(ranks):
        try:
            return LLM(**arguments)
        except (UsageError, KeyboardInterrupt):
            raise
        except Exception as error:
            msg = f"vLLM could not boot {arguments['model']}: {type(error).__name__}: {error}"
            raise EngineError(msg) from error


def _wrap(llm: Any, spec: HarnessSpec, path: str, tokenizer: Any, **facts: Any) -> RemoteBridge:
    from harness.bridge import RemoteBridge
    from harness.vllm.driver import VLLMDriver

    try:
        names = [tap.name for tap in spec.taps]
        internals.verify_hook_coverage(llm.collective_rpc("tl_absent_hooks"), names)
        # Profiling and warm-up have already fired every hook.
        llm.collective_rpc("tl_reset_counter")
        driver = VLLMDriver(llm, spec, **facts)
    except AttributeError as error:
        internals.shut_down(llm)
        msg = f"hook installation never ran: the engine's worker is not the capture worker ({error})"
        raise EngineError(msg) from error
    except BaseException:
        internals.shut_down(llm)
        raise
    log.info(
        "%d hook points fire: %s … %s; %d known ones cannot: %s",
        len(names),
        names[0],
        names[-1],
        len(driver.non_fireable_hook_points),
        ", ".join(sorted({name.rsplit(".", 1)[-1] for name in driver.non_fireable_hook_points})),
    )
    return RemoteBridge(driver, path=path, tokenizer=tokenizer)
