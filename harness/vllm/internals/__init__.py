"""The one package that touches vLLM's private attributes. Read on releases 0.30 to 0.32.

Each function names what it relies on; when a release moves it, the error raised here says which attribute is gone.
"""

from __future__ import annotations

from harness.vllm.internals.engine import (
    abort_all,
    call_workers,
    extract_hf_config,
    generate,
    patch_engine_config,
    ray_backend,
    shut_down,
    verify_hook_coverage,
)
from harness.vllm.internals.model import (
    attention_rule,
    called_directly,
    compute_logits,
    is_pp_missing_layer,
    is_split,
    logits_processor,
    resolve_dot_path,
    vocabulary_rows,
)
from harness.vllm.internals.steps import (
    filling_blocks,
    finished_requests,
    instrument_runner,
    request_extra_args,
    segment_by_request,
)
from harness.vllm.internals.worker import (
    activation_dtype,
    base_worker_class,
    clear_blocks,
    compile_for_any_threads,
    is_traced,
    model_of,
    place_of,
    prepare_stage_input,
    ranks_per_stage,
    refuse_arguments,
    refuse_engine,
    runner_name,
    step_budget,
)

__all__ = [
    "abort_all",
    "activation_dtype",
    "attention_rule",
    "base_worker_class",
    "call_workers",
    "called_directly",
    "clear_blocks",
    "compile_for_any_threads",
    "compute_logits",
    "extract_hf_config",
    "filling_blocks",
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
    "refuse_arguments",
    "refuse_engine",
    "request_extra_args",
    "resolve_dot_path",
    "runner_name",
    "segment_by_request",
    "shut_down",
    "step_budget",
    "verify_hook_coverage",
    "vocabulary_rows",
]
