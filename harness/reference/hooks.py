"""Read and edit the hook points of a Hugging Face model with forward hooks.

A point's value is what its module returns, copied at the hook: later code may add into the same memory. The one
exception is ``ln_final.hook_normalized``, which no module returns: it is the final norm's output divided by its
weight, by the same rule as on the engine's side, so that the division's rounding is in both.

An edited row goes on through the model in the module's own convention, and what is captured is read from that, as an
engine's capture is: after the edit.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from harness.conventions import divide_weight, multiply_weight
from harness.errors import CaptureError, UsageError
from harness.points import ATTN_OUT, BLOCK_OUT, EMBED, FINAL_NORM, MLP_OUT, HookPoint, all_points

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from harness.interventions import Edit

__all__ = [
    "FAMILIES",
    "ModuleTree",
    "architecture_of",
    "capturing",
    "hidden_of",
    "module_paths",
    "points_of",
]


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


@contextmanager
def capturing(
    model: PreTrainedModel, capture: Sequence[str], edits: Sequence[Edit] = ()
) -> Iterator[dict[str, torch.Tensor]]:
    """Within it, ONE forward of ``model`` fills the yielded dict: hook → (batch, n, width), a copy on the CPU.

    Args:
        model: where the hooks are installed, and taken off again however the block ends.
        capture: names of hooks.
        edits: of the one sequence that is run, at most one per hook, captured or not.

    Raises:
        UsageError: as :func:`module_paths`; two edits at one hook, or a batch of several sequences with edits.
        CaptureError: a hook fired twice, or, on leaving, never fired; a module that isn't in the model.
    """
    by_hook = {edit.hook: edit for edit in edits}
    if len(by_hook) != len(edits):
        twice = next(edit.hook for edit in edits if by_hook[edit.hook] is not edit)
        msg = f"hook {twice!r}: a sequence has two edits there, and which comes first is not defined; give it one"
        raise UsageError(msg)
    captured: dict[str, torch.Tensor] = {}
    taps: list[_Tap] = []
    handles: list[Any] = []
    try:
        for hook, path in module_paths(model, [*capture, *by_hook]).items():
            try:
                module = model.get_submodule(path)
            except AttributeError as error:
                msg = f"{hook}: the model has no module {path!r}"
                raise CaptureError(msg) from error
            taps.append(_Tap(hook, by_hook.get(hook), captured if hook in capture else None))
            handles.append(module.register_forward_hook(taps[-1]))
        yield captured
    finally:
        for handle in handles:
            handle.remove()
    dead = [tap.hook for tap in taps if not tap.fired]
    if dead:
        msg = f"{len(dead)} hooks of the reference never fired: {', '.join(dead[:4])}{', …' if len(dead) > 4 else ''}"
        raise CaptureError(msg)


@dataclass
class _Tap:
    """The forward hook of one point, for one forward."""

    hook: str
    edit: Edit | None
    captured: dict[str, torch.Tensor] | None  #: where its value goes; None: it is edited only
    fired: bool = False

    def __call__(self, module: nn.Module, _args: Any, output: Any) -> Any:
        """Edit, then capture. None where nothing was edited: the forward goes on with the module's own output."""
        if self.fired:
            msg = f"{self.hook}: its module ran twice in one forward; the hook's value would be ambiguous"
            raise CaptureError(msg)
        self.fired = True
        weight = self._weight(module)
        emitted = hidden_of(output, self.hook).detach()
        after = emitted if self.edit is None else _edited(emitted, self.edit, weight)
        if self.captured is not None:
            value = after if weight is None else divide_weight(after, weight)
            self.captured[self.hook] = value.to("cpu", copy=True)
        if after is emitted:
            return None
        if isinstance(output, tuple | list):
            return [after, *output[1:]] if isinstance(output, list) else (after, *output[1:])
        return after

    def _weight(self, module: nn.Module) -> torch.Tensor | None:
        """What the module has multiplied its value by; None where it returns the value itself."""
        if self.hook != FINAL_NORM:
            return None
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor):
            msg = f"{self.hook}: {type(module).__name__} has no weight to divide by"
            raise CaptureError(msg)
        return weight


def _edited(emitted: torch.Tensor, edit: Edit, weight: torch.Tensor | None) -> torch.Tensor:
    """``emitted`` with the rows that ``edit`` touches replaced, in memory of its own; ``emitted`` itself if none is."""
    batch, n_rows, _ = emitted.shape
    if batch != 1:
        msg = f"hook {edit.hook!r}: edits are of one sequence, but a batch of {batch} was run; run them one at a time"
        raise UsageError(msg)
    touched = edit.touches(n_rows)
    if not touched:
        return emitted
    at = torch.tensor(touched, device=emitted.device)
    rows = emitted[:, at]
    if weight is None:
        rows = edit.apply(rows)
    else:
        # In fp64, so that to divide, to edit and to multiply back cost one rounding and not three.
        canonical = divide_weight(rows.double(), weight)
        rows = multiply_weight(edit.apply(canonical), weight).to(emitted.dtype)
    return emitted.index_copy(1, at, rows)
