"""The rule: each gate has a fault that only it sees, and none of the hard inputs gets past it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from harness.errors import CaptureError, UsageError
from harness.parity.metrics import row_errors
from harness.parity.synthetic import Stream, stream
from harness.parity.verdict import compare

HOOK = "blocks.2.hook_out"
LENGTHS = (40, 60, 1)


def case(dtype: str = "float32", seed: int = 7, **options) -> Stream:
    return stream(seed, dtype=dtype, lengths=LENGTHS, realisations=3, **options)


def judge(c: Stream, **options):
    return compare(c.engine, c.truth, c.same, dtype=c.dtype, n_layers=c.n_layers, **options)


def red(verdict) -> dict[str, set[str]]:
    """Hook → names of the gates that failed."""
    found = {h.hook: {g.name for g in h.gates if not g.passed} for h in verdict.hooks}
    return {hook: names for hook, names in found.items() if names}


def gate(verdict, name: str, hook: str = HOOK):
    return next(g for h in verdict.hooks if h.hook == hook for g in h.gates if g.name == name)


def noise_of(c: Stream, request: int = 0, hook: str = HOOK) -> float:
    return float(row_errors(c.same[0][hook][request], c.truth[hook][request])[1:].median())


def spoil(c: Stream, request: int, rows, channels, relative: float, hook: str = HOOK, seed: int = 0) -> None:
    """Move part of some rows by ``relative`` of that part's own norm, in a random direction."""
    target = c.engine[hook][request]
    part = target[rows, channels].double()
    direction = torch.randn(part.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    direction *= relative * part.norm(dim=-1, keepdim=True) / direction.norm(dim=-1, keepdim=True)
    target[rows, channels] = (part + direction).to(target.dtype)


def test_a_sound_engine_passes_every_gate():
    verdict = judge(case())
    assert verdict.passed
    assert verdict.divergence is None
    ordinary = ["aggregate", "worst row", "worst slice"]
    assert [g.name for g in verdict.hooks[0].gates] == ordinary
    names = next([g.name for g in hook.gates] for hook in verdict.hooks if hook.hook == HOOK)
    assert names == [*ordinary, "massive rows", "massive rows, other channels"]


def test_only_the_row_gate_sees_one_noisy_row():
    c = case()
    spoil(c, 0, slice(17, 18), slice(None), 8 * noise_of(c))
    verdict = judge(c)
    assert red(verdict) == {HOOK: {"worst row"}}
    assert (gate(verdict, "worst row").where.request, gate(verdict, "worst row").where.position) == (0, 17)
    assert verdict.divergence.pattern == "one row"


def test_only_the_slice_gate_sees_one_noisy_slice():
    c = case()
    for request in (0, 1):
        spoil(c, request, slice(1, None), slice(16, 24), 5 * noise_of(c), seed=request)
    verdict = judge(c)
    assert red(verdict) == {HOOK: {"worst slice"}}
    assert gate(verdict, "worst slice").slice == (16, 24)
    assert "only channels 16 to 23" in verdict.divergence.pattern


def test_only_the_aggregate_sees_noise_that_is_everywhere():
    """Each realisation of R errs in a quarter of the cells: its rows and slices have lax bounds, the whole has not."""
    random = torch.Generator().manual_seed(0)
    truth = torch.randn(64, 64, generator=random, dtype=torch.float64)
    noise = torch.randn(64, 64, generator=random, dtype=torch.float64).sign()
    sames = []
    for quarter in range(4):
        part = noise.clone()
        part[(quarter & 1) :: 2] = 0
        part[:, torch.arange(64) // 8 % 2 == (quarter >> 1)] = 0
        sames.append({"logits": [(truth + 1e-5 * part).float()]})
    engine = truth + 1.7e-5 * noise
    verdict = compare({"logits": [engine.float()]}, {"logits": [truth]}, sames, dtype="fp32", n_layers=4)
    assert red(verdict) == {"logits": {"aggregate"}}
    assert verdict.divergence.pattern == "all rows"
    assert verdict.divergence.explanation is None


def test_only_the_massive_gate_sees_an_error_of_the_giant_channel():
    c = case()
    c.engine[HOOK][1][0, 5] *= 1 + 2e-5
    verdict = judge(c)
    assert red(verdict) == {HOOK: {"massive rows"}}
    assert gate(verdict, "massive rows").where.request == 1
    assert "only channel 5" in verdict.divergence.pattern


def test_only_the_last_gate_sees_ten_percent_hidden_by_a_giant_channel():
    c = case("bfloat16")
    spoil(c, 1, slice(0, 1), torch.tensor([i for i in range(64) if i not in (5, 17)]), 0.1)
    verdict = judge(c)
    assert red(verdict) == {HOOK: {"massive rows, other channels"}}
    full = gate(verdict, "massive rows")
    assert full.err_engine < 0.01  # what the row as a whole shows of it
    assert gate(verdict, "massive rows, other channels").err_engine > 0.08


def test_a_prompt_of_one_token_has_its_massive_channels_found():
    """No other row says that this one is large: its own other channels do."""
    c = stream(3, dtype="bfloat16", lengths=(1,), realisations=3)
    assert next(h for h in judge(c).hooks if h.hook == HOOK).n_massive == 1
    spoil(c, 0, slice(0, 1), torch.tensor([i for i in range(64) if i not in (5, 17)]), 0.3)
    # With no other row the slices without a giant see it too; the row as a whole does not.
    assert red(judge(c)) == {HOOK: {"worst slice", "massive rows, other channels"}}


def test_only_the_dtype_gate_sees_right_values_in_a_wrong_dtype():
    c = case("bfloat16")
    c.engine[HOOK] = [t.float() for t in c.engine[HOOK]]
    verdict = judge(c)
    assert red(verdict) == {HOOK: {"dtype"}}
    assert verdict.divergence.explanation == "is captured as float32 where the engine runs bfloat16"
    assert any("captured as float32" in note for note in verdict.notes)
    assert judge(c, check_dtype=False).passed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_percent_of_rows_wildly_wrong(dtype):
    """What a comparison of distributions passes (1 % of elements shifted by 1000 standard deviations)."""
    c = case(dtype)
    spoil(c, 1, slice(30, 31), slice(None), 10.0)
    verdict = judge(c)
    assert "worst row" in red(verdict)[HOOK]
    assert verdict.divergence.where.position == 30
    assert gate(verdict, "worst row").required_k > 100


def test_one_row_off_by_a_thousandth():
    c = case()
    spoil(c, 1, slice(30, 31), slice(None), 1e-3)
    verdict = judge(c)
    assert "worst row" in red(verdict)[HOOK]
    assert verdict.divergence.pattern == "one row"
    assert verdict.divergence.explanation is None


def test_fp32_computed_in_bf16_fails_and_says_so():
    c = case()
    c.engine[HOOK] = [t.bfloat16().float() for t in c.engine[HOOK]]
    verdict = judge(c)
    assert HOOK in red(verdict)
    assert any("fits bfloat16" in note and HOOK in note for note in verdict.notes)


def test_an_embedding_that_is_bf16_in_the_checkpoint_is_no_finding():
    c = case()
    for side in (c.engine, c.truth, *c.same):
        side["embed.hook_out"] = [t.bfloat16().to(t.dtype) for t in side["embed.hook_out"]]
    assert not judge(c).notes


def test_equal_is_zero():
    c = case()
    exact = {hook: [t.float() for t in rows] for hook, rows in c.truth.items()}
    truth = {hook: [t.double() for t in rows] for hook, rows in exact.items()}
    verdict = compare(exact, truth, c.same, dtype="fp32", n_layers=4)
    assert verdict.passed
    assert verdict.worst.worst_gate.required_k == 0
    assert all(
        h.min_cosine == pytest.approx(1, abs=1e-12) and h.max_abs == 0 == h.max_ulps for h in verdict.hooks
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("row", [0, 12])
def test_not_finite_fails_whatever_the_reference_does(bad, row):
    c = case()
    c.engine[HOOK][0][row, 3] = bad
    for side in c.same:
        side[HOOK][0][row, 3] = bad
    verdict = judge(c)
    assert HOOK in red(verdict)
    assert verdict.divergence.explanation == "holds NaN or infinity where the truth is finite"
    assert any("reference at the engine's dtype is not finite" in note for note in verdict.notes)


def test_a_broken_reference_excuses_nobody():
    c = case()
    for side in c.same:
        side[HOOK][0][12] = math.inf
    assert judge(c).passed
    spoil(c, 0, slice(12, 13), slice(None), 1e-3)
    assert "worst row" in red(judge(c))[HOOK]


def test_a_row_too_noisy_to_judge_is_noted():
    c = case()
    for side in (c.engine, *c.same):
        side[HOOK][0][12] *= 1.3
    verdict = judge(c)
    assert verdict.passed
    assert any("hardly judged: 1 row" in note and HOOK in note for note in verdict.notes)


def test_a_row_that_was_large_keeps_the_rounding_of_that_time():
    """Stored at a hundred times its size, a row is off by a hundred roundings of what is left of it."""
    c = case()
    before, after = "blocks.2.hook_out", "blocks.3.hook_out"
    for side in (c.engine, c.truth, *c.same):
        side[before][0][12] = side[after][0][12] * 100
    floors = {g.name: g.floor for h in judge(c).hooks if h.hook == after for g in h.gates}
    assert floors["worst slice"] > 5 * 2**-24 * 5**0.5
    spoil(c, 0, slice(12, 13), slice(None), 40 * 2**-24, hook=after)
    assert judge(c).passed
    spoil(c, 0, slice(13, 14), slice(None), 40 * 2**-24, hook=after)
    assert red(judge(c)) == {after: {"worst row"}}


def test_the_delta_of_an_intervention_may_be_zero_before_it_begins():
    c = case()
    for side in (c.engine, c.truth, *c.same):
        side[HOOK][1][:50] = 0
    assert judge(c).passed
    c.engine[HOOK][1][20, 0] = 0.5
    verdict = judge(c)
    assert verdict.divergence.where.position == 20
    assert all(math.isfinite(g.err_engine) for h in verdict.hooks for g in h.gates)


def test_a_hook_of_nothing_but_zeros():
    c = case()
    for side in (c.engine, c.truth, *c.same):
        side[HOOK] = [torch.zeros_like(t) for t in side[HOOK]]
    assert judge(c).passed
    c.engine[HOOK][0][1, 1] = 1e-30
    assert gate(judge(c), "worst row").err_engine == math.inf


def test_the_smallest_k_that_passes_is_the_one_reported():
    c = case()
    spoil(c, 0, slice(17, 18), slice(None), 8 * noise_of(c))
    needed = max(h.worst_gate.required_k for h in judge(c).hooks)
    assert judge(c, k=needed * 1.0001).passed
    assert not judge(c, k=needed * 0.9999).passed


def test_bounds_are_what_they_say():
    for hook in judge(case()).hooks:
        for g in hook.gates:
            assert g.bound == pytest.approx(3 * max(g.err_reference, g.floor))
            assert g.required_k == pytest.approx(g.err_engine / max(g.err_reference, g.floor))
            assert g.passed == (g.err_engine <= g.bound)


def test_one_realisation_may_be_given_alone():
    c = case()
    one = compare(c.engine, c.truth, c.same[0], dtype="fp32", n_layers=4)
    listed = compare(c.engine, c.truth, c.same[:1], dtype="float32", n_layers=4)
    assert one == listed


def test_hooks_may_be_chosen_and_come_in_forward_order():
    verdict = judge(case(), hooks=["ln_final.hook_normalized", "blocks.1.attn.hook_out", "embed.hook_out"])
    assert [h.hook for h in verdict.hooks] == [
        "embed.hook_out",
        "blocks.1.attn.hook_out",
        "ln_final.hook_normalized",
    ]
    assert [h.depth for h in verdict.hooks] == [0, 2, 4]


def test_row_errors_are_per_request_and_the_record_is_json():
    verdict = judge(case())
    assert [len(rows) for rows in verdict.hooks[0].row_errors] == list(LENGTHS)
    assert json.loads(json.dumps(verdict.to_json()))["dtype"] == "float32"


def test_the_number_of_threads_is_put_back():
    before = torch.get_num_threads()
    with pytest.raises(CaptureError):
        judge(case(), hooks=[])
    assert torch.get_num_threads() == before


def drop_hook(c):
    del c.engine[HOOK]


def drop_request(c):
    c.engine[HOOK] = c.engine[HOOK][:2]


def drop_row(c):
    c.engine[HOOK][1] = c.engine[HOOK][1][:-1]


def widen(c):
    c.engine[HOOK][1] = torch.cat([c.engine[HOOK][1]] * 2, dim=1)


def add_axis(c):
    c.engine[HOOK][1] = c.engine[HOOK][1][None]


def extra_hook(c):
    c.engine["blocks.9.hook_out"] = c.engine[HOOK]


def drop_reference(c):
    del c.same[1][HOOK]


def spoil_truth(c):
    c.truth[HOOK][1][4, 4] = math.nan


def no_rows(c):
    for side in (c.engine, c.truth, *c.same):
        side[HOOK] = [t[:0] for t in side[HOOK]]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (drop_hook, r"the engine lacks 1 of 14 hooks: blocks\.2\.hook_out"),
        (drop_request, r"blocks\.2\.hook_out: the engine has 2 requests, the truth 3"),
        (drop_row, r"blocks\.2\.hook_out, request 1: the engine has 59 rows, the truth 60"),
        (widen, r"request 1: the engine has width 128, the truth 64"),
        (add_axis, r"request 1: the engine holds a tensor of shape \(1, 60, 64\)"),
        (extra_hook, r"which nobody would judge: blocks\.9\.hook_out"),
        (drop_reference, r"the reference at the engine's dtype lacks 1 of 14 hooks"),
        (spoil_truth, r"request 1, position 4: the truth itself is not finite"),
        (no_rows, r"blocks\.2\.hook_out: no rows"),
    ],
)
def test_what_is_missing_or_misshapen_is_named(fault, message):
    c = case()
    fault(c)
    with pytest.raises(CaptureError, match=message):
        judge(c)


def test_nothing_to_compare_is_no_pass():
    c = case()
    with pytest.raises(CaptureError, match="no hooks"):
        judge(c, hooks=[])
    with pytest.raises(CaptureError, match="no reference"):
        judge(replace(c, same=[]))
    with pytest.raises(UsageError, match="int8"):
        judge(replace(c, dtype="int8"))
