"""Taps: forward hooks whose whole state is tensors registered on the hooked module.

Why buffers on the module: ``torch.compile`` takes them as graph inputs bound by name, so a graph served from the
compile cache writes into this engine's buffers. A hook that closes over tensors binds them by position and goes dead.
The hook itself only copies rows; which row belongs to whom is decided on the host, before and after each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from harness.vllm.overlays import TapSpec

__all__ = ["DIVISOR_EPSILON", "Tap", "TapSet", "canonical", "emitted_rows", "install_taps"]

#: A canonical value is the emitted one divided by a weight; entries of the weight below this are left as they are.
DIVISOR_EPSILON = 1e-6

_ROWS, _DESTINATION, _FIRES = "_tap_rows", "_tap_destination", "_tap_fires"


def emitted_rows(output: Any) -> torch.Tensor:
    """The value a module's output stands for, as rows (n_tokens, width).

    A decoder layer with a fused residual returns two tensors of one shape whose sum is the residual stream; a final
    norm returns (normalised, residual) where only the first is its own. The two look alike, so the norm's tap is told
    apart by its spec (``TapSpec.sums``).
    """
    value = output[0] if isinstance(output, tuple) else output
    rows: torch.Tensor = value.reshape(-1, value.shape[-1])
    return rows


def _summed_rows(output: Any) -> torch.Tensor:
    if isinstance(output, tuple) and len(output) > 1 and isinstance(output[1], torch.Tensor):
        return emitted_rows(output[0]) + emitted_rows(output[1])
    return emitted_rows(output)


def _capture_hook(module: nn.Module, _args: Any, output: Any) -> None:
    rows = _summed_rows(output) if module._tap_sums else emitted_rows(output)
    destination = getattr(module, _DESTINATION)[: rows.shape[0]]
    getattr(module, _ROWS).index_copy_(0, destination, rows)
    getattr(module, _FIRES).add_(1)


@dataclass
class Tap:
    """One installed tap.

    Attributes:
        spec: what it captures.
        module: the hooked module.
        rows: (max_tokens + 1, width) at the module's dtype; the last row is where unwanted rows go.
        fires: int64 scalar, forwards this hook took part in, counted inside the graph.
        divisor: (width,) or None, see :class:`~harness.vllm.overlays.TapSpec`.
    """

    spec: TapSpec
    module: nn.Module
    rows: torch.Tensor
    fires: torch.Tensor
    divisor: torch.Tensor | None
    handle: Any

    def remove(self) -> None:
        """Take the hook and its buffers off the module."""
        self.handle.remove()
        for name in (_ROWS, _DESTINATION, _FIRES):
            self.module._buffers.pop(name, None)
        if hasattr(self.module, "_tap_sums"):
            del self.module._tap_sums


def canonical(rows: torch.Tensor, divisor: torch.Tensor | None) -> torch.Tensor:
    """Turn emitted rows (n, width) into the canonical value: divide in fp32, round once to the rows' dtype."""
    if divisor is None:
        return rows
    weight = divisor.detach().to(device=rows.device, dtype=torch.promote_types(rows.dtype, torch.float32))
    safe = torch.where(weight.abs() < DIVISOR_EPSILON, torch.ones_like(weight), weight)
    return (rows.to(weight.dtype) / safe).to(rows.dtype)


class TapSet:
    """The taps of one rank and the row table they share.

    ``destination[r]`` says into which buffer row the r-th token of this step goes. Outside a captured step every token
    goes to the spare last row, so warm-up and dummy runs cannot overwrite anything.
    """

    def __init__(self, max_tokens: int, device: torch.device) -> None:
        self.max_tokens = max_tokens
        self.taps: dict[str, Tap] = {}
        self.absent: list[str] = []
        # Runners may pad a step past its budget up to a graph size; the padding's rows are spare ones.
        self.destination = torch.full((2 * max_tokens + 64,), max_tokens, dtype=torch.int64, device=device)

    def open_step(self, n_tokens: int) -> None:
        """Let the next forward's first ``n_tokens`` rows be kept."""
        self.destination[:n_tokens] = torch.arange(n_tokens, device=self.destination.device)

    def close_step(self) -> None:
        """Send every row to the spare one again."""
        self.destination.fill_(self.max_tokens)

    def fires(self, names: Iterable[str] | None = None) -> dict[str, int]:
        """Fires per hook since it was installed."""
        return {name: int(self.taps[name].fires) for name in (self.taps if names is None else names)}

    def remove(self) -> None:
        """Remove every tap; safe to call twice."""
        for tap in self.taps.values():
            tap.remove()
        self.taps.clear()


def install_taps(
    modules: Sequence[tuple[TapSpec, nn.Module | None, torch.Tensor | None]],
    *,
    max_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> TapSet:
    """Install a tap on each module that this rank holds; the others are listed in ``absent``.

    Args:
        modules: spec, its module (None where another rank holds it) and its divisor parameter.
        max_tokens: most tokens one step schedules.
        dtype: the model's activation dtype.
        device: where the model lives.
    """
    taps = TapSet(max_tokens, device)
    for spec, module, divisor in modules:
        if module is None:
            taps.absent.append(spec.name)
            continue
        rows = torch.zeros((max_tokens + 1, spec.width), dtype=dtype, device=device)
        fires = torch.zeros((), dtype=torch.int64, device=device)
        module.register_buffer(_ROWS, rows, persistent=False)
        module.register_buffer(_DESTINATION, taps.destination, persistent=False)
        module.register_buffer(_FIRES, fires, persistent=False)
        module._tap_sums = spec.sums  # type: ignore[assignment]
        handle = module.register_forward_hook(_capture_hook)
        taps.taps[spec.name] = Tap(spec, module, rows, fires, divisor, handle)
    return taps
