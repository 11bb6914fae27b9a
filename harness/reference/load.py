"""Load a Hugging Face causal LM so that its weights are the ones an engine holds, at the dtype one asks for.

Three dtypes meet here. The checkpoint's is what lies on disk; ``weights_dtype`` is what the engine rounds it to;
``dtype`` is what this model computes in. A truth must start from the engine's rounded weights, or it would blame
the engine for the checkpoint's precision, so weights go checkpoint → ``weights_dtype`` → ``dtype``.

Non-persistent buffers (rotary ``inv_freq``) are no weights: the model's definition computes them in fp32 whatever
the model's dtype, and ``model.to(bfloat16)`` would round them (angles off by up to 0.2 %). They
are left as the class made them.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from harness.backend import DTYPES
from harness.errors import UsageError
from harness.models import load_config, resolve
from harness.reference.families import known_trees

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import PreTrainedModel

__all__ = ["as_dtype", "load_model"]

logger = logging.getLogger(__name__)


def as_dtype(name: torch.dtype | str) -> torch.dtype:
    """Return the torch dtype called ``fp32``, ``float32`` or ``torch.float32``.

    Raises:
        UsageError: none of the dtypes a model can run in.
    """
    text = str(name).removeprefix("torch.")
    full = DTYPES.get(text, text)
    if full not in DTYPES.values():
        msg = f"{text!r} is no dtype a model can run in; use one of {', '.join(DTYPES)}"
        raise UsageError(msg)
    dtype: torch.dtype = getattr(torch, full)
    return dtype


def load_model(
    path: str | Path,
    dtype: torch.dtype | str,
    *,
    weights_dtype: torch.dtype | str | None = None,
    attn_implementation: str = "eager",
) -> PreTrainedModel:
    """Load a causal LM on the CPU, in eval mode, without gradients.

    Args:
        path: checkpoint folder, bundled name or hub id.
        dtype: what the model computes in, and the dtype of its parameters and persistent buffers.
        weights_dtype: what the weights are rounded to first: the engine's dtype. None: ``dtype``.
        attn_implementation: transformers' name, ``eager`` or ``sdpa``.

    Raises:
        UsageError: there is no such checkpoint, it is damaged or quantised, it lacks weights that its config
            asks for, it runs only with code of its own, or not rightly with this attention implementation.
    """
    compute = as_dtype(dtype)
    stored = compute if weights_dtype is None else as_dtype(weights_dtype)
    folder = resolve(path).fetch()
    config = load_config(folder)
    if getattr(config, "quantization_config", None):
        msg = f"checkpoint {str(folder)!r} is quantised: an engine does more than round its weights; use a plain one"
        raise UsageError(msg)

    trees = known_trees()
    for name in config.architectures or []:
        right = trees[name].attention if name in trees else ""
        if right and attn_implementation != right:
            msg = (
                f"checkpoint {str(folder)!r} is a {name}, which transformers computes rightly with "
                f"attn_implementation {right!r} only, not {attn_implementation!r}"
            )
            raise UsageError(msg)

    from transformers import AutoModelForCausalLM

    try:
        with _no_progress_bar():
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=stored,
                attn_implementation=attn_implementation,
                # Plain matrix products: the grouped ones take no fp64.
                experts_implementation="eager",
                trust_remote_code=False,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (
        Exception
    ) as error:  # OSError, ValueError, KeyError, RuntimeError and safetensors' own, one per defect
        reason = (str(error).strip().splitlines() or [""])[0]
        msg = f"checkpoint {str(folder)!r} does not load into transformers ({type(error).__name__}: {reason})"
        raise UsageError(msg) from error
    _refuse_incomplete(str(folder), report)
    _cast_weights(model, stored, compute)
    model.eval()
    model.requires_grad_(requires_grad=False)
    loaded: PreTrainedModel = model
    return loaded


def _refuse_incomplete(folder: str, report: dict[str, Any]) -> None:
    """Transformers fills missing weights with random ones and only logs it; a reference must not."""
    for key, what in (("missing_keys", "lacks"), ("mismatched_keys", "has the wrong shape for")):
        names = sorted(str(name) for name in report.get(key) or ())
        if names:
            shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
            msg = f"checkpoint {folder!r} {what} {len(names)} weights of its config ({shown}); copy it again"
            raise UsageError(msg)


def _cast_weights(model: torch.nn.Module, stored: torch.dtype, compute: torch.dtype) -> None:
    """Round every weight to ``stored`` and widen it to ``compute``; ``.data`` keeps tied weights tied.

    Rounding again matters where a family keeps some modules at fp32 against the dtype it was loaded with.
    """
    persistent = set(model.state_dict(keep_vars=True))
    weights = [*model.parameters(), *(b for name, b in model.named_buffers() if name in persistent)]
    for weight in weights:
        if weight.is_floating_point():
            weight.data = weight.data.to(stored).to(compute)
    config = getattr(model, "config", None)
    if config is not None:
        config.dtype = compute


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Keep transformers' bar out of a test run's output, and leave the user's setting as it was."""
    from transformers.utils import logging as hf_logging

    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()
