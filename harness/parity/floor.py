"""What a dtype alone can cost: the noise floor below which an error is never held against an engine.

``floor(dtype, depth) = ROUNDOFFS · u · √(depth + 1)``, where ``u`` is the dtype's unit roundoff (half a unit in the
last place of 1.0) and ``depth`` the number of blocks whose rounding the value carries.

Where it comes from. Rounding errors that are not conspiring add like a random walk: n of them cost about √n·u, not
n·u (Wilkinson's rule of thumb; proved under weak assumptions by Higham and Mary, "A New Approach to Probabilistic
Rounding Error Analysis", SIAM J. Sci. Comput. 41, 2019). Rounding one tensor costs 0.4·u in the root mean square, and a
block stores its running values about six times, so one block costs about √6 · 0.4·u ≈ u: ``ROUNDOFFS = 1``. That is
also the smallest whole number that lets a single flip of the last place pass at k = 3 (one ulp is at most 2·u of the
value), which matters where one massive channel decides a row.

Measured (SmolLM2-135M, 30 blocks, 305 rows of English, Hugging Face on a CPU): the reference's own aggregate error is
0.5 to 2.4 floors at bf16 and fp16 and 2 to 14 floors at fp32 (whose products of a thousand terms cost more than storing
the result). So the floor decides only where the reference is better than its dtype promises: in embeddings, shallow
hooks, and rows where it was lucky.

A row whose residual stream was once much larger than it is now carries the error of that time: off by ``e · M`` at norm
M, it is off by ``e · M / m`` of what is left after the large part has cancelled to norm m (Higham, "Accuracy and
Stability of Numerical Algorithms", section 1.7). :func:`carried` is that M / m. In SmolLM2 the first row is 2.7e4 from
block 11 on and shrinks 4.6 times over the last two blocks: an engine whose error is 1.1e-6 before, well inside the
noise, has 7.6e-6 after, through no fault of those blocks.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import torch

from harness.errors import UsageError
from harness.points import BLOCK_OUT

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ROUNDOFFS", "SIGNIFICAND_BITS", "carried", "floor", "full_name", "unit_roundoff"]

_BLOCK_OUT = re.compile(re.escape(BLOCK_OUT).replace(r"\{i\}", r"\d+"))

#: Unit roundoffs that one block costs. The one constant to calibrate.
ROUNDOFFS = 1.0

#: Bits of the significand, the implicit one included, by torch's name of the dtype.
SIGNIFICAND_BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
_SHORT = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def full_name(dtype: str) -> str:
    """Torch's name of a dtype given as ``float32``, ``torch.float32`` or ``fp32``.

    Raises:
        UsageError: none of the four floating dtypes an engine may run at.
    """
    name = dtype.removeprefix("torch.")
    name = _SHORT.get(name, name)
    if name not in SIGNIFICAND_BITS:
        msg = f"dtype {dtype!r} has no noise floor; known are {', '.join(SIGNIFICAND_BITS)} and {', '.join(_SHORT)}"
        raise UsageError(msg)
    return name


def unit_roundoff(dtype: str) -> float:
    """Largest relative error of rounding to nearest: 2^-8 for bf16, 2^-24 for fp32."""
    return math.ldexp(1.0, -SIGNIFICAND_BITS[full_name(dtype)])


def floor(dtype: str, depth: int) -> float:
    """Relative error that ``dtype`` alone may cost after ``depth`` blocks; always above zero.

    Raises:
        UsageError: an unknown dtype.
    """
    return ROUNDOFFS * unit_roundoff(dtype) * math.sqrt(depth + 1)


def carried(
    norms: Mapping[str, torch.Tensor], kept: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """How many times larger each row's residual stream has been than it is, at each hook: (N,), from 1 up.

    A branch (attention, MLP) works on the stream as the block before left it, the final norm on the last block's.
    Only the block outputs among ``norms`` are known, so a capture that lacks them gets ones.

    Args:
        norms: hook → (N,) row norms of the truth, in forward order.
        kept: block output, or a block's input → (N,) factor by which an edit there multiplied each row, 0 where it was
            set: so much of the earlier error is left as well.
    """
    factors: dict[str, torch.Tensor] = {}
    largest: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    for name, here in norms.items():
        edited = kept is not None and name in kept
        if _BLOCK_OUT.fullmatch(name) or (edited and largest is not None):
            if largest is not None and kept is not None and edited:
                largest = largest * kept[name].abs()
            largest = here if largest is None else torch.maximum(largest, here)
            factor = torch.where(here > 0, largest / here, torch.ones_like(here))
        factors[name] = torch.ones_like(here) if factor is None else factor
    return factors
