"""Templates of this package, filled so that nothing recorded can become markup, hide text or give a secret away."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from harness.provenance import redact_text
from harness.report.numbers import count, duration, ratio
from harness.report.visible import visible

__all__ = ["TEMPLATES", "clean", "environment", "stylesheet"]

TEMPLATES = Path(__file__).parent / "templates"
_MIN_SECRET = 12  # characters
_LINK = re.compile(r"https?://[^\s<>\"']+[^\s<>\"'.,;:)\]]")


def clean(html: str) -> str:
    """A page with no characters that hide or reorder text, and nothing that looks like a token."""
    return visible(redact_text(html))


def stylesheet(*names: str) -> Markup:
    """Files of this package, one after the other, as they stand in a page."""
    return Markup("".join((TEMPLATES / name).read_text(encoding="utf-8") for name in names))  # noqa: S704 - our own


def environment() -> Environment:
    """What fills a template: everything that is no :class:`Markup` is escaped and loses what looks like a secret."""
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_masked,
    )
    made.filters |= {"linked": _linked, "count": count, "duration": duration, "ratio": ratio}
    return made


def _masked(value: Any) -> Any:
    """Values on their way into the page: long enough text loses what looks like a secret in it."""
    return redact_text(value) if type(value) is str and len(value) >= _MIN_SECRET else value


def _linked(text: str) -> Markup:
    """Escaped text in which web addresses can be followed."""
    text = redact_text(text)
    parts, end = [], 0
    for match in _LINK.finditer(text):
        address = escape(match[0])
        parts += [
            escape(text[end : match.start()]),
            Markup('<a href="{0}" rel="noreferrer">{0}</a>').format(address),
        ]
        end = match.end()
    return Markup("").join([*parts, escape(text[end:])])
