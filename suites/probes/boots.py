"""Run in a process of its own: engines booted and closed one after the other, and what the process holds after each.

    python -m suites.probes.boots MODEL eager|compiled tapped|plain [boots]

Prints one line of JSON: resident bytes after each close. What vLLM itself never gives back is in ``plain`` too.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def main():
    from harness.backend import BootConfig, load_backend
    from harness.budgets.measure import measure_memory
    from harness.models import resolve

    model, mode, kind, boots = (*sys.argv[1:], *("tiny-llama", "eager", "tapped", "6")[len(sys.argv) - 1 :])
    config = BootConfig(
        backend="vllm",
        model=model,
        path=str(resolve(model).fetch()),
        dtype="float32",
        mode=mode,
        max_model_len=640,
        max_num_batched_tokens=512,
    )
    plain = kind == "plain"
    held, taps = [], 0
    for _ in range(int(boots)):
        engine = load_backend("vllm").boot(config.with_options(instrument=False) if plain else config)
        capture = [] if plain else engine.supported_hook_points
        engine.forward([[(7 * i) % 200 + 3 for i in range(500)]], capture=capture)
        taps = 0 if plain else sum(engine.tap_bytes()[0].values())
        engine.close()
        del engine
        gc.collect()
        # glibc's allocator keeps what was freed; asked to, it gives back what nobody holds.
        ctypes.CDLL(None).malloc_trim(0)
        held.append(measure_memory()["resident"])
    print("PROBE " + json.dumps({"held": held, "taps": taps}))


if __name__ == "__main__":
    main()
