"""Capture workers that edit wrongly, each in one way that real projects have shipped (see ``docs/faults.md``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from harness.points import FINAL_NORM
from harness.vllm import sites
from harness.vllm.worker import CaptureWorker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from harness.interventions import Plan
    from harness.vllm.accumulator import StepRows

__all__ = [
    "EditAppliedTwice",
    "EditBeforeWeight",
    "EditCancelled",
    "EditLostAtDecode",
    "EditNotHandedOn",
    "EditNotReset",
    "EditOfDeltaOnly",
    "EditOnEveryRequest",
    "EditOnePositionLate",
    "EditOutsideCapture",
    "EditSkippedInLaterChunks",
    "OverflowLeft",
]


class EditAppliedTwice(CaptureWorker):
    """Each edit is applied to its own result once more."""

    def load_edits(self, plan: Plan) -> None:
        """``(x·s + b)·s + b``."""
        super().load_edits(plan)
        for tap in self._installed().taps.values():
            tap.bias.copy_(tap.bias * tap.scale.unsqueeze(1) + tap.bias)
            tap.scale.square_()


class EditOnEveryRequest(CaptureWorker):
    """The first edited request's programs are applied to all (vllm-lens 12's family)."""

    def program_rows(self, shares: Sequence[StepRows]) -> list[tuple[int, int, int]]:
        """Requests without edits get those of another."""
        ranges = next(iter(self._ranges.values()), ())
        self._ranges = {key: self._ranges.get(key, ranges) for key in (*self._ranges, *self._keys.values())}
        return super().program_rows(shares)


class EditOnePositionLate(CaptureWorker):
    """Positions are taken to count from one."""

    def program_rows(self, shares: Sequence[StepRows]) -> list[tuple[int, int, int]]:
        """Every range begins and ends one later."""
        kept = self._ranges
        self._ranges = {
            key: tuple((begin + 1, end + 1, program) for begin, end, program in ranges)
            for key, ranges in kept.items()
        }
        rows = super().program_rows(shares)
        self._ranges = kept
        return rows


class EditBeforeWeight(CaptureWorker):
    """What is meant for the normalised value is added to the one that the weight is in already (vLLM 3653's family)."""

    def load_edits(self, plan: Plan) -> None:
        """The final norm's bias without its weight."""
        super().load_edits(plan)
        tap = self._installed().taps[FINAL_NORM]
        for number, edits in enumerate(plan.programs, start=1):
            for edit in edits:
                if edit.hook == FINAL_NORM:
                    tap.bias[number] = edit.bias.expand(tap.spec.width)


class EditOutsideCapture(CaptureWorker):
    """The capture holds the value from before the edit."""

    @staticmethod
    def tap_hook(site: sites.Site, module: nn.Module, value: Any) -> Any:
        """Keep first, edit afterwards."""
        pair, rows = sites.whole_rows(site, value)
        sites.keep(site, module, rows)
        rows, changed = sites.edit(site, module, rows)
        return sites.emit(site, value, rows, changed, pair=pair)


class EditNotHandedOn(CaptureWorker):
    """The edited value is captured and not given back: a hook that changes a copy (vllm-lens 12's family)."""

    @staticmethod
    def tap_hook(site: sites.Site, module: nn.Module, value: Any) -> Any:
        """Edit and keep, and let the module's own output go on."""
        _, rows = sites.whole_rows(site, value)
        sites.keep(site, module, sites.edit(site, module, rows)[0])


class EditNotReset(CaptureWorker):
    """Edits stay until others replace them, and are found by a request's place in the batch (vLLM 42245's family)."""

    _order: list[str]
    _kept: list[tuple[tuple[int, int, int], ...]]

    def clear_edits(self) -> None:
        """Nothing is cleared."""

    def load_edits(self, plan: Plan) -> None:
        """Remember the programs by place."""
        super().load_edits(plan)
        self._kept = list(plan.ranges)

    def program_rows(self, shares: Sequence[StepRows]) -> list[tuple[int, int, int]]:
        """The n-th request of a call gets the n-th programs there ever were."""
        keys = [self._keys.get(share.request, share.request) for share in shares]
        self._ranges.update(zip(keys, getattr(self, "_kept", ()), strict=False))
        return super().program_rows(shares)


class EditLostAtDecode(CaptureWorker):
    """Only prompts are edited (SAE-Reasoning 3)."""

    def program_rows(self, shares: Sequence[StepRows]) -> list[tuple[int, int, int]]:
        """Steps of one token after the first are left out."""
        return super().program_rows([share for share in shares if share.start == 0 or share.count > 1])


class EditSkippedInLaterChunks(CaptureWorker):
    """Only the first chunk of a long prompt is edited (vLLM-Hook 22's family)."""

    def program_rows(self, shares: Sequence[StepRows]) -> list[tuple[int, int, int]]:
        """Chunks that continue a prompt are left out."""
        return super().program_rows([share for share in shares if share.start == 0 or share.count == 1])


class EditOfDeltaOnly(CaptureWorker):
    """An edit of the residual stream is applied to the layer's delta, and the residual is added to it (nnsight 337)."""

    @staticmethod
    def tap_hook(site: sites.Site, module: nn.Module, value: Any) -> Any:
        """Edit the first half of a fused pair."""
        pair, _ = sites.whole_rows(site, value)
        if not pair:
            return sites.tap_hook(site, module, value)
        delta, _ = sites.edit(site, module, sites.emitted_rows(value[0]))
        sites.keep(site, module, delta + sites.emitted_rows(value[1]))
        return (delta.reshape(value[0].shape), *value[1:])


class EditCancelled(CaptureWorker):
    """An edited residual stream is handed on as ``(edited - residual, residual)``: what bf16 loses never comes back."""

    @staticmethod
    def tap_hook(site: sites.Site, module: nn.Module, value: Any) -> Any:
        """Subtract now, let the next layer add."""
        pair, rows = sites.whole_rows(site, value)
        if not pair:
            return sites.tap_hook(site, module, value)
        edited, changed = sites.edit(site, module, rows)
        residual = sites.emitted_rows(value[1])
        delta = torch.where(changed, edited - residual, sites.emitted_rows(value[0]))
        sites.keep(site, module, delta + residual)
        return (delta.reshape(value[0].shape), *value[1:])


class OverflowLeft(CaptureWorker):
    """What a request that overflowed has left in the KV cache stays there."""

    def clear_blocks(self, scheduler_output: Any) -> None:
        """Leave it."""
