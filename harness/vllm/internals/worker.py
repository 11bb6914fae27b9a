"""What is read of a worker: its class, its place among the ranks, its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.errors import UsageError
from harness.vllm.internals.moved import moved

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn

__all__ = [
    "activation_dtype",
    "base_worker_class",
    "clear_blocks",
    "compile_for_any_threads",
    "is_traced",
    "model_of",
    "place_of",
    "prepare_stage_input",
    "ranks_per_stage",
    "refuse_arguments",
    "refuse_engine",
    "runner_name",
    "step_budget",
]

_WORKERS = {
    "cpu": "vllm.v1.worker.cpu_worker.CPUWorker",
    "cuda": "vllm.v1.worker.gpu_worker.Worker",
    "xpu": "vllm.v1.worker.xpu_worker.XPUWorker",
}

#: Arguments of an engine that taps are refused with: some rows never come to count, or are not computed where they are.
_REFUSED = {
    "speculative_config": "rows of rejected drafts would be captured in place of the real ones",
    "enable_dbo": "two half-batches at once would share one row table",
    "kv_transfer_config": "rows whose keys and values are sent are not computed: captures lack them, edits miss them",
    "data_parallel_size": "captures and edits reach one replica, requests any: boot one engine for each",
    "prefill_context_parallel_size": "a rank would have some positions of a prompt and count them as all",
}


def base_worker_class() -> type[Any]:
    """The platform's own worker class (relies on ``current_platform.device_type`` and the worker's module path)."""
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    device = current_platform.device_type
    if device not in _WORKERS:
        msg = f"no capture worker for device {device!r}; there is one for {', '.join(_WORKERS)}"
        raise UsageError(msg)
    try:
        cls: type[Any] = resolve_obj_by_qualname(_WORKERS[device])
    except (ImportError, AttributeError) as error:
        raise moved(_WORKERS[device]) from error
    return cls


def compile_for_any_threads(vllm_config: Any) -> None:
    """Have a CPU graph that is compiled now count right with however many threads it is run later.

    vLLM lets OpenMP choose the threads (``cpp.dynamic_threads``), and inductor then leaves their number out of its
    cache's key. Compiled where one thread computes, though, its code has no ``omp single`` around scalar operations:
    of two threads that run it from the cache, each counts a tap's forward. With at least two assumed it has
    (``compilation_config.inductor_compile_config``; inductor's ``CppKernelProxy.codegen_loops_impl``).
    """
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    try:
        options = vllm_config.compilation_config.inductor_compile_config
    except AttributeError as error:
        raise moved(f"CompilationConfig.inductor_compile_config ({error})") from error
    # A caller's own number may be one.
    options["cpp.threads"] = max(2, options.get("cpp.threads", 0), torch.get_num_threads())


def runner_name(worker: Any) -> str:
    """``V1`` or ``V2``: which of vLLM's model runners this worker drives."""
    return "V2" if getattr(worker, "use_v2_model_runner", False) else "V1"


def step_budget(worker: Any) -> int:
    """Most tokens one step may schedule (``scheduler_config.max_num_batched_tokens``)."""
    return int(worker.vllm_config.scheduler_config.max_num_batched_tokens)


def clear_blocks(worker: Any, blocks: Sequence[int]) -> None:
    """On CPU set these blocks of the KV cache to zero (``model_runner.kv_caches``, (blocks, …) each).

    A block is handed to the next request as the last one left it. Positions past that request's end get no weight in
    attention, but on CPU zero times what stands there is still added up, and that is NaN where another overflowed.
    """
    import torch

    if not blocks or worker.device.type != "cpu":
        return
    for cache in worker.model_runner.kv_caches:
        if isinstance(cache, torch.Tensor):
            for block in blocks:
                cache[block].zero_()


def model_of(worker: Any) -> nn.Module:
    """The model a worker has loaded (``model_runner.get_model()``)."""
    model: nn.Module = worker.model_runner.get_model()
    return model


def place_of(worker: Any) -> tuple[int, int]:
    """Pipeline stage and tensor-parallel rank of a worker (``get_pp_group``, ``get_tp_group``)."""
    del worker  # the groups are this process' own
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return int(get_pp_group().rank_in_group), int(get_tp_group().rank_in_group)


def ranks_per_stage() -> int:
    """Tensor-parallel ranks of each pipeline stage (``get_tp_group``)."""
    from vllm.distributed.parallel_state import get_tp_group

    return int(get_tp_group().world_size)


def prepare_stage_input(worker: Any) -> None:
    """Give a later pipeline stage the buffers its input is received into.

    vLLM makes them in its first dummy run, and an eager engine on CPU has none
    (``model_runner.intermediate_tensors``, ``model.make_empty_intermediate_tensors``).
    """
    from vllm.distributed.parallel_state import get_pp_group

    runner = worker.model_runner
    if get_pp_group().is_first_rank or getattr(runner, "intermediate_tensors", None) is not None:
        return
    model: Any = model_of(worker)
    try:
        runner.intermediate_tensors = model.make_empty_intermediate_tensors(
            batch_size=step_budget(worker), dtype=activation_dtype(worker), device=worker.device
        )
    except AttributeError as error:
        raise moved(f"make_empty_intermediate_tensors ({error})") from error


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse engine arguments with which rows could not be told, or are not computed here.

    Raises:
        UsageError: one of :data:`_REFUSED` is asked for.
    """
    for name, reason in _REFUSED.items():
        given = arguments.get(name)
        # Sizes are off at 1.
        if given and (isinstance(given, bool) or given != 1):
            msg = f"{name} cannot be used here: {reason}"
            raise UsageError(msg)


def refuse_engine(worker: Any) -> None:
    """The same of an engine that runs: one that plain vLLM has booted with this worker may have any.

    Relies on ``vllm_config.{speculative_config, kv_transfer_config}``, ``cache_config.enable_prefix_caching`` and
    ``parallel_config.{enable_dbo, data_parallel_size, prefill_context_parallel_size}``.

    Raises:
        UsageError: as :func:`refuse_arguments`, or it skips rows.
    """
    config = worker.vllm_config
    refuse_arguments(
        {
            name: getattr(config, name, None) or getattr(config.parallel_config, name, None)
            for name in _REFUSED
        }
    )
    if getattr(config.cache_config, "enable_prefix_caching", False):
        msg = (
            "enable_prefix_caching=False is needed here, which is not vLLM's default: "
            "a prefix hit skips rows, so captures lack them and edits miss them"
        )
        raise UsageError(msg)


def is_traced(worker: Any) -> bool:
    """Whether the worker runs a compiled graph of its model (``model_config.enforce_eager``)."""
    return not worker.vllm_config.model_config.enforce_eager


def activation_dtype(worker: Any) -> torch.dtype:
    """The dtype activations are computed in (``model_config.dtype``)."""
    dtype: torch.dtype = worker.vllm_config.model_config.dtype
    return dtype
