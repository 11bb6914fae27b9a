"""Small random checkpoints, the same bytes on every machine: a boot takes seconds and TP=2 divides their heads.

Random weights are made to be awkward rather than realistic. Norm weights spread over 0.5 to 1.5, so that a norm
folded into the next matrix, or left out, shows; matrices are scaled so that every block changes the residual
stream by about its own size and the logits have a spread of a few nats.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from harness.models.checkpoint import no_progress_bars

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import LlamaConfig

__all__ = ["TINY_LLAMA", "TinyLlama", "values"]

#: Standard deviation of the logits over the vocabulary, in nats: peaked enough for a clear argmax, flat enough
#: for every probability to count.
_LOGIT_SPREAD = 2.5


def __dir__() -> list[str]:
    """Only the public names."""
    return __all__


@dataclass(frozen=True, kw_only=True)
class TinyLlama:
    """A seeded random `LlamaForCausalLM` in fp32, without a tokenizer."""

    name: str
    seed: int
    recipe_version: int  #: raise when `build` would write other bytes
    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 2
    num_key_value_heads: int = 2  #: not 1: two ranks would then hold copies of the same head
    head_dim: int = 32  #: the smallest that vLLM's CPU attention takes
    vocab_size: int = 259  #: a byte vocabulary and three specials; odd, so engines must pad it
    max_position_embeddings: int = 512

    @property
    def description(self) -> str:
        """One line for a list of models."""
        return (
            f"seeded random Llama: {self.num_hidden_layers} layers, width {self.hidden_size}, "
            f"{self.num_attention_heads} heads, vocabulary {self.vocab_size}, untied; fp32, no tokenizer, "
            f"TP up to {self.num_key_value_heads}"
        )

    def config(self) -> LlamaConfig:
        """Return the transformers config; the last three ids are padding, begin and end."""
        from transformers import LlamaConfig  # listing the models must not pay for transformers

        return LlamaConfig(
            architectures=["LlamaForCausalLM"],
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
            tie_word_embeddings=False,
            bos_token_id=self.vocab_size - 2,
            eos_token_id=self.vocab_size - 1,
            dtype="float32",
        )

    def build(self, folder: Path) -> None:
        """Write config and safetensors weights into `folder`."""
        import torch
        from transformers import LlamaForCausalLM

        # On the meta device the class draws no values of its own, which would move the caller's generator.
        with torch.device("meta"):
            model = LlamaForCausalLM(self.config())
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        state = {name: torch.from_numpy(self._weight(name, shape)) for name, shape in shapes.items()}
        model.load_state_dict(state, strict=True, assign=True)
        with no_progress_bars():
            model.save_pretrained(folder)

    def _weight(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Values of one parameter, fp32: from its name and the seed alone, whatever order they are asked in."""
        unit = values(f"{self.name}/{self.seed}/{name}", shape)
        if name.endswith("norm.weight"):
            return 1.0 + unit / np.float32(2.0)
        # `unit` is uniform on [-1, 1): its standard deviation is 1/sqrt(3).
        if name == "model.embed_tokens.weight":
            spread = 1.0
        elif name == "lm_head.weight":
            spread = _LOGIT_SPREAD / math.sqrt(shape[-1])
        else:
            # 1.5 and not 1: attention scores spread by about 2, and a block weighs as much as its input.
            spread = 1.5 / math.sqrt(shape[-1])
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


TINY_LLAMA = TinyLlama(name="tiny-llama", seed=0, recipe_version=1)
