"""The reference as a backend: what it serves is what transformers computes and generates."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from harness.backend import BootConfig, Topology
from harness.errors import UsageError
from harness.reference.backend import ReferenceBackend, boot_reference
from harness.reference.run import run_reference, teacher_forced
from suites.unit.small_llama import IDS, POINTS, PROMPTS, VOCAB, relative

if TYPE_CHECKING:
    from pathlib import Path


class TestBackend:
    @pytest.fixture
    def backend(self, checkpoint: Path) -> ReferenceBackend:
        return boot_reference(checkpoint)

    def test_forward(self, backend: ReferenceBackend) -> None:
        result = backend.forward(PROMPTS, capture=POINTS, max_new_tokens=4, return_logits=True)
        assert result.lengths == [len(ids) + 3 for ids in PROMPTS]
        assert result.logits is not None
        assert result.logits.shape == (3, max(result.lengths), VOCAB)
        assert list(result.captured) == POINTS
        for index, ids in enumerate(PROMPTS):
            forced = teacher_forced([ids], [result.new_tokens[index]])
            expected = run_reference(backend._alive(), forced, POINTS)
            for hook in POINTS:
                assert relative(result.rows(hook, index), expected.captured[hook][0]) < 1e-5
                assert not result.captured[hook][index, result.lengths[index] :].any()
            assert bool((result.logits[index, result.lengths[index] :] == float("-inf")).all())
            assert [int(row.argmax()) for row in expected.logits[0][len(ids) - 1 :]] == result.new_tokens[
                index
            ]

    def test_prompt_rows_do_not_depend_on_what_follows(self, backend: ReferenceBackend) -> None:
        one, four = (backend.forward(PROMPTS, capture=POINTS, max_new_tokens=k) for k in (1, 4))
        for hook in POINTS:
            for index, ids in enumerate(PROMPTS):
                assert torch.equal(one.rows(hook, index), four.rows(hook, index)[: len(ids)])

    def test_greedy_is_what_transformers_generates(self, backend: ReferenceBackend) -> None:
        # Its own loop, with its own cache; greedy and without an end token. The mask is said, or the 0 among the ids
        # would be taken for padding.
        ids = torch.tensor([IDS])
        expected = backend._alive().generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert backend.forward([IDS], max_new_tokens=8).new_tokens == [expected[0, len(IDS) :].tolist()]

    def test_capture_is_authoritative(self, backend: ReferenceBackend) -> None:
        result = backend.forward([IDS])
        assert result.captured == {}
        assert result.logits is None
        assert result.lengths == [len(IDS)]

    def test_raw_logits(self, backend: ReferenceBackend) -> None:
        result = backend.forward(PROMPTS, capture=POINTS, return_logits=True)
        assert result.logits is not None
        for index, raw in enumerate(backend.raw_logits(PROMPTS)):
            assert torch.equal(raw, result.logits[index, : len(PROMPTS[index])])

    def test_describe_and_close(self, checkpoint: Path) -> None:
        with boot_reference(checkpoint, "bf16", attn_implementation="eager") as backend:
            told = json.loads(json.dumps(backend.describe()))
            assert (told["dtype"], told["attn_implementation"]) == ("bfloat16", "eager")
        backend.close()
        with pytest.raises(UsageError, match="closed"):
            backend.forward([IDS])

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"mode": "compiled"}, "no compiled mode"),
            ({"topology": Topology(tp=2)}, "tp2"),
            ({"options": {"worker_cls": "x"}}, "'worker_cls'"),
            ({"max_model_len": 129}, "max_model_len is 129"),
            ({"max_model_len": 0}, "max_model_len is 0"),
        ],
    )
    def test_boot_refuses(self, checkpoint: Path, change: dict[str, Any], message: str) -> None:
        config = BootConfig("hf", "tiny", str(checkpoint), mode="eager", max_model_len=64)
        with pytest.raises(UsageError, match=message):
            ReferenceBackend.boot(dataclasses.replace(config, **change))

    @pytest.mark.parametrize("steps", [0, -1, True, 1.5])
    def test_wrong_number_of_tokens(self, backend: ReferenceBackend, steps: Any) -> None:
        with pytest.raises(UsageError, match="max_new_tokens"):
            backend.forward([IDS], max_new_tokens=steps)

    def test_decode_steps_need_positions(self, checkpoint: Path) -> None:
        backend = boot_reference(checkpoint, max_model_len=14)
        assert backend.forward([IDS], max_new_tokens=3).lengths == [14]
        with pytest.raises(UsageError, match="at most 11 fit"):
            backend.forward([IDS], max_new_tokens=4)
