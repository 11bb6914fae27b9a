"""What a page shows on demand, packed: pieces of HTML, deflated in groups and written as text.

The tables of some hundred cases are megabytes of repetition. Packed they are a tenth of that, and a browser neither
parses nor lays out what nobody opens.
"""

from __future__ import annotations

import base64
import zlib

__all__ = ["SEPARATOR", "Pack"]

#: Between the pieces of a group; the page holds no other control characters.
SEPARATOR = "\x1e"
#: Characters after which a group is closed: enough for repetition to pay, little enough to unpack at once.
_GROUP = 300_000


class Pack:
    """Takes pieces of HTML and gives each a key under which the page's script finds it again."""

    def __init__(self) -> None:
        self._groups: list[list[str]] = []
        self._size = 0

    def add(self, html: str) -> str:
        """Keep one piece.

        Returns:
            ``group.index``, for a ``data-body`` attribute.
        """
        if not self._groups or self._size > _GROUP:
            self._groups.append([])
            self._size = 0
        self._groups[-1].append(html)
        self._size += len(html)
        return f"{len(self._groups) - 1}.{len(self._groups[-1]) - 1}"

    def texts(self) -> list[str]:
        """The groups as base64 of zlib streams, in the order of their numbers."""
        return [
            base64.b64encode(zlib.compress(SEPARATOR.join(group).encode(), 9)).decode("ascii")
            for group in self._groups
        ]
