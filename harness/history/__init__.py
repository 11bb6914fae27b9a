"""Runs beside each other: what became worse from one to the next, and how each check went over many.

Pure functions on :class:`harness.store.RunRecords`; may import :mod:`harness.store` only. :mod:`harness.report` makes
text and pages of what they return.
"""

from __future__ import annotations

from harness.history.compare import Comparison, compare_runs
from harness.history.pairing import ACROSS, Across
from harness.history.reading import read_records
from harness.history.trend import Trend, find_runs, trend_of

__all__ = [
    "ACROSS",
    "Across",
    "Comparison",
    "Trend",
    "compare_runs",
    "find_runs",
    "read_records",
    "trend_of",
]
