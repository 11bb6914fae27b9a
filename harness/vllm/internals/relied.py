"""Everything of vLLM's that this package touches and that no promise covers, and whether it is still there.

Asked of classes and modules alone, so no engine has to boot. What only instances have (``self.input_batch = …``) is
looked for in the source of their class: one that is assigned nowhere is gone.
"""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass
from typing import Any

__all__ = ["RELIED", "Relied", "missing"]


@dataclass(frozen=True)
class Relied:
    """Names of one owner.

    Attributes:
        owner: dotted path of a module, class or object.
        names: attributes of it, or, of a class, of its instances.
        use: what they are needed for.
        platform: the only one that has them; empty: every one.
    """

    owner: str
    names: tuple[str, ...]
    use: str
    platform: str = ""


_SCHEDULED = "vllm.v1.core.sched.output"
_VOCABULARY = "vllm.model_executor.layers.vocab_parallel_embedding"

RELIED = (
    Relied("vllm.LLM", ("collective_rpc", "generate", "llm_engine"), "calling an engine"),
    Relied(
        "vllm.v1.engine.llm_engine.LLMEngine",
        ("model_config", "engine_core", "output_processor", "abort_request"),
        "reading its config, stopping it, dropping interrupted requests",
    ),
    Relied(
        "vllm.v1.engine.output_processor.OutputProcessor",
        ("request_states",),
        "dropping interrupted requests",
    ),
    Relied("vllm.v1.engine.core_client.EngineCoreClient", ("shutdown",), "stopping an engine"),
    Relied("vllm.engine.arg_utils.EngineArgs", ("create_engine_config",), "instrumenting a plain LLM"),
    Relied("vllm.inputs", ("TokensPrompt",), "sending token ids"),
    Relied("vllm.platforms.current_platform", ("device_type",), "choosing the worker"),
    Relied("vllm.utils.import_utils", ("resolve_obj_by_qualname",), "choosing the worker"),
    Relied(
        "vllm.v1.worker.worker_base.WorkerBase",
        ("vllm_config", "device", "load_model", "execute_model"),
        "installing taps",
    ),
    Relied("vllm.v1.worker.cpu_worker.CPUWorker", ("model_runner",), "installing taps", platform="cpu"),
    Relied("vllm.v1.worker.gpu_worker.Worker", ("model_runner",), "installing taps", platform="cuda"),
    Relied(
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
        ("_model_forward", "execute_model", "get_model", "input_batch", "intermediate_tensors", "kv_caches"),
        "knowing whose rows a step computes, and what requests leave behind",
    ),
    Relied(
        "vllm.v1.worker.gpu_input_batch.InputBatch",
        ("num_reqs", "req_ids", "num_computed_tokens_cpu"),
        "knowing whose rows a step computes",
    ),
    Relied(
        f"{_SCHEDULED}.SchedulerOutput",
        ("num_scheduled_tokens", "scheduled_new_reqs", "scheduled_cached_reqs", "finished_req_ids"),
        "knowing whose rows a step computes",
    ),
    Relied(f"{_SCHEDULED}.NewRequestData", ("req_id", "sampling_params"), "knowing requests from each other"),
    Relied(f"{_SCHEDULED}.NewRequestData", ("block_ids",), "clearing what requests leave behind"),
    Relied(f"{_SCHEDULED}.CachedRequestData", ("new_block_ids",), "clearing what requests leave behind"),
    Relied("vllm.SamplingParams", ("extra_args",), "knowing requests from each other"),
    Relied("vllm.distributed.parallel_state", ("get_pp_group", "get_tp_group"), "the layout over ranks"),
    Relied(
        "vllm.distributed.parallel_state.GroupCoordinator",
        ("rank_in_group", "world_size", "is_first_rank"),
        "the layout over ranks",
    ),
    Relied("vllm.config", ("set_current_vllm_config",), "the engine's own logits"),
    Relied(
        "vllm.config.VllmConfig",
        (
            "additional_config",
            "model_config",
            "scheduler_config",
            "speculative_config",
            "kv_transfer_config",
            "compilation_config",
            "cache_config",
            "parallel_config",
        ),
        "carrying specs to workers",
    ),
    Relied("vllm.config.CompilationConfig", ("inductor_compile_config",), "graphs for any number of threads"),
    Relied(
        "vllm.config.ParallelConfig", ("enable_dbo", "data_parallel_size"), "refusing what taps cannot serve"
    ),
    Relied("vllm.config.ModelConfig", ("hf_config", "enforce_eager", "dtype"), "reading its config"),
    Relied("vllm.config.SchedulerConfig", ("max_num_batched_tokens",), "the size of step buffers"),
    Relied("vllm.model_executor.models.utils", ("PPMissingLayer",), "knowing stubs of other stages"),
    Relied(f"{_VOCABULARY}.VocabParallelEmbedding", ("shard_indices",), "joining vocabulary shards"),
    Relied(
        f"{_VOCABULARY}.VocabParallelEmbeddingShardIndices",
        ("org_vocab_start_index", "org_vocab_end_index"),
        "joining vocabulary shards",
    ),
    Relied(
        "vllm.model_executor.layers.logits_processor.LogitsProcessor",
        ("soft_cap", "scale", "logits_as_input"),
        "rebuilding logits",
    ),
    Relied(
        "vllm.model_executor.layers.attention.Attention", ("impl", "sliding_window"), "rebuilding patterns"
    ),
    Relied(
        "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl",
        ("scale", "logits_soft_cap"),
        "rebuilding patterns",
        platform="cpu",
    ),
)


def missing(platform: str) -> list[str]:
    """One line for each name that this release of vLLM has not, where it was.

    Args:
        platform: vLLM's device type here.
    """
    lines = []
    for relied in RELIED:
        if relied.platform not in ("", platform):
            continue
        owner, reason = _find(relied.owner)
        if owner is None:
            lines.append(f"no {relied.owner} ({reason}), for {relied.use}")
            continue
        lines += [
            f"{relied.owner} has no {name}, for {relied.use}"
            for name in relied.names
            if not _has(owner, name)
        ]
    return lines


def _find(path: str) -> tuple[Any | None, str]:
    """What a dotted path names, or None and why not; the longest part of it that can be imported is a module."""
    parts = path.split(".")
    reason = ""
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            reason = str(error)
            continue
        except Exception as error:  # noqa: BLE001 - another release's module may raise anything while it is imported
            return None, f"{type(error).__name__}: {error}"
        for name in parts[cut:]:
            found = getattr(found, name, None)
        return found, reason or "it is not there"
    return None, reason


def _has(owner: Any, name: str) -> bool:
    """Whether an owner has an attribute, or its instances are given one."""
    if hasattr(owner, name):
        return True
    if not inspect.isclass(owner):
        return False
    assigned = re.compile(rf"\bself\.{name}\b\s*(:[^=\n]+)?=[^=]|\bself\.{name}\b\s*,[^()]*=")
    return any(
        name in vars(cls).get("__annotations__", {}) or assigned.search(_source(cls))
        for cls in owner.__mro__
        if cls is not object
    )


def _source(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):  # made by C, or at run time
        return ""
