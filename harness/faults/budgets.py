"""Workers that cost more than was promised (see ``docs/faults.md``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from harness.vllm import sites
from harness.vllm.worker import CaptureWorker

if TYPE_CHECKING:
    from torch import nn

    from harness.vllm.spec import HarnessSpec
    from harness.vllm.taps import TapSet

__all__ = ["Hungry", "Leaky", "Slow"]


class Hungry(CaptureWorker):
    """Step buffers are twice as long as a step can be."""

    def install(self, spec: HarnessSpec) -> TapSet:
        """Install, then lengthen each buffer."""
        installed = super().install(spec)
        for tap in installed.taps.values():
            tap.rows = torch.cat([tap.rows, tap.rows])
            tap.module.register_buffer(tap.site.name("rows"), tap.rows, persistent=False)
        return installed


class Leaky(CaptureWorker):
    """What was captured is never let go."""

    _kept: list[torch.Tensor]

    def take_rows(self, name: str, total: int) -> torch.Tensor:
        """Hold on to a copy."""
        rows = super().take_rows(name, total)
        self._kept = [*getattr(self, "_kept", ()), rows.clone()]
        return rows


class Slow(CaptureWorker):
    """Each value is copied thirty times over."""

    @staticmethod
    def tap_hook(site: sites.Site, module: nn.Module, value: Any) -> Any:
        """Copy it again and again, then keep it as it should be."""
        _, rows = sites.whole_rows(site, value)
        for _ in range(30):
            rows = rows.clone()  # kept once: a hook that fires thirty times a forward is another fault
        return sites.tap_hook(site, module, value)
