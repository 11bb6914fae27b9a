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
    """

    module: str
    title: str
    url: str


#: Name on the command line → adapter; its environment is pinned in ``requirements/audits/NAME.txt``.
ADAPTERS = {
    "transformer-lens": Adapter(
        "transformer_lens_bridge",
        "TransformerLens, TransformerBridge on transformers",
        "https://github.com/TransformerLensOrg/TransformerLens",
    ),
    "nnsight": Adapter(
        "nnsight_transformers", "nnsight on transformers", "https://github.com/ndif-team/nnsight"
    ),
}
