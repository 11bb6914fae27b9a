"""A small seeded Llama, other families alike, and token ids for them: what the tests of the reference share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from harness.points import all_points

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4, 64, 2, 1, 32, 259
POINTS = all_points(LAYERS)
IDS = [7, 3, 200, 14, 99, 99, 0, 258, 13, 5, 6, 7]
PROMPTS = [[5], IDS, [1, 2, 3, 4, 5, 6, 7]]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


#: What the families add to Llama, none of it as it is by default.
EXTRA: dict[str, dict[str, Any]] = {
    "Gemma2": {
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
        "tie_word_embeddings": True,
    },
    "Granite": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.3,
        "logits_scaling": 3.0,
    },
    "GPTJ": {
        "n_embd": WIDTH,
        "n_inner": 96,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "n_positions": 128,
        "rotary_dim": 16,
    },
}


def tiny_config(name: str = "Llama", **more: Any) -> Any:
    import transformers

    fields = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "initializer_range": 0.15,  # the default 0.02 leaves the blocks with next to nothing to say
        "tie_word_embeddings": False,
        "pad_token_id": None,
    }
    if name == "GPTJ":  # it has its own names for sizes
        fields = {key: fields[key] for key in ("vocab_size", "initializer_range", "tie_word_embeddings")}
    return getattr(transformers, f"{name}Config")(**{**fields, **EXTRA.get(name, {}), **more})


def randomised(config: Any, name: str = "Llama") -> PreTrainedModel:
    """A seeded model whose norm weights lie in 0.5 to 1.5, with two channels that the final norm multiplies away."""
    import transformers

    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith(("norm.weight", "ln_1.weight", "ln_f.weight")):
                weight.uniform_(0.5, 1.5)
            elif key.endswith("bias"):
                weight.normal_(std=0.1)
        last = model.transformer.ln_f if name == "GPTJ" else model.model.norm
        one = 1.0 if name == "Gemma2" else 0.0
        last.weight[3], last.weight[9] = 0.0 - one, 1e-7 - one
    return model.eval().requires_grad_(requires_grad=False)


def relative(got: Any, want: Any) -> float:
    got, want = np.asarray(got, dtype=np.float64), np.asarray(want, dtype=np.float64)
    return float((np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)).max())
