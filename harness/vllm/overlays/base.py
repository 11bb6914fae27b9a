"""Overlays: hook point → dot path, width and convention, chosen by the checkpoint's architecture."""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from harness import points
from harness.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["OVERLAYS", "Overlay", "TapSpec", "get_overlay", "known_architectures"]


@dataclass(frozen=True)
class TapSpec:
    """One tap as it travels to the workers: plain strings, numbers and bools, so that it can be hashed and sent.

    What the module emits and the canonical value belong together by ``canonical = (emitted - offset) / divisor ·
    factor``, see :class:`harness.conventions.Emission`. All three are dot paths from the model's root, so that what
    counts is what the engine holds; an empty one plays no part.

    Attributes:
        name: canonical hook name.
        path: dot path of the module from the model's root.
        width: length of one row.
        divisor: a parameter the module multiplies in.
        plus_one: the module multiplies by 1 + that parameter.
        offset: a parameter the module adds after that.
        factor: a number or one-element tensor that the model multiplies the module's output by.
        sums: the module may return (delta, residual), and the canonical value is their sum. Whether it does is seen in
            its output, not assumed.
    """

    name: str
    path: str
    width: int
    divisor: str = ""
    plus_one: bool = False
    offset: str = ""
    factor: str = ""
    sums: bool = False

    def to_dict(self) -> dict[str, Any]:
        """A plain dict that :meth:`from_dict` reads back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TapSpec:
        """Undo :meth:`to_dict`."""
        return cls(**data)


@dataclass(frozen=True)
class Overlay:
    """The module tree of one decoder family in vLLM.

    Attributes:
        architecture: as the checkpoint's ``architectures`` names it.
        embed, block, attn, mlp, norm: dot paths, with ``{i}`` for the block's index.
        embed_factor: dot path of what the model multiplies the embedding module's output by; empty: it does not.
        norm_plus_one: the final norm multiplies by 1 + its weight.
        norm_bias: the final norm adds a bias after its weight.
    """

    architecture: str
    embed: str = "model.embed_tokens"
    block: str = "model.layers.{i}"
    attn: str = "model.layers.{i}.self_attn"
    mlp: str = "model.layers.{i}.mlp"
    norm: str = "model.norm"
    embed_factor: str = ""
    norm_plus_one: bool = False
    norm_bias: bool = False

    def emission(self, template: str) -> dict[str, Any]:
        """How a point's module emits its value: fields of :class:`TapSpec`."""
        if template == points.EMBED:
            return {"factor": self.embed_factor}
        if template == points.FINAL_NORM:
            return {
                "divisor": f"{self.norm}.weight",
                "plus_one": self.norm_plus_one,
                "offset": f"{self.norm}.bias" if self.norm_bias else "",
            }
        return {"sums": template == points.BLOCK_OUT}

    def taps(self, hf_config: Any) -> list[TapSpec]:
        """Every fireable point of a model, in forward order."""
        width = int(hf_config.hidden_size)
        paths = {
            points.EMBED: self.embed,
            points.ATTN_OUT: self.attn,
            points.MLP_OUT: self.mlp,
            points.BLOCK_OUT: self.block,
            points.FINAL_NORM: self.norm,
        }
        specs = []
        for name in points.all_points(int(hf_config.num_hidden_layers)):
            point = points.HookPoint.parse(name)
            path = paths[point.template].format(i=point.block)
            specs.append(TapSpec(name, path, width, **self.emission(point.template)))
        return specs

    def capture_specs(self, hf_config: Any) -> dict[str, tuple[str, int]]:
        """Hook name → (dot path, width), in forward order."""
        return {tap.name: (tap.path, tap.width) for tap in self.taps(hf_config)}

    def nonfiring_hooks(self) -> dict[str, str]:
        """Templates (with ``{i}``) of the points that are known but cannot fire, with the reason."""
        return dict(points.NONFIREABLE_TEMPLATES)


#: Families whose decoder layer is Llama's in vLLM 0.30 to 0.32: pre-norm, fused residual, RMSNorm with plain weight.
_LLAMA_LIKE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
_OTHERS = (
    # Embeddings are scaled by √width outside embed_tokens, by a buffer at the engine's dtype. The branches' own norms
    # come after attn and mlp, inside the layer.
    Overlay("Gemma2ForCausalLM", embed_factor="model.normalizer", norm_plus_one=True),
    # The branches are scaled in the layer, after attn and mlp.
    Overlay("GraniteForCausalLM", embed_factor="model.config.embedding_multiplier"),
    # Attention and MLP read one LayerNorm's output.
    Overlay(
        "GPTJForCausalLM",
        embed="transformer.wte",
        block="transformer.h.{i}",
        attn="transformer.h.{i}.attn",
        mlp="transformer.h.{i}.mlp",
        norm="transformer.ln_f",
        norm_bias=True,
    ),
)
OVERLAYS = {overlay.architecture: overlay for overlay in (*map(Overlay, _LLAMA_LIKE), *_OTHERS)}


def known_architectures() -> list[str]:
    """Architectures that have an overlay."""
    return sorted(OVERLAYS)


def get_overlay(architecture: str) -> Overlay:
    """The overlay of an architecture.

    Raises:
        UsageError: there is none, with those there are.
    """
    if architecture in OVERLAYS:
        return OVERLAYS[architecture]
    near = difflib.get_close_matches(architecture, OVERLAYS, n=1)
    hint = f" (nearest: {near[0]})" if near else ""
    msg = (
        f"architecture {architecture!r} has no decoder overlay{hint}: its module tree is not known, so nothing can be "
        f"captured. There are overlays for {', '.join(known_architectures())}; add one in harness/vllm/overlays"
    )
    raise UsageError(msg)
