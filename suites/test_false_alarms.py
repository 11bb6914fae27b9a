"""Sound engines, as different as twenty seeds make them, and none may be called broken.

A draw is an engine (model, dtype, mode, ranks, step, threads) and a call on it (prompts, their order, new tokens,
edits), all of it from its seed. `vllm-parity trial` shows how near their bounds the comparisons of such runs came: what
the one constant of the verdict is chosen by.
"""

from __future__ import annotations

import pytest

from harness.draws import ANYTHING, QUICK, draws
from harness.reference.run import teacher_forced
from suites.draws import Calls


@pytest.mark.parity(
    models=("tiny-llama", "smollm2-135m"),
    topologies=("tp1", "tp2", "pp2"),
    extra_topologies=("tp2", "pp2"),
    backends=("vllm",),
    draws=draws(20, ANYTHING),
    smoke={"draws": draws(2, QUICK)},
)
def test_clean_draw(parity, draw):
    """Activations, logits and edits of one draw, by the checks that judge every engine."""
    call = Calls(parity).of(draw.seed)
    threads = parity.engine.describe.get("threads")
    parity.note("draw", seed=draw.seed, threads=threads or draw.threads, **call.facts)
    assert not (draw.threads and threads) or threads == draw.threads, (
        "the engine took other threads than asked"
    )
    result = parity.forward(call.prompts, max_new_tokens=call.steps, return_logits=True)
    parity.check(call.prompts, result)
    sequences = teacher_forced(call.prompts, result.new_tokens)
    parity.check_logits(sequences, [result.logit_rows(i) for i in range(len(sequences))])
    again = parity.forward(call.reordered, max_new_tokens=call.steps)
    parity.check(call.reordered, again, label="in another order")
    parity.check_edits(call.prompts, call.specs, max_new_tokens=call.steps, must_bite=False)
