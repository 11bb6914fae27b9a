"""Canonical names in a library's own words: one table per adapter, and how it is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["OPS", "block_of", "everywhere", "patterns", "translated"]

OPS = ("suppress", "scale", "add", "set")


def block_of(name: str) -> int:
    """The block of ``blocks.{i}.…``."""
    return int(name.split(".", 2)[1])


def translated(table: Mapping[str, str], name: str) -> str:
    """A point's own name there; both sides of the table have ``{i}`` for the block."""
    if not name.startswith("blocks."):
        return table[name]
    _, block, rest = name.split(".", 2)
    return table[f"blocks.{{i}}.{rest}"].replace("{i}", block)


def patterns(names: Iterable[str]) -> list[str]:
    """What a table declares, as capabilities have it."""
    return [name.replace("{i}", "*") for name in names]


def everywhere(names: Iterable[str]) -> dict[str, list[str]]:
    """Every edit at every one of these points, as capabilities have it."""
    return {op: patterns(names) for op in OPS}
