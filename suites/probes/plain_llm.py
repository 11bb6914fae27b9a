"""Run in a process of its own: a plain ``vllm.LLM`` before, beside and after an instrumented engine.

Prints one line of JSON. Arguments: checkpoint folder, ``eager`` or ``compiled``.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# It would win over the size below.
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)

PROMPTS = [[5, 6, 7, 8, 9], [11], list(range(20, 60))]
KWARGS = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 64 << 20,
    "logprobs_mode": "raw_logits",
    "max_logprobs": -1,
}


def plain(path, eager):
    from vllm import LLM

    return LLM(
        model=path, enforce_eager=eager, skip_tokenizer_init=True, enable_prefix_caching=False, **KWARGS
    )


def look(llm):
    """Raw logits, and everything of the harness that could be found in a plain engine."""
    from harness.vllm.raw_logits import read_raw_logits

    logits = read_raw_logits(llm, PROMPTS, 259, 3)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    model = worker.model_runner.get_model()
    return {
        "logits": [row.tolist() for request in logits for row in request],
        "worker": f"{type(worker).__module__}.{type(worker).__name__}",
        "runner": type(worker.model_runner).__name__,
        "hooks": sum(len(module._forward_hooks) for module in model.modules()),
        "buffers": [name for name, _ in model.named_buffers() if "_tap_" in name],
        "config": llm.llm_engine.vllm_config.additional_config,
    }


def main():
    from harness.vllm.boot import boot_vllm
    from harness.vllm.overlays import get_overlay
    from harness.vllm.plugin import clear_config, configure

    path, eager = sys.argv[1], sys.argv[2] == "eager"
    found = {}
    before = plain(path, eager)
    found["before"] = look(before)
    bridge = boot_vllm(path, enable_batching=eager, **KWARGS)
    result = bridge.driver.forward(PROMPTS, capture=["blocks.1.hook_out"], return_logits=False)
    found["captured"] = result.captured["blocks.1.hook_out"].abs().sum().item()
    found["beside"] = look(before)
    bridge.close()
    found["after"] = look(plain(path, eager))
    # The plugin's way in: a plain LLM(...) that is instrumented while configured, and not before or after.
    specs = get_overlay("LlamaForCausalLM").capture_specs(bridge.cfg)
    configure(specs, 64, "float32")
    configured = plain(path, eager)
    configured.collective_rpc("tl_reset_capture_flags", args=(["blocks.1.hook_out"],))
    look(configured)
    read = configured.collective_rpc("tl_read_batched_captures")[0]
    found["configured rows"] = sorted(hooks["blocks.1.hook_out"]["shape"][0] for hooks in read.values())
    clear_config()
    found["cleared"] = look(plain(path, eager))
    print("PROBE " + json.dumps(found))


if __name__ == "__main__":
    main()
