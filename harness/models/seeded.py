"""Small random checkpoints, the same bytes on every machine: a boot takes seconds and TP=2 divides their heads.

Random weights are made to be awkward rather than realistic. Norm weights spread over 0.5 to 1.5, so that a norm
folded into the next matrix, or left out, shows, and biases over -0.5 to 0.5; matrices are scaled so that every block
changes the residual stream by about its own size and the logits have a spread of a few nats.

One for each family that has an overlay, with the traits by which its forward differs from Llama's.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from harness.models.checkpoint import no_progress_bars

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from transformers import PreTrainedConfig

__all__ = ["TinyModel", "values"]

#: Standard deviation of the logits over the vocabulary, in nats: peaked enough for a clear argmax, flat enough
#: for every probability to count.
_LOGIT_SPREAD = 2.5
_NORM_WEIGHT = re.compile(r"(norm|ln_\w+)\.weight$")
_EMBEDDING = re.compile(r"(embed_tokens|wte|embed_in|word_embeddings)\.weight$")
_POSITIONS = re.compile(r"(wpe|embed_positions)\.weight$")
#: GPT-2 stores these as (in, out).
_TRANSPOSED = re.compile(r"^transformer\.h\.\d+\.(attn|mlp)\.c_(attn|proj|fc)\.weight$")
#: Families with other names of sizes, or without some: transformers would take any name, and vLLM may read it.
_GPT2_SIZES = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
_NO_HEAD_SIZES = {
    name: name
    for name in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    )
}
_SIZES = {
    "GPTJ": _GPT2_SIZES,
    "GPT2": _GPT2_SIZES,
    "GPTNeoX": _NO_HEAD_SIZES,
    "OPT": {**_NO_HEAD_SIZES, "intermediate_size": "ffn_dim"},
    # Its MLP is four times as wide as the stream in vLLM, whatever `ffn_hidden_size` says.
    "Falcon": {name: name for name in _NO_HEAD_SIZES if name != "intermediate_size"},
    "Phi": {**_NO_HEAD_SIZES, "num_key_value_heads": "num_key_value_heads"},
    "StableLm": {**_NO_HEAD_SIZES, "num_key_value_heads": "num_key_value_heads"},
}


def __dir__() -> list[str]:
    """Only the public names."""
    return __all__


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """A seeded random causal LM in fp32, without a tokenizer."""

    name: str
    family: str  #: transformers' prefix: `Llama` for `LlamaForCausalLM`
    config_class: str = ""  #: transformers' prefix of the config where it is another one
    note: str  #: what there is to it, for a list
    seed: int
    recipe_version: int  #: raise when `build` would write other bytes
    extra: Mapping[str, object] = field(default_factory=dict)  #: what the family adds to Llama's config
    tied: bool = False  #: one matrix embeds and unembeds
    embed_gain: float = 1.0  #: what the model multiplies an untied embedding by
    logit_gain: float = 1.0  #: what the final norm, in the mean, and the model multiply logits by
    zero_norms: tuple[str, ...] = ()  #: norms whose weights spread around 0, not 1
    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 2
    num_key_value_heads: int = 2  #: where it is 1, two ranks hold copies of the same head
    head_dim: int = 32  #: the smallest that vLLM's CPU attention takes
    vocab_size: int = 259  #: a byte vocabulary and three specials; odd, so engines must pad it
    max_position_embeddings: int = 512

    @property
    def architecture(self) -> str:
        """The class, as a checkpoint's config names it."""
        return "GPT2LMHeadModel" if self.family == "GPT2" else f"{self.family}ForCausalLM"

    @property
    def description(self) -> str:
        """One line for a list of models."""
        return (
            f"seeded random {self.family}: {self.num_hidden_layers} layers, width {self.hidden_size}, "
            f"{self.num_attention_heads} heads, vocabulary {self.vocab_size}, {self.note}; fp32, no tokenizer, "
            f"TP up to {self.num_attention_heads}"
        )

    def config(self) -> PreTrainedConfig:
        """Return the transformers config; the last three ids are padding, begin and end."""
        import transformers  # listing the models must not pay for it

        sizes: dict[str, object] = {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position_embeddings,
        }
        if names := _SIZES.get(self.family):
            sizes = {names[name]: value for name, value in sizes.items() if name in names}
        made: PreTrainedConfig = getattr(transformers, f"{self.config_class or self.family}Config")(
            architectures=[self.architecture],
            vocab_size=self.vocab_size,
            **sizes,
            tie_word_embeddings=self.tied,
            bos_token_id=self.vocab_size - 2,
            eos_token_id=self.vocab_size - 1,
            dtype="float32",
            **self.extra,
        )
        return made

    def build(self, folder: Path) -> None:
        """Write config and safetensors weights into `folder`."""
        import torch
        import transformers

        # On the meta device the class draws no values of its own, which would move the caller's generator.
        with torch.device("meta"):
            model = getattr(transformers, self.architecture)(self.config())
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        state = {name: torch.from_numpy(self._weight(name, shape)) for name, shape in shapes.items()}
        model.load_state_dict(state, strict=True, assign=True)
        model.tie_weights()
        with no_progress_bars():
            model.save_pretrained(folder)

    def _weight(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Values of one parameter, fp32: from its name and the seed alone, whatever order they are asked in."""
        unit = values(f"{self.name}/{self.seed}/{name}", shape)
        if _NORM_WEIGHT.search(name):
            centre = 0.0 if any(part in name for part in self.zero_norms) else 1.0
            return centre + unit / np.float32(2.0)
        if name.endswith(".bias"):
            return unit / np.float32(2.0)
        # `unit` is uniform on [-1, 1): its standard deviation is 1/sqrt(3).
        if name == "lm_head.weight" or (self.tied and _EMBEDDING.search(name)):
            spread = _LOGIT_SPREAD / math.sqrt(shape[-1]) / self.logit_gain
        elif _EMBEDDING.search(name):
            spread = 1.0 / self.embed_gain
        elif _POSITIONS.search(name):
            spread = 0.5
        else:
            # 1.5 and not 1: attention scores spread by about 2, and a block weighs as much as its input.
            spread = 1.5 / math.sqrt(shape[0] if _TRANSPOSED.search(name) else shape[-1])
        return unit * np.float32(spread * math.sqrt(3.0))


def values(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return `shape` fp32 values uniform on [-1, 1), fixed by `key`.

    They come from the raw bits of a counter-based generator, 24 of each word, which are exact in fp32. A torch
    generator would not do: its normal samples differ in the last bit between CPU families.
    """
    digest = hashlib.sha256(key.encode()).digest()
    words = np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(math.prod(shape))
    integers = (words >> np.uint64(40)).astype(np.int64) - (1 << 23)
    return (integers.astype(np.float32) / np.float32(1 << 23)).reshape(shape)
