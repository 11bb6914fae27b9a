"""The smallest PNG that can hold a heat map: 4-bit indexed colour with an alpha per colour."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["data_uri", "indexed_png"]

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_BIT_DEPTH, _INDEXED = 4, 3


def indexed_png(pixels: Sequence[Sequence[int]], palette: Sequence[tuple[int, int, int, int]]) -> bytes:
    """Encode rows of palette indices; the palette holds at most 16 (red, green, blue, alpha), 0 to 255 each."""
    width, height = len(pixels[0]), len(pixels)
    header = struct.pack(">IIBBBBB", width, height, _BIT_DEPTH, _INDEXED, 0, 0, 0)
    colours = b"".join(bytes(colour[:3]) for colour in palette)
    alphas = bytes(colour[3] for colour in palette)
    scanlines = b"".join(b"\0" + _packed(row) for row in pixels)
    chunks = (
        (b"IHDR", header),
        (b"PLTE", colours),
        (b"tRNS", alphas),
        (b"IDAT", zlib.compress(scanlines, 9)),
        (b"IEND", b""),
    )
    return _SIGNATURE + b"".join(_chunk(kind, data) for kind, data in chunks)


def data_uri(png: bytes) -> str:
    """The image as an address that needs no network and no second file."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _packed(row: Sequence[int]) -> bytes:
    """Two pixels a byte, the left one in the high bits."""
    padded = [*row, 0] if len(row) % 2 else row
    return bytes(left << 4 | right for left, right in zip(padded[::2], padded[1::2], strict=True))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
