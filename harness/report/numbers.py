"""Numbers as a reader meets them: three digits, never a tail of zeros, never a silent NaN."""

from __future__ import annotations

import math

__all__ = ["count", "duration", "ratio", "sci", "size", "ulps"]

_NEAR_ONE = 0.005
_TEN, _THOUSAND, _HUGE = 10, 1000, 1e5
_MINUTE_S = 60
_KIB = 1024


def sci(value: float) -> str:
    """``1.21e-7``; ``0``, ``NaN`` and ``∞`` as themselves."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "\N{MINUS SIGN}∞"
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def ratio(value: float) -> str:
    """A multiple: ``0.62``, ``12.4``, ``3.10e6``; more digits next to 1, where they decide."""
    if not math.isfinite(value) or value >= _HUGE:
        return sci(value)
    if 0 < value < _NEAR_ONE:
        return "<0.01"
    if 0 < abs(value - 1) < _NEAR_ONE:
        return f"{value:.4f}"
    return f"{value:.2f}" if value < _TEN else f"{value:.1f}" if value < _THOUSAND else f"{value:,.0f}"


def ulps(value: float) -> str:
    """Units in the last place: whole ones above ten."""
    if not math.isfinite(value) or value >= _HUGE:
        return sci(value)
    return f"{value:.1f}" if value < _TEN else f"{value:,.0f}"


def duration(seconds: float) -> str:
    """``0.42 s``, ``38 s``, ``6 min 12 s``; empty where nothing was measured."""
    if not math.isfinite(seconds):
        return ""
    if seconds < _TEN:
        return f"{seconds:.2f} s"
    if seconds < _MINUTE_S:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), _MINUTE_S)
    return f"{minutes} min {rest} s"


def size(n_bytes: float) -> str:
    """``712 B``, ``1.07 MiB``, ``2,048 GiB``: three digits or whole units."""
    value, unit = n_bytes, "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < _KIB or unit == "GiB":
            break
        value /= _KIB
    return f"{value:.3g} {unit}" if unit != "B" and abs(value) < _THOUSAND else f"{value:,.0f} {unit}"


def count(number: int, noun: str) -> str:
    """``1 case``, ``1,234 cases``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
