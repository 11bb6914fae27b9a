"""Which overlay an architecture has: one of the project's own, or one that another package brings."""

from __future__ import annotations

import difflib
from importlib.metadata import entry_points

from harness.errors import UsageError
from harness.vllm.overlays.base import Overlay
from harness.vllm.overlays.families import OVERLAYS

__all__ = ["GROUP", "get_overlay", "known_architectures"]

#: Entry points of other packages: an architecture's name → an :class:`Overlay` in some module.
GROUP = "harness.overlays"


def known_architectures() -> list[str]:
    """Architectures that have an overlay."""
    return sorted({*OVERLAYS, *(point.name for point in entry_points(group=GROUP))})


def get_overlay(architecture: str) -> Overlay:
    """The overlay of an architecture; another package's wins over the project's own.

    Raises:
        UsageError: there is none, with those there are; or what another package brings is no overlay.
    """
    for point in entry_points(group=GROUP):
        if point.name == architecture:
            found = point.load()
            if not isinstance(found, Overlay):
                msg = f"entry point {point.value!r} of {GROUP} gave {type(found).__name__}, no Overlay"
                raise UsageError(msg)
            return found
    if architecture in OVERLAYS:
        return OVERLAYS[architecture]
    known = known_architectures()
    near = difflib.get_close_matches(architecture, known, n=1)
    hint = f" (nearest: {near[0]})" if near else ""
    msg = (
        f"architecture {architecture!r} has no decoder overlay{hint}: its module tree is not known, so nothing can be "
        f"captured. There are overlays for {', '.join(known)}; docs/hook-points.md says how to write one"
    )
    raise UsageError(msg)
