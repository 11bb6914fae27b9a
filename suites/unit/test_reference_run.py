"""The reference runs each sequence alone, and keeps what it computed within its limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.reference.load import load_model
from harness.reference.references import References
from harness.reference.run import run_reference, teacher_forced
from harness.reference.truth import load_truth
from suites.unit.small_llama import DTYPES, POINTS, PROMPTS, VOCAB, WIDTH

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from harness.reference.run import ReferenceRun


class TestRun:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_each_sequence_runs_alone(self, checkpoint: Path, dtype: torch.dtype) -> None:
        model = load_model(checkpoint, dtype)
        run = run_reference(model, PROMPTS, ["blocks.1.hook_out", "embed.hook_out"])
        assert list(run.captured) == ["embed.hook_out", "blocks.1.hook_out"]
        for index, ids in enumerate(PROMPTS):
            alone = run_reference(model, [ids], POINTS)
            assert run.logits[index].shape == (len(ids), VOCAB)
            assert run.logits[index].dtype == torch.float32
            assert torch.equal(run.logits[index], alone.logits[0])
            for hook, rows in run.captured.items():
                assert rows[index].shape == (len(ids), WIDTH)
                assert rows[index].dtype == dtype
                assert torch.equal(rows[index], alone.captured[hook][0])

    @given(st.lists(st.tuples(st.lists(st.integers(), min_size=1), st.lists(st.integers(), min_size=1))))
    def test_teacher_forced(self, requests: list[tuple[list[int], list[int]]]) -> None:
        forced = teacher_forced([p for p, _ in requests], [new for _, new in requests])
        for ids, (prompt, new) in zip(forced, requests, strict=True):
            assert ids == (prompt + new)[:-1]
            assert len(ids) == len(prompt) + len(new) - 1

    def test_teacher_forced_wants_pairs(self) -> None:
        with pytest.raises(UsageError, match="2 prompts but 1"):
            teacher_forced([[1], [2]], [[3]])
        with pytest.raises(UsageError, match="prompt 0 has no new token"):
            teacher_forced([[1]], [[]])


def entry_bytes(n_rows: int) -> int:
    """Bytes of one cached sequence of an fp32 engine: T in fp64, three realisations of R in fp32, logits in fp32."""
    return n_rows * (len(POINTS) * WIDTH * (8 + 3 * 4) + 2 * VOCAB * 4)


class TestReferences:
    def test_computed_once(self, checkpoint: Path) -> None:
        references = References()
        first = references.get(checkpoint, "fp32", PROMPTS, POINTS)
        assert references.computed == 4 * len(PROMPTS)
        again = references.get(
            str(checkpoint), torch.float32, [PROMPTS[2], PROMPTS[1], PROMPTS[1]], ["embed.hook_out"]
        )
        assert references.computed == 4 * len(PROMPTS)
        assert again.truth.prompts == [PROMPTS[2], PROMPTS[1], PROMPTS[1]]
        assert list(again.same[0].captured) == ["embed.hook_out"]
        assert again.truth.captured["embed.hook_out"][0] is first.truth.captured["embed.hook_out"][2]
        references.get(checkpoint, "bf16", PROMPTS, POINTS)
        assert references.computed == 8 * len(PROMPTS)

    def test_is_what_run_reference_gives(self, checkpoint: Path) -> None:
        pair = References().get(checkpoint, "bf16", PROMPTS, POINTS)
        truth_run = run_reference(load_truth(checkpoint, "bf16"), PROMPTS, POINTS)
        same_run = run_reference(load_model(checkpoint, "bf16", attn_implementation="sdpa"), PROMPTS, POINTS)
        for got, expected in ((pair.truth, truth_run), (pair.same[0], same_run)):
            assert got.prompts == expected.prompts
            for hook in POINTS:
                assert all(map(torch.equal, got.captured[hook], expected.captured[hook]))
            assert all(map(torch.equal, got.logits, expected.logits))

    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    def test_realisations_differ_by_their_noise(self, checkpoint: Path, dtype: str) -> None:
        """The jittered ones start one unit away, are no worse than R by much, and leave the embedding R's own."""
        pair = References().get(checkpoint, dtype, PROMPTS, POINTS)

        def error(run: ReferenceRun, hook: str) -> float:
            rows, truth = (
                torch.cat(run.captured[hook]).double(),
                torch.cat(pair.truth.captured[hook]).double(),
            )
            return float((rows - truth).norm() / truth.norm())

        plain, *moved = pair.same
        assert len(moved) == 2
        for run in moved:
            assert all(map(torch.equal, run.captured["embed.hook_out"], plain.captured["embed.hook_out"]))
            for hook in POINTS[1:]:
                assert not torch.equal(torch.cat(run.captured[hook]), torch.cat(plain.captured[hook]))
                assert error(run, hook) < 4 * error(plain, hook)
        assert not torch.equal(
            torch.cat(moved[0].captured[POINTS[-1]]), torch.cat(moved[1].captured[POINTS[-1]])
        )

    def test_models_are_freed_before_the_next_is_loaded(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        references = References(max_loaded=1)
        loaded: list[int] = []
        for name, real in (("load_truth", load_truth), ("load_model", load_model)):

            def spy(*args: Any, real: Callable[..., Any] = real, **kwargs: Any) -> Any:
                loaded.append(len(references._models))
                return real(*args, **kwargs)

            monkeypatch.setattr(f"harness.reference.references.{name}", spy)
        for ids in ([1], [2], [3], [4]):
            references.get(checkpoint, "fp32", [ids], POINTS)
        assert set(loaded) == {0}
        # Each call begins with the model the one before ended with.
        assert len(loaded) == 5

    def test_least_recently_used_goes_first(self, checkpoint: Path) -> None:
        references = References(max_bytes=2 * entry_bytes(3), max_loaded=2)
        a, b, c = [1, 2, 3], [4, 5, 6], [7, 8, 9]
        for ids in (a, b, a, c):
            references.get(checkpoint, "fp32", [ids], POINTS)
        assert references.computed == 12
        assert references.nbytes == 2 * entry_bytes(3)
        references.get(checkpoint, "fp32", [a, c], POINTS)
        assert references.computed == 12
        references.get(checkpoint, "fp32", [b], POINTS)
        assert references.computed == 16

    def test_a_batch_over_the_limit_still_comes_whole(self, checkpoint: Path) -> None:
        references = References(max_bytes=1)
        pair = references.get(checkpoint, "fp32", PROMPTS, POINTS)
        assert [len(rows) for rows in pair.same[0].captured["embed.hook_out"]] == [
            len(ids) for ids in PROMPTS
        ]
        assert references.nbytes == 0

    @pytest.mark.parametrize(
        ("dtype", "ids", "capture", "message"),
        [
            ("fp64", [[1]], POINTS, "no truth"),
            ("fp32", [[VOCAB]], POINTS, "outside the vocabulary of 259"),
            ("fp32", [[1] * 129], POINTS, "at most 128"),
            ("fp32", [[1]], ["blocks.4.hook_out"], "unknown hook"),
        ],
    )
    def test_mistakes_cost_no_load(
        self, checkpoint: Path, dtype: str, ids: Any, capture: Any, message: str
    ) -> None:
        references = References()
        with pytest.raises(UsageError, match=message):
            references.get(checkpoint, dtype, ids, capture)
        assert not references._models
        references.close()
