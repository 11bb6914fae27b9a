"""Warm compile caches: faster boots, the same captures, and never a graph traced for other hooks."""

from __future__ import annotations

import pytest

from harness.errors import CaptureError
from harness.prompts import of_length

compiled_tiny = pytest.mark.parity(
    models=("tiny-llama",), backends=("vllm",), modes=("compiled",), smoke={"dtypes": ("fp32",)}
)
FEW = ["embed.hook_out", "blocks.1.hook_out"]


@compiled_tiny
def test_boots_in_sequence(parity, tmp_path):
    """Few hooks, then more, then none, then few again, on one cache: each engine captures just its own, and right."""
    environment = _fresh_caches(tmp_path)
    prompts = [of_length(parity, n, seed=i) for i, n in enumerate((70, 9))]
    seconds = []
    for hook_points in (FEW, None, FEW):
        with parity.spare_engine(environment=environment, hook_points=hook_points) as engine:
            seconds.append(engine.describe["boot_seconds"])
            assert hook_points is None or engine.supported_hook_points == hook_points
            result = engine.forward(prompts, capture=engine.supported_hook_points, max_new_tokens=2)
            parity.check(prompts, result, label=f"{len(engine.supported_hook_points)} hooks")
        with parity.spare_engine(environment=environment, instrument=False) as plain:
            plain.raw_logits(prompts)
    parity.note("boots on one cache", seconds=seconds)


@compiled_tiny
def test_warm_boot_is_faster(parity, tmp_path):
    """The second boot on a cache takes at most half of the first, and captures the same bits."""
    environment = _fresh_caches(tmp_path)
    prompts = [of_length(parity, 40)]
    seconds, captured = [], []
    for _ in range(2):
        with parity.spare_engine(environment=environment) as engine:
            seconds.append(engine.describe["boot_seconds"])
            captured.append(engine.forward(prompts, capture=engine.supported_hook_points).captured)
    parity.note("cold and warm boot", seconds=seconds, ratio=round(seconds[1] / seconds[0], 3))
    parity.bit_equal(
        list(captured[1].values()), list(captured[0].values()), label="warm", what="captures of a warm boot"
    )
    assert seconds[1] <= 0.5 * seconds[0], f"cold {seconds[0]:.1f} s, warm {seconds[1]:.1f} s"


@compiled_tiny
def test_specs_outside_the_cache_key_are_caught(parity, tmp_path):
    """Planted fault: hooks by a side channel, few then more, warm cache: the silent ones are named, never zeros.

    The control boots the same two sets through the engine's config and stays green.
    """
    prompts = [of_length(parity, 40)]
    for inside in (True, False):
        environment = _fresh_caches(tmp_path / str(inside)) | {"VLLM_USE_AOT_COMPILE": "1"}
        fault = "SpecsInsideKey" if inside else "SpecsOutsideKey"
        with parity.planted(f"workers.{fault}", environment=environment, hook_points=FEW) as few:
            few.check(prompts, few.forward(prompts))
        with parity.planted(f"workers.{fault}", environment=environment) as more:
            if inside:
                more.check(prompts, more.forward(prompts))
                continue
            with pytest.raises(CaptureError, match="never fired") as caught:
                more.forward(prompts)
            parity.note(fault, message=str(caught.value))


@compiled_tiny
def test_other_threads_take_the_same_graph(parity, tmp_path):
    """A graph compiled where one thread computes is served from the cache to an engine of two, and still counts right.

    Planted fault: compiled as vLLM has it, each of the two threads counts.
    """
    prompts = [of_length(parity, n, seed=i) for i, n in enumerate((70, 9))]
    environment = _fresh_caches(tmp_path / "sound")
    for threads in (1, 2):
        with parity.variant(environment=environment, threads=threads) as engine:
            engine.check(prompts, engine.forward(prompts), label=f"{threads} threads")
    environment, fault = _fresh_caches(tmp_path / "planted"), "ThreadsOutsideKey"
    with parity.planted(f"workers.{fault}", environment=environment, threads=1) as one:
        one.check(prompts, one.forward(prompts))
    with parity.planted(f"workers.{fault}", environment=environment, threads=2) as two:
        with pytest.raises(CaptureError, match=r"fired \d+ times in 2 forwards") as caught:
            two.forward(prompts)
        parity.note(fault, message=str(caught.value))


def _fresh_caches(folder) -> dict[str, str]:
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "VLLM_CACHE_ROOT": str(folder / "vllm")}
