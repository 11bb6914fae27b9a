"""Capture workers with one mistake each, of kinds that real projects have shipped (see ``docs/faults.md``).

Chosen by ``worker_cls``; the suites must turn red on every one of them and say what it looks like.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import torch

from harness import points
from harness.vllm.lending import Lent, lend
from harness.vllm.spec import HarnessSpec
from harness.vllm.worker import CaptureWorker

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from harness.vllm.accumulator import StepRows
    from harness.vllm.overlays import TapSpec
    from harness.vllm.taps import TapSet

__all__ = [
    "AnotherRequestsRows",
    "DecodeOverwritesPrefill",
    "LateHooks",
    "LayerOffByOne",
    "LoanReused",
    "PostWeightNorm",
    "ResidualHalfDropped",
    "RowsOffByOne",
    "SpecsInsideKey",
    "SpecsOutsideKey",
    "StaleBuffer",
    "ThreadsOutsideKey",
    "Tires",
    "WaitingOverwritten",
    "ZerosServed",
]


#: Bytes that hold any call of the tests.
LOAN = 64 << 20


class _WrongSpec(CaptureWorker):
    """Installs taps after changing their specs."""

    def respec(self, taps: Sequence[TapSpec]) -> Iterator[TapSpec]:
        """The specs as this fault gets them wrong."""
        raise NotImplementedError

    def install(self, spec: HarnessSpec) -> TapSet:
        """Install the wrong specs."""
        return super().install(HarnessSpec(tuple(self.respec(spec.taps))))


class ResidualHalfDropped(_WrongSpec):
    """Takes a decoder layer's first output for the residual stream (nnsight 337, vLLM-Hook 11)."""

    def respec(self, taps: Sequence[TapSpec]) -> Iterator[TapSpec]:
        """No sums."""
        return (dataclasses.replace(tap, sums=False) for tap in taps)


class PostWeightNorm(_WrongSpec):
    """Serves the final norm after its weight as if it were before it (vLLM 3653's family)."""

    def respec(self, taps: Sequence[TapSpec]) -> Iterator[TapSpec]:
        """No divisor."""
        return (dataclasses.replace(tap, divisor="") for tap in taps)


class LayerOffByOne(_WrongSpec):
    """Every block's tap sits on the next block (the last one's on the first)."""

    def respec(self, taps: Sequence[TapSpec]) -> Iterator[TapSpec]:
        """Rotate the paths of the block outputs."""
        blocks = [tap for tap in taps if points.HookPoint.parse(tap.name).template == points.BLOCK_OUT]
        following = {
            tap.name: after.path for tap, after in zip(blocks, [*blocks[1:], blocks[0]], strict=True)
        }
        return (dataclasses.replace(tap, path=following.get(tap.name, tap.path)) for tap in taps)


class RowsOffByOne(CaptureWorker):
    """Rows of a step are read one place too early."""

    def take_rows(self, total: int, views: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """Roll the step by one row."""
        return {name: rows.roll(1, dims=0) for name, rows in super().take_rows(total, views).items()}


class AnotherRequestsRows(CaptureWorker):
    """Takes the batch to be in the opposite order (speculators 279, sglang 4997)."""

    def label_shares(self, shares: Sequence[StepRows]) -> Sequence[StepRows]:
        """Hand the rows out from the other end."""
        row, wrong = 0, []
        for share in reversed(shares):
            wrong.append(dataclasses.replace(share, row=row))
            row += share.count
        return wrong


class StaleBuffer(CaptureWorker):
    """From the second call on, serves what the call before left in the step buffers (vLLM 42245)."""

    _previous: dict[str, torch.Tensor]
    _latest: dict[str, torch.Tensor]

    def harness_init(self, taps: TapSet, spec: HarnessSpec) -> None:
        """Start with no call before."""
        super().harness_init(taps, spec)
        self._previous, self._latest = {}, {}

    def tl_reset_capture_flags(self, names: list[str] | None = None) -> None:
        """A new call begins: what was latest is now the call before."""
        super().tl_reset_capture_flags(names)
        self._previous, self._latest = self._latest, {}

    def take_rows(self, total: int, views: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """Overlay this step's rows with the previous call's."""
        taken = super().take_rows(total, views)
        for name, rows in taken.items():
            self._latest[name] = rows.clone()
            before = self._previous.get(name)
            if before is not None:
                n = min(total, before.shape[0])
                rows[:n] = before[:n]
        return taken


class DecodeOverwritesPrefill(CaptureWorker):
    """Decode steps write their rows over the prompt's first ones (kaleidoscope 84)."""

    def read_rows(self, request: str, name: str, n_rows: int | None) -> torch.Tensor:
        """Put each single-row step after the first into the rows from 0 on."""
        rows = super().read_rows(request, name, n_rows)
        decoded = [share.start for _, share in self._accumulator.shares[request][1:] if share.count == 1]
        for target, source in enumerate(decoded):
            rows[target] = rows[source].clone()
        return rows


class LoanReused(CaptureWorker):
    """Memory that was lent is filled again, under the rows that the caller still holds."""

    _loan: Lent | None = None

    def tl_read_blocks(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, tuple[int, int, int] | None]:
        """Move what is lent to where the call before was lent."""
        seen, blocks, address = super().tl_read_blocks(*args, **kwargs)
        if self._lent is None:
            return seen, blocks, address
        self._loan = self._loan or lend(LOAN)
        os.pwrite(self._loan.descriptor, os.pread(self._lent.descriptor, self._lent.size, 0), 0)
        return seen, blocks, self._loan.address


class Tires(CaptureWorker):
    """From the thirtieth capturing call on, one block's values are off in their last bit."""

    _calls = 0

    def tl_reset_capture_flags(self, names: list[str] | None = None) -> None:
        """Count the calls."""
        super().tl_reset_capture_flags(names)
        self._calls += 1

    def take_rows(self, total: int, views: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """The next number up."""
        taken = super().take_rows(total, views)
        rows = taken.get("blocks.1.hook_out")
        if self._calls >= 30 and rows is not None:
            taken["blocks.1.hook_out"] = torch.nextafter(rows, torch.full_like(rows, torch.inf))
        return taken


class WaitingOverwritten(CaptureWorker):
    """A small step's rows are put over those that still wait in the step buffers."""

    def install(self, spec: HarnessSpec) -> TapSet:
        """Install, then let every step begin in the first row."""
        installed = super().install(spec)
        opened = installed.open_step
        vars(installed)["open_step"] = lambda n_tokens, _first=0: opened(n_tokens)
        return installed


class ZerosServed(CaptureWorker):
    """Serves buffers nobody filled (vLLM 46301)."""

    def take_rows(self, total: int, views: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """All zeros."""
        return {name: torch.zeros_like(rows) for name, rows in super().take_rows(total, views).items()}


class LateHooks(CaptureWorker):
    """Installs after the engine has compiled and warmed up: the graph never learns of the hooks (pytorch 117758)."""

    _late: HarnessSpec | None = None

    def harness_spec(self) -> HarnessSpec | None:
        """Pretend while loading that nothing was asked for."""
        return None if self._late is None else super().harness_spec()

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        """Warm up, then install."""
        from harness.vllm import internals

        result = super().compile_or_warm_up_model(*args, **kwargs)
        self._late = HarnessSpec.from_config(self.vllm_config.additional_config)
        if self._late is not None:
            self.harness_init(self.install(self._late), self._late)
            internals.instrument_runner(self, self)
        return result


class SpecsOutsideKey(CaptureWorker):
    """Gets its taps by a side channel that vLLM's compile-cache key does not see (vLLM 53366, 28759).

    Together with :func:`force_caching_backend` it shows what the design avoids: a warm cache serves a graph traced for
    other taps, and the ones it lacks stay silent.
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        force_caching_backend(vllm_config)
        self._side_channel = HarnessSpec.from_config(vllm_config.additional_config)
        vllm_config.additional_config = {}
        super().__init__(vllm_config, *args, **kwargs)

    def harness_spec(self) -> HarnessSpec | None:
        """The taps as they came, out of the key's sight."""
        return self._side_channel


class ThreadsOutsideKey(CaptureWorker):
    """Compiles for as many threads as there are, which inductor's cache key does not see where vLLM is on CPU."""

    def prepare_compiler(self) -> None:
        """As vLLM has it."""


class SpecsInsideKey(CaptureWorker):
    """The control: the same compile cache, with the taps where they belong."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        force_caching_backend(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)


def force_caching_backend(vllm_config: Any) -> None:
    """Make the CPU platform compile as CUDA does: through vLLM's own backend, whose graphs are cached under its key.

    On CPU vLLM traces afresh at every boot, so a stale graph could not be shown there. The one pass that names
    CUDA-only operators is put out of action.
    """
    from vllm.compilation.passes.utility import fix_functionalization
    from vllm.config import CompilationMode

    compilation = vllm_config.compilation_config
    compilation.mode = CompilationMode.VLLM_COMPILE
    compilation.backend = "inductor"
    compilation.compile_sizes = []

    def nothing(self: Any, graph: Any) -> None:
        del self, graph

    fix_functionalization.FixFunctionalizationPass.__call__ = nothing
