"""Read and edit the hook points of a Hugging Face model with forward hooks.

A point's value is what its module returns, copied at the hook: later code may add into the same memory. Exceptions
are ``ln_final.hook_normalized``, which no module returns: it is the final norm's output without its bias and divided by
its weight; and ``embed.hook_out`` of a family that scales embeddings outside the module. Both are made by the same rule
as on the engine's side (:class:`~harness.conventions.Emission`), so that the rounding is in both.

An edited row goes on through the model in the module's own convention, and what is captured is read from that, as an
engine's capture is: after the edit.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from harness.conventions import Emission
from harness.errors import CaptureError, UsageError
from harness.points import ATTN_OUT, BLOCK_OUT, EMBED, FINAL_NORM, MLP_OUT, HookPoint, all_points

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from harness.interventions import Edit

__all__ = [
    "FAMILIES",
    "ModuleTree",
    "architecture_of",
    "attention_of",
    "capturing",
    "emission_of",
    "hidden_of",
    "module_paths",
    "points_of",
    "tree_of",
]


@dataclass(frozen=True)
class ModuleTree:
    """Where a family keeps the modules whose outputs are the hook points, and by which convention.

    Attributes:
        embed, block, attn, mlp, final_norm: dotted paths, ``{i}`` is the block.
        embed_factor: the config's name of what the model multiplies the embedding module's output by; empty: the module
            returns what the first block takes in.
        plus_one: the final norm multiplies by 1 + its weight.
        layer_norm: the final norm is a LayerNorm, which takes the mean off first and adds a bias at the end; else it is
            an RMSNorm.
        attention: the one implementation of transformers that is right, where it has wrong or no others; empty: any is.
        branch_factor: the config's name of what attention's and the MLP's outputs are multiplied by before they are
            added to the residual stream; empty: they are added as they are.
        branch_norms: the block's names of the norms those outputs pass before they are added.
    """

    embed: str = "model.embed_tokens"
    block: str = "model.layers.{i}"
    attn: str = "model.layers.{i}.self_attn"
    mlp: str = "model.layers.{i}.mlp"
    final_norm: str = "model.norm"
    embed_factor: str = ""
    plus_one: bool = False
    layer_norm: bool = False
    attention: str = ""
    branch_factor: str = ""
    branch_norms: tuple[str, str] | None = None

    def emission(
        self, hook: str, config: PreTrainedConfig, parameter: Callable[[str], torch.Tensor]
    ) -> Emission:
        """How the module of ``hook`` emits its value; ``parameter`` gives the model's by dotted path.

        Raises:
            CaptureError: the config lacks the family's factor.
        """
        if hook == EMBED and self.embed_factor:
            factor = getattr(config, self.embed_factor, None)
            if factor is None:
                msg = f"{hook}: the config has no {self.embed_factor}, which the embedding is multiplied by"
                raise CaptureError(msg)
            return Emission(factor=float(factor))
        if hook == FINAL_NORM:
            return Emission(
                parameter(f"{self.final_norm}.weight"),
                plus_one=self.plus_one,
                offset=parameter(f"{self.final_norm}.bias") if self.layer_norm else None,
            )
        return Emission()

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
#: Architecture (``config.architectures[0]``) → its tree. An entry promises that residual = before + attn + mlp, each by
#: way of ``branch_factor`` and ``branch_norms``; that ``embed.hook_out`` is what the first block takes in; and that the
#: logits are ``lm_head(norm(residual))``, soft-capped and scaled as the config says; the self-test checks each.
FAMILIES: dict[str, ModuleTree] = {
    "GPTJForCausalLM": ModuleTree(
        embed="transformer.wte",
        block="transformer.h.{i}",
        attn="transformer.h.{i}.attn",
        mlp="transformer.h.{i}.mlp",
        final_norm="transformer.ln_f",
        layer_norm=True,
        attention="eager",  # the only one there is
    ),
    "Gemma2ForCausalLM": ModuleTree(
        plus_one=True,
        attention="eager",  # sdpa leaves out the soft-cap of the scores
        branch_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    "GraniteForCausalLM": ModuleTree(
        embed_factor="embedding_multiplier", branch_factor="residual_multiplier"
    ),
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


def attention_of(config: PreTrainedConfig, wanted: str) -> str:
    """The attention implementation to run a model with: the family's only right one, else ``wanted``."""
    return FAMILIES[architecture_of(config)].attention or wanted


def tree_of(model: PreTrainedModel) -> ModuleTree:
    """The module tree of a loaded model.

    Raises:
        UsageError: its architecture is not in :data:`FAMILIES`.
    """
    # A model built from a bare config has no `architectures`; its class is what it is.
    architecture = type(model).__name__ if type(model).__name__ in FAMILIES else architecture_of(model.config)
    return FAMILIES[architecture]


def emission_of(model: PreTrainedModel, hook: str) -> Emission:
    """How the module of ``hook`` emits its value in this model.

    Raises:
        UsageError: unknown architecture.
        CaptureError: a parameter or number that its family has is not there.
    """

    def held(path: str) -> torch.Tensor:
        try:
            return model.get_parameter(path)
        except AttributeError as error:
            msg = (
                f"{hook}: the model has no {path}, without which the module's output cannot be made canonical"
            )
            raise CaptureError(msg) from error

    return tree_of(model).emission(hook, model.config, held)


def points_of(model: PreTrainedModel) -> list[str]:
    """Every hook point of ``model``, in forward order."""
    return all_points(model.config.num_hidden_layers)


def module_paths(model: PreTrainedModel, capture: Sequence[str]) -> dict[str, str]:
    """Return hook name → dotted path of its module.

    Raises:
        UsageError: unknown architecture, or a name that is no hook point.
    """
    tree = tree_of(model)
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
            kept = captured if hook in capture else None
            taps.append(_Tap(hook, emission_of(model, hook), by_hook.get(hook), kept))
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
    emission: Emission
    edit: Edit | None
    captured: dict[str, torch.Tensor] | None  #: where its value goes; None: it is edited only
    fired: bool = False

    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Edit, then capture. None where nothing was edited: the forward goes on with the module's own output."""
        if self.fired:
            msg = f"{self.hook}: its module ran twice in one forward; the hook's value would be ambiguous"
            raise CaptureError(msg)
        self.fired = True
        emitted = hidden_of(output, self.hook).detach()
        after = emitted if self.edit is None else _edited(emitted, self.edit, self.emission)
        if self.captured is not None:
            self.captured[self.hook] = self.emission.canonical(after).to("cpu", copy=True)
        if after is emitted:
            return None
        if isinstance(output, tuple | list):
            return [after, *output[1:]] if isinstance(output, list) else (after, *output[1:])
        return after


def _edited(emitted: torch.Tensor, edit: Edit, emission: Emission) -> torch.Tensor:
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
    if emission.plain:
        rows = edit.apply(rows)
    else:
        # In fp64, so that there, the edit and back cost one rounding and not three; by way of fp32, as in an engine's
        # tables, so that a value that is set is emitted in the same bits.
        canonical = emission.canonical(rows.double())
        wide = torch.promote_types(emitted.dtype, torch.float32)
        rows = emission.emitted(edit.apply(canonical)).to(wide).to(emitted.dtype)
    return emitted.index_copy(1, at, rows)
