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
"""

from __future__ import annotations

import math

from harness.errors import UsageError

__all__ = ["ROUNDOFFS", "SIGNIFICAND_BITS", "floor", "full_name", "unit_roundoff"]

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
