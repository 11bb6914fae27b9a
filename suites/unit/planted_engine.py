"""Engines in this process with something wrong in them, for tests of the bisection."""

from __future__ import annotations

import torch

from harness.backend import BootConfig
from harness.bisect.bench import Call
from harness.capabilities import FULL
from harness.check import Parity
from harness.reference.backend import ReferenceBackend
from harness.session import ParitySession

CONFIG = BootConfig("hf", "tiny-llama", "", mode="eager")
PROMPTS = ((5, 6, 7, 8, 9, 10, 11, 12), (21, 22, 23), (31, 32, 33, 34, 35))
CALL = Call(PROMPTS)


class Planted(Parity):
    """An engine in this process: transformers, with whatever is wrong in it."""

    capabilities = FULL

    def __init__(self, session: ParitySession, plant=None, spoil=None) -> None:
        super().__init__(session, CONFIG)
        self.backend = ReferenceBackend.boot(self.config)
        self.spoil = spoil
        self.before: list = []
        if plant is not None:
            plant(self.backend._model.model.layers)

    @property
    def engine(self):
        return self.backend

    def forward(self, prompts, **kwargs):
        result = super().forward(prompts, **kwargs)
        if self.spoil is not None:
            self.spoil(self, result)
        self.before.append(result)
        return result


def louder(module, by: float = 1.5):
    with torch.no_grad():
        module.weight.mul_(by)


def late(module, position: int, length: int | None = None):
    """Wrong from a position on, in sequences of at least some length."""

    def hook(_module, _args, output):
        if output.shape[1] >= (length or 0):
            output = output.clone()
            output[:, position:] *= 1.5
        return output

    module.register_forward_hook(hook)


FAULTS = {
    "norm before attention": (
        lambda layers: louder(layers[2].input_layernorm),
        "blocks.2.attn.hook_in",
        "norm",
        0,
    ),
    "query projection": (
        lambda layers: late(layers[1].self_attn.q_proj, 2),
        "blocks.1.attn.hook_q",
        "attention",
        2,
    ),
    "value projection": (
        lambda layers: louder(layers[0].self_attn.v_proj),
        "blocks.0.attn.hook_v",
        "attention",
        0,
    ),
    "output projection": (
        lambda layers: late(layers[3].self_attn.o_proj, 1),
        "blocks.3.attn.hook_out",
        "attention",
        1,
    ),
    "norm before the MLP": (
        lambda layers: louder(layers[0].post_attention_layernorm),
        "blocks.0.mlp.hook_in",
        "norm",
        0,
    ),
    "the MLP": (lambda layers: louder(layers[2].mlp.down_proj), "blocks.2.mlp.hook_out", "MLP", 0),
    "the sum": (lambda layers: late(layers[1], 2), "blocks.1.hook_out", "residual stream", 2),
}
