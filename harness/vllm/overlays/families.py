"""The decoder families that are known, one overlay each, as vLLM 0.30 to 0.32 lays them out."""

from __future__ import annotations

from typing import Any

from harness.points import ATTN_OUT, HEAD_K, HEAD_Q, HEAD_V, MLP_OUT, ROT_K, ROT_Q
from harness.vllm.overlays.base import Overlay, Requirement

__all__ = ["OVERLAYS"]

#: Families whose decoder layer is Llama's: norms before the branches, RMSNorm with plain weight. OLMo 2's come after,
#: and it is served by vLLM's transformers backend, whose tree is Hugging Face's own; its paths are the same.
_LLAMA_LIKE = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Olmo2ForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
#: Embeddings are scaled by √width outside embed_tokens, by a buffer at the engine's dtype. Where branches have norms of
#: their own, those come after attn and mlp, inside the layer.
_GEMMAS = ("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM")
_NO_ROTARY = dict.fromkeys(
    (ROT_Q, ROT_K), "positions are learned, nothing is rotated: hook_q and hook_k are it"
)
_INTERLEAVED = dict.fromkeys((HEAD_Q, HEAD_K, HEAD_V), "the projection interleaves q, k and v head by head")
_GPT2_LIKE: dict[str, Any] = {
    "embed": "transformer.wte",
    "block": "transformer.h.{i}",
    "attn": "transformer.h.{i}.attn",
    "mlp": "transformer.h.{i}.mlp",
    "norm": "transformer.ln_f",
    "norm_bias": True,
    "core": "transformer.h.{i}.attn.attn",
    "ends_everywhere": True,
}
_OTHERS = (
    Overlay("MixtralForCausalLM", mlp="model.layers.{i}.block_sparse_moe", ends_everywhere=True),
    Overlay("Qwen3MoeForCausalLM", ends_everywhere=True),
    # The branches are scaled in the layer, after attn and mlp.
    Overlay("GraniteForCausalLM", embed_factor="model.config.embedding_multiplier"),
    # Attention and MLP read one LayerNorm's output.
    Overlay("GPTJForCausalLM", qkv="transformer.h.{i}.attn.qkv_proj", **_GPT2_LIKE),
    # Learned positions are added after wte.
    Overlay("GPT2LMHeadModel", qkv="transformer.h.{i}.attn.c_attn", lacks=_NO_ROTARY, **_GPT2_LIKE),
    # The next three are served by vLLM's transformers backend.
    Overlay(
        "GPTNeoXForCausalLM",
        embed="model.embed_in",
        attn="model.layers.{i}.attention",
        norm="model.final_layer_norm",
        norm_bias=True,
        core="model.layers.{i}.attention.attn",
        lacks=_INTERLEAVED,
    ),
    Overlay("PhiForCausalLM", norm="model.final_layernorm", norm_bias=True),
    Overlay("Starcoder2ForCausalLM", norm_bias=True),
    # No module holds the MLP; its last projection emits what it returns. Positions are added after embed_tokens.
    Overlay(
        "OPTForCausalLM",
        embed="model.decoder.embed_tokens",
        block="model.decoder.layers.{i}",
        attn="model.decoder.layers.{i}.self_attn",
        mlp="model.decoder.layers.{i}.fc2",
        mlp_in="model.decoder.layers.{i}.fc1",
        qkv="model.decoder.layers.{i}.self_attn.qkv_proj",
        core="model.decoder.layers.{i}.self_attn.attn",
        lacks=_NO_ROTARY,
        norm="model.decoder.final_layer_norm",
        norm_bias=True,
        ends_everywhere=True,
        requires=(
            Requirement(
                "do_layer_norm_before", True, "its norms follow the branches, and there is no final norm"
            ),
            Requirement("_remove_final_layer_norm", False, "there is no final norm"),
        ),
    ),
    # Layers return the finished stream and, for nothing, what came in; a LayerNorm without bias.
    Overlay("CohereForCausalLM", fused=False, partial=(ATTN_OUT, MLP_OUT), ends_everywhere=True),
    Overlay(
        "StableLmForCausalLM",
        fused=False,
        norm_bias=True,
        ends_everywhere=True,
        requires=(
            Requirement(
                "use_parallel_residual", False, "vLLM computes its branches one after the other all the same"
            ),
            Requirement("qk_layernorm", False, "vLLM leaves the norms of q and k out"),
        ),
    ),
    Overlay(
        "FalconForCausalLM",
        embed="transformer.word_embeddings",
        block="transformer.h.{i}",
        attn="transformer.h.{i}.self_attention",
        mlp="transformer.h.{i}.mlp",
        qkv="transformer.h.{i}.self_attention.query_key_value",
        core="transformer.h.{i}.self_attention.attn",
        norm="transformer.ln_f",
        norm_bias=True,
        partial=(ATTN_OUT, MLP_OUT),
        ends_everywhere=True,
        requires=(Requirement("bias", False, "vLLM's branches return their biases beside them, not added"),),
    ),
)
OVERLAYS = {
    overlay.architecture: overlay
    for overlay in (
        *(Overlay(name) for name in _LLAMA_LIKE),
        *(
            Overlay(name, embed_factor="model.normalizer", norm_plus_one=True, ends_everywhere=True)
            for name in _GEMMAS
        ),
        *_OTHERS,
    )
}
