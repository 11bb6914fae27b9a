"""Causal bisection of a failed comparison, see ``docs/bisect.md``.

The truth is put in at one point after another, until what is wrong by itself is told from what only carries it on.
"""

from __future__ import annotations
