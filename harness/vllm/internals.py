"""The one module that touches vLLM's private attributes. Read on releases 0.30 to 0.32.

Each function names what it relies on; when a release moves it, the error raised here says which attribute is gone.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

from harness.errors import CaptureError, EngineError, HarnessError, UsageError
from harness.vllm.accumulator import StepRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch
    from torch import nn

__all__ = [
    "abort_all",
    "activation_dtype",
    "attention_rule",
    "base_worker_class",
    "call_workers",
    "called_directly",
    "compute_logits",
    "extract_hf_config",
    "finished_requests",
    "generate",
    "instrument_runner",
    "is_pp_missing_layer",
    "is_split",
    "is_traced",
    "logits_processor",
    "model_of",
    "patch_engine_config",
    "place_of",
    "prepare_stage_input",
    "ranks_per_stage",
    "ray_backend",
    "refuse_drafts",
    "request_extra_args",
    "resolve_dot_path",
    "runner_name",
    "segment_by_request",
    "shut_down",
    "step_budget",
    "verify_hook_coverage",
    "vocabulary_rows",
]

_WORKERS = {
    "cpu": "vllm.v1.worker.cpu_worker.CPUWorker",
    "cuda": "vllm.v1.worker.gpu_worker.Worker",
    "xpu": "vllm.v1.worker.xpu_worker.XPUWorker",
}


#: vLLM's sentence around what a worker process raised.
_WORKER_FAILED = re.compile(r"Worker failed with error '(.*)', please check the stack trace", re.DOTALL)


def _moved(what: str) -> EngineError:
    import vllm

    return EngineError(
        f"vLLM {vllm.__version__} has no {what}: the harness reads it and knows releases 0.30 to 0.32; "
        "run `vllm-parity doctor` and install a supported release"
    )


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
        raise _moved(_WORKERS[device]) from error
    return cls


def ray_backend() -> Any:
    """What ``distributed_executor_backend`` has to be for Ray: vLLM's own, or one that also takes a CPU for a device.

    Relies on ``current_platform.ray_device_key``, which is empty where vLLM knows no device for Ray.
    """
    from vllm.platforms import current_platform

    if current_platform.ray_device_key:
        return "ray"
    from harness.vllm.ray_executor import CPURayExecutor

    return CPURayExecutor


def extract_hf_config(llm: Any) -> Any:
    """The Hugging Face config of a booted engine (``llm.llm_engine.model_config.hf_config``)."""
    try:
        return llm.llm_engine.model_config.hf_config
    except AttributeError as error:
        raise _moved("LLM.llm_engine.model_config.hf_config") from error


def is_pp_missing_layer(module: Any) -> bool:
    """Whether a module is the stub vLLM puts where another pipeline stage holds the real one."""
    return type(module).__name__ == "PPMissingLayer"


def resolve_dot_path(root: Any, path: str) -> Any | None:
    """Follow ``path`` from ``root``; None for a missing segment or a pipeline stub on the way."""
    node = root
    for segment in path.split("."):
        if segment.isdigit() and hasattr(node, "__getitem__"):
            node = node[int(segment)] if int(segment) < len(node) else None
        else:
            node = getattr(node, segment, None)
        if node is None or is_pp_missing_layer(node):
            return None
    return node


def runner_name(worker: Any) -> str:
    """``V1`` or ``V2``: which of vLLM's model runners this worker drives."""
    return "V2" if getattr(worker, "use_v2_model_runner", False) else "V1"


def step_budget(worker: Any) -> int:
    """Most tokens one step may schedule (``scheduler_config.max_num_batched_tokens``)."""
    return int(worker.vllm_config.scheduler_config.max_num_batched_tokens)


def verify_hook_coverage(absent_by_rank: Sequence[Sequence[str] | None], names: Sequence[str]) -> None:
    """Check after boot that every point is installed on at least one rank.

    Args:
        absent_by_rank: per rank the points it does not hold; None where installation never ran.
        names: every point that was asked for.

    Raises:
        EngineError: installation never ran on a rank, or points no rank holds.
    """
    silent = [rank for rank, absent in enumerate(absent_by_rank) if absent is None]
    if silent:
        msg = (
            f"hook installation never ran on rank {', '.join(map(str, silent))}: the worker class there is not the "
            "capture worker, so nothing it computes would be seen"
        )
        raise EngineError(msg)
    missing = [
        name for name in names if all(absent is not None and name in absent for absent in absent_by_rank)
    ]
    if missing:
        shown = ", ".join(missing[:6]) + (f" and {len(missing) - 6} more" if len(missing) > 6 else "")
        msg = f"no rank holds {shown}: the overlay's module paths do not fit this release of vLLM"
        raise EngineError(msg)


def _shares(requests: Sequence[str], counts: Sequence[int], starts: Sequence[int]) -> list[StepRows]:
    shares, row = [], 0
    for request, count, start in zip(requests, counts, starts, strict=True):
        shares.append(StepRows(request, int(start), int(count), row))
        row += int(count)
    return shares


def segment_by_request(runner: Any, scheduler_output: Any) -> list[StepRows]:
    """Who owns which rows of the step a V1 runner is about to run.

    Relies on ``input_batch.{num_reqs, req_ids, num_computed_tokens_cpu}``, final once ``_model_forward`` is reached,
    and on ``scheduler_output.num_scheduled_tokens``.
    """
    try:
        batch = runner.input_batch
        n = batch.num_reqs
        requests = list(batch.req_ids[:n])
        counts = [scheduler_output.num_scheduled_tokens[r] for r in requests]
        starts = batch.num_computed_tokens_cpu[:n].tolist()
    except AttributeError as error:
        raise _moved(f"GPUModelRunner.input_batch as expected ({error})") from error
    return _shares(requests, counts, starts)


class _V1Steps:
    """Mixed into a V1 runner instance: tells the observer what the step holds, around the forward.

    ``_model_forward`` is vLLM's documented override point, reached with the request order final and outside the
    CUDA-graph wrapper, so it runs on graph replay too.
    """

    harness_observer: Any = None
    _harness_scheduled: Any = None

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._harness_scheduled = scheduler_output
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        forward: Callable[..., Any] = super()._model_forward  # type: ignore[misc]
        if self.harness_observer is None or not self.harness_observer.harness_watching():
            return forward(*args, **kwargs)
        with self.harness_observer.harness_step(segment_by_request(self, self._harness_scheduled)):
            return forward(*args, **kwargs)


class _V2Steps:
    """Mixed into a V2 runner instance (default on CUDA). Read in its source, never run by this project yet."""

    harness_observer: Any = None
    _harness_stack: contextlib.ExitStack | None = None

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        batch = super().prepare_inputs(*args, **kwargs)  # type: ignore[misc]
        observer = self.harness_observer
        if observer is not None and observer.harness_watching() and self._harness_stack is not None:
            counts, starts = batch.num_scheduled_tokens.tolist(), batch.num_computed_tokens_np.tolist()
            shares = _shares(list(batch.req_ids), counts, starts)
            self._harness_stack.enter_context(observer.harness_step(shares))
        return batch

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            self._harness_stack = stack
            return super().execute_model(*args, **kwargs)  # type: ignore[misc]


def instrument_runner(worker: Any, observer: Any) -> None:
    """Re-class this worker's runner instance so that a watching observer's ``harness_step`` surrounds each forward.

    Only the instance changes: another engine's runner in this process keeps its class.
    """
    runner = worker.model_runner
    mixin, needed = (
        (_V2Steps, "prepare_inputs") if runner_name(worker) == "V2" else (_V1Steps, "_model_forward")
    )
    if not hasattr(runner, needed):
        raise _moved(f"{type(runner).__name__}.{needed}")
    runner.__class__ = type(f"Observed{type(runner).__name__}", (mixin, type(runner)), {})
    runner.harness_observer = observer


def request_extra_args(scheduler_output: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Requests that start in this step, with the ``extra_args`` their sampling parameters carry."""
    for request in scheduler_output.scheduled_new_reqs:
        extra = getattr(request.sampling_params, "extra_args", None) if request.sampling_params else None
        yield request.req_id, extra or {}


def finished_requests(scheduler_output: Any) -> Sequence[str]:
    """Ids of requests that ended since the last step (``finished_req_ids``)."""
    return list(scheduler_output.finished_req_ids)


def model_of(worker: Any) -> nn.Module:
    """The model a worker has loaded (``model_runner.get_model()``)."""
    model: nn.Module = worker.model_runner.get_model()
    return model


def called_directly(model: Any) -> list[nn.Module]:
    """Modules whose ``forward`` vLLM calls itself, past their hooks: attention in models of the transformers backend.

    Relies on that backend's package and on ``Attention.impl``.
    """
    backend = "vllm.model_executor.models.transformers"
    if not any(cls.__module__.startswith(backend) for cls in type(model).__mro__):
        return []
    return [module for module in model.modules() if hasattr(module, "impl")]


def vocabulary_rows(module: Any) -> tuple[int, int] | None:
    """Which real vocabulary rows [from, to) a vocabulary-parallel module holds (``shard_indices``); None for others."""
    indices = getattr(module, "shard_indices", None)
    if indices is None:
        return None
    try:
        return int(indices.org_vocab_start_index), int(indices.org_vocab_end_index)
    except AttributeError as error:
        raise _moved("VocabParallelEmbedding.shard_indices.org_vocab_start_index") from error


def is_split(parameter: torch.Tensor) -> bool:
    """Whether a parameter is one rank's part of a larger one (linear layers have ``output_dim``, ``input_dim``)."""
    marked = any(getattr(parameter, name, None) is not None for name in ("output_dim", "input_dim"))
    return marked and ranks_per_stage() > 1


def logits_processor(model: Any) -> dict[str, Any] | None:
    """Soft-cap and scale of a model's ``logits_processor``, None where the model has no such module."""
    processor = getattr(model, "logits_processor", None)
    if processor is None or is_pp_missing_layer(processor):
        return None
    try:
        soft_cap = processor.soft_cap
        return {
            "soft_cap": None if soft_cap is None else float(soft_cap),
            "scale": float(processor.scale),
            "as_input": bool(processor.logits_as_input),
        }
    except AttributeError as error:
        raise _moved(f"LogitsProcessor as expected ({error})") from error


def attention_rule(attention: Any) -> dict[str, Any]:
    """What an ``Attention`` module makes scores by (``impl.{scale, sliding_window, logits_soft_cap}``).

    Raises:
        CaptureError: it adds biases of position or sinks to the scores, which are not rebuilt.
    """
    try:
        impl = attention.impl
        window, cap = attention.sliding_window, impl.logits_soft_cap
        more = [name for name in ("alibi_slopes", "sinks") if getattr(impl, name, None) is not None]
        scale = float(impl.scale)
    except AttributeError as error:
        raise _moved(f"Attention.impl as expected ({error})") from error
    if more:
        msg = f"attention adds {' and '.join(more)} to its scores: its patterns are not rebuilt"
        raise CaptureError(msg)
    return {"scale": scale, "window": window, "soft_cap": float(cap) if cap else None}


def compute_logits(worker: Any, hidden: torch.Tensor) -> torch.Tensor | None:
    """The model's own ``compute_logits`` on rows (n, width)."""
    import torch
    from vllm.config import set_current_vllm_config

    with torch.inference_mode(), set_current_vllm_config(worker.vllm_config):
        model: Any = model_of(worker)
        logits: torch.Tensor | None = model.compute_logits(hidden)
    return logits


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
        raise _moved(f"make_empty_intermediate_tensors ({error})") from error


def refuse_drafts(worker: Any) -> None:
    """Refuse an engine that computes rows it may reject (``vllm_config.speculative_config``).

    Raises:
        UsageError: it does.
    """
    if getattr(worker.vllm_config, "speculative_config", None) is not None:
        msg = "speculative_config cannot be used here: rows of rejected drafts would be captured in place of real ones"
        raise UsageError(msg)


def is_traced(worker: Any) -> bool:
    """Whether the worker runs a compiled graph of its model (``model_config.enforce_eager``)."""
    return not worker.vllm_config.model_config.enforce_eager


def activation_dtype(worker: Any) -> torch.dtype:
    """The dtype activations are computed in (``model_config.dtype``)."""
    dtype: torch.dtype = worker.vllm_config.model_config.dtype
    return dtype


def call_workers(llm: Any, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
    """Call an RPC method of the capture worker on every rank (``LLM.collective_rpc``): one answer per rank.

    Raises:
        CaptureError: what a worker in a process of its own raised. vLLM passes on its text alone, inside a sentence.
    """
    try:
        answers: list[Any] = llm.collective_rpc(method, args=args)
    except HarnessError:
        raise
    except Exception as error:
        # Through the engine's own process it is an Exception, through a rank's a RuntimeError, or both in turn.
        text = str(error).removeprefix("Call to collective_rpc method failed: ")
        told = _WORKER_FAILED.search(text)
        if told is None and text == str(error):
            raise
        raise CaptureError(told[1] if told else text) from error
    return answers


def abort_all(llm: Any) -> None:
    """Drop every request the engine still works on (``llm_engine.output_processor.request_states``)."""
    try:
        engine = llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
    except AttributeError as error:
        raise _moved("LLMEngine.output_processor.request_states") from error


def generate(llm: Any, prompts: Sequence[Sequence[int]], params: Any) -> list[Any]:
    """Run token-id prompts to their end (``LLM.generate``); an interrupted call leaves no request behind."""
    from vllm.inputs import TokensPrompt

    sent = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
    try:
        outputs: list[Any] = llm.generate(sent, params, use_tqdm=False)
    except BaseException:
        # What is left of this call would run on inside the next one. Its own error is the one to be told.
        with contextlib.suppress(Exception):
            abort_all(llm)
        raise
    return outputs


def shut_down(llm: Any) -> None:
    """Release an engine's processes and memory (``llm_engine.engine_core.shutdown()``)."""
    engine = getattr(llm, "llm_engine", None)
    core = getattr(engine, "engine_core", None)
    if core is None:
        raise _moved("LLM.llm_engine.engine_core")
    core.shutdown()


def patch_engine_config(transform: Callable[[Any], None]) -> None:
    """Let ``transform(engine_args)`` run before any engine config is made in this process; once per process.

    Wraps ``EngineArgs.create_engine_config``, the one place that a plain ``LLM(...)`` and ``vllm serve`` share.
    """
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if getattr(original, "harness_wrapped", False):
        return

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        transform(self)
        return original(self, *args, **kwargs)

    create_engine_config.harness_wrapped = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config
