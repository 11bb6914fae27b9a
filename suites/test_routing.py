"""Mixtures of experts: tokens go to the same experts as in the reference, wherever its own noise does not decide."""

from __future__ import annotations

import pytest
import torch

from harness.points import MLP_IN, MLP_OUT
from harness.prompts import of_length
from harness.reference.weights import read_tensor
from harness.vllm.overlays import get_overlay

MIXTURES = ("tiny-mixtral", "tiny-qwen3moe")


def router_logits(rows, gate):
    """(n, experts) fp64 of rows (n, width)."""
    return rows.double() @ gate.double().T


def chosen(logits, k):
    """The experts of each row, in no order."""
    return logits.topk(k, dim=1).indices.sort(dim=1).values


def margins(logits, k):
    """By how much each row's last chosen expert is ahead of the first that is not."""
    ranked = logits.sort(dim=1, descending=True).values
    return ranked[:, k - 1] - ranked[:, k]


@pytest.mark.parity(
    models=MIXTURES,
    extra_models=MIXTURES,
    backends=("vllm",),
    steps=(64,),
    smoke={"models": MIXTURES[:1], "dtypes": ("bf16",), "modes": ("eager",)},
)
def test_experts(parity):
    """What the gates are given sends tokens to the same experts, but within noise; the experts' outputs are judged."""
    k = parity.hf_config.num_experts_per_tok
    path = get_overlay(parity.hf_config.architectures[0]).mlp
    dtype = getattr(torch, parity.config.dtype)
    prompts = [of_length(parity, n, seed=n) for n in (70, 33, 12)]
    with parity.variant(hook_points=[MLP_IN.replace("{i}", "*"), MLP_OUT.replace("{i}", "*")]) as wide:
        result = wide.forward(prompts)
        pair = wide.reference(prompts, wide.hook_points)
        rows = agree = beyond = 0
        for block in range(parity.n_layers):
            gate = read_tensor(parity.config.path, f"{path.format(i=block)}.gate.weight").to(dtype)
            hook = MLP_IN.format(i=block)
            engine = router_logits(torch.cat(result.rows_by_hook()[hook]), gate)
            truth = router_logits(torch.cat(pair.truth.captured[hook]), gate)
            same = [router_logits(torch.cat(run.captured[hook]), gate) for run in pair.same]
            noise = torch.stack([(one - truth).abs().amax(dim=1) for one in same]).amax(dim=0)
            differ = (chosen(engine, k) != chosen(truth, k)).any(dim=1)
            rows += len(differ)
            agree += int((~differ).sum())
            beyond += int((differ & (margins(truth, k) > 2 * parity.k * noise)).sum())
        parity.note("routing", rows=rows, agree=agree / rows, beyond_noise=beyond)
        assert not beyond, f"{beyond} of {rows} rows would go to other experts by more than noise allows"
        wide.check(prompts, result)
