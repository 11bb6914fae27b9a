"""What the suites found about one backend, for the people who maintain it.

May import the store, capabilities and points; ``overhead`` also the pool, ``smallest`` the reference and the verdict,
``suites`` starts pytest.
"""

from __future__ import annotations

from harness.audit.findings import Audit, Point, Suite, audit_of
from harness.audit.minimal import minimal_script
from harness.audit.overhead import Overhead, measure_overhead
from harness.audit.smallest import Smallest, asked_of, find_smallest
from harness.audit.suites import run_suites
from harness.audit.text import audit_text

__all__ = [
    "Audit",
    "Overhead",
    "Point",
    "Smallest",
    "Suite",
    "asked_of",
    "audit_of",
    "audit_text",
    "find_smallest",
    "measure_overhead",
    "minimal_script",
    "run_suites",
]
