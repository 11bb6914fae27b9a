"""What edits cost: a call with 16 edits of their own against a clean one, and the memory of the tables.

    python -m suites.probes.edit_cost [model] [eager|compiled] [dtype]

Paired and interleaved, nothing captured; prints medians, the median of the paired ratios with its quartiles, and bytes.
"""

from __future__ import annotations

import os
import statistics
import sys

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

REPEATS = 15
REQUESTS, TOKENS = 16, 20


def main():
    from harness import boot_vllm
    from suites.edits import randn

    model, mode, dtype = (*sys.argv[1:], *("smollm2-135m", "compiled", "float32")[len(sys.argv) - 1 :])
    options = {"dtype": dtype, "max_model_len": 128, "max_num_batched_tokens": 512}
    with boot_vllm(model, enable_batching=mode == "eager", **options) as bridge:
        driver, width = bridge.driver, bridge.cfg.hidden_size
        prompts = [[(7 * i + j) % 200 + 3 for j in range(TOKENS)] for i in range(REQUESTS)]
        hook = f"blocks.{bridge.cfg.num_hidden_layers // 2}.hook_out"
        specs = [{hook: {"op": "add", "value": randn(i, width)}} for i in range(REQUESTS)]
        clean, edited, ratios = [], [], []
        for _ in range(REPEATS):
            plain = driver.forward(prompts, return_logits=False).stats["seconds"]
            with_edits = driver.forward(prompts, intervene=specs, return_logits=False).stats["seconds"]
            clean.append(plain)
            edited.append(with_edits)
            ratios.append(with_edits / plain)
        low, middle, high = statistics.quantiles(ratios[2:], n=4)
        size = driver.llm.collective_rpc("tl_tap_bytes")[0]
        print(
            f"{model} {mode} {dtype}: {REQUESTS} requests of {TOKENS} tokens: clean {statistics.median(clean):.4f} s, "
            f"with {REQUESTS} edits {statistics.median(edited):.4f} s, ratio {middle:.3f} ({low:.3f} to {high:.3f}); "
            f"tables {size['tables'] / 2**20:.2f} MiB, step buffers {size['rows'] / 2**20:.2f} MiB"
        )


if __name__ == "__main__":
    main()
