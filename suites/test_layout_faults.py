"""The layout checks on trial: ranks that go their own way are noticed, by hook and rank, and leave nothing behind."""

from __future__ import annotations

import psutil
import pytest

from harness.errors import CaptureError, EngineError
from harness.prompts import of_length
from suites import test_activations, test_logits
from suites.trial import expect_red


def batch(parity):
    """The first call that captures: the layout is verified on it."""
    test_activations.test_ragged_batch(parity)


def edit_at_the_end(parity):
    """An edit after the last all-reduce: nothing downstream mixes the ranks again."""
    specs = {f"blocks.{parity.n_layers - 1}.hook_out": {"op": "scale", "factor": -0.5}}
    parity.check_edits([of_length(parity, 12)], specs)


def unembedding(parity):
    """W_U against the checkpoint's, and logits against the reference's."""
    test_logits.test_the_unembedding_is_the_checkpoint_s(parity)


#: Topology → fault: the check that must catch it, and what the message must say.
FAULTS = {
    "tp2": {
        "HookMissingOnOneRank": (batch, r"blocks\.1\.mlp\.hook_out is served by pp0/tp0 and not by pp0/tp1"),
        "ReplicasDrift": (
            batch,
            r"blocks\.1\.mlp\.hook_out: replicas differ by up to 1\.0e-03 between pp0/tp0 and pp0/tp1",
        ),
        "HookBeforeAllReduce": (batch, r"blocks\.1\.mlp\.hook_out: replicas differ by up to"),
        "EditOnOneRank": (edit_at_the_end, r"blocks\.3\.hook_out: replicas differ by up to"),
        "CounterRanTwice": (
            batch,
            r"blocks\.1\.mlp\.hook_out: its replicas ran a different number of times: pp0/tp0",
        ),
        "ShardsInWrongOrder": (unembedding, r"W_U against the checkpoint's"),
    },
    "pp2": {
        "StageBorderTwice": (batch, r"blocks\.1\.hook_out is served by 2 pipeline stages"),
        "StageBorderDropped": (batch, r"no rank holds blocks\.1\.hook_out"),
        "StageBorderEarly": (batch, r"blocks\.1\.hook_out is the first .*equals blocks\.0\.hook_out"),
    },
}
on_ranks = pytest.mark.parity(
    models=("tiny-llama",),
    backends=("vllm",),
    dtypes=("fp32",),
    steps=(64,),
    modes=("eager",),
    topologies=tuple(FAULTS),
    extra_topologies=tuple(FAULTS),
)


@on_ranks
def test_planted_faults_are_caught(parity):
    """Every way a rank can go wrong on this topology is caught and told by hook and rank."""
    for fault, (check, says) in FAULTS[str(parity.config.topology)].items():
        side = "driver" if fault == "ShardsInWrongOrder" else "worker"
        expect_red(parity, f"ranks.{fault}", check, says, errors=(CaptureError, EngineError), side=side)


@pytest.mark.parametrize("fault", ["RankDies", "RankHangs"])
@pytest.mark.parity(
    models=("tiny-llama",),
    backends=("vllm",),
    dtypes=("fp32",),
    steps=(64,),
    modes=("eager",),
    topologies=("tp2",),
    extra_topologies=("tp2",),
)
def test_a_lost_rank_costs_its_own_call(parity, fault):
    """A rank that dies or hangs in a forward: an error in time, no process left, and the next engine is right."""
    prompts = [of_length(parity, 12)]
    with parity.spare_engine(worker_cls=f"harness.faults.ranks.{fault}") as engine:
        family = [psutil.Process(engine.pid), *psutil.Process(engine.pid).children(recursive=True)]
        assert len(family) >= 3, "two ranks were to be started"
        with pytest.raises(EngineError) as caught:
            engine.request("forward", 15.0, input_ids=prompts, capture=["embed.hook_out"])
        parity.note(fault, message=str(caught.value).splitlines()[0])
    _, alive = psutil.wait_procs(family, timeout=15)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    parity.check(prompts, parity.forward(prompts))
