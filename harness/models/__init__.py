"""Models that run with no hub: bundled real weights and seeded random checkpoints, built once into a cache.

May import `harness.errors` only; nothing here knows a backend, an engine or a suite.
"""

from __future__ import annotations

from harness.models.cache import cache_dir, materialise
from harness.models.checkpoint import has_tokenizer, load_config
from harness.models.registry import ModelSource, bundled, resolve

__all__ = [
    "ModelSource",
    "bundled",
    "cache_dir",
    "has_tokenizer",
    "load_config",
    "materialise",
    "resolve",
]


def __dir__() -> list[str]:
    """Only the public names."""
    return __all__
