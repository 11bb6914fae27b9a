"""Ranks as Ray workers: specs reach them, rows come back and edits land as they do with vLLM's own processes."""

from __future__ import annotations

import psutil
import pytest

from suites import test_activations, test_interventions, test_layout, test_logits

on_ray = pytest.mark.parity(
    models=("tiny-llama",),
    backends=("vllm",),
    topologies=("tp2", "pp2"),
    extra_topologies=("tp2", "pp2"),
    smoke={"dtypes": ("fp32",), "modes": ("eager",)},
)


@pytest.mark.ray
@on_ray
def test_ranks_as_ray_workers(parity):
    """Captures, edits, logits and layout through Ray's workers; none of its processes is left."""
    parity.needs("ray", "no Ray here to run the ranks on; `nox -s ray` installs it and runs this")
    with parity.variant(distributed_executor_backend="ray") as on_ray_workers:
        engine = psutil.Process(on_ray_workers.engine.pid)
        family = [engine, *engine.children(recursive=True)]
        actors = [p for p in family if "RayWorkerProc" in " ".join(p.cmdline())]
        assert len(actors) >= 2, f"two ranks were to be Ray workers: {[p.name() for p in family]}"
        test_activations.test_ragged_batch(on_ray_workers)
        test_interventions.test_every_op_at_every_hook(on_ray_workers, 1)
        test_logits.test_every_position(on_ray_workers)
        test_layout.test_each_hook_lives_on_one_stage(on_ray_workers)
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
