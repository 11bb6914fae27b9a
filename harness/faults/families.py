"""Workers and models that follow another family's conventions (see ``docs/faults.md``)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from harness.points import EMBED, FINAL_NORM, HEAD_Q, ROT_Q, HookPoint
from harness.vllm import internals
from harness.vllm.worker import CaptureWorker

if TYPE_CHECKING:
    from harness.vllm.overlays import TapSpec
    from harness.vllm.spec import HarnessSpec
    from harness.vllm.taps import TapSet

__all__ = [
    "EmbeddingUnscaled",
    "KvHeadMisreplicated",
    "OtherExpert",
    "ParallelAsSequential",
    "PlainAsFused",
    "PlusOneMissing",
    "PostNormIgnored",
    "RotarySwapped",
    "WindowForgotten",
]


class _OtherTaps(CaptureWorker):
    """Installs taps that are described wrongly."""

    def described(self, tap: TapSpec, taps: dict[str, TapSpec]) -> TapSpec:
        """What this fault makes of one of them; ``taps`` are all, by name."""
        raise NotImplementedError

    def install(self, spec: HarnessSpec) -> TapSet:
        """Install what :meth:`described` says."""
        taps = {tap.name: tap for tap in spec.taps}
        wrong = tuple(self.described(tap, taps) for tap in spec.taps)
        return super().install(dataclasses.replace(spec, taps=wrong))


class PlusOneMissing(_OtherTaps):
    """Gemma's final norm is divided by its weight and not by 1 + weight."""

    def described(self, tap: TapSpec, taps: dict[str, TapSpec]) -> TapSpec:
        """As Llama has it."""
        del taps
        return dataclasses.replace(tap, plus_one=False) if tap.name == FINAL_NORM else tap


class EmbeddingUnscaled(_OtherTaps):
    """Gemma's embedding is taken as the module returns it, without √width."""

    def described(self, tap: TapSpec, taps: dict[str, TapSpec]) -> TapSpec:
        """As Llama has it."""
        del taps
        return dataclasses.replace(tap, factor="") if tap.name == EMBED else tap


class PlainAsFused(_OtherTaps):
    """A finished residual stream is taken for one half of it, and what came in is added once more."""

    def described(self, tap: TapSpec, taps: dict[str, TapSpec]) -> TapSpec:
        """As Llama has it."""
        del taps
        is_block = HookPoint.parse(tap.name).template == "blocks.{i}.hook_out"
        return dataclasses.replace(tap, sums=True) if is_block else tap


class RotarySwapped(_OtherTaps):
    """Queries from before the rotary embedding are served as those from after it, and the other way round."""

    def described(self, tap: TapSpec, taps: dict[str, TapSpec]) -> TapSpec:
        """Each at the other's place."""
        point = HookPoint.parse(tap.name)
        other = {HEAD_Q: ROT_Q, ROT_Q: HEAD_Q}.get(point.template)
        return tap if other is None else dataclasses.replace(taps[other.format(i=point.block)], name=tap.name)


class WindowForgotten(CaptureWorker):
    """Patterns are rebuilt as if every query saw all that came before it."""

    def tl_get_attention(self, path: str) -> dict[str, Any] | None:
        """Without the window."""
        said = super().tl_get_attention(path)
        return None if said is None else {**said, "window": None}


class _OtherModel(CaptureWorker):
    """Runs a model that was changed after its weights were loaded."""

    def changed(self, model: Any) -> None:
        """Change it."""
        raise NotImplementedError

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load and install, then change."""
        super().load_model(*args, **kwargs)
        self.changed(internals.model_of(self))


class ParallelAsSequential(_OtherModel):
    """The second block gives its MLP what attention has led to, though both should read the same."""

    def changed(self, model: Any) -> None:
        """GPT-NeoX has a switch for it."""
        model.model.layers[1].use_parallel_residual = False


class PostNormIgnored(_OtherModel):
    """The norm between attention and the residual stream of the second block does nothing."""

    def changed(self, model: Any) -> None:
        """OLMo 2 has one."""
        model.model.layers[1].post_attention_layernorm = torch.nn.Identity()


class KvHeadMisreplicated(_OtherModel):
    """The second rank's copy of the one key-value head has its channels in another order."""

    def changed(self, model: Any) -> None:
        """Roll the keys of the second block as they leave their projection, whose weight is packed by now."""
        if internals.place_of(self)[1] != 1:
            return
        attention = model.model.layers[1].self_attn
        keys = slice(attention.q_size, attention.q_size + attention.kv_size)

        def roll(_module: Any, _args: Any, output: Any) -> Any:
            rows = output[0].clone()
            rows[:, keys] = rows[:, keys].roll(1, dims=1)
            return (rows, *output[1:])

        attention.qkv_proj.register_forward_hook(roll, prepend=True)


class OtherExpert(_OtherModel):
    """In the second block, the fourth token of each step goes to the expert it likes least."""

    def changed(self, model: Any) -> None:
        """Exchange what the router gives the best and the worst."""

        def exchange(_module: Any, _args: Any, output: Any) -> Any:
            logits = output[0].clone()
            best, worst = logits[3:4].argmax(dim=1), logits[3:4].argmin(dim=1)
            logits[3:4, best], logits[3:4, worst] = output[0][3:4, worst], output[0][3:4, best]
            return (logits, *output[1:])

        block = model.model.layers[1]
        mixture = getattr(block, "block_sparse_moe", None) or block.mlp
        mixture.gate.register_forward_hook(exchange)
