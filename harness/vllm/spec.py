"""What the driver tells the workers: one JSON-able dict inside the engine's own config.

It travels in ``additional_config``, so spawned and remote workers get it without an environment variable, and vLLM
hashes it into the compile-cache key: a graph traced for one set of taps is never served for another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from harness.geometry import Geometry
from harness.vllm.overlays import TapSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.vllm.overlays import Overlay

__all__ = ["CONFIG_KEY", "DESIGN", "EDIT_PROGRAMS", "HarnessSpec"]

CONFIG_KEY = "harness"

#: Bumped whenever the traced part of a tap changes: the worker class itself is no part of vLLM's cache key.
DESIGN = 4
#: Distinct combinations of edits one call may use, where the caller names no number.
EDIT_PROGRAMS = 16


@dataclass(frozen=True)
class HarnessSpec:
    """Which taps to install, and how many programs of edits their tables hold.

    Attributes:
        taps: one per hook point.
        max_programs: distinct combinations of edits one call may use.
        bare: the taps say where the modules are and no more: which architecture they belong to, and so by which
            convention, is known where the model is.
    """

    taps: tuple[TapSpec, ...]
    max_programs: int = EDIT_PROGRAMS
    bare: bool = False

    def completed(self, overlay: Overlay, hf_config: Any) -> HarnessSpec:
        """The same, by the conventions of an architecture and the sizes of a model."""
        geometry = Geometry.of(hf_config)
        taps = (replace(overlay.tap(tap.name, geometry), path=tap.path, width=tap.width) for tap in self.taps)
        return replace(self, taps=tuple(taps), bare=False)

    def to_config(self) -> dict[str, Any]:
        """The value for ``LLM(additional_config=...)``."""
        taps = [tap.to_dict() for tap in self.taps]
        return {
            CONFIG_KEY: {
                "design": DESIGN,
                "max_programs": self.max_programs,
                "bare": self.bare,
                "taps": taps,
            }
        }

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
        taps = tuple(TapSpec.from_dict(tap) for tap in data["taps"])
        return cls(taps, int(data["max_programs"]), bool(data["bare"]))
