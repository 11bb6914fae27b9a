"""Read a checkpoint's folder far enough to know that an engine can load it, and say so clearly if not.

Both sides of a comparison would otherwise die of the same damaged file with two different tracebacks, one of
them in a worker process.
"""

from __future__ import annotations

import contextlib
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from harness.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedConfig

__all__ = ["check_weights", "has_tokenizer", "load_config", "no_progress_bars"]

_INDEX = "model.safetensors.index.json"
#: Formats that execute code, or may, while they are read.
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
#: Files that hold a tokenizer; its settings, tokenizer_config.json, make none by themselves.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


def __dir__() -> list[str]:
    """Only the public names."""
    return __all__


def load_config(path: str | Path, *, weights: bool = True) -> PreTrainedConfig:
    """Return the Hugging Face config of the checkpoint folder `path`, after checking that its weights open.

    Weights are opened, not read: the header of every safetensors file must be whole and its length must agree
    with the file's, which is what a truncated copy fails. With ``weights=False`` they need not be there. Code that
    ships with a checkpoint is never run.

    Raises:
        UsageError: `config.json` or the weights are missing or damaged, or the architecture is not one that
            the installed transformers knows.
    """
    folder = Path(path)
    config = folder / "config.json"
    if not config.is_file():
        why = "there is no config.json in it" if folder.is_dir() else "it is not a folder"
        raise _unreadable(folder, why, "give the folder of a Hugging Face checkpoint")
    try:
        fields = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(folder, f"config.json does not parse ({error})", "copy it again") from error
    if not isinstance(fields, dict) or not fields.get("model_type"):
        raise _unreadable(folder, "config.json names no model_type", "give a transformers checkpoint")
    if not _names(fields.get("architectures")):
        raise _unreadable(folder, "its config.json names architectures that are no names", "copy it again")
    if weights:
        check_weights(folder)

    from transformers import AutoConfig  # a second of imports that a damaged folder needs not

    try:
        loaded: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except (
        Exception
    ) as error:  # transformers raises ValueError, KeyError, OSError and validation errors alike
        if fields.get("auto_map"):
            why = f"model_type {fields['model_type']!r} needs code that ships with it, which is never run"
            raise _unreadable(folder, why, "use a checkpoint whose model_type transformers has") from error
        why = f"transformers rejects its config.json ({type(error).__name__}: {error})"
        raise _unreadable(folder, why, "use a checkpoint that the installed transformers supports") from error
    return loaded


def check_weights(path: str | Path) -> None:
    """Check that `path` holds safetensors weights and that every file of them opens.

    Raises:
        UsageError: no safetensors weights, a shard that its index names is absent, or a file is damaged.
    """
    folder = Path(path)
    names = _indexed(folder) if (folder / _INDEX).is_file() else _unindexed(folder)
    for name in names:
        shard = folder / name
        if not shard.is_file():
            raise _unreadable(
                folder, f"{_INDEX} names {name}, which is missing", "copy the whole folder again"
            )
        try:
            with safe_open(shard, framework="numpy") as tensors:
                empty = not list(tensors.keys())
        except (SafetensorError, OSError) as error:
            raise _unreadable(folder, f"{name} is damaged ({error})", "copy that file again") from error
        if empty:
            raise _unreadable(folder, f"{name} holds no tensor", "copy that file again")


def has_tokenizer(path: str | Path) -> bool:
    """Whether the checkpoint folder `path` ships a tokenizer; told by file names, nothing is loaded."""
    return any(Path(path, name).is_file() for name in _TOKENIZERS)


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers' progress bars out of a run's output while the block runs."""
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging as transformers_logging

    shown, of_gguf = transformers_logging.is_progress_bar_enabled(), gguf.tqdm
    transformers_logging.disable_progress_bar()
    gguf.tqdm = functools.partial(of_gguf, disable=True)  # draws its bar whatever is switched off
    try:
        yield
    finally:
        gguf.tqdm = of_gguf
        if shown:
            transformers_logging.enable_progress_bar()


def _names(value: object) -> bool:
    """Whether a field is a list of strings, or was left out."""
    return value is None or (isinstance(value, list) and all(isinstance(one, str) for one in value))


def _indexed(folder: Path) -> list[str]:
    """File names that the index of a sharded checkpoint lists."""
    try:
        shards = set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(folder, f"{_INDEX} does not parse ({error!r})", "copy it again") from error
    if not shards or not all(isinstance(name, str) for name in shards):
        raise _unreadable(folder, f"{_INDEX} names no weight file", "copy it again")
    return sorted(shards)


def _unindexed(folder: Path) -> list[str]:
    """The one `model.safetensors` file, or whatever single-file name the folder uses instead."""
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if found:
        return found
    if any(path for pattern in _PICKLED for path in folder.glob(pattern)):
        why = "its weights are pickled, and reading those can run code"
        raise _unreadable(folder, why, "convert it to safetensors (`save_pretrained` writes it)")
    raise _unreadable(folder, "it holds no *.safetensors file", "copy the weights into it")


def _unreadable(folder: Path, why: str, way_out: str) -> UsageError:
    return UsageError(f"checkpoint {str(folder)!r} cannot be read: {why}; {way_out}")
