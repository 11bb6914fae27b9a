"""What the suites found about one backend, for the people who maintain it.

May import the store, capabilities and points; ``overhead`` also the pool, ``suites`` starts pytest.
"""

from __future__ import annotations

from harness.audit.findings import Audit, Point, Suite, audit_of
from harness.audit.overhead import Overhead, measure_overhead
from harness.audit.suites import run_suites
from harness.audit.text import audit_text

__all__ = ["Audit", "Overhead", "Point", "Suite", "audit_of", "audit_text", "measure_overhead", "run_suites"]
