"""Run in a process of its own: the library as a person uses it, a bridge on a real engine.

Prints one line of JSON. Arguments: model, ``eager`` or ``compiled``.
"""

from __future__ import annotations

import json
import sys
import warnings

TEXT = "The capital of France is"


def worker_surface(bridge, ids):
    """The worker's RPC methods that the driver itself has no use for."""
    from harness.vllm.wire import decode_tensor

    hook, llm = "blocks.5.hook_out", bridge.driver.llm
    rpc = llm.collective_rpc
    clean = bridge.driver.forward(ids, capture=[hook], return_logits=False).captured[hook]
    rpc("tl_set_interventions", args=({hook: {"op": "suppress", "pos": 2}},))
    edited = bridge.driver.forward(ids, capture=[hook], return_logits=False).captured[hook]
    rpc("tl_set_interventions", args=(None,))
    after = bridge.driver.forward(ids, capture=[hook], return_logits=False).captured[hook]
    rpc("tl_reset_capture_flags", args=([hook],))
    bridge.driver.llm.generate([{"prompt_token_ids": ids[0]}], use_tqdm=False)
    read = decode_tensor(rpc("tl_read_captures", args=([len(ids[0])],))[0][hook])
    rpc("tl_reset_accumulators")
    before = bridge.driver.forward(ids, return_logits=False).new_tokens
    removed = [rpc("tl_remove_hooks")[0] for _ in range(2)]
    return {
        "suppressed": bool((edited[0, 2] == 0).all()) and bool((edited[0, :2] == clean[0, :2]).all()),
        "unset": bool((after == clean).all()),
        "read": bool((read == clean[0]).all()),
        "removed": removed,
        "runs on": bridge.driver.forward(ids, return_logits=False).new_tokens == before,
    }


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
        found |= worker_surface(bridge, ids)
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
