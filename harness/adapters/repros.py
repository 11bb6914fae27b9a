"""How each library is asked for one point of one prompt, as lines of a script that needs nothing but the library.

Text, and not the adapters' own code: what is pasted into an issue has to be read there. The lines may use ``path``,
``dtype``, ``prompt`` and ``hook``, and where there is an edit ``at`` and ``change``, or ``edits``, its spec; they leave
``found``, (rows, width).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["REPROS", "Repro"]


@dataclass(frozen=True)
class Repro:
    """Lines for one library.

    Attributes:
        imports: of what the lines need beside torch.
        clean: without an edit.
        edited: with one; empty where the library is asked for none.
        raw: ``found`` is what the module returns, so that the final norm's weight is still in it.
    """

    imports: str
    clean: str
    edited: str = ""
    raw: bool = False


_BRIDGE = 'bridge = TransformerBridge.boot_transformers(path, device="cpu", dtype=dtype)\n'
_READ = "_, cache = bridge.run_with_cache(torch.tensor([prompt]), names_filter=[hook])\n"
_SOURCE = "bridge = boot_vllm(path, dtype=dtype, max_model_len=256, enable_batching=True)\n"

#: Module of an adapter → its library's lines.
REPROS = {
    "transformer_lens_bridge": Repro(
        "from transformer_lens.model_bridge import TransformerBridge",
        f"{_BRIDGE}{_READ}found = cache[hook][0]",
        f"{_BRIDGE}with bridge.hooks(fwd_hooks=[(at, lambda value, hook: change(value))]):\n"
        f"    {_READ}found = cache[hook][0]",
    ),
    "transformer_lens_vllm": Repro(
        "from transformer_lens.model_bridge.sources.vllm import boot_vllm",
        f"{_SOURCE}found = bridge._driver.forward([prompt], capture=(hook,)).captured[hook][0]",
        f"{_SOURCE}found = bridge._driver.forward([prompt], capture=(hook,), intervene=edits).captured[hook][0]",
    ),
    "nnsight_transformers": Repro(
        "import nnsight",
        'traced = nnsight.TransformersModel(path, task="text-generation", dispatch=True, dtype=dtype)\n'
        'with traced.trace({"input_ids": torch.tensor([prompt])}):\n'
        "    output = traced.get(modules[hook]).output\n"
        "    found = nnsight.save((output[0] if isinstance(output, tuple) else output)[0])",
        raw=True,
    ),
    "nnsight_vllm": Repro(
        "from nnsight.modeling.vllm import VLLM",
        "traced = VLLM(path, dispatch=True, dtype=dtype, max_model_len=256)\n"
        "with traced.trace(prompt, temperature=0.0, max_tokens=1):\n"
        '    found = sum(traced.model.layers[int(hook.split(".")[1])].output).save()',
    ),
    "vllm_lens_engine": Repro(
        "from vllm import LLM, SamplingParams",
        "llm = LLM(path, dtype=dtype, max_model_len=256, enable_prefix_caching=False)\n"
        'asked = SamplingParams(max_tokens=1, extra_args={"output_residual_stream": [int(hook.split(".")[1])]})\n'
        'found = llm.generate([{"prompt_token_ids": prompt}], asked)[0].activations["residual_stream"][0]',
    ),
}
