"""The logit checks on trial: unembeddings, masks and losses that are wrong must turn them red, for the right reason."""

from __future__ import annotations

import pytest
import torch

from harness.errors import CaptureError
from harness.loss import token_losses
from harness.prompts import of_length
from suites import test_logits
from suites.trial import expect_red


def left_padded(parity):
    """The left-padded half of ``test_padded_batches_give_the_unpadded_rows``, rows alone."""
    prompts = [of_length(parity, n, seed=i) for i, n in enumerate((9, 4))]
    plain = parity.forward(prompts)
    padded, mask = test_logits._padded(prompts, (7, 12), 16)
    result = parity.forward(padded, attention_mask=mask)
    parity.bit_equal(
        [result.captured[hook][i, left:16] for hook in result.captured for i, left in enumerate((7, 12))],
        [plain.rows(hook, i) for hook in plain.captured for i in range(2)],
        label="padded left",
        what="captured rows of a batch padded left",
    )


def scaled_opinions(parity):
    """Rebuilt logits against raw ones, on an engine with a scale and a soft-cap: no reference has both."""
    prompts = [of_length(parity, n, seed=i) for i, n in enumerate((9, 4))]
    rebuilt = parity.forward(prompts, return_logits=True)
    raw = parity.engine.raw_logits(prompts)
    apart = max(float((rebuilt.logit_rows(i) - rows).abs().max()) for i, rows in enumerate(raw))
    # No truth has both, so the size tells: the two agree to 1e-6 in fp32, and another order moves logits by tenths.
    if apart > 1e-4:
        pytest.fail(f"rebuilt logits against the engine's own: {apart:.2e} apart", pytrace=False)


#: Model → faults that show on it: the check that must catch each, what the message must say, further engine options.
FAULTS = {
    "tiny-llama": {
        "PadColumnsKept": (test_logits.test_every_position, r"\(\d+, 320\).*vocabulary of 259", {}),
        "EmbeddingThoughUntied": (
            test_logits.test_every_position,
            r"logits is the first hook that fails",
            {},
        ),
        "PreWeightNorm": (test_logits.test_every_position, r"logits is the first hook that fails", {}),
        "LeftPaddingAsRight": (left_padded, r"captured rows of a batch padded left", {}),
        "MaskIgnored": (left_padded, r"captured rows of a batch padded left", {}),
    },
    "tiny-gemma2": {
        "SoftCapSkipped": (test_logits.test_every_position, r"logits is the first hook that fails", {}),
        "ScaleBeforeCap": (
            scaled_opinions,
            r"rebuilt logits against the engine's own",
            {"worker_cls": "harness.faults.logits.ScaledAndCapped"},
        ),
    },
    "tiny-gptj": {
        "BiasDropped": (test_logits.test_every_position, r"logits is the first hook that fails", {})
    },
}


@pytest.mark.parity(
    models=tuple(FAULTS),
    extra_models=tuple(FAULTS),
    backends=("vllm",),
    dtypes=("fp32",),
    smoke={"modes": ("eager",)},
)
def test_planted_faults_are_caught(parity):
    """Logits made wrongly, in every way this model can show, turn the logit checks red, and the message says where."""
    for fault, (check, says, options) in FAULTS[parity.config.model].items():
        expect_red(parity, f"logits.{fault}", check, says, errors=(CaptureError,), side="driver", **options)


@pytest.mark.parity(
    models=("tiny-gemma2",), extra_models=("tiny-gemma2",), dtypes=("fp32",), modes=("eager",)
)
def test_scale_after_cap_on_a_healthy_driver(parity):
    """The control of ``ScaleBeforeCap``: with scale and soft-cap both there, rebuilt logits are the engine's own."""
    with parity.planted("logits.ScaledAndCapped") as scaled:
        scaled_opinions(scaled)


@pytest.mark.parity(models=("tiny-llama",), backends=("vllm",), dtypes=("fp32",), modes=("eager",))
def test_a_loss_shifted_by_one_is_seen(parity):
    """A loss that takes row i for token i, not for token i + 1, is far from the reference's; the right one is not."""
    prompt = of_length(parity, 40)
    logits = parity.forward([prompt], capture=[], return_logits=True).logit_rows(0)
    pair = parity.reference([prompt], [], logits=True)
    truth = token_losses(pair.truth.logits[0], prompt)
    noise = max(float((token_losses(run.logits[0], prompt) - truth).abs().max()) for run in pair.same)
    shifted = torch.nn.functional.cross_entropy(logits, torch.tensor(prompt), reduction="none")[:-1]
    assert float((token_losses(logits, prompt) - truth).abs().max()) <= parity.k * noise
    assert float((shifted - truth).abs().max()) > 1000 * parity.k * noise
