"""Single tensors of a checkpoint, without building the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from harness.errors import UsageError
from harness.models import load_config
from harness.points import FINAL_NORM, HookPoint
from harness.reference.hooks import FAMILIES, architecture_of

if TYPE_CHECKING:
    import torch

__all__ = ["final_norm_weight", "read_tensor"]

_INDEX = "model.safetensors.index.json"


def read_tensor(path: str | Path, name: str) -> torch.Tensor:
    """Read one tensor of a safetensors checkpoint, sharded or not, at its stored dtype.

    Raises:
        UsageError: the checkpoint has no such tensor.
    """
    folder = Path(path)
    index = folder / _INDEX
    files = (
        [folder / json.loads(index.read_text())["weight_map"].get(name, "")]
        if index.is_file()
        else sorted(folder.glob("*.safetensors"))
    )
    for file in files:
        if file.is_file():
            with safe_open(file, framework="pt") as tensors:
                if name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                    found: torch.Tensor = tensors.get_tensor(name)
                    return found
    msg = f"checkpoint {str(folder)!r} has no tensor {name!r}"
    raise UsageError(msg)


def final_norm_weight(path: str | Path) -> torch.Tensor:
    """The weight that the final norm multiplies in after normalising, (width,)."""
    tree = FAMILIES[architecture_of(load_config(path))]
    return read_tensor(path, f"{tree.path(HookPoint.parse(FINAL_NORM))}.weight")
