"""The errors a person meets, sorted by whose move is next: the caller's, the engine's, or ours."""

from __future__ import annotations

__all__ = [
    "CaptureError",
    "EngineError",
    "HarnessError",
    "UndeclaredError",
    "UnsupportedError",
    "UsageError",
]


class HarnessError(Exception):
    """Base of every error this package raises on purpose."""


class UsageError(HarnessError, ValueError):
    """The caller asked for something that cannot be had: the message names it, says why, and the way out.

    The command and the pytest plugin turn it into exit code 2, before anything expensive starts.
    """


class UnsupportedError(UsageError, NotImplementedError):
    """The caller asked for something that makes sense and is not built; the message says what to use instead."""


class UndeclaredError(UnsupportedError):
    """A backend was to boot with a mode or with ranks that it does not declare: nothing that could be judged."""


class EngineError(HarnessError, RuntimeError):
    """An engine failed to boot, died, or did not answer in time; its log's last lines are in the message."""


class CaptureError(HarnessError, RuntimeError):
    """Captured rows are missing, doubled, or belong to nobody. Never papered over with zeros."""
