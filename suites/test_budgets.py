"""What taps cost: memory as predicted from specs, nothing that grows, and time as a ratio to plain vLLM in one run."""

from __future__ import annotations

import time

import pytest
import torch

from harness.budgets import paired, plan_memory
from harness.points import TEMPLATES
from harness.prompts import of_length
from harness.vllm.overlays import get_overlay
from harness.vllm.spec import EDIT_PROGRAMS
from suites.probes import boots, run_probe
from suites.trial import expect_red

MIB = 2**20
#: Most that the median ratio to plain vLLM may be, and beside what.
PREFILL = {"compiled": 1.05, "eager": 1.10}
IDLE = {"compiled": 1.03, "eager": 1.10}
DECODE = {"compiled": 1.02, "eager": 1.10}
#: Reading captures back from the workers, over one copy of the same bytes into fresh memory: 30 % of its speed.
TRANSFER = 1 / 0.3
ROUNDS = 15
LONG = {"step": 512, "length": 640}

everywhere = pytest.mark.parity(
    models=("tiny-llama", "smollm2-135m"),
    backends=("vllm",),
    steps=(64,),
    smoke={"models": ("tiny-llama",), "dtypes": ("bf16",), "modes": ("eager",)},
)
on_ranks = pytest.mark.parity(
    models=("tiny-llama",),
    backends=("vllm",),
    topologies=("tp2", "tp2pp2"),
    extra_topologies=("tp2", "tp2pp2"),
    every_point=True,
    steps=(64,),
    smoke={"dtypes": ("fp32",), "modes": ("eager",), "topologies": ("tp2",)},
)
timed = pytest.mark.parity(
    models=("smollm2-135m",),
    backends=("vllm",),
    dtypes=("fp32",),
    steps=(64,),
    smoke={"modes": ("compiled",)},
)


def promised(parity, step):
    """The plan of an engine with this one's points."""
    config, topology = parity.hf_config, parity.config.topology
    taps = get_overlay(config.architectures[0]).taps(config, topology.tp, TEMPLATES)
    if parity.config.options.get("hook_points") != "every":
        taps = [tap for tap in taps if tap.name in set(parity.hook_points)]
    return plan_memory(
        taps,
        parity.geometry,
        itemsize=getattr(torch, parity.config.dtype).itemsize,
        max_num_batched_tokens=step,
        max_model_len=parity.config.max_model_len,
        max_programs=parity.config.options.get("max_edit_programs", EDIT_PROGRAMS),
        tensor_parallel_size=topology.tp,
        pipeline_parallel_size=topology.pp,
        tied=config.tie_word_embeddings,
    )


def judge_state(parity):
    """Every rank's taps hold what was promised, within 5 %."""
    plan, held = promised(parity, parity.step), parity.engine.memory()["taps"]
    assert len(held) == len(plan.ranks)
    for rank, (wanted, got) in enumerate(zip(plan.ranks, held, strict=True)):
        for part in ("rows", "tables", "index"):
            assert abs(got[part] - getattr(wanted, part)) <= 0.05 * getattr(wanted, part), (
                f"rank {rank}: {part}"
            )
    parity.note(
        "tap state", promised=[rank.state for rank in plan.ranks], held=[sum(one.values()) for one in held]
    )


@everywhere
def test_taps_hold_what_was_promised(parity):
    """Step buffers, edit tables and row tables are as large as the formula says from the specs alone."""
    judge_state(parity)


@on_ranks
def test_every_rank_holds_its_share(parity):
    """The same on each rank, with heads shared out and every point installed."""
    judge_state(parity)


@pytest.mark.parity(
    models=("tiny-llama-tied",),
    extra_models=("tiny-llama-tied",),
    backends=("vllm",),
    topologies=("pp2",),
    extra_topologies=("pp2",),
    steps=(64,),
    smoke={"dtypes": ("fp32",), "modes": ("eager",)},
)
def test_a_tied_embedding_is_held_twice(parity):
    """Its tap lies on the first and on the last stage."""
    judge_state(parity)


@everywhere
def test_points_left_out_cost_nothing(parity):
    """An engine booted for one point holds that one's buffers."""
    hook = f"blocks.{parity.n_layers - 1}.hook_out"
    with parity.variant(hook_points=[hook], max_edit_programs=0) as one:
        (held,) = one.engine.memory()["taps"]
        (wanted,) = promised(one, one.step).ranks
    assert wanted.points == 1
    assert held["rows"] == wanted.rows
    assert held["tables"] == wanted.tables


def judge_growth(parity):
    """Over 200 calls the engine's process grows by less than what one of them captures."""
    prompts = [of_length(parity, n, seed=n) for n in (50, 14)]
    hook = f"blocks.{parity.n_layers // 2}.hook_out"

    def call(number):
        specs = {hook: {"op": "scale", "factor": 1.5, "pos": number % 14}} if number % 2 else None
        parity.forward(prompts, intervene=specs)

    for number in range(20):  # allocators and kernels settle
        call(number)
    before = parity.engine.memory()["resident"]
    for number in range(200):
        call(number)
    grown = parity.engine.memory()["resident"] - before
    one_call = 64 * promised(parity, parity.step).largest.per_token
    target = max(one_call, 4 * MIB)
    parity.note("growth over 200 calls", bytes=grown, captured_per_call=one_call, target=target)
    assert grown <= target, f"{grown / MIB:.1f} MiB in 200 calls; one captures {one_call / MIB:.1f} MiB"


@everywhere
def test_nothing_grows(parity):
    """Captures and edits, 200 times over: what a call held is let go."""
    judge_growth(parity)


@pytest.mark.parametrize(
    ("fault", "check", "says"),
    [("Hungry", judge_state, r"rank 0: rows"), ("Leaky", judge_growth, r"MiB in 200 calls")],
)
@pytest.mark.parity(
    models=("tiny-llama",), backends=("vllm",), dtypes=("fp32",), modes=("eager",), steps=(64,)
)
def test_a_hungry_engine_is_caught(parity, fault, check, says):
    """Buffers that are too long, and captures that are never let go, turn the budget red."""
    expect_red(parity, f"budgets.{fault}", check, says, errors=(AssertionError,))


@pytest.mark.slow
@pytest.mark.parity(
    models=("smollm2-135m",), backends=("vllm",), dtypes=("fp32",), modes=("eager",), steps=(64,)
)
def test_boots_give_back_what_they_took(parity):
    """Six engines one after the other in one process: closed, they leave what plain vLLM's leave, and nothing grows."""
    held, taps = {}, 0
    for kind in ("plain", "tapped"):
        found = run_probe(boots, parity.config.model, parity.config.mode, kind)
        held[kind], taps = found["held"], found["taps"]
        parity.note(f"{kind} boots", held=held[kind], taps=taps)
    left = max(tapped - plain for plain, tapped in zip(held["plain"], held["tapped"], strict=True))
    grown = {
        kind: some[-1] - some[1] for kind, some in held.items()
    }  # the first leaves what every process has
    assert left <= 0.25 * taps, (
        f"{left / MIB:.1f} MiB more than plain vLLM after close; taps hold {taps / MIB:.1f}"
    )
    assert grown["tapped"] - grown["plain"] <= 0.25 * taps, {kind: some / MIB for kind, some in grown.items()}


def seconds(engine, prompts, **options):
    """What the engine took to run the prompts, as its own process measured it; reading captures back comes after."""
    return float(engine.forward(prompts, return_logits=False, **options).stats["generate_seconds"])


def copied(result):
    """Seconds that one copy of everything a call captured takes."""
    started = time.perf_counter()
    copies = [tensor.clone() for tensor in result.captured.values()]
    took = time.perf_counter() - started
    assert len(copies) == len(result.captured)
    return took


def judged(parity, benchmark, title, found, target):
    """Record a ratio with its spread; what is wrong with it, if its median is over the target."""
    if benchmark is not None:
        benchmark.extra_info[title] = {"ratio": found.ratio, "quartiles": found.quartiles, "target": target}
    parity.note(title, ratio=found.ratio, quartiles=found.quartiles, rounds=len(found.base), target=target)
    if found.ratio <= target:
        return ""
    base = "plain vLLM's" if "tokens" in title else "one copy's"
    return f"{title}: {found} of {base} time, at most {target:.3g} was promised"


@pytest.mark.slow
@timed
def test_time_of_taps(parity, benchmark):
    """Prefill captured, idle and edited, and decode, each in turn with plain vLLM; reading back with one copy."""
    judge_time(parity, benchmark)


@pytest.mark.slow
@pytest.mark.parity(
    models=("smollm2-135m",), backends=("vllm",), dtypes=("fp32",), modes=("eager",), steps=(64,)
)
def test_a_slow_engine_is_caught(parity):
    """A worker that copies every value thirty times turns the budget red."""
    with pytest.raises(AssertionError, match=r"prefill of 511 tokens, captured: .* of plain vLLM's time"):
        judge_time(parity, None, worker_cls="harness.faults.budgets.Slow")


def measured(parity, plain, tapped):
    """Each way of running an engine with taps, in turn with plain vLLM, and reading back, in turn with one copy."""
    prompt, short = [of_length(parity, 511)], [of_length(parity, 8)]
    every, decode = {"capture": parity.hook_points}, {"max_new_tokens": 64}
    edit = {f"blocks.{parity.n_layers // 2}.hook_out": {"op": "scale", "factor": 1.5, "pos": [3, 200]}}

    def against_plain(prompts, more, **options):
        return paired(
            lambda: seconds(plain, prompts, **options),
            lambda: seconds(tapped, prompts, **options, **more),
            rounds=ROUNDS,
        )

    found = {
        "prefill of 511 tokens, captured": against_plain(prompt, every),
        "prefill of 511 tokens, taps idle": against_plain(prompt, {}),
        "prefill of 511 tokens, edited": against_plain(prompt, {"intervene": edit}),
        "decode of 64 tokens, captured": against_plain(short, every, **decode),
    }
    last = tapped.forward(prompt, **every)
    found["captures read back"] = paired(
        lambda: copied(last), lambda: tapped.forward(prompt, **every).stats["read_seconds"], rounds=ROUNDS
    )
    return found


def judge_time(parity, benchmark, **options):
    """Two engines side by side, one of them plain."""
    mode, prompt = parity.config.mode, [of_length(parity, 511)]
    with (
        parity.spare_engine(instrument=False, **LONG) as plain,
        parity.spare_engine(**LONG, **options) as tapped,
    ):
        plan, peaks = promised(parity, LONG["step"]).largest, {}
        # Before anything was captured: an allocator that keeps what it was once given would hide the rise.
        for name, engine, capture in (("plain", plain, []), ("tapped", tapped, parity.hook_points)):
            seconds(engine, prompt)
            peaks[name] = engine.forward_memory(prompt, capture=capture)["resident"]
        if benchmark is None:
            found = measured(parity, plain, tapped)
        else:
            found = benchmark.pedantic(measured, (parity, plain, tapped), rounds=1)
    over = peaks["tapped"] - peaks["plain"]
    parity.note("peak of a forward", **peaks, capture_state=plan.state, target=1.5 * plan.state)
    targets = (PREFILL[mode], IDLE[mode], PREFILL[mode], DECODE[mode], TRANSFER)
    problems = [
        judged(parity, benchmark, title, one, target)
        for (title, one), target in zip(found.items(), targets, strict=True)
    ]
    if over > 1.5 * plan.state:
        problems.append(
            f"peak {over / MIB:.1f} MiB over plain vLLM's; the state is {plan.state / MIB:.1f} MiB"
        )
    assert not any(problems), "; ".join(filter(None, problems))
