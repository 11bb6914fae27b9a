"""Mixtures of experts: tokens go to the same experts as in the reference, wherever its own noise does not decide."""

from __future__ import annotations

import itertools

import pytest
import torch

from harness.points import MLP_IN, MLP_OUT
from harness.prompts import of_length

MIXTURES = ("tiny-mixtral", "tiny-qwen3moe")


def in_order(experts):
    """The same experts, (n, k), ascending."""
    return experts.sort(dim=1).values


def chosen(logits, k):
    """The experts of each row of (n, experts), ascending."""
    return in_order(logits.topk(k, dim=1).indices)


def margins(route):
    """By how much each row's least of its experts is ahead of the best of the others; below zero where it is behind."""
    logits = route.logits.double()
    mine = torch.zeros_like(logits, dtype=torch.bool).scatter(1, route.experts, value=True)
    return logits.masked_fill(~mine, torch.inf).amin(dim=1) - logits.masked_fill(mine, -torch.inf).amax(dim=1)


@pytest.mark.parity(
    models=MIXTURES,
    extra_models=MIXTURES,
    backends=("vllm",),
    steps=(64,),
    smoke={"models": MIXTURES[:1], "dtypes": ("bf16",), "modes": ("eager",)},
    full={},
)
def test_experts(parity):
    """What the gates are given sends tokens to the same experts, but within noise; the experts' outputs are judged."""
    prompts = [of_length(parity, n, seed=n) for n in (70, 33, 12)]
    with parity.variant(hook_points=[MLP_IN.replace("{i}", "*"), MLP_OUT.replace("{i}", "*")]) as wide:
        result = wide.forward(prompts)
        wide.settle_routes(prompts, result)
        alone = wide.reference(prompts, wide.hook_points, choices=[()] * len(prompts))
        pair = wide.reference(prompts, wide.hook_points)
        rows = agree = beyond = 0
        for number, block in itertools.product(range(len(prompts)), range(parity.n_layers)):
            given = result.rows_by_hook()[MLP_IN.format(i=block)][number].double()
            route = pair.truth.routing[number][block]
            went = chosen(given @ wide.routes.router(block).double().T, route.experts.shape[1])
            same = torch.stack([run.routing[number][block].logits.double() for run in pair.same])
            noise = (same - route.logits.double()).abs().amax(dim=(0, 2))
            rows += len(went)
            agree += int((went == in_order(alone.truth.routing[number][block].experts)).all(dim=1).sum())
            differ = (went != in_order(route.experts)).any(dim=1)
            beyond += int((differ & ~(margins(route) <= 2 * parity.k * noise)).sum())
        parity.note("routing of all rows", rows=rows, agree=agree / rows, beyond_noise=beyond)
        assert not beyond, f"{beyond} of {rows} rows would go to other experts by more than noise allows"
        wide.check(prompts, result)
