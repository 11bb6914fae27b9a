"""Verdicts: metrics, the noise-floor rule, where a failure began and what it looks like.

May import the vocabulary (points, results); knows no backend.
"""

from __future__ import annotations
