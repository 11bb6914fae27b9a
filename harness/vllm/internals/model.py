"""What is read of a model that a worker has loaded: its modules, parameters and numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.errors import CaptureError
from harness.vllm.internals.moved import moved
from harness.vllm.internals.worker import model_of, ranks_per_stage

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "attention_rule",
    "called_directly",
    "compute_logits",
    "is_pp_missing_layer",
    "is_split",
    "logits_processor",
    "resolve_dot_path",
    "vocabulary_rows",
]


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
        raise moved("VocabParallelEmbedding.shard_indices.org_vocab_start_index") from error


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
        raise moved(f"LogitsProcessor as expected ({error})") from error


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
        raise moved(f"Attention.impl as expected ({error})") from error
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
