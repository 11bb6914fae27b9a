"""Ranks that go their own way, each in one manner that real projects have shipped (see ``docs/faults.md``)."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import TYPE_CHECKING, Any

import torch

from harness.vllm import internals
from harness.vllm.driver import VLLMDriver
from harness.vllm.logits import assemble_vocabulary
from harness.vllm.wire import decode_tensor
from harness.vllm.worker import CaptureWorker

if TYPE_CHECKING:
    from collections.abc import Collection

    from harness.interventions import Plan
    from harness.vllm.spec import HarnessSpec
    from harness.vllm.taps import TapSet

__all__ = [
    "CounterRanTwice",
    "EditOnOneRank",
    "HookBeforeAllReduce",
    "HookMissingOnOneRank",
    "RankDies",
    "RankHangs",
    "ReplicasDrift",
    "ShardsInWrongOrder",
    "StageBorderDropped",
    "StageBorderEarly",
    "StageBorderTwice",
]

#: The hook that is got wrong; in a model of four layers and two stages it is the last of the first stage.
BORDER = "blocks.1.hook_out"
BRANCH = "blocks.1.mlp.hook_out"


class _OnOne(CaptureWorker):
    """Goes wrong on one rank only."""

    def wrong_here(self) -> bool:
        """The second tensor-parallel rank."""
        return internals.place_of(self)[1] == 1


class HookMissingOnOneRank(_OnOne):
    """One rank installs one hook less."""

    def install(self, spec: HarnessSpec) -> TapSet:
        """Leave it out."""
        if self.wrong_here():
            spec = dataclasses.replace(spec, taps=tuple(tap for tap in spec.taps if tap.name != BRANCH))
        return super().install(spec)


class EditOnOneRank(_OnOne):
    """One rank does not get the edits."""

    def load_edits(self, plan: Plan) -> None:
        """Leave its tables empty."""
        if not self.wrong_here():
            super().load_edits(plan)


class ReplicasDrift(_OnOne):
    """One rank's values are off by a thousandth (nnsight 631's family)."""

    def take_rows(self, total: int, views: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """Add it."""
        taken = super().take_rows(total, views)
        if self.wrong_here() and BRANCH in taken:
            taken[BRANCH] = taken[BRANCH] + 1e-3
        return taken


class HookBeforeAllReduce(CaptureWorker):
    """A branch is read before the ranks' parts are summed."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Keep what the down projection gives before the sum."""
        self._partial: list[torch.Tensor] = []
        super().load_model(*args, **kwargs)
        layer = internals.resolve_dot_path(internals.model_of(self), "model.layers.1.mlp.down_proj")
        method: Any = layer.quant_method if layer is not None else None
        whole = method.apply

        def apply(*inner: Any, **options: Any) -> torch.Tensor:
            out: torch.Tensor = whole(*inner, **options)
            if inner[0] is layer:
                self._partial.append(out.clone())
            return out

        method.apply = apply

    def take_rows(self, total: int, views: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """Serve that."""
        taken = super().take_rows(total, views)
        if BRANCH in taken:
            taken[BRANCH] = torch.cat(self._partial)[-total:]
        self._partial.clear()
        return taken


class CounterRanTwice(_OnOne):
    """One rank counts a hook's forwards twice."""

    def tl_fires_since_armed(self) -> dict[str, int]:
        """Double it."""
        counts = super().tl_fires_since_armed()
        return {**counts, BRANCH: 2 * counts[BRANCH]} if self.wrong_here() else counts


class _AtBorder(CaptureWorker):
    """Installs the last hook of the first stage wrongly."""

    #: Stage that goes wrong, and where its tap sits; an empty path leaves it out.
    stage = 0
    path = ""

    def install(self, spec: HarnessSpec) -> TapSet:
        """Change that one tap."""
        if internals.place_of(self)[0] == self.stage:
            moved = (dataclasses.replace(t, path=self.path) if t.name == BORDER else t for t in spec.taps)
            spec = dataclasses.replace(spec, taps=tuple(moved))
        return super().install(spec)


class StageBorderTwice(_AtBorder):
    """The second stage serves the border hook too (vllm-lens 25's family)."""

    stage = 1
    path = "model.layers.2.input_layernorm"


class StageBorderDropped(_AtBorder):
    """No stage holds it (vLLM 51063's family)."""

    path = "model.layers.1.nowhere"


class StageBorderEarly(CaptureWorker):
    """It is read one layer early."""

    def take_rows(self, total: int, views: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """The layer before."""
        taken = super().take_rows(total, views)
        if BORDER in taken:
            taken[BORDER] = self._installed().take(["blocks.0.hook_out"], total)["blocks.0.hook_out"]
        return taken


class RankDies(_OnOne):
    """One rank's process ends in the middle of a forward."""

    def execute_model(self, scheduler_output: Any) -> Any:
        """Leave without a word, as after a segmentation fault, once captures are armed."""
        if self.wrong_here() and self._accumulator.armed:
            os._exit(1)
        return super().execute_model(scheduler_output)


class RankHangs(_OnOne):
    """One rank never comes back from a forward."""

    def execute_model(self, scheduler_output: Any) -> Any:
        """Sleep, once captures are armed."""
        while self.wrong_here() and self._accumulator.armed:
            time.sleep(1)
        return super().execute_model(scheduler_output)


class ShardsInWrongOrder(VLLMDriver):
    """Vocabulary shards are joined in the opposite order."""

    def get_param(self, name: str) -> torch.Tensor | None:
        """Swap the starts."""
        found = [
            one for one in internals.call_workers(self.llm, "tl_get_param", args=(name,)) if one is not None
        ]
        shards = [decode_tensor(one) for one in found if "start" in one]
        if not shards:
            return super().get_param(name)
        starts, at = [], 0
        for part in reversed(shards):
            starts.append((at, part))
            at += part.shape[0]
        return assemble_vocabulary(starts, self._vocab_size)
