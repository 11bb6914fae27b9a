"""Where each decoder family of transformers keeps the modules whose outputs are the hook points."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from harness.conventions import Emission
from harness.errors import CaptureError, UsageError
from harness.points import (
    ATTN_IN,
    ATTN_OUT,
    BLOCK_IN,
    BLOCK_OUT,
    EMBED,
    FINAL_NORM,
    HEAD_K,
    HEAD_Q,
    HEAD_V,
    HEAD_Z,
    MLP_IN,
    MLP_OUT,
    NONFIREABLE_TEMPLATES,
    PATTERN,
    ROT_K,
    ROT_Q,
    TEMPLATES,
    HookPoint,
    every_point,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = [
    "FAMILIES",
    "GROUP",
    "ModuleTree",
    "Reading",
    "architecture_of",
    "attention_of",
    "known_trees",
    "tree_of",
    "tree_of_config",
]

#: Entry points of other packages: an architecture's name → a :class:`ModuleTree` in some module.
GROUP = "harness.module_trees"


@dataclass(frozen=True)
class Reading:
    """Where a point's value passes in transformers.

    Attributes:
        path: dotted path of a module, ``{i}`` is the block.
        side: ``out``: what it returns; ``in``: what it is given first; ``query``, ``key``: what it gives the attention
            function under that name; ``pattern``: the weights that one gives back.
        part: which of the three, q, k or v, where it returns them side by side; None: it returns the value alone.
        flat: it sees the rows of all sequences, (n, width), and not (batch, n, width).
    """

    path: str
    side: str = "out"
    part: int | None = None
    flat: bool = False


@dataclass(frozen=True)
class ModuleTree:
    """Where a family keeps the modules whose outputs are the hook points, and by which convention.

    Attributes:
        embed, block, attn, mlp, final_norm: dotted paths, ``{i}`` is the block.
        embed_factor: the config's name of what the model multiplies the embedding module's output by; empty: the module
            returns what goes on.
        positions: dotted path of the learned positions that are added to that before the first block; empty: none are.
        plus_one: the final norm multiplies by 1 + its weight.
        layer_norm: the final norm is a LayerNorm, which takes the mean off first; else it is an RMSNorm.
        norm_bias: a LayerNorm adds a bias at the end.
        norm_eps: the config's name of what norms add to the variance, or, where the config has none, the number.
        attention: the one implementation of transformers that is right, where it has wrong or no others; empty: any is.
        branch_factor: the config's name of what attention's and the MLP's outputs are multiplied by before they are
            added to the residual stream; empty: they are added as they are.
        branch_norms: the block's names of the norms those outputs pass before they are added.
        mlp_in: dotted path of the module that is given the MLP's input; empty: the MLP itself.
        qkv: names, below attention, of the projections to q, k and v, or of the one that makes all three side by side.
        projection: name, below attention, of its last projection, which is given the heads' outputs.
        lacks: template → why transformers has no such point in this family.
        flat: templates whose modules see the rows of all sequences, (n, width), and not (batch, n, width).
        unembed: the checkpoint's name of an untied unembedding.
        router: dotted path of what sends tokens to experts, and returns (logits, weights, experts); empty: none are.
    """

    embed: str = "model.embed_tokens"
    block: str = "model.layers.{i}"
    attn: str = "model.layers.{i}.self_attn"
    mlp: str = "model.layers.{i}.mlp"
    final_norm: str = "model.norm"
    embed_factor: str = ""
    positions: str = ""
    plus_one: bool = False
    layer_norm: bool = False
    norm_bias: bool = True
    norm_eps: str | float = "rms_norm_eps"
    attention: str = ""
    branch_factor: str = ""
    branch_norms: tuple[str, str] | None = None
    mlp_in: str = ""
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    projection: str = "o_proj"
    lacks: Mapping[str, str] = field(default_factory=dict)
    flat: tuple[str, ...] = ()
    unembed: str = "lm_head.weight"
    router: str = ""

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
            biased = self.layer_norm and self.norm_bias
            return Emission(
                parameter(f"{self.final_norm}.weight"),
                plus_one=self.plus_one,
                offset=parameter(f"{self.final_norm}.bias") if biased else None,
            )
        return Emission()

    def reading(self, point: HookPoint) -> Reading:
        """Return where the value of ``point`` passes, its block filled in."""
        template = point.template
        if template in (HEAD_Q, HEAD_K, HEAD_V):
            number = (HEAD_Q, HEAD_K, HEAD_V).index(template)
            alone = len(self.qkv) > 1
            found = Reading(f"{self.attn}.{self.qkv[number if alone else 0]}", part=None if alone else number)
        else:
            found = {
                EMBED: Reading(self.embed),
                BLOCK_IN: Reading(self.block, "in"),
                ATTN_IN: Reading(self.attn, "in"),
                ROT_Q: Reading(self.attn, "query"),
                ROT_K: Reading(self.attn, "key"),
                PATTERN: Reading(self.attn, "pattern"),
                HEAD_Z: Reading(f"{self.attn}.{self.projection}", "in"),
                ATTN_OUT: Reading(self.attn),
                MLP_IN: Reading(self.mlp_in or self.mlp, "in"),
                MLP_OUT: Reading(self.mlp),
                BLOCK_OUT: Reading(self.block),
                FINAL_NORM: Reading(self.final_norm),
            }[template]
        return replace(found, path=found.path.format(i=point.block), flat=template in self.flat)

    def points(self, n_layers: int, templates: Sequence[str] = (*TEMPLATES, PATTERN)) -> list[str]:
        """Every point of some templates that a model of so many blocks has here, in forward order."""
        return every_point(n_layers, [template for template in templates if template not in self.lacks])

    @property
    def missing(self) -> dict[str, str]:
        """Template → why it cannot fire."""
        return {**NONFIREABLE_TEMPLATES, **self.lacks}


_LLAMA = ModuleTree()
_MIXTURE = ModuleTree(router="model.layers.{i}.mlp.gate")
_AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")
_NO_ROTARY = dict.fromkeys(
    (ROT_Q, ROT_K), "positions are learned, nothing is rotated: hook_q and hook_k are it"
)
_OWN_ATTENTION = dict.fromkeys(
    (ROT_Q, ROT_K, PATTERN), "its attention class calls no attention function of transformers"
)
_INTERLEAVED = dict.fromkeys((HEAD_Q, HEAD_K, HEAD_V), "its projection interleaves q, k and v")
_GPT2_LIKE = ModuleTree(
    embed="transformer.wte",
    block="transformer.h.{i}",
    attn="transformer.h.{i}.attn",
    mlp="transformer.h.{i}.mlp",
    final_norm="transformer.ln_f",
    layer_norm=True,
    norm_eps="layer_norm_epsilon",
)
#: Architecture (``config.architectures[0]``) → its tree. An entry promises that residual = before + attn + mlp, each by
#: way of ``branch_factor`` and ``branch_norms``; that the first block takes in ``embed.hook_out`` and the learned
#: positions, if any; and that the logits are ``unembed(norm(residual))``, soft-capped and scaled as the config says.
#: The self-test checks each.
FAMILIES: dict[str, ModuleTree] = {
    "CohereForCausalLM": ModuleTree(layer_norm=True, norm_bias=False, norm_eps="layer_norm_eps"),
    "FalconForCausalLM": replace(
        _GPT2_LIKE,
        embed="transformer.word_embeddings",
        attn="transformer.h.{i}.self_attention",
        projection="dense",
        lacks={**_OWN_ATTENTION, **_INTERLEAVED},
    ),
    "GPT2LMHeadModel": replace(
        _GPT2_LIKE, positions="transformer.wpe", qkv=("c_attn",), projection="c_proj", lacks=_NO_ROTARY
    ),
    "GPTJForCausalLM": replace(
        _GPT2_LIKE,
        attention="eager",  # the only one there is
        projection="out_proj",
        lacks=_OWN_ATTENTION,
    ),
    "GPTNeoXForCausalLM": ModuleTree(
        embed="gpt_neox.embed_in",
        block="gpt_neox.layers.{i}",
        attn="gpt_neox.layers.{i}.attention",
        mlp="gpt_neox.layers.{i}.mlp",
        final_norm="gpt_neox.final_layer_norm",
        layer_norm=True,
        norm_eps="layer_norm_eps",
        projection="dense",
        lacks=_INTERLEAVED,
        unembed="embed_out.weight",
    ),
    "Gemma2ForCausalLM": ModuleTree(
        plus_one=True,
        attention="eager",  # sdpa leaves out the soft-cap of the scores
        branch_norms=_AFTER,
    ),
    "Gemma3ForCausalLM": ModuleTree(plus_one=True, branch_norms=_AFTER),
    "GemmaForCausalLM": ModuleTree(plus_one=True),
    "GraniteForCausalLM": ModuleTree(
        embed_factor="embedding_multiplier", branch_factor="residual_multiplier"
    ),
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "MixtralForCausalLM": _MIXTURE,
    "OPTForCausalLM": ModuleTree(
        embed="model.decoder.embed_tokens",
        block="model.decoder.layers.{i}",
        attn="model.decoder.layers.{i}.self_attn",
        mlp="model.decoder.layers.{i}.fc2",
        final_norm="model.decoder.final_layer_norm",
        positions="model.decoder.embed_positions",
        layer_norm=True,
        norm_eps=1e-5,
        mlp_in="model.decoder.layers.{i}.fc1",
        projection="out_proj",
        lacks=_NO_ROTARY,
        flat=(MLP_IN, MLP_OUT),
    ),
    "Olmo2ForCausalLM": ModuleTree(branch_norms=_AFTER),
    "Phi3ForCausalLM": ModuleTree(qkv=("qkv_proj",)),
    "PhiForCausalLM": ModuleTree(
        final_norm="model.final_layernorm",
        layer_norm=True,
        norm_eps="layer_norm_eps",
        projection="dense",
    ),
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
    "Qwen3MoeForCausalLM": _MIXTURE,
    "StableLmForCausalLM": ModuleTree(layer_norm=True, norm_eps="layer_norm_eps"),
    "Starcoder2ForCausalLM": ModuleTree(layer_norm=True, norm_eps="norm_epsilon"),
}


@cache
def _brought() -> dict[str, ModuleTree]:
    """Trees that other packages bring, by architecture."""
    trees: dict[str, ModuleTree] = {}
    for point in entry_points(group=GROUP):
        found = point.load()
        if not isinstance(found, ModuleTree):
            msg = f"entry point {point.value!r} of {GROUP} gave {type(found).__name__} for {point.name}, no ModuleTree"
            raise UsageError(msg)
        trees[point.name] = found
    return trees


def known_trees() -> dict[str, ModuleTree]:
    """Every architecture that has a tree; what another package brings wins over :data:`FAMILIES`."""
    return {**FAMILIES, **_brought()}


def architecture_of(config: PreTrainedConfig) -> str:
    """Return the architecture a config names, after checking that its module tree is known.

    Raises:
        UsageError: the tree is not in :func:`known_trees`.
    """
    names, known = config.architectures or [], known_trees()
    for name in names:
        if name in known:
            return name
    named = ", ".join(names) or f"none, model_type {config.model_type}"
    msg = f"the reference has no module tree for this architecture ({named}); it has: {', '.join(sorted(known))}"
    raise UsageError(msg)


def tree_of_config(config: PreTrainedConfig) -> ModuleTree:
    """The module tree of the architecture a config names; raises as :func:`architecture_of`."""
    return known_trees()[architecture_of(config)]


def tree_of(model: PreTrainedModel) -> ModuleTree:
    """The module tree of a loaded model; raises as :func:`architecture_of`."""
    # A model built from a bare config has no `architectures`; its class is what it is.
    return known_trees().get(type(model).__name__) or tree_of_config(model.config)


def attention_of(config: PreTrainedConfig, wanted: str) -> str:
    """The attention implementation to run a model with: the family's only right one, else ``wanted``."""
    return tree_of_config(config).attention or wanted
