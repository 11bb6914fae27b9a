"""Memory of this process as the kernel counts it, and of the device as its allocator does."""

from __future__ import annotations

import re
from pathlib import Path

from harness.errors import UsageError

__all__ = ["measure_memory", "reset_peak"]

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
#: What the kernel takes for "forget the largest resident set there was" (proc(5)).
_FORGET_PEAK = "5"


def reset_peak() -> None:
    """Let the peak start from what is held now.

    Raises:
        UsageError: this system keeps no such count.
    """
    import torch

    try:
        _CLEAR.write_text(_FORGET_PEAK, encoding="ascii")
    except OSError as error:
        msg = f"the peak of resident memory cannot be reset here ({error.strerror or error}); it needs Linux' /proc"
        raise UsageError(msg) from error
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def measure_memory() -> dict[str, int]:
    """Bytes: ``resident`` now, its ``peak`` since :func:`reset_peak`, and on CUDA ``allocated`` and ``allocated_peak``.

    Raises:
        UsageError: this system has no such count.
    """
    import torch

    try:
        text = _STATUS.read_text(encoding="ascii")
    except OSError as error:
        msg = f"resident memory cannot be read here ({error.strerror or error}); it needs Linux' /proc"
        raise UsageError(msg) from error
    kib = {
        name: int(number) for name, number in re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB$", text, re.MULTILINE)
    }
    found = {"resident": kib["VmRSS"] << 10, "peak": kib["VmHWM"] << 10}
    if torch.cuda.is_available():
        found |= {
            "allocated": torch.cuda.memory_allocated(),
            "allocated_peak": torch.cuda.max_memory_allocated(),
        }
    return found
