"""The HTML report: one self-contained file, built from the records of a run.

May import the store; knows no backend and no engine.
"""

from __future__ import annotations

from harness.report.build import build_report

__all__ = ["build_report"]
