"""A backend in fifty lines: a Llama in transformers, read and edited by forward hooks."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, __version__

# The one table of names: what follows `blocks.{i}.` → the module whose output it is.
MODULES = {"hook_out": "", "attn.hook_out": ".self_attn", "mlp.hook_out": ".mlp"}


class ExampleBackend:
    capabilities = {
        "capture": [f"blocks.*.{name}" for name in MODULES],
        "edit": {op: [f"blocks.*.{name}" for name in MODULES] for op in ("suppress", "scale", "add", "set")},
        "batch": True,
        "edit_per_prompt": True,
        "edit_positions": True,
        "logits": True,
    }

    def __init__(self, model):
        self.model = model

    @classmethod
    def boot(cls, config):
        return cls(AutoModelForCausalLM.from_pretrained(config.path, dtype=getattr(torch, config.dtype)))

    def describe(self):
        return {"transformers": __version__, "torch": torch.__version__}

    @torch.no_grad()
    def run(self, prompts, *, capture, edits, new_tokens, logits):
        found = {name: [] for name in capture}
        rows = []
        for prompt, here in zip(prompts, edits):
            by_name = {edit["hook"]: edit for edit in here}
            hooks = [self.hook(name, by_name.get(name), found) for name in {*capture, *by_name}]
            rows.append(self.model(torch.tensor([prompt])).logits[0].float())
            for hook in hooks:
                hook.remove()
        return {"captured": found, "logits": rows}

    def hook(self, name, edit, found):
        _, block, point = name.split(".", 2)

        def forward_hook(module, args, output):
            value = (output[0] if isinstance(output, tuple) else output).clone()
            if edit is not None:
                at = slice(None) if edit["rows"] is None else edit["rows"]
                scaled = value[0, at].float() * edit["scale"] if edit["scale"] else 0.0
                value[0, at] = (scaled + edit["bias"].expand_as(value[0, at])).to(value.dtype)
            if name in found:
                found[name].append(value[0])
            return (value, *output[1:]) if isinstance(output, tuple) else value

        module = self.model.get_submodule(f"model.layers.{block}{MODULES[point]}")
        return module.register_forward_hook(forward_hook)

    def close(self):
        self.model = None
