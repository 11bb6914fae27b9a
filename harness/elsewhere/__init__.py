"""Backends written in terms of plain lists, dicts and tensors: in this interpreter, or in one of their own.

May import what every backend may (points, geometry, conventions, interventions, results, reference.weights); ``worker``
runs on the other side and imports nothing of this.
"""

from __future__ import annotations

from harness.elsewhere.plain import Plain, PlainBackend, PlainClass
from harness.elsewhere.remote import Elsewhere, split_name

__all__ = ["Elsewhere", "Plain", "PlainBackend", "PlainClass", "split_name"]
