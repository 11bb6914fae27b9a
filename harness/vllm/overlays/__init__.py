"""Where each decoder family keeps its hook points inside vLLM, and by which convention.

May import the vocabulary; knows module paths, never modules.
"""

from __future__ import annotations

from harness.vllm.overlays.base import Overlay, Requirement, TapSpec
from harness.vllm.overlays.find import get_overlay, known_architectures

__all__ = ["Overlay", "Requirement", "TapSpec", "get_overlay", "known_architectures"]
