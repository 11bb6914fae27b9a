"""A causal story told twice: activation patching in the engine gives the same map as in transformers.

"The capital of Italy is" is run with the residual stream of "The capital of France is" put in at one block and one
position at a time. How far that moves the answer from Rome to Paris says where the model keeps which country it is
about. The map of the engine must be the reference's, within the reference's own noise.
"""

from __future__ import annotations

import math

import pytest
import torch

from harness.points import BLOCK_OUT, FINAL_NORM
from harness.reference.weights import final_norm_weight, unembedding_rows

CLEAN, CORRUPT = "The capital of France is", "The capital of Italy is"
ANSWERS = " Paris", " Rome"
#: Patches per call: one program each, one request each.
BATCH = 15
#: In the smoke profile every so-many-th block is patched, and the last one.
STRIDE = 10


class Answer:
    """The difference of two words' logits at a prompt's last row, from the captured final norm, in fp64."""

    def __init__(self, parity) -> None:
        ids = [parity.tokenizer(word)["input_ids"] for word in ANSWERS]
        assert [len(i) for i in ids] == [1, 1], f"{ANSWERS} are not one token each"
        rows = unembedding_rows(parity.config.path, [i[0] for i in ids]).double()
        self._direction = (rows[0] - rows[1]) * final_norm_weight(parity.config.path).double()

    def of(self, normalised: torch.Tensor) -> float:
        """(n, width) captured at ln_final → logit(Paris) - logit(Rome) after the last row."""
        return float(normalised[-1].double() @ self._direction)


def _edit(hook, value, position):
    return {hook: {"op": "set", "value": value.float().tolist(), "pos": position}}


@pytest.mark.parity(tokenizer=True, models=("smollm2-135m",), smoke={"modes": ("compiled",)})
def test_patching_map_is_the_reference_s(parity):
    """Patch each block and position; the engine's map of what that does to the answer equals transformers'."""
    answer = Answer(parity)
    clean, corrupt = ([int(i) for i in parity.tokenizer(text)["input_ids"]] for text in (CLEAN, CORRUPT))
    assert len(clean) == len(corrupt)
    smoke = parity.profile == "smoke"
    blocks = sorted({*range(0, parity.n_layers, STRIDE if smoke else 1), parity.n_layers - 1})
    base = parity.forward([clean, corrupt])
    patches = [(block, position) for block in blocks for position in range(len(corrupt))]
    engine, truth, realisations = [], [], []
    for start in range(0, len(patches), BATCH):
        part = patches[start : start + BATCH]
        specs = [
            _edit(BLOCK_OUT.format(i=block), base.rows(BLOCK_OUT.format(i=block), 0)[position], position)
            for block, position in part
        ]
        prompts = [corrupt] * len(part)
        edited = parity.check_edits(
            prompts, specs, label=f"blocks {part[0][0]} to {part[-1][0]}", must_bite=False
        )
        engine += [answer.of(edited.rows(FINAL_NORM, i)) for i in range(len(part))]
        pair = parity.reference(prompts, [FINAL_NORM], edits=parity.edits(specs, edited.lengths))
        truth += [answer.of(rows) for rows in pair.truth.captured[FINAL_NORM]]
        realisations.append([[answer.of(rows) for rows in run.captured[FINAL_NORM]] for run in pair.same])
    ends = parity.reference([clean, corrupt], [FINAL_NORM])
    high, low = (answer.of(rows) for rows in ends.truth.captured[FINAL_NORM])
    assert high > 0 > low, f"the model does not know these capitals: {high:.2f}, {low:.2f}"
    same = [[value for part in runs for value in part] for runs in zip(*realisations, strict=True)]
    error = _rms(engine, truth)
    bound = parity.k * max(_rms(one, truth) for one in same)
    parity.note(
        "activation patching",
        maps={
            "title": f"“{CORRUPT}” with the residual stream of “{CLEAN}” put in: 0 Rome, 1 Paris",
            "rows": [f"block {block}" for block in blocks],
            "columns": [parity.tokenizer.decode([token]) for token in corrupt],
            "engine": _grid([(value - low) / (high - low) for value in engine], len(corrupt)),
            "reference": _grid([(value - low) / (high - low) for value in truth], len(corrupt)),
        },
        error=f"{error:.2e}",
        bound=f"{bound:.2e}",
        span=f"{low:.3f} to {high:.3f}",
    )
    last = _grid(truth, len(corrupt))
    assert last[-1][-1] == pytest.approx(high, rel=0.05), "patching the last block's last row must give Paris"
    assert error <= bound, (
        f"the maps differ by {error:.2e} (rms, in logits); the reference's noise allows {bound:.2e}"
    )


def _grid(values, width):
    return [[round(value, 4) for value in values[i : i + width]] for i in range(0, len(values), width)]


def _rms(values, truth):
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(values, truth, strict=True)) / len(truth))
