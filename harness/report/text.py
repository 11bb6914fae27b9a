"""Recorded values of any kind as short text."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["short_values", "shortened", "value_text"]

_MAX_VALUE, _MAX_SHORT = 240, 60  # characters


def shortened(text: str, limit: int) -> str:
    """The first ``limit`` characters, saying how many more there are."""
    more = len(text) - limit
    return text if more <= 0 else f"{text[:limit]} … ({more:,} characters more in results.jsonl)"


def value_text(value: Any) -> str:
    """A JSON value for a person: four digits, yes and no, nested values as JSON, cut where long."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "\N{EN DASH}"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return shortened(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), _MAX_VALUE)


def short_values(detail: Any) -> str:
    """The short values of a comparison's detail in one line; a page has hundreds of them."""
    if not isinstance(detail, dict):
        return ""
    pairs = [(str(name).replace("_", " "), value_text(value)) for name, value in detail.items()]
    return ", ".join(f"{name} {value}" for name, value in pairs if len(value) <= _MAX_SHORT)
