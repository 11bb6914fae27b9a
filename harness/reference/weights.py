"""Single tensors of a checkpoint, without building the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from harness.errors import UsageError
from harness.models import load_config
from harness.reference.families import tree_of_config

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from harness.conventions import Emission

__all__ = ["emission", "final_norm_weight", "read_tensor", "unembedding_rows"]

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


def emission(path: str | Path, hook: str, dtype: torch.dtype) -> Emission:
    """How a model with this checkpoint's weights, rounded to ``dtype``, emits the value of ``hook``."""
    config = load_config(path)
    tree = tree_of_config(config)
    return tree.emission(hook, config, lambda name: read_tensor(path, name).to(dtype))


def final_norm_weight(path: str | Path) -> torch.Tensor:
    """The final norm's weight as the checkpoint has it, (width,); Gemma's norm multiplies by 1 + that."""
    tree = tree_of_config(load_config(path))
    return read_tensor(path, f"{tree.final_norm}.weight")


def unembedding_rows(path: str | Path, tokens: Sequence[int]) -> torch.Tensor:
    """Rows of the unembedding for some tokens, (len(tokens), width), at the checkpoint's dtype.

    Raises:
        UsageError: a token outside the vocabulary, or a checkpoint without the tensor.
    """
    config = load_config(path)
    tree = tree_of_config(config)
    name = f"{tree.embed}.weight" if config.tie_word_embeddings else tree.unembed
    weight = read_tensor(path, name)
    if any(not 0 <= token < config.vocab_size for token in tokens):
        msg = f"tokens {list(tokens)} are not all inside the vocabulary of {config.vocab_size}"
        raise UsageError(msg)
    return weight[list(tokens)]
