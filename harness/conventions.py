"""Conventions about values that both backends follow, in one place so that they cannot drift apart.

Knows no backend. A *canonical* value is what a hook point's name promises; an *emitted* one is what the module that
computes it returns. They differ where a module multiplies its weight in, or adds its bias, before anything can be read,
and where the model goes on to scale what the module returned. :class:`Emission` is how they belong together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["MIN_DIVISOR", "Emission", "dtype_name", "safe_divisor"]

#: Weights smaller than this are not divided by: the quotient would be noise blown up.
MIN_DIVISOR = 1e-6


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def safe_divisor(weight: torch.Tensor, *, plus_one: bool = False) -> torch.Tensor:
    """What rows are divided by: ``weight``, with 1 in place of its entries below :data:`MIN_DIVISOR`.

    Args:
        weight: any shape, float.
        plus_one: 1 + ``weight`` instead, and its entries are what is compared.

    Returns:
        Shape and device of ``weight``, at fp32 or, where it is wider, at its dtype (a module adds one at that precision
        too); without gradient.
    """
    given = weight.detach()
    one = 1.0 if plus_one else 0.0
    # Compared in fp64: fp32(1e-6) lies below 1e-6, so an fp32 comparison would decide otherwise than the fp64 truth's.
    small = (given.double() + one).abs() < MIN_DIVISOR
    divisor = given.to(torch.promote_types(given.dtype, torch.float32)) + one
    return torch.where(small, torch.ones_like(divisor), divisor)


@dataclass(frozen=True, eq=False)
class Emission:
    """How a hook point's value c lies in what its module returns, e: ``c = (e - offset) / divisor · factor``.

    As a module has it, ``e = c / factor · divisor + offset``. By default the two are one.

    Attributes:
        weight: (width,), the divisor: what the module multiplies in. Where it is below :data:`MIN_DIVISOR` the divisor
            is 1.
        plus_one: the divisor is 1 + ``weight``.
        offset: (width,), what the module adds after that.
        factor: what the model multiplies the module's output by, before anything else sees it.
    """

    weight: torch.Tensor | None = None
    plus_one: bool = False
    offset: torch.Tensor | None = None
    factor: float = 1.0

    @property
    def plain(self) -> bool:
        """Whether the module returns the value itself."""
        return self.weight is None and self.offset is None and self.factor == 1.0

    def canonical(self, rows: torch.Tensor) -> torch.Tensor:
        """Emitted to canonical, computed in fp32 or wider and rounded once to the rows' dtype.

        Args:
            rows: (…, width), any float dtype and device; the result has its shape, dtype and device.
        """
        if self.plain:
            return rows
        value = rows.to(torch.promote_types(rows.dtype, torch.float32))
        if self.offset is not None:
            value = value - self.offset.detach().to(value)
        if self.weight is not None:
            value = value / self._divisor(self.weight, value)
        if self.factor != 1.0:
            value = value * self.factor
        return value.to(rows.dtype)

    def emitted(self, rows: torch.Tensor) -> torch.Tensor:
        """Canonical to emitted, the inverse of :meth:`canonical` by the same rules."""
        if self.plain:
            return rows
        value = rows.to(torch.promote_types(rows.dtype, torch.float32))
        if self.factor != 1.0:
            value = value / self.factor
        if self.weight is not None:
            value = value * self._divisor(self.weight, value)
        if self.offset is not None:
            value = value + self.offset.detach().to(value)
        return value.to(rows.dtype)

    def bias(self, scale: float, bias: torch.Tensor) -> torch.Tensor:
        """What must be added to ``e · scale`` for the canonical value to become ``c · scale + bias``.

        That is ``bias / factor · divisor + offset · (1 - scale)``, fp32 and rounded once.

        Args:
            scale: factor on the canonical value.
            bias: () or (width,), what is added to it, on any device; the result is on its device.
        """
        if self.plain:
            return bias
        value = bias.double() / self.factor
        if self.weight is not None:
            value = value * self._divisor(self.weight, value)
        if self.offset is not None:
            value = value + self.offset.detach().to(value) * (1.0 - scale)
        return value.float()

    def read_back(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What a canonical value that was set reads back as from a module that emits at ``dtype``, bit for bit.

        Args:
            value: (…, width) fp32.
            dtype: what is emitted is rounded to it, and again what that is made into.
        """
        return self.canonical(self.bias(0.0, value).to(dtype))

    def _divisor(self, weight: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return safe_divisor(weight.to(like.device), plus_one=self.plus_one)
