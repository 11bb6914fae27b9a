"""Tensor and pipeline parallelism as real processes: every earlier check holds, and each hook lives where it should."""

from __future__ import annotations

import psutil
import pytest

from harness.prompts import of_length
from suites import test_activations, test_interventions, test_logits

PARALLEL = ("tp2", "pp2", "tp2pp2")
on_ranks = pytest.mark.parity(
    models=("tiny-llama",),
    backends=("vllm",),
    steps=(64,),
    topologies=PARALLEL,
    extra_topologies=PARALLEL,
    smoke={"dtypes": ("fp32",), "modes": ("eager",)},
)
tied = pytest.mark.parity(
    models=("tiny-llama-tied",),
    extra_models=("tiny-llama-tied",),
    backends=("vllm",),
    topologies=("pp2",),
    extra_topologies=("pp2",),
    steps=(64,),
    smoke={"dtypes": ("fp32",), "modes": ("eager",)},
)


@on_ranks
def test_rows_of_every_rank(parity):
    """Ragged batches, chunks and decode steps, against the same reference as on one rank."""
    test_activations.test_ragged_batch(parity)
    test_activations.test_prompt_length(parity, 200)
    test_activations.test_decode_steps(parity)


@on_ranks
def test_edits_on_every_rank(parity):
    """Every op somewhere, edits at hooks of each stage, decode steps: home rank applies them, the others skip them."""
    test_interventions.test_every_op_at_every_hook(parity, 1)
    test_interventions.test_decode_steps(parity)


@on_ranks
def test_logits_from_every_rank(parity):
    """Logits rebuilt from a sharded unembedding, the engine's raw ones and its head's; W_U is the checkpoint's."""
    test_logits.test_every_position(parity)
    test_logits.test_a_second_and_a_third_opinion(parity)
    test_logits.test_the_unembedding_is_the_checkpoint_s(parity)


@on_ranks
def test_each_hook_lives_on_one_stage(parity):
    """Every hook on each tensor-parallel rank of exactly one stage, in order; replicas and counters agree."""
    parity.forward([of_length(parity, 70), of_length(parity, 5)])
    layout = parity.engine.layout()
    topology = parity.config.topology
    stage_of = {
        name: {layout["ranks"][r].split("/")[0] for r in ranks} for name, ranks in layout["served"].items()
    }
    assert sorted(stage_of) == sorted(parity.hook_points)
    assert all(len(stages) == 1 for stages in stage_of.values())
    assert all(len(ranks) == topology.tp for ranks in layout["served"].values())
    assert all(len(set(fires)) == 1 for fires in layout["fires"].values())
    stages = [next(iter(stage_of[name])) for name in parity.hook_points]
    assert stages == sorted(stages), "a later hook lives on an earlier stage"
    assert set(stages) == {f"pp{s}" for s in range(topology.pp)}
    parity.note("rank layout", layout=layout)


@on_ranks
def test_repeats_are_bitwise_equal(parity):
    """Five runs of one batch: no race between ranks shows in a single bit (nnsight 631)."""
    prompts = [of_length(parity, n, seed=i) for i, n in enumerate((70, 9))]
    first = parity.forward(prompts, max_new_tokens=3)
    for number in range(2, 6):
        again = parity.forward(prompts, max_new_tokens=3)
        parity.bit_equal(
            list(again.captured.values()),
            list(first.captured.values()),
            label=f"repeat {number}",
            what=f"captures of repeat {number} against the first run",
        )


@on_ranks
def test_against_one_rank(parity):
    """One rank and several differ by no more than either may from the truth; how much, goes into the record."""
    prompts = [of_length(parity, n, seed=i) for i, n in enumerate((70, 9))]
    here = parity.forward(prompts)
    alone = parity.on_one_rank().forward(prompts, capture=parity.hook_points)
    gaps = {
        name: float((here.captured[name].double() - alone.captured[name].double()).norm())
        / float(alone.captured[name].double().norm())
        for name in here.captured
    }
    worst = max(gaps, key=gaps.get)
    parity.check(prompts, here, label="several ranks")
    parity.check(prompts, alone, label="one rank")
    reference = parity.reference(prompts, [worst])
    truth = [rows.double() for rows in reference.truth.captured[worst]]
    own = (
        max(
            (
                sum(
                    float((r.double() - t).norm()) ** 2
                    for r, t in zip(run.captured[worst], truth, strict=True)
                )
            )
            ** 0.5
            for run in reference.same
        )
        / sum(float(t.norm()) ** 2 for t in truth) ** 0.5
    )
    parity.note("one rank and several", hook=worst, difference=gaps[worst], reference_error=own)
    assert gaps[worst] <= 2 * parity.k * own, (
        f"{worst}: {gaps[worst]:.2e} apart, the reference's own error {own:.2e}"
    )


@tied
def test_a_tied_embedding_is_served_once(parity):
    """The last stage holds the shared embedding too and never runs it as one: it is no second copy of the hook."""
    test_activations.test_ragged_batch(parity)
    layout = parity.engine.layout()
    assert layout["served"]["embed.hook_out"] == [0]
    test_logits.test_every_position(parity)


@pytest.mark.parity(
    models=("smollm2-135m",),
    backends=("vllm",),
    topologies=("tp3", "pp2"),  # nine heads on three key-value heads
    extra_topologies=("tp3", "pp2"),
    steps=(64,),
    smoke={"dtypes": ("fp32",), "modes": ("eager",), "topologies": ("pp2",)},
)
def test_a_trained_model_on_ranks(parity):
    """Massive activations, thirty blocks, a tied unembedding: what holds on one rank holds on several."""
    test_activations.test_ragged_batch(parity)
    test_interventions.test_edits_on_real_text(parity)
    test_logits.test_every_position(parity)


@pytest.mark.parity(
    models=("tiny-llama",),
    backends=("vllm",),
    topologies=("tp2",),
    extra_topologies=("tp2",),
    steps=(64,),
    smoke={"dtypes": ("fp32",), "modes": ("eager",)},
)
def test_through_the_other_rpc_path(parity):
    """With the engine's core in a process of its own the ranks give the same bits, and leave no process behind."""
    prompts = [of_length(parity, n, seed=i) for i, n in enumerate((70, 3))]
    inside = parity.forward(prompts, max_new_tokens=2)
    with parity.spare_engine(environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}) as engine:
        outside = engine.forward(prompts, capture=parity.hook_points, max_new_tokens=2)
        children = psutil.Process(engine.pid).children(recursive=True)
        assert len(children) >= 3, "a core and two ranks were to be started"
    parity.bit_equal(
        list(outside.captured.values()),
        list(inside.captured.values()),
        label="other RPC path",
        what="captures through a core in its own process",
    )
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
