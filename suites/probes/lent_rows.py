"""Run in a process of its own: rows that another process lent, and what becomes of them.

Prints one line of JSON. Arguments: model, ``eager`` or ``compiled``, and the worker's class.
"""

from __future__ import annotations

import json
import os
import sys

HOOK = "blocks.1.hook_out"


def main():
    # Whoever runs this may have its engines in its own process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    import torch

    from harness import boot_vllm
    from harness.vllm.lending import LENT

    model, mode, worker = sys.argv[1:]
    options = {"dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 64, "worker_cls": worker}
    with boot_vllm(model, enable_batching=mode == "eager", hook_points=[HOOK], **options) as bridge:

        def rows(first_id):
            result = bridge.driver.forward([[first_id, 4, 5, 6], [first_id, 9]], capture=[HOOK])
            return [result.rows(HOOK, request) for request in range(2)], result

        first, result = rows(3)
        copies = [one.clone() for one in first]
        other, _ = rows(7)
        found = {
            "kept": all(map(torch.equal, first, copies)),
            "other": not any(map(torch.equal, other, copies)),
            "again": all(map(torch.equal, rows(3)[0], copies)),
            "lent": bridge.driver._readback.way == LENT,
        }
        first[0].zero_()
        found |= {
            "writable": not first[0].any() and not result.captured[HOOK][0, :4].any(),
            "own": all(map(torch.equal, rows(3)[0], copies)),
        }
    # The engine has ended, and what it lent is still there.
    found["outlives"] = torch.equal(first[1], copies[1])
    print("PROBE " + json.dumps(found))


if __name__ == "__main__":
    main()
