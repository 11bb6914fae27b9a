"""Run in a process of its own: the library as a person uses it, a bridge on a real engine.

Prints one line of JSON. Arguments: model, ``eager`` or ``compiled``.
"""

from __future__ import annotations

import json
import os
import sys
import warnings

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

TEXT = "The capital of France is"


def main():
    from harness import boot_vllm
    from harness.errors import UsageError

    model, eager = sys.argv[1], sys.argv[2] == "eager"
    options = {"dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 64}
    found = {}
    with boot_vllm(model, enable_batching=eager, **options) as bridge:
        ids = bridge.to_tokens(TEXT)
        logits, cache = bridge.run_with_cache(TEXT, names_filter=lambda name: name.endswith("mlp.hook_out"))
        found["cache"] = {name: list(tensor.shape) for name, tensor in cache.items()}
        found["logits"] = list(logits.shape)
        found["next"] = bridge.tokenizer.decode([int(logits[0, -1].argmax())])
        one = bridge.run_with_cache(TEXT, names_filter="embed.hook_out", return_type=None)
        found["one"] = [one[0], list(one[1])]
        both, loss = bridge.forward(TEXT, return_type="both")
        found["same"] = bool((both == logits).all())
        found["loss"] = [float(loss), float(bridge.forward(TEXT, return_type="loss"))]
        edit = {"blocks.5.hook_out": {"op": "suppress"}}
        edited = bridge.run_with_interventions(TEXT, edit)
        found["edit bites"] = bool((edited[0, -1] - logits[0, -1]).abs().max() > 1)
        found["clean after"] = bool((bridge(TEXT) == logits).all())
        found["generated"] = bridge.tokenizer.decode(bridge.generate(TEXT, 4)[0])
        found["generated edited"] = bridge.generate(TEXT, 4, intervene=edit) != bridge.generate(TEXT, 4)
        found["prompt"] = len(ids[0])
        weight = bridge.driver.get_param("model.norm.weight")
        found["norm"] = list(weight.shape)
        found["missing"] = bridge.driver.get_param("model.no.such.weight")
        bridge.close()
        bridge.close()
    found["refused"] = []
    with (
        warnings.catch_warnings(record=True) as caught,
        boot_vllm(model, enable_batching=eager, hook_points=["blocks.*.hook_out"], **options) as bridge,
    ):
        warnings.simplefilter("always")
        logits = bridge.forward(ids)
        bridge.forward(ids)
        told = [str(w.message) for w in caught if "no sequence logits" in str(w.message)]
        found["warnings"] = told
        found["fallback"] = [
            int((logits[0, -1] > -float("inf")).sum()),
            bool((logits[0, :-1] == -float("inf")).all()),
        ]
        for return_type in ("loss", "both"):
            try:
                bridge.forward(ids, return_type=return_type)
            except UsageError as error:
                found["refused"].append(str(error))
    print("PROBE " + json.dumps(found))


if __name__ == "__main__":
    main()
