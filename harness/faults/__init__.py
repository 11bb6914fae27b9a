"""Broken engine paths for the harness' own trial.

Nothing here is imported by the paths under test; a fault is chosen by ``worker_cls``.
"""

from __future__ import annotations
