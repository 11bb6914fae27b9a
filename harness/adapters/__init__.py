"""Backends for libraries that others wrote, each run in that library's own interpreter.

Modules of this folder are loaded there by path and import nothing of this project; each has one table of names and a
class ``Backend``, a :class:`~harness.elsewhere.plain.PlainBackend`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["ADAPTERS", "FOLDER", "Adapter"]

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Adapter:
    """One of the modules here.

    Attributes:
        module: its name.
        title: what a reader sees.
        url: where findings go.
        requirements: file of ``requirements/peers`` with its environment's pins, without its ending.
    """

    module: str
    title: str
    url: str
    requirements: str


_TRANSFORMER_LENS = "https://github.com/TransformerLensOrg/TransformerLens"
_NNSIGHT = "https://github.com/ndif-team/nnsight"

#: Name on the command line → adapter.
ADAPTERS = {
    "transformer-lens": Adapter(
        "transformer_lens_bridge",
        "TransformerLens, TransformerBridge on transformers",
        _TRANSFORMER_LENS,
        "transformer-lens",
    ),
    "nnsight": Adapter("nnsight_transformers", "nnsight on transformers", _NNSIGHT, "nnsight"),
    "transformer-lens-vllm": Adapter(
        "transformer_lens_vllm", "TransformerLens' vLLM source", _TRANSFORMER_LENS, "transformer-lens"
    ),
    "nnsight-vllm": Adapter("nnsight_vllm", "nnsight on vLLM", _NNSIGHT, "nnsight"),
    "vllm-lens": Adapter(
        "vllm_lens_engine", "vllm-lens", "https://github.com/UKGovernmentBEIS/vllm-lens", "vllm-lens"
    ),
}
