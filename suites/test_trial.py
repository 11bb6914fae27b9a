"""The sensitivity curve: faults of known size in the captures of a sound engine, and the smallest that turn it red.

One call of 64 requests (in chunks, with decode steps) is run and judged sound. Then its captured rows are spoilt, one
fault at a time, and judged again as any engine is. ``vllm-parity trial`` makes the table and the figure of the records.
"""

from __future__ import annotations

import pytest

from harness.prompts import of_length
from harness.trial.kinds import Layout
from harness.trial.records import BLIND, CAUGHT, LABEL, NAMED, above, packed, share
from harness.trial.sweep import SWEEPS, row_noise, sweep

#: Prompt lengths: 62 short ones, one of a single token, and one that takes several steps.
LENGTHS = (*(2 + i % 5 for i in range(62)), 1, 150)
STEPS = 3


@pytest.mark.parity(models=("tiny-llama",), modes=("eager",), steps=(64,), smoke={"dtypes": ("fp32",)})
def test_sensitivity(parity):
    """Of faults above three times the noise nearly all are seen, and the hook they begin at is named first."""
    prompts = [of_length(parity, n, seed=i) for i, n in enumerate(LENGTHS)]
    result = parity.forward(prompts, max_new_tokens=STEPS)
    parity.check(prompts, result)
    lengths = tuple(result.lengths)
    layout = Layout(LENGTHS, lengths, parity.step, parity.geometry.head_dim)
    sequences = [[*prompt, *new[:-1]] for prompt, new in zip(prompts, result.new_tokens, strict=True)]
    clean = result.rows_by_hook()
    every = list(range(len(prompts)))
    pair = parity.reference(sequences, list(clean), more_for=every)
    noise = row_noise(
        pair.truth.captured,
        [run.captured for run in pair.same],
        dtype=parity.config.dtype,
        n_layers=parity.n_layers,
        calibrated=parity.noise,
    )
    tried = list(
        sweep(
            clean,
            noise,
            lambda rows: parity.verdict_of(prompts, result, rows),
            layout,
            SWEEPS[parity.profile],
        )
    )
    parity.note(LABEL, **packed(tried))
    loud = above(tried)
    quiet = [one for one in tried if one.multiple < BLIND]
    assert loud
    assert quiet
    assert share(loud, "caught") >= CAUGHT, [one for one in loud if not one.caught]
    red = [one for one in loud if one.caught]
    assert share(red, "right") >= NAMED, [one for one in red if not one.right]
    assert share(red, "placed") >= NAMED, [one for one in red if not one.placed]
