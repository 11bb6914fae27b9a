"""Where each decoder family keeps its hook points inside vLLM, and by which convention.

May import the vocabulary; knows module paths, never modules.
"""

from __future__ import annotations

from harness.vllm.overlays.base import Overlay, TapSpec, get_overlay, known_architectures

__all__ = ["Overlay", "TapSpec", "get_overlay", "known_architectures"]
