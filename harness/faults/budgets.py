"""Workers that cost more than was promised (see ``docs/faults.md``)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from harness.vllm import sites
from harness.vllm.worker import CaptureWorker

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from torch import nn

    from harness.vllm.accumulator import StepRows
    from harness.vllm.spec import HarnessSpec
    from harness.vllm.taps import TapSet

__all__ = ["Hungry", "Leaky", "Slow", "SlowEdits", "SlowReader", "SlowSteps"]


#: Copies that serve nothing.
COPIES = 30


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

    def take_rows(self, total: int, views: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """Hold on to copies."""
        rows = super().take_rows(total, views)
        self._kept = [*getattr(self, "_kept", ()), *(one.clone() for one in rows.values())]
        return rows


class Slow(CaptureWorker):
    """Each value is copied thirty times over."""

    @staticmethod
    def tap_hook(site: sites.Site, module: nn.Module, value: Any) -> Any:
        """Copy it again and again, then keep it as it should be."""
        # Kept once: a hook that fires thirty times a forward is another fault.
        _copied(sites.whole_rows(site, value)[1])
        return sites.tap_hook(site, module, value)


class SlowEdits(CaptureWorker):
    """The same, in forwards that edit."""

    @staticmethod
    def tap_hook(site: sites.Site, module: nn.Module, value: Any) -> Any:
        """Copy it again and again if any row of the step is edited, here or elsewhere."""
        if getattr(module, sites.PROGRAM).any():
            _copied(sites.whole_rows(site, value)[1])
        return sites.tap_hook(site, module, value)


class SlowSteps(CaptureWorker):
    """The rows of a step are copied out thirty times before the next."""

    @contextlib.contextmanager
    def harness_step(self, shares: Sequence[StepRows]) -> Iterator[None]:
        """Copy them again and again."""
        with super().harness_step(shares):
            yield
            for _ in range(COPIES):
                self.take_rows(sum(share.count for share in shares))


class SlowReader(CaptureWorker):
    """What was captured is made a list of numbers before it is handed over, as vLLM's own RPC does with tensors."""

    def read_rows(self, request: str, name: str, n_rows: int | None) -> torch.Tensor:
        """There and back: every number is the same."""
        rows = super().read_rows(request, name, n_rows)
        return torch.tensor(rows.tolist(), dtype=rows.dtype)


def _copied(rows: torch.Tensor) -> torch.Tensor:
    for _ in range(COPIES):
        rows = rows.clone()
    return rows
