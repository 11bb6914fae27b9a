"""``compare`` on a few rows: every figure of its record, and what it hands on to those who explain."""

from __future__ import annotations

import math

import pytest
import torch

from harness.parity import verdict as module
from harness.parity.explain import Clues
from harness.parity.floor import floor
from harness.parity.types import RowRef
from harness.parity.verdict import compare, reference_noise

EMBED, MLP, BLOCK = "embed.hook_out", "blocks.0.mlp.hook_out", "blocks.0.hook_out"
TRUTH = ([[1.0, 2, 2, 0], [2, 4, 4, 0]], [[0.0, 3, 4, 0]])


def rows(*requests, dtype=torch.float64) -> list[torch.Tensor]:
    return [torch.tensor(request, dtype=torch.float64).to(dtype) for request in requests]


def side(factor: float, *hooks: str, dtype=torch.float32) -> dict[str, list[torch.Tensor]]:
    """The truth times ``factor``, which is off by ``factor - 1`` in every row."""
    return {hook: [(t * factor).to(dtype) for t in rows(*TRUTH)] for hook in hooks or (EMBED, MLP, BLOCK)}


def judge(engine, truth=None, same=None, **options):
    truth = side(1.0, *engine, dtype=torch.float64) if truth is None else truth
    same = side(1.15, *engine) if same is None else same
    return compare(engine, truth, same, **{"dtype": "fp32", "n_layers": 1, **options})


def test_the_record_of_a_hook():
    engine = side(1.0)
    engine[MLP] = rows([[1, 2, 2, 0], [2, 3.4, 4, 0]], [[0, 3, 4.25, 0]], dtype=torch.float32)
    engine[BLOCK] = side(1.1)[BLOCK]
    found = judge(engine)
    assert (found.passed, found.k, found.dtype) == (True, 3.0, "float32")
    assert (found.divergence, found.failed_requests) == (None, ())
    assert found.to_json()["hooks"][1]["worst"] == {"request": 0, "position": 1}
    assert [(h.hook, h.depth) for h in found.hooks] == [(EMBED, 0), (MLP, 1), (BLOCK, 1)]
    hook = found.hooks[1]
    assert (hook.passed, hook.n_rows, hook.n_massive) == (True, 3, 0)
    assert hook.row_errors == ((0.0, 0.1), (0.05,))  # four digits, so exactly
    assert hook.max_abs == pytest.approx(0.6)
    assert (hook.worst, hook.worst_channel) == (RowRef(0, 1), 1)
    assert hook.min_cosine == pytest.approx((4 + 13.6 + 16) / (6 * math.sqrt(4 + 3.4**2 + 16)))
    assert hook.max_ulps == pytest.approx(0.6 * 2**21)
    assert hook.err_engine == pytest.approx(math.sqrt((0.1**2 + 0.05**2) / 3))
    assert [h.amplification for h in found.hooks] == [
        None,
        None,
        pytest.approx(0.1 / hook.err_engine, rel=1e-6),
    ]
    for h in found.hooks:
        gate = h.gates[0]
        assert gate.floor == pytest.approx(floor("float32", h.depth))
        assert gate.err_reference == pytest.approx(0.15)
        assert gate.bound == pytest.approx(0.45)


def test_k_the_slices_and_the_hooks_are_the_callers():
    found = judge(side(1.1), k=0.1, slices=2, hooks=[BLOCK, MLP], explain=False)
    assert not found.passed
    assert found.k == 0.1
    assert found.divergence is None
    assert [hook.hook for hook in found.hooks] == [MLP, BLOCK]
    assert found.failed_requests == (0, 1)
    assert found.hooks[0].gates[2].slice in {(0, 2), (2, 4)}
    wide = {MLP: [torch.ones(1, 72) + 0.1 * torch.eye(72)[:1]]}
    spans = {number: judge(wide, wide, wide, slices=number).hooks[0].gates[2].slice for number in (4, 8)}
    assert spans == {4: (0, 18), 8: (0, 9)}
    assert judge(wide, wide, wide).hooks[0].gates[2].slice == (0, 9)


def test_what_comes_after_the_last_block_carries_all_of_them():
    final = {"ln_final.hook_normalized": rows(*TRUTH, dtype=torch.float32)}
    (hook,) = judge(final, n_layers=15).hooks
    assert hook.depth == 15
    assert hook.floor == pytest.approx(4 * 2**-24)


def test_noise_counts_at_its_own_hook():
    found = judge(side(1.1), noise={MLP: 0.5})
    assert [hook.err_reference for hook in found.hooks] == pytest.approx([0.15, 0.5, 0.15])


def test_what_the_stream_has_carried_counts_less_where_an_edit_scaled_it():
    """The first row was a hundred times as large a block ago."""
    truth = {"blocks.0.hook_out": rows([[100.0, 0], [1, 0]]), "blocks.1.hook_out": rows([[1.0, 0], [1, 0]])}
    exact = {hook: [t.float() for t in tensors] for hook, tensors in truth.items()}

    def floors(**options) -> list[float]:
        found = judge(exact, truth, exact, n_layers=2, **options)
        return [hook.floor / floor("float32", hook.depth) for hook in found.hooks]

    assert floors() == pytest.approx([1, math.sqrt((100**2 + 1) / 2)])
    kept = {"blocks.1.hook_out": torch.tensor([0.1, 1.0], dtype=torch.float64)}
    assert floors(kept=kept) == pytest.approx([1, math.sqrt((10**2 + 1) / 2)])


def test_a_request_at_another_dtype_fails_its_hook_alone():
    engine = side(1.0)
    engine[MLP][1] = engine[MLP][1].bfloat16()
    found = judge(engine, k=2.0, explain=False)
    assert [hook.passed for hook in found.hooks] == [True, False, True]
    gate = found.hooks[1].gates[-1]
    own = floor("float32", 1)
    assert (gate.name, gate.floor, gate.bound, gate.passed) == ("dtype", own, 2 * own, False)
    assert len(found.hooks[0].gates) == len(found.hooks[1].gates) - 1
    assert not found.passed
    assert found.failed_requests == ()
    assert found.notes[0] == f"captured as bfloat16 where the engine runs float32: {MLP}"
    assert judge(engine, check_dtype=False).passed
    assert "captured as bfloat16" not in " ".join(judge(engine, check_dtype=False).notes)


def test_requests_that_any_hook_blames_are_named_once():
    engine = {
        hook: [t.float() for t in rows([[1.0, 2]], [[1.0, 2], [3, 4]], [[1.0, 2]])]
        for hook in (EMBED, MLP, BLOCK)
    }
    truth = {hook: [t.double() for t in tensors] for hook, tensors in engine.items()}
    same = {hook: [t.clone() for t in tensors] for hook, tensors in engine.items()}
    engine[EMBED][2] = engine[EMBED][2] * 1.5
    engine[BLOCK][1] = engine[BLOCK][1] * 1.5
    found = judge(engine, truth, same, explain=False)
    assert [hook.passed for hook in found.hooks] == [False, True, False]
    assert found.failed_requests == (1, 2)


def test_rows_hardly_judged_are_counted_over_hooks():
    (note,) = judge(side(1.1), same=side(1.2)).notes
    assert note.startswith("hardly judged: 9 row(s) are so noisy")
    assert note.endswith(f": {EMBED}, {MLP}, {BLOCK}")


def test_realisations_may_be_several_or_one():
    one = judge(side(1.1), same=side(1.2))
    assert one == judge(side(1.1), same=[side(1.2)])
    both = judge(side(1.1), same=(side(1.2), side(1.3)))
    assert both.hooks[0].err_reference == pytest.approx(0.3)


def test_who_explains_is_told_everything(monkeypatch):
    told, answer = [], object()
    monkeypatch.setattr(module, "diverge", lambda *given: told.append(given) or answer)
    engine, truth = side(1.0), side(1.0, dtype=torch.float64)
    engine[BLOCK][1] = engine[BLOCK][1] * 2
    weight, edits = torch.ones(4), [("an edit", torch.ones(4))]
    earlier = [("the call before", side(1.0))]
    found = judge(
        engine, truth, prompt_lengths=[1, 1], step=64, earlier=earlier, final_norm_weight=weight, edits=edits,
        unedited=truth,
    )  # fmt: skip
    assert found.divergence is answer
    assert judge(side(1.0)).passed
    ((given_engine, given_truth, failure, clues),) = told
    assert given_engine is engine
    assert given_truth is truth
    assert clues == Clues([1, 1], 64, earlier, weight, edits, truth)
    assert (failure.hooks, failure.first) == (found.hooks, 2)
    assert failure.failing.tolist() == [False, False, True]
    assert (failure.lengths, failure.dtype) == ((2, 1), "float32")


def test_noise_is_the_aggregate_of_ordinary_rows_that_say_something():
    truth = {
        EMBED: rows([[3.0, 4, 0, 0], [0, 0, 0, 0]], [[0.0, 0, 6, 8], [100, 1, 1, 1]]),
        MLP: rows([[0.0, 0], [0, 0]], [[0.0, 0], [0, 0]]),
    }
    same = {
        EMBED: rows([[3.0, 4, 0, 1], [0, 0, 0, 0]], [[0.0, 0, 6, 9], [900, 1, 1, 1]], dtype=torch.float32),
        MLP: truth[MLP],
    }
    noise = reference_noise(truth, {**same, "surplus": []})
    broken = {**same, EMBED: [one.clone() for one in same[EMBED]]}
    broken[EMBED][0][1] = torch.inf
    broken[EMBED][1][0, 0] = torch.nan
    assert reference_noise(truth, broken)[EMBED] == pytest.approx(0.2)
    assert noise == {EMBED: pytest.approx(math.sqrt((0.2**2 + 0.1**2) / 2)), MLP: 0.0}
