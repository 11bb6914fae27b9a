"""vLLM Parity Harness: prove that what is captured from vLLM is what Hugging Face transformers computes.

The public names load on first use, so that importing :mod:`harness` (as pytest does for every run in an
environment that has it) costs neither torch nor vLLM.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "BootConfig": "harness.backend",
    "ForwardResult": "harness.results",
    "RemoteBridge": "harness.bridge",
    "Topology": "harness.backend",
    "boot_reference": "harness.reference.backend",
    "boot_vllm": "harness.vllm.boot",
    "compare": "harness.parity.verdict",
}

__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted(__all__)
