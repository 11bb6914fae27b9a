"""The error that says which private attribute of vLLM is gone."""

from __future__ import annotations

from harness.errors import EngineError

__all__ = ["moved"]


def moved(what: str) -> EngineError:
    """An error for an attribute that this release of vLLM has not."""
    import vllm

    return EngineError(
        f"vLLM {vllm.__version__} has no {what}: the harness reads it and knows releases 0.30 to 0.32; "
        "run `vllm-parity doctor` and install a supported release"
    )
