"""Recorded text as it can be shown: nothing in it moves a cursor or turns text around."""

from __future__ import annotations

import re

__all__ = ["visible"]

#: Control characters (not tab and newline), lone surrogates, and those that reorder text on screen.
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069\ufffe\uffff]")


def visible(text: str) -> str:
    """The text with a replacement character for each of those."""
    return _INVISIBLE.sub("\ufffd", text)
