"""Exit statuses of the command."""

from __future__ import annotations

__all__ = ["BROKEN", "INCOMPLETE", "NOTHING_RAN", "NO_ENGINE", "OK", "USAGE"]

OK = 0
BROKEN = 1  #: a case failed: parity does not hold
USAGE = 2  #: the caller asked for something that cannot be had
NO_ENGINE = 3  #: `doctor` found something that keeps engines from booting
INCOMPLETE = 4  #: no case failed, but some were lost, not run, or could not be judged
NOTHING_RAN = 5  #: as pytest says "no tests collected"
