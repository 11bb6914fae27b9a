"""What tests with random input share."""

from __future__ import annotations


def one_line(error: Exception) -> str:
    """What a person reads of it."""
    text = str(error)
    assert text.strip()
    assert len(text) < 1000, "an error is read, not scrolled"
    return text
