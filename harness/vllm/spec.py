"""What the driver tells the workers: one JSON-able dict inside the engine's own config.

It travels in ``additional_config``, so spawned and remote workers get it without an environment variable, and vLLM
hashes it into the compile-cache key: a graph traced for one set of taps is never served for another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.vllm.overlays import TapSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CONFIG_KEY", "DESIGN", "EDIT_PROGRAMS", "HarnessSpec"]

CONFIG_KEY = "harness"

#: Bumped whenever the traced part of a tap changes: the worker class itself is no part of vLLM's cache key.
DESIGN = 2
#: Distinct combinations of edits one call may use, where the caller names no number.
EDIT_PROGRAMS = 16


@dataclass(frozen=True)
class HarnessSpec:
    """Which taps to install, and how many programs of edits their tables hold."""

    taps: tuple[TapSpec, ...]
    max_programs: int = EDIT_PROGRAMS

    def to_config(self) -> dict[str, Any]:
        """The value for ``LLM(additional_config=...)``."""
        taps = [tap.to_dict() for tap in self.taps]
        return {CONFIG_KEY: {"design": DESIGN, "max_programs": self.max_programs, "taps": taps}}

    @classmethod
    def from_config(cls, additional_config: Mapping[str, Any] | None) -> HarnessSpec | None:
        """Read it back in a worker; None for an engine that was not instrumented.

        Raises:
            ValueError: driver and worker run different versions of the harness.
        """
        data = (additional_config or {}).get(CONFIG_KEY)
        if data is None:
            return None
        if data["design"] != DESIGN:
            msg = f"the driver speaks tap design {data['design']}, this worker {DESIGN}: install one version"
            raise ValueError(msg)
        return cls(tuple(TapSpec.from_dict(tap) for tap in data["taps"]), int(data["max_programs"]))
