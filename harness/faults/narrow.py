"""Models that compute something else in few places: one channel, row, request, chunk, phase, rank or dtype alone.

What is wrong there goes on into every later block, as in a real engine; ``harness.trial`` plants the same kinds at
every size in what was captured. For eager engines: what is wrong where is decided anew in every step.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from harness.faults.families import _OtherModel
from harness.vllm import internals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from harness.vllm.accumulator import StepRows

__all__ = [
    "AttentionInInt4",
    "DriftsPerLayer",
    "MatmulInTf32",
    "OneChannel",
    "OneRanksShare",
    "OneRequestOf64",
    "OneRowOfEach",
    "OnlyLastChunk",
    "OnlyWhileDecoding",
]

#: The block that is got wrong where not all are.
BLOCK = 1
#: How much too large a wrong value is.
FACTOR = 1.5


class DriftsPerLayer(_OtherModel):
    """Every block gives its residual stream a ten-thousandth more than it should have."""

    def changed(self, model: Any) -> None:
        """A layer returns what is to be added to the stream, and the stream."""

        def grow(_module: Any, _args: Any, output: Any) -> Any:
            return tuple(part * (1 + 1e-4) for part in output)

        for layer in model.model.layers:
            layer.register_forward_hook(grow, prepend=True)


class _Branch(_OtherModel):
    """A branch of one block gives something else."""

    branch = "mlp"

    def wrong(self, rows: torch.Tensor) -> torch.Tensor:
        """What it gives, made of what it should, (rows of the step, width)."""
        raise NotImplementedError

    def changed(self, model: Any) -> None:
        """Before a tap sees it."""

        def change(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
            return self.wrong(output.clone())

        getattr(model.model.layers[BLOCK], self.branch).register_forward_hook(change, prepend=True)


class OneChannel(_Branch):
    """One channel of the second block's MLP is half as large again."""

    def wrong(self, rows: torch.Tensor) -> torch.Tensor:
        """The eighth."""
        rows[:, 7] *= FACTOR
        return rows


class MatmulInTf32(_Branch):
    """At fp32 alone, the second block's MLP has ten bits of mantissa (vLLM 19076, triton 1671)."""

    def wrong(self, rows: torch.Tensor) -> torch.Tensor:
        """Cut off the thirteen others."""
        return (rows.view(torch.int32) & ~0x1FFF).view(torch.float32) if rows.dtype == torch.float32 else rows


class AttentionInInt4(_Branch):
    """At bf16 alone, the second block's attention has been through four bits a number, one scale a row.

    Eight bits (e4m3) drown there: 0.028 of a row, where bf16 itself costs the reference 0.030.
    """

    branch = "self_attn"

    def wrong(self, rows: torch.Tensor) -> torch.Tensor:
        """There and back."""
        if rows.dtype != torch.bfloat16:
            return rows
        scale = rows.abs().amax(dim=-1, keepdim=True) / 7
        return (rows / scale).round() * scale


class OneRanksShare(_OtherModel):
    """The second rank's part of the second block's MLP is half as large again before the parts are summed.

    All ranks then hold the same wrong sum, so that no comparison of replicas can tell.
    """

    def changed(self, model: Any) -> None:
        """By what goes into its share of the down projection."""
        if internals.place_of(self)[1] == 1:
            down = model.model.layers[BLOCK].mlp.down_proj
            down.register_forward_pre_hook(lambda _, args: (args[0] * FACTOR, *args[1:]))


class _SomeRows(_Branch):
    """Some rows of a step are wrong in the second block's MLP."""

    _shares: Sequence[StepRows] = ()

    @contextlib.contextmanager
    def harness_step(self, shares: Sequence[StepRows]) -> Iterator[None]:
        """Remember whose rows the step holds."""
        self._shares = shares
        try:
            with super().harness_step(shares):
                yield
        finally:
            self._shares = ()

    def wrong(self, rows: torch.Tensor) -> torch.Tensor:
        """Those that are chosen are half as large again."""
        for share in self._shares:
            for row in self.chosen(share):
                rows[row] *= FACTOR
        return rows

    def chosen(self, share: StepRows) -> range:
        """Which rows of the step, of one request's share of it."""
        raise NotImplementedError


def _all(share: StepRows) -> range:
    return range(share.row, share.row + share.count)


class OneRowOfEach(_SomeRows):
    """The row at position 5 of every request."""

    def chosen(self, share: StepRows) -> range:
        """Where it is among these."""
        row = share.row + 5 - share.start
        return range(row, row + 1) if row in _all(share) else range(0)


class OneRequestOf64(_SomeRows):
    """The request that comes thirty-eighth in a call."""

    _order: dict[str, int]

    def tl_reset_capture_flags(self, names: list[str] | None = None) -> None:
        """A new call begins."""
        super().tl_reset_capture_flags(names)
        self._order = {}

    def chosen(self, share: StepRows) -> range:
        """All of its rows."""
        return _all(share) if self._order.setdefault(share.request, len(self._order)) == 37 else range(0)


class OnlyLastChunk(_SomeRows):
    """The last chunk of a prompt that takes several, unless it fills its step."""

    def chosen(self, share: StepRows) -> range:
        """A part that begins later than the prompt and leaves room in the step."""
        last = share.start > 0 and 1 < share.count < internals.step_budget(self)
        return _all(share) if last else range(0)


class OnlyWhileDecoding(_SomeRows):
    """Rows of decode steps."""

    def chosen(self, share: StepRows) -> range:
        """Those that come one by one."""
        return _all(share) if share.start > 0 and share.count == 1 else range(0)
