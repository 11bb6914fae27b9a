"""Overlays: hook point → dot path, width and convention; what one family of decoders needs to be captured."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from harness import points
from harness.errors import UsageError
from harness.geometry import Geometry

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Overlay", "Requirement", "TapSpec"]


@dataclass(frozen=True)
class TapSpec:
    """One tap as it travels to the workers: plain strings, numbers and bools, so that it can be hashed and sent.

    What the module emits and the canonical value belong together by ``canonical = (emitted - offset) / divisor ·
    factor``, see :class:`harness.conventions.Emission`. All three are dot paths from the model's root, so that what
    counts is what the engine holds; an empty one plays no part.

    Attributes:
        name: canonical hook name.
        path: dot path of the module from the model's root.
        width: length of one row, over all ranks.
        divisor: a parameter the module multiplies in.
        plus_one: the module multiplies by 1 + that parameter.
        offset: a parameter the module adds after that.
        factor: a number or one-element tensor that the model multiplies the module's output by.
        sums: where the module returns (delta, residual), the canonical value is their sum. Whether it returns a pair is
            seen in its output; that the second is to be added is said here, for some families return it for nothing.
        argument: what is read is not the module's output but what it is given under this name; empty: first of all.
        heads: a row is made of so many heads, and each tensor-parallel rank has its share of them; 0: it has all.
        before: the module emits several such parts side by side: heads of those that stand before this one.
    """

    name: str
    path: str
    width: int
    divisor: str = ""
    plus_one: bool = False
    offset: str = ""
    factor: str = ""
    sums: bool = False
    argument: str | None = None
    heads: int = 0
    before: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """A plain dict that :meth:`from_dict` reads back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TapSpec:
        """Undo :meth:`to_dict`."""
        return cls(**{**data, "before": tuple(data["before"])})

    def local_heads(self, heads: int, ranks: int) -> int:
        """How many of ``heads`` one of so many ranks has; where they are fewer, several ranks have the same one."""
        return max(1, heads // ranks)

    def columns(self, ranks: int) -> tuple[int, int]:
        """From where to where, in what the module emits on one of so many ranks, this point's numbers stand."""
        if not self.heads:
            return 0, self.width
        dim = self.width // self.heads
        begin = dim * sum(self.local_heads(heads, ranks) for heads in self.before)
        return begin, begin + dim * self.local_heads(self.heads, ranks)

    def share(self, rank: int, ranks: int) -> tuple[int, int]:
        """From where to where in a whole row one rank's numbers stand."""
        if not self.heads:
            return 0, self.width
        dim = self.width // self.heads
        first = rank * self.heads // ranks
        return dim * first, dim * (first + self.local_heads(self.heads, ranks))


@dataclass(frozen=True)
class Requirement:
    """What a family's config must say for its overlay, or for vLLM itself, to be right.

    Attributes:
        name: of the config's entry; one that the config lacks is not looked at.
        value: what it must be.
        reason: why nothing else will do.
    """

    name: str
    value: object
    reason: str


@dataclass(frozen=True)
class Overlay:
    """The module tree of one decoder family in vLLM.

    Attributes:
        architecture: as the checkpoint's ``architectures`` names it.
        embed, block, attn, mlp, norm: dot paths, with ``{i}`` for the block's index.
        embed_factor: dot path of what the model multiplies the embedding module's output by; empty: it does not.
        norm_plus_one: the final norm multiplies by 1 + its weight.
        norm_bias: the final norm adds a bias after its weight.
        fused: where a block returns two tensors, the residual stream is their sum. False: it is the first alone.
        partial: templates whose modules return one rank's part of a sum that is taken later: with tensor parallelism
            no module holds their value.
        qkv: dot path of the projection to queries, keys and values side by side.
        core: dot path of vLLM's own attention module, which is given what rotary made and returns the heads' outputs.
        mlp_in: dot path of the module that is given the MLP's input; empty: the MLP itself.
        ends_everywhere: vLLM makes the embedding and the final norm on every pipeline stage, used or not, and so their
            taps.
        lacks: template → why this family has no such point.
        requires: what the config must say.
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
    fused: bool = True
    partial: tuple[str, ...] = ()
    qkv: str = "model.layers.{i}.self_attn.qkv_proj"
    core: str = "model.layers.{i}.self_attn.attn"
    mlp_in: str = ""
    ends_everywhere: bool = False
    lacks: Mapping[str, str] = field(default_factory=dict)
    requires: tuple[Requirement, ...] = ()

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
        if template in (points.BLOCK_IN, points.BLOCK_OUT):
            return {"sums": self.fused}
        return {}

    def tap(self, name: str, geometry: Geometry) -> TapSpec:
        """The tap of one point of a model of these sizes."""
        point = points.HookPoint.parse(name)
        path, where = self._places(geometry)[point.template]
        return TapSpec(
            name,
            path.format(i=point.block),
            geometry.row_width(name),
            heads=geometry.heads_at(name) or 0,
            **where,
            **self.emission(point.template),
        )

    def _places(self, geometry: Geometry) -> dict[str, tuple[str, dict[str, Any]]]:
        """Template → dot path of its module, and where in that module's call the value is."""
        heads, kv_heads = geometry.heads, geometry.kv_heads
        return {
            points.EMBED: (self.embed, {}),
            points.BLOCK_IN: (self.block, {"argument": "hidden_states"}),
            points.ATTN_IN: (self.attn, {"argument": "hidden_states"}),
            points.HEAD_Q: (self.qkv, {}),
            points.HEAD_K: (self.qkv, {"before": (heads,)}),
            points.HEAD_V: (self.qkv, {"before": (heads, kv_heads)}),
            points.ROT_Q: (self.core, {"argument": "query"}),
            points.ROT_K: (self.core, {"argument": "key"}),
            points.HEAD_Z: (self.core, {}),
            points.ATTN_OUT: (self.attn, {}),
            points.MLP_IN: (self.mlp_in or self.mlp, {"argument": ""}),
            points.MLP_OUT: (self.mlp, {}),
            points.BLOCK_OUT: (self.block, {}),
            points.FINAL_NORM: (self.norm, {}),
        }

    def check(self, hf_config: Any) -> None:
        """Refuse a config for which the family's tree or vLLM's own code is not right.

        Raises:
            UsageError: naming the entry, its value and the reason.
        """
        for wanted in self.requires:
            given = getattr(hf_config, wanted.name, wanted.value)
            if given != wanted.value:
                msg = f"{self.architecture} with {wanted.name}={given!r} cannot be captured from vLLM: {wanted.reason}"
                raise UsageError(msg)

    def taps(
        self,
        hf_config: Any,
        tensor_parallel_size: int = 1,
        templates: Sequence[str] = points.FIREABLE_TEMPLATES,
    ) -> list[TapSpec]:
        """Every point of some templates that a model can serve, in forward order."""
        geometry, missing = Geometry.of(hf_config), self.nonfiring_hooks(tensor_parallel_size)
        served = [template for template in templates if template not in missing]
        return [self.tap(name, geometry) for name in points.every_point(geometry.layers, served)]

    def capture_specs(self, hf_config: Any, tensor_parallel_size: int = 1) -> dict[str, tuple[str, int]]:
        """Hook name → (dot path, width) of the points that are served unless told otherwise, in forward order."""
        return {tap.name: (tap.path, tap.width) for tap in self.taps(hf_config, tensor_parallel_size)}

    def refuse(self, taps: Sequence[TapSpec], tensor_parallel_size: int) -> None:
        """Refuse taps at points that this family cannot serve, wherever they come from.

        Raises:
            UsageError: naming the first, with the reason.
        """
        missing = self.nonfiring_hooks(tensor_parallel_size)
        for tap in taps:
            if reason := missing.get(points.HookPoint.parse(tap.name).template):
                msg = f"hook {tap.name!r} cannot be served by {self.architecture} here: {reason}"
                raise UsageError(msg)

    def nonfiring_hooks(self, tensor_parallel_size: int = 1) -> dict[str, str]:
        """Templates (with ``{i}``) of the points that are known but cannot fire, with the reason."""
        partial = self.partial if tensor_parallel_size > 1 else ()
        return {**points.NONFIREABLE_TEMPLATES, **self.lacks, **dict.fromkeys(partial, _PARTIAL)}


_PARTIAL = (
    "with tensor parallelism each rank has a part of it: attention and MLP are summed over the ranks together"
)
