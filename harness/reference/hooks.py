"""Read the hook points from a Hugging Face model with forward hooks.

A point's value is what its module returns, copied at the hook: later code may add into the same memory. The one
exception is ``ln_final.hook_normalized``, which no module returns: it is the final norm's output divided by its
weight, by the same rule as on the engine's side, so that the division's rounding is in both.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from harness.errors import CaptureError, UsageError
from harness.points import ATTN_OUT, BLOCK_OUT, EMBED, FINAL_NORM, MLP_OUT, HookPoint, all_points

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = [
    "FAMILIES",
    "MIN_DIVISOR",
    "ModuleTree",
    "architecture_of",
    "capturing",
    "hidden_of",
    "module_paths",
    "points_of",
    "unweight",
]

#: Weights smaller than this are not divided by: the quotient would be noise blown up.
MIN_DIVISOR = 1e-6


@dataclass(frozen=True)
class ModuleTree:
    """Where a family keeps the modules whose outputs are the hook points; ``{i}`` is the block."""

    embed: str = "model.embed_tokens"
    block: str = "model.layers.{i}"
    attn: str = "model.layers.{i}.self_attn"
    mlp: str = "model.layers.{i}.mlp"
    final_norm: str = "model.norm"  #: an RMSNorm whose output is normalised · weight

    def path(self, point: HookPoint) -> str:
        """Return the dotted path of the module that emits ``point``."""
        by_template = {
            EMBED: self.embed,
            ATTN_OUT: self.attn,
            MLP_OUT: self.mlp,
            BLOCK_OUT: self.block,
            FINAL_NORM: self.final_norm,
        }
        return by_template[point.template].format(i=point.block)


_LLAMA = ModuleTree()
#: Architecture (``config.architectures[0]``) → its tree. An entry promises that residual = before + attn + mlp, that
#: the embedding's output is the residual stream, and that the logits are ``lm_head(norm(residual))``; the self-test
#: checks each.
FAMILIES: dict[str, ModuleTree] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Phi3ForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
}


def architecture_of(config: PreTrainedConfig) -> str:
    """Return the architecture a config names, after checking that its module tree is known.

    Raises:
        UsageError: the tree is not in :data:`FAMILIES`.
    """
    names = config.architectures or []
    for name in names:
        if name in FAMILIES:
            return name
    named = ", ".join(names) or f"none, model_type {config.model_type}"
    msg = f"the reference has no module tree for this architecture ({named}); it has: {', '.join(sorted(FAMILIES))}"
    raise UsageError(msg)


def points_of(model: PreTrainedModel) -> list[str]:
    """Every hook point of ``model``, in forward order."""
    return all_points(model.config.num_hidden_layers)


def module_paths(model: PreTrainedModel, capture: Sequence[str]) -> dict[str, str]:
    """Return hook name → dotted path of its module.

    Raises:
        UsageError: unknown architecture, or a name that is no hook point.
    """
    # A model built from a bare config has no `architectures`; its class is what it is.
    architecture = type(model).__name__ if type(model).__name__ in FAMILIES else architecture_of(model.config)
    tree = FAMILIES[architecture]
    return {name: tree.path(HookPoint.parse(name)) for name in capture}


def hidden_of(output: Any, hook: str) -> torch.Tensor:
    """Return the hidden states, (batch, n, width), in what a module returned.

    Attention returns a tuple and, since transformers 5, a decoder layer a bare tensor, of which ``output[0]`` would
    be the first sequence of the batch; so the type decides.

    Raises:
        CaptureError: what it returned holds no such tensor in first place.
    """
    value = output[0] if isinstance(output, tuple | list) else output
    if isinstance(value, torch.Tensor) and value.ndim == 3 and value.is_floating_point():
        return value
    got = (
        f"{value.dtype} of shape {tuple(value.shape)}"
        if isinstance(value, torch.Tensor)
        else type(value).__name__
    )
    msg = f"{hook}: its module returned {got} where float hidden states (batch, n, width) were expected"
    raise CaptureError(msg)


def unweight(output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Divide an RMSNorm's output by its weight: ``normalised = output / weight``.

    In fp32 or wider, then rounded to ``output``'s dtype. Channels with ``|weight| < 1e-6`` are left as they are.

    Args:
        output: (…, width), any float dtype; the result has its shape and dtype.
        weight: (width,).
    """
    wide = torch.promote_types(output.dtype, torch.float32)
    divisor = weight.detach().to(wide)
    # Compared in fp64: fp32(1e-6) lies below 1e-6, so an fp32 comparison would decide otherwise than the fp64 truth's.
    small = divisor.double().abs() < MIN_DIVISOR
    divisor = torch.where(small, torch.ones_like(divisor), divisor)
    return (output.to(wide) / divisor).to(output.dtype)


@contextmanager
def capturing(model: PreTrainedModel, capture: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
    """Within it, ONE forward of ``model`` fills the yielded dict: hook → (batch, n, width), a copy on the CPU.

    Raises:
        UsageError: as :func:`module_paths`.
        CaptureError: a hook fired twice, or, on leaving, never fired; a module that isn't in the model.
    """
    captured: dict[str, torch.Tensor] = {}
    handles: list[Any] = []
    try:
        for hook, path in module_paths(model, capture).items():
            try:
                module = model.get_submodule(path)
            except AttributeError as error:
                msg = f"{hook}: the model has no module {path!r}"
                raise CaptureError(msg) from error
            handles.append(module.register_forward_hook(partial(_take, captured, hook)))
        yield captured
    finally:
        for handle in handles:
            handle.remove()
    dead = [hook for hook in capture if hook not in captured]
    if dead:
        msg = f"{len(dead)} hooks of the reference never fired: {', '.join(dead[:4])}{', …' if len(dead) > 4 else ''}"
        raise CaptureError(msg)


def _take(captured: dict[str, torch.Tensor], hook: str, module: nn.Module, _args: Any, output: Any) -> None:
    """Copy what ``module`` returned into ``captured``. Returns None: the forward goes on with the module's own."""
    if hook in captured:
        msg = f"{hook}: its module ran twice in one forward; the hook's value would be ambiguous"
        raise CaptureError(msg)
    value = hidden_of(output, hook).detach()
    if hook == FINAL_NORM:
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor):
            msg = f"{hook}: {type(module).__name__} has no weight to divide by"
            raise CaptureError(msg)
        value = unweight(value, weight)
    captured[hook] = value.to("cpu", copy=True)
