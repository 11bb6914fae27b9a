"""Pages as files of which a reader never meets half."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["write_whole"]


def write_whole(target: Path, text: str) -> None:
    """Put a text in the place of a file, or leave everything as it was.

    Raises:
        OSError: it cannot be written there.
    """
    partial = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        partial.write_bytes(text.encode())
        partial.replace(target)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
