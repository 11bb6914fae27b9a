"""What taps are said to cost, against what they hold, and ratios of times that are given."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from harness.budgets import Paired, Sided, paired, plan_memory, sided
from harness.budgets.memory import stage_of_blocks
from harness.cli import main
from harness.conventions import Emission
from harness.geometry import Geometry
from harness.models.tiny import TINY_LLAMA
from harness.points import TEMPLATES
from harness.vllm.overlays import get_overlay
from harness.vllm.taps import install_taps

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = TINY_LLAMA.config()
TAPS = get_overlay("LlamaForCausalLM").taps(CONFIG, 1, TEMPLATES)


class Takes(nn.Module):
    def forward(self, hidden_states, residual=None, query=None, key=None):
        raise NotImplementedError


@pytest.mark.parametrize("place", [(0, 1), (1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("programs", [0, 5])
def test_taps_hold_what_is_planned(place: tuple[int, int], dtype: torch.dtype, programs: int) -> None:
    rank, ranks = place
    taps = install_taps(
        [(tap, Takes(), Emission()) for tap in TAPS],
        max_tokens=24,
        max_programs=programs,
        dtype=dtype,
        device=torch.device("cpu"),
        place=place,
    )
    plan = plan_memory(
        TAPS,
        Geometry.of(CONFIG),
        itemsize=dtype.itemsize,
        max_num_batched_tokens=24,
        max_model_len=100,
        max_programs=programs,
        tensor_parallel_size=ranks,
    ).ranks[rank]
    assert taps.nbytes == {"rows": plan.rows, "tables": plan.tables, "index": plan.index}
    assert sum(taps.nbytes.values()) == plan.state
    assert plan.per_token == sum(tap.rows[0].nbytes for tap in taps.taps.values())
    assert plan.kv_cache == 2 * 4 * (2 // ranks) * 32 * dtype.itemsize * 100


def points_per_stage(stages: int, **more: bool) -> list[int]:
    plan = plan_memory(
        TAPS,
        Geometry.of(CONFIG),
        itemsize=4,
        max_num_batched_tokens=8,
        max_model_len=8,
        max_programs=0,
        pipeline_parallel_size=stages,
        **more,
    )
    assert plan.largest in plan.ranks
    return [rank.points for rank in plan.ranks]


def test_stages_share_the_points() -> None:
    assert points_per_stage(2) == [1 + 2 * 12, 2 * 12 + 1]
    assert points_per_stage(2, tied=True) == [25, 26], "the last stage holds the embedding too"
    both = points_per_stage(4, tied=True, ends_everywhere=True)
    assert both == [14] * 4, "embedding and final norm on each, used or not"


@pytest.mark.parametrize(("layers", "stages"), [(4, 2), (5, 2), (30, 4), (7, 3), (8, 8), (11, 4)])
def test_blocks_lie_where_vllm_puts_them(layers: int, stages: int) -> None:
    utils = pytest.importorskip("vllm.distributed.utils")
    cut = [utils.get_pp_indices(layers, stage, stages) for stage in range(stages)]
    assert stage_of_blocks(layers, stages) == [
        s for s, (begin, end) in enumerate(cut) for _ in range(begin, end)
    ]


def timed(order: list[str], name: str, seconds: float):
    """Something that takes so many seconds, and says that it was its turn."""

    def run() -> float:
        order.append(name)
        return seconds

    return run


def test_pairs_take_turns() -> None:
    order: list[str] = []
    way = functools.partial(timed, order)
    found = paired(way("a", 2.0), way("b", 3.0), rounds=4, warm_up=1)
    assert found == Paired((2.0,) * 4, (3.0,) * 4)
    assert found.ratio == 1.5
    assert found.quartiles == (1.5, 1.5)
    assert "".join(order) == "baabbaabba"
    assert str(found) == "1.500 (1.500 to 1.500, 4 rounds)"


def test_one_slow_round_does_not_decide() -> None:
    assert Paired((1.0, 1.0, 1.0, 1.0, 5.0), (1.1, 1.1, 9.0, 1.1, 5.5)).ratio == pytest.approx(1.1)


def test_kinds_take_turns_and_each_engine_begins_a_round() -> None:
    order: list[str] = []
    way = functools.partial(timed, order)
    found = sided(
        [way("a", 1.0), way("b", 3.0)], [way("x", 3.0), way("y", 3.0), way("z", 6.0)], rounds=5, warm_up=0
    )
    assert found == Sided(((1.0,) * 5, (3.0,) * 5), ((3.0,) * 5, (3.0,) * 5, (6.0,) * 5))
    assert "".join(order) == "axbyzxbyzabyzaxyzaxbzaxby"
    assert found.paired == Paired((1.0,) * 5, (3.0,) * 5)
    slow_once = Sided(((1.0, 9.0, 1.0), (2.0, 2.0, 2.0)), ((3.0, 3.0, 3.0),))
    assert slow_once.paired == Paired((1.0, 9.0, 1.0), (3.0,) * 3), "by medians, and the rounds stay paired"


@pytest.mark.parametrize(
    ("base", "other", "apart"),
    [
        (((2.0, 2.0),), ((3.0, 3.0),), 0.0),
        (((2.0, 2.0, 2.0), (2.2, 2.2, 9.0)), ((3.0,) * 3, (3.0,) * 3), 0.1),
        (((2.0, 2.0), (2.0, 2.0)), ((3.0, 3.0), (2.5, 2.5)), 0.2),
    ],
)
def test_like_engines_say_what_a_ratio_cannot_resolve(base, other, apart) -> None:
    assert Sided(base, other).apart == pytest.approx(apart)


PEAK = """
import json, torch
from harness.budgets.measure import measure_memory, reset_peak
reset_peak()
seen = [measure_memory()["peak"]]
block = torch.ones(32 << 20)
del block
seen.append(measure_memory()["peak"])
reset_peak()
seen.append(measure_memory()["peak"])
print(json.dumps(seen))
"""


def test_the_peak_is_seen_and_forgotten() -> None:
    # In a process of its own: this one may let go of as much meanwhile, of what other tests have left to be collected.
    run = subprocess.run(
        [sys.executable, "-c", PEAK], capture_output=True, text=True, timeout=120, check=True
    )
    before, seen, forgotten = json.loads(run.stdout)
    assert seen - before > 100 << 20
    assert forgotten < seen - (50 << 20)


def test_plan_says_it_before_anything_boots(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tiny_folder), "--step", "24", "--edits", "5", "--hooks", "every"]) == 0
    text = capsys.readouterr().out
    assert "pp0/tp0: 50 points hold" in text
    assert "keys and values of one request of 512 tokens" in text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--hooks", "blocks.*.nope"], "matches none of the 50 points"),
        (["--tp", "3"], "does not divide the 2 attention heads"),
        (["--dtype", "int7"], "is not known"),
        (["--step", "0"], "--step is from 1"),
    ],
)
def test_what_cannot_be_planned(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert main(["plan", str(tiny_folder), *more]) == 2
    assert message in capsys.readouterr().err
