"""Which other settings may be tried: apart from the rest, so that ``--help`` loads nothing heavy."""

from __future__ import annotations

__all__ = ["CHOICES"]

#: ``none``; ``simpler``: what an engine can do without; ``all``: the other way round as well.
CHOICES = ("none", "simpler", "all")
