"""Which engine a draw is made on: by its seed alone, with every value of every axis, and one that the run has."""

from __future__ import annotations

import dataclasses
import subprocess

import pytest

from harness.draws import ANYTHING, QUICK, Draw, deal, draws
from harness.plan import Plan
from suites.unit import mini_suite

TWENTY = draws(20, ANYTHING)
SUITE = '''
import pytest
from harness.draws import ANYTHING, draws

@pytest.mark.parity(draws=draws(20, ANYTHING), models=("tiny-llama",))
def test_drawn(parity, draw):
    """A draw."""
'''


def configs(**asked):
    return Plan(**{"profile": "nightly", "models": ("tiny-llama", "smollm2-135m"), **asked}).configs(
        (), ("tp2", "pp2")
    )


def test_a_seed_says_it_all():
    assert draws(20, ANYTHING) == TWENTY
    assert draws(5, ANYTHING) == TWENTY[:5], "one more draw changes no other"


@pytest.mark.parametrize("axis", ["models", "dtypes", "modes", "topologies", "steps"])
def test_every_value_is_drawn(axis):
    field = {"topologies": "topology"}.get(axis, axis.removesuffix("s"))
    assert {getattr(draw, field) for draw in TWENTY} == set(getattr(ANYTHING, axis))


def test_threads_are_those_of_the_mode():
    assert all(draw.threads in ANYTHING.threads[draw.mode] for draw in TWENTY)
    assert len({draw.threads for draw in TWENTY}) > 2
    assert all(draw.topology == "tp1" for draw in TWENTY if draw.model in ANYTHING.plain)


def test_each_draw_gets_its_engine():
    pairs = deal(TWENTY, configs())
    assert [draw for _, draw in pairs] == list(TWENTY)
    for config, draw in pairs:
        here = (config.model, config.short_dtype, config.mode, str(config.topology))
        assert here == (draw.model, draw.dtype, draw.mode, draw.topology)
        assert config.max_num_batched_tokens == draw.step
        assert config.options.get("threads", 0) == draw.threads


def test_draws_keep_their_engines_in_a_narrower_run():
    every = {draw.seed: config for config, draw in deal(TWENTY, configs())}
    narrow = deal(TWENTY, configs(dtypes=("bf16",), modes=("eager",)))
    assert narrow
    assert all(every[draw.seed] == config for config, draw in narrow)
    assert {draw.seed for _, draw in narrow} == {
        d.seed for d in TWENTY if (d.dtype, d.mode) == ("bf16", "eager")
    }


def test_the_quick_ones_are_on_the_engine_that_smoke_boots():
    here = Plan(models=("tiny-llama",), dtypes=("fp32",), modes=("eager",)).configs()
    pairs = deal(draws(2, QUICK), here)
    assert {config.options.get("threads") for config, _ in pairs} == {None, 1}
    assert here[0] in [config for config, _ in pairs]


def test_no_engine_no_case():
    nowhere = dataclasses.replace(Draw.of(0, QUICK), dtype="fp16")
    assert deal([nowhere], configs()) == []


def test_one_case_per_draw(tmp_path):
    """Through pytest: each draw once, by its own name, and not once per engine."""
    source = ["--backend", "hf", "--profile", "nightly", "--topology", "tp1", "--collect-only", "-q"]
    done = subprocess.run(
        mini_suite.command(tmp_path, *source, source=SUITE),
        env=mini_suite.environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = [line for line in done.stdout.splitlines() if "::test_drawn[" in line]
    wanted = [draw.seed for draw in TWENTY if draw.model == "tiny-llama" and draw.topology == "tp1"]
    assert sorted(int(line.rpartition("draw")[2].rstrip("]")) for line in found) == wanted, done.stdout
