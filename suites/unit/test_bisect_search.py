"""The search of a bisection on engines made of arithmetic: it names what is wrong by itself, and nothing else."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.bisect.search import MOST_STAGES, Search, fewest, first_true
from harness.bisect.stages import LOGITS, branch_of, part_of, stage_name, stages_of
from harness.points import HookPoint, every_point

LAYERS = 12
HOOKS = [*every_point(LAYERS), LOGITS]


@dataclass
class Arithmetic:
    """An engine whose every value is one number: how far it is off, in bounds. A fault adds to its point.

    What is read at a point may be wrong too, which nothing after it notices.
    """

    faults: dict[str, float] = field(default_factory=dict)
    misread: dict[str, float] = field(default_factory=dict)
    hooks: list[str] = field(default_factory=lambda: list(HOOKS))
    calls: int = 0

    def __call__(self, healed: tuple[str, ...]) -> dict[str, float]:
        self.calls += 1
        values: dict[str, float] = {}
        stream = 0.0
        branches = 0.0
        for hook in self.hooks:
            kind = hook.rpartition(".")[0].rpartition(".")[2] if hook.startswith("blocks.") else hook
            given_in = stream + branches if hook == LOGITS or kind in ("attn", "mlp") else stream
            value = given_in + self.faults.get(hook, 0.0)
            if kind not in ("attn", "mlp") and hook.startswith("blocks."):
                value = stream + branches + self.faults.get(hook, 0.0)
            if hook in healed:
                value = 0.0
            if kind in ("attn", "mlp"):
                branches += value - given_in if hook not in healed else -given_in
            else:
                stream, branches = value, 0.0
            values[hook] = abs(value) + self.misread.get(hook, 0.0)
        return values


def search(engine: Arithmetic, fixed: tuple[str, ...] = (LOGITS,)):
    return Search(stages_of(engine.hooks, fixed), engine, fixed).run()


def sites(found) -> list[str]:
    return [site.hook for _, site in found.wrong]


def test_a_sound_engine_is_not_blamed() -> None:
    engine = Arithmetic()
    found = search(engine)
    assert (found.first, found.culprits, found.last) == (None, (), None)
    assert engine.calls == 1


@pytest.mark.parametrize("hook", HOOKS)
def test_one_fault_is_named_wherever_it_is(hook: str) -> None:
    engine = Arithmetic({hook: 40.0})
    found = search(engine)
    assert sites(found) == [hook]
    assert found.first == hook
    (culprit,) = found.culprits
    assert hook in culprit.stage.hooks
    assert culprit.heals == (hook != LOGITS)
    assert culprit.stage == found.last
    assert culprit.sites[0].share == pytest.approx(40)
    assert engine.calls <= 3 + math.ceil(math.log2(LAYERS + 3)), "a search by halves"


@given(st.sets(st.sampled_from(HOOKS[:-1]), min_size=1, max_size=3))
def test_several_faults_are_all_named(hooks: set[str]) -> None:
    found = search(Arithmetic(dict.fromkeys(hooks, 40.0)))
    assert sites(found) == sorted(hooks, key=HookPoint.parse)
    assert found.culprits[-1].stage == found.last


def test_of_many_wrong_blocks_the_first_few_and_the_last_are_named() -> None:
    faults = {f"blocks.{i}.mlp.hook_out": 9.0 for i in range(2, 11)}
    found = search(Arithmetic(faults))
    assert len(found.culprits) == MOST_STAGES
    assert sites(found)[0] == "blocks.2.mlp.hook_out"
    assert found.last is not None
    assert found.last.name == "block 10"


def test_small_errors_that_add_up_blame_no_block() -> None:
    found = search(Arithmetic({f"blocks.{i}.hook_out": 0.3 for i in range(LAYERS)}))
    assert found.first == "blocks.3.hook_out"
    assert found.wrong == []
    assert found.culprits[0].stage.name == "block 3"


def test_a_nan_is_wrong() -> None:
    class Nan(Arithmetic):
        def __call__(self, healed: tuple[str, ...]) -> dict[str, float]:
            shares = super().__call__(healed)
            return {hook: math.nan if share > 1 else share for hook, share in shares.items()}

    assert sites(search(Nan({"blocks.4.attn.hook_out": 5.0}))) == ["blocks.4.attn.hook_out"]


def test_points_that_cannot_be_put_right_join_their_stages() -> None:
    fixed = (LOGITS, "blocks.3.hook_out")
    found = search(Arithmetic({"blocks.4.mlp.hook_out": 7.0}), fixed)
    assert sites(found) == ["blocks.4.mlp.hook_out"]
    assert found.culprits[0].stage.name == "blocks 3 to 4"
    assert found.culprits[0].stage.start == "blocks.2.hook_out"
    at_it = search(Arithmetic({"blocks.3.hook_out": 7.0}), fixed)
    assert sites(at_it) == ["blocks.3.hook_out"]
    assert not at_it.culprits[0].heals


def test_no_probe_is_made_twice() -> None:
    engine = Arithmetic({"blocks.5.hook_out": 3.0, "blocks.9.mlp.hook_out": 3.0})
    found = search(engine)
    assert len({one.healed for one in found.probes}) == len(found.probes) == engine.calls


@given(st.integers(0, 40), st.integers(0, 40))
def test_first_true_is_the_border(size: int, border: int) -> None:
    asked: list[int] = []

    def holds(number: int) -> bool:
        asked.append(number)
        return number >= border

    assert first_true(0, size, holds) == min(size, border)
    assert len(asked) <= math.ceil(math.log2(size + 1)) if size else not asked


@given(st.lists(st.integers(0, 30), unique=True, max_size=20), st.data())
def test_fewest_leaves_out_all_that_is_not_needed(items: list[int], data) -> None:
    needed = set(data.draw(st.lists(st.sampled_from(items), max_size=3))) if items else set()
    assert set(fewest(items, lambda some: needed <= set(some))) == needed


def test_stages_and_their_words() -> None:
    stages = stages_of(HOOKS, (LOGITS,))
    assert [stage.name for stage in stages[:2]] == ["the embedding", "block 0"]
    assert [stage.name for stage in stages[-2:]] == [
        "the final norm",
        "the unembedding, or how logits are made",
    ]
    assert stages[0].start is None
    assert all(after.start == before.end for before, after in itertools.pairwise(stages))
    assert [hook for stage in stages for hook in stage.hooks] == HOOKS
    assert stage_name(["blocks.1.hook_out", "blocks.4.hook_in"]) == "blocks 1 to 4"
    assert branch_of("blocks.3.attn.hook_z") == "attention"
    assert branch_of("blocks.3.mlp.hook_in") == "norm"
    assert part_of("blocks.1.mlp.hook_out", ["blocks.1.mlp.hook_in"]) == "the MLP"
    assert part_of("blocks.1.mlp.hook_out", ["blocks.0.mlp.hook_in"]) == "the MLP, its norm included"
    for hook in [*every_point(2, tuple({HookPoint.parse(h).template for h in HOOKS[:-1]})), LOGITS]:
        assert branch_of(hook)
        assert part_of(hook, [])
