"""Conventions about values that both backends follow, in one place so that they cannot drift apart.

Knows no backend. A *canonical* value is what a hook point's name promises; an *emitted* one is what the module that
computes it returns. They differ where a module multiplies its weight in before anything can be read.
"""

from __future__ import annotations

import torch

__all__ = ["MIN_DIVISOR", "divide_weight", "dtype_name", "multiply_weight", "safe_divisor"]

#: Weights smaller than this are not divided by: the quotient would be noise blown up.
MIN_DIVISOR = 1e-6


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def safe_divisor(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What rows at ``dtype`` are divided by: ``weight``, with 1 in place of its entries below :data:`MIN_DIVISOR`.

    Returns:
        Shape and device of ``weight``, at fp32 or, where ``dtype`` is wider, at ``dtype``; without gradient.
    """
    given = weight.detach()
    # Compared in fp64: fp32(1e-6) lies below 1e-6, so an fp32 comparison would decide otherwise than the fp64 truth's.
    small = given.double().abs() < MIN_DIVISOR
    divisor = given.to(torch.promote_types(dtype, torch.float32))
    return torch.where(small, torch.ones_like(divisor), divisor)


def divide_weight(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Emitted to canonical: ``rows / weight``, in fp32 or wider, rounded once to the rows' dtype.

    Args:
        rows: (…, width), any float dtype; the result has its shape, dtype and device.
        weight: (width,), on any device; channels below :data:`MIN_DIVISOR` stay as they are.
    """
    divisor = safe_divisor(weight.to(rows.device), rows.dtype)
    return (rows.to(divisor.dtype) / divisor).to(rows.dtype)


def multiply_weight(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Canonical to emitted, the inverse of :func:`divide_weight`: ``rows * weight``, by the same rules."""
    divisor = safe_divisor(weight.to(rows.device), rows.dtype)
    return (rows.to(divisor.dtype) * divisor).to(rows.dtype)
